"""Timing of one call: warm up until stable, replay as a graph, sample until the median's interval is narrow enough.

Calls rotate over several sets of inputs, so that a call does not find its inputs in the cache; the row records the
number of sets and whether together they exceed the cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

from shapewright.core.records import dataclass

if TYPE_CHECKING:
    from shapewright.measure.bench.device.backend import Backend

# Shortest duration of a sample, which is the mean of several calls: well above the resolution of device events
# (0.5 us, CUDA runtime API, cudaEventElapsedTime) and of the host's clock. [s]
_SAMPLE_S = 2e-3
_MAX_CALLS_PER_SAMPLE = 512
_MIN_SAMPLES, _MAX_SAMPLES = 10, 400
# Share of the row's budget for the warm-up, which ends earlier once three successive calls agree.
_WARM_UP_FRACTION = 0.25
_STABLE_FRACTION = 0.05
_MIN_WARM_UP_CALLS = 3
# Samples of individually issued calls, for the launch cost; the fastest counts, since the host may be interrupted.
_LAUNCH_SAMPLES = 3
# Samples between two checks of the confidence interval.
_SAMPLES_PER_CHECK = 5
# Samples taken even if the budget is used up.
_SAMPLES_AFTER_DEADLINE = 3
# Shortest sampling time where the budget allows: clock and power control act within tens of milliseconds, and so does
# other load on the host. [s]
_MIN_SAMPLED_S = 0.08
# Largest difference between the medians of the first and the second half of the samples: above it they still drift.
_DRIFT_FRACTION = 0.03
# Clocks and power are read while the device executes calls for about this long, longer than the reading takes. [s]
_BUSY_S = 1e-2
# Trial calls stop once they take this many times the duration of a sample.
_SLOW_FACTOR = 3.0
# Quantile of the normal distribution that leaves 2.5 % on either side.
_NORMAL_95 = 1.959964


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary statistics of the time of one call.

    Attributes:
        median_s: Median of the samples. [s]
        min_s: Smallest sample. [s]
        max_s: Largest sample. [s]
        q1_s: Lower quartile. [s]
        q3_s: Upper quartile. [s]
        ci_half_width_s: Half the width of the median's 95 % confidence interval. [s]
        num_samples: Number of samples.
    """

    median_s: float
    min_s: float
    max_s: float
    q1_s: float
    q3_s: float
    ci_half_width_s: float
    num_samples: int

    @property
    def ci_fraction(self) -> float:
        """Half width of the confidence interval over the median."""
        return self.ci_half_width_s / self.median_s if self.median_s > 0.0 else math.inf


