"""Fit the GEMM records from measured tables.

The data folder holds gemm.parquet, paper_gemm.csv and paper_layers.csv (columns in
docs/decisions/0003-gemm-calibration.md). A fifth of the whole (n, k) shapes is held out; errors and interval of a
record are those of the held-out shapes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from shapewright.hardware.architectures import USUAL_ALIGNMENT_FACTORS
from shapewright.hardware.device import Device
from shapewright.hardware.loader import find_measured_device, load_device
from shapewright.measure.accuracy.tables.gemm import GEMMS_ALONE, PAPER_SECTION
from shapewright.measure.accuracy.tables.paper_layers import BATCHED_GEMMS, GEMMS
from shapewright.measure.fit.gemm_section import (
    FIT_ROWS,
    NARROW,
    Array,
    Entries,
    FitParameters,
    alignment_entries,
    borrow_alignment,
    device_rates,
    factor_table,
    fit,
    fit_vector,
    interval_per_regime,
    percentage_errors,
    predict_rows,
    transform,
    untransform,
)
from shapewright.measure.fit.shared import split_by_shape
from shapewright.measure.refit.gemm.batch_kernels import LEAST_WAVES, PLANS, fit_batch_kernels
from shapewright.measure.refit.gemm.paper_device import (
    NARROW_CASES,
    SPANS_OF_BLOCKS,
    fit_blocks,
    fit_paper_device,
    fit_spans,
    narrow_cases,
    narrow_rows,
    read_blocks,
)
from shapewright.measure.refit.gemm.rows import PAPER, SOURCES, Source, layer_rows, paper_rows
from shapewright.measure.refit.record_files import RECORDS, SAME_CHIP, command, read_record, save_record, write_record
from shapewright.pricing.gemm.alignment import ROLES
from shapewright.pricing.gemm.kernels import DeviceRates
from shapewright.pricing.gemm.parameters import ALIGNMENT_FROM

# Devices with measured sweeps of odd n and k, and their name in the paper's tables.
ALIGNMENT_SOURCES = {"a100-sxm-80gb": "a100"}
# Devices whose sections are fitted to blocks, and their name in the paper's tables.
GPUS = {"mi250x-gcd": "mi250x"}
ALIGNMENT_DONORS = {"hopper": "a100-sxm-80gb", "blackwell": "a100-sxm-80gb", "ada": "a100-sxm-80gb"}
# Contractions that are slower in the paper's software than in current libraries: qkv, mlp_up and proj of A100's layers
# lose 4 to 12 % from h = 1280 to 3968 and nothing from 4224 on; its sweeps, of a later version, have 4096 and more.
# [element]
OLDER_SPANS = {"a100": {"first_k": 1024.0, "last_k": 4095.0}}
# Names of the factors on the times of the paper's sweeps and of its batches (slowest of many iterations).
SCALES = ("scale", "scale_slowest")


def split_odd_sizes(folder: Path, gpu: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split the paper's sweeps and batches by shape; column ``scale`` names the time factor of a row's table."""
    tables = (paper_rows(folder, gpu), layer_rows(folder, gpu, BATCHED_GEMMS))
    return split_by_shape(pd.concat(table.assign(scale=name) for name, table in zip(SCALES, tables, strict=True)))


class PaperFit(NamedTuple):
    """Results of the paper's tables for a device whose kernels were fitted to other tables.

    Attributes:
        factors: Alignment table.
        batched: Parameters of batched GEMMs.
        older_cases: Slow cases of single GEMMs in the paper's software.
        older_interval: Interval of its single GEMMs.
        report: Errors on held-out rows.
    """

    factors: dict[str, dict[str, float]]
    batched: dict[str, Any]
    older_cases: dict[str, Any]
    older_interval: dict[str, list[float]]
    report: dict[str, Any]


