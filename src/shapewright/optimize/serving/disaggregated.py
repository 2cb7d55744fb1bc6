"""Disaggregated serving: some instances prefill whole prompts, others decode, and caches are sent between them.

Legend: b prompts of a prefill pass, T_p its time, B sequences of a decode pass, T_d its time, P and O lengths of prompt
and answer, E tokens that a decode pass adds to a sequence, x prefill and y decode instances, rho load of the former.

    requests/s of a prefill instance          b / T_p for each replica and pipeline stage
    requests/s of a decode instance           B E / ((O - 1) T_d) for each replica and pipeline stage
    requests/s of the unit                    min(rho x of the former, y of the latter)
    time to first token                       T_p + rho T_p / (2 (1 - rho)) + transfer of the cache of one prompt

Assumes: as in serving.aggregated; a cached prefix is on the prefill instances and is sent with the rest; the whole
transfer counts in the time to the first token, although the first token is known before it; the devices of the smaller
side transfer their parts of a cache in parallel, between nodes if the unit is larger than a node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from shapewright.core.errors import ShapewrightError
from shapewright.lowering.operations.collective import Collective
from shapewright.optimize.serving.aggregated import MOST_LOAD_FRACTION
from shapewright.optimize.serving.passes import PrefillSizes
from shapewright.optimize.serving.point import OperatingPoint, Span, batch_sizes, span_of, waiting_s
from shapewright.pricing.operations import price_operations

if TYPE_CHECKING:
    from shapewright.optimize.serving.passes import Pass
    from shapewright.optimize.serving.point import Instance
    from shapewright.prediction.composition.step import StepTimes

_PROMPT_BATCHES = (1, 2, 4, 16, 64)
_MOST_PREFILL_TOKENS = 32768
_MOST_INSTANCES = 8
"""Most instances of either kind in a unit."""
_MOST_PREFILLERS = 4
# A first token waits for all prompts of its pass, so a larger batch of prompts must serve more by this fraction.
_LEAST_GAIN_FRACTION = 0.03
_LEAST_LOAD_FRACTION = 0.05


class PrefillCandidate(NamedTuple):
    """An instance that prefills a batch of prompts."""

    instance: Instance
    batch_size: int

    def passes(self) -> tuple[Pass, ...]:
        """Return the prefill pass."""
        return (self.instance.passes.prefill(*self.sizes),)

    @property
    def sizes(self) -> PrefillSizes:
        """Sizes of the prefill pass."""
        request = self.instance.request
        return PrefillSizes(self.batch_size, request.new_len, request.cached_len)


class DecodeCandidate(NamedTuple):
    """An instance that decodes a batch."""

    instance: Instance
    batch_size: int

    def passes(self) -> tuple[Pass, ...]:
        """Return a plain decode pass, and the one that runs."""
        return self.instance.decode_passes(self.batch_size)


def prefill_candidates(instance: Instance) -> Iterator[PrefillCandidate]:
    """Yield the instance with each batch of prompts that fits in memory."""
    request, stages = instance.request, instance.layout.pipeline_parallel
    sizes = [each for each in _PROMPT_BATCHES if each == 1 or each * request.new_len <= _MOST_PREFILL_TOKENS]
    held = instance.list_most_sequences([each * request.new_len for each in sizes], request.prompt_len)
    for batch_size, most in zip(sizes, held, strict=True):
        if most // stages >= batch_size:
            yield PrefillCandidate(instance, batch_size)


def decode_candidates(instance: Instance) -> Iterator[DecodeCandidate]:
    """Yield the instance with each batch of sequences that fits in memory."""
    query_len, stages = instance.request.query_len, instance.layout.pipeline_parallel
    most = instance.most_sequences(1) // stages
    if most >= 1:
        most = instance.most_sequences(most * query_len) // stages
    for batch_size in batch_sizes(most):
        yield DecodeCandidate(instance, batch_size)


class Prefiller(NamedTuple):
    """A prefill instance with the time of its pass."""

    instance: Instance
    batch_size: int
    service: Span

    @property
    def requests_per_s(self) -> float:
        """Prompts per second at full load."""
        return self.batch_size * self.instance.num_streams / self.service.middle_s


class Decoder(NamedTuple):
    """A decode instance with the time of its pass."""

    instance: Instance
    batch_size: int
    step: Span

    @property
    def requests_per_s(self) -> float:
        """Answers per second."""
        request = self.instance.request
        tokens_per_s = self.batch_size * self.instance.num_streams * request.tokens_per_pass / self.step.middle_s
        return tokens_per_s / (request.output_len - 1)


def make_prefiller(candidate: PrefillCandidate, times: Sequence[StepTimes]) -> Prefiller:
    """Combine a candidate with the time of its pass."""
    return Prefiller(candidate.instance, candidate.batch_size, span_of(times[0]))


def make_decoder(candidate: DecodeCandidate, times: Sequence[StepTimes]) -> Decoder:
    """Combine a candidate with the times of its passes."""
    plain, step = (span_of(time) for time in times)
    speculation = candidate.instance.request.speculation
    if speculation:
        step = step.plus(plain.scaled(speculation.draft_s(1.0)))
    return Decoder(candidate.instance, candidate.batch_size, step)


def pair_instances(
    prefillers: Sequence[Prefiller], decoders: Sequence[Decoder], ttft_limit_s: float | None = None
) -> Iterator[OperatingPoint]:
    """Yield, for each decode instance, its best unit with one of the prefill instances that serve most.

    Args:
        prefillers: Prefill instances with each batch of prompts.
        decoders: Decode instances with each batch.
        ttft_limit_s: Limit of the first token, to which the load of prefill instances is reduced; by default that of
            the request. [s]
    """
    if not prefillers or not decoders:
        return
    request = decoders[0].instance.request
    limit_s = request.ttft_limit_s if ttft_limit_s is None else ttft_limit_s
    chosen: list[tuple[Prefiller, float, Span]] = []
    for prefiller in sorted(prefillers, key=lambda one: -one.requests_per_s / one.instance.layout.num_devices):
        transfer = transfer_span(prefiller.instance, request.num_devices)
        if transfer is None:
            continue
        load = _load_within(prefiller.service, transfer, limit_s)
        if load >= _LEAST_LOAD_FRACTION:
            chosen.append((prefiller, load, transfer))
    batches: dict[int, list[Prefiller]] = {}
    for prefiller, _, _ in chosen:
        batches.setdefault(id(prefiller.instance), []).append(prefiller)
    chosen = _smallest_good_batches(chosen)
    chosen.sort(key=lambda one: -_served_per_device(one))
    for decoder in decoders:
        points = [
            point
            for prefiller, load, transfer in chosen[:_MOST_PREFILLERS]
            if (point := _best_unit(prefiller, decoder, load, transfer, batches[id(prefiller.instance)])) is not None
        ]
        if points:
            yield max(points, key=lambda point: point.total_tokens_per_s(request.num_devices))


def _served_per_device(chosen: tuple[Prefiller, float, Span]) -> float:
    """Return the prompts per second and device at the allowed load."""
    prefiller, load, _ = chosen
    return load * prefiller.requests_per_s / prefiller.instance.layout.num_devices


def _smallest_good_batches(chosen: Sequence[tuple[Prefiller, float, Span]]) -> list[tuple[Prefiller, float, Span]]:
    """Return, for each prefill instance, the smallest batch of prompts that serves nearly as many as its best one."""
    by_instance: dict[int, list[tuple[Prefiller, float, Span]]] = {}
    for one in chosen:
        by_instance.setdefault(id(one[0].instance), []).append(one)
    kept = []
    for batches in by_instance.values():
        least = (1.0 - _LEAST_GAIN_FRACTION) * max(map(_served_per_device, batches))
        kept.append(
            min((one for one in batches if _served_per_device(one) >= least), key=lambda one: one[0].batch_size)
        )
    return kept


def transfer_span(instance: Instance, num_devices: int | None, prompt_len: int | None = None) -> Span | None:
    """Return the time to send the cache of one prompt; None if the bandwidth of the link is unknown. [s]

    Args:
        instance: The prefill instance; each of its devices sends its part.
        num_devices: Devices of the whole server; within a node, caches are sent over the node's link.
        prompt_len: Tokens of the prompt; by default those of the request.
    """
    device = instance.scenario.device
    total_bytes = max(instance.cache_bytes(prompt_len or instance.request.prompt_len))
    in_node = num_devices is not None and num_devices <= device.node_size
    send = Collective(
        name="cache.transfer",
        op_name="send_recv",
        axis="pipeline",
        message_bytes=total_bytes,
        num_ranks=2,
        ranks_per_node=2 if in_node else 1,
        dtype="bf16",
    )
    try:
        (price,) = price_operations([send], device)
    except ShapewrightError:
        return None
    return Span(float(price.time_s), float(price.low_s), float(price.high_s))


def _load_within(service: Span, transfer: Span, limit_s: float | None) -> float:
    """Return the largest load at which the mean time to the first token keeps a limit; 0 if none does.

    S (1 + rho / (2 (1 - rho))) + transfer = limit, solved for rho.
    """
    if limit_s is None:
        return MOST_LOAD_FRACTION
    wait = (limit_s - transfer.middle_s) / service.middle_s - 1.0
    return min(max(2.0 * wait / (1.0 + 2.0 * wait), 0.0), MOST_LOAD_FRACTION) if wait > 0.0 else 0.0


def _best_unit(
    prefiller: Prefiller, decoder: Decoder, load: float, transfer: Span, batches: Sequence[Prefiller]
) -> OperatingPoint | None:
    """Return the unit of prefill and decode instances with most tokens per second of the available devices.

    Args:
        prefiller: The prefill instance with the batch of prompts that serves most.
        decoder: The decode instance.
        load: Load that the prefill instance may have.
        transfer: Time to send the cache of one prompt. [s]
        batches: The prefill instance with each of its batches of prompts. Of those that carry the load, the one with
            the earliest first token is taken, because a pass takes only the prompts that wait.
    """
    request, instance = decoder.instance.request, decoder.instance
    prefill_layout, layout = prefiller.instance.layout, instance.layout
    limit = request.num_devices
    prefill_rate, decode_rate = prefiller.requests_per_s, decoder.requests_per_s
    best_rate, best, requests_per_s = 0.0, None, 0.0
    for num_prefill in range(1, _MOST_INSTANCES + 1):
        most, prefilling = _MOST_INSTANCES, num_prefill * prefill_layout.num_devices
        if limit is not None:
            most = min(most, (limit - prefilling) // layout.num_devices)
        if most < 1:
            break
        for num_decode in _balanced_counts(num_prefill * load * prefill_rate / decode_rate, most):
            rate = min(num_prefill * load * prefill_rate, num_decode * decode_rate)
            devices = prefilling + num_decode * layout.num_devices
            total = rate / devices if limit is None else rate * (limit // devices)
            if best is None or total > best_rate * (1.0 + 1e-9):
                best_rate, best, requests_per_s = total, (num_prefill, num_decode), rate
    if best is None:
        return None
    num_prefill, num_decode = best
    prefilling = num_prefill * prefill_layout.num_devices
    prefiller, reached = min(
        (
            (one, fraction)
            for one in batches
            if (fraction := requests_per_s / (num_prefill * one.requests_per_s)) <= MOST_LOAD_FRACTION * (1.0 + 1e-9)
        ),
        key=lambda run: run[0].service.middle_s + waiting_s(run[0].service.middle_s, run[1]),
    )
    service = prefiller.service
    # Decode instances that receive fewer prompts run smaller batches, but are priced with full ones.
    return OperatingPoint(
        mode="disaggregated",
        format=instance.format,
        layout=layout,
        prefill_layout=prefill_layout,
        num_instances=num_decode,
        num_prefill_instances=num_prefill,
        batch_size=decoder.batch_size,
        num_sequences=decoder.batch_size * instance.num_streams * num_decode,
        prefill_tokens=prefiller.batch_size * request.new_len,
        prefill_load_fraction=reached,
        prompt_cost_fraction=prefilling / (prefilling + num_decode * layout.num_devices),
        ttft=Span(
            service.middle_s + waiting_s(service.middle_s, reached) + transfer.middle_s,
            service.low_s + waiting_s(service.low_s, reached) + transfer.low_s,
            service.high_s + waiting_s(service.high_s, reached) + transfer.high_s,
        ),
        tpot=decoder.step.scaled(1.0 / request.tokens_per_pass),
        requests_per_s=requests_per_s,
        output_len=request.output_len,
    )


def _balanced_counts(ratio: float, most: int) -> set[int]:
    """Return the numbers of decode instances next to the balanced ratio, limited by the available devices."""
    below = int(ratio)
    return {min(max(count, 1), most) for count in (below, below + 1)}
