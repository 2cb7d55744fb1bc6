"""What limits an operating point: the room for the KV cache, arithmetic, memory traffic or communication."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.optimize.serving.aggregated import AggregatedCandidate, prefill_shares
from shapewright.optimize.serving.disaggregated import DecodeCandidate
from shapewright.optimize.serving.point import Instance
from shapewright.prediction.composition import bound_of, price_passes

if TYPE_CHECKING:
    from shapewright.optimize.serving.point import OperatingPoint
    from shapewright.optimize.serving.request import ServingRequest
    from shapewright.prediction.scenario import Scenario

PASS_LIMITS = ("compute", "memory", "communication", "latency")
"""Limits of a part of a pass: arithmetic, memory traffic, communication, kernel launches."""


@dataclass(frozen=True, kw_only=True)
class PointLimits:
    """What limits an operating point.

    Attributes:
        limited_by: ``cache`` if no further sequence fits in memory, otherwise the largest of ``pass_fractions``.
        cache_fraction: Sequences of the batch over the most that fit beside the passes.
        pass_fractions: Share of the time of a mean pass by PASS_LIMITS, in sum 1; of decode passes if disaggregated.
    """

    limited_by: str
    cache_fraction: float
    pass_fractions: Mapping[str, float]


def find_limits(
    points: Sequence[OperatingPoint], scenario: Scenario, request: ServingRequest
) -> dict[OperatingPoint, PointLimits]:
    """Return what limits each of some operating points of a plan.

    Args:
        points: The points.
        scenario: Model and device of the plan.
        request: Lengths and limits of the plan.
    """
    instances: dict[object, Instance] = {}
    candidates: dict[OperatingPoint, AggregatedCandidate | DecodeCandidate] = {}
    for point in points:
        instance = instances.setdefault(
            (point.layout, point.format), Instance(scenario.replace(layout=point.layout), point.format, request)
        )
        candidates[point] = _candidate_of(point, instance)
    passes = {point: candidate.passes()[1:] for point, candidate in candidates.items()}
    listed = [one for each in passes.values() for one in each]
    priced = iter(price_passes(listed, scenario.device, request.server.adjust))
    limits = {}
    for point, candidate in candidates.items():
        load = point.prefill_load_fraction
        num_mixed = len(passes[point]) - 1
        weights = (1.0 - load, *[load / num_mixed] * num_mixed) if num_mixed else (1.0,)
        times = dict.fromkeys(PASS_LIMITS, 0.0)
        for weight in weights:
            for entry in next(priced):
                times[bound_of(entry)] += weight * entry.total_time_s
        total_s = sum(times.values())
        fractions = {limit: time_s / total_s for limit, time_s in times.items()}
        most = _most_sequences(candidate)
        is_full = candidate.batch_size >= most
        limits[point] = PointLimits(
            limited_by="cache" if is_full else max(fractions, key=lambda limit: fractions[limit]),
            cache_fraction=min(candidate.batch_size / most, 1.0) if most else 1.0,
            pass_fractions=fractions,
        )
    return limits


def _candidate_of(point: OperatingPoint, instance: Instance) -> AggregatedCandidate | DecodeCandidate:
    if point.mode != "aggregated":
        return DecodeCandidate(instance, point.batch_size)
    request = instance.request
    share = next(
        share
        for share in prefill_shares(request.new_len, request.cached_len)
        if share.prompts * share.tokens == point.prefill_tokens
    )
    return AggregatedCandidate(instance, point.batch_size, share, point.prefill_load_fraction)


def _most_sequences(candidate: AggregatedCandidate | DecodeCandidate) -> int:
    """Return the largest batch that fits beside the passes of a candidate."""
    instance = candidate.instance
    stages, new_tokens = instance.layout.pipeline_parallel, candidate.batch_size * instance.request.query_len
    if isinstance(candidate, DecodeCandidate):
        return instance.most_sequences(new_tokens) // stages
    share = candidate.share
    return instance.most_sequences(share.prompts * share.tokens + new_tokens) // stages - share.prompts
