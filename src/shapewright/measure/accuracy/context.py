"""State of pricing one table: devices, element formats, records, skipped rows by reason, and notes for the user.

Serving libraries name a quantization scheme instead of a format: ``fp8_block`` multiplies 8-bit floats with a scale per
block, ``int8_wo`` stores 8-bit weights and multiplies in 16 bits. A name is matched in this order: a format of the
package, a scheme of weights and activations (``w4a16``), stored weights only (``_wo``), a prefix that is a format.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import MeasuredFileError, ShapewrightError, UnknownDeviceError, WorkloadError
from shapewright.core.notes import Note
from shapewright.core.records import dataclass
from shapewright.hardware.loader import find_measured_device, is_exact_name
from shapewright.measure.accuracy.chunk import Columns, Prices
from shapewright.pricing.calibration.libraries import nearest_library
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.experts.kernels import has_same_defaults

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.hardware.device import Device
    from shapewright.pricing.calibration.records import CalibrationRecord

# Widening of the logarithmic interval if a format is priced as a similar one: judgment, as for formats that borrow
# another's fractions (pricing.gemm).
_ASSUMED_WIDENING = 1.6
# Schemes of collectors that state no widths, and schemes known by a name.
_SCHEMES = {
    "awq": "w4a16",
    "gptq": "w4a16",
    "marlin": "w4a16",
    "sq": "w8a8",
    "smoothquant": "w8a8",
    "w4afp8": "w4a8",
    "w4a8_mxfp4_mxfp8": "w4a8",
}
_WIDTHS = re.compile(r"w(4|8|16)a(4|8|16)")
_STORED = {"4": "int4", "8": "int8"}
# Formats whose names are prefixes of other names: fp8_block, nvfp4_awq. Longer ones first.
_PREFIXES = ("nvfp4", "mxfp4", "mxfp8", "bfloat16", "float16", "float8", "bf16", "fp16", "fp8", "fp4", "int8", "int4")


class ElementFormat(NamedTuple):
    """Formats with which a measured row is priced.

    Attributes:
        dtype: Element format of the GEMMs.
        weight_dtype: Element format of the stored weights, if it is another.
        assumption: Assumption for the user; empty if there is none.
    """

    dtype: str
    weight_dtype: str | None = None
    assumption: str = ""

    def widen(self, prices: Prices) -> Prices:
        """Widen the intervals if there is an assumption."""
        return prices.widen(_ASSUMED_WIDENING) if self.assumption else prices


def read_format(word: str, device: Device) -> ElementFormat:
    """Read a format name for a device.

    A device without matrix units for a narrow float stores it and multiplies in 16 bits, as libraries do.

    Raises:
        MeasuredFileError: the name is unknown.
    """
    found = _read_word(word)
    narrow = get_dtype(found.dtype)
    if narrow.name not in device.dense_flops_per_s and narrow.name in ("fp8", "fp4", "int4") and not found.weight_dtype:
        stored = "int4" if narrow.bits == 4 else "int8"
        usual = "bf16" if "bf16" in device.dense_flops_per_s else "fp16"
        assumption = f"{word} on {device.name}, which cannot multiply it: stored weights, GEMMs in {usual}"
        return ElementFormat(usual, stored, assumption)
    return found


def read_stored_format(word: str) -> ElementFormat:
    """Read the format name of stored data, such as a cache; any device can store it.

    Raises:
        MeasuredFileError: the name is unknown.
    """
    found = _read_word(word)
    return ElementFormat(found.weight_dtype or found.dtype, None, found.assumption)


def _read_word(word: str) -> ElementFormat:
    folded = word.strip().casefold().removeprefix("torch.")
    try:
        return ElementFormat(get_dtype(folded).name)
    except WorkloadError:
        pass
    scheme = _SCHEMES.get(folded, folded)
    widths = _WIDTHS.match(scheme)
    if widths:
        is_integer = "int8" in folded or folded in ("sq", "smoothquant")
        return _read_scheme(word, widths.group(1), widths.group(2), is_integer=is_integer)
    if folded.endswith(("_wo", "-wo", "_weight_only")):
        stored = "int4" if "4" in folded else "int8"
        return ElementFormat("bf16", stored, f"{word}: weights as {stored}, GEMMs in bf16")
    for prefix in _PREFIXES:
        if folded.startswith(prefix):
            dtype = get_dtype(prefix).name
            return ElementFormat(dtype, None, f"{word} as {dtype}")
    raise MeasuredFileError(f"unknown format {word!r}; known are those of the package, and schemes such as w4a16")


def _read_scheme(word: str, weights: str, activations: str, *, is_integer: bool) -> ElementFormat:
    """Return the formats of a scheme with these widths of weights and activations."""
    if activations == "16":
        if weights == "16":
            return ElementFormat("bf16", None, f"{word} as bf16")
        return ElementFormat("bf16", _STORED[weights], f"{word}: weights as {_STORED[weights]}, GEMMs in bf16")
    if activations == "4":
        return ElementFormat("fp4", None, f"{word} as fp4")
    dtype = "int8" if is_integer else "fp8"
    if weights == "4":
        return ElementFormat(dtype, "int4", f"{word}: weights as int4, GEMMs in {dtype}")
    return ElementFormat(dtype, None, f"{word} as {dtype}")


# Rows priced in one call: bounds memory, and lets a progress bar move.
ROWS_AT_ONCE = 131_072
# Most notes per table, since a file of unknown names could fill the screen.
_MOST_NOTES, _MORE_NOTES = 60, "and more notes of this kind"


PriceGroup = Callable[[Columns, "Device", tuple[str, ...]], Prices]


@dataclass
class Context:
    """State of pricing one table.

    Attributes:
        uncalibrated: Price as if the device had no record of its own.
        physics_only: Ignore learned corrections.
        as_new_shapes: Price by records without the shapes by which their errors are reported; for rows of these alone.
        devices: Canonical names to keep; empty for all.
        skipped: Number of skipped rows by reason.
        notes: Notes for the user.
        advance: Called with the number of rows that are done.
        own: Devices with records of the user's own, by canonical name; they take precedence over the package's.
        folder: Folder of the table, for files that belong to it.
    """

    uncalibrated: bool = False
    physics_only: bool = False
    as_new_shapes: bool = False
    devices: frozenset[str] = frozenset()
    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    advance: Callable[[int], None] = lambda _: None
    own: Mapping[str, Device] = field(default_factory=dict)
    folder: Path = field(default_factory=Path)

    def record(self, kind: str, device: Device, *, older_software: bool = False) -> CalibrationRecord:
        """Return the record to price with.

        Args:
            older_software: The rows were timed with libraries older than the record's, with other heuristics. Learned
                corrections of current libraries are then ignored (docs/decisions/0003), and the interval is that of
                older software. Records without learned corrections were fitted to such rows and stay unchanged.
        """
        record = load_record(kind, self.with_pricing(device))
        record = record.without_own_shapes if self.as_new_shapes else record
        if (
            older_software
            and load_record(kind, device.with_pricing(uncalibrated=self.uncalibrated)).residual is not None
        ):
            record = replace(record, residual=None, older_software=True)
        if self.uncalibrated and device.name in record.devices:
            self.note(f"{kind} on {device.name}: its own record is used, since no other device has one")
        elif record.transfer != "exact" and not self.uncalibrated and not device.roofline_only:
            self.note(f"{kind} on {device.name}: unmeasured, priced by the record of {record.device}")
        return record

    def with_pricing(self, device: Device) -> Device:
        """Return the device with the pricing options of this context."""
        return device.with_pricing(uncalibrated=self.uncalibrated, physics_only=self.physics_only)

    def note_library(self, kind: str, library: str, record: CalibrationRecord) -> None:
        """Note what prices a library that the record does not contain."""
        known = {each.partition("/")[0] for each in record.parameters["libraries"]}
        # The default sections carry no library name; the reports name their libraries.
        for report in record.provenance.get("reports", {}).values():
            known.update(report.get("libraries", ()))
        if library and known and library not in known:
            nearest = nearest_library(library, known)
            stands = f"an unmeasured version, priced as {nearest}" if nearest else "an unmeasured library"
            alike = next((each for each in sorted(known) if has_same_defaults(library, each)), "")
            if kind == "moe" and alike and nearest and not has_same_defaults(library, nearest):
                stands += f"; triton's kernels are those of {alike}, with the same default tiles"
            self.note(f"{kind}: {library!r} is {stands}")

    def note(self, words: str) -> None:
        """Add a note once; after many notes, only that there are more."""
        if len(self.notes) >= _MOST_NOTES:
            words = _MORE_NOTES
        if words not in self.notes:
            self.notes.append(words)

    def read_format(self, word: str, device: Device) -> ElementFormat:
        """Return the element format that a file names; assumptions are noted.

        Raises:
            MeasuredFileError: the name is unknown.
        """
        return self._noted(read_format(word, device))

    def read_stored_format(self, word: str) -> ElementFormat:
        """Return the element format of stored data that a file names; assumptions are noted.

        Raises:
            MeasuredFileError: the name is unknown.
        """
        return self._noted(read_stored_format(word))

    def _noted(self, found: ElementFormat) -> ElementFormat:
        if found.assumption:
            self.note(f"assumed, with wider intervals: {found.assumption}")
        return found

    def skip_rows(self, columns: Columns, wrong: NDArray[np.bool_], reason: str) -> Columns:
        """Count invalid rows under a reason, and return the others."""
        if not wrong.any():
            return columns
        self.skipped[reason] += int(wrong.sum())
        self.advance(int(wrong.sum()))
        return columns.take(~wrong)

    def find_device(self, name: str, num_rows: int) -> Device | None:
        """Return the device of a file's name for it; None if it is not selected, or unknown, which is counted."""
        try:
            device = self.own[name] if name in self.own else find_measured_device(name)
            device = self.own.get(device.name, device)
        except UnknownDeviceError:
            if not self.devices:
                self.skipped[Note(f"no device file for {name!r}", "unknown-device")] += num_rows
            return None
        if name not in self.own and not is_exact_name(name):
            self.note(f"{name!r} is read as {device.name}")
        return device if not self.devices or device.name in self.devices else None

    def device_groups(self, columns: Columns, *by: str) -> Iterator[tuple[Device, tuple[str, ...], Columns]]:
        """Yield rows of selected devices that share the labels ``by``, of which the first is the device."""
        for words, rows in columns.groups(*by):
            device = self.find_device(words[0], rows.num_rows)
            if device is not None:
                yield device, words, rows
            self.advance(rows.num_rows)

    def price_groups(
        self, columns: Columns, by: tuple[str, ...], price: PriceGroup
    ) -> Iterator[tuple[Columns, Device, tuple[str, ...], Prices]]:
        """Price rows that share the labels ``by``, of which the first is the device; groups with errors are skipped."""
        for words, group in columns.groups(*by):
            device = self.find_device(words[0], group.num_rows)
            if device is None:
                self.advance(group.num_rows)
                continue
            for start in range(0, group.num_rows, ROWS_AT_ONCE):
                rows = group.take(slice(start, start + ROWS_AT_ONCE))
                try:
                    prices = price(rows, device, words)
                except ShapewrightError as error:
                    self.skipped[str(error)] += rows.num_rows
                else:
                    yield rows, device, words, prices
                self.advance(rows.num_rows)
