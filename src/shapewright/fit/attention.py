"""Fit of one attention kernel: its structure (tiles, splits) chosen, its constants by least squares on logarithms.

A family of kernels is fitted over all its head widths, then each width by itself, pulled to the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.fit.attention_form import DECODE, DECODE_CHOICES, PREFILL, PREFILL_CHOICES, TENSOR_FRACTION, Free
from shapewright.fit.logs import (
    HELD_OUT_FOLD,
    NUM_FOLDS,
    Array,
    coverage_of,
    error_summary,
    fit_logs,
    folds_of,
    interval_of,
    tidy,
)
from shapewright.perf.attention_decode import DecodeParameters, estimate_decode
from shapewright.perf.attention_kernels import AttentionRates, AttentionShape, read_parameters
from shapewright.perf.attention_prefill import PrefillParameters, estimate_prefill

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from shapewright.hardware import Device

# Library whose rows these are, element format of the products, and of the cache.
Source = tuple[str, str, str]
ELEMENT_BYTES = {"bf16": 2.0, "fp8": 1.0, "bfloat16": 2.0}
ROWS_PER_FIT = 2000
ROWS_PER_TRIAL = 500
# How strongly constants are pulled to the stated start, and those of one head width to the family's: residual of a
# factor of e off it, beside residuals that are logarithms of times.
PULL_TO_START = 0.3
PULL_TO_FAMILY = 1.0
# What belongs to the device or to the copy into the cache, and so to all head widths: fitted with the family alone. A
# width of few layouts could not tell these apart.
OF_THE_FAMILY = (
    "exponentials_per_sm_per_clock",
    "power_drop_fraction",
    "bandwidth_fraction",
    "cache_write_passes",
    "cache_write_token_cycles",
    "l2_reach_fraction",
    "l2_bytes_per_sm_clock",
    "sequence_s",
    "planned_sequence_s",
    "planned_pair_s",
)
# What belongs to the copy into the cache, a kernel of the library whatever the head width: widths with a family of
# their own and few layouts take it from the others.
OF_THE_COPY = ("cache_write_passes", "cache_write_token_cycles", "bandwidth_fraction")
# Head layouts from which on one width can tell them by itself.
ENOUGH_LAYOUTS = 20
# Constants of one width must beat the family's by this factor on layouts that they have not seen.
WORTHWHILE_RATIO = 0.97
# Rows of one head layout err alike, so there are fewer independent residuals than rows; aiming at 92 % among some 80
# layouts covers about 90 % of rows of further ones.
AIMED_COVERAGE = 0.92

# Head widths that the kernels are compiled for. Source: flash-attn (2: multiples of 32; 3: hopper/ folder).
FLASH_2_HEADS = (32, 64, 96, 128, 160, 192, 224, 256)
FLASH_3_HEADS = (64, 96, 128, 192, 256)
# The backward pass has no public table: FlashAttention-2's figures show its rate at about 0.85 of forward's
# (arXiv 2307.08691 section 4.1: A100, head width 128, about 190 against 225 TFLOP/s).
BACKWARD_RATE_FRACTION = 0.85
# The copy into the cache is a kernel of its own in these tables; the smallest kernel of gemm.parquet takes 2.45 us.
CACHE_WRITE_START_S = 2e-6
# Exponentials of one SM and clock where one head width alone cannot tell them from the products: 4 special function
# units of 4 lanes. Source: CUDA C programming guide, arithmetic throughput, compute capability 8.0.
EXPONENTIALS_PER_SM_PER_CLOCK = 16.0


def shape_of(rows: pd.DataFrame, source: Source) -> AttentionShape:
    """Sizes of rows as the pricing module takes them."""
    _, dtype, kv_dtype = source

    def column(name: str) -> Array:
        values: Array = rows[name].to_numpy(float)
        return values

    return AttentionShape(
        batch_size=column("batch_size"),
        query_len=column("query_len"),
        kv_len=column("kv_len"),
        num_heads=column("num_heads"),
        num_kv_heads=column("num_kv_heads"),
        head_dim=column("head_dim"),
        v_head_dim=column("head_dim"),
        window_size=column("window_size"),
        causal=True,
        element_bytes=ELEMENT_BYTES[dtype],
        kv_element_bytes=ELEMENT_BYTES[kv_dtype],
    )


def layout_folds(rows: pd.DataFrame) -> NDArray[np.int64]:
    """Fold of each row's head layout."""
    return folds_of(rows.num_heads, rows.num_kv_heads, rows.head_dim)


