"""Grids of shapes: each field varies along one axis, so values that depend on few fields are computed once.

Legend: the axes are ``heads`` (every allowed combination of width, heads, head_dim and key-value heads), ``ffn``,
``depth``, ``vocab`` and ``batch``. Values that depend on the width alone are computed per width, not per entry of
``heads``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.traced import evaluate, sum_of_products

if TYPE_CHECKING:
    from jaxtyping import Int, Num

    from shapewright.core.traced import Node

    PerShape = Int[np.ndarray, " shapes"]
    Positions = Int[np.ndarray, " positions"]
    Column = Int[np.ndarray, " entries"]
    OnGrid = Num[np.ndarray, "heads ffn depth vocab batch"]
    Index = tuple[PerShape, ...]
    Columns = Mapping[str, Mapping[str, Column]]

AXES = ("heads", "ffn", "depth", "vocab", "batch")

MOST_CELLS = 1 << 17
"""Values with more entries on the grid are computed per shape instead, after most shapes have been ruled out."""


class Values(NamedTuple):
    """An array over the grid.

    Attributes:
        array: Five axes, of length 1 where the values do not depend on them.
        by_heads: Whether the first axis runs over the entries of ``heads``; if not, over the distinct widths.
    """

    array: OnGrid
    by_heads: bool


class Grid:
    """All combinations of the entries of the axes.

    Args:
        columns: Values of the fields by axis and field; the columns of an axis have equal lengths.
        width_fields: Fields on ``heads`` that depend on the width alone, the width included.
    """

    def __init__(self, columns: Columns, width_fields: frozenset[str]) -> None:
        self.columns, self.width_fields = columns, width_fields
        self.lengths = tuple(max((len(column) for column in columns[axis].values()), default=1) for axis in AXES)
        self._memo: dict[Node, Values] = {}

    @property
    def num_shapes(self) -> int:
        """Number of combinations."""
        return int(np.prod(self.lengths, dtype=object))

    @cached_property
    def _widths(self) -> tuple[dict[str, Int[np.ndarray, " widths"]], Int[np.ndarray, " heads"]]:
        """Columns over the distinct widths, and the position of the width of each entry of ``heads``."""
        names = sorted(self.width_fields)
        rows = np.stack([self.columns["heads"][name] for name in names])
        unique, inverse = np.unique(rows, axis=1, return_inverse=True)
        return dict(zip(names, unique, strict=True)), np.asarray(inverse).reshape(-1)

    def count_cells(self, variables: frozenset[str]) -> int:
        """Return the size of an array of values that depend on some fields: the product of their axes' lengths."""
        count = 1
        for axis, length in zip(AXES, self.lengths, strict=True):
            here = variables & frozenset(self.columns[axis])
            if here:
                by_width = axis == "heads" and here <= self.width_fields
                count *= len(next(iter(self._widths[0].values()))) if by_width else length
        return count

    def first(self) -> dict[str, int]:
        """Return the fields of the first shape."""
        return {name: int(column[0]) for axis in AXES for name, column in self.columns[axis].items()}

    def take(self, axis: int, entries: Positions) -> Grid:
        """Return the part of the grid with some entries of one axis."""
        chosen = {name: column[entries] for name, column in self.columns[AXES[axis]].items()}
        return Grid({**self.columns, AXES[axis]: chosen}, self.width_fields)

    def fields_at(self, index: Index) -> dict[str, PerShape]:
        """Return the fields of the shapes at an index, one position per axis."""
        return {
            name: column[positions]
            for axis, positions in zip(AXES, index, strict=True)
            for name, column in self.columns[axis].items()
        }

    def evaluate(self, node: Node) -> Values:
        """Evaluate an expression over the axes that it depends on."""
        if node not in self._memo:
            if node.op == "variable":
                self._memo[node] = self._column(node.args[0])
            elif node.op == "constant":
                self._memo[node] = Values(np.asarray(node.args[0]).reshape((1,) * len(AXES)), by_heads=False)
            else:
                left, right = self.align(*(self.evaluate(argument) for argument in node.args))
                step = evaluate(node, {}, dict(zip(node.args, (left.array, right.array), strict=True)))
                self._memo[node] = Values(step, left.by_heads)
        return self._memo[node]

    def evaluate_at(self, node: Node, index: Index, memo: dict[Node, Num[np.ndarray, ...]]) -> Num[np.ndarray, ...]:
        """Evaluate an expression for the shapes at an index; terms that depend on few fields are read from the axes.

        Args:
            index: Positions on the axes, one entry per shape.
            memo: Expressions computed so far for these shapes; extended.
        """
        if node not in memo:
            if node.op in ("variable", "constant") or self.count_cells(node.variables) <= MOST_CELLS:
                memo[node] = self.read(self.evaluate(node), index)
            else:
                memo[node] = evaluate(
                    node, {}, {argument: self.evaluate_at(argument, index, memo) for argument in node.args}
                )
        return memo[node]

    def read(self, values: Values, index: Index) -> Any:
        """Return the entries of an array for the shapes at an index; one number if the array has only one."""
        flat: Any = 0
        for axis, length in enumerate(values.array.shape):
            if length > 1:
                by_width = axis == 0 and not values.by_heads
                flat = flat * length + (self._widths[1][index[axis]] if by_width else index[axis])
        return values.array.reshape(-1)[flat]

    def align(self, *values: Values) -> tuple[Values, ...]:
        """Return arrays whose first axes run over the same entries."""
        by_heads = any(value.by_heads for value in values)
        return tuple(self.expand_widths(value) if by_heads else value for value in values)

    def expand_widths(self, values: Values) -> Values:
        """Return an array over the entries of ``heads`` instead of the distinct widths."""
        if values.by_heads or values.array.shape[0] == 1:
            return Values(values.array, by_heads=True)
        return Values(values.array[self._widths[1]], by_heads=True)

    def width_of(self, positions: Positions) -> Positions:
        """Return the positions of the widths of entries of ``heads``."""
        widths: Positions = self._widths[1][positions]
        return widths

    def _column(self, name: str) -> Values:
        if name in self.width_fields:
            return Values(_on_axis(self._widths[0][name], 0), by_heads=False)
        for position, axis in enumerate(AXES):
            if name in self.columns[axis]:
                return Values(_on_axis(self.columns[axis][name], position), by_heads=position == 0)
        raise KeyError(name)


