"""Simulations as independent jobs, which run in this process or on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from shapewright import __version__
from shapewright.core.errors import WorkloadError
from shapewright.core.ranges import check_integer, check_number
from shapewright.core.ray_cluster import MOST_RETRIES, check_engine, check_version, connect, fetch_result
from shapewright.core.records import dataclass
from shapewright.optimize.serving.traffic.candidates import DEFAULT_LAYOUTS, MOST_LAYOUTS, Scheduler
from shapewright.optimize.serving.traffic.figures import (
    WARM_UP_FRACTION,
    TrafficFigures,
    find_largest_rate,
    simulate_capacity_per_s,
    summarize_outcome,
)
from shapewright.optimize.serving.traffic.requests import RandomTraffic, Traffic
from shapewright.optimize.serving.traffic.unit import simulate_unit

if TYPE_CHECKING:
    from shapewright.optimize.serving.traffic.unit import SimulatedUnit

_MOST_PLAIN_REQUESTS = 300_000
"""Most requests that are simulated without Numba: Python takes 35 us for each, compiling 10 s once and loading 2 s."""
_LONGEST_LIMIT_S = 3e8
_LARGEST_RATE_REQUESTS = 5_000
"""Requests of each step of the bisection for the largest rate."""


@dataclass(frozen=True, kw_only=True)
class TrafficQuestion:
    """What to simulate.

    Attributes:
        source: Distributions of requests, or the requests of a trace.
        rates_per_s: Rates of arrival; empty for those of the trace. [1/s]
        scheduler: Limits of the scheduler.
        ttft_p90_s: Limit of the 90 % quantile of the time to the first token; None for none. [s]
        tpot_p90_s: Limit of the 90 % quantile of the time per further token; None for none. [s]
        num_layouts: Most layouts on each device.
        engine: One of ``shapewright.core.ray_cluster.ENGINES``.
        address: Address of a Ray cluster.

    Raises:
        WorkloadError: a value is out of range.
        ConfigError: the engine is not known, or an address is given without Ray.
    """

    source: RandomTraffic | Traffic
    rates_per_s: tuple[float, ...] = ()
    scheduler: Scheduler = field(default_factory=Scheduler)
    ttft_p90_s: float | None = None
    tpot_p90_s: float | None = None
    num_layouts: int = DEFAULT_LAYOUTS
    engine: str = "local"
    address: str | None = None

    def __post_init__(self) -> None:
        check_engine(self.engine, self.address)
        hint = "give the number of layouts to simulate on each device"
        check_integer("num_layouts", self.num_layouts, 1, MOST_LAYOUTS, error=WorkloadError, hint=hint)
        for name in ("ttft_p90_s", "tpot_p90_s"):
            value = getattr(self, name)
            if value is not None:
                hint = "give a time such as 0.3 seconds"
                check_number(name, value, 0, _LONGEST_LIMIT_S, exclude_low=True, error=WorkloadError, hint=hint)

    @property
    def is_trace(self) -> bool:
        """Whether the requests come from a trace."""
        return isinstance(self.source, Traffic)

    @property
    def has_limits(self) -> bool:
        """Whether there is a limit to keep."""
        return self.ttft_p90_s is not None or self.tpot_p90_s is not None

    @property
    def warm_up_fraction(self) -> float:
        """Share of requests that percentiles leave out: none of a trace."""
        return 0.0 if self.is_trace else WARM_UP_FRACTION


@dataclass(frozen=True)
class Job:
    """A simulation that a worker can run by itself.

    Attributes:
        unit: The server.
        question: Requests and limits.
        longest_len: Tokens of the longest sequence of the model.
        kind: ``capacity``, ``run`` or ``largest`` (the largest rate within the limits).
        rate_per_s: Rate of arrival, or the capacity for ``largest``; 0 for that of a trace. [1/s]
    """

    unit: SimulatedUnit
    question: TrafficQuestion
    longest_len: int
    kind: str
    rate_per_s: float = 0.0


def draw_requests(source: RandomTraffic | Traffic, context: int) -> tuple[Traffic, int]:
    """Return the requests, and how many of them were cut to the context of the model.

    Args:
        context: Tokens of the longest sequence of the model.

    Raises:
        WorkloadError: a request of a trace is longer.
    """
    if isinstance(source, RandomTraffic):
        return source.draw(context)
    if source.longest_len > context:
        lengths = source.prompt_len + source.output_len
        index = int(lengths.argmax())
        num_longer = int((lengths > context).sum())
        longer = "the request that is" if num_longer == 1 else f"the {num_longer} requests that are"
        raise WorkloadError(
            f"request {index + 1} of the trace has {lengths[index]} tokens of prompt and answer, the model has "
            f"max_position_embeddings={context}; leave out or shorten {longer} longer",
            field="trace",
        )
    return source, 0


def run_jobs(jobs: Sequence[Job], question: TrafficQuestion) -> list[Any]:
    """Run jobs here or on a Ray cluster, and return their results in order.

    In this process, many requests are simulated by compiled code in threads, fewer in Python, one job after the other.
    The results are the same.
    """
    if question.engine == "ray":
        with connect(question.address) as ray:
            task = ray.remote(num_cpus=1, max_retries=MOST_RETRIES)(_run_remotely)
            references = [task.remote(job, __version__) for job in jobs]
            return [fetch_result(ray, reference) for reference in references]
    if question.source.num_requests * len(jobs) <= _MOST_PLAIN_REQUESTS or find_spec("numba") is None:
        return [run_job(job) for job in jobs]
    first = run_job(jobs[0], compiled=True)  # compiles once, before threads would
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [first, *pool.map(lambda job: run_job(job, compiled=True), jobs[1:])]


def _run_remotely(job: Job, version: str) -> Any:
    """Run a job as a task.

    Raises:
        ClusterError: the worker has another version of this package.
    """
    check_version(version)
    is_large = job.question.source.num_requests > _MOST_PLAIN_REQUESTS
    return run_job(job, compiled=is_large and find_spec("numba") is not None)


def run_job(job: Job, *, compiled: bool = False) -> float | tuple[TrafficFigures, ...]:
    """Run one job.

    Args:
        compiled: Use Numba, which must be installed.

    Returns:
        A rate for ``capacity`` and ``largest`` [1/s]; for ``run`` the figures at the middle, the lower and the upper
        end of the interval of the times of passes.
    """
    question, warm_up = job.question, job.question.warm_up_fraction
    traffic, _ = draw_requests(question.source, job.longest_len)
    if job.kind == "capacity":
        return simulate_capacity_per_s(job.unit, traffic, compiled=compiled)
    limits = {"ttft_p90_s": question.ttft_p90_s, "tpot_p90_s": question.tpot_p90_s}
    if job.kind == "largest":
        part = traffic.select(slice(0, _LARGEST_RATE_REQUESTS))
        return find_largest_rate(job.unit, part, job.rate_per_s, **limits, warm_up_fraction=warm_up, compiled=compiled)
    if job.rate_per_s:
        traffic = traffic.at_rate(job.rate_per_s)
    units = [job.unit, *(job.unit.scaled(factor) for factor in job.unit.interval)]
    return tuple(
        summarize_outcome(
            unit, traffic, simulate_unit(unit, traffic, compiled=compiled), **limits, warm_up_fraction=warm_up
        )
        for unit in units
    )
