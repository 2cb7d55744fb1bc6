"""Lowering of a whole step: embedding, layers, head, and in training recomputation, gradients and optimizer."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from shapewright.core.deadline import check_deadline
from shapewright.core.records import dataclass
from shapewright.lowering.adapters import add_adapters
from shapewright.lowering.attention.compressed import lower_compressed
from shapewright.lowering.attention.core import lower_context_exchange, lower_core, lower_cross_core
from shapewright.lowering.attention.projections import (
    lower_bias_gradients,
    lower_cross_inputs,
    lower_inputs,
    lower_output,
)
from shapewright.lowering.builders import lower_stream_mixing, norm, residual
from shapewright.lowering.checks import validate_layout
from shapewright.lowering.collectives import send_to_next_stage
from shapewright.lowering.counts import (
    LayerCounts,
    count_encoder_layers,
    count_layers,
    count_recomputed_layers,
    count_trained_layers,
)
from shapewright.lowering.embedding import (
    count_mtp,
    lower_embedding,
    lower_embedding_backward,
    lower_final_norm,
    lower_head,
    lower_head_backward,
    lower_mtp,
    predicts_more,
    with_mtp_heads,
)
from shapewright.lowering.gradients import lower_backward
from shapewright.lowering.images import lower_scalings, of_tower
from shapewright.lowering.mixers import lower_mixer, lower_mixer_bias_gradients
from shapewright.lowering.mlp import lower_expert_bias_gradients, lower_experts, lower_mlp, lower_mlp_bias_gradients
from shapewright.lowering.offload import lower_activation_copies
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.optimizer_step import (
    lower_gradient_communication,
    lower_optimizer,
    lower_orthogonalization,
    lower_tied_gradients,
    weight_groups,
)
from shapewright.lowering.shard import make_encoder_shard, make_shard
from shapewright.models.layers import COMPRESSED_LAYERS, CROSS_ATTENTION, WITH_SOFTMAX
from shapewright.workload.alternate_gemms import find_alternate_gemms
from shapewright.workload.images import has_tower, tower_job
from shapewright.workload.recompute import ALTERNATE, MODULES, read_modules

if TYPE_CHECKING:
    from shapewright.lowering.operations.operation import Operation
    from shapewright.lowering.optimizer_step import WeightGroup
    from shapewright.lowering.shard import Shard
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload


def lower(
    config: TransformerConfig, workload: Workload, layout: ParallelLayout, *, node_size: int = 8
) -> tuple[Operation, ...]:
    """List the operations of one device in one step; equal layers are listed once with their number of repeats.

    Args:
        node_size: Devices of one node, which determines the ranks of a collective that share one.

    Returns:
        Operations in the order of the passes: forward, recompute, backward, step.

    Raises:
        LayoutError: the layout does not divide the model.
        WorkloadError: the global batch is not a multiple of the micro-batches, or the model does not support the phase.

    Assumes:
        All stages run as long as the busiest one, whose operations have stage ``every``; those at the ends of the model
        have stage ``first`` or ``last``. Quantization of the operands of 8-bit GEMMs is left out.
    """
    check_deadline()
    parts = lower_parts(config, workload, layout, node_size=node_size)
    passes = lower_passes(parts, config, workload, layout)
    if not workload.is_training:
        return tuple(passes)
    after = [_lower_after_passes(parts, workload, layout)]
    if parts.tower:
        after.append(of_tower(_lower_after_passes(parts.tower, workload, layout)))
    return tuple(passes + [operation for operations in after for operation in operations])


def _lower_after_passes(parts: StepParts, workload: Workload, layout: ParallelLayout) -> list[Operation]:
    """List the copies to the host, the communication of weights and gradients, and the optimizer step."""
    copies = parts.host_copies(workload.recompute) if workload.offload_activations else []
    return copies + parts.communication(layout.zero_stage) + parts.step(layout.zero_stage)


def lower_passes(
    parts: StepParts, config: TransformerConfig, workload: Workload, layout: ParallelLayout
) -> list[Operation]:
    """List the operations of the forward, recompute and backward passes of a lowered step."""
    operations = lower_before_backward(parts, config, workload, layout)
    if workload.is_training:
        operations += parts.backward(layout.virtual_pipeline)
        operations += of_tower(parts.tower.backward(1)) if parts.tower else []
    return operations


def lower_before_backward(
    parts: StepParts, config: TransformerConfig, workload: Workload, layout: ParallelLayout
) -> list[Operation]:
    """List the operations of the forward pass of a lowered step, and in training of the recompute pass."""
    forward = parts.inputs + parts.body + parts.sends(layout.virtual_pipeline) + parts.mtp + parts.head
    if parts.tower:
        tower = parts.tower.inputs + parts.tower.body + parts.tower.head
        forward = of_tower(tower + parts.tower.recompute(workload.recompute)) + forward
    if not workload.is_training:
        return forward
    if workload.recompute_layers is None:
        return forward + parts.recompute(workload.recompute)
    return forward + parts.recompute_first(count_recomputed_layers(config, workload, layout))


def lower_parts(
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
    *,
    node_size: int = 8,
    counts: tuple[LayerCounts, LayerCounts] | None = None,
) -> StepParts:
    """Lower a step into parts that do not depend on recomputation, ZeRO stage, model chunks and schedule.

    Args:
        workload: What is run; its recomputation mode has no effect.
        layout: Parallel layout; its ZeRO stage, model chunks and schedule have no effect.
        counts: Layers of the (decoder) stack and of the encoder; None for those of the busiest stage.

    Raises:
        LayoutError: the layout does not divide the model.
        WorkloadError: the global batch is not a multiple of the micro-batches, or the model does not support the phase.
    """
    validate_layout(config, workload, layout)
    shard = make_shard(config, workload, layout, node_size)
    own, encoder = counts or (count_layers(config, layout), count_encoder_layers(config, layout))
    stacks = [_lower_stack(shard, own)]
    trained = count_trained_layers(config, workload, own)
    if shard.encodes_source and config.num_encoder_layers:
        stacks.insert(0, _lower_stack(make_encoder_shard(shard), encoder))
    layers = [operation for stack in stacks for operation in stack.layers]
    tower = None
    if has_tower(config, workload):
        tower = lower_parts(*tower_job(config, workload, layout, shard.num_passes), node_size=node_size)
    return StepParts(
        shard=shard,
        stacks=tuple(stacks),
        trained=tuple(stacks) if trained is own else _lower_some(shard, trained),
        inputs=[operation for stack in stacks for operation in lower_embedding(stack.shard)],
        body=layers + [operation for stack in stacks[:-1] for operation in lower_final_norm(stack.shard)],
        head=with_mtp_heads(shard, lower_head(shard)),
        mtp=_lower_mtp_layers(shard),
        tower=tower,
    )


@dataclass(frozen=True, kw_only=True)
class StepParts:
    """A lowered step before recomputation, ZeRO stage and model chunks are chosen.

    Attributes:
        shard: Sizes of one device.
        stacks: Layers of encoder and decoder.
        trained: Those of them with a backward pass.
        inputs: Forward operations before the layers.
        body: Forward operations of the layers, without transfers between pipeline stages.
        head: Forward operations after the layers.
        mtp: Forward operations of the layers of multi-token prediction, on the last stage.
        tower: The step of the vision tower, which runs on the first stage.
    """

    shard: Shard
    stacks: tuple[_Stack, ...]
    trained: tuple[_Stack, ...]
    inputs: list[Operation]
    body: list[Operation]
    head: list[Operation]
    mtp: list[Operation]
    tower: StepParts | None = None

    @cached_property
    def groups(self) -> tuple[WeightGroup, ...]:
        """Weights of this device, grouped for communication and the optimizer."""
        return tuple(
            weight_groups(
                self.shard,
                self.weighted_layers(),
                self.num_layers,
                trained=self._weighted(self.trained),
                image_ends=(_with_weights(self.inputs), _with_weights(self.head)),
            )
        )

    def sends(self, virtual_pipeline: int) -> list[Operation]:
        """List the transfers to the next stage in the forward pass."""
        return send_to_next_stage(self.shard, virtual_pipeline)

    def repeated_indices(self, mode: str) -> list[int]:
        """List the indices in the body of the operations that a recomputation mode repeats, of layers of one kind."""
        # The body begins with all layers.
        indices: list[int] = []
        start = 0
        for stack in self.stacks:
            indices += [start + index for index in _list_repeated(stack, mode)]
            start += len(stack.layers)
        return indices

    def repeated_mtp_indices(self, mode: str) -> list[int]:
        """List the same for the layers of multi-token prediction, with their projections in full recomputation.

        Source: NVIDIA/Megatron-LM, megatron/core/transformer/multi_token_prediction.py (_checkpointed_forward).
        """
        return _list_repeated(_Stack(self.shard, count_mtp(self.shard.config), self.mtp), mode)

    def recompute(self, mode: str) -> list[Operation]:
        """List the operations of the recompute pass."""
        repeated = [
            part.layers[index]
            for stack in self.trained
            for part in _split_by_repeats(stack, mode)
            for index in _list_repeated(part, mode)
        ]
        repeated += [self.mtp[index] for index in self.repeated_mtp_indices(mode)]
        return [operation.changed(pass_name="recompute") for operation in repeated]

    def recompute_first(self, counts: LayerCounts) -> list[Operation]:
        """List the operations of full recomputation of some layers of the stage, and of as many of the encoder.

        Layers of multi-token prediction do not run again, unless all layers do.

        Source: NVIDIA/Megatron-LM, megatron/core/transformer/multi_token_prediction.py: no block method.
        """
        if counts.num_layers >= sum(stack.counts.num_layers for stack in self.trained[-1:]):
            return self.recompute("full")
        stacks = list(_lower_some(self.shard, counts))
        for stack in self.stacks[:-1]:
            stacks = [*_lower_some(stack.shard, _limit_encoder(stack.counts, counts)), *stacks]
        return [operation.changed(pass_name="recompute") for stack in stacks for operation in stack.layers]

    def host_copies(self, mode: str) -> list[Operation]:
        """List the copies to and from the host of the tensors saved under a recomputation mode."""
        shard, repeated = self.shard, None
        if shard.workload.recompute_layers is not None and mode == "full":
            repeated = count_recomputed_layers(shard.config, shard.workload, shard.layout)
        copies: list[Operation] = []
        for stack in self.trained:
            again = stack.counts
            if repeated is not None:
                again = _limit_encoder(stack.counts, repeated) if stack.shard.prefix else repeated
            copies += lower_activation_copies(stack.shard, stack.counts, mode, again)
        if self.mtp:
            counts = count_mtp(shard.config)
            has_again = repeated is None or repeated.num_layers >= self.trained[-1].counts.num_layers
            of_mtp = lower_activation_copies(shard, counts, mode, counts if has_again else LayerCounts({}))
            copies += [operation.changed(name=f"mtp.{operation.name}", stage="last") for operation in of_mtp]
        return copies

    def backward(self, virtual_pipeline: int) -> list[Operation]:
        """List the operations of the backward pass with the transfers to the previous stage.

        A vision tower of which no weights are trained has none.
        """
        if self.shard.workload.last_layers == 0:
            return []
        sends = self.backward_of_sends(self.sends(virtual_pipeline))
        return self.backward_of_head() + sends + self.backward_of_layers()

    def backward_of_sends(self, sends: list[Operation]) -> list[Operation]:
        """List the transfers to the previous stage in the backward pass."""
        return lower_backward(sends)

    def backward_of_head(self) -> list[Operation]:
        """List the operations of the backward pass from the loss to the last layer."""
        return with_mtp_heads(self.shard, lower_head_backward(self.shard)) + self.backward_of_mtp()

    def backward_of_mtp(self) -> list[Operation]:
        """List the operations of the backward pass of the layers of multi-token prediction."""
        return lower_backward(self.mtp, self.shard.workload)

    def backward_of_layers(self) -> list[Operation]:
        """List the operations of the backward pass from the last layer to the embedding."""
        workload = self.shard.workload
        body = self.body
        if workload.last_layers is not None:
            body = [operation for stack in self.trained for operation in stack.layers]
        backward = lower_backward(body, workload)
        for stack in reversed(self.trained):
            if not workload.has_adapters:
                backward += _lower_bias_gradients(stack)
            if workload.trains_all:
                backward += lower_embedding_backward(stack.shard)
        return backward

    @cached_property
    def num_layers(self) -> int:
        """Layers of this device."""
        return sum(stack.counts.num_layers for stack in self.stacks)

    def communication(self, zero_stage: int) -> list[Operation]:
        """List the collectives that reduce gradients over replicas and gather sharded weights."""
        return lower_gradient_communication(self.shard, self.groups, zero_stage)

    def step(self, zero_stage: int) -> list[Operation]:
        """List the operations after the last backward pass."""
        updates = lower_tied_gradients(self.shard) + lower_optimizer(self.shard, self.groups, zero_stage)
        return updates + self.orthogonalization(zero_stage)

    def weighted_layers(self) -> list[Operation]:
        """List the forward operations of the layers but those that multiply activations."""
        return self._weighted(self.stacks)

    def _weighted(self, stacks: tuple[_Stack, ...]) -> list[Operation]:
        layers = [operation for stack in stacks for operation in stack.layers] + self.mtp
        return _with_weights(layers)

    def orthogonalization(self, zero_stage: int) -> list[Operation]:
        """List the GEMMs of an optimizer that orthogonalizes matrices; empty for others."""
        return lower_orthogonalization(self.shard, self._weighted(self.trained), zero_stage)


def _with_weights(operations: list[Operation]) -> list[Operation]:
    """Leave out operations that multiply activations."""
    return [operation for operation in operations if not operation.multiplies_activations]


class _Stack(NamedTuple):
    """Forward operations of the layers of one stack on this stage."""

    shard: Shard
    counts: LayerCounts
    layers: list[Operation]


def _lower_stack(shard: Shard, counts: LayerCounts) -> _Stack:
    """Lower the forward pass of the layers of one stack."""
    passes = shard.num_passes
    repeats = passes * counts.num_layers
    has_cross_attention = _has_cross_attention(shard)
    every, counts = counts, _without_skipped(shard, counts)

    layers = _lower_residual_stream(shard, counts, has_cross_attention=has_cross_attention)
    layers += lower_scalings(shard, counts.num_layers)
    if counts.num_attention:
        attended = passes * counts.num_attention
        layers += lower_inputs(shard, attended, passes * counts.num_rotary) + lower_context_exchange(shard, attended)
        for window, num_layers in _effective_windows(shard, counts):
            layers += lower_core(shard, passes * num_layers, window)
        layers += lower_output(shard, "attention", attended)
    for mixer, num_layers in counts.mixers.items():
        if mixer == CROSS_ATTENTION:
            layers += _lower_cross_attention(shard, passes * num_layers)
        elif mixer in COMPRESSED_LAYERS:
            layers += lower_compressed(shard, mixer, passes * num_layers)
        else:
            layers += lower_mixer(shard, mixer, passes * num_layers)
    if has_cross_attention:
        layers += _lower_cross_attention(shard, repeats)
    if counts.num_dense:
        layers += lower_mlp(shard, passes * counts.num_dense)
    if counts.num_expert:
        layers += lower_experts(shard, passes * counts.num_expert)
    return _Stack(shard, every, add_adapters(shard, layers))


def _split_by_repeats(stack: _Stack, mode: str) -> list[_Stack]:
    """Split a stack into its kinds of layers where they repeat different operations of a block."""
    alternates = mode == "selective" and ALTERNATE in read_modules(stack.shard.workload.recompute_modules)
    if not alternates or len(stack.counts.kinds) == 1:
        return [stack]
    return [_lower_stack(stack.shard, LayerCounts({kind: count})) for kind, count in stack.counts.kinds.items()]


def _list_repeated(stack: _Stack, mode: str) -> list[int]:
    """List the indices of the operations that a mode repeats; with alternate GEMMs, in layers of one kind."""
    if mode == "none" or not stack.layers or not stack.counts.kinds:
        return []
    if mode == "full":
        return list(range(len(stack.layers)))
    shard, names = stack.shard, read_modules(stack.shard.workload.recompute_modules)
    modules = [MODULES[name] for name in names if name != ALTERNATE]
    alternate = find_alternate_gemms(
        shard.config,
        shard.workload,
        shard.layout,
        next(iter(stack.counts.kinds)),
        has_cross_attention=_has_cross_attention(shard),
    )
    return [
        index
        for index, operation in enumerate(stack.layers)
        if any(module.repeats_operation(operation.block, operation.role) for module in modules)
        or (
            alternate is not None
            and not isinstance(operation, Collective)
            and alternate.repeats_operation(operation.block, operation.role)
        )
    ]


def _has_cross_attention(shard: Shard) -> bool:
    """Whether every layer of the stack attends to the output of an encoder as well."""
    return shard.source_len > 0 and not shard.config.attends_to_images


def _lower_some(shard: Shard, counts: LayerCounts) -> tuple[_Stack, ...]:
    """Lower some layers of a stack, of which there may be none."""
    return (_lower_stack(shard, counts),) if counts.num_layers else ()


def _limit_encoder(encoder: LayerCounts, decoder: LayerCounts) -> LayerCounts:
    """Limit equal layers of an encoder to as many as there are of a decoder."""
    return LayerCounts({kind: min(count, decoder.num_layers) for kind, count in encoder.kinds.items()})


def _without_skipped(shard: Shard, counts: LayerCounts) -> LayerCounts:
    """Leave out layers of cross-attention to images where there are none."""
    if not shard.config.attends_to_images or shard.source_len:
        return counts
    return LayerCounts({kind: count for kind, count in counts.kinds.items() if kind.layer_type != CROSS_ATTENTION})


def _lower_cross_attention(shard: Shard, repeats: int) -> list[Operation]:
    inputs = lower_cross_inputs(shard, repeats)
    return inputs + lower_cross_core(shard, repeats) + lower_output(shard, "cross_attention", repeats)


def _lower_mtp_layers(shard: Shard) -> list[Operation]:
    return lower_mtp(shard, _lower_stack(shard, count_mtp(shard.config)).layers) if predicts_more(shard) else []


def _lower_bias_gradients(stack: _Stack) -> list[Operation]:
    """Lower the gradients of the biases of all layers of a stack; their addition is fused in the forward pass."""
    shard, counts = stack.shard, stack.counts
    attention = lower_bias_gradients(shard, shard.num_passes * counts.num_attention) if counts.num_attention else []
    for mixer, num_layers in counts.mixers.items():
        if mixer in WITH_SOFTMAX:
            continue
        attention += lower_mixer_bias_gradients(shard, mixer, shard.num_passes * num_layers)
    dense = lower_mlp_bias_gradients(shard, shard.num_passes * counts.num_dense) if counts.num_dense else []
    experts = lower_expert_bias_gradients(shard, shard.num_passes * counts.num_expert) if counts.num_expert else []
    return attention + dense + experts


def _lower_residual_stream(shard: Shard, counts: LayerCounts, *, has_cross_attention: bool) -> list[Operation]:
    """Lower norms and residual additions with dropout, on this device's tokens of the residual stream."""
    config, repeats = shard.config, shard.num_passes * counts.num_layers
    num_branches = counts.num_branches + (counts.num_layers if has_cross_attention else 0)
    num_norms = config.num_norms_per_layer + (1 if has_cross_attention else 0)
    tokens = shard.num_residual_tokens
    operations: list[Operation] = []
    if num_norms:
        operations.append(norm(shard, "norm", "", repeats * num_norms, width=config.hidden_size, tokens=tokens))
    if config.residual_streams > 1:
        return operations + lower_stream_mixing(shard, shard.num_passes * num_branches)
    operations.append(residual(shard, shard.num_passes * num_branches))
    return operations


def _effective_windows(shard: Shard, counts: LayerCounts) -> list[tuple[int, int]]:
    """Count the layers by effective window: 0 if it covers all keys, or if unfused attention computes all scores."""
    computes_squares = shard.workload.attention == "unfused" and shard.workload.phase != "decode"
    merged: Counter[int] = Counter()
    for window, num_layers in counts.windows.items():
        matters = 0 < window < shard.kv_len and not computes_squares
        merged[window if matters else 0] += num_layers
    return sorted(merged.items())
