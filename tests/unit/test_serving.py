"""Serving plans: formulas by hand, passes against predict, limits, what is refused, and what the command prints."""

from __future__ import annotations

import json
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import pytest

import shapewright
from command_line import run as run_command
from shapewright.adding_up import StepTimes, add_up_passes
from shapewright.config import count_parameters, read_model
from shapewright.errors import LayoutError, ShapewrightError, UnknownRateError, WorkloadError
from shapewright.hardware import load_device
from shapewright.layout import ParallelLayout
from shapewright.operations import Attention, Gemm
from shapewright.predict import predict
from shapewright.question import ask
from shapewright.serving import ServingFormat, ServingPlan, ServingRequest, Speculation
from shapewright.serving.aggregated import AggregatedCandidate, PrefillShare, prefill_shares
from shapewright.serving.disaggregated import Decoder, Prefiller, pair_up, prefill_candidates, transfer_span
from shapewright.serving.instance import Instance, batch_sizes
from shapewright.serving.passes import Passes
from shapewright.serving.point import Span, pareto_front

BF16 = ServingFormat("bf16", "bf16", "bf16")


def make_instance(model: str = "llama-3-8b", request: ServingRequest | None = None, **degrees: int) -> Instance:
    """One copy of a model on H100s."""
    question = ask(model, "h100-sxm-80gb", workload={"phase": "prefill"})
    return Instance(
        question.config,
        question.device,
        question.workload,
        ParallelLayout(**degrees),
        BF16,
        request or ServingRequest(prompt_len=1000, output_len=101),
    )


def times_of(step_s: float) -> StepTimes:
    """A pass of a round length."""
    return StepTimes(
        step_s=step_s, step_low_s=0.9 * step_s, step_high_s=1.2 * step_s, bubble_s=0.0, layer_forward_s=0.0
    )


def plan(model: str = "llama-3-8b", device: str = "h100-sxm-80gb", **given: Any) -> ServingPlan:
    """A plan with short lengths, in one format."""
    return shapewright.serve_plan(
        model, device=device, **{"prompt_len": 1000, "output_len": 200, "formats": []} | given
    )


def test_plain_passes_are_what_predict_says() -> None:
    """A decode pass and a prefill pass take exactly the predicted step."""
    question = ask("mixtral-8x7b", "h100-sxm-80gb", workload={"phase": "decode"})
    layout = ParallelLayout(tensor_parallel=2)
    passes = Passes(question.config, question.device, question.workload, layout)
    decode, prefill = passes.decode(24, 3000), passes.prefill(2, 700, 100)
    times = add_up_passes([decode, prefill], question.config, question.device)

    for found, one in zip(times, (decode, prefill), strict=True):
        step = predict(question.config, device=question.device, workload=one.workload, layout=layout)
        assert (found.step_s, found.step_low_s, found.step_high_s) == (
            step.step_time_s,
            step.step_time_low_s,
            step.step_time_high_s,
        )


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "deepseek-v2-lite", "gemma-2-9b"])
def test_mixed_pass_is_between_its_parts_and_their_sum(model: str) -> None:
    """Prefill beside decode costs at least what either takes alone, and less than one after the other."""
    question = ask(model, "h100-sxm-80gb", workload={"phase": "decode"})
    passes = Passes(question.config, question.device, question.workload, ParallelLayout())
    decode, prefill = passes.decode(32, 2000), passes.prefill(1, 512, 1024)
    both = passes.mixed(decode, prefill)
    alone_s, chunk_s, both_s = (
        found.step_s for found in add_up_passes([decode, prefill, both], question.config, question.device)
    )

    assert max(alone_s, chunk_s) * 0.98 < both_s < alone_s + chunk_s


def test_mixed_pass_runs_each_attention_and_joins_the_products() -> None:
    """Products have 32 + 512 rows; the two attention calls are those of the parts; logits are those of decode."""
    passes = make_instance().passes
    decode, prefill = passes.decode(32, 2000), passes.prefill(1, 512, 1024)
    operations = passes.mixed(decode, prefill).operations
    calls = [operation for operation in operations if isinstance(operation, Attention)]
    products = {operation.name: operation for operation in operations if isinstance(operation, Gemm)}

    assert [(call.batch_size, call.query_len, call.kv_len) for call in calls] == [(32, 1, 2001), (1, 512, 1536)]
    assert products["mlp.down"].m == 32 + 512
    assert products["logits"].m == 32


