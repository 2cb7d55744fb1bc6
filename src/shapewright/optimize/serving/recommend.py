"""Recommended operating point, the number of instances for a load, and what limits a point.

Without a limit of the time per token, the point with most tokens/s of the devices has a batch so large that a user gets
a few tokens per second. The recommended point is then the knee of the front, where the product of tokens/s of a device
and of a user is largest: next to it, 1 % more of one costs 1 % of the other. For a decode pass of a + b B seconds over
B sequences, that is the batch for which b B equals the time a of reading the weights: half of the highest throughput at
half of the highest speed. The knee does not depend on the first token, and instances that only prefill serve most when
prompts wait for seconds. So the recommended point keeps a limit of the first token, which has a default.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING

from shapewright.core.errors import WorkloadError
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.core.units import format_seconds
from shapewright.optimize.serving.aggregated import MOST_LOAD_FRACTION, AggregatedCandidate, list_chunkings
from shapewright.optimize.serving.batches import lower_candidates
from shapewright.optimize.serving.disaggregated import DecodeCandidate
from shapewright.optimize.serving.point import Instance, recommended_ttft_limit_s
from shapewright.optimize.serving.request import MOST_DEVICES
from shapewright.prediction.composition.step import bound_of, price_passes

if TYPE_CHECKING:
    from shapewright.optimize.serving.passes import Pass
    from shapewright.optimize.serving.point import OperatingPoint
    from shapewright.optimize.serving.request import ServingRequest
    from shapewright.prediction.scenario import Scenario

# Points with at least this fraction of the most tokens/s count as equal: the difference is within the prediction error.
_ALIKE_FRACTION = 0.98
_KNEE_REASON = "knee: 1 % more speed for a user costs 1 % of a device's tokens"


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Instances that carry a load, with a spare one (N + 1).

    Attributes:
        requests_per_s: The load. [1/s]
        num_instances: Instances that carry it, each used up to MOST_LOAD_FRACTION so that queues stay short; units of
            prefill and decode instances if disaggregated.
        num_spare_instances: Instances beyond them: 1, or 0 if the given devices have no room for it.
        num_devices: Devices of all instances.
        load_fraction: Load over the capacity of ``num_instances``; of the busier kind of instances if disaggregated.
        usd_per_hour: Price of all devices; None without a price. [USD/h]
    """

    requests_per_s: float
    num_instances: int
    num_spare_instances: int
    num_devices: int
    load_fraction: float
    usd_per_hour: float | None


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """The recommended operating point.

    Attributes:
        point: The point.
        reason: Why it is recommended.
        ttft_limit_s: Limit of the first token that it keeps, see recommended_ttft_limit_s. [s]
        fleet: Instances for the load of the request; None without a load.
    """

    point: OperatingPoint
    reason: str
    ttft_limit_s: float
    fleet: Fleet | None = None


def most_tokens(points: Sequence[OperatingPoint], request: ServingRequest) -> OperatingPoint | None:
    """Return the point with most tokens/s of the devices that keeps the limits; None if none does.

    Of points within 2 % of it, which is within the error of a prediction, the one with fewest devices is taken.
    """
    fitting = [point for point in points if point.meets(request)]
    most = max((point.total_tokens_per_s(request.num_devices) for point in fitting), default=0.0)
    close = [point for point in fitting if point.total_tokens_per_s(request.num_devices) >= _ALIKE_FRACTION * most]
    return min(close, key=lambda point: (point.num_devices, point.tpot.middle_s), default=None)


def find_knee(
    points: Sequence[OperatingPoint], num_devices: int | None = None, node_size: int | None = None
) -> OperatingPoint | None:
    """Return the point with the largest product of tokens/s of the devices and of a user; None without points.

    Args:
        points: Points to choose from; the chosen one is on their Pareto front.
        num_devices: Available devices, of which those left over by whole units are idle. None compares per device.
        node_size: Devices of a node: without ``num_devices``, a unit inside a node is chosen if there is one.
    """
    inside = [point for point in points if num_devices is not None or point.num_devices <= (node_size or 0)]
    return max(
        inside or points,
        key=lambda point: point.total_tokens_per_s(num_devices) * point.tokens_per_s_per_user,
        default=None,
    )


