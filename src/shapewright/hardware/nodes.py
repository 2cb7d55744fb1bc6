"""Nodes: devices per allocation, and node sizes and networks other than those of the reference system."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import DeviceError, LayoutError
from shapewright.core.ranges import check_integer
from shapewright.core.texts import with_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shapewright.hardware.device import Device

# Sanity bounds against mistaken units: the largest domain of one link is a TPU pod, the fastest port has 800 Gb/s.
_MAX_NODE_SIZE = 16_384
_MIN_NETWORK_BYTES_PER_S, _MAX_NETWORK_BYTES_PER_S = 1e6, 1e13
_BITS_PER_BYTE = 8

# Where one link joins a whole rack, jobs are allocated whole trays (NVL72: 18 trays of 4).
_MAX_SERVER_SIZE, _DEVICES_PER_TRAY = 16, 4


def devices_per_allocation(device: Device) -> int:
    """Return the allocation unit of jobs: the devices of a node, or of a tray where one link joins a rack."""
    return device.node_size if device.node_size <= _MAX_SERVER_SIZE else _DEVICES_PER_TRAY


def is_whole_allocation(num_devices: int, device: Device) -> bool:
    """Return whether a number of devices fits in one node (or tray) or is a multiple of it."""
    unit = devices_per_allocation(device)
    return num_devices <= unit or num_devices % unit == 0


def check_allocation(num_devices: int, device: Device, *, words: str = "", allowed: Sequence[int] = ()) -> None:
    """Check that a job does not leave part of a node unused.

    Args:
        words: How the number of devices is computed, for the message; empty for ``num_devices=...``.
        allowed: Numbers of devices that the model can be split over, ascending, to suggest one; empty for any.

    Raises:
        LayoutError: the number is larger than a node and not a multiple of it.
    """
    if is_whole_allocation(num_devices, device):
        return
    unit = devices_per_allocation(device)
    whole = "node" if unit == device.node_size else "tray of its rack"
    # A single device is not a useful suggestion for a job larger than a node.
    possible = [number for number in allowed if number > 1 and is_whole_allocation(number, device)]
    near = [*[n for n in possible if n < num_devices][-1:], *[n for n in possible if n > num_devices][:1]]
    if not near:
        below, most = num_devices // unit * unit, max(allowed, default=num_devices + unit)
        near = [number for number in (below, below + unit) if number <= most] or [most // unit * unit or most]
    tries = " or ".join(map(str, near))
    raise LayoutError(
        (words or f"num_devices={num_devices}")
        + f" must be a multiple of {unit}, the number of {device.name} in a {whole}, or less",
        advice=f"try {tries}, " + with_fields("or set {node_size} if your nodes differ"),
    )


def with_nodes(
    device: Device | str, *, node_size: int | None = None, inter_node_bandwidth_bytes_per_s: float | None = None
) -> Device:
    """Return a device with another node size or network than the reference system of its file.

    Args:
        device: The device, or its name, alias or file.
        node_size: Devices per node, joined by the link of the device file or else by PCIe; None to keep it.
        inter_node_bandwidth_bytes_per_s: Network bandwidth per device, one direction; None to keep it. [byte/s]

    Raises:
        DeviceError: a value is out of range.

    >>> with_nodes("rtx-4090", node_size=8, inter_node_bandwidth_bytes_per_s=12.5e9).title
    'NVIDIA GeForce RTX 4090 (nodes of 8, network of 100 Gb/s each)'
    """
    if isinstance(device, str):
        from shapewright.hardware.loader import load_device

        device = load_device(device)
    changes: dict[str, Any] = {}
    if node_size is not None:
        changes["node_size"] = check_integer("node_size", node_size, 1, _MAX_NODE_SIZE, error=DeviceError)
    if inter_node_bandwidth_bytes_per_s is not None:
        network = inter_node_bandwidth_bytes_per_s
        if not _MIN_NETWORK_BYTES_PER_S <= network <= _MAX_NETWORK_BYTES_PER_S:
            low, high = (_gbit_per_s(bound) for bound in (_MIN_NETWORK_BYTES_PER_S, _MAX_NETWORK_BYTES_PER_S))
            raise DeviceError(
                f"a network of {_gbit_per_s(network)} Gb/s per device must be from {low} to {high} Gb/s; a "
                f"ConnectX-7 port has 400"
            )
        changes["inter_node_bandwidth_bytes_per_s"] = network
    if not changes:
        return device
    words = describe_nodes(node_size, inter_node_bandwidth_bytes_per_s)
    # Values given by the user are not from the sources of the device file.
    provenance = {name: entry for name, entry in device.provenance.items() if name not in changes}
    return replace(device, **changes, provenance=provenance, title=f"{device.title} ({words})")


def describe_nodes(node_size: int | None, inter_node_bandwidth_bytes_per_s: float | None) -> str:
    """Describe the arguments of with_nodes; empty if there are none."""
    words = [] if node_size is None else [f"nodes of {node_size}"]
    if inter_node_bandwidth_bytes_per_s is not None:
        words.append(f"network of {_gbit_per_s(inter_node_bandwidth_bytes_per_s)} Gb/s each")
    return ", ".join(words)


def _gbit_per_s(bytes_per_s: float) -> str:
    return f"{bytes_per_s * _BITS_PER_BYTE / 1e9:g}"
