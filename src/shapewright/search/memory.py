"""Memory of many shapes: the one estimate, traced once for each way through its branches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.dtypes import get_dtype
from shapewright.memory import count_cached_elements, estimate_memory
from shapewright.search.trace import Tape, evaluate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shapewright.config import TransformerConfig
    from shapewright.search.steps import Setting
    from shapewright.search.trace import Guard, Node
    from shapewright.workload import Workload


class _Way(NamedTuple):
    """One way through the branches."""

    guards: list[Guard]
    total_bytes: Node
    kv_bytes_per_token: Node


def kv_bytes_per_token(config: TransformerConfig, workload: Workload) -> float:
    """Bytes that one token adds to the KV cache of the whole model; what windows drop again is not taken off. [byte]"""
    width_bytes = get_dtype(workload.kv_cache_dtype or workload.dtype).num_bytes
    return width_bytes * config.num_layers * count_cached_elements(config)


class MemoryOfShapes:
    """Bytes of one device, and of the KV cache per token, for columns of shapes."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._ways: list[_Way] = []

    def estimate(self, shapes: Mapping[str, NDArray[np.int64]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Total bytes of the busiest device, and bytes that one token adds to the whole KV cache. [byte]

        Args:
            shapes: Varied fields, one entry per shape.
        """
        count = len(next(iter(shapes.values())))
        total_bytes, kv_bytes = np.zeros(count), np.zeros(count)
        left = np.arange(count)
        known = iter(list(self._ways))
        while len(left):
            columns = {name: column[left] for name, column in shapes.items()}
            way = next(known, None) or self._trace({name: int(column[0]) for name, column in columns.items()})
            memo: dict[Node, NDArray[Any]] = {}
            here = np.ones(len(left), dtype=bool)
            for guard in way.guards:
                here &= np.broadcast_to(evaluate(guard.node, columns, memo) == guard.outcome, here.shape)
            for target, node in ((total_bytes, way.total_bytes), (kv_bytes, way.kv_bytes_per_token)):
                target[left[here]] = np.broadcast_to(evaluate(node, columns, memo), here.shape)[here]
            left = left[~here]
        return total_bytes, kv_bytes

    def _trace(self, shape: dict[str, int]) -> _Way:
        tape = Tape()
        config, workload = self._setting.traced(tape, shape)
        total = tape.node_of(estimate_memory(config, workload, self._setting.layout).total_bytes)
        kv = tape.node_of(kv_bytes_per_token(config, workload))
        self._ways.append(_Way(tape.guards, total, kv))
        return self._ways[-1]
