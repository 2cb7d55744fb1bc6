"""Keep the best of many shapes: the fastest of each kind of change, and the Pareto front.

A table is a dict of columns of one length, one row per shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Table = dict[str, NDArray[Any]]

# Differences that no prediction can tell apart count as none, or the front would be half of the space.
_TIME_STEP, _PARAMETERS_STEP, _MEMORY_STEP = 0.005, 0.005, 0.01


def join(tables: Sequence[Table]) -> Table:
    """Put tables below each other."""
    return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}


def take(table: Table, rows: NDArray[Any]) -> Table:
    """Some rows of a table."""
    return {name: column[rows] for name, column in table.items()}


def best_of_each(table: Table, count: int) -> Table:
    """The cheapest rows of each kind of change, at most ``count`` of a kind."""
    order = np.lexsort((table["cost"], table["changes"]))
    kinds = table["changes"][order]
    starts = np.flatnonzero(np.r_[True, kinds[1:] != kinds[:-1]])
    place = np.arange(len(kinds)) - np.repeat(starts, np.diff(np.r_[starts, len(kinds)]))
    return take(table, order[place < count])


def pareto(table: Table) -> Table:
    """Rows that no other row beats: in time per token, parameters (more is better), KV bytes per token and memory.

    Differences below half a per cent (memory: one per cent) count as none; of rows alike the cheapest is kept.
    So is the cheapest of all, which leads the list of shapes: rounding may put it behind one of a few more parameters.
    """
    columns = np.stack(
        [
            np.floor(np.log(table["token_s"]) / _TIME_STEP),
            -np.floor(np.log(table["parameters"].astype(float)) / _PARAMETERS_STEP),
            table["kv_bytes"],
            np.floor(np.log(table["memory_bytes"]) / _MEMORY_STEP),
        ],
        axis=1,
    )
    cheapest = int(np.lexsort((table["changes"], table["cost"]))[0])  # of several the one that the list takes too
    order = np.lexsort((table["cost"], *columns.T[::-1]))
    columns = columns[order]
    fresh = np.r_[True, (columns[1:] != columns[:-1]).any(axis=1)]
    order, columns = order[fresh], columns[fresh]
    # Whatever beats a row has a smaller sum of places, so that nothing that comes later beats the first one left.
    places = sum(np.asarray(np.unique(column, return_inverse=True)[1]).reshape(-1) for column in columns.T)
    by_places = np.argsort(places, kind="stable")
    order, columns = order[by_places], columns[by_places]
    kept: list[int] = []
    while len(order):
        kept.append(int(order[0]))
        left = (columns[:, 0] < columns[0, 0]) | (columns[:, 1] < columns[0, 1])
        left |= (columns[:, 2] < columns[0, 2]) | (columns[:, 3] < columns[0, 3])
        order, columns = order[left], columns[left]
    kept = [cheapest, *(row for row in kept if row != cheapest)]
    return take(table, np.array(sorted(kept, key=lambda row: table["cost"][row]), dtype=np.int64))