def summarize(samples_s: Sequence[float]) -> Summary:
    """Summarize samples by median, quartiles and a confidence interval of the median.

    The interval is distribution-free: its ends are the order statistics with ranks n/2 -+ 1.96 sqrt(n)/2, from the
    binomial distribution of n and 1/2, clipped to the samples (Conover, Practical Nonparametric Statistics, 3rd ed.,
    section 3.2).

    Args:
        samples_s: Times of one call, at least one. [s]

    >>> summary = summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    >>> summary.median_s, summary.q1_s, summary.q3_s, summary.ci_half_width_s
    (3.0, 2.0, 4.0, 49.5)
    """
    ordered = sorted(samples_s)
    count = len(ordered)
    half_width_ranks = _NORMAL_95 * math.sqrt(count) / 2.0
    low = max(0, math.floor((count - 1) / 2.0 - half_width_ranks))
    high = min(count - 1, math.ceil((count - 1) / 2.0 + half_width_ranks))
    return Summary(
        median_s=quantile(ordered, 0.5),
        min_s=ordered[0],
        max_s=ordered[-1],
        q1_s=quantile(ordered, 0.25),
        q3_s=quantile(ordered, 0.75),
        ci_half_width_s=(ordered[high] - ordered[low]) / 2.0,
        num_samples=count,
    )


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """Quantile of sorted numbers, interpolated linearly.

    >>> quantile([1.0, 2.0, 4.0, 8.0], 0.5)
    3.0
    """
    position = fraction * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Result of timing one operation.

    Attributes:
        summary: Time of one call; includes the launch cost unless ``method`` is ``graph``.
        method: ``graph``, ``eager``, ``host`` or ``processor``, see Row.
        calls_per_sample: Calls whose mean is one sample.
        launch_s: Launch cost of an individually issued call; None if not measured. [s]
        kernels_s: Device time spent on this row, including the warm-up and the launch comparison. [s]
        state: Clocks, power and temperature after the samples, while a GPU still executes the same calls.
    """

    summary: Summary
    method: str
    calls_per_sample: int
    launch_s: float | None
    kernels_s: float
    state: dict[str, float]


def measure(
    backend: Backend,
    call: Callable[..., object],
    inputs: Sequence[tuple[Any, ...]],
    *,
    budget_s: float,
    ci_fraction: float,
    capturable: bool = True,
) -> Timing:
    """Time a call.

    Args:
        inputs: Sets of inputs to rotate over.
        budget_s: Time after which no further samples are begun; three are always taken. [s]
        ci_fraction: Half width of the median's confidence interval over the median at which sampling may stop.
        capturable: Whether the calls may be captured as a graph.
    """
    deadline = time.monotonic() + budget_s
    once_s, warm_s = _warm_up(backend, call, inputs, budget_s * _WARM_UP_FRACTION)
    num_calls, filled_s = _calls_per_sample(backend, call, inputs, once_s)
    if backend.is_cuda and capturable:
        num_calls = max(num_calls, len(inputs))  # a graph's inputs are fixed, so it covers every set

    def loop() -> object:
        # The rotation continues where the last sample stopped.
        result: object = None
        for arguments in islice(rotation, num_calls):
            result = call(*arguments)
        return result

    rotation = (arguments for all_sets in repeat(inputs) for arguments in all_sets)
    replay = backend.capture(loop) if capturable else None
    run = replay or loop
    if replay:
        run()
    samples = _sample(backend, run, num_calls, deadline, ci_fraction, is_replay=replay is not None)
    summary = summarize(samples)
    num_busy = math.ceil(_BUSY_S / max(summary.median_s * num_calls, _SAMPLE_S)) if backend.is_cuda else 0
    for _ in range(num_busy):
        run()
    state = backend.read_state()
    backend.synchronize()
    method = "graph" if replay else backend.eager_method
    launch_s = None
    kernels_s = warm_s + filled_s + (sum(samples) + num_busy * summary.median_s) * num_calls
    if replay:
        individual = [backend.elapsed_s(loop) for _ in range(_LAUNCH_SAMPLES)]
        launch_s = max(0.0, min(individual) / num_calls - summary.median_s)
        kernels_s += summary.median_s * num_calls * (_LAUNCH_SAMPLES + 2)
    return Timing(
        summary=summary,
        method=method,
        calls_per_sample=num_calls,
        launch_s=launch_s,
        kernels_s=kernels_s,
        state=state,
    )


def _warm_up(
    backend: Backend, call: Callable[..., object], inputs: Sequence[tuple[Any, ...]], budget_s: float
) -> tuple[float, float]:
    """Run until three successive calls agree or the budget is used up; returns the time of one call, and of all. [s]"""
    for arguments in inputs:
        call(*arguments)
    backend.synchronize()
    begin, calls_s = time.monotonic(), list[float]()
    while len(calls_s) < _MIN_WARM_UP_CALLS or time.monotonic() - begin < budget_s:
        arguments = inputs[len(calls_s) % len(inputs)]
        calls_s.append(backend.elapsed_s(partial(call, *arguments)))
        latest = calls_s[-_MIN_WARM_UP_CALLS:]
        if len(calls_s) > _MIN_WARM_UP_CALLS and max(latest) <= (1.0 + _STABLE_FRACTION) * min(latest):
            break
    once_s = min(calls_s[-_MIN_WARM_UP_CALLS:])
    return once_s, sum(calls_s) + once_s * len(inputs)


def _calls_per_sample(
    backend: Backend, call: Callable[..., object], inputs: Sequence[tuple[Any, ...]], once_s: float
) -> tuple[int, float]:
    """Calls per sample, fewer if successive calls are slower than one alone, and the time of the trial calls. [s]"""
    num_calls = min(_MAX_CALLS_PER_SAMPLE, math.ceil(_SAMPLE_S / max(once_s, 1e-7)))
    done = 0
    begin = backend.clock()
    while done < num_calls and backend.clock() - begin < _SLOW_FACTOR * _SAMPLE_S:
        call(*inputs[done % len(inputs)])
        done += 1
    backend.synchronize()
    return max(1, done), backend.clock() - begin


def _sample(
    backend: Backend, run: Callable[[], object], num_calls: int, deadline: float, ci_fraction: float, *, is_replay: bool
) -> list[float]:
    samples: list[float] = []
    begin = time.monotonic()
    while len(samples) < _MAX_SAMPLES:
        samples.append(backend.elapsed_s(run, is_replay=is_replay) / num_calls)
        if len(samples) >= _SAMPLES_AFTER_DEADLINE and time.monotonic() >= deadline:
            break
        checks_now = len(samples) >= _MIN_SAMPLES and len(samples) % _SAMPLES_PER_CHECK == 0
        if checks_now and time.monotonic() - begin >= _MIN_SAMPLED_S and _is_converged(samples, ci_fraction):
            break
    return samples


def _is_converged(samples: Sequence[float], ci_fraction: float) -> bool:
    """Whether the median's interval is narrow enough and the samples no longer drift."""
    half = len(samples) // 2
    early_s, late_s = (sorted(part)[len(part) // 2] for part in (samples[:half], samples[half:]))
    return summarize(samples).ci_fraction <= ci_fraction and abs(late_s / early_s - 1.0) <= _DRIFT_FRACTION
