"""Fit the attention records from measured prefill and decode tables.

    python scripts/calibrate_attention.py --data DIR

DIR holds attention_prefill.parquet and attention_decode.parquet. One fifth of the head layouts (num_heads,
num_kv_heads, head_dim) is held out whole: it sees no fit and no choice, and its errors stand in the record. Intervals
come from cross-validation among the other layouts. Needs the ``fit`` extra; about two minutes on one core.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from calibration_fit import (
    HELD_OUT_FOLD,
    NUM_FOLDS,
    Array,
    coverage_of,
    error_summary,
    fit_logs,
    folds_of,
    interval_of,
    tidy,
    write_record,
)

from shapewright.hardware import Device, load_device
from shapewright.perf.attention_kernels import (
    AttentionRates,
    AttentionShape,
    DecodeParameters,
    PrefillParameters,
    estimate_decode,
    estimate_prefill,
)

SOURCE = "ai-dynamo/aiconfigurator @095f58a, Apache-2.0"
# Record name -> name in the tables.
DEVICES = {
    "a100-sxm-80gb": "a100_sxm",
    "h100-sxm-80gb": "h100_sxm",
    "h200-sxm-141gb": "h200_sxm",
    "b200-sxm-180gb": "b200_sxm",
    "l40s": "l40s",
}
# Devices of the same chip with the same kernels: their record is exact for them too.
SAME_CHIP = {"a100-sxm-80gb": ["a100-sxm-40gb"]}
# Section -> (library, arithmetic, cache) of the rows that it is fitted on.
SECTIONS = {
    "16bit": ("vllm", "bf16", "bfloat16"),
    "16bit_kv8": ("vllm", "bf16", "fp8"),
    "fp8": ("sglang", "fp8", "fp8"),
}
ELEMENT_BYTES = {"bf16": 2.0, "fp8": 1.0, "bfloat16": 2.0}
ROWS_PER_FIT = 4000
PHASES = ("prefill", "decode")
WIDEST_USUAL_HEAD = 256
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

PREFILL_START = {
    "start_s": 1e-5,
    "exponentials_per_sm_per_clock": 16.0,
    "tile_overhead_cycles": 2000.0,
    "wave_tail_fraction": 0.5,
    "power_drop_fraction": 0.02,
    "bandwidth_fraction": 0.8,
    "query_passes": 1.0,
    "cache_write_passes": 1.0,
    "cache_write_token_cycles": 50.0,
    "overlap_power": 2.0,
    "l2_reach_fraction": 1.0,
    "l2_speedup": 2.0,
    "window_extra_key_tiles": 0.5,
}
PREFILL_BOUNDS = {
    "start_s": (3e-6, 3e-5),
    "exponentials_per_sm_per_clock": (4.0, 64.0),
    "tile_overhead_cycles": (100.0, 3e4),
    "wave_tail_fraction": (1e-3, 1.0),
    "power_drop_fraction": (1e-5, 0.4),
    "bandwidth_fraction": (0.3, 0.98),
    "query_passes": (0.5, 3.0),
    "cache_write_passes": (0.01, 2.5),
    "cache_write_token_cycles": (0.1, 5000.0),
    "overlap_power": (1.0, 12.0),
    "l2_reach_fraction": (0.1, 5.0),
    "l2_speedup": (1.0, 8.0),
    "window_extra_key_tiles": (0.01, 3.0),
}
DECODE_START = {
    "start_s": 9e-6,
    "most_splits": 64.0,
    "sm_bandwidth_ratio": 1.5,
    "key_tile_cycles": 300.0,
    "row_work": 1.0,
    "block_cycles": 2000.0,
    "block_head_cycles": 2000.0,
    "wave_tail_fraction": 0.5,
    "sequence_s": 3e-9,
    "reorder_s": 1e-7,
    "query_passes": 1.0,
    "partial_passes": 0.5,
    "bandwidth_fraction": 0.85,
    "overlap_power": 3.0,
    "combine_s": 2e-6,
    "l2_reach_fraction": 0.8,
    "l2_speedup": 1.5,
}
DECODE_BOUNDS = {
    "start_s": (2.5e-6, 2e-5),
    "most_splits": (8.0, 256.0),
    "sm_bandwidth_ratio": (0.8, 20.0),
    "key_tile_cycles": (10.0, 1e4),
    "row_work": (0.05, 30.0),
    "block_cycles": (10.0, 3e4),
    "block_head_cycles": (10.0, 3e4),
    "wave_tail_fraction": (1e-3, 1.0),
    "sequence_s": (1e-11, 1e-7),
    "reorder_s": (1e-9, 2e-5),
    "query_passes": (0.1, 4.0),
    "partial_passes": (0.01, 3.0),
    "bandwidth_fraction": (0.5, 0.98),
    "overlap_power": (1.0, 12.0),
    "combine_s": (1e-8, 2e-5),
    "l2_reach_fraction": (0.1, 3.0),
    "l2_speedup": (1.0, 8.0),
}
# Structure is chosen on the rows of the fit: FlashAttention 2 and 3 and trtllm differ in it.
PREFILL_CHOICES = [
    {"query_tile": float(rows), "key_tile": float(keys), "packs_query_heads": packs}
    for (rows, keys), packs in product(((64, 64), (128, 64), (128, 128), (256, 128)), (False, True))
]
DECODE_CHOICES = [
    {
        "query_tile": 64.0,
        "key_tile_elements": elements,
        "packs_always": always,
        "key_tiles_per_split": tiles,
        "fill_waves": waves,
    }
    for elements, always, tiles, waves in product((8192.0, 16384.0), (False, True), (1.0, 2.0, 4.0), (1.0, 2.0))
]


def read_rows(data: Path, phase: str, device_name: str, section: str) -> pd.DataFrame:
    """Rows of one device and section; one query token is decode, whichever table it stands in."""
    library, dtype, kv_dtype = SECTIONS[section]
    rows = pd.read_parquet(data / f"attention_{phase}.parquet")
    rows = rows[(rows.device == device_name) & rows.library.str.startswith(library)]
    rows = rows[(rows.dtype == (dtype if phase == "prefill" else "bf16")) & (rows.kv_cache_dtype == kv_dtype)]
    if phase == "prefill":
        rows = rows[rows.query_len > 1].assign(kv_len=lambda frame: frame.query_len)
    else:
        rows = rows.assign(kv_len=lambda frame: frame.context_len)
    return usual_kernel_only(rows)


def shape_of(rows: pd.DataFrame, section: str) -> AttentionShape:
    """Sizes of rows as the pricing module takes them."""
    _, dtype, kv_dtype = SECTIONS[section]

    def column(name: str) -> Array:
        return rows[name].to_numpy(float)

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


def rates_of(device: Device, section: str) -> AttentionRates:
    """Data-sheet rates for a section's arithmetic."""
    return AttentionRates(
        flops_per_s=device.peak_flops_per_s(SECTIONS[section][1]),
        bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        num_sms=float(device.num_sms or 0),
        clock_hz=float(device.boost_clock_hz or 0.0),
        l2_bytes=float(device.l2_bytes or 0.0),
    )


