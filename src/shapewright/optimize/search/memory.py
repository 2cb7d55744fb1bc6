"""Memory of many shapes: the memory estimate is traced once for each path through its branches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.core.traced import Tape, evaluate
from shapewright.memory import count_cached_elements, estimate_memory
from shapewright.models.layers import ATTENTION, mixers_of
from shapewright.optimize.search.space.grid import AXES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Float, Num

    from shapewright.core.traced import Guard, Node
    from shapewright.models import TransformerConfig
    from shapewright.optimize.search.space.grid import Grid, Index
    from shapewright.optimize.search.steps import VariedScenario
    from shapewright.workload import Workload

    Bytes = Float[np.ndarray, " shapes"]


# Combinations of the fields of some shapes, over those shapes, up to which all combinations are estimated.
_MOST_OVER_SHAPES = 3


class _TracedEstimate(NamedTuple):
    """The estimate along one path through its branches, which holds where the guards have their values."""

    guards: list[Guard]
    total_bytes: Node
    kv_bytes_per_token: Node

    def holds(self, columns: Mapping[str, Any], memo: dict[Node, Num[np.ndarray, ...]]) -> Any:
        """Return whether shapes take this path; expressions computed on the way are added to a memo."""
        holds: Any = np.True_
        for guard in self.guards:
            is_equal = evaluate(guard.node, columns, memo) == guard.outcome
            if not np.all(is_equal):
                holds = holds & is_equal
        return holds


def kv_bytes_per_token(config: TransformerConfig, workload: Workload) -> Any:
    """Return the bytes that one token adds to the KV cache of the whole model, ignoring attention windows. [byte]

    A traced config gives a traced number.
    """
    width_bytes = get_dtype(workload.kv_cache_dtype or workload.dtype).num_bytes
    num_layers = config.num_layers
    if config.is_hybrid:
        num_layers = sum(
            group.num_layers for group in config.layer_groups() if ATTENTION in mixers_of(group.layer_type)
        )
    return width_bytes * num_layers * count_cached_elements(config)


class MemoryOfShapes:
    """Estimates the memory of one device, and the KV cache per token, for columns of shapes."""

    def __init__(self, varied: VariedScenario) -> None:
        self._varied = varied
        # By number of layers: stages iterate over them, so that an estimate holds for one number only.
        self._traced: dict[int, list[_TracedEstimate]] = {}

    def estimate(self, grid: Grid, index: Index) -> tuple[Bytes, Bytes]:
        """Return total bytes of the fullest device, and bytes that one token adds to the whole KV cache. [byte]

        Args:
            index: Positions on the axes of the grid, one entry per shape.
        """
        count = len(index[0])
        total_bytes, kv_bytes = np.zeros(count), np.zeros(count)
        depths, layers = index[AXES.index("depth")], grid.columns["depth"].get("num_layers")
        for depth in np.unique(depths):
            left = np.flatnonzero(depths == depth)
            known = self._traced.setdefault(0 if layers is None else int(layers[depth]), [])
            waiting = iter([*known])
            while len(left):
                here = tuple(positions[left] for positions in index)
                traced = next(waiting, None)
                if traced is None:
                    first = grid.fields_at(tuple(positions[:1] for positions in here))
                    traced = self._trace({name: int(column[0]) for name, column in first.items()})
                    known.append(traced)
                columns, shape, places = _on_axes(grid, here)
                memo: dict[Node, Num[np.ndarray, ...]] = {}
                with np.errstate(all="ignore"):  # of shapes that take another path
                    holds = traced.holds(columns, memo)
                    total, kv = (
                        np.broadcast_to(evaluate(node, columns, memo), shape).reshape(-1)[places]
                        for node in (traced.total_bytes, traced.kv_bytes_per_token)
                    )
                if holds is np.True_:
                    total_bytes[left], kv_bytes[left] = total, kv
                    break
                holds = np.broadcast_to(holds, shape).reshape(-1)[places]
                total_bytes[left[holds]], kv_bytes[left[holds]] = total[holds], kv[holds]
                left = left[~holds]
        return total_bytes, kv_bytes

    def _trace(self, shape: dict[str, int]) -> _TracedEstimate:
        tape = Tape()
        config, workload = self._varied.traced(tape, shape)
        total = tape.node_for(estimate_memory(config, workload, self._varied.scenario.layout).total_bytes)
        kv = tape.node_for(kv_bytes_per_token(config, workload))
        return _TracedEstimate(tape.guards, total, kv)


def _on_axes(grid: Grid, index: Index) -> tuple[dict[str, Any], tuple[int, ...], Any]:
    """Return fields of shapes over the axes that they lie on, the combined length of those, and each shape's place.

    Expressions of few fields are then computed for few entries. Where the shapes are few of all combinations, they are
    one axis.
    """
    entries, shape, places = list[Any](), list[int](), np.zeros(len(index[0]), dtype=np.int64)
    for positions, length in zip(index, grid.lengths, strict=True):
        is_used = np.zeros(length, dtype=bool)
        is_used[positions] = True
        entries.append(np.flatnonzero(is_used))
        shape.append(len(entries[-1]))
        places = places * shape[-1] + (np.cumsum(is_used) - 1)[positions]
    if np.prod(shape) > _MOST_OVER_SHAPES * len(index[0]):
        return grid.fields_at(index), (len(index[0]),), slice(None)
    columns = {
        name: column[used].reshape([-1 if other == axis else 1 for other in AXES])
        for axis, used in zip(AXES, entries, strict=True)
        for name, column in grid.columns[axis].items()
    }
    return columns, tuple(shape), places
