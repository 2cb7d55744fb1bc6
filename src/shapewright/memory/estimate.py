"""Memory of one device: the sum of states, activations, logits, KV cache and runtime, for the stage that needs most."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import fields, replace
from functools import cache, cached_property, partial, reduce
from typing import TYPE_CHECKING

from shapewright.core.deadline import check_deadline
from shapewright.core.dtypes import get_dtype
from shapewright.core.numeric import ceil_div, maximum, minimum
from shapewright.core.records import dataclass
from shapewright.memory.activations import (
    LayerBytes,
    count_microbatches_in_flight,
    estimate_activation_terms,
    estimate_layer,
    estimate_logits,
)
from shapewright.memory.saved_tensors import list_layer_tensors
from shapewright.memory.stages import Stage, peak_stage_candidates
from shapewright.memory.states import count_stage_parameters, estimate_states
from shapewright.memory.tensors import LAYER, activation_element_bytes
from shapewright.models.compressed_attention import count_entries, make_compressed
from shapewright.models.layers import ATTENTION, COMPRESSED_LAYERS, CROSS_ATTENTION, mixers_of
from shapewright.models.mixers import STATE_BYTES, make_mixer
from shapewright.models.parameters import count_parameters
from shapewright.workload.images import count_image_tokens, tower_job
from shapewright.workload.projection import training_recipe

if TYPE_CHECKING:
    from shapewright.models.layers import LayerKind
    from shapewright.models.parameters import ParameterCounts
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.optimizers import TrainingRecipe
    from shapewright.workload.workload import Workload


CUDA_CONTEXT_BYTES = 0.9e9
"""CUDA context and kernels of one process, without buffers of NCCL and of the allocator: 0.9 GB with torch 1.13 to 2.1
on A100 with eager loading, about half with lazy loading. Source: stas00/ml-engineering, training/performance."""

ALLOCATOR_BAND_FRACTION = 0.10
"""Assumed margin for allocator fragmentation, communication buffers and gradients of activations, which the estimate
leaves out; unmeasured. A job with more free memory fits, one with less may not."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Memory of one device of one pipeline stage.

    Attributes:
        weights_bytes: Weights that the GEMMs read. [byte]
        gradients_bytes: Gradients, training only. [byte]
        optimizer_bytes: Master weights and moments, training only. [byte]
        activations_bytes: Training: tensors that layers, embedding and final norm save for the backward pass, over all
            micro-batches in flight. Inference: the tensors of one running layer. [byte]
        logits_bytes: Softmax of the logits in fp32 (training), logits in fp32 (inference). [byte]
        kv_cache_bytes: Keys and values of all tokens, inference only. [byte]
        gathered_bytes: Weights and gradients of the running layers, gathered by ZeRO stage 3. [byte]
        workspace_bytes: Tensors alive only briefly: recomputed tensors of one layer, the gradient of the logits. [byte]
        runtime_bytes: Context of the device's runtime. [byte]
        host_bytes: Offloaded activations and optimizer states in the host's memory; not part of the total. [byte]
        stage: Index of the pipeline stage, from 0.
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
        """Sum of all components on the device. [byte]"""
        # Not converted to float: the search evaluates it on expressions over many shapes.
        total: float = sum(self.components.values())
        return total


_COMPONENTS = {
    spec.name.removesuffix("_bytes"): spec.name
    for spec in fields(MemoryEstimate)
    if spec.name.endswith("_bytes") and spec.name != "host_bytes"
}
"""Field of each component in the device's memory, by the component's displayed name."""


def estimate_memory(
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
    *,
    recipe: TrainingRecipe | None = None,
) -> MemoryEstimate:
    """Estimate the memory of one device of the pipeline stage that needs most.

    Args:
        recipe: State bytes per parameter in training; by default those of the workload's optimizer.

    Assumes: No allocator fragmentation; communication buffers and gradients of activations, which reuse freed memory,
        are left out. Expect a few percent more in practice.

    >>> from shapewright.models.transformer import TransformerConfig
    >>> from shapewright.workload.layout import ParallelLayout
    >>> from shapewright.workload.workload import Workload
    >>> gpt2_xl = TransformerConfig(hidden_size=1600, num_layers=48, num_heads=25, vocab_size=50257)
    >>> memory = estimate_memory(gpt2_xl, Workload(phase="decode", micro_batch_size=1), ParallelLayout())
    >>> round(memory.weights_bytes / 1e9, 2)
    3.27
    """
    check_deadline()
    config = _loaded_part(config, workload)
    caches = not workload.is_training and config.is_causal
    indices = peak_stage_candidates(
        config, layout, partial(_count_cached_tokens, config, workload, layout) if caches else None
    )
    stages = [Stage(config, layout, index) for index in indices]
    return max(_estimate(stages, workload, recipe), key=lambda estimate: estimate.total_bytes)


