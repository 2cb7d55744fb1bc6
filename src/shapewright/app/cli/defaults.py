"""Defaults of the command line: the device, layout and ignored rules of SHAPEWRIGHT_DEVICE and pyproject.toml.

``[tool.shapewright]`` is read from the pyproject.toml of the working directory, or of a folder above it up to the root
of its repository. It is data: names, numbers and a path of a device file.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import click

from shapewright.core.errors import ShapewrightError, UnknownDeviceError, first_line, short_path
from shapewright.core.files import parse_toml, read_start
from shapewright.core.notes import Note
from shapewright.core.records import dataclass
from shapewright.core.texts import FieldName

if TYPE_CHECKING:
    from pathlib import Path

DEVICE_VARIABLE = "SHAPEWRIGHT_DEVICE"
_NOTES, _DEFAULTS = "shapewright.notes", "shapewright.defaults"
_KEYS = ("device", "layout", "ignore")
_MAX_FILE_BYTES = 2**18  # those of large projects have 50 kB
_GPU_QUERY = ("--query-gpu=name,memory.total", "--format=csv,noheader,nounits")
_GPU_QUERY_LIMIT_S = 5.0
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The table [tool.shapewright] of a pyproject.toml.

    Attributes:
        device: Device name, or path of a device file.
        layout: Fields of ParallelLayout.
        ignore: Rules that check ignores.
        where: The file, for notes and messages; empty where there is none.
    """

    device: str | None = None
    layout: Mapping[str, Any] = field(default_factory=dict)
    ignore: Sequence[str] = ()
    where: str = ""


def read_settings(folder: Path | None = None) -> Settings:
    """Read the settings of a folder: those of its repository, or of the folder itself outside of one.

    Raises:
        ShapewrightError: a setting is unknown or malformed.
    """
    from pathlib import Path

    try:
        return _read_settings(Path.cwd() if folder is None else folder)
    except FileNotFoundError:  # the working directory was deleted
        return Settings()


@lru_cache(maxsize=1)
def _read_settings(start: Path) -> Settings:
    above = [start, *start.parents]
    depth = next((index for index, each in enumerate(above) if (each / ".git").exists()), 0)
    for each in above[: depth + 1]:
        path = each / "pyproject.toml"
        table = _read_table(path)
        if table is not None:
            return _check(table, path)
    return Settings()


def _read_table(path: Path) -> Mapping[str, Any] | None:
    """Return the table of a file; None where there is none, or the file is malformed, which a note says."""
    try:
        text = read_start(path, _MAX_FILE_BYTES + 1).decode()
    except (OSError, ValueError):
        return None
    if len(text) > _MAX_FILE_BYTES or ("tool.shapewright" not in text and "[tool]" not in text):
        return None  # without parsing it
    try:
        table = parse_toml(text).get("tool", {}).get("shapewright")
    except (ValueError, AttributeError) as error:  # no TOML, or no tables
        add_note(f"{short_path(str(path))} is malformed ({first_line(error)}): its settings are not used", "settings")
        return None
    return table if isinstance(table, dict) else None


def _check(table: Mapping[str, Any], path: Path) -> Settings:
    where = f"[tool.shapewright] of {short_path(str(path))}"
    for name in table:
        if name not in _KEYS:
            raise ShapewrightError(f"{where} has no setting {name!r}; it has {', '.join(_KEYS)}")
    device, layout, ignore = table.get("device"), table.get("layout", {}), table.get("ignore", [])
    if device is not None and not isinstance(device, str):
        raise ShapewrightError(f"{where}: device={device!r} must be a device name or the path of a device file")
    if isinstance(ignore, str):
        ignore = [part.strip() for part in ignore.split(",")]
    if not isinstance(ignore, list) or not all(isinstance(each, str) for each in ignore):
        raise ShapewrightError(f'{where}: ignore={ignore!r} must be a list of rules such as ["TC103", "WQ"]')
    if device is not None and device.endswith(".toml"):
        device = str(path.parent / device)  # an absolute path stays as it is
    return Settings(device=device, layout=_check_layout(layout, where), ignore=ignore, where=short_path(str(path)))


