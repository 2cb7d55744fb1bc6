"""Find a device by name, by alias or by the path of a file of one's own; never by default."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

from shapewright.errors import DeviceError, UnknownDeviceError, close_names
from shapewright.hardware.catalogue import find_aliases, fold_name, list_devices, read_device_text
from shapewright.hardware.fileformat import one_line, parse_device
from shapewright.hardware.spec import Device

# A device file of this package has 4 to 8 kB; far above that it is something else.
LARGEST_FILE_BYTES = 256 * 1024

_TEMPLATE_HINT = (
    "`shapewright devices` lists all names, `shapewright devices template > my.toml` starts a file for another device"
)


def load_device(name_or_path: str) -> Device:
    """Find a device.

    Args:
        name_or_path: A canonical name or an alias (case, ``_``, ``-`` and spaces do not matter), or the path of a
            device file: anything that ends in ``.toml`` or has a path separator.

    Raises:
        UnknownDeviceError: nothing has this name, or several devices could be meant.
        DeviceError: the file cannot be read or is malformed.
    """
    name_or_path = str(name_or_path)
    folded = fold_name(name_or_path)
    if folded.endswith(".toml"):
        return read_device_file(name_or_path)
    has_separator = any(separator and separator in name_or_path for separator in (os.sep, os.altsep))
    if has_separator and folded not in find_aliases():  # drivers print names such as MI250X/MI250
        return read_device_file(name_or_path)
    return _load_named(folded)


def load_named_device(name: str) -> Device:
    """Find a device of the package by its name or an alias; unlike load_device, never a file.

    Raises:
        UnknownDeviceError: nothing has this name, or several devices could be meant.
    """
    return _load_named(fold_name(name))


def read_device_file(path: str | os.PathLike[str]) -> Device:
    """Read a device file of one's own; provenance is welcome there and not required.

    Raises:
        DeviceError: the file cannot be read or is malformed.
    """
    where = f"device file {one_line(str(path))!r}"
    try:
        with Path(path).open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(str(error))
        raise DeviceError(
            f"{where} cannot be read ({reason}); give a readable file or a name; {_TEMPLATE_HINT}"
        ) from None
    if len(content) > LARGEST_FILE_BYTES:
        raise DeviceError(f"{where} has more than {LARGEST_FILE_BYTES} bytes, the most a device file may have")
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
    raise UnknownDeviceError(_no_such_device(folded, aliases))


def _no_such_device(folded: str, aliases: dict[str, str]) -> str:
    """Say which devices a name could have meant: those it begins, or those spelled nearly so."""
    shown = one_line(folded, 60)
    if folded == "cpu":
        return (
            "a CPU has no data sheet to predict from; measure it ('shapewright bench smoke --cpu --store s.db'), fit "
            "that ('shapewright calibrate --store s.db -o cpu.json'), and add --calibration cpu.json"
        )
    begun = [name for name in list_devices() if folded and re.match(re.escape(folded) + r"(?![0-9])", name)]
    if len(begun) > 1:
        return f"{shown!r} could be any of {', '.join(begun)}; name one of them"
    hint = close_names(folded, [*list_devices(), *aliases]) if folded and len(folded) <= 200 else ""
    return f"unknown device {shown!r}; {hint + ' ' if hint else ''}{_TEMPLATE_HINT}"