class Kernel:
    """One kernel to fit: its formula, its free constants and its structural choices."""

    def __init__(self, phase: str, device: Device, section: str, widths: list[int]) -> None:
        self.phase, self.section, self.rates, self.widths = phase, section, rates_of(device, section), widths
        self.fixed: dict[str, Any] = {"cache_write_start_s": CACHE_WRITE_START_S}
        if phase == "prefill":
            heads = FLASH_2_HEADS if device.architecture in ("ampere", "ada") else FLASH_3_HEADS
            self.fixed |= {"kernel_head_dims": heads, "backward_rate_fraction": BACKWARD_RATE_FRACTION}
            self.start = PREFILL_START | {f"fraction_{width}": 0.7 for width in widths}
            self.bounds = PREFILL_BOUNDS | {f"fraction_{width}": (0.1, 1.0) for width in widths}
            self.choices = PREFILL_CHOICES
            if len(widths) == 1:
                self.fixed["exponentials_per_sm_per_clock"] = EXPONENTIALS_PER_SM_PER_CLOCK
        else:
            self.start, self.bounds, self.choices = DECODE_START, DECODE_BOUNDS, DECODE_CHOICES
        self.bounds = {name: bound for name, bound in self.bounds.items() if name not in self.fixed}

    def parameters(self, choice: dict[str, Any], fitted: dict[str, float]) -> dict[str, Any]:
        """Constants as the record holds them."""
        merged: dict[str, Any] = {**self.fixed, **choice, **fitted}
        if self.phase == "prefill":
            merged["tensor_fraction"] = {str(width): merged.pop(f"fraction_{width}") for width in self.widths}
        return merged

    def predict(self, shape: AttentionShape, parameters: dict[str, Any]) -> Array:
        """Times, the copy into the cache included, as the tables have it. [s]"""
        if self.phase == "prefill":
            known = PrefillParameters(**{field.name: parameters[field.name] for field in fields(PrefillParameters)})
            return estimate_prefill(shape, self.rates, known, writes_cache=True).total_s
        constants = DecodeParameters(**{field.name: parameters[field.name] for field in fields(DecodeParameters)})
        return estimate_decode(shape, self.rates, constants, writes_cache=True, hot_cache=True).total_s

    def fit(
        self, rows: pd.DataFrame, choice: dict[str, Any], evaluations: int, start: dict[str, float] | None = None
    ) -> tuple[dict[str, float], float]:
        """Free constants for one structure, and the cost."""
        rows = rows.sample(min(ROWS_PER_FIT, len(rows)), random_state=1)
        shape, measured = shape_of(rows, self.section), rows.latency_s.to_numpy()
        return fit_logs(
            lambda free: self.predict(shape, self.parameters(choice, free)),
            measured,
            start or self.start,
            self.bounds,
            most_evaluations=evaluations,
        )

    def choose(self, rows: pd.DataFrame) -> tuple[dict[str, Any], dict[str, float]]:
        """The structure that fits best, with its constants: all are tried briefly, the best three at length."""
        costs = [self.fit(rows, choice, 12)[1] for choice in self.choices]
        finalists = [self.choices[index] for index in np.argsort(costs)[:3]]
        fits = [self.fit(rows, choice, 100) for choice in finalists]
        best = min(range(len(fits)), key=lambda index: fits[index][1])
        return finalists[best], fits[best][0]


