"""Memory of one device: what is kept over a step, and what the busiest moment needs on top."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING

from shapewright.config.parameters import count_parameters
from shapewright.memory.activations import (
    SavedTensor,
    activation_element_bytes,
    ceil_div,
    keep_tensors,
    list_saved_tensors,
)
from shapewright.memory.kv_cache import estimate_kv_cache
from shapewright.memory.states import DeviceParameters, count_device_parameters, estimate_states

if TYPE_CHECKING:
    from shapewright.config.parameters import ParameterCounts
    from shapewright.config.transformer import TransformerConfig
    from shapewright.layout import ParallelLayout
    from shapewright.optimizers import TrainingRecipe
    from shapewright.workload import Workload

CUDA_CONTEXT_BYTES = 0.9e9
"""CUDA context and kernels of one process: 0.9 GB with torch 1.13 to 2.1 on A100 with eager loading (about half with
lazy loading), after stas00/ml-engineering, training/performance. Buffers of NCCL and of the allocator are not in it."""

ALLOCATOR_BAND_FRACTION = 0.10
"""What allocator fragmentation, communication buffers and gradients of activations may add to an estimate. Assumed:
the estimate leaves them out, and they have not been measured. With more to spare a job fits; with less, it may."""

_LOGIT_BYTES = 4.0  # cross entropy keeps its softmax in fp32 (arXiv 2205.05198 section 4.3); samplers read fp32 logits
_MASK_BYTES = 1.0  # torch.native_dropout keeps a bool per element


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of one device of the busiest pipeline stage.

    Attributes:
        weights_bytes: Weights that the GEMMs read. [byte]
        gradients_bytes: Gradients, training only. [byte]
        optimizer_bytes: Master weights and moments, training only. [byte]
        activations_bytes: Training: what the layers, the embedding and the final norm keep for the backward pass, of
            all micro-batches in flight. Inference: the tensors of one layer at work. [byte]
        logits_bytes: Softmax of the logits in fp32 (training), logits in fp32 (inference). [byte]
        kv_cache_bytes: Keys and values of all tokens, inference only. [byte]
        gathered_bytes: Weights and gradients of the layers at work, gathered by ZeRO stage 3. [byte]
        workspace_bytes: What exists for a moment only: recomputed tensors of one layer, the gradient of the logits.
            [byte]
        runtime_bytes: Context of the device's runtime. [byte]
        stage: The pipeline stage that this is, counted from 0.
    """

    weights_bytes: float
    gradients_bytes: float
    optimizer_bytes: float
    activations_bytes: float
    logits_bytes: float
    kv_cache_bytes: float
    gathered_bytes: float = 0.0
    workspace_bytes: float
    runtime_bytes: float
    stage: int = 0

    @cached_property
    def total_bytes(self) -> float:
        """Everything together. [byte]"""
        # No conversion: the search asks this of expressions over many shapes.
        total: float = sum(getattr(self, spec.name) for spec in fields(self) if spec.name.endswith("_bytes"))
        return total


def estimate_memory(
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
    *,
    recipe: TrainingRecipe | None = None,
) -> MemoryEstimate:
    """Estimate the memory of one device of the pipeline stage that needs most.

    Args:
        config: The model.
        workload: What is run.
        layout: How it is spread.
        recipe: Bytes of states a parameter in training; by default those of the workload's optimiser.

    Assumes: The allocator wastes nothing; communication buffers and gradients of
        activations, which reuse freed memory, are left out. Expect some percent on top.

    >>> from shapewright.config.transformer import TransformerConfig
    >>> from shapewright.layout import ParallelLayout
    >>> from shapewright.workload import Workload
    >>> gpt2_xl = TransformerConfig(hidden_size=1600, num_layers=48, num_heads=25, vocab_size=50257)
    >>> memory = estimate_memory(gpt2_xl, Workload(phase="decode", micro_batch_size=1), ParallelLayout())
    >>> round(memory.weights_bytes / 1e9, 2)
    3.27
    """
    indices = stages_to_compare(config, layout)
    return max(_estimate(config, workload, layout, recipe, indices), key=lambda estimate: estimate.total_bytes)


def estimate_stages(
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
    *,
    recipe: TrainingRecipe | None = None,
) -> tuple[MemoryEstimate, ...]:
    """Estimate the memory of one device of every pipeline stage, in order.

    Args:
        config: The model.
        workload: What is run.
        layout: How it is spread.
        recipe: Bytes of states a parameter in training; by default 18 (mixed AdamW) or 16 (fp32 AdamW).

    Assumes: As estimate_memory does.
    """
    return tuple(_estimate(config, workload, layout, recipe, range(layout.pipeline_parallel)))


