"""Simulated traffic: worked examples, queues with known waits, and the limits where the closed form holds."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import shapewright
from served import make_instance
from shapewright.core.errors import WorkloadError
from shapewright.optimize.serving.aggregated import AggregatedCandidate, PrefillChunking
from shapewright.optimize.serving.pass_times import time_passes
from shapewright.optimize.serving.point import waiting_s
from shapewright.optimize.serving.request import ServingRequest
from shapewright.optimize.serving.traffic.candidates import Scheduler, price_streams
from shapewright.optimize.serving.traffic.figures import find_largest_rate, simulate_capacity_per_s, summarize_outcome
from shapewright.optimize.serving.traffic.pass_table import price_table
from shapewright.optimize.serving.traffic.requests import RandomTraffic, Traffic, read_lengths
from shapewright.optimize.serving.traffic.state import Limits
from shapewright.optimize.serving.traffic.stream import pass_s, replica_pass_s
from shapewright.optimize.serving.traffic.unit import SimulatedUnit, Streams, simulate_unit
from shapewright.prediction.composition.step import compose_passes
from shapewright.pricing.servers import load_server
from simulated import constant_streams, make_traffic, simulate


def test_one_request_by_hand() -> None:
    """100 tokens in passes of 64: two passes to the first token, then one for each of the 4 further ones."""
    outcome = simulate(make_traffic([3.0], [100], [5]), constant_streams())

    assert outcome.first_s.tolist() == [5.0]
    assert outcome.end_s.tolist() == [9.0]
    assert outcome.totals[0][:2] == (6, 6.0)
    assert outcome.totals[0].prefill_tokens == 100
    assert outcome.totals[0].decode_tokens == 4
    assert outcome.totals[0].most_blocks == 26  # 104 tokens in blocks of 4


def test_second_prompt_shares_passes_with_decoding() -> None:
    """A request that arrives in a pass waits for its end; its prompt is cut to what the decoding token leaves."""
    outcome = simulate(make_traffic([0.0, 0.5], [10, 64], [4, 2]), constant_streams())

    assert outcome.first_s.tolist() == [1.0, 3.0]  # 63 tokens beside a decoding one, then the last
    assert outcome.end_s.tolist() == [4.0, 4.0]
    assert outcome.admitted_s.tolist() == [0.0, 1.0]


def test_full_cache_computes_the_last_sequence_again() -> None:
    """Two sequences of 8 + 8 tokens in 6 blocks of 4: the second loses its blocks, and is computed again at the end."""
    streams = constant_streams(num_blocks=6, max_sequences=2)
    outcome = simulate(make_traffic([0.0, 0.0], [8, 8], [9, 9]), streams)

    assert outcome.preempted.tolist() == [0, 1]
    assert outcome.emitted.tolist() == [9, 9]
    assert outcome.end_s[0] == 9.0
    assert outcome.totals[0].most_blocks == 6
    assert outcome.first_s[1] == outcome.first_s[0]  # a first token that was sent stays the first
    # The second has 8 + 5 tokens when the first needs its fifth block, so 13 more are computed than the prompts hold.
    assert outcome.totals[0].prefill_tokens == 16 + 13


def test_preempted_blocks_that_nobody_takes_are_kept() -> None:
    """As above, where the blocks stay in the cache: of the 13 tokens only those after the first block are computed."""
    streams = constant_streams(num_blocks=6, max_sequences=2, keeps_preempted=True)
    outcome = simulate(make_traffic([0.0, 0.0], [8, 8], [9, 9]), streams)

    # The second has 3 whole blocks; the first takes the partial one and one of these before it ends.
    assert outcome.preempted.tolist() == [0, 1]
    assert outcome.totals[0].prefill_tokens == 16 + 13 - 2 * 4


def test_replicas_in_step_share_the_time_of_a_pass() -> None:
    """Two replicas take a prompt each in one pass; a longer one makes both wait."""
    streams = constant_streams(num_replicas=2, max_sequences=1)
    outcome = simulate(make_traffic([0.0, 0.0], [64, 100], [3, 3]), streams)

    assert outcome.first_s.tolist() == [1.0, 2.0]
    assert outcome.end_s.tolist() == [3.0, 4.0]


def test_replicas_cut_prompts_at_the_same_time() -> None:
    """Two prompts of three passes each take three passes on two replicas, not six; capacity counts all sequences."""
    streams = constant_streams(num_replicas=2, max_sequences=1)
    traffic = make_traffic([0.0, 0.0], [192, 192], [2, 2])
    outcome = simulate(traffic, streams)

    assert outcome.first_s.tolist() == [3.0, 3.0]
    assert simulate_capacity_per_s(SimulatedUnit(streams), traffic) == pytest.approx(2 / 4, rel=0.01)


def test_prompts_that_are_not_cut_stop_decoding() -> None:
    """Without chunked prefill, a pass over prompts decodes nothing: the first request waits for the second's prompt."""
    streams = constant_streams(is_chunked=False, max_tokens=128)
    outcome = simulate(make_traffic([0.0, 0.5], [10, 100], [4, 2]), streams)

    assert outcome.first_s.tolist() == [1.0, 2.0]
    assert outcome.end_s.tolist() == [5.0, 3.0]


