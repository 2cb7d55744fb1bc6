"""Which residuals make the interval of a price: those of its own record, or measured ones of records used from afar.

A record's interval holds the residuals of its own section: same device, library and format. It says little where the
section is used for something else, so ``data/intervals/<kind>.json`` has residuals of each such case, in groups:

    own/RECORD/SECTION                  the section itself, where rows that no fit saw ask for other ends
    other library/DEVICE/FORMAT         one library's rows, priced with the other's section; another version of a
                                        library lies halfway
    older software/FORMAT               a collection of software older than the record's
    architecture/FORMAT                 a device's rows, priced with a record of its family
    generic/FORMAT                      the same with a record of another family
    distant/FORMAT                      the same, two generations apart
    foreign/FORMAT                      the same with a record of another maker's chip
    CLASS/batches                       the same of batches of products; of another family also where a device's record
                                        has none

``DEVICE`` and ``FORMAT`` may be left out of a name. Groups of devices left out, and of other libraries on all devices,
have a twin ``.../without DEVICE``, made of the other devices alone: who prices a measured device as if nobody had
measured it gets that one, and where it is null (there are no others) the next name counts, wider by TRANSFER_WIDENING
where that is of a nearer class. Another library and older software on a borrowed record add their own intervals, as
independent errors add. ``scripts/calibrate_intervals.py`` writes the files (docs/decisions/0012-intervals.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.errors import CalibrationError
from shapewright.perf.calibration import TRANSFER_WIDENING
from shapewright.perf.libraries import LibraryMatch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.perf.calibration import CalibrationRecord

    Array = NDArray[np.float64]

OTHER_LIBRARY_WIDENING = 1.6
"""Factor on the logarithm of an interval's ends for a library that the record does not know, where no group says more.
Judgement, as TRANSFER_WIDENING is."""

FORMAT_WIDENING = 1.6
"""Factor on the logarithm of an interval's ends where another element format's fractions stand in. Judgement."""
FORMAT_ERROR, NARROW_FORMAT_ERROR = 1.5, 2.5
"""What another format's fractions are wrong by, in 8 bits and in 4: experts of L40S and B200, 16-bit fractions at the
narrow rate, are measured at 0.76 to 1.49 and 0.91 to 2.49 times that (90 % of rows: docs/decisions/0007-moe.md)."""

CARRIED_ALIGNMENT_ERROR = 1.5
"""What poorly aligned products that wait for arithmetic are wrong by, 90 % of them, where another SM's alignment
factors were carried over: medians of 18 classes of rows over the six pairs of A100, V100 and MI250X have a root mean
square of 0.2 as logarithms, and Student's 90 % with five degrees of freedom is 2.0 times that
(docs/decisions/0012-intervals.md)."""

_FOLDER = "data/intervals"
# Keeps the share of an interval without width from being 0 / 0.
_LEAST_SQUARE = 1e-12


class Interval(NamedTuple):
    """Residual quantiles, and how much they are to be widened.

    Attributes:
        quantiles: ``edges_s`` between regimes of predicted time [s], and per regime ``low`` and ``high``, quantiles of
            measured / predicted, and of devices left out ``shared``, the share of that which is the device's bias.
        widening: Factor on their logarithms.
        format: Element format whose residuals they are; empty for those of a record, or of all formats.
    """

    quantiles: Mapping[str, Any]
    widening: float
    format: str = ""

    def factors(self, time_s: Array, widening: float = 1.0) -> tuple[Array, Array]:
        """Its ends as factors on predicted times, widened further."""
        return interval_factors(self.quantiles, time_s, self.widening * widening)

    def shared_error(self, time_s: Array) -> Array:
        """Share of its variance that is one error of all operations on a device; 0 where nobody was left out."""
        known = self.quantiles.get("shared")
        if known is None:
            return np.zeros(np.shape(time_s))
        found: Array = np.asarray(known)[np.searchsorted(self.quantiles["edges_s"], time_s)]
        return found


def interval_factors(interval: Mapping[str, Any], time_s: Array, widening: float | Array) -> tuple[Array, Array]:
    """Ends of the 90 % interval as factors on a predicted time, by regime of that time.

    Args:
        interval: ``edges_s`` between regimes, and per regime ``low`` and ``high``, quantiles of measured / predicted.
        time_s: Predicted times. [s]
        widening: Factor on their logarithms, 1 or more, for borrowed records.
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
    """The interval of a section as it is used here.

    Args:
        record: The record that prices.
        own: The record's own interval of the section.
        section: Name of the section within the record.
        formats: What the section computes, nearest first, as groups are named.
        library: How near the section's library is to the one that runs.
    """
    if record.transfer != "exact":
        # Another library on a borrowed record, and older software on one, are wrong about both.
        found = borrowed_interval(record, formats) or Interval(own, record.interval_widening)
        if record.transfer == "architecture":  # the lender's very kernels
            known: LibraryMatch = "own" if library == "other" else library
            found = at_least(found, choose_interval(as_lenders(record), own, section, formats, library=known))
        another = find_group(record.kind, ("other library",), formats, _endings(record)) if library == "other" else None
        older = find_group(record.kind, ("older software",), formats) if record.older_software else None
        for further in (another, older):
            found = added(found, further) if further else found
        return found
    its_group = find_group(record.kind, (f"own/{record.id}",), (section,))
    if record.older_software:  # a section of that very software knows more than all older ones together
        older = its_group if library == "own" and _is_of_library(section) else None
        older = older or find_group(record.kind, ("older software",), formats)
        return older or Interval(own, OTHER_LIBRARY_WIDENING)
    itself = its_group or Interval(own, 1.0)
    if library == "own":
        return itself
    places = (f"other library/{record.device}", "other library")
    another = find_group(record.kind, places, formats) or Interval(own, OTHER_LIBRARY_WIDENING)
    # No library was measured in two versions on one device: halfway is judgement.
    return another if library == "other" else between(itself, another)


