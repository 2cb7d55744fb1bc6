"""Compose many inference passes at once: equal operations are priced once, and the sums of all passes are arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from shapewright.lowering.operations.base import STAGES
from shapewright.prediction.composition.stages import WEIGHT_GRADIENTS, PricedOperation, overlap_communication
from shapewright.prediction.composition.step import StepTimes, error_correlation, finish_step
from shapewright.pricing.operations import price_operations, price_rows

if TYPE_CHECKING:
    from jaxtyping import Float

    from shapewright.hardware import Device
    from shapewright.lowering.operations import Operation
    from shapewright.lowering.operations.rows import OperationRows
    from shapewright.models import TransformerConfig
    from shapewright.pricing.price import Price
    from shapewright.workload import ParallelLayout, Workload

Adjust = Callable[["Operation", "Price", "Device"], "Price"]
"""Returns the price of an operation as the software of the passes runs it."""


class LoweredPass(Protocol):
    """Operations of one inference pass, with the workload and the layout that they were lowered from."""

    @property
    def parts(self) -> Sequence[tuple[OperationRows, int]]:
        """The operations, in order: rows of operations, and which row."""

    @property
    def operations(self) -> Sequence[Operation]:
        """The same, one by one."""

    @property
    def workload(self) -> Workload:
        """The workload."""

    @property
    def layout(self) -> ParallelLayout:
        """The layout."""


def compose_passes(
    passes: Sequence[LoweredPass], config: TransformerConfig, device: Device, adjust: Adjust | None = None
) -> list[StepTimes]:
    """Price and compose many inference passes of one model, to the times that compose_step returns for each.

    In such a pass no communication overlaps and no operation computes a gradient.

    Args:
        adjust: None for today's kernels.
    """
    if not passes:
        return []
    groups = {id(rows): rows for each in passes for rows, _ in each.parts}
    operations, prices, found = price_rows(groups.values(), device)
    if adjust:
        prices = [adjust(operation, price, device) for operation, price in zip(operations, prices, strict=True)]
    places = dict(zip(groups, found, strict=True))
    parts = [part for each in passes for part in each.parts]
    place = np.concatenate([places[id(rows)][row] for rows, row in parts])
    repeats = np.concatenate([rows.repeats for rows, _ in parts])
    stage = np.concatenate([rows.stages for rows, _ in parts])
    lengths = [sum(len(rows.operations) for rows, _ in each.parts) for each in passes]
    own_pass = np.repeat(np.arange(len(passes)), lengths)

    time_s, low_s, high_s = (
        np.array([float(getattr(price, name)) for price in prices]) for name in ("time_s", "low_s", "high_s")
    )
    shared = np.array([error_correlation(price) for price in prices])
    total_s = time_s[place] * repeats
    stage_s = np.bincount(own_pass * len(STAGES) + stage, total_s, len(passes) * len(STAGES))

    def spread_s(end_s: Float[np.ndarray, " prices"]) -> Float[np.ndarray, " passes"]:
        """Return the half-width of the interval of each sum; see step._Spread."""
        width_s = np.where(total_s > 0.0, repeats * np.abs(end_s - time_s)[place], 0.0)
        alone = np.bincount(own_pass, (1.0 - shared)[place] * width_s * width_s, len(passes))
        together_s = np.bincount(own_pass, np.sqrt(shared)[place] * width_s, len(passes))
        return np.asarray(np.sqrt(alone + together_s**2))

    rows_s = zip(
        passes,
        stage_s.reshape(len(passes), len(STAGES)).tolist(),
        zip(spread_s(low_s).tolist(), spread_s(high_s).tolist(), strict=True),
        strict=True,
    )
    return [
        finish_step(
            {**dict(zip(STAGES, sums_s, strict=True)), "step": 0.0, WEIGHT_GRADIENTS: 0.0},
            sums_s[0],
            widths_s,
            config,
            each.workload,
            each.layout,
        )
        for each, sums_s, widths_s in rows_s
    ]


def price_passes(
    passes: Sequence[LoweredPass], device: Device, adjust: Adjust | None = None
) -> Iterator[list[PricedOperation]]:
    """Yield the priced operations of each pass, with overlapped communication, from one pricing call."""
    listed = [operation for each in passes for operation in each.operations]
    priced = price_operations(listed, device)
    if adjust:
        priced = [adjust(operation, price, device) for operation, price in zip(listed, priced, strict=True)]
    prices = iter(priced)
    for each in passes:
        yield overlap_communication([PricedOperation(operation, next(prices)) for operation in each.operations])
