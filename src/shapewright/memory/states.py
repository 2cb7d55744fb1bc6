"""Memory of weights, gradients and optimizer states of a pipeline stage on one device, sharded by ZeRO stages 1 to 3.

Legend: t tensor, d data times context, e expert parallel degree.

A stage is counted in layers, its layers in parameters, and its parameters in bytes. Routed experts are split and
replicated by their own degrees (layout.expert_tensor_degree, layout.num_expert_replicas).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from shapewright.core.dtypes import stored_weight_bytes
from shapewright.core.numeric import ceil_div
from shapewright.core.records import dataclass
from shapewright.memory.frozen import count_adapters, count_stored_weights
from shapewright.memory.stages import Stage, has_embedding_copy
from shapewright.memory.tensors import activation_element_bytes
from shapewright.models.compressed_attention import make_compressed
from shapewright.models.layers import COMPRESSED_LAYERS, CROSS_ATTENTION, WITH_SOFTMAX, LayerGroup, LayerKind, mixers_of
from shapewright.models.mixers import make_mixer
from shapewright.models.parameters import (
    LayerParameters,
    count_head_transform,
    count_indexer,
    count_layer_parameters,
    count_parameters,
)
from shapewright.workload.images import has_tower, tower_job
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.optimizers import TrainingRecipe, find_recipe

if TYPE_CHECKING:
    from shapewright.models.parameters import ParameterCounts
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.workload import Workload


def count_stage_parameters(stage: Stage, counts: ParameterCounts, workload: Workload) -> DeviceParameters:
    """Count the parameters of one device of a stage, and those of them that the workload trains."""
    every = count_device_parameters(
        stage.config,
        counts,
        stage.layout,
        kinds=stage.layer_kinds,
        is_first=stage.is_first,
        is_last=stage.is_last,
    )
    if not workload.is_training or workload.trains_all:
        return every
    if not workload.has_adapters:
        trained = count_device_parameters(
            stage.config,
            counts,
            stage.layout,
            kinds=stage.list_trained_kinds(workload),
            is_first=False,
            is_last=False,
        )
        return replace(every, trained_dense=trained.dense - trained.outside_layers, trained_experts=trained.experts)
    dense = routed = stored = 0.0
    for kind, has_cross_attention, num_layers in stage.layer_kinds:
        cross = {"has_cross_attention": has_cross_attention}
        own = count_adapters(stage.config, workload, stage.layout, kind, **cross)
        dense, routed = dense + num_layers * own[0], routed + num_layers * own[1]
        stored += num_layers * count_stored_weights(stage.config, stage.layout, kind, **cross)
    return replace(every, trained_dense=dense, trained_experts=routed, stored_narrow=stored, has_adapters=True)


def count_trained_parameters(config: TransformerConfig, workload: Workload) -> int:
    """Count the parameters of the whole model that training updates; 0 in inference.

    >>> from shapewright.models.transformer import TransformerConfig
    >>> from shapewright.workload.workload import Workload
    >>> llama_3_8b = TransformerConfig(
    ...     hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, intermediate_size=14336,
    ...     vocab_size=128256, norm="rmsnorm", gated_mlp=True,
    ... )
    >>> count_trained_parameters(llama_3_8b, Workload(finetune="qlora", lora_rank=16))
    41943040
    """
    counts = count_parameters(config)
    if not workload.is_training:
        return 0
    if workload.trains_all:
        return counts.total
    found = count_stage_parameters(Stage(config, ParallelLayout(), 0), counts, workload)
    assert found.trained_dense is not None
    assert found.trained_experts is not None
    of_tower = 0
    if has_tower(config, workload):
        tower, job, _ = tower_job(config, workload, ParallelLayout())
        of_tower = count_trained_parameters(tower, job)
    return round(found.trained_dense + found.trained_experts) + of_tower


@dataclass(frozen=True, kw_only=True)
class DeviceParameters:
    """Parameters of one device before sharding over replicas.

    Attributes:
        dense: All parameters but those of routed experts; replicated over data and context ranks.
        experts: Routed experts; replicated over data and context ranks of the same expert rank.
        largest_layer: Parameters of the largest layer, experts included.
        outside_layers: Part of ``dense`` in embeddings, logits and final norms.
        trained_dense: Trained parameters without routed experts: a part of ``dense``, or adapters; None for all.
        trained_experts: Trained parameters of routed experts, in the same way.
        has_adapters: Whether the trained parameters are adapters, in addition to the others.
        stored_narrow: Parameters that may be stored in fewer bits: linear layers, if they are frozen.
    """

    dense: float
    experts: float
    largest_layer: float
    outside_layers: float = 0.0
    trained_dense: float | None = None
    trained_experts: float | None = None
    has_adapters: bool = False
    stored_narrow: float = 0.0


def count_device_parameters(
    config: TransformerConfig,
    counts: ParameterCounts,
    layout: ParallelLayout,
    *,
    kinds: Iterable[tuple[LayerKind, bool, int]],
    is_first: bool,
    is_last: bool,
) -> DeviceParameters:
    """Count the parameters of one device of a pipeline stage.

    Matrices are split over the tensor axis, routed experts over layout.expert_tensor_degree devices. Norms, routers,
    learned positions, BERT's transform before the logits and MLA's down-projections are complete on every rank of the
    tensor axis; key-value heads are replicated if there are fewer of them than ranks.

    Args:
        kinds: Kinds of layer of the stage, whether each has cross-attention, and how many there are.
        is_first: Whether the stage has the embedding.
        is_last: Whether the stage has the final norm and the logits.
    """
    degree = layout.tensor_parallel
    dense = experts = largest_layer = 0.0
    for kind, has_cross_attention, num_layers in kinds:
        group = LayerGroup(0, kind.mlp == "experts", num_layers, kind.layer_type, kind.mlp != "none")
        is_encoder = config.has_cross_attention and not has_cross_attention
        layer = count_layer_parameters(config, group, is_encoder=is_encoder)
        if kind.layer_type in COMPRESSED_LAYERS:
            own_attention = make_compressed(config, kind.layer_type, degree).num_parameters
            layer_dense = _dense_share(config, replace(layer, attention=0), degree) + own_attention
        elif kind.layer_type == CROSS_ATTENTION:  # split as self-attention of the same heads is
            as_own = replace(layer, attention=layer.cross_attention, cross_attention=0)
            layer_dense = _dense_share(config, as_own, degree)
        else:
            layer_dense = _dense_share(config, layer, degree) + _linear_share(config, kind, degree)
        layer_experts = layer.experts / (layout.expert_tensor_degree * layout.expert_parallel)
        dense += num_layers * layer_dense
        experts += num_layers * layer_experts
        largest_layer = max(largest_layer, layer_dense + layer_experts)
    inside_layers = dense
    if is_first:
        dense += counts.token_embedding / degree + counts.other_embedding
    if is_last:
        whole = count_head_transform(config)
        dense += (counts.head - whole) / degree + whole + counts.final_norms
        # With DualPipe the device of the last stage is that of the first (arXiv 2412.19437, section 3.2.2).
        is_apart = not is_first and layout.pipeline_schedule != "dualpipe"
        if is_apart and has_embedding_copy(config, layout.pipeline_parallel):
            dense += counts.token_embedding / degree
    return DeviceParameters(
        dense=dense, experts=experts, largest_layer=largest_layer, outside_layers=dense - inside_layers
    )


def _dense_share(config: TransformerConfig, layer: LayerParameters, degree: int) -> float:
    """Count the parameters of one layer on one tensor-parallel rank without routed experts."""
    whole = layer.norms + layer.router
    split = layer.attention + layer.cross_attention + layer.mlp + layer.shared_experts
    h = config.hidden_size
    if not layer.attention:
        return whole + split / degree
    if config.is_mla:
        down_projections = h * (config.q_lora_rank + config.kv_lora_rank + config.qk_rope_head_dim)
        down_projections += count_indexer(config)
        whole += down_projections
        split -= down_projections
    else:
        # With fewer key-value heads than ranks, each rank has a copy of the head that its query heads need.
        copies = ceil_div(config.num_kv_heads, degree) * degree - config.num_kv_heads
        blocks = 2 if layer.cross_attention else 1
        split += blocks * copies * (config.head_dim + config.v_head_dim) * (h + config.qkv_bias)
    return whole + split / degree


def _linear_share(config: TransformerConfig, kind: LayerKind, degree: int) -> float:
    """Count the parameters of one layer's linear attention or state space on one tensor-parallel rank."""
    mixers = (make_mixer(config, mixer, degree) for mixer in mixers_of(kind.layer_type) if mixer not in WITH_SOFTMAX)
    return float(sum(mixer.num_parameters for mixer in mixers))


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Memory of one device for weights, gradients and optimizer states.

    Attributes:
        weights_bytes: Weights. [byte]
        gradients_bytes: Gradients. [byte]
        optimizer_bytes: Master weights and moments. [byte]
        gathered_bytes: Weights and gradients of the running layers, gathered from their shards (ZeRO stage 3). [byte]
        host_bytes: States that are in the host's memory instead. [byte]
    """

    weights_bytes: float
    gradients_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    gathered_bytes: float = 0.0
    host_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Sum of all components on the device. [byte]"""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.gathered_bytes


