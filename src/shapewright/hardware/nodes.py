"""How many devices a job gets together: those of a node, or of a tray where one link joins a whole rack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.errors import LayoutError

if TYPE_CHECKING:
    from shapewright.hardware.spec import Device

# One link may join the devices of a rack; jobs get whole trays of it (NVL72: 18 trays of 4).
_LARGEST_SERVER, _DEVICES_PER_TRAY = 16, 4


def devices_per_unit(device: Device) -> int:
    """Devices that a job gets together."""
    return device.node_size if device.node_size <= _LARGEST_SERVER else _DEVICES_PER_TRAY


def fills_units(num_devices: int, device: Device) -> bool:
    """Whether a number of devices is a part of one unit, or whole units."""
    unit = devices_per_unit(device)
    return num_devices <= unit or num_devices % unit == 0


def check_units(num_devices: int, device: Device, *, words: str = "") -> None:
    """Refuse a number of devices that leaves a part of a node over.

    Args:
        num_devices: Devices of the job.
        device: The device.
        words: How the number came about, where it is no option of its own.

    Raises:
        LayoutError: it is more than a node and not whole nodes.
    """
    if fills_units(num_devices, device):
        return
    unit = devices_per_unit(device)
    whole = "node" if unit == device.node_size else "tray of its rack"
    below = num_devices // unit * unit
    raise LayoutError(
        f"{words or f'gpus={num_devices}'} must be a multiple of the {unit} {device.name} of a {whole}, or fewer than "
        f"those; try {below} or {below + unit}, or a device file with your node_size"
    )
