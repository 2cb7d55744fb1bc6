"""Loads in closed form in which the load determines the batch: an open loop, latency limits, disaggregated instances.

Legend as in closed_form; m O is the longest answer.

    open loop at rate r               ends at N / r + m O T_d(B / m), or as queued; B = (N / end) O T(B)
    its median first token            when N / 2 - B others ended or N / 2 were prefilled, less its arrival at N / (2 r)
    99 % of first tokens within t     rho exp(-2 (1 - rho) t / S) = 0.01, S the time between prompts at full load
    disaggregated                     a closed queueing network: prefill instances are queues, decode instances delays

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
    make_prefill_pass,
    mixed_pass,
    most_decoding_sequences,
    pass_tokens,
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
"""Shares of the largest load that are tried; at the smallest, the share of requests that wait equals _LATE_SHARE."""
_LIMITED_BATCHES = 32
"""Number of batches that are tried within limits."""
_MOST_BUSY = 0.95
"""Utilization above which the queue of a finite run is its backlog, to which random arrivals add no more."""
_MEAN_VALUE_STEPS = 60
_OPEN_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Batches whose passes are priced for an open loop; others are interpolated."""


class _BatchPasses(NamedTuple):
    """Passes of several batch sizes, between which times are interpolated.

    Attributes:
        sizes: Sequences of a stream that decode at once.
        shapes: Decode passes by size, then the same with the prefill of one prompt, then those of ``all_queued``.
        all_queued: The load if all requests wait from the start: its passes prefill as many prompts as fit.
        passes_per_prompt: Prefill passes of one prompt.
        prompt_len: Tokens of a prompt that are not in the cache.
        output_len: Tokens of an answer.
        mixes_prefill: Whether passes prefill and decode together.
    """

    sizes: Sequence[int]
    shapes: tuple[PassShape, ...]
    all_queued: Load
    passes_per_prompt: float
    prompt_len: int
    output_len: int
    mixes_prefill: bool

    def times(self, times_s: Sequence[float]) -> _BatchTimes:
        """Return the times by batch size."""
        count = len(self.sizes)
        decode_s, mixed_s = np.array(times_s[:count]), np.array(times_s[count : 2 * count])
        # Of the passes of queued requests, the first decodes the full batch, and the third does so with prefill.
        full_decode_s, _, full_mixed_s = times_s[2 * count : 2 * count + 3]
        full = self.all_queued.shapes[2]
        prefill_s = max(full_mixed_s - (full_decode_s if self.mixes_prefill else 0.0), 0.0)
        prompt_s = prefill_s / (full.prompts * full.prefill_tokens) * self.prompt_len
        extra_s = mixed_s - decode_s if self.mixes_prefill else mixed_s
        # B sequences end in O passes, so each pass prefills B / O prompts: one, and further ones together with it.
        prefills = np.array(self.sizes) * self.passes_per_prompt / self.output_len
        more_s = np.maximum(prefills - 1.0, 0.0) * prompt_s / self.passes_per_prompt
        mean_s = decode_s + np.minimum(prefills, 1.0) * extra_s + more_s
        rate = self.all_queued.combine(times_s[2 * count :]).output_tokens_per_s
        return _BatchTimes(decode_s, mixed_s, mean_s, prompt_s, rate)


class _BatchTimes(NamedTuple):
    """Times by batch size. [s]

    Attributes:
        decode_s: Decode passes.
        mixed_s: Passes that prefill one prompt as well.
        mean_s: Mean passes of a steady load.
        prompt_s: Prefill of a prompt in passes with as many prompts as fit.
        most_tokens_per_s: Answered tokens per second if all requests wait from the start.
    """

    decode_s: NDArray[np.float64]
    mixed_s: NDArray[np.float64]
    mean_s: NDArray[np.float64]
    prompt_s: float
    most_tokens_per_s: float


