"""Parts of a layer that selective recomputation can take: Megatron-LM's ``--recompute-modules``.

Source: NVIDIA/Megatron-LM, megatron/core/transformer/transformer_config.py (recompute_modules), 2025; what its
``core_attn`` drops is arXiv 2205.05198, section 5.
"""

from __future__ import annotations

from dataclasses import dataclass

from shapewright.errors import WorkloadError, close_names


@dataclass(frozen=True)
class Module:
    """One part of a layer.

    Attributes:
        operations: Operations of the forward pass that run again, by the beginning of their names; those of the
            attention core, which have no name in common, are known to the lowering.
        tensors: Saved tensors that are dropped, by the end of their names; a dot at the end stands for all of a block.
    """

    operations: tuple[str, ...]
    tensors: tuple[str, ...]

    def runs_again(self, name: str) -> bool:
        """Whether an operation belongs to it."""
        return name.startswith(self.operations)

    def drops(self, name: str) -> bool:
        """Whether a saved tensor need not be kept."""
        return any(name.startswith(end) if end.endswith(".") else name.endswith(end) for end in self.tensors)


CORE = "core_attn"
_EXPERTS = ("moe.", "shared_expert.")
MODULES = {
    CORE: Module((), ("attention.weights", "attention.dropout_mask", "attention.dropped_weights")),
    "layernorm": Module(("norm",), ("attention.input", "mlp.input")),
    "mla_up_proj": Module(
        ("attention.q_b", "attention.kv_b"), ("attention.queries", "attention.keys", "attention.values")
    ),
    "mlp": Module(("mlp.",), ("mlp.activation_input", "mlp.activation_output", "mlp.up_output", "mlp.down_input")),
    "moe_act": Module(
        ("moe.activation", "moe.clamp"), ("expert.activation_output", "expert.clamped", "expert.down_input")
    ),
    "shared_experts": Module(("shared_expert.",), ("shared_expert.",)),
    "moe": Module(_EXPERTS, ("expert.", "router.", "shared_expert.")),
}


def read_modules(words: str) -> tuple[str, ...]:
    """Names of parts from a list of them, in the order of MODULES.

    Raises:
        WorkloadError: one is not known, or there is none.

    >>> read_modules("moe_act, layernorm")
    ('layernorm', 'moe_act')
    """
    found = [word for word in words.replace(",", " ").split() if word]
    for word in found:
        if word not in MODULES:
            hint = close_names(word, MODULES)
            raise WorkloadError(
                f"recompute_modules={word!r} is not known; {hint + ' ' if hint else ''}choose among "
                f"{', '.join(MODULES)}"
            )
    if not found:
        raise WorkloadError(f"recompute_modules={words!r} names no part; choose among {', '.join(MODULES)}")
    return tuple(name for name in MODULES if name in found)
