"""Which passes a server's candidates are priced by, and what speculation adds to them, by hand."""

from __future__ import annotations

from statistics import mean
from typing import Any

import pytest

from shapewright.hardware.loader import load_device
from shapewright.lowering.flops import sum_flops
from shapewright.lowering.operations.gemm import Gemm
from shapewright.optimize.serving.aggregated import AggregatedCandidate, PrefillChunking, aggregated_candidates
from shapewright.optimize.serving.disaggregated import (
    DecodeCandidate,
    Decoder,
    PrefillCandidate,
    Prefiller,
    decode_candidates,
    make_decoder,
    make_prefiller,
    pair_instances,
    prefill_candidates,
    transfer_span,
)
from shapewright.optimize.serving.passes import Passes, PrefillSizes
from shapewright.optimize.serving.point import Instance, Span
from shapewright.optimize.serving.request import ServingFormat, ServingRequest, Speculation
from shapewright.prediction.build import build_scenario
from shapewright.prediction.composition.step import StepTimes, compose_passes, compose_step, price_passes
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.gemm.price import price_gemm
from shapewright.pricing.operations import price_operations
from shapewright.pricing.servers import load_server
from shapewright.workload.layout import ParallelLayout

TWO_AT_HALF = Speculation(num_draft_tokens=2, acceptance_fraction=0.5, draft_cost_fraction=0.1)
BF16 = ServingFormat("bf16", "bf16", "bf16")


def make_instance(
    degrees: dict[str, int] | None = None, model: str = "llama-3-8b", formats: ServingFormat = BF16, **given: Any
) -> Instance:
    """One copy of a model on H100s."""
    question = build_scenario(model, "h100-sxm-80gb", workload={"phase": "prefill"})
    request = ServingRequest(**{"prompt_len": 4000, "output_len": 101, **given})
    layout = ParallelLayout(**(degrees or {}))
    return Instance(question.replace(layout=layout), formats, request)


def times_of(step_s: float) -> StepTimes:
    """A pass of a round length."""
    return StepTimes(
        step_s=step_s, step_low_s=0.9 * step_s, step_high_s=1.2 * step_s, bubble_s=0.0, layer_forward_s=0.0
    )


@pytest.mark.parametrize("speculation", [None, TWO_AT_HALF], ids=["plain", "speculative"])
def test_decode_is_priced_at_the_mean_context_of_an_answer(speculation: Speculation | None) -> None:
    """Tokens 2 to 101 attend to 4,001 to 4,100 before them, whatever of the prompt lay in the cache already."""
    instance = make_instance(cached_len=3000, speculation=speculation)
    rows = instance.request.query_len
    middle = mean(range(4001, 4101))
    for candidate in (next(aggregated_candidates(instance)), next(decode_candidates(instance))):
        plain, decode, *_ = candidate.passes()
        assert plain.workload.context_len == decode.workload.context_len == pytest.approx(middle, abs=1)
        assert (plain.workload.micro_batch_size, decode.workload.micro_batch_size) == (1, rows)


def test_chunks_are_priced_at_their_mean_context() -> None:
    """A prompt of 4,000 in passes of 500 has 0, 500, ... 3,500 tokens before it, and a cached prefix before those."""
    for cached_len in (0, 3000):
        instance = make_instance(prompt_len=4000 + cached_len, cached_len=cached_len)
        candidate = next(each for each in aggregated_candidates(instance) if each.chunking.tokens == 500)
        assert candidate.chunking.context_len == cached_len + mean(range(0, 4000, 500))


def test_drafts_run_before_every_pass() -> None:
    """E = 1.75; drafts of 3 ms before passes of 20 and, a fifth of them, of 50 ms, of which prompts take 30.

    A draft of a tenth takes 3 ms for the prompts as well: 0.8 x 23 + 0.2 x 56 ms for 1.75 tokens.
    """
    instance = make_instance(speculation=TWO_AT_HALF)
    chunking = PrefillChunking(prompts=1, tokens=4000, num_passes=1, context_len=0)
    point = AggregatedCandidate(instance, 10, chunking, 0.2).point((times_of(0.015), times_of(0.02), times_of(0.05)))
    apart = make_decoder(DecodeCandidate(instance, 10), [times_of(0.015), times_of(0.02)])

    assert point.tpot.middle_s == pytest.approx((0.8 * 0.023 + 0.2 * 0.056) / 1.75)
    assert point.ttft.middle_s == pytest.approx(0.056 + 0.2 * 0.056 / (2 * 0.8))
    assert apart.step.middle_s == pytest.approx(0.023)
    assert apart.requests_per_s == pytest.approx(10 * 1.75 / 0.023 / 100)


