"""Evaluate serving_runs.csv: runs of a server whose request log is in serving_requests.parquet (or .csv) beside it.

The requests of a run arrive in the simulation when they did in the log, with the lengths, layout, scheduler limits and
cache of the run. Compared are, for each run, the median time per further token, the 90 % quantile of the time to the
first token, the median time to the last token, and tokens per second. Runs have no learned correction of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.errors import MeasuredFileError, ShapewrightError
from shapewright.measure.accuracy.chunk import Chunk, Prices
from shapewright.measure.accuracy.measured_files import Format, read_columns
from shapewright.measure.accuracy.tables.published_rows import UnusableRowError
from shapewright.measure.accuracy.tables.serving.rows import degree_of, preset_of
from shapewright.optimize.serving.point import Instance
from shapewright.optimize.serving.request import ServingFormat, ServingRequest
from shapewright.optimize.serving.traffic.candidates import pass_interval
from shapewright.optimize.serving.traffic.pass_table import price_table
from shapewright.optimize.serving.traffic.requests import Traffic
from shapewright.optimize.serving.traffic.state import Limits
from shapewright.optimize.serving.traffic.unit import SimulatedUnit, Streams, simulate_unit
from shapewright.prediction.build import build_scenario
from shapewright.pricing.servers import KernelFit, Server, load_server
from shapewright.workload.layout import ParallelLayout

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.operation import Operation
    from shapewright.measure.accuracy.chunk import Columns
    from shapewright.measure.accuracy.context import Context
    from shapewright.models.read import Model
    from shapewright.pricing.price import Price

FORMAT = Format(
    numbers={"max_num_seqs": 1, "max_num_batched_tokens": 1},
    labels=("run_id", "model", "device", "framework_version", "weight_dtype"),
    optional=("tp", "dp", "ep", "kv_cache_tokens"),
)
REQUESTS = "serving_requests"
_REQUEST_FORMAT = Format(
    numbers={"input_len": 1, "output_len": 1},
    labels=("run_id",),
    positive=("ttft_s", "latency_s"),
    optional=("queued_s",),
)
_QUANTITIES = ("time_per_token", "first_token_p90", "latency", "tokens_per_s")


class _RooflineServer(Server):
    """A server whose kernels run at their roofline."""

    def adjust(self, operation: Operation, price: Price, device: Device) -> Price:  # noqa: ARG002
        """Return the price at its lower bound."""
        return replace(price, time_s=price.roofline_s)


def price(columns: Columns, context: Context) -> Iterator[Chunk]:
    """Simulate every run; each is a row of every quantity.

    Raises:
        MeasuredFileError: the log of requests is missing or malformed.
    """
    requests = _read_requests(context)
    for device, _, rows in context.device_groups(columns, "device"):
        for place in range(rows.num_rows):
            words, numbers = rows.row(place)
            try:
                if words["run_id"] not in requests:
                    raise UnusableRowError(f"{REQUESTS} has no requests of the run")
                yield from _price_run(words, numbers, requests[words["run_id"]], context.with_pricing(device))
            except ShapewrightError as error:
                context.skipped[str(error)] += 1


def _read_requests(context: Context) -> dict[str, Columns]:
    paths = [context.folder / f"{REQUESTS}{suffix}" for suffix in (".parquet", ".csv")]
    path = next((each for each in paths if each.is_file()), None)
    if path is None:
        raise MeasuredFileError(f"serving_runs.csv needs {REQUESTS}.parquet or .csv beside it; add the log of requests")
    return {run: rows for (run,), rows in read_columns(path, _REQUEST_FORMAT, context.skipped).groups("run_id")}


def _price_run(words: Mapping[str, str], numbers: Mapping[str, float], log: Columns, device: Device) -> Iterator[Chunk]:
    """Yield the measured and predicted quantities of a run.

    Raises:
        ShapewrightError: the run cannot be simulated.
    """
    queued_s = log.numbers["queued_s"]
    if np.isnan(queued_s).any():
        raise UnusableRowError("queued_s is not stated")
    log = log.take(np.argsort(queued_s, kind="stable"))
    none = np.zeros(log.num_rows, np.int64)
    lengths = [log.numbers[name].astype(np.int64) for name in ("input_len", "output_len")]
    traffic = Traffic(log.numbers["queued_s"], lengths[0], lengths[1], none - 1, none)
    server = load_server(words["framework_version"].strip().replace(" ", "-"))  # such as vLLM 0.19.0
    instance = _make_instance(words, numbers, traffic, device, server)
    middle, low, high = _simulate(instance, numbers, traffic)
    roofline = _simulate(_at_roofline(instance), numbers, traffic)[0]
    first_s, latency_s = log.numbers["ttft_s"], log.numbers["latency_s"]
    end_s = log.numbers["queued_s"] + latency_s
    measured = _quantities(traffic, first_s, latency_s, float(end_s.max() - traffic.arrival_s[0]))
    config = instance.scenario.config
    for place, quantity in enumerate(_QUANTITIES):
        ends = sorted((low[place], high[place]))
        value = measured[place]
        yield Chunk(
            table=f"serving_runs/{quantity}",
            device=device.name,
            dtype=instance.format.weight_dtype,
            library=words["framework_version"],
            part=config.name,
            measured=np.array([value]),
            prices=Prices(*(np.array([one]) for one in (middle[place], *ends, roofline[place]))),
            seconds=np.array([1.0 / value if quantity == "tokens_per_s" else value]),
        )


def _quantities(traffic: Traffic, first_s: np.ndarray, latency_s: np.ndarray, makespan_s: float) -> list[float]:
    """Return the compared quantities; times count from the arrival of each request. [s; tokens/s]"""
    passes = traffic.output_len - 1
    has_more = passes > 0
    if not has_more.any():
        raise UnusableRowError("no answer has a second token")
    tpot_s = (latency_s - first_s)[has_more] / passes[has_more]
    tokens_per_s = float(traffic.output_len.sum()) / makespan_s
    return [float(np.median(tpot_s)), float(np.quantile(first_s, 0.9)), float(np.median(latency_s)), tokens_per_s]


def _simulate(instance: Instance, numbers: Mapping[str, float], traffic: Traffic) -> list[list[float]]:
    """Return the quantities at the middle and at both ends of the interval of the times of passes."""
    server, layout = instance.request.server, instance.layout
    max_sequences, max_tokens = round(numbers["max_num_seqs"]), round(numbers["max_num_batched_tokens"])
    replicas, block = layout.data_parallel, instance.request.block_tokens
    given = numbers["kv_cache_tokens"]
    cache_tokens = instance.cache_tokens(max_tokens) // replicas if np.isnan(given) else round(given)
    limits = Limits(
        max_sequences,
        max_tokens,
        block,
        cache_tokens // block * replicas,
        is_chunked=server.chunked_prefill,
        is_mixed=server.chunked_prefill and server.mixes_prefill,
        reserves_answers=server.reserves_answers,
        keeps_preempted=server.chunked_prefill,
        num_replicas=replicas,
    )
    priced = price_table(instance, max_sequences=max_sequences, max_tokens=max_tokens, longest_len=traffic.longest_len)
    num_streams = 1 if replicas > 1 else degree_of(numbers["dp"])
    unit = SimulatedUnit(Streams(priced.table, limits, num_streams))
    found = []
    for factor in (1.0, *pass_interval(server, priced, is_moe=instance.scenario.config.is_moe)):
        outcome = simulate_unit(unit.scaled(factor), traffic)
        times_s = (outcome.first_s - traffic.arrival_s, outcome.end_s - traffic.arrival_s)
        found.append(_quantities(traffic, *times_s, outcome.makespan_s))
    return found


def _make_instance(
    words: Mapping[str, str], numbers: Mapping[str, float], traffic: Traffic, device: Device, server: Server
) -> Instance:
    """Return the instance of a run.

    Raises:
        UnusableRowError: the model or its format is not known.
    """
    weights = words["weight_dtype"] or "bf16"
    workload = {"phase": "prefill", "dtype": weights if weights in ("bf16", "fp16", "fp8") else "bf16"}
    scenario = build_scenario(preset_of(words["model"]), device, workload={**workload, "expert_kernel": "as-16-bit"})
    layout = _layout_of(scenario.model, numbers)
    dtype = scenario.workload.dtype
    formats = ServingFormat(dtype, weights, server.cache_dtype(dtype, weights))
    request = ServingRequest(
        prompt_len=max(1, round(float(traffic.prompt_len.mean()))),
        output_len=max(2, round(float(traffic.output_len.mean()))),
        server=server,
        memory_fraction=server.memory_fraction,
        block_tokens=server.block_tokens,
    )
    return Instance(scenario.replace(layout=layout), formats, request)


def _layout_of(model: Model, numbers: Mapping[str, float]) -> ParallelLayout:
    """Return the layout of an instance: replicas share experts, those of dense models are instances of their own."""
    tensor, replicas, experts = (degree_of(numbers[name]) for name in ("tp", "dp", "ep"))
    if not model.config.is_moe or experts == 1:
        return ParallelLayout(tensor_parallel=tensor)
    whole = 1 if tensor > 1 else None
    return ParallelLayout(
        tensor_parallel=tensor, data_parallel=replicas, expert_parallel=experts, expert_tensor_parallel=whole
    )


def _at_roofline(instance: Instance) -> Instance:
    """Return the instance with kernels at their roofline."""
    server = _RooflineServer(**{**vars(instance.request.server), "kernels": {"": KernelFit()}})
    return replace(instance, request=replace(instance.request, server=server))