def test_cut_prompts_may_have_passes_of_their_own() -> None:
    """A prompt of 100 tokens that is cut to passes of 64, none of them mixed, stops decoding for two passes."""
    outcome = simulate(make_traffic([0.0, 0.5], [10, 100], [4, 2]), constant_streams(is_mixed=False))

    assert outcome.first_s.tolist() == [1.0, 3.0]
    assert outcome.end_s.tolist() == [6.0, 4.0]


def test_reserved_answers_wait_instead() -> None:
    """Where whole answers are reserved, the second of two sequences starts when the first ends, and loses nothing."""
    streams = constant_streams(num_blocks=6, max_sequences=2, reserves_answers=True)
    outcome = simulate(make_traffic([0.0, 0.0], [8, 8], [9, 9]), streams)

    assert outcome.preempted.tolist() == [0, 0]
    assert outcome.admitted_s.tolist() == [0.0, 9.0]


@pytest.mark.parametrize("reserves_answers", [False, True])
def test_the_last_block_of_the_cache_counts(reserves_answers: bool) -> None:
    """Two sequences of 8 + 8 tokens fill 8 blocks of 4 exactly; with one less the second waits or starts again."""
    exact, short = (
        simulate(
            make_traffic([0.0, 0.0], [8, 8], [9, 9]),
            constant_streams(num_blocks=num_blocks, max_sequences=2, reserves_answers=reserves_answers),
        )
        for num_blocks in (8, 7)
    )

    assert exact.end_s.tolist() == [9.0, 9.0]
    assert exact.preempted.tolist() == [0, 0]
    assert exact.totals[0].most_blocks == 8
    assert short.end_s[1] > short.end_s[0] == 9.0
    assert short.totals[0].most_blocks <= 7


def test_shared_prefix_is_computed_once() -> None:
    """Of a prefix of 10 tokens two whole blocks of 4 stay, for requests that come after its first user ended too."""
    traffic = make_traffic([0.0, 50.0], [12, 12], [2, 2], prefix=[0, 0], prefix_len=[10, 10])
    outcome = simulate(traffic, constant_streams())

    assert outcome.hit_len.tolist() == [0, 8]
    assert outcome.totals[0].prefill_tokens == 12 + 4


def test_unused_prefix_gives_way() -> None:
    """An unused prefix is evicted when another request needs its blocks, and computed again."""
    traffic = make_traffic([0.0, 50.0, 100.0], [16, 40, 16], [2, 2, 2], prefix=[0, -1, 0], prefix_len=[16, 0, 16])
    outcome = simulate(traffic, constant_streams(num_blocks=11))

    assert outcome.hit_len.tolist() == [0, 0, 0]
    assert outcome.preempted.tolist() == [0, 0, 0]


