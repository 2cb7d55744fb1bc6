"""Parts of a step: sums of operation times that a step is composed from, as numbers or as arrays over many steps.

An operation's time is added to a pipeline stage (``every``, ``first``, ``last``) or to the once-per-step time. The
computation that communication may overlap with, and that communication, are summed by pool in parts of their own.

Search and plans compose these sums, for many steps at once. Predict and serving compose priced operations one by one
(composition.step), because their breakdown and interval need the exposed fraction of each operation; for a search that
would be a hundred times slower. Both forms use the same functions for pools and overlap (composition.overlap), for the
ends of the model and for the pipeline (composition.stages), and property tests compare their results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.lowering.operations import Collective
from shapewright.prediction.composition.overlap import (
    COLLECTIVE_POOLS,
    COMPUTE_POOLS,
    EXPERT_EXCHANGES,
    exchange_overlap_fraction,
    exposed_fraction,
    overlap_pools,
    pool_compute_s,
)
from shapewright.prediction.composition.stages import WEIGHT_GRADIENTS, combine_stages, rebalance_ends

if TYPE_CHECKING:
    from shapewright.core.numeric import Count, Numeric
    from shapewright.lowering.operations import Operation
    from shapewright.pricing.software import Software
    from shapewright.workload import ParallelLayout

STAGES = ("every", "first", "last")
EXPOSED_PARTS = (*STAGES, "step", WEIGHT_GRADIENTS)
"""Parts without overlappable communication; WEIGHT_GRADIENTS is contained in ``every``."""


def compute_part(pool: str) -> str:
    """Return the name of the part with the computation of a pool."""
    return f"compute.{pool}"


def collective_part(pool: str, stage: str) -> str:
    """Return the name of the part with a stage's overlappable communication of a pool."""
    return f"collective.{pool}.{stage}"


STEP_PARTS = (
    *EXPOSED_PARTS,
    *(compute_part(pool) for pool in COMPUTE_POOLS),
    *(collective_part(pool, stage) for pool in COLLECTIVE_POOLS for stage in STAGES),
)
"""Names of all parts."""


def parts_of(operation: Operation, pass_name: str = "", *, overlaps_exchanges: bool = True) -> tuple[str, ...]:
    """Return the parts of a step that an operation's time is added to.

    Args:
        operation: The operation.
        pass_name: Pass that it runs in, if not its own: recomputation runs forward operations in the backward pass.
        overlaps_exchanges: False if expert exchanges overlap with nothing, so that they are exposed.
    """
    pass_name = pass_name or operation.pass_name
    pools = overlap_pools(operation, pass_name)
    is_collective = isinstance(operation, Collective)
    if is_collective and not overlaps_exchanges and pools == (EXPERT_EXCHANGES,):
        pools = ()
    return _list_parts(
        pools,
        pass_name,
        operation.stage,
        is_collective=is_collective,
        is_weight_gradient=operation.is_weight_gradient,
    )


@cache
def _list_parts(
    pools: tuple[str, ...], pass_name: str, stage: str, *, is_collective: bool, is_weight_gradient: bool
) -> tuple[str, ...]:
    if is_collective and pools:
        return (collective_part(pools[0], stage),)
    if pass_name == "step":
        return ("step",)
    parts = (stage, *map(compute_part, pools))
    return (*parts, WEIGHT_GRADIENTS) if stage == "every" and is_weight_gradient else parts


def compose_parts(
    parts: Mapping[str, Numeric],
    passes: Count,
    layout: ParallelLayout,
    software: Software,
    *,
    layers_per_stage: Count = 1,
    num_spare: Count = 0,
) -> tuple[Any, Any]:
    """Compose the parts of a step into its time and its bubble.

    Args:
        parts: Times by name of the part, numbers or arrays that broadcast together; a missing part takes no time. [s]
        passes: Micro-batches of a step.
        layout: Pipeline degree, chunks and schedule; its other degrees have no effect.
        software: Determines what overlaps.
        layers_per_stage: Layers of the busiest stage.
        num_spare: Layers that the other stages together have fewer, see rebalance_ends.

    Returns:
        Step and bubble. [s]
    """
    times_s = add_exposed_communication(parts, software, exchange_overlap_fraction(software, layout, passes))
    if np.any(num_spare):
        layer_s = times_s["every"] / layers_per_stage
        times_s["first"], times_s["last"] = rebalance_ends(
            times_s["first"], times_s["last"], layer_s, num_spare, layers_per_stage, layout.ends_as_layers
        )
    return combine_stages(times_s, passes, layout)


def add_exposed_communication(
    parts: Mapping[str, Numeric],
    software: Software,
    exchange_overlap: Numeric = 0.0,
    pools: Sequence[str] = COLLECTIVE_POOLS,
) -> dict[str, Any]:
    """Add the exposed share of overlappable communication to the times of the stages.

    Args:
        parts: Times by name of the part. [s]
        software: Determines what overlaps.
        exchange_overlap: See exchange_overlap_fraction.
        pools: Pools of communication to add.

    Returns:
        Times of the parts in EXPOSED_PARTS. [s]
    """
    times_s: dict[str, Any] = {name: parts.get(name, 0.0) for name in EXPOSED_PARTS}
    compute_s = {pool: parts.get(compute_part(pool), 0.0) for pool in COMPUTE_POOLS}
    for pool in pools:
        names = {stage: collective_part(pool, stage) for stage in STAGES}
        collective_s = {stage: parts[name] for stage, name in names.items() if name in parts}
        if not collective_s:
            continue
        exposed: Any = 1.0
        if pool != EXPERT_EXCHANGES or np.any(exchange_overlap):
            total_s: Any = sum(collective_s.values())
            # Without communication its exposed time is zero, whatever the fraction.
            exposed = exposed_fraction(
                pool_compute_s(compute_s, pool), np.maximum(total_s, 1e-300), pool, software, exchange_overlap
            )
        for stage, part_s in collective_s.items():
            times_s[stage] = times_s[stage] + exposed * part_s
    return times_s
