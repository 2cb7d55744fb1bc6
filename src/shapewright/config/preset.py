"""Presets: published models that ship with the package, one TOML file each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shapewright.config.validate import shown
from shapewright.errors import ConfigError, UnknownModelError, close_names

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,99}", re.ASCII)
_FOLDER = Path(__file__).parent / "presets"

# TOML has no null; in preset files a 0 under these keys stands for it.
_NULL_IF_ZERO = ("q_lora_rank", "sliding_window")


@dataclass(frozen=True)
class Preset:
    """One published model.

    Attributes:
        name: What to call it on the command line.
        title: Name to print.
        family: Presets of one family belong together in a list.
        source: Where its config was published.
        config: Its config.json object.
        notes: What to know of it.
        num_parameters: The published parameter count, where there is one.
    """

    name: str
    title: str
    family: str
    source: str
    config: dict[str, Any]
    notes: str = ""
    num_parameters: int | None = None


def list_presets() -> tuple[str, ...]:
    """List the names of all presets, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.toml")))


def load_preset(name: str) -> Preset:
    """Load one preset; only its file is read.

    Raises:
        UnknownModelError: there is no preset of this name.
        ConfigError: its file is damaged.
    """
    import tomllib

    path = _FOLDER / f"{name.casefold()}.toml"
    if not is_preset(name):
        raise UnknownModelError(f"no preset {shown(name)}; {_hint(name)}")
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
        return Preset(
            name=content["name"],
            title=content["title"],
            family=content.get("family", ""),
            source=content["source"],
            config={
                key: None if key in _NULL_IF_ZERO and value == 0 else value for key, value in content["config"].items()
            },
            notes=content.get("notes", ""),
            num_parameters=content.get("parameters"),
        )
    except (OSError, KeyError, tomllib.TOMLDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"preset file {path.name} is damaged ({reason}); install the package again") from None


def is_preset(name: str) -> bool:
    """Whether there is a preset of this name; upper case does not matter."""
    # Checked as a plain word first: a name from outside must not lead out of the folder.
    return _PLAIN_NAME.fullmatch(name) is not None and (_FOLDER / f"{name.casefold()}.toml").is_file()


def _hint(name: str) -> str:
    known = list_presets()
    return close_names(name, known) or f"there are {len(known)}, such as {', '.join(repr(each) for each in known[:3])}"
