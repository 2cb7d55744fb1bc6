"""Operating points of instances: the passes of all candidates priced together, format by format.

Batches are looked at in steps of a third to a half (``instance.batch_sizes``). Where one keeps the limits and the next
does not, the largest that does is found by halving: it serves up to a fifth more than the step before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from shapewright.adding_up import add_up_passes
from shapewright.errors import ShapewrightError, WorkloadError
from shapewright.serving.aggregated import AggregatedCandidate, aggregated_candidates
from shapewright.serving.disaggregated import (
    DecodeCandidate,
    Decoder,
    PrefillCandidate,
    decode_candidates,
    make_decoder,
    make_prefiller,
    pair_up,
    prefill_candidates,
)

if TYPE_CHECKING:
    from shapewright.adding_up import StepTimes
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.serving.instance import Instance
    from shapewright.serving.passes import Pass
    from shapewright.serving.point import OperatingPoint

Candidate = AggregatedCandidate | PrefillCandidate | DecodeCandidate
Price = Callable[[Sequence[Candidate]], "list[list[StepTimes]]"]
_C = TypeVar("_C", AggregatedCandidate, DecodeCandidate)


def price_points(instances: Sequence[Instance], said: list[str], *, uncalibrated: bool) -> list[OperatingPoint]:
    """Every way to serve with some instances of one model on one device, priced.

    Args:
        instances: Instances that hold a sequence, of any layouts and formats.
        said: Gets the reasons of formats that are left out.
        uncalibrated: Price as if nobody had measured the device.

    Raises:
        WorkloadError: nothing can be priced.
    """
    config, device = instances[0].config, instances[0].device
    points: list[OperatingPoint] = []
    reasons: list[str] = []

    def price(candidates: Sequence[Candidate]) -> list[list[StepTimes]]:
        return _times(candidates, config, device, uncalibrated=uncalibrated)

    for name in dict.fromkeys(instance.format.name for instance in instances):
        own = [instance for instance in instances if instance.format.name == name]
        together: list[AggregatedCandidate] = [one for instance in own for one in aggregated_candidates(instance)]
        prefill: list[PrefillCandidate] = [one for instance in own for one in prefill_candidates(instance)]
        decode: list[DecodeCandidate] = [one for instance in own for one in decode_candidates(instance)]
        try:
            timed = iter(price([*together, *prefill, *decode]))
        except ShapewrightError as error:
            said.append(f"{name} is left out: {error}")
            reasons.append(str(error))
            continue
        aggregated = [(one, one.point(next(timed))) for one in together]
        prefillers = [make_prefiller(one, next(timed)) for one in prefill]
        decoders = [(one, make_decoder(one, next(timed))) for one in decode]
        points += _close_in(aggregated, price)
        points += pair_up(prefillers, _close_in_decoders(decoders, price))
    if not points:
        if not reasons:
            raise WorkloadError("nothing could be priced; give another --isl or --osl")
        fewest = min(instance.layout.num_devices for instance in instances)
        raise WorkloadError(
            f"{config.title} needs {fewest} x {device.name} at least, which have no price: {reasons[0]}"
        )
    return points


def _close_in(priced: list[tuple[AggregatedCandidate, OperatingPoint]], price: Price) -> list[OperatingPoint]:
    """Points with those added that lie between a batch that keeps the limits and one that does not.

    Only where the larger of the two would serve more than the best so far.
    """
    while True:
        keeps = [point.meets(each.instance.request) for each, point in priced]
        best = max((_total(*entry) for entry, kept in zip(priced, keeps, strict=True) if kept), default=0.0)
        series: dict[object, list[_Tried[AggregatedCandidate]]] = {}
        for (each, point), kept in zip(priced, keeps, strict=True):
            tried = _Tried(each.batch_size, kept, _total(each, point) > best, each)
            series.setdefault((id(each.instance), each.share), []).append(tried)
        between = [
            each._replace(batch_size=size, load_fraction=each.load_fraction * size / each.batch_size)
            for own in series.values()
            for each, size in _halves(own)
        ]
        if not between:
            return [point for _, point in priced]
        priced += [(each, each.point(times)) for each, times in zip(between, price(between), strict=True)]


def _close_in_decoders(priced: list[tuple[DecodeCandidate, Decoder]], price: Price) -> list[Decoder]:
    """Decoding instances, with the largest batches added that keep the limit on the time per token."""
    while True:
        series: dict[int, list[_Tried[DecodeCandidate]]] = {}
        for each, decoder in priced:
            request = each.instance.request
            limit_s = float("inf") if request.tpot_limit_s is None else request.tpot_limit_s
            keeps = decoder.step.middle_s <= limit_s * request.tokens_per_pass
            tried = _Tried(each.batch_size, keeps, may_gain=True, candidate=each)
            series.setdefault(id(each.instance), []).append(tried)
        between = [each._replace(batch_size=size) for own in series.values() for each, size in _halves(own)]
        if not between:
            return [decoder for _, decoder in priced]
        priced += [(each, make_decoder(each, times)) for each, times in zip(between, price(between), strict=True)]


class _Tried(NamedTuple, Generic[_C]):
    """A batch that was priced.

    Attributes:
        batch_size: Its sequences.
        keeps: Whether it keeps the limits.
        may_gain: Whether it would serve more than the best that does.
        candidate: The batch itself.
    """

    batch_size: int
    keeps: bool
    may_gain: bool
    candidate: _C


def _halves(series: list[_Tried[_C]]) -> Iterator[tuple[_C, int]]:
    """Who keeps the limits, and the batch halfway to the next, where that one does not but would serve more."""
    for tried, above in pairwise(sorted(series, key=lambda each: each.batch_size)):
        if tried.keeps and not above.keeps and above.may_gain and above.batch_size - tried.batch_size > 1:
            yield tried.candidate, (tried.batch_size + above.batch_size) // 2


def _total(candidate: AggregatedCandidate, point: OperatingPoint) -> float:
    return point.total_tokens_per_s(candidate.instance.request.num_devices)


def _times(
    candidates: Sequence[Candidate],
    config: TransformerConfig,
    device: Device,
    *,
    uncalibrated: bool,
) -> list[list[StepTimes]]:
    """Times of the passes of each candidate; a pass that several have is priced once."""
    known: dict[int, int] = {}
    distinct: list[Pass] = []
    wanted: list[list[int]] = []
    for candidate in candidates:
        row = []
        for one in candidate.passes():
            if id(one) not in known:
                known[id(one)] = len(distinct)
                distinct.append(one)  # which also keeps its identity its own
            row.append(known[id(one)])
        wanted.append(row)
    times = add_up_passes(distinct, config, device, uncalibrated=uncalibrated)
    return [[times[index] for index in row] for row in wanted]