def rates_of(device: Device, source: Source) -> AttentionRates:
    """Data-sheet rates for a source's arithmetic."""
    return AttentionRates(
        flops_per_s=device.peak_flops_per_s(source[1]),
        bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        num_sms=float(device.num_sms or 0),
        clock_hz=float(device.boost_clock_hz or 0.0),
        l2_bytes=float(device.l2_bytes or 0.0),
    )


def sample(rows: pd.DataFrame, most: int) -> pd.DataFrame:
    """At most so many rows, the same in every run."""
    return rows.sample(min(most, len(rows)), random_state=1)


@dataclass
class Fit:
    """A structure with its constants."""

    choice: dict[str, Any]
    free: dict[str, float]
    cost: float = np.inf


class Kernel:
    """One kernel to fit: its formula, its free constants and its structural choices."""

    def __init__(self, phase: str, device: Device, source: Source, widths: list[int], family: str) -> None:
        self.phase, self.source, self.rates, self.widths = phase, source, rates_of(device, source), widths
        self.family = family
        self.fixed: dict[str, Any] = {"cache_write_start_s": CACHE_WRITE_START_S}
        self.pull = PULL_TO_START
        if phase == "prefill":
            heads = FLASH_2_HEADS if device.architecture in ("ampere", "ada") else FLASH_3_HEADS
            self.fixed |= {"kernel_head_dims": heads, "backward_rate_fraction": BACKWARD_RATE_FRACTION}
            free: dict[str, Free] = PREFILL | {f"fraction_{width}": TENSOR_FRACTION for width in widths}
            is_flash_2 = self.family == "flash" and heads is FLASH_2_HEADS
            self.choices = [choice for choice in PREFILL_CHOICES if not (is_flash_2 and choice["splits_keys"])]
            if len(widths) == 1:
                self.fixed["exponentials_per_sm_per_clock"] = EXPONENTIALS_PER_SM_PER_CLOCK
        else:
            free, self.choices = DECODE, DECODE_CHOICES
        self.start = {name: one.start for name, one in free.items()}
        self.bounds = {name: (one.low, one.high) for name, one in free.items() if name not in self.fixed}

    def settle(self, known: Mapping[str, float]) -> None:
        """Take constants as given instead of fitting them."""
        self.fixed |= known
        self.bounds = {name: bound for name, bound in self.bounds.items() if name not in known}

    def narrow(self, device: Device, width: int, fit: Fit, num_layouts: int) -> Kernel:
        """The same kernel for one head width, starting from the family's constants and pulled to them."""
        own = Kernel(self.phase, device, self.source, [width], self.family)
        known = fit.free | {f"fraction_{width}": fit.free.get(f"fraction_{width}", TENSOR_FRACTION.start)}
        own.start = {name: known[name] for name in own.bounds if name in known}
        kept = OF_THE_FAMILY[:1] if num_layouts >= ENOUGH_LAYOUTS else OF_THE_FAMILY
        shared = {name: fit.free[name] for name in kept if name in fit.free}
        own.settle(shared | {name: self.fixed[name] for name in OF_THE_COPY if name in self.fixed})
        own.pull = PULL_TO_FAMILY
        return own

    def parameters(self, fit: Fit) -> dict[str, Any]:
        """Constants as the record holds them."""
        merged: dict[str, Any] = {**self.fixed, **fit.choice, **fit.free}
        if self.phase == "prefill":
            fractions = {str(width): merged[f"fraction_{width}"] for width in self.widths}
            merged = {name: value for name, value in merged.items() if not name.startswith("fraction_")}
            merged["tensor_fraction"] = fractions
        return merged

    def predict(self, shape: AttentionShape, parameters: dict[str, Any]) -> Array:
        """Times, the copy into the cache included, as the tables have it. [s]"""
        if self.phase == "prefill":
            known = read_parameters(PrefillParameters, parameters, "of this fit")
            return estimate_prefill(shape, self.rates, known, writes_cache=True).total_s
        constants = read_parameters(DecodeParameters, parameters, "of this fit")
        return estimate_decode(shape, self.rates, constants, writes_cache=True, hot_cache=True).total_s

    def fit(self, rows: pd.DataFrame, choice: dict[str, Any], evaluations: int, start: dict[str, float]) -> Fit:
        """Free constants for one structure."""
        shape, measured = shape_of(rows, self.source), rows.latency_s.to_numpy()
        free, cost = fit_logs(
            lambda values: self.predict(shape, self.parameters(Fit(choice, values))),
            measured,
            start,
            self.bounds,
            most_evaluations=evaluations,
            pull=self.pull,
        )
        return Fit(choice, free, cost)

    def choose(self, rows: pd.DataFrame) -> Fit:
        """The structure that fits best, with its constants: all are tried briefly, the best two at length."""
        few, many = sample(rows, ROWS_PER_TRIAL), sample(rows, ROWS_PER_FIT)
        trials = sorted((self.fit(few, choice, 6, self.start) for choice in self.choices), key=lambda fit: fit.cost)
        return min((self.fit(many, trial.choice, 60, trial.free) for trial in trials[:2]), key=lambda fit: fit.cost)


