"""The dense MLP: two matrices, or three with a gate.

Legend: T tokens of this device, h hidden size, f inner width of this device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.lowering.communication import gather_tokens, reduce_tokens
from shapewright.lowering.gemms import weight_gemm
from shapewright.lowering.pointwise import activation, bias_gradients

if TYPE_CHECKING:
    from shapewright.lowering.shard import Shard
    from shapewright.operations import Operation


def lower_mlp(shard: Shard, repeats: int) -> list[Operation]:
    """The MLP of a dense layer with its collectives.

    With parallel attention and MLP both read the same gathered tokens, and their sum is reduced once, here.
    """
    config, tokens = shard.config, shard.num_tokens
    operations: list[Operation] = []
    if not config.parallel_attention_mlp:
        operations += gather_tokens(shard, "mlp", repeats, tokens=tokens)
    operations += lower_mlp_gemms(shard, "mlp", repeats, config.intermediate_size)
    operations += reduce_tokens(shard, "mlp", repeats, tokens=tokens)
    return operations


def lower_mlp_bias_gradients(shard: Shard, repeats: int) -> list[Operation]:
    """Sums over the tokens that make the gradients of a dense MLP's biases."""
    config = shard.config
    if not config.mlp_bias:
        return []
    f = config.intermediate_size // shard.layout.tensor_parallel
    widths = [f * (2 if config.gated_mlp else 1), config.hidden_size]
    return bias_gradients(shard, "mlp", repeats, widths=widths, tokens=shard.num_tokens)


def lower_mlp_gemms(shard: Shard, block: str, repeats: int, inner_width: int) -> list[Operation]:
    """(T x h)(h x f), activation, (T x f)(f x h); a gate is a second (h x f), or makes the first one 2f wide."""
    config, tokens, h = shard.config, shard.num_tokens, shard.config.hidden_size
    f = inner_width // shard.layout.tensor_parallel
    if config.gated_mlp and config.fused_gate_up:
        widths = {"gate_up": 2 * f}
    elif config.gated_mlp:
        widths = {"gate": f, "up": f}
    else:
        widths = {"up": f}
    operations: list[Operation] = [
        weight_gemm(shard, f"{block}.{role}", repeats, m=tokens, n=width, k=h) for role, width in widths.items()
    ]
    operations.append(activation(shard, f"{block}.activation", repeats, width=f, tokens=tokens, gated=config.gated_mlp))
    operations.append(weight_gemm(shard, f"{block}.down", repeats, m=tokens, n=h, k=f))
    return operations
