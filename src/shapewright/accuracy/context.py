"""What pricing a table needs and leaves behind: devices, records, rows left out and why, remarks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from shapewright.accuracy.chunk import Prices
from shapewright.accuracy.columns import Columns
from shapewright.accuracy.formats import read_format, read_stored_format
from shapewright.errors import ShapewrightError, UnknownDeviceError
from shapewright.hardware import find_measured_device, is_exact_name
from shapewright.perf.calibration import load_record
from shapewright.perf.expert_kernels import has_same_defaults
from shapewright.perf.libraries import nearest_library

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.accuracy.formats import ElementFormat
    from shapewright.hardware import Device
    from shapewright.perf.calibration import CalibrationRecord

# Rows priced in one call: bounds the memory of what is kept beside them, and lets a progress bar move.
ROWS_AT_ONCE = 131_072
# Remarks kept for each table; a file of nothing but strange words would fill the screen.
_MOST_NOTES, _MORE_NOTES = 60, "and more remarks of this kind"


PriceGroup = Callable[[Columns, "Device", tuple[str, ...]], Prices]


@dataclass
class Context:
    """State of judging one table.

    Attributes:
        uncalibrated: Price as if nobody had measured the device.
        physics_only: Leave aside what was learned beyond the formulas.
        devices: Canonical names to keep; empty for all.
        skipped: Rows left out, by reason.
        notes: What the reader must know.
        advance: Called with the number of rows that are done.
        own: Devices with records of the user's own, by canonical name; they come before those of the package.
    """

    uncalibrated: bool = False
    physics_only: bool = False
    devices: frozenset[str] = frozenset()
    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    advance: Callable[[int], None] = lambda _: None
    own: Mapping[str, Device] = field(default_factory=dict)

    def record(self, kind: str, device: Device, *, older_software: bool = False) -> CalibrationRecord:
        """The record to price with.

        Args:
            kind: Kind of operation.
            device: The device.
            older_software: The rows were timed with libraries older than the record's. Their heuristics were others, so
                what was learned of today's is left aside (docs/decisions/0003), and the interval is that of older
                software. Records without anything learned were fitted on such rows: nothing changes.
        """
        record = load_record(kind, device, uncalibrated=self.uncalibrated, physics_only=self.physics_only)
        if older_software and load_record(kind, device, uncalibrated=self.uncalibrated).residual is not None:
            record = replace(record, residual=None, older_software=True)
        if self.uncalibrated and device.name in record.devices:
            self.note(f"{kind} on {device.name}: no other device has a record, so its own is used after all")
        elif record.transfer != "exact" and not self.uncalibrated and not device.roofline_only:
            self.note(f"{kind} on {device.name}: nobody measured it, priced by the record of {record.device}")
        return record

    def priced(self, device: Device) -> Device:
        """The device as a model's step is priced on it: by physics alone where that is asked."""
        return device.by_physics if self.physics_only else device

    def note_library(self, kind: str, library: str, record: CalibrationRecord) -> None:
        """Say what stands for a library that the record does not know."""
        known = {each.partition("/")[0] for each in record.parameters["libraries"]}
        # A record's usual sections carry no name of a library; its reports tell whose they are.
        for report in record.provenance.get("reports", {}).values():
            known.update(report.get("libraries", ()))
        if library and known and library not in known:
            nearest = nearest_library(library, known)
            stands = f"no measured version, {nearest} is nearest" if nearest else "a library that nobody measured"
            alike = next((each for each in sorted(known) if has_same_defaults(library, each)), "")
            if kind == "moe" and alike and nearest and not has_same_defaults(library, nearest):
                stands += f"; triton's kernels are those of {alike}, with the same default tiles"
            self.note(f"{kind}: {library!r} is {stands}")

    def note(self, words: str) -> None:
        """Say something once; of very many things, that there are more."""
        if len(self.notes) >= _MOST_NOTES:
            words = _MORE_NOTES
        if words not in self.notes:
            self.notes.append(words)

    def read_format(self, word: str, device: Device) -> ElementFormat:
        """Element format of a word of a file; what it takes for granted is noted.

        Raises:
            MeasuredFileError: the word tells no format.
        """
        return self._noted(read_format(word, device))

    def read_stored_format(self, word: str) -> ElementFormat:
        """The same of what only lies in memory.

        Raises:
            MeasuredFileError: the word tells no format.
        """
        return self._noted(read_stored_format(word))

    def _noted(self, found: ElementFormat) -> ElementFormat:
        if found.assumption:
            self.note(f"assumed, with wider intervals: {found.assumption}")
        return found

    def leave_out(self, columns: Columns, wrong: NDArray[np.bool_], reason: str) -> Columns:
        """Count rows that make no sense under a reason, and return the others."""
        if not wrong.any():
            return columns
        self.skipped[reason] += int(wrong.sum())
        self.advance(int(wrong.sum()))
        return columns.take(~wrong)

    def device_of(self, name: str, num_rows: int) -> Device | None:
        """The device of a measured file; None where it is not asked for, or unknown, which is counted."""
        try:
            device = self.own[name] if name in self.own else find_measured_device(name)
            device = self.own.get(device.name, device)
        except UnknownDeviceError:
            if not self.devices:
                self.skipped[f"no device file for {name!r}"] += num_rows
            return None
        if name not in self.own and not is_exact_name(name):
            self.note(f"{name!r} is taken as {device.name}")
        return device if not self.devices or device.name in self.devices else None

    def price_groups(
        self, columns: Columns, by: tuple[str, ...], price: PriceGroup
    ) -> Iterator[tuple[Columns, Device, tuple[str, ...], Prices]]:
        """Price rows that share the words ``by``, of which the first is the device; errors leave a group out."""
        for words, group in columns.groups(*by):
            device = self.device_of(words[0], group.num_rows)
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