def test_verifying_pass_reads_each_cache_once() -> None:
    """Five new tokens of 8 sequences: 40 rows in the products, 8 caches in attention, keys up to the last proposal."""
    operations = make_instance().passes.decode(8, 2000, query_len=5).operations
    (call,) = [operation for operation in operations if isinstance(operation, Attention)]
    products = {operation.name: operation for operation in operations if isinstance(operation, Gemm)}

    assert (call.batch_size, call.query_len, call.kv_len) == (8, 5, 2005)
    assert products["mlp.down"].m == products["logits"].m == 40


def test_continuous_batch_by_hand() -> None:
    """B = 10, O = 101, two chunks: f = 10 * 2 / 100, T = 16 + 10 = 26 ms, S = 100 ms, wait f S / (2 - 2 f)."""
    share = PrefillShare(prompts=1, tokens=500, num_passes=2, context_len=250)
    candidate = AggregatedCandidate(make_instance(), 10, share, 0.2)
    point = candidate.point((times_of(0.02), times_of(0.02), times_of(0.05)))

    assert point.tpot.middle_s == pytest.approx(0.026)
    assert point.ttft.middle_s == pytest.approx(0.1 + 0.2 * 0.1 / (2 * 0.8))
    assert point.requests_per_s == pytest.approx(10 / (100 * 0.026))
    assert point.tokens_per_s == pytest.approx(101 * 10 / (100 * 0.026))
    assert point.tpot.low_s < point.tpot.middle_s < point.tpot.high_s


def test_speculation_by_hand() -> None:
    """Two proposals at 0.5, draft 0.1: E = 1.75 tokens in 20 ms + 2 * 0.1 * 15 ms = 23 ms without prefill."""
    request = ServingRequest(
        prompt_len=1000,
        output_len=101,
        speculation=Speculation(num_draft_tokens=2, acceptance_fraction=0.5, draft_cost_fraction=0.1),
    )
    share = PrefillShare(prompts=1, tokens=1000, num_passes=1, context_len=0)
    candidate = AggregatedCandidate(make_instance(request=request), 1, share, 0.0)
    point = candidate.point((times_of(0.015), times_of(0.02), times_of(0.05)))

    assert point.tpot.middle_s == pytest.approx(0.023 / 1.75)


def test_ratio_by_hand() -> None:
    """One prompt in 100 ms at a load of 0.8, 40 sequences of 100 tokens at 20 ms: 8 against 20 requests/s, so 5 : 2."""
    request = ServingRequest(prompt_len=1000, output_len=101, num_devices=7)
    instance = make_instance(request=request)
    prefiller = Prefiller(instance, 1, Span(0.1, 0.09, 0.12))
    decoder = Decoder(instance, 40, Span(0.02, 0.018, 0.024))
    (point,) = pair_up([prefiller], [decoder])
    transfer = transfer_span(instance, 7)

    assert (point.num_prefill_instances, point.num_instances) == (5, 2)
    assert point.requests_per_s == pytest.approx(40.0)
    assert transfer is not None
    assert point.ttft.middle_s == pytest.approx(0.1 + 0.8 * 0.1 / 0.4 + transfer.middle_s)
    assert point.tpot.middle_s == pytest.approx(0.02)


def test_load_of_prefill_follows_the_limit() -> None:
    """S (1 + rho / (2 (1 - rho))) + transfer stays within the time to first token that was asked for."""
    for limit_s in (0.12, 0.15, 0.3):
        request = ServingRequest(prompt_len=1000, output_len=101, ttft_limit_s=limit_s)
        instance = make_instance(request=request)
        decoder = Decoder(instance, 40, Span(0.02, 0.018, 0.024))
        (point,) = pair_up([Prefiller(instance, 1, Span(0.1, 0.09, 0.12))], [decoder])
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


