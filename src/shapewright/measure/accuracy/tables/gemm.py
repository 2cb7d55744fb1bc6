"""Evaluate tables of GEMMs.

- gemm.parquet: y[m,n] = x[m,k] W[n,k]^T as called by torch.nn.functional.linear, medians without launch.
- gemm_amd.parquet: the fastest kernel of a tuning run for each GEMM on AMD's matrix cores, launch excluded. A library
  without tuning is slower: these are upper ends of what it reaches.
- gemm_fp32.parquet: fp32 layers and batched GEMMs, one event-timed call each, so with its launch of 15 to 90 us, more
  than most kernels take. It belongs to the collector, not to the kernel: its cost is that which the device's record
  found, or the mean of all measured devices.
- paper_gemm.csv: fp16 sweeps of arXiv 2401.14489, odd sizes included, one host synchronization per call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.errors import MeasuredFileError
from shapewright.core.units import TERA, format_seconds
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.accuracy.chunk import Alternatives, Chunk, prices_of, split_chunks
from shapewright.measure.accuracy.measured_files import Format
from shapewright.pricing.calibration.records import FP32_GEMM, list_records
from shapewright.pricing.gemm.price import price_gemm
from shapewright.pricing.price import roofline_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.hardware.device import Device
    from shapewright.measure.accuracy.chunk import Columns, Prices
    from shapewright.measure.accuracy.context import Context

    Array = NDArray[np.float64]
    from shapewright.pricing.calibration.records import CalibrationRecord

FORMAT = Format(
    numbers={"m": 1, "n": 1, "k": 1}, labels=("device", "library", "kernel", "dtype"), positive=("latency_s",)
)

SAME_SIZE_FACTOR = 1.03
"""Shapes whose parameter counts differ by less than this factor are alternatives."""
# Above any m: combines size and m in one number.
_MOST_TOKENS = 2.0**32


def price_gemms(
    operation: Gemm,
    device: Device,
    context: Context,
    *,
    library: str = "",
    extra_s: float = 0.0,
    older_software: bool = False,
    run_flops: Array | None = None,
) -> Prices:
    """Price arrays of GEMMs as a benchmark times them.

    Args:
        library: Library and version, as measured files name it.
        extra_s: Cost of the measurement, added to each. [s]
        older_software: The rows were timed with libraries older than the record's.
        run_flops: Work of the runs in which they were timed, if known. [flop]
    """
    hot = device.architecture_facts.benchmarks_run_from_cache  # elsewhere operands are cold, as in a model
    record = context.record("gemm", device, older_software=older_software)
    context.note_library("gemm", library, record)
    price = price_gemm(operation, device, record, hot_cache=hot, library=library, run_flops=run_flops)
    floor = roofline_s(operation.flops, operation.num_bytes, device, operation.dtype)
    return prices_of(price, floor, extra_s=extra_s)


def price(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Price every row; parts are kernels."""

    def price_group(rows: Columns, device: Device, words: tuple[str, ...]) -> Prices:
        m, n, k = (rows.numbers[letter] for letter in "mnk")
        form = context.read_format(words[1], device)
        operation = Gemm(name="gemm", dtype=form.dtype, weight_dtype=form.weight_dtype, m=m, n=n, k=k)
        return form.widen(price_gemms(operation, device, context, library=words[2]))

    for rows, device, words, prices in context.price_groups(columns, ("device", "dtype", "library"), price_group):
        names = (device.name, words[1], words[2])
        alternatives = _same_size_weights(rows)
        yield from split_chunks(
            "gemm", names, rows.labels["kernel"], rows.numbers["latency_s"], prices, alternatives=alternatives
        )


def _same_size_weights(rows: Columns) -> Alternatives:
    """Group GEMMs of equal m with weights of the same size within 3 %: shapes that a layer could have."""
    m, n, k = (rows.numbers[letter] for letter in ("m", "n", "k"))
    size = np.floor(np.log(n * k) / np.log(SAME_SIZE_FACTOR))
    return Alternatives(size * _MOST_TOKENS + m, 1.0 * n * k)


