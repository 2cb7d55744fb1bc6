"""Loads in closed form: queued requests, closed loops, static batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from served import make_instance
from shapewright.core.errors import WorkloadError
from shapewright.optimize.serving.closed_form import make_prefill_pass, most_decoding_sequences, queued, static_batch
from shapewright.optimize.serving.pass_times import PassShape
from shapewright.optimize.serving.point import Instance
from shapewright.optimize.serving.request import ServingRequest
from shapewright.optimize.serving.steady_loads import open_loop, within_limits
from shapewright.pricing.servers import CURRENT_SERVER, load_server

REQUEST = ServingRequest(prompt_len=1000, output_len=500)


def instance(**changes: object) -> Instance:
    """Llama-3-8B on an H100 with changed defaults of its server."""
    return make_instance(request=replace(REQUEST, server=replace(CURRENT_SERVER, **changes)))  # type: ignore[arg-type]


def test_a_batch_is_its_passes_added_up() -> None:
    """Prompts in one pass, then O - 1 tokens."""
    load = static_batch(make_instance(request=REQUEST), 4)
    times = load.combine([0.1, 0.01])

    assert times.ttft_s == pytest.approx(0.1)
    assert times.output_tokens_per_s == pytest.approx(4 * 500 / (0.1 + 499 * 0.01))


def test_many_queued_requests_reach_a_steady_rate() -> None:
    """Ten times as many requests change the throughput by less than a tenth, and fill more than few do."""
    rates = [queued(instance(), count).predict(instance())[0].output_tokens_per_s for count in (10, 5000, 50000)]

    assert rates[2] == pytest.approx(rates[1], rel=0.1)
    assert rates[0] < 0.5 * rates[1]


def test_more_in_flight_serves_more_at_more_time_per_token() -> None:
    """A closed loop trades throughput for speed, up to what the cache holds."""
    times = [queued(instance(), 2000, count).predict(instance())[0] for count in (1, 8, 64)]

    assert [one.output_tokens_per_s for one in times] == sorted(one.output_tokens_per_s for one in times)
    assert [one.tpot_s for one in times] == sorted(one.tpot_s for one in times)


def test_pieces_of_prompts_fill_a_pass() -> None:
    """Chunked prefill fills its budget of 2,500 tokens with pieces of three prompts; otherwise two whole ones fit."""
    cut, whole = (make_prefill_pass(instance(chunked_prefill=chunked), 2500, 100) for chunked in (True, False))

    assert (cut.prompts, cut.prefill_tokens, cut.prefill_context) == (3, 833, 83)
    assert (whole.prompts, whole.prefill_tokens, whole.prefill_context) == (2, 1000, 0)
    assert make_prefill_pass(instance(), 2500, 1).prefill_tokens == 1000


def test_long_answers_hold_up_the_end() -> None:
    """Of as many tokens in all, unequal answers take longer: the last of them decode in ever smaller batches."""
    equal, unequal = (queued(instance(), 500, longest=longest) for longest in (1.0, 4.0))
    rates = [load.predict(instance())[0].output_tokens_per_s for load in (equal, unequal)]

    assert 0.3 * rates[0] < rates[1] < rates[0]


def test_memory_for_the_longest_context_holds_fewer_sequences() -> None:
    """An engine that keeps memory for a pass over the model's whole context has less left for its cache."""
    small, reserved = (
        most_decoding_sequences(instance(reserves_context=reserves, pass_tokens=1024, most_sequences=10**6))
        for reserves in (False, True)
    )

    assert reserved < small


def test_reserving_answers_holds_fewer_sequences() -> None:
    """An engine that never evicts starts a request only if its whole answer fits."""
    assert most_decoding_sequences(instance(reserves_answers=True, most_sequences=10**6)) < most_decoding_sequences(
        instance(most_sequences=10**6)
    )