def as_lenders(record: CalibrationRecord) -> CalibrationRecord:
    """A borrowed record as the device that it was measured on has it."""
    return replace(record, transfer="exact", borrower="", farther="", older_software=False)


def _is_of_library(section: str) -> bool:
    """Whether a section is one library's, as perf.residual.section_name calls it, and not that of all together."""
    return " of " in section


def borrowed_interval(record: CalibrationRecord, formats: Sequence[str]) -> Interval | None:
    """Interval of a record that another device borrows, from devices left out; None where there are no groups.

    Args:
        record: The record, as the device borrows it.
        formats: What is computed, nearest first, as groups are named.
    """
    for place in (record.distance, "generic"):
        found = find_group(record.kind, (place,), formats, _endings(record))
        if found is not None:
            farther = TRANSFER_WIDENING[record.distance] / TRANSFER_WIDENING[place]
            return found._replace(widening=max(farther, 1.0))
    return None


def _endings(record: CalibrationRecord) -> tuple[str, str]:
    """Of groups: made without who borrows, else of all."""
    return f"/without {record.borrower}", ""


def between(one: Interval, other: Interval) -> Interval:
    """Halfway between two intervals, on the logarithms of their ends."""
    return _joined(one, other, lambda mine, theirs: 0.5 * (mine + theirs))


def at_least(one: Interval, other: Interval) -> Interval:
    """An interval with the farther end of two on either side: nobody is surer of a copy than of what was measured.

    Devices left out say what lending adds where lender and borrower scatter little; a lender may scatter more itself.
    """
    joined = _joined(one, other, lambda mine, theirs: np.where(np.abs(mine) >= np.abs(theirs), mine, theirs))
    times_s = np.array([*joined.quantiles["edges_s"], np.inf])
    if np.allclose(joined.factors(times_s), one.factors(times_s)):
        return one
    mine, theirs = (np.log(each.factors(times_s)[1]) ** 2 for each in (one, other))
    shared = mine * one.shared_error(times_s) / np.maximum(np.maximum(mine, theirs), _LEAST_SQUARE)
    return joined._replace(quantiles={**joined.quantiles, "shared": shared})


def added(one: Interval, other: Interval) -> Interval:
    """Interval of a price that is wrong about two things: ends as independent errors add, on their logarithms."""
    return _joined(one, other, lambda mine, theirs: np.copysign(np.hypot(mine, theirs), mine))


def with_error(ends: tuple[Array, Array], log_error: Array) -> tuple[Array, Array]:
    """Ends of intervals, as factors, whose prices have a further independent error, as a logarithm on either side."""
    low, high = (np.hypot(np.log(end), log_error) for end in ends)
    return np.exp(-low), np.exp(high)


def widened_for_format(found: Interval, error: float = FORMAT_ERROR) -> Interval:
    """An interval where another format's fractions stand in: wider by a factor, at most as independent errors add.

    A chip of another maker is off by up to four times in any format: that it multiplies in 8 bits adds little.

    Args:
        found: Interval of the format whose fractions they are.
        error: What they are wrong by in the format that runs, as a factor.
    """
    most = np.log(error)

    def join(mine: Array, _: Array) -> Array:
        return np.sign(mine) * np.minimum(FORMAT_WIDENING * np.abs(mine), np.hypot(mine, most))

    return _joined(found, found, join)


def _joined(one: Interval, other: Interval, join: Callable[[Array, Array], Array]) -> Interval:
    """An interval whose ends are made of those of two, as logarithms, by regime of both."""
    edges_s = sorted({*one.quantiles["edges_s"], *other.quantiles["edges_s"]})
    times_s = np.array([*edges_s, np.inf])  # an edge belongs to the regime before it
    ends = zip(one.factors(times_s), other.factors(times_s), strict=True)
    logs = [(np.log(mine), np.log(theirs)) for mine, theirs in ends]
    low, high = (np.exp(join(*pair)) for pair in logs)
    # Variances that two errors share add as the errors do.
    mine, theirs = (upper**2 for upper in logs[1])
    shared = mine * one.shared_error(times_s) + theirs * other.shared_error(times_s)
    quantiles = {
        "edges_s": edges_s,
        "low": low,
        "high": high,
        "shared": shared / np.maximum(mine + theirs, _LEAST_SQUARE),
    }
    return Interval(quantiles, 1.0, one.format)


def find_group(
    kind: str, places: Iterable[str], formats: Sequence[str] = (), endings: Iterable[str] = ("",)
) -> Interval | None:
    """First group that there is: of a place with a format, then of a place alone; for each the first ending counts."""
    groups = read_groups(kind)
    for place in places:
        for name in (*formats, ""):
            names = (f"{place}/{name}{ending}" if name else f"{place}{ending}" for ending in endings)
            known = next((groups[full] for full in names if full in groups), None)
            if known is not None:
                return Interval(known, 1.0, name)
    return None


@cache
def read_groups(kind: str) -> Mapping[str, Mapping[str, Any] | None]:
    """Groups of a kind of record by name; none where the package has no file of them.

    Raises:
        CalibrationError: the file is malformed.
    """
    path = resources.files("shapewright.perf") / _FOLDER / f"{kind}.json"
    if not path.is_file():
        return {}
    try:
        groups: Mapping[str, Mapping[str, Any] | None] = json.loads(path.read_text(encoding="utf-8"))["groups"]
    except (ValueError, KeyError, TypeError) as error:
        raise CalibrationError(f"intervals of {kind} are malformed: {error!r}; write them anew") from error
    return groups
