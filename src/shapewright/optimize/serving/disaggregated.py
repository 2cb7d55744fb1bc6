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
    # A draft reads the prompts as well.
    service = span_of(times[0]).scaled(1.0 + candidate.instance.request.draft_memory_fraction)
    return Prefiller(candidate.instance, candidate.batch_size, service)


def make_decoder(candidate: DecodeCandidate, times: Sequence[StepTimes]) -> Decoder:
    """Combine a candidate with the times of its passes."""
    plain, step = (span_of(time) for time in times)
    speculation = candidate.instance.request.speculation
    if speculation:
        step = step.plus(plain.scaled(speculation.draft_s(1.0)))
    return Decoder(candidate.instance, candidate.batch_size, step)


class _Choice(NamedTuple):
    """A prefill instance with the batch of prompts that it is paired with.

    Attributes:
        prefiller: The instance with the batch.
        load: Load that it may have.
        transfer: Time to send the cache of one prompt.
        batches: The instance with each of its batches that keep the limit.
    """

    prefiller: Prefiller
    load: float
    transfer: Span
    batches: Sequence[Prefiller]

    @property
    def served_per_device(self) -> float:
        """Prompts per second and device at the allowed load."""
        return self.load * self.prefiller.requests_per_s / self.prefiller.instance.layout.num_devices


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
    request, node_size = decoders[0].instance.request, decoders[0].instance.scenario.device.node_size
    limit_s = request.ttft_limit_s if ttft_limit_s is None else ttft_limit_s
    # Without a number of devices, a unit uses the link of a node unless it is larger.
    counts = (node_size, node_size + 1) if request.num_devices is None else (request.num_devices,)
    chosen: dict[tuple[int, int], list[_Choice]] = {}
    for decoder in decoders:
        best: OperatingPoint | None = None
        for count in counts:
            key = (id(decoder.instance), count)
            if key not in chosen:
                chosen[key] = _choose_prefillers(prefillers, decoder.instance, limit_s, count)
            if count != counts[-1] and all(_least_devices(each, decoder) > count for each in chosen[key]):
                continue  # every unit is larger
            points = [point for each in chosen[key] if (point := _best_unit(each, decoder)) is not None]
            best = max(points, key=lambda point: point.total_tokens_per_s(request.num_devices), default=None)
            if best is not None and best.num_devices <= count:
                break
        if best is not None:
            yield best


def _least_devices(choice: _Choice, decoder: Decoder) -> int:
    """Count the devices of the smallest unit, of one prefill and one decode instance."""
    return choice.prefiller.instance.layout.num_devices + decoder.instance.layout.num_devices


def _choose_prefillers(
    prefillers: Sequence[Prefiller], receiver: Instance, limit_s: float | None, num_devices: int
) -> list[_Choice]:
    """Return the prefill instances that serve most, each with its smallest batch that serves nearly as many.

    Args:
        receiver: The decode instance that they send caches to.
        limit_s: Limit of the first token. [s]
        num_devices: Devices that both are among.
    """
    by_instance: dict[int, list[Prefiller]] = {}
    for prefiller in prefillers:
        by_instance.setdefault(id(prefiller.instance), []).append(prefiller)
    kept = []
    for own in by_instance.values():
        transfer = transfer_span(own[0].instance, receiver, num_devices)
        if transfer is None:
            continue
        loads = [(one, _load_within(one.service, transfer, limit_s)) for one in own]
        batches = [one for one, load in loads if load >= _LEAST_LOAD_FRACTION]
        choices = [_Choice(one, load, transfer, batches) for one, load in loads if load >= _LEAST_LOAD_FRACTION]
        least = (1.0 - _LEAST_GAIN_FRACTION) * max((each.served_per_device for each in choices), default=0.0)
        good = [each for each in choices if each.served_per_device >= least]
        kept += sorted(good, key=lambda each: each.prefiller.batch_size)[:1]
    return sorted(kept, key=lambda each: -each.served_per_device)[:_MOST_PREFILLERS]


def transfer_span(sender: Instance, receiver: Instance, num_devices: int, prompt_len: int | None = None) -> Span | None:
    """Return the time to send the cache of one prompt; None if the bandwidth of the link is unknown. [s]

    Args:
        sender: The prefill instance.
        receiver: The decode instance.
        num_devices: Devices that both are among; within a node, caches are sent over the node's link.
        prompt_len: Tokens of the prompt; by default those of the request.
    """
    device, tokens = sender.scenario.device, prompt_len or sender.request.prompt_len
    send = Collective(
        name="cache.transfer",
        op_name="send_recv",
        axis="pipeline",
        message_bytes=max(*sender.cache_bytes(tokens), *receiver.cache_bytes(tokens)),
        num_ranks=2,
        ranks_per_node=2 if num_devices <= device.node_size else 1,
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


def _best_unit(choice: _Choice, decoder: Decoder) -> OperatingPoint | None:
    """Return the unit of prefill and decode instances with most tokens per second of the available devices.

    Of the batches of prompts that carry the load, the one with the earliest first token is taken, because a pass takes
    only the prompts that wait.
    """
    prefiller, load, transfer, batches = choice
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
        # Further ones wait for prompts; fewer may leave room for another unit.
        balanced = int(num_prefill * load * prefill_rate / decode_rate) + 1
        for num_decode in range(1, min(balanced, most) + 1):
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
