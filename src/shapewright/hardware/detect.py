"""Name the device that a driver reports."""

from __future__ import annotations

from shapewright.errors import UnknownDeviceError, close_names
from shapewright.hardware.catalogue import find_aliases, fold_name, list_devices
from shapewright.hardware.loader import load_device
from shapewright.hardware.spec import Device

# Files hold what a process sees where that is known, else decimal gigabytes: drivers report between 6 % below these (24
# GB of GDDR6 with ECC) and 7.4 % above them (2**30 / 10**9). Siblings of one name lie 17 % apart at least.
MEMORY_TOLERANCE_FRACTION = 0.08


def detect_device(gpu_name: str, num_sms: int, memory_bytes: float) -> Device:
    """Find the device that has this driver name, this many SMs and this much memory; all three must agree.

    Args:
        gpu_name: What ``nvidia-smi``, ``rocm-smi`` or torch call it.
        num_sms: Streaming multiprocessors or compute units that the driver reports.
        memory_bytes: Memory that the driver reports. [byte]

    Raises:
        UnknownDeviceError: no device agrees, or more than one does.
    """
    known = find_aliases()
    folded = fold_name(gpu_name)
    named = [known.get(folded, folded)] if folded in known or folded in list_devices() else []
    # A driver name shared by several SKUs (``NVIDIA GH200``) begins or lies within their names.
    if not named and folded:
        named = sorted({name for alias, name in known.items() if folded in alias})
    found = [
        device
        for device in map(load_device, named)
        if device.num_sms == num_sms and abs(memory_bytes / device.memory_bytes - 1.0) <= MEMORY_TOLERANCE_FRACTION
    ]
    if len(found) == 1:
        return found[0]
    seen = f"{gpu_name!r} with {num_sms} SMs and {memory_bytes / 1e9:.1f} GB"
    if found:
        raise UnknownDeviceError(
            f"{seen} could be any of {', '.join(device.name for device in found)}; name one with --device"
        )
    if named:
        nearest = "; ".join(
            f"{device.name} has {device.num_sms} SMs and {device.memory_bytes / 1e9:g} GB"
            for device in map(load_device, named[:3])
        )
        raise UnknownDeviceError(
            f"no device file is of {seen} ({nearest}); name one with --device, or write a file for it"
        )
    hint = close_names(folded, [*list_devices(), *known])
    raise UnknownDeviceError(
        f"no device file is of {seen}; {hint + ' ' if hint else ''}`shapewright devices template > my.toml` starts one"
    )
