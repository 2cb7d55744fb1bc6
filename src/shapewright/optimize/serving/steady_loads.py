"""Loads in closed form whose batch follows from the load: an open loop, limits on latency, disaggregated instances.

Legend as in closed_form; m O is the longest answer.

    open loop at rate r               ends at N / r + m O T_d(B / m), or as queued; B = (N / end) O T(B)
    its median first token            when N / 2 - B others ended or N / 2 were prefilled, less its arrival at N / (2 r)
    99 % of first tokens within t     rho exp(-2 (1 - rho) t / S) = 0.01, S the time between prompts at full load
    disaggregated                     a closed network of queues that prefill and of delays that decode

Assumes: as closed_form.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.core.errors import WorkloadError
from shapewright.optimize.serving.closed_form import (
    Load,
    LoadTimes,
    mix,
    most_decoding,
    pass_tokens,
    prefill_part,
    queued,
)
from shapewright.optimize.serving.pass_times import PassShape
from shapewright.optimize.serving.point import waiting_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.optimize.serving.point import Instance

_LATE_SHARE = 0.01
"""Share of requests that may break a limit."""
_SHARES = np.linspace(_LATE_SHARE, 1.0, 1000)
"""Shares of the largest load; with the first of them no more requests wait at all than may be late."""
_LIMITED_BATCHES = 32
"""Batches of which the best within limits is taken."""
_MOST_BUSY = 0.95
"""Utilization above which the queue of a finite run is that of its backlog; random arrivals add no more."""
_MEAN_VALUE_STEPS = 60
_OPEN_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Batches whose passes are priced for an open loop; others are interpolated."""


class _Sizes(NamedTuple):
    """Passes of several batch sizes, to interpolate between.

    Attributes:
        sizes: Sequences of a stream that decode at once.
        shapes: Passes that decode them, then those that prefill one prompt as well, then those of ``crowd``.
        crowd: The same requests if all wait from the start; its passes prefill as many prompts as they may.
        passes: Prefill passes of one prompt.
        prompt: Tokens of a prompt that are not in the cache.
        answer: Tokens of an answer.
        mixes: Whether passes prefill and decode together.
    """

    sizes: Sequence[int]
    shapes: tuple[PassShape, ...]
    crowd: Load
    passes: float
    prompt: int
    answer: int
    mixes: bool

    def times(self, times_s: Sequence[float]) -> _Times:
        """Return the times by batch size."""
        count = len(self.sizes)
        decode_s, mixed_s = np.array(times_s[:count]), np.array(times_s[count : 2 * count])
        whole_s, _, full_s = times_s[2 * count : 2 * count + 3]
        full = self.crowd.shapes[2]
        prompt_s = (
            max(full_s - (whole_s if self.mixes else 0.0), 0.0) / (full.prompts * full.prefill_tokens) * self.prompt
        )
        extra_s = mixed_s - decode_s if self.mixes else mixed_s
        # A request in O passes of B sequences brings its prefill along: one prompt in a pass, or several.
        share = np.array(self.sizes) * self.passes / self.answer
        mean_s = decode_s + np.minimum(share, 1.0) * extra_s + np.maximum(share - 1.0, 0.0) * prompt_s / self.passes
        rate = self.crowd.combine(times_s[2 * count :]).output_tokens_per_s
        return _Times(decode_s, mixed_s, mean_s, prompt_s, rate)


class _Times(NamedTuple):
    """Times by batch size. [s]

    Attributes:
        decode_s: Decode passes.
        mixed_s: Passes that prefill one prompt as well.
        mean_s: Mean passes of a steady load.
        prompt_s: Prefill of a prompt in passes that hold as many as they may.
        most_tokens_per_s: Answered tokens per second if all requests wait from the start.
    """

    decode_s: NDArray[np.float64]
    mixed_s: NDArray[np.float64]
    mean_s: NDArray[np.float64]
    prompt_s: float
    most_tokens_per_s: float


