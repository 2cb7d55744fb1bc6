"""Nodes: how many devices a job gets together, and machines that differ from a device's reference system."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shapewright.errors import DeviceError, LayoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shapewright.hardware.spec import Device

# The largest that one link joins today is a pod of TPUs, and the fastest network port 800 Gb/s; beyond these a unit is
# mistaken. [device, byte/s]
_LARGEST_NODE, _SLOWEST_NETWORK, _FASTEST_NETWORK = 16_384, 1e6, 1e13
_BITS_PER_BYTE = 8

# One link may join the devices of a rack; jobs get whole trays of it (NVL72: 18 trays of 4).
_LARGEST_SERVER, _DEVICES_PER_TRAY = 16, 4


def devices_per_unit(device: Device) -> int:
    """Devices that a job gets together."""
    return device.node_size if device.node_size <= _LARGEST_SERVER else _DEVICES_PER_TRAY


def fills_units(num_devices: int, device: Device) -> bool:
    """Whether a number of devices is a part of one unit, or whole units."""
    unit = devices_per_unit(device)
    return num_devices <= unit or num_devices % unit == 0


def check_units(num_devices: int, device: Device, *, words: str = "", allowed: Sequence[int] = ()) -> None:
    """Refuse a number of devices that leaves a part of a node over.

    Args:
        num_devices: Devices of the job.
        device: The device.
        words: How the number came about, where it is no option of its own.
        allowed: Numbers that the model can be cut into, in order, of which one is suggested; empty for any.

    Raises:
        LayoutError: it is more than a node and not whole nodes.
    """
    if fills_units(num_devices, device):
        return
    unit = devices_per_unit(device)
    whole = "node" if unit == device.node_size else "tray of its rack"
    # One device is not what somebody wants who asked for more than a node.
    possible = [number for number in allowed if number > 1 and fills_units(number, device)]
    near = [*[n for n in possible if n < num_devices][-1:], *[n for n in possible if n > num_devices][:1]]
    if not near:
        below, most = num_devices // unit * unit, max(allowed, default=num_devices + unit)
        near = [number for number in (below, below + unit) if number <= most] or [most // unit * unit or most]
    tries = " or ".join(map(str, near))
    raise LayoutError(
        f"{words or f'gpus={num_devices}'} must be a multiple of the {unit} {device.name} of a {whole}, or fewer than "
        f"those; try {tries}, or --node-size if yours has others"
    )


def with_nodes(
    device: Device | str, *, node_size: int | None = None, inter_node_bandwidth_bytes_per_s: float | None = None
) -> Device:
    """The same device in nodes of another size, or on another network, than in the reference system of its file.

    Args:
        device: The device, or its name, alias or file.
        node_size: Devices of a node, joined by the link of its file, or without one by PCIe; None for as many as there.
        inter_node_bandwidth_bytes_per_s: Network per device, one direction; None for that of its file. [byte/s]

    Raises:
        DeviceError: no node is of that size, or no network that fast or slow.

    >>> with_nodes("rtx-4090", node_size=8, inter_node_bandwidth_bytes_per_s=12.5e9).title
    'NVIDIA GeForce RTX 4090 (nodes of 8, network of 100 Gb/s each)'
    """
    if isinstance(device, str):
        from shapewright.hardware.loader import load_device

        device = load_device(device)
    changes: dict[str, Any] = {}
    if node_size is not None:
        if isinstance(node_size, bool) or not isinstance(node_size, int) or not 1 <= node_size <= _LARGEST_NODE:
            raise DeviceError(f"node_size={node_size!r} must be a whole number from 1 to {_LARGEST_NODE}, such as 8")
        changes["node_size"] = node_size
    if inter_node_bandwidth_bytes_per_s is not None:
        network = inter_node_bandwidth_bytes_per_s
        if not _SLOWEST_NETWORK <= network <= _FASTEST_NETWORK:
            raise DeviceError(
                f"a network of {network * _BITS_PER_BYTE / 1e9:g} Gb/s for each device must be from "
                f"{_SLOWEST_NETWORK * _BITS_PER_BYTE / 1e9:g} to {_FASTEST_NETWORK * _BITS_PER_BYTE / 1e9:g} Gb/s; "
                f"400 is a ConnectX-7 for each"
            )
        changes["inter_node_bandwidth_bytes_per_s"] = network
    if not changes:
        return device
    words = describe_nodes(node_size, inter_node_bandwidth_bytes_per_s)
    # What the reader gave has no source in the device's file.
    provenance = {name: entry for name, entry in device.provenance.items() if name not in changes}
    return replace(device, **changes, provenance=provenance, title=f"{device.title} ({words})")


def describe_nodes(node_size: int | None, inter_node_bandwidth_bytes_per_s: float | None) -> str:
    """Say what with_nodes was given; empty where nothing was."""
    words = [] if node_size is None else [f"nodes of {node_size}"]
    if inter_node_bandwidth_bytes_per_s is not None:
        words.append(f"network of {inter_node_bandwidth_bytes_per_s * _BITS_PER_BYTE / 1e9:g} Gb/s each")
    return ", ".join(words)
