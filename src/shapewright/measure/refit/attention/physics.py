"""Fit the attention records from measured prefill and decode tables, and the fused attention of 2023.

The data folder holds attention_prefill.parquet and attention_decode.parquet. One fifth of the head layouts (num_heads,
num_kv_heads, head_dim) is held out of every fit and choice, and its errors stand in the record. Intervals come from
cross-validation among the other layouts. About four minutes on one core.

The fused attention of 2023 is a section of A100's record, from the flash log (a = 128, b = 4, s = 2048, fp16, A100 40
GB) of paper_layers.csv. It ran in training mode, so the kernel drew a random number for every score, and head widths
that are not a multiple of 8 were padded by copies. Two constants are fitted, scores per SM and clock and these copies,
to the measured layers, and to those attention blocks that fit into theirs, minus the predicted other operations; tiles
and rates are those of the record's current kernel. A fifth of the hidden sizes is held out. Some seconds.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from shapewright.core.records import dataclass
from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.tables.gemm import PAPER_LIBRARY, noted_overhead_s
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
from shapewright.measure.refit.attention.kernel_fit import (
    CACHE_COPY_CONSTANTS,
    ENOUGH_LAYOUTS,
    Source,
    calibrate_family,
)
from shapewright.measure.refit.record_files import DEVICES, SAME_CHIP, SOURCE, command, read_record, write_record
from shapewright.pricing.attention.kernels import AttentionShape, read_parameters
from shapewright.pricing.attention.prefill import PrefillParameters, estimate_prefill
from shapewright.pricing.attention.sections import SMALL_GROUPS, WIDEST_FLASH_HEAD, kernel_family

# Sections that price models: (library, arithmetic, cache) of the rows that each is fitted to.
SECTIONS = {
    "16bit": ("vllm", "bf16", "bfloat16"),
    "16bit_kv8": ("vllm", "bf16", "fp8"),
    "fp8": ("sglang", "fp8", "fp8"),
}
# Sections of another library, which price its measurements.
OTHER_LIBRARY = "sglang"
OTHER_SECTIONS = {"16bit": (OTHER_LIBRARY, "bf16", "bfloat16"), "16bit_kv8": (OTHER_LIBRARY, "bf16", "fp8")}
PHASES = ("prefill", "decode")


def read_rows(data: Path, phase: str, device_name: str, source: Source) -> pd.DataFrame:
    """Read the rows of one device, library and pair of element formats; one query token is decode in either table."""
    library, dtype, kv_dtype = source
    rows = pd.read_parquet(data / f"attention_{phase}.parquet")
    rows = rows[(rows.device == device_name) & rows.library.str.startswith(library)]
    rows = rows[(rows.dtype == (dtype if phase == "prefill" else "bf16")) & (rows.kv_cache_dtype == kv_dtype)]
    if phase == "prefill":
        rows = rows[rows.query_len > 1].assign(kv_len=lambda frame: frame.query_len)
    else:
        rows = rows.assign(kv_len=lambda frame: frame.context_len)
    rows = rows.assign(family=rows.kernel.map(kernel_family)).reset_index(drop=True)
    if phase == "decode" and library == OTHER_LIBRARY and kv_dtype == "bfloat16":
        for widest, family in reversed(SMALL_GROUPS):
            small = (rows.family.str.startswith("flashinfer")) & (rows.num_heads <= widest * rows.num_kv_heads)
            rows.loc[small, "family"] = family
    return rows


class Library:
    """Sections of one library; each table is fitted once, and an unmeasured phase takes the one of another format."""

    def __init__(self, data: Path, device: Device, alias: str) -> None:
        self.data, self.device, self.alias = data, device, alias
        self.done: dict[tuple[str, Source], dict[str, Any]] = {}

    def phase(self, phase: str, source: Source) -> dict[str, Any]:
        """Return the kernels of one phase by name; decode computes in 16 bits whatever the arithmetic of prefill."""
        key = (phase, source if phase == "prefill" else (source[0], "bf16", source[2]))
        if key not in self.done:
            rows = read_rows(self.data, phase, self.alias, key[1])
            flat, wide = rows[rows.head_dim <= WIDEST_FLASH_HEAD], rows[rows.head_dim > WIDEST_FLASH_HEAD]
            found = self.fit_families(phase, key[1], flat, {})
            known: dict[str, float] = {}
            if (
                phase == "prefill"
                and found
                and len(wide[["num_heads", "num_kv_heads"]].drop_duplicates()) < ENOUGH_LAYOUTS
            ):
                usual = found[max(found, key=lambda name: found[name]["report"]["fit"]["rows"])]["parameters"]
                known = {name: usual[name] for name in CACHE_COPY_CONSTANTS}
            found |= self.fit_families(phase, key[1], wide, known)
            self.done[key] = found
        return self.done[key]

    def fit_families(self, phase: str, source: Source, rows: pd.DataFrame, known: dict[str, float]) -> dict[str, Any]:
        """Fit the kernels of the families in these rows, and return them by name."""
        found: dict[str, Any] = {}
        for family, ours in rows.groupby("family"):
            fits = calibrate_family(self.device, source, phase, ours.reset_index(drop=True), known)
            found |= {f"{family}_{width}": fit for width, fit in fits.items()}
        return found

    def section(self, source: Source) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]] | None:
        """Return content, intervals and reports of a section; None if neither phase was measured."""
        library, _, kv_dtype = source
        own = {phase: self.phase(phase, source) for phase in PHASES}
        if not own["decode"]:
            return None
        fallback = {
            "prefill": self.phase("prefill", (library, "bf16", "bfloat16")),
            "decode": self.phase("decode", (library, "bf16", kv_dtype)),
        }
        for _, family in SMALL_GROUPS:  # one kernel in prefill, whatever the group
            for table in (own, fallback):
                usual_family = {
                    name.replace("flashinfer", family): fit
                    for name, fit in table["prefill"].items()
                    if name.startswith("flashinfer_") and name.replace("flashinfer", family) in table["decode"]
                }
                table["prefill"] = table["prefill"] | usual_family
        names = sorted({*own["prefill"], *own["decode"]})
        names = [name for name in names if all(name in own[phase] or name in fallback[phase] for phase in PHASES)]
        kernels: dict[str, Any] = {name: {} for name in names}
        intervals, reports = {}, {}
        for name, phase in product(names, PHASES):
            is_measured = name in own[phase]
            fit = own[phase][name] if is_measured else fallback[phase][name]
            kernels[name][phase] = fit["parameters"]
            intervals[f"{name}/{phase}"] = fit["interval"]
            reports[f"{name}/{phase}"] = fit["report"] if is_measured else {"borrowed": "16-bit cache and arithmetic"}
        rows = read_rows(self.data, "decode", self.alias, (library, "bf16", kv_dtype))
        rows = rows.assign(name=rows.kernel.map(kernel_family) + "_" + rows.head_dim.astype(str))
        rows = rows[rows.name.isin(names)]
        usual = {int(width): str(part.name.mode().iloc[0]) for width, part in rows.groupby("head_dim")}
        flat = rows[rows.head_dim <= WIDEST_FLASH_HEAD]
        content = {
            "kernels": kernels,
            "kernel_of_head_dim": usual,
            "usual_kernel": usual[int(flat.head_dim.mode().iloc[0])],
        }
        return content, intervals, reports


def calibrate(name: str, data: Path) -> dict[str, Any]:
    """Return the record of one device."""
    device = load_device(name)
    fits = Library(data, device, DEVICES[name])
    version = str(read_rows(data, "decode", DEVICES[name], OTHER_SECTIONS["16bit"]).library.unique()[0])
    sections: dict[str, Any] = {}
    libraries: dict[str, Any] = {version: {}}
    intervals: dict[str, Any] = {}
    reports: dict[str, Any] = {}
    for prefix, into, sources in (("", sections, SECTIONS), (f"{version}/", libraries[version], OTHER_SECTIONS)):
        for section, source in sources.items():
            found = fits.section(source)
            if found is None:
                continue
            into[section] = found[0]
            for table, entries in ((intervals, found[1]), (reports, found[2])):
                table.update({f"{prefix}{section}/{path}": entry for path, entry in entries.items()})
    return {
        "devices": [name, *SAME_CHIP.get(name, ())],
        "architecture": device.architecture,
        "parameters": {"sections": sections, "libraries": libraries},
        "interval": intervals,
        "provenance": {
            "source": SOURCE,
            "files": ["attention_prefill.parquet", "attention_decode.parquet"],
            "rows": "per section the libraries named in the reports; one query token counts as decode",
            "split": "one fifth of the head layouts (num_heads, num_kv_heads, head_dim) held out whole, by crc32",
            "command": command("attention"),
            "assumptions": {
                "backward_rate_fraction": "no public table; arXiv 2307.08691 section 4.1",
                "kernel_head_dims": "flash-attn's compiled head widths; only 64, 128, 192, 256, 512 are measured",
                "cache_write_start_s": "smallest kernel of the GEMM table",
                "head widths not measured": "interpolated in the logarithm, held constant beyond the ends",
            },
            "reports": reports,
        },
    }


def refit(data: Path, devices: Sequence[str] = ()) -> None:
    """Fit every attention record, or those of some devices."""
    for name in devices or DEVICES:
        print(write_record("attention", name, calibrate(name, data)))


# The paper's layers with fused attention.
NAME, MEASURED_DEVICE = "a100-sxm-80gb", "a100-sxm-40gb"
LOG, SECTION, KERNEL = "flash_h_sweep", "16bit", "flash_128"
BLOCKS = ("attention", "layer")
BOUNDS = {"exponentials_per_sm_per_clock": (0.1, 64.0), "unaligned_passes": (0.01, 100.0)}
START = {"exponentials_per_sm_per_clock": 2.0, "unaligned_passes": 2.0}


@dataclass(frozen=True)
class PaperRows:
    """Measured blocks: sizes, measured time, and predicted time of everything but fused attention."""

    shape: AttentionShape
    hidden_size: Array
    measured_s: Array
    other_s: Array

    def take(self, index: Array) -> PaperRows:
        """Return the rows of an index or of a mask."""
        sizes = {name: value[index] for name, value in vars(self.shape).items() if isinstance(value, np.ndarray)}
        return PaperRows(
            replace(self.shape, **sizes), self.hidden_size[index], self.measured_s[index], self.other_s[index]
        )


def read_paper_rows(data: Path) -> PaperRows:
    """Read attention blocks and layers of the flash log."""
    device, context = load_device(MEASURED_DEVICE), Context()
    columns = read_columns(data / "paper_layers.csv", FORMAT, Counter())
    columns = columns.take(columns.labels["log"].values == LOG)
    sizes, measured, other = [], [], []
    overhead_s = noted_overhead_s("paper_layers", device, context)
    misfits = find_misfits(columns)
    for name in BLOCKS:
        for row in range(columns.num_rows):
            if name == "attention" and misfits[row]:
                continue
            layer = PaperLayer.of(columns, row)
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
    return PaperRows(shape, heads * width, np.array(measured), np.array(other))


def refit_paper(data: Path) -> None:
    """Fit the fused attention of 2023 and write it into the record of A100."""
    rows = read_paper_rows(data)
    record = read_record("attention", NAME)
    current = record["parameters"]["sections"][SECTION]["kernels"][KERNEL]
    base = read_parameters(PrefillParameters, current["prefill"], record["id"])
    device = load_device(MEASURED_DEVICE)
    rates = attention_rates(device, "fp16")

    def attention_s(values: dict[str, float], part: PaperRows) -> Array:
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
