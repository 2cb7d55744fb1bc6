"""Generations of training software: their effect on prices, and how they are selected."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shapewright.core.errors import CalibrationError, WorkloadError
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.base import Block
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm
from shapewright.prediction.build import build_scenario
from shapewright.prediction.composition.stages import GRADIENT_GEMMS, exposed_fraction
from shapewright.prediction.predict import Prediction
from shapewright.prediction.predict import predict as predict_step
from shapewright.prediction.scenario import Scenario
from shapewright.pricing.calibration.source import ROOFLINE_BOUND
from shapewright.pricing.price import Price
from shapewright.pricing.software import TUNED, TUNED_SOFTWARE, Software, load_software, software_names
from shapewright.workload.layout import ParallelLayout

A100 = "a100-sxm-80gb"
H100 = "h100-sxm-80gb"
SHARDED = ParallelLayout(data_parallel=8, zero_stage=3)


def predict(software: Software | str, layout: ParallelLayout = SHARDED) -> Prediction:
    """A training step of Llama-3-8B."""
    question = build_scenario("llama-3-8b", H100, workload={"micro_batch_size": 1, "seq_len": 4096}, layout=layout)
    return predict_step(
        question.config, device=question.device, workload=question.workload, layout=layout, software=software
    )


def of(question: Scenario, software: Software) -> Prediction:
    """A question's step, run by other software."""
    terms = {"device": question.device, "workload": question.workload, "layout": question.layout}
    return predict_step(question.config, **terms, software=software)


def test_tuned_software_is_neutral() -> None:
    """The default is the plain sum of operations, and names no record."""
    plain, named = predict(Software()), predict(TUNED)

    assert plain.step_time_s == named.step_time_s
    assert named.software == TUNED
    assert "software" not in named.calibration


def test_a_factor_is_on_the_whole_step() -> None:
    """Every operation 1.25 times as slow makes a step 1.25 times as slow, hidden communication included."""
    assert predict(Software(time_factor=1.25)).step_time_s == pytest.approx(1.25 * predict(TUNED).step_time_s)


def test_older_attention_weighs_on_attention_alone() -> None:
    """Attention three times as slow on Hopper adds twice its time; a factor of another architecture adds nothing."""
    plain = predict(Software(overlap_share=0.0))
    attention_s = sum(entry.total_time_s for entry in plain.operations if isinstance(entry.operation, Attention))
    slow = predict(Software(overlap_share=0.0, attention_factor={"hopper": 3.0}))

    assert slow.step_time_s == pytest.approx(plain.step_time_s + 2.0 * attention_s)
    assert predict(Software(attention_factor={"ampere": 3.0})).step_time_s == predict(TUNED).step_time_s


def test_exposed_shards() -> None:
    """Without overlap the step has all communication of the shards."""
    exposed = predict(Software(overlap_share=0.0))
    collectives = [entry for entry in exposed.operations if isinstance(entry.operation, Collective)]

    assert collectives
    assert all(entry.exposed_fraction == 1.0 for entry in collectives)
    assert exposed.step_time_s > predict(TUNED).step_time_s


def test_tensor_communication_behind_its_gemm() -> None:
    """Input gradients are all-reduced during weight-gradient GEMMs, which hide them where they take longer."""
    layout = ParallelLayout(tensor_parallel=8, sequence_parallel=False)
    shown, half = (predict(Software(tensor_hidden_fraction=share), layout) for share in (0.0, 0.5))
    reduced = [
        entry
        for entry in shown.operations
        if isinstance(entry.operation, Collective)
        and entry.operation.axis == "tensor"
        and entry.operation.pass_name == "backward"
    ]

    assert {entry.operation.op_name for entry in reduced} == {"all_reduce"}
    hidden_s = sum(entry.total_time_s for entry in reduced) / 2
    assert half.step_time_s == pytest.approx(shown.step_time_s - hidden_s)


def test_slow_links_show_behind_weight_gradients() -> None:
    """Communication longer than the concurrent GEMMs is hidden for as long as these take."""
    sums = {"compute_s": 1.0, "collective_s": 4.0, "pool": GRADIENT_GEMMS}

    assert exposed_fraction(**sums, software=Software(tensor_hidden_fraction=0.8)) == pytest.approx(1.0 - 0.8 / 4.0)


