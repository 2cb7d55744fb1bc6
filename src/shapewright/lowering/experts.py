"""Mixture-of-experts layers: router, routed experts as grouped GEMMs, shared experts.

Legend: T tokens of this device, h hidden size, k_e experts per token, E experts, f_e inner width of one of them.

Under balanced routing a device of the expert axis keeps its number of rows: it gives away T k_e rows and receives as
many, which meet E / expert_parallel local experts. A router that is not balanced takes longer.

Experts that are cut apart from other matrices (layout.expert_tensor_parallel): in training each device of the tensor
axis gives away the rows of its own T / t tokens, and the e_t devices that share an expert's matrices gather theirs.
A server either has the expert axis inside the tensor axis, where each device computes the rows of its experts from
tokens that it has anyway and one sum follows (sglang, vllm), or over replicas too, where devices of the tensor axis
send the rows of a share of the tokens each (vllm).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.dtypes import get_dtype
from shapewright.lowering.communication import (
    combine_experts,
    dispatch_experts,
    gather_tokens,
    reduce_tokens,
    share_tokens,
)
from shapewright.lowering.expert_biases import lower_biases, lower_clamp, lower_scaled_bias_gradients
from shapewright.lowering.gemms import weight_gemm
from shapewright.lowering.mlp import lower_mlp_gemms
from shapewright.lowering.pointwise import activation, bias_gradients, move
from shapewright.operations import GroupedGemm, Pointwise

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.lowering.shard import Shard
    from shapewright.operations import Operation


def lower_experts(shard: Shard, repeats: int) -> list[Operation]:
    """The MLP of an expert layer with its collectives."""
    config, layout, tokens = shard.config, shard.layout, shard.num_tokens
    h = config.hidden_size
    spreads = _spreads(shard)
    # Between devices of the expert axis, each device of the tensor axis sends the tokens that are its own.
    own_tokens = _own_tokens(shard)
    routed_tokens = own_tokens if spreads else tokens
    rows = count_rows(shard)
    own_rows = rows if layout.cuts_experts_apart and not spreads else own_tokens * config.num_experts_per_token
    sharers = layout.tensor_degree_of_experts if layout.cuts_experts_apart else None

    operations: list[Operation] = []
    if not spreads:
        operations += gather_tokens(shard, "moe", repeats, tokens=tokens)
    operations += _route(shard, repeats, routed_tokens)
    if spreads or shard.workload.is_training:
        # An exchange sends, and a backward pass keeps, rows in the order of their experts; otherwise products gather.
        operations.append(move(shard, "moe.permute", repeats, read=1.0 * own_rows * h, written=1.0 * own_rows * h))
    if spreads:
        operations += dispatch_experts(shard, repeats, rows=own_rows)
        # The products' input is kept as it was gathered (saved_tensors).
        gathered = gather_tokens(shard, "moe", repeats, tokens=rows, num_ranks=sharers)
        operations += [each.changed(keeps_result=True) for each in gathered]
    operations += _multiply(shard, repeats, rows)
    if spreads:
        operations += reduce_tokens(shard, "moe", repeats, tokens=rows, num_ranks=sharers)
        operations += combine_experts(shard, repeats, rows=own_rows)
    combined = 1.0 * routed_tokens * h
    operations.append(move(shard, "moe.unpermute", repeats, read=1.0 * own_rows * h, written=combined))
    if spreads and layout.cuts_experts_apart and not shard.workload.is_training:
        operations += share_tokens(shard, "moe.outputs", repeats, tokens=tokens)
    if config.shared_expert_intermediate_size:
        operations += _lower_shared_expert(shard, repeats, stands_alone=spreads)
    if not spreads:
        operations += reduce_tokens(shard, "moe", repeats, tokens=tokens)
    return operations


def _route(shard: Shard, repeats: int, tokens: int) -> list[Operation]:
    """Score the experts for each token, and choose those that it meets."""
    n, k = shard.config.num_experts, shard.config.hidden_size
    scores = weight_gemm(shard, "moe.router", repeats, m=tokens, n=n, k=k, dtype=shard.dtype)
    return [scores, _choose(shard, repeats, tokens)]


def _multiply(shard: Shard, repeats: int, rows: int) -> list[Operation]:
    """Put rows through the experts of this device."""
    config, layout, workload = shard.config, shard.layout, shard.workload
    h, f = config.hidden_size, config.moe_intermediate_size // layout.tensor_degree_of_experts
    own_experts = config.num_experts // layout.expert_parallel
    reached_experts = own_experts
    # What serving libraries choose tiles by; training stacks choose otherwise.
    choice: dict[str, Any] = {}
    if not workload.is_training:
        group_tokens = count_group_tokens(shard)
        reached_experts = _count_reached(own_experts, config, group_tokens)
        received = _count_received(config, group_tokens, layout.expert_parallel)
        choice = {"tokens": received, "experts": own_experts, "inner": f}

    def grouped(role: str, n: int, k: int) -> GroupedGemm:
        return GroupedGemm(
            name=f"{shard.prefix}moe.{role}",
            repeats=repeats,
            dtype=shard.gemm_dtype,
            m=rows,
            n=n,
            k=k,
            groups=reached_experts,
            weight_dtype=shard.weight_dtype,
            is_training=workload.is_training,
            leaves_poor_kernel=workload.expert_kernel == "as-16-bit",
            **choice,
        )

    inner = 2 * f if config.gated_mlp else f
    return [
        # Every grouped kernel in use keeps gate and up projections of an expert in one matrix.
        grouped("gate_up" if config.gated_mlp else "up", inner, h),
        *lower_clamp(shard, repeats, elements=1.0 * rows * inner),
        activation(shard, "moe.activation", repeats, width=f, tokens=rows, gated=config.gated_mlp),
        grouped("down", h, f),
        *lower_biases(shard, repeats, elements=1.0 * rows * h, num_experts=own_experts),
    ]


def _lower_shared_expert(shard: Shard, repeats: int, *, stands_alone: bool) -> list[Operation]:
    """The expert that every token meets.

    Args:
        shard: Sizes of this device.
        repeats: Executions per step.
        stands_alone: Whether it gathers its tokens and sums its outputs itself, since routed rows go another way.
    """
    config, tokens = shard.config, shard.num_tokens
    operations = lower_mlp_gemms(shard, "shared_expert", repeats, config.shared_expert_intermediate_size)
    if config.shared_expert_gate:
        operations.append(
            weight_gemm(
                shard, "shared_expert.token_gate", repeats, m=tokens, n=1, k=config.hidden_size, dtype=shard.dtype
            )
        )
    if not stands_alone:
        return operations
    return [
        *gather_tokens(shard, "shared_expert", repeats, tokens=tokens),
        *operations,
        *reduce_tokens(shard, "shared_expert", repeats, tokens=tokens),
    ]


def count_group_tokens(shard: Shard) -> int:
    """All tokens that the experts of this device's group see."""
    layout = shard.layout
    tokens = shard.num_tokens * layout.expert_parallel
    if not layout.cuts_experts_apart:
        return tokens
    return tokens * layout.tensor_degree_of_experts // layout.tensor_parallel


