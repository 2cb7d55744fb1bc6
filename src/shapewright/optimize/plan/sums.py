"""Times of splits by part of a step, from which the steps of all combinations of a split are composed.

A split is combined with recomputation, ZeRO stage and pipeline schedule. Each of them changes its own share of the
parts of a step (prediction.composition.parts), so that the shares are computed once and added for every combination.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.prediction.composition import (
    EXPERT_EXCHANGES,
    GRADIENT_GEMMS,
    STAGES,
    STEP_PARTS,
    add_exposed_communication,
    collective_part,
    compose_parts,
    parts_of,
)

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from shapewright.lowering.operations import Operation
    from shapewright.pricing.software import Software
    from shapewright.workload import ParallelLayout

    SplitTimes = Float[np.ndarray, "splits columns"]
    PolicyTimes = Float[np.ndarray, "splits policies columns"]
    ShardingTimes = Float[np.ndarray, "splits shardings columns"]
    StepTimes = Float[np.ndarray, "splits policies shardings"]

# Communication of the experts is in layers alone.
_ABSENT_PARTS = frozenset(collective_part(EXPERT_EXCHANGES, stage) for stage in ("first", "last"))
COLUMNS = tuple(part for part in STEP_PARTS if part not in _ABSENT_PARTS)
"""Parts of a step, in the order of the columns of the arrays here."""
_INDEX = {name: index for index, name in enumerate(COLUMNS)}
# Exposed before splits are combined, see expose_tensor_communication.
_EXPOSED_EARLY = frozenset(collective_part(GRADIENT_GEMMS, stage) for stage in STAGES)


@dataclass(frozen=True)
class SplitSums:
    """Times of splits of one pipeline degree, by part of a step. [s]

    Attributes:
        base: Forward and backward pass without sends.
        recompute: Recomputation, and copies to the host and back.
        sharding: Gradient communication and optimizer step.
        send: Sends between stages without chunks.
        send_chunk: Sends per chunk of an interleaved schedule.
        software: Determines what overlaps.
        layers_per_stage: Layers of the busiest stage.
        num_spare: Layers that the other stages together have fewer.
    """

    base: SplitTimes
    recompute: PolicyTimes
    sharding: ShardingTimes
    send: SplitTimes
    send_chunk: SplitTimes
    software: Software
    layers_per_stage: int
    num_spare: int

    def first_shardings(self, num_shardings: int) -> SplitSums:
        """Return the times of the first shardings only."""
        return replace(self, sharding=self.sharding[:, :num_shardings])

    def step_s(self, num_microbatches: Int[np.ndarray, " splits"], layout: ParallelLayout) -> StepTimes:
        """Return the step times of the splits under one schedule. [s]

        Args:
            num_microbatches: Micro-batches of a step.
            layout: Pipeline degree, chunks and schedule; its other degrees have no effect.
        """
        chunks = layout.virtual_pipeline
        send = self.send if chunks == 1 else chunks * self.send_chunk
        total = (self.base + send)[:, None, None, :] + self.recompute[:, :, None, :] + self.sharding[:, None, :, :]
        step_s, _ = compose_parts(
            {name: total[..., index] for name, index in _INDEX.items() if name not in _EXPOSED_EARLY},
            num_microbatches[:, None, None],
            layout,
            self.software,
            layers_per_stage=self.layers_per_stage,
            num_spare=self.num_spare,
        )
        return np.asarray(step_s, dtype=float)


def expose_tensor_communication(base: SplitTimes, software: Software) -> SplitTimes:
    """Add the exposed share of tensor communication to its stages, and return the array.

    Recomputation, ZeRO stage and schedule do not change it, so it is computed once per split.

    Args:
        base: Times of splits; changed in place. [s]
        software: Determines what overlaps.
    """
    parts: dict[str, Any] = {name: base[:, index] for name, index in _INDEX.items()}
    exposed = add_exposed_communication(parts, software, pools=(GRADIENT_GEMMS,))
    for stage in STAGES:
        base[:, _INDEX[stage]] = exposed[stage]
    return base


def zero_sharding_times(num_splits: int, num_shardings: int) -> ShardingTimes:
    """Return an array for the times of gradient communication and optimizer step. [s]"""
    return np.zeros((num_splits, num_shardings, len(COLUMNS)))


def add_to_step(sharding: Float[np.ndarray, "shardings columns"], times_s: Float[np.ndarray, " shardings"]) -> None:
    """Add work that runs once per step to a split, in place.

    Args:
        sharding: Times of the split. [s]
        times_s: Times to add. [s]
    """
    sharding[:, _INDEX["step"]] += times_s


def sum_by_row(
    columns: Sequence[tuple[int, ...]],
    times_s: Float[np.ndarray, "operations sizes"],
    rows: Int[np.ndarray, " operations"],
    num_rows: int,
) -> Float[np.ndarray, "sizes rows columns"]:
    """Sum times by row and column. [s]

    Args:
        columns: Columns that each time belongs to, see columns_of.
        times_s: Times of all executions of operations, of several sizes. [s]
        rows: Row of each operation.
        num_rows: Rows of the result.
    """
    kinds: dict[tuple[int, ...], int] = {}
    codes = np.array([kinds.setdefault(each, len(kinds)) for each in columns])
    cells, num_cells = rows * len(kinds) + codes, num_rows * len(kinds)
    by_kind = np.array([np.bincount(cells, weights=own_s, minlength=num_cells) for own_s in times_s.T])
    spread = np.zeros((len(kinds), len(COLUMNS)))
    for each, code in kinds.items():
        spread[code, list(each)] = 1.0
    table: Float[np.ndarray, "sizes rows columns"] = by_kind.reshape(-1, num_rows, len(kinds)) @ spread
    return table


_COLUMNS_OF_PARTS: dict[tuple[str, ...], tuple[int, ...]] = {}


def columns_of(operation: Operation, pass_name: str = "") -> tuple[int, ...]:
    """Return the columns that the time of an operation is added to, in its own pass or in another one."""
    parts = parts_of(operation, pass_name)
    columns = _COLUMNS_OF_PARTS.get(parts)
    if columns is None:
        columns = _COLUMNS_OF_PARTS[parts] = tuple(_INDEX[part] for part in parts)
    return columns