def test_unaligned_heads_leave_tensor_cores() -> None:
    """Batched GEMMs of heads of 108 elements, 216 bytes, run at a fraction of the fp32 rate; of 112, unchanged."""
    old = Software(unaligned_heads_fraction=0.5)
    gpt = build_scenario("gpt3-2.7b", A100).config

    def score_s(head_dim: int, software: Software) -> float:
        config = replace(gpt, num_heads=8, num_kv_heads=8, head_dim=head_dim, v_head_dim=head_dim)
        question = build_scenario(config, A100, workload={"attention": "unfused", "dtype": "fp16"})
        found = predict_step(config, device=question.device, workload=question.workload, software=software)
        (score,) = [entry for entry in found.operations if entry.operation.name == "attention.score"]
        if software is old and head_dim == 108:
            slow_s = score.operation.flops / (0.5 * question.device.peak_flops_per_s("fp32"))
            assert score.price.time_s == pytest.approx(slow_s)
        return float(score.price.time_s)

    assert score_s(108, old) > 5.0 * score_s(108, Software())
    assert score_s(112, old) == score_s(112, Software())


def test_a_host_that_waits_costs_small_batches_most() -> None:
    """A fixed cost per launch takes a larger share of a step the less work a launch does."""
    slow = Software(host_s=1e-4)
    question = build_scenario("llama-3-8b", H100)

    def slowdown(micro_batch_size: int) -> float:
        workload = replace(question.workload, micro_batch_size=micro_batch_size)
        steps = [
            predict_step(question.config, device=question.device, workload=workload, software=software).step_time_s
            for software in (slow, Software())
        ]
        return steps[0] / steps[1]

    assert slowdown(1) > slowdown(4) > 1.0


def test_host_cost_of_routed_rows_alone() -> None:
    """Where attention and router are captured in graphs, the host cost applies to operations on routed rows only."""
    question = build_scenario("mixtral-8x7b", H100, layout={"data_parallel": 8, "expert_parallel": 8})

    def operations(software: Software) -> dict[str, float]:
        found = of(question, software).operations
        return {f"{entry.operation.name} {entry.operation.pass_name}": entry.price.time_s for entry in found}

    plain, slow = operations(Software()), operations(Software(host_s=1e-4, host_scope="experts"))
    costly = {name for name in plain if slow[name] == pytest.approx(plain[name] + 1e-4)}
    assert {name for name in plain if slow[name] != plain[name]} == costly
    assert {name.split(" ")[0].split(".")[0] for name in costly} == {"moe"}
    assert {"moe.gate_up forward", "moe.dispatch.alltoall forward", "moe.down.wgrad backward"} <= costly
    assert not {name for name in costly if "router" in name or "choose" in name}


def test_exchanges_overlap_with_another_micro_batch() -> None:
    """Software that overlaps exchanges hides its share of them, but of a single micro-batch nothing."""
    overlaps = Software(expert_hidden_fraction=0.75)

    def exposed(batch: int) -> set[float]:
        workload = {"micro_batch_size": 1, "global_batch_size": 8 * batch, "seq_len": 4096}
        question = build_scenario(
            "mixtral-8x7b", H100, workload=workload, layout={"data_parallel": 8, "expert_parallel": 8}
        )
        found = of(question, overlaps).operations
        return {entry.exposed_fraction for entry in found if "alltoall" in entry.operation.name}

    assert exposed(1) == {1.0}
    assert list(exposed(4)) == [pytest.approx(1.0 - 0.75 * 3 / 4)]


def test_interval_of_a_known_generation() -> None:
    """Whole steps that no fit saw make the interval of a generation, which is narrower than that of all of them."""
    known, unknown = load_software("fsdp-2023"), predict(TUNED)
    found = predict("fsdp-2023")

    assert known.low is not None
    assert known.high is not None
    # What is borrowed even here, norms and the like, adds a little.
    assert found.step_time_low_s == pytest.approx(known.low * found.step_time_s, rel=0.01)
    assert found.step_time_high_s == pytest.approx(known.high * found.step_time_s, rel=0.01)
    width = found.step_time_high_s / found.step_time_low_s
    assert width < unknown.step_time_high_s / unknown.step_time_low_s


