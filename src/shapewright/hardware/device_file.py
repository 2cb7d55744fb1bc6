"""Parse device files (TOML) and check them; print a template for a new one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from shapewright.core.dtypes import DTYPE_NAMES
from shapewright.core.errors import DeviceError, close_names, short_repr
from shapewright.core.files import parse_toml
from shapewright.core.ranges import check_integer, check_number
from shapewright.hardware.architectures import ARCHITECTURE_NAMES
from shapewright.hardware.device import PRICING_FIELDS, RATE_TABLES, SCOPES, Device

_FIELDS = tuple(spec for spec in fields(Device) if spec.name not in PRICING_FIELDS)
KEYS = tuple(spec.name for spec in _FIELDS)
REQUIRED_KEYS = tuple(spec.name for spec in _FIELDS if spec.default is MISSING and spec.default_factory is MISSING)

# Kinds of sources. ``datasheet`` is any specification by the vendor, ``secondary`` a third party's table that repeats
# the vendor's numbers, ``recalled`` a number written from memory of the named source without checking it.
PROVENANCE_KINDS = ("datasheet", "whitepaper", "measured", "derived", "secondary", "recalled")
PROVENANCE_KEYS = ("source", "place", "read", "kind")
SOURCE_REQUIRED_KEYS = ("title", "publisher")
SOURCE_OPTIONAL_KEYS = ("url", "reference", "revision")

# Sanity bounds, far from the numbers of any device: they catch mistaken units, such as a bandwidth in GB/s.
MAX_COUNT = 10_000_000
MAX_AMOUNT = 1e21
MIN_AMOUNTS: Mapping[str, tuple[float, str]] = {
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
MAX_TEXT_LENGTH = 4000

_NAME = re.compile(r"[a-z0-9]+(?:[.-][a-z0-9]+)*")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}|not re-read")


def parse_device(text: str, *, where: str, complete: bool) -> Device:
    """Parse the text of a device file.

    Args:
        text: The TOML text.
        where: Name of the file, for messages.
        complete: Whether every number must have provenance; if not, ``Device.unsourced`` lists those without.

    Raises:
        DeviceError: the text is not a valid device file; the message names the first error.
    """
    try:
        raw = parse_toml(text)
    except ValueError as error:
        raise DeviceError(f"{where} is not valid TOML ({one_line(str(error))}); {_TEMPLATE_HINT}") from None
    return build_device(raw, where=where, complete=complete)


def build_device(raw: Mapping[str, Any], *, where: str, complete: bool) -> Device:
    """Build a device from the parsed TOML of a device file; arguments and errors as for parse_device."""
    _check_known_keys(raw, KEYS, where)
    for key in REQUIRED_KEYS:
        if key not in raw:
            raise DeviceError(f"{where} lacks the required key {key}; {_TEMPLATE_HINT}")
    values: dict[str, Any] = {}
    for key, value in raw.items():
        values[key] = _READERS[key](value, key, where)
    if not _NAME.fullmatch(values["name"]):
        raise DeviceError(
            f"{where}: name={values['name']!r} must be lower-case words separated by '-', such as 'h100-sxm-80gb'"
        )
    _check_choice(values, "architecture", ARCHITECTURE_NAMES, where)
    _check_choice(values, "scope", SCOPES, where)
    device = Device(**values)
    _check_provenance(device, where, complete=complete)
    return device


def one_line(text: str, longest: int = 160) -> str:
    """Replace line breaks and unprintable characters, and cut text to a length."""
    folded = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return folded if len(folded) <= longest else folded[: longest - 3] + "..."


_TEMPLATE_HINT = "compare it with the template that `shapewright devices template` prints"


_UNKNOWN_HINT = "leave the key out if the value is unknown"


def _read_text(value: object, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise DeviceError(f"{where}: {key}={short_repr(value)} must be text in quotes")
    if len(value) > MAX_TEXT_LENGTH or (key in REQUIRED_KEYS and not value.strip()):
        raise DeviceError(f"{where}: {key} has {len(value)} characters; from 1 to {MAX_TEXT_LENGTH} are allowed")
    if not "".join(value.split()).isprintable():
        raise DeviceError(f"{where}: {key}={short_repr(value)} has control characters; leave them out")
    return value.strip()


def _read_count(value: object, key: str, where: str) -> int:
    return check_integer(f"{where}: {key}", value, 1, MAX_COUNT, error=DeviceError, hint=_UNKNOWN_HINT)


def _read_amount(value: object, key: str, where: str) -> float:
    low, example = MIN_AMOUNTS.get(key.partition(".")[0], (0.0, ""))
    hint = f"use SI base units ({example}), and {_UNKNOWN_HINT}" if example else _UNKNOWN_HINT
    exclude_low = low == 0.0
    name = f"{where}: {key}"
    return float(check_number(name, value, low, MAX_AMOUNT, exclude_low=exclude_low, error=DeviceError, hint=hint))


def _read_rates(value: object, key: str, where: str) -> dict[str, float]:
    table = _read_table(value, key, where)
    for dtype in table:
        if dtype not in DTYPE_NAMES:
            hint = close_names(dtype, DTYPE_NAMES) or "dense rates only"
            raise DeviceError(f"{where}: {key}.{one_line(dtype)} is not one of {', '.join(DTYPE_NAMES)}; {hint}")
    return {dtype: _read_amount(rate, f"{key}.{dtype}", where) for dtype, rate in table.items()}


def _read_flag(value: object, key: str, where: str) -> bool:
    if not isinstance(value, bool):
        raise DeviceError(f"{where}: {key}={short_repr(value)} must be true or false")
    return value


def _read_names(value: object, key: str, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(
        isinstance(item, str) and item.isprintable() and 0 < len(item) <= 200 for item in value
    ):
        raise DeviceError(f"{where}: {key}={short_repr(value)} must be a list of names in quotes")
    return tuple(value)


def _read_table(value: object, key: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DeviceError(f"{where}: {key}={short_repr(value)} must be a table that starts with [{key}]")
    return value


def _read_sources(value: object, key: str, where: str) -> dict[str, Mapping[str, str]]:
    sources = _read_table(value, key, where)
    for source, entry in sources.items():
        _check_entry(entry, f"{key}.{source}", SOURCE_REQUIRED_KEYS, SOURCE_OPTIONAL_KEYS, where)
        if "url" not in entry and "reference" not in entry:
            raise DeviceError(f"{where}: {key}.{one_line(source)} needs a url or a reference")
    return sources


def _read_provenance(value: object, key: str, where: str) -> dict[str, Mapping[str, str]]:
    """Read the provenance table; entries of rates are flattened to ``dense_flops_per_s.fp16``."""
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
                f"{where}: {key}.{one_line(number)} has kind={short_repr(entry['kind'])}; choose one of "
                f"{', '.join(PROVENANCE_KINDS)}"
            )
        if not _DATE.fullmatch(entry["read"]):
            raise DeviceError(
                f"{where}: {key}.{one_line(number)} has read={short_repr(entry['read'])}; give a date such as "
                f"2026-11-21, or 'not re-read'"
            )
    return flat


_READERS_BY_TYPE: Mapping[str, Callable[[object, str, str], Any]] = {
    "str": _read_text,
    "float": _read_amount,
    "int": _read_count,
    "bool": _read_flag,
    "tuple[str, ...]": _read_names,
    "Mapping[str, float]": _read_rates,
}
_READERS: Mapping[str, Callable[[object, str, str], Any]] = {
    "provenance": _read_provenance,
    "sources": _read_sources,
    **{
        spec.name: _READERS_BY_TYPE[found]
        for spec in _FIELDS
        if (found := str(spec.type).removesuffix(" | None")) in _READERS_BY_TYPE
    },
}


def _check_entry(entry: object, key: str, required: Iterable[str], optional: Iterable[str], where: str) -> None:
    """Check that a provenance or source entry is a table of texts with the right keys."""
    key = one_line(key)
    table = _read_table(entry, key, where)
    _check_known_keys(table, (*required, *optional), where, f" in {key}")
    for name in required:
        if name not in table:
            raise DeviceError(f"{where}: {key} lacks {name}; it needs {', '.join(required)}")
    for name, value in table.items():
        _read_text(value, f"{key}.{name}", where)


def _check_provenance(device: Device, where: str, *, complete: bool) -> None:
    """Check that numbers, provenance and sources match."""
    numbers = device.numbers
    for number, entry in device.provenance.items():
        if number not in numbers:
            raise DeviceError(
                f"{where}: provenance.{one_line(number)} belongs to a number that the file lacks; remove it"
            )
        if entry["source"] not in device.sources:
            raise DeviceError(
                f"{where}: provenance.{number} names the source {short_repr(entry['source'])}, which [sources] lacks"
            )
    for source in device.sources:
        if all(entry["source"] != source for entry in device.provenance.values()):
            raise DeviceError(f"{where}: sources.{one_line(source)} is not used by any provenance entry; remove it")
    if complete and (
        missing := [number for number in device.unsourced if number != "node_size" or device.node_size != 1]
    ):
        raise DeviceError(f"{where}: {missing[0]} has no entry in [provenance]; say where the number comes from")


def _check_known_keys(table: Mapping[str, Any], known: Iterable[str], where: str, inside: str = "") -> None:
    known = tuple(known)
    for key in table:
        if key not in known:
            hint = close_names(key, known) or f"known keys: {', '.join(known)}"
            raise DeviceError(f"{where}: unknown key {short_repr(key)}{inside}; {hint}")


def _check_choice(values: Mapping[str, Any], key: str, choices: Iterable[str], where: str) -> None:
    choices = tuple(choices)
    if key in values and values[key] not in choices:
        hint = close_names(values[key], choices)
        allowed = f"choose one of {', '.join(choices)}"
        raise DeviceError(
            f"{where}: {key}={short_repr(values[key])} is not known; {hint + ' ' if hint else ''}{allowed}"
        )


_TEMPLATE = """\
# A device file. Values are in SI base units: bytes, bytes per second, FLOP/s, Hz, W.
# Data sheets often print sparse rates, twice the dense ones; these go to a separate table. Leave out numbers that the
# data sheet lacks: a prediction that needs one is then an error instead of a guess.
name = "my-device-80gb"        # lower-case words separated by '-'
title = "My Device 80 GB"      # name in reports
vendor = "My Vendor"
architecture = "other"         # or the one it shares kernels with: ampere, hopper, cdna3, ...
scope = "card"                 # what the numbers describe: card, die or package
# num_dies = 2                         # only if the numbers cover several dies together