def count_rows(shard: Shard) -> int:
    """Routed rows that this device multiplies with its experts."""
    return -(-count_group_tokens(shard) * shard.config.num_experts_per_token // shard.layout.expert_parallel)


def lower_expert_bias_gradients(shard: Shard, repeats: int) -> list[Operation]:
    """Sums over the rows that make the gradients of the experts' biases."""
    config, rows = shard.config, count_rows(shard)
    if not config.expert_bias:
        return []
    inner = config.moe_intermediate_size // shard.layout.tensor_degree_of_experts * (2 if config.gated_mlp else 1)
    if shard.workload.fused_experts:
        return bias_gradients(shard, "moe", repeats, widths=[inner, config.hidden_size], tokens=rows)
    summed = bias_gradients(shard, "moe", repeats, widths=[inner], tokens=rows)
    return summed + lower_scaled_bias_gradients(shard, repeats, elements=1.0 * rows * config.hidden_size)


def _spreads(shard: Shard) -> bool:
    """Whether tokens are sent to the devices of their experts."""
    layout = shard.layout
    if not layout.cuts_experts_apart:
        return layout.expert_parallel > 1
    return shard.workload.is_training or not layout.keeps_experts_in_tensor_axis


def _own_tokens(shard: Shard) -> int:
    """Tokens whose rows this device sends; where all of the tensor axis have all tokens, each sends a share of them."""
    if shard.workload.is_training or not shard.layout.cuts_experts_apart:
        return shard.num_residual_tokens
    return -(-shard.num_tokens // shard.layout.tensor_parallel)


def _count_reached(local_experts: int, config: TransformerConfig, tokens: int) -> int:
    """Expected number of a device's experts that get a row: few tokens reach few, and the others' weights stay unread.

    local (1 - (1 - k_e / E)^tokens), where each token picks k_e distinct experts of E, all alike.
    """
    missed = (1.0 - min(config.num_experts_per_token / config.num_experts, 1.0)) ** tokens
    return min(max(round(local_experts * (1.0 - missed)), 1), local_experts)


def _count_received(config: TransformerConfig, tokens: int, num_devices: int) -> int:
    """Tokens that reach a device of the expert axis, each counted once however many of its experts it meets.

    T (1 - (1 - 1/N)^k_e) of the T tokens that N devices have together.
    """
    met = 1.0 - (1.0 - 1.0 / num_devices) ** config.num_experts_per_token
    return max(round(tokens * met), 1)


def _choose(shard: Shard, repeats: int, tokens: int) -> Pointwise:
    """Softmax and top-k over the router's fp32 scores: both read them, one writes them, one weights and indices."""
    score_bytes = 1.0 * tokens * shard.config.num_experts * get_dtype("fp32").num_bytes
    chosen_bytes = 1.0 * tokens * shard.config.num_experts_per_token * 2.0 * get_dtype("fp32").num_bytes
    return Pointwise(
        name=f"{shard.prefix}moe.choose",
        repeats=repeats,
        dtype=shard.dtype,
        operation="router",
        read_bytes=2.0 * score_bytes,
        written_bytes=score_bytes + chosen_bytes,
        num_kernels=2,
    )