AMD_LIBRARY = "aiter tuned"
AMD_FORMAT = Format(
    numbers={"batch": 1, "m": 1, "n": 1, "k": 1},
    labels=("device", "library", "kernel", "dtype", "scale", "weights_shuffled", "out_dtype"),
    positive=("latency_s",),
)
WIDE_OUTPUT = "fp32"
"""Format of outputs that are not priced: at equal sizes kernels that write it take a third longer than in 16 bits."""


def section_of(scale: str, shuffled: object) -> str:
    """Return the section of a record for a scale of the operands and a layout of the weights.

    >>> section_of("none", False), section_of("per_token", "true")
    ('aiter tuned, none', 'aiter tuned, per_token, shuffled')
    """
    return f"{AMD_LIBRARY}, {scale}{', shuffled' if str(shuffled).casefold() in ('true', '1') else ''}"


def price_amd(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Price every row; libraries name the scale, parts are kernels."""

    def price_group(rows: Columns, device: Device, words: tuple[str, ...]) -> Prices:
        sizes = {letter: rows.numbers[letter] for letter in ("m", "n", "k", "batch")}
        form = context.read_format(words[2], device)
        operation = Gemm(name="gemm", dtype=form.dtype, weight_dtype=form.weight_dtype, **sizes)  # type: ignore[arg-type]
        # A format that was tuned for one scale only has no section by that name: its own section prices it.
        name = section_of(words[3], words[4])
        record = context.record("gemm", device)
        known = form.dtype in record.parameters["libraries"].get(name, {})
        return form.widen(price_gemms(operation, device, context, library=name if known else ""))

    is_wide = columns.labels["out_dtype"].values == WIDE_OUTPUT
    columns = context.skip_rows(columns, is_wide, f"out_dtype is {WIDE_OUTPUT}: GEMMs are priced with 16-bit outputs")
    by = ("device", "library", "dtype", "scale", "weights_shuffled")
    for rows, device, words, prices in context.price_groups(columns, by, price_group):
        names = (device.name, words[2], f"{words[1]}, {words[3]}")
        yield from split_chunks("gemm_amd", names, rows.labels["kernel"], rows.numbers["latency_s"], prices)
    if columns.num_rows:
        context.note("gemm_amd: the fastest of all kernels tried; a library without tuning is slower")


FP32_FORMAT = Format(
    numbers={"batch": 1, "m": 1, "n": 1, "k": 1}, labels=("device", "operation", "dtype"), positive=("latency_s",)
)
FP32_LIBRARY = "pytorch 2.1"
# Layout of each operation: y = x W^T + b, and A B.
_LAYOUTS = {"linear": "NT", "bmm": "NN"}


def price_fp32(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Price every row; parts are operations."""

    def price_group(rows: Columns, device: Device, words: tuple[str, ...]) -> Prices:
        operation = words[1]
        if operation not in _LAYOUTS:
            raise MeasuredFileError(f"unknown operation {operation!r}; known are {', '.join(_LAYOUTS)}")
        dtype = context.read_format(words[2], device).dtype
        sizes = {letter: rows.numbers[letter] for letter in ("m", "n", "k", "batch")}
        gemms = Gemm(name="gemm", dtype=dtype, layout=_LAYOUTS[operation], **sizes)  # type: ignore[arg-type]
        found = price_gemm(gemms, device, context.record(FP32_GEMM if dtype == "fp32" else "gemm", device))
        prices = prices_of(found, roofline_s(gemms.flops, gemms.num_bytes, device, dtype))
        launch_s, low, high = find_launch(operation, device)
        context.note(f"gemm_fp32 on {device.name}: {format_seconds(launch_s)} added per {operation} for its launch")
        return prices.add(launch_s, low * launch_s, high * launch_s)

    for rows, device, words, prices in context.price_groups(columns, ("device", "operation", "dtype"), price_group):
        names = (device.name, words[2], FP32_LIBRARY)
        yield from split_chunks("gemm_fp32", names, words[1], rows.numbers["latency_s"], prices)


def find_launch(operation: str, device: Device) -> tuple[float, float, float]:
    """Return the collector's launch cost on a device [s], and the ends of its spread as factors.

    Args:
        operation: A key of ``collector_launch_s`` of the records.
        device: The device; without a record of its own it has the geometric mean, and the widest spread, of all.
    """
    records = list_records(FP32_GEMM)
    own = [record for record in records if device.name in record.devices] or records
    reports = [record.provenance["sections"]["fp32"] for record in own]
    costs = np.array([report["collector_launch_s"][operation] for report in reports])
    spreads = np.array([report["collector_launch_spread"][operation] for report in reports])
    typical = float(np.exp(np.log(costs).mean()))
    low, high = spreads.min(axis=0)[0], spreads.max(axis=0)[1]
    if len(reports) > 1:
        low, high = low * costs.min() / typical, high * costs.max() / typical
    return typical, float(low), float(high)


PAPER_FORMAT = Format(numbers={"batch": 1, "m": 1, "n": 1, "k": 1}, labels=("gpu", "sweep"), positive=("tflops",))
PAPER_DTYPE = "fp16"
PAPER_LIBRARY = "pytorch 1.13-2.0"
PAPER_SECTION = "arXiv 2401.14489"
"""Section of a record for the paper's rows; not the name of a library, so that no later version matches it."""
GEMMS_ALONE = f"{PAPER_SECTION}, GEMMs alone"
"""Section of a record for GEMMs timed alone, if blocks of the same GEMMs took another time."""


def price_paper(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Price every row; parts are sweeps."""

    def price_group(rows: Columns, device: Device, _: tuple[str, ...]) -> Prices:
        m, n, k, batch = (rows.numbers[name] for name in ("m", "n", "k", "batch"))
        operation = Gemm(name="gemm", dtype=PAPER_DTYPE, layout="NN", m=m, n=n, k=k, batch=batch)
        overhead_s = noted_overhead_s("paper_gemm", device, context)
        library = paper_library(context.record("gemm", device), GEMMS_ALONE)
        return price_gemms(operation, device, context, library=library, extra_s=overhead_s, older_software=True)

    for rows, device, _, prices in context.price_groups(columns, ("gpu",), price_group):
        numbers = rows.numbers
        flops = 2.0 * numbers["batch"] * numbers["m"] * numbers["n"] * numbers["k"]
        names = (device.name, PAPER_DTYPE, PAPER_LIBRARY)
        yield from split_chunks("paper_gemm", names, rows.labels["sweep"], flops / (numbers["tflops"] * TERA), prices)
    if columns.num_rows:
        context.note("paper_gemm: bmm_* rows are the slowest of 100-200 iterations, the others means")


def paper_library(record: CalibrationRecord, *nearest: str) -> str:
    """Return the library of a record that prices the paper's rows: the first known of ``nearest``, or its section.

    Two logs of one device differ in the sizes at which its library switches kernels, for no recorded reason.
    """
    known = record.parameters["libraries"]
    return next((name for name in (*nearest, PAPER_SECTION) if name in known), "")


def noted_overhead_s(table: str, device: Device, context: Context) -> float:
    """Return the paper's synchronization cost per call on a device, and note it. [s]"""
    overhead_s = collector_overhead_s(context.record("gemm", device))
    origin = "as fitted with its record" if overhead_s else "unknown from its record"
    words = f"{format_seconds(overhead_s)} added per call for the collector's synchronization"
    context.note(f"{table} on {device.name}: {words}, {origin}")
    return overhead_s


def collector_overhead_s(record: CalibrationRecord) -> float:
    """Return the fixed cost per call found by the fit of the paper's sweeps, 0 if there is none. [s]"""
    for section in record.provenance.get("sections", {}).values():
        for place in (section, section.get("alignment", {})):
            if place.get("collector_overhead_s"):
                return float(place["collector_overhead_s"])
    return 0.0
