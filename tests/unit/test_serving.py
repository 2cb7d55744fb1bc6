"""Serving plans: limits and fronts, formats, prefixes, speculation, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import pytest

import shapewright
from served import make_instance, plan
from shapewright.core.errors import LayoutError, ShapewrightError, UnknownRateError, WorkloadError
from shapewright.hardware.loader import load_device
from shapewright.models.parameters import count_parameters
from shapewright.models.read import read_model
from shapewright.optimize.serving.aggregated import AggregatedCandidate, list_chunkings
from shapewright.optimize.serving.disaggregated import (
    Decoder,
    Prefiller,
    pair_instances,
    prefill_candidates,
    transfer_span,
)
from shapewright.optimize.serving.point import Span, batch_sizes, pareto_front
from shapewright.optimize.serving.request import ServingRequest, read_format
from shapewright.prediction.build import build_scenario
from shapewright.prediction.composition.step import compose_passes
from shapewright.workload.layout import ParallelLayout


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


def test_limits_are_kept_together() -> None:
    """A point within one limit and beyond the other does not meet the request; without limits any does."""
    request = ServingRequest(prompt_len=1000, output_len=101)
    instance = make_instance(request=request)
    decoder = Decoder(instance, 40, Span(0.02, 0.018, 0.024))
    (point,) = pair_instances([Prefiller(instance, 1, Span(0.1, 0.09, 0.12))], [decoder])
    assert point.meets(request)
    late, slow = 2.0 * point.ttft.middle_s, 2.0 * point.tpot.middle_s
    for ttft_s, tpot_s, is_met in ((late, slow, True), (0.05, slow, False), (late, 0.01, False), (None, slow, True)):
        assert point.meets(replace(request, ttft_limit_s=ttft_s, tpot_limit_s=tpot_s)) == is_met


@pytest.mark.parametrize(("pass_s", "batch_size"), [(0.196, 1), (0.185, 2)])
def test_first_tokens_do_not_wait_for_other_prompts(pass_s: float, batch_size: int) -> None:
    """Two prompts at once, in nearly twice the time of one, are worth it only if they serve some percent more."""
    instance = make_instance(request=ServingRequest(prompt_len=1000, output_len=101))
    single = Prefiller(instance, 1, Span(0.1, 0.09, 0.12))
    double = Prefiller(instance, 2, Span(pass_s, 0.9 * pass_s, 1.2 * pass_s))
    (point,) = pair_instances([single, double], [Decoder(instance, 40, Span(0.02, 0.018, 0.024))])

    assert point.prefill_tokens == 1000 * batch_size


def test_a_prefill_pass_takes_no_more_prompts_than_the_load_needs() -> None:
    """Eight prompts at once serve 20 a second and one 10; for 5 a second the lone prompt has the earlier first token.

    At load 0.5 it waits for 0.1 s x 0.5 / (2 x 0.5) = 0.05 s.
    """
    instance = make_instance(request=ServingRequest(prompt_len=1000, output_len=101, num_devices=2))
    batches = [Prefiller(instance, 1, Span(0.1, 0.09, 0.12)), Prefiller(instance, 8, Span(0.4, 0.36, 0.48))]
    transfer = transfer_span(instance, instance, 2)
    assert transfer is not None
    (point,) = pair_instances(batches, [Decoder(instance, 10, Span(0.02, 0.018, 0.024))])

    assert (point.prefill_tokens, point.requests_per_s, point.prefill_load_fraction) == (1000, 5.0, 0.5)
    assert point.ttft.middle_s == pytest.approx(0.1 + 0.05 + transfer.middle_s)


def test_front_drops_dominated_points() -> None:
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


def test_remedies_make_the_model_fit() -> None:
    """405 billion in 16 bits are 811 GB, more than eight H100 have; the formats that are named in its place do fit."""
    with pytest.raises(WorkloadError) as caught:
        plan("llama-3.1-405b", num_devices=8, formats=None)
    assert str(caught.value).endswith("or dtype fp8 or weight_dtype int4, which fits")
    for workload in ({"dtype": "fp8"}, {"weight_dtype": "int4"}):
        assert plan("llama-3.1-405b", num_devices=8, workload=workload).capacities


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"num_devices": 0}, WorkloadError, "num_devices=0 must be an integer from 1"),
        ({"prompt_len": 10**9}, WorkloadError, "prompt_len=1000000000 must be an integer from 1"),
        ({"output_len": 1}, WorkloadError, "output_len=1 .*phase='prefill'"),
        ({"prompt_len": 8000}, WorkloadError, r"prompt_len \+ output_len = 8200 tokens exceed .*_embeddings=8192"),
        (
            {"prompt_len": 10**8, "overrides": {"max_position_embeddings": 2**27}},
            WorkloadError,
            "does not fit on up to 1024",
        ),
        ({"memory_fraction": 1.5}, WorkloadError, "memory_fraction=1.5"),
        ({"block_tokens": 0}, WorkloadError, "block_tokens=0 .*; give the tokens of a block of the cache, such as 16"),
        ({"ttft_limit_s": -1.0}, WorkloadError, "ttft_limit_s=-1.0 must be a number above 0"),
        ({"formats": ["fp7"]}, WorkloadError, "unknown dtype 'fp7'"),
        ({"formats": ["bf16:int4:fp8:x"]}, WorkloadError, "unknown dtype 'x'"),
        ({"formats": ["bf16:int4:fp8:fp8"]}, WorkloadError, "too many parts"),
        ({"layout": {"zero_stage": 3}}, LayoutError, "zero_stage is not a choice of a serving plan"),
        ({"layout": {"tensor_parallel": 5}}, LayoutError, "tensor_parallel=5 must divide num_heads=32; try 4 or 8"),
        ({"layout": {"tensor_parallel": 0}}, LayoutError, "tensor_parallel=0 must be an integer"),
        ({"layout": {"expert_parallel": 4}}, LayoutError, "expert_parallel=4 requires a model with experts"),
        ({"device": "a100-sxm-80gb", "workload": {"dtype": "fp8"}}, UnknownRateError, "has no fp8 rate"),
        ({"model": "flan-t5-base"}, WorkloadError, "a serving plan needs a decoder"),
        (
            {"tpot_limit_s": "30ms"},
            WorkloadError,
            "tpot_limit_s='30ms' must be a number above 0 .* such as 0.3 seconds",
        ),
        ({"memory_fraction": "0.9"}, WorkloadError, "memory_fraction='0.9' must be a number above 0"),
        ({"num_devices": 2.5}, WorkloadError, "num_devices=2.5 must be an integer from 1"),
        ({"cached_len": 2.5}, WorkloadError, "cached_len=2.5 must be an integer"),
        ({"formats": "fp8,bf16:int4"}, WorkloadError, r"must be a list of formats; give \['fp8', 'bf16:int4'\]"),
        ({"speculation": {"num_draft_tokens": 4}}, WorkloadError, "give num_draft_tokens, acceptance_fraction, draft"),
    ],
)
def test_invalid_scenarios_are_errors(given: dict[str, Any], error: type[ShapewrightError], words: str) -> None:
    """Each error states the wrong value and the allowed ones."""
    with pytest.raises(error, match=words):
        plan(**given)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_draft_tokens": 0}, "draft_tokens=0"),
        ({"acceptance_fraction": 1.1}, "acceptance_fraction=1.1"),
        ({"draft_cost_fraction": -0.1}, "draft_cost_fraction=-0.1"),
        ({"draft_size_fraction": 1.5}, "draft_size_fraction=1.5"),
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


def test_unknown_links_leave_out_the_transfer() -> None:
    """A device without a network card in its sheet has no unit beyond a node."""
    device = replace(load_device("h100-sxm-80gb"), inter_node_bandwidth_bytes_per_s=None)
    found = shapewright.serve_plan("llama-3-8b", device=device, prompt_len=1000, output_len=200, formats=[])
    assert max(point.num_devices for point in found.points if point.mode == "disaggregated") <= 8


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


@pytest.mark.parametrize(
    ("device", "given", "is_noted"),
    [
        ("l40s", {"server": "vllm-0.10"}, True),
        ("h100-pcie-80gb", {"server": "sglang-0.5"}, True),
        ("h100-pcie-80gb", {"server": "sglang-0.5", "layout": {"tensor_parallel": 2}}, False),
        ("l40s", {"server": "vllm-0.10", "layout": {"tensor_parallel": 1}}, False),
        ("l40s", {"server": "trtllm-1.0"}, False),
        ("h100-sxm-80gb", {"server": "vllm-0.10"}, False),
    ],
)
def test_all_reduces_of_one_measured_pcie_host_are_noted(device: str, given: dict[str, Any], is_noted: bool) -> None:
    """Where a group communicates over PCIe and the engine's own all-reduces over it were not measured."""
    notes = plan("llama-3-8b", device, num_devices=4, **given).notes
    assert any("as NCCL ran on one host of l40s" in note for note in notes) == is_noted


