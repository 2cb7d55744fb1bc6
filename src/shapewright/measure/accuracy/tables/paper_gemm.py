"""Evaluate paper_gemm.csv: fp16 sweeps of arXiv 2401.14489, odd sizes included, one host synchronization per call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.core.units import TERA, format_seconds
from shapewright.lowering.operations import Gemm
from shapewright.measure.accuracy.chunk import Chunk, split_chunks
from shapewright.measure.accuracy.measured_files import Format
from shapewright.measure.accuracy.tables.gemm import price_gemms

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.measure.accuracy.chunk import Columns, Prices
    from shapewright.measure.accuracy.context import Context
    from shapewright.pricing.calibration.records import CalibrationRecord

FORMAT = Format(numbers={"batch": 1, "m": 1, "n": 1, "k": 1}, labels=("gpu", "sweep"), positive=("tflops",))
PAPER_DTYPE = "fp16"
PAPER_LIBRARY = "pytorch 1.13-2.0"
PAPER_SECTION = "arXiv 2401.14489"
"""Section of a record for the paper's rows; not the name of a library, so that no later version matches it."""
GEMMS_ALONE = f"{PAPER_SECTION}, products alone"
"""Section of a record for GEMMs timed alone, if blocks of the same GEMMs took another time."""


def price(columns: Columns, context: Context) -> Iterator[Chunk]:
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