def estimate_stages(
    config: TransformerConfig,
    workload: Workload,
    layout: ParallelLayout,
) -> tuple[MemoryEstimate, ...]:
    """Estimate the memory of one device of every pipeline stage, in order.

    Assumes: As estimate_memory does.
    """
    config = _loaded_part(config, workload)
    stages = [Stage(config, layout, index) for index in range(layout.pipeline_parallel)]
    if workload.is_training:
        return tuple(_estimate(stages, workload, None))
    # In inference, stages with equal layers and ends need equal memory.
    kinds = [(stage.is_first, stage.is_last, tuple(stage.kinds.items()), stage.encoder_layers) for stage in stages]
    first = dict(zip(reversed(kinds), reversed(stages), strict=True))
    estimates = dict(zip(first, _estimate(first.values(), workload, None), strict=True))
    found = (estimates[kind] for kind in kinds)
    return tuple(each if each.stage == index else replace(each, stage=index) for index, each in enumerate(found))


def _loaded_part(config: TransformerConfig, workload: Workload) -> TransformerConfig:
    """Return the part of a model that is loaded: inference leaves out the layers of multi-token prediction.

    Where they draft tokens, serving plans count them as a draft model (Speculation.draft_memory_fraction).

    Source: vllm-project/vllm, vllm/model_executor/models/deepseek_v2.py, and sgl-project/sglang,
        python/sglang/srt/models/deepseek_v2.py (load_weights skips their weights, which a draft model loads).
    """
    return config if workload.is_training or not config.num_mtp_layers else replace(config, num_mtp_layers=0)


