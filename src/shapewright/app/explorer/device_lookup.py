"""Look up devices by name: those of the package, and the device of the user's calibration file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shapewright.app.report.outputs.catalogue import describe_calibration
from shapewright.core.notes import Note
from shapewright.hardware.loader import load_named_device
from shapewright.hardware.nodes import with_nodes
from shapewright.pricing.calibration.file import calibrated_device, read_calibration

if TYPE_CHECKING:
    from shapewright.hardware.device import Device

_BYTES_PER_GBIT = 1e9 / 8
_MAX_CACHED = 64


class DeviceLookup:
    """Finds devices by name; requests cannot choose files.

    Args:
        calibration: Path of a calibration file whose device is priced with its records; empty for none.

    Raises:
        CalibrationError: the file cannot be read.
    """

    def __init__(self, calibration: str = "") -> None:
        self.calibration = calibration
        self.calibrated: Device | None = None
        self._with_nodes: dict[tuple[str, int | None, float | None], Device] = {}
        if calibration:
            self.calibrated = calibrated_device(read_calibration(calibration).device.name, calibration)

    def find(self, name: str, *, node_size: int | None = None, network_gbit_per_s: float | None = None) -> Device:
        """Find a device by name or alias, with the given node options instead of those of its file.

        Args:
            node_size: Devices per node; None for the value of the device file.
            network_gbit_per_s: Network of each device, one direction; None for the value of the device file. [Gbit/s]

        Raises:
            UnknownDeviceError: no device of that name.
            DeviceError: the node options are not valid.
        """
        found = self._find_on_disk(name)
        if node_size is None and network_gbit_per_s is None:
            return found
        # Prices are cached per device object, so each combination has one object; the cache is cleared when full.
        key = (found.name, node_size, network_gbit_per_s)
        if key not in self._with_nodes:
            network = None if network_gbit_per_s is None else network_gbit_per_s * _BYTES_PER_GBIT
            made = with_nodes(found, node_size=node_size, inter_node_bandwidth_bytes_per_s=network)
            if len(self._with_nodes) >= _MAX_CACHED:
                self._with_nodes.clear()
            self._with_nodes[key] = made
            return made
        return self._with_nodes[key]

    def _find_on_disk(self, name: str) -> Device:
        if self.calibrated is None:
            return load_named_device(name)
        if name.strip().casefold() == self.calibrated.name:
            return self.calibrated  # may not have a device file
        found = load_named_device(name)
        return self.calibrated if found.name == self.calibrated.name else found

    def calibration_notes(self, device: Device) -> tuple[Note, ...]:
        """Notes on a device that is priced with the user's calibration file; empty for other devices."""
        if self.calibrated is None or device.name != self.calibrated.name:
            return ()
        file = Path(self.calibration).name
        names = ", ".join(sorted(device.own_records))
        return (Note(f"{device.name} is priced with the records of {file}: {names}", "own-records"),)

    def to_json(self) -> dict[str, str] | None:
        """The device of the calibration file as the page lists it; None without a calibration file."""
        if self.calibrated is None:
            return None
        return {
            "name": self.calibrated.name,
            "title": self.calibrated.title,
            "vendor": self.calibrated.vendor,
            "measured": describe_calibration(self.calibrated),
            "text": self.calibration_notes(self.calibrated)[0],
        }
