"""Loads whose batch follows from the load: open loops, limits on latency, disaggregated instances."""

from __future__ import annotations

from dataclasses import replace

import pytest

from served import make_instance
from shapewright.core.errors import WorkloadError
from shapewright.optimize.serving.closed_form import LoadTimes, queued
from shapewright.optimize.serving.point import Instance
from shapewright.optimize.serving.request import ServingRequest
from shapewright.optimize.serving.steady_loads import disaggregated, open_loop, within_limits
from shapewright.pricing.servers import CURRENT_SERVER
from shapewright.workload.layout import ParallelLayout

REQUEST = ServingRequest(prompt_len=1000, output_len=500)


def instance(**changes: object) -> Instance:
    """Llama-3-8B on an H100 with changed defaults of its server."""
    return make_instance(request=replace(REQUEST, server=replace(CURRENT_SERVER, **changes)))  # type: ignore[arg-type]


def limited(ttft_limit_s: float, tpot_limit_s: float, copies: int = 1) -> LoadTimes:
    """The largest load within limits."""
    load = within_limits(instance(), 5000, copies, ttft_limit_s=ttft_limit_s, tpot_limit_s=tpot_limit_s)
    return load.predict(instance())[0]


def test_an_open_loop_serves_what_arrives_until_it_is_full() -> None:
    """Below the capacity its tokens are those that arrive; above it those of queued requests."""
    slow, fast = (open_loop(instance(), 5000, rate).predict(instance())[0] for rate in (1.0, 1000.0))

    assert slow.output_tokens_per_s == pytest.approx(500.0, rel=0.05)
    assert fast.output_tokens_per_s == pytest.approx(
        queued(instance(), 5000).predict(instance())[0].output_tokens_per_s
    )
    assert fast.ttft_s > 10.0 * slow.ttft_s


def test_the_middle_request_waits_for_those_before_it() -> None:
    """At once beyond capacity, half of the requests less a batch end before the one in the middle starts."""
    served = instance(most_sequences=100)
    times = open_loop(served, 2000, 1e6).predict(served)[0]

    # Each of the 900 takes 500 passes of the time per token, a hundred together.
    assert times.ttft_s == pytest.approx(9 * 500 * times.tpot_s, rel=0.05)


def test_requests_that_all_fit_wait_for_prefill_alone() -> None:
    """With room for all, the first token comes after half of the prompts, far before the first answers end."""
    served = instance(most_sequences=400)
    times = open_loop(served, 200, 1e6).predict(served)[0]

    assert 0.5 < times.ttft_s < 0.5 * 500 * times.tpot_s


def test_requests_wait_for_passes_that_are_scheduled_together() -> None:
    """Ten decode passes at a time: a request that arrives in between waits for five; throughput is as before."""
    single, together = (instance(scheduler_steps=steps) for steps in (1, 10))
    first, later = (open_loop(one, 2000, 4.0).predict(one)[0] for one in (single, together))

    assert later.ttft_s - first.ttft_s == pytest.approx(5.0 * first.tpot_s)
    assert later.output_tokens_per_s == first.output_tokens_per_s


def test_replicas_of_a_dense_model_share_the_load() -> None:
    """Two replicas serve twice the requests as one does its own, and wait for none of the other's prompts."""
    one = instance()
    two = replace(one, scenario=one.scenario.replace(layout=ParallelLayout(data_parallel=2)))
    for own, both in (
        (queued(one, 1000, 64).predict(one)[0], queued(two, 2000, 128).predict(two)[0]),
        (open_loop(one, 1000, 4.0).predict(one)[0], open_loop(two, 2000, 8.0).predict(two)[0]),
    ):
        assert both.output_tokens_per_s == pytest.approx(2.0 * own.output_tokens_per_s)
        assert (both.ttft_s, both.tpot_s) == pytest.approx((own.ttft_s, own.tpot_s))


def test_tighter_limits_carry_less() -> None:
    """Both limits lower the load; loose ones leave that of queued requests."""
    most = queued(instance(), 5000).predict(instance())[0].output_tokens_per_s

    assert limited(1e3, 1e3).output_tokens_per_s == pytest.approx(most, rel=0.01)
    assert limited(1e3, 0.01).output_tokens_per_s < 0.9 * most
    assert limited(1e3, 0.01).tpot_s <= 0.01 * (1.0 + 1e-9)
    assert limited(0.1, 1e3).output_tokens_per_s < 0.9 * most
    assert limited(0.1, 1e3, copies=64).output_tokens_per_s > limited(0.1, 1e3).output_tokens_per_s


def test_limits_that_a_request_alone_breaks_are_refused() -> None:
    """No load is made up where even an idle instance is too slow for one of the limits."""
    with pytest.raises(WorkloadError, match=r"a request alone takes .* use more devices or looser limits"):
        limited(0.001, 1e3)
    with pytest.raises(WorkloadError, match="per further token"):
        limited(1e3, 0.001)


def test_disaggregated_instances_are_limited_by_the_slower_kind() -> None:
    """One user gets the sum of both stages; many are limited by prefill where one instance prefills."""
    alone, many, more = (
        disaggregated(instance(), prefillers, 3, users).predict(instance())[0]
        for prefillers, users in ((1, 1), (1, 4000), (4, 4000))
    )

    assert alone.output_tokens_per_s == pytest.approx(500 / (alone.ttft_s + 499 * alone.tpot_s))
    assert many.output_tokens_per_s == pytest.approx(500 / alone.ttft_s, rel=0.05)
    assert more.output_tokens_per_s > 1.2 * many.output_tokens_per_s
    assert many.ttft_s > 100.0 * alone.ttft_s


def test_twice_the_instances_serve_twice_the_users() -> None:
    """Two prefill instances and one that decodes for 100 users, doubled and doubled again: the same times for each."""
    one, two, four = (
        disaggregated(instance(), 2 * copies, copies, 100 * copies).predict(instance())[0] for copies in (1, 2, 4)
    )
    for copies, times in ((2, two), (4, four)):
        assert times.output_tokens_per_s == pytest.approx(copies * one.output_tokens_per_s, rel=1e-3)
        assert (times.ttft_s, times.tpot_s) == pytest.approx((one.ttft_s, one.tpot_s), rel=5e-3)


def test_prompts_that_wait_are_prefilled_together() -> None:
    """Where a pass has a cost of its own, a full queue of a prefill instance serves faster than one prompt a pass."""
    served = instance(prefill_host_s=0.1)
    alone, many = (disaggregated(served, 1, 3, users).predict(served)[0] for users in (1, 4000))

    assert many.output_tokens_per_s > 2.0 * 500 / alone.ttft_s


def test_a_run_ends_with_its_longest_answer() -> None:
    """Answers twice the mean cost a run of ten rounds a tenth of its time, and an endless one nothing."""
    endless, even, uneven = (
        disaggregated(instance(), 1, 3, 8, count, longest=longest).predict(instance())[0]
        for count, longest in ((float("inf"), 2.0), (80, 1.0), (80, 2.0))
    )

    assert even == endless
    assert even.output_tokens_per_s / uneven.output_tokens_per_s == pytest.approx(1.1, rel=0.01)
    assert uneven.ttft_s == even.ttft_s
