"""Evaluate gemm_fp32.parquet: fp32 layers and batched GEMMs, one event-timed call each, so with its launch.

The launch costs 15 to 90 us, more than most kernels. It belongs to the collector, not to the kernel: its cost is that
which the device's record found, or the mean of all measured devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.errors import MeasuredFileError
from shapewright.core.units import format_seconds
from shapewright.lowering.operations import Gemm
from shapewright.measure.accuracy.chunk import Chunk, Labels, prices_of, split_chunks
from shapewright.measure.accuracy.measured_files import Format
from shapewright.pricing.calibration.records import FP32_GEMM, list_records
from shapewright.pricing.gemm.price import price_gemm
from shapewright.pricing.price import roofline_s

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.measure.accuracy.chunk import Columns, Prices
    from shapewright.measure.accuracy.context import Context

FORMAT = Format(
    numbers={"batch": 1, "m": 1, "n": 1, "k": 1}, labels=("device", "operation", "dtype"), positive=("latency_s",)
)
LIBRARY = "pytorch 2.1"
# Layout of each operation: y = x W^T + b, and A B.
_LAYOUTS = {"linear": "NT", "bmm": "NN"}


def price(columns: Columns, context: Context) -> Iterator[Chunk]:
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
        parts = Labels(np.zeros(rows.num_rows, dtype=np.int64), (words[1],))
        names = (device.name, words[2], LIBRARY)
        yield from split_chunks("gemm_fp32", names, parts, rows.numbers["latency_s"], prices)


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
