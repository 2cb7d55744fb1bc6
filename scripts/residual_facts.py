"""Errors on held-out rows by size, format, alignment and head layout. Not a script itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.measure.accuracy.chunk import Columns
from shapewright.measure.accuracy.tables.paper_layers import GEMMS, layer_gemm
from shapewright.measure.fit.shared import HELD_OUT_FOLD
from shapewright.measure.refit.attention.kernel_fit import layout_folds
from shapewright.measure.refit.attention.physics import PHASES, SECTIONS, read_rows
from shapewright.measure.refit.intervals.rows import (
    fitted_shapes,
    held_out_rows,
    is_held_out,
    only_measured,
    price_rows,
    read_table,
)
from shapewright.measure.refit.record_files import DEVICES
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.gemm.alignment import ALIGNMENT_CLASSES_BYTES, alignment_bytes

# Fewest rows that a point of a figure stands for.
FEWEST_ROWS = 30
GEMM_DEVICES = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "l40s")
# GPUs of the paper's tables, where odd sizes were measured.
PAPER_GPUS = {"a100": "a100-sxm-40gb", "v100": "v100-sxm2-16gb", "mi250x": "mi250x-gcd"}
# Section whose kernels price models in 16 bits.
USUAL_SECTION = "16bit"

Curve = tuple[list[float], list[float]]


def attention_facts(data: Path) -> list[dict[str, Any]]:
    """Errors of 16-bit attention kernels on held-out head layouts, per device and phase.

    ``in_turn`` is the mean over all layouts, each held out in turn from the learned correction; the constants of the
    formulas were fitted to four fifths of them.
    """
    facts = []
    for name, alias in DEVICES.items():
        record = load_record("attention", load_device(name))
        for phase in PHASES:
            rows = read_rows(data, phase, alias, SECTIONS[USUAL_SECTION])
            rows = rows[layout_folds(rows) == HELD_OUT_FOLD]
            errors = np.abs(_attention_ratios(rows, name) - 1.0)
            facts.append(
                {
                    "device": name,
                    "phase": phase,
                    "rows": len(errors),
                    "layouts": len(rows.groupby(["num_heads", "num_kv_heads", "head_dim"])),
                    "mean": float(errors.mean()),
                    "median": float(np.median(errors)),
                    "p90": float(np.quantile(errors, 0.9)),
                    "in_turn": _in_turn(record, phase),
                }
            )
    return facts


def _attention_ratios(rows: pd.DataFrame, name: str) -> np.ndarray:
    """Predicted over measured times of 16-bit rows of one device, each priced as the kernel that ran."""
    device = load_device(name)
    record = load_record("attention", device)
    sized = ("batch_size", "query_len", "kv_len", "num_heads", "num_kv_heads", "head_dim", "window_size")
    found = []
    for (library, kernel), part in rows.groupby(["library", "kernel"]):
        operation = Attention(
            name="row",
            dtype="bf16",
            writes_cache=True,
            v_head_dim=part.head_dim.to_numpy(),
            **{column: part[column].to_numpy() for column in sized},
        )
        price = price_attention(operation, device, record, hot_cache=True, library=library, kernel=kernel)
        found.append(np.asarray(price.time_s) / part.latency_s.to_numpy())
    return np.concatenate(found)


def _in_turn(record: Any, phase: str) -> dict[str, float]:
    """Rows and mean error with each layout held out in turn, over the learned tables of the usual section."""
    learned = record.residual
    paths = [path for path in learned["tables"] if path.startswith(f"{USUAL_SECTION}/") and path.endswith(phase)]
    reports = [
        report
        for table in sorted({learned["tables"][path] for path in paths})
        for report in learned["reports"][table].values()
    ]
    rows = sum(report["rows"] for report in reports)
    return {"rows": rows, "mean": sum(report["rows"] * report["mean_absolute_error"] for report in reports) / rows}


def gemm_curves(dtypes: Iterable[str]) -> dict[str, Curve]:
    """Mean error of GEMMs on held-out (n, k), each library with its own section, by decade of measured time."""
    curves = {}
    for name in GEMM_DEVICES:
        sections = load_record("gemm", load_device(name)).provenance["sections"]
        for dtype in dtypes:
            sums: dict[float, list[float]] = {}
            for report in sections.get(dtype, {}).get("libraries", {}).values():
                for decade, errors in report["by_size"].items():
                    both = sums.setdefault(float(decade) * 10**0.5, [0.0, 0.0])
                    both[0] += errors["rows"] * errors["mean_ape"]
                    both[1] += errors["rows"]
            points = sorted((at, total / rows) for at, (total, rows) in sums.items() if rows >= FEWEST_ROWS)
            if points:
                curves[f"{name} {dtype}"] = ([at for at, _ in points], [error for _, error in points])
    return curves


def size_curves(data: Path, table: str, word: str) -> dict[str, Curve]:
    """Mean error of the held-out rows of a table, by decade of measured time."""
    rows = price_rows(table, held_out_rows(data, table), as_new_shapes=True)
    rows = rows.assign(error=(rows.predicted / rows.measured - 1.0).abs(), decade=np.floor(np.log10(rows.measured)))
    curves = {}
    for name, part in rows.groupby(word):
        found = part.groupby("decade").error.agg(["mean", "size"])
        found = found[found["size"] >= FEWEST_ROWS]
        if len(found):
            curves[str(name)] = ([10.0 ** (decade + 0.5) for decade in found.index], found["mean"].tolist())
    return curves


def alignment_curves(data: Path) -> dict[str, Curve]:
    """Mean error of the paper's GEMMs on held-out (n, k), by the smaller alignment of n and k in bytes."""
    curves: dict[str, Curve] = {}
    for gpu, device in PAPER_GPUS.items():
        fitted = fitted_shapes(data, gpu)
        errors: dict[int, list[np.ndarray]] = {}
        for name, columns, n, k in _paper_gemms(data, gpu):
            unseen = is_held_out(n, k, fitted)
            worse = np.minimum(alignment_bytes(n, 16), alignment_bytes(k, 16))
            for width in ALIGNMENT_CLASSES_BYTES:
                chosen = columns.take(unseen & (worse == width))
                if chosen.num_rows:
                    priced = price_rows(name, chosen)
                    errors.setdefault(width, []).append(np.abs(priced.predicted / priced.measured - 1.0).to_numpy())
        found = {width: np.concatenate(parts) for width, parts in sorted(errors.items())}
        found = {width: each for width, each in found.items() if len(each) >= FEWEST_ROWS}
        curves[device] = ([float(width) for width in found], [float(each.mean()) for each in found.values()])
    return curves


def _paper_gemms(data: Path, gpu: str) -> Iterable[tuple[str, Columns, np.ndarray, np.ndarray]]:
    """The paper's GEMMs on one GPU: table, its rows, n and k of each row."""
    sweeps = read_table(data, "paper_gemm")
    sweeps = sweeps.take(sweeps.labels["gpu"].values == gpu)
    yield "paper_gemm", sweeps, sweeps.numbers["n"], sweeps.numbers["k"]
    layers = read_table(data, "paper_layers")
    layers = layers.take(layers.labels["gpu"].values == gpu)
    for name in GEMMS:
        measured = only_measured(layers.take(layers.numbers[f"{name}_tflops"] > 0.0), f"{name}_tflops")
        product = layer_gemm(name, measured.numbers)
        yield "paper_layers", measured, np.asarray(product.n, float), np.asarray(product.k, float)
