"""Go through a space: count parameters everywhere, price what has the right size, keep the best."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.config import count_parameters
from shapewright.errors import ConfigError
from shapewright.search.changes import encode_changes
from shapewright.search.front import best_of_each, join, pareto, take
from shapewright.search.grid import AXES, sum_of
from shapewright.search.memory import MemoryOfShapes
from shapewright.search.steps import Lowered, Refused, StepTimes, lower_grid
from shapewright.search.trace import Tape, plain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.search.front import Table
    from shapewright.search.grid import Grid, Sum
    from shapewright.search.space import Space
    from shapewright.search.steps import Setting

    Progress = Callable[[int, int], None]

# Shapes counted at once: eight bytes for each of a few columns.
_CHUNK = 1 << 20
# Shapes priced at once, so that their columns stay in a core's cache.
_PRICED_AT_ONCE = 1 << 16
_KEPT_OF_EACH = 50
# Faster shapes that wait to be sorted out together: 20 columns of eight bytes each.
_SORTED_OUT_AT = 1 << 17
# Sums over more parameters would leave 63 bits.
_MOST_COUNTED = 2**60


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a shape must keep to.

    Attributes:
        num_parameters: Parameters wanted.
        tolerance_fraction: How far from them a shape may be.
        memory_bytes: Most that one device may need. [byte]
        token_s: The baseline's time per token (or per step); slower shapes are of no interest. [s]
        cost: Its cost, that time per parameter a token uses; dearer shapes are only faster because they are smaller.
        per_step: Whether the step itself is to be short, and not the time of a token.
    """

    num_parameters: int
    tolerance_fraction: float
    memory_bytes: float
    token_s: float
    cost: float
    per_step: bool = False


