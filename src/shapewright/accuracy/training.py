"""published_training_throughput.csv: tokens per second and device that vendors and labs published.

Each row that accuracy.training_rows can complete is priced as the generation of software that its source names would
run it. Here the bias is of tokens/s: above zero means promising too much. Rows of mixtures of experts are a table of
their own, ``published_training_throughput/moe``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shapewright.accuracy.chunk import Chunk, Prices
from shapewright.accuracy.training_rows import read_runs
from shapewright.adding_up import add_up
from shapewright.errors import ShapewrightError
from shapewright.predict import predict

if TYPE_CHECKING:
    from shapewright.accuracy.columns import Columns
    from shapewright.accuracy.context import Context
    from shapewright.predict import Prediction


def price(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Predict every complete row; the library is the first word of the source, parts are sources and models."""
    for run in read_runs(columns, context, has_experts=None):
        try:
            prediction = predict(
                run.config,
                device=context.priced(run.device),
                workload=run.workload,
                layout=run.layout,
                uncalibrated=context.uncalibrated,
                software=run.software,
            )
        except ShapewrightError as error:
            context.skipped[str(error)] += 1
            continue
        yield Chunk(
            table=f"published_training_throughput{'/moe' if run.config.is_moe else ''}",
            device=run.device.name,
            dtype=run.workload.dtype,
            library=run.source.split(" ")[0],
            part=f"{run.source}: {run.config.name}",
            measured=np.array([run.tokens_per_s_per_device]),
            prices=_prices_of(prediction),
            seconds=np.array([run.step_s]),
        )


def _prices_of(prediction: Prediction) -> Prices:
    """Tokens per second and device; the longest step makes the lowest of them."""
    tokens = prediction.tokens_per_step / prediction.layout.num_devices
    bounds = [
        replace(entry, price=replace(entry.price, time_s=entry.price.roofline_s)) for entry in prediction.operations
    ]
    roofline_s = add_up(bounds, prediction.config, prediction.workload, prediction.layout).step_s
    return Prices(
        predicted=np.array([tokens / prediction.step_time_s]),
        low=np.array([tokens / prediction.step_time_high_s]),
        high=np.array([tokens / max(prediction.step_time_low_s, 1e-12)]),
        roofline=np.array([tokens / roofline_s]),
    )
