"""Read a JSON object from an untrusted file: bounded in length and depth, strict about what JSON is."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, NoReturn

from shapewright.config.validate import shown, shown_path
from shapewright.errors import ConfigError

LARGEST_FILE_BYTES = 8 * 2**20  # config.json files are a few kB; the largest public ones, with label maps, under 1 MB
DEEPEST_NESTING = 64
LONGEST_NUMBER = 400  # digits; Python refuses to parse more than 4300


def read_json_file(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ConfigError: the file cannot be read, is too large, or is no well-formed JSON object.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{shown_path(path)} is no regular file; give a config.json or a folder that holds one")
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot read {shown_path(path)}: {reason}; give a config.json that can be read") from None
    return parse_json_object(content, str(path))


def parse_json_object(content: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        content: Bytes of the file.
        where: Name of the file, for messages.

    Raises:
        ConfigError: not one well-formed JSON object.
    """
    where = shown_path(where)
    if len(content) > LARGEST_FILE_BYTES:
        raise ConfigError(f"{where} is larger than {LARGEST_FILE_BYTES // 2**20} MiB; a config.json has a few kB")
    if not content.strip():
        raise ConfigError(f"{where} is empty; give a config.json with a JSON object")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text (byte {error.start}); give a config.json, not weights") from None
    _refuse_deep_nesting(text, where)
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_int=_parse_int, object_pairs_hook=_unique_pairs)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where} is not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}; "
            f"check that the file is whole"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where} holds {_kind(value)}; a config.json holds one JSON object {{...}}")
    return value


def _refuse_deep_nesting(text: str, where: str) -> None:
    """Count brackets outside of strings, so that the parser never recurses far."""
    depth = 0
    in_string = is_escaped = False
    for character in text:
        if in_string:
            if is_escaped:
                is_escaped = False
            elif character == "\\":
                is_escaped = True
            elif character == '"':
                in_string = False
        elif character == '"':
            in_string = True
        elif character in "{[":
            depth += 1
            if depth > DEEPEST_NESTING:
                raise ConfigError(
                    f"{where} nests deeper than {DEEPEST_NESTING} levels; a config.json has three or four"
                )
        elif character in "}]":
            depth -= 1


def _refuse_constant(name: str) -> NoReturn:
    raise ConfigError(f"{name} is not a JSON number; give a finite number")


def _parse_int(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise ConfigError(f"a number has {len(digits)} digits; at most {LONGEST_NUMBER} are read")
    return int(digits)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ConfigError(f"key {shown(key)} appears twice in one object; keep one of them")
            seen.add(key)
    return unique


def _kind(value: object) -> str:
    if value is None:
        return "null"
    kinds = {list: "an array", str: "a text", bool: "a truth value", int: "a number", float: "a number"}
    return kinds.get(type(value), "something else")
