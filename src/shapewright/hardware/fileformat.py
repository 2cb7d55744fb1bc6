"""The device file: TOML text in, a checked Device out, and one line of complaint where the text is wrong."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shapewright.dtypes import DTYPE_NAMES
from shapewright.errors import DeviceError, close_names
from shapewright.hardware.spec import ARCHITECTURES, RATE_TABLES, SCOPES, Device

REQUIRED_KEYS = (
    "name",
    "title",
    "vendor",
    "architecture",
    "memory_bytes",
    "memory_bandwidth_bytes_per_s",
    "dense_flops_per_s",
)
COUNT_KEYS = ("num_sms", "node_size", "link_group_size", "num_dies")
AMOUNT_KEYS = (
    "memory_bytes",
    "memory_bandwidth_bytes_per_s",
    "boost_clock_hz",
    "tensor_fma_per_sm_per_clock",
    "l2_bytes",
    "shared_memory_per_sm_bytes",
    "tdp_watts",
    "intra_node_bandwidth_bytes_per_s",
    "inter_node_bandwidth_bytes_per_s",
    "pcie_bandwidth_bytes_per_s",
    "host_bandwidth_bytes_per_s",
)
WORD_KEYS = (
    "name",
    "title",
    "vendor",
    "architecture",
    "memory_kind",
    "intra_node_link",
    "compute_capability",
    "scope",
    "peak_mismatch",
    "notes",
)
TABLE_KEYS = (*RATE_TABLES, "provenance", "sources")
KEYS = (*WORD_KEYS, *AMOUNT_KEYS, *COUNT_KEYS, "roofline_only", "aliases", *TABLE_KEYS)

# Where a number comes from. ``datasheet`` is any specification of the vendor's own, ``secondary`` somebody's published
# table that repeats the vendor's; ``recalled`` was written from memory of the source named, which was not opened again.
PROVENANCE_KINDS = ("datasheet", "whitepaper", "measured", "derived", "secondary", "recalled")
PROVENANCE_KEYS = ("source", "place", "read", "kind")
SOURCE_REQUIRED_KEYS = ("title", "publisher")
SOURCE_OPTIONAL_KEYS = ("url", "reference", "revision")

# No device has more units than a wafer, and no number here is near these; they catch slips of unit, such as a
# bandwidth in GB/s, before they become a prediction.
LARGEST_COUNT = 10_000_000
LARGEST_AMOUNT = 1e21
SMALLEST: Mapping[str, tuple[float, str]] = {
    "memory_bytes": (1e6, "80 GB is 80e9"),
    "memory_bandwidth_bytes_per_s": (1e9, "3.35 TB/s is 3.35e12"),
    "boost_clock_hz": (1e6, "1.83 GHz is 1.83e9"),
    "intra_node_bandwidth_bytes_per_s": (1e8, "450 GB/s is 450e9"),
    "inter_node_bandwidth_bytes_per_s": (1e6, "400 Gb/s is 50e9"),
    "pcie_bandwidth_bytes_per_s": (1e8, "64 GB/s is 64e9"),
    "host_bandwidth_bytes_per_s": (1e8, "450 GB/s is 450e9"),
    "dense_flops_per_s": (1e9, "989 TFLOP/s is 989e12"),
    "sparse_flops_per_s": (1e9, "1979 TFLOP/s is 1979e12"),
}
LONGEST_WORD = 4000

_NAME = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}|not re-read")


def parse_device(text: str, *, where: str, complete: bool) -> Device:
    """Read a device file.

    Args:
        text: The TOML text.
        where: What to call the file in complaints.
        complete: Whether every number must have provenance; otherwise it may, and ``Device.unsourced`` tells.

    Raises:
        DeviceError: the text is not a device file; says the first thing that is wrong.
    """
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else one_line(str(error))
        raise DeviceError(f"{where} is not valid TOML ({reason}); {_TEMPLATE_HINT}") from None
    return device_of(raw, where=where, complete=complete)


def device_of(raw: Mapping[str, Any], *, where: str, complete: bool) -> Device:
    """Check a device file's content and build the device; arguments and errors as of parse_device."""
    _refuse_unknown(raw, KEYS, where)
    for key in REQUIRED_KEYS:
        if key not in raw:
            raise DeviceError(f"{where} lacks {key}, which every device needs; {_TEMPLATE_HINT}")
    values: dict[str, Any] = {}
    for key, value in raw.items():
        values[key] = _READERS[key](value, key, where)
    if not _NAME.fullmatch(values["name"]):
        raise DeviceError(
            f"{where}: name={values['name']!r} must be lower-case words joined by '-', such as 'h100-sxm-80gb'"
        )
    _refuse_other_word(values, "architecture", ARCHITECTURES, where)
    _refuse_other_word(values, "scope", SCOPES, where)
    device = Device(**values)
    _check_provenance(device, where, complete=complete)
    return device


