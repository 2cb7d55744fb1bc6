"""Simple loads in closed form: queued requests, a closed loop, an open loop and a static batch of equal lengths.

Legend: I and O tokens of prompt and answer, N requests of one stream (replica and pipeline stage), B sequences that
decode at once, C tokens of a prefill pass, T_d(B) time of a decode pass, T_m(B) of one that also prefills C tokens.

    passes with prefill               n = N I / C, of which b = B I / C fill the empty batch
    rounds                            w = N / B, each of O passes
    time of N queued requests         (w O - b) T_d(B) + b T_d(B/2) + b T_m(B/2) + (n - b) (T_m(B) - T_d(B))
    sequences that arrive in time     B <= O C / (I + O): faster than they are prefilled they cannot start
    open loop at rate r               B = r (O - 1) T(B), T(B) the mean pass; beyond capacity, as queued

The batch fills and drains at half of its size on average; the last round has the requests that are left. Engines that
do not mix prefill with decoding add the prefill passes alone instead of T_m - T_d. The batch is what the cache holds:
sequences of full length where an engine reserves whole answers, of half an answer otherwise.

Assumes: equal lengths; a replica gets its share of the requests; pipelines keep every stage busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.core.errors import WorkloadError
from shapewright.optimize.serving.pass_times import PassShape, predict_passes
from shapewright.optimize.serving.point import waiting_s

if TYPE_CHECKING:
    from shapewright.optimize.serving.point import Instance

LONE_PREFILL_SHARE = 0.2
"""Share of the time of a prefill of all replicas that a replica takes whose experts are spread over all: its attention
and dense layers, and a part of the experts. Fitted (docs/decisions/0021)."""
_OPEN_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Batches whose passes are priced for an open loop; others are interpolated."""


class LoadTimes(NamedTuple):
    """What a load gets from an instance.

    Attributes:
        output_tokens_per_s: Answered tokens per second of the instance.
        ttft_s: Time to the first token. [s]
        tpot_s: Time per further token. [s]
    """

    output_tokens_per_s: float
    ttft_s: float
    tpot_s: float


@dataclass(frozen=True)
class Load:
    """A load on an instance, before its passes are priced.

    Attributes:
        shapes: Passes to price.
        combine: Returns the result, given the times of the passes. [s]
        num_sequences: Sequences that a pass decodes.
    """

    shapes: tuple[PassShape, ...]
    combine: Callable[[Sequence[float]], LoadTimes]
    num_sequences: float

    def predict(self, instance: Instance) -> tuple[LoadTimes, LoadTimes, LoadTimes]:
        """Price the passes; return the result, and those with all passes at the ends of their 90 % intervals."""
        spans = predict_passes(instance, self.shapes)
        middle_s, low_s, high_s = zip(*((span.middle_s, span.low_s, span.high_s) for span in spans), strict=True)
        return self.combine(middle_s), self.combine(low_s), self.combine(high_s)


