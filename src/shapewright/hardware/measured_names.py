"""Devices by the names that files of measurements give them."""

from __future__ import annotations

from functools import cache

from shapewright.hardware.loader import load_device
from shapewright.hardware.spec import Device

# Names of measured files that say too little, and the device that was measured. The paper's A100 has 40 GB (its logs
# name the machine), its V100 is the SXM2 one of 16 GB, and one die of MI250X is what a process sees.
MEASURED_DEVICES = {
    "a100": "a100-sxm-40gb",
    "v100": "v100-sxm2-16gb",
    "mi250x": "mi250x-gcd",
    "h100": "h100-sxm-80gb",
    "h200": "h200-sxm-141gb",
    "h100-sxm-96gb-hbm2e": "h100-sxm-96gb",
}


@cache
def find_measured_device(name: str) -> Device:
    """Device of a name as measured files spell it: an alias, or one with remarks in brackets.

    Raises:
        UnknownDeviceError: no device file has it.
    """
    plain = name.partition("(")[0].strip()
    return load_device(MEASURED_DEVICES.get(plain.lower(), plain) or "?")
