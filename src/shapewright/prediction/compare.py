"""Compare devices on one job: time, tokens, cost, energy, and the bound of each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from shapewright.core.errors import ShapewrightError, WorkloadError
from shapewright.core.notebook import NotebookDisplay
from shapewright.core.notes import Note, Refusal
from shapewright.core.ranges import check_number
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.prediction.composition.step import bound_of

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.prediction.predict import Prediction

BOUNDS = ("compute", "memory", "latency", "communication", "bubble")
"""Limits of a part of a step: arithmetic, memory traffic, kernel launches, communication, other pipeline stages."""

LOWEST_USD_PER_HOUR, HIGHEST_USD_PER_HOUR = 1e-6, 1e6
"""Prices outside this range are refused."""

_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class ComparedDevice:
    """A device with its prediction.

    Attributes:
        device: The device.
        prediction: The predicted step; None where the device cannot run it.
        refusal: Why it cannot run; None where it can.
        usd_per_hour: Price of one device hour; None if not given.
    """

    device: Device
    prediction: Prediction | None
    refusal: Refusal | None = None
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
        """Tokens per dollar; None where no price was given."""
        if self.prediction is None or self.usd_per_hour is None:
            return None
        return self.prediction.tokens_per_s_per_device * _SECONDS_PER_HOUR / self.usd_per_hour

    @property
    def tokens_per_joule(self) -> float | None:
        """Tokens per joule at the board power, a lower bound; None where the board power is unknown.

        Host, network and cooling are not included.
        """
        if self.prediction is None or not self.device.tdp_watts:
            return None
        return self.prediction.tokens_per_s_per_device / self.device.tdp_watts

    @cached_property
    def bound_fractions(self) -> dict[str, float]:
        """Share of the step that each of BOUNDS limits; shares add up to 1. Empty where the device cannot run it."""
        prediction = self.prediction
        if prediction is None or prediction.step_time_s <= 0.0:
            return {}
        times = dict.fromkeys(BOUNDS, 0.0)
        for entry in prediction.busiest_operations:
            times[bound_of(entry)] += entry.total_time_s
        times["bubble"] += prediction.bubble_time_s
        return {bound: time_s / prediction.step_time_s for bound, time_s in times.items()}

    @property
    def bound_by(self) -> str:
        """The bound with the largest share; empty where the device cannot run the step."""
        fractions = self.bound_fractions
        return max(fractions, key=lambda bound: fractions[bound]) if fractions else ""


@dataclass(frozen=True, repr=False)
class Comparison(NotebookDisplay):
    """Devices with their predictions, in the given order.

    Attributes:
        rows: One row per device.
        notes: Notes on the whole comparison.
    """

    rows: tuple[ComparedDevice, ...]
    notes: tuple[str, ...]

    def speed_fraction(self, row: ComparedDevice) -> float | None:
        """Tokens per second of a row over those of the first row with a prediction; None without one."""
        base = next((other.tokens_per_s for other in self.rows if other.tokens_per_s), None)
        return row.tokens_per_s / base if row.tokens_per_s and base else None


def compare_outcomes(
    outcomes: list[tuple[Device, Prediction | ShapewrightError]],
    usd_per_hour: Mapping[str, float] | None = None,
    notes: tuple[str, ...] = (),
) -> Comparison:
    """Compare the predictions of several devices.

    Args:
        outcomes: Each device with its predicted step, or with the error that predicting raised.
        usd_per_hour: Price of one device hour by canonical device name. [USD/h]

    Raises:
        WorkloadError: a price is not a positive number, or names a device that is not compared.
    """
    prices = dict(usd_per_hour or {})
    names = [device.name for device, _ in outcomes]
    for name, price in prices.items():
        if name not in names:
            raise WorkloadError(
                with_fields("{usd_per_hour} names ") + f"{name!r}, which is not compared",
                advice=f"give one of {', '.join(names)}",
            )
        named = with_fields("{usd_per_hour} of ") + name
        check_number(named, price, LOWEST_USD_PER_HOUR, HIGHEST_USD_PER_HOUR, error=WorkloadError)
    rows = tuple(
        ComparedDevice(device, None, Refusal.of(outcome), prices.get(device.name))
        if isinstance(outcome, ShapewrightError)
        else ComparedDevice(device, outcome, None, prices.get(device.name))
        for device, outcome in outcomes
    )
    return Comparison(rows=rows, notes=(*notes, *_comparison_notes(rows)))


def _comparison_notes(rows: tuple[ComparedDevice, ...]) -> list[Note]:
    """Return the notes needed to read the numbers of a comparison."""
    notes = []
    predicted = [(row.device, row.prediction) for row in rows if row.prediction is not None]
    dtypes = {prediction.workload.dtype for _, prediction in predicted}
    if len(dtypes) > 1:
        text = f"devices run different formats ({', '.join(sorted(dtypes))}), since not all support the first"
        notes.append(Note(text, "mixed-dtypes", "dtype"))
    if any(row.tokens_per_joule for row in rows):
        text = "tokens per joule use the board power (TDP), an upper bound of the power draw"
        notes.append(Note(text, "board-power"))
    if missing := [device.name for device, _ in predicted if not device.tdp_watts]:
        notes.append(Note(f"the board power is unknown for {', '.join(missing)}", "board-power"))
    if unfit := [row.device.name for row in rows if row.prediction is not None and not row.fits]:
        text = f"the step does not fit on {', '.join(unfit)}; times assume enough memory"
        notes.append(Note(text, "does-not-fit"))
    if bounds := [device.name for device, _ in predicted if device.roofline_only]:
        text = f"roofline bounds from the data sheet, not predictions; real steps take longer: {', '.join(bounds)}"
        notes.append(Note(text, "roofline-bound"))
    one_kernel = [
        device.name
        for device, prediction in predicted
        if any(warning.code == "expert-kernel" for warning in prediction.warnings)
    ]
    if one_kernel:
        text = (
            f"experts in narrow formats are priced with the kernel of one library, others may be faster "
            f"(predict names it): {', '.join(one_kernel)}"
        )
        notes.append(Note(text, "expert-kernel", "expert_kernel"))
    borrowed = {
        device.name: [
            kind
            for kind, source in prediction.calibration.items()
            if any(part.is_uncalibrated for part in source.parts)
        ]
        for device, prediction in predicted
        if not device.roofline_only
    }
    if words := [f"{name} ({', '.join(kinds)})" for name, kinds in borrowed.items() if kinds]:
        text = f"borrowed calibration with wider intervals: {', '.join(words)}"
        notes.append(Note(text, "uncalibrated"))
    return notes
