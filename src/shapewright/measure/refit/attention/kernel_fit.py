"""Fit one attention kernel: choose its structure (tiles, splits), and fit its constants to the logarithm of times.

The kernels of a family are fitted over all head widths, then for each width with a prior at the family's constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.records import dataclass
from shapewright.measure.fit.attention_record import attention_rates
from shapewright.measure.fit.shared import (
    HELD_OUT_FOLD,
    Array,
    coverage_of,
    error_summary,
    fit_log_times,
    fold_of_rows,
    interval_of,
    mean_error,
    predict_in_turn,
    round_numbers,
)
from shapewright.pricing.attention.decode import DecodeParameters, estimate_decode
from shapewright.pricing.attention.kernels import AttentionShape, read_parameters
from shapewright.pricing.attention.prefill import PrefillParameters, estimate_prefill

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from shapewright.hardware.device import Device


# A field of the record, or such a field at one head width.
ConstantName = str | tuple[str, int]


class FreeConstant(NamedTuple):
    """A free constant: starting value and range."""

    start: float
    low: float
    high: float


# Constants of PrefillParameters and DecodeParameters, in their units.
PREFILL: dict[ConstantName, FreeConstant] = {
    "start_s": FreeConstant(1e-5, 3e-6, 3e-5),
    "exponentials_per_sm_per_clock": FreeConstant(16.0, 4.0, 64.0),
    "tile_overhead_cycles": FreeConstant(2000.0, 100.0, 3e4),
    "wave_tail_fraction": FreeConstant(0.5, 1e-3, 1.0),
    "power_drop_fraction": FreeConstant(0.02, 1e-5, 0.4),
    "bandwidth_fraction": FreeConstant(0.8, 0.3, 0.98),
    "query_passes": FreeConstant(1.0, 0.5, 3.0),
    "cache_write_passes": FreeConstant(1.0, 0.01, 20.0),
    "cache_write_token_cycles": FreeConstant(50.0, 0.1, 5000.0),
    "overlap_power": FreeConstant(2.0, 1.0, 12.0),
    "l2_reach_fraction": FreeConstant(1.0, 0.1, 5.0),
    "l2_bytes_per_sm_clock": FreeConstant(30.0, 5.0, 64.0),
    "window_extra_key_tiles": FreeConstant(0.5, 0.01, 3.0),
    "window_start_s": FreeConstant(3e-7, 1e-9, 2e-5),
    "masked_key_work": FreeConstant(0.01, 1e-4, 1.0),
}
DECODE: dict[ConstantName, FreeConstant] = {
    "start_s": FreeConstant(9e-6, 2.5e-6, 2e-5),
    "most_splits": FreeConstant(64.0, 4.0, 256.0),
    "sm_bytes_per_clock": FreeConstant(20.0, 4.0, 512.0),
    "key_tile_cycles": FreeConstant(300.0, 10.0, 1e4),
    "dram_tile_cycles": FreeConstant(100.0, 1.0, 1e4),
    "row_work": FreeConstant(1.0, 0.05, 30.0),
    "block_cycles": FreeConstant(2000.0, 10.0, 3e4),
    "block_head_cycles": FreeConstant(2000.0, 10.0, 3e4),
    "wave_tail_fraction": FreeConstant(0.5, 1e-3, 1.0),
    "sequence_s": FreeConstant(3e-9, 1e-11, 1e-7),
    "cache_write_passes": FreeConstant(0.5, 0.01, 10.0),
    "reorder_s": FreeConstant(1e-7, 1e-9, 2e-5),
    "query_passes": FreeConstant(1.0, 0.1, 4.0),
    "partial_passes": FreeConstant(0.5, 0.01, 3.0),
    "bandwidth_fraction": FreeConstant(0.85, 0.5, 0.98),
    "overlap_power": FreeConstant(3.0, 1.0, 12.0),
    "combine_s": FreeConstant(2e-6, 1e-8, 2e-5),
    "resident_blocks": FreeConstant(1.2, 1.0, 8.0),
    "planned_sequence_s": FreeConstant(3e-8, 1e-11, 1e-5),
    "planned_pair_s": FreeConstant(1e-10, 1e-14, 1e-7),
    "l2_reach_fraction": FreeConstant(0.8, 0.1, 3.0),
    "l2_bytes_per_sm_clock": FreeConstant(30.0, 5.0, 64.0),
}
# Share of the tensor cores' rate at one head width.
TENSOR_FRACTION = FreeConstant(0.7, 0.02, 1.0)
# The structure is chosen on the fitted rows: FlashAttention 2 and 3 and trtllm differ in it. Sizes are integers, so
# that 128 keys fill exactly one tile of 128. FlashAttention 2 splits keys in decode only (its source, mha_varlen_fwd).
PREFILL_CHOICES: list[dict[str, Any]] = [
    {"query_tile": rows, "key_tile": keys, "packs_query_heads": packs, "splits_keys": splits}
    for (rows, keys), packs, splits in product(
        ((64, 64), (128, 64), (128, 128), (256, 128)), (False, True), (False, True)
    )
]
DECODE_CHOICES: list[dict[str, Any]] = [
    {
        "query_tile": 64,
        "key_tile_elements": elements,
        "packs_always": always,
        "key_tiles_per_split": tiles,
        "fill_waves": waves,
    }
    for elements, always, tiles, waves in product((8192, 16384), (False, True), (1.0, 2.0, 4.0), (1.0, 2.0))
]


# Library, element format of the GEMMs, and element format of the cache.
Source = tuple[str, str, str]
ELEMENT_BYTES = {"bf16": 2.0, "fp8": 1.0, "bfloat16": 2.0}
ROWS_PER_FIT = 2000
ROWS_PER_TRIAL = 500
# Prior weights: residual of a constant that is a factor of e from its start, or from the family's value, next to
# residuals that are logarithms of times.
PULL_TO_START = 0.3
PULL_TO_FAMILY = 1.0
# Constants of the device or of the copy into the cache, common to all head widths and fitted with the family: a width
# with few layouts does not determine them.
FAMILY_CONSTANTS = (
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
# Constants of the copy into the cache, a kernel of the library for every head width: widths with a family of their own
# and few layouts take them from the others.
CACHE_COPY_CONSTANTS = ("cache_write_passes", "cache_write_token_cycles", "bandwidth_fraction")
# Number of head layouts from which on one width determines them.
ENOUGH_LAYOUTS = 20
# Constants of one width are used if their error on left-out layouts is below the family's times this.
WORTHWHILE_RATIO = 0.97
# Residuals of one head layout correlate, so there are fewer independent ones than rows; aiming at 92 % among some 80
# layouts covers about 90 % of rows of further ones.
AIMED_COVERAGE = 0.92

# Head widths that each version is compiled for. Source: flash-attn (2: multiples of 32; 3: hopper/ folder).
FLASH_HEADS = {2: (32, 64, 96, 128, 160, 192, 224, 256), 3: (64, 96, 128, 192, 256)}
# The backward pass of flash-attn has no table (attention_training.csv has cuDNN's on H200 and GB200): its figures show
# about 0.85 of the forward pass's rate (arXiv 2307.08691 section 4.1: A100, head width 128, 190 against 225 TFLOP/s).
BACKWARD_RATE_FRACTION = 0.85
# The copy into the cache is a separate kernel in these tables; the smallest kernel of gemm.parquet takes 2.45 us.
CACHE_WRITE_START_S = 2e-6
# Exponentials per SM and clock if one head width alone cannot separate them from the GEMMs: 4 special function units of
# 4 lanes. Source: CUDA C programming guide, arithmetic throughput, compute capability 8.0.
EXPONENTIALS_PER_SM_PER_CLOCK = 16.0


def shape_from_rows(rows: pd.DataFrame, source: Source) -> AttentionShape:
    """Return the sizes of rows as the pricing module takes them."""
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
    """Return the fold of each row's head layout."""
    return fold_of_rows(rows.num_heads, rows.num_kv_heads, rows.head_dim)


