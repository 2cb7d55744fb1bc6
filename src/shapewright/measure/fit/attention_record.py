"""Fit the attention record of a user's device to a store: the nearest sibling's kernels with a few constants fitted.

Structure (tiles, splits) stays the sibling's; a device of unknown architecture may have smaller tiles, if they err less
on head layouts left out. Free are the constants that dominate: start, share of the peak, softmax, work per tile,
bandwidth, and the rate of the backward pass. Some dozen rows are therefore enough.

A record describes one kernel: the library's own choice if there are enough rows of it, otherwise the fastest of the
kernels that were requested by name. Rows of other kernels are not used.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.lowering.operations.attention import Attention
from shapewright.measure.fit.shared import (
    Array,
    choose_form,
    error_summary,
    fit_log_times,
    folds_of_groups,
    interval_of,
    mean_error,
    predict_in_turn,
)
from shapewright.pricing.attention.decode import DecodeParameters, estimate_decode
from shapewright.pricing.attention.kernels import AttentionRates, AttentionShape, read_parameters
from shapewright.pricing.attention.prefill import PrefillParameters, estimate_prefill
from shapewright.pricing.calibration.records import load_record

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.measure.store.record import Row

FEWEST_ROWS = 4
NUM_FOLDS = 5
_SECTION = "16bit"
_PULL = 0.02
# Free factors on the sibling's constants, and their ranges.
_FREE = {
    "prefill": {
        "start_s": (1e-3, 1e3),
        "tensor_fraction": (0.02, 3.0),
        "exponentials_per_sm_per_clock": (1e-3, 1e2),
        "tile_overhead_cycles": (1e-3, 1e3),
        "backward_rate_fraction": (0.05, 5.0),
    },
    "decode": {
        "start_s": (1e-3, 1e3),
        "sm_bytes_per_clock": (1e-2, 1e2),
        "key_tile_cycles": (1e-3, 1e3),
        "block_cycles": (1e-3, 1e3),
        "bandwidth_fraction": (0.05, 1.0),
    },
}
# Upper limits of constants.
_MOST = {"bandwidth_fraction": 0.999}
# Tiles of PyTorch's kernel for CPUs, which takes 32 queries at a time below 192 and skips keys after them.
_SMALL_TILES = {"query_tile": 32, "key_tile": 32}
# Widening of the sibling's interval for an unmeasured phase, as for another family's record.
_BORROWED_WIDENING = 2.5


def fit_attention_record(
    rows: Sequence[Row], device: Device
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None:
    """Return parameters, intervals and reports of a record; None if there are too few rows.

    Args:
        rows: Valid rows of one device.
    """
    sibling = load_record("attention", device)
    section = sibling.parameters["sections"][_SECTION]
    kernel_name: str = section["usual_kernel"]
    kernels: dict[str, Any] = dict(section["kernels"][kernel_name])
    intervals: dict[str, Any] = {}
    reports: dict[str, Any] = {"structure": f"that of {kernel_name} of {sibling.id}"}
    by_phase: dict[str, list[Row]] = {"prefill": [], "decode": []}
    for row in rows:
        if isinstance(call := _operation(row), Attention):
            by_phase["decode" if int(call.query_len) == 1 and not call.is_backward else "prefill"].append(row)
    any_fitted = False
    for phase, measured_rows in by_phase.items():
        kernel, used = _of_one_kernel(measured_rows)
        chosen = [_Call(call, row.is_cold) for row in used if isinstance(call := _operation(row), Attention)]
        path = f"{_SECTION}/{kernel_name}/{phase}"
        if len(chosen) < FEWEST_ROWS:
            ends = sibling.interval[path]
            intervals[path] = {
                "edges_s": ends["edges_s"],
                **{end: [float(value) ** _BORROWED_WIDENING for value in ends[end]] for end in ("low", "high")},
            }
            reports[phase] = {"rows": len(chosen), "constants": f"not fitted, those of {sibling.id}"}
            continue
        any_fitted = True
        kernels[phase], intervals[path], reports[phase] = _fit_phase(
            phase, chosen, np.array([row.median_s or 0.0 for row in used]), kernels[phase], device
        )
        reports[phase] |= {
            "kernel": kernel or "the library's choice",
            "rows_of_other_kernels": len(measured_rows) - len(used),
        }
    if not any_fitted:
        return None
    content = {
        "kernels": {kernel_name: kernels},
        "kernel_of_head_dim": {"128": kernel_name},
        "usual_kernel": kernel_name,
    }
    return {"sections": {_SECTION: content}, "libraries": {}}, intervals, reports


def _of_one_kernel(rows: Sequence[Row]) -> tuple[str, list[Row]]:
    """Return the kernel to describe, as it was requested, and its rows."""
    by_kernel: dict[str, dict[str, Row]] = {}
    for row in rows:
        call = json.dumps([row.dtype, row.sizes], sort_keys=True)
        by_kernel.setdefault(row.variant, {})[call] = row
    if len(by_kernel.get("", ())) >= FEWEST_ROWS or not by_kernel:
        return "", [row for row in rows if not row.variant]
    # Number of calls on which each kernel was the fastest; ties go to the kernel with more rows.
    wins = Counter(
        min((found[call].median_s or np.inf, name) for name, found in by_kernel.items() if call in found)[1]
        for call in {call for found in by_kernel.values() for call in found}
        if sum(call in found for found in by_kernel.values()) > 1
    )
    best = max(by_kernel, key=lambda name: (wins[name], len(by_kernel[name])))
    return best, [row for row in rows if row.variant == best]


def _operation(row: Row) -> object:
    return row.operation() if row.kind == "attention" else None


class _Call(NamedTuple):
    """A measured call, and whether its inputs were outside the last-level cache."""

    operation: Attention
    is_cold: bool


def _fit_phase(
    phase: str, calls: Sequence[_Call], measured: Array, start: Mapping[str, Any], device: Device
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return constants, interval and report of one phase, in the form that errs least on layouts left out."""
    layouts = [(int(call.num_heads), int(call.num_kv_heads), int(call.head_dim)) for call, _ in calls]
    is_split = len(set(layouts)) > 1
    forms = {"": start}
    if phase == "prefill" and is_split and not device.architecture_facts.gemm_tiles:
        starts = (start, {**start, **_SMALL_TILES})
        forms = {f"a tile of {one['query_tile']:g} queries": one for one in starts}
    found = {name: _fit_form(phase, calls, measured, form, device, layouts) for name, form in forms.items()}
    errors = {name: mean_error(held_out, measured) for name, (_, _, held_out) in found.items()}
    chosen = choose_form(errors)
    free, fitted, held_out = found[chosen]
    report = {
        "rows": len(calls),
        "split": "folds of whole head layouts (num_heads, num_kv_heads, head_dim)" if is_split else "none: one layout",
        "held_out": error_summary(held_out, measured) if is_split else None,
        "fitted": error_summary(fitted, measured),
        "factors": free,
        **({"form": chosen, "forms": errors} if len(forms) > 1 else {}),
    }
    return _scaled(forms[chosen], free), interval_of(held_out, measured), report


