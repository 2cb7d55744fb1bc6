"""Assembly: embedding, layers, head, then what training adds to them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from shapewright.lowering.attention import lower_bias_gradients, lower_cross_inputs, lower_inputs, lower_output
from shapewright.lowering.attention_core import lower_context_exchange, lower_core, lower_cross_core
from shapewright.lowering.backward import lower_backward
from shapewright.lowering.checks import validate_layout
from shapewright.lowering.communication import send_to_next_stage
from shapewright.lowering.counts import count_encoder_layers, count_layers
from shapewright.lowering.embedding import lower_embedding, lower_embedding_backward
from shapewright.lowering.experts import lower_experts
from shapewright.lowering.head import lower_final_norm, lower_head, lower_head_backward
from shapewright.lowering.mlp import lower_mlp, lower_mlp_bias_gradients
from shapewright.lowering.pointwise import dropout, norm, residual
from shapewright.lowering.shard import make_encoder_shard, make_shard
from shapewright.lowering.step import (
    lower_gradient_communication,
    lower_optimizer,
    lower_tied_gradients,
    weight_groups,
)

if TYPE_CHECKING:
    from shapewright.config.transformer import TransformerConfig
    from shapewright.layout import ParallelLayout
    from shapewright.lowering.counts import LayerCounts
    from shapewright.lowering.shard import Shard
    from shapewright.operations import Operation
    from shapewright.workload import Workload


def lower(
    config: TransformerConfig, workload: Workload, layout: ParallelLayout, *, node_size: int = 8
) -> tuple[Operation, ...]:
    """List what one device runs in one step, layers alike once.

    Args:
        config: The model.
        workload: What is run.
        layout: How it is spread.
        node_size: Devices of one node; decides which ranks of a collective share one.

    Returns:
        Operations in the order of the passes: forward, recompute, backward, step.

    Raises:
        LayoutError: the layout does not divide the model.
        WorkloadError: the batch does not divide, or the model cannot run this phase.

    Assumes:
        One busiest stage stands for all; its operations have stage ``every``, those at the ends of the model ``first``
        and ``last``. Eight-bit GEMMs are listed without the casts of their operands.
    """
    validate_layout(config, workload, layout)
    shard = make_shard(config, workload, layout, node_size)
    stacks = [_lower_stack(shard, count_layers(config, layout))]
    if shard.encodes_source:
        stacks.insert(0, _lower_stack(make_encoder_shard(shard), count_encoder_layers(config, layout)))
    inputs = [operation for stack in stacks for operation in lower_embedding(stack.shard)]
    layers = [operation for stack in stacks for operation in stack.layers]
    encoder_norms = [operation for stack in stacks[:-1] for operation in lower_final_norm(stack.shard)]
    body = layers + encoder_norms + send_to_next_stage(shard)
    forward = inputs + body + lower_head(shard)
    if not workload.is_training:
        return tuple(forward)

    cores = [operation for stack in stacks for operation in stack.cores]
    repeated = {"none": [], "selective": cores, "full": layers}[workload.recompute]
    recompute = [replace(operation, pass_name="recompute") for operation in repeated]
    backward = lower_head_backward(shard) + lower_backward(body)
    for stack in reversed(stacks):
        backward += _lower_bias_gradients(stack) + lower_embedding_backward(stack.shard)
    groups = weight_groups(shard, layers, cores, sum(stack.counts.num_layers for stack in stacks))
    communication = lower_gradient_communication(shard, groups)
    step = lower_tied_gradients(shard) + lower_optimizer(shard, groups)
    return tuple(forward + recompute + backward + communication + step)


class _Stack(NamedTuple):
    """Forward operations of the layers of one stack on this stage; ``cores`` are those of attention without weights."""

    shard: Shard
    counts: LayerCounts
    layers: list[Operation]
    cores: list[Operation]


def _lower_stack(shard: Shard, counts: LayerCounts) -> _Stack:
    passes = shard.num_passes
    repeats = passes * counts.num_layers
    has_cross_attention = shard.source_len > 0

    cores = lower_context_exchange(shard, repeats)
    for window, num_layers in _effective_windows(shard, counts):
        cores += lower_core(shard, passes * num_layers, window)
    layers = _lower_residual_stream(shard, repeats, has_cross_attention)
    layers += lower_inputs(shard, repeats) + cores + lower_output(shard, "attention", repeats)
    if has_cross_attention:
        cross_cores = lower_cross_core(shard, repeats)
        layers += lower_cross_inputs(shard, repeats) + cross_cores + lower_output(shard, "cross_attention", repeats)
        cores += cross_cores
    if counts.num_dense:
        layers += lower_mlp(shard, passes * counts.num_dense)
    if counts.num_expert:
        layers += lower_experts(shard, passes * counts.num_expert)
    return _Stack(shard, counts, layers, cores)


def _lower_bias_gradients(stack: _Stack) -> list[Operation]:
    """Gradients of the biases of all layers of a stack; nothing runs for them in the forward pass."""
    shard, counts = stack.shard, stack.counts
    attention = lower_bias_gradients(shard, shard.num_passes * counts.num_layers)
    return attention + lower_mlp_bias_gradients(shard, shard.num_passes * counts.num_dense)


def _lower_residual_stream(shard: Shard, repeats: int, has_cross_attention: bool) -> list[Operation]:
    """Norms, residual additions and dropout, on as many tokens as this device keeps of the residual stream."""
    config = shard.config
    num_branches = 3 if has_cross_attention else 2
    num_norms = config.num_norms_per_layer + (1 if has_cross_attention else 0)
    tokens = shard.num_residual_tokens
    operations: list[Operation] = []
    if num_norms:
        operations.append(norm(shard, "norm", repeats * num_norms, width=config.hidden_size, tokens=tokens))
    if shard.workload.is_training and config.hidden_dropout > 0.0:
        elements = 1.0 * tokens * config.hidden_size
        operations.append(dropout(shard, "dropout", repeats * num_branches, elements=elements))
    operations.append(residual(shard, "residual", repeats * num_branches))
    return operations


def _effective_windows(shard: Shard, counts: LayerCounts) -> list[tuple[int, int]]:
    """Layers by window, where it makes a difference: unfused attention over a new sequence computes whole squares."""
    computes_squares = shard.workload.attention == "unfused" and shard.workload.phase != "decode"
    merged: Counter[int] = Counter()
    for window, num_layers in counts.windows.items():
        matters = 0 < window < shard.kv_len and not computes_squares
        merged[window if matters else 0] += num_layers
    return sorted(merged.items())