def sample_rows(rows: pd.DataFrame, most: int) -> pd.DataFrame:
    """Return at most ``most`` rows, the same in every run."""
    return rows.sample(min(most, len(rows)), random_state=1)


@dataclass
class Fit:
    """A structure with its constants."""

    choice: dict[str, Any]
    free: dict[ConstantName, float]
    cost: float = np.inf


class Kernel:
    """One kernel to fit: its formula, free constants and candidate structures."""

    def __init__(self, phase: str, device: Device, source: Source, widths: list[int], family: str) -> None:
        self.phase, self.source, self.rates, self.widths = phase, source, attention_rates(device, source[1]), widths
        self.family = family
        self.fixed: dict[str, Any] = {"cache_write_start_s": CACHE_WRITE_START_S}
        self.pull = PULL_TO_START
        if phase == "prefill":
            heads = FLASH_HEADS[device.architecture_facts.flash_attention_version]
            self.fixed |= {"kernel_head_dims": heads, "backward_rate_fraction": BACKWARD_RATE_FRACTION}
            free: dict[ConstantName, FreeConstant] = PREFILL | {
                ("tensor_fraction", width): TENSOR_FRACTION for width in widths
            }
            is_flash_2 = self.family == "flash" and heads is FLASH_HEADS[2]
            self.choices = [choice for choice in PREFILL_CHOICES if not (is_flash_2 and choice["splits_keys"])]
            if len(widths) == 1:
                self.fixed["exponentials_per_sm_per_clock"] = EXPONENTIALS_PER_SM_PER_CLOCK
        else:
            free, self.choices = DECODE, DECODE_CHOICES
        self.start = {name: one.start for name, one in free.items()}
        self.bounds = {name: (one.low, one.high) for name, one in free.items() if name not in self.fixed}

    def fix_constants(self, known: Mapping[str, float]) -> None:
        """Fix constants instead of fitting them."""
        self.fixed |= known
        self.bounds = {name: bound for name, bound in self.bounds.items() if name not in known}

    def for_head_dim(self, device: Device, width: int, fit: Fit, num_layouts: int) -> Kernel:
        """Return the same kernel for one head width, with start and prior at the family's constants."""
        own = Kernel(self.phase, device, self.source, [width], self.family)
        known = fit.free | {("tensor_fraction", width): fit.free.get(("tensor_fraction", width), TENSOR_FRACTION.start)}
        own.start = {name: known[name] for name in own.bounds if name in known}
        kept = FAMILY_CONSTANTS[:1] if num_layouts >= ENOUGH_LAYOUTS else FAMILY_CONSTANTS
        shared = {name: fit.free[name] for name in kept if name in fit.free}
        own.fix_constants(shared | {name: self.fixed[name] for name in CACHE_COPY_CONSTANTS if name in self.fixed})
        own.pull = PULL_TO_FAMILY
        return own

    def parameters(self, fit: Fit) -> dict[str, Any]:
        """Return the constants in the form of the record."""
        merged: dict[Any, Any] = {**self.fixed, **fit.choice, **fit.free}
        if self.phase == "prefill":
            fractions = {str(width): fit.free["tensor_fraction", width] for width in self.widths}
            merged = {name: value for name, value in merged.items() if isinstance(name, str)}
            merged["tensor_fraction"] = fractions
        return merged

    def predict(self, shape: AttentionShape, parameters: dict[str, Any]) -> Array:
        """Predict times, the copy into the cache included, as the tables measure them. [s]"""
        if self.phase == "prefill":
            known = read_parameters(PrefillParameters, parameters, "of this fit")
            return estimate_prefill(shape, self.rates, known, writes_cache=True).total_s
        constants = read_parameters(DecodeParameters, parameters, "of this fit")
        return estimate_decode(shape, self.rates, constants, writes_cache=True, hot_cache=True).total_s

    def fit(
        self, rows: pd.DataFrame, choice: dict[str, Any], evaluations: int, start: dict[ConstantName, float]
    ) -> Fit:
        """Fit the free constants of one structure."""
        shape, measured = shape_from_rows(rows, self.source), rows.latency_s.to_numpy()
        free, cost = fit_log_times(
            lambda values: self.predict(shape, self.parameters(Fit(choice, values))),
            measured,
            start,
            self.bounds,
            most_evaluations=evaluations,
            pull=self.pull,
        )
        return Fit(choice, free, cost)

    def choose(self, rows: pd.DataFrame) -> Fit:
        """Return the best structure with its constants: all are tried briefly, the best two at length."""
        few, many = sample_rows(rows, ROWS_PER_TRIAL), sample_rows(rows, ROWS_PER_FIT)
        trials = sorted((self.fit(few, choice, 6, self.start) for choice in self.choices), key=lambda fit: fit.cost)
        return min((self.fit(many, trial.choice, 60, trial.free) for trial in trials[:2]), key=lambda fit: fit.cost)