def _fit_form(
    phase: str,
    calls: Sequence[_Call],
    measured: Array,
    start: Mapping[str, Any],
    device: Device,
    layouts: Sequence[tuple[int, ...]],
) -> tuple[dict[str, float], Array, Array]:
    """Return the factors of one form, its times, and those of each row by a fit without its head layout."""
    predict = _predictor(phase, calls, start, device)
    free = _fit(phase, predict, measured, np.ones(len(calls), dtype=bool))
    is_split = len(set(layouts)) > 1
    held_out = predict_in_turn(
        folds_of_groups(layouts, NUM_FOLDS),
        lambda seen, held: predict(_fit(phase, predict, measured, seen) if is_split else free)[held],
    )
    return free, predict(free), held_out


def _fit(
    phase: str, predict: Callable[[Mapping[str, float]], Array], measured: Array, here: np.ndarray
) -> dict[str, float]:
    bounds = _FREE[phase]
    start = dict.fromkeys(bounds, 0.999)
    return fit_log_times(lambda free: predict(free)[here], measured[here], start, bounds, pull=_PULL)[0]


def _scaled(start: Mapping[str, Any], free: Mapping[str, float]) -> dict[str, Any]:
    """Return the sibling's constants times the fitted factors."""
    found = dict(start)
    for name, factor in free.items():
        value = start[name]
        if isinstance(value, Mapping):
            found[name] = {width: float(share) * factor for width, share in value.items()}
        else:
            found[name] = min(float(value) * factor, _MOST.get(name, float("inf")))
    return found


def _predictor(
    phase: str, calls: Sequence[_Call], start: Mapping[str, Any], device: Device
) -> Callable[[Mapping[str, float]], Array]:
    """Return a function from the factors to the times of calls; calls with the same flags are evaluated together."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for index, (call, is_cold) in enumerate(calls):
        of_shape = call.dtype, call.kv_cache_dtype, call.causal, call.values_in_keys
        groups.setdefault((*of_shape, call.is_backward, call.writes_cache, is_cold), []).append(index)
    prepared = [
        (
            _shape([calls[index].operation for index in places]),
            attention_rates(device, flags[0]),
            flags[-3:],
            np.array(places),
        )
        for flags, places in groups.items()
    ]

    def predict(free: Mapping[str, float]) -> Array:
        constants = _scaled(start, free)
        found = np.empty(len(calls))
        for shape, rates, (is_backward, writes, is_cold), places in prepared:
            if phase == "prefill":
                prefill = read_parameters(PrefillParameters, constants, "that is being fitted")
                times = estimate_prefill(shape, rates, prefill, writes_cache=writes, is_backward=is_backward)
            else:
                decode = read_parameters(DecodeParameters, constants, "that is being fitted")
                times = estimate_decode(shape, rates, decode, writes_cache=writes, hot_cache=not is_cold)
            found[places] = times.total_s
        return found

    return predict


def _shape(calls: Sequence[Attention]) -> AttentionShape:
    """Sizes of calls with the same formats, mask and values."""
    names = ("batch_size", "query_len", "kv_len", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "window_size")
    columns: dict[str, Any] = {name: np.array([float(getattr(call, name)) for call in calls]) for name in names}
    first = calls[0]
    return AttentionShape(
        causal=first.causal,
        element_bytes=get_dtype(first.dtype).num_bytes,
        kv_element_bytes=get_dtype(first.kv_cache_dtype or first.dtype).num_bytes,
        values_in_keys=first.values_in_keys,
        **columns,
    )


def attention_rates(device: Device, dtype: str) -> AttentionRates:
    """Data-sheet rates that bound an attention kernel in one element format."""
    return AttentionRates(
        flops_per_s=device.peak_flops_per_s(dtype),
        bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        num_sms=float(device.num_sms or 1),
        clock_hz=float(device.boost_clock_hz or 0.0),
        l2_bytes=float(device.l2_bytes or 0.0),
    )
