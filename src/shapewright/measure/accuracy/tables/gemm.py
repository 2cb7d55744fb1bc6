"""Evaluate gemm.parquet: y[m,n] = x[m,k] W[n,k]^T as called by torch.nn.functional.linear, medians without launch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from shapewright.lowering.operations import Gemm
from shapewright.measure.accuracy.chunk import Alternatives, Chunk, prices_of, split_chunks
from shapewright.measure.accuracy.measured_files import Format
from shapewright.pricing.gemm.price import price_gemm
from shapewright.pricing.price import roofline_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.hardware import Device
    from shapewright.measure.accuracy.chunk import Columns, Prices
    from shapewright.measure.accuracy.context import Context

    Array = NDArray[np.float64]

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
        operation: GEMMs; dims are arrays.
        device: The device.
        context: Selects the record.
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