def _check_layout(layout: Any, where: str) -> Mapping[str, Any]:
    from shapewright.app.report.flags import field_named
    from shapewright.core.fields import documented_fields
    from shapewright.workload.layout import ParallelLayout

    if not isinstance(layout, dict):
        raise ShapewrightError(f"{where}: layout={layout!r} must be a table such as {{tp = 8, dp = 2}}")
    known = [spec.name for spec, _ in documented_fields(ParallelLayout)]
    fields: dict[str, Any] = {field_named(str(name)): value for name, value in layout.items()}
    for name in fields:
        if name not in known:
            raise ShapewrightError(f"{where}: layout has no field {name!r}; it has {', '.join(known)}")
    return fields


def device_callback(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return the device of a command: the one given, else the default, which a note names.

    Raises:
        MissingParameter: none is given and there is no default.
    """
    if value is not None or context.resilient_parsing:
        return value
    found, origin = default_device()
    if found is None:
        raise click.MissingParameter(ctx=context, param=parameter)
    words = f"device {found}: {origin}"
    add_note(words, "device")
    _keep_default((found,), words)
    return found


def default_device() -> tuple[str | None, str]:
    """Find the device to use where none is given, and where it comes from.

    Raises:
        ShapewrightError: a setting is malformed, or names no device.
    """
    named = os.environ.get(DEVICE_VARIABLE, "").strip()
    origin = DEVICE_VARIABLE
    if not named:
        settings = read_settings()
        named, origin = settings.device or "", f"[tool.shapewright] of {settings.where}"
    if not named:
        return _present_device(), "the GPU of this machine"
    from shapewright.hardware.loader import load_device

    try:
        load_device(named)
    except ShapewrightError as error:
        raise ShapewrightError(f"{origin}: " + error.text) from None
    return named, origin


def _present_device() -> str | None:
    """Name of the first GPU of this machine; None where there is none, or its data sheet is not known."""
    import shutil
    import subprocess

    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        printed = subprocess.run(
            [program, *_GPU_QUERY], capture_output=True, text=True, timeout=_GPU_QUERY_LIMIT_S, check=False
        ).stdout
        name, memory_mib = printed.splitlines()[0].rsplit(",", 1)
        memory_bytes = float(memory_mib) * _MIB
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
    from shapewright.hardware.loader import detect_device

    try:
        return detect_device(name.strip(), None, memory_bytes).name
    except UnknownDeviceError:
        return None


def add_note(text: str, code: str = "note", name: str = "") -> None:
    """Keep a note for the output of the running command."""
    context = click.get_current_context(silent=True)
    if context is not None:
        notes = context.meta.setdefault(_NOTES, [])
        if text not in notes:
            notes.append(Note(text, code, name))


def default_layout(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the fields of the layout that pyproject.toml sets and the command line does not, with a note."""
    settings = read_settings()
    chosen = {name: value for name, value in settings.layout.items() if name not in given}
    if chosen:
        words = (
            f"{', '.join(f'{name}={value}' for name, value in chosen.items())}: [tool.shapewright] of {settings.where}"
        )
        add_note(words, "layout")
        _keep_default(chosen, words)
    return chosen


def default_ignored() -> Sequence[str]:
    """Return the rules that pyproject.toml ignores.

    Raises:
        ShapewrightError: there is no such rule; the message names the file.
    """
    from shapewright.lint.rule import select_rules

    settings = read_settings()
    try:
        select_rules(settings.ignore)
    except ShapewrightError as error:
        raise ShapewrightError(f"[tool.shapewright] of {settings.where}: " + error.text) from None
    return settings.ignore


def _keep_default(names: Iterable[str], words: str) -> None:
    """Keep what a default sets, for errors that name it."""
    context = click.get_current_context(silent=True)
    if context is not None:
        context.meta.setdefault(_DEFAULTS, []).append((tuple(names), words))


def explain_defaults(error: ShapewrightError) -> None:
    """Add to an error where the defaults come from that it names: nobody typed them."""
    context = click.get_current_context(silent=True)
    said = {error.subject, error.field, *(part.field for part in error.text.parts if isinstance(part, FieldName))}
    for names, words in context.meta.get(_DEFAULTS, ()) if context is not None else ():
        if not said.isdisjoint(names):
            error.text += f" ({words})"


def take_notes() -> tuple[Note, ...]:
    """Return the notes kept for the running command, and forget them."""
    context = click.get_current_context(silent=True)
    notes = context.meta.pop(_NOTES, []) if context is not None else []
    return tuple(notes)
