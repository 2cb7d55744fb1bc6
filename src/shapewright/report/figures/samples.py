"""Samples: operations with what was measured of them, if anything was, and what is predicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.errors import ShapewrightError
from shapewright.operations import Attention, Collective, Gemm, GroupedGemm, Pointwise
from shapewright.perf.pricing import price_operations
from shapewright.store.record import OK

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.operations import Operation
    from shapewright.perf.price import Price
    from shapewright.store.record import Row

SINGLE_OPERATIONS = (Gemm, GroupedGemm, Attention, Pointwise, Collective)


@dataclass(frozen=True)
class Sample:
    """One operation.

    Attributes:
        operation: What runs.
        measured_s: Median of its measurement; None where it was not measured. [s]
        name: Sweep or layer that it belongs to.
        variant: Kernel asked for.
        library: Library and versions; empty where it was not measured.
    """

    operation: Operation
    measured_s: float | None = None
    name: str = ""
    variant: str = ""
    library: str = ""


@dataclass(frozen=True)
class PricedSample:
    """A sample with its price."""

    sample: Sample
    price: Price

    @property
    def operation(self) -> Operation:
        """What runs."""
        return self.sample.operation


def samples_of(rows: Iterable[Row], *, device: str = "", suite: str = "") -> list[Sample]:
    """Good rows of single operations, each measurement once.

    Args:
        rows: Rows of a store.
        device: Canonical name to keep; all if empty.
        suite: Suite to keep; all if empty.
    """
    found = []
    for row in rows:
        if row.status != OK or row.repetition or not row.median_s:
            continue
        if (device and row.device != device) or (suite and row.suite != suite):
            continue
        operation = row.operation()
        if isinstance(operation, SINGLE_OPERATIONS):
            found.append(Sample(operation, row.median_s, row.name, row.variant, row.library))
    return found


def price_samples(samples: Sequence[Sample], device: Device, *, uncalibrated: bool = False) -> list[PricedSample]:
    """Price samples together; what the device has no price for is left out."""
    try:
        prices = price_operations([sample.operation for sample in samples], device, uncalibrated=uncalibrated)
        return [PricedSample(sample, price) for sample, price in zip(samples, prices, strict=True)]
    except ShapewrightError:
        found = []
        for sample in samples:
            try:
                (price,) = price_operations([sample.operation], device, uncalibrated=uncalibrated)
            except ShapewrightError:
                continue
            found.append(PricedSample(sample, price))
        return found