def num_stage_copies(layout: ParallelLayout) -> int:
    """Number of stages whose weights a device holds: with DualPipe one from each end of the model.

    Source: arXiv 2412.19437, table 2 (twice the parameters).
    """
    return 2 if layout.pipeline_schedule == "dualpipe" else 1


# The running layer and the prefetched one (PyTorch FSDP's default backward prefetch).
_GATHERED_LAYERS = 2


def estimate_states(
    parameters: DeviceParameters, workload: Workload, layout: ParallelLayout, recipe: TrainingRecipe | None = None
) -> StateBytes:
    """Estimate the memory of weights, gradients and optimizer states on one device.

    ZeRO stage 1 divides the optimizer states by the number of replicas, stage 2 also the gradients, stage 3 also the
    weights. Ranks of the context axis count as replicas (Megatron-LM). With DualPipe a device has weights and gradients
    of two stages, and the two devices of a stage share its optimizer states.

    Args:
        layout: Degrees of parallelism and ZeRO stage.
        recipe: State bytes per parameter in training; by default those of the workload's optimizer.

    Source: arXiv 1910.02054, section 5 (ZeRO); arXiv 2412.19437, table 2 (DualPipe).
    """
    everything = parameters.dense + parameters.experts
    if not workload.is_training:
        inside_bytes = stored_weight_bytes(workload.weight_dtype or workload.dtype)
        # Embeddings and logits stay in 16 bits if the layers are narrower, as their GEMMs do.
        outside_bytes = activation_element_bytes(workload.dtype)
        inside = everything - parameters.outside_layers
        return StateBytes(weights_bytes=inside_bytes * inside + outside_bytes * parameters.outside_layers)
    used = recipe or find_recipe(workload.optimizer, workload.dtype)
    if parameters.trained_dense is not None:
        return _estimate_partly_frozen(parameters, workload, layout, used)
    replicas = layout.data_parallel * layout.context_parallel
    sharded = parameters.dense / replicas + parameters.experts / layout.num_expert_replicas
    stage = layout.zero_stage
    optimizer_bytes = used.optimizer_bytes * (sharded if stage >= 1 else everything)
    if used.embedding_optimizer_bytes is not None:
        outside = parameters.outside_layers / (replicas if stage >= 1 else 1)
        optimizer_bytes += (used.embedding_optimizer_bytes - used.optimizer_bytes) * outside
    gradients = sharded if stage >= 2 else everything
    if not used.keeps_gradients:
        gradients = parameters.largest_layer
    gathered = parameters.largest_layer * (_GATHERED_LAYERS * used.weight_bytes + used.gradient_bytes)
    host_bytes = 0.0
    if workload.offload_optimizer:
        # Without a master weight, the host's optimizer updates the weights themselves.
        weights = 0.0 if used.has_master else used.weight_bytes * (sharded if stage >= 1 else everything)
        host_bytes, optimizer_bytes = optimizer_bytes + weights, 0.0
    copies = num_stage_copies(layout)
    return StateBytes(
        host_bytes=host_bytes,
        weights_bytes=copies * used.weight_bytes * (sharded if stage >= 3 else everything),
        gradients_bytes=copies * used.gradient_bytes * gradients,
        optimizer_bytes=optimizer_bytes,
        gathered_bytes=gathered if stage >= 3 and replicas > 1 else 0.0,
    )


