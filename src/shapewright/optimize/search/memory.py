"""Memory of many shapes: the memory estimate is traced once for each path through its branches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.core.traced import Tape, evaluate
from shapewright.memory import count_cached_elements, estimate_memory
from shapewright.models.layers import ATTENTION, mixers_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Bool, Float, Int, Num

    from shapewright.core.traced import Guard, Node
    from shapewright.models import TransformerConfig
    from shapewright.optimize.search.steps import VariedScenario
    from shapewright.workload import Workload

    Bytes = Float[np.ndarray, " shapes"]
    PerShape = Int[np.ndarray, " shapes"]


class _TracedEstimate(NamedTuple):
    """The estimate along one path through its branches, which holds where the guards have their values."""

    guards: list[Guard]
    total_bytes: Node
    kv_bytes_per_token: Node

    def holds(
        self, columns: Mapping[str, PerShape], memo: dict[Node, Num[np.ndarray, ...]], count: int
    ) -> Bool[np.ndarray, " shapes"]:
        """Return whether each of some shapes takes this path; expressions computed on the way are added to a memo."""
        found = np.ones(count, dtype=bool)
        for guard in self.guards:
            found &= evaluate(guard.node, columns, memo) == guard.outcome
        return found


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

    def estimate(self, shapes: Mapping[str, PerShape]) -> tuple[Bytes, Bytes]:
        """Return total bytes of the fullest device, and bytes that one token adds to the whole KV cache. [byte]

        Args:
            shapes: Varied fields, one entry per shape.
        """
        count = len(next(iter(shapes.values())))
        total_bytes, kv_bytes = np.zeros(count), np.zeros(count)
        layers = shapes.get("num_layers", np.zeros(count, dtype=np.int64))
        for num_layers in np.unique(layers):
            left = np.flatnonzero(layers == num_layers)
            known = self._traced.setdefault(int(num_layers), [])
            waiting = iter([*known])
            while len(left):
                columns = {name: column[left] for name, column in shapes.items()}
                traced = next(waiting, None)
                if traced is None:
                    traced = self._trace({name: int(column[0]) for name, column in columns.items()})
                    known.append(traced)
                memo: dict[Node, Num[np.ndarray, ...]] = {}
                holds = traced.holds(columns, memo, len(left))
                if holds.all():
                    rows = left
                else:
                    rows, memo = left[holds], {}
                    columns = {name: column[holds] for name, column in columns.items()}
                total_bytes[rows] = evaluate(traced.total_bytes, columns, memo)
                kv_bytes[rows] = evaluate(traced.kv_bytes_per_token, columns, memo)
                left = left[~holds]
        return total_bytes, kv_bytes

    def _trace(self, shape: dict[str, int]) -> _TracedEstimate:
        tape = Tape()
        config, workload = self._varied.traced(tape, shape)
        total = tape.node_for(estimate_memory(config, workload, self._varied.scenario.layout).total_bytes)
        kv = tape.node_for(kv_bytes_per_token(config, workload))
        return _TracedEstimate(tape.guards, total, kv)
