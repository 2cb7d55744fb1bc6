"""Devices by the names that files of measurements give them: looser than names that a user types.

A file's name is taken as it stands; else without remarks in brackets; else by its words, whatever their order, without
the maker's and without what every board has. Where words fit several boards, the one that collections of measurements
mean by them is taken, and whoever asks is told (``is_exact_name``).
"""

from __future__ import annotations

import re
from functools import cache

from shapewright.errors import UnknownDeviceError
from shapewright.hardware.catalogue import find_aliases, fold_name, list_devices
from shapewright.hardware.loader import load_device, load_named_device
from shapewright.hardware.spec import Device

# Names of measured files that say too little, and the device that was measured. The paper's A100 has 40 GB (its logs
# name the machine), its V100 is the SXM2 one of 16 GB, and one die of MI250X is what a process sees. Of others the
# board that clouds rent is meant.
MEASURED_DEVICES = {
    "a100": "a100-sxm-40gb",
    "a100-40gb": "a100-sxm-40gb",
    "a100-80gb": "a100-sxm-80gb",
    "v100": "v100-sxm2-16gb",
    "v100-sxm": "v100-sxm2-16gb",
    "v100-16gb": "v100-sxm2-16gb",
    "v100-32gb": "v100-sxm2-32gb",
    "v100-pcie": "v100-pcie-16gb",
    "mi250x": "mi250x-gcd",
    "mi300": "mi300x",
    "h100": "h100-sxm-80gb",
    "h100-80gb": "h100-sxm-80gb",
    "h200": "h200-sxm-141gb",
    "h200-141gb": "h200-sxm-141gb",
    "h800-80gb": "h800-sxm-80gb",
    "a800-80gb": "a800-sxm-80gb",
    "gh200": "gh200-96gb",
    "b200-192gb": "b200-sxm-180gb",
    "b200-sxm-192gb": "b200-sxm-180gb",
    "h100-sxm-96gb-hbm2e": "h100-sxm-96gb",
}
# Words that tell no board from another: makers, families, kinds of memory, parts of a system's name.
_IDLE_WORDS = frozenset(
    (
        *("nvidia", "amd", "intel", "google", "aws", "tesla", "geforce", "quadro", "instinct"),
        *("accelerator", "gpu", "tensor", "core", "graphics", "generation", "edition", "per", "ac", "oam"),
        *("hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6", "gddr6x"),
        *("hgx", "dgx", "nvl72", "server", "workstation", "blackwell"),
    )
)
_SOCKET = re.compile(r"sxm\d")


def find_measured_device(name: str) -> Device:
    """Device of a name as measured files spell it.

    Raises:
        UnknownDeviceError: no device file has it, or several could be meant.
    """
    return load_device(_find_name(name))


def is_exact_name(name: str) -> bool:
    """Whether a name is one of a device file's own, and no reading of this module."""
    folded = fold_name(name)
    return folded in list_devices() or folded in find_aliases()


@cache
def _find_name(name: str) -> str:
    plain = name.partition("(")[0].strip()
    for spelled in (name, plain):
        folded = MEASURED_DEVICES.get(fold_name(spelled), spelled)
        if folded and is_exact_name(folded):
            return load_named_device(folded).name
    words = _read_words(plain)
    usual = {_read_words(short): device for short, device in MEASURED_DEVICES.items()}
    if words in usual:
        return usual[words]
    named = find_aliases() | {own: own for own in list_devices()}
    found = sorted({device for alias, device in named.items() if words and _read_words(alias) == words})
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownDeviceError(f"{name!r} could be any of {', '.join(found)}; rename it to one of them")
    return load_named_device(plain or "?").name


def _read_words(name: str) -> frozenset[str]:
    """Words of a name that tell boards apart.

    >>> sorted(_read_words("NVIDIA H100 80GB HBM3")), sorted(_read_words("RTX_6000_Ada"))
    (['80gb', 'h100'], ['6000', 'ada', 'rtx'])
    """
    words = fold_name(name).replace(".", "-").replace(",", "-").split("-")
    return frozenset("sxm" if _SOCKET.fullmatch(word) else word for word in words if word not in _IDLE_WORDS) - {""}
