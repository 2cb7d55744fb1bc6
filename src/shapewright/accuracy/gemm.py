"""gemm.parquet: y[m,n] = x[m,k] W[n,k]^T as torch.nn.functional.linear calls it, medians without launch cost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from shapewright.accuracy.chunk import Alternatives, Chunk, prices_of, split_chunks
from shapewright.accuracy.read import Format
from shapewright.operations import Gemm
from shapewright.perf.gemm import price_gemm
from shapewright.perf.roofline import roofline_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.accuracy.chunk import Prices
    from shapewright.accuracy.columns import Columns
    from shapewright.accuracy.context import Context
    from shapewright.hardware import Device

    Array = NDArray[np.float64]

FORMAT = Format(
    numbers={"m": 1, "n": 1, "k": 1}, labels=("device", "library", "kernel", "dtype"), positive=("latency_s",)
)

# A benchmark repeats one product, whose operands these families keep in a last-level cache larger than their memory
# bandwidth can hide: L40S reaches 3 TB/s on 0.86 TB/s of memory. Others are priced with cold operands, as in a model.
HOT_CACHE_ARCHITECTURES = ("ada", "blackwell-consumer")

SAME_SIZE_FACTOR = 1.03
"""Shapes whose numbers of parameters differ by less than this factor are alternatives to one another."""
# Above any m: makes one number of a size and m.
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
    """Price arrays of products as a benchmark would time them.

    Args:
        operation: Products; dims are arrays.
        device: The device.
        context: Says which record to use.
        library: Library and version, as measured files name it.
        extra_s: Cost of the measurement itself, added to each. [s]
        older_software: The rows were timed with libraries older than the record's.
        run_flops: Work of the runs that they were timed in, if that is known. [flop]
    """
    hot = device.architecture in HOT_CACHE_ARCHITECTURES
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
        rivals = _weights_alike(rows)
        yield from split_chunks(
            "gemm", names, rows.labels["kernel"], rows.numbers["latency_s"], prices, alternatives=rivals
        )


def _weights_alike(rows: Columns) -> Alternatives:
    """Products of as many tokens with weights of the same size within 3 %: shapes that a layer could have."""
    m, n, k = (rows.numbers[letter] for letter in ("m", "n", "k"))
    size = np.floor(np.log(n * k) / np.log(SAME_SIZE_FACTOR))
    return Alternatives(size * _MOST_TOKENS + m, 1.0 * n * k)
