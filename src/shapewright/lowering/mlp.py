"""Lowering of MLPs: dense ones, and mixtures of experts with router, grouped GEMMs and shared experts.

Legend: T tokens of this device, h hidden size, f intermediate width of this device, k_e experts per token, E experts,
f_e intermediate width of one of them.

Balanced routing is assumed: a device of the expert axis sends T k_e rows and receives as many, for E / expert_parallel
local experts. Unbalanced routers are slower.

If experts are split over another number of devices e_t than other matrices (layout.expert_tensor_parallel), there are
three cases. In training each device of the tensor axis sends the rows of its own T / t tokens, and the e_t devices that
share an expert gather their rows. A server with the expert axis inside the tensor axis computes the rows of its experts
from tokens that every device has, followed by one reduction (sglang, vllm). A server with the expert axis over replicas
as well lets each device of the tensor axis send the rows of a share of the tokens (vllm).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.core.dtypes import get_dtype
from shapewright.core.numeric import maximum, minimum
from shapewright.lowering.builders import activation, bias_gradients, display_name, move, pointwise, weight_gemm
from shapewright.lowering.collectives import (
    combine_experts,
    dispatch_experts,
    gather_expert_outputs,
    gather_tokens,
    reduce_tokens,
)
from shapewright.lowering.operations.gemm import GroupedGemm
from shapewright.lowering.operations.pointwise import Pointwise

if TYPE_CHECKING:
    from shapewright.lowering.operations.base import Block
    from shapewright.lowering.operations.operation import Operation
    from shapewright.lowering.shard import Shard
    from shapewright.models.transformer import TransformerConfig


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


# Kernels of Megatron-LM for biases of routed experts in training (fused_experts=False): the bias of the second GEMM is
# scaled by the routing weight in fp32 and added expert by expert (megatron/core/transformer/moe/experts.py of 2025,
# _apply_bias). Bytes read and written per element of the result:
#   forward: bias times weight (0, 4), sum in fp32 (6, 4), concatenation of all experts (4, 4), cast to 16 bits (4, 2)
#   backward: cast (2, 4), gradients of the sum (4, 2) and of the split (2, 2), then the gradient times the bias and
#   times the weight, each summed (8, 4). The gradient of the forward operation includes 28 of these 40 bytes.
_BIAS_READ_BYTES = _BIAS_WRITTEN_BYTES = 14.0
_GRADIENT_READ_BYTES, _GRADIENT_WRITTEN_BYTES = 8.0, 4.0
_KERNELS_PER_EXPERT = 2


def lower_experts(shard: Shard, repeats: int) -> list[Operation]:
    """Lower the MLP of an expert layer with its collectives."""
    config, layout, tokens = shard.config, shard.layout, shard.num_tokens
    h = config.hidden_size
    exchanges = shard.layout.exchanges_expert_rows(is_training=shard.workload.is_training)
    own_tokens = _own_tokens(shard)
    routed_tokens = own_tokens if exchanges else tokens
    rows = count_rows(shard)
    own_rows = own_tokens * config.num_experts_per_token if exchanges else rows
    sharers = layout.expert_tensor_degree if layout.has_own_expert_degree else None

    operations: list[Operation] = []
    if not exchanges:
        operations += gather_tokens(shard, "moe", repeats, tokens=tokens)
    operations += _lower_router(shard, repeats, routed_tokens)
    if exchanges or shard.workload.is_training:
        # An exchange and a backward pass need rows in the order of their experts; otherwise the GEMMs gather rows.
        operations.append(move(shard, "moe", "permute", repeats, read=1.0 * own_rows * h, written=1.0 * own_rows * h))
    if exchanges:
        operations += dispatch_experts(shard, repeats, rows=own_rows)
        # The gathered input of the GEMMs is saved for the backward pass (memory.saved_tensors).
        gathered = gather_tokens(shard, "moe", repeats, tokens=rows, num_ranks=sharers)
        operations += [each.changed(keeps_result=True) for each in gathered]
    operations += _lower_routed_experts(shard, repeats, rows)
    if exchanges:
        operations += reduce_tokens(shard, "moe", repeats, tokens=rows, num_ranks=sharers)
        operations += combine_experts(shard, repeats, rows=own_rows)
    combined = 1.0 * routed_tokens * h
    operations.append(move(shard, "moe", "unpermute", repeats, read=1.0 * own_rows * h, written=combined))
    if exchanges and layout.has_own_expert_degree and not shard.workload.is_training:
        operations += gather_expert_outputs(shard, repeats, tokens=tokens)
    if config.shared_expert_intermediate_size:
        operations += _lower_shared_expert(shard, repeats, stands_alone=exchanges)
    if not exchanges:
        operations += reduce_tokens(shard, "moe", repeats, tokens=tokens)
    return operations


def lower_expert_bias_gradients(shard: Shard, repeats: int) -> list[Operation]:
    """Lower the gradients of the experts' biases, which are sums over the rows."""
    config, rows = shard.config, count_rows(shard)
    if not config.expert_bias:
        return []
    inner = config.moe_intermediate_size // shard.layout.expert_tensor_degree * (2 if config.gated_mlp else 1)
    if shard.workload.fused_experts:
        return bias_gradients(shard, "moe", repeats, widths=[inner, config.hidden_size], tokens=rows)
    summed = bias_gradients(shard, "moe", repeats, widths=[inner], tokens=rows)
    return summed + _lower_scaled_bias_gradients(shard, repeats, elements=1.0 * rows * config.hidden_size)


