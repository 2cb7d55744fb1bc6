"""The same job over several devices: time, tokens, money, energy, and what bounds each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from shapewright.errors import ShapewrightError, WorkloadError
from shapewright.operations import Collective
from shapewright.shown import ShownInNotebook

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.predict import Prediction

BOUNDS = ("compute", "memory", "latency", "communication", "bubble")
"""What a part of a step waits for: arithmetic, memory traffic, kernel starts, other devices, other pipeline stages."""

LOWEST_USD_PER_HOUR, HIGHEST_USD_PER_HOUR = 1e-6, 1e6
"""Prices outside these are mistakes."""

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class ComparedDevice:
    """One device's row.

    Attributes:
        device: The device.
        prediction: The predicted step; None where the device cannot run it.
        problem: Why it cannot; empty where it can.
        usd_per_hour: Price of one device; None where none was given.
    """

    device: Device
    prediction: Prediction | None
    problem: str = ""
    usd_per_hour: float | None = None

    @property
    def fits(self) -> bool:
        """Whether the step can run and its memory is within the device's."""
        return self.prediction is not None and self.prediction.memory.total_bytes <= self.device.memory_bytes

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second of the whole job."""
        if self.prediction is None:
            return None
        return self.prediction.tokens_per_s_per_device * self.prediction.layout.num_devices

    @property
    def tokens_per_usd(self) -> float | None:
        """Tokens for one dollar; None where no price was given."""
        if self.prediction is None or self.usd_per_hour is None:
            return None
        return self.prediction.tokens_per_s_per_device * _SECONDS_PER_HOUR / self.usd_per_hour

    @property
    def tokens_per_joule(self) -> float | None:
        """Tokens for one joule at the board power, which is the most that a device draws: at least so many.

        Host, network and cooling are left out.
        """
        if self.prediction is None or not self.device.tdp_watts:
            return None
        return self.prediction.tokens_per_s_per_device / self.device.tdp_watts

    @cached_property
    def bound_fractions(self) -> dict[str, float]:
        """Share of the step that waits for each of BOUNDS; they add up to 1. Empty where the device cannot run it."""
        prediction = self.prediction
        if prediction is None or prediction.step_time_s <= 0.0:
            return {}
        times = dict.fromkeys(BOUNDS, 0.0)
        for entry in prediction.busiest_operations:
            bound = "communication" if isinstance(entry.operation, Collective) else entry.price.bound_by
            times[bound] += entry.total_time_s
        times["bubble"] += prediction.bubble_time_s
        return {bound: time_s / prediction.step_time_s for bound, time_s in times.items()}

    @property
    def bound_by(self) -> str:
        """The largest of its bounds; empty where the device cannot run it."""
        fractions = self.bound_fractions
        return max(fractions, key=lambda bound: fractions[bound]) if fractions else ""


@dataclass(frozen=True)
class Comparison(ShownInNotebook):
    """Devices side by side, in the order that they were asked for.

    Attributes:
        rows: One for each device.
        notes: What needs to be said, one line each.
    """

    rows: tuple[ComparedDevice, ...]
    notes: tuple[str, ...]

    def speed_fraction(self, row: ComparedDevice) -> float | None:
        """Tokens per second of a row over those of the first row that runs; None where it does not run."""
        base = next((other.tokens_per_s for other in self.rows if other.tokens_per_s), None)
        return row.tokens_per_s / base if row.tokens_per_s and base else None


def compare_outcomes(
    outcomes: list[tuple[Device, Prediction | ShapewrightError]],
    usd_per_hour: Mapping[str, float] | None = None,
    notes: tuple[str, ...] = (),
) -> Comparison:
    """Put predictions side by side.

    Args:
        outcomes: Each device with its predicted step, or with why there can be none.
        usd_per_hour: Price of one device by canonical name. [USD/h]
        notes: What the caller has to say.

    Raises:
        WorkloadError: a price is no positive number, or belongs to no device of the comparison.
    """
    prices = dict(usd_per_hour or {})
    names = [device.name for device, _ in outcomes]
    for name, price in prices.items():
        if name not in names:
            raise WorkloadError(f"usd_per_hour names {name!r}, which is not compared; give one of {', '.join(names)}")
        if not LOWEST_USD_PER_HOUR <= price <= HIGHEST_USD_PER_HOUR:
            raise WorkloadError(
                f"usd_per_hour of {name} is {price!r}; give a price from {LOWEST_USD_PER_HOUR:g} to "
                f"{HIGHEST_USD_PER_HOUR:g}"
            )
    rows = tuple(
        ComparedDevice(device, None, str(outcome), prices.get(device.name))
        if isinstance(outcome, ShapewrightError)
        else ComparedDevice(device, outcome, "", prices.get(device.name))
        for device, outcome in outcomes
    )
    return Comparison(rows=rows, notes=(*notes, *_remarks(rows)))


def _remarks(rows: tuple[ComparedDevice, ...]) -> list[str]:
    """What the numbers of a comparison do not say themselves."""
    said = []
    dtypes = {row.prediction.workload.dtype for row in rows if row.prediction is not None}
    if len(dtypes) > 1:
        said.append(f"devices run different formats ({', '.join(sorted(dtypes))}), since not all have the first")
    if any(row.tokens_per_joule for row in rows):
        said.append("tokens per joule take the board power (TDP), an upper bound of what a device draws")
    missing = [row.device.name for row in rows if row.prediction is not None and not row.device.tdp_watts]
    if missing:
        said.append(f"no board power is known of {', '.join(missing)}")
    unfit = [row.device.name for row in rows if row.prediction is not None and not row.fits]
    if unfit:
        said.append(f"the step does not fit on {', '.join(unfit)}: its numbers are those of more memory")
    bounds = [row.device.name for row in rows if row.prediction is not None and row.device.roofline_only]
    if bounds:
        said.append(f"a bound from the data sheet and no prediction, real steps take longer: {', '.join(bounds)}")
    one_kernel = [
        row.device.name
        for row in rows
        if row.prediction is not None and any("experts are priced as" in line for line in row.prediction.warnings)
    ]
    if one_kernel:
        said.append(
            f"experts in narrow formats are priced as one library's kernel ran, with another they may be faster "
            f"(predict names it): {', '.join(one_kernel)}"
        )
    borrowed = {row.device.name: _borrowed_kinds(row) for row in rows if not row.device.roofline_only}
    words = [f"{name} ({', '.join(kinds)})" for name, kinds in borrowed.items() if kinds]
    if words:
        said.append(f"priced with another device's record, so with a wider interval: {', '.join(words)}")
    return said


def _borrowed_kinds(row: ComparedDevice) -> list[str]:
    """Kinds of operation that were not measured on the device."""
    records = row.prediction.calibration if row.prediction is not None else {}
    return [kind for kind, label in records.items() if label.startswith("uncalibrated")]