def test_prefill_apart_from_decoding_is_slower() -> None:
    """Passes that do both read the weights once."""
    apart, together = (
        queued(instance(mixes_prefill=mixes), 5000).predict(instance())[0].output_tokens_per_s
        for mixes in (False, True)
    )

    assert apart < together


def test_a_model_that_does_not_fit_is_refused() -> None:
    """No sequence fits beside 405 billion parameters."""
    with pytest.raises(WorkloadError, match="does not fit"):
        queued(make_instance("llama-3.1-405b", replace(REQUEST, server=load_server("vllm"))), 100)


def test_prompts_of_many_passes_hold_up_every_token() -> None:
    """A prompt of 30,000 tokens takes more passes than its answer: each token waits for one with prefill, of 3 s."""
    served = make_instance(request=ServingRequest(prompt_len=30000, output_len=2))
    times = queued(served, 100).combine([1.0, 1.0, 3.0, 3.0])

    assert times.tpot_s == 3.0


def test_each_replica_decodes_a_batch_of_its_own() -> None:
    """Two copies hold twice the sequences of one, whatever the load."""
    one, two = (make_instance(request=REQUEST, data_parallel=degree) for degree in (1, 2))
    for load in (
        lambda served: queued(served, 5000),
        lambda served: open_loop(served, 5000, 1e6),
        lambda served: within_limits(served, 5000, 1, 10.0, 1.0),
    ):
        assert load(two).num_sequences == 2 * load(one).num_sequences


def test_a_single_request_in_the_queue_is_served_alone() -> None:
    """Its tokens take the first token's time and 499 times that of a further one."""
    times = queued(instance(), 1).predict(instance())[0]

    assert times.output_tokens_per_s == pytest.approx(500 / (times.ttft_s + 499 * times.tpot_s), rel=0.02)


def test_a_closed_loop_prefills_in_rounds() -> None:
    """Half of a round's prefill comes before the median first token, less what others decode meanwhile."""
    served = make_instance(request=ServingRequest(prompt_len=8192, output_len=129))
    # Decode passes of 10 ms, and one second more for each of the 16 that prefill.
    times = queued(served, 160, 16).combine([0.01, 0.01, 1.01, 1.01])

    wait_s = 0.5 * 16 * (1 - 16 / 129)
    assert times.ttft_s == pytest.approx(wait_s + 0.5 * 1.01, rel=0.01)
    assert times.ttft_s + 128 * times.tpot_s == pytest.approx(16 * 129 / times.output_tokens_per_s)


def test_a_request_whose_prompt_is_known_ends_sooner() -> None:
    """With less than the mean to prefill, the request in the middle ends sooner; the rate is as it was."""
    served = make_instance(request=ServingRequest(prompt_len=8192, output_len=129))
    mean, known = (queued(served, 160, 16, typical=typical).combine([0.01, 0.01, 1.01, 1.01]) for typical in (1.0, 0.5))

    assert known.output_tokens_per_s == mean.output_tokens_per_s
    assert 128 * (mean.tpot_s - known.tpot_s) == pytest.approx(0.5 * 16, rel=0.01)


def test_fewer_requests_than_replicas_leave_some_idle() -> None:
    """Four requests on eight replicas are served at half of the rate of eight."""
    served = make_instance("mixtral-8x7b", request=REQUEST, data_parallel=8, expert_parallel=8)
    four, eight = (queued(served, 10 * count, count).predict(served)[0] for count in (4, 8))

    assert four.output_tokens_per_s == pytest.approx(0.5 * eight.output_tokens_per_s, rel=0.01)
    assert four.tpot_s == pytest.approx(eight.tpot_s, rel=0.05)