def test_waits_are_those_of_m_d_1() -> None:
    """One sequence at a time and equal requests are a queue with one server and a fixed service time."""
    num, passes = 60_000, 5
    draw = np.random.default_rng(1)
    traffic = make_traffic(np.cumsum(draw.exponential(1.0, num)), [8] * num, [passes] * num)
    for load in (0.3, 0.6, 0.8):
        outcome = simulate(traffic, constant_streams(load / passes, max_sequences=1))
        waits_s = outcome.admitted_s - outcome.arrival_s

        assert np.mean(waits_s) == pytest.approx(waiting_s(load, load), rel=0.05)


def test_waits_are_those_of_m_m_c() -> None:
    """Passes of one time and answers of geometric length are a queue with as many servers as sequences.

    Erlang's C: with c = 4 servers and load 0.8, a request waits with probability 0.596 and 1 / (4 * 0.2) services.
    """
    servers, load, mean, num = 4, 0.8, 400, 80_000
    offered = servers * load
    terms = [offered**k / math.factorial(k) for k in range(servers)]
    last = offered**servers / math.factorial(servers) / (1.0 - load)
    probability = last / (sum(terms) + last)
    draw = np.random.default_rng(2)
    service_s = 1.0
    arrival_s = np.cumsum(draw.exponential(service_s / offered, num))
    # With the pass of the prompt, a request takes as many passes as its answer has tokens.
    traffic = make_traffic(arrival_s, [1] * num, draw.geometric(1.0 / mean, num))
    streams = constant_streams(service_s / mean, max_sequences=servers, num_blocks=40_000, longest_len=20_000)
    outcome = simulate(traffic, streams)
    waits_s = outcome.admitted_s - outcome.arrival_s

    assert probability == pytest.approx(0.596, abs=0.001)
    assert np.mean(waits_s) == pytest.approx(probability * service_s / (servers * (1.0 - load)), rel=0.1)
    assert np.mean(waits_s > service_s / mean) == pytest.approx(probability, rel=0.05)


def test_full_batches_serve_as_the_closed_form() -> None:
    """With equal requests that always wait, requests per second are those of the closed form within 4 %."""
    request = ServingRequest(prompt_len=1024, output_len=256)
    instance = make_instance(request=request)
    chunking = PrefillChunking(1, 512, 2, 256)
    for batch in (16, 64):
        candidate = AggregatedCandidate(instance, batch, chunking, batch * 2 / 255)
        point = candidate.point(compose_passes(candidate.passes(), instance.scenario.config, instance.scenario.device))
        limits = Limits(batch + 1, 512 + batch, 16, 10_000)
        priced = price_table(
            instance, max_sequences=limits.max_sequences, max_tokens=limits.max_tokens, longest_len=request.total_len
        )
        unit = SimulatedUnit(Streams(priced.table, limits, 1))
        equal = make_traffic([0.0] * 2000, [1024] * 2000, [256] * 2000)

        assert simulate_capacity_per_s(unit, equal) == pytest.approx(point.requests_per_s, rel=0.04)


def test_idle_server_has_the_latency_of_its_passes() -> None:
    """With hours between requests, a first token takes a prefill pass, and a further one a decode pass."""
    request = ServingRequest(prompt_len=1000, output_len=201)
    instance = make_instance(request=request)
    priced = price_table(instance, max_sequences=8, max_tokens=2048, longest_len=request.total_len)
    unit = SimulatedUnit(Streams(priced.table, Limits(8, 2048, 16, 1000), 1))
    traffic = make_traffic([0.0, 3600.0, 7200.0], [1000] * 3, [201] * 3)
    figures = summarize_outcome(unit, traffic, simulate_unit(unit, traffic))
    passes = [instance.passes.prefill(1, 1000), instance.passes.decode(1, 1100, answer_len=201)]
    prefill, decode = compose_passes(passes, instance.scenario.config, instance.scenario.device)

    assert figures.tpot is not None
    assert figures.ttft.p50_s == pytest.approx(prefill.step_s, rel=0.05)
    assert figures.tpot.p50_s == pytest.approx(decode.step_s, rel=0.02)
    assert figures.most_queue == 0


