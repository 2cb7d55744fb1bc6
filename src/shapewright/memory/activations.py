"""Activations of one stage in training: of each micro-batch, at the end of the model, for a moment, on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.memory.stage import Stage
from shapewright.saved_tensors import (
    activation_element_bytes,
    ceil_div,
    keep_tensors,
    list_saved_tensors,
    sum_bytes,
)

if TYPE_CHECKING:
    from shapewright.config.transformer import TransformerConfig
    from shapewright.layout import ParallelLayout
    from shapewright.workload import Workload

LOGIT_BYTES = 4.0  # cross entropy keeps its softmax in fp32 (arXiv 2205.05198 section 4.3); samplers read fp32 logits
_MASK_BYTES = 1.0  # torch.native_dropout keeps a bool per element
_LAYERS_MOVING = 2  # of offloaded activations: the layer at work, and the one on its way to the host or back


@dataclass(frozen=True)
class LayerBytes:
    """What one layer keeps of one micro-batch, and what it computes again. [byte]"""

    kept_bytes: float
    recomputed_bytes: float


def estimate_layer(
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
    *,
    has_experts: bool,
    has_cross_attention: bool,
) -> LayerBytes:
    """Estimate what one layer keeps under the workload's recomputation; schedule and stages have no part in it."""
    tensors = list_saved_tensors(
        config, workload, layout, has_experts=has_experts, has_cross_attention=has_cross_attention
    )
    kept_bytes = sum_bytes(keep_tensors(tensors, workload.recompute, workload.recompute_modules))
    return LayerBytes(kept_bytes, sum_bytes(tensors) - kept_bytes)


@dataclass(frozen=True)
class TrainingTerms:
    """Activations of one stage, before the schedule says how many micro-batches are in flight.

    Attributes:
        microbatch_bytes: Kept on the device of each micro-batch in flight. [byte]
        end_bytes: Kept once, at the end of the model, without the logits. [byte]
        logits_bytes: Softmax of the logits. [byte]
        momentary_bytes: What exists for a moment: the layer computed again, or the gradient of the logits, which is
            gone before the first layer is computed again. [byte]
        host_bytes: Kept by the host of each micro-batch in flight. [byte]
        moving_bytes: The most of it that the device holds besides: the layer at work and the one under way. [byte]
    """

    microbatch_bytes: float
    end_bytes: float
    logits_bytes: float
    momentary_bytes: float
    host_bytes: float = 0.0
    moving_bytes: float = 0.0

    def on_device_bytes(self, in_flight: float) -> float:
        """What the device keeps of all micro-batches in flight. [byte]"""
        on_device = self.microbatch_bytes * in_flight
        return on_device + min(self.moving_bytes, self.host_bytes * in_flight) if self.host_bytes else on_device


