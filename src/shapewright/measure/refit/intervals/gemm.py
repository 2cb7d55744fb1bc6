"""Interval groups of GEMMs: batched GEMMs, the paper's devices, other libraries, older software, left-out devices.

``mamf.csv`` holds the fastest GEMM found on each of many devices (stas00/ml-engineering @744d01e). It determines no
scatter, but a device's bias: whether its rows are faster or slower than the borrowed record predicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from shapewright.core.dtypes import get_dtype
from shapewright.hardware.device import Device
from shapewright.hardware.loader import find_measured_device, load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.accuracy.chunk import Columns
from shapewright.measure.accuracy.tables.gemm import GEMMS_ALONE, paper_library
from shapewright.measure.accuracy.tables.paper_layers import BATCHED_GEMMS, GEMMS
from shapewright.measure.refit.intervals.left_out import OtherDevices, bias_of, transfer_groups
from shapewright.measure.refit.intervals.residual_intervals import (
    Groups,
    leave_one_out_widening,
    library_groups,
    parts_of,
    pool,
    widen_interval,
)
from shapewright.measure.refit.intervals.rows import (
    ROWS_OF_A_TABLE,
    held_out_rows,
    only_measured,
    paper_gemm_rows,
    price_rows,
    read_table,
    sampled,
    with_labels,
)
from shapewright.prediction.composition.step import ERROR_CORRELATION
from shapewright.pricing.calibration.records import CalibrationRecord, list_records, load_record
from shapewright.pricing.calibration.residual import section_name
from shapewright.pricing.gemm.price import price_gemm

# The paper's A100, whose GEMMs other tables have too.
A100_OF_PAPER = "a100-sxm-40gb"
# Regimes of the paper's rows: sweeps of a millisecond, layers of up to a second; a hundred held-out rows per table.
PAPER_EDGES_S = (1e-3, 1e-2, 1e-1)
PAPER_FEWEST_ROWS = 60
# Tables of GEMMs inside layers, which count separately from GEMMs timed alone.
BLOCKS = ("paper_layers/mlp", "paper_layers/mlp-flash")
# A block is two GEMMs of nearly equal time. Errors with this correlation add up to less than twice one of them, so that
# the logarithmic error of a GEMM is larger than its block's by this factor.
GEMM_OF_BLOCK = np.sqrt(2.0 / (1.0 + ERROR_CORRELATION))


def gemm_groups(folder: Path) -> tuple[Groups, dict[str, Any]]:
    """Return the interval groups of GEMMs."""
    groups: Groups = {}
    paper = pd.concat(list(paper_gemm_rows(folder)), ignore_index=True)
    paper["is_block"] = paper.table.isin(BLOCKS)
    ratio = paper.measured / paper.predicted
    paper["measured"] = paper.predicted * ratio.where(~paper.is_block, ratio**GEMM_OF_BLOCK)
    for (device, is_batch), rows in paper.groupby(["device", "is_batch"]):
        record = load_record("gemm", load_device(str(device)))
        section = next(iter(record.parameters["dtypes"]))
        sections = {section: rows}
        if is_batch:
            sections = {f"{section}, batches": rows}
        elif (alone := paper_library(record, GEMMS_ALONE)) != (inside := paper_library(record)):
            names = section_name(section, alone), section_name(section, inside)
            sections = {names[0]: rows[~rows.is_block], names[1]: rows}
        elif alone:  # a section of the paper's software, next to those of others
            sections = {section_name(section, alone): rows}
        for name, part in sections.items():
            origin = part.table.str.split("/").str[0].where(~part.is_block, BLOCKS[0])
            parts = parts_of(part.assign(origin=origin), ["origin"])
            groups[f"own/{record.id}/{name}"] = pool(
                list(parts.values()), edges_s=PAPER_EDGES_S, fewest=PAPER_FEWEST_ROWS
            )
    a100 = paper[paper.device == A100_OF_PAPER]

    held_out = held_out_rows(folder, "gemm")
    swapped = pd.concat(other_library_rows(held_out), ignore_index=True)
    swapped = with_gemm_formats(swapped)
    groups |= library_groups(swapped)

    # Without a library name: as software that no record has a section of.
    layers = with_labels(read_table(folder, "linear_layers"), library="")
    older = price_rows("linear_layers", layers)
    older = older[older.table == "linear_layers"].assign(origin=older.part.str.split().str[0])
    older = pd.concat([older, a100[~a100.is_batch].assign(origin=a100.table.str.split("/").str[0])])
    parts = parts_of(older, ["origin"])
    groups["older software"] = widen_interval(pool(list(parts.values())), leave_one_out_widening(parts))

    far = borrowed_rows(folder)
    far = with_gemm_formats(far)
    gemms = borrowed_paper_rows(folder)
    # Devices that no other table has; fp16 and bf16 share their kernels and their parameters.
    own_devices = gemms[~gemms.is_batch & (gemms.device != A100_OF_PAPER)].assign(format="bf16", format_family="bf16")
    others = OtherDevices(same=best_rate_biases(folder))
    groups |= transfer_groups("gemm", pd.concat([far, own_devices], ignore_index=True), others)
    batches = transfer_groups("gemm", gemms[gemms.is_batch].assign(format="batches", format_family="batches"), others)
    groups |= {name: group for name, group in batches.items() if "/batches" in name}
    return groups, {}


def with_gemm_formats(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with the element format by which groups are named."""
    formats = rows.dtype.map(lambda word: get_dtype(word).name)
    return rows.assign(format=formats, format_family=formats)