def test_stages_and_replicas_work_in_parallel() -> None:
    """Two stages with a batch each answer twice as much in a pass of the same time, on either kind of server."""
    rates = []
    for degrees in ({}, {"pipeline_parallel": 2}):
        instance = make_instance(degrees)
        chunking = PrefillChunking(prompts=1, tokens=4000, num_passes=1, context_len=0)
        point = AggregatedCandidate(instance, 10, chunking, 0.1).point((times_of(0.02), times_of(0.02), times_of(0.05)))
        prefiller = make_prefiller(PrefillCandidate(instance, 4), [times_of(0.1)])
        decoder = make_decoder(DecodeCandidate(instance, 10), [times_of(0.02), times_of(0.02)])
        rates.append([point.requests_per_s, prefiller.requests_per_s, decoder.requests_per_s])

    assert rates[0] == pytest.approx([10 / (100 * 0.023), 4 / 0.1, 10 / (100 * 0.02)])
    assert rates[1] == pytest.approx([2 * rate for rate in rates[0]])


@pytest.mark.parametrize("model", ["llama-3-8b", "deepseek-v3", "gemma-2-27b", "bamba-9b", "llama-3.2-11b-vision"])
def test_memory_of_several_passes_is_that_of_each(model: str) -> None:
    """Memory estimated with arrays of tokens, for windows, states and experts too."""
    instance, lengths = make_instance({"pipeline_parallel": 2}, model), (1, 300, 4000, 16_384)
    for length in (None, 700):
        expected = [instance.most_sequences(tokens, length) for tokens in lengths]
        assert instance.list_most_sequences(lengths, length) == expected


@pytest.mark.parametrize("stages", [1, 2])
def test_batches_fit_together_with_prefills(stages: int) -> None:
    """Each stage's batch has its caches on both stages; whole prompts count as sequences."""
    instance = make_instance({"pipeline_parallel": stages}, output_len=2000)
    for candidate in aggregated_candidates(instance):
        sequences = (candidate.batch_size + candidate.chunking.prompts) * stages
        prefilled = candidate.chunking.prompts * candidate.chunking.tokens
        assert sequences <= instance.most_sequences(prefilled)
        # Prompt tokens are prefilled as fast as answers of 1,999 passes leave.
        assert candidate.load_fraction * prefilled == pytest.approx(candidate.batch_size * 4000 / 1999, rel=0.01)
    largest = max(each.batch_size for each in decode_candidates(instance))
    assert largest * stages <= instance.most_sequences(largest) < (largest + 1) * stages + stages
    for prompts in (each.batch_size for each in prefill_candidates(instance)):
        assert prompts * stages <= instance.most_sequences(prompts * 4000, 4000)


def test_prompts_wait_by_the_load_that_answers_leave() -> None:
    """Two devices have room for one decoding instance: 4 / (100 x 20 ms) = 2 requests/s of 10, a load of 0.2."""
    instance = make_instance(num_devices=2)
    decoder = Decoder(instance, 4, Span(0.02, 0.018, 0.024))
    (point,) = pair_instances([Prefiller(instance, 1, Span(0.1, 0.09, 0.12))], [decoder])
    transfer = transfer_span(instance, instance, 2)

    assert transfer is not None
    assert (point.num_prefill_instances, point.num_instances, point.num_devices) == (1, 1, 2)
    assert point.prefill_load_fraction == pytest.approx(0.2)
    assert point.ttft.middle_s == pytest.approx(0.1 + 0.2 * 0.1 / (2 * 0.8) + transfer.middle_s)


def test_caches_travel_by_the_link_that_joins_the_devices() -> None:
    """131,072 bytes a token of 4,000, half from each of two stages: NVLink at 450 GB/s in a node, 50 GB/s beyond."""
    for stages in (1, 2):
        instance = make_instance({"pipeline_parallel": stages})
        sent_bytes = 4000 * 131_072 / stages
        for num_devices, rate in ((8, 450e9), (16, 50e9)):
            span = transfer_span(instance, instance, num_devices)
            assert span is not None
            assert sent_bytes / rate < span.middle_s < 2 * sent_bytes / rate


