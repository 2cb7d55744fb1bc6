"""Lowering of dense MLPs, with two matrices or, if gated, three.

Legend: T tokens of this device, h hidden size, f intermediate width of this device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.lowering.builders import activation, bias_gradients, weight_gemm
from shapewright.lowering.collectives import gather_tokens, reduce_tokens

if TYPE_CHECKING:
    from shapewright.lowering.operations import Operation
    from shapewright.lowering.operations.base import Block
    from shapewright.lowering.shard import Shard


def lower_mlp(shard: Shard, repeats: int) -> list[Operation]:
    """Lower the MLP of a dense layer with its collectives.

    With parallel attention and MLP, both read the tokens gathered for attention, and the sum of both is reduced here.
    """
    config, tokens = shard.config, shard.num_tokens
    operations: list[Operation] = []
    if not config.parallel_attention_mlp:
        operations += gather_tokens(shard, "mlp", repeats, tokens=tokens)
    operations += lower_mlp_gemms(shard, "mlp", repeats, config.intermediate_size)
    operations += reduce_tokens(shard, "mlp", repeats, tokens=tokens)
    return operations


def lower_mlp_bias_gradients(shard: Shard, repeats: int) -> list[Operation]:
    """Lower the gradients of a dense MLP's biases, which are sums over the tokens."""
    config = shard.config
    if not config.mlp_bias:
        return []
    f = config.intermediate_size // shard.layout.tensor_parallel
    widths = [f * (2 if config.gated_mlp else 1), config.hidden_size]
    return bias_gradients(shard, "mlp", repeats, widths=widths, tokens=shard.num_tokens)


def lower_mlp_gemms(shard: Shard, block: Block, repeats: int, intermediate_size: int) -> list[Operation]:
    """Lower (T x h)(h x f), activation and (T x f)(f x h); a gate is a second (h x f) or doubles the first's width."""
    config, tokens, h = shard.config, shard.num_tokens, shard.config.hidden_size
    f = intermediate_size // shard.layout.tensor_parallel
    if config.gated_mlp and config.fused_gate_up:
        widths = {"gate_up": 2 * f}
    elif config.gated_mlp:
        widths = {"gate": f, "up": f}
    else:
        widths = {"up": f}
    operations: list[Operation] = [
        weight_gemm(shard, block, role, repeats, m=tokens, n=width, k=h) for role, width in widths.items()
    ]
    operations.append(activation(shard, block, repeats, width=f, tokens=tokens, gated=config.gated_mlp))
    operations.append(weight_gemm(shard, block, "down", repeats, m=tokens, n=h, k=f))
    return operations