@cache
def borrowed_paper_rows(folder: Path) -> pd.DataFrame:
    """Return the paper's GEMMs, priced uncalibrated, with ``is_batch``."""
    sweeps = read_table(folder, "paper_gemm")
    is_batch = sweeps.numbers["batch"] > 1.0
    frames = [
        price_rows("paper_gemm", sweeps.take(is_batch == chosen), uncalibrated=True).assign(is_batch=chosen)
        for chosen in (False, True)
    ]
    layers = read_table(folder, "paper_layers")
    for name in GEMMS:
        rows = only_measured(layers.take(layers.numbers[f"{name}_tflops"] > 0.0), f"{name}_tflops")
        frames.append(price_rows("paper_layers", rows, uncalibrated=True).assign(is_batch=name in BATCHED_GEMMS))
    return pd.concat(frames, ignore_index=True)


def prior_biases(folder: Path) -> OtherDevices:
    """Return the biases of devices in 16-bit GEMMs, by distance class, as a prior for other kinds of operations."""
    found: dict[str, dict[str, float]] = {"generic": {}} | best_rate_biases(folder)
    far, paper = borrowed_rows(folder).query("dtype == 'bf16'"), borrowed_paper_rows(folder).query("not is_batch")
    for place, table in (("generic", far), ("foreign", paper)):
        for device, rows in table.groupby("device"):
            if load_record("gemm", load_device(str(device)).without_calibration).distance == place:
                found[place][str(device)] = bias_of((rows.predicted.to_numpy(), rows.measured.to_numpy()))
    return OtherDevices(prior=found)


@cache
def borrowed_rows(folder: Path) -> pd.DataFrame:
    """Return held-out GEMMs of the other tables, priced uncalibrated."""
    held_out = sampled(held_out_rows(folder, "gemm"), ROWS_OF_A_TABLE)
    return price_rows("gemm", held_out, uncalibrated=True, as_new_shapes=True)


def other_library_rows(columns: Columns) -> Iterator[pd.DataFrame]:
    """Yield the rows of each library, priced with the section of every other library of its device."""
    libraries = columns.labels["library"].values
    devices = columns.labels["device"].values
    for device in sorted(set(devices)):
        here = sorted(set(libraries[devices == device]))
        for measured, priced in product(here, here):
            if measured != priced:
                chosen = columns.take((devices == device) & (libraries == measured))
                yield price_rows("gemm", with_labels(chosen, library=priced), as_new_shapes=True)


# Only 16-bit GEMMs: other formats were timed without the casts that records contain.
_FORMAT = "bf16"
# Donor for chips of other vendors, if none of theirs was measured.
_FOREIGN_DONOR = "a100-sxm-80gb"


def best_rate_biases(folder: Path) -> dict[str, dict[str, float]]:
    """Return ln(measured / predicted) of each device's best GEMM, by distance class of the donor and device.

    A sibling's value is relative to its donor's own best GEMM, since best GEMMs are at one end of a record's errors;
    the nearest listed device of the donor's architecture replaces one that is not listed. Chips of other vendors are
    priced by A100's record, as if none of theirs had been measured.
    """
    rows = pd.read_csv(folder / "mamf.csv")
    rows = rows[(rows.dtype == _FORMAT) & rows.mamf_tflops.notna()]
    found: dict[str, dict[str, float]] = {"architecture": {}, "foreign": {}}
    own: dict[str, float] = {}
    for row in rows.itertuples():
        device = find_measured_device(str(row.accelerator))
        record = load_record("gemm", device)
        if device.vendor != "NVIDIA":
            donor = next(each for each in list_records("gemm") if each.device == _FOREIGN_DONOR)
            record = replace(donor, transfer="generic", distance_override="foreign", recipient=device.name)
        bias = _bias(row, device, record)
        if record.transfer == "exact":
            own[device.architecture] = bias
        elif record.distance in found:
            found[record.distance][device.name] = bias
    for name in found["architecture"]:
        found["architecture"][name] -= own[load_record("gemm", find_measured_device(name)).architecture]
    return found


def _bias(row: Any, device: Device, record: CalibrationRecord) -> float:
    operation = Gemm(name="best", dtype=_FORMAT, m=int(row.M), n=int(row.N), k=int(row.K))
    measured_s = operation.flops / (float(row.mamf_tflops) * 1e12)
    return float(np.log(measured_s / price_gemm(operation, device, record).time_s))
