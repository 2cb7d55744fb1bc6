"""Devices that requests may name: those of the package, one of them perhaps with records of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shapewright.hardware import load_named_device
from shapewright.perf.calibration_file import calibrated_device, read_calibration
from shapewright.report.devices import calibration_words

if TYPE_CHECKING:
    from shapewright.hardware import Device


class KnownDevices:
    """Finds devices by name; nothing that a request says chooses a file.

    Args:
        calibration: Path of a calibration file, whose device is priced with its records; empty for none.

    Raises:
        CalibrationError: the file cannot be read.
    """

    def __init__(self, calibration: str = "") -> None:
        self.calibration = calibration
        self.own: Device | None = None
        if calibration:
            self.own = calibrated_device(read_calibration(calibration).device.name, calibration)

    def named(self, name: str) -> Device:
        """The device of a name or an alias.

        Raises:
            UnknownDeviceError: there is none.
        """
        if self.own is None:
            return load_named_device(name)
        if name.strip().casefold() == self.own.name:
            return self.own  # perhaps one that no device file describes
        found = load_named_device(name)
        return self.own if found.name == self.own.name else found

    def remark(self, device: Device) -> tuple[str, ...]:
        """What there is to say about a device with records of its own."""
        if device is not self.own:
            return ()
        file = Path(self.calibration).name
        return (f"{device.name} is priced with the records of {file}: {', '.join(sorted(device.own_records))}",)

    def to_json(self) -> dict[str, str] | None:
        """The device with records of its own, as pages list it; None where there is none."""
        if self.own is None:
            return None
        return {
            "name": self.own.name,
            "title": self.own.title,
            "vendor": self.own.vendor,
            "measured": calibration_words(self.own),
            "text": self.remark(self.own)[0],
        }