def test_best_keeps_limits_and_front_falls() -> None:
    """The best point keeps both limits; along the front a user's speed falls and the devices' rises."""
    found = plan(ttft_limit_s=0.2, tpot_limit_s=0.01)
    best = found.best()
    front = found.front()

    assert best is not None
    assert best.ttft.middle_s <= 0.2
    assert best.tpot.middle_s <= 0.01
    assert best.tokens_per_s_per_device < max(point.tokens_per_s_per_device for point in plan().points)
    users = [point.tokens_per_s_per_user for point in front]
    devices = [point.tokens_per_s_per_device for point in front]
    assert users == sorted(users, reverse=True)
    assert devices == sorted(devices)


def test_both_limits_are_kept_or_neither_is() -> None:
    """A point within one limit and beyond the other does not meet the request; without limits any does."""
    request = ServingRequest(prompt_len=1000, output_len=101)
    instance = make_instance(request=request)
    decoder = Decoder(instance, 40, Span(0.02, 0.018, 0.024))
    (point,) = pair_up([Prefiller(instance, 1, Span(0.1, 0.09, 0.12))], [decoder])
    assert point.meets(request)
    late, slow = 2.0 * point.ttft.middle_s, 2.0 * point.tpot.middle_s
    for ttft_s, tpot_s, is_met in ((late, slow, True), (0.05, slow, False), (late, 0.01, False), (None, slow, True)):
        assert point.meets(replace(request, ttft_limit_s=ttft_s, tpot_limit_s=tpot_s)) == is_met


def test_front_leaves_out_what_is_beaten() -> None:
    """Of three points, one worse in both is not on the front."""
    points = plan().points
    front = pareto_front(points)
    for point in points[::17]:
        assert any(
            other.tokens_per_s_per_user >= point.tokens_per_s_per_user
            and other.tokens_per_s_per_device >= point.tokens_per_s_per_device
            for other in front
        )


def test_more_devices_serve_more() -> None:
    """Sixteen devices answer at least as many tokens as eight, of any format and mode."""
    few, many = (plan("llama-3-70b", num_devices=count) for count in (8, 16))
    for mode in ("aggregated", "disaggregated"):
        less, more = few.best(mode), many.best(mode)
        assert less is not None
        assert more is not None
        assert more.total_tokens_per_s(16) >= 0.98 * less.total_tokens_per_s(8)
        assert more.num_devices <= 16


def test_narrow_formats_hold_more_and_answer_more() -> None:
    """fp8 halves the cache of a token and int4 the weights: more sequences fit, more tokens a second come out."""
    found = plan(formats=["fp8", "bf16:int4"])
    held = {
        capacity.format.name: capacity.most_sequences
        for capacity in found.capacities
        if capacity.layout == ParallelLayout()
    }
    wide, narrow = found.best(format_name="bf16"), found.best(format_name="fp8")

    assert held["bf16"] < held["bf16:int4"] < held["fp8"]
    assert wide is not None
    assert narrow is not None
    assert wide.tokens_per_s_per_device < narrow.tokens_per_s_per_device


def test_speculation_pays_at_small_batches() -> None:
    """With 80 % of four cheap proposals accepted a lone user gets tokens faster; with none accepted, slower."""

    def fastest(acceptance: float | None) -> float:
        speculation = None
        if acceptance is not None:
            speculation = {"num_draft_tokens": 4, "acceptance_fraction": acceptance, "draft_cost_fraction": 0.05}
        return (
            plan(speculation=speculation, layout={"tensor_parallel": 1, "pipeline_parallel": 1})
            .front()[0]
            .tokens_per_s_per_user
        )

    assert fastest(0.0) < fastest(None) < fastest(0.8)


