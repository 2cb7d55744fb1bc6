"""Fit the GEMM records of src/shapewright/perf/data/gemm from measured tables.

Usage: python scripts/calibrate_gemm.py --data DIR [--device a100-sxm-80gb] [--alignment]

DIR holds gemm.parquet, paper_gemm.csv and paper_layers.csv (columns in docs/decisions/0003-gemm-calibration.md). A
fifth of the whole (n, k) shapes is never fitted: the errors and the interval of a record come from those alone.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from gemm_rows import PAPER, SOURCES, layer_rows, paper_rows
from scipy.optimize import least_squares

from shapewright.fit.gemm import (
    ALIGNMENT_STARTS,
    FIT_ROWS,
    FIT_SCALE,
    NARROW,
    NVIDIA_ALIGNMENT_STARTS,
    PRIOR_WEIGHT,
    TILES,
    Array,
    Entries,
    Form,
    alignment_entries,
    device_rates,
    factor_table,
    fit,
    interval,
    judge,
    predict_collected,
    predict_rows,
    round_section,
    transform,
    untransform,
)
from shapewright.fit.split import split_by_shape
from shapewright.hardware import Device, load_device
from shapewright.perf.kernels import ROLES

RECORDS = Path(__file__).parent.parent / "src/shapewright/perf/data/gemm"

# Devices that share the measured chip and its clocks, and differ in memory alone.
SHARED_CHIPS = {
    "a100-sxm-80gb": ("a100-sxm-40gb",),
    "v100-sxm2-16gb": ("v100-sxm2-32gb",),
}
# Sweeps with odd n and k exist for these alone; the rest of a vendor's chips borrow the nearest table.
ALIGNMENT_SOURCES = {"a100-sxm-80gb": "a100"}
ALIGNMENT_FROM = {"hopper": "a100-sxm-80gb", "blackwell": "a100-sxm-80gb", "ada": "a100-sxm-80gb"}
# The one published pair of Hopper: SwiGLU widths 10922 (4 bytes) and 10944 at h = 4096, 273 and 398 TFLOP/s
# (stas00/ml-engineering, training/performance). 398 is half of what this chip reaches in its SXM form, so that the pair
# may be that of a card short of power, which hides part of the loss: it is averaged with the borrowed factor.
HOPPER_PAIR = 273.0 / 398.0


def fit_alignment_table(
    folder: Path, gpu: str, device: Device, section: dict[str, Any]
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Alignment factors from the paper's odd sizes, the kernels of `section` held fixed.

    Single products come from paper_gemm.csv, batches from the attention products of paper_layers.csv. Free besides the
    factors: the collector's fixed cost per call, and a factor on all times of each table (an older library; the slowest
    iteration instead of the mean).
    """
    tables = {"scale": paper_rows(gpu)(folder), "scale_slowest": layer_rows(gpu, ("score", "aov"))(folder)}
    rows = pd.concat(table.assign(scale=name) for name, table in tables.items())
    train, held = split_by_shape(rows)
    layers = train[train.scale == "scale_slowest"]
    train = pd.concat([train[train.scale == "scale"], layers.sample(min(len(layers), FIT_ROWS // 4), random_state=0)])
    rates = device_rates(device, "fp16", hot=False)
    entries: Entries = (
        *alignment_entries(NVIDIA_ALIGNMENT_STARTS, ROLES),
        ("overhead_s", 1e-5, "log"),
        *((name, 1.0, "log") for name in tables),
    )
    start = transform(entries)

    def predicted(x: Array, chosen: pd.DataFrame) -> Array:
        v = untransform(x, entries)
        base = predict_rows(chosen, {**section, "alignment_factor": factor_table(v)}, rates, "NN")
        return base * chosen.scale.map(v).to_numpy() + v["overhead_s"]

    def residuals(x: Array) -> Array:
        return np.concatenate(
            [np.log(predicted(x, train) / train.latency_s.to_numpy()), PRIOR_WEIGHT * FIT_SCALE * (x - start)]
        )

    x = least_squares(residuals, start, loss="soft_l1", f_scale=FIT_SCALE, max_nfev=60, diff_step=1e-3).x
    v = untransform(x, entries)
    single, batches = held[held.scale == "scale"], held[held.scale == "scale_slowest"]
    report = {
        "source": "paper_gemm.csv, paper_layers.csv",
        "rows": len(train),
        "collector_overhead_s": v["overhead_s"],
        "collector_scale": v["scale"],
        "slowest_iteration_scale": v["scale_slowest"],
        "held_out": judge(predicted(x, single), single.latency_s.to_numpy()),
        "held_out_batches": judge(predicted(x, batches), batches.latency_s.to_numpy()),
    }
    # No single product with an odd free dimension was measured: what oddness costs a batch, it is taken to cost it.
    v["free:2"] = v["free:4"] * v["free_batched:2"] / v["free_batched:4"]
    return factor_table(v), report


def refit_alignment(folder: Path) -> None:
    """Fit the alignment tables again, kernels as they are, and hand them to the records that borrow them."""
    for name, gpu in ALIGNMENT_SOURCES.items():
        record = _read_record(name)
        section = record["parameters"]["dtypes"]["bf16"]
        table, report = fit_alignment_table(folder, gpu, load_device(name), section)
        record["provenance"]["sections"]["bf16"]["alignment"] = report
        print(name, json.dumps(report), flush=True)
        _write_record(name, _with_table(record, table))
    for path in sorted(RECORDS.glob("*.json")):
        record = _read_record(path.stem)
        lender = ALIGNMENT_FROM.get(record["architecture"])
        if lender:
            _write_record(path.stem, _with_table(record, borrowed_table(lender, record["architecture"])))


def borrowed_table(lender: str, architecture: str) -> dict[str, dict[str, float]]:
    """Another family's alignment table, with what little is known of the borrower."""
    table = _stored_table(lender)
    if architecture == "hopper":
        for width in ("4", "8"):
            table["free"][width] = float(np.sqrt(table["free"][width] * HOPPER_PAIR))
    return table


def _with_table(record: dict[str, Any], table: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Put one alignment table into every section of a record."""
    for sections in (record["parameters"]["dtypes"], *record["parameters"]["libraries"].values()):
        for section in sections.values():
            section["alignment_factor"] = table
    return record


def main(arguments: Sequence[str] | None = None) -> int:
    """Fit every record, or those of one device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with gemm.parquet and paper_gemm.csv")
    parser.add_argument("--device", action="append", help="canonical name; may be given again; default: all")
    parser.add_argument("--alignment", action="store_true", help="fit the alignment tables alone again")
    given = parser.parse_args(arguments)
    if given.alignment:
        refit_alignment(given.data)
        return 0
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    chosen = given.device or list(dict.fromkeys(source.device for source in SOURCES))
    for name in chosen:
        device = load_device(name)
        sections: dict[str, Any] = {}
        libraries: dict[str, Any] = {}
        provenance: dict[str, Any] = {
            "command": "python scripts/calibrate_gemm.py --data DIR --device " + name,
            "date": today,
            "split": "a fifth of whole (n, k) shapes held out",
            "sections": {},
        }
        intervals: dict[str, Any] = {"dtypes": {}, "libraries": {}}
        borrowed = ALIGNMENT_FROM.get(device.architecture)
        for source in (s for s in SOURCES if s.device == name):
            own_table = source.table == PAPER
            factors = (
                None if own_table else (borrowed_table(borrowed, device.architecture) if borrowed else factor_table({}))
            )
            entries = (
                alignment_entries(ALIGNMENT_STARTS.get(device.architecture, NVIDIA_ALIGNMENT_STARTS), ROLES)
                if own_table
                else ()
            )
            form = Form(
                TILES[device.architecture],
                hot=source.hot_cache,
                alignment=entries,
                overhead=own_table,
                cast=source.dtype in NARROW,
            )
            rates = device_rates(device, source.dtype, hot=source.hot_cache)
            train, held = split_by_shape(source.rows(given.data))
            x = fit(train, form, rates, source.layout, factors)
            section, overhead = form.section(x, factors), form.values(x).get("overhead_s", 0.0)
            predicted = predict_collected(held, form, x, rates, source.layout, factors)
            report: dict[str, Any] = {
                "source": source.table,
                "rows_fitted": min(len(train), FIT_ROWS),
                "collector_overhead_s": overhead,
                "held_out": judge(predicted, held.latency_s.to_numpy()),
            }
            if own_table:
                for label, is_slowest in (("held_out_sweeps", False), ("held_out_layers", True)):
                    part = held.slowest.astype(bool).to_numpy() == is_slowest
                    report[label] = judge(predicted[part], held.latency_s.to_numpy()[part])
            if name in ALIGNMENT_SOURCES and source.dtype == "bf16":
                section["alignment_factor"], report["alignment"] = fit_alignment_table(
                    given.data, ALIGNMENT_SOURCES[name], device, section
                )
                factors = section["alignment_factor"]
            elif not own_table:
                report["alignment"] = {"borrowed_from": borrowed}
            for library in sorted(set(train.library) - {""}):
                seen, unseen = train[train.library == library], held[held.library == library]
                own = form.section(fit(seen, form, rates, source.layout, factors, start=x), factors)
                guess = predict_rows(unseen, own, rates, source.layout)
                libraries.setdefault(library, {})[source.dtype] = own
                intervals["libraries"].setdefault(library, {})[source.dtype] = interval(
                    guess, unseen.latency_s.to_numpy()
                )
                report.setdefault("libraries", {})[library] = judge(guess, unseen.latency_s.to_numpy())
            sections[source.dtype] = section
            intervals["dtypes"][source.dtype] = interval(predicted, held.latency_s.to_numpy())
            provenance["sections"][source.dtype] = report
            print(name, source.dtype, json.dumps(report), flush=True)
        record = {
            "id": f"gemm/{name}/{today}",
            "kind": "gemm",
            "devices": [name, *SHARED_CHIPS.get(name, ())],
            "architecture": device.architecture,
            "parameters": {"dtypes": sections, "libraries": libraries},
            "interval": intervals,
            "provenance": provenance,
        }
        _write_record(name, record)
    return 0


def _write_record(name: str, record: dict[str, Any]) -> None:
    """Write a record whole, so that an interrupted fit leaves the old one."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    draft = RECORDS / f".{name}.json.tmp"
    draft.write_text(json.dumps(round_section(record), indent=1) + "\n", encoding="utf-8")
    draft.replace(RECORDS / f"{name}.json")


def _read_record(name: str) -> dict[str, Any]:
    """A record that was fitted before."""
    record: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text(encoding="utf-8"))
    return record


def _stored_table(name: str) -> dict[str, dict[str, float]]:
    """Alignment factors of a record that was fitted before."""
    table: dict[str, dict[str, float]] = _read_record(name)["parameters"]["dtypes"]["bf16"]["alignment_factor"]
    return table


if __name__ == "__main__":
    sys.exit(main())