def test_interpolated_passes_are_close() -> None:
    """Passes off the grid are within 2 % in the median and 10 % at most."""
    priced = price_table(make_instance(), max_sequences=256, max_tokens=2048, longest_len=8192)

    assert priced.error_median_fraction < 0.02
    assert priced.error_most_fraction < 0.1
    assert priced.low_fraction < 1.0 < priced.high_fraction


def test_disaggregated_first_token_includes_the_transfer() -> None:
    """A prompt passes the prefill stream, is sent, and is decoded elsewhere; nothing is computed twice."""
    unit = SimulatedUnit(constant_streams(), constant_streams(0.5), (0.0, 1000.0), (0.25, 10.25))
    traffic = make_traffic([0.0, 0.0], [50, 100], [3, 3])
    outcome = simulate_unit(unit, traffic)

    # 64 tokens in the first pass (50 and 14), 64 in the second, 22 in the third; then 0.25 s + 0.01 s a token.
    assert outcome.first_s.tolist() == [0.5 + 0.75, 1.5 + 1.25]
    assert outcome.emitted.tolist() == [3, 3]
    assert sum(total.prefill_tokens for total in outcome.totals) == 0
    assert outcome.end_s[0] == pytest.approx(outcome.first_s[0] + 2.0)


def test_requests_that_wait_to_be_decoded_do_not_run() -> None:
    """Eight prompts are prefilled at once; two at a time decode for 4 s each, and the others wait for them."""
    unit = SimulatedUnit(constant_streams(max_sequences=2), constant_streams(1e-3, max_tokens=400, max_sequences=8))
    traffic = make_traffic([0.0] * 8, [10] * 8, [5] * 8)
    figures = summarize_outcome(unit, traffic, simulate_unit(unit, traffic))

    assert figures.mean_running == pytest.approx(2.0, rel=2e-3)


def _mixed_traffic() -> Traffic:
    source = RandomTraffic(
        prompts=read_lengths("lognormal:60,40", "prompt_len"),
        answers=read_lengths("geometric:30", "output_len"),
        cached_len=12,
        num_requests=3000,
        seed=7,
    )
    return source.draw(400)[0].at_rate(0.2)


def test_same_seed_gives_the_same_outcome() -> None:
    """Bit by bit; another seed gives another one."""
    streams = constant_streams(num_blocks=150, max_sequences=16, num_streams=2)
    first, second = simulate(_mixed_traffic(), streams), simulate(_mixed_traffic(), streams)

    assert first.end_s.tobytes() == second.end_s.tobytes()
    source = RandomTraffic(prompts=read_lengths("geometric:60", "prompt_len"), answers=read_lengths(30, "output_len"))
    assert not np.array_equal(source.draw(4000)[0].prompt_len, replace(source, seed=1).draw(4000)[0].prompt_len)


def test_compiled_loop_gives_the_same_outcome() -> None:
    """With preemptions, prefixes and cut prompts, times and counts are bit-identical to those of Python alone."""
    pytest.importorskip("numba", reason="needs the fast extra")
    streams = constant_streams(num_blocks=150, max_sequences=16, num_streams=2)
    plain, compiled = (simulate(_mixed_traffic(), streams, compiled=each) for each in (False, True))

    assert plain.preempted.sum() > 0
    assert plain.hit_len.sum() > 0
    for name in ("admitted_s", "first_s", "end_s", "emitted", "preempted", "hit_len"):
        assert getattr(plain, name).tobytes() == getattr(compiled, name).tobytes()
    assert plain.totals == compiled.totals


def test_requests_that_never_fit_are_refused() -> None:
    """A request that the whole cache does not hold is named."""
    with pytest.raises(WorkloadError, match="a request of 44 tokens does not fit into the cache of 40 tokens"):
        simulate(make_traffic([0.0], [40], [4]), constant_streams(num_blocks=10))