def _estimate(
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
    recipe: TrainingRecipe | None,
    indices: Iterable[int],
) -> list[MemoryEstimate]:
    counts = count_parameters(config)
    return [_estimate_stage(Stage(config, layout, index), counts, workload, recipe) for index in indices]


class Stage:
    """Layers of one pipeline stage: consecutive ones, as many on each stage but the last."""

    def __init__(self, config: TransformerConfig, layout: ParallelLayout, index: int) -> None:
        self.config, self.layout, self.index = config, layout, index
        self.is_first = index == 0
        self.is_last = index == layout.pipeline_parallel - 1
        per_stage = ceil_div(config.num_layers, layout.pipeline_parallel)
        first, end = index * per_stage, min((index + 1) * per_stage, config.num_layers)
        num_layers = max(end - first, 0)
        if _are_alike(config):
            self.windows = {config.window_of_layer(0): num_layers}
            self.moe_layers = num_layers if config.is_moe_layer(0) else 0
        else:
            layers = range(first, end)
            self.windows = dict(Counter(config.window_of_layer(layer) for layer in layers))
            self.moe_layers = sum(config.is_moe_layer(layer) for layer in layers)
        self.num_layers = num_layers
        self.dense_layers = num_layers - self.moe_layers
        self.encoder_layers = ceil_div(config.num_encoder_layers, layout.pipeline_parallel)

    def layer_kinds(self) -> Iterable[tuple[bool, bool, int]]:
        """Whether a kind of layer has experts, whether it has cross-attention, and how many there are."""
        cross = self.config.has_cross_attention
        kinds = ((True, cross, self.moe_layers), (False, cross, self.dense_layers), (False, False, self.encoder_layers))
        return (kind for kind in kinds if kind[2])


def _are_alike(config: TransformerConfig) -> bool:
    return len(config.attention_windows) <= 1 and len(config.moe_layers) <= 1


def stages_to_compare(config: TransformerConfig, layout: ParallelLayout) -> Iterable[int]:
    """The first stage holds most micro-batches, the last the logits; those between matter where layers differ."""
    last = min(layout.pipeline_parallel, config.num_layers) - 1
    return (0, layout.pipeline_parallel - 1) if _are_alike(config) else (*range(last), layout.pipeline_parallel - 1)


def _estimate_stage(
    stage: Stage, counts: ParameterCounts, workload: Workload, recipe: TrainingRecipe | None
) -> MemoryEstimate:
    config, layout = stage.config, stage.layout
    states = estimate_states(count_stage_parameters(stage, counts), workload, layout, recipe)
    logits_bytes = _logits_bytes(stage, workload, _LOGIT_BYTES)
    if workload.is_training:
        terms = estimate_training_terms(stage, workload)
        in_flight = count_microbatches_in_flight(workload, layout, stage.index)
        activations_bytes = terms.microbatch_bytes * in_flight + terms.end_bytes
        workspace_bytes = terms.momentary_bytes
    else:
        activations_bytes, workspace_bytes = _inference_activations(stage, workload), 0.0
    return MemoryEstimate(
        weights_bytes=states.weights_bytes,
        gradients_bytes=states.gradients_bytes,
        optimizer_bytes=states.optimizer_bytes,
        activations_bytes=activations_bytes,
        logits_bytes=logits_bytes,
        kv_cache_bytes=estimate_kv_cache(config, workload, layout, stage.windows.items()),
        gathered_bytes=states.gathered_bytes,
        workspace_bytes=workspace_bytes,
        runtime_bytes=CUDA_CONTEXT_BYTES,
        stage=stage.index,
    )


def count_stage_parameters(stage: Stage, counts: ParameterCounts) -> DeviceParameters:
    """Count what one device of a stage holds."""
    return count_device_parameters(
        stage.config,
        counts,
        stage.layout,
        moe_layers=stage.moe_layers,
        dense_layers=stage.dense_layers,
        encoder_layers=stage.encoder_layers,
        is_first=stage.is_first,
        is_last=stage.is_last,
    )


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
    kept_bytes = _sum_bytes(keep_tensors(tensors, workload.recompute))
    return LayerBytes(kept_bytes, _sum_bytes(tensors) - kept_bytes)


