"""Price of kernels by their work: the kernel of a record that resembles the running one, its weights, its residuals.

A record of these kinds holds kernels by name: the labels that distinguish them, joined by ``|``, the library first.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import CalibrationError
from shapewright.core.records import dataclass
from shapewright.hardware.loader import load_device
from shapewright.pricing.calibration.intervals import OTHER_LIBRARY_WIDENING, interval_factors, widen_by_error
from shapewright.pricing.calibration.libraries import nearest_library, split_version
from shapewright.pricing.calibration.residual import ResidualTable, fade, interpolate, reading_residuals
from shapewright.pricing.calibration.source import ROOFLINE_BOUND
from shapewright.pricing.calibration.transfer import (
    clock_hz_of,
    comparable_clock_hz,
    is_sibling_card,
    transfer_bandwidth_fraction,
)
from shapewright.pricing.kernels.work import KernelRates, estimate_kernel
from shapewright.pricing.price import ROOFLINE_HIGH_FACTOR, Price

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shapewright.hardware.device import Device
    from shapewright.pricing.calibration.records import CalibrationRecord
    from shapewright.pricing.kernels.work import KernelWork

LABEL_SEPARATOR = "|"
LOG_STEP = 0.02
"""Value of one unit of a stored correction; a byte then spans factors of 0.08 to 12."""
# Clock where the data sheet gives none: only starts and rounds of tiles depend on it. [Hz]
_ASSUMED_CLOCK_HZ = 1.6e9
TRANSFER_ERROR = {"architecture": 1.18, "generic": 2.5, "distant": 3.5, "foreign": 4.0}
"""What 90 % of rows are wrong by where another device's record prices them, by distance: each of five devices left out,
H100 and H200 by each other 1.1 to 1.25, others 1.5 to 4 (docs/decisions/0020). The last two are judgement."""
GAP_ERROR = "error_at_one_doubling"
"""Key of an interval: logarithm of what rows are wrong by, beyond the spread of measured sizes, where their squared
error has grown as far as it does in one doubling (doublings_from_knots)."""
# Records whose tables correct a device: its own and those of its siblings.
_CORRECTED_TRANSFERS = ("exact", "architecture")


def kernel_rates(device: Device, record: CalibrationRecord | None = None) -> KernelRates:
    """Rates of a device, its clock counted as on the donor's data sheet where a record is borrowed."""
    is_own = record is None or record.transfer == "exact"
    clock_hz = clock_hz_of(device) if is_own or not record else comparable_clock_hz(device, load_device(record.device))
    return KernelRates(
        bytes_per_s=device.memory_bandwidth_bytes_per_s,
        num_sms=float(device.num_sms or 1),
        clock_hz=clock_hz or _ASSUMED_CLOCK_HZ,
        l2_bytes=device.l2_bytes or 0.0,
        exponential_growth=device.architecture_facts.exponential_growth.get(record.architecture, 1.0)
        if record
        else 1.0,
    )


@dataclass(frozen=True)
class KernelMatch:
    """Kernel of a record that prices the running one.

    Attributes:
        name: Its name in the record.
        is_same: Whether all labels but the version of the library agree.
    """

    name: str
    is_same: bool


def match_kernel(record: CalibrationRecord, labels: Sequence[str]) -> KernelMatch:
    """Find the kernel with these labels: the library first, then the others from the most to the least important.

    Another version of the library comes before another library, and a kernel that shares the first labels before one
    that shares later ones.

    Raises:
        CalibrationError: the record has no kernel that shares the second label.
    """
    library, *others = labels
    known = [tuple(name.split(LABEL_SEPARATOR)) for name in record.parameters["kernels"]]
    alike = [each for each in known if not others or each[1] == others[0]]
    if not alike:
        raise CalibrationError(f"no measured kernel of {record.kind} resembles {' '.join(filter(None, labels))}")
    nearest = nearest_library(library, sorted({each[0] for each in alike}))

    def rank(each: tuple[str, ...]) -> tuple[Any, ...]:
        same = tuple(one != other for one, other in zip(each[1:], others, strict=False))
        version = tuple(-number for number in split_version(each[0])[1])
        return (*same[:1], each[0] != nearest, *same[1:], version, each)

    best = min(alike, key=rank)
    is_same = list(best[1:]) == others and split_version(best[0])[0] == split_version(library)[0]
    return KernelMatch(LABEL_SEPARATOR.join(best), is_same or not library)