def test_only_whole_blocks_of_the_cache_hold_a_request() -> None:
    """A request that ends in the last, partial block of the cache does not fit."""
    instance = make_instance(request=ServingRequest(prompt_len=1024, output_len=256))
    scheduler = Scheduler(max_num_seqs=4, max_num_batched_tokens=2048)
    block_tokens, cache_tokens = instance.request.block_tokens, instance.cache_tokens(2048)
    num_blocks = cache_tokens // block_tokens
    longest_len = num_blocks * block_tokens

    assert longest_len < cache_tokens, "this cache is to end within a block"
    with pytest.raises(WorkloadError, match=f"a request of {longest_len + 1} tokens does not fit into the cache"):
        price_streams(instance, scheduler, longest_len + 1)
    assert price_streams(instance, scheduler, longest_len)[1].num_blocks == num_blocks


@pytest.mark.parametrize(
    ("text", "mean", "spread"),
    [
        ("500", 500.0, 0.0),
        ("uniform:100,900", 500.0, 800 / math.sqrt(12)),
        ("normal:500,50", 500.0, 50.0),
        ("lognormal:500,300", 500.0, 300.0),
        ("geometric:500", 500.0, 500.0),
        ("poisson:500", 500.0, 500.0**0.5),
        ("uniform(100-900)", 500.0, 800 / math.sqrt(12)),
        ("100=0.5,900=0.5", 500.0, 400.0),
    ],
)
def test_drawn_lengths_have_the_mean_and_spread(text: str, mean: float, spread: float) -> None:
    """Mean and standard deviation of 100,000 lengths are those of the distribution."""
    distribution = read_lengths(text, "prompt_len")
    drawn = distribution.draw(np.random.default_rng(0), 100_000)

    assert distribution.mean == pytest.approx(mean)
    assert np.mean(drawn) == pytest.approx(mean, rel=0.02)
    assert np.std(drawn) == pytest.approx(spread, rel=0.03, abs=1e-9)


def test_reserved_answers_share_a_prefix() -> None:
    """Two sequences of 16 tokens need four blocks of 4 each; with two of them shared, six hold both at once."""
    traffic = make_traffic([0.0, 1.5], [12, 12], [5, 5], prefix=[0, 0], prefix_len=[8, 8])
    six, five = (
        simulate(traffic, constant_streams(num_blocks=blocks, max_sequences=2, reserves_answers=True))
        for blocks in (6, 5)
    )

    assert six.admitted_s.tolist() == [0.0, 2.0]
    assert five.admitted_s.tolist() == [0.0, 5.0]


def test_share_of_prompt_tokens_found_in_the_cache() -> None:
    """Of 24 prompt tokens of two requests 8 are those of a prefix that is there already."""
    unit = SimulatedUnit(constant_streams())
    traffic = make_traffic([0.0, 50.0], [12, 12], [2, 2], prefix=[0, 0], prefix_len=[10, 10])
    figures = summarize_outcome(unit, traffic, simulate_unit(unit, traffic))

    assert figures.prefix_hit_fraction == pytest.approx(8 / 24)


@pytest.mark.parametrize(("num_devices", "cached_len"), [(1, 1500), (2, 1500), (4, 0)])
def test_the_largest_load_is_what_an_overloaded_server_serves(num_devices: int, cached_len: int) -> None:
    """Of equal requests, with a shared prefix or replicas, the queue of a load beyond the capacity drains at it."""
    plan = shapewright.serve_traffic(
        "llama-3.1-8b",
        device="h100-sxm-80gb",
        arrivals="2/s",
        prompt_len=2000,
        output_len=300,
        cached_len=cached_len,
        num_requests=9000,
        num_devices=num_devices,
        num_layouts=1,
        layout={"tensor_parallel": 1},
    )
    (server,) = plan.servers
    source = plan.question.source
    assert isinstance(source, RandomTraffic)
    traffic, _ = source.draw(131072)
    ends_s = np.sort(simulate_unit(server.candidate.unit, traffic.at_rate(1.3 * server.capacity_per_s)).end_s)
    served_per_s = 4000 / (ends_s[7000] - ends_s[3000])

    assert server.capacity_per_s == pytest.approx(served_per_s, rel=0.05)