def predict_held_out(kernel: Kernel, rows: pd.DataFrame, fit: Fit) -> Array:
    """Predict each row with constants that did not see its layout. [s]"""

    def predict_fold(others: Any, left: Any) -> Array:
        enough = others.any() and set(rows.head_dim[others]) == set(rows.head_dim)
        seen = sample_rows(rows[others], ROWS_PER_FIT)
        again = kernel.fit(seen, fit.choice, 15, fit.free) if enough else fit
        return kernel.predict(shape_from_rows(rows[left], kernel.source), kernel.parameters(again))

    return predict_in_turn(layout_folds(rows), predict_fold)


def calibrate_family(
    device: Device, source: Source, phase: str, rows: pd.DataFrame, known: Mapping[str, float] | None = None
) -> dict[int, Any]:
    """Fit the kernels of one family, one per head width, and return them by width.

    Args:
        source: Library and element formats of the rows.
        phase: ``prefill`` or ``decode``.
        known: Constants fixed by other rows.
    """
    held_out = layout_folds(rows) == HELD_OUT_FOLD
    seen = rows[~held_out]
    if seen.empty:
        return {}
    family = Kernel(phase, device, source, sorted(int(width) for width in seen.head_dim.unique()), family_name(rows))
    family.fix_constants(known or {})
    common = family.choose(seen)
    results: dict[int, Any] = {}
    for width in family.widths:
        part = seen[seen.head_dim == width]
        kernel, fit = family, common
        predicted = family.predict(shape_from_rows(part, source), family.parameters(common))
        if len(family.widths) == 1:
            predicted = predict_held_out(family, part, common)
        else:
            num_layouts = len(part[["num_heads", "num_kv_heads"]].drop_duplicates())
            for_head_dim = family.for_head_dim(device, width, common, num_layouts)
            own = for_head_dim.choose(part)
            own_predicted = predict_held_out(for_head_dim, part, own)
            measured = part.latency_s.to_numpy()
            if mean_error(own_predicted, measured) < WORTHWHILE_RATIO * mean_error(predicted, measured):
                kernel, fit, predicted = for_head_dim, own, own_predicted
        parameters = kernel.parameters(fit)
        if phase == "prefill":
            parameters["tensor_fraction"] = {str(width): parameters["tensor_fraction"][str(width)]}
        parameters = round_numbers(parameters)
        interval = interval_of(predicted, part.latency_s.to_numpy(), AIMED_COVERAGE)
        held = rows[held_out & (rows.head_dim == width)]
        report: dict[str, Any] = {
            "libraries": sorted(part.library.unique()),
            "kernels": sorted(part.kernel.unique()),
            "own_width": kernel is not family,
        }
        for name, judged in (("fit", part), ("held_out", held)):
            times, measured = kernel.predict(shape_from_rows(judged, source), parameters), judged.latency_s.to_numpy()
            covered = {"interval_coverage": coverage_of(interval, times, measured)} if len(judged) else {}
            report[name] = error_summary(times, measured) | covered if len(judged) else None
        errors = [report[name]["mean_absolute_error"] if report[name] else None for name in ("fit", "held_out")]
        print(f"{device.name:16s} {source} {phase:8s} {family_name(part)}_{width} {errors}", flush=True)
        results[width] = {"parameters": parameters, "interval": interval, "report": report}
    return results


def family_name(rows: pd.DataFrame) -> str:
    """Return the family of the kernel that most rows ran."""
    return str(rows.family.mode().iloc[0])