def _passes_of_sizes(instance: Instance, num_requests: float, longest: float = 1.0) -> _Sizes:
    request, server, most = instance.request, instance.request.server, most_decoding(instance)
    sizes = sorted({min(size, most) for size in _OPEN_BATCHES} | {most})
    context, part = request.prompt_len + request.output_len // 2, prefill_part(instance, pass_tokens(instance), 1.0)
    decodes = [PassShape(size, context) for size in sizes]
    mixed = [mix(part, shape) if server.mixes_prefill else part for shape in decodes]
    crowd = queued(instance, num_requests, longest=longest)
    passes = request.new_len / (part.prompts * part.prefill_tokens)
    return _Sizes(
        sizes,
        (*decodes, *mixed, *crowd.shapes),
        crowd,
        passes,
        request.new_len,
        request.output_len,
        server.mixes_prefill,
    )


def open_loop(instance: Instance, num_requests: float, rate: float, *, longest: float = 1.0) -> Load:
    """Return the load of requests that arrive at random at a rate.

    Args:
        instance: The instance; its request gives the lengths.
        rate: Arrivals per second. [1/s]
        longest: Longest answer over the mean one.

    Raises:
        WorkloadError: not even one sequence fits.
    """
    answer, streams, server = instance.request.output_len, instance.num_streams, instance.request.server
    by_size, half = _passes_of_sizes(instance, num_requests, longest), 0.5 * num_requests / streams
    sizes = by_size.sizes

    def combine(times_s: Sequence[float]) -> LoadTimes:
        times = by_size.times(times_s)
        busy = _steady_batch(sizes, rate / streams * answer * times.mean_s)
        tail_s = longest * answer * float(np.interp(busy / longest, sizes, times.decode_s))
        end_s = max(num_requests / rate + tail_s, num_requests * answer / times.most_tokens_per_s)
        batch = _steady_batch(sizes, 2.0 * half / end_s * answer * times.mean_s)
        service_s = float(np.interp(batch, sizes, times.mixed_s)) * by_size.passes
        # The request in the middle starts when enough others ended and all before it are prefilled.
        ended_s = max(half - sizes[-1], 0.0) * answer * float(times.mean_s[-1]) / sizes[-1]
        queue_s = max(ended_s, half * times.prompt_s) - half * streams / rate
        random_s = waiting_s(times.prompt_s, min(rate / streams * times.prompt_s, _MOST_BUSY))
        token_s = float(np.interp(batch, sizes, times.mean_s))
        # A request arrives in the middle of the passes that the scheduler runs together.
        together_s = 0.5 * server.scheduler_steps * token_s if server.scheduler_steps > 1 else 0.0
        first_s = service_s + max(queue_s, random_s) + together_s
        return LoadTimes(num_requests * answer / end_s, first_s, token_s)

    return Load(by_size.shapes, combine, sizes[-1] * streams)


def _steady_batch(sizes: Sequence[int], needed: NDArray[np.float64]) -> float:
    """Return the sequences that decode at once, given how many each batch size would let collect."""
    if needed[-1] >= sizes[-1]:
        return float(sizes[-1])
    return float(max(needed[int(np.argmax(needed <= np.array(sizes)))], 1.0))