memory_bytes = 80e9                    # 80 GB; better the amount a process sees (total_memory in torch)
memory_bandwidth_bytes_per_s = 2.0e12  # 2.0 TB/s

# Needed to model tiles and waves; without these, predictions are bounds.
num_sms = 100                          # streaming multiprocessors, compute units or matrix cores
boost_clock_hz = 1.5e9                 # the clock at which the rates below are quoted
tensor_fma_per_sm_per_clock = 1024     # dense fp16 fused multiply-adds per SM and clock
# l2_bytes = 41943040                  # 40 MiB
# shared_memory_per_sm_bytes = 166912  # 163 KiB, the maximum of one thread block

# tdp_watts = 400
# node_size = 8
# intra_node_link = "NVLink 3"
# link_group_size = 2                  # only if the link connects fewer than node_size, such as bridged pairs
# intra_node_bandwidth_bytes_per_s = 300e9  # per device, one direction
# inter_node_bandwidth_bytes_per_s = 25e9   # per device, one direction: 200 Gb/s
# pcie_bandwidth_bytes_per_s = 32e9         # one direction
# host_bandwidth_bytes_per_s = 450e9        # only if the link to host memory is not PCIe (NVLink-C2C), one direction

[dense_flops_per_s]
fp16 = 307.2e12
bf16 = 307.2e12
# also: fp32, tf32, fp8, int8, fp4

# Rates with 2:4 sparsity, if the data sheet has them; printed by mfu, never used in a prediction:
# [sparse_flops_per_s]
# bf16 = 614.4e12

# Sources of the numbers are optional, one entry per number:
# [provenance]
# memory_bytes = { source = "datasheet", place = "page 1", read = "2026-11-21", kind = "datasheet" }
# dense_flops_per_s.fp16 = { source = "datasheet", place = "page 1", read = "2026-11-21", kind = "datasheet" }
#
# [sources.datasheet]
# title = "My Device data sheet"
# publisher = "My Vendor"
# url = "https://example.com/datasheet.pdf"
"""


def device_template() -> str:
    """Return a commented device file that loads without changes."""
    return _TEMPLATE
