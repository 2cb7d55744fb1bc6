"""What follows the backward passes: gradient communication over replicas, gradient norm, optimiser.

Weights are counted from the lowered GEMMs, so that every slicing holds here too; norms and biases (below 0.1 % of a
model's weights) are left out.

Source: arXiv 1910.02054, sections 5 and 7: ZeRO stage 0 moves 2 elements per weight and step (all_reduce), stages 1
and 2 as many (reduce_scatter, all_gather), stage 3 half as many again (it gathers weights twice).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shapewright.lowering.communication import collective, num_ranks_of
from shapewright.lowering.embedding import vocab_rows
from shapewright.lowering.host import lower_host_step
from shapewright.operations import Gemm, GroupedGemm, Pointwise
from shapewright.optimizers import OPTIMIZERS, find_recipe

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shapewright.lowering.shard import Shard
    from shapewright.operations import Operation
    from shapewright.operations.base import Count


@dataclass(frozen=True)
class WeightGroup:
    """Weights of this device that share a stage and the devices that hold copies.

    Attributes:
        name: Module path.
        stage: Pipeline stages that hold it.
        num_weights: Weights on this device. [element]
        num_parts: Pieces that are communicated one by one: layers, or 1.
        num_replicas: Devices that hold the same weights.
    """

    name: str
    stage: str
    num_weights: Count
    num_parts: int
    num_replicas: Count


def count_gemm_weights(operations: Iterable[Operation], num_passes: int) -> tuple[Any, Any]:
    """Elements of the second operands on this device: of ordinary GEMMs, and of grouped ones.

    Args:
        operations: Forward operations of the layers.
        num_passes: Micro-batches, which their repeats hold.
    """
    dense: Any = 0
    routed: Any = 0
    for operation in operations:
        if isinstance(operation, GroupedGemm):
            routed += operation.repeats // num_passes * operation.groups * operation.n * operation.k
        elif isinstance(operation, Gemm):
            dense += operation.repeats // num_passes * operation.batch * operation.n * operation.k
    return dense, routed


def weight_groups(
    shard: Shard, layers: Iterable[Operation], cores: Iterable[Operation], num_layers: int
) -> list[WeightGroup]:
    """Group the weights of this device: layers, routed experts, embedding, logits.

    Args:
        shard: Sizes of this device.
        layers: Forward operations of all layers.
        cores: Those of them whose products have no weights.
        num_layers: Layers on this device.
    """
    dense, routed = count_gemm_weights(layers, shard.num_passes)
    dense -= count_gemm_weights(cores, shard.num_passes)[0]
    return make_groups(shard, dense, routed, num_layers, has_experts=bool(routed))


def make_groups(shard: Shard, dense: Count, routed: Count, num_layers: int, *, has_experts: bool) -> list[WeightGroup]:
    """Group weights that are counted already; sizes of the shard and counts may be arrays.

    Args:
        shard: Sizes of this device.
        dense: Weights of the layers, routed experts left out.
        routed: Weights of routed experts.
        num_layers: Layers on this device.
        has_experts: Whether there are routed experts among them.
    """
    config, layout = shard.config, shard.layout
    replicas = num_ranks_of(layout, "data")
    table = vocab_rows(shard) * config.embedding_size
    groups = [WeightGroup("layers", "every", dense, num_layers, replicas)]
    if has_experts:
        groups.append(WeightGroup("experts", "every", routed, num_layers, layout.replicas_of_experts))
    groups.append(WeightGroup("embedding", "first", table, 1, replicas))
    if not config.tied_embeddings or layout.pipeline_parallel > 1:
        groups.append(WeightGroup("logits", "last", table, 1, replicas))
    return groups


def lower_gradient_communication(shard: Shard, groups: Iterable[WeightGroup], zero_stage: int) -> list[Operation]:
    """Reduction of gradients over replicas, and gathering of sharded weights; layer by layer, behind computation.

    Gradients travel in the format of the activations.
    """
    operations: list[Operation] = []
    for group in groups:
        for op_name, times, pass_name in _communication_plan(shard, zero_stage):
            subject = "weights" if op_name == "all_gather" else "gradients"
            operations += collective(
                shard,
                f"{group.name}.{subject}.{op_name}",
                op_name,
                "data",
                times * group.num_parts,
                message_bytes=group.num_weights / group.num_parts * shard.width_bytes,
                num_ranks=group.num_replicas,
                stride=_stride(shard, group),
                stage=group.stage,
                pass_name=pass_name,
                overlaps=True,
            )
    return operations


def _communication_plan(shard: Shard, zero_stage: int) -> tuple[tuple[str, int, str], ...]:
    """Collectives of one piece of the weights: name, times per step, pass.

    Sharded gradients are reduced in every pass, for no device can keep a whole sum of them.
    """
    passes = shard.num_passes
    return (
        (("all_reduce", 1, "backward"),),
        (("reduce_scatter", 1, "backward"), ("all_gather", 1, "forward")),
        (("reduce_scatter", passes, "backward"), ("all_gather", 1, "forward")),
        (("reduce_scatter", passes, "backward"), ("all_gather", passes, "forward"), ("all_gather", passes, "backward")),
    )[zero_stage]


def lower_tied_gradients(shard: Shard) -> list[Operation]:
    """Sum of the two gradients of a tied embedding that first and last stage both hold."""
    if not shard.config.tied_embeddings:
        return []
    layout = shard.layout
    # Stages are the outermost axis: first and last share a node where the whole job does, however far apart they are.
    crosses = layout.num_devices > shard.node_size
    apart = layout.num_devices // layout.pipeline_parallel * (layout.pipeline_parallel - 1)
    return collective(
        shard,
        "embedding.tied_gradients.all_reduce",
        "all_reduce",
        "pipeline",
        1,
        message_bytes=1.0 * vocab_rows(shard) * shard.config.embedding_size * shard.width_bytes,
        num_ranks=min(2, layout.pipeline_parallel),
        stride=1 + crosses * (apart - 1),
        stage="last",
        pass_name="step",
    )


def lower_optimizer(shard: Shard, groups: Iterable[WeightGroup], zero_stage: int) -> list[Operation]:
    """Norm of the gradients (each read once), then the optimiser; states are sharded from ZeRO stage 1 on.

    AdamW in mixed precision keeps fp32 gradient, master weight and moments and writes the narrow weight besides:
    16 bytes read and 14 written per weight in bf16. What another optimiser keeps it moves.
    """
    operations: list[Operation] = []
    recipe = find_recipe(shard.workload.optimizer, shard.workload.dtype)
    outside_bytes = 0.0  # beside that, of embeddings and logits
    if recipe.embedding_optimizer_bytes is not None:
        outside_bytes = recipe.embedding_optimizer_bytes - recipe.optimizer_bytes
    for group in groups:
        shards = group.num_replicas if zero_stage else 1
        weights = 1.0 * -(-group.num_weights // shards)
        more_bytes = outside_bytes if group.stage != "every" else 0.0
        passes = [("gradient_norm", recipe.gradient_bytes, 0.0)]
        if shard.workload.offload_optimizer:
            name = group.name
            operations += lower_host_step(shard, name, weights, recipe, stage=group.stage, more_bytes=more_bytes)
        else:
            read_bytes, written_bytes = recipe.step_read_bytes + more_bytes, recipe.step_written_bytes + more_bytes
            passes.append(("optimizer", read_bytes, written_bytes))
        for name, read_bytes, written_bytes in passes:
            operations.append(
                Pointwise(
                    name=f"{name}.{group.name}",
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
    """Newton-Schulz iteration of an optimiser that orthogonalises updates: three products a step for each matrix.

    For a matrix of s x l, s the smaller: A = X X^T, B = A A, X + B X; the sums are left out. Each tensor-parallel slice
    is taken on its own, and from ZeRO stage 1 on replicas share the matrices.

    Source: arXiv 2502.16982, section 2.1 (five steps in bf16).
    """
    steps = OPTIMIZERS[shard.workload.optimizer].newton_schulz_steps
    operations: list[Operation] = []
    if not steps:
        return operations
    replicas = num_ranks_of(shard.layout, "data")
    for layer in layers:
        if not isinstance(layer, Gemm | GroupedGemm):
            continue
        short, long = min(layer.n, layer.k), max(layer.n, layer.k)
        matrices = layer.groups if isinstance(layer, GroupedGemm) else layer.batch
        copies = shard.layout.replicas_of_experts if isinstance(layer, GroupedGemm) else replicas
        repeats = -(-steps * matrices * (layer.repeats // shard.num_passes) // (copies if zero_stage else 1))
        for role, m, n, k in (
            ("square", short, short, long),
            ("power", short, short, short),
            ("turn", short, long, short),
        ):
            operations.append(
                Gemm(
                    name=f"newton_schulz.{layer.name}.{role}",
                    pass_name="step",
                    repeats=repeats,
                    dtype=shard.dtype,
                    m=m,
                    n=n,
                    k=k,
                )
            )
    return operations


def _stride(shard: Shard, group: WeightGroup) -> int:
    """Devices between copies: copies of an expert are one whole expert group apart."""
    layout = shard.layout
    if group.name == "experts":
        return layout.tensor_degree_of_experts * layout.expert_parallel
    return layout.tensor_parallel
