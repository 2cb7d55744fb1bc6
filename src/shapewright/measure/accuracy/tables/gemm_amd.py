"""Evaluate gemm_amd.parquet: the fastest kernel of a tuning run for each GEMM on AMD's matrix cores, launch excluded.

A library without tuning is slower: these are upper ends of what it reaches.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lowering.operations import Gemm
from shapewright.measure.accuracy.chunk import Chunk, split_chunks
from shapewright.measure.accuracy.measured_files import Format
from shapewright.measure.accuracy.tables.gemm import price_gemms

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.measure.accuracy.chunk import Columns, Prices
    from shapewright.measure.accuracy.context import Context

LIBRARY = "aiter tuned"
FORMAT = Format(
    numbers={"batch": 1, "m": 1, "n": 1, "k": 1},
    labels=("device", "library", "kernel", "dtype", "scale", "weights_shuffled"),
    positive=("latency_s",),
)


def section_of(scale: str, shuffled: object) -> str:
    """Return the section of a record for a scale of the operands and a layout of the weights.

    >>> section_of("none", False), section_of("per_token", "true")
    ('aiter tuned, none', 'aiter tuned, per_token, shuffled')
    """
    return f"{LIBRARY}, {scale}{', shuffled' if str(shuffled).casefold() in ('true', '1') else ''}"


def price(columns: Columns, context: Context) -> Iterator[Chunk]:
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

    by = ("device", "library", "dtype", "scale", "weights_shuffled")
    for rows, device, words, prices in context.price_groups(columns, by, price_group):
        names = (device.name, words[2], f"{words[1]}, {words[3]}")
        yield from split_chunks("gemm_amd", names, rows.labels["kernel"], rows.numbers["latency_s"], prices)
    if columns.num_rows:
        context.note("gemm_amd: the fastest of all kernels tried; a library without tuning is slower")
