"""OperationRows: the operations of many passes that differ in sizes alone, kept as arrays."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shapewright.lowering.operations.base import STAGES

if TYPE_CHECKING:
    from jaxtyping import Int

    from shapewright.lowering.operations.operation import Operation


class OperationRows:
    """Operations of passes that have the same kinds of operations in the same order: row i holds those of pass i.

    Args:
        operations: One of each kind; its sizes are arrays with a number for each row, or numbers that all rows share.
        num_rows: Length of the arrays.
    """

    def __init__(self, operations: tuple[Operation, ...], num_rows: int = 1) -> None:
        self.operations, self.num_rows = operations, num_rows
        self._parts: dict[Callable[[Operation], bool], OperationRows] = {}

    @cached_property
    def repeats(self) -> Int[np.ndarray, " operations"]:
        """Executions of each operation in a pass."""
        return np.array([int(each.repeats) for each in self.operations], dtype=int)

    @cached_property
    def num_kernels(self) -> int:
        """Executions of all operations in a pass."""
        return int(self.repeats.sum())

    @cached_property
    def stages(self) -> Int[np.ndarray, " operations"]:
        """Place in STAGES of the pipeline stage that runs each operation."""
        return np.array([STAGES.index(each.stage) for each in self.operations], dtype=int)

    @cached_property
    def _rows(self) -> list[tuple[Operation, ...]]:
        if not self.operations:
            return [()] * self.num_rows
        return list(zip(*(each.single_sizes(self.num_rows) for each in self.operations), strict=True))

    def row(self, index: int) -> tuple[Operation, ...]:
        """Return the operations of one pass, with numbers for sizes."""
        return self._rows[index]

    def where(self, is_wanted: Callable[[Operation], bool]) -> OperationRows:
        """Return the rows with some of the operations alone; calls with one function return one object."""
        if is_wanted not in self._parts:
            own = tuple(each for each in self.operations if is_wanted(each))
            self._parts[is_wanted] = OperationRows(own, self.num_rows)
        return self._parts[is_wanted]