def fit_alignment_table(folder: Path, gpu: str, device: Device, section: dict[str, Any]) -> PaperFit:
    """Fit alignment factors and batched GEMMs to the paper's odd sizes, with the kernels of ``section`` fixed.

    Single GEMMs come from paper_gemm.csv, batched ones from the attention GEMMs of paper_layers.csv. Also free are the
    collector's fixed cost per call and a factor on all times of each table (older library; slowest iteration instead of
    the mean). Batches that fill the device run kernels of their own, which are fitted separately.
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
        *alignment_entries(USUAL_ALIGNMENT_FACTORS, ROLES),
        ("overhead_s", 1e-5, "log"),
        *((name, 1.0, "log") for name in SCALES),
    )

    def predicted(x: Array, chosen: pd.DataFrame) -> Array:
        v = untransform(x, entries)
        base = predict_rows(chosen, {**section, "alignment_factor": factor_table(v)}, rates, "NN")
        timed_s: Array = base * chosen.scale.map(v).to_numpy() + v["overhead_s"]
        return timed_s

    x, _ = fit_vector(lambda x: predicted(x, train), train.latency_s.to_numpy(), transform(entries))
    v = untransform(x, entries)
    times = np.maximum(narrow_train.latency_s - v["overhead_s"], 1e-6) / narrow_train.scale.map(v)
    slow_cases = narrow_cases(narrow_train.assign(latency_s=times), narrow, section, rates)
    plans, least_waves = PLANS[device.architecture], LEAST_WAVES[device.architecture]
    measured_rates = device_rates(find_measured_device(gpu), "fp16", hot=False)  # the memory differs from this device's
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
        "held_out": percentage_errors(predicted(x, single), single.latency_s.to_numpy()),
        "held_out_batches": percentage_errors(
            predict_rows(batches, section, measured_rates, "NN") + kernels.extra_s, batches.latency_s.to_numpy()
        ),
    }
    # Single GEMMs with an odd free dimension were not measured: they take the loss of batched ones, larger by as much
    # as it is for an odd contraction.
    single_loss = v["contracted:2"] / v["contracted:4"] / (v["contracted_batched:2"] / v["contracted_batched:4"])
    v["free:2"] = v["free:4"] * v["free_batched:2"] / v["free_batched:4"] * min(single_loss, 1.0)
    section = {**section, "alignment_factor": factor_table(v)}
    cases, ends, report["older_products"] = fit_older_gemms(folder, gpu, section, measured_rates, v["overhead_s"])
    return PaperFit(section["alignment_factor"], own_batches, cases, ends, report)


def fit_older_gemms(
    folder: Path, gpu: str, section: dict[str, Any], rates: DeviceRates, overhead_s: float
) -> tuple[dict[str, Any], dict[str, list[float]], dict[str, Any]]:
    """Fit the loss of short contractions in the paper's software, and return the errors of its single GEMMs."""
    rows = layer_rows(folder, gpu, [name for name in GEMMS if name not in BATCHED_GEMMS])
    seen, held_out = split_by_shape(rows)
    at_kernel = seen.assign(latency_s=np.maximum(seen.latency_s - overhead_s, 1e-6))
    cases = {"spans": fit_spans(at_kernel, [OLDER_SPANS[gpu]], {**section, "slow_cases": {}}, rates, "NT")}
    predicted = predict_rows(held_out, {**section, "slow_cases": cases}, rates, "NT") + overhead_s
    measured = held_out.latency_s.to_numpy()
    return cases, interval_per_regime(predicted, measured), percentage_errors(predicted, measured)


def refit_alignment(folder: Path) -> None:
    """Fit the alignment factors again with the kernels fixed, and copy them to the records that borrow them."""
    for name, gpu in ALIGNMENT_SOURCES.items():
        record = read_record("gemm", name)
        section = record["parameters"]["dtypes"]["bf16"]
        paper = fit_alignment_table(folder, gpu, load_device(name), section)
        record["provenance"]["sections"]["bf16"]["alignment"] = paper.report
        print(name, json.dumps(paper.report), flush=True)
        for place, content in older_library_section(section, paper).items():
            record[place]["libraries"][PAPER_SECTION] = content
        save_record("gemm", name, _with_table(record, paper.factors, paper.batched), digits=6)
    copy_alignment(folder)