def estimate_training_terms(
    stage: Stage, workload: Workload, layer_bytes: Callable[..., LayerBytes] = estimate_layer
) -> TrainingTerms:
    """Estimate the activations of one stage in training.

    Args:
        stage: The stage.
        workload: What is run.
        layer_bytes: estimate_layer, or what remembers its answers.
    """
    config, layout = stage.config, stage.layout
    per_microbatch = recomputed = largest = 0.0
    for has_experts, has_cross_attention, num_layers in stage.layer_kinds():
        layer = layer_bytes(config, workload, layout, has_experts=has_experts, has_cross_attention=has_cross_attention)
        per_microbatch += num_layers * layer.kept_bytes
        if workload.recompute_layers is not None and workload.recompute == "full":
            # The first layers of the stage are computed again; of a mixed stage an equal share of each kind.
            share = min(workload.recompute_layers / max(stage.num_layers, 1), 1.0)
            per_microbatch += (1.0 - share) * num_layers * layer.recomputed_bytes
            largest = max(largest, layer.recomputed_bytes + layer.kept_bytes) if share < 1.0 else largest
        largest = max(largest, layer.kept_bytes)
        recomputed = max(recomputed, layer.recomputed_bytes)
    host_bytes = moving_bytes = 0.0
    if workload.offload_activations:
        host_bytes, moving_bytes, per_microbatch = per_microbatch, _LAYERS_MOVING * largest, 0.0
    residual_rows = workload.micro_batch_size * ceil_div(workload.seq_len, layout.context_parallel)
    if layout.sequence_parallel:
        residual_rows = ceil_div(residual_rows, layout.tensor_parallel)
    residual_elements = residual_rows * config.hidden_size
    residual_bytes = activation_element_bytes(workload.dtype) * residual_elements
    if stage.is_first:
        per_microbatch += _MASK_BYTES * residual_elements * (config.hidden_dropout > 0)
        per_microbatch += residual_bytes * config.embedding_norm
    # Inputs of the final norm and of the logit matrix; the last stage goes backward at once, so of one micro-batch.
    end_bytes = residual_bytes * (1 + config.has_final_norm) if stage.is_last else 0.0
    logit_gradient_bytes = estimate_logits(stage, workload, activation_element_bytes(workload.dtype))
    logits_bytes = estimate_logits(stage, workload)
    momentary_bytes = max(recomputed, logit_gradient_bytes)
    return TrainingTerms(per_microbatch, end_bytes, logits_bytes, momentary_bytes, host_bytes, moving_bytes)


def count_microbatches_in_flight(workload: Workload, layout: ParallelLayout, stage: int) -> float:
    """Micro-batches whose activations a stage holds at its busiest moment; fractions are chunks of an interleaved one.

    1F1B: p - i on stage i. Interleaved with v chunks: 2(p - i - 1) + (v - 1)p + 1 chunks of 1/v, which on the first
    stage is p(1 + (p - 1)/(pv)). GPipe: all of the step. Zero-bubble (ZB-H1): p on every stage, where i of them wait
    for gradients of weights alone and could free a part. DualPipe: p + 1. Never more than the step has.

    >>> from shapewright.layout import ParallelLayout
    >>> from shapewright.workload import Workload
    >>> layout = ParallelLayout(pipeline_parallel=8, virtual_pipeline=3)
    >>> round(count_microbatches_in_flight(Workload(global_batch_size=64, micro_batch_size=1), layout, 0), 3)
    10.333

    Source: arXiv 2104.04473, section 2.2; arXiv 2205.05198, section 4.2; arXiv 1811.06965, section 2 (GPipe); arXiv
        2401.10241, section 2.3 (ZB-H1); arXiv 2412.19437, table 2 (DualPipe).
    """
    p, v = layout.pipeline_parallel, layout.virtual_pipeline
    in_step = p
    if workload.global_batch_size is not None:
        in_step = ceil_div(workload.global_batch_size, workload.micro_batch_size * layout.data_parallel)
    if layout.pipeline_schedule == "gpipe":
        return in_step
    if layout.pipeline_schedule == "zero-bubble":
        return min(p, in_step)
    if layout.pipeline_schedule == "dualpipe":
        return min(p + 1, in_step)
    if v == 1:
        return min(p - stage, in_step)
    return min(2 * (p - stage - 1) + (v - 1) * p + 1, in_step * v) / v


def estimate_logits(stage: Stage, workload: Workload, element_bytes: float = LOGIT_BYTES) -> float:
    """Logits of one micro-batch on the last stage, split over the vocabulary. [byte]

    Training and encoders need those of every token, generation those of the last one.
    """
    if not stage.is_last:
        return 0.0
    rows = workload.micro_batch_size
    if workload.is_training or stage.config.stack == "encoder":
        rows *= ceil_div(workload.seq_len, stage.layout.context_parallel)
    if workload.is_training and workload.loss_chunks > 1:
        rows = ceil_div(rows, workload.loss_chunks)
    return element_bytes * rows * ceil_div(stage.config.vocab_size, stage.layout.tensor_parallel)