@dataclass
class Tally:
    """How many shapes went where, and how near the rest came.

    Attributes:
        num_shapes: Shapes of the space.
        refused: Shapes that the layout or the workload cannot run, by reason.
        outside_guard: Shapes outside the quality guard.
        outside_budget: Shapes of another size.
        priced: Shapes whose step was predicted.
        too_large: Faster shapes that do not fit the device.
        faster: Faster shapes that fit.
        nearest_parameters: Size next to the wanted one among those inside the guard.
        least_memory_bytes: Least that a faster shape needs. [byte]
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

    @property
    def pruned(self) -> int:
        """Shapes that needed no price."""
        return sum(self.refused.values()) + self.outside_guard + self.outside_budget


@dataclass
class Findings:
    """The best shapes so far.

    Attributes:
        tally: What became of the space.
        best: The fastest few of each kind of change.
        front: The Pareto front.
        is_complete: Whether the whole space was looked at.
    """

    tally: Tally
    best: Table | None = None
    front: Table | None = None
    is_complete: bool = True
    _waiting: list[Table] = field(default_factory=list)

    def add(self, table: Table) -> None:
        """Take in more shapes; they are sorted out once there are many."""
        self._waiting.append(table)
        if sum(len(waiting["cost"]) for waiting in self._waiting) > _SORTED_OUT_AT:
            self.sort_out()

    def sort_out(self) -> None:
        """Put what was taken in where it belongs."""
        table = join(self._waiting) if self._waiting else None
        self._waiting.clear()
        if table is None or not len(table["cost"]):
            return
        self.best = best_of_each(table if self.best is None else join([self.best, table]), _KEPT_OF_EACH)
        self.front = pareto(table if self.front is None else join([self.front, table]))


def explore(space: Space, setting: Setting, limits: Limits, progress: Progress | None = None) -> Findings:
    """Look at every shape of a space.

    Args:
        space: The shapes.
        setting: What they have in common.
        limits: What they must keep to.
        progress: Told after each chunk how many shapes of how many are done.

    Returns:
        The best of them; what there is so far where the user interrupts.
    """
    _refuse_overflow(space.grid, setting)
    findings = Findings(Tally(num_shapes=space.grid.num_shapes))
    done = 0
    try:
        for part in lower_grid(space.grid, setting):
            if isinstance(part, Refused):
                findings.tally.refused[_without_numbers(str(part.reason))] += part.num_shapes
                done += part.num_shapes
                continue
            explorer = _Explorer(space, setting, limits, part, findings)
            for num_shapes in explorer.run():
                done += num_shapes
                if progress is not None:
                    progress(done, findings.tally.num_shapes)
    except KeyboardInterrupt:
        findings.is_complete = False
    findings.sort_out()
    return findings


def _without_numbers(message: str) -> str:
    """What is wrong, the same for all shapes with which it is wrong.

    >>> _without_numbers("tensor_parallel=8 must divide num_heads=20; try 4")
    'tensor_parallel=8 must divide num_heads'
    """
    wrong = message.partition(";")[0]
    return re.sub(
        r"\b(num_heads|num_kv_heads|intermediate_size|moe_intermediate_size|vocab_size|num_layers)=\d+", r"\1", wrong
    )


def _refuse_overflow(grid: Grid, setting: Setting) -> None:
    largest = {name: int(column.max()) for axis in AXES for name, column in grid.columns[axis].items()}
    total = plain(count_parameters(setting.traced(Tape(), largest)[0]).total)
    if total > _MOST_COUNTED:
        raise ConfigError(f"shapes of up to {total:.1e} parameters are too large to search; start from a smaller model")


class _Explorer:
    """Goes through the part of a space that lowers alike."""

    def __init__(self, space: Space, setting: Setting, limits: Limits, part: Lowered, findings: Findings) -> None:
        self._space, self._setting, self._limits, self._findings = space, setting, limits, findings
        self._grid = part.grid
        self._times = StepTimes(part, setting)
        self._memory = MemoryOfShapes(setting)
        counts = count_parameters(setting.traced(tape := Tape(), self._grid.first())[0])
        total, active = tape.node_of(counts.total), tape.node_of(counts.active)
        self._parameters = sum_of(self._grid, total)
        self._active: Sum | None = None if active is total else sum_of(self._grid, active)

    def run(self) -> Iterator[int]:
        """Go through all shapes; yields how many were done, chunk by chunk."""
        num_rows = self._grid.lengths[0]
        per_row = self._grid.num_shapes // num_rows
        rows_at_once = max(1, _CHUNK * self._grid.lengths[-1] // per_row)
        for first in range(0, num_rows, rows_at_once):
            rows = np.arange(first, min(first + rows_at_once, num_rows))
            for index in self._of_right_size(rows):
                self._findings.add(self._price(index))
            yield per_row * len(rows)

    def _of_right_size(self, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], ...]]:
        """Indices of the shapes inside guard and budget."""
        limits, tally = self._limits, self._findings.tally
        num_batches = self._grid.lengths[-1]
        shape = (len(rows), *self._grid.lengths[1:-1], 1)
        allowed = np.broadcast_to(self._space.allowed(self._grid, rows), shape)
        total = np.broadcast_to(self._parameters.on_rows(rows), shape)
        distance = np.abs(total - limits.num_parameters)
        hits = allowed & (distance <= limits.tolerance_fraction * limits.num_parameters)
        num_allowed, num_hits = int(allowed.sum()), int(hits.sum())
        tally.outside_guard += (allowed.size - num_allowed) * num_batches
        tally.outside_budget += (num_allowed - num_hits) * num_batches
        if num_allowed and not num_hits and not tally.priced:
            nearest = int(np.argmin(np.where(allowed, distance, np.iinfo(np.int64).max)))
            size = int(total.reshape(-1)[nearest])
            known = tally.nearest_parameters
            if known is None or abs(size - limits.num_parameters) < abs(known - limits.num_parameters):
                tally.nearest_parameters = size
        found = np.flatnonzero(hits)
        for first in range(0, len(found), _PRICED_AT_ONCE):
            place = np.unravel_index(found[first : first + _PRICED_AT_ONCE], shape)
            repeated = [np.repeat(positions, num_batches) for positions in place[:-1]]
            batches = np.tile(np.arange(num_batches), len(place[0]))
            yield (rows[repeated[0]], *repeated[1:], batches)

    def _price(self, index: tuple[NDArray[np.int64], ...]) -> Table:
        """Shapes at an index that are faster than the baseline and fit."""
        limits, tally = self._limits, self._findings.tally
        step_s = self._times.step_s(index)
        active: Any = (self._active or self._parameters).at(index)
        token_s = step_s / (1.0 if limits.per_step else self._times.num_tokens(index))
        cost = token_s / active
        tally.priced += len(cost)
        faster = np.flatnonzero((cost < limits.cost) & (token_s < limits.token_s))
        index = tuple(positions[faster] for positions in index)
        fields = self._grid.fields_at(index)
        memory_bytes, kv_bytes = self._memory.estimate(fields) if len(faster) else (np.zeros(0), np.zeros(0))
        table: Table = {
            **fields,
            "step_s": step_s[faster],
            "token_s": token_s[faster],
            "cost": cost[faster],
            "parameters": self._parameters.at(index),
            "memory_bytes": memory_bytes,
            "kv_bytes": kv_bytes,
            "changes": encode_changes(fields, self._setting),
        }
        fits = memory_bytes <= limits.memory_bytes
        tally.faster += int(fits.sum())
        tally.too_large += int((~fits).sum())
        if len(memory_bytes):
            least = float(memory_bytes.min())
            tally.least_memory_bytes = min(least, tally.least_memory_bytes or least)
        return take(table, np.flatnonzero(fits))
