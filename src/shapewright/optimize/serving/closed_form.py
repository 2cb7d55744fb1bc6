"""Loads in closed form: queued requests, a closed loop and a static batch.

Legend: I and O tokens of prompt and answer, N requests of one stream (replica and pipeline stage), B sequences that
decode at once, C tokens of a prefill pass, T_d(B) time of a decode pass, T_m(B) of one that also prefills C tokens.

    passes with prefill               n = N I / C, of which b = B I / C fill the empty batch
    rounds                            w = N / B, each of O passes
    time of N queued requests         (w O - b) T_d(B) + b T_d(B/2) + b T_m(B/2) + (n - b) (T_m(B) - T_d(B))
    sequences that prefill sustains   B <= O C / (I + O): sequences start no faster than they are prefilled
    answers of unequal lengths        (N - B) O / B passes of B, then m O of B / m, the longest being m O
    queued requests                   first token N / rate - (O - 1) T by Little's law
    closed loop of R requests         first token half of the prefill of R prompts, times 1 - p / O for its p passes;
                                      the rest of R / rate, by Little's law, is for the other tokens

In a closed loop the rounds persist: R requests end together, their successors prefill one after the other, and decode
a token in each pass that prefills others. The more tokens they decode in such passes, the further apart they end.

While the batch fills, it has half of its size on average; the last round has the requests that are left. Engines that
do not mix prefill with decoding run prefill passes alone, instead of adding T_m - T_d. The batch is what the cache
holds: sequences of full length if an engine reserves whole answers, of half an answer otherwise.

Assumes: equal prompts; requests are divided evenly over replicas; pipelines keep every stage busy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import ceil, floor
from typing import TYPE_CHECKING, NamedTuple

from shapewright.core.errors import WorkloadError
from shapewright.core.records import dataclass
from shapewright.optimize.serving.pass_times import PassShape, predict_passes

if TYPE_CHECKING:
    from shapewright.optimize.serving.point import Instance

LONE_PREFILL_SHARE = 0.2
"""Prefill time that one replica alone adds to a pass, over what all together add, where replicas share experts: its own
attention and dense layers, and a part of the experts. Chosen on all compared runs (docs/decisions/0027)."""

GROUP_POWER = 0.5
"""Prompts that share a prefill pass in a closed loop of R requests: R to this power. It is between 1 (all requests end
together) and 0 (each ends alone): requests that share a pass end together, but the first to return starts the next."""


class LoadTimes(NamedTuple):
    """Throughput and latency of an instance under a load.

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
        combine: Returns throughput and latency, given the times of the passes. [s]
        num_sequences: Sequences that a pass decodes.
    """

    shapes: tuple[PassShape, ...]
    combine: Callable[[Sequence[float]], LoadTimes]
    num_sequences: float

    def predict(self, instance: Instance) -> tuple[LoadTimes, LoadTimes, LoadTimes]:
        """Return throughput and latency with the times of passes in the middle, at the low and at the high end."""
        spans = predict_passes(instance, self.shapes)
        middle_s, low_s, high_s = zip(*((span.middle_s, span.low_s, span.high_s) for span in spans), strict=True)
        return self.combine(middle_s), self.combine(low_s), self.combine(high_s)


def most_decoding_sequences(instance: Instance) -> int:
    """Return the sequences that one stream of an instance decodes at once.

    Raises:
        WorkloadError: not even one fits.
    """
    request, server = instance.request, instance.request.server
    length = request.total_len if server.reserves_answers else request.prompt_len + -(-request.output_len // 2)
    tokens = pass_tokens(instance)
    if server.reserves_context:
        tokens = max(tokens, instance.config.max_position_embeddings or 0)
    held = instance.most_sequences(tokens, length) // instance.layout.pipeline_parallel
    if held < 1:
        raise WorkloadError(
            f"{instance.scenario.config.title} with one sequence of {length} tokens does not fit on "
            f"{instance.layout.num_devices} x {instance.scenario.device.name}"
        )
    return min(held, server.most_sequences)


def queued(
    instance: Instance,
    num_requests: float,
    concurrency: float | None = None,
    *,
    longest: float = 1.0,
    typical: float = 1.0,
) -> Load:
    """Return the load of requests that all wait from the start, or of a closed loop.

    Args:
        instance: The instance; its request gives the lengths.
        concurrency: Requests in flight at most; None for all.
        longest: Longest answer over the mean one.
        typical: Prompt tokens that the median request computes over the mean, if some prompts are cached.

    Raises:
        WorkloadError: not even one sequence fits.
    """
    request, server, streams = instance.request, instance.request.server, instance.num_streams
    prompt, answer = request.new_len, request.output_len
    stream_requests = max(num_requests / streams, 1.0)
    budget = pass_tokens(instance)
    batch = min(most_decoding_sequences(instance), stream_requests, (concurrency or num_requests) / streams)
    if server.mixes_prefill:
        batch = min(batch, answer * budget / (prompt + answer))
    # A closed loop of fewer requests than streams leaves some of them idle.
    busy_fraction = min((concurrency or num_requests) / streams, 1.0)
    batch = max(batch, 1.0)
    fill_prefills, prefills = batch * prompt / budget, stream_requests * prompt / budget
    full_rounds = floor(stream_requests / batch + 1e-9) if longest == 1.0 else stream_requests / batch - 1.0
    last_batch = max(stream_requests - full_rounds * batch, 0.0) if longest == 1.0 else batch / longest
    context = request.prompt_len + answer // 2
    prefill = make_prefill_pass(
        instance, budget, (concurrency / streams) ** GROUP_POWER if concurrency else stream_requests
    )
    # A pass may hold fewer prompt tokens than its budget, so more passes are needed.
    scale = budget / (prefill.prompts * prefill.prefill_tokens)
    full_batch, half_batch = PassShape(_round(batch), context), PassShape(_round(batch / 2), context)
    mixed = [mixed_pass(prefill, shape) if server.mixes_prefill else prefill for shape in (full_batch, half_batch)]
    shapes = (full_batch, half_batch, *mixed, *([PassShape(_round(last_batch), context)] if last_batch else []))

    def combine(times_s: Sequence[float]) -> LoadTimes:
        # Decode passes of the full and the half batch, both with prefill, and of the sequences left at the end, if any.
        full_s, half_s, mixed_s, mixed_half_s, *last_s = times_s
        extra_s = mixed_s - full_s if server.mixes_prefill else mixed_s
        fill_passes, prefill_passes = fill_prefills * scale, prefills * scale
        # Replicas that share experts run their passes in step, so all wait for those that prefill.
        share = min(prefill_passes / (stream_requests / batch * answer), 1.0)
        replicas = instance.layout.data_parallel if instance.layout.expert_parallel > 1 else 1
        prefill_passes *= _waiting_factor(share, replicas) if server.mixes_prefill else 1.0
        decode_passes = max(full_rounds * answer - (fill_passes if server.mixes_prefill else 0.0), 0.0)
        total_s = decode_passes * full_s + fill_passes * mixed_half_s + max(prefill_passes - fill_passes, 0.0) * extra_s
        total_s += fill_passes * half_s if server.mixes_prefill else 0.0
        total_s += longest * answer * last_s[0] if last_s else 0.0
        total_s /= busy_fraction
        rate = num_requests / total_s
        alone_s = mixed_half_s * ceil(prefill_passes_per_prompt(instance))
        if concurrency is None:
            mean_s = full_s + extra_s * min(prefill_passes / (stream_requests / batch * answer), 1.0)
            # Little's law: requests that do not decode wait for their first token.
            return LoadTimes(rate * answer, max(num_requests / rate - (answer - 1) * mean_s, alone_s), mean_s)
        # Prefill passes between the start of a request and that of its successor.
        round_prefills = prefill_passes / stream_requests * batch
        wait_s = 0.5 * extra_s * round_prefills * max(1.0 - round_prefills / answer, 0.0)
        first_s = max(wait_s + 0.5 * alone_s, alone_s)
        request_s = concurrency / rate - (1.0 - typical) * extra_s * round_prefills
        return LoadTimes(rate * answer, first_s, max((request_s - first_s) / (answer - 1), full_s))

    return Load(shapes, combine, batch * streams)


def static_batch(instance: Instance, batch_size: int) -> Load:
    """Return the load of one batch: all prompts, then all answers.

    Args:
        instance: The instance; its request gives the lengths.
        batch_size: Sequences of the batch on all replicas.
    """
    request = instance.request
    batch = max(_round(batch_size / instance.num_streams), 1)
    together = max(min(batch, pass_tokens(instance) // request.new_len), 1)
    prefill = PassShape(prefill_tokens=request.new_len, prefill_context=request.cached_len, prompts=together)
    decode = PassShape(batch, request.prompt_len + request.output_len // 2)

    def combine(times_s: Sequence[float]) -> LoadTimes:
        first_s = times_s[0] * batch / together
        total_s = first_s + (request.output_len - 1) * times_s[1]
        return LoadTimes(batch_size * request.output_len / total_s, first_s, times_s[1])

    return Load((prefill, decode), combine, batch)


def _waiting_factor(share: float, replicas: int) -> float:
    """Return the prefill time of replicas that run their passes in step, over that of independent ones.

    With f the share of passes in which a replica prefills and n replicas, some replica prefills in 1 - (1 - f)^n of the
    passes. One alone adds LONE_PREFILL_SHARE of what all together add to a pass; in between it grows linearly.

    >>> _waiting_factor(0.1, 1)
    1.0
    """
    if replicas == 1 or share <= 0.0:
        return 1.0
    some = 1.0 - (1.0 - share) ** replicas
    return (LONE_PREFILL_SHARE * some + (1.0 - LONE_PREFILL_SHARE) * (replicas * share - some) / (replicas - 1)) / share


def prefill_passes_per_prompt(instance: Instance) -> float:
    """Return the number of prefill passes of one prompt; below 1 if several prompts share a pass."""
    return instance.request.new_len / pass_tokens(instance)


def pass_tokens(instance: Instance) -> int:
    """Return the prompt tokens of a full prefill pass: the token budget, or a longer prompt that cannot be cut."""
    server, prompt = instance.request.server, instance.request.new_len
    return server.pass_tokens if server.chunked_prefill else max(server.pass_tokens, prompt)


def make_prefill_pass(instance: Instance, tokens: int, requests: float) -> PassShape:
    """Return a prefill pass over prompts of at most some requests: whole prompts up to the budget, or chunks of it."""
    request = instance.request
    most = ceil(tokens / request.new_len) if request.server.chunked_prefill else tokens // request.new_len
    prompts = max(min(most, int(requests)), 1)
    chunk = min(tokens // prompts, request.new_len)
    return PassShape(0, 0, chunk, request.cached_len + (request.new_len - chunk) // 2, prompts)


def mixed_pass(prefill: PassShape, decode: PassShape) -> PassShape:
    """Return a prefill pass that also decodes the sequences of a decode pass."""
    return prefill._replace(decode_batch=decode.decode_batch, decode_context=decode.decode_context)


def _round(count: float) -> int:
    return max(round(count), 1)