@pytest.mark.parametrize(
    ("mixes", "total_s", "token_s"),
    [
        # 100 requests of 1,000 tokens are 50 passes of 2,000; 5 of them fill the first batch of 10, of 5 on average.
        # 10 batches take 500 passes each; 45 passes take 2 s more for their prompts.
        (True, 4995 * 1.0 + 5 * 2.5 + 5 * 0.6 + 45 * 2.0, 1.0 + 2.0 * 50 / 5000),
        # Apart, all 5,000 passes decode, and 50 more prefill.
        (False, 5000 * 1.0 + 5 * 2.5 + 45 * 3.0, 1.0 + 3.0 * 50 / 5000),
    ],
)
def test_queued_requests_by_hand(mixes: bool, total_s: float, token_s: float) -> None:
    """Passes of 1 s, 0.6 s for half of the batch, and with a prefill 3 and 2.5 s."""
    load = queued(instance(mixes_prefill=mixes, pass_tokens=2000, most_sequences=10), 100)
    times = load.combine([1.0, 0.6, 3.0, 2.5])

    # Halfway through its answer, a sequence has 1,000 + 250 tokens.
    decode = (10, 1250) if mixes else (0, 0)
    assert [(shape.decode_batch, shape.decode_context) for shape in load.shapes[:3]] == [(10, 1250), (5, 1250), decode]
    assert load.num_sequences == 10
    assert times.output_tokens_per_s == pytest.approx(100 * 500 / total_s)
    assert times.tpot_s == pytest.approx(token_s)
    # Of the whole time a request decodes for 499 tokens, and waits for the rest (Little's law).
    assert times.ttft_s == pytest.approx(total_s - 499 * token_s)


def test_the_last_requests_in_the_queue_decode_in_a_smaller_batch() -> None:
    """Of 105, the last five take 500 passes of 0.5 s; of unequal answers, the last batch of ten decodes twice as long.

    Its passes have five sequences on average, and it is not among the full batches.
    """
    served = instance(pass_tokens=2000, most_sequences=10)
    few, long = queued(served, 105), queued(served, 100, longest=2.0)

    assert few.shapes[4] == long.shapes[4] == PassShape(5, 1250)
    few_s = (5000 - 5) * 1.0 + 5 * 2.5 + 5 * 0.6 + 47.5 * 2.0 + 500 * 0.5
    assert few.combine([1.0, 0.6, 3.0, 2.5, 0.5]).output_tokens_per_s == pytest.approx(105 * 500 / few_s)
    long_s = (4500 - 5) * 1.0 + 5 * 2.5 + 5 * 0.6 + 45 * 2.0 + 2 * 500 * 0.5
    assert long.combine([1.0, 0.6, 3.0, 2.5, 0.5]).output_tokens_per_s == pytest.approx(100 * 500 / long_s)


def test_whole_prompts_leave_a_part_of_a_pass_unused() -> None:
    """Prompts of 1,000 tokens in passes of up to 1,999: a hundred passes prefill a hundred requests."""
    times = queued(instance(chunked_prefill=False, pass_tokens=1999, most_sequences=10), 100).combine(
        [1.0, 0.6, 3.0, 2.5]
    )

    assert times.tpot_s == pytest.approx(1.0 + 2.0 * 100 / 5000)
    assert 100 * 500 / times.output_tokens_per_s == pytest.approx(4990 * 1.0 + 10 * 2.5 + 10 * 0.6 + 90 * 2.0)


def test_a_batch_has_no_more_sequences_than_its_passes_prefill() -> None:
    """In 500 passes of 200 tokens, of which a sequence takes 1,000 and 500, 67 sequences start and end."""
    load = queued(instance(pass_tokens=200), 1e6)

    assert load.num_sequences == pytest.approx(500 * 200 / 1500)
    assert load.shapes[0].decode_batch == 67