def one_line(text: str, longest: int = 160) -> str:
    """Fold text to one printable line of bounded length."""
    folded = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return folded if len(folded) <= longest else folded[: longest - 3] + "..."


_TEMPLATE_HINT = "compare it with the template that `shapewright devices template` prints"


def _read_word(value: object, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise DeviceError(f"{where}: {key}={_shown(value)} must be text in quotes")
    if len(value) > LONGEST_WORD or (key in REQUIRED_KEYS and not value.strip()):
        raise DeviceError(f"{where}: {key} has {len(value)} characters; from 1 to {LONGEST_WORD} are allowed")
    return value.strip()


def _read_count(value: object, key: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_COUNT:
        raise DeviceError(
            f"{where}: {key}={_shown(value)} must be a whole number from 1 to {LARGEST_COUNT}; "
            "leave the key out if it is unknown"
        )
    return value


def _read_amount(value: object, key: str, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise DeviceError(f"{where}: {key}={_shown(value)} must be a number; leave the key out if it is unknown")
    smallest, example = SMALLEST.get(key.partition(".")[0], (0.0, ""))
    if not smallest <= value <= LARGEST_AMOUNT or value == 0 or math.isnan(value):
        hint = f"units are SI base units ({example}), and " if example else ""
        raise DeviceError(
            f"{where}: {key}={_shown(value)} must be a positive number from {smallest:g} to {LARGEST_AMOUNT:g}; "
            f"{hint}an unknown number is left out"
        )
    return float(value)


def _read_rates(value: object, key: str, where: str) -> dict[str, float]:
    table = _read_table(value, key, where)
    for dtype in table:
        if dtype not in DTYPE_NAMES:
            hint = close_names(dtype, DTYPE_NAMES) or "dense rates only"
            raise DeviceError(f"{where}: {key}.{one_line(dtype)} is not one of {', '.join(DTYPE_NAMES)}; {hint}")
    return {dtype: _read_amount(rate, f"{key}.{dtype}", where) for dtype, rate in table.items()}


def _read_flag(value: object, key: str, where: str) -> bool:
    if not isinstance(value, bool):
        raise DeviceError(f"{where}: {key}={_shown(value)} must be true or false")
    return value


def _read_names(value: object, key: str, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and 0 < len(item) <= 200 for item in value):
        raise DeviceError(f"{where}: {key}={_shown(value)} must be a list of names in quotes")
    return tuple(value)


def _read_table(value: object, key: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DeviceError(f"{where}: {key}={_shown(value)} must be a table that starts with [{key}]")
    return value


def _read_sources(value: object, key: str, where: str) -> dict[str, Mapping[str, str]]:
    sources = _read_table(value, key, where)
    for source, entry in sources.items():
        _check_entry(entry, f"{key}.{source}", SOURCE_REQUIRED_KEYS, SOURCE_OPTIONAL_KEYS, where)
        if "url" not in entry and "reference" not in entry:
            raise DeviceError(f"{where}: {key}.{one_line(source)} needs a url or a reference by which it can be found")
    return sources


def _read_provenance(value: object, key: str, where: str) -> dict[str, Mapping[str, str]]:
    """Read the provenance table, with the entries of the rates flattened to ``dense_flops_per_s.fp16``."""
    table = _read_table(value, key, where)
    flat: dict[str, Mapping[str, str]] = {}
    for number, entry in table.items():
        if number in RATE_TABLES:
            rates = _read_table(entry, f"{key}.{number}", where)
            flat.update({f"{number}.{dtype}": rate_entry for dtype, rate_entry in rates.items()})
        else:
            flat[number] = entry
    for number, entry in flat.items():
        _check_entry(entry, f"{key}.{number}", PROVENANCE_KEYS, (), where)
        if entry["kind"] not in PROVENANCE_KINDS:
            raise DeviceError(
                f"{where}: {key}.{one_line(number)} has kind={_shown(entry['kind'])}; choose one of "
                f"{', '.join(PROVENANCE_KINDS)}"
            )
        if not _DATE.fullmatch(entry["read"]):
            raise DeviceError(
                f"{where}: {key}.{one_line(number)} has read={_shown(entry['read'])}; give the date as 2026-11-21, or "
                f"'not re-read'"
            )
    return flat


_READERS: Mapping[str, Callable[[object, str, str], Any]] = {
    **dict.fromkeys(WORD_KEYS, _read_word),
    **dict.fromkeys(AMOUNT_KEYS, _read_amount),
    **dict.fromkeys(COUNT_KEYS, _read_count),
    "roofline_only": _read_flag,
    "aliases": _read_names,
    **dict.fromkeys(RATE_TABLES, _read_rates),
    "provenance": _read_provenance,
    "sources": _read_sources,
}


def _check_entry(entry: object, key: str, required: Iterable[str], optional: Iterable[str], where: str) -> None:
    """Refuse a provenance or source entry that is not a table of texts with the right keys."""
    key = one_line(key)
    table = _read_table(entry, key, where)
    _refuse_unknown(table, (*required, *optional), where, f" in {key}")
    for word in required:
        if word not in table:
            raise DeviceError(f"{where}: {key} lacks {word}; it needs {', '.join(required)}")
    for word, value in table.items():
        _read_word(value, f"{key}.{word}", where)


def _check_provenance(device: Device, where: str, *, complete: bool) -> None:
    """Match numbers, provenance and sources one to one."""
    numbers = device.numbers
    for number, entry in device.provenance.items():
        if number not in numbers:
            raise DeviceError(
                f"{where}: provenance.{one_line(number)} is of a number that the file does not give; remove it"
            )
        if entry["source"] not in device.sources:
            raise DeviceError(
                f"{where}: provenance.{number} names the source {_shown(entry['source'])}, which [sources] lacks"
            )
    for source in device.sources:
        if all(entry["source"] != source for entry in device.provenance.values()):
            raise DeviceError(f"{where}: sources.{one_line(source)} is not used by any provenance entry; remove it")
    if complete and (
        missing := [number for number in device.unsourced if number != "node_size" or device.node_size != 1]
    ):
        raise DeviceError(f"{where}: {missing[0]} has no entry in [provenance]; say where the number comes from")


def _refuse_unknown(table: Mapping[str, Any], known: Iterable[str], where: str, inside: str = "") -> None:
    known = tuple(known)
    for key in table:
        if key not in known:
            hint = close_names(key, known) or f"known keys: {', '.join(known)}"
            raise DeviceError(f"{where}: unknown key {_shown(key)}{inside}; {hint}")


def _refuse_other_word(values: Mapping[str, Any], key: str, choices: Iterable[str], where: str) -> None:
    choices = tuple(choices)
    if key in values and values[key] not in choices:
        hint = close_names(values[key], choices)
        allowed = f"choose one of {', '.join(choices)}"
        raise DeviceError(f"{where}: {key}={_shown(values[key])} is not known; {hint + ' ' if hint else ''}{allowed}")


def _shown(value: object) -> str:
    try:
        return one_line(repr(value), 60)
    except (ValueError, RecursionError):  # an integer of too many digits, or tables nested too deeply
        return "a value too large to print"
