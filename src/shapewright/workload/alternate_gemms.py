"""Selective recomputation of every second GEMM of a layer: torchtitan's ``selective_ac_option = "op"``.

Attention and the 1st, 3rd, 5th, ... GEMM of a layer keep their outputs; all else runs again: the other GEMMs, norms,
rotary embeddings, activations and residual additions. Of a Llama layer (wq, wk, wv, wo, w1, w3, w2) these are wk, wo
and w3.

Assumes:
    GEMMs count in the order of the layer as lowered: a fused projection (``fused_qkv``, ``fused_gate_up``) is one. The
        router runs again and does not count; grouped GEMMs of experts keep their outputs and do not count (torchtitan's
        default for ``moe.router.gate``, and ``_grouped_mm`` in its list); nor do adapters, which run again.
    What no gradient reads is neither kept nor computed again, as torch.compile has it: the output of a layer's last
        GEMM, and that of a GEMM whose sum over the tensor axis is kept.
    Results of reductions and exchanges are kept. The backward pass gathers tokens as it does without recomputation,
        for both purposes. Attention without a fused kernel runs again.

Source: pytorch/torchtitan, torchtitan/distributed/activation_checkpoint.py (_apply_op_sac), 2025.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from shapewright.models.layers import CROSS_ATTENTION, LINEAR_LAYERS
from shapewright.workload.finetuning import CONVERSION, QUANTIZATION
from shapewright.workload.linears import list_linears
from shapewright.workload.recompute import ALTERNATE, ATTENTION_CORE_ROLES, read_modules

if TYPE_CHECKING:
    from shapewright.models.layers import LayerKind
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.linears import Linear
    from shapewright.workload.workload import Workload

_ATTENTION_BLOCKS = ("attention", "cross_attention")
_MLP_BLOCKS = ("mlp", "moe", "shared_expert")

_KEPT, _SUMMED, _REPEATED, _UNREAD = "kept", "summed", "repeated", "unread"

# Saved tensors of a block that are the output of one of its GEMMs, or as large: the first of each group that there is.
_QUERIES, _KEYS, _VALUES = ("queries_before_norm", "queries"), ("keys_before_norm", "keys"), ("values",)
_ATTENTION_OUTPUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "q": (_QUERIES, ("gate",)),
    "k": (_KEYS,),
    "v": (_VALUES,),
    "qkv": (_QUERIES, _KEYS, _VALUES, ("gate",)),
    "q_a": (("q_latent_before_norm",),),
    "q_b": (_QUERIES,),
    "kv_a": (("kv_latent_before_norm", "keys_before_norm"),),
    "kv_b": (_KEYS, _VALUES),
    "qkv_a": (("q_latent_before_norm",), ("keys_before_norm",), ("compressed",)),
    "compressed_kv": (("compressed",),),
    "compressed_gate": (("compressed",),),
    "compressed": (("compressed",),),
}
_ACTIVATED = ("activation_input", "activation_output", "down_input")
_MLP_OUTPUTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gate": (_ACTIVATED,),
    "gate_up": (_ACTIVATED, ("up_output",)),
    "down": (("output",),),
}


class AlternateGemms(NamedTuple):
    """What layers of one kind keep and repeat.

    Attributes:
        fates: By block and role, whether the output of a GEMM is kept, kept as a sum over the tensor axis, repeated, or
            read by no gradient.
        is_gated: Whether the MLP has a gate.
        is_unfused: Whether attention is several kernels.
        keeps_rows: Whether the rows of experts are received from other devices.
        values_hold_rest: Whether the values are a view of a kept GEMM output that has the keys, or queries and keys.
        outputs: By block and role, the saved tensor that is the output of a GEMM at the end of a block.
    """

    fates: Mapping[tuple[str, str], str]
    is_gated: bool
    is_unfused: bool
    keeps_rows: bool
    values_hold_rest: bool
    outputs: Mapping[tuple[str, str], tuple[str, str]]

    def repeats_operation(self, block: str, role: str) -> bool:
        """Whether a forward operation, which is no collective, runs again."""
        fate = self.fates.get((block, role.removesuffix(CONVERSION).removesuffix(QUANTIZATION)))
        if fate is not None:
            return fate == _REPEATED
        if block in _ATTENTION_BLOCKS and role in ATTENTION_CORE_ROLES:
            return self.is_unfused
        if block == "moe" and role in ("permute", "unpermute"):
            return role == "permute" and not self.keeps_rows
        return block != "mtp"

    def list_kept(self, tensors: frozenset[tuple[str, str]]) -> Iterator[tuple[str, str]]:
        """Yield block and role of the saved tensors that are kept, among those of a layer."""
        yield "layer", "input"
        for block in _ATTENTION_BLOCKS:
            yield block, "output_dropout_mask"
            if not self.is_unfused:
                yield block, "output"
        yield "mlp", "output_dropout_mask"
        if self.keeps_rows:
            yield "moe", "input"
        for (block, role), fate in self.fates.items():
            if (block, role) in self.outputs:
                if fate in (_KEPT, _SUMMED):
                    yield self.outputs[block, role]
            elif fate == _KEPT:
                for group in self._outputs_of(block, role):
                    yield from [(block, name) for name in group if (block, name) in tensors][:1]

    def _outputs_of(self, block: str, role: str) -> tuple[tuple[str, ...], ...]:
        """Groups of roles of saved tensors, of which the first that there is is an output of a GEMM."""
        if block in _MLP_BLOCKS:
            if role == "up":
                return (("up_output",),) if self.is_gated else (_ACTIVATED,)
            return _MLP_OUTPUTS[role]
        if block not in _ATTENTION_BLOCKS:
            return ((f"{role}_output",),)
        if self.values_hold_rest and role in ("qkv", "kv_b"):
            return (_VALUES,)
        return _ATTENTION_OUTPUTS.get(role, ())


def find_alternate_gemms(
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
    kind: LayerKind,
    *,
    has_cross_attention: bool,
) -> AlternateGemms | None:
    """Find what layers of one kind keep and repeat; None if the workload does not recompute every second GEMM.

    Args:
        has_cross_attention: Whether these are decoder layers of an encoder-decoder.
    """
    if ALTERNATE not in read_modules(workload.recompute_modules):
        return None
    ends = _ends_of_blocks(config, kind, has_cross_attention=has_cross_attention)
    linears = list_linears(config, layout, kind, has_cross_attention=has_cross_attention)
    is_unfused = workload.attention == "unfused"
    splits_experts = layout.has_own_expert_degree and layout.expert_tensor_degree > 1
    turns_copies = config.fused_qkv and config.position_embedding == "rotary" and config.qk_norm == "none"
    return AlternateGemms(
        fates=_fates_of_layer(linears, layout, ends),
        is_gated=config.gated_mlp,
        is_unfused=is_unfused,
        keeps_rows=layout.expert_parallel > 1 or splits_experts,
        values_hold_rest=not is_unfused and (config.is_mla or turns_copies),
        outputs={end: tensor for end, tensor in ends.items() if tensor is not None},
    )


def _ends_of_blocks(
    config: TransformerConfig, kind: LayerKind, *, has_cross_attention: bool
) -> dict[tuple[str, str], tuple[str, str] | None]:
    """Map the last GEMM of each block to the saved tensor that is its output, or None if no gradient reads it."""
    has_streams, num_norms = config.residual_streams > 1, config.num_norms_per_layer
    of_images = kind.layer_type == CROSS_ATTENTION
    of_mixer: tuple[str, str] | None = None
    if of_images:
        of_mixer = ("cross_attention", "gated_attention")
    elif has_streams:
        of_mixer = ("streams", "mixer_output")
    elif (kind.mlp != "none" and not config.parallel_attention_mlp) or num_norms > 2:
        of_mixer = ("norm_1", "input")
    of_mlp: tuple[str, str] | None = None
    if of_images:
        of_mlp = ("cross_attention", "gated_mlp")
    elif has_streams:
        of_mlp = ("streams", "mlp_output")
    elif num_norms > 2:
        of_mlp = (f"norm_{num_norms - 1}", "input")
    mixers = kind.layer_type.split("+")
    ends = {(mixer if mixer in LINEAR_LAYERS else "attention", "out"): of_mixer for mixer in mixers}
    if has_cross_attention:
        ends = dict.fromkeys(ends, ("cross_attention", "norm_input"))
    ends["cross_attention", "out"] = of_mixer
    ends["mlp", "down"] = of_mlp
    ends["shared_expert", "down"] = ("shared_expert", "output") if config.shared_expert_gate else None
    return ends


def _fates_of_layer(
    linears: Iterator[Linear],
    layout: ParallelLayout,
    ends: Mapping[tuple[str, str], tuple[str, str] | None],
) -> dict[tuple[str, str], str]:
    """Decide about each GEMM of a layer, in order."""
    fates: dict[tuple[str, str], str] = {}
    num_gemms = 0
    for linear in linears:
        key = (linear.block, linear.role)
        if linear.block == "moe":
            fates[key] = _KEPT
            continue
        num_gemms += 1
        if key in ends and ends[key] is None:
            fates[key] = _UNREAD
        elif key in ends and layout.tensor_parallel > 1 and linear.block != "shared_expert":
            fates[key] = _SUMMED
        else:
            fates[key] = _KEPT if num_gemms % 2 else _REPEATED
    return fates
