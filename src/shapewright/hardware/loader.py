"""Load a device by name, alias or path of a device file; there is no default device.

Only the requested file is parsed. A canonical name is a file name. Any other name is looked up in the ``aliases``
lists, which are extracted from the text of all files, because parsing every file would take longer than a prediction.

A name in a measurement file is looked up as it is, then without remarks in parentheses, then by its words in any order,
ignoring words that do not distinguish boards (vendor, memory technology). An ambiguous name is resolved to the board
that published measurements usually mean by it; ``is_exact_name`` tells whether that happened.
"""

from __future__ import annotations

import os
import re
import tomllib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from shapewright.core.errors import DeviceError, UnknownDeviceError, close_names
from shapewright.core.files import read_start
from shapewright.hardware.device import Device
from shapewright.hardware.device_file import one_line, parse_device

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_ALIASES = re.compile(r"^aliases = \[.*?^\]$|^aliases = \[.*\]$", re.MULTILINE | re.DOTALL)
_SEPARATORS = re.compile(r"[\s_-]+")


def normalize_name(name: str) -> str:
    """Normalize a name: lower case, with hyphens for underscores and spaces.

    >>> normalize_name("NVIDIA A100-SXM4-80GB"), normalize_name("a100_sxm")
    ('nvidia-a100-sxm4-80gb', 'a100-sxm')
    """
    return _SEPARATORS.sub("-", name.strip().casefold())


@cache
def list_devices() -> tuple[str, ...]:
    """List the canonical names of the package's devices, sorted."""
    return tuple(sorted(_files()))


@cache
def find_aliases() -> dict[str, str]:
    """Map every normalized alias to its canonical name.

    Raises:
        DeviceError: two devices share a name.
    """
    found: dict[str, str] = {}
    canonical = set(list_devices())
    for name in list_devices():
        match = _ALIASES.search(read_device_text(name))
        aliases = tomllib.loads(match.group())["aliases"] if match else []
        for alias in map(normalize_name, aliases):
            if found.setdefault(alias, name) != name or (alias in canonical and alias != name):
                raise DeviceError(
                    f"the alias {alias!r} of {name} is also a name of {found[alias]}; remove one of the two"
                )
    return found


def read_device_text(name: str) -> str:
    """Read the text of the device file with this canonical name."""
    return _files()[name].read_text(encoding="utf-8")


@cache
def _files() -> dict[str, Traversable]:
    folder = resources.files("shapewright.hardware") / "data"
    return {entry.name.removesuffix(".toml"): entry for entry in folder.iterdir() if entry.name.endswith(".toml")}


# Device files of this package have 4 to 8 kB.
MAX_FILE_BYTES = 256 * 1024

_TEMPLATE_HINT = (
    "`shapewright devices` lists all names, `shapewright devices template > my.toml` starts a file for another device"
)


def load_device(name_or_path: str) -> Device:
    """Load a device of the package, or a device file.

    Args:
        name_or_path: A canonical name or an alias (case, ``_``, ``-`` and spaces do not matter), or the path of a
            device file: anything that ends in ``.toml`` or has a path separator.

    Raises:
        UnknownDeviceError: no device has this name, or the name is ambiguous.
        DeviceError: the file cannot be read or is malformed.
    """
    name_or_path = str(name_or_path)
    folded = normalize_name(name_or_path)
    if folded.endswith(".toml"):
        return read_device_file(name_or_path)
    has_separator = any(separator and separator in name_or_path for separator in (os.sep, os.altsep))
    if has_separator and folded not in find_aliases():  # drivers print names such as MI250X/MI250
        return read_device_file(name_or_path)
    return _load_named(folded)


def load_named_device(name: str) -> Device:
    """Load a device of the package by name or alias; unlike load_device, never a file.

    Raises:
        UnknownDeviceError: no device has this name, or the name is ambiguous.
    """
    return _load_named(normalize_name(name))


