"""Devices that requests may name: those of the package, one of them perhaps with records of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shapewright.hardware import load_named_device, with_nodes
from shapewright.perf.calibration_file import calibrated_device, read_calibration
from shapewright.report.devices import calibration_words

if TYPE_CHECKING:
    from shapewright.hardware import Device

_BYTES_PER_GBIT = 1e9 / 8
_MOST_KEPT = 64


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
        self._in_nodes: dict[tuple[str, int | None, float | None], Device] = {}
        if calibration:
            self.own = calibrated_device(read_calibration(calibration).device.name, calibration)

    def named(self, name: str, *, node_size: int | None = None, network_gbit_per_s: float | None = None) -> Device:
        """The device of a name or an alias, in nodes that differ from its file's where they are given.

        Args:
            name: Name or alias.
            node_size: Devices of a node; None for those of its file.
            network_gbit_per_s: Network of each device, one direction; None for that of its file. [Gbit/s]

        Raises:
            UnknownDeviceError: there is none.
            DeviceError: there can be no such nodes.
        """
        found = self._of_file(name)
        if node_size is None and network_gbit_per_s is None:
            return found
        # One object for each, since prices are kept by it; past a limit all are made anew.
        key = (found.name, node_size, network_gbit_per_s)
        if key not in self._in_nodes:
            network = None if network_gbit_per_s is None else network_gbit_per_s * _BYTES_PER_GBIT
            made = with_nodes(found, node_size=node_size, inter_node_bandwidth_bytes_per_s=network)
            if len(self._in_nodes) >= _MOST_KEPT:
                self._in_nodes.clear()
            self._in_nodes[key] = made
            return made
        return self._in_nodes[key]

    def _of_file(self, name: str) -> Device:
        if self.own is None:
            return load_named_device(name)
        if name.strip().casefold() == self.own.name:
            return self.own  # perhaps one that no device file describes
        found = load_named_device(name)
        return self.own if found.name == self.own.name else found

    def remark(self, device: Device) -> tuple[str, ...]:
        """What there is to say about a device with records of its own."""
        if self.own is None or device.name != self.own.name:
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
