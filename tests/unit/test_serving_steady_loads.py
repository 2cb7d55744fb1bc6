"""Loads whose batch follows from the load: open loops, limits on latency, disaggregated instances."""

from __future__ import annotations

import math
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


HAND = ServingRequest(
    prompt_len=1000, output_len=101, server=replace(CURRENT_SERVER, pass_tokens=1000, most_sequences=4)
)
DECODE_S, MIXED_S = (0.010, 0.012, 0.016), (0.110, 0.112, 0.116)
"""Passes of one, two and four sequences, and the same with a prompt: 2 ms for a sequence, 0.1 s for a prompt."""
QUEUED_S = (0.016, 0.012, 0.116, 0.112)


def mean_s(batch: float) -> float:
    """A mean pass: of 101 in which a batch ends, one prefills for each of its sequences."""
    return 0.008 + 0.002 * batch + 0.1 * batch / 101


@pytest.mark.parametrize(("longest", "steps"), [(1.0, 1), (2.0, 1), (1.0, 8)])
def test_an_open_loop_below_capacity_by_hand(longest: float, steps: int) -> None:
    """1,000 requests, one a second: B = 101 (0.01 + 0.002 (B - 1)) + 0.1 B of a batch between one and two decode."""
    request = replace(HAND, server=replace(HAND.server, scheduler_steps=steps))
    load = open_loop(make_instance(request=request), 1000, 1.0, longest=longest)
    queued_s = QUEUED_S if longest == 1.0 else (*QUEUED_S, 0.012)
    times = load.combine([*DECODE_S, *MIXED_S, *queued_s])

    # On the line from (1, 101 mean_s(1)) to (2, 101 mean_s(2)): the value at the first size that is enough.
    busy = 101 * mean_s(2)
    tail_s = longest * 101 * (0.008 + 0.002 * max(busy / longest, 1.0))
    end_s = 1000 + tail_s
    batch = 1000 / end_s * busy
    # An arrival finds a prompt before it in a tenth of cases: 0.1 * 0.1 / (2 * 0.9) s.
    first_s = 0.108 + 0.002 * batch + 0.01 / 1.8
    token_s = mean_s(1) + (batch - 1) * (mean_s(2) - mean_s(1))
    assert times.output_tokens_per_s == pytest.approx(1000 * 101 / end_s)
    assert times.tpot_s == pytest.approx(token_s)
    assert times.ttft_s == pytest.approx(first_s + (4 * token_s if steps == 8 else 0.0))


def test_an_open_loop_beyond_capacity_by_hand() -> None:
    """1,000 requests within a second: 250 rounds of four, and the one in the middle waits until 496 have ended."""
    times = open_loop(make_instance(request=HAND), 1000, 1000.0).combine([*DECODE_S, *MIXED_S, *QUEUED_S])

    # Passes of queued requests: 25,250 less the four that fill the batch, which decode two on average.
    end_s = (25250 - 4) * 0.016 + 4 * 0.112 + 4 * 0.012 + 996 * 0.1
    batch = 1000 / end_s * 101 * mean_s(4)
    assert times.output_tokens_per_s == pytest.approx(1000 * 101 / end_s)
    assert times.ttft_s == pytest.approx(0.108 + 0.002 * batch + 496 * 101 * mean_s(4) / 4 - 0.5)


@pytest.mark.parametrize("copies", [1, 2])
def test_half_of_the_load_keeps_a_limit_of_the_first_token_by_hand(copies: int) -> None:
    """One sequence at a time: 0.5 exp(-(t - 0.11) / S) = 0.01 at a time t = 0.11 + ln(50) S.

    S is the time between prompts at full load: that of an answer, over the copies.
    """
    request = replace(HAND, server=replace(HAND.server, most_sequences=1))
    between_s = 101 * mean_s(1) / copies
    limit_s = 0.11 + math.log(50.0) * between_s
    # The queue of all requests is fast here, so that it is no limit.
    load = within_limits(make_instance(request=request), 1000, copies, limit_s, 1.0)
    times = load.combine([0.01, 0.11, 0.01, 0.001, 0.11, 0.001])

    assert times.output_tokens_per_s == pytest.approx(0.5 / mean_s(1), rel=2e-3)
    assert times.tpot_s == pytest.approx(mean_s(1))
    # The mean wait of a queue that is busy half of the time is half of its service.
    assert times.ttft_s == pytest.approx(0.11 + 0.5 * between_s, rel=2e-3)


