"""Output of ``serve-plan`` with ``--arrivals`` or ``--trace``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.app.report.outputs.model import DeviceSummary, Output, described, optional, summarize_device, take
from shapewright.app.report.outputs.serving import InstanceLayout, instances_words
from shapewright.core.records import dataclass
from shapewright.models.transformer import TransformerConfig
from shapewright.optimize.serving.request import ServingFormat

if TYPE_CHECKING:
    from shapewright.optimize.serving.traffic.figures import Percentiles
    from shapewright.optimize.serving.traffic.sweep import SimulatedServer, TrafficPlan, TrafficRun

_MILLION, _SECONDS_PER_HOUR = 1e6, 3600.0


@dataclass(frozen=True, kw_only=True)
class TrafficRequestOutput:
    """What was simulated."""

    source: str = described("`arrivals` or `trace`")
    num_requests: int = described("requests of each simulation")
    rates_per_s: list[float] = described("mean rates of arrival in requests per second; empty for that of the trace")
    mean_prompt_len: float = described("mean tokens of a prompt")
    mean_output_len: float = described("mean tokens of an answer")
    ttft_p90_limit_s: float | None = described("limit of the 90 % quantile of the time to first token")
    tpot_p90_limit_s: float | None = described("limit of the 90 % quantile of the time per further token")
    num_devices: int | None = described("devices; null for one unit of each layout")
    server: str = described("inference engine and version, or `current` for what current engines share")
    memory_fraction: float = described("share of the device's memory that the server takes")
    block_tokens: int = described("tokens of a block of the paged KV cache")
    seed: int | None = described("seed of lengths and arrivals; null for a trace")
    burstiness: float | None = described("shape of the gamma distribution of intervals; null for a trace")
    usd_per_hour: float | None
    images: int | None = optional("images in each prompt, whose tokens are part of it; absent without images")


@dataclass(frozen=True, kw_only=True)
class TrafficServerOutput:
    """A simulated server."""

    device: str = described("name of the device")
    mode: str = described("`aggregated` or `disaggregated`")
    instances: str = described("instances of a unit as text")
    layout: InstanceLayout = described("degrees of an instance that decodes")
    prefill_layout: InstanceLayout | None = described("degrees of an instance that only prefills; null if aggregated")
    num_units: int = described("units of these instances")
    num_devices: int = described("devices of all units")
    max_num_seqs: int = described("most sequences of a batch")
    max_num_batched_tokens: int = described("most tokens of a pass")
    cache_tokens: int = described("tokens that the caches of the decoding instances hold")
    capacity_requests_per_s: float = described("requests per second when requests always wait: the largest load")
    largest_requests_per_s: float | None = described(
        "largest rate of arrival at which 90 % of the requests keep the limits, within 2 % of the capacity; null "
        "without limits"
    )
    pass_error_median_fraction: float = described(
        "median error of interpolated times of passes, on passes off the grid that are priced themselves"
    )
    pass_error_max_fraction: float = described("largest of these errors")
    pass_low_fraction: float = described("lower end of the 90 % interval of the time of a pass over its middle")
    pass_high_fraction: float = described("upper end of that interval over the middle")
    usd_per_hour: float | None = described("price of all devices; null without a price")
    closed_form_batch_size: int = described("sequences of a pass at the best operating point of the closed form")
    closed_form_requests_per_s: float = described("requests per second of all units there, at equal lengths")
    closed_form_ttft_s: float = described("mean time to the first token there")
    closed_form_tpot_s: float = described("time per further token there")


@dataclass(frozen=True, kw_only=True)
class TrafficRunOutput:
    """One simulation; its figures are null if the server cannot hold the rate.

    Ends of intervals are of simulations with all passes at the ends of the 90 % interval of their times.
    """

    server: int = described("place of the server in `servers`, from 0")
    arrivals_per_s: float = described("mean rate of arrival in requests per second")
    holds_load: bool = described("whether the rate is within the capacity of the server, or a trace")
    keeps_limits: bool = described("whether it holds the load and the 90 % quantiles keep the limits")
    ttft_mean_s: float | None = described("mean time to the first token, queueing included")
    ttft_p50_s: float | None = described("its median")
    ttft_p90_s: float | None = described("its 90 % quantile")
    ttft_p99_s: float | None = described("its 99 % quantile")
    tpot_mean_s: float | None = described("mean time per further token of a request")
    tpot_p50_s: float | None = described("its median over requests")
    tpot_p90_s: float | None = described("its 90 % quantile")
    tpot_p99_s: float | None = described("its 99 % quantile")
    e2e_mean_s: float | None = described("mean time from arrival to the last token")
    e2e_p50_s: float | None = described("its median")
    e2e_p90_s: float | None = described("its 90 % quantile")
    e2e_p99_s: float | None = described("its 99 % quantile")
    ttft_p50_low_s: float | None = described("median of the time to the first token at the lower end of the interval")
    ttft_p50_high_s: float | None = described("median of the time to the first token at the upper end")
    ttft_p90_low_s: float | None = described(
        "90 % quantile of the time to the first token at the lower end of the interval"
    )
    ttft_p90_high_s: float | None = described("90 % quantile of the time to the first token at the upper end")
    tpot_p50_low_s: float | None = described("median of the time per further token at the lower end of the interval")
    tpot_p50_high_s: float | None = described("median of the time per further token at the upper end")
    tpot_p90_low_s: float | None = described(
        "90 % quantile of the time per further token at the lower end of the interval"
    )
    tpot_p90_high_s: float | None = described("90 % quantile of the time per further token at the upper end")
    e2e_p50_low_s: float | None = described("median of the time to the last token at the lower end of the interval")
    e2e_p50_high_s: float | None = described("median of the time to the last token at the upper end")
    e2e_p90_low_s: float | None = described(
        "90 % quantile of the time to the last token at the lower end of the interval"
    )
    e2e_p90_high_s: float | None = described("90 % quantile of the time to the last token at the upper end")
    queue_wait_mean_s: float | None = described("mean time from arrival to the first pass")
    queue_wait_p50_s: float | None = described("its median")
    queue_wait_p90_s: float | None = described("its 90 % quantile")
    queue_wait_p99_s: float | None = described("its 99 % quantile")
    mean_queue: float | None = described("mean number of requests that wait for their first pass")
    most_queue: int | None = described("largest number of them")
    mean_running: float | None = described("mean number of requests that run")
    cache_use_fraction: float | None = described("mean share of cache blocks in use while passes run")
    most_cache_use_fraction: float | None = described("largest share of blocks in use in any stream")
    busy_fraction: float | None = described("share of the time in which decoding instances run a pass")
    preemptions_per_request: float | None = described("how often a request lost its blocks and was computed again")
    prefix_hit_fraction: float | None = described("share of prompt tokens that were in the cache")
    requests_per_s: float | None = described("requests that ended per second of the simulation")
    tokens_per_s: float | None = described("answered tokens per second of the simulation")
    tokens_per_s_per_device: float | None
    goodput_fraction: float | None = described("share of requests that keep all limits")
    goodput_requests_per_s: float | None = described("requests per second that keep all limits")
    usd_per_million_tokens: float | None = described("cost per million output tokens; null without a price")


@dataclass(frozen=True, kw_only=True)
class TrafficOutput(Output):
    """Requests over time on simulated servers."""

    devices: list[DeviceSummary] = described("devices with simulated servers")
    config: TransformerConfig
    request: TrafficRequestOutput = described("what was simulated")
    format: ServingFormat = described("element formats")
    keeps_limits: bool = described("whether any server holds a rate and keeps the limits; the exit code is 1 if not")
    best: int | None = described(
        "place in `runs` of the one that keeps the limits at the highest rate, at the lowest price or on the fewest "
        "devices; null if none does"
    )
    servers: list[TrafficServerOutput] = described("servers, the best layouts of each device by the closed form")
    runs: list[TrafficRunOutput] = described("a simulation for each server and rate")
    notes: list[str]


def traffic_output(found: TrafficPlan) -> TrafficOutput:
    """Output of simulated traffic."""
    question, source, request = found.question, found.question.source, found.request
    best = found.best
    devices = {one.candidate.scenario.device.name: one.candidate.scenario.device for one in found.servers}
    return TrafficOutput(
        devices=[summarize_device(device) for device in devices.values()],
        config=found.scenario.config,
        request=TrafficRequestOutput(
            source="trace" if question.is_trace else "arrivals",
            num_requests=found.num_requests,
            rates_per_s=list(question.rates_per_s),
            mean_prompt_len=found.mean_prompt_len,
            mean_output_len=found.mean_output_len,
            ttft_p90_limit_s=question.ttft_p90_s,
            tpot_p90_limit_s=question.tpot_p90_s,
            num_devices=request.num_devices,
            server=request.server.name,
            memory_fraction=request.memory_fraction,
            block_tokens=request.block_tokens,
            seed=getattr(source, "seed", None),
            burstiness=getattr(source, "burstiness", None),
            usd_per_hour=request.usd_per_hour,
            images=found.scenario.workload.images or None,
        ),
        format=found.format,
        keeps_limits=best is not None,
        best=None if best is None else found.runs.index(best),
        servers=[_server(one) for one in found.servers],
        runs=[_run(one, found) for one in found.runs],
        notes=list(found.notes),
    )


def _server(server: SimulatedServer) -> TrafficServerOutput:
    candidate, priced = server.candidate, server.candidate.priced
    point = candidate.point
    return take(
        TrafficServerOutput,
        candidate,
        device=candidate.scenario.device.name,
        mode=point.mode,
        instances=instances_words(point),
        layout=take(InstanceLayout, point.layout),
        prefill_layout=None if point.prefill_layout is None else take(InstanceLayout, point.prefill_layout),
        capacity_requests_per_s=server.capacity_per_s,
        largest_requests_per_s=server.largest_rate_per_s,
        usd_per_hour=server.usd_per_hour,
        pass_error_median_fraction=priced.error_median_fraction,
        pass_error_max_fraction=priced.error_most_fraction,
        pass_low_fraction=candidate.unit.interval[0],
        pass_high_fraction=candidate.unit.interval[1],
        closed_form_batch_size=point.batch_size,
        closed_form_requests_per_s=point.requests_per_s * candidate.num_units,
        closed_form_ttft_s=point.ttft.middle_s,
        closed_form_tpot_s=point.tpot.middle_s,
    )


def _run(run: TrafficRun, found: TrafficPlan) -> TrafficRunOutput:
    figures, server = run.figures, found.servers[run.server]
    given: dict[str, Any] = dict.fromkeys(TrafficRunOutput.__dataclass_fields__)
    if figures is not None:
        for name, times in (*figures.times.items(), ("queue_wait", figures.queue_wait)):
            given |= _named(name, times)
        for end, other in (("low", run.low), ("high", run.high)):
            assert other is not None
            for name, times in other.times.items():
                if times is not None:
                    given |= {f"{name}_p50_{end}_s": times.p50_s, f"{name}_p90_{end}_s": times.p90_s}
        given |= {name: getattr(figures, name) for name in given if hasattr(figures, name)}
        given["goodput_requests_per_s"] = figures.goodput_per_s
        given["tokens_per_s_per_device"] = figures.tokens_per_s / server.candidate.num_devices
        if server.usd_per_hour is not None:
            usd_per_s = server.usd_per_hour / _SECONDS_PER_HOUR
            given["usd_per_million_tokens"] = usd_per_s / figures.tokens_per_s * _MILLION
    given |= {"server": run.server, "arrivals_per_s": run.rate_per_s, "keeps_limits": run.keeps_limits}
    return TrafficRunOutput(**given | {"holds_load": figures is not None})


def _named(name: str, times: Percentiles | None) -> dict[str, float]:
    return {} if times is None else {f"{name}_{part}": getattr(times, part) for part in times.__dataclass_fields__}
