"""Findings of a search so far: the best shapes of each kind of change, the Pareto front, and counts of the rest.

A table is a dict of columns of one length, one row per shape.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Int, Num

    Table = dict[str, Num[np.ndarray, " _rows"]]

# Relative steps in which the front compares shapes: smaller differences are within the error of a prediction, and would
# put half of the space on the front.
_TIME_STEP, _QUALITY_STEP, _MEMORY_STEP = 0.005, 0.005, 0.01


def join(tables: Sequence[Table]) -> Table:
    """Concatenate tables."""
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def take(table: Table, rows: Int[np.ndarray, " chosen"]) -> Table:
    """Return some rows of a table."""
    return {name: column[rows] for name, column in table.items()}


def best_of_each_kind(table: Table, count: int) -> Table:
    """Return the rows of lowest cost of each kind of change, at most ``count`` of a kind."""
    order = np.lexsort((table["cost"], table["changes"]))
    kinds = table["changes"][order]
    starts = np.flatnonzero(np.r_[True, kinds[1:] != kinds[:-1]])
    rank_in_kind = np.arange(len(kinds)) - np.repeat(starts, np.diff(np.r_[starts, len(kinds)]))
    return take(table, order[rank_in_kind < count])


def pareto_front(table: Table) -> Table:
    """Return the Pareto front of time per token, quality (more is better), KV bytes per token and memory.

    Quality is the number of parameters; in a ranking by loss, the ratio of tokens that the baseline needs to reach its
    loss to those that the shape needs.

    Differences below half a percent (memory: one percent) are ignored; of equal rows the one of lowest cost is kept.
    The row of lowest cost is always kept, because it leads the list of shapes: rounding could let a shape with slightly
    more parameters dominate it.
    """
    values = (
        np.floor(np.log(table["token_s"]) / _TIME_STEP),
        -np.floor(np.log(table["quality"].astype(float)) / _QUALITY_STEP),
        table["kv_bytes"],
        np.floor(np.log(table["memory_bytes"]) / _MEMORY_STEP),
    )
    ranks = [np.asarray(np.unique(column, return_inverse=True)[1]).reshape(-1) for column in values]
    columns, cell = np.stack(ranks, axis=1), np.zeros(len(table["cost"]), dtype=np.int64)
    for rank in ranks:
        cell = cell * (int(rank.max()) + 1) + rank
    by_cost = np.lexsort((table["changes"], table["cost"]))
    cheapest = int(by_cost[0])  # the same one that leads the list of shapes
    order = by_cost[np.unique(cell[by_cost], return_index=True)[1]]
    # A row that dominates another has a smaller sum of ranks, so no later row dominates the first one left.
    order = order[np.argsort(columns[order].sum(axis=1), kind="stable")]
    columns = columns[order]
    kept: list[int] = []
    while len(order):
        kept.append(int(order[0]))
        left = (columns[:, 0] < columns[0, 0]) | (columns[:, 1] < columns[0, 1])
        left |= (columns[:, 2] < columns[0, 2]) | (columns[:, 3] < columns[0, 3])
        order, columns = order[left], columns[left]
    kept = [cheapest, *(row for row in kept if row != cheapest)]
    return take(table, np.array(sorted(kept, key=lambda row: table["cost"][row]), dtype=np.int64))


# Shapes kept of each kind of change.
_KEPT_OF_EACH = 50
# Shapes collected before they are merged; each has 20 columns of eight bytes.
_MERGED_AT = 1 << 17


@dataclass
class Tally:
    """Counts of the shapes of a space, and how close the rejected shapes come to the limits.

    Attributes:
        num_shapes: Shapes of the space.
        refused: Shapes that do not fit the layout or the workload, by reason.
        outside_guard: Shapes outside the quality guard.
        outside_budget: Shapes of another size.
        priced: Shapes whose step was predicted.
        too_large: Faster shapes that do not fit the device.
        faster: Faster shapes that fit.
        nearest_parameters: Parameters closest to the target number, of shapes inside the guard.
        least_memory_bytes: Lowest memory of a faster shape. [byte]
    """

    num_shapes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    outside_guard: int = 0
    outside_budget: int = 0
    priced: int = 0
    too_large: int = 0
    faster: int = 0
    nearest_parameters: int | None = None
    least_memory_bytes: float | None = None

    def add(self, other: Tally, target_parameters: int) -> None:
        """Add the counts of other shapes."""
        for name in ("num_shapes", "outside_guard", "outside_budget", "priced", "too_large", "faster"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.refused.update(other.refused)
        sizes = [size for size in (self.nearest_parameters, other.nearest_parameters) if size is not None]
        self.nearest_parameters = min(sizes, key=lambda size: abs(size - target_parameters), default=None)
        least = [each for each in (self.least_memory_bytes, other.least_memory_bytes) if each is not None]
        self.least_memory_bytes = min(least, default=None)

    @property
    def pruned(self) -> int:
        """Shapes that were rejected before they were priced."""
        return sum(self.refused.values()) + self.outside_guard + self.outside_budget


@dataclass
class Findings:
    """The best shapes so far.

    Attributes:
        tally: Counts of the shapes of the space.
        best: The fastest shapes of each kind of change.
        front: The Pareto front.
        is_complete: Whether the whole space was evaluated.
    """

    tally: Tally
    best: Table | None = None
    front: Table | None = None
    is_complete: bool = True
    _collected: list[Table] = field(default_factory=list)

    def add(self, table: Table) -> None:
        """Add shapes; they are merged once there are many."""
        self._collected.append(table)
        if sum(len(table["cost"]) for table in self._collected) > _MERGED_AT:
            self.merge_collected()

    def merge(self, other: Findings, target_parameters: int) -> None:
        """Add the merged findings of another job."""
        self.tally.add(other.tally, target_parameters)
        self.is_complete &= other.is_complete
        if other.best is not None:
            self.best = (
                other.best if self.best is None else best_of_each_kind(join([self.best, other.best]), _KEPT_OF_EACH)
            )
        if other.front is not None:
            self.front = other.front if self.front is None else pareto_front(join([self.front, other.front]))

    def merge_collected(self) -> None:
        """Merge the collected shapes into the best ones and the front."""
        table = join(self._collected) if self._collected else None
        self._collected.clear()
        if table is None or not len(table["cost"]):
            return
        self.best = best_of_each_kind(table if self.best is None else join([self.best, table]), _KEPT_OF_EACH)
        self.front = pareto_front(table if self.front is None else join([self.front, table]))