def test_model_that_a_node_cannot_hold_gets_more_devices() -> None:
    """Without a number of devices the smallest instances that hold the model are found; with one, it is an error."""
    found = plan("llama-3.1-405b")
    assert min(capacity.layout.num_devices for capacity in found.capacities) == 16
    with pytest.raises(WorkloadError, match=r"does not fit on 8 x h100-sxm-80gb .*needs 16 \(tensor_parallel=8"):
        plan("llama-3.1-405b", num_devices=8)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"num_devices": 0}, WorkloadError, "gpus=0 must be from 1"),
        ({"prompt_len": 10**9}, WorkloadError, "isl=1000000000 must be a whole number from 1"),
        ({"output_len": 1}, WorkloadError, "osl=1 .*--phase prefill"),
        ({"prompt_len": 10**8}, WorkloadError, "fits on none of up to 1024"),
        ({"memory_fraction": 1.5}, WorkloadError, "memory_fraction=1.5"),
        ({"ttft_limit_s": -1.0}, WorkloadError, "ttft=-1.0 s must be above 0"),
        ({"formats": ["fp7"]}, WorkloadError, "unknown dtype 'fp7'"),
        ({"formats": ["bf16:int4:fp8:x"]}, WorkloadError, "unknown dtype 'x'"),
        ({"formats": ["bf16:int4:fp8:fp8"]}, WorkloadError, "too many parts"),
        ({"layout": {"zero_stage": 3}}, LayoutError, "zero_stage is not a choice of serve-plan"),
        ({"layout": {"tensor_parallel": 5}}, LayoutError, "tensor_parallel=5 must divide num_heads=32; try 4 or 8"),
        ({"layout": {"tensor_parallel": 0}}, LayoutError, "tensor_parallel=0 must be a whole number of devices from 1"),
        ({"layout": {"expert_parallel": 4}}, LayoutError, "expert_parallel=4 needs a model with experts"),
        ({"workload": {"dtype": "fp4"}}, UnknownRateError, "has no fp4 rate"),
        ({"model": "flan-t5-base"}, WorkloadError, "serve-plan is for decoders"),
        ({"tpot_limit_s": "30ms"}, WorkloadError, "tpot='30ms' s must be above 0; .* in Python as seconds"),
        ({"memory_fraction": "0.9"}, WorkloadError, "memory_fraction='0.9' must be above 0"),
        ({"num_devices": 2.5}, WorkloadError, "gpus=2.5 must be from 1"),
        ({"cached_len": 2.5}, WorkloadError, "cached_prefix=2.5 must be a whole number"),
        ({"formats": "fp8,bf16:int4"}, WorkloadError, r"must be a list of formats; give \['fp8', 'bf16:int4'\]"),
        ({"speculation": {"num_draft_tokens": 4}}, WorkloadError, "give num_draft_tokens, acceptance_fraction, draft"),
    ],
)
def test_bad_questions_are_refused(given: dict[str, Any], error: type[ShapewrightError], words: str) -> None:
    """Each message says what is wrong and what is allowed."""
    with pytest.raises(error, match=words):
        plan(**given)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_draft_tokens": 0}, "draft_tokens=0"),
        ({"acceptance_fraction": 1.1}, "acceptance_fraction=1.1"),
        ({"draft_cost_fraction": -0.1}, "draft_cost_fraction=-0.1"),
        ({"acceptance_fraction": "0.7"}, "acceptance_fraction='0.7'"),
    ],
)
def test_senseless_speculation_is_refused(fields: dict[str, Any], words: str) -> None:
    """Shares are from 0 to 1, and something has to be proposed."""
    usual = {"num_draft_tokens": 4, "acceptance_fraction": 0.7, "draft_cost_fraction": 0.1}
    with pytest.raises(WorkloadError, match=words):
        plan(speculation=usual | fields)


def test_devices_without_fused_attention_are_planned_too() -> None:
    """V100 runs unfused attention in fp16."""
    best = plan("llama-2-7b", "v100-sxm2-32gb").best()
    assert best is not None
    assert best.format.name == "fp16"


def test_links_that_nobody_knows_leave_out_the_transfer() -> None:
    """A device without a network card in its sheet serves aggregated alone."""
    device = replace(load_device("h100-sxm-80gb"), inter_node_bandwidth_bytes_per_s=None)
    found = shapewright.serve_plan("llama-3-8b", device=device, prompt_len=1000, output_len=200, formats=[])
    assert {point.mode for point in found.points} == {"aggregated"}