def predict_unseen(kernel: Kernel, rows: pd.DataFrame, fit: Fit) -> Array:
    """Times of each row from constants that did not see its layout. [s]"""
    folds, predicted = layout_folds(rows), np.empty(len(rows))
    for fold in range(NUM_FOLDS):
        inside = folds == fold
        if inside.any():
            other = rows[~inside]
            enough = not other.empty and set(other.head_dim) == set(rows.head_dim)
            again = kernel.fit(sample(other, ROWS_PER_FIT), fit.choice, 15, fit.free) if enough else fit
            predicted[inside] = kernel.predict(shape_of(rows[inside], kernel.source), kernel.parameters(again))
    return predicted


def error_of(predicted: Array, rows: pd.DataFrame) -> float:
    """Mean |predicted / measured - 1|."""
    return float(np.mean(np.abs(predicted / rows.latency_s.to_numpy() - 1.0)))


def calibrate_family(
    device: Device, source: Source, phase: str, rows: pd.DataFrame, known: Mapping[str, float] | None = None
) -> dict[int, Any]:
    """Fit the kernels of one family, one for each head width, by width.

    Args:
        device: The device.
        source: What the rows are of.
        phase: ``prefill`` or ``decode``.
        rows: Measured rows of the family.
        known: Constants that other rows have settled.
    """
    held_out = layout_folds(rows) == HELD_OUT_FOLD
    seen = rows[~held_out]
    if seen.empty:
        return {}
    family = Kernel(phase, device, source, sorted(int(width) for width in seen.head_dim.unique()), family_word(rows))
    family.settle(known or {})
    common = family.choose(seen)
    results: dict[int, Any] = {}
    for width in family.widths:
        part = seen[seen.head_dim == width]
        kernel, fit = family, common
        predicted = family.predict(shape_of(part, source), family.parameters(common))
        if len(family.widths) == 1:
            predicted = predict_unseen(family, part, common)
        else:
            num_layouts = len(part[["num_heads", "num_kv_heads"]].drop_duplicates())
            narrow = family.narrow(device, width, common, num_layouts)
            own = narrow.choose(part)
            unseen = predict_unseen(narrow, part, own)
            if error_of(unseen, part) < WORTHWHILE_RATIO * error_of(predicted, part):
                kernel, fit, predicted = narrow, own, unseen
        parameters = kernel.parameters(fit)
        if phase == "prefill":
            parameters["tensor_fraction"] = {str(width): parameters["tensor_fraction"][str(width)]}
        parameters = tidy(parameters)
        interval = interval_of(predicted, part.latency_s.to_numpy(), AIMED_COVERAGE)
        held = rows[held_out & (rows.head_dim == width)]
        report: dict[str, Any] = {
            "libraries": sorted(part.library.unique()),
            "kernels": sorted(part.kernel.unique()),
            "own_width": kernel is not family,
        }
        for name, judged in (("fit", part), ("held_out", held)):
            times, measured = kernel.predict(shape_of(judged, source), parameters), judged.latency_s.to_numpy()
            covered = {"interval_coverage": coverage_of(interval, times, measured)} if len(judged) else {}
            report[name] = error_summary(times, measured) | covered if len(judged) else None
        errors = [report[name]["mean_absolute_error"] if report[name] else None for name in ("fit", "held_out")]
        print(f"{device.name:16s} {source} {phase:8s} {family_word(part)}_{width} {errors}", flush=True)
        results[width] = {"parameters": parameters, "interval": interval, "report": report}
    return results


def family_word(rows: pd.DataFrame) -> str:
    """Family of the kernel that most rows ran."""
    return str(rows.family.mode().iloc[0])