@pytest.mark.parametrize("output_len", [1, "geometric:1.2"])
@pytest.mark.parametrize("num_devices", [None, 1])
def test_answers_that_leave_no_passes_to_decode_are_refused(output_len: int | str, num_devices: int | None) -> None:
    """Prefill alone is no load that a plan of decoding servers holds."""
    with pytest.raises(WorkloadError, match="answers of 2 tokens are too short beside prompts of 2000"):
        shapewright.serve_traffic(
            "llama-3.1-8b", device="h100-sxm-80gb", arrivals="2/s", prompt_len=2000, output_len=output_len,
            num_devices=num_devices,
        )  # fmt: skip


def test_the_largest_load_of_a_limit_that_only_a_lone_request_keeps() -> None:
    """Passes of 1 s: who arrives at a busy server waits for the end of a pass, and 5 tokens keep it busy for 5 s.

    9 of 10 requests must find it idle, which is e^(-5 r) of the time: r = 0.021/s, below 1/64 of 6.4/s.
    """
    unit = SimulatedUnit(constant_streams(max_sequences=100, num_blocks=10**6))
    arrival_s = np.random.default_rng(0).exponential(size=4000).cumsum()
    traffic = make_traffic(arrival_s.tolist(), [10] * 4000, [5] * 4000)
    found, none = (
        find_largest_rate(unit, traffic, 6.4, ttft_p90_s=limit_s, tpot_p90_s=None, warm_up_fraction=0.0)
        for limit_s in (1.0001, 0.9)
    )

    assert found == pytest.approx(-math.log(0.9) / 5, rel=0.15)
    assert none == 0.0


@pytest.mark.parametrize("server", ["current", "vllm-0.6"])
def test_passes_of_the_table_are_those_that_were_priced(server: str) -> None:
    """On the grid of batches, contexts and chunks, and halfway between two contexts the mean of both.

    A prompt pass of the grid has chunks that attend to a mean number of tokens; cores and the rest are added up.
    """
    request = ServingRequest(prompt_len=1000, output_len=10_000, server=load_server(server))
    served = make_instance(request=request)
    table = price_table(served, max_sequences=64, max_tokens=1024, longest_len=4096).table

    def alone_s(*sizes: tuple[int, int]) -> list[float]:
        passes = [served.passes.decode(batch, context, answer_len=min(10_000, 2 * context)) for batch, context in sizes]
        return [each.step_s for each in time_passes(passes, served.scenario, request.server)]

    grid = [(batch, context) for batch in (1, 3, 48, 64) for context in (16, 96, 1024, 4096)]
    found = [pass_s(table, batch, batch * context, 0, 0.0) for batch, context in grid]
    assert found == pytest.approx(alone_s(*grid), rel=1e-9)

    # The cores of 3 sequences between contexts of 1,024 and 1,536, and of 5 sequences between 4 and 6.
    near, far = (pass_s(table, 3, 3 * context, 0, 0.0) for context in (1024, 1536))
    assert pass_s(table, 3, 3 * 1280, 0, 0.0) == pytest.approx(0.5 * (near + far))
    four, five, six = (pass_s(table, batch, batch * 1024, 0, 0.0) for batch in (4, 5, 6))
    assert four < five < six

    (prompt,) = time_passes([served.passes.prefill(1, 512, 1024 - 256)], served.scenario, request.server)
    assert pass_s(table, 0, 0, 512, 512 * 1024.0) == pytest.approx(prompt.step_s, rel=1e-9)
    decode, prefill = served.passes.decode(64, 1024, answer_len=2048), served.passes.prefill(1, 512, 1024 - 256)
    (both,) = time_passes([served.passes.mixed(decode, prefill)], served.scenario, request.server)
    assert pass_s(table, 64, 64 * 1024, 512, 512 * 1024.0) == pytest.approx(both.step_s, rel=0.02)