def test_a_closed_loop_by_hand() -> None:
    """Four in flight of 100 requests of 1,000 tokens and 101: 25 rounds of 101 passes, and 100 that prefill.

    Each pass of 0.1 s (0.06 s of two sequences) takes 0.4 s more for a prompt. In a round 4 prompts are prefilled; a
    request waits for half of them, less the share 4 / 101 of its passes, then for half of its own pass of 0.4 s.
    """
    served = make_instance(
        request=ServingRequest(prompt_len=1000, output_len=101, server=replace(CURRENT_SERVER, pass_tokens=1000))
    )
    even, cached = (queued(served, 100, 4, typical=typical).combine([0.1, 0.06, 0.5, 0.4]) for typical in (1.0, 0.75))

    total_s = (2525 - 4) * 0.1 + 4 * 0.4 + 4 * 0.06 + 96 * 0.4
    first_s = 0.5 * 0.4 * 4 * (1 - 4 / 101) + 0.5 * 0.4
    assert even.output_tokens_per_s == pytest.approx(100 * 101 / total_s)
    assert even.ttft_s == pytest.approx(first_s)
    assert even.tpot_s == pytest.approx((4 * total_s / 100 - first_s) / 100)
    # The request in the middle prefills three quarters of the mean.
    assert cached.tpot_s == pytest.approx((4 * total_s / 100 - first_s - 0.25 * 0.4 * 4) / 100)


@pytest.mark.parametrize(("replicas", "share", "factor"), [(2, 0.5, 0.7), (2, 0.25, 0.55), (4, 0.5, 0.9416667)])
def test_replicas_that_share_experts_wait_for_those_that_prefill(replicas: int, share: float, factor: float) -> None:
    """Some of n replicas prefills in q = 1 - (1 - f)^n of the passes, for a fifth of the time that all would add.

    The rest grows with those beyond one: (0.2 q + 0.8 (n f - q) / (n - 1)) / f. Of 2 this is 0.4 + 0.6 f; of 4 with
    f = 1/2 it is (0.2 * 15/16 + 0.8 * (2 - 15/16) / 3) * 2.
    """
    request = ServingRequest(
        prompt_len=1000,
        output_len=100,
        server=replace(CURRENT_SERVER, pass_tokens=1000, most_sequences=round(100 * share)),
    )
    served = make_instance("mixtral-8x7b", request, data_parallel=replicas, expert_parallel=replicas)
    count = 1000 * replicas
    times = queued(served, count).combine([1.0, 1.0, 3.0, 3.0])

    # Each replica has 1,000 prompts and passes, in 1,000 / B batches of 100 passes.
    passes = 1000 / (100 * share) * 100
    fill = 100 * share
    total_s = passes - fill + fill * 3.0 + fill + (1000 * factor - fill) * 2.0
    assert count * 100 / times.output_tokens_per_s == pytest.approx(total_s, rel=1e-6)


def test_a_static_batch_prefills_as_many_prompts_as_fit() -> None:
    """Six sequences on two replicas: three each, whose prompts are prefilled two at a time, then 499 tokens."""
    served = make_instance(
        "mixtral-8x7b",
        replace(REQUEST, server=replace(CURRENT_SERVER, pass_tokens=2000)),
        data_parallel=2,
        expert_parallel=2,
    )
    load = static_batch(served, 6)
    times = load.combine([0.2, 0.01])

    assert load.shapes == (PassShape(prefill_tokens=1000, prompts=2), PassShape(3, 1250))
    assert times.ttft_s == pytest.approx(1.5 * 0.2)
    assert times.output_tokens_per_s == pytest.approx(6 * 500 / (0.3 + 499 * 0.01))


@pytest.mark.parametrize(("reserves", "tokens"), [(False, 1264), (True, 1504)])
def test_sequences_in_memory_by_hand(reserves: bool, tokens: int) -> None:
    """Blocks of 16 tokens for a prompt of 1,000 and half of an answer of 501, or all of it, at 128 KiB a token."""
    server = replace(CURRENT_SERVER, reserves_answers=reserves, most_sequences=10**6)
    served = make_instance(request=ServingRequest(prompt_len=1000, output_len=501, server=server))

    assert most_decoding_sequences(served) == int(served.free_bytes(8192)[0] // (131072 * tokens))
