"""Lowering of gradient communication over replicas, gradient norm and optimizer step.

Weights are counted from the lowered GEMMs and so follow their sharding; norms and biases of layers (below 0.1 % of a
model's weights) are left out.

Source: arXiv 1910.02054, sections 5 and 7: ZeRO stage 0 moves 2 elements per weight and step (all_reduce), stages 1
and 2 as many (reduce_scatter, all_gather), stage 3 half as many again (it gathers weights twice).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.core.dtypes import stored_weight_bytes
from shapewright.core.records import dataclass
from shapewright.lowering.collectives import collective, num_ranks_of
from shapewright.lowering.embedding import vocab_rows
from shapewright.lowering.offload import lower_host_step
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.memory.stages import has_embedding_copy
from shapewright.models.parameters import count_head_transform, count_other_embedding
from shapewright.workload.optimizers import OPTIMIZERS
from shapewright.workload.projection import DEFAULT_INTERVAL, projection_rank, svd_depth, training_recipe

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from shapewright.core.numeric import Count
    from shapewright.lowering.operations.operation import Operation
    from shapewright.lowering.shard import Shard
    from shapewright.workload.optimizers import Optimizer


@dataclass(frozen=True)
class WeightGroup:
    """Weights of this device with the same pipeline stages and the same replicas.

    Attributes:
        name: Displayed name.
        stage: Pipeline stages that have it.
        num_weights: Number of weights on this device. [element]
        num_trained: Number of them that the optimizer updates. [element]
        num_parts: Number of separately communicated pieces: layers, or 1.
        num_replicas: Number of devices with the same weights.
    """

    name: str
    stage: str
    num_weights: Count
    num_trained: Count
    num_parts: int
    num_replicas: Count


def count_gemm_weights(
    operations: Iterable[Operation], num_passes: int, *, of_adapters: bool = False
) -> tuple[Any, Any]:
    """Count the weights of GEMMs and of grouped GEMMs on this device. [element]

    Args:
        num_passes: Number of micro-batches, which repeats include.
    """
    dense: Any = 0
    routed: Any = 0
    for operation in operations:
        if operation.is_weight_constant or (of_adapters and not operation.is_adapter):
            continue
        if isinstance(operation, GroupedGemm):
            routed += operation.repeats // num_passes * operation.groups * operation.n * operation.k
        elif isinstance(operation, Gemm):
            dense += operation.repeats // num_passes * operation.batch * operation.n * operation.k
    return dense, routed


def weight_groups(
    shard: Shard,
    layers: Sequence[Operation],
    num_layers: int,
    *,
    trained: Sequence[Operation],
    image_ends: tuple[Sequence[Operation], Sequence[Operation]],
) -> list[WeightGroup]:
    """Group the weights of this device into layers, routed experts, embedding and logits.

    Args:
        layers: Forward operations of all layers, without the attention cores, whose GEMMs have no weights.
        num_layers: Number of layers on this device.
        trained: Those of layers with a backward pass.
        image_ends: Forward operations before and after the layers, whose GEMMs count in image models.
    """
    dense, routed = count_gemm_weights(layers, shard.num_passes)
    found = count_gemm_weights(trained, shard.num_passes, of_adapters=shard.workload.has_adapters)
    linear = (0, 0)
    if shard.config.patches is not None:
        linear = tuple(count_gemm_weights(end, shard.num_passes)[0] for end in image_ends)
    return make_groups(shard, (dense, routed), found, num_layers, has_experts=bool(routed), image_ends=linear)


def make_groups(
    shard: Shard,
    weights: tuple[Count, Count],
    trained: tuple[Count, Count],
    num_layers: int,
    *,
    has_experts: bool,
    image_ends: tuple[Count, Count],
) -> list[WeightGroup]:
    """Group weights given by their counts; counts and sizes of the shard may be arrays.

    Args:
        weights: Weights of the layers without routed experts, and of routed experts.
        trained: Those of them that the optimizer updates.
        num_layers: Number of layers on this device.
        has_experts: Whether any layer has routed experts.
        image_ends: Weights of the linear layers before and after the layers, which image models have instead of an
            embedding and a logit matrix.
    """
    config, layout = shard.config, shard.layout
    replicas = num_ranks_of(layout, "data")
    ends = image_ends
    if config.patches is None:
        table = vocab_rows(shard) * config.embedding_size
        num_last = (not config.tied_embeddings) + has_embedding_copy(config, layout.pipeline_parallel)
        # Each device of the tensor axis has all positions, and BERT's transform before the logits.
        last = num_last * table if num_last else 0
        ends = table + count_other_embedding(config), last + count_head_transform(config)
    # Adapters and the training of the last layers leave embedding and logits as they are.
    trains_ends = shard.workload.trains_all
    groups = [WeightGroup("layers", "every", weights[0], trained[0], num_layers, replicas)]
    if has_experts:
        groups.append(WeightGroup("experts", "every", weights[1], trained[1], num_layers, layout.num_expert_replicas))
    for name, stage, own in (("embedding", "first", ends[0]), ("logits", "last", ends[1])):
        if not _is_none(own):
            groups.append(WeightGroup(name, stage, own, own if trains_ends else 0, 1, replicas))
    return groups


def _is_none(count: Count) -> bool:
    """Whether there are none; counts that are arrays or traced are not zero."""
    return isinstance(count, int) and not count


def _is_frozen(group: WeightGroup) -> bool:
    """Whether the optimizer updates no weight of a group."""
    return _is_none(group.num_trained)


def _gathered_bytes(shard: Shard, group: WeightGroup, zero_stage: int) -> Any:
    """Bytes of the weights of one piece that replicas gather: with ZeRO stage 3 all, otherwise the updated ones."""
    trained_bytes = group.num_trained / group.num_parts * shard.width_bytes
    if zero_stage < _SHARDED_WEIGHTS_STAGE or shard.workload.trains_all:
        return trained_bytes
    stored = shard.workload.weight_dtype
    is_layer = group.stage == "every"
    frozen_width = stored_weight_bytes(stored) if stored is not None and is_layer else shard.width_bytes
    return trained_bytes + (group.num_weights - group.num_trained) / group.num_parts * frozen_width


_SHARDED_WEIGHTS_STAGE = 3


def lower_gradient_communication(shard: Shard, groups: Iterable[WeightGroup], zero_stage: int) -> list[Operation]:
    """Lower the reduction of gradients over replicas and the gathering of sharded weights, layer by layer.

    Both overlap with computation. Gradients are reduced in the format of the activations.
    """
    operations: list[Operation] = []
    for group in groups:
        for op_name, times, pass_name in _communication_plan(shard, zero_stage):
            subject = "weights" if op_name == "all_gather" else "gradients"
            if _is_frozen(group) and (subject == "gradients" or zero_stage < _SHARDED_WEIGHTS_STAGE):
                continue
            message_bytes = (
                _gathered_bytes(shard, group, zero_stage)
                if subject == "weights"
                else group.num_trained / group.num_parts * shard.width_bytes
            )
            operations += collective(
                shard,
                "replicas",
                subject,
                op_name,
                "data",
                times * group.num_parts,
                name=f"{group.name}.{subject}.{op_name}",
                message_bytes=message_bytes,
                num_ranks=group.num_replicas,
                stride=_stride(shard, group),
                stage=group.stage,
                pass_name=pass_name,
                overlaps=True,
            )
    return operations


def _communication_plan(shard: Shard, zero_stage: int) -> tuple[tuple[str, int, str], ...]:
    """List the collectives of one piece of the weights: operation, executions per step, pass.

    Sharded gradients are reduced in every micro-batch, as no device keeps the full accumulated gradient.
    """
    passes = shard.num_passes
    return (
        (("all_reduce", 1, "backward"),),
        (("reduce_scatter", 1, "backward"), ("all_gather", 1, "forward")),
        (("reduce_scatter", passes, "backward"), ("all_gather", 1, "forward")),
        (("reduce_scatter", passes, "backward"), ("all_gather", passes, "forward"), ("all_gather", passes, "backward")),
    )[zero_stage]


def lower_tied_gradients(shard: Shard) -> list[Operation]:
    """Lower the sum of the gradients of an embedding of which the first and the last stage have a copy.

    With DualPipe both devices that have the first stage have the last one too, and with it a copy.

    Assumes: DualPipe's other gradients, of which every stage has two copies as well, are added without cost.
    """
    config, layout = shard.config, shard.layout
    is_copied = has_embedding_copy(config, layout.pipeline_parallel)
    if not is_copied or not config.vocab_size or not shard.workload.trains_all:
        return []
    # Stages are the outermost axis, so first and last stage share a node only if the whole job does.
    crosses = layout.num_devices > shard.node_size
    apart = layout.num_devices // layout.pipeline_parallel * (layout.pipeline_parallel - 1)
    return collective(
        shard,
        "embedding",
        "tied_gradients",
        "all_reduce",
        "pipeline",
        1,
        name="embedding.tied_gradients.all_reduce",
        message_bytes=1.0 * vocab_rows(shard) * config.embedding_size * shard.width_bytes,
        num_ranks=2,
        stride=1 + crosses * (apart - 1),
        stage="last",
        pass_name="step",
    )


def lower_optimizer(shard: Shard, groups: Iterable[WeightGroup], zero_stage: int) -> list[Operation]:
    """Lower the gradient norm (each gradient read once) and the optimizer step; ZeRO stage 1 and above shard both.

    AdamW in mixed precision reads and writes fp32 gradient, master weight and moments and also writes the 16-bit
    weight: 16 bytes read and 14 written per weight in bf16. Other optimizers move their own states.
    """
    operations: list[Operation] = []
    recipe = training_recipe(shard.config, shard.workload)
    extra_embedding_bytes = 0.0  # additional state bytes per weight of embeddings and logits
    if recipe.embedding_optimizer_bytes is not None:
        extra_embedding_bytes = recipe.embedding_optimizer_bytes - recipe.optimizer_bytes
    for group in groups:
        if _is_frozen(group):
            continue
        shards = group.num_replicas if zero_stage else 1
        weights = 1.0 * -(-group.num_trained // shards)
        extra_bytes = extra_embedding_bytes if group.stage != "every" else 0.0
        passes = [("gradient_norm", recipe.gradient_bytes, 0.0)]
        if shard.workload.offload_optimizer:
            name = group.name
            operations += lower_host_step(shard, name, weights, recipe, stage=group.stage, extra_bytes=extra_bytes)
        else:
            read_bytes, written_bytes = recipe.step_read_bytes + extra_bytes, recipe.step_written_bytes + extra_bytes
            passes.append(("optimizer", read_bytes, written_bytes))
        for role, read_bytes, written_bytes in passes:
            operations.append(
                Pointwise(
                    name=f"{role}.{group.name}",
                    block="optimizer",
                    role=role,
                    pass_name="step",
                    stage=group.stage,
                    repeats=1,
                    dtype="fp32",
                    operation="optimizer",
                    read_bytes=weights * read_bytes,
                    written_bytes=weights * written_bytes,
                )
            )
    return operations


def lower_orthogonalization(shard: Shard, layers: Iterable[Operation], zero_stage: int) -> list[Operation]:
    """Lower the GEMMs that an optimizer runs on each matrix: a Newton-Schulz iteration, or projections of gradients.

    Orthogonalized updates take three GEMMs a step of the iteration. Projected gradients take two GEMMs, and an SVD
    every few steps, whose share of one step is a GEMM of equal time (workload.projection).

    For a matrix X of s x l, s the smaller: A = X X^T, B = A A, X + B X, without the cheap sums. Each tensor-parallel
    shard is orthogonalized separately, and from ZeRO stage 1 on the replicas divide the matrices among them.

    Source: arXiv 2502.16982, section 2.1 (five steps in bf16).
    """
    optimizer = OPTIMIZERS[shard.workload.optimizer]
    operations: list[Operation] = []
    if not optimizer.works_on_matrices:
        return operations
    replicas = num_ranks_of(shard.layout, "data")
    for layer in layers:
        if not isinstance(layer, Gemm | GroupedGemm) or layer.is_weight_constant:
            continue
        if shard.workload.has_adapters and not layer.is_adapter:
            continue
        short, long = min(layer.n, layer.k), max(layer.n, layer.k)
        matrices = layer.groups if isinstance(layer, GroupedGemm) else layer.batch
        copies = shard.layout.num_expert_replicas if isinstance(layer, GroupedGemm) else replicas
        steps = max(optimizer.newton_schulz_steps, 1)
        repeats = -(-steps * matrices * (layer.repeats // shard.num_passes) // (copies if zero_stage else 1))
        rank = projection_rank(shard.config, shard.workload) if optimizer.projection_bytes else 0
        interval = shard.workload.galore_interval or DEFAULT_INTERVAL
        for part, dtype, m, n, k in matrix_gemms(optimizer, shard.dtype, short, long, rank, interval):
            method = "newton_schulz" if optimizer.newton_schulz_steps else "galore"
            operations.append(
                Gemm(
                    name=f"{method}.{layer.name}.{part}",
                    block=layer.block,
                    role=f"{method}_{part}",
                    pass_name="step",
                    repeats=repeats,
                    dtype=dtype,
                    m=m,
                    n=n,
                    k=k,
                )
            )
    return operations


def matrix_gemms(
    optimizer: Optimizer, dtype: str, short: Count, long: Count, rank: Count, interval: int
) -> Iterator[tuple[str, str, Any, Any, Any]]:
    """Yield name, dtype, m, n and k of the GEMMs that an optimizer runs on one matrix.

    One step of the Newton-Schulz iteration, or GaLore's projections with their share of an SVD.

    Args:
        short: Shorter side of the matrix, ``long`` the other.
        rank: Rank of the projections.
        interval: Steps between updates of the projections.
    """
    if optimizer.newton_schulz_steps:
        yield "square", dtype, short, short, long
        yield "power", dtype, short, short, short
        yield "turn", dtype, short, long, short
        return
    rank = min(rank, short)
    yield "project", dtype, rank, long, short
    yield "expand", dtype, short, long, rank
    yield "svd", "fp32", short, long, svd_depth(short, long, interval, optimizer.svd_fraction)


def _stride(shard: Shard, group: WeightGroup) -> int:
    """Distance in devices between replicas; replicas of an expert are one expert group apart."""
    layout = shard.layout
    if group.name == "experts":
        return layout.expert_tensor_degree * layout.expert_parallel
    return layout.tensor_parallel