def most_decoding(instance: Instance) -> int:
    """Return the sequences that one stream of an instance decodes at once.

    Raises:
        WorkloadError: not even one fits.
    """
    request, server = instance.request, instance.request.server
    length = request.total_len if server.reserves_answers else request.prompt_len + -(-request.output_len // 2)
    tokens = _pass_tokens(instance)
    held = instance.most_sequences(tokens, length) // instance.layout.pipeline_parallel
    if held < 1:
        raise WorkloadError(
            f"{instance.scenario.config.title} with one sequence of {length} tokens does not fit on "
            f"{instance.layout.num_devices} x {instance.scenario.device.name}"
        )
    return min(held, server.most_sequences)


def queued(instance: Instance, num_requests: float, concurrency: float | None = None) -> Load:
    """Return the load of requests that all wait from the start, or of a closed loop.

    Args:
        instance: The instance; its request gives the lengths.
        num_requests: Requests.
        concurrency: Requests in flight at most; None for all.

    Raises:
        WorkloadError: not even one sequence fits.
    """
    request, server, streams = instance.request, instance.request.server, instance.num_streams
    prompt, answer = request.new_len, request.output_len
    requests = max(num_requests / streams, 1.0)
    tokens = _pass_tokens(instance)
    batch = min(most_decoding(instance), requests, (concurrency or num_requests) / streams)
    if server.mixes_prefill:
        batch = min(batch, answer * tokens / (prompt + answer))
    batch = max(batch, 1.0)
    full, fill, prefills = floor(requests / batch + 1e-9), batch * prompt / tokens, requests * prompt / tokens
    rest = max(requests - full * batch, 0.0)
    context = request.prompt_len + answer // 2
    part = _prefill_part(instance, tokens, requests)
    # Passes hold whole prompts, or pieces of one: as many of them as prompt tokens need.
    scale = tokens / (part.prompts * part.prefill_tokens)
    whole, half = PassShape(_round(batch), context), PassShape(_round(batch / 2), context)
    mixed = [_mix(part, shape) if server.mixes_prefill else part for shape in (whole, half)]
    shapes = (whole, half, *mixed, *([PassShape(_round(rest), context)] if rest else []))

    def combine(times_s: Sequence[float]) -> LoadTimes:
        decode_s, half_s, mixed_s, mixed_half_s = times_s[:4]
        extra_s = mixed_s - decode_s if server.mixes_prefill else mixed_s
        fill_passes, passes = fill * scale, prefills * scale
        # Replicas that run in step wait for those that prefill.
        share = min(passes / (requests / batch * answer), 1.0)
        passes *= _waiting_factor(share, instance.layout.data_parallel) if server.mixes_prefill else 1.0
        decoding = max(full * answer - (fill_passes if server.mixes_prefill else 0.0), 0.0)
        total_s = decoding * decode_s + fill_passes * mixed_half_s + max(passes - fill_passes, 0.0) * extra_s
        total_s += fill_passes * half_s if server.mixes_prefill else 0.0
        total_s += answer * times_s[4] if rest else 0.0
        # Requests of a closed loop stay together: on average half of their prompts follow one that already decodes.
        together = 0.5 if concurrency else 1.0
        mean_s = decode_s + together * extra_s * min(passes / (requests / batch * answer), 1.0)
        rate = num_requests / total_s
        # Little's law: requests in flight that do not decode wait for their first token.
        waiting = (concurrency or num_requests) / rate - (answer - 1) * mean_s
        return LoadTimes(rate * answer, max(waiting, mixed_half_s * ceil(part_passes(instance))), mean_s)

    return Load(shapes, combine, batch * streams)


def open_loop(instance: Instance, num_requests: float, rate: float) -> Load:
    """Return the load of requests that arrive at random at a rate.

    Args:
        instance: The instance; its request gives the lengths.
        num_requests: Requests.
        rate: Arrivals per second. [1/s]

    Raises:
        WorkloadError: not even one sequence fits.
    """
    request, server, streams = instance.request, instance.request.server, instance.num_streams
    prompt, answer = request.new_len, request.output_len
    most = most_decoding(instance)
    sizes = sorted({min(size, most) for size in _OPEN_BATCHES} | {most})
    context, tokens = request.prompt_len + answer // 2, _pass_tokens(instance)
    part = _prefill_part(instance, tokens, 1.0)
    decodes = [PassShape(size, context) for size in sizes]
    mixed = [_mix(part, shape) if server.mixes_prefill else part for shape in decodes]
    crowd = queued(instance, num_requests)

    def combine(times_s: Sequence[float]) -> LoadTimes:
        count = len(sizes)
        decode_s, mixed_s = np.array(times_s[:count]), np.array(times_s[count : 2 * count])
        extra_s = mixed_s - decode_s if server.mixes_prefill else mixed_s
        passes = prompt / (part.prompts * part.prefill_tokens)
        # Mean pass: a request in O - 1 passes of B sequences brings its prefill passes along.
        mean_s = decode_s + extra_s * np.minimum(np.array(sizes) * passes / answer, 1.0)
        needed = rate / streams * answer * mean_s
        saturated = crowd.combine(times_s[2 * count :])
        if needed[-1] >= sizes[-1]:
            # The queue grows from none to its longest at the last arrival.
            behind_s = num_requests * max(answer / saturated.output_tokens_per_s - 1.0 / rate, 0.0)
            return saturated._replace(ttft_s=0.5 * behind_s + float(mixed_s[-1]) * passes)
        index = int(np.argmax(needed <= np.array(sizes)))
        batch = max(needed[index], 1.0)
        token_s, service_s = float(np.interp(batch, sizes, mean_s)), float(np.interp(batch, sizes, mixed_s)) * passes
        load = min(rate / streams * service_s, 0.95)
        total_s = num_requests / rate + answer * token_s
        rate_tokens = min(num_requests * answer / total_s, saturated.output_tokens_per_s)
        return LoadTimes(rate_tokens, service_s + waiting_s(service_s, load), token_s)

    return Load((*decodes, *mixed, *crowd.shapes), combine, most * streams)


def static_batch(instance: Instance, batch_size: int) -> Load:
    """Return the load of one batch: all prompts, then all answers.

    Args:
        instance: The instance; its request gives the lengths.
        batch_size: Sequences of the batch on all replicas.
    """
    request = instance.request
    batch = max(_round(batch_size / instance.num_streams), 1)
    together = max(min(batch, _pass_tokens(instance) // request.new_len), 1)
    prefill = PassShape(prefill_tokens=request.new_len, prefill_context=request.cached_len, prompts=together)
    decode = PassShape(batch, request.prompt_len + request.output_len // 2)

    def combine(times_s: Sequence[float]) -> LoadTimes:
        first_s = times_s[0] * batch / together
        total_s = first_s + (request.output_len - 1) * times_s[1]
        return LoadTimes(batch_size * request.output_len / total_s, first_s, times_s[1])

    return Load((prefill, decode), combine, batch)


def _waiting_factor(share: float, replicas: int) -> float:
    """Return the prefill time of a replica that is in step with others, over that alone.

    With f the share of passes in which a replica prefills and n replicas, some replica prefills in 1 - (1 - f)^n of the
    passes. A pass in which one alone prefills takes LONE_PREFILL_SHARE of what all together add, and grows linearly.

    >>> _waiting_factor(0.1, 1)
    1.0
    """
    if replicas == 1 or share <= 0.0:
        return 1.0
    some = 1.0 - (1.0 - share) ** replicas
    return (LONE_PREFILL_SHARE * some + (1.0 - LONE_PREFILL_SHARE) * (replicas * share - some) / (replicas - 1)) / share


def part_passes(instance: Instance) -> float:
    """Return the prefill passes of one prompt; below 1 where several prompts share a pass."""
    return instance.request.new_len / _pass_tokens(instance)


def _pass_tokens(instance: Instance) -> int:
    """Return the prompt tokens of a full prefill pass: the budget, or a longer prompt that is not cut."""
    server, prompt = instance.request.server, instance.request.new_len
    return server.pass_tokens if server.chunked_prefill else max(server.pass_tokens, prompt)


def _prefill_part(instance: Instance, tokens: int, requests: float) -> PassShape:
    """Return a prefill pass: whole prompts up to the budget, or the middle piece of one."""
    prompt = instance.request.new_len
    if prompt <= tokens:
        return PassShape(0, 0, prompt, instance.request.cached_len, max(int(min(tokens // prompt, requests)), 1))
    return PassShape(0, 0, tokens, instance.request.cached_len + (prompt - tokens) // 2, 1)


def _mix(part: PassShape, decode: PassShape) -> PassShape:
    return part._replace(decode_batch=decode.decode_batch, decode_context=decode.decode_context)


def _round(count: float) -> int:
    return max(round(count), 1)