def count_group_tokens(shard: Shard) -> int:
    """Count the tokens of all devices that share the experts of a layer with this one."""
    layout = shard.layout
    tokens = shard.num_tokens * layout.expert_parallel
    if not layout.has_own_expert_degree:
        return tokens
    return tokens * layout.expert_tensor_degree // layout.tensor_parallel


def count_rows(shard: Shard) -> int:
    """Count the routed rows that the experts of this device process."""
    return -(-count_group_tokens(shard) * shard.config.num_experts_per_token // shard.layout.expert_parallel)


def _lower_router(shard: Shard, repeats: int, tokens: int) -> list[Operation]:
    """Lower the router: scores of all experts for each token, and the selection of the top k."""
    n, k = shard.config.num_experts, shard.config.hidden_size
    scores = weight_gemm(shard, "router", "router", repeats, m=tokens, n=n, k=k, dtype=shard.wide_dtype)
    return [scores, _lower_top_k(shard, repeats, tokens)]


def _lower_top_k(shard: Shard, repeats: int, tokens: int) -> Pointwise:
    """Lower softmax and top-k over fp32 scores: both read scores; they write scores, and weights with indices."""
    score_bytes = 1.0 * tokens * shard.config.num_experts * get_dtype("fp32").num_bytes
    chosen_bytes = 1.0 * tokens * shard.config.num_experts_per_token * 2.0 * get_dtype("fp32").num_bytes
    return Pointwise(
        name=display_name(shard, "router", "choose"),
        block="router",
        role="choose",
        repeats=repeats,
        dtype=shard.dtype,
        operation="router",
        read_bytes=2.0 * score_bytes,
        written_bytes=score_bytes + chosen_bytes,
        num_kernels=2,
    )


def _lower_routed_experts(shard: Shard, repeats: int, rows: int) -> list[Operation]:
    """Lower the grouped GEMMs and the activation of the experts of this device."""
    config, layout, workload = shard.config, shard.layout, shard.workload
    h, f = config.hidden_size, config.moe_intermediate_size // layout.expert_tensor_degree
    own_experts = config.num_experts // layout.expert_parallel
    reached_experts = own_experts
    # Serving libraries select tiles by these sizes; training frameworks do not.
    tile_selection: dict[str, Any] = {}
    if not workload.is_training:
        group_tokens = count_group_tokens(shard)
        reached_experts = _expected_experts_with_rows(own_experts, config, group_tokens)
        received = _expected_received_tokens(config, group_tokens, layout.expert_parallel)
        tile_selection = {"tokens": received, "experts": own_experts, "inner": f}

    def grouped(role: str, n: int, k: int) -> GroupedGemm:
        return GroupedGemm(
            name=display_name(shard, "moe", role),
            block="moe",
            role=role,
            repeats=repeats,
            dtype=shard.gemm_dtype,
            m=rows,
            n=n,
            k=k,
            groups=reached_experts,
            weight_dtype=shard.weight_dtype,
            is_training=workload.is_training,
            leaves_poor_kernel=workload.expert_kernel == "as-16-bit",
            **tile_selection,
        )

    inner = 2 * f if config.gated_mlp else f
    return [
        # All grouped kernels in use have gate and up projections of an expert in one matrix.
        grouped("gate_up" if config.gated_mlp else "up", inner, h),
        *_lower_clamp(shard, repeats, elements=1.0 * rows * inner),
        activation(shard, "moe", repeats, width=f, tokens=rows, gated=config.gated_mlp),
        grouped("down", h, f),
        *_lower_biases(shard, repeats, elements=1.0 * rows * h, num_experts=own_experts),
    ]


def _expected_experts_with_rows(local_experts: int, config: TransformerConfig, tokens: Any) -> Any:
    """Expected number of a device's experts that get rows; the weights of the others are not read.

    local (1 - (1 - k_e / E)^tokens), if each token selects k_e distinct experts of E with equal probability.
    """
    missed = (1.0 - min(config.num_experts_per_token / config.num_experts, 1.0)) ** tokens
    return minimum(maximum(_rounded(local_experts * (1.0 - missed)), 1), local_experts)


def _expected_received_tokens(config: TransformerConfig, tokens: Any, num_devices: int) -> Any:
    """Expected number of distinct tokens with rows for a device of the expert axis.

    T (1 - (1 - 1/N)^k_e) of the T tokens of N devices.
    """
    met = 1.0 - (1.0 - 1.0 / num_devices) ** config.num_experts_per_token
    return maximum(_rounded(tokens * met), 1)


def _rounded(number: Any) -> Any:
    """Return the nearest integers of a number or an array, the even one of two."""
    return number.round().astype(int) if hasattr(number, "shape") else round(number)


def _lower_clamp(shard: Shard, repeats: int, *, elements: float) -> list[Operation]:
    """Lower the clamp of both halves of the activation's input, unless the activation kernel includes it.

    The clamp and the concatenation of both halves each read and write every element (Megatron-LM,
    megatron/core/fusions/fused_bias_geglu.py).
    """
    if not (shard.config.expert_clamp and _has_separate_kernels(shard)):
        return []
    num_kernels = 3 if shard.config.gated_mlp else 1
    return [
        pointwise(
            shard, "moe", "clamp", "bias", repeats, read=2.0 * elements, written=2.0 * elements, num_kernels=num_kernels
        )
    ]


def _lower_biases(shard: Shard, repeats: int, *, elements: float, num_experts: int) -> list[Operation]:
    """Lower the addition of the scaled bias of the second GEMM, unless it is fused into another kernel."""
    if not (shard.config.expert_bias and _has_separate_kernels(shard)):
        return []
    return [
        Pointwise(
            name=display_name(shard, "moe", "bias"),
            block="moe",
            role="bias",
            repeats=repeats,
            dtype=shard.dtype,
            operation="bias",
            read_bytes=_BIAS_READ_BYTES * elements,
            written_bytes=_BIAS_WRITTEN_BYTES * elements,
            num_kernels=_KERNELS_PER_EXPERT * num_experts + 2,
        )
    ]


def _lower_scaled_bias_gradients(shard: Shard, repeats: int, *, elements: float) -> list[Operation]:
    """Lower the gradients of the scaled bias and of the routing weights that scale it."""
    return [
        Pointwise(
            name=display_name(shard, "moe", "scaled_bias_gradient"),
            block="moe",
            role="scaled_bias_gradient",
            pass_name="backward",
            repeats=repeats,
            dtype=shard.dtype,
            operation="bias",
            read_bytes=_GRADIENT_READ_BYTES * elements,
            written_bytes=_GRADIENT_WRITTEN_BYTES * elements,
            num_kernels=2 * _KERNELS_PER_EXPERT * (shard.config.num_experts // shard.layout.expert_parallel),
        )
    ]


def _lower_shared_expert(shard: Shard, repeats: int, *, stands_alone: bool) -> list[Operation]:
    """Lower the shared expert, which processes every token.

    Args:
        stands_alone: Whether it gathers its tokens and reduces its outputs itself, because routed rows are exchanged.
    """
    config, tokens = shard.config, shard.num_tokens
    operations = lower_mlp_gemms(shard, "shared_expert", repeats, config.shared_expert_intermediate_size)
    if config.shared_expert_gate:
        operations.append(
            weight_gemm(
                shard,
                "shared_expert",
                "token_gate",
                repeats,
                m=tokens,
                n=1,
                k=config.hidden_size,
                dtype=shard.wide_dtype,
            )
        )
    if not stands_alone:
        return operations
    return [
        *gather_tokens(shard, "shared_expert", repeats, tokens=tokens),
        *operations,
        *reduce_tokens(shard, "shared_expert", repeats, tokens=tokens),
    ]


def _has_separate_kernels(shard: Shard) -> bool:
    """Whether biases and clamps of routed experts run in separate kernels."""
    return shard.workload.is_training and not shard.workload.fused_experts


def _own_tokens(shard: Shard) -> int:
    """Count the tokens whose rows this device sends: a share of them if the tensor axis replicates tokens."""
    if shard.workload.is_training or not shard.layout.has_own_expert_degree:
        return shard.num_residual_tokens
    return -(-shard.num_tokens // shard.layout.tensor_parallel)