class Sum:
    """A sum of arrays over a grid; arrays over different axes are stored separately, because their sum is larger."""

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._parts: dict[tuple[bool, tuple[bool, ...]], OnGrid] = {}

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, values: Values) -> None:
        """Add one array."""
        key = (values.by_heads, tuple(length > 1 for length in values.array.shape))
        self._parts[key] = self._parts[key] + values.array if key in self._parts else values.array

    def merge(self, other: Sum, factor: Values | None = None) -> None:
        """Add another sum, times a factor."""
        for (by_heads, _), array in other._parts.items():
            values = Values(array, by_heads)
            if factor is not None:
                one, two = self.grid.align(values, factor)
                values = Values(one.array * two.array, one.by_heads)
            self.add(values)

    def fold(self) -> Sum:
        """Add each array to one that spans the same axes and more, if there is one."""
        ordered = sorted(self._parts.items(), key=lambda part: part[1].size)
        while ordered:
            (by_heads, axes), array = ordered.pop(0)
            for position, ((other_by_heads, other_axes), other) in enumerate(ordered):
                fits = all(other_axis or not axis for axis, other_axis in zip(axes, other_axes, strict=True))
                if fits and (by_heads <= other_by_heads or not axes[0]):
                    one, two = self.grid.align(Values(array, by_heads and axes[0]), Values(other, other_by_heads))
                    ordered[position] = ((other_by_heads, other_axes), one.array + two.array)
                    self._parts[other_by_heads, other_axes] = ordered[position][1]
                    del self._parts[by_heads, axes]
                    break
        return self

    def at(self, index: Index) -> Num[np.ndarray, " shapes"]:
        """Return the values of the shapes at an index, one position per axis."""
        total: Num[np.ndarray, " shapes"] = np.zeros(len(index[0]))
        for (by_heads, _), array in self._parts.items():
            total += self.grid.read(Values(array, by_heads), index)
        return total

    def range(self) -> tuple[Any, Any]:
        """Return bounds of the values: the sums of the least and of the largest entries of the arrays."""
        arrays = self._parts.values()
        return sum(array.min() for array in arrays), sum(array.max() for array in arrays)

    def on_rows(self, rows: Positions) -> OnGrid:
        """Return the values of all shapes at some entries of ``heads``; the result broadcasts over the other axes."""
        total: Any = 0
        for (by_heads, _), array in sorted(self._parts.items(), key=lambda part: part[1].size):
            chosen = array if array.shape[0] == 1 else array[rows if by_heads else self.grid.width_of(rows)]
            total = total + chosen
        return np.asarray(total)


def sum_of(grid: Grid, node: Node) -> Sum:
    """Return an expression over a grid as a sum, each part over the axes that it depends on."""
    # Products of the same expressions are combined: their constant factors are added.
    factors_of: dict[tuple[Node, ...], Any] = {}
    for product in sum_of_products(node):
        factor, numbers = 1, []
        for each in product:
            if each.op == "constant":
                factor *= each.args[0]
            else:
                numbers.append(each)
        key = tuple(sorted(numbers, key=id))
        factors_of[key] = factors_of.get(key, 0) + factor
    total = Sum(grid)
    for key, factor in factors_of.items():
        if factor:
            aligned = grid.align(*(grid.evaluate(number) for number in key))
            array = np.full((1,) * len(AXES), factor)
            for values in aligned:
                array = array * values.array
            total.add(Values(array, bool(aligned) and aligned[0].by_heads))
    return total.fold()


def split_by(grid: Grid, node: Node) -> Iterator[Grid]:
    """Cut a grid along one axis into parts on which an expression takes fewer values."""
    array = grid.expand_widths(grid.evaluate(node)).array
    axes = [axis for axis, length in enumerate(array.shape) if length > 1]
    axis = min(axes, key=lambda each: array.shape[each])
    rows = np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)
    kinds = np.asarray(np.unique(rows, axis=0, return_inverse=True)[1]).reshape(-1)
    for kind in range(int(kinds.max()) + 1):
        yield grid.take(axis, np.flatnonzero(kinds == kind))


def is_constant(grid: Grid, node: Node, value: Any) -> bool:
    """Return whether an expression has one value on the whole grid."""
    return bool(np.all(grid.evaluate(node).array == value))


def _on_axis(column: Column, axis: int) -> OnGrid:
    return column.reshape([-1 if each == axis else 1 for each in range(len(AXES))])
