"""Times of frames, as sums that recomputation, ZeRO stage and schedule are combined from.

Every operation comes from the one lowering and has the one price; here they are only added up, part by part, in the
columns that adding_up and its hiding of communication tell apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.adding_up import (
    BESIDE_PRODUCTS,
    EXCHANGES,
    POOLS,
    WEIGHT_GRADIENTS,
    cover_of,
    exposed_fraction,
    hidden_exchange_fraction,
    join_stages,
    pools_of,
    settle_ends,
)
from shapewright.lowering import is_weight_gradient
from shapewright.operations import Collective

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.layout import ParallelLayout
    from shapewright.operations import Operation
    from shapewright.perf.software import Software

    Array = NDArray[np.float64]

_STAGES = ("every", "first", "last")
# Pools that recomputation, sharding and schedule change; the last one is settled before.
_SIDES = tuple(pool for pool in POOLS if pool != BESIDE_PRODUCTS)
_EXCHANGED = f"wanted.{EXCHANGES}.every"  # experts are in layers alone
# Columns: times of the stages and of what runs once, computation that hides communication, communication that can be
# hidden, and gradients of weights.
COLUMNS = (
    *_STAGES,
    "step",
    *(f"cover.{pool}" for pool in POOLS),
    *(f"wanted.{pool}.{stage}" for pool in POOLS for stage in _STAGES),
    _EXCHANGED,
    WEIGHT_GRADIENTS,
)
_INDEX = {name: index for index, name in enumerate(COLUMNS)}


@dataclass(frozen=True)
class FrameSums:
    """Times of frames, by part and column. [s]

    Attributes:
        base: Forward and backward pass without sends. [frames, columns]
        recompute: What is computed again, and copied to the host and back. [frames, modes, columns]
        sharding: Gradient communication and optimiser step. [frames, shardings, columns]
        send: Sends between stages without chunks. [frames, columns]
        send_chunk: The same per chunk of an interleaved schedule. [frames, columns]
        software: What communication can hide behind.
        layers_per_stage: Layers of the busiest stage.
        num_spare: Layers by which the stages together have fewer than it.
    """

    base: Array
    recompute: Array
    sharding: Array
    send: Array
    send_chunk: Array
    software: Software
    layers_per_stage: int
    num_spare: int

    def under(self, num_shardings: int) -> FrameSums:
        """The same of the first shardings alone."""
        return replace(self, sharding=self.sharding[:, :num_shardings])

    def step_s(self, num_microbatches: NDArray[np.int64], layout: ParallelLayout) -> Array:
        """Step times of the frames under one order of passes. [frames, modes, shardings]

        Args:
            num_microbatches: Passes of a step. [frames]
            layout: Pipeline degree, chunks and schedule; nothing else of it counts.
        """
        chunks = layout.virtual_pipeline
        send = self.send if chunks == 1 else chunks * self.send_chunk
        total = (self.base + send)[:, None, None, :] + self.recompute[:, :, None, :] + self.sharding[:, None, :, :]
        sums: dict[str, Any] = {name: total[..., _INDEX[name]] for name in (*_STAGES, "step", WEIGHT_GRADIENTS)}
        passes = num_microbatches[:, None, None]
        covers = {pool: total[..., _INDEX[f"cover.{pool}"]] for pool in POOLS}
        exchanged_s: Any = total[..., _INDEX[_EXCHANGED]]
        hidden = hidden_exchange_fraction(self.software, layout, passes)
        if np.any(hidden):
            cover_s = cover_of(covers, EXCHANGES)
            wanted_s = np.maximum(exchanged_s, 1e-300)
            exchanged_s = exchanged_s * exposed_fraction(cover_s, wanted_s, EXCHANGES, self.software, hidden)
        sums["every"] = sums["every"] + exchanged_s
        for side in _SIDES:
            wanted = {stage: total[..., _INDEX[f"wanted.{side}.{stage}"]] for stage in _STAGES}
            wanted_s = wanted["every"] + wanted["first"] + wanted["last"]
            exposed = exposed_fraction(covers[side], np.maximum(wanted_s, 1e-300), side, self.software)
            shown = np.where(wanted_s > 0.0, exposed, 1.0)
            for stage in _STAGES:
                sums[stage] = sums[stage] + shown * wanted[stage]
        if self.num_spare:
            layer_s = sums["every"] / self.layers_per_stage
            ends = sums["first"], sums["last"], layer_s, self.num_spare, self.layers_per_stage
            sums["first"], sums["last"] = settle_ends(*ends)
        step_s, _ = join_stages(sums, passes, layout)
        return np.asarray(step_s, dtype=float)


def settle_products(base: Array, software: Software) -> Array:
    """Add the share of the tensor axis' communication that gradients of products do not hide to its stages.

    Recomputation, ZeRO stage and schedule change neither, so that it is done once for a frame.

    Args:
        base: Times of frames; changed in place. [frames, columns]
        software: What products hide.
    """
    wanted = {stage: base[:, _INDEX[f"wanted.{BESIDE_PRODUCTS}.{stage}"]] for stage in _STAGES}
    wanted_s = wanted["every"] + wanted["first"] + wanted["last"]
    cover_s = base[:, _INDEX[f"cover.{BESIDE_PRODUCTS}"]]
    shown = exposed_fraction(cover_s, np.maximum(wanted_s, 1e-300), BESIDE_PRODUCTS, software)
    for stage in _STAGES:
        base[:, _INDEX[stage]] += shown * wanted[stage]
    return base


def no_times(num_frames: int, num_shardings: int) -> Array:
    """Room for the times of gradient communication and optimiser step. [frames, shardings, columns]"""
    return np.zeros((num_frames, num_shardings, len(COLUMNS)))


def add_to_step(sharding: Array, times_s: Array) -> None:
    """Add what runs once a step to a frame, in place.

    Args:
        sharding: Times of the frame. [shardings, columns]
        times_s: What to add. [shardings, s]
    """
    sharding[:, _INDEX["step"]] += times_s


def add_rows(columns: Sequence[tuple[int, ...]], times_s: Array, rows: NDArray[np.int64], num_rows: int) -> Array:
    """Add up times by row and column. [sizes, rows, columns]

    Args:
        columns: Columns that each time belongs to, see columns_of.
        times_s: Times of all executions of operations, of several sizes. [s], [operations, sizes]
        rows: Row of each.
        num_rows: Rows of the result.
    """
    kinds: dict[tuple[int, ...], int] = {}
    codes = np.array([kinds.setdefault(each, len(kinds)) for each in columns])
    cells, num_cells = rows * len(kinds) + codes, num_rows * len(kinds)
    by_kind = np.array([np.bincount(cells, weights=own_s, minlength=num_cells) for own_s in times_s.T])
    spread = np.zeros((len(kinds), len(COLUMNS)))
    for each, code in kinds.items():
        spread[code, list(each)] = 1.0
    table: Array = by_kind.reshape(-1, num_rows, len(kinds)) @ spread
    return table


def columns_of(operation: Operation, pass_name: str = "") -> tuple[int, ...]:
    """Columns that the time of an operation belongs to, in its own pass or in another one."""
    pass_name = pass_name or operation.pass_name
    pools = pools_of(operation, pass_name)
    if isinstance(operation, Collective) and pools:
        return (_INDEX[f"wanted.{pools[0]}.{operation.stage}"],)
    key = (pools, pass_name, operation.stage)
    if key not in _COLUMNS_OF:
        _COLUMNS_OF[key] = _columns_of(*key)
    columns = _COLUMNS_OF[key]
    is_filler = operation.stage == "every" and is_weight_gradient(operation)
    return (*columns, _INDEX[WEIGHT_GRADIENTS]) if is_filler else columns


def _columns_of(pools: tuple[str, ...], pass_name: str, stage: str) -> tuple[int, ...]:
    if pass_name == "step":
        return (_INDEX["step"],)
    return (_INDEX[stage], *(_INDEX[f"cover.{pool}"] for pool in pools))


_COLUMNS_OF: dict[tuple[tuple[str, ...], str, str], tuple[int, ...]] = {}
