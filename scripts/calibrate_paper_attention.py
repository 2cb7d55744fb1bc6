"""Fit the fused attention of 2023 from the paper's layers, into the attention record of the A100.

    python scripts/calibrate_paper_attention.py --data DIR

DIR holds paper_layers.csv. Its flash log (a = 128, b = 4, s = 2048, fp16, A100 40 GB) ran in training mode, so the
kernel drew a random number for every score, and head widths that are no multiple of 8 were padded by copies. Two
numbers are fitted, scores per SM and clock and those copies, to the measured layers, and to those attention blocks that
fit into theirs, less what the other operations are predicted to take; tiles and rates are those of the record's kernel
of today. A fifth of the hidden sizes is held out whole. Run it after calibrate_attention.py. Needs the ``fit`` extra;
some seconds.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from calibration import argument_parser, read_record, write_record

from shapewright.accuracy.context import Context
from shapewright.accuracy.paper_gemm import PAPER_LIBRARY, noted_overhead_s
from shapewright.accuracy.paper_layers import FORMAT, PaperLayer, find_misfits, price_block
from shapewright.accuracy.read import read_columns
from shapewright.fit.logs import HELD_OUT_FOLD, Array, coverage_of, error_summary, fit_logs, folds_of, interval_of
from shapewright.hardware import load_device
from shapewright.operations import Attention
from shapewright.perf.attention_kernels import AttentionRates, AttentionShape, read_parameters
from shapewright.perf.attention_prefill import PrefillParameters, estimate_prefill

NAME, MEASURED_DEVICE = "a100-sxm-80gb", "a100-sxm-40gb"
LOG, SECTION, KERNEL = "flash_h_sweep", "16bit", "flash_128"
BLOCKS = ("attention", "layer")
BOUNDS = {"exponentials_per_sm_per_clock": (0.1, 64.0), "unaligned_passes": (0.01, 100.0)}
START = {"exponentials_per_sm_per_clock": 2.0, "unaligned_passes": 2.0}


@dataclass(frozen=True)
class Rows:
    """Measured blocks: sizes, measured time, and what is predicted besides fused attention."""

    shape: AttentionShape
    hidden_size: Array
    measured_s: Array
    other_s: Array

    def take(self, index: Array) -> Rows:
        """Some rows."""
        sizes = {name: value[index] for name, value in vars(self.shape).items() if isinstance(value, np.ndarray)}
        return Rows(replace(self.shape, **sizes), self.hidden_size[index], self.measured_s[index], self.other_s[index])


def read_rows(data: Path) -> Rows:
    """Attention blocks and layers of the flash log."""
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


def main() -> None:
    """Fit and put the section into the record."""
    rows = read_rows(argument_parser(__doc__).parse_args().data)
    record = read_record("attention", NAME)
    today = record["parameters"]["sections"][SECTION]["kernels"][KERNEL]
    base = read_parameters(PrefillParameters, today["prefill"], record["id"])
    device = load_device(MEASURED_DEVICE)
    rates = AttentionRates(
        flops_per_s=device.peak_flops_per_s("fp16"),
        bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
        num_sms=float(device.num_sms or 0),
        clock_hz=float(device.boost_clock_hz or 0.0),
        l2_bytes=float(device.l2_bytes or 0.0),
    )

    def attention_s(values: dict[str, float], part: Rows) -> Array:
        changes: dict[str, Any] = values
        return estimate_prefill(part.shape, rates, replace(base, **changes), writes_cache=False).total_s

    is_unseen = folds_of(rows.hidden_size.tolist()) == HELD_OUT_FOLD
    seen, unseen = rows.take(~is_unseen), rows.take(is_unseen)
    values, _ = fit_logs(lambda tried: attention_s(tried, seen) + seen.other_s, seen.measured_s, START, BOUNDS)
    reports: dict[str, Any] = {"libraries": [PAPER_LIBRARY], "kernels": ["flash-attn"], "own_width": False}
    for name, part in (("fit", seen), ("held_out", unseen)):
        reports[name] = error_summary(attention_s(values, part) + part.other_s, part.measured_s)
    # The blocks' residuals as ratios of fused attention alone; blocks where it is a small part say nothing about it.
    time_s = attention_s(values, seen)
    residual_s = np.maximum(seen.measured_s - seen.other_s, 0.2 * time_s)
    weighs = time_s > 0.25 * seen.measured_s
    interval = interval_of(time_s[weighs], residual_s[weighs])
    reports["fit"]["interval_coverage"] = coverage_of(interval, time_s[weighs], residual_s[weighs])

    kernel = copy.deepcopy(today)
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
        "paper_layers.csv, EleutherAI/cookbook @fb3e361; scripts/calibrate_paper_attention.py; decode as today"
    )
    print(values, interval, reports)
    print(write_record("attention", NAME, record))


if __name__ == "__main__":
    main()
