"""Prediction intervals: which residuals of held-out rows give the 90 % interval of a price.

A record's own interval holds the residuals of each of its sections: same device, library and format. Where a section
prices something else, ``data/intervals/<kind>.json`` holds measured residuals of such transfers, in groups:

    own/RECORD/SECTION                  the section itself, where held-out rows give other quantiles
    other library/DEVICE/FORMAT         rows of one library priced with another's section; another version of the same
                                        library counts as halfway
    older software/FORMAT               rows of software older than the record's
    architecture/FORMAT                 rows of a device priced with a record of its architecture
    generic/FORMAT                      rows priced with a record of another architecture
    distant/FORMAT                      the same, two generations apart
    foreign/FORMAT                      the same with another vendor's record
    CLASS/batches                       the same of batched GEMMs; ``generic`` also where a device's record has none

``DEVICE`` and ``FORMAT`` may be omitted from a name. Groups of held-out devices, and of other libraries on all devices,
have a variant ``.../without DEVICE`` made of the other devices only: it applies when a measured device is priced as if
it were unmeasured. Where it is null (there are no other devices), the next name applies, widened by TRANSFER_WIDENING
if that is of a nearer class. Another library and older software on a borrowed record add their intervals as
independent errors. The files are written by ``python -m shapewright.measure.refit`` (docs/decisions/0012).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.pricing.calibration.libraries import LibraryMatch
from shapewright.pricing.calibration.records import TRANSFER_WIDENING

if TYPE_CHECKING:
    from jaxtyping import Float

    from shapewright.pricing.calibration.records import CalibrationRecord

    AnyShape = Float[np.ndarray, "..."]

OTHER_LIBRARY_WIDENING = 1.6
"""Factor on the logarithm of an interval's ends for an unmeasured library, where no group applies. Judgement, as
TRANSFER_WIDENING.
"""

FORMAT_WIDENING = 1.6
"""Factor on the logarithm of an interval's ends where another element format's fractions stand in. Judgment."""
FORMAT_ERROR, NARROW_FORMAT_ERROR = 1.5, 2.5
"""What another format's fractions are wrong by, in 8 bits and in 4: experts of L40S and B200, 16-bit fractions at the
narrow rate, are measured at 0.76 to 1.49 and 0.91 to 2.49 times that (90 % of rows: docs/decisions/0007-moe.md)."""

OWN_ALIGNMENT_ERROR = 1.15
"""What poorly aligned GEMMs that wait for arithmetic are wrong by, 90 % of them, at sizes unlike those that the factors
were fitted to: even n of A100 run at 0.59 to 0.70 of the aligned rate by how they fill their tiles, fitted as 0.61, and
odd n were not measured (docs/decisions/0012-intervals.md)."""

CARRIED_ALIGNMENT_ERROR = 1.5
"""What poorly aligned GEMMs that wait for arithmetic are wrong by, 90 % of them, where another SM's alignment
factors were carried over: medians of 18 classes of rows over the six pairs of A100, V100 and MI250X have a root mean
square of 0.2 as logarithms, and Student's 90 % with five degrees of freedom is 2.0 times that
(docs/decisions/0012-intervals.md)."""

_FOLDER = "data/intervals"
# Avoids 0 / 0 in the shared variance of an interval without width.
_LEAST_SQUARE = 1e-12


class Interval(NamedTuple):
    """Quantiles of measured / predicted, and their widening.

    Attributes:
        quantiles: ``edges_s`` between regimes of predicted time [s], and per regime ``low`` and ``high``, the 5 % and
            95 % quantiles of measured / predicted; for held-out devices also ``shared``, the share of the variance that
            is the device's bias.
        widening: Factor on the logarithms of the quantiles.
        format: Element format that the residuals belong to; empty for those of a record, or of all formats.
    """

    quantiles: Mapping[str, Any]
    widening: float
    format: str = ""

    def factors(self, time_s: AnyShape, widening: float | AnyShape = 1.0) -> tuple[AnyShape, AnyShape]:
        """Ends of the interval as factors on predicted times, widened further."""
        return interval_factors(self.quantiles, time_s, self.widening * widening)

    def shared_error(self, time_s: AnyShape) -> AnyShape:
        """Share of the variance that all operations on a device have in common; 0 without held-out devices."""
        known = self.quantiles.get("shared")
        if known is None:
            return np.zeros(np.shape(time_s))
        found: AnyShape = np.asarray(known)[np.searchsorted(self.quantiles["edges_s"], time_s)]
        return found


def interval_factors(
    interval: Mapping[str, Any], time_s: AnyShape, widening: float | AnyShape
) -> tuple[AnyShape, AnyShape]:
    """Ends of the 90 % interval as factors on predicted times, by regime of predicted time.

    Args:
        interval: ``edges_s`` between regimes, and per regime ``low`` and ``high``, quantiles of measured / predicted.
        time_s: Predicted times. [s]
        widening: Factor on the logarithms, 1 or more for borrowed records.
    """
    regime = np.asarray(interval["edges_s"], dtype=float).searchsorted(time_s)
    low, high = np.asarray((interval["low"], interval["high"]))[:, regime] ** widening
    return low, high


def choose_interval(
    record: CalibrationRecord,
    own: Mapping[str, Any],
    section: str,
    formats: Sequence[str] = (),
    *,
    library: LibraryMatch = "own",
) -> Interval:
    """Choose the interval of a record's section for its use here.

    Args:
        own: The record's own interval of the section.
        section: Name of the section within the record.
        formats: Element formats to look for among the groups, nearest first.
        library: How near the section's library is to the running one.
    """
    if record.transfer != "exact":
        # A borrowed record with another library or older software is wrong for both reasons.
        found = borrowed_interval(record, formats) or Interval(own, record.interval_widening)
        if record.transfer == "architecture":  # the donor's very kernels
            known: LibraryMatch = "own" if library == "other" else library
            found = widest(found, choose_interval(as_donor_record(record), own, section, formats, library=known))
        another = (
            find_residual_group(record.kind, ("other library",), formats, _group_suffixes(record))
            if library == "other"
            else None
        )
        older = find_residual_group(record.kind, ("older software",), formats) if record.older_software else None
        for further in (another, older):
            found = combine_errors(found, further) if further else found
        return found
    its_group = find_residual_group(record.kind, (f"own/{record.id}",), (section,))
    if record.older_software:  # the section of that software is more specific than all older ones together
        older = its_group if library == "own" and _is_of_library(section) else None
        older = older or find_residual_group(record.kind, ("older software",), formats)
        return older or Interval(own, OTHER_LIBRARY_WIDENING)
    itself = its_group or Interval(own, 1.0)
    if library == "own":
        return itself
    places = (f"other library/{record.device}", "other library")
    another = find_residual_group(record.kind, places, formats) or Interval(own, OTHER_LIBRARY_WIDENING)
    # No library was measured in two versions on one device: halfway is judgement.
    return another if library == "other" else midpoint(itself, another)


def as_donor_record(record: CalibrationRecord) -> CalibrationRecord:
    """Return a borrowed record as it applies to the device that it was measured on."""
    return replace(record, transfer="exact", recipient="", distance_override="", older_software=False)


def _is_of_library(section: str) -> bool:
    """Whether a section belongs to one library (calibration.residual.section_name) rather than to all together."""
    return " of " in section


def borrowed_interval(record: CalibrationRecord, formats: Sequence[str]) -> Interval | None:
    """Interval of a borrowed record from held-out devices; None where no group applies.

    Args:
        record: The record, as the recipient borrows it.
        formats: Element formats to look for, nearest first.
    """
    for place in (record.distance, "generic"):
        found = find_residual_group(record.kind, (place,), formats, _group_suffixes(record))
        if found is not None:
            distance_override = TRANSFER_WIDENING[record.distance] / TRANSFER_WIDENING[place]
            return found._replace(widening=max(distance_override, 1.0))
    return None


def _group_suffixes(record: CalibrationRecord) -> tuple[str, str]:
    """Suffixes of group names to try: without the recipient, then of all devices."""
    return f"/without {record.recipient}", ""


def midpoint(one: Interval, other: Interval) -> Interval:
    """Interval halfway between two, on the logarithms of their ends."""
    return _join_intervals(one, other, lambda mine, theirs: 0.5 * (mine + theirs))


def widest(one: Interval, other: Interval) -> Interval:
    """Take the wider end of two intervals on either side: a borrowed price is never more certain than its donor's.

    Held-out devices show the error of the transfer where donor and recipient scatter little; a donor may scatter more.
    """
    joined = _join_intervals(one, other, lambda mine, theirs: np.where(np.abs(mine) >= np.abs(theirs), mine, theirs))
    times_s = np.array([*joined.quantiles["edges_s"], np.inf])
    if np.allclose(joined.factors(times_s), one.factors(times_s)):
        return one
    mine, theirs = (np.log(each.factors(times_s)[1]) ** 2 for each in (one, other))
    shared = mine * one.shared_error(times_s) / np.maximum(np.maximum(mine, theirs), _LEAST_SQUARE)
    return joined._replace(quantiles={**joined.quantiles, "shared": shared})


def combine_errors(one: Interval, other: Interval) -> Interval:
    """Interval of a price with two independent errors: their logarithms add in quadrature."""
    return _join_intervals(one, other, lambda mine, theirs: np.copysign(np.hypot(mine, theirs), mine))


def widen_by_error(ends: tuple[AnyShape, AnyShape], log_error: AnyShape | float) -> tuple[AnyShape, AnyShape]:
    """Widen interval ends, as factors, by a further independent error, given as a logarithm."""
    low, high = (np.hypot(np.log(end), log_error) for end in ends)
    return np.exp(-low), np.exp(high)


def widen_for_format(found: Interval, error: float = FORMAT_ERROR) -> Interval:
    """Widen an interval where another format's fractions stand in: by a factor, but at most as independent errors add.

    A chip of another vendor is off by up to four times in any format: that it multiplies in 8 bits adds little.

    Args:
        found: Interval of the format that the fractions belong to.
        error: Error of the stand-in in the priced format, as a factor.
    """
    log_error = np.log(error)

    def join(mine: AnyShape, _: AnyShape) -> AnyShape:
        wider: AnyShape = np.sign(mine) * np.minimum(FORMAT_WIDENING * np.abs(mine), np.hypot(mine, log_error))
        return wider

    return _join_intervals(found, found, join)


def _join_intervals(one: Interval, other: Interval, join: Callable[[AnyShape, AnyShape], AnyShape]) -> Interval:
    """Combine the logarithms of the ends of two intervals, over the regimes of both."""
    edges_s = sorted({*one.quantiles["edges_s"], *other.quantiles["edges_s"]})
    times_s = np.array([*edges_s, np.inf])  # an edge belongs to the regime below it
    ends = zip(one.factors(times_s), other.factors(times_s), strict=True)
    logs = [(np.log(mine), np.log(theirs)) for mine, theirs in ends]
    low, high = (np.exp(join(*pair)) for pair in logs)
    # Shared variances add as the errors do.
    mine, theirs = (upper**2 for upper in logs[1])
    shared = mine * one.shared_error(times_s) + theirs * other.shared_error(times_s)
    quantiles = {
        "edges_s": edges_s,
        "low": low,
        "high": high,
        "shared": shared / np.maximum(mine + theirs, _LEAST_SQUARE),
    }
    return Interval(quantiles, 1.0, one.format)


def find_residual_group(
    kind: str, places: Iterable[str], formats: Sequence[str] = (), suffixes: Iterable[str] = ("",)
) -> Interval | None:
    """Find the first existing group: of a class with a format, then of the class alone, each with the first suffix."""
    groups = read_residual_groups(kind)
    for place in places:
        for name in (*formats, ""):
            names = (f"{place}/{name}{suffix}" if name else f"{place}{suffix}" for suffix in suffixes)
            known = next((groups[full] for full in names if full in groups), None)
            if known is not None:
                return Interval(known, 1.0, name)
    return None


@cache
def read_residual_groups(kind: str) -> Mapping[str, Mapping[str, Any] | None]:
    """Read the groups of a kind of record by name; empty where the package has no file of them."""
    path = resources.files("shapewright.pricing") / _FOLDER / f"{kind}.json"
    if not path.is_file():
        return {}
    groups: Mapping[str, Mapping[str, Any] | None] = json.loads(path.read_text(encoding="utf-8"))["groups"]
    return groups
