"""The devices that come with the package: their names, their aliases, and where their files are.

Only the file that is asked for is parsed. A canonical name is a file name; any other name is looked for in the
``aliases`` lists, which are cut out of the files' text, since parsing every file would cost more than a prediction.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from shapewright.errors import DeviceError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_ALIASES = re.compile(r"^aliases = \[.*?^\]$|^aliases = \[.*\]$", re.MULTILINE | re.DOTALL)
_SEPARATORS = re.compile(r"[\s_-]+")


def fold_name(name: str) -> str:
    """Fold case, and treat underscores, spaces and hyphens alike.

    >>> fold_name("NVIDIA A100-SXM4-80GB"), fold_name("a100_sxm")
    ('nvidia-a100-sxm4-80gb', 'a100-sxm')
    """
    return _SEPARATORS.sub("-", name.strip().casefold())


@cache
def list_devices() -> tuple[str, ...]:
    """Canonical names of all devices of the package, in order."""
    return tuple(sorted(_files()))


@cache
def find_aliases() -> dict[str, str]:
    """Map every alias, folded, to its canonical name.

    Raises:
        DeviceError: two devices claim one name.
    """
    found: dict[str, str] = {}
    canonical = set(list_devices())
    for name in list_devices():
        match = _ALIASES.search(read_device_text(name))
        aliases = tomllib.loads(match.group())["aliases"] if match else []
        for alias in map(fold_name, aliases):
            if found.setdefault(alias, name) != name or (alias in canonical and alias != name):
                raise DeviceError(
                    f"the alias {alias!r} of {name} is also a name of {found[alias]}; remove one of the two"
                )
    return found


def read_device_text(name: str) -> str:
    """Read the file of a canonical name."""
    return _files()[name].read_text(encoding="utf-8")


@cache
def _files() -> dict[str, Traversable]:
    folder = resources.files("shapewright.hardware") / "data"
    return {entry.name.removesuffix(".toml"): entry for entry in folder.iterdir() if entry.name.endswith(".toml")}
