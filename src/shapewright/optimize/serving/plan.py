"""plan_serving: operating points of all layouts, formats, batches and ways to prefill; the best, and Pareto fronts.

The passes of all candidates are priced together, format by format. Batch sizes are tried in steps of a third to a half
(``instance.batch_sizes``). If one keeps the limits and the next does not, the largest that does is found by bisection:
it serves up to a fifth more than the step before it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from shapewright.core.errors import ShapewrightError, UnknownRateError, WorkloadError
from shapewright.core.notebook import NotebookDisplay
from shapewright.core.notes import Note, Refusal
from shapewright.optimize.serving.aggregated import AggregatedCandidate, aggregated_candidates
from shapewright.optimize.serving.capacity import InstanceCapacity, InstanceSearch, check_given
from shapewright.optimize.serving.disaggregated import (
    DecodeCandidate,
    Decoder,
    PrefillCandidate,
    decode_candidates,
    make_decoder,
    make_prefiller,
    pair_up,
    prefill_candidates,
)
from shapewright.optimize.serving.pass_times import time_passes
from shapewright.optimize.serving.point import OperatingPoint, pareto_front
from shapewright.optimize.serving.recommend import Recommendation, recommend
from shapewright.prediction.scenario import ScenarioResult
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.experts.kernels import describe_expert_kernel
from shapewright.pricing.servers import CURRENT_SERVER

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.optimize.serving.passes import Pass
    from shapewright.optimize.serving.point import Instance, OperatingPoint
    from shapewright.optimize.serving.request import ServingFormat, ServingRequest
    from shapewright.prediction.composition import StepTimes
    from shapewright.prediction.scenario import Scenario

Candidate = AggregatedCandidate | PrefillCandidate | DecodeCandidate
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
    scenario = instances[0].scenario
    points: list[OperatingPoint] = []
    refusals: list[Refusal] = []

    def price(candidates: Sequence[Candidate]) -> list[list[StepTimes]]:
        return _compose_candidates(candidates, scenario)

    for name in dict.fromkeys(instance.format.name for instance in instances):
        own = [instance for instance in instances if instance.format.name == name]
        together: list[AggregatedCandidate] = [one for instance in own for one in aggregated_candidates(instance)]
        prefill: list[PrefillCandidate] = [one for instance in own for one in prefill_candidates(instance)]
        decode: list[DecodeCandidate] = [one for instance in own for one in decode_candidates(instance)]
        try:
            timed = iter(price([*together, *prefill, *decode]))
        except ShapewrightError as error:
            notes.append(Note(f"{name} is left out: {error}", "format-left-out", "formats"))
            refusals.append(Refusal.of(error))
            continue
        aggregated = [(one, one.point(next(timed))) for one in together]
        prefillers = [make_prefiller(one, next(timed)) for one in prefill]
        decoders = [(one, make_decoder(one, next(timed))) for one in decode]
        points += _bisect_batches(aggregated, price)
        points += pair_up(prefillers, _bisect_decoders(decoders, price))
    if not points:
        if not refusals:
            raise WorkloadError("nothing could be priced; give another prompt_len or output_len")
        fewest = min(instance.layout.num_devices for instance in instances)
        raise WorkloadError(
            f"{scenario.config.title} needs at least {fewest} x {scenario.device.name}, which cannot be priced: "
            f"{refusals[0]}"
        )
    return points


def _bisect_batches(priced: list[tuple[AggregatedCandidate, OperatingPoint]], price: Price) -> list[OperatingPoint]:
    """Return the points, with batches added between one that keeps the limits and the next that does not.

    Only if the larger of the two would serve more than the best so far.
    """
    while True:
        keeps = [point.meets(each.instance.request) for each, point in priced]
        best = max((_total(*entry) for entry, kept in zip(priced, keeps, strict=True) if kept), default=0.0)
        series: dict[object, list[_Tried[AggregatedCandidate]]] = {}
        for (each, point), kept in zip(priced, keeps, strict=True):
            tried = _Tried(each.batch_size, kept, _total(each, point) > best, each)
            series.setdefault((each.instance.layout, each.share), []).append(tried)
        between = [
            each._replace(batch_size=size, load_fraction=each.load_fraction * size / each.batch_size)
            for own in series.values()
            for each, size in _halves(own)
        ]
        if not between:
            return [point for _, point in priced]
        priced += [(each, each.point(times)) for each, times in zip(between, price(between), strict=True)]


def _bisect_decoders(priced: list[tuple[DecodeCandidate, Decoder]], price: Price) -> list[Decoder]:
    """Return the decoding instances, with the largest batches added that keep the limit of the time per token."""
    while True:
        series: dict[object, list[_Tried[DecodeCandidate]]] = {}
        for each, decoder in priced:
            request = each.instance.request
            limit_s = float("inf") if request.tpot_limit_s is None else request.tpot_limit_s
            keeps = decoder.step.middle_s <= limit_s * request.tokens_per_pass
            tried = _Tried(each.batch_size, keeps, may_gain=True, candidate=each)
            series.setdefault(each.instance.layout, []).append(tried)
        between = [each._replace(batch_size=size) for own in series.values() for each, size in _halves(own)]
        if not between:
            return [decoder for _, decoder in priced]
        priced += [(each, make_decoder(each, times)) for each, times in zip(between, price(between), strict=True)]


class _Tried(NamedTuple, Generic[_C]):
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


def _halves(series: list[_Tried[_C]]) -> Iterator[tuple[_C, int]]:
    """Yield candidates that keep the limits, with the batch halfway to the next one if that does not keep them."""
    for tried, above in pairwise(sorted(series, key=lambda each: each.batch_size)):
        if tried.keeps and not above.keeps and above.may_gain and above.batch_size - tried.batch_size > 1:
            yield tried.candidate, (tried.batch_size + above.batch_size) // 2


def _total(candidate: AggregatedCandidate, point: OperatingPoint) -> float:
    return point.total_tokens_per_s(candidate.instance.request.num_devices)


def _compose_candidates(candidates: Sequence[Candidate], scenario: Scenario) -> list[list[StepTimes]]:
    """Return the times of the passes of each candidate; a pass that several candidates share is priced once."""
    known: dict[object, int] = {}
    distinct: list[Pass] = []
    wanted: list[list[int]] = []
    for candidate in candidates:
        row = []
        for one in candidate.passes():
            # Candidates that are priced together have the same format, so layout and key identify a pass.
            index = known.setdefault((one.layout, one.key), len(distinct))
            if index == len(distinct):
                distinct.append(one)
            row.append(index)
        wanted.append(row)
    times = time_passes(distinct, scenario, candidates[0].instance.request.server)
    return [[times[index] for index in row] for row in wanted]


# Points within this fraction of the best are equal within the error of a prediction.
_ALIKE_FRACTION = 0.98


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingPlan(ScenarioResult, NotebookDisplay):
    """Result of plan_serving: capacities of instances, and operating points.

    Attributes:
        scenario: Model and device, and a workload with the wanted formats and kind of attention.
        request: Lengths and limits.
        formats: Element formats that were tried; the first is the wanted one.
        capacities: Capacity of an instance of each layout and format.
        points: All operating points that were priced.
        notes: Notes for the reader, one line each.
    """

    scenario: Scenario
    request: ServingRequest
    formats: tuple[ServingFormat, ...]
    capacities: tuple[InstanceCapacity, ...]
    points: tuple[OperatingPoint, ...]
    notes: tuple[str, ...]

    def best(self, mode: str | None = None, format_name: str | None = None) -> OperatingPoint | None:
        """Return the point with most tokens per second of the devices that keeps the limits; None if none does.

        Of points within 2 % of it, which is within the error of a prediction, the one with fewest devices is taken.

        Args:
            mode: ``aggregated`` or ``disaggregated``; None for either.
            format_name: Name of a format; None for the wanted one.
        """
        wanted = format_name or self.formats[0].name
        fitting = [
            point
            for point in self.points
            if point.format.name == wanted and mode in (None, point.mode) and point.meets(self.request)
        ]
        most = max((point.total_tokens_per_s(self.request.num_devices) for point in fitting), default=0.0)
        close = [
            point for point in fitting if point.total_tokens_per_s(self.request.num_devices) >= _ALIKE_FRACTION * most
        ]
        return min(close, key=lambda point: (point.num_devices, point.tpot.middle_s), default=None)

    def front(self, mode: str | None = None, format_name: str | None = None) -> tuple[OperatingPoint, ...]:
        """Return the Pareto front of tokens/s of a device and of a user, within the limit of the first token.

        Args:
            mode: As for best.
            format_name: As for best.
        """
        wanted = format_name or self.formats[0].name
        limit_s = self.request.ttft_limit_s
        return pareto_front(
            point
            for point in self.points
            if point.format.name == wanted
            and mode in (None, point.mode)
            and (limit_s is None or point.ttft.middle_s <= limit_s)
        )

    @cached_property
    def recommended(self) -> Recommendation | None:
        """The recommended operating point in the wanted format; None if no point keeps the limits.

        Raises:
            WorkloadError: the devices do not carry the load.
        """
        wanted = [point for point in self.points if point.format.name == self.formats[0].name]
        return recommend(wanted, self.front(), self.best(), self.request, self.device.node_size)


def plan_serving(
    scenario: Scenario,
    request: ServingRequest,
    *,
    formats: Sequence[ServingFormat],
    layout: Mapping[str, Any] | None = None,
    notes: tuple[str, ...] | None = None,
) -> ServingPlan:
    """Plan how to serve a model: layout, format, batch, and prefill together with decode or apart.

    Args:
        scenario: Model, a decoder, and device; of the workload, the kind of attention is used.
        request: Lengths, limits and devices.
        formats: Element formats to try, the wanted one first.
        layout: Degrees that are fixed.
        notes: Notes kept with the result, instead of those of the scenario.

    Raises:
        WorkloadError: the model is not a decoder, or it does not fit on the devices.
        LayoutError: no layout divides the model.
        UnknownRateError: the device has no rate for the wanted format.
    """
    config, device, workload = scenario.config, scenario.device, scenario.workload
    if config.stack != "decoder":
        raise WorkloadError(
            f"a serving plan needs a decoder, and this model is an {config.stack}; predict its prefill instead"
        )
    if request.adapters:
        request.adapters.check(config)
    given = {name: value for name, value in (layout or {}).items() if value is not None}
    check_given(config, given)
    found_notes = list(scenario.notes if notes is None else notes)
    kept = _list_usable(formats, device, found_notes)
    if request.server == CURRENT_SERVER:
        found_notes.append(
            "no server is named: fused projections, CUDA graphs, chunked prefill, no time of the host; server (such as "
            "trtllm-1.0, vllm-0.19, sglang-0.5) sets those of an engine"
        )
    search = InstanceSearch(scenario=scenario, request=request, given=given)
    instances, capacities = search.find(kept, found_notes)
    with paused_garbage_collection():
        points = price_points(instances, found_notes)
    if config.is_moe:
        record = load_record("moe", device)
        is_own = workload.expert_kernel == "as-16-bit"
        kernels = dict.fromkeys(describe_expert_kernel(record, one.dtype, is_own=is_own) for one in kept)
        found_notes += [note for note in kernels if note]
    if request.adapters and config.is_moe:
        found_notes.append("routed experts have no LoRA adapters, as in vLLM 0.10 and SGLang 0.5")
    if request.total_len > config.max_position_embeddings:
        found_notes.append(
            f"prompt_len + output_len = {request.total_len} tokens exceed the model's max_position_embeddings="
            f"{config.max_position_embeddings}"
        )
    return ServingPlan(
        scenario=scenario,
        request=request,
        formats=tuple(kept),
        capacities=tuple(capacities),
        points=tuple(points),
        notes=tuple(found_notes),
    )


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Pause the collection of reference cycles: hundreds of thousands of operations and prices hold none."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _list_usable(formats: Sequence[ServingFormat], device: Device, notes: list[str]) -> list[ServingFormat]:
    """Return the formats whose GEMMs the device has a rate for; the first must be one of them."""
    device.peak_flops_per_s(formats[0].dtype)
    kept: dict[str, ServingFormat] = {}
    for one in formats:
        try:
            device.peak_flops_per_s(one.dtype)
            kept.setdefault(one.name, one)
        except UnknownRateError as error:
            notes.append(f"{one.name} is left out: {error}")
    return list(kept.values())