@pytest.mark.parametrize(("senders", "receivers", "parts"), [(4, 1, 1), (1, 4, 1), (4, 2, 2), (4, 4, 4)])
def test_the_smaller_side_of_a_transfer_has_the_larger_parts(senders: int, receivers: int, parts: int) -> None:
    """524 MB of 4,000 tokens in 8 heads: one device receives all that four send, at 450 GB/s of NVLink."""
    sender, receiver = (make_instance({"tensor_parallel": degree}) for degree in (senders, receivers))
    span = transfer_span(sender, receiver, 8)
    least_s = 4000 * 131_072 / parts / 450e9

    assert span is not None
    assert least_s < span.middle_s < 2 * least_s


def test_a_unit_inside_a_node_uses_its_link() -> None:
    """One instance of each kind on two devices sends as fast where a node is free as where two devices are given."""
    ttft_s = []
    for num_devices in (None, 2):
        instance = make_instance(num_devices=num_devices)
        prefiller, decoder = (
            Prefiller(instance, 1, Span(0.1, 0.09, 0.12)),
            Decoder(instance, 16, Span(0.02, 0.018, 0.024)),
        )
        (point,) = pair_instances([prefiller], [decoder])
        assert (point.num_prefill_instances, point.num_instances) == (1, 1)
        ttft_s.append(point.ttft.middle_s)

    assert ttft_s[0] == ttft_s[1]


@pytest.mark.parametrize("attention", ["flash", "unfused"])
@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "deepseek-v2-lite", "gemma-2-2b"])
def test_mixed_pass_has_the_flops_of_its_parts(model: str, attention: str) -> None:
    """FLOPs of 16 decoding sequences and two prompts of 512 add up, without the logits of prompts that go on."""
    question = build_scenario(model, "h100-sxm-80gb", workload={"phase": "prefill", "attention": attention})
    passes = Passes(question)
    decode, prefill = passes.decode(16, 2000), passes.prefill(2, 512, 1024 if attention == "flash" else 0)
    mixed = passes.mixed(decode, prefill)
    logits = [one for one in prefill.operations if one.stage == "last"]

    assert sum_flops(mixed.operations, ("forward",)) == pytest.approx(
        sum(sum_flops(each, ("forward",)) for each in (decode.operations, prefill.operations))
        - sum_flops(logits, ("forward",))
    )


@pytest.mark.parametrize(
    ("server", "library"), [("vllm-0.19", "vllm 0.24.0"), ("sglang-0.5", "sglang 0.5.14"), ("trtllm-1.0", "")]
)
def test_narrow_gemms_of_a_server_are_priced_as_its_library_runs_them(server: str, library: str) -> None:
    """Of its nearest measured version; 16 bits, and engines without measured GEMMs, by all libraries together."""
    for formats in (BF16, ServingFormat("fp8", "fp8", "fp8")):
        instance = make_instance(formats=formats, server=load_server(server))
        device, gemms = instance.scenario.device, []
        for one in instance.passes.decode(1, 2000).operations:
            if isinstance(one, Gemm):
                own = library if one.dtype == "fp8" else ""
                gemms.append(
                    (one, price_gemm(one.changed(library=""), device, load_record("gemm", device), library=own))
                )
        prices = price_operations([one for one, _ in gemms], device)

        assert {one.dtype for one, _ in gemms} == {"bf16", formats.dtype}
        assert [float(price.time_s) for price in prices] == pytest.approx([float(each.time_s) for _, each in gemms])


def test_a_library_without_measured_gemms_changes_no_price() -> None:
    """MI300X's record has tuned kernels alone, so that vLLM's GEMMs have the price and the interval of any."""
    device = load_device("mi300x")
    gemm = Gemm(name="x", dtype="fp8", m=16, n=4096, k=4096)
    named, unnamed = price_operations([gemm.changed(library="vllm 0.10"), gemm], device)

    assert named == unnamed


