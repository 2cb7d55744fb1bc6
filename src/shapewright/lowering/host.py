"""What a device has with its host: saved activations that wait there, and the optimiser's step.

Each layer's tensors leave behind the forward pass and come back behind the backward pass, for every micro-batch. All
layers are counted, although the last ones of a single stage could stay: their backward pass comes at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.lowering.communication import ranks_per_node
from shapewright.operations import Collective
from shapewright.operations.collective import HOST_AXIS
from shapewright.saved_tensors import keep_tensors, list_saved_tensors, sum_bytes

if TYPE_CHECKING:
    from shapewright.lowering.counts import LayerCounts
    from shapewright.lowering.shard import Shard
    from shapewright.operations import Operation
    from shapewright.operations.base import Count, Numeric
    from shapewright.optimizers import TrainingRecipe


def lower_activation_copies(shard: Shard, counts: LayerCounts, mode: str) -> list[Operation]:
    """Copies of one stack's saved tensors to the host and back.

    Args:
        shard: Sizes of this device.
        counts: Layers of the stack.
        mode: Recomputation, which decides what a layer keeps.
    """
    workload, config = shard.workload, shard.config
    operations: list[Operation] = []
    for has_experts, num_layers in ((True, counts.num_expert), (False, counts.num_dense)):
        if not num_layers:
            continue
        tensors = list_saved_tensors(
            config,
            workload,
            shard.layout,
            has_experts=has_experts,
            has_cross_attention=config.has_cross_attention and not shard.prefix,
        )
        kept_bytes, all_bytes = sum_bytes(keep_tensors(tensors, mode, workload.recompute_modules)), sum_bytes(tensors)
        recomputed = num_layers
        if workload.recompute_layers is not None and mode == "full":
            # Of a mixed stage an equal share of each kind is computed again; the others keep everything.
            recomputed = min(workload.recompute_layers * num_layers // counts.num_layers, num_layers)
        for name, message_bytes, layers in (
            ("activations", kept_bytes, recomputed),
            ("activations.whole", all_bytes, num_layers - recomputed),
        ):
            if layers:
                block = f"{'experts.' if has_experts else ''}{name}"
                operations += _there_and_back(shard, block, message_bytes, shard.num_passes * layers)
    return operations


def _there_and_back(shard: Shard, block: str, message_bytes: Numeric, repeats: Count) -> list[Operation]:
    """A copy behind the forward pass, and one behind the backward pass."""
    there = host_operation(shard, f"{block}.to_host", message_bytes, repeats=repeats, overlaps=True)
    return [there, there.changed(name=f"{shard.prefix}{block}.from_host", pass_name="backward")]


def lower_host_step(
    shard: Shard, name: str, weights: Numeric, recipe: TrainingRecipe, *, stage: str, more_bytes: float
) -> list[Operation]:
    """The optimiser's step in the host's memory: gradients there, the update, weights back; nothing hides it.

    Args:
        shard: Sizes of this device.
        name: Group of weights.
        weights: Weights whose states belong to this device. [element]
        recipe: What the optimiser keeps of each.
        stage: Pipeline stages that hold them.
        more_bytes: States of a weight beside those of the recipe, read and written. [byte]

    Source: arXiv 2101.06840, section 4 (ZeRO-Offload).
    """
    layout: Any = shard.layout
    sharing = ranks_per_node(layout.num_devices, 1, shard.node_size)
    moved = recipe.step_read_bytes + recipe.step_written_bytes + 2.0 * more_bytes
    once: dict[str, Any] = {"repeats": 1, "stage": stage, "pass_name": "step"}
    return [
        host_operation(shard, f"optimizer.{name}.gradients.to_host", weights * recipe.gradient_bytes, **once),
        host_operation(
            shard, f"optimizer.{name}.on_host", weights * moved, op_name="host_optimizer", num_ranks=sharing, **once
        ),
        host_operation(shard, f"optimizer.{name}.weights.from_host", weights * recipe.weight_bytes, **once),
    ]


def host_operation(
    shard: Shard,
    name: str,
    message_bytes: Numeric,
    *,
    repeats: Count,
    op_name: str = "host_copy",
    num_ranks: Count = 1,
    stage: str = "every",
    pass_name: str = "forward",
    overlaps: bool = False,
) -> Collective:
    """Build one operation of the host axis."""
    return Collective(
        name=shard.prefix + name,
        pass_name=pass_name,
        stage=stage,
        repeats=repeats,
        dtype=shard.dtype,
        op_name=op_name,
        axis=HOST_AXIS,
        message_bytes=message_bytes,
        num_ranks=num_ranks,
        ranks_per_node=num_ranks,
        overlaps=overlaps,
    )