def family_of(kernel: str) -> str:
    """Kernels of one library that count as one here: the prefill and decode kernels of flashinfer, say."""
    return "triton" if "triton" in kernel else "fa4" if kernel.endswith("fa4") else "main"


def usual_kernel_only(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of each head width's most frequent kernel; some tables hold a second one for the same shapes."""
    family = rows.kernel.map(family_of)
    usual = family.groupby(rows.head_dim).transform(lambda names: names.mode().iloc[0])
    return rows[family == usual].reset_index(drop=True)


def kernels_of_widths(rows: pd.DataFrame) -> dict[int, str]:
    """Head widths that the library serves with another kernel than most, and a name for that kernel.

    Heads wider than WIDEST_USUAL_HEAD are apart in any case, since their tiles no longer fit.
    """
    by_width = rows.kernel.map(family_of).groupby(rows.head_dim).agg(lambda names: names.mode().iloc[0])
    usual = by_width[rows.head_dim.mode().iloc[0]]
    others = {int(width): "wide" for width in by_width.index if width > WIDEST_USUAL_HEAD}
    return others | {int(width): str(name) for width, name in by_width.items() if name != usual}


def calibrate_kernel(device: Device, section: str, phase: str, rows: pd.DataFrame) -> dict[str, Any]:
    """Fit one kernel on one device."""
    folds = folds_of(rows.num_heads, rows.num_kv_heads, rows.head_dim)
    seen, held = rows[folds != HELD_OUT_FOLD], rows[folds == HELD_OUT_FOLD]
    kernel = Kernel(phase, device, section, sorted(int(width) for width in seen.head_dim.unique()))
    choice, fitted = kernel.choose(seen)
    parameters = tidy(kernel.parameters(choice, fitted))

    # Residuals of layouts that a fit has not seen, by cross-validation among those that it may see.
    seen_folds = folds[folds != HELD_OUT_FOLD]
    unseen_predicted = np.empty(len(seen))
    for fold in range(NUM_FOLDS):
        inside = seen_folds == fold
        if inside.any():
            other = seen[~inside]
            again = kernel.fit(other, choice, 40, fitted)[0] if set(other.head_dim) == set(seen.head_dim) else fitted
            constants = kernel.parameters(choice, again)
            unseen_predicted[inside] = kernel.predict(shape_of(seen[inside], section), constants)
    interval = interval_of(unseen_predicted, seen.latency_s.to_numpy(), AIMED_COVERAGE)

    def judge(part: pd.DataFrame) -> dict[str, float]:
        predicted, measured = kernel.predict(shape_of(part, section), parameters), part.latency_s.to_numpy()
        return error_summary(predicted, measured) | {"interval_coverage": coverage_of(interval, predicted, measured)}

    report = {
        "libraries": sorted(rows.library.unique()),
        "kernels": sorted(rows.kernel.unique()),
        "fit": judge(seen),
        "held_out": judge(held) if len(held) else None,
    }
    print(f"{device.name:16s} {section:10s} {phase:8s} {report['fit']} held out {report['held_out']}", flush=True)
    return {"parameters": parameters, "interval": interval, "report": report}


def main() -> None:
    """Fit every device and write its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the measured tables")
    parser.add_argument("--device", choices=sorted(DEVICES), action="append", help="only this device")
    arguments = parser.parse_args()
    for name in arguments.device or DEVICES:
        device = load_device(name)
        sections: dict[str, Any] = {}
        intervals: dict[str, Any] = {}
        reports: dict[str, Any] = {}
        for section in SECTIONS:
            tables = {
                phase: read_rows(arguments.data, phase, DEVICES[name], section) for phase in ("prefill", "decode")
            }
            if any(table.empty for table in tables.values()):
                continue
            others = kernels_of_widths(tables["prefill"])
            kernels: dict[str, Any] = {}
            for kernel in ("main", *sorted(set(others.values()))):
                kernels[kernel] = {}
                for phase, table in tables.items():
                    rows = table[[others.get(width, "main") == kernel for width in table.head_dim]]
                    result = calibrate_kernel(device, section, phase, rows.reset_index(drop=True))
                    kernels[kernel][phase] = result["parameters"]
                    intervals[f"{section}/{kernel}/{phase}"] = result["interval"]
                    reports[f"{section}/{kernel}/{phase}"] = result["report"]
            sections[section] = {
                "kernels": kernels,
                "kernel_of_head_dim": {str(width): kernel for width, kernel in others.items()},
            }
        record = {
            "devices": [name, *SAME_CHIP.get(name, [])],
            "architecture": device.architecture,
            "parameters": {"sections": sections},
            "interval": intervals,
            "provenance": {
                "source": SOURCE,
                "files": ["attention_prefill.parquet", "attention_decode.parquet"],
                "rows": "per section the libraries named in the reports; one query token counts as decode",
                "split": "one fifth of the head layouts (num_heads, num_kv_heads, head_dim) held out whole, by crc32",
                "command": "python scripts/calibrate_attention.py --data DIR",
                "assumptions": {
                    "backward_rate_fraction": "no public table; arXiv 2307.08691 section 4.1",
                    "kernel_head_dims": "flash-attn's compiled head widths; only 64, 128, 192, 256, 512 are measured",
                    "cache_write_start_s": "smallest kernel of the GEMM table",
                    "head widths not measured": "interpolated in the logarithm, held constant beyond the ends",
                },
                "reports": reports,
            },
        }
        print(write_record("attention", name, record))


if __name__ == "__main__":
    main()
