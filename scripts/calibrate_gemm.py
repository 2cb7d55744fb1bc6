"""Fit the GEMM records of src/shapewright/perf/data/gemm from measured tables.

Usage: python scripts/calibrate_gemm.py --data DIR [--device a100-sxm-80gb] [--alignment]

DIR holds gemm.parquet, paper_gemm.csv and paper_layers.csv (columns in docs/decisions/0003-gemm-calibration.md). A
fifth of the whole (n, k) shapes is never fitted: the errors and the interval of a record come from those alone.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from calibration import RECORDS, SAME_CHIP, argument_parser, read_record, save_record
from gemm_batch_fit import LEAST_WAVES, PLANS, fit_batch_kernels
from gemm_block_fit import fit_blocks, read_blocks
from gemm_paper_fit import NARROW_CASES, SPANS_OF_BLOCKS, fit_paper_device, fit_spans, narrow_cases, narrow_rows
from gemm_rows import PAPER, PRODUCTS, SOURCES, Source, layer_rows, paper_rows
from scipy.optimize import least_squares

from shapewright.accuracy.paper_gemm import PAPER_SECTION, PRODUCTS_ALONE
from shapewright.accuracy.paper_layers import BATCHES
from shapewright.fit.gemm import (
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
    predict_rows,
    round_section,
    transform,
    untransform,
)
from shapewright.fit.split import split_by_shape
from shapewright.hardware import Device, find_measured_device, load_device
from shapewright.perf.alignment import carried_factors
from shapewright.perf.gemm_menu import ALIGNMENT_FROM, ROLES
from shapewright.perf.kernels import DeviceRates
from shapewright.perf.lending import multiplier_ratio

# Sweeps with odd n and k exist for these alone; the rest of a vendor's chips borrow the nearest table.
ALIGNMENT_SOURCES = {"a100-sxm-80gb": "a100"}
# Names of devices in the paper's tables, where blocks are fitted.
GPUS = {"mi250x-gcd": "mi250x"}
ALIGNMENT_LENDERS = {"hopper": "a100-sxm-80gb", "blackwell": "a100-sxm-80gb", "ada": "a100-sxm-80gb"}
# Contractions that the paper's software multiplies slower than today's: qkv, mlp_up and proj of A100's layers lose 4 to
# 12 % from h = 1280 to 3968 and nothing from 4224 on; its sweeps, of a later version, have 4096 and more. [element]
OLDER_SPANS = {"a100": {"first_k": 1024.0, "last_k": 4095.0}}
# Factors on the times of the paper's sweeps and of its batches, which are the slowest of many iterations.
SCALES = ("scale", "scale_slowest")


def split_odd_sizes(folder: Path, gpu: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Sweeps and batches of the paper, seen and unseen; column ``scale`` names the factor of each row's table."""
    tables = (paper_rows(gpu)(folder), layer_rows(gpu, BATCHES)(folder))
    return split_by_shape(pd.concat(table.assign(scale=name) for name, table in zip(SCALES, tables, strict=True)))


class PaperTeaches(NamedTuple):
    """What the paper's tables teach a device whose kernels other tables taught.

    Attributes:
        factors: Alignment table.
        batched: What batches have of their own.
        older_cases: Slow cases of single products in the paper's software.
        older_interval: Interval of its single products.
        report: How wrong all this is on unseen rows.
    """

    factors: dict[str, dict[str, float]]
    batched: dict[str, Any]
    older_cases: dict[str, Any]
    older_interval: dict[str, list[float]]
    report: dict[str, Any]


