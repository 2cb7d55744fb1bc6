"""Serving by hand: passes against predict, batches, speculation, transfers and caches by their formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from served import make_instance
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm
from shapewright.optimize.serving.aggregated import AggregatedCandidate, PrefillChunking, aggregated_candidates
from shapewright.optimize.serving.disaggregated import (
    Decoder,
    PrefillCandidate,
    Prefiller,
    make_prefiller,
    pair_instances,
    prefill_candidates,
    transfer_span,
)
from shapewright.optimize.serving.passes import Passes
from shapewright.optimize.serving.point import Span
from shapewright.optimize.serving.request import ServingRequest, Speculation
from shapewright.prediction.build import build_scenario
from shapewright.prediction.composition.step import StepTimes, compose_passes
from shapewright.prediction.predict import predict
from shapewright.workload.layout import ParallelLayout


def times_of(step_s: float) -> StepTimes:
    """A pass of a round length."""
    return StepTimes(
        step_s=step_s, step_low_s=0.9 * step_s, step_high_s=1.2 * step_s, bubble_s=0.0, layer_forward_s=0.0
    )


def test_plain_passes_equal_predict() -> None:
    """A decode pass and a prefill pass take exactly the predicted step."""
    question = build_scenario("mixtral-8x7b", "h100-sxm-80gb", workload={"phase": "decode"})
    layout = ParallelLayout(tensor_parallel=2)
    passes = Passes(question.replace(layout=layout))
    decode, prefill = passes.decode(24, 3000), passes.prefill(2, 700, 100)
    times = compose_passes([decode, prefill], question.config, question.device)

    for found, one in zip(times, (decode, prefill), strict=True):
        step = predict(question.config, device=question.device, workload=one.workload, layout=layout)
        assert (found.step_s, found.step_low_s, found.step_high_s) == (
            step.step_time_s,
            step.step_time_low_s,
            step.step_time_high_s,
        )


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "deepseek-v2-lite", "gemma-2-9b"])
def test_mixed_pass_is_between_its_parts_and_their_sum(model: str) -> None:
    """A mixed pass takes at least as long as its longer part, and less than both in sequence."""
    question = build_scenario(model, "h100-sxm-80gb", workload={"phase": "decode"})
    passes = Passes(question)
    decode, prefill = passes.decode(32, 2000), passes.prefill(1, 512, 1024)
    both = passes.mixed(decode, prefill)
    alone_s, chunk_s, both_s = (
        found.step_s for found in compose_passes([decode, prefill, both], question.config, question.device)
    )

    assert max(alone_s, chunk_s) * 0.98 < both_s < alone_s + chunk_s


def test_mixed_pass_runs_each_attention_and_joins_the_gemms() -> None:
    """GEMMs have 32 + 512 rows; the two attention calls are those of the parts; logits are those of decode."""
    passes = make_instance().passes
    decode, prefill = passes.decode(32, 2000), passes.prefill(1, 512, 1024)
    operations = passes.mixed(decode, prefill).operations
    calls = [operation for operation in operations if isinstance(operation, Attention)]
    gemms = {operation.name: operation for operation in operations if isinstance(operation, Gemm)}

    assert [(call.batch_size, call.query_len, call.kv_len) for call in calls] == [(32, 1, 2001), (1, 512, 1536)]
    assert gemms["mlp.down"].m == 32 + 512
    assert gemms["logits"].m == 32


def test_verifying_pass_reads_each_cache_once() -> None:
    """Five new tokens of 8 sequences: 40 rows in the GEMMs, 8 caches in attention, keys up to the last draft token."""
    operations = make_instance().passes.decode(8, 2000, query_len=5).operations
    (call,) = [operation for operation in operations if isinstance(operation, Attention)]
    gemms = {operation.name: operation for operation in operations if isinstance(operation, Gemm)}

    assert (call.batch_size, call.query_len, call.kv_len) == (8, 5, 2005)
    assert gemms["mlp.down"].m == gemms["logits"].m == 40


def test_continuous_batch_by_hand() -> None:
    """B = 10, O = 101, two chunks: f = 10 * 2 / 100, T = 16 + 10 = 26 ms, S = 100 ms, wait f S / (2 - 2 f)."""
    chunking = PrefillChunking(prompts=1, tokens=500, num_passes=2, context_len=250)
    candidate = AggregatedCandidate(make_instance(), 10, chunking, 0.2)
    point = candidate.point((times_of(0.02), times_of(0.02), times_of(0.05)))

    assert point.tpot.middle_s == pytest.approx(0.026)
    assert point.ttft.middle_s == pytest.approx(0.1 + 0.2 * 0.1 / (2 * 0.8))
    assert point.requests_per_s == pytest.approx(10 / (100 * 0.026))
    assert point.tokens_per_s == pytest.approx(101 * 10 / (100 * 0.026))
    assert point.tpot.low_s < point.tpot.middle_s < point.tpot.high_s
    # Of 26 ms, 20 are those of decode passes.
    assert point.prompt_cost_fraction == pytest.approx(6 / 26)
    assert (point.prefill_tokens, point.prefill_load_fraction) == (500, 0.2)


def test_batches_are_limited_by_the_passes_that_prefill() -> None:
    """Prompts of 4,000 tokens in eight passes to one, or 2 and 4 in a pass, in 100 passes of an answer: at most 0.8.

    No more prompts share a pass than sequences decode.
    """
    request = ServingRequest(prompt_len=4000, output_len=101)
    found: dict[tuple[int, int], list[int]] = {}
    for each in aggregated_candidates(make_instance(request=request)):
        prompts, num_passes = each.chunking.prompts, each.chunking.num_passes
        assert each.load_fraction == pytest.approx(each.batch_size * num_passes / prompts / 100)
        assert each.batch_size >= prompts
        found.setdefault((prompts, num_passes), []).append(each.batch_size)

    assert {key: max(sizes) for key, sizes in found.items() if key[0] == 1} == {(1, 8): 10, (1, 2): 40, (1, 1): 80}
    assert set(found) == {(1, 8), (1, 2), (1, 1), (2, 1), (4, 1)}


def test_speculation_by_hand() -> None:
    """Two proposals at 0.5, draft 0.1: E = 1.75 tokens in 20 ms + 2 * 0.1 * 15 ms = 23 ms without prefill."""
    request = ServingRequest(
        prompt_len=1000,
        output_len=101,
        speculation=Speculation(num_draft_tokens=2, acceptance_fraction=0.5, draft_cost_fraction=0.1),
    )
    chunking = PrefillChunking(prompts=1, tokens=1000, num_passes=1, context_len=0)
    candidate = AggregatedCandidate(make_instance(request=request), 1, chunking, 0.0)
    point = candidate.point((times_of(0.015), times_of(0.02), times_of(0.05)))

    assert point.tpot.middle_s == pytest.approx(0.023 / 1.75)


def test_a_draft_reads_prompts_by_hand() -> None:
    """A draft of a twentieth adds that of the 30 ms that prefill adds to a pass of 20 ms, and of 100 ms alone."""
    drafts = Speculation(num_draft_tokens=2, acceptance_fraction=0.5, draft_cost_fraction=0.1, draft_size_fraction=0.05)
    instance = make_instance(request=ServingRequest(prompt_len=1000, output_len=101, speculation=drafts))
    chunking = PrefillChunking(prompts=1, tokens=1000, num_passes=1, context_len=0)
    point = AggregatedCandidate(instance, 1, chunking, 0.0).point((times_of(0.015), times_of(0.02), times_of(0.05)))
    prefiller = make_prefiller(PrefillCandidate(instance, 1), [times_of(0.1)])

    # Two drafts of a tenth of 15 ms are 3 ms.
    assert point.ttft.middle_s == pytest.approx(0.050 + 0.003 + 0.05 * 0.030)
    assert prefiller.service.middle_s == pytest.approx(0.105)


def test_ratio_by_hand() -> None:
    """One prompt in 100 ms at a load of 0.8, 40 sequences of 100 tokens at 20 ms: 8 against 20 requests/s, so 5 : 2."""
    request = ServingRequest(prompt_len=1000, output_len=101, num_devices=7)
    instance = make_instance(request=request)
    prefiller = Prefiller(instance, 1, Span(0.1, 0.09, 0.12))
    decoder = Decoder(instance, 40, Span(0.02, 0.018, 0.024))
    (point,) = pair_instances([prefiller], [decoder])
    transfer = transfer_span(instance, instance, 7)

    assert (point.num_prefill_instances, point.num_instances) == (5, 2)
    assert point.requests_per_s == pytest.approx(40.0)
    assert transfer is not None
    assert point.ttft.middle_s == pytest.approx(0.1 + 0.8 * 0.1 / 0.4 + transfer.middle_s)
    assert point.tpot.middle_s == pytest.approx(0.02)


def test_load_of_prefill_follows_the_limit() -> None:
    """S (1 + rho / (2 (1 - rho))) + transfer stays within the requested time to first token."""
    for limit_s in (0.12, 0.15, 0.3):
        request = ServingRequest(prompt_len=1000, output_len=101, ttft_limit_s=limit_s)
        instance = make_instance(request=request)
        decoder = Decoder(instance, 40, Span(0.02, 0.018, 0.024))
        (point,) = pair_instances([Prefiller(instance, 1, Span(0.1, 0.09, 0.12))], [decoder])
        assert 0.1 < point.ttft.middle_s <= limit_s * (1 + 1e-9)


def test_cache_capacity_by_hand() -> None:
    """Llama-3-8B, bf16: 90 % of 79.1 GiB less weights, context and a pass, over 131,072 bytes a token in blocks."""
    request = ServingRequest(prompt_len=4000, output_len=500)
    instance = make_instance(request=request)
    (stage,) = instance.stage_estimates(2048)
    free = 0.9 * 79.10 * 2**30 - 2 * 8_030_261_248 - stage.activations_bytes - stage.logits_bytes - stage.runtime_bytes
    blocks = -(-4500 // 16)

    assert stage.weights_bytes == 2 * 8_030_261_248
    assert instance.most_sequences(2048) == int(free // (blocks * 16 * 131_072)) == 100


@pytest.mark.parametrize(("size", "share"), [(0.25, 0.25), (0.0, 0.0), (None, 0.1)])
def test_a_draft_takes_memory(size: float | None, share: float) -> None:
    """Weights and the cache of a token are larger by the draft's: by its size, or else by the share of its time."""
    drafts = Speculation(num_draft_tokens=2, acceptance_fraction=0.5, draft_cost_fraction=0.1, draft_size_fraction=size)
    instance = make_instance(request=ServingRequest(prompt_len=4000, output_len=500, speculation=drafts))
    (stage,) = instance.stage_estimates(2048)
    pass_bytes = stage.activations_bytes + stage.logits_bytes + stage.runtime_bytes
    free = 0.9 * 79.10 * 2**30 - (1 + share) * 2 * 8_030_261_248 - pass_bytes
    sequence_bytes = (1 + share) * -(-4500 // 16) * 16 * 131_072

    assert instance.cache_bytes(4500) == pytest.approx((sequence_bytes,))
    assert instance.most_sequences(2048) == int(free // sequence_bytes)


@pytest.mark.parametrize("num_tokens", [512, 16000])
def test_scores_of_unfused_attention_are_of_one_prompt(num_tokens: int) -> None:
    """A chunk has the scores of the keys before it, several prompts in a pass have none of each other.

    Scores and their softmax of 32 heads in bf16: 4,000 keys more are as many columns for each token of the pass.
    """
    found = []
    for prompt_len in (4000, 8000):
        served = make_instance(request=ServingRequest(prompt_len=prompt_len, output_len=101))
        unfused = replace(served, scenario=served.scenario.replace(attention="unfused"))
        (stage,) = unfused.stage_estimates(num_tokens)
        found.append(stage.activations_bytes)

    assert found[1] - found[0] == 2 * 2 * 32 * 4000 * num_tokens


def test_a_limit_of_the_first_token_is_used_up() -> None:
    """Where prefill alone limits the rate, a first token takes as long as it may: S + rho S / (2 - 2 rho) + transfer.

    Its ends are those of a pass with the same load. Two prompts share each pass of 0.1 s.
    """
    for limit_s, load in ((0.15, None), (0.3, 0.8)):
        request = ServingRequest(prompt_len=1000, output_len=101, ttft_limit_s=limit_s + 0.01, num_devices=8)
        instance = make_instance(request=request)
        decoder = Decoder(instance, 4000, Span(0.02, 0.018, 0.024))
        (point,) = pair_instances([Prefiller(instance, 2, Span(0.1, 0.09, 0.12))], [decoder])
        transfer = transfer_span(instance, instance, 8)
        assert transfer is not None
        used = point.prefill_load_fraction

        assert point.requests_per_s == pytest.approx(point.num_prefill_instances * used * 2 / 0.1)
        assert point.prefill_tokens == 2000
        if load is None:
            assert point.ttft.middle_s == pytest.approx(limit_s + 0.01)
        else:
            assert used == pytest.approx(load)
        for end_s, pass_s, sent_s in (
            (point.ttft.low_s, 0.09, transfer.low_s),
            (point.ttft.middle_s, 0.1, transfer.middle_s),
            (point.ttft.high_s, 0.12, transfer.high_s),
        ):
            assert end_s == pytest.approx(pass_s * (1 + used / (2 - 2 * used)) + sent_s)
    late = ServingRequest(prompt_len=1000, output_len=101, ttft_limit_s=0.1)
    served = make_instance(request=late)
    prefiller, decoder = Prefiller(served, 2, Span(0.1, 0.1, 0.1)), Decoder(served, 40, Span(0.02, 0.02, 0.02))
    assert not list(pair_instances([prefiller], [decoder]))


def test_prompts_that_share_a_prefill_pass() -> None:
    """Of 2,048 tokens, 16 fill the largest pass of 32,768 tokens exactly."""
    request = ServingRequest(prompt_len=2048, output_len=101)

    assert [each.batch_size for each in prefill_candidates(make_instance(request=request))] == [1, 2, 4, 16]
