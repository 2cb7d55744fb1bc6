"""Recommended operating points: the knee, limits, instances for a load, costs of prompts and answers, what limits."""

from __future__ import annotations

import json
from dataclasses import replace
from math import ceil
from typing import Any

import pytest

from command_line import run as run_command
from served import BF16, plan
from shapewright.core.errors import WorkloadError
from shapewright.optimize.serving.point import OperatingPoint, Span, pareto_front
from shapewright.optimize.serving.recommend import PASS_LIMITS, find_knee, find_limits, recommend, size_fleet
from shapewright.optimize.serving.request import ServingRequest
from shapewright.workload.layout import ParallelLayout

REQUEST = ServingRequest(prompt_len=1000, output_len=100, usd_per_hour=3.6)


def make_point(tpot_s: float, requests_per_s: float, *, num_devices: int = 1, ttft_s: float = 0.1) -> OperatingPoint:
    """An operating point of one instance."""
    return OperatingPoint(
        mode="aggregated",
        format=BF16,
        layout=ParallelLayout(tensor_parallel=num_devices),
        batch_size=8,
        num_sequences=8,
        prefill_tokens=1000,
        prefill_load_fraction=0.5,
        prompt_cost_fraction=0.25,
        ttft=Span(ttft_s, ttft_s, ttft_s),
        tpot=Span(tpot_s, tpot_s, tpot_s),
        requests_per_s=requests_per_s,
        output_len=100,
    )


def is_dominated(point: dict[str, Any], others: list[dict[str, Any]]) -> bool:
    """Whether another point is as good in both speeds and better in one."""
    mine = (point["tokens_per_s_per_user"], point["tokens_per_s_per_device"])
    theirs = [(other["tokens_per_s_per_user"], other["tokens_per_s_per_device"]) for other in others]
    return any(other != mine and other[0] >= mine[0] and other[1] >= mine[1] for other in theirs)