@pytest.mark.parametrize("device", ["a100-sxm-40gb", "h100-sxm-80gb"])
def test_pythia_410m_is_slow_and_1b_is_fast_for_its_size(device: str) -> None:
    """Latency of a token over the suite: 410M (24 layers, h = 1024) lies above the trend, 1B (16, h = 2048) below.

    The trend is the least-squares line of log latency over log parameters of the other six (arXiv 2401.14489,
    section on inference of Pythia).
    """
    latency_s, parameters = {}, {}
    for size in ("70m", "160m", "410m", "1b", "1.4b", "2.8b", "6.9b", "12b"):
        model = f"pythia-{size}"
        workload = {"phase": "decode", "micro_batch_size": 1, "context_len": 512, "dtype": "fp16"}
        latency_s[size] = shapewright.predict(model, device=device, workload=workload).step_time_s
        parameters[size] = count_parameters(read_model(model).config).total
    others = [size for size in latency_s if size not in ("410m", "1b")]
    mean_x = sum(log(parameters[size]) for size in others) / len(others)
    mean_y = sum(log(latency_s[size]) for size in others) / len(others)
    slope = sum((log(parameters[size]) - mean_x) * (log(latency_s[size]) - mean_y) for size in others) / sum(
        (log(parameters[size]) - mean_x) ** 2 for size in others
    )

    def above(size: str) -> float:
        return log(latency_s[size]) - mean_y - slope * (log(parameters[size]) - mean_x)

    assert above("410m") > 0.1
    assert above("1b") < -0.1


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command."""
    return run_command(["serve-plan", *arguments], capsys)


# One tensor degree: what the command prints does not hang on how many layouts there are.
JOB = ["llama-3-8b", "--device", "h100-sxm-80gb", "--isl", "1000", "--osl", "200", "--tp", "1"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text and JSON agree on the best; the page is whole and says what the numbers rest on."""
    page = tmp_path / "plan.html"
    limits = ["--ttft", "300ms", "--tpot", "12ms"]
    code, text, _ = run([*JOB, *limits, "--html", str(page)], capsys)
    _, out, err = run([*JOB, *limits, "--json"], capsys)
    facts = json.loads(out)
    best = facts["best"]

    assert (code, err) == (0, "")
    assert facts["schema_version"] == 1
    assert f"{best['tokens_per_s_per_device']:,.0f}" in text
    assert best["ttft_low_s"] < best["ttft_s"] <= 0.3
    assert best["tokens_per_s_per_user"] == pytest.approx(1 / best["tpot_s"])
    assert [one["name"] for one in facts["formats"]] == ["bf16", "fp8", "bf16:int4"]
    for words in ("aggregated", "tokens in cache", "first token at most 300 ms"):
        assert words in text
    written = page.read_text(encoding="utf-8")
    for words in ("What this rests on", "echarts", "tokens/s of a user"):
        assert words in written


