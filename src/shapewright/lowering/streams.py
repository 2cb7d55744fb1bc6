"""Lowering of parallel residual streams, which learned weights mix around each block (hyper-connections).

Legend: T tokens of the residual stream on this device, n streams, h hidden size.

Before a block, a projection of all streams (T x n h)(n h x (2 + n) n) gives the weights; the streams are summed
to the block's input. After it, streams are mixed with each other and the block's output is added to each. One kernel
does each of the two; PyTorch multiplies the streams in a GEMM for each token. The iterations that balance the n x n
weights, a few numbers of each token, are left out.

Source: modeling_deepseek_v4.py of transformers 5.24 (DeepseekV4HyperConnection); arXiv 2409.19606.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.lowering.builders import display_name, pointwise, weight_gemm
from shapewright.lowering.operations import Gemm
from shapewright.models.parameters import stream_weights

if TYPE_CHECKING:
    from shapewright.lowering.operations import Operation
    from shapewright.lowering.shard import Shard


def lower_stream_start(shard: Shard) -> list[Operation]:
    """Lower the copy of the embedding to each stream."""
    copied, streams = _elements(shard), shard.config.residual_streams
    written = streams * copied
    return [
        pointwise(
            shard, "embedding", "streams", "permute", shard.num_passes, read=copied, written=written, stage="first"
        )
    ]


def lower_stream_mixing(shard: Shard, repeats: int) -> list[Operation]:
    """Lower what is around the blocks of the layers.

    Args:
        repeats: Number of blocks that run.
    """
    config, tokens, copied = shard.config, shard.num_residual_tokens, _elements(shard)
    streams = config.residual_streams
    every = streams * copied
    weights = weight_gemm(
        shard,
        "residual",
        "stream_weights",
        repeats,
        m=tokens,
        n=stream_weights(config),
        k=streams * config.hidden_size,
        dtype=_weights_dtype(shard),
    )
    collapse = pointwise(shard, "residual", "collapse", "residual", repeats, read=every, written=copied)
    if shard.workload.kernels != "torch":
        expand = pointwise(shard, "residual", "expand", "residual", repeats, read=every + copied, written=every)
        return [weights, collapse, expand]
    mixed = Gemm(
        name=display_name(shard, "residual", "mix"),
        block="residual",
        role="mix",
        repeats=repeats,
        dtype=shard.dtype,
        m=streams,
        n=config.hidden_size,
        k=streams,
        batch=tokens,
        layout="NN",
    )
    expand = pointwise(shard, "residual", "expand", "residual", repeats, read=every + copied, written=every)
    return [weights, collapse, mixed, expand]


def lower_stream_sum(shard: Shard) -> list[Operation]:
    """Lower the weighted sum of the streams after the last layer."""
    config, copied, repeats = shard.config, _elements(shard), shard.num_passes
    streams = config.residual_streams
    weights = weight_gemm(
        shard,
        "final_norm",
        "stream_weights",
        repeats,
        m=shard.num_residual_tokens,
        n=streams,
        k=streams * config.hidden_size,
        dtype=_weights_dtype(shard),
        stage="last",
    )
    every = streams * copied
    summed = pointwise(shard, "final_norm", "collapse", "residual", repeats, read=every, written=copied, stage="last")
    return [weights, summed]


def _weights_dtype(shard: Shard) -> str:
    """Format of the projection to the weights: PyTorch copies the streams to fp32, a fused kernel reads them as is."""
    return "fp32" if shard.workload.kernels == "torch" else shard.dtype


def _elements(shard: Shard) -> float:
    """Elements of one stream on this device."""
    return 1.0 * shard.num_residual_tokens * shard.config.hidden_size