@pytest.mark.parametrize(
    "job",
    [
        ["llama-3-8b", "--isl", "4000", "--osl", "500", "--gpus", "5"],
        ["llama-3-8b", "--isl", "300", "--osl", "30", "--gpus", "7", "--ttft", "100ms"],
        ["llama-3-70b", "--isl", "4000", "--osl", "500", "--gpus", "16", "--dtype", "fp8"],
        ["mixtral-8x7b", "--isl", "1000", "--osl", "300", "--gpus", "8"],
    ],
    ids=lambda job: f"{job[0]}-{job[6]}",
)
def test_no_point_of_the_front_is_dominated(job: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Neither in its mode, nor by a point of the other mode, also where units leave some of the devices idle."""
    _, out, _ = run_command(["serve-plan", *job, "--device", "h100-sxm-80gb", "--json"], capsys)
    facts = json.loads(out)
    together = [point for front in facts["front"].values() for point in front]

    assert len(together) > 2
    for front in (together, *facts["front_by_format"].values()):
        assert not [point["instances"] for point in front if is_dominated(point, front)]


def test_equal_points_are_on_the_front_once() -> None:
    """Of two points with equal speeds, the front holds the one with fewest devices."""
    small, large = make_point(0.01, 2.0), make_point(0.01, 4.0, num_devices=2)
    assert pareto_front([large, small]) == (small,)


def test_knee_is_where_both_speeds_trade_evenly() -> None:
    """Passes of 10 ms + 1 ms a sequence: the knee is at 10 sequences, at half of both speeds."""
    points = [make_point(0.010 + 0.001 * batch, batch / (0.010 + 0.001 * batch) / 100) for batch in range(1, 100)]
    knee = find_knee(points)

    assert knee is not None
    assert knee.tpot.middle_s == pytest.approx(0.020)
    assert knee.tokens_per_s_per_device == pytest.approx(500.0)


def test_knee_inside_a_node_is_that_of_the_node() -> None:
    """Larger units that beat every batch but the smallest do not leave that one as the recommendation."""
    speeds = [(0.010 + 0.001 * batch, batch / (0.010 + 0.001 * batch) / 100) for batch in range(1, 100)]
    inside = [make_point(tpot_s, requests) for tpot_s, requests in speeds]
    beyond = [make_point(tpot_s, 32.0 * requests, num_devices=16) for tpot_s, requests in speeds[1:]]
    knee = find_knee([*inside, *beyond], node_size=8)

    assert [point for point in pareto_front([*inside, *beyond]) if point.num_devices == 1] == inside[:1]
    assert knee is not None
    assert knee.num_devices == 1
    assert knee.tpot.middle_s == pytest.approx(0.020)


def test_a_limit_per_token_recommends_the_most_tokens_within_it() -> None:
    """With a limit the recommendation is the best point; without one it is faster for a user than the best."""
    limited, free = plan(tpot_limit_s=0.015), plan()
    best = free.best()

    assert limited.recommended is not None
    assert limited.recommended.point == limited.best()
    assert free.recommended is not None
    assert best is not None
    assert free.recommended.point.tokens_per_s_per_user > best.tokens_per_s_per_user
    assert free.recommended.point in free.front()
    assert plan(tpot_limit_s=1e-6).recommended is None


@pytest.mark.parametrize(
    ("model", "server", "lengths"),
    [
        ("llama-3.1-70b", "sglang-0.5", {"prompt_len": 1000, "output_len": 200}),
        ("llama-3.1-8b", "sglang-0.5", {"prompt_len": 8000, "output_len": 500}),
        ("llama-3.1-70b", None, {"prompt_len": 8000, "output_len": 500}),
        ("llama-3.1-8b", "sglang-0.5", {"prompt_len": 1000, "output_len": 200, "tpot_limit_s": 0.02}),
        ("llama-3.1-8b", "sglang-0.5", {"prompt_len": 1000, "output_len": 200, "requests_per_s": 20.0}),
    ],
)
def test_without_a_limit_the_first_token_of_the_recommended_point_comes_within_a_second(
    model: str, server: str | None, lengths: dict[str, Any]
) -> None:
    """Disaggregated points that serve most let prompts wait for seconds; the recommended one does not."""
    found = plan(model, "h200-sxm-141gb", server=server, num_devices=8, **lengths)
    late = [point for point in found.points if point.ttft.middle_s > 1.0]

    assert late
    assert found.recommended is not None
    assert found.recommended.point.ttft.middle_s <= 1.0
    assert found.recommended.ttft_limit_s == 1.0


def test_a_given_limit_of_the_first_token_replaces_the_default() -> None:
    """With a limit of 5 s the point that serves more is recommended, and no default is mentioned."""
    slow, soon = make_point(0.010, 10.0, ttft_s=4.0), make_point(0.010, 4.0)
    free, limited = recommend([slow, soon], REQUEST), recommend([slow, soon], replace(REQUEST, ttft_limit_s=5.0))

    assert free is not None
    assert limited is not None
    assert (free.point, limited.point) == (soon, slow)
    assert "default" not in limited.reason
    assert limited.ttft_limit_s == 5.0


def test_long_prompts_may_take_twice_the_shortest_first_token() -> None:
    """Where no first token comes within half a second, the default limit is twice the shortest."""
    soonest, usual, late = (make_point(0.01, rate, ttft_s=ttft) for rate, ttft in ((1.0, 3.0), (2.0, 6.0), (9.0, 6.1)))
    found = recommend([soonest, usual, late], REQUEST)

    assert found is not None
    assert found.point == usual
    assert found.ttft_limit_s == 6.0


def test_fleet_by_hand() -> None:
    """20 requests/s on instances of 4, used up to 80 %: 6.25, so 7, and a spare one; 8 devices have no room for it."""
    request = replace(REQUEST, requests_per_s=20.0)
    fleet = size_fleet(make_point(0.01, 4.0), request)

    assert (fleet.num_instances, fleet.num_spare_instances, fleet.num_devices) == (7, 1, 8)
    assert fleet.load_fraction == pytest.approx(20 / 28)
    assert fleet.usd_per_hour == pytest.approx(8 * 3.6)
    assert size_fleet(make_point(0.01, 4.0), replace(request, num_devices=7)).num_spare_instances == 0
    assert size_fleet(make_point(0.01, 4.0, num_devices=2), request).num_devices == 16


def make_unit(requests_per_s: float, prefill_load_fraction: float, num_sequences: int) -> OperatingPoint:
    """Two prefill instances and a decode instance with 100 ms a token and 99 tokens after the first."""
    one = make_point(0.1, requests_per_s)
    return replace(
        one,
        mode="disaggregated",
        prefill_layout=ParallelLayout(),
        num_prefill_instances=2,
        prefill_load_fraction=prefill_load_fraction,
        num_sequences=num_sequences,
    )


def test_fleet_of_disaggregated_units_by_hand() -> None:
    """A unit whose prompts already wait at 80 % of its prefill instances carries all of its requests, not 80 % of them.

    4 requests/s at 80 % are 5 at full load; 99 sequences of 99 x 0.1 s are 10 on the decode instance, used to 40 %.
    With 40 sequences, 4.04 requests/s fill the decode instance, and the unit carries 80 % of them, 3.2. A first
    token within a limit at 50 % of the prefill instances stays there.
    """
    request = replace(REQUEST, requests_per_s=20.0)
    prefill_bound, decode_bound = make_unit(4.0, 0.8, 99), make_unit(4.0, 0.5, 40)
    first, second = size_fleet(prefill_bound, request), size_fleet(decode_bound, request)
    limited = size_fleet(make_unit(4.0, 0.5, 99), request)

    assert (first.num_instances, first.load_fraction) == (5, pytest.approx(20 / (5 * 5)))
    assert (second.num_instances, second.load_fraction) == (7, pytest.approx(20 / (7 * 40 / 9.9)))
    assert (limited.num_instances, limited.load_fraction) == (5, pytest.approx(20 / (5 * 8)))


def test_a_load_is_carried_with_the_fewest_devices() -> None:
    """Of points that are fast enough, the one whose instances and spare need fewest devices; slower ones are not."""
    wide = make_point(0.010, 10.0, num_devices=4)
    narrow, slow = make_point(0.012, 1.5), make_point(0.5, 3.0)
    points = [wide, narrow, slow]
    request = replace(REQUEST, tpot_limit_s=0.02, requests_per_s=3.0)
    found = recommend(points, request)

    assert found is not None
    assert found.fleet is not None
    assert found.point == narrow
    assert found.fleet.num_devices == ceil(3.0 / 1.2) + 1


def test_a_spare_is_given_up_before_the_load() -> None:
    """Devices with no room for a spare instance carry the load, and the reason says so."""
    point = make_point(0.01, 4.0)
    found = recommend([point], replace(REQUEST, requests_per_s=3.0, num_devices=1))

    assert found is not None
    assert found.fleet is not None
    assert found.fleet.num_spare_instances == 0
    assert "no room for a spare" in found.reason


def test_a_spare_comes_before_the_speed_at_the_knee() -> None:
    """Four devices carry the load with a spare at 12 ms a token; the knee, 10 ms, leaves no room for one."""
    fast, slow = make_point(0.010, 12.0, num_devices=4), make_point(0.012, 2.0)
    found = recommend([fast, slow], replace(REQUEST, requests_per_s=3.0, num_devices=4))

    assert find_knee([fast, slow], 4) == fast
    assert found is not None
    assert found.fleet is not None
    assert (found.point, found.fleet.num_spare_instances) == (slow, 1)


def test_a_load_beyond_the_devices_names_the_largest() -> None:
    """The error gives the largest load of the devices, and how many would be enough."""
    point = make_point(0.01, 4.0, num_devices=2)
    request = replace(REQUEST, requests_per_s=20.0, num_devices=5)
    words = r"more than 5 devices carry: at most 6.4 .*default limit of 1 s; give num_devices 14 .*ttft_limit_s"
    with pytest.raises(WorkloadError, match=words) as caught:
        recommend([point], request)
    assert caught.value.field == "requests_per_s"


def test_a_load_beyond_all_devices_is_not_advised_more_of_them() -> None:
    """A plan has at most 4,096 devices, 6.4 requests/s of two of them."""
    request = replace(REQUEST, requests_per_s=1e6, num_devices=2)
    words = r"more than 2 devices carry: at most 3.2 .*; give fewer requests_per_s, or wider"
    with pytest.raises(WorkloadError, match=words):
        recommend([make_point(0.01, 4.0, num_devices=2)], request)
    with pytest.raises(WorkloadError, match=r"more than a device carries: at most 3\.2 "):
        recommend([make_point(0.01, 4.0)], replace(request, num_devices=1))


def test_prompts_and_answers_pay_for_all_devices() -> None:
    """3.60 dollars an hour, a quarter of it for 2 x 1000 prompt tokens a second, the rest for 2 x 100."""
    costs = make_point(0.01, 2.0).usd_per_million_each(REQUEST)

    assert costs == (pytest.approx(1000 * 0.25 / 2000), pytest.approx(1000 * 0.75 / 200))
    for point in plan(num_devices=2, usd_per_hour=1.0).points[::7]:
        assert 0.0 <= point.prompt_cost_fraction < 1.0
    assert make_point(0.01, 2.0).usd_per_million_each(replace(REQUEST, usd_per_hour=None)) is None


def test_limits_of_small_full_and_split_points() -> None:
    """A full cache is named; a lone sequence does not fill it; only split models communicate."""
    found = plan(num_devices=2, usd_per_hour=1.0)
    limits = find_limits(found.points, found.scenario, found.request)
    fullest = max(limits.values(), key=lambda each: each.cache_fraction)

    assert fullest.limited_by == "cache"
    assert fullest.cache_fraction == pytest.approx(1.0)
    for point, each in limits.items():
        assert sum(each.pass_fractions.values()) == pytest.approx(1.0)
        assert set(each.pass_fractions) == set(PASS_LIMITS)
        assert (each.pass_fractions["communication"] > 0.0) == (point.layout.num_devices > 1)
        if point.batch_size == 1:
            assert each.limited_by != "cache"


def test_command_states_load_and_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """Text and JSON hold the recommended point, the instances for the load, and the costs of tokens in and out."""
    job = ["serve-plan", "llama-3-8b", "--device", "h100-sxm-80gb", "--isl", "1000", "--osl", "200", "--tp", "1"]
    job += ["--formats", "none", "--usd-per-hour", "2.5"]
    _, text, _ = run_command([*job, "--load", "600/min"], capsys)
    _, out, _ = run_command([*job, "--load", "10/s", "--json"], capsys)
    facts = json.loads(out)
    point, fleet = facts["recommended"], facts["fleet"]

    assert fleet["requests_per_s"] == 10.0
    assert fleet["num_devices"] == (fleet["num_instances"] + fleet["num_spare_instances"]) * point["num_devices"]
    assert f"{fleet['num_instances']} + 1 spare" in text
    costs = 1000 * point["usd_per_million_input_tokens"] + 200 * point["usd_per_million_output_tokens"]
    assert costs == pytest.approx(200 * point["usd_per_million_tokens"])
    assert "USD per million tokens in" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--load", "many"], "is not a rate such as 12/s"),
        (["--load", "0/s"], "requests_per_s=0.0 must be a number above 0"),
        (["--load", "1000/s", "--gpus", "2"], "give --gpus"),
    ],
)
def test_bad_loads_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    job = ["serve-plan", "llama-3-8b", "--device", "h100-sxm-80gb", "--isl", "1000", "--osl", "200", *arguments]
    code, out, err = run_command(job, capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
