"""Lowering of layers without softmax attention: projections, short convolution, scan, gate and output projection.

Legend: T tokens of this device, H heads of this device, w tokens of the convolution.

A scan reads and writes the state of every sequence in serving, and none in training. With sequence parallelism the
tokens are gathered first, as before attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from shapewright.lowering.builders import activation, bias_gradients, display_name, pointwise, weight_gemm
from shapewright.lowering.collectives import all_reduce_partial, gather_tokens, reduce_tokens
from shapewright.lowering.operations.scan import CausalConv, Scan
from shapewright.models.mixers import make_mixer

if TYPE_CHECKING:
    from shapewright.lowering.operations.base import Block
    from shapewright.lowering.operations.operation import Operation
    from shapewright.lowering.shard import Shard
    from shapewright.models.mixers import Mixer


def lower_mixer(shard: Shard, kind: str, repeats: int) -> list[Operation]:
    """Lower the layers of one kind.

    Args:
        kind: One of LINEAR_LAYERS.
    """
    mixer, block = make_mixer(shard.config, kind, shard.layout.tensor_parallel), cast("Block", kind)
    tokens = shard.num_tokens
    operations = gather_tokens(shard, block, repeats, tokens=tokens)
    operations += [
        weight_gemm(shard, block, each.role, repeats, m=tokens, n=each.outputs, k=each.inputs) for each in mixer.inputs
    ]
    if kind == "short_convolution":
        operations.append(_gate(shard, block, "gate_in", repeats, mixer.out.inputs))
    if mixer.conv_channels:
        operations.append(
            CausalConv(
                name=display_name(shard, block, "convolution"),
                block=block,
                role="convolution",
                channels=mixer.conv_channels,
                width=mixer.conv_width,
                **_common(shard, mixer, repeats),
            )
        )
    for each in mixer.inner:
        operations.append(weight_gemm(shard, block, each.role, repeats, m=tokens, n=each.outputs, k=each.inputs))
        if each.is_partial:
            operations += all_reduce_partial(shard, block, repeats, width=each.outputs)
    if mixer.num_v_heads:
        operations.append(
            Scan(
                name=display_name(shard, block, "scan"),
                block=block,
                role="scan",
                num_k_heads=mixer.num_k_heads,
                num_v_heads=mixer.num_v_heads,
                k_head_dim=mixer.k_head_dim,
                v_head_dim=mixer.v_head_dim,
                **_common(shard, mixer, repeats),
            )
        )
    operations += _lower_gated_norm(shard, block, mixer, repeats)
    out = mixer.out
    operations.append(weight_gemm(shard, block, "out", repeats, m=tokens, n=out.outputs, k=out.inputs))
    return operations + reduce_tokens(shard, block, repeats, tokens=tokens)


def lower_mixer_bias_gradients(shard: Shard, kind: str, repeats: int) -> list[Operation]:
    """Lower the gradients of the biases of the layers of one kind, which are sums over the tokens."""
    mixer = make_mixer(shard.config, kind, shard.layout.tensor_parallel)
    widths = [each.outputs for each in mixer.projections if each.has_bias]
    return bias_gradients(shard, cast("Block", kind), repeats, widths=widths, tokens=shard.num_tokens)


def _common(shard: Shard, mixer: Mixer, repeats: int) -> dict[str, Any]:
    """Fields of convolution and scan."""
    return {
        "rule": mixer.kind,
        "repeats": repeats,
        "dtype": shard.dtype,
        "batch_size": shard.batch_size,
        "seq_len": shard.query_len,
        "has_cache": not shard.workload.is_training,
    }


def _lower_gated_norm(shard: Shard, block: Block, mixer: Mixer, repeats: int) -> list[Operation]:
    """Lower the normalization of the result with its gate in one kernel, or the gate alone.

    The scan of Mamba-1 contains its gate.
    """
    if mixer.kind == "mamba":
        return []
    if not mixer.norm_width:
        return [_gate(shard, block, "gate", repeats, mixer.out.inputs)]
    elements = 1.0 * shard.num_tokens * mixer.norm_width
    return [pointwise(shard, block, "norm", "norm", repeats, read=2.0 * elements, written=elements)]


def _gate(shard: Shard, block: Block, role: str, repeats: int, width: int) -> Operation:
    return activation(shard, block, repeats, width=width, tokens=shard.num_tokens, gated=True, role=role)