def test_borrowed_records_widen_a_known_generation() -> None:
    """Residuals of whole steps are those of measured devices: on others the spread of operations comes on top."""
    question = build_scenario("llama-3-8b", H100, workload={"micro_batch_size": 1, "seq_len": 4096}, layout=SHARDED)
    own, borrowed = (
        predict_step(
            question.config, device=question.device.with_pricing(uncalibrated=is_left_out),
            workload=question.workload, layout=SHARDED, software="fsdp-2023",
        )
        for is_left_out in (False, True)
    )  # fmt: skip

    assert borrowed.step_time_high_s / borrowed.step_time_s > 1.03 * own.step_time_high_s / own.step_time_s


def test_residual_noise_is_not_counted_twice() -> None:
    """Where the steps behind an interval were borrowed as much, borrowing adds nothing to it."""
    residuals = Software(low=0.9, high=1.1, borrowed_fraction=1.0)
    question = build_scenario("llama-3-8b", "gb200", workload={"micro_batch_size": 1, "seq_len": 4096})
    found, wider = of(question, residuals), of(question, replace(residuals, borrowed_fraction=0.0))

    assert found.step_time_high_s == pytest.approx(1.1 * found.step_time_s)
    assert found.step_time_low_s == pytest.approx(0.9 * found.step_time_s)
    assert wider.step_time_high_s > found.step_time_high_s


@pytest.mark.parametrize("name", [name for name in software_names() if name != TUNED])
def test_records_have_provenance(name: str) -> None:
    """Each generation predicts, brackets its step, and names source, split, and errors on rows left out."""
    found, software = predict(name), load_software(name)

    assert found.step_time_low_s <= found.step_time_s <= found.step_time_high_s
    assert found.calibration["software"].record_id == software.record
    assert software.provenance["reports"]["held out"]["rows"] == software.provenance["rows"]


def test_unknown_software_and_wrong_phase() -> None:
    """An unknown generation is answered with those that there are; serving has no training software."""
    with pytest.raises(CalibrationError, match=r"unknown software 'fsdp-2032'.*fsdp-2023"):
        predict("fsdp-2032")
    with pytest.raises(WorkloadError, match=r"means nothing in decode"):
        build_scenario("llama-3-8b", load_device(H100), workload={"phase": "decode"}, software="fsdp-2023")


def test_software_generation_scales_the_complete_price() -> None:
    """Half as much again and 10 us of the host, for the time and both of its ends; the step is not launched so."""
    price = Price(
        time_s=1e-4,
        low_s=8e-5,
        high_s=2e-4,
        compute_s=1e-4,
        memory_s=0.0,
        start_s=2e-6,
        roofline_s=5e-5,
        calibration=ROOFLINE_BOUND,
    )
    device = load_device("a100-sxm-80gb")
    old = replace(TUNED_SOFTWARE, time_factor=1.5, host_s=1e-5)
    gemm = Gemm(name="mlp.up", m=8, n=8, k=8)
    found = old.adjust(gemm, price, device)
    assert (found.time_s, found.low_s, found.high_s) == pytest.approx((1.6e-4, 1.3e-4, 3.1e-4))
    assert found.start_s == pytest.approx(1.2e-5)
    assert old.adjusted_s(gemm, 1e-4, device) == pytest.approx(1.6e-4)
    assert old.adjust(replace(gemm, pass_name="step"), price, device).time_s == pytest.approx(1.5e-4)


def test_host_waiting_for_experts_delays_no_other_launch() -> None:
    """Where the rest is captured in graphs, routed rows and shared experts cost their launch, router and MLP none."""
    waits = replace(TUNED_SOFTWARE, host_s=1e-5, host_scope="experts")
    device = load_device("a100-sxm-80gb")
    cases: tuple[tuple[Block, bool], ...] = (("moe", True), ("shared_expert", True), ("router", False), ("mlp", False))
    for block, is_late in cases:
        gemm = Gemm(name="x", block=block, m=8, n=8, k=8)
        assert waits.needs_own_price(gemm) == is_late
        assert waits.adjusted_s(gemm, 1e-4, device) == pytest.approx(1.1e-4 if is_late else 1e-4)
        assert not replace(waits, host_scope="all").needs_own_price(gemm)
