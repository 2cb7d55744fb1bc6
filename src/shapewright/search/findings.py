"""What a search has found so far: the best shapes, the Pareto front, and what became of all others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shapewright.search.front import best_of_each, join, pareto

if TYPE_CHECKING:
    from shapewright.search.front import Table

# Fastest shapes that are kept of each kind of change.
_KEPT_OF_EACH = 50
# Faster shapes that wait to be sorted out together: 20 columns of eight bytes each.
_SORTED_OUT_AT = 1 << 17


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

    def add(self, other: Tally, wanted: int) -> None:
        """Take in what became of other shapes, when so many parameters are wanted."""
        for name in ("num_shapes", "outside_guard", "outside_budget", "priced", "too_large", "faster"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.refused.update(other.refused)
        sizes = [size for size in (self.nearest_parameters, other.nearest_parameters) if size is not None]
        self.nearest_parameters = min(sizes, key=lambda size: abs(size - wanted), default=None)
        least = [each for each in (self.least_memory_bytes, other.least_memory_bytes) if each is not None]
        self.least_memory_bytes = min(least, default=None)

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

    def merge(self, other: Findings, wanted: int) -> None:
        """Take in what another job has found and sorted out, when so many parameters are wanted."""
        self.tally.add(other.tally, wanted)
        self.is_complete &= other.is_complete
        if other.best is not None:
            self.best = other.best if self.best is None else best_of_each(join([self.best, other.best]), _KEPT_OF_EACH)
        if other.front is not None:
            self.front = other.front if self.front is None else pareto(join([self.front, other.front]))

    def sort_out(self) -> None:
        """Put what was taken in where it belongs."""
        table = join(self._waiting) if self._waiting else None
        self._waiting.clear()
        if table is None or not len(table["cost"]):
            return
        self.best = best_of_each(table if self.best is None else join([self.best, table]), _KEPT_OF_EACH)
        self.front = pareto(table if self.front is None else join([self.front, table]))
