"""Loads of MLPerf inference (closed division, v5.1): lengths, limits on latency, and the layout of a submission.

Results state neither the length of prompts nor the layout. Mean lengths are those of the data set; the layout is the
one that is predicted to serve most, as submitters tune it. A server scenario is the largest load whose 99 % quantiles
of first token and time per token keep the limits of the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.core.errors import ShapewrightError, WorkloadError
from shapewright.lowering.checks import validate_layout
from shapewright.measure.accuracy.tables.published_rows import UnusableRowError
from shapewright.optimize.serving.closed_form import Load, LoadTimes, queued
from shapewright.optimize.serving.point import Instance
from shapewright.optimize.serving.request import ServingRequest
from shapewright.optimize.serving.steady_loads import within_limits
from shapewright.prediction.scenario import Scenario
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shapewright.hardware.device import Device
    from shapewright.models.read import Model
    from shapewright.optimize.serving.request import ServingFormat
    from shapewright.pricing.servers import Server


class _Task(NamedTuple):
    """A model with its data set.

    Attributes:
        prompt_len: Mean tokens of a prompt.
        output_len: Mean tokens of an answer, where a row states none.
        limits_s: Limits of first token and time per token, by scenario. [s]
    """

    prompt_len: int
    output_len: int
    limits_s: Mapping[str, tuple[float, float]]


# Recalled from MLCommons: pages on Llama 3.1 405B, Llama 3.1 8B and DeepSeek-R1 (2025) and the rules of the round.
# Assumed: prompts of OpenOrca and of Mixtral's mixture are as long as their answers; summaries end at 128 tokens.
_TASKS = {
    "llama-2-70b": _Task(294, 294, {"server": (2.0, 0.2), "interactive": (0.45, 0.04)}),
    "llama-3.1-405b": _Task(9400, 680, {"server": (6.0, 0.175), "interactive": (4.5, 0.08)}),
    "llama-3.1-8b": _Task(778, 128, {"server": (2.0, 0.1), "interactive": (0.5, 0.03)}),
    "mixtral-8x7b": _Task(145, 145, {"server": (2.0, 0.2)}),
    "deepseek-v3": _Task(800, 3880, {"server": (2.0, 0.08)}),
}
INTERVAL = {"dense": (0.6, 1.4), "moe": (0.35, 1.1)}
"""5 % and 95 % quantile of measured / predicted throughput of 90 rows. No row is fitted, but the quantiles are those of
the rows that they are judged on."""
_REQUESTS_PER_DEVICE = 3000.0
"""Enough for a steady state, as runs of ten minutes are."""
_MOST_DEVICES = 8


def make_instance(
    model: Model,
    device: Device,
    layout: ParallelLayout,
    formats: ServingFormat,
    server: Server,
    prompt_len: int,
    output_len: int,
) -> Instance:
    """Return an instance with the defaults of a server."""
    workload = Workload(
        phase="decode",
        dtype=formats.dtype,
        weight_dtype=formats.weight_dtype,
        kv_cache_dtype=formats.kv_cache_dtype,
        expert_kernel="as-16-bit",
        attention="flash",
    )
    request = ServingRequest(
        prompt_len=prompt_len,
        output_len=max(output_len, 2),
        server=server,
        memory_fraction=server.memory_fraction,
        block_tokens=server.block_tokens,
    )
    return Instance(Scenario(model=model, device=device, workload=workload, layout=layout), formats, request)


def best_load(
    model: Model, device: Device, formats: ServingFormat, server: Server, metric: str, numbers: Mapping[str, float]
) -> tuple[Instance, Load]:
    """Return the instance that serves most on the devices of a row, and their load together.

    Args:
        metric: ``mlperf_offline``, ``mlperf_server`` or ``mlperf_interactive``.
        numbers: num_gpus, and output_len where it is stated.

    Raises:
        UnusableRowError: lengths or limits are not known.
        WorkloadError: the model fits on no layout.
    """
    scenario, task = metric.partition("_")[2], _TASKS.get(model.config.name)
    if task is None or (scenario != "offline" and scenario not in task.limits_s):
        raise UnusableRowError(f"{metric}: lengths and limits of {model.config.name} are not known")
    devices = round(numbers["num_gpus"])
    answer = task.output_len if np.isnan(numbers["output_len"]) else round(numbers["output_len"])
    found: list[tuple[float, Instance, Load]] = []
    for layout in _layouts(model, devices, server):
        try:
            instance = make_instance(model, device, layout, formats, server, task.prompt_len, answer)
            validate_layout(instance.config, instance.workload, layout)
            load = _load_of(instance, devices // layout.num_devices, task.limits_s.get(scenario))
            found.append((load.predict(instance)[0].output_tokens_per_s, instance, load))
        except ShapewrightError:
            continue
    if not found:
        raise WorkloadError(f"{model.config.title} does not fit on {devices} x {device.name}")
    _, instance, load = max(found, key=lambda each: each[0])
    return instance, load


def _layouts(model: Model, devices: int, server: Server) -> Iterator[ParallelLayout]:
    degree = 1
    while degree <= min(devices, _MOST_DEVICES):
        if devices % degree == 0:
            yield ParallelLayout(tensor_parallel=degree)
            if degree > 1:
                yield ParallelLayout(pipeline_parallel=degree)
            if degree > 1 and model.config.is_moe and server.attention_data_parallel:
                yield ParallelLayout(data_parallel=degree, expert_parallel=degree)
        degree *= 2


def _load_of(instance: Instance, copies: int, limits_s: tuple[float, float] | None) -> Load:
    count = _REQUESTS_PER_DEVICE * instance.layout.num_devices
    one = queued(instance, count)
    if limits_s:
        one = within_limits(instance, count, copies, ttft_limit_s=limits_s[0], tpot_limit_s=limits_s[1])

    def combine(times_s: Sequence[float]) -> LoadTimes:
        times = one.combine(times_s)
        return times._replace(output_tokens_per_s=copies * times.output_tokens_per_s)

    return Load(one.shapes, combine, one.num_sequences)