def within_limits(
    instance: Instance, num_requests: float, copies: int, ttft_limit_s: float, tpot_limit_s: float
) -> Load:
    """Return the largest load of one of several equal instances that keeps limits on the 99 % quantile.

    The batch is the one that serves most of those whose mean pass keeps the limit per token, and whose prefill leaves
    time to wait. Prompts wait in one queue before all copies: P(wait > t) = rho exp(-2 (1 - rho) t / S), S the time
    between prompts at full load and rho the share of it that arrives.

    Args:
        instance: The instance; its request gives the lengths.
        num_requests: Requests of this instance.
        copies: Instances that share a queue.
        ttft_limit_s: Limit of the time to the first token. [s]
        tpot_limit_s: Limit of the time per further token. [s]

    Source: L. Kleinrock, Queueing Systems, volume 2 (1976), section 2.1, for a fixed service time.

    Raises:
        WorkloadError: not even one sequence fits; when priced, not even one request alone keeps the limits.
    """
    answer, streams = instance.request.output_len, instance.num_streams
    by_size = _passes_of_sizes(instance, num_requests)

    def combine(times_s: Sequence[float]) -> LoadTimes:
        times = by_size.times(times_s)
        alone_s = float(times.mixed_s[0]) * by_size.passes
        if alone_s >= ttft_limit_s or times.mean_s[0] > tpot_limit_s:
            raise WorkloadError(
                f"a request alone takes {alone_s:.3g} s to its first token and {times.mean_s[0]:.3g} s per further "
                f"token, limits are {ttft_limit_s:g} and {tpot_limit_s:g} s; use more devices or looser limits"
            )
        best = LoadTimes(0.0, 0.0, 0.0)
        most = float(np.interp(tpot_limit_s, np.maximum.accumulate(times.mean_s), by_size.sizes))
        for batch in np.geomspace(1.0, most, _LIMITED_BATCHES):
            token_s, mixed_s = (float(np.interp(batch, by_size.sizes, each)) for each in (times.mean_s, times.mixed_s))
            rate, service_s = min(batch * streams / token_s, times.most_tokens_per_s), mixed_s * by_size.passes
            between_s = answer / (rate * copies)
            waits = _SHARES * np.exp(-2.0 * (1.0 - _SHARES) * (ttft_limit_s - service_s) / between_s)
            share = float(_SHARES[waits <= _LATE_SHARE].max(initial=0.0)) if service_s < ttft_limit_s else 0.0
            if rate * share > best.output_tokens_per_s:
                best = LoadTimes(rate * share, service_s + waiting_s(between_s, share), token_s)
        return best

    return Load(by_size.shapes, combine, by_size.sizes[-1] * streams)


def disaggregated(
    instance: Instance,
    prefillers: int,
    decoders: int,
    concurrency: float,
    num_requests: float = inf,
    *,
    longest: float = 1.0,
) -> Load:
    """Return a closed loop over equal instances of which some prefill and the others decode.

    Mean value analysis of a closed network: a request finds the queue of its prefill instance as it is with one request
    less, then decodes with as many others as are in flight there. A pass prefills all prompts that wait, up to its
    budget. A run ends when the longest of the answers in flight does.

    Args:
        instance: The instance; its request gives the lengths.
        num_requests: Requests of the run.
        longest: Longest answer over the mean one.

    Source: M. Reiser and S. Lavenberg, Mean-value analysis of closed multichain queuing networks, J. ACM 27 (1980);
    approximation of Schweitzer.
    """
    answer, streams = instance.request.output_len, instance.num_streams
    by_size = _passes_of_sizes(instance, concurrency)
    part = prefill_part(instance, pass_tokens(instance), 1.0)._replace(prompts=1)

    def combine(times_s: Sequence[float]) -> LoadTimes:
        times = by_size.times(times_s)
        service_s = times_s[-1] * by_size.passes
        further_s = min(times.prompt_s, service_s)
        waiting, rate, first_s, token_s = 0.0, 0.0, service_s, float(times.decode_s[0])
        for _ in range(_MEAN_VALUE_STEPS):
            found = waiting * (concurrency - 1.0) / concurrency / (prefillers * streams)
            first_s = service_s + further_s * found
            rate = concurrency / (first_s + (answer - 1) * token_s)
            waiting = 0.5 * (waiting + rate * first_s)
            batch = max(rate * (answer - 1) * token_s / (decoders * streams), 1.0)
            token_s = 0.5 * (token_s + float(np.interp(batch, by_size.sizes, times.decode_s)))
        # The last request starts when all but those in flight have ended, and has the longest answer.
        drain = (longest - 1.0) * (answer - 1) * token_s * rate / num_requests
        return LoadTimes(rate * answer / (1.0 + drain), first_s, token_s)

    return Load((*by_size.shapes, part), combine, by_size.sizes[-1] * decoders * streams)
