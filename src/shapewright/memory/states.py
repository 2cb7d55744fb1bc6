"""Weights, gradients and optimiser states of one pipeline stage on one device.

Legend: t tensor, d data times context, e expert parallel degree.

Routed experts are cut and copied by degrees of their own (layout.tensor_degree_of_experts, replicas_of_experts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.config.parameters import LayerParameters, count_layer_parameters
from shapewright.config.transformer import LayerGroup
from shapewright.dtypes import stored_weight_bytes
from shapewright.optimizers import TrainingRecipe, find_recipe
from shapewright.saved_tensors import activation_element_bytes, ceil_div

if TYPE_CHECKING:
    from shapewright.config.parameters import ParameterCounts
    from shapewright.config.transformer import TransformerConfig
    from shapewright.layout import ParallelLayout
    from shapewright.workload import Workload


@dataclass(frozen=True, kw_only=True)
class DeviceParameters:
    """Parameters that one device holds before any sharding over replicas.

    Attributes:
        dense: All but routed experts; replicated over data and context ranks.
        experts: Routed experts; replicated over data and context ranks of the same expert rank.
        largest_layer: The largest single layer among them, experts included.
        outside_layers: Embeddings, logits and final norms among them.
    """

    dense: float
    experts: float
    largest_layer: float
    outside_layers: float = 0.0


def count_device_parameters(
    config: TransformerConfig,
    counts: ParameterCounts,
    layout: ParallelLayout,
    *,
    moe_layers: int,
    dense_layers: int,
    encoder_layers: int,
    is_first: bool,
    is_last: bool,
) -> DeviceParameters:
    """Count what one device of a pipeline stage holds.

    Matrices are split over the tensor axis, routed experts by a degree of their own; norms, routers, learned positions
    and MLA's compressing projections are whole on every rank of it, and so are key-value heads fewer than the ranks.

    Args:
        config: The model.
        counts: Its parameters.
        layout: Degrees of parallelism.
        moe_layers: Expert layers of the stage.
        dense_layers: Other layers of its main stack.
        encoder_layers: Encoder layers of an encoder-decoder.
        is_first: Whether the stage has the embedding.
        is_last: Whether the stage has the final norm and the logits.
    """
    degree = layout.tensor_parallel
    dense = experts = largest_layer = 0.0
    kinds = ((True, False, moe_layers), (False, False, dense_layers), (False, True, encoder_layers))
    for is_moe, is_encoder, num_layers in kinds:
        if not num_layers:
            continue
        layer = count_layer_parameters(config, LayerGroup(0, is_moe, num_layers), is_encoder=is_encoder)
        layer_dense = _dense_share(config, layer, degree)
        layer_experts = layer.experts / (layout.tensor_degree_of_experts * layout.expert_parallel)
        dense += num_layers * layer_dense
        experts += num_layers * layer_experts
        largest_layer = max(largest_layer, layer_dense + layer_experts)
    inside_layers = dense
    if is_first:
        dense += counts.token_embedding / degree + counts.other_embedding
    if is_last:
        dense += counts.head / degree + counts.final_norms
        if config.tied_embeddings and not is_first:
            # The last stage multiplies by a copy of the embedding of the first.
            dense += counts.token_embedding / degree
    return DeviceParameters(
        dense=dense, experts=experts, largest_layer=largest_layer, outside_layers=dense - inside_layers
    )


def _dense_share(config: TransformerConfig, layer: LayerParameters, degree: int) -> float:
    """Parameters of one layer on one tensor-parallel rank, routed experts left out."""
    whole = layer.norms + layer.router
    split = layer.attention + layer.cross_attention + layer.mlp + layer.shared_experts
    h = config.hidden_size
    if config.is_mla:
        compressing = h * (config.q_lora_rank + config.kv_lora_rank + config.qk_rope_head_dim)
        whole += compressing
        split -= compressing
    else:
        # Fewer key-value heads than ranks: each rank has a copy of the head that its query heads need.
        copies = ceil_div(config.num_kv_heads, degree) * degree - config.num_kv_heads
        blocks = 2 if layer.cross_attention else 1
        split += blocks * copies * (config.head_dim + config.v_head_dim) * (h + config.qkv_bias)
    return whole + split / degree


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of one device for parameters and what training keeps beside them.

    Attributes:
        weights_bytes: Weights. [byte]
        gradients_bytes: Gradients. [byte]
        optimizer_bytes: Master weights and moments. [byte]
        gathered_bytes: Weights and gradients of the layers at work, gathered from their shards (ZeRO stage 3). [byte]
        host_bytes: What the host keeps of it instead of the device. [byte]
    """

    weights_bytes: float
    gradients_bytes: float = 0.0
    optimizer_bytes: float = 0.0
    gathered_bytes: float = 0.0
    host_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Everything on the device together. [byte]"""
        return self.weights_bytes + self.gradients_bytes + self.optimizer_bytes + self.gathered_bytes


def num_stage_copies(layout: ParallelLayout) -> int:
    """Stages that a device has weights of: DualPipe's have one from either end of the model.

    Source: arXiv 2412.19437, table 2 (twice the parameters).
    """
    return 2 if layout.pipeline_schedule == "dualpipe" else 1


# The layer at work and the one fetched ahead of it (PyTorch FSDP's default backward prefetch).
_GATHERED_LAYERS = 2


def estimate_states(
    parameters: DeviceParameters, workload: Workload, layout: ParallelLayout, recipe: TrainingRecipe | None = None
) -> StateBytes:
    """Bytes of weights, gradients and optimiser states on one device.

    Args:
        parameters: What the device holds.
        workload: Phase and dtype.
        layout: Degrees and ZeRO stage.
        recipe: Bytes a parameter in training; by default that of the workload's optimiser.

    DualPipe's devices have two stages of weights and gradients; the two devices of a stage share its optimiser states.

    Source: arXiv 1910.02054, section 5: stage 1 divides optimiser states by the replicas, 2 gradients too, 3 weights
        too. Ranks of the context axis count as replicas (Megatron-LM).
    """
    everything = parameters.dense + parameters.experts
    if not workload.is_training:
        inside_bytes = stored_weight_bytes(workload.weight_dtype or workload.dtype)
        # Embeddings and logits stay in 16 bits where the layers are narrower, as their products do.
        outside_bytes = activation_element_bytes(workload.dtype)
        inside = everything - parameters.outside_layers
        return StateBytes(weights_bytes=inside_bytes * inside + outside_bytes * parameters.outside_layers)
    used = recipe or find_recipe(workload.optimizer, workload.dtype)
    replicas = layout.data_parallel * layout.context_parallel
    sharded = parameters.dense / replicas + parameters.experts / layout.replicas_of_experts
    stage = layout.zero_stage
    optimizer_bytes = used.optimizer_bytes * (sharded if stage >= 1 else everything)
    if used.embedding_optimizer_bytes is not None:
        outside = parameters.outside_layers / (replicas if stage >= 1 else 1)
        optimizer_bytes += (used.embedding_optimizer_bytes - used.optimizer_bytes) * outside
    gathered = parameters.largest_layer * (_GATHERED_LAYERS * used.weight_bytes + used.gradient_bytes)
    host_bytes = 0.0
    if workload.offload_optimizer:
        # The host's optimiser needs the weights themselves where no master stands behind them.
        weights = 0.0 if used.has_master else used.weight_bytes * (sharded if stage >= 1 else everything)
        host_bytes, optimizer_bytes = optimizer_bytes + weights, 0.0
    copies = num_stage_copies(layout)
    return StateBytes(
        host_bytes=host_bytes,
        weights_bytes=copies * used.weight_bytes * (sharded if stage >= 3 else everything),
        gradients_bytes=copies * used.gradient_bytes * (sharded if stage >= 2 else everything),
        optimizer_bytes=optimizer_bytes,
        gathered_bytes=gathered if stage >= 3 and replicas > 1 else 0.0,
    )