def test_time_of_a_pass_by_hand() -> None:
    """A sequence takes 1 s and a token of a pass with prompts 10 s; cores take 0.1 s a sequence at 100 tokens.

    Sequences and prompt tokens are dealt to replicas, of which the one with most decides.
    """
    counts = np.arange(201)
    cells, fractions = np.zeros(201, np.int64), counts / 100.0
    table = constant_streams(longest_len=1).table._replace(
        decode_s=1.0 * counts,
        tokens_s=10.0 * counts,
        decode_core_s=np.array([0.0, 0.1, 0.0, 0.2]),  # of one and two sequences at 0 and 100 tokens
        prompt_core_s=np.array([0.0, 0.5, 0.0, 0.7]),  # of 10 and 20 tokens
        batch_cell=cells,
        batch_fraction=np.maximum(counts - 1.0, 0.0),
        context_cell=cells,
        context_fraction=fractions,
        token_cell=cells,
        token_fraction=(counts - 10.0) / 10.0,
    )

    assert pass_s(table, 1, 50, 0, 0.0) == pytest.approx(1.0 + 0.05)
    assert pass_s(table, 2, 200, 0, 0.0) == pytest.approx(2.0 + 0.2)
    assert pass_s(table, 0, 0, 10, 10 * 100.0) == pytest.approx(100.0 + 0.5)
    assert pass_s(table, 2, 100, 15, 15 * 50.0) == pytest.approx(170.0 + 0.1 + 0.3)
    # Without a graph the launches take longer; the host adds its time for a pass, a sequence and a prompt.
    slow = table._replace(
        most_graph_sequences=1,
        decode_launch_s=5.0,
        prefill_launch_s=200.0,
        mixed_launch_s=300.0,
        host_s=0.25,
        host_per_sequence_s=0.125,
        prefill_host_s=0.5,
    )
    assert pass_s(slow, 1, 0, 0, 0.0) == pytest.approx(1.0 + 0.25 + 0.125)
    assert pass_s(slow, 2, 0, 0, 0.0) == pytest.approx(5.0 + 0.25 + 0.25)
    assert pass_s(slow, 0, 0, 10, 0.0) == pytest.approx(200.0 + 0.25 + 0.125 + 0.5)
    assert pass_s(slow, 2, 0, 10, 0.0) == pytest.approx(300.0 + 0.25 + 0.25 + 0.5)
    # Seven sequences and 25 prompt tokens on three replicas: 3 and 9, unless one has a longer chunk.
    flat = table._replace(decode_core_s=np.zeros(4), prompt_core_s=np.array([0.0, 1.0, 0.0, 1.0]))
    assert replica_pass_s(flat, 3, 7, 700, 0, 0.0, 0) == pytest.approx(3.0)
    assert replica_pass_s(flat, 3, 7, 700, 25, 25 * 50.0, 5) == pytest.approx(10.0 * (3 + 9) + 0.5)
    assert replica_pass_s(flat, 3, 7, 700, 25, 25 * 50.0, 20) == pytest.approx(10.0 * (3 + 20) + 0.5)
    assert replica_pass_s(flat, 3, 0, 0, 25, 25 * 50.0, 20) == pytest.approx(10.0 * 20 + 0.5)


@pytest.mark.parametrize(
    ("arrivals", "prompts", "answers", "num_blocks", "max_sequences", "max_tokens"),
    [
        ([0.0, 0.5, 1.0, 1.0], [4, 40, 4, 40], [2, 2, 20, 2], 22, 2, 8),
        ([0.0, 0.0, 0.5, 0.5], [20, 20, 24, 20], [20, 10, 2, 10], 20, 3, 6),
        ([0.0, 0.5, 0.5, 0.5, 1.0], [4, 4, 20, 20, 24], [2, 10, 2, 10, 2], 18, 2, 12),
    ],
)
def test_a_cut_prompt_that_loses_its_blocks_leaves_the_other_one_as_it_was(
    arrivals: list[float], prompts: list[int], answers: list[int], num_blocks: int, max_sequences: int, max_tokens: int
) -> None:
    """They are on two replicas when a decoding sequence needs a block: all answers end, all blocks are free."""
    streams = constant_streams(
        num_replicas=2, num_blocks=num_blocks, max_sequences=max_sequences, max_tokens=max_tokens
    )
    outcome = simulate(make_traffic(arrivals, prompts, answers), streams)

    assert outcome.preempted.sum() > 0
    assert outcome.emitted.tolist() == answers
    assert outcome.totals[0].free_blocks == num_blocks
