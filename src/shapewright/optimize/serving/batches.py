"""Operating points of instances: batches and chunkings of prompts, priced together for each format.

Batches that are powers of four are priced first, then those between them that are next to one near the front. If one
batch keeps the limits and the next does not, the largest that keeps them is found by bisection: it serves up to a fifth
more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from shapewright.core.errors import ShapewrightError, UnknownRateError, WorkloadError
from shapewright.core.notes import Note, Refusal
from shapewright.core.texts import with_fields
from shapewright.optimize.serving.aggregated import MOST_LOAD_FRACTION, AggregatedCandidate, aggregated_candidates
from shapewright.optimize.serving.disaggregated import (
    DecodeCandidate,
    Decoder,
    PrefillCandidate,
    Prefiller,
    decode_candidates,
    make_decoder,
    make_prefiller,
    pair_instances,
    prefill_candidates,
)
from shapewright.optimize.serving.pass_times import time_passes
from shapewright.optimize.serving.point import recommended_ttft_limit_s

if TYPE_CHECKING:
    from shapewright.optimize.serving.passes import Pass
    from shapewright.optimize.serving.point import Instance, OperatingPoint
    from shapewright.optimize.serving.request import ServingRequest
    from shapewright.prediction.composition.step import StepTimes
    from shapewright.prediction.scenario import Scenario

Candidate = AggregatedCandidate | PrefillCandidate | DecodeCandidate
# Ratio of the batches that are priced first. Those next to one are priced too if its throughput is at least this share
# of the best at its speed for a user.
_COARSE_STEP, _NEAR_FRACTION = 4, 0.8
_COARSE_BATCHES = frozenset(_COARSE_STEP**power for power in range(16))
Price = Callable[[Sequence[Candidate]], "list[list[StepTimes]]"]
_C = TypeVar("_C", AggregatedCandidate, DecodeCandidate)


def price_points(instances: Sequence[Instance], notes: list[str]) -> list[OperatingPoint]:
    """Price the operating points of instances of one model on one device.

    Args:
        instances: Instances that hold a sequence, of any layouts and formats.
        notes: Receives the reasons of formats that are left out.

    Raises:
        WorkloadError: nothing can be priced.
    """
    scenario, request = instances[0].scenario, instances[0].request
    points: list[OperatingPoint] = []
    refusals: list[Refusal] = []

    def price(candidates: Sequence[Candidate]) -> list[list[StepTimes]]:
        return _compose_candidates(candidates, scenario)

    for name in dict.fromkeys(instance.format.name for instance in instances):
        own = [instance for instance in instances if instance.format.name == name]
        inside = [instance for instance in own if instance.layout.num_devices <= scenario.device.node_size]
        try:
            try:
                points += _price_format(own, request, price)
            except UnknownRateError as error:  # of a network, for example
                if not 0 < len(inside) < len(own):
                    raise
                points += _price_format(inside, request, price)
                note = Note("layouts over several nodes are left out: " + error.text, "layouts-left-out")
                notes += [note] if note not in notes else []
        except ShapewrightError as error:
            notes.append(Note(f"{name} is left out: " + error.text, "format-left-out", "formats"))
            refusals.append(Refusal.of(error))
    if not points:
        if not refusals:
            raise refuse_short_answers(request)
        fewest = min(instance.layout.num_devices for instance in instances)
        raise WorkloadError(
            f"{scenario.config.title} needs at least {fewest} x {scenario.device.name}, which cannot be priced: "
            + refusals[0].text
        )
    return points


def _price_format(instances: Sequence[Instance], request: ServingRequest, price: Price) -> list[OperatingPoint]:
    """Price the operating points of instances of one format.

    Raises:
        ShapewrightError: one of them cannot be priced.
    """
    coarse, between = _split_coarse([one for instance in instances for one in aggregated_candidates(instance)])
    prefill: list[PrefillCandidate] = [one for instance in instances for one in prefill_candidates(instance)]
    decode: list[DecodeCandidate] = [one for instance in instances for one in decode_candidates(instance)]
    timed = iter(price([*coarse, *prefill, *decode]))
    aggregated = [(one, one.point(next(timed))) for one in coarse]
    finer = _near_front(aggregated, between)
    prefillers = [make_prefiller(one, next(timed)) for one in prefill]
    decoders = [(one, make_decoder(one, next(timed))) for one in decode]
    aggregated += [(one, one.point(times)) for one, times in zip(finer, price(finer), strict=True)] if finer else []
    points = _bisect_batches(aggregated, price)
    return points + _price_disaggregated(prefillers, _bisect_decoders(decoders, price), points, request)


def refuse_short_answers(request: ServingRequest) -> WorkloadError:
    """Return the error for answers so short that no instance can both prefill and decode."""
    return WorkloadError(
        f"answers of {request.output_len} tokens are too short beside prompts of {request.new_len}: prefill would take "
        f"over {MOST_LOAD_FRACTION:.0%} of the passes of an instance, and the wait for it grow without bound",
        advice=with_fields("give a longer {output_len}, or predict the prefill"),
        field="output_len",
    )


def _price_disaggregated(
    prefillers: Sequence[Prefiller],
    decoders: Sequence[Decoder],
    aggregated: Sequence[OperatingPoint],
    request: ServingRequest,
) -> list[OperatingPoint]:
    """Return disaggregated points.

    Without a limit of the first token, prefill instances run at their largest load. Decode instances whose first token
    is then too late for a recommended point are also paired at a smaller load.
    """
    found = list(pair_instances(prefillers, decoders))
    limit_s = recommended_ttft_limit_s([*aggregated, *found], request)
    late = {(point.layout, point.batch_size) for point in found if point.ttft.middle_s > limit_s}
    again = [one for one in decoders if (one.instance.layout, one.batch_size) in late]
    return [*found, *pair_instances(prefillers, again, limit_s)]


def _split_coarse(
    candidates: Sequence[AggregatedCandidate],
) -> tuple[list[AggregatedCandidate], list[AggregatedCandidate]]:
    """Split candidates into those whose batch is a power of four or the largest of its series, and the others.

    A series has one layout and one chunking.
    """
    most: dict[object, int] = {}
    for each in candidates:
        series = (each.instance.layout, each.chunking)
        most[series] = max(most.get(series, 0), each.batch_size)
    coarse: list[AggregatedCandidate] = []
    between: list[AggregatedCandidate] = []
    for each in candidates:
        is_power = each.batch_size in _COARSE_BATCHES
        is_coarse = is_power or each.batch_size == most[each.instance.layout, each.chunking]
        (coarse if is_coarse else between).append(each)
    return coarse, between


def _near_front(
    priced: Sequence[tuple[AggregatedCandidate, OperatingPoint]], between: Sequence[AggregatedCandidate]
) -> list[AggregatedCandidate]:
    """Return the candidates whose batch is next to a priced one near the front, of the same layout and chunking."""
    near: dict[object, list[int]] = {}
    best = 0.0
    for each, point in sorted(priced, key=lambda entry: -entry[1].tokens_per_s_per_user):
        best = max(best, point.tokens_per_s_per_device)
        if point.tokens_per_s_per_device >= _NEAR_FRACTION * best:
            near.setdefault((each.instance.layout, each.chunking), []).append(each.batch_size)
    return [
        each
        for each in between
        if any(
            size < _COARSE_STEP * each.batch_size and each.batch_size < _COARSE_STEP * size
            for size in near.get((each.instance.layout, each.chunking), ())
        )
    ]


def _bisect_batches(priced: list[tuple[AggregatedCandidate, OperatingPoint]], price: Price) -> list[OperatingPoint]:
    """Return the points, with batches bisected between one that keeps the limits and the next that does not.

    A pair is bisected only if the larger batch would serve more than the best so far.
    """
    while True:
        keeps = [point.meets(each.instance.request) for each, point in priced]
        best = max(
            (_total_tokens_per_s(*entry) for entry, kept in zip(priced, keeps, strict=True) if kept), default=0.0
        )
        series: dict[object, list[_PricedBatch[AggregatedCandidate]]] = {}
        for (each, point), kept in zip(priced, keeps, strict=True):
            tried = _PricedBatch(each.batch_size, kept, _total_tokens_per_s(each, point) > best, each)
            series.setdefault((each.instance.layout, each.chunking), []).append(tried)
        between = [
            each._replace(batch_size=size, load_fraction=each.load_fraction * size / each.batch_size)
            for own in series.values()
            for each, size in _midpoints(own)
        ]
        if not between:
            return [point for _, point in priced]
        priced += [(each, each.point(times)) for each, times in zip(between, price(between), strict=True)]


def _bisect_decoders(priced: list[tuple[DecodeCandidate, Decoder]], price: Price) -> list[Decoder]:
    """Return the decoding instances, with the largest batches that keep the limit of the time per token added."""
    while True:
        series: dict[object, list[_PricedBatch[DecodeCandidate]]] = {}
        for each, decoder in priced:
            request = each.instance.request
            limit_s = float("inf") if request.tpot_limit_s is None else request.tpot_limit_s
            keeps = decoder.step.middle_s <= limit_s * request.tokens_per_pass
            tried = _PricedBatch(each.batch_size, keeps, may_gain=True, candidate=each)
            series.setdefault(each.instance.layout, []).append(tried)
        between = [each._replace(batch_size=size) for own in series.values() for each, size in _midpoints(own)]
        if not between:
            return [decoder for _, decoder in priced]
        priced += [(each, make_decoder(each, times)) for each, times in zip(between, price(between), strict=True)]


class _PricedBatch(NamedTuple, Generic[_C]):
    """A batch that was priced.

    Attributes:
        batch_size: Its sequences.
        keeps: Whether it keeps the limits.
        may_gain: Whether it would serve more than the best batch that keeps them.
        candidate: The candidate with the batch.
    """

    batch_size: int
    keeps: bool
    may_gain: bool
    candidate: _C


def _midpoints(series: list[_PricedBatch[_C]]) -> Iterator[tuple[_C, int]]:
    """Yield candidates that keep the limits, with the batch halfway to the next one if that does not keep them."""
    for tried, above in pairwise(sorted(series, key=lambda each: each.batch_size)):
        if tried.keeps and not above.keeps and above.may_gain and above.batch_size - tried.batch_size > 1:
            yield tried.candidate, (tried.batch_size + above.batch_size) // 2


def _total_tokens_per_s(candidate: AggregatedCandidate, point: OperatingPoint) -> float:
    return point.total_tokens_per_s(candidate.instance.request.num_devices)


def _compose_candidates(candidates: Sequence[Candidate], scenario: Scenario) -> list[list[StepTimes]]:
    """Return the times of the passes of each candidate; a pass that several candidates share is priced once."""
    lower_candidates(candidates)
    known: dict[object, int] = {}
    distinct: list[Pass] = []
    rows: list[list[int]] = []
    for candidate in candidates:
        row = []
        for one in candidate.passes():
            # Candidates that are priced together have the same format, so layout and key identify a pass.
            index = known.setdefault((one.layout, one.key), len(distinct))
            if index == len(distinct):
                distinct.append(one)
            row.append(index)
        rows.append(row)
    times = time_passes(distinct, scenario, candidates[0].instance.request.server)
    return [[times[index] for index in row] for row in rows]


def lower_candidates(candidates: Iterable[Candidate]) -> None:
    """Lower the passes of candidates of one instance together."""
    of_instances: dict[int, list[Candidate]] = {}
    for each in candidates:
        of_instances.setdefault(id(each.instance), []).append(each)
    for own in of_instances.values():
        instance = own[0].instance
        # Whole prompts are lowered before chunks: of the latter, only the cores of attention are priced.
        instance.passes.lower_prefill_passes({each.sizes for each in own if isinstance(each, PrefillCandidate)})
        aggregated = [each for each in own if isinstance(each, AggregatedCandidate)]
        chunks = {each.chunking: each for each in aggregated}.values()
        instance.passes.lower_prefill_passes({sizes for each in chunks for sizes in each.prefills()})
        tokens = {
            each.batch_size * instance.request.query_len + each.chunking.prompts * each.chunking.tokens
            for each in aggregated
        }
        instance.lower_batches({each.batch_size for each in own if not isinstance(each, PrefillCandidate)}, tokens)