def _list_batch_passes(instance: Instance, num_requests: float, longest: float = 1.0) -> _BatchPasses:
    """Return the passes to price for a load, by batch size."""
    request, server, most = instance.request, instance.request.server, most_decoding_sequences(instance)
    sizes = sorted({min(size, most) for size in _OPEN_BATCHES} | {most})
    context = request.prompt_len + request.output_len // 2
    prefill = make_prefill_pass(instance, pass_tokens(instance), 1.0)
    decodes = [PassShape(size, context) for size in sizes]
    mixed = [mixed_pass(prefill, shape) if server.mixes_prefill else prefill for shape in decodes]
    all_queued = queued(instance, num_requests, longest=longest)
    return _BatchPasses(
        sizes=sizes,
        shapes=(*decodes, *mixed, *all_queued.shapes),
        all_queued=all_queued,
        passes_per_prompt=request.new_len / (prefill.prompts * prefill.prefill_tokens),
        prompt_len=request.new_len,
        output_len=request.output_len,
        mixes_prefill=server.mixes_prefill,
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
    by_batch, half_requests = _list_batch_passes(instance, num_requests, longest), 0.5 * num_requests / streams
    sizes = by_batch.sizes

    def combine(times_s: Sequence[float]) -> LoadTimes:
        times = by_batch.times(times_s)
        busy = _find_steady_batch(sizes, rate / streams * answer * times.mean_s)
        tail_s = longest * answer * float(np.interp(busy / longest, sizes, times.decode_s))
        end_s = max(num_requests / rate + tail_s, num_requests * answer / times.most_tokens_per_s)
        batch = _find_steady_batch(sizes, 2.0 * half_requests / end_s * answer * times.mean_s)
        service_s = float(np.interp(batch, sizes, times.mixed_s)) * by_batch.passes_per_prompt
        # The median request starts when enough others ended and all before it are prefilled.
        ended_s = max(half_requests - sizes[-1], 0.0) * answer * float(times.mean_s[-1]) / sizes[-1]
        queue_s = max(ended_s, half_requests * times.prompt_s) - half_requests * streams / rate
        random_s = waiting_s(times.prompt_s, min(rate / streams * times.prompt_s, _MOST_BUSY))
        token_s = float(np.interp(batch, sizes, times.mean_s))
        # On average, a request arrives in the middle of the passes that the scheduler runs together.
        together_s = 0.5 * server.scheduler_steps * token_s if server.scheduler_steps > 1 else 0.0
        first_s = service_s + max(queue_s, random_s) + together_s
        return LoadTimes(num_requests * answer / end_s, first_s, token_s)

    return Load(by_batch.shapes, combine, sizes[-1] * streams)


def _find_steady_batch(sizes: Sequence[int], needed: NDArray[np.float64]) -> float:
    """Return the batch that is in balance: as many sequences as arrive while one is decoded at that batch size.

    Args:
        needed: Sequences that arrive in the time of an answer, by batch size.
    """
    if needed[-1] >= sizes[-1]:
        return float(sizes[-1])
    return float(max(needed[int(np.argmax(needed <= np.array(sizes)))], 1.0))


def within_limits(
    instance: Instance, num_requests: float, copies: int, ttft_limit_s: float, tpot_limit_s: float
) -> Load:
    """Return the largest load of one of several equal instances that keeps limits on the 99 % quantile.

    Of the batches whose mean pass keeps the limit per token and whose prefill leaves time to wait, the one that serves
    most is taken. Prompts wait in one queue for all copies: P(wait > t) = rho exp(-2 (1 - rho) t / S), S the time
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
    by_batch = _list_batch_passes(instance, num_requests)

    def combine(times_s: Sequence[float]) -> LoadTimes:
        times = by_batch.times(times_s)
        alone_s = float(times.mixed_s[0]) * by_batch.passes_per_prompt
        if alone_s >= ttft_limit_s or times.mean_s[0] > tpot_limit_s:
            raise WorkloadError(
                f"a request alone takes {alone_s:.3g} s to its first token and {times.mean_s[0]:.3g} s per further "
                f"token, limits are {ttft_limit_s:g} and {tpot_limit_s:g} s; use more devices or looser limits"
            )
        best = LoadTimes(0.0, 0.0, 0.0)
        most = float(np.interp(tpot_limit_s, np.maximum.accumulate(times.mean_s), by_batch.sizes))
        for batch in np.geomspace(1.0, most, _LIMITED_BATCHES):
            token_s, mixed_s = (float(np.interp(batch, by_batch.sizes, each)) for each in (times.mean_s, times.mixed_s))
            rate, service_s = (
                min(batch * streams / token_s, times.most_tokens_per_s),
                mixed_s * by_batch.passes_per_prompt,
            )
            between_s = answer / (rate * copies)
            waits = _SHARES * np.exp(-2.0 * (1.0 - _SHARES) * (ttft_limit_s - service_s) / between_s)
            share = float(_SHARES[waits <= _LATE_SHARE].max(initial=0.0)) if service_s < ttft_limit_s else 0.0
            if rate * share > best.output_tokens_per_s:
                best = LoadTimes(rate * share, service_s + waiting_s(between_s, share), token_s)
        return best

    return Load(by_batch.shapes, combine, by_batch.sizes[-1] * streams)


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

    Mean value analysis of a closed network: a request finds its prefill instance with the queue of a load that is one
    request smaller, then decodes with all others in flight on its decode instance. A pass prefills all prompts that
    wait, up to its budget. A run ends with the longest answer in flight.

    Args:
        instance: The instance; its request gives the lengths.
        num_requests: Requests of the run.
        longest: Longest answer over the mean one.

    Source: M. Reiser and S. Lavenberg, Mean-value analysis of closed multichain queuing networks, J. ACM 27 (1980);
    approximation of Schweitzer.
    """
    answer, streams = instance.request.output_len, instance.num_streams
    by_batch = _list_batch_passes(instance, concurrency)
    prefill = make_prefill_pass(instance, pass_tokens(instance), 1.0)._replace(prompts=1)

    def combine(times_s: Sequence[float]) -> LoadTimes:
        times = by_batch.times(times_s)
        service_s = times_s[-1] * by_batch.passes_per_prompt
        further_s = min(times.prompt_s, service_s)
        waiting, rate, first_s, token_s = 0.0, 0.0, service_s, float(times.decode_s[0])
        for _ in range(_MEAN_VALUE_STEPS):
            found = waiting * (concurrency - 1.0) / concurrency / (prefillers * streams)
            first_s = service_s + further_s * found
            rate = concurrency / (first_s + (answer - 1) * token_s)
            waiting = 0.5 * (waiting + rate * first_s)
            batch = max(rate * (answer - 1) * token_s / (decoders * streams), 1.0)
            token_s = 0.5 * (token_s + float(np.interp(batch, by_batch.sizes, times.decode_s)))
        # The last request starts when all but those in flight have ended, and has the longest answer.
        drain = (longest - 1.0) * (answer - 1) * token_s * rate / num_requests
        return LoadTimes(rate * answer / (1.0 + drain), first_s, token_s)

    return Load((*by_batch.shapes, prefill), combine, by_batch.sizes[-1] * decoders * streams)
