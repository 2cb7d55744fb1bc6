"""Figures of simulated traffic: latency, queue, cache use, goodput, capacity and the largest rate within limits."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.records import dataclass
from shapewright.optimize.serving.traffic.unit import simulate_unit

if TYPE_CHECKING:
    from jaxtyping import Float

    from shapewright.optimize.serving.traffic.requests import Traffic
    from shapewright.optimize.serving.traffic.unit import Outcome, SimulatedUnit

    PerRequest = Float[np.ndarray, " requests"]

WARM_UP_FRACTION = 0.1
"""Share of random requests, the first ones, that percentiles leave out because the server is still filling."""
QUANTILES = (0.5, 0.9, 0.99)
_LEAST_SATURATED = 2000
"""Fewest requests with which the capacity of a unit is simulated."""
_SATURATED_BATCHES, _MOST_SATURATED = 4, 200_000
"""Requests per sequence that can run, and most requests, with which the capacity is simulated."""
_BISECTIONS = 6
_LONE_SHARE = 1e-6
"""Share of the capacity at which every request runs alone."""


@dataclass(frozen=True)
class Percentiles:
    """Distribution of a time over requests. [s]

    Attributes:
        mean_s: Mean.
        p50_s: Median.
        p90_s: 90 % quantile.
        p99_s: 99 % quantile.
    """

    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float


@dataclass(frozen=True, kw_only=True)
class TrafficFigures:
    """Latency, queue, cache and throughput of a simulation.

    Attributes:
        num_requests: Requests that percentiles count, without those of the warm-up.
        ttft: Time to the first token, the queue included.
        tpot: Time per further token; None if all answers have one token.
        end_to_end: Time from arrival to the last token.
        queue_wait: Time from arrival to the first pass.
        mean_queue: Mean number of requests that wait for their first pass.
        most_queue: Largest number of them.
        mean_running: Mean number of requests that are in a batch.
        cache_use_fraction: Mean share of cache blocks in use, while passes run.
        most_cache_use_fraction: Largest share of any stream.
        busy_fraction: Share of the time in which the decoding streams run a pass.
        preemptions_per_request: Mean number of times that a request was preempted.
        prefix_hit_fraction: Share of prompt tokens that were in the cache.
        requests_per_s: Requests that ended, per second of the simulation.
        tokens_per_s: Answered tokens per second.
        goodput_fraction: Share of requests that keep all limits.
        goodput_per_s: Requests per second that keep them.
    """

    num_requests: int
    ttft: Percentiles
    tpot: Percentiles | None
    end_to_end: Percentiles
    queue_wait: Percentiles
    mean_queue: float
    most_queue: int
    mean_running: float
    cache_use_fraction: float
    most_cache_use_fraction: float
    busy_fraction: float
    preemptions_per_request: float
    prefix_hit_fraction: float
    requests_per_s: float
    tokens_per_s: float
    goodput_fraction: float
    goodput_per_s: float

    @property
    def times(self) -> dict[str, Percentiles | None]:
        """Distributions of times, by name."""
        return {"ttft": self.ttft, "tpot": self.tpot, "e2e": self.end_to_end}

    def keeps(self, ttft_p90_s: float | None, tpot_p90_s: float | None) -> bool:
        """Return whether the 90 % quantiles keep both limits. [s]"""
        tpot_s = 0.0 if self.tpot is None else self.tpot.p90_s
        return (ttft_p90_s is None or self.ttft.p90_s <= ttft_p90_s) and (tpot_p90_s is None or tpot_s <= tpot_p90_s)


def summarize_outcome(
    unit: SimulatedUnit,
    traffic: Traffic,
    outcome: Outcome,
    *,
    ttft_p90_s: float | None = None,
    tpot_p90_s: float | None = None,
    warm_up_fraction: float = 0.0,
) -> TrafficFigures:
    """Compute the figures of a simulation.

    Args:
        ttft_p90_s: Limit of the time to the first token, for goodput. [s]
        tpot_p90_s: Limit of the time per further token, for goodput. [s]
        warm_up_fraction: Share of requests, the first ones, that percentiles leave out.
    """
    first = int(warm_up_fraction * traffic.num_requests)
    arrival_s, first_s, end_s = outcome.arrival_s[first:], outcome.first_s[first:], outcome.end_s[first:]
    ttft_s = first_s - arrival_s
    passes = traffic.output_len[first:] - 1
    has_more = passes > 0
    tpot_s = (end_s - first_s)[has_more] / passes[has_more]
    kept = ttft_s <= (np.inf if ttft_p90_s is None else ttft_p90_s)
    kept[has_more] &= tpot_s <= (np.inf if tpot_p90_s is None else tpot_p90_s)
    makespan_s = max(outcome.makespan_s, np.finfo(float).tiny)
    waits_s = outcome.admitted_s - outcome.arrival_s
    blocks = unit.decode.limits.num_blocks
    busy_s = sum(total.busy_s for total in outcome.totals)
    requests_per_s = traffic.num_requests / makespan_s
    good = float(np.mean(kept))
    hits, prompts = int(np.sum(outcome.hit_len)), outcome.prefill_totals or outcome.totals
    return TrafficFigures(
        num_requests=len(arrival_s),
        ttft=_percentiles(ttft_s),
        tpot=_percentiles(tpot_s) if len(tpot_s) else None,
        end_to_end=_percentiles(end_s - arrival_s),
        queue_wait=_percentiles(waits_s[first:]),
        mean_queue=float(np.sum(waits_s)) / makespan_s,
        most_queue=_most_at_once(outcome.arrival_s, outcome.admitted_s),
        mean_running=float(np.sum(outcome.running_s)) / makespan_s,
        cache_use_fraction=sum(total.cache_block_s for total in outcome.totals) / max(busy_s * blocks, 1e-300),
        most_cache_use_fraction=max(total.most_blocks for total in outcome.totals) / blocks,
        busy_fraction=busy_s / (makespan_s * unit.decode.num_streams),
        preemptions_per_request=float(np.mean(outcome.preempted)),
        prefix_hit_fraction=hits / (hits + sum(total.prefill_tokens for total in prompts)) if hits else 0.0,
        requests_per_s=requests_per_s,
        tokens_per_s=float(np.sum(traffic.output_len)) / makespan_s,
        goodput_fraction=good,
        goodput_per_s=good * requests_per_s,
    )


def simulate_capacity_per_s(unit: SimulatedUnit, traffic: Traffic, *, compiled: bool = False) -> float:
    """Simulate the capacity of a unit: its requests per second when requests always wait. [1/s]

    All requests arrive at once, four batches of them; a batch is as many as run at the same time, which shared prefixes
    make more than the cache holds of whole ones. Equal requests stay together and end in bursts, so the rate is a batch
    over the mean time in which one ends, taken from each request of the second batch on. Filling and draining do not
    count.
    """
    limits, mean_len = unit.decode.limits, float(np.mean(traffic.prompt_len + traffic.output_len))
    fitting = limits.num_blocks * limits.block_tokens / mean_len
    most = limits.max_sequences * limits.num_replicas * unit.decode.num_streams
    running = ceil(min(most, fitting * unit.decode.num_streams))
    count = min(max(_LEAST_SATURATED, _SATURATED_BATCHES * running), _MOST_SATURATED)
    outcome = simulate_unit(unit, traffic.at_once(count), compiled=compiled)
    if unit.prefill is None:  # otherwise requests that wait between prefill and decoding count as running
        running = min(_most_at_once(outcome.admitted_s, outcome.end_s), most)
        if count < min(_SATURATED_BATCHES * running, _MOST_SATURATED):
            count = min(_SATURATED_BATCHES * running, _MOST_SATURATED)
            outcome = simulate_unit(unit, traffic.at_once(count), compiled=compiled)
    ends_s = np.sort(outcome.end_s)
    starts = np.arange(running, count - 2 * running)
    if len(starts) == 0 or ends_s[-1] == ends_s[0]:
        return count / float(ends_s[-1])
    return running / float(np.mean(ends_s[starts + running] - ends_s[starts]))


def find_largest_rate(
    unit: SimulatedUnit,
    traffic: Traffic,
    capacity_per_s: float,
    *,
    ttft_p90_s: float | None,
    tpot_p90_s: float | None,
    warm_up_fraction: float,
    compiled: bool = False,
) -> float:
    """Return the largest rate of arrival at which 90 % of the requests keep the limits; 0 if none. [1/s]

    Within 2 % of the capacity, or of 1/64 of it if less is held, and so on: limits that one request keeps alone and two
    together do not are held at a small share of what a large batch serves.

    Args:
        capacity_per_s: Capacity of the unit, the highest rate that is tried. [1/s]
        ttft_p90_s: Limit of the 90 % quantile of the time to the first token. [s]
        tpot_p90_s: Limit of the 90 % quantile of the time per further token. [s]
    """

    def keeps(rate_per_s: float) -> bool:
        scaled = traffic.at_rate(rate_per_s)
        outcome = simulate_unit(unit, scaled, compiled=compiled)
        figures = summarize_outcome(unit, scaled, outcome, warm_up_fraction=warm_up_fraction)
        return figures.keeps(ttft_p90_s, tpot_p90_s)

    low, high = 0.0, capacity_per_s
    if keeps(high):
        return high
    while not low:
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            low, high = (middle, high) if keeps(middle) else (low, middle)
        if high < _LONE_SHARE * capacity_per_s or not (low or keeps(_LONE_SHARE * capacity_per_s)):
            break
    return low


def _percentiles(values_s: PerRequest) -> Percentiles:
    return Percentiles(float(np.mean(values_s)), *(float(one) for one in np.quantile(values_s, QUANTILES)))


def _most_at_once(start_s: PerRequest, end_s: PerRequest) -> int:
    """Return the largest number of intervals that contain a common time; ends come before starts."""
    times = np.concatenate([end_s, start_s])
    change = np.concatenate([np.full(len(end_s), -1), np.ones(len(start_s), np.int64)])
    waits = np.concatenate([end_s > start_s, end_s > start_s])
    order = np.argsort(times[waits], kind="stable")
    return int(np.max(np.cumsum(change[waits][order]), initial=0))
