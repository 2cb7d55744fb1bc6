"""Memory of one device: what is kept over a step, and what the busiest moment needs on top."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import TYPE_CHECKING

from shapewright.config.parameters import count_parameters
from shapewright.memory.activations import (
    LayerBytes,
    count_microbatches_in_flight,
    estimate_layer,
    estimate_logits,
    estimate_training_terms,
)
from shapewright.memory.kv_cache import estimate_kv_cache
from shapewright.memory.stage import Stage, count_stage_parameters, stages_to_compare
from shapewright.memory.states import estimate_states
from shapewright.saved_tensors import list_saved_tensors

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
        host_bytes: What the host keeps for this device: offloaded activations and optimiser states; no part of the
            total. [byte]
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
    host_bytes: float = 0.0
    stage: int = 0

    @property
    def components(self) -> dict[str, float]:
        """Bytes on the device by component. [byte]"""
        return {component: getattr(self, name) for component, name in _COMPONENTS.items()}

    @cached_property
    def total_bytes(self) -> float:
        """Everything on the device together. [byte]"""
        # No conversion: the search asks this of expressions over many shapes.
        total: float = sum(self.components.values())
        return total


_COMPONENTS = {
    spec.name.removesuffix("_bytes"): spec.name
    for spec in fields(MemoryEstimate)
    if spec.name.endswith("_bytes") and spec.name != "host_bytes"
}
"""Fields of an estimate that lie on the device, by what they are called there."""


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
) -> tuple[MemoryEstimate, ...]:
    """Estimate the memory of one device of every pipeline stage, in order.

    Args:
        config: The model.
        workload: What is run.
        layout: How it is spread.

    Assumes: As estimate_memory does.
    """
    return tuple(_estimate(config, workload, layout, None, range(layout.pipeline_parallel)))


def _estimate(
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
    recipe: TrainingRecipe | None,
    indices: Iterable[int],
) -> list[MemoryEstimate]:
    counts, layer_bytes = count_parameters(config), _once_a_kind(config, workload, layout)
    return [_estimate_stage(Stage(config, layout, index), counts, workload, recipe, layer_bytes) for index in indices]


def _once_a_kind(config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> Callable[..., LayerBytes]:
    """estimate_layer, once for each kind of layer, since stages have the same kinds.

    Sizes that a search traces stay out of the key: a hash asks for their values, and its formula would hold for one
    shape alone.
    """

    @cache
    def estimate_kind(*, has_experts: bool, has_cross_attention: bool) -> LayerBytes:
        return estimate_layer(
            config, workload, layout, has_experts=has_experts, has_cross_attention=has_cross_attention
        )

    return lambda *_, **kind: estimate_kind(**kind)


def _estimate_stage(
    stage: Stage,
    counts: ParameterCounts,
    workload: Workload,
    recipe: TrainingRecipe | None,
    layer_bytes: Callable[..., LayerBytes],
) -> MemoryEstimate:
    config, layout = stage.config, stage.layout
    states = estimate_states(count_stage_parameters(stage, counts), workload, layout, recipe)
    logits_bytes = estimate_logits(stage, workload)
    host_bytes = states.host_bytes
    if workload.is_training:
        terms = estimate_training_terms(stage, workload, layer_bytes)
        in_flight = count_microbatches_in_flight(workload, layout, stage.index)
        activations_bytes = terms.on_device_bytes(in_flight) + terms.end_bytes
        host_bytes = host_bytes + terms.host_bytes * in_flight
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
        host_bytes=host_bytes,
        stage=stage.index,
    )


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
