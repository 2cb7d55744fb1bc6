"""linear_layers.parquet: fp16 layer products of real models over a dense sweep of m, timed with the software of 2024.

That software is slower than today's, which is what is predicted; so the rows are judged twice: as they are, and after
one factor per device (the median of measured / predicted) with intervals wider by the noise between two collectors.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shapewright.accuracy.chunk import Chunk, split_chunks
from shapewright.accuracy.columns import Labels, group_rows
from shapewright.accuracy.gemm import price_gemms
from shapewright.accuracy.read import Format
from shapewright.operations import Gemm

if TYPE_CHECKING:
    from shapewright.accuracy.chunk import Prices
    from shapewright.accuracy.columns import Columns
    from shapewright.accuracy.context import Context
    from shapewright.hardware import Device

FORMAT = Format(
    numbers={"m": 1, "n": 1, "k": 1},
    labels=("device", "library", "model", "kernel", "dtype"),
    positive=("latency_s",),
)
# Two collections of the same shapes on the same device differ by 2 to 10 %; intervals are those of one of them.
_COLLECTOR_NOISE = 1.05


def price(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Price every row, then scale per device; parts are models and layers."""

    def price_group(rows: Columns, device: Device, words: tuple[str, ...]) -> Prices:
        dims = {letter: rows.numbers[letter] for letter in ("m", "n", "k")}
        form = context.read_format(words[1], device)
        operation = Gemm(name="gemm", dtype=form.dtype, weight_dtype=form.weight_dtype, layout="NT", **dims)  # type: ignore[arg-type]
        return form.widen(price_gemms(operation, device, context, older_software=True))

    chunks: defaultdict[str, list[Chunk]] = defaultdict(list)
    by = ("device", "dtype", "library")
    for rows, device, words, prices in context.price_groups(columns, by, price_group):
        names = (device.name, words[1], words[2])
        parts = join_labels(rows.labels["model"], rows.labels["kernel"])
        for chunk in split_chunks("linear_layers", names, parts, rows.numbers["latency_s"], prices):
            chunks[device.name].append(chunk)
            yield chunk
    for device_name, found in chunks.items():
        ratios = np.concatenate([chunk.measured / chunk.prices.predicted for chunk in found])
        factor = float(np.median(ratios))
        context.note(f"linear_layers/scaled on {device_name}: predictions times {factor:.3f}, the median ratio")
        for chunk in found:
            scaled = chunk.prices.scale(factor)
            low, high = scaled.low / _COLLECTOR_NOISE, scaled.high * _COLLECTOR_NOISE
            yield replace(chunk, table="linear_layers/scaled", prices=scaled._replace(low=low, high=high))


def join_labels(first: Labels, second: Labels) -> Labels:
    """Two columns of words as one."""
    words: list[str] = []
    codes = np.zeros(len(first.codes), dtype=np.int64)
    for pair, index in group_rows([first, second], len(first.codes)):
        codes[index] = len(words)
        words.append(" ".join(pair))
    return Labels(codes, tuple(words))
