"""Choices of a server plan against brute force: units of prefill and decode instances, fronts, fleets for a load."""

from __future__ import annotations

from math import ceil
from random import Random

import pytest

from served import BF16, make_instance
from shapewright.core.errors import WorkloadError
from shapewright.optimize.serving.disaggregated import Decoder, Prefiller, pair_instances
from shapewright.optimize.serving.point import OperatingPoint, Span, batch_sizes, pareto_front
from shapewright.optimize.serving.recommend import find_knee, most_tokens, recommend
from shapewright.optimize.serving.request import ServingRequest
from shapewright.workload.layout import ParallelLayout


def exactly(time_s: float) -> Span:
    """A time without an interval."""
    return Span(time_s, time_s, time_s)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("has_limit", [False, True])
def test_units_are_the_best_of_all(seed: int, has_limit: bool) -> None:
    """Up to eight prefill and eight decode instances: none serves more per device, or on all devices."""
    random = Random(seed)
    prefill_degree, degree = random.choice((1, 2, 4)), random.choice((1, 2, 4))
    num_devices = random.choice((8, 12, 24, 40)) if has_limit else None
    request = ServingRequest(prompt_len=1000, output_len=101, num_devices=num_devices)
    prefiller = Prefiller(
        make_instance(request=request, tensor_parallel=prefill_degree), 1, exactly(random.uniform(0.05, 0.5))
    )
    decoder = Decoder(
        make_instance(request=request, tensor_parallel=degree),
        random.choice((4, 40)),
        exactly(random.uniform(0.01, 0.05)),
    )
    (point,) = pair_instances([prefiller], [decoder])

    best = 0.0
    for num_prefill in range(1, 9):
        for num_decode in range(1, 9):
            devices = num_prefill * prefill_degree + num_decode * degree
            # Prefill instances are used to 0.8, so that queues stay short.
            rate = min(
                num_prefill * 0.8 / prefiller.service.middle_s,
                num_decode * decoder.batch_size / (100 * decoder.step.middle_s),
            )
            best = max(best, rate / devices if num_devices is None else rate * (num_devices // devices))
    assert point.total_tokens_per_s(num_devices) / 101 == pytest.approx(best)
    assert point.num_devices == point.num_prefill_instances * prefill_degree + point.num_instances * degree
    load = point.requests_per_s * prefiller.service.middle_s / point.num_prefill_instances
    assert point.prefill_load_fraction == pytest.approx(load)
    assert point.prompt_cost_fraction == pytest.approx(point.num_prefill_instances * prefill_degree / point.num_devices)
    assert point.num_sequences == decoder.batch_size * point.num_instances


def random_points(random: Random) -> list[OperatingPoint]:
    """Points with round times and rates, so that ties occur."""
    return [
        OperatingPoint(
            mode="aggregated",
            format=BF16,
            layout=ParallelLayout(tensor_parallel=random.choice((1, 2, 4))),
            batch_size=1,
            num_sequences=1,
            prefill_tokens=1,
            prefill_load_fraction=0.5,
            prompt_cost_fraction=0.5,
            ttft=exactly(random.choice((0.25, 0.5, 0.8))),
            tpot=exactly(random.choice((0.01, 0.02, 0.05))),
            requests_per_s=random.choice((1.0, 2.0, 4.0, 4.05, 8.0)),
            output_len=100,
        )
        for _ in range(random.randint(1, 15))
    ]


def speeds(point: OperatingPoint) -> tuple[float, float]:
    """Tokens per second of a user and of a device."""
    return 1.0 / point.tpot.middle_s, point.requests_per_s * 100 / point.layout.tensor_parallel


@pytest.mark.parametrize("seed", range(40))
def test_front_is_what_no_point_beats(seed: int) -> None:
    """Each point that no other beats in one speed without losing in the other is there once, on fewest devices."""
    points = random_points(Random(seed))
    found = [speeds(point) for point in pareto_front(points)]
    unbeaten = {
        speeds(point)
        for point in points
        if not any(
            speeds(other) != speeds(point)
            and all(one >= own for one, own in zip(speeds(other), speeds(point), strict=True))
            for other in points
        )
    }

    assert found == sorted(unbeaten, reverse=True)
    for point in pareto_front(points):
        assert point.num_devices == min(each.num_devices for each in points if speeds(each) == speeds(point))


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("num_devices", [None, 4, 7])
def test_recommended_point_is_the_best_of_those_that_keep_the_limits(seed: int, num_devices: int | None) -> None:
    """With a limit per token the fewest devices of those within 2 % of the most tokens, otherwise the knee."""
    points = random_points(Random(seed))

    def tokens(point: OperatingPoint) -> float:
        units = 1 / point.num_devices if num_devices is None else num_devices // point.num_devices
        return units * point.requests_per_s * 100

    request = ServingRequest(
        prompt_len=1000, output_len=100, num_devices=num_devices, ttft_limit_s=0.5, tpot_limit_s=0.02
    )
    keeping = [point for point in points if point.ttft.middle_s <= 0.5 and point.tpot.middle_s <= 0.02]
    chosen = most_tokens(points, request)
    if not keeping:
        assert chosen is None
        assert recommend(points, request) is None
    else:
        close = [point for point in keeping if tokens(point) >= 0.98 * max(map(tokens, keeping))]
        assert chosen is not None
        assert chosen in close
        assert (chosen.num_devices, chosen.tpot) == min(
            (each.num_devices, each.tpot.middle_s, each.tpot) for each in close
        )[::2]
    knee = find_knee(points, num_devices)
    assert knee is not None
    assert tokens(knee) * speeds(knee)[0] == max(tokens(point) * speeds(point)[0] for point in points)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("num_devices", [None, 8, 16])
def test_a_load_is_carried_by_the_fewest_devices(seed: int, num_devices: int | None) -> None:
    """Each instance used to 0.8 at most, with a spare one where there is room; points that keep 20 ms a token."""
    random = Random(seed)
    points, load = random_points(random), random.choice((0.1, 3.2, 10.0, 30.0))
    request = ServingRequest(
        prompt_len=1000,
        output_len=100,
        num_devices=num_devices,
        ttft_limit_s=9.0,
        tpot_limit_s=0.02,
        requests_per_s=load,
        usd_per_hour=2.0,
    )
    sizes = []
    for point in points:
        count = ceil(load / (0.8 * point.requests_per_s))
        if point.tpot.middle_s <= 0.02 and (num_devices is None or count * point.num_devices <= num_devices):
            has_room = num_devices is None or (count + 1) * point.num_devices <= num_devices
            sizes.append((not has_room, (count + has_room) * point.num_devices, load / (count * point.requests_per_s)))
    if not sizes:
        if any(point.tpot.middle_s <= 0.02 for point in points):
            with pytest.raises(WorkloadError, match="is more than"):
                recommend(points, request)
        return
    found = recommend(points, request)
    assert found is not None
    assert found.fleet is not None
    without_room, devices, used = min(sizes)
    assert found.fleet.num_devices == devices
    assert found.fleet.load_fraction == pytest.approx(used)
    assert found.fleet.num_spare_instances == (not without_room)
    assert found.fleet.usd_per_hour == 2.0 * devices


@pytest.mark.parametrize(("most", "sizes"), [(0, []), (1, [1]), (2, [1, 2]), (12, [1, 2, 3, 4, 6, 8, 12])])
def test_batches_to_try(most: int, sizes: list[int]) -> None:
    """Powers of two and those in the middle, up to the largest."""
    assert batch_sizes(most) == sizes