def estimate_stage_caches(config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> tuple[float, ...]:
    """Estimate the KV cache of one device of every pipeline stage, in order. [byte]"""
    stages = (Stage(config, layout, index) for index in range(layout.pipeline_parallel))
    return tuple(estimate_kv_cache(config, workload, layout, stage.kinds.items()) for stage in stages)


def _estimate(stages: Collection[Stage], workload: Workload, recipe: TrainingRecipe | None) -> list[MemoryEstimate]:
    """Estimate the memory of one device of some stages of one job."""
    config, layout = next((stage.config, stage.layout) for stage in stages)
    counts, layer_bytes = count_parameters(config), _cached_estimate_layer(config, workload, layout)
    return [_estimate_stage(stage, counts, workload, recipe, layer_bytes) for stage in stages]


def _cached_estimate_layer(
    config: TransformerConfig, workload: Workload, layout: ParallelLayout
) -> Callable[..., LayerBytes]:
    """Return a form of estimate_layer that evaluates each kind of layer once, as stages have the same kinds.

    Traced sizes of a search are no part of the cache key: hashing one would need its value, and the traced formula
    would then hold for a single shape.
    """

    @cache
    def estimate_kind(*, kind: LayerKind, has_cross_attention: bool) -> LayerBytes:
        return estimate_layer(config, workload, layout, kind=kind, has_cross_attention=has_cross_attention)

    return lambda *_, **kind: estimate_kind(**kind)


def _estimate_stage(
    stage: Stage,
    counts: ParameterCounts,
    workload: Workload,
    recipe: TrainingRecipe | None,
    layer_bytes: Callable[..., LayerBytes],
    tower_in_flight: float | None = None,
) -> MemoryEstimate:
    """Estimate the memory of one device of one stage.

    Args:
        tower_in_flight: For a vision tower, micro-batches in flight on the stage that it runs on. Each of them keeps
            the end of the tower too, as its backward pass starts only after that of the language model.
    """
    config, layout = stage.config, stage.layout
    if recipe is None and workload.is_training:
        recipe = training_recipe(config, workload)
    states = estimate_states(count_stage_parameters(stage, counts, workload), workload, layout, recipe)
    logits_bytes = estimate_logits(stage, workload)
    host_bytes = states.host_bytes
    if workload.is_training:
        terms = estimate_activation_terms(stage, workload, layer_bytes)
        in_flight = tower_in_flight or count_microbatches_in_flight(workload, layout, stage.index)
        activations_bytes = terms.on_device_bytes(in_flight) + terms.end_bytes * (tower_in_flight or 1.0)
        logits_bytes *= tower_in_flight or 1.0
        if layout.pipeline_schedule == "gpipe" and not tower_in_flight:
            # All micro-batches of a step pass the last stage before the first backward pass.
            more = in_flight - 1.0
            logits_bytes += more * (terms.gpipe_end_bytes - terms.end_bytes)
            activations_bytes += more * terms.end_bytes
        host_bytes = host_bytes + terms.host_bytes * in_flight
        workspace_bytes = terms.transient_bytes
    else:
        in_flight, activations_bytes, workspace_bytes = 1.0, _inference_activations(stage, workload), 0.0
    own = MemoryEstimate(
        weights_bytes=states.weights_bytes,
        gradients_bytes=states.gradients_bytes,
        optimizer_bytes=states.optimizer_bytes,
        activations_bytes=activations_bytes,
        logits_bytes=logits_bytes,
        kv_cache_bytes=estimate_kv_cache(config, workload, layout, stage.kinds.items()),
        gathered_bytes=states.gathered_bytes,
        workspace_bytes=workspace_bytes,
        runtime_bytes=CUDA_CONTEXT_BYTES,
        host_bytes=host_bytes,
        stage=stage.index,
    )
    has_images = config.vision is not None and workload.images > 0
    return _add_tower(own, stage, workload, in_flight) if has_images and stage.is_first else own


def _add_tower(own: MemoryEstimate, stage: Stage, workload: Workload, in_flight: float) -> MemoryEstimate:
    """Add the vision tower to the first stage: its states, and what it saves of every micro-batch in flight."""
    tower, job, layout = tower_job(stage.config, workload, stage.layout)
    added = _estimate_stage(
        Stage(tower, layout, 0),
        count_parameters(tower),
        job,
        None,
        _cached_estimate_layer(tower, job, layout),
        in_flight,
    )
    saved_bytes = added.activations_bytes + added.logits_bytes
    if job.last_layers == 0:  # without a backward pass nothing is saved
        added, saved_bytes = replace(added, workspace_bytes=0.0, host_bytes=0.0), 0.0
    if workload.is_training:
        activations_bytes = own.activations_bytes + saved_bytes
    else:  # the tower runs before the language model
        activations_bytes = maximum(own.activations_bytes, saved_bytes)
    return replace(
        own,
        weights_bytes=own.weights_bytes + added.weights_bytes,
        gradients_bytes=own.gradients_bytes + added.gradients_bytes,
        optimizer_bytes=own.optimizer_bytes + added.optimizer_bytes,
        gathered_bytes=max(own.gathered_bytes, added.gathered_bytes),
        activations_bytes=activations_bytes,
        workspace_bytes=max(own.workspace_bytes, added.workspace_bytes),
        host_bytes=own.host_bytes + added.host_bytes,
    )


def _inference_activations(stage: Stage, workload: Workload) -> float:
    """Estimate the residual stream before and after a block and the tensors of the widest block. [byte]"""
    widest = 0.0
    for kind, has_cross_attention, _ in stage.layer_kinds:
        blocks: dict[str, float] = {}
        for tensor in list_layer_tensors(
            stage.config, workload, stage.layout, kind, has_cross_attention=has_cross_attention
        ):
            # Attention weights and the scores that they are the softmax of exist at the same time.
            copies = 2.0 if tensor.role == "weights" else 1.0
            blocks[tensor.block] = blocks.get(tensor.block, 0.0) + copies * tensor.num_bytes
        residual_bytes = 2.0 * blocks.pop(LAYER)
        widest = maximum(widest, residual_bytes + reduce(maximum, blocks.values(), 0.0))
    return widest


def count_cached_elements(config: TransformerConfig, tensor_parallel: int = 1) -> int:
    """Count the elements that one token adds to the KV cache of one layer on one device.

    A key and a value of each key-value head; with MLA the latent and the rotary key that all heads share, complete on
    every tensor-parallel rank (arXiv 2405.04434, section 2.1.2).

    >>> from shapewright.models.transformer import TransformerConfig
    >>> llama = TransformerConfig(hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, vocab_size=128256)
    >>> 2 * 32 * count_cached_elements(llama)  # bf16, 32 layers: bytes a token
    131072
    """
    if config.is_mla:
        return config.kv_lora_rank + config.qk_rope_head_dim + config.index_head_dim
    return ceil_div(config.num_kv_heads, tensor_parallel) * (config.head_dim + config.v_head_dim)


def estimate_kv_cache(
    config: TransformerConfig, workload: Workload, layout: ParallelLayout, kinds: Iterable[tuple[LayerKind, int]]
) -> float:
    """Estimate the KV cache of one device at the end of the pass, states of linear attention included. [byte]

    Args:
        workload: Sequences, cached and new tokens, dtype of the cache.
        layout: Degrees of parallelism; the context axis splits the cached tokens.
        kinds: Pairs of a kind of layer and the number of the stage's layers of it.

    Assumes: A layer with a window drops tokens that no later token can attend to. The decoder of an encoder-decoder
        has processed its start token and ``context_len`` more, and every layer also caches keys and values of
        ``seq_len`` encoder tokens; layers of cross-attention to images cache those of their tokens. A paged cache
        (kv_block_tokens above 1; arXiv 2309.06180, section 4) does not share blocks between sequences.
    """
    if workload.is_training or config.stack == "encoder":
        return 0.0
    tokens = elements = 0
    states_bytes: float = 0.0
    for kind, num_layers in kinds:
        if kind.layer_type in COMPRESSED_LAYERS:
            elements += num_layers * _count_compressed_elements(config, workload, kind.layer_type)
        states_bytes += num_layers * estimate_layer_state(config, workload, kind.layer_type, layout.tensor_parallel)
        tokens += num_layers * _count_cached_tokens(config, workload, layout, kind)
        if kind.layer_type == CROSS_ATTENTION:
            tokens += num_layers * _round_up(count_image_tokens(config, workload), workload.kv_block_tokens)
        elif config.has_cross_attention and kind.has_attention:
            source_len = ceil_div(workload.seq_len, layout.context_parallel)
            tokens += num_layers * _round_up(source_len, workload.kv_block_tokens)
    width = get_dtype(workload.kv_cache_dtype or workload.dtype).num_bytes
    cached = width * (tokens * count_cached_elements(config, layout.tensor_parallel) + elements)
    return workload.micro_batch_size * (cached + states_bytes)


def _count_compressed_elements(config: TransformerConfig, workload: Workload, layer_type: str) -> int:
    """Count the elements of one sequence in the cache of a layer of compressed attention: window and entries.

    Keys are values, and every rank of the tensor axis has them.
    """
    layer, block = make_compressed(config, layer_type), workload.kv_block_tokens
    nearest = _round_up(minimum(config.compressed_window, workload.kv_len), block) * config.head_dim
    return nearest + sum(
        _round_up(count_entries(each, workload.kv_len), block) * each.head_dim for each in layer.compressors
    )


def _count_cached_tokens(config: TransformerConfig, workload: Workload, layout: ParallelLayout, kind: LayerKind) -> int:
    """Count the tokens of one sequence in the KV cache of a layer's self-attention on one device."""
    if not kind.has_attention:
        return 0
    length = workload.context_len + 1 if config.has_cross_attention else workload.kv_len
    kept = minimum(kind.window, length) if kind.window else length
    return _round_up(ceil_div(kept, layout.context_parallel), workload.kv_block_tokens)


def estimate_layer_state(
    config: TransformerConfig, workload: Workload, layer_type: str, tensor_parallel: int = 1
) -> float:
    """Estimate the state that one sequence keeps in a layer besides keys and values, whatever its length. [byte]

    The state of a scan in fp32, and the last inputs of a convolution, or of the compressors of keys, in the format of
    activations.

    >>> from shapewright.models.transformer import TransformerConfig
    >>> from shapewright.workload.workload import Workload
    >>> config = TransformerConfig(hidden_size=2048, num_layers=4, num_heads=16, vocab_size=100, head_dim=128,
    ...                            layer_types=("gated_delta_net",), linear_num_value_heads=32)
    >>> estimate_layer_state(config, Workload(phase="decode"), "gated_delta_net")  # 32 * 128 * 128 * 4 + 12288 * 3 * 2
    2170880.0
    """
    if layer_type in (ATTENTION, CROSS_ATTENTION):
        return 0.0
    if layer_type in COMPRESSED_LAYERS:
        layer = make_compressed(config, layer_type)
        return activation_element_bytes(workload.dtype) * sum(each.state_elements for each in layer.compressors)
    mixers = [make_mixer(config, mixer, tensor_parallel) for mixer in mixers_of(layer_type) if mixer != ATTENTION]
    width = activation_element_bytes(workload.dtype)
    return float(sum(STATE_BYTES * mixer.state_elements + width * mixer.conv_elements for mixer in mixers))


def _round_up(tokens: int, block_tokens: int) -> int:
    """Round a number of tokens up to full blocks; blocks of one token leave it, and traced lengths, unchanged."""
    return tokens if block_tokens == 1 else ceil_div(tokens, block_tokens) * block_tokens
