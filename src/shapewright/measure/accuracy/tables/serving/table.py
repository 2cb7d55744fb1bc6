"""Evaluate serving_throughput.csv and serving_static.csv, in closed form (optimize.serving.closed_form).

Throughput and times are tables of their own: ``serving_throughput``, ``.../latency`` of whole answers,
``.../first_token`` and ``.../time_per_token``; so are mixtures of experts (``serving_throughput/moe``) and MLPerf,
whose lengths and layouts are assumed (``serving_throughput/mlperf``). Parts are metrics and models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.errors import ShapewrightError
from shapewright.measure.accuracy.chunk import Chunk, Prices
from shapewright.measure.accuracy.tables.serving import mlperf
from shapewright.measure.accuracy.tables.serving.rows import read_served, read_static

if TYPE_CHECKING:
    from shapewright.measure.accuracy.chunk import Columns
    from shapewright.measure.accuracy.context import Context
    from shapewright.measure.accuracy.tables.serving.rows import ServedRow
    from shapewright.optimize.serving.closed_form import LoadTimes
    from shapewright.pricing.servers import Server


def price(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Predict every complete row of serving_throughput.csv."""
    for row in read_served(columns, context):
        yield from chunks_of(row, "serving_throughput", context)


def price_static(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Predict the rows of serving_static.csv: whole batch, time of the prompts, time of a token."""
    for row in read_static(columns, context):
        yield from chunks_of(row, "serving_static", context)


_TABLE_OF = {"output_tokens_per_s": "", "e2e_s": "latency", "ttft_s": "first_token", "tpot_s": "time_per_token"}


def chunks_of(row: ServedRow, table: str, context: Context) -> Iterator[Chunk]:
    """Yield the measured and predicted values of a row, one table for each quantity."""
    try:
        times = row.load.predict(row.instance)
    except ShapewrightError as error:
        context.skipped[str(error)] += 1
        return
    scenario, server = row.instance.scenario, row.server
    kind = "/mlperf" if row.metric.startswith("mlperf") else ""
    name = f"{table}{kind}{'/moe' if scenario.config.is_moe else ''}"
    for quantity, measured in row.measured.items():
        middle, low, high = (quantity_of(one, quantity, row.instance.request.output_len) for one in times)
        if quantity == "output_tokens_per_s":
            low, high = high, low
        model_kind = "moe" if scenario.config.is_moe else "dense"
        if ends := mlperf.INTERVAL[model_kind] if kind else _interval(server, model_kind, quantity):
            low, high = middle * ends[0], middle * ends[1]
        yield Chunk(
            table="/".join(part for part in (name, _TABLE_OF[quantity]) if part),
            device=scenario.device.name,
            dtype=row.instance.format.weight_dtype,
            library=server.name,
            part=f"{row.metric}: {scenario.config.name}" if row.metric else scenario.config.name,
            measured=np.array([measured]),
            prices=Prices(*(np.array([value]) for value in (middle, low, high, np.nan))),
            seconds=np.array([measured if quantity != "output_tokens_per_s" else 1.0 / measured]),
        )


def quantity_of(times: LoadTimes, quantity: str, output_len: int) -> float:
    """Return a predicted quantity: a field of the times, or the time of a whole answer. [s]"""
    if quantity == "e2e_s":
        return times.ttft_s + (output_len - 1) * times.tpot_s
    return float(getattr(times, quantity))


def _interval(server: Server, kind: str, quantity: str) -> tuple[float, float] | None:
    """Return the ends of a 90 % interval relative to the prediction, from errors on held-out rows.

    A time without an interval of its own takes the inverse of the throughput's.
    """
    if quantity == "output_tokens_per_s" or f"{kind}.{quantity}" in server.interval:
        return server.interval.get(kind if quantity == "output_tokens_per_s" else f"{kind}.{quantity}")
    ends = server.interval.get(kind)
    return (1.0 / ends[1], 1.0 / ends[0]) if ends else None
