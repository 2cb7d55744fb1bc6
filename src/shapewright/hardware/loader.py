"""Load a device by name, alias or path of a device file; there is no default device.

Only the requested file is parsed. A canonical name is a file name. Any other name is looked up in the ``aliases``
lists, which are extracted from the text of all files, because parsing every file would take longer than a prediction.
"""

from __future__ import annotations

import os
import re
import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from shapewright.core.errors import DeviceError, UnknownDeviceError, close_names
from shapewright.hardware.device import Device
from shapewright.hardware.device_file import one_line, parse_device

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_ALIASES = re.compile(r"^aliases = \[.*?^\]$|^aliases = \[.*\]$", re.MULTILINE | re.DOTALL)
_SEPARATORS = re.compile(r"[\s_-]+")


def normalize_name(name: str) -> str:
    """Normalise a name: lower case, with hyphens for underscores and spaces.

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
    """Map every normalised alias to its canonical name.

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
        with Path(path).open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
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