@pytest.mark.parametrize("prefillers", [1, 2])
def test_a_network_of_instances_is_in_balance(prefillers: int) -> None:
    """Eight users: as many are with prefill and decode instances, and each waits for the queue that it finds.

    A prompt takes 0.2 s alone, and 0.1 s more in a pass with others; decoding takes 0.3 s and more a token.
    """
    decode_s = (0.01, 0.012, 0.016)
    load = disaggregated(make_instance(request=HAND), prefillers, 2, 8)
    times = load.combine([*decode_s, *MIXED_S, *QUEUED_S, 0.2])
    rate = times.output_tokens_per_s / 101

    assert load.num_sequences == 8
    assert rate * (times.ttft_s + 100 * times.tpot_s) == pytest.approx(8.0, rel=1e-6)
    # Of the requests that prefill, 7 / 8 are others, spread over the instances.
    assert times.ttft_s == pytest.approx(0.2 + 0.1 * rate * times.ttft_s * 7 / 8 / prefillers, rel=1e-6)
    batch = max(rate * 100 * times.tpot_s / 2, 1.0)
    assert times.tpot_s == pytest.approx(0.008 + 0.002 * batch, rel=1e-6)


@pytest.mark.parametrize("mixes", [True, False])
def test_prompts_that_share_a_pass_by_hand(mixes: bool) -> None:
    """Answers of three tokens: four sequences start in three passes, 4 / 3 prompts in each.

    The first takes the 0.1 s that one prompt adds to a pass, the third of another one a third of 0.05 s: four take
    0.2 s in a full pass.
    """
    server = replace(CURRENT_SERVER, pass_tokens=4000, most_sequences=4, mixes_prefill=mixes)
    load = open_loop(make_instance(request=ServingRequest(prompt_len=1000, output_len=3, server=server)), 1000, 1e3)
    mixed_s, queued_s = (MIXED_S, (0.016, 0.012, 0.216, 0.212)) if mixes else ((0.1,) * 3, (0.016, 0.012, 0.2, 0.2))
    times = load.combine([*DECODE_S, *mixed_s, *queued_s])

    assert times.tpot_s == pytest.approx(0.016 + 0.1 + 0.05 / 3)


def test_prompts_of_two_passes_by_hand() -> None:
    """One request in ten seconds: both of its passes prefill, and of 101 passes with its tokens two prefill."""
    request = replace(HAND, server=replace(HAND.server, pass_tokens=500))
    load = open_loop(make_instance(request=request), 1000, 0.1)
    times = load.combine([*DECODE_S, *MIXED_S, *QUEUED_S])

    assert times.tpot_s == pytest.approx(0.01 + 0.1 * 2 / 101)
    # Another prompt of twice 0.1 s is there in a fiftieth of cases.
    assert times.ttft_s == pytest.approx(2 * 0.11 + 0.02 * 0.2 / (2 * 0.98))


def test_a_request_alone_is_no_slower_than_a_batch_within_limits() -> None:
    """With loose limits the load is that of queued requests; within the time of three sequences, theirs.

    Shares of it are tried to a thousandth.
    """
    loose, tight = (
        within_limits(make_instance(request=HAND), 1000, 1, 1e9, limit_s).combine([*DECODE_S, *MIXED_S, *QUEUED_S])
        for limit_s in (1.0, mean_s(3))
    )

    queued_s = (25250 - 4) * 0.016 + 4 * 0.112 + 4 * 0.012 + 996 * 0.1
    assert loose.output_tokens_per_s == pytest.approx(1000 * 101 / queued_s, rel=2e-3)
    assert tight.output_tokens_per_s == pytest.approx(3 / mean_s(3), rel=2e-3)
    assert tight.tpot_s == pytest.approx(mean_s(3))
