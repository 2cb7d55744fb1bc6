"""Schema of calibration records: checked when a user's file is read, so that no number of it fails later.

A schema is a mapping of keys (a key in brackets may be absent, ``*`` stands for all others), a list with the schema of
its entries, a range of numbers, or a type. The first violation is reported with its path, value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from math import isfinite
from typing import Any, NamedTuple

from shapewright.core.errors import CalibrationError, short_repr
from shapewright.pricing.attention.decode import DecodeParameters
from shapewright.pricing.attention.prefill import PrefillParameters
from shapewright.pricing.gemm.alignment import ALIGNMENT_CLASSES_BYTES, ROLES
from shapewright.pricing.gemm.parameters import SCALARS, BatchKernel
from shapewright.pricing.gemm.slow_cases import NarrowCase, SlowCases, Span


class Range(NamedTuple):
    """Numbers from ``low`` to ``high``."""

    low: float
    high: float


# Fractions of data-sheet rates can be far off for a device that is described wrongly, but not by more than this.
_FRACTION = Range(1e-6, 1e3)
_SHARE = Range(0.0, 1.0)
_SECONDS = Range(0.0, 1e3)
_AMOUNT = Range(0.0, 1e24)
_FACTOR = Range(1e-6, 1e6)
_WIDTH = Range(1, 2**31)
_POWER = Range(0.1, 1e3)

# Ranges of constants by name; by ending where none has the name. Everything else is an amount.
_BY_NAME = {
    "feed_ratio": _FACTOR,
    "overlap_power": _POWER,
    "power_half_flops": Range(1.0, 1e24),
    "power_drop_fraction": Range(0.0, 0.999),
    "wave_give_back": _SHARE,
    "wave_tail_fraction": Range(0.0, 10.0),
    "loss": Range(0.0, 0.999),
    "reach_loss": Range(0.0, 0.999),
    "small_fraction": Range(0.0, 10.0),
    "idle_fraction": Range(0.0, 10.0),
    "hot_cache_speedup": Range(1e-3, 1e6),
    "hot_cache_share": Range(0.0, 1e3),
    "exponentials_per_sm_per_clock": _FACTOR,
    "sm_bytes_per_clock": _FACTOR,
    "l2_bytes_per_sm_clock": _FACTOR,
    "key_tiles_per_split": _FACTOR,
    "most_splits": _FACTOR,
    "resident_blocks": _FACTOR,
    "long_k": _AMOUNT,
    "reach_steepness": _POWER,
    "edge": _FACTOR,
    "step": _FACTOR,
}
_BY_ENDING = {
    "_s": _SECONDS,
    "_fraction": _FRACTION,
    "fraction": _FRACTION,
    "_tile": _WIDTH,
    "_tile_elements": _WIDTH,
    "k_step": _WIDTH,
    "tile_m": _WIDTH,
    "tile_n": _WIDTH,
}


def _range_of(name: str) -> Range:
    if name in _BY_NAME:
        return _BY_NAME[name]
    return next((found for ending, found in _BY_ENDING.items() if name.endswith(ending)), _AMOUNT)


def _fields_of(kind: Any, **others: Any) -> dict[str, Any]:
    """Schema of the constants of a dataclass: those with a default may be absent."""
    found: dict[str, Any] = {}
    for spec in fields(kind):
        key = spec.name if spec.default is MISSING and spec.default_factory is MISSING else f"[{spec.name}]"
        plain = bool if spec.type == "bool" else _range_of(spec.name)
        found[key] = others.get(spec.name, plain)
    return found


_TILES = [{"m": _WIDTH, "n": _WIDTH, "rate": _FRACTION, "fill_k": _AMOUNT}]
_NUMBERS = {"*": _FACTOR}
_ALIGNMENT = {role: {str(width): _FRACTION for width in ALIGNMENT_CLASSES_BYTES} for role in ROLES}
_CLASSES = [Range(1, 128)]
_SLOW_CASES = _fields_of(
    SlowCases,
    spans=[_fields_of(Span)],
    narrow=[_fields_of(NarrowCase, role=str, alignments_bytes=_CLASSES)],
)
_BATCH_KERNEL = _fields_of(
    BatchKernel,
    role=str,
    alignments_bytes=_CLASSES,
    widths=[_WIDTH],
    rates=[_FRACTION],
    alignment_rates=_NUMBERS,
)
_GEMM_SECTION: dict[str, Any] = {
    "tiles": _TILES,
    "splits": [_WIDTH],
    **{name: _range_of(name) for name in SCALARS},
    "alignment_factor": _ALIGNMENT,
    "[alignment_from]": str,
    "[power_run_steepness]": Range(0.0, 1e3),
    "[slow_cases]": _SLOW_CASES,
    "[start_growth]": {"first_share": _SHARE, "half_count": _FACTOR, "counts_groups": bool},
    "[kernels]": [_BATCH_KERNEL],
    "[kernels_least_waves]": _AMOUNT,
}
_BATCHED = {key if key.startswith("[") else f"[{key}]": value for key, value in _GEMM_SECTION.items()}
_TILE_RULE = {"library": str, "per_expert": bool, "up_to": [_AMOUNT], "steps": [{**_BATCHED}]}
_SECTION = {**_GEMM_SECTION, "[batched]": _BATCHED}
_EXPERT_SECTION = {
    **_SECTION,
    "idle_row_share": Range(0.0, 1e3),
    "[untuned]": _TILE_RULE,
    "[lone_row_s_per_byte]": _SECONDS,
}
_QUANTILES = {"edges_s": [_SECONDS], "low": [_FACTOR], "high": [_FACTOR], "[shared]": [Range(0.0, 1e3)]}
_FORMAT_QUANTILES = {"dtypes": {"*": _QUANTILES}, "libraries": {"*": {"*": _QUANTILES}}}
_ATTENTION_KERNEL = {
    "prefill": _fields_of(PrefillParameters, kernel_head_dims=[_WIDTH], tensor_fraction={"*": _FRACTION}),
    "decode": _fields_of(DecodeParameters),
}
_ATTENTION_SECTION = {
    "kernels": {"*": _ATTENTION_KERNEL},
    "kernel_of_head_dim": {"*": str},
    "usual_kernel": str,
}
_POINTWISE_KIND = {"bandwidth_fraction": _FRACTION, "start_s": _SECONDS, "in_table": bool, "[device]": str}
_PROTOCOLS = [{"start_s": _SECONDS, "bandwidth_fraction": _FRACTION}]

PARAMETERS: Mapping[str, Any] = {
    "gemm": {"dtypes": {"*": _SECTION}, "libraries": {"*": {"*": _SECTION}}},
    "moe": {"dtypes": {"*": _EXPERT_SECTION}, "libraries": {"*": {"*": _EXPERT_SECTION}}},
    "attention": {"sections": {"*": _ATTENTION_SECTION}, "[libraries]": {"*": {"*": _ATTENTION_SECTION}}},
    "pointwise": {
        "kinds": {"other": _POINTWISE_KIND, "*": _POINTWISE_KIND},
        "l2_reach_fraction": Range(0.0, 1e3),
        "l2_speedup": _FACTOR,
    },
    "collectives": {
        "operations": {"*": {"*": _PROTOCOLS}},
        "groups_of_this_machine_only": [str],
        "between_nodes": {"bandwidth_fraction": _FRACTION, "hop_s": _SECONDS, "start_s": _SECONDS},
    },
}
"""Schema of ``parameters`` by kind of record."""

INTERVALS: Mapping[str, Any] = {
    "gemm": _FORMAT_QUANTILES,
    "moe": _FORMAT_QUANTILES,
    "attention": {"*": _QUANTILES},
    "pointwise": _QUANTILES,
    "collectives": _QUANTILES,
}
"""Schema of ``interval`` by kind of record."""

_REPORTS = {"[reports]": {"*": {"[libraries]": [str]}}, "[defaults]": {"*": str}}


def check_record(kind: str, raw: Mapping[str, Any], *, where: str) -> None:
    """Check the content of a record against its schema.

    Raises:
        CalibrationError: a key is missing, or a value is not allowed; the message names its path.
    """
    schema = {
        "id": str,
        "devices": [str],
        "architecture": str,
        "parameters": PARAMETERS[kind],
        "interval": INTERVALS[kind],
        "provenance": _REPORTS,
    }
    _check(raw, schema, where)
    _check_finite(raw, where)
    if not raw["devices"]:
        raise CalibrationError(f"{where}.devices is empty; name the measured device")
    _check_intervals(raw["interval"], f"{where}.interval")
    if kind in ("gemm", "moe"):
        _check_gemm_sections(raw, where)
    if kind == "attention":
        _check_attention_sections(raw, where)


def _check(value: object, schema: Any, path: str) -> None:
    if isinstance(schema, Range):
        if isinstance(value, bool) or not isinstance(value, int | float) or not schema.low <= value <= schema.high:
            raise _wrong(path, value, f"a number from {schema.low:g} to {schema.high:g}")
    elif isinstance(schema, type):
        if not isinstance(value, schema) or (isinstance(value, str) and not value.isprintable()):
            raise _wrong(path, value, {str: "a text", bool: "true or false"}[schema])
    elif isinstance(schema, Sequence):
        if not isinstance(value, list):
            raise _wrong(path, value, "a list")
        for index, each in enumerate(value):
            _check(each, schema[0], f"{path}[{index}]")
    else:
        _check_keys(value, schema, path)


def _check_keys(value: object, schema: Mapping[str, Any], path: str) -> None:
    if not isinstance(value, dict):
        raise _wrong(path, value, "an object")
    for key, inner in schema.items():
        is_optional = key.startswith("[")
        name = key.strip("[]")
        if key == "*":
            for other in [each for each in value if each not in schema and f"[{each}]" not in schema]:
                _check(value[other], inner, f"{path}.{_name(other)}")
        elif name in value:
            _check(value[name], inner, f"{path}.{name}")
        elif not is_optional:
            raise CalibrationError(f"{path} lacks {name!r}")


def _check_finite(value: object, path: str) -> None:
    """Check that every number is finite, also where nothing reads it."""
    if isinstance(value, dict):
        for key, each in value.items():
            _check_finite(each, f"{path}.{_name(key)}")
    elif isinstance(value, list):
        for index, each in enumerate(value):
            _check_finite(each, f"{path}[{index}]")
    elif isinstance(value, float) and not isfinite(value):
        raise _wrong(path, value, "a finite number")


def _check_intervals(value: Mapping[str, Any], path: str) -> None:
    """Check that quantiles have one entry per regime, with ascending edges and ends around the prediction."""
    if not isinstance(value, Mapping):
        raise _wrong(path, value, "an object with edges_s, low and high")
    if "edges_s" not in value:
        for key, each in value.items():
            _check_intervals(each, f"{path}.{_name(key)}")
        return
    edges, low, high = value["edges_s"], value["low"], value["high"]
    if sorted(edges) != edges:
        raise _wrong(f"{path}.edges_s", edges, "ascending")
    for name in ("low", "high", "shared"):
        if name in value and len(value[name]) != len(edges) + 1:
            raise _wrong(f"{path}.{name}", value[name], f"a list of {len(edges) + 1} numbers, one per regime")
    if any(one > other for one, other in zip(low, high, strict=True)):
        raise _wrong(f"{path}.low", low, f"at most high={short_repr(high)}")


def _check_gemm_sections(raw: Mapping[str, Any], where: str) -> None:
    """Check that each section has kernels and an interval, and that batch kernels are complete."""
    parameters, interval = raw["parameters"], raw["interval"]
    groups = [("dtypes", parameters["dtypes"], interval["dtypes"])]
    for library, sections in parameters["libraries"].items():
        groups.append((f"libraries.{_name(library)}", sections, interval["libraries"].get(library, {})))
    for group, sections, intervals in groups:
        for dtype, section in sections.items():
            path = f"{where}.parameters.{group}.{_name(dtype)}"
            if dtype not in intervals:
                raise CalibrationError(f"{where}.interval.{group} lacks {_name(dtype)!r}")
            for key in ("tiles", "splits"):
                if not section[key]:
                    raise _wrong(f"{path}.{key}", section[key], "a list with at least one entry")
            for inner in (section, section.get("batched", {})):
                _check_batch_kernels(inner, path)
            steps, limits = (section.get("untuned", {}).get(key, []) for key in ("steps", "up_to"))
            if ("untuned" in section and not steps) or len(steps) != len(limits) + ("untuned" in section):
                raise _wrong(f"{path}.untuned.up_to", limits, f"a list of {max(len(steps) - 1, 0)} numbers")


def _check_batch_kernels(section: Mapping[str, Any], path: str) -> None:
    kernels = section.get("kernels", [])
    if "kernels" in section and (not kernels or "kernels_least_waves" not in section):
        raise CalibrationError(f"{path} has kernels without an entry or without 'kernels_least_waves'")
    for index, kernel in enumerate(kernels):
        if not kernel["widths"] or len(kernel["widths"]) != len(kernel["rates"]):
            raise _wrong(f"{path}.kernels[{index}].rates", kernel["rates"], "a list with one rate per width")
    narrow: Any = (section.get("slow_cases") or {}).get("narrow", [])
    roles = [each["role"] for each in narrow] + [each.get("role", "") for each in kernels]
    for role in roles:
        if role not in ("", "free", "contracted"):
            raise _wrong(f"{path}: role", role, "'free', 'contracted' or empty")


def _check_attention_sections(raw: Mapping[str, Any], where: str) -> None:
    """Check that each section's choice of kernels names kernels that it has, and that each has intervals."""
    parameters = raw["parameters"]
    if not parameters["sections"]:
        raise CalibrationError(f"{where}.parameters.sections is empty")
    groups = [("sections", "", parameters["sections"])]
    for library, sections in parameters.get("libraries", {}).items():
        groups.append((f"libraries.{_name(library)}", f"{library}/", sections))
    for group, prefix, sections in groups:
        for name, section in sections.items():
            path = f"{where}.parameters.{group}.{_name(name)}"
            kernels = section["kernels"]
            for kernel in (section["usual_kernel"], *section["kernel_of_head_dim"].values()):
                if kernel not in kernels:
                    raise _wrong(f"{path}: kernel", kernel, f"one of {', '.join(map(_name, kernels))}")
            if not section["kernel_of_head_dim"]:
                raise CalibrationError(f"{path}.kernel_of_head_dim is empty")
            for kernel, phases in kernels.items():
                fractions = phases["prefill"]["tensor_fraction"]
                widths = [*section["kernel_of_head_dim"], kernel.rpartition("_")[2], *fractions]
                if not fractions or not all(each.isdecimal() and 0 < int(each[:10]) < 2**31 for each in widths):
                    raise CalibrationError(f"{path}: head widths of kernel {_name(kernel)} must be numbers from 1 up")
                for phase in ("prefill", "decode"):
                    if f"{prefix}{name}/{kernel}/{phase}" not in raw["interval"]:
                        raise CalibrationError(f"{where}.interval lacks '{prefix}{name}/{kernel}/{phase}'")


def _name(key: object) -> str:
    """A key of the file for a message: printable and short."""
    return short_repr(key)[1:-1]


def _wrong(path: str, value: object, allowed: str) -> CalibrationError:
    return CalibrationError(f"{path}={short_repr(value)} must be {allowed}")