def fit_alignment_table(folder: Path, gpu: str, device: Device, section: dict[str, Any]) -> PaperTeaches:
    """Alignment factors and what batches have of their own from the paper's odd sizes, kernels of `section` held fixed.

    Single products come from paper_gemm.csv, batches from the attention products of paper_layers.csv. Free besides the
    factors: the collector's fixed cost per call, and a factor on all times of each table (an older library; the slowest
    iteration instead of the mean). Batches that fill the device have kernels of their own, fitted apart.
    """
    section = {name: value for name, value in section.items() if name != "batched"}
    train, held = split_odd_sizes(folder, gpu)
    all_layers, narrow = train[train.scale == "scale_slowest"], NARROW_CASES[device.architecture]
    narrow_train = train[narrow_rows(train, narrow)]
    train = train[~narrow_rows(train, narrow)]
    layers = train[train.scale == "scale_slowest"]
    train = pd.concat([train[train.scale == "scale"], layers.sample(min(len(layers), FIT_ROWS // 4), random_state=0)])
    rates = device_rates(device, "fp16", hot=False)
    entries: Entries = (
        *alignment_entries(NVIDIA_ALIGNMENT_STARTS, ROLES),
        ("overhead_s", 1e-5, "log"),
        *((name, 1.0, "log") for name in SCALES),
    )
    start = transform(entries)

    def predicted(x: Array, chosen: pd.DataFrame) -> Array:
        v = untransform(x, entries)
        base = predict_rows(chosen, {**section, "alignment_factor": factor_table(v)}, rates, "NN")
        timed_s: Array = base * chosen.scale.map(v).to_numpy() + v["overhead_s"]
        return timed_s

    def residuals(x: Array) -> Array:
        return np.concatenate(
            [np.log(predicted(x, train) / train.latency_s.to_numpy()), PRIOR_WEIGHT * FIT_SCALE * (x - start)]
        )

    x = least_squares(residuals, start, loss="soft_l1", f_scale=FIT_SCALE, max_nfev=60, diff_step=1e-3).x
    v = untransform(x, entries)
    times = np.maximum(narrow_train.latency_s - v["overhead_s"], 1e-6) / narrow_train.scale.map(v)
    slow_cases = narrow_cases(narrow_train.assign(latency_s=times), narrow, section, rates)
    plans, least_waves = PLANS[device.architecture], LEAST_WAVES[device.architecture]
    measured_rates = device_rates(find_measured_device(gpu), "fp16", hot=False)  # its memory is not this device's
    kernels = fit_batch_kernels(all_layers, plans, section, measured_rates, "NN", least_waves)
    own_batches = {"slow_cases": slow_cases, **kernels.content}
    section = {**section, "batched": own_batches}
    single, batches = held[held.scale == "scale"], held[held.scale == "scale_slowest"]
    report = {
        "source": "paper_gemm.csv, paper_layers.csv",
        "rows": len(train),
        "collector_overhead_s": v["overhead_s"],
        "collector_scale": v["scale"],
        "slowest_batch_extra_s": kernels.extra_s,
        "held_out": judge(predicted(x, single), single.latency_s.to_numpy()),
        "held_out_batches": judge(
            predict_rows(batches, section, measured_rates, "NN") + kernels.extra_s, batches.latency_s.to_numpy()
        ),
    }
    # No single product with an odd free dimension was measured: what oddness costs a batch, it is taken to cost it.
    v["free:2"] = v["free:4"] * v["free_batched:2"] / v["free_batched:4"]
    section = {**section, "alignment_factor": factor_table(v)}
    cases, ends, report["older_products"] = fit_older_products(folder, gpu, section, measured_rates, v["overhead_s"])
    return PaperTeaches(section["alignment_factor"], own_batches, cases, ends, report)


def fit_older_products(
    folder: Path, gpu: str, section: dict[str, Any], rates: DeviceRates, overhead_s: float
) -> tuple[dict[str, Any], dict[str, list[float]], dict[str, Any]]:
    """What single products with short contractions lose in the paper's software, and how wrong all of them are."""
    rows = layer_rows(gpu, [name for name in PRODUCTS if name not in BATCHES])(folder)
    seen, unseen = split_by_shape(rows)
    at_kernel = seen.assign(latency_s=np.maximum(seen.latency_s - overhead_s, 1e-6))
    cases = {"spans": fit_spans(at_kernel, [OLDER_SPANS[gpu]], {**section, "slow_cases": {}}, rates, "NT")}
    predicted = predict_rows(unseen, {**section, "slow_cases": cases}, rates, "NT") + overhead_s
    measured = unseen.latency_s.to_numpy()
    return cases, interval(predicted, measured), judge(predicted, measured)


def refit_alignment(folder: Path) -> None:
    """Fit the alignment tables again, kernels as they are, and hand them to the records that borrow them."""
    for name, gpu in ALIGNMENT_SOURCES.items():
        record = read_record("gemm", name)
        section = record["parameters"]["dtypes"]["bf16"]
        taught = fit_alignment_table(folder, gpu, load_device(name), section)
        record["provenance"]["sections"]["bf16"]["alignment"] = taught.report
        print(name, json.dumps(taught.report), flush=True)
        for place, content in older_library(section, taught).items():
            record[place]["libraries"][PAPER_SECTION] = content
        save_record("gemm", name, round_section(_with_table(record, taught.factors, taught.batched)))
    lend_alignment()


def lend_alignment() -> None:
    """Hand the alignment tables, as they are, to the records that borrow them."""
    for path in sorted((RECORDS / "gemm").glob("*.json")):
        record = read_record("gemm", path.stem)
        if table := borrowed_table(path.stem, record):
            save_record("gemm", path.stem, round_section(_with_table(record, table)))


def older_library(section: dict[str, Any], taught: PaperTeaches) -> dict[str, dict[str, Any]]:
    """The section that prices the paper's own rows, and its interval, by their places in a record."""
    return {
        "parameters": {"bf16": {**section, "slow_cases": taught.older_cases}},
        "interval": {"bf16": taught.older_interval},
    }


def borrowed_table(name: str, record: dict[str, Any]) -> dict[str, dict[str, float]] | None:
    """Another family's alignment table as the device's SM would have it, by 16 bits; None where it has its own."""
    lender = ALIGNMENT_LENDERS.get(record["architecture"])
    if not lender:
        return None
    table, lent = _stored_table(lender), read_record("gemm", lender)
    largest = [max(tile["rate"] for tile in one["parameters"]["dtypes"]["bf16"]["tiles"]) for one in (record, lent)]
    ratio = multiplier_ratio(load_device(name), load_device(lender)) * largest[0] / largest[1]
    carried = carried_factors(np.array([list(factors.values()) for factors in table.values()]), ratio)
    return {
        role: dict(zip(table[role], factors, strict=True))
        for role, factors in zip(table, carried.tolist(), strict=True)
    }


def _with_table(
    record: dict[str, Any], table: dict[str, dict[str, float]], own_batches: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Put one alignment table, whose it is, and what batches have of their own, into every section of a record."""
    lender = ALIGNMENT_LENDERS.get(record["architecture"])
    for sections in (record["parameters"]["dtypes"], *record["parameters"]["libraries"].values()):
        for section in sections.values():
            section["alignment_factor"] = table
            if lender:
                section[ALIGNMENT_FROM] = lender
            if own_batches:
                section["batched"] = own_batches
    return record


def main() -> None:
    """Fit every record, or those of one device."""
    devices = list(dict.fromkeys(source.device for source in SOURCES))
    parser = argument_parser(__doc__, devices)
    parser.add_argument("--alignment", action="store_true", help="fit the alignment tables alone again")
    parser.add_argument(
        "--lend-alignment", action="store_true", help="fit nothing, hand these tables to who borrows them"
    )
    given = parser.parse_args()
    if given.alignment or given.lend_alignment:
        refit_alignment(given.data) if given.alignment else lend_alignment()
        return
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    for name in given.device or devices:
        device = load_device(name)
        fitted = {source.dtype: fit_source(given.data, source, device) for source in SOURCES if source.device == name}
        libraries: dict[str, Any] = {}
        intervals: dict[str, Any] = {}
        for dtype, one in fitted.items():
            for library, (section, ends) in one.libraries.items():
                libraries.setdefault(library, {})[dtype] = section
                intervals.setdefault(library, {})[dtype] = ends
        record = {
            "id": f"gemm/{name}/{today}",
            "kind": "gemm",
            "devices": [name, *SAME_CHIP.get(name, ())],
            "architecture": device.architecture,
            "parameters": {"dtypes": {dtype: one.section for dtype, one in fitted.items()}, "libraries": libraries},
            "interval": {"dtypes": {dtype: one.interval for dtype, one in fitted.items()}, "libraries": intervals},
            "provenance": {
                "command": "python scripts/calibrate_gemm.py --data DIR --device " + name,
                "date": today,
                "split": "a fifth of whole (n, k) shapes held out",
                "sections": {dtype: one.report for dtype, one in fitted.items()},
            },
        }
        table = borrowed_table(name, record)
        save_record("gemm", name, round_section(_with_table(record, table) if table else record))


class Fitted(NamedTuple):
    """What one source taught: a section, its interval, the same by library, and how wrong it is on unseen rows."""

    section: dict[str, Any]
    interval: dict[str, list[float]]
    libraries: dict[str, tuple[dict[str, Any], dict[str, list[float]]]]
    report: dict[str, Any]


def fit_source(folder: Path, source: Source, device: Device) -> Fitted:
    """Fit the section of one dtype on its measured rows."""
    fitted = (_fit_paper if source.table == PAPER else _fit_libraries)(folder, source, device)
    print(device.name, source.dtype, json.dumps(fitted.report), flush=True)
    return fitted


def _fit_paper(folder: Path, source: Source, device: Device) -> Fitted:
    """Fit on the paper's sweeps and layers."""
    train, held = split_by_shape(source.rows(folder))
    taught = fit_paper_device(train, source, device)
    rates, measured = device_rates(device, source.dtype, hot=False), held.latency_s.to_numpy()
    predicted = np.full(len(held), taught.overhead_s)
    logs = held.log.where(held.log.isin(taught.logs), "").to_numpy()
    for log, section in {"": taught.section, **taught.logs}.items():
        predicted[logs == log] += predict_rows(held[logs == log], section, rates, source.layout)
    sections = dict(taught.logs)
    report: dict[str, Any] = {
        "source": source.table,
        "rows_fitted": taught.num_fitted,
        "collector_overhead_s": taught.overhead_s,
        "held_out": judge(predicted, measured),
    }
    is_layer = held.slowest.to_numpy(bool)
    for label, part in (("held_out_sweeps", ~is_layer), ("held_out_layers", is_layer)):
        report[label] = judge(predicted[part], measured[part])
    usual = taught.section
    if device.architecture in SPANS_OF_BLOCKS:
        # Models run layers: their section is that of blocks, and products timed alone have one of their own.
        blocks = read_blocks(folder, device, GPUS[device.name])
        seen = set(zip(train.n.tolist(), train.k.tolist(), strict=True))
        is_unseen = np.array([(4 * h, h) not in seen for h in blocks.hidden_size.astype(int)])
        spans = usual["slow_cases"]["spans"][: SPANS_OF_BLOCKS[device.architecture]]
        cases, report["held_out_blocks"] = fit_blocks(blocks, is_unseen, usual, spans, rates)
        sections[PRODUCTS_ALONE] = usual
        usual = {**usual, "slow_cases": cases}
    ends = interval(predicted, measured)
    return Fitted(usual, ends, {name: (own, ends) for name, own in sections.items()}, report)


def _fit_libraries(folder: Path, source: Source, device: Device) -> Fitted:
    """Fit on the rows of all libraries together, and from there on those of each."""
    own_alignment = ALIGNMENT_SOURCES.get(device.name) if source.dtype == "bf16" else None
    borrowed = ALIGNMENT_LENDERS.get(device.architecture)
    # No row of these tables is aligned to less than 64 bytes, where all devices have one table.
    factors = _stored_table(borrowed) if borrowed else factor_table({})
    form = Form(TILES[device.architecture], hot=source.hot_cache, alignment=(), cast=source.dtype in NARROW)
    rates = device_rates(device, source.dtype, hot=source.hot_cache)
    train, held = split_by_shape(source.rows(folder))
    x = fit(train, form, rates, source.layout, factors)
    section = form.section(x, factors)
    predicted = predict_rows(held, section, rates, source.layout)
    report: dict[str, Any] = {
        "source": source.table,
        "rows_fitted": min(len(train), FIT_ROWS),
        "held_out": judge(predicted, held.latency_s.to_numpy()),
    }
    own_batches: dict[str, Any] = {}
    libraries: dict[str, tuple[dict[str, Any], dict[str, list[float]]]] = {}
    if own_alignment:
        taught = fit_alignment_table(folder, own_alignment, device, section)
        factors, report["alignment"] = taught.factors, taught.report
        own_batches = {"batched": taught.batched}
        section |= {"alignment_factor": factors, **own_batches}
        older = older_library(section, taught)
        libraries[PAPER_SECTION] = (older["parameters"]["bf16"], older["interval"]["bf16"])
    else:
        report["alignment"] = {"borrowed_from": borrowed}
    for library in sorted(set(train.library)):
        seen, unseen = train[train.library == library], held[held.library == library]
        own = form.section(fit(seen, form, rates, source.layout, factors, start=x), factors) | own_batches
        guess, measured = predict_rows(unseen, own, rates, source.layout), unseen.latency_s.to_numpy()
        libraries[library] = (own, interval(guess, measured))
        report.setdefault("libraries", {})[library] = judge(guess, measured)
    return Fitted(section, interval(predicted, held.latency_s.to_numpy()), libraries, report)


def _stored_table(name: str) -> dict[str, dict[str, float]]:
    """Alignment factors of a record that was fitted before."""
    table: dict[str, dict[str, float]] = read_record("gemm", name)["parameters"]["dtypes"]["bf16"]["alignment_factor"]
    return table


if __name__ == "__main__":
    main()
