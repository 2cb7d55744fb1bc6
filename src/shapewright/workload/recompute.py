"""Modules of a layer that selective recomputation can repeat: Megatron-LM's ``--recompute-modules``, and torchtitan's.

Source: NVIDIA/Megatron-LM, megatron/core/transformer/transformer_config.py (recompute_modules), 2025; for the tensors
that ``core_attn`` drops, arXiv 2205.05198, section 5.
"""

from __future__ import annotations

from collections.abc import Mapping

from shapewright.core.errors import WorkloadError, close_names
from shapewright.core.records import dataclass

ATTENTION_CORE_ROLES = frozenset(
    ("ring", "partial_outputs", "repeat_kv", "score", "mask", "softmax", "dropout", "over_value", "fused")
)
"""Roles of operations between queries, keys and values and the output projection of an attention block."""

_EVERYTHING: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RecomputeModule:
    """One module of a layer: the operations to repeat and the saved tensors that this makes unnecessary.

    Attributes:
        operations: Roles of the forward operations that run again, by block; an empty set means all of the block.
        tensors: Roles of the saved tensors that are not kept, by block; an empty set means all of the block.
        source: Role of the saved tensor that they are computed from; layers without it do not have the module. Empty
            for modules whose tensors belong to no other operation.
    """

    operations: Mapping[str, frozenset[str]]
    tensors: Mapping[str, frozenset[str]]
    source: str = ""

    def repeats_operation(self, block: str, role: str) -> bool:
        """Whether a forward operation runs again."""
        return _matches(self.operations, block, role)

    def drops_tensor(self, block: str, role: str) -> bool:
        """Whether recomputation drops a saved tensor."""
        return _matches(self.tensors, block, role)


def _matches(roles_by_block: Mapping[str, frozenset[str]], block: str, role: str) -> bool:
    roles = roles_by_block.get(block)
    return roles is not None and (not roles or role in roles)


def _attention(*roles: str) -> dict[str, frozenset[str]]:
    """The same roles in self-attention and in cross-attention."""
    return dict.fromkeys(("attention", "cross_attention"), frozenset(roles))


CORE = "core_attn"
ALTERNATE = "alternate_gemms"
"""Every second GEMM of a layer and all memory-bound operations, which workload.alternate_gemms finds."""

MODULES = {
    CORE: RecomputeModule(_attention(*ATTENTION_CORE_ROLES), _attention("weights", "dropout_mask", "dropped_weights")),
    "layernorm": RecomputeModule({"norm": _EVERYTHING}, {**_attention("input"), "mlp": frozenset(("input",))}),
    "mla_up_proj": RecomputeModule(
        {"attention": frozenset(("q_b", "kv_b"))},
        {"attention": frozenset(("queries", "keys", "values"))},
        source="kv_latent_before_norm",
    ),
    "mlp": RecomputeModule(
        {"mlp": _EVERYTHING},
        {"mlp": frozenset(("activation_input", "activation_output", "up_output", "down_input"))},
    ),
    "moe_act": RecomputeModule(
        {"moe": frozenset(("activation", "clamp"))},
        {"moe": frozenset(("activation_output", "clamped", "down_input"))},
    ),
    "shared_experts": RecomputeModule({"shared_expert": _EVERYTHING}, {"shared_expert": _EVERYTHING}),
    "moe": RecomputeModule(
        dict.fromkeys(("router", "moe", "shared_expert"), _EVERYTHING),
        dict.fromkeys(("router", "moe", "shared_expert"), _EVERYTHING),
    ),
}
"""Modules by Megatron-LM's name."""

MODULE_NAMES = (*MODULES, ALTERNATE)
"""Values of ``recompute_modules``."""


def read_modules(text: str) -> tuple[str, ...]:
    """Parse a list of module names separated by commas or spaces; the result is in the order of MODULE_NAMES.

    Raises:
        WorkloadError: a name is unknown, or the list is empty.

    >>> read_modules("moe_act, layernorm")
    ('layernorm', 'moe_act')
    """
    found = [word for word in text.replace(",", " ").split() if word]
    for word in found:
        if word not in MODULE_NAMES:
            hint = close_names(word, MODULE_NAMES)
            known = ", ".join(MODULE_NAMES)
            raise WorkloadError(
                f"recompute_modules={word!r} is unknown; {hint + ' ' if hint else ''}choose among {known}",
                field="recompute_modules",
            )
    if not found:
        raise WorkloadError(
            f"recompute_modules={text!r} is empty; choose among {', '.join(MODULE_NAMES)}", field="recompute_modules"
        )
    return tuple(name for name in MODULE_NAMES if name in found)