def test_the_largest_batch_within_a_limit_is_found() -> None:
    """One sequence more than at the best point, on the same layout and chunks, breaks the limit."""
    found = plan("llama-3.1-70b", prompt_len=4000, output_len=500, tpot_limit_s=0.029, layout={"tensor_parallel": 4})
    request = ServingRequest(prompt_len=4000, output_len=500, tpot_limit_s=0.029)
    kept = [point for point in found.points if point.mode == "aggregated" and point.meets(request)]
    # Not found.best, which takes the faster of points with nearly as many tokens.
    best = max(kept, key=lambda point: point.tokens_per_s_per_device)
    instance = make_instance("llama-3.1-70b", request, tensor_parallel=4)
    chunking = next(each for each in list_chunkings(4000) if each.prompts * each.tokens == best.prefill_tokens)

    def tpot_s(batch_size: int) -> float:
        load = best.prefill_load_fraction * batch_size / best.batch_size
        candidate = AggregatedCandidate(instance, batch_size, chunking, load)
        plain, decode, mixed = compose_passes(candidate.passes(), instance.scenario.config, instance.scenario.device)
        return candidate.point((plain, decode, mixed)).tpot.middle_s

    assert tpot_s(best.batch_size) == best.tpot.middle_s <= 0.029 < tpot_s(best.batch_size + 1)
    assert best.batch_size not in batch_sizes(64)