def test_formats_and_blocks_of_a_cache_by_hand() -> None:
    """32 layers x 2 x 8 heads x 128 numbers a token: 2 bytes each in bf16, 1 in fp8; 1,001 tokens take whole blocks."""
    narrow = ServingFormat("bf16", "int4", "fp8")
    for formats, width in ((BF16, 2), (narrow, 1)):
        for block in (16, 64):
            instance = make_instance(formats=formats, block_tokens=block)
            assert instance.cache_bytes(1001) == (-(-1001 // block) * block * 65_536 * width,)
    weights = [make_instance(formats=formats).stage_estimates(2048)[0].weights_bytes for formats in (BF16, narrow)]
    assert 0.25 < weights[1] / weights[0] < 0.4  # a quarter, with scales, and the embedding and logits as they are


def test_capacity_is_that_of_the_fullest_stage() -> None:
    """Of 32 layers on three stages two have eleven: sequences are those that fit there; short ones are more."""
    instance = make_instance({"pipeline_parallel": 3})
    caches, free = instance.cache_bytes(4101), instance.free_bytes(2048)
    fitting = [int(room // cache) for room, cache in zip(free, caches, strict=True)]
    assert len(set(fitting)) > 1
    assert instance.most_sequences(2048) == min(fitting)
    assert instance.cache_tokens(2048) // 4101 == min(fitting)
    assert instance.most_sequences(2048, 2050) == pytest.approx(2 * min(fitting), rel=0.01)


def test_replicas_of_an_instance_hold_as_much_each() -> None:
    """Mixtral with a replica of attention on each of two devices: two streams, and twice the tokens of one replica."""
    instance = make_instance({"data_parallel": 2, "expert_parallel": 2}, model="mixtral-8x7b")
    assert instance.num_streams == 2
    assert instance.cache_tokens(2048) // 4101 in {
        2 * instance.most_sequences(2048),
        2 * instance.most_sequences(2048) + 1,
    }


@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        ("llama-3-8b", {"tensor_parallel": 2}),
        ("gpt2", {}),
        ("deepseek-v3", {"data_parallel": 4, "tensor_parallel": 2, "expert_parallel": 8, "expert_tensor_parallel": 1}),
        ("qwen3-next-80b-a3b", {"data_parallel": 2, "expert_parallel": 2}),
        ("gemma-2-27b", {"pipeline_parallel": 2}),
    ],
)
def test_passes_lowered_together_equal_passes_lowered_alone(model: str, degrees: dict[str, int]) -> None:
    """Decode passes, with and without drafts, prefill and mixed passes, which share no operation with another size."""
    alone, together = (make_instance(degrees, model).passes for _ in range(2))
    prompts = (PrefillSizes(1, 500, 0), PrefillSizes(4, 100, 37), PrefillSizes(1, 900, 100))
    together.lower_prefill_passes(prompts)
    for sizes in prompts:
        whole, own = together.prefill(*sizes), alone.prefill(*sizes)
        assert whole.operations == own.operations
        assert whole._replace(parts=()) == own._replace(parts=())
    batches, prompt = (1, 3, 17, 256), (2, 500)
    together.lower_decode_passes(batches, 700, {1, 3}, 200)
    together.lower_token_operations([query_len * batch + 1000 for batch in batches for query_len in (1, 3)])

    for batch in batches:
        for query_len in (1, 3):
            found, expected = (one.decode(batch, 700, query_len, answer_len=200) for one in (together, alone))
            mixed = together.mixed(found, together.prefill(*prompt)), alone.mixed(expected, alone.prefill(*prompt))
            for one, other in ((found, expected), mixed):
                assert (one.operations, one.num_kernels) == (other.operations, other.num_kernels)
                assert one._replace(parts=()) == other._replace(parts=())


@pytest.mark.parametrize("server", ["current", "trtllm-1.0", "vllm-0.16"])
def test_passes_composed_together_equal_those_composed_alone(server: str) -> None:
    """Sums over arrays of all passes are those of compose_step, operation by operation, to the last digit."""
    degrees = {"tensor_parallel": 4, "pipeline_parallel": 2, "expert_parallel": 4, "expert_tensor_parallel": 1}
    instance = make_instance(degrees, "mixtral-8x7b")
    config, device, adjust = instance.config, instance.scenario.device, load_server(server).adjust
    instance.lower_batches((1, 3, 17, 256), (1001, 1003))
    decodes = [instance.decode_passes(batch)[0] for batch in (1, 3, 17, 256)]
    passes = [*decodes, *(instance.passes.mixed(one, instance.passes.prefill(1, 1000, 500)) for one in decodes)]

    each = [
        compose_step(priced, config, one.workload, one.layout)
        for one, priced in zip(passes, price_passes(passes, device, adjust), strict=True)
    ]
    assert compose_passes(passes, config, device, adjust) == each
    assert compose_passes([], config, device) == []
