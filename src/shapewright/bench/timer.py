"""The timer: warm up until stable, replay without launch cost, repeat until the median is known well enough.

Calls rotate over several sets of inputs, so that what one call leaves in the cache is not what the next one reads; the
row says how many sets there were and whether together they exceed the cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

from shapewright.bench.statistics import Summary, summarize

if TYPE_CHECKING:
    from shapewright.bench.backend import Backend

# A sample is the mean of so many calls that it lasts at least this long: well above the resolution of device events
# (0.5 us, CUDA runtime API, cudaEventElapsedTime) and of the host's clock. [s]
_SAMPLE_S = 2e-3
_MOST_CALLS = 512
_FEWEST_SAMPLES, _MOST_SAMPLES = 10, 400
# Of the row's budget, what warming up may take; it ends earlier once three calls agree.
_WARM_UP_FRACTION = 0.25
_STABLE_FRACTION = 0.05
_FEWEST_WARM_UPS = 3
# Samples of calls issued one by one, to compare with a graph's; the quickest counts, for the host may be held up.
_LAUNCH_SAMPLES = 3
# Samples between two looks at the confidence interval.
_SAMPLES_PER_LOOK = 5
# Samples that are taken even when the time is up.
_SAMPLES_AFTER_DEADLINE = 3
# Samples go on for at least this long where the budget allows: control of clocks and power acts within tens of
# milliseconds, and what the host does besides comes and goes as fast. [s]
_LEAST_SAMPLED_S = 0.08
# Medians of the first and of the second half of the samples that differ by more are still on their way.
_DRIFT_FRACTION = 0.03
# Clocks and power are read while the device works: for about so long, longer than reading takes. [s]
_BUSY_S = 1e-2
# A row of calls that takes so many times what a sample should is cut.
_SLOW_FACTOR = 3.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What timing one operation gave.

    Attributes:
        summary: Of the kernel's time where ``method`` is ``graph``, else with what it takes to start it.
        method: ``graph``, ``eager``, ``host`` or ``processor``, see Row.
        calls_per_sample: Calls that one sample is the mean of.
        launch_s: What issuing calls one by one adds to each; None where it was not told apart. [s]
        kernels_s: Time that the device worked for this row, warm-up and launch comparison included. [s]
        state: Clocks, power and temperature after the samples, while a GPU goes on with the same calls.
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
        backend: Where it runs.
        call: Takes one set of inputs.
        inputs: Sets of inputs to rotate over.
        budget_s: Time after which no further samples are begun; three are always taken. [s]
        ci_fraction: Half width of the median's interval, over the median, that is narrow enough.
        capturable: Whether a graph of the calls can be made.
    """
    deadline = time.monotonic() + budget_s
    once_s, warm_s = _warm_up(backend, call, inputs, budget_s * _WARM_UP_FRACTION)
    num_calls, filled_s = _calls_per_sample(backend, call, inputs, once_s)
    if backend.is_cuda and capturable:
        num_calls = max(num_calls, len(inputs))  # a graph has its inputs fixed: all sets or none

    def loop() -> object:
        # Rotates on from where the last sample stopped.
        result: object = None
        for arguments in islice(rotation, num_calls):
            result = call(*arguments)
        return result

    rotation = (arguments for round_of_sets in repeat(inputs) for arguments in round_of_sets)
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
        one_by_one = [backend.elapsed_s(loop) for _ in range(_LAUNCH_SAMPLES)]
        launch_s = max(0.0, min(one_by_one) / num_calls - summary.median_s)
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
    """Run until three calls in a row agree or the time is up; give the time of one call, and of all. [s]"""
    for arguments in inputs:
        call(*arguments)
    backend.synchronize()
    begin, calls_s = time.monotonic(), list[float]()
    while len(calls_s) < _FEWEST_WARM_UPS or time.monotonic() - begin < budget_s:
        arguments = inputs[len(calls_s) % len(inputs)]
        calls_s.append(backend.elapsed_s(partial(call, *arguments)))
        latest = calls_s[-_FEWEST_WARM_UPS:]
        if len(calls_s) > _FEWEST_WARM_UPS and max(latest) <= (1.0 + _STABLE_FRACTION) * min(latest):
            break
    once_s = min(calls_s[-_FEWEST_WARM_UPS:])
    return once_s, sum(calls_s) + once_s * len(inputs)


def _calls_per_sample(
    backend: Backend, call: Callable[..., object], inputs: Sequence[tuple[Any, ...]], once_s: float
) -> tuple[int, float]:
    """Calls that fill a sample, and the time of trying; fewer where a row of them is slower than one alone. [s]"""
    num_calls = min(_MOST_CALLS, math.ceil(_SAMPLE_S / max(once_s, 1e-7)))
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
    while len(samples) < _MOST_SAMPLES:
        samples.append(backend.elapsed_s(run, is_replay=is_replay) / num_calls)
        if len(samples) >= _SAMPLES_AFTER_DEADLINE and time.monotonic() >= deadline:
            break
        is_look = len(samples) >= _FEWEST_SAMPLES and len(samples) % _SAMPLES_PER_LOOK == 0
        if is_look and time.monotonic() - begin >= _LEAST_SAMPLED_S and _is_known(samples, ci_fraction):
            break
    return samples


def _is_known(samples: Sequence[float], ci_fraction: float) -> bool:
    """Whether the median is narrow enough and no longer on its way."""
    half = len(samples) // 2
    early_s, late_s = (sorted(part)[len(part) // 2] for part in (samples[:half], samples[half:]))
    return summarize(samples).ci_fraction <= ci_fraction and abs(late_s / early_s - 1.0) <= _DRIFT_FRACTION