def price_kernel(
    work: KernelWork, device: Device, record: CalibrationRecord, match: KernelMatch, *, is_bounded: bool = True
) -> Price:
    """Price calls of a kernel.

    Args:
        work: The calls, counted with ``kernel_rates(device, record)``.
        is_bounded: Whether the data-sheet bound holds; not in a benchmark whose operands stay in the last-level cache.
    """
    floor_s = work.roofline_s
    if device.roofline_only or device.num_sms is None:
        zero = np.zeros_like(floor_s)
        return Price(
            time_s=floor_s,
            low_s=floor_s,
            high_s=floor_s * ROOFLINE_HIGH_FACTOR,
            compute_s=floor_s,
            memory_s=zero,
            start_s=zero,
            roofline_s=floor_s,
            calibration=ROOFLINE_BOUND,
        )
    content: Mapping[str, Any] = record.parameters["kernels"][match.name]
    parts = estimate_kernel(work, _transfer_weights(content["weights"], work, device, record))
    time_s = parts.total_s
    interval = record.interval[match.name]
    log_error = np.zeros_like(time_s)
    if record.residual and content.get("axes"):
        table = load_tables(record.residual["file"], record.kind)[match.name]
        log_error = interval[GAP_ERROR] * np.sqrt(doublings_from_knots(table, work, content["axes"]))
        if record.transfer in _CORRECTED_TRANSFERS:
            time_s = time_s * np.exp(correct_kernel(table, work, content["axes"]))
    time_s = np.maximum(time_s, floor_s) if is_bounded else time_s
    if record.transfer != "exact":
        log_error = np.hypot(log_error, np.log(TRANSFER_ERROR[record.distance]))
    widening = 1.0 if match.is_same else OTHER_LIBRARY_WIDENING
    low, high = widen_by_error(interval_factors(interval, time_s, widening), widening * log_error)
    return Price(
        time_s=time_s,
        low_s=np.maximum(time_s * low, floor_s) if is_bounded else time_s * low,
        high_s=time_s * high,
        compute_s=parts.compute_s,
        memory_s=parts.memory_s,
        start_s=parts.start_s,
        roofline_s=floor_s,
        calibration=record.source,
    )


def _transfer_weights(
    weights: Mapping[str, float], work: KernelWork, device: Device, record: CalibrationRecord
) -> Mapping[str, float]:
    """Weights on the device: a sibling's time beyond full-bandwidth traffic is cycles of the same SMs."""
    if record.transfer != "architecture" and not is_sibling_card(device, record):
        return weights
    slow = {name: weight for name in work.memory if (weight := weights[name]) > 1.0}
    return {
        **weights,
        **{name: 1.0 / transfer_bandwidth_fraction(1.0 / weight, device, record) for name, weight in slow.items()},
    }


def correct_kernel(table: ResidualTable, work: KernelWork, axes: Sequence[str]) -> np.ndarray:
    """Logarithm of the correction of each call; it fades with the distance from the table."""
    logs, beyond = interpolate(table, _places(work, axes))
    corrected: np.ndarray = logs * fade(beyond)
    return corrected


def doublings_from_knots(table: ResidualTable, work: KernelWork, axes: Sequence[str]) -> np.ndarray:
    """Distance of each call from the table's knots, to which the variance of its residual is proportional. [doubling]

    Residuals that change at random from size to size have between two knots the variance of a Brownian bridge, the
    product of the distances to both over their sum, and beyond the outermost knot that distance itself.
    """
    distance = np.zeros_like(work.roofline_s)
    for knots, place in zip(table.knots_log2, _places(work, axes), strict=True):
        upper = np.clip(np.searchsorted(knots, place), 1, len(knots) - 1)
        after, before = place - knots[upper - 1], knots[upper] - place
        between = after * before / (knots[upper] - knots[upper - 1])
        distance += np.where(between >= 0.0, between, np.maximum(-after, -before))
    return distance


def _places(work: KernelWork, axes: Sequence[str]) -> np.ndarray:
    return np.round(np.stack([np.log2(np.maximum(work.places[axis], 1e-9)) for axis in axes]), 4)


@cache
def load_tables(file_name: str, kind: str) -> Mapping[str, ResidualTable]:
    """Load the residual tables of a record's kernels."""
    with reading_residuals(file_name, kind) as stored:
        names = [name.removesuffix("@steps") for name in stored.files if name.endswith("@steps")]
        return {
            name: ResidualTable(
                knots_log2=tuple(
                    stored[f"{name}@{axis}"].astype(float) for axis in range(stored[f"{name}@steps"].ndim)
                ),
                log_steps=stored[f"{name}@steps"],
                log_step=LOG_STEP,
            )
            for name in names
        }