def test_a_cached_prefix_is_attended_to_and_not_prefilled() -> None:
    """Prefill passes start behind it, as predict with that context does; more of it never serves fewer tokens."""
    chunkings = list_chunkings(1000, 3000)
    request = ServingRequest(prompt_len=4000, output_len=100, cached_len=3000)
    instance = make_instance(request=request)
    (candidate, *_) = prefill_candidates(instance)
    (times,) = compose_passes(candidate.passes(), instance.scenario.config, instance.scenario.device)
    alone = build_scenario(
        "llama-3-8b",
        "h100-sxm-80gb",
        workload={"phase": "prefill", "micro_batch_size": 1, "seq_len": 1000, "context_len": 3000},
        overrides={"fused_qkv": True, "fused_gate_up": True},
    ).predict()

    assert [(chunking.tokens, chunking.context_len) for chunking in chunkings[:2]] == [(500, 3250), (1000, 3000)]
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
    with pytest.raises(WorkloadError, match=rf"cached_len={cached_len} must be an integer from 0 to 3999"):
        plan(prompt_len=4000, cached_len=cached_len)


def test_slightly_longer_prompts_are_served_similarly() -> None:
    """Where two whole prompts share a pass, one a little longer is not cut: no step of tokens/s beyond 2 %."""
    served = [
        best.tokens_per_s_per_device * prompt_len
        for prompt_len in (8190, 8200)
        if (best := plan("llama-3.1-70b", prompt_len=prompt_len, layout={"tensor_parallel": 8}).best("aggregated"))
    ]

    assert served[0] == pytest.approx(served[1], rel=0.02)


def test_formats_have_one_to_three_parts() -> None:
    """GEMMs, weights and cache, each that of the GEMMs where it is left out."""
    whole = read_format("bf16:int4:fp8")

    assert (whole.dtype, whole.weight_dtype, whole.kv_cache_dtype) == ("bf16", "int4", "fp8")
    with pytest.raises(WorkloadError, match="has too many parts"):
        read_format("bf16:int4:fp8:fp8")