def test_limits_that_nothing_keeps_are_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, and the shortest times that there are."""
    code, text, _ = run([*JOB, "--tpot", "1us"], capsys)
    assert code == 1
    assert "the shortest time to a first token is" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "0"], "gpus=0"),
        (["--ttft", "soon"], "is not a time such as 300ms"),
        (["--draft-tokens", "4"], "belong together"),
        (["--tp", "3"], "tensor_parallel=3"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    code, out, err = run([*JOB, *arguments], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_experts_of_a_server_with_kernels_of_its_own() -> None:
    """DeepSeek-V3 in FP8 on eight H200 decodes in 2.2 times its bytes, and the note that named the remedy is gone."""
    question = {"phase": "decode", "dtype": "fp8", "micro_batch_size": 64, "context_len": 4096}
    spread = {"expert_parallel": 8, "data_parallel": 8}
    measured, own = (
        shapewright.predict(
            "deepseek-v3", device="h200-sxm-141gb", workload=question | {"expert_kernel": kernel}, layout=spread
        )
        for kernel in ("measured", "as-16-bit")
    )
    least_s = (own.memory.weights_bytes + own.memory.kv_cache_bytes) / own.device.memory_bandwidth_bytes_per_s

    assert 1.3 * least_s < own.step_time_s < 2.4 * least_s < 0.4 * measured.step_time_s
    assert any("give --expert-kernel as-16-bit" in line for line in measured.warnings)
    assert not any("give --expert-kernel" in line for line in own.warnings)


def test_a_plan_takes_the_kernel_of_experts() -> None:
    """The knob reaches every pass of a plan, and its JSON says so."""
    wanted = {"formats": [], "workload": {"dtype": "fp8"}, "layout": {"tensor_parallel": 1}}
    measured = plan("mixtral-8x7b", **wanted)
    own = plan("mixtral-8x7b", **wanted | {"workload": {"dtype": "fp8", "expert_kernel": "as-16-bit"}})

    fast, slow = own.best(), measured.best()
    assert fast is not None
    assert slow is not None
    assert fast.tokens_per_s_per_device > 1.5 * slow.tokens_per_s_per_device


@pytest.mark.parametrize(
    ("model", "phase", "words"),
    [
        ("mixtral-8x7b", "train", "expert_kernel=as-16-bit has no effect in train"),
        ("llama-3-8b", "decode", "expert_kernel=as-16-bit has no effect in a model without experts"),
    ],
)
def test_a_kernel_of_experts_that_changes_nothing_is_told(model: str, phase: str, words: str) -> None:
    """Training has kernels of its own, and a dense model has no experts."""
    question = ask(model, "h100-sxm-80gb", workload={"phase": phase, "expert_kernel": "as-16-bit"})

    assert any(words in line for line in question.notes)


def test_the_largest_batch_within_a_limit_is_found() -> None:
    """One sequence more than at the best point, on the same layout and chunks, breaks the limit."""
    found = plan("llama-3.1-70b", prompt_len=4000, output_len=500, tpot_limit_s=0.03, layout={"tensor_parallel": 4})
    best = found.best("aggregated")
    assert best is not None
    request = ServingRequest(prompt_len=4000, output_len=500, tpot_limit_s=0.03)
    instance = make_instance("llama-3.1-70b", request, tensor_parallel=4)
    share = next(each for each in prefill_shares(4000) if each.prompts * each.tokens == best.prefill_tokens)

    def tpot_s(batch_size: int) -> float:
        load = best.prefill_load_fraction * batch_size / best.batch_size
        candidate = AggregatedCandidate(instance, batch_size, share, load)
        plain, decode, mixed = add_up_passes(candidate.passes(), instance.config, instance.device)
        return candidate.point((plain, decode, mixed)).tpot.middle_s

    assert tpot_s(best.batch_size) == best.tpot.middle_s <= 0.03 < tpot_s(best.batch_size + 1)
    assert best.batch_size not in batch_sizes(64)


def test_a_cached_prefix_is_attended_to_and_not_prefilled() -> None:
    """Prefill passes start behind it, as predict with that context does; more of it never serves fewer tokens."""
    shares = prefill_shares(1000, 3000)
    request = ServingRequest(prompt_len=4000, output_len=100, cached_len=3000)
    instance = make_instance(request=request)
    (candidate, *_) = prefill_candidates(instance)
    (times,) = add_up_passes(candidate.passes(), instance.config, instance.device)
    alone = ask(
        "llama-3-8b",
        "h100-sxm-80gb",
        workload={"phase": "prefill", "micro_batch_size": 1, "seq_len": 1000, "context_len": 3000},
    ).predict()

    assert [(share.tokens, share.context_len) for share in shares[:2]] == [(500, 3250), (1000, 3000)]
    assert times.step_s == pytest.approx(alone.step_time_s, rel=1e-12)

    bests = [
        plan(prompt_len=4000, output_len=100, cached_len=cached_len, layout={"tensor_parallel": 1}).best("aggregated")
        for cached_len in (0, 1000, 3000, 3900)
    ]
    served = [best.tokens_per_s_per_device for best in bests if best is not None]
    assert len(served) == 4
    assert served == sorted(served)
    assert served[-1] > 1.5 * served[0]


@pytest.mark.parametrize("cached_len", [-1, 4000, 5000])
def test_a_prefix_is_shorter_than_its_prompt(cached_len: int) -> None:
    """At least one token of a prompt is new."""
    with pytest.raises(WorkloadError, match=rf"cached_prefix={cached_len} must be a whole number from 0 to 3999"):
        plan(prompt_len=4000, cached_len=cached_len)


def test_prompts_a_little_longer_are_served_alike() -> None:
    """Where two whole prompts share a pass, one a little longer is not cut: no step of tokens/s beyond 2 %."""
    served = [
        best.tokens_per_s_per_device * prompt_len
        for prompt_len in (8190, 8200)
        if (best := plan("llama-3.1-70b", prompt_len=prompt_len, layout={"tensor_parallel": 8}).best("aggregated"))
    ]

    assert served[0] == pytest.approx(served[1], rel=0.02)
