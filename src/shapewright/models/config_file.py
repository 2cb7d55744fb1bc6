"""Read a config.json from an untrusted file, or download it from a Hugging Face hub.

Files are limited in size, nesting and digits, and must be strict JSON but for infinite numbers, which transformers
writes. Nothing but config.json is downloaded.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from shapewright.core.errors import ConfigError, MissingExtraError, UnknownModelError, short_path, short_repr
from shapewright.core.files import read_start

MAX_FILE_BYTES = 8 * 2**20  # config.json files have a few kB; the largest public ones, with label maps, below 1 MB
MAX_NESTING = 64
HUB_LIMIT_S = 5.0
"""Time in which a hub must answer; a config of the local cache is used otherwise. [s]"""
MAX_DIGITS = 400  # Python refuses to parse more than 4300


def read_json_file(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ConfigError: the file cannot be read, is too large, or is not a JSON object.
    """
    return parse_json_object(read_file(path), str(path), is_config=True)


def read_file(path: Path) -> bytes:
    """Read a file up to one byte above the largest size.

    Raises:
        ConfigError: the file cannot be read, or is not a regular one.
    """
    try:
        return read_start(path, MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot read {short_path(path)}: {reason}; give a readable config.json") from None


def parse_json_object(content: bytes, where: str, *, is_config: bool = False) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        where: Name of the file, for messages.
        is_config: Whether it is a config of transformers, which may hold infinite numbers; fields that are read refuse
            them.

    Raises:
        ConfigError: the content is not one well-formed JSON object.
    """
    where = short_path(where)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"{where} is larger than {MAX_FILE_BYTES // 2**20} MiB; a config.json has a few kB")
    if not content.strip():
        raise ConfigError(f"{where} is empty; give a config.json with a JSON object")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text (byte {error.start}); give a config.json, not weights") from None
    _check_nesting(text, where)
    try:
        value = json.loads(
            text,
            parse_constant=float if is_config else _reject_constant,
            parse_int=_parse_int,
            object_pairs_hook=_config_object if is_config else _unique_pairs,
        )
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where} is not valid JSON at line {error.lineno}, column {error.colno}: {error.msg}; "
            f"check that the file is complete"
        ) from None
    except ConfigError as error:
        raise ConfigError(f"{where}: " + error.text) from None
    if not isinstance(value, dict):
        raise ConfigError(f"{where} holds {_kind(value)}; a config.json holds one JSON object {{...}}")
    return value


def _check_nesting(text: str, where: str) -> None:
    """Count brackets outside of strings, so that the parser cannot exceed the recursion limit."""
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
            if depth > MAX_NESTING:
                raise ConfigError(f"{where} nests deeper than {MAX_NESTING} levels; a config.json has three or four")
        elif character in "}]":
            depth -= 1


def _reject_constant(name: str) -> NoReturn:
    raise ConfigError(f"{name} is not a JSON number; give a finite number")


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ConfigError(f"a number has {len(digits)} digits; at most {MAX_DIGITS} are read")
    return int(digits)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ConfigError(f"key {short_repr(key)} appears twice in one object; keep one of them")
            seen.add(key)
    return unique


# transformers writes Infinity as {"__float__": "Infinity"}, earlier releases as it is.
_FLOAT_KEY = "__float__"
_FLOAT_NAMES = ("Infinity", "-Infinity", "NaN")


def _config_object(pairs: list[tuple[str, Any]]) -> dict[str, Any] | float:
    """Object of a config, or the number that it stands for."""
    if len(pairs) == 1 and pairs[0][0] == _FLOAT_KEY and pairs[0][1] in _FLOAT_NAMES:
        return float(pairs[0][1])
    return _unique_pairs(pairs)


def _kind(value: object) -> str:
    if value is None:
        return "null"
    kinds = {list: "an array", str: "a text", bool: "a truth value", int: "a number", float: "a number"}
    return kinds.get(type(value), "something else")


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}(@[\w./-]{1,100})?", re.ASCII)


def is_hub_id(source: str) -> bool:
    """Return whether a text has the form ``organization/name`` or ``organization/name@revision``.

    >>> is_hub_id("meta-llama/Llama-3.1-8B"), is_hub_id("gpt2"), is_hub_id("./a/b")
    (True, False, False)
    """
    return _HUB_ID.fullmatch(source) is not None


def fetch_config(hub_id: str) -> Path:
    """Download config.json of a hub repository, or find it in the local cache.

    No weights and no code are downloaded. The environment variable ``HF_ENDPOINT`` selects another hub.

    Args:
        hub_id: ``organization/name`` or ``organization/name@revision``.

    Raises:
        MissingExtraError: huggingface_hub is not installed.
        UnknownModelError: no such repository, or it has no config.json.
        ConfigError: the hub cannot be reached or refuses access.
    """
    repo_id, _, revision = hub_id.partition("@")
    endpoint = os.environ.get("HF_ENDPOINT") or None
    try:
        import huggingface_hub
        from huggingface_hub import errors

        # The library would log a line per attempt in addition to the error raised here.
        huggingface_hub.logging.set_verbosity_error()
    except ImportError:
        raise MissingExtraError(
            f"reading {short_repr(hub_id)} from the hub needs huggingface_hub, which is not installed; "
            f"run pip install 'shapewright[hub]', or download its config.json and give its path"
        ) from None
    except ValueError as error:  # the library reads HF_ENDPOINT when it is first used
        raise _unreachable(repo_id, endpoint, error) from None

    def download() -> str:
        # The library reads HF_ENDPOINT at import only; passing it makes a later change effective.
        return str(
            huggingface_hub.hf_hub_download(repo_id, "config.json", revision=revision or None, endpoint=endpoint)
        )

    try:
        path = _within_limit(download)
    except errors.GatedRepoError:
        raise ConfigError(
            f"{short_repr(repo_id)} is gated; accept its terms on the hub and log in with 'hf auth login', "
            f"or download its config.json and give its path"
        ) from None
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        if isinstance(error, errors.LocalEntryNotFoundError):
            raise _unreachable(repo_id, endpoint, error) from None
        raise UnknownModelError(
            f"the hub has no config.json at {short_repr(hub_id)} ({type(error).__name__}); check the spelling"
        ) from None
    except Exception as error:  # errors of the HTTP transport, which depends on the version of the library
        cached = huggingface_hub.try_to_load_from_cache(repo_id, "config.json", revision=revision or None)
        if not isinstance(cached, str):
            raise _unreachable(repo_id, endpoint, error) from None
        path = cached
    return Path(path)


def _within_limit(download: Callable[[], str]) -> str:
    """Return the result of a download; the library itself retries an unreachable hub for half a minute.

    Raises:
        TimeoutError: there was no answer in time. The thread that waits for it does not keep the process alive.
    """
    outcome: list[str | Exception] = []

    def work() -> None:
        try:
            outcome.append(download())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(HUB_LIMIT_S)
    if not outcome:
        raise TimeoutError(f"no answer within {HUB_LIMIT_S:g} s")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def _unreachable(repo_id: str, endpoint: str | None, error: Exception) -> ConfigError:
    where = short_repr(endpoint) if endpoint else "the Hugging Face hub"
    reason = " ".join(str(error).split())[:120].rstrip(" .:,") or type(error).__name__
    return ConfigError(
        f"cannot fetch the config of {short_repr(repo_id)} from {where}: {reason}; check the network and HF_ENDPOINT, "
        f"or give the path of a config.json"
    )