def copy_alignment(_folder: Path) -> None:
    """Copy the alignment factors, as committed, to the records that borrow them."""
    for path in sorted((RECORDS / "gemm").glob("*.json")):
        record = read_record("gemm", path.stem)
        if table := borrowed_table(path.stem, record):
            save_record("gemm", path.stem, _with_table(record, table), digits=6)


def older_library_section(section: dict[str, Any], paper: PaperFit) -> dict[str, dict[str, Any]]:
    """Return the section that prices the paper's rows and its interval, by their place in a record."""
    return {
        "parameters": {"bf16": {**section, "slow_cases": paper.older_cases}},
        "interval": {"bf16": paper.older_interval},
    }


def borrowed_table(name: str, record: dict[str, Any]) -> dict[str, dict[str, float]] | None:
    """Return the alignment table of the donor scaled to the device's SM by 16-bit rates; None without a donor."""
    donor = ALIGNMENT_DONORS.get(record["architecture"])
    if not donor:
        return None
    own, other = (one["parameters"]["dtypes"]["bf16"] for one in (record, read_record("gemm", donor)))
    return borrow_alignment(load_device(name), own, load_device(donor), other)


def _with_table(
    record: dict[str, Any], table: dict[str, dict[str, float]], own_batches: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Put an alignment table, its donor and the parameters of batched GEMMs into every section of a record."""
    donor = ALIGNMENT_DONORS.get(record["architecture"])
    for sections in (record["parameters"]["dtypes"], *record["parameters"]["libraries"].values()):
        for section in sections.values():
            section["alignment_factor"] = table
            if donor:
                section[ALIGNMENT_FROM] = donor
            if own_batches:
                section["batched"] = own_batches
    return record


def refit(data: Path, devices: Sequence[str] = ()) -> None:
    """Fit every GEMM record, or those of some devices."""
    for name in devices or list(dict.fromkeys(source.device for source in SOURCES)):
        device = load_device(name)
        fitted = {source.dtype: fit_source(data, source, device) for source in SOURCES if source.device == name}
        libraries: dict[str, Any] = {}
        intervals: dict[str, Any] = {}
        for dtype, one in fitted.items():
            for library, (section, ends) in one.libraries.items():
                libraries.setdefault(library, {})[dtype] = section
                intervals.setdefault(library, {})[dtype] = ends
        record = {
            "devices": [name, *SAME_CHIP.get(name, ())],
            "architecture": device.architecture,
            "parameters": {"dtypes": {dtype: one.section for dtype, one in fitted.items()}, "libraries": libraries},
            "interval": {"dtypes": {dtype: one.interval for dtype, one in fitted.items()}, "libraries": intervals},
            "provenance": {
                "command": command("gemm", f"--device {name}"),
                "split": "a fifth of whole (n, k) shapes held out",
                "sections": {dtype: one.report for dtype, one in fitted.items()},
            },
        }
        table = borrowed_table(name, record)
        write_record("gemm", name, _with_table(record, table) if table else record, digits=6)


class Fitted(NamedTuple):
    """Result of one source: its section, interval, the same by library, and errors on held-out rows."""

    section: dict[str, Any]
    interval: dict[str, list[float]]
    libraries: dict[str, tuple[dict[str, Any], dict[str, list[float]]]]
    report: dict[str, Any]


def fit_source(folder: Path, source: Source, device: Device) -> Fitted:
    """Fit the section of one dtype to its measured rows."""
    fitted = (_fit_paper if source.table == PAPER else _fit_libraries)(folder, source, device)
    print(device.name, source.dtype, json.dumps(fitted.report), flush=True)
    return fitted


def _fit_paper(folder: Path, source: Source, device: Device) -> Fitted:
    """Fit the paper's sweeps and layers."""
    train, held = split_by_shape(source.rows(folder))
    paper = fit_paper_device(train, source, device)
    rates, measured = device_rates(device, source.dtype, hot=False), held.latency_s.to_numpy()
    predicted = np.full(len(held), paper.overhead_s)
    logs = held.log.where(held.log.isin(paper.logs), "").to_numpy()
    for log, section in {"": paper.section, **paper.logs}.items():
        predicted[logs == log] += predict_rows(held[logs == log], section, rates, source.layout)
    sections = dict(paper.logs)
    report: dict[str, Any] = {
        "source": source.table,
        "rows_fitted": paper.num_fitted,
        "collector_overhead_s": paper.overhead_s,
        "held_out": percentage_errors(predicted, measured),
    }
    is_layer = held.slowest.to_numpy(bool)
    for label, part in (("held_out_sweeps", ~is_layer), ("held_out_layers", is_layer)):
        report[label] = percentage_errors(predicted[part], measured[part])
    usual = paper.section
    if device.architecture in SPANS_OF_BLOCKS:
        # Models run layers, so their section is fitted to blocks; GEMMs timed alone have a section of their own.
        blocks = read_blocks(folder, device, GPUS[device.name])
        seen = set(zip(train.n.tolist(), train.k.tolist(), strict=True))
        is_held_out = np.array([(4 * h, h) not in seen for h in blocks.hidden_size.astype(int)])
        spans = usual["slow_cases"]["spans"][: SPANS_OF_BLOCKS[device.architecture]]
        cases, report["held_out_blocks"] = fit_blocks(blocks, is_held_out, usual, spans, rates)
        sections[GEMMS_ALONE] = usual
        usual = {**usual, "slow_cases": cases}
    ends = interval_per_regime(predicted, measured)
    return Fitted(usual, ends, {name: (own, ends) for name, own in sections.items()}, report)


def _fit_libraries(folder: Path, source: Source, device: Device) -> Fitted:
    """Fit the rows of all libraries together, then those of each library from there on."""
    own_alignment = ALIGNMENT_SOURCES.get(device.name) if source.dtype == "bf16" else None
    borrowed = ALIGNMENT_DONORS.get(device.architecture)
    # All rows of these tables are aligned to at least 64 bytes, where all devices share one table.
    factors = _stored_table(borrowed) if borrowed else factor_table({})
    parameters = FitParameters(
        device.architecture_facts.gemm_tiles, hot=source.hot_cache, alignment=(), cast=source.dtype in NARROW
    )
    rates = device_rates(device, source.dtype, hot=source.hot_cache)
    train, held = split_by_shape(source.rows(folder))
    x = fit(train, parameters, rates, source.layout, factors)
    section = parameters.section(x, factors)
    predicted = predict_rows(held, section, rates, source.layout)
    report: dict[str, Any] = {
        "source": source.table,
        "rows_fitted": min(len(train), FIT_ROWS),
        "held_out": percentage_errors(predicted, held.latency_s.to_numpy()),
    }
    own_batches: dict[str, Any] = {}
    libraries: dict[str, tuple[dict[str, Any], dict[str, list[float]]]] = {}
    if own_alignment:
        paper = fit_alignment_table(folder, own_alignment, device, section)
        factors, report["alignment"] = paper.factors, paper.report
        own_batches = {"batched": paper.batched}
        section |= {"alignment_factor": factors, **own_batches}
        older = older_library_section(section, paper)
        libraries[PAPER_SECTION] = (older["parameters"]["bf16"], older["interval"]["bf16"])
    else:
        report["alignment"] = {"borrowed_from": borrowed}
    for library in sorted(set(train.library)):
        seen, held_out = train[train.library == library], held[held.library == library]
        own = parameters.section(fit(seen, parameters, rates, source.layout, factors, start=x), factors) | own_batches
        guess, measured = predict_rows(held_out, own, rates, source.layout), held_out.latency_s.to_numpy()
        libraries[library] = (own, interval_per_regime(guess, measured))
        report.setdefault("libraries", {})[library] = percentage_errors(guess, measured)
    return Fitted(section, interval_per_regime(predicted, held.latency_s.to_numpy()), libraries, report)


def _stored_table(name: str) -> dict[str, dict[str, float]]:
    """Return the alignment factors of a committed record."""
    table: dict[str, dict[str, float]] = read_record("gemm", name)["parameters"]["dtypes"]["bf16"]["alignment_factor"]
    return table
