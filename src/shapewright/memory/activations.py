"""Activation memory of one pipeline stage in training, and the logits of the last stage.

The terms are kept apart by how long they live: for each micro-batch in flight on the device or on the host, once at the
end of the model, or only while one layer runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shapewright.core.numeric import ceil_div
from shapewright.core.records import dataclass
from shapewright.memory.frozen import list_kept_tensors, temporary_weight_bytes
from shapewright.memory.stages import Stage
from shapewright.memory.tensors import activation_element_bytes, select_kept_tensors, sum_bytes
from shapewright.workload.alternate_gemms import find_alternate_gemms

if TYPE_CHECKING:
    from shapewright.models.layers import LayerKind
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

LOGIT_BYTES = 4.0  # cross entropy keeps its softmax in fp32 (arXiv 2205.05198 section 4.3); samplers read fp32 logits
_MASK_BYTES = 1.0  # torch.native_dropout keeps a bool per element
_LAYERS_IN_TRANSIT = 2  # of offloaded activations: the layer that runs, and the one being copied


@dataclass(frozen=True)
class LayerBytes:
    """Saved tensors of one layer and one micro-batch: those that stay, and those that are recomputed. [byte]"""

    kept_bytes: float
    recomputed_bytes: float


def estimate_layer(
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
    *,
    kind: LayerKind,
    has_cross_attention: bool,
) -> LayerBytes:
    """Estimate the saved tensors of one layer under the workload's recomputation.

    Args:
        layout: Degrees of parallelism; the pipeline's schedule and stages have no effect.
        kind: Mixer and MLP of the layer.
    """
    tensors = list_kept_tensors(config, workload, layout, kind, has_cross_attention=has_cross_attention)
    alternate = find_alternate_gemms(config, workload, layout, kind, has_cross_attention=has_cross_attention)
    kept_bytes = sum_bytes(select_kept_tensors(tensors, workload.recompute, workload.recompute_modules, alternate))
    return LayerBytes(kept_bytes, sum_bytes(tensors) - kept_bytes)


@dataclass(frozen=True)
class ActivationTerms:
    """Activation memory of one stage by lifetime, independent of the number of micro-batches in flight.

    Attributes:
        microbatch_bytes: On the device for each micro-batch in flight. [byte]
        end_bytes: On the device once, at the end of the model, without the logits. [byte]
        logits_bytes: Softmax of the logits. [byte]
        gpipe_end_bytes: Of both, what GPipe keeps for each micro-batch in flight. [byte]
        transient_bytes: Alive only briefly: the recomputed tensors of one layer or the gradient of the logits, which
            is freed before a layer is recomputed. [byte]
        host_bytes: On the host for each micro-batch in flight. [byte]
        in_transit_bytes: Offloaded activations that the device holds at most: those of the layer that runs and of the
            one being copied. [byte]
    """

    microbatch_bytes: float
    end_bytes: float
    logits_bytes: float
    transient_bytes: float
    host_bytes: float = 0.0
    in_transit_bytes: float = 0.0
    gpipe_end_bytes: float = 0.0

    def on_device_bytes(self, in_flight: float) -> float:
        """Activations on the device for a number of micro-batches in flight. [byte]"""
        on_device_bytes = self.microbatch_bytes * in_flight
        if not self.host_bytes:
            return on_device_bytes
        return on_device_bytes + min(self.in_transit_bytes, self.host_bytes * in_flight)


def estimate_activation_terms(
    stage: Stage, workload: Workload, layer_bytes: Callable[..., LayerBytes] = estimate_layer
) -> ActivationTerms:
    """Estimate the activation memory of one stage in training.

    Args:
        layer_bytes: estimate_layer, or a cached form of it.
    """
    config, layout = stage.config, stage.layout
    per_microbatch = recomputed = largest = temporary = 0.0
    # Layers without a backward pass save nothing.
    trained, again = (
        {(kind, has_cross): num_layers for kind, has_cross, num_layers in kinds}
        for kinds in (stage.list_trained_kinds(workload), stage.list_recomputed_kinds(workload))
    )
    for kind, has_cross_attention, _ in stage.layer_kinds:
        num_layers = trained.get((kind, has_cross_attention), 0)
        layer = layer_bytes(config, workload, layout, kind=kind, has_cross_attention=has_cross_attention)
        per_microbatch += num_layers * layer.kept_bytes
        if workload.recompute_layers is not None and workload.recompute == "full":
            whole = num_layers - again.get((kind, has_cross_attention), 0)
            per_microbatch += whole * layer.recomputed_bytes
            largest = max(largest, layer.recomputed_bytes + layer.kept_bytes) if whole else largest
        largest = max(largest, layer.kept_bytes)
        recomputed = max(recomputed, layer.recomputed_bytes)
        if workload.has_adapters:
            one = temporary_weight_bytes(config, workload, layout, kind)
            temporary = max(temporary, one)
    host_bytes = in_transit_bytes = 0.0
    if workload.offload_activations:
        host_bytes, in_transit_bytes, per_microbatch = per_microbatch, _LAYERS_IN_TRANSIT * largest, 0.0
    residual_rows = workload.micro_batch_size * ceil_div(workload.seq_len, layout.context_parallel)
    if layout.sequence_parallel:
        residual_rows = ceil_div(residual_rows, layout.tensor_parallel)
    residual_elements = residual_rows * config.hidden_size
    residual_bytes = activation_element_bytes(workload.dtype) * residual_elements
    if stage.is_first:
        per_microbatch += _MASK_BYTES * residual_elements * (config.hidden_dropout > 0)
        per_microbatch += residual_bytes * config.embedding_norm
    # Inputs of the final norm and of the logit GEMM, once more for each layer of multi-token prediction. The last stage
    # starts the backward pass at once, so only one micro-batch has them, except with GPipe.
    num_heads = 1 + config.num_mtp_layers
    end_bytes = num_heads * residual_bytes * (1 + config.has_final_norm) if stage.is_last else 0.0
    logits_bytes = estimate_logits(stage, workload)
    transient_bytes = max(recomputed + temporary, estimate_logit_gradient(stage, workload))
    rows = workload.micro_batch_size * ceil_div(workload.seq_len, layout.context_parallel)
    # A loss in chunks, and Liger's, keep no logits for the backward pass.
    has_logits = stage.is_last and config.vocab_size and workload.kernels != "fused"
    keeps_logits = has_logits and _count_loss_chunks(stage, workload, rows) == 1
    gpipe_end_bytes = end_bytes + (logits_bytes if keeps_logits else 0.0)
    return ActivationTerms(
        per_microbatch, end_bytes, logits_bytes, transient_bytes, host_bytes, in_transit_bytes, gpipe_end_bytes
    )


def count_microbatches_in_flight(workload: Workload, layout: ParallelLayout, stage: int) -> float:
    """Count the micro-batches whose activations a stage holds at its peak; chunks of an interleaved one are fractions.

    1F1B: p - i on stage i. Interleaved with v chunks: 2(p - i - 1) + (v - 1)p + 1 chunks of 1/v, which on the first
    stage is p(1 + (p - 1)/(pv)). GPipe: all of the step. Zero-bubble (ZB-H1): p on every stage, of which i wait only
    for their weight gradients and could free a part. DualPipe: p + 1. The step's number of micro-batches is the limit.

    >>> from shapewright.workload.layout import ParallelLayout
    >>> from shapewright.workload.workload import Workload
    >>> layout = ParallelLayout(pipeline_parallel=8, virtual_pipeline=3)
    >>> round(count_microbatches_in_flight(Workload(global_batch_size=64, micro_batch_size=1), layout, 0), 3)
    10.333

    Source: arXiv 2104.04473, section 2.2; arXiv 2205.05198, section 4.2; arXiv 1811.06965, section 2 (GPipe); arXiv
        2401.10241, section 2.3 (ZB-H1); arXiv 2412.19437, table 2 (DualPipe).
    """
    p, v = layout.pipeline_parallel, layout.virtual_pipeline
    in_step = layout.default_microbatches
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


def estimate_logits(stage: Stage, workload: Workload) -> float:
    """Estimate the logits of one micro-batch on the last stage, split over the vocabulary. [byte]

    Training and encoders compute logits of every token, generation those of the last token. Those of multi-token
    prediction exist beside them until the backward pass, unless the loss is computed in chunks.

    Source: NVIDIA/Megatron-LM, megatron/core/transformer/multi_token_prediction.py (process_mtp_loss).
    """
    one_bytes = _logits_of_one_loss(stage, workload, LOGIT_BYTES)
    config, rows = stage.config, workload.micro_batch_size * ceil_div(workload.seq_len, stage.layout.context_parallel)
    if not workload.is_training or not config.num_mtp_layers or _count_loss_chunks(stage, workload, rows) > 1:
        return one_bytes
    return (1 + config.num_mtp_layers) * one_bytes


def estimate_logit_gradient(stage: Stage, workload: Workload) -> float:
    """Estimate the gradient of the logits of one loss; a fused cross entropy writes it over the logits. [byte]"""
    if workload.kernels == "fused":
        return 0.0
    return _logits_of_one_loss(stage, workload, activation_element_bytes(workload.dtype))


def _logits_of_one_loss(stage: Stage, workload: Workload, element_bytes: float) -> float:
    if not stage.is_last or not stage.config.vocab_size:
        return 0.0
    rows = workload.micro_batch_size
    if workload.is_training or stage.config.stack == "encoder":
        rows *= ceil_div(workload.seq_len, stage.layout.context_parallel)
    if workload.is_training:
        rows = ceil_div(rows, _count_loss_chunks(stage, workload, rows))
        if workload.kernels == "fused":
            element_bytes = min(element_bytes, activation_element_bytes(workload.dtype))
    return element_bytes * rows * ceil_div(stage.config.vocab_size, stage.layout.tensor_parallel)


def _count_loss_chunks(stage: Stage, workload: Workload, rows: int) -> int:
    config, degree = stage.config, stage.layout.tensor_parallel
    return int(workload.count_loss_chunks(rows, config.embedding_size, config.vocab_size, degree))
