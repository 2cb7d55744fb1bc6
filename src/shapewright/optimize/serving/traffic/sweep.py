"""plan_traffic: simulate requests on several devices, layouts and rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import ShapewrightError, WorkloadError
from shapewright.core.notebook import NotebookDisplay
from shapewright.core.notes import Note
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.core.units import format_number_of
from shapewright.optimize.serving.traffic.candidates import Scheduler, find_candidates, make_candidate
from shapewright.optimize.serving.traffic.jobs import Job, TrafficQuestion, draw_requests, run_jobs
from shapewright.optimize.serving.traffic.requests import RandomTraffic, read_lengths

if TYPE_CHECKING:
    from shapewright.optimize.serving.plan import ServingPlan
    from shapewright.optimize.serving.point import OperatingPoint
    from shapewright.optimize.serving.request import ServingFormat, ServingRequest
    from shapewright.optimize.serving.traffic.candidates import Candidate
    from shapewright.optimize.serving.traffic.figures import TrafficFigures
    from shapewright.optimize.serving.traffic.requests import Traffic
    from shapewright.prediction.scenario import Scenario
    from shapewright.pricing.servers import Server


_MOST_PROMPT_PASSES = 10_000_000
"""Most passes with parts of prompts, of which Python simulates about 200,000 a second."""


@dataclass(frozen=True, kw_only=True)
class SimulatedServer:
    """A simulated server with its capacity.

    Attributes:
        candidate: Instances, streams and times of passes.
        capacity_per_s: Requests per second when requests always wait. [1/s]
        largest_rate_per_s: Largest rate at which 90 % of the requests keep the limits; None without limits. [1/s]
        usd_per_hour: Price of all its devices; None without a price. [USD/h]
    """

    candidate: Candidate
    capacity_per_s: float
    largest_rate_per_s: float | None
    usd_per_hour: float | None


@dataclass(frozen=True, kw_only=True)
class TrafficRun:
    """One simulation.

    Attributes:
        server: Index of its server in the plan.
        rate_per_s: Mean rate of arrival. [1/s]
        figures: Its figures; None if the rate exceeds the capacity of the server.
        low: Figures at the lower end of the 90 % interval of the times of passes.
        high: Figures at the upper end.
        keeps_limits: Whether the server sustains the rate and keeps the limits.
    """

    server: int
    rate_per_s: float
    figures: TrafficFigures | None
    low: TrafficFigures | None
    high: TrafficFigures | None
    keeps_limits: bool


@dataclass(frozen=True, kw_only=True, repr=False)
class TrafficPlan(NotebookDisplay):
    """Result of plan_traffic.

    Attributes:
        request: Mean lengths, devices, memory.
        format: Element formats.
        question: What was simulated.
        num_requests: Requests of each simulation.
        mean_prompt_len: Mean tokens of their prompts.
        mean_output_len: Mean tokens of their answers.
        servers: Servers, device by device.
        runs: A simulation for each server and rate.
        notes: Notes for the reader, one line each.
    """

    request: ServingRequest
    format: ServingFormat
    question: TrafficQuestion
    num_requests: int
    mean_prompt_len: float
    mean_output_len: float
    servers: tuple[SimulatedServer, ...]
    runs: tuple[TrafficRun, ...]
    notes: tuple[str, ...]

    @property
    def scenario(self) -> Scenario:
        """Model and device of the first server."""
        return self.servers[0].candidate.scenario

    @property
    def best(self) -> TrafficRun | None:
        """The run within the limits at the highest rate, then of least price and devices, then the fastest."""
        kept = [run for run in self.runs if run.keeps_limits and run.figures]

        def rank(run: TrafficRun) -> tuple[float, float, int, float]:
            assert run.figures is not None
            server = self.servers[run.server]
            # Either all servers have a price or none.
            price = server.usd_per_hour or 0.0
            return -run.rate_per_s, price, server.candidate.num_devices, run.figures.end_to_end.p90_s

        return min(kept, key=rank, default=None)


def plan_traffic(
    scenarios: Sequence[Scenario],
    request: ServingRequest,
    question: TrafficQuestion,
    *,
    format_: ServingFormat,
    layout: Mapping[str, Any],
    usd_per_hour: Mapping[str, float],
    notes: Sequence[str] = (),
) -> TrafficPlan:
    """Simulate traffic on the best layouts of each device.

    Args:
        request: Mean lengths, devices, memory and cache blocks.
        usd_per_hour: Price of one device by its name; empty without prices. [USD/h]

    Raises:
        WorkloadError: no server sustains a rate, or a request is longer than model or cache allow.
        ShapewrightError: nothing can be priced.
    """
    config = scenarios[0].config
    context = config.max_position_embeddings
    found_notes = list(notes)
    traffic, num_cut = draw_requests(question.source, context)
    if num_cut:
        cut = (
            f"{num_cut} of {format_number_of(traffic.num_requests, 'request')} {'was' if num_cut == 1 else 'were'} cut"
        )
        text = f"{cut} to the model's {context} tokens"
        found_notes.append(Note(text, "cut", "prompt_len"))
    server = request.server
    _check_num_passes(traffic, question.scheduler, server)
    if server.interval_of:
        found_notes.append(
            f"intervals are those of {server.interval_of}: no published throughput of {server.name} was compared"
        )
    candidates: list[Candidate] = []
    refusals: list[ShapewrightError] = []
    for scenario in scenarios:
        try:
            candidates += find_candidates(
                scenario,
                request,
                question.scheduler,
                format_=format_,
                layout=layout,
                num_layouts=question.num_layouts,
                longest_len=traffic.longest_len,
                notes=found_notes,
            )
        except ShapewrightError as error:
            if len(scenarios) == 1:
                raise
            found_notes.append(Note(f"{scenario.device.name} is left out: " + error.text, "device-left-out", "device"))
            refusals.append(error)
    if not candidates:
        raise refusals[0]

    def make_job(index: int, kind: str, rate_per_s: float = 0.0) -> Job:
        return Job(candidates[index].unit, question, context, kind, rate_per_s)

    indices = range(len(candidates))
    capacities = [float(one) for one in run_jobs([make_job(index, "capacity") for index in indices], question)]
    rates = question.rates_per_s or (traffic.rate_per_s,)
    simulated = [(index, rate) for index in indices for rate in rates if question.is_trace or rate <= capacities[index]]
    if not simulated:
        raise _overload_error(candidates, capacities, min(rates))
    found_notes += _overload_notes(question, capacities, traffic)
    jobs = [
        make_job(index, "run", 0.0 if question.is_trace and not question.rates_per_s else rate)
        for index, rate in simulated
    ]
    if question.has_limits:
        jobs += [make_job(index, "largest", capacities[index]) for index in indices]
    results = run_jobs(jobs, question)
    figures = dict(zip(simulated, results, strict=False))
    largest: list[float | None] = [float(one) for one in results[len(simulated) :]] or [None] * len(candidates)
    prices = [usd_per_hour.get(one.scenario.device.name) for one in candidates]
    return TrafficPlan(
        request=request,
        format=format_,
        question=question,
        num_requests=traffic.num_requests,
        mean_prompt_len=float(traffic.prompt_len.mean()),
        mean_output_len=float(traffic.output_len.mean()),
        servers=tuple(
            SimulatedServer(
                candidate=one,
                capacity_per_s=capacity,
                largest_rate_per_s=rate,
                usd_per_hour=None if price is None else price * one.num_devices,
            )
            for one, capacity, rate, price in zip(candidates, capacities, largest, prices, strict=True)
        ),
        runs=tuple(_make_run(index, rate, figures.get((index, rate)), question) for index in indices for rate in rates),
        notes=tuple(found_notes),
    )


def _check_num_passes(traffic: Traffic, scheduler: Scheduler, server: Server) -> None:
    """Check that passes of a given size cut prompts into no more passes than can be simulated."""
    tokens = scheduler.max_num_batched_tokens
    if tokens is None or not server.chunked_prefill:
        return
    prompt_tokens = int(traffic.prompt_len.sum())
    if prompt_tokens > _MOST_PROMPT_PASSES * tokens:
        raise WorkloadError(
            f"max_num_batched_tokens={tokens} cuts the prompts into {prompt_tokens / tokens:,.0f} passes, and at most "
            f"{_MOST_PROMPT_PASSES:,} are simulated",
            advice=with_fields(
                "give at least {least}, or fewer {num_requests}", least=-(-prompt_tokens // _MOST_PROMPT_PASSES)
            ),
            field="max_num_batched_tokens",
        )


def simulate_loads(
    plan: ServingPlan, point: OperatingPoint, load_fractions: Sequence[float], *, num_requests: int
) -> list[tuple[float, TrafficFigures]]:
    """Simulate one unit of an operating point at several loads, with requests of the plan's lengths.

    Args:
        point: The operating point; its batch is the limit of the scheduler.
        load_fractions: Rates of arrival over the largest load.

    Returns:
        Rates [1/s] with their figures.

    Raises:
        WorkloadError: the cache of the point does not hold a request.
    """
    request = replace(plan.request, num_devices=point.num_devices, requests_per_s=None)
    pass_tokens = max(point.prefill_tokens + point.batch_size * request.query_len, point.batch_size)
    scheduler = Scheduler(max_num_seqs=point.batch_size, max_num_batched_tokens=pass_tokens)
    source = RandomTraffic(
        prompts=read_lengths(request.prompt_len, "prompt_len"),
        answers=read_lengths(request.output_len, "output_len"),
        cached_len=request.cached_len,
        num_requests=num_requests,
    )
    question = TrafficQuestion(source=source, scheduler=scheduler)
    unit = make_candidate(plan.scenario, request, scheduler, point, request.total_len, {}).unit
    context = plan.config.max_position_embeddings
    (capacity_per_s,) = run_jobs([Job(unit, question, context, "capacity")], question)
    rates = [fraction * float(capacity_per_s) for fraction in load_fractions]
    results = run_jobs([Job(unit, question, context, "run", rate) for rate in rates], question)
    return [(rate, middle) for rate, (middle, _, _) in zip(rates, results, strict=True)]


def _make_run(
    index: int, rate: float, found: tuple[TrafficFigures, ...] | None, question: TrafficQuestion
) -> TrafficRun:
    if found is None:
        return TrafficRun(server=index, rate_per_s=rate, figures=None, low=None, high=None, keeps_limits=False)
    keeps = found[0].keeps(question.ttft_p90_s, question.tpot_p90_s)
    return TrafficRun(server=index, rate_per_s=rate, figures=found[0], low=found[1], high=found[2], keeps_limits=keeps)


def _overload_error(candidates: Sequence[Candidate], capacities: Sequence[float], rate: float) -> WorkloadError:
    """Return the error for a rate that exceeds the capacity of all servers."""
    index = max(range(len(candidates)), key=lambda one: capacities[one])
    best, capacity = candidates[index], capacities[index]
    device = best.scenario.device.name
    needed = math.ceil(rate / capacity) * best.num_devices
    return WorkloadError(
        f"arrivals={rate:g}/s is more than any layout holds: the largest load is {_rounded_down(capacity)}/s, on "
        f"{best.num_devices} x {device}",
        advice=with_fields("give fewer arrivals, or about {needed} {num_devices}", needed=needed),
        field="arrivals",
    )


def _overload_notes(question: TrafficQuestion, capacities: Sequence[float], traffic: Traffic) -> list[str]:
    """Return a note on rates that exceed the capacity of all servers."""
    rates = question.rates_per_s or (traffic.rate_per_s,)
    best = max(capacities)
    if question.is_trace and not question.rates_per_s:
        if traffic.rate_per_s <= best or traffic.num_requests < 2:
            return []
        text = (
            f"the trace arrives at {traffic.rate_per_s:.3g}/s and the largest load that a layout holds is "
            f"{_rounded_down(best)}/s: the queue grows until the last arrival; "
            + with_fields("give more {num_devices}")
        )
        return [Note(text, "overload", "num_devices")]
    beyond = [rate for rate in rates if rate > best]
    if not beyond:
        return []
    text = (
        f"arrivals of {', '.join(f'{rate:g}/s' for rate in beyond)} are more than any layout holds: the largest load "
        f"is {_rounded_down(best)}/s; " + with_fields("give more {num_devices}")
    )
    return [Note(text, "overload", "num_devices")]


def _rounded_down(rate_per_s: float) -> str:
    """Return a rate rounded down to three significant digits, as text.

    >>> _rounded_down(12.39), _rounded_down(0.0123456)
    ('12.3', '0.0123')
    """
    digits = 2 - math.floor(math.log10(rate_per_s))
    return f"{math.floor(rate_per_s * 10.0**digits) / 10.0**digits:g}"
