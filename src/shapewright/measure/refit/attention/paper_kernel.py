"""Fit the fused attention of 2023 from the paper's layers, as a section of A100's attention record.

The data folder holds paper_layers.csv. Its flash log (a = 128, b = 4, s = 2048, fp16, A100 40 GB) ran in training mode,
so the kernel drew a random number for every score, and head widths that are not a multiple of 8 were padded by copies.
Two constants are fitted, scores per SM and clock and these copies, to the measured layers, and to those attention
blocks that fit into theirs, minus the predicted other operations; tiles and rates are those of the record's current
kernel. A fifth of the hidden sizes is held out. Some seconds.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shapewright.hardware import load_device
from shapewright.lowering.operations import Attention
from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.tables.paper_gemm import PAPER_LIBRARY, noted_overhead_s
from shapewright.measure.accuracy.tables.paper_layers import FORMAT, PaperLayer, find_misfits, price_block
from shapewright.measure.fit.attention_record import attention_rates
from shapewright.measure.fit.shared import (
    HELD_OUT_FOLD,
    Array,
    coverage_of,
    error_summary,
    fit_log_times,
    fold_of_rows,
    interval_of,
)
from shapewright.measure.refit.record_files import read_record, write_record
from shapewright.pricing.attention.kernels import AttentionShape, read_parameters
from shapewright.pricing.attention.prefill import PrefillParameters, estimate_prefill

NAME, MEASURED_DEVICE = "a100-sxm-80gb", "a100-sxm-40gb"
LOG, SECTION, KERNEL = "flash_h_sweep", "16bit", "flash_128"
BLOCKS = ("attention", "layer")
BOUNDS = {"exponentials_per_sm_per_clock": (0.1, 64.0), "unaligned_passes": (0.01, 100.0)}
START = {"exponentials_per_sm_per_clock": 2.0, "unaligned_passes": 2.0}


@dataclass(frozen=True)
class Rows:
    """Measured blocks: sizes, measured time, and predicted time of everything but fused attention."""

    shape: AttentionShape
    hidden_size: Array
    measured_s: Array
    other_s: Array

    def take(self, index: Array) -> Rows:
        """Return the rows of an index or of a mask."""
        sizes = {name: value[index] for name, value in vars(self.shape).items() if isinstance(value, np.ndarray)}
        return Rows(replace(self.shape, **sizes), self.hidden_size[index], self.measured_s[index], self.other_s[index])


def read_rows(data: Path) -> Rows:
    """Read attention blocks and layers of the flash log."""
    device, context = load_device(MEASURED_DEVICE), Context()
    columns = read_columns(data / "paper_layers.csv", FORMAT, Counter())
    columns = columns.take(np.array([columns.labels["log"][row] == LOG for row in range(columns.num_rows)]))
    sizes, measured, other = [], [], []
    overhead_s = noted_overhead_s("paper_layers", device, context)
    misfits = find_misfits(columns)
    for name in BLOCKS:
        for row in range(columns.num_rows):
            if name == "attention" and misfits[row]:
                continue
            layer = PaperLayer(*(int(columns.numbers[size][row]) for size in FORMAT.numbers))
            priced = price_block(name, layer, device, is_flash=True, context=context)
            sizes.append((layer.micro_batch_size, layer.seq_len, layer.num_heads, layer.hidden_size / layer.num_heads))
            measured.append(float(columns.numbers[f"{name}_s"][row]))
            rest = [entry.total_time_s for entry in priced if not isinstance(entry.operation, Attention)]
            other.append(sum(rest) + overhead_s)
    batch, length, heads, width = np.array(sizes, dtype=float).T
    shape = AttentionShape(
        batch_size=batch,
        query_len=length,
        kv_len=length,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width,
        v_head_dim=width,
        window_size=np.zeros_like(batch),
        causal=True,
        element_bytes=2.0,
        kv_element_bytes=2.0,
    )
    return Rows(shape, heads * width, np.array(measured), np.array(other))


def refit(data: Path) -> None:
    """Fit the fused attention of 2023 and write it into the record of A100."""
    rows = read_rows(data)
    record = read_record("attention", NAME)
    current = record["parameters"]["sections"][SECTION]["kernels"][KERNEL]
    base = read_parameters(PrefillParameters, current["prefill"], record["id"])
    device = load_device(MEASURED_DEVICE)
    rates = attention_rates(device, "fp16")

    def attention_s(values: dict[str, float], part: Rows) -> Array:
        changes: dict[str, Any] = values
        return estimate_prefill(part.shape, rates, replace(base, **changes), writes_cache=False).total_s

    is_held_out = fold_of_rows(rows.hidden_size.tolist()) == HELD_OUT_FOLD
    seen, held_out = rows.take(~is_held_out), rows.take(is_held_out)
    values, _ = fit_log_times(lambda tried: attention_s(tried, seen) + seen.other_s, seen.measured_s, START, BOUNDS)
    reports: dict[str, Any] = {"libraries": [PAPER_LIBRARY], "kernels": ["flash-attn"], "own_width": False}
    for name, part in (("fit", seen), ("held_out", held_out)):
        reports[name] = error_summary(attention_s(values, part) + part.other_s, part.measured_s)
    # The blocks' residuals as ratios of fused attention only; blocks of which it is a small part are not used.
    time_s = attention_s(values, seen)
    residual_s = np.maximum(seen.measured_s - seen.other_s, 0.2 * time_s)
    weighs = time_s > 0.25 * seen.measured_s
    interval = interval_of(time_s[weighs], residual_s[weighs])
    reports["fit"]["interval_coverage"] = coverage_of(interval, time_s[weighs], residual_s[weighs])

    kernel = copy.deepcopy(current)
    kernel["prefill"] |= values
    path = f"{PAPER_LIBRARY}/{SECTION}/{KERNEL}"
    content = {"kernels": {KERNEL: kernel}, "kernel_of_head_dim": {"128": KERNEL}, "usual_kernel": KERNEL}
    record["parameters"]["libraries"][PAPER_LIBRARY] = {SECTION: content}
    decode = record["interval"][f"{SECTION}/{KERNEL}/decode"]
    record["interval"] |= {f"{path}/prefill": interval, f"{path}/decode": decode}
    record["provenance"]["reports"] |= {
        f"{path}/prefill": reports,
        f"{path}/decode": {"borrowed": "today's kernel; the log has no decode"},
    }
    record["provenance"]["assumptions"][PAPER_LIBRARY] = (
        "paper_layers.csv, EleutherAI/cookbook @fb3e361; shapewright.measure.refit attention-paper; decode as today"
    )
    print(values, interval, reports)
    print(write_record("attention", NAME, record))