@dataclass(frozen=True)
class TrainingTerms:
    """Activations of one stage, before the schedule says how many micro-batches are in flight.

    Attributes:
        microbatch_bytes: Kept of each micro-batch in flight. [byte]
        end_bytes: Kept once, at the end of the model, without the logits. [byte]
        logits_bytes: Softmax of the logits. [byte]
        momentary_bytes: What exists for a moment: the layer computed again, or the gradient of the logits, which is
            gone before the first layer is computed again. [byte]
    """

    microbatch_bytes: float
    end_bytes: float
    logits_bytes: float
    momentary_bytes: float


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
    per_microbatch = recomputed = 0.0
    for has_experts, has_cross_attention, num_layers in stage.layer_kinds():
        layer = layer_bytes(config, workload, layout, has_experts=has_experts, has_cross_attention=has_cross_attention)
        per_microbatch += num_layers * layer.kept_bytes
        if workload.recompute_layers is not None and workload.recompute == "full":
            # The first layers of the stage are computed again; of a mixed stage an equal share of each kind.
            share = min(workload.recompute_layers / max(stage.num_layers, 1), 1.0)
            per_microbatch += (1.0 - share) * num_layers * layer.recomputed_bytes
        recomputed = max(recomputed, layer.recomputed_bytes)
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
    logit_gradient_bytes = _logits_bytes(stage, workload, activation_element_bytes(workload.dtype))
    logits_bytes = _logits_bytes(stage, workload, _LOGIT_BYTES)
    return TrainingTerms(per_microbatch, end_bytes, logits_bytes, max(recomputed, logit_gradient_bytes))


def count_microbatches_in_flight(workload: Workload, layout: ParallelLayout, stage: int) -> float:
    """Micro-batches whose activations a stage holds at its busiest moment; fractions are chunks of an interleaved one.

    1F1B: p - i on stage i. Interleaved with v chunks: 2(p - i - 1) + (v - 1)p + 1 chunks of 1/v, which on the first
    stage is p(1 + (p - 1)/(pv)). GPipe: all of the step. Zero-bubble (ZB-H1): p on every stage, where i of them wait
    for gradients of weights alone and could free a part. Never more than the step has.

    >>> from shapewright.layout import ParallelLayout
    >>> from shapewright.workload import Workload
    >>> layout = ParallelLayout(pipeline_parallel=8, virtual_pipeline=3)
    >>> round(count_microbatches_in_flight(Workload(global_batch_size=64, micro_batch_size=1), layout, 0), 3)
    10.333

    Source: arXiv 2104.04473, section 2.2; arXiv 2205.05198, section 4.2; arXiv 1811.06965, section 2 (GPipe); arXiv
        2401.10241, section 2.3 (ZB-H1).
    """
    p, v = layout.pipeline_parallel, layout.virtual_pipeline
    in_step = p
    if workload.global_batch_size is not None:
        in_step = ceil_div(workload.global_batch_size, workload.micro_batch_size * layout.data_parallel)
    if layout.pipeline_schedule == "gpipe":
        return in_step
    if layout.pipeline_schedule == "zero-bubble":
        return min(p, in_step)
    if v == 1:
        return min(p - stage, in_step)
    return min(2 * (p - stage - 1) + (v - 1) * p + 1, in_step * v) / v


def _inference_activations(stage: Stage, workload: Workload) -> float:
    """Residual stream before and after a block, and the tensors of the widest block. [byte]"""
    widest = 0.0
    for has_experts, has_cross_attention, _ in stage.layer_kinds():
        blocks: dict[str, float] = {}
        for tensor in list_saved_tensors(
            stage.config, workload, stage.layout, has_experts=has_experts, has_cross_attention=has_cross_attention
        ):
            block, _, role = tensor.name.partition(".")
            # Attention weights exist beside the scores that they are the softmax of.
            copies = 2.0 if role == "weights" else 1.0
            blocks[block] = blocks.get(block, 0.0) + copies * tensor.num_bytes
        residual_bytes = 2.0 * blocks.pop("layer")
        widest = max(widest, residual_bytes + max(blocks.values()))
    return widest


def _logits_bytes(stage: Stage, workload: Workload, element_bytes: float) -> float:
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


def _sum_bytes(tensors: Iterable[SavedTensor]) -> float:
    return sum(tensor.num_bytes for tensor in tensors)