def _estimate_partly_frozen(
    parameters: DeviceParameters, workload: Workload, layout: ParallelLayout, recipe: TrainingRecipe
) -> StateBytes:
    """Estimate the states if only a part of the parameters, or adapters beside them, are trained.

    Frozen weights have neither gradients nor optimizer states, and no master weight. ZeRO stage 3 shards them as well.
    """
    assert parameters.trained_dense is not None
    assert parameters.trained_experts is not None
    trained = DeviceParameters(
        dense=parameters.trained_dense,
        experts=parameters.trained_experts,
        largest_layer=parameters.largest_layer * (not parameters.has_adapters),
    )
    states = estimate_states(trained, workload, layout, recipe)
    left_out = (0.0, 0.0) if parameters.has_adapters else (trained.dense, trained.experts)
    width = activation_element_bytes(workload.dtype)
    stored = width if workload.weight_dtype is None else stored_weight_bytes(workload.weight_dtype)
    # Of the linear layers, those of routed experts have replicas of their own.
    narrow_experts = min(parameters.experts, parameters.stored_narrow) if workload.weight_dtype else 0.0
    narrow_dense = parameters.stored_narrow - narrow_experts if workload.weight_dtype else 0.0
    dense_bytes = width * (parameters.dense - left_out[0]) - (width - stored) * narrow_dense
    experts_bytes = width * (parameters.experts - left_out[1]) - (width - stored) * narrow_experts
    is_sharded = layout.zero_stage >= 3
    replicas = layout.data_parallel * layout.context_parallel
    frozen_bytes = dense_bytes + experts_bytes
    gathered_bytes = states.gathered_bytes
    if is_sharded:
        frozen_bytes = dense_bytes / replicas + experts_bytes / layout.num_expert_replicas
        if parameters.has_adapters and replicas > 1:
            gathered_bytes += _GATHERED_LAYERS * stored * parameters.largest_layer
    return replace(
        states,
        weights_bytes=states.weights_bytes + num_stage_copies(layout) * frozen_bytes,
        gathered_bytes=gathered_bytes,
    )
