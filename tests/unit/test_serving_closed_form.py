"""Loads in closed form: queued requests, closed loops, static batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from served import make_instance
from shapewright.core.errors import WorkloadError
from shapewright.optimize.serving.closed_form import make_prefill_pass, most_decoding_sequences, queued, static_batch
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
