"""Samples: operations with their measured time, if any, and their predicted price."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.core.errors import ShapewrightError
from shapewright.lowering.operations import Attention, Collective, Gemm, GroupedGemm, Pointwise
from shapewright.measure.store.record import OK
from shapewright.pricing.operations import price_operations

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.lowering.operations import Operation
    from shapewright.measure.store.record import Row
    from shapewright.pricing.price import Price

SINGLE_OPERATIONS = (Gemm, GroupedGemm, Attention, Pointwise, Collective)


@dataclass(frozen=True)
class Sample:
    """One operation with its measurement, if any.

    Attributes:
        operation: The operation.
        measured_s: Median measured time; None if unmeasured. [s]
        name: Sweep or layer that the sample belongs to.
        variant: Requested kernel.
        library: Library and versions; empty if unmeasured.
        suite: Benchmark suite of the measurement; empty if unmeasured.
    """

    operation: Operation
    measured_s: float | None = None
    name: str = ""
    variant: str = ""
    library: str = ""
    suite: str = ""


@dataclass(frozen=True)
class PricedSample:
    """A sample with its price."""

    sample: Sample
    price: Price

    @property
    def operation(self) -> Operation:
        """The operation of the sample."""
        return self.sample.operation


def samples_from_rows(rows: Iterable[Row], *, device: str = "", suite: str = "") -> list[Sample]:
    """Samples of successful rows of single operations, without repetitions.

    Args:
        rows: Rows of a measurement store.
        device: Canonical name of the device to keep; empty for all.
        suite: Suite to keep; empty for all.
    """
    found = []
    for row in rows:
        if row.status != OK or row.repetition or not row.median_s:
            continue
        if (device and row.device != device) or (suite and row.suite != suite):
            continue
        operation = row.operation()
        if isinstance(operation, SINGLE_OPERATIONS):
            found.append(Sample(operation, row.median_s, row.name, row.variant, row.library, row.suite))
    return found


def price_samples(samples: Sequence[Sample], device: Device) -> list[PricedSample]:
    """Price samples in one call; samples that cannot be priced on the device are dropped."""
    try:
        prices = price_operations([sample.operation for sample in samples], device)
        return [PricedSample(sample, price) for sample, price in zip(samples, prices, strict=True)]
    except ShapewrightError:
        found = []
        for sample in samples:
            try:
                (price,) = price_operations([sample.operation], device)
            except ShapewrightError:
                continue
            found.append(PricedSample(sample, price))
        return found