def read_device_file(path: str | os.PathLike[str]) -> Device:
    """Read a user's device file, in which provenance is optional.

    Raises:
        DeviceError: the file cannot be read or is malformed.
    """
    where = f"device file {one_line(str(path))!r}"
    try:
        content = read_start(path, MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(str(error))
        raise DeviceError(
            f"{where} cannot be read ({reason}); give a readable file or a name; {_TEMPLATE_HINT}"
        ) from None
    if len(content) > MAX_FILE_BYTES:
        raise DeviceError(f"{where} is larger than {MAX_FILE_BYTES} bytes; give a device file, which has a few kB")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DeviceError(f"{where} is not UTF-8 text (byte {error.start}); a device file is TOML") from None
    return parse_device(text, where=where, complete=False)


@cache
def _load_named(folded: str) -> Device:
    if folded in list_devices():
        return parse_device(read_device_text(folded), where=f"device file {folded}.toml", complete=True)
    aliases = find_aliases()
    if folded in aliases:
        return _load_named(aliases[folded])
    usual = MEASURED_DEVICES.get(folded, "")
    if usual.startswith(f"{folded}-"):
        return _load_named(usual)
    raise UnknownDeviceError(_unknown_device_message(folded, aliases))


def _unknown_device_message(folded: str, aliases: dict[str, str]) -> str:
    """Return the error message: the devices whose name begins so, or those with a similar name."""
    shown = one_line(folded, 60)
    if folded == "cpu":
        return (
            "a CPU has no data sheet to predict from; measure it ('shapewright bench smoke --cpu --store s.db'), fit "
            "the measurements ('shapewright calibrate --store s.db -o cpu.json'), and give cpu.json as the calibration"
        )
    matches = [name for name in list_devices() if folded and re.match(re.escape(folded) + r"(?![0-9])", name)]
    if len(matches) > 1:
        return f"{shown!r} could be any of {', '.join(matches)}; choose one of them"
    hint = close_names(folded, [*list_devices(), *aliases]) if folded and len(folded) <= 200 else ""
    return f"unknown device {shown!r}; {hint + ' ' if hint else ''}{_TEMPLATE_HINT}"


# Ambiguous names in measurement files, and the device that was measured. The A100 of arXiv 2401.14489 has 40 GB (its
# logs name the machine), its V100 is the SXM2 board with 16 GB, and a process sees one die of an MI250X. The others are
# the boards that cloud providers offer.
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
# Words that do not distinguish boards: vendors, product families, memory technologies, parts of system names, cooling.
_IGNORED_WORDS = frozenset(
    (
        *("nvidia", "amd", "intel", "google", "aws", "tesla", "geforce", "quadro", "instinct"),
        *("accelerator", "gpu", "tensor", "core", "graphics", "generation", "edition", "per", "ac", "dlc", "oam"),
        *("hbm2", "hbm2e", "hbm3", "hbm3e", "gddr6", "gddr6x"),
        *("hgx", "dgx", "nvl72", "server", "workstation", "blackwell"),
    )
)
_SOCKET = re.compile(r"sxm\d")


def find_measured_device(name: str) -> Device:
    """Load the device that a measurement file names.

    Raises:
        UnknownDeviceError: no device matches, or the name is ambiguous.
    """
    return load_device(_find_name(name))


def note_on_board(name: str) -> str:
    """Describe the board that an ambiguous name is resolved to; empty for other names and for files.

    >>> note_on_board("h100"), note_on_board("h100-sxm-80gb")
    ('h100 is taken for h100-sxm-80gb; there are also h100-nvl-94gb, h100-pcie-80gb, h100-sxm-96gb', '')
    """
    folded = normalize_name(name)
    usual = MEASURED_DEVICES.get(folded, "")
    if not usual.startswith(f"{folded}-") or is_exact_name(folded):
        return ""
    others = [each for each in list_devices() if re.match(re.escape(folded) + r"(?![0-9])", each) and each != usual]
    return f"{folded} is taken for {usual}" + (f"; there are also {', '.join(others)}" if others else "")


def is_exact_name(name: str) -> bool:
    """Return whether a name is a canonical name or an alias of a device file."""
    folded = normalize_name(name)
    return folded in list_devices() or folded in find_aliases()


@cache
def _find_name(name: str) -> str:
    plain = name.partition("(")[0].strip()
    for spelled in (name, plain):
        folded = MEASURED_DEVICES.get(normalize_name(spelled), spelled)
        if folded and is_exact_name(folded):
            return load_named_device(folded).name
    words = _distinguishing_words(plain)
    usual = {_distinguishing_words(short): device for short, device in MEASURED_DEVICES.items()}
    if words in usual:
        return usual[words]
    named = find_aliases() | {own: own for own in list_devices()}
    found = sorted({device for alias, device in named.items() if words and _distinguishing_words(alias) == words})
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownDeviceError(f"{name!r} could be any of {', '.join(found)}; use one of these names")
    return load_named_device(plain or "?").name


def _distinguishing_words(name: str) -> frozenset[str]:
    """Return the words of a name that distinguish boards.

    >>> sorted(_distinguishing_words("NVIDIA H100 80GB HBM3")), sorted(_distinguishing_words("RTX_6000_Ada"))
    (['80gb', 'h100'], ['6000', 'ada', 'rtx'])
    """
    words = normalize_name(name).replace(".", "-").replace(",", "-").split("-")
    return frozenset("sxm" if _SOCKET.fullmatch(word) else word for word in words if word not in _IGNORED_WORDS) - {""}


# Device files hold the memory that a process sees if it is known, and decimal gigabytes otherwise. Drivers report from
# 6 % below that (24 GB of GDDR6 with ECC) to 7.4 % above (2**30 / 10**9). Variants of one board differ by 17 % or more.
MEMORY_TOLERANCE_FRACTION = 0.08


def detect_device(gpu_name: str, num_sms: int | None, memory_bytes: float) -> Device:
    """Find the device that matches the name, number of SMs and memory that a driver reports.

    Args:
        gpu_name: Name printed by ``nvidia-smi``, ``rocm-smi`` or torch.
        num_sms: Streaming multiprocessors or compute units; None where the driver does not say.
        memory_bytes: Memory. [byte]

    Raises:
        UnknownDeviceError: no device matches all three, or more than one does.
    """
    known = find_aliases()
    folded = normalize_name(gpu_name)
    named = [known.get(folded, folded)] if folded in known or folded in list_devices() else []
    # A driver name shared by several SKUs (``NVIDIA GH200``) is a part of their names.
    if not named and folded:
        named = sorted({name for alias, name in known.items() if folded in alias})
    found = [
        device
        for device in map(load_device, named)
        if num_sms in (None, device.num_sms)
        and abs(memory_bytes / device.memory_bytes - 1.0) <= MEMORY_TOLERANCE_FRACTION
    ]
    if len(found) == 1:
        return found[0]
    seen = f"{gpu_name!r} with {'' if num_sms is None else f'{num_sms} SMs and '}"
    seen += f"{memory_bytes / 1e9:.1f} GB"
    if found:
        raise UnknownDeviceError(
            f"{seen} could be any of {', '.join(device.name for device in found)}; choose one as the device"
        )
    if named:
        nearest = "; ".join(
            f"{device.name} has {device.num_sms} SMs and {device.memory_bytes / 1e9:g} GB"
            for device in map(load_device, named[:3])
        )
        raise UnknownDeviceError(
            f"no device file matches {seen} ({nearest}); choose one as the device, or write a device file"
        )
    hint = close_names(folded, [*list_devices(), *known])
    template = "`shapewright devices template > my.toml` writes a template"
    raise UnknownDeviceError(f"no device file matches {seen}; {hint + ' ' if hint else ''}{template}")
