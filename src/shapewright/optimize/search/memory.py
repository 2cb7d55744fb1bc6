"""Memory of many shapes: the memory estimate is traced once for each path through its branches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.core.traced import Tape, evaluate
from shapewright.memory import count_cached_elements, estimate_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Float, Int, Num

    from shapewright.core.traced import Guard, Node
    from shapewright.models import TransformerConfig
    from shapewright.optimize.search.steps import VariedScenario
    from shapewright.workload import Workload

    Bytes = Float[np.ndarray, " shapes"]


class _TracedEstimate(NamedTuple):
    """The estimate along one path through its branches, which holds where the guards have their values."""

    guards: list[Guard]
    total_bytes: Node
    kv_bytes_per_token: Node


def kv_bytes_per_token(config: TransformerConfig, workload: Workload) -> Any:
    """Return the bytes that one token adds to the KV cache of the whole model, ignoring attention windows. [byte]

    A traced config gives a traced number.
    """
    width_bytes = get_dtype(workload.kv_cache_dtype or workload.dtype).num_bytes
    return width_bytes * config.num_layers * count_cached_elements(config)


class MemoryOfShapes:
    """Estimates the memory of one device, and the KV cache per token, for columns of shapes."""

    def __init__(self, varied: VariedScenario) -> None:
        self._varied = varied
        self._traced: list[_TracedEstimate] = []

    def estimate(self, shapes: Mapping[str, Int[np.ndarray, " shapes"]]) -> tuple[Bytes, Bytes]:
        """Return total bytes of the fullest device, and bytes that one token adds to the whole KV cache. [byte]

        Args:
            shapes: Varied fields, one entry per shape.
        """
        count = len(next(iter(shapes.values())))
        total_bytes, kv_bytes = np.zeros(count), np.zeros(count)
        left = np.arange(count)
        known = iter(list(self._traced))
        while len(left):
            columns = {name: column[left] for name, column in shapes.items()}
            traced = next(known, None) or self._trace({name: int(column[0]) for name, column in columns.items()})
            memo: dict[Node, Num[np.ndarray, ...]] = {}
            holds = np.ones(len(left), dtype=bool)
            for guard in traced.guards:
                holds &= np.broadcast_to(evaluate(guard.node, columns, memo) == guard.outcome, holds.shape)
            for target, node in ((total_bytes, traced.total_bytes), (kv_bytes, traced.kv_bytes_per_token)):
                target[left[holds]] = np.broadcast_to(evaluate(node, columns, memo), holds.shape)[holds]
            left = left[~holds]
        return total_bytes, kv_bytes

    def _trace(self, shape: dict[str, int]) -> _TracedEstimate:
        tape = Tape()
        config, workload = self._varied.traced(tape, shape)
        total = tape.node_for(estimate_memory(config, workload, self._varied.scenario.layout).total_bytes)
        kv = tape.node_for(kv_bytes_per_token(config, workload))
        self._traced.append(_TracedEstimate(tape.guards, total, kv))
        return self._traced[-1]
