"""Lowering of offload to the host: copies of saved activations, and the optimizer step in host memory.

The saved tensors of each layer are copied to the host during the forward pass and back during the backward pass of
every micro-batch. This includes the last layers of a single stage, although their backward pass follows at once.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from shapewright.lowering.collectives import ranks_per_node
from shapewright.lowering.operations.collective import HOST_AXIS, Collective
from shapewright.memory.frozen import list_kept_tensors
from shapewright.memory.tensors import select_kept_tensors, sum_bytes
from shapewright.models.layers import ATTENTION, LayerKind
from shapewright.workload.alternate_gemms import find_alternate_gemms

if TYPE_CHECKING:
    from shapewright.core.numeric import Count, Numeric
    from shapewright.lowering.counts import LayerCounts
    from shapewright.lowering.operations.base import Block
    from shapewright.lowering.operations.operation import Operation
    from shapewright.lowering.shard import Shard
    from shapewright.workload.optimizers import TrainingRecipe


def lower_activation_copies(shard: Shard, counts: LayerCounts, mode: str, again: LayerCounts) -> list[Operation]:
    """Lower the copies of one stack's saved tensors to the host and back.

    Args:
        counts: Layers with a backward pass.
        mode: Recomputation mode, which determines the saved tensors.
        again: Those of the layers to which it applies; the others save everything.
    """
    workload, config = shard.workload, shard.config
    operations: list[Operation] = []
    by_kind, again_by_kind = _by_saved_tensors(counts), _by_saved_tensors(again)
    # Layers with experts first.
    for kind, num_layers in sorted(by_kind.items(), key=lambda each: each[0].mlp != "experts"):
        has_cross_attention = config.has_cross_attention and not shard.prefix
        tensors = list_kept_tensors(config, workload, shard.layout, kind, has_cross_attention=has_cross_attention)
        alternate = find_alternate_gemms(config, workload, shard.layout, kind, has_cross_attention=has_cross_attention)
        kept_bytes, all_bytes = (
            sum_bytes(select_kept_tensors(tensors, mode, workload.recompute_modules, alternate)),
            sum_bytes(tensors),
        )
        recomputed = again_by_kind[kind]
        for name, message_bytes, layers in (
            ("activations", kept_bytes, recomputed),
            ("activations.whole", all_bytes, num_layers - recomputed),
        ):
            if layers:
                words = [] if kind.layer_type == ATTENTION else [kind.layer_type]
                words += ["experts"] if kind.mlp == "experts" else []
                operations += _copies_both_ways(
                    shard, ".".join([*words, name]), message_bytes, shard.num_passes * layers
                )
    return operations


def _by_saved_tensors(counts: LayerCounts) -> Counter[LayerKind]:
    by_kind: Counter[LayerKind] = Counter()
    for kind, num_layers in counts.kinds.items():
        by_kind[LayerKind(kind.layer_type, mlp=kind.mlp)] += num_layers
    return by_kind


def _copies_both_ways(shard: Shard, tensors: str, message_bytes: Numeric, repeats: Count) -> list[Operation]:
    """Build a copy to the host during the forward pass and one back during the backward pass."""
    to_host = host_operation(
        shard, "offload", "to_host", f"{tensors}.to_host", message_bytes, repeats=repeats, overlaps=True
    )
    from_host = to_host.changed(name=f"{shard.prefix}{tensors}.from_host", role="from_host", pass_name="backward")
    return [to_host, from_host]


def lower_host_step(
    shard: Shard, name: str, weights: Numeric, recipe: TrainingRecipe, *, stage: str, extra_bytes: float
) -> list[Operation]:
    """Lower an optimizer step in host memory: gradients to the host, the update, weights back, without overlap.

    Args:
        weights: Number of weights whose states belong to this device. [element]
        stage: Pipeline stages that have the weights.
        extra_bytes: State bytes per weight in addition to the recipe's, each read and written. [byte]

    Source: arXiv 2101.06840, section 4 (ZeRO-Offload).
    """
    layout: Any = shard.layout
    # Devices that update these weights: all, or those of a stage at an end, or of both ends on one node.
    updating = layout.num_devices
    if stage != "every":
        meets = (layout.pipeline_parallel > 1) * (layout.num_devices <= shard.node_size)
        updating = layout.devices_per_stage * (1 + meets)
    sharing = ranks_per_node(updating, 1, shard.node_size)
    moved = recipe.step_read_bytes + recipe.step_written_bytes + 2.0 * extra_bytes
    once: dict[str, Any] = {"repeats": 1, "stage": stage, "pass_name": "step"}
    return [
        host_operation(
            shard,
            "optimizer",
            "to_host",
            f"optimizer.{name}.gradients.to_host",
            weights * recipe.gradient_bytes,
            **once,
        ),
        host_operation(
            shard,
            "optimizer",
            "on_host",
            f"optimizer.{name}.on_host",
            weights * moved,
            op_name="host_optimizer",
            num_ranks=sharing,
            **once,
        ),
        host_operation(
            shard,
            "optimizer",
            "from_host",
            f"optimizer.{name}.weights.from_host",
            weights * recipe.weight_bytes,
            **once,
        ),
    ]


def host_operation(
    shard: Shard,
    block: Block,
    role: str,
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
    """Build one operation between the device and its host."""
    return Collective(
        name=shard.prefix + name,
        block=block,
        role=role,
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
