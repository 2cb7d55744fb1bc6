"""Assembly: embedding, layers, head, then what training adds to them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from shapewright.lowering.attention import lower_bias_gradients, lower_cross_inputs, lower_inputs, lower_output
from shapewright.lowering.attention_core import lower_context_exchange, lower_core, lower_cross_core
from shapewright.lowering.backward import lower_backward
from shapewright.lowering.checks import validate_layout
from shapewright.lowering.communication import send_to_next_stage
from shapewright.lowering.counts import count_encoder_layers, count_layers, layers_per_stage
from shapewright.lowering.embedding import lower_embedding, lower_embedding_backward
from shapewright.lowering.experts import lower_expert_bias_gradients, lower_experts
from shapewright.lowering.head import lower_final_norm, lower_head, lower_head_backward
from shapewright.lowering.host import lower_activation_copies
from shapewright.lowering.mlp import lower_mlp, lower_mlp_bias_gradients
from shapewright.lowering.pointwise import norm, residual
from shapewright.lowering.shard import make_encoder_shard, make_shard
from shapewright.lowering.step import (
    lower_gradient_communication,
    lower_optimizer,
    lower_orthogonalization,
    lower_tied_gradients,
    weight_groups,
)
from shapewright.recomputation import CORE, MODULES, read_modules

if TYPE_CHECKING:
    from shapewright.config.transformer import TransformerConfig
    from shapewright.layout import ParallelLayout
    from shapewright.lowering.counts import LayerCounts
    from shapewright.lowering.shard import Shard
    from shapewright.lowering.step import WeightGroup
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
    parts = lower_parts(config, workload, layout, node_size=node_size)
    passes = lower_passes(parts, config, workload, layout)
    if not workload.is_training:
        return tuple(passes)
    copies = parts.host_copies(workload.recompute) if workload.offload_activations else []
    others = copies + parts.communication(layout.zero_stage)
    return tuple(passes + others + parts.step(layout.zero_stage))


def lower_passes(
    parts: StepParts, config: TransformerConfig, workload: Workload, layout: ParallelLayout
) -> list[Operation]:
    """Forward, recompute and backward passes of a step that is lowered into its parts."""
    before_backward = lower_before_backward(parts, config, workload, layout)
    return before_backward + parts.backward(layout.virtual_pipeline) if workload.is_training else before_backward


def lower_before_backward(
    parts: StepParts, config: TransformerConfig, workload: Workload, layout: ParallelLayout
) -> list[Operation]:
    """Forward pass of a step that is lowered into its parts, and in training what the recompute pass repeats of it."""
    forward = parts.inputs + parts.body + parts.sends(layout.virtual_pipeline) + parts.head
    if not workload.is_training:
        return forward
    return forward + _first_layers(parts.recompute(workload.recompute), config, workload, layout)


def _first_layers(
    recomputed: list[Operation], config: TransformerConfig, workload: Workload, layout: ParallelLayout
) -> list[Operation]:
    """What runs again where only some layers of a stage are computed again; of a mixed stage a share of each kind."""
    if workload.recompute_layers is None:
        return recomputed
    num_layers = layers_per_stage(config, layout)
    chosen = min(workload.recompute_layers, num_layers)
    return [operation.changed(repeats=operation.repeats * chosen // num_layers) for operation in recomputed]


def lower_parts(
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
    *,
    node_size: int = 8,
    counts: tuple[LayerCounts, LayerCounts] | None = None,
) -> StepParts:
    """Lower a step into the parts that recomputation, ZeRO stage and model chunks choose from.

    Args:
        config: The model.
        workload: What is run; its mode of recomputation does not matter.
        layout: How it is spread; its ZeRO stage, model chunks and schedule do not matter.
        node_size: Devices of one node.
        counts: Layers of the (decoder) stack and of the encoder; None for those of the busiest stage.

    Raises:
        LayoutError: the layout does not divide the model.
        WorkloadError: the batch does not divide, or the model cannot run this phase.
    """
    validate_layout(config, workload, layout)
    shard = make_shard(config, workload, layout, node_size)
    own, encoder = counts or (count_layers(config, layout), count_encoder_layers(config, layout))
    stacks = [_lower_stack(shard, own)]
    if shard.encodes_source:
        stacks.insert(0, _lower_stack(make_encoder_shard(shard), encoder))
    layers = [operation for stack in stacks for operation in stack.layers]
    return StepParts(
        shard=shard,
        stacks=tuple(stacks),
        inputs=[operation for stack in stacks for operation in lower_embedding(stack.shard)],
        body=layers + [operation for stack in stacks[:-1] for operation in lower_final_norm(stack.shard)],
        head=lower_head(shard),
    )


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """A lowered step before recomputation, ZeRO stage and model chunks are chosen; none of them changes another part.

    Attributes:
        shard: Sizes of one device.
        stacks: Layers of encoder and decoder.
        inputs: Forward operations before the layers.
        body: Forward operations of the layers, without what pipeline stages send.
        head: Forward operations after the layers.
    """

    shard: Shard
    stacks: tuple[_Stack, ...]
    inputs: list[Operation]
    body: list[Operation]
    head: list[Operation]

    @cached_property
    def groups(self) -> tuple[WeightGroup, ...]:
        """Weights of this device."""
        layers = [operation for stack in self.stacks for operation in stack.layers]
        cores = [operation for stack in self.stacks for operation in stack.cores]
        return tuple(weight_groups(self.shard, layers, cores, sum(stack.counts.num_layers for stack in self.stacks)))

    def sends(self, virtual_pipeline: int) -> list[Operation]:
        """What a stage hands to the next one in the forward pass."""
        return send_to_next_stage(self.shard, virtual_pipeline)

    def repeated(self, mode: str) -> list[Operation]:
        """Forward operations of the body that run again before the backward pass."""
        if mode == "none":
            return []
        return [
            operation
            for stack in self.stacks
            for operation in (stack.layers if mode == "full" else _taken_again(stack))
        ]

    def recompute(self, mode: str) -> list[Operation]:
        """The same as operations of the pass that repeats them."""
        return [operation.changed(pass_name="recompute") for operation in self.repeated(mode)]

    def host_copies(self, mode: str) -> list[Operation]:
        """What the layers save under a mode of recomputation, to the host and back."""
        return [
            operation for stack in self.stacks for operation in lower_activation_copies(stack.shard, stack.counts, mode)
        ]

    def backward(self, virtual_pipeline: int) -> list[Operation]:
        """The backward pass, with what a stage hands to the one before it."""
        sends = self.backward_of_sends(self.sends(virtual_pipeline))
        return self.backward_of_head() + sends + self.backward_of_layers()

    def backward_of_sends(self, sends: list[Operation]) -> list[Operation]:
        """What a stage hands to the one before it in the backward pass."""
        return lower_backward(sends)

    def backward_of_head(self) -> list[Operation]:
        """The backward pass down to the last layer."""
        return lower_head_backward(self.shard)

    def backward_of_layers(self) -> list[Operation]:
        """The backward pass from the last layer to the embedding."""
        backward = lower_backward(self.body)
        for stack in reversed(self.stacks):
            backward += _lower_bias_gradients(stack) + lower_embedding_backward(stack.shard)
        return backward

    def communication(self, zero_stage: int) -> list[Operation]:
        """Gradients reduced over replicas, and sharded weights gathered."""
        return lower_gradient_communication(self.shard, self.groups, zero_stage)

    def step(self, zero_stage: int) -> list[Operation]:
        """What follows the last backward pass."""
        updates = lower_tied_gradients(self.shard) + lower_optimizer(self.shard, self.groups, zero_stage)
        return updates + self.orthogonalization(zero_stage)

    def weighted_layers(self) -> list[Operation]:
        """Forward operations of the layers whose products have weights."""
        cores = {id(operation) for stack in self.stacks for operation in stack.cores}
        return [operation for stack in self.stacks for operation in stack.layers if id(operation) not in cores]

    def orthogonalization(self, zero_stage: int) -> list[Operation]:
        """Products of an optimiser that works on whole matrices; none for others."""
        return lower_orthogonalization(self.shard, self.weighted_layers(), zero_stage)


class _Stack(NamedTuple):
    """Forward operations of the layers of one stack on this stage; ``cores`` are those of attention without weights."""

    shard: Shard
    counts: LayerCounts
    layers: list[Operation]
    cores: list[Operation]


def _taken_again(stack: _Stack) -> list[Operation]:
    """Forward operations of the parts that selective recomputation takes, in their order."""
    names = read_modules(stack.shard.workload.recompute_modules)
    modules = [MODULES[name] for name in names]
    cores = {id(operation) for operation in stack.cores} if CORE in names else set()
    return [
        operation
        for operation in stack.layers
        if id(operation) in cores
        or any(module.runs_again(operation.name.removeprefix(stack.shard.prefix)) for module in modules)
    ]


def _lower_stack(shard: Shard, counts: LayerCounts) -> _Stack:
    passes = shard.num_passes
    repeats = passes * counts.num_layers
    has_cross_attention = shard.source_len > 0

    cores = lower_context_exchange(shard, repeats)
    for window, num_layers in _effective_windows(shard, counts):
        cores += lower_core(shard, passes * num_layers, window)
    layers = _lower_residual_stream(shard, repeats, has_cross_attention=has_cross_attention)
    layers += (
        lower_inputs(shard, repeats, passes * counts.num_rotary) + cores + lower_output(shard, "attention", repeats)
    )
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
    dense = lower_mlp_bias_gradients(shard, shard.num_passes * counts.num_dense) if counts.num_dense else []
    experts = lower_expert_bias_gradients(shard, shard.num_passes * counts.num_expert) if counts.num_expert else []
    return attention + dense + experts


def _lower_residual_stream(shard: Shard, repeats: int, *, has_cross_attention: bool) -> list[Operation]:
    """Norms, residual additions and dropout, on as many tokens as this device keeps of the residual stream."""
    config = shard.config
    num_branches = 3 if has_cross_attention else 2
    num_norms = config.num_norms_per_layer + (1 if has_cross_attention else 0)
    tokens = shard.num_residual_tokens
    operations: list[Operation] = []
    if num_norms:
        operations.append(norm(shard, "norm", repeats * num_norms, width=config.hidden_size, tokens=tokens))
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
