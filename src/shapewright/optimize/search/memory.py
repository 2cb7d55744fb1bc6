"""Memory of many shapes: the estimate is traced once for each path through its branches, as sums over the grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.core.traced import Node, Tape
from shapewright.memory.estimate import count_cached_elements, estimate_memory
from shapewright.models.compressed_attention import make_compressed
from shapewright.models.layers import ATTENTION, mixers_of
from shapewright.optimize.search.space.grid import AXES, Sum, sum_of

if TYPE_CHECKING:
    from jaxtyping import Float

    from shapewright.core.traced import Guard
    from shapewright.models.transformer import TransformerConfig
    from shapewright.optimize.search.space.grid import Grid, Index
    from shapewright.optimize.search.steps import VariedScenario
    from shapewright.workload.workload import Workload

    Bytes = Float[np.ndarray, " shapes"]


_DEPTH = AXES.index("depth")
# Traced comparisons of two numbers, applied to their difference and 0.
_COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal}
_COMPARISONS |= {"ne": np.not_equal}


class _Condition(NamedTuple):
    """A guard of a trace that some shapes of the grid fail.

    Attributes:
        number: The number that the guard tests.
        holds: Returns whether a value of it gives the outcome that the traced shape had.
    """

    number: Sum
    holds: Callable[[Any], Any]


class _TracedEstimate(NamedTuple):
    """The estimate along one path through its branches, which holds where all conditions hold."""

    conditions: list[_Condition]
    total_bytes: Sum
    kv_bytes_per_token: Sum


def kv_bytes_per_token(config: TransformerConfig, workload: Workload) -> Any:
    """Return the bytes that one token adds to the KV cache of the whole model, ignoring attention windows. [byte]

    Compressed attention caches its compressed entries. A traced config gives a traced number.
    """
    width_bytes = get_dtype(workload.kv_cache_dtype or workload.dtype).num_bytes
    if config.compressed_layers:
        return width_bytes * sum(
            group.num_layers * each.head_dim / each.ratio
            for group in config.layer_groups()
            for each in make_compressed(config, group.layer_type).compressors
        )
    num_layers = config.num_layers
    if config.is_hybrid:
        num_layers = sum(
            group.num_layers for group in config.layer_groups() if ATTENTION in mixers_of(group.layer_type)
        )
    return width_bytes * num_layers * count_cached_elements(config)


class ShapeMemoryEstimator:
    """Estimates the memory of one device, and the KV cache per token, for many shapes of a grid."""

    def __init__(self, varied: VariedScenario, grid: Grid) -> None:
        self._varied, self._grid = varied, grid
        # By entry of the axis of depth: the estimate iterates over layers, so a trace holds for one number of them.
        self._traced: dict[int, list[_TracedEstimate]] = {}

    def estimate(self, index: Index) -> tuple[Bytes, Bytes]:
        """Return total bytes of the fullest device, and bytes that one token adds to the whole KV cache. [byte]

        Args:
            index: Positions on the axes of the grid, one entry per shape.
        """
        count = len(index[0])
        total_bytes, kv_bytes = np.zeros(count), np.zeros(count)
        order = np.argsort(index[_DEPTH].astype(np.min_scalar_type(self._grid.lengths[_DEPTH])), kind="stable")
        num_at_depth = np.bincount(index[_DEPTH])
        ends = np.cumsum(num_at_depth)
        for depth in np.flatnonzero(num_at_depth):
            left = order[ends[depth] - num_at_depth[depth] : ends[depth]]
            known = self._traced.setdefault(int(depth), [])
            untried = iter([*known])
            while len(left):
                here = tuple(positions[left] for positions in index)
                traced = next(untried, None)
                if traced is None:
                    first = self._grid.fields_at(tuple(positions[:1] for positions in here))
                    traced = self._trace(int(depth), {name: int(column[0]) for name, column in first.items()})
                    known.append(traced)
                found = left
                if traced.conditions:
                    holds = np.logical_and.reduce([each.holds(each.number.at(here)) for each in traced.conditions])
                    found, left = left[holds], left[~holds]
                    here = tuple(positions[holds] for positions in here)
                else:
                    left = left[:0]
                total_bytes[found], kv_bytes[found] = traced.total_bytes.at(here), traced.kv_bytes_per_token.at(here)
        return total_bytes, kv_bytes

    def _trace(self, depth: int, shape: dict[str, int]) -> _TracedEstimate:
        tape = Tape()
        grid = self._grid.take(_DEPTH, np.array([depth]))
        config, workload = self._varied.traced(tape, shape)
        total = tape.node_for(estimate_memory(config, workload, self._varied.scenario.layout).total_bytes)
        kv = tape.node_for(kv_bytes_per_token(config, workload))
        conditions = [condition for guard in tape.guards for condition in _conditions_of(guard, grid)]
        return _TracedEstimate(conditions, sum_of(grid, total), sum_of(grid, kv))


def _conditions_of(guard: Guard, grid: Grid) -> Iterator[_Condition]:
    """Yield the condition of a guard, unless the range of its number shows that all shapes meet it."""
    node, outcome = guard
    compare = _COMPARISONS.get(node.op)
    if compare is not None:
        node = Node("sub", node.args, node.variables)
    number = sum_of(grid, node)

    def holds(value: Any) -> Any:
        return value == outcome if compare is None else compare(value, 0) == outcome

    low, high = number.range()
    is_decided = low == high or (compare not in (None, np.equal, np.not_equal) or low > 0 or high < 0)
    if not (is_decided and holds(low) and holds(high)):
        yield _Condition(number, holds)
