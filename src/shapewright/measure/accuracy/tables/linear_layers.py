"""Evaluate linear_layers.parquet: fp16 layer GEMMs of real models over a dense sweep of m, with software of 2024.

All GEMMs of a model at one tensor degree and m were timed in one run, in which power sets one clock: the work of a run
is the sum of its GEMMs, and a run with missing GEMMs counts as unlimited. That software is slower than current
libraries. If a device's record has a section of it, the rows are priced with that; it was fitted to vidur's table, and
its errors on held-out models are in the record's provenance. On other devices current libraries are predicted. On every
device the rows are evaluated a second time with current libraries and one factor per device (the median of measured /
predicted), with intervals widened by the noise between two collectors; nothing of that was fitted to them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.accuracy.chunk import Chunk, split_chunks
from shapewright.measure.accuracy.measured_files import Format
from shapewright.measure.accuracy.tables.gemm import price_gemms

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.hardware.device import Device
    from shapewright.measure.accuracy.chunk import Columns, Prices
    from shapewright.measure.accuracy.context import Context

    Array = NDArray[np.float64]
    Index = NDArray[np.intp] | NDArray[np.int64]

FORMAT = Format(
    numbers={"m": 1, "n": 1, "k": 1, "tensor_parallel": 1},
    labels=("device", "library", "model", "kernel", "dtype"),
    positive=("latency_s",),
)
# Two collections of the same shapes on one device differ by 2 to 10 %; intervals are those of a single one.
_COLLECTOR_NOISE = 1.05
# GEMMs that vidur times in one run of a layer: into and out of attention, into and out of the MLP.
GEMMS_OF_A_RUN = 4


def price(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Price every row, and again with current libraries scaled per device; parts are models and layers."""

    def price_by(library: str, rows: Columns, device: Device, dtype: str) -> Prices:
        m, n, k = (rows.numbers[letter] for letter in "mnk")
        form = context.read_format(dtype, device)
        operation = Gemm(name="gemm", dtype=form.dtype, weight_dtype=form.weight_dtype, m=m, n=n, k=k)
        run_flops = rows.numbers["run_flops"]
        prices = price_gemms(
            operation, device, context, library=library, older_software=not library, run_flops=run_flops
        )
        return form.widen(prices)

    def price_group(rows: Columns, device: Device, words: tuple[str, ...]) -> Prices:
        return price_by(own_library(words[2], device, context), rows, device, words[1])

    columns = replace(columns, numbers=columns.numbers | {"run_flops": _runs_of(columns)})
    scaled: defaultdict[str, list[Chunk]] = defaultdict(list)
    by = ("device", "dtype", "library")
    for rows, device, words, prices in context.price_groups(columns, by, price_group):
        names = (device.name, words[1], words[2])
        parts = rows.labels["model"].join(rows.labels["kernel"])
        yield from split_chunks("linear_layers", names, parts, rows.numbers["latency_s"], prices)
        if num_cut := int(np.isinf(rows.numbers["run_flops"]).sum()):
            context.note(
                f"linear_layers on {device.name}: rows of runs that lack some of their {GEMMS_OF_A_RUN} "
                f"GEMMs, priced at the clock of an unlimited run: {num_cut:,}"
            )
        if own_library(words[2], device, context):
            context.note(
                f"linear_layers on {device.name}: priced by the section of {words[2]!r}, which was fitted to its "
                "table; the record states errors on held-out models"
            )
            today = price_by("", rows, device, words[1])
        else:
            today = prices
        scaled[device.name] += split_chunks("linear_layers/scaled", names, parts, rows.numbers["latency_s"], today)
    for device_name, found in scaled.items():
        ratios = np.concatenate([chunk.measured / chunk.prices.predicted for chunk in found])
        factor = float(np.median(ratios))
        context.note(f"linear_layers/scaled on {device_name}: predictions times {factor:.3f}, the median ratio")
        for chunk in found:
            prices = chunk.prices.scale(factor)
            low, high = prices.low / _COLLECTOR_NOISE, prices.high * _COLLECTOR_NOISE
            yield replace(chunk, prices=prices._replace(low=low, high=high))


def own_library(library: str, device: Device, context: Context) -> str:
    """Return the library if the device's own record has a section of exactly it; empty otherwise."""
    record = context.record("gemm", device)
    return library if record.transfer == "exact" and library in record.parameters["libraries"] else ""


def flops_of_runs(run: Index, kernel: Index, flops: Array) -> Array:
    """Return the work of the run of each row: of each of its kernels once, however often that was measured. [flop]

    A run with missing GEMMs worked longer than its rows show: infinity, which no price exceeds.

    Args:
        run: Number of the run of each row. [rows]
        kernel: Number of its kernel. [rows]
        flops: Its own work. [flop]

    >>> flops = np.array([1.0, 1.0, 4.0, 2.0, 3.0, 2.0])
    >>> flops_of_runs(np.array([0, 0, 0, 0, 0, 1]), np.array([0, 0, 1, 2, 3, 0]), flops)
    array([10., 10., 10., 10., 10., inf])
    """
    pairs, pair_of_row = np.unique(np.stack([run, kernel]), axis=1, return_inverse=True)
    pair_of_row = pair_of_row.reshape(-1)
    mean_flops = np.bincount(pair_of_row, flops) / np.bincount(pair_of_row)
    is_whole = np.bincount(pairs[0]) >= GEMMS_OF_A_RUN
    found: Array = np.where(is_whole, np.bincount(pairs[0], mean_flops), np.inf)[run]
    return found


def _runs_of(columns: Columns) -> Array:
    """Return the work of the run of each row. [flop]"""
    words = [columns.labels[name].codes.astype(float) for name in ("device", "library", "model", "dtype")]
    keys = np.stack([*words, columns.numbers["tensor_parallel"], columns.numbers["m"]])
    run = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
    flops = 2.0 * columns.numbers["m"] * columns.numbers["n"] * columns.numbers["k"]
    return flops_of_runs(run, columns.labels["kernel"].codes, flops)