def recommend(
    points: Sequence[OperatingPoint], request: ServingRequest, node_size: int | None = None
) -> Recommendation | None:
    """Recommend an operating point within the limits and the default limit of the first token.

    Args:
        points: All points of the requested format.
        request: Lengths, limits, devices and load.
        node_size: Devices of a node, see find_knee.

    Returns:
        Without a load, the point with most tokens/s of the devices if the time per token is limited, else the knee.
        With a load, the point with the fewest devices that carry it, with a spare instance if there is room for one;
        if the time per token is not limited, only points at least as fast for a user as the knee are considered.
        None if no point keeps the limits.

    Raises:
        WorkloadError: the given devices do not carry the load.
    """
    limit_s = recommended_ttft_limit_s(points, request)
    within = replace(request, ttft_limit_s=limit_s)
    points = [point for point in points if point.meets(within)]
    if not points:
        return None
    is_default = request.ttft_limit_s is None
    limit_note = f"; first token within the default limit of {format_seconds(limit_s)}" if is_default else ""
    has_limit = request.tpot_limit_s is not None
    if request.requests_per_s is None:
        chosen = most_tokens(points, within) if has_limit else find_knee(points, request.num_devices, node_size)
        assert chosen is not None
        reason = "most tokens/s of the devices within the limits" if has_limit else _KNEE_REASON
        return Recommendation(point=chosen, reason=reason, ttft_limit_s=limit_s)
    fleets = [(size_fleet(point, request), point) for point in points]
    fitting = [entry for entry in fleets if request.num_devices is None or entry[0].num_devices <= request.num_devices]
    if not fitting:
        raise _overload_error(points, min(fleet.num_devices for fleet, _ in fleets), request, limit_note)
    fitting = [entry for entry in fitting if entry[0].num_spare_instances] or fitting
    knee = None if has_limit else find_knee([point for _, point in fitting], request.num_devices, node_size)
    if knee is not None:
        fitting = [entry for entry in fitting if entry[1].tpot.middle_s <= knee.tpot.middle_s]
    fleet, point = min(fitting, key=lambda entry: (entry[0].num_devices, entry[0].load_fraction))
    speed = "the limits" if has_limit else "the speed for a user at the knee"
    reason = f"fewest devices for the load with a spare instance, within {speed}"
    if not fleet.num_spare_instances:
        reason = f"fewest devices for the load, within {speed}; the devices have no room for a spare instance"
    return Recommendation(point=point, reason=reason, ttft_limit_s=limit_s, fleet=fleet)


def size_fleet(point: OperatingPoint, request: ServingRequest) -> Fleet:
    """Return the instances that carry the load of a request, and a spare one if the devices have room for it."""
    load = request.requests_per_s or 0.0
    carrying = max(ceil(load / _most_load_per_s(point)), 1)
    has_room = request.num_devices is None or (carrying + 1) * point.num_devices <= request.num_devices
    num_devices = (carrying + has_room) * point.num_devices
    price = request.usd_per_hour
    return Fleet(
        requests_per_s=load,
        num_instances=carrying,
        num_spare_instances=int(has_room),
        num_devices=num_devices,
        load_fraction=load / (carrying * _capacity_per_s(point)),
        usd_per_hour=None if price is None else price * num_devices,
    )


def _capacity_per_s(point: OperatingPoint) -> float:
    """Return the requests per second of a unit whose busier kind of instances has no idle time.

    The requests of a disaggregated point already leave time to its prefill instances, so that prompts wait less.
    """
    if point.mode == "aggregated":
        return point.requests_per_s
    decode_per_s = point.num_sequences / ((point.output_len - 1) * point.tpot.middle_s)
    return min(point.requests_per_s / point.prefill_load_fraction, decode_per_s)


def _most_load_per_s(point: OperatingPoint) -> float:
    """Return the requests per second that a unit of a fleet carries.

    No more than those of the point, whose first token keeps its limit.
    """
    return min(MOST_LOAD_FRACTION * _capacity_per_s(point), point.requests_per_s)


def _overload_error(
    points: Sequence[OperatingPoint], fewest: int, request: ServingRequest, limit_note: str
) -> WorkloadError:
    available = request.num_devices or 0
    most = max(available // point.num_devices * _most_load_per_s(point) for point in points)
    carry = f"{available} devices carry" if available > 1 else "a device carries"
    more = with_fields("{num_devices} {fewest} or more, ", fewest=fewest) if fewest <= MOST_DEVICES else ""
    return WorkloadError(
        f"requests_per_s={request.requests_per_s:g} is more than {carry}: at most {most:.3g} with "
        f"instances used up to {100.0 * MOST_LOAD_FRACTION:.0f} %{limit_note}",
        advice=with_fields(
            "give {more}fewer {requests_per_s}, or wider {ttft_limit_s} or {tpot_limit_s}",
            more=more,
        ),
        field="requests_per_s",
    )


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
    lower_candidates(candidates.values())
    # Passes of each point, the vision tower's among them, with their share of the time between two tokens.
    weighted: dict[OperatingPoint, list[tuple[Pass, float]]] = {}
    for point, candidate in candidates.items():
        decode, *mixed = candidate.passes()[1:]
        load = point.prefill_load_fraction if mixed else 0.0
        own = [(decode, 1.0 - load), *((one, load / len(mixed)) for one in mixed)]
        weighted[point] = own + [(one.tower, weight * one.tower_share) for one, weight in own if one.tower]
    listed = [one for own in weighted.values() for one, _ in own]
    priced = iter(price_passes(listed, scenario.device, request.server.adjust))
    limits = {}
    for point, candidate in candidates.items():
        times = dict.fromkeys(PASS_LIMITS, 0.0)
        for _, weight in weighted[point]:
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
    chunking = next(
        chunking
        for chunking in list_chunkings(request.new_len, request.cached_len)
        if chunking.prompts * chunking.tokens == point.prefill_tokens
    )
    return AggregatedCandidate(instance, point.batch_size, chunking, point.prefill_load_fraction)


def _most_sequences(candidate: AggregatedCandidate | DecodeCandidate) -> int:
    """Return the largest batch that fits beside the passes of a candidate."""
    instance = candidate.instance
    stages, new_tokens = instance.layout.pipeline_parallel, candidate.batch_size * instance.request.query_len
    if isinstance(candidate, DecodeCandidate):
        return instance.most_sequences(new_tokens) // stages
    chunking = candidate.chunking
    return instance.most_sequences(chunking.prompts * chunking.tokens + new_tokens) // stages - chunking.prompts
