"""predict: composition of the step, pipeline bubble, overlap, warnings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import shapewright
from lowered import gpt
from shapewright.app.report.outputs.predict import predict_output
from shapewright.app.report.predict import describe, verdict
from shapewright.core.errors import LayoutError, UnknownDeviceError, UnknownRateError, WorkloadError
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.prediction.build import build_scenario
from shapewright.prediction.composition.stages import PricedOperation, rebalance_ends
from shapewright.prediction.composition.step import compose_step
from shapewright.prediction.predict import Prediction
from shapewright.pricing.calibration.source import CalibrationSource
from shapewright.pricing.price import Price
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

H100 = "h100-sxm-80gb"


def test_bubble_is_the_share_of_the_schedule() -> None:
    """With p stages and m micro-batches the 1F1B bubble is (p - 1) / m of the layer time of a stage.

    It also has 1 / m of what the first stage has besides, which is less than what the last one has.
    """
    layout = {"pipeline_parallel": 4}
    for num_microbatches in (4, 8, 32):
        workload = {"micro_batch_size": 1, "global_batch_size": num_microbatches}
        prediction = build_scenario("llama-3-8b", H100, workload=workload, layout=layout).predict()
        times_s = dict.fromkeys(("every", "first", "last"), 0.0)
        for entry in prediction.operations:
            if entry.operation.pass_name != "step":
                times_s[entry.operation.stage] += entry.total_time_s

        assert times_s["first"] < times_s["last"]
        waited_s = (3 * times_s["every"] + times_s["first"]) / num_microbatches
        assert prediction.bubble_time_s == pytest.approx(waited_s)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_single_pass_takes_all_layers_once(phase: str) -> None:
    """26 layers over 4 stages are 7, 7, 7 and 5: all of them with embedding and logits, and sends between stages."""
    workload = {"phase": phase, "micro_batch_size": 8}
    model = build_scenario("llama-3-8b", H100, overrides={"num_layers": 26}, workload=workload)
    whole, staged = (model.replace(pipeline_parallel=degree).predict() for degree in (1, 4))
    sent_s = sum(one.total_time_s for one in staged.operations if one.operation.block == "pipeline")
    assert staged.step_time_s == pytest.approx(whole.step_time_s + 26 / 7 * sent_s, rel=1e-9)


def test_interleaving_halves_the_bubble() -> None:
    """Two chunks per stage halve the wait for layers; the embedding of four micro-batches comes first, not of one."""
    workload = {"global_batch_size": 64, "micro_batch_size": 1}
    layout = {"pipeline_parallel": 4}
    plain, interleaved = (
        build_scenario("llama-3-8b", H100, workload=workload, layout={**layout, "virtual_pipeline": chunks}).predict()
        for chunks in (1, 2)
    )
    embedding_s = sum(
        entry.total_time_s / 64
        for entry in plain.operations
        if entry.operation.stage == "first" and entry.operation.pass_name != "step"
    )

    wait_for_layers_s = plain.bubble_time_s - embedding_s
    assert interleaved.bubble_time_s == pytest.approx(wait_for_layers_s / 2 + 4 * embedding_s, rel=0.02)


def test_gradient_communication_overlaps_with_the_backward_pass() -> None:
    """Only the exposed part of the gradient communication adds to the step."""
    inside = build_scenario("llama-3-8b", H100, layout={"data_parallel": 8}).predict()
    hidden = [
        entry for entry in inside.operations if isinstance(entry.operation, Collective) and entry.operation.overlaps
    ]

    assert hidden
    assert all(entry.exposed_fraction < 1.0 for entry in hidden)
    assert all(
        entry.exposed_fraction == 1.0 for entry in inside.operations if not isinstance(entry.operation, Collective)
    )


def test_recomputation_costs_a_forward_pass() -> None:
    """Full recomputation repeats the forward pass: HFU exceeds MFU, and memory decreases."""
    plain = build_scenario("llama-3-8b", H100).predict()
    again = build_scenario("llama-3-8b", H100, workload={"recompute": "full"}).predict()
    forward_s = plain.layer_forward_time_s * plain.config.num_layers

    assert again.step_time_s - plain.step_time_s == pytest.approx(forward_s, rel=0.05)
    assert again.hfu > 1.2 * again.mfu
    assert again.memory.total_bytes < plain.memory.total_bytes


def test_decode_reads_the_weights_once() -> None:
    """One token per sequence takes at least the time to read the weights: 16.06 GB at 3.35 TB/s on an H100."""
    prediction = build_scenario("llama-3-8b", H100, workload={"phase": "decode", "micro_batch_size": 1}).predict()

    assert 15.0e9 / 3.35e12 < prediction.step_time_s < 2 * 16.06e9 / 3.35e12
    assert prediction.tokens_per_step == 1


def test_bandwidth_in_use_is_that_of_weights_and_cache() -> None:
    """One sequence: all weights but the embedding, 4097 tokens of 128 KiB; half of each with tensor degree 2."""
    alone, shared = (
        build_scenario(
            "llama-3-8b",
            H100,
            workload={"phase": "decode", "micro_batch_size": 1, "context_len": 4096},
            layout={"tensor_parallel": degree},
        ).predict()
        for degree in (1, 2)
    )
    read_bytes = 2 * (8_030_261_248 - 128_256 * 4096) + 4097 * 131_072

    for prediction, num_devices in ((alone, 1), (shared, 2)):
        used = prediction.mbu * prediction.step_time_s * 3.35e12
        assert used == pytest.approx(read_bytes / num_devices, rel=0.01)


def test_communication_does_not_count_as_memory_traffic() -> None:
    """Eight replicas have the memory traffic of one, plus gradient communication."""
    alone, together = (build_scenario("gpt2", H100, layout={"data_parallel": degree}).predict() for degree in (1, 8))

    assert any(isinstance(entry.operation, Collective) for entry in together.operations)
    assert together.mbu * together.step_time_s == pytest.approx(alone.mbu * alone.step_time_s)


def test_few_tokens_use_the_bandwidth_of_few_experts() -> None:
    """One token of Mixtral reads 2 of 8 experts: a quarter of 2.8 GB a layer, and not the whole."""
    one, many = (
        build_scenario(
            "mixtral-8x7b",
            "h200-sxm-141gb",
            workload={"phase": "decode", "micro_batch_size": batch_size, "context_len": 1},
        ).predict()
        for batch_size in (1, 64)
    )
    expert_bytes = 32 * 3 * 4096 * 14336 * 2

    def moved_bytes(prediction: Prediction) -> float:
        return prediction.mbu * prediction.step_time_s * 4.8e12

    assert moved_bytes(many) - moved_bytes(one) == pytest.approx(6 * expert_bytes, rel=0.02)


def test_a_step_that_does_not_fit_has_a_warning() -> None:
    """A step that needs more memory than the device has is predicted, with a warning that names what to change."""
    prediction = build_scenario("gpt3-175b", H100).predict()
    (warning,) = [line for line in prediction.warnings if line.code == "does-not-fit"]

    assert "79.1 GiB" in warning
    assert "tensor_parallel" in warning


def test_memory_warning_depends_on_the_phase() -> None:
    """In decode, narrower weights and caches are suggested, not recomputation or sharded optimizer states."""
    workload = {"phase": "decode", "context_len": 1024}
    (warning,) = [
        line for line in build_scenario("llama-2-70b", H100, workload=workload).predict().warnings if "does not" in line
    ]

    assert "recompute" not in warning
    assert "zero_stage" not in warning
    assert "kv_cache_dtype" in warning


def test_a_high_mfu_has_a_warning_on_masked_scores() -> None:
    """32,768 causal tokens at an MFU of 88 % compute two thirds of it; short sequences have no warning."""
    long, short = (
        build_scenario("llama-3-8b", H100, workload={"phase": "prefill", "seq_len": s}).predict() for s in (32768, 2048)
    )
    (message,) = [line for line in long.warnings if line.code == "masked-scores"]
    causal = float(message.split()[-2]) / 100.0

    # Per layer and token attention counts 2 * 2 * 4096 * 32768 = 0.54 GFLOP, half of them masked, and matrices 0.44.
    assert causal == pytest.approx(long.mfu * (1.0 - 0.54 / 2.0 / (0.54 + 0.44)), rel=0.05)
    assert not any(line.code == "masked-scores" for line in short.warnings)


def test_masked_scores_are_the_models_and_not_a_ranks() -> None:
    """131,072 tokens over 16 ranks of the context axis: most blocks have no mask, and half of the scores still do."""
    workload = {"seq_len": 131072, "micro_batch_size": 1, "global_batch_size": 4}
    split = build_scenario(
        "llama-3-8b", H100, workload=workload, layout={"data_parallel": 4, "context_parallel": 16}
    ).predict()
    (message,) = [line for line in split.warnings if line.code == "masked-scores"]

    # Per layer and token attention counts 2 * 2 * 4096 * 131072 = 2.15 GFLOP, half of them masked, and matrices 0.44.
    assert float(message.split()[-2]) / 100.0 == pytest.approx(split.mfu * (1.0 - 2.15 / 2.0 / (2.15 + 0.44)), rel=0.05)


TO_2048, TO_512 = ({"phase": "prefill", "seq_len": length, "micro_batch_size": 1} for length in (2048, 512))
UNFUSED = {"phase": "decode", "context_len": 2048, "attention": "unfused", "micro_batch_size": 8}
TP8 = {"tensor_parallel": 8}
PCIE = "communication over PCIe, measured in one host"
BOUNDS = "pointwise, gemm, attention on groq-lpu-v1: roofline bounds from the data sheet, not predictions; real steps"


@pytest.mark.parametrize(
    ("model", "device", "workload", "layout", "code", "words"),
    [
        # Experts in fp8 are priced with the kernel of one library.
        ("qwen3-30b-a3b", H100, {"phase": "prefill", "dtype": "fp8"}, {}, "expert-kernel", "experts are priced as"),
        ("qwen3-30b-a3b", H100, {"phase": "prefill", "dtype": "bf16"}, {}, "expert-kernel", None),
        # Prefill over eight L40S is mostly all-reduces; one device and NVLink have no PCIe.
        ("llama-3.1-70b", "l40s", TO_2048, TP8, "host-link", PCIE),
        ("llama-3.1-70b", "l40s", {**TO_2048, "seq_len": 16}, TP8, "host-link", PCIE),
        ("llama-3.1-70b", "l40s", TO_2048, {}, "host-link", None),
        ("llama-3.1-70b", H100, TO_2048, TP8, "host-link", None),
        # ZeRO shards over replicas and context ranks.
        ("llama-3-8b", H100, {}, {"zero_stage": 3}, "no-effect", "zero_stage=3 has no effect"),
        ("llama-3-8b", H100, {}, {"zero_stage": 3, "tensor_parallel": 2}, "no-effect", "zero_stage=3 has no effect"),
        ("llama-3-8b", H100, {}, {"zero_stage": 3, "data_parallel": 2}, "no-effect", None),
        ("llama-3-8b", H100, {}, {"zero_stage": 3, "context_parallel": 2}, "no-effect", None),
        # No kernel of Groq is measured.
        ("gpt2", "groq-lpu-v1", {**TO_512, "dtype": "fp16"}, {}, "roofline-bound", BOUNDS),
        ("gpt2", H100, {**TO_512, "dtype": "fp16"}, {}, "roofline-bound", None),
        # Unfused decode over 2,049 keys runs slower kernels than over 2,048.
        ("llama-3-8b", H100, UNFUSED, {}, "unaligned-cache", "attention over 2049 keys"),
        ("llama-3-8b", H100, {**UNFUSED, "context_len": 2047}, {}, "unaligned-cache", None),
        ("llama-3-8b", H100, {**UNFUSED, "attention": "flash"}, {}, "unaligned-cache", None),
        # B300 runs int8 at 7 % of the rate of fp16, and MI210 at the same rate.
        ("gpt2", "b300", {**TO_512, "dtype": "int8"}, {}, "slow-format", "7 % of the matrix rate of"),
        ("gpt2", "mi210", {**TO_512, "dtype": "int8"}, {}, "slow-format", "of the matrix rate of"),
        ("gpt2", "b300", {**TO_512, "dtype": "fp8"}, {}, "slow-format", None),
        ("gpt2", H100, {**TO_512, "dtype": "int8"}, {}, "slow-format", None),
    ],
)
def test_warnings_of_scenarios(
    model: str, device: str, workload: dict[str, Any], layout: dict[str, int], code: str, words: str | None
) -> None:
    """A scenario has the warning of this code and words, or none of this code."""
    found = shapewright.predict(model, device=device, workload=workload, layout=layout)
    told = [str(warning) for warning in found.warnings if warning.code == code]

    assert len(told) == (words is not None)
    assert all(str(words) in text for text in told)


def test_borrowed_calibration_has_a_warning() -> None:
    """An unmeasured device has borrowed calibration, a wider interval and a warning."""
    own = build_scenario("gpt2", "a100-sxm-80gb").predict()
    borrowed = build_scenario("gpt2", "a100-sxm-80gb", uncalibrated=True).predict()

    assert own.calibration["gemm"].label.startswith("gemm/a100-sxm-80gb/")
    assert not own.warnings
    assert borrowed.calibration["gemm"].is_borrowed
    assert any("uncalibrated" in line for line in borrowed.warnings)
    assert borrowed.step_time_high_s / borrowed.step_time_s > own.step_time_high_s / own.step_time_s


@pytest.mark.parametrize(
    ("workload", "layout", "error", "words"),
    [
        ({"dtype": "fp8"}, {}, UnknownRateError, ["fp8", "bf16, fp16"]),
        ({}, {"tensor_parallel": 7}, LayoutError, ["tensor_parallel=7", "num_heads=32"]),
        ({"global_batch_size": 3}, {"data_parallel": 2}, WorkloadError, ["global_batch_size=3", "try 8"]),
    ],
)
def test_impossible_steps(
    workload: dict[str, object], layout: dict[str, int], error: type[Exception], words: list[str]
) -> None:
    """A step that cannot run raises a specific error with the given and the allowed values."""
    scenario = build_scenario("llama-3-8b", "a100-sxm-80gb", workload=workload, layout=layout)
    with pytest.raises(error) as raised:
        scenario.predict()

    for word in words:
        assert word in str(raised.value)


def test_unknown_device_has_close_names() -> None:
    """A misspelt device is an error that suggests close names."""
    with pytest.raises(UnknownDeviceError, match=r"did you mean .*'a100-sxm-40gb'"):
        build_scenario("gpt2", "a100-sxm4-40bg")


def test_ends_compensate_for_missing_layers() -> None:
    """Where the layers do not divide, the stage with the logits has one layer less."""
    workload = {"micro_batch_size": 1, "global_batch_size": 32}
    steps_s, ends_s = {}, {}
    for num_layers in (31, 32):
        config = replace(build_scenario("llama-3-8b", H100).config, num_layers=num_layers)
        prediction = build_scenario(config, H100, workload=workload, layout={"pipeline_parallel": 4}).predict()
        steps_s[num_layers] = prediction.step_time_s
        busiest_s = sum(entry.total_time_s for entry in prediction.busiest_operations)
        assert busiest_s + prediction.bubble_time_s == pytest.approx(prediction.step_time_s, rel=1e-12)
        ends_s[num_layers] = sum(
            entry.total_time_s for entry in prediction.operations if entry.operation.name.startswith("logits.wgrad")
        )
        layer_s = sum(
            entry.total_time_s
            for entry in prediction.operations
            if entry.operation.stage == "every" and entry.operation.pass_name != "step"
        )
    # One layer of eight a stage: the step of 31 layers is shorter by a layer, or by all of the logits if they are less.
    assert steps_s[32] - steps_s[31] == pytest.approx(layer_s / 8, rel=0.02)
    assert 0.0 < ends_s[31] < ends_s[32]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((1.0, 6.0, 2.0, 0, 8), (1.0, 6.0)),
        ((1.0, 6.0, 2.0, 1, 8), (1.0, 4.0)),
        ((3.0, 6.0, 2.0, 3, 8), (1.0, 2.0)),  # last, last, first
        ((1.0, 6.0, 2.0, 9, 8), (0.0, 0.0)),
        ((1.0, 6.0, 2.0, 9, 2), (1.0, 2.0)),  # a stage has no more than its two layers to give
    ],
)
def test_gaps_go_to_the_slower_end(arguments: tuple[float, ...], expected: tuple[float, float]) -> None:
    """Each gap removes a layer from the slower end, for numbers and for arrays."""
    first_s, last_s, layer_s, num_spare, layers_per_stage = arguments
    assert rebalance_ends(first_s, last_s, layer_s, int(num_spare), int(layers_per_stage)) == pytest.approx(expected)
    arrays = rebalance_ends(
        np.array([first_s, 0.0]),
        np.array([last_s, 0.0]),
        np.array([layer_s, 1.0]),
        int(num_spare),
        int(layers_per_stage),
    )
    assert [end[0] for end in arrays] == pytest.approx(expected)
    assert [end[1] for end in arrays] == [0.0, 0.0]


def test_a_pipeline_without_a_global_batch_has_a_warning() -> None:
    """With the default global batch a warning states the bubble; with an explicit one it does not."""
    layout = {"pipeline_parallel": 4}
    assumed, given, single = (
        build_scenario(
            "llama-3-8b", H100, workload={"micro_batch_size": 1, "global_batch_size": batch}, layout=shape
        ).predict()
        for batch, shape in ((None, layout), (4, layout), (None, {}))
    )
    share = 100.0 * assumed.bubble_time_s / assumed.step_time_s
    message = [line for line in assumed.warnings if line.field == "global_batch_size"]

    assert assumed.step_time_s == given.step_time_s
    assert [f"bubble is {share:.0f} % of the step" in line for line in message] == [True]
    assert not any(line.field == "global_batch_size" for line in (*given.warnings, *single.warnings))


def test_host_copies_have_their_own_calibration_source() -> None:
    """Copies to the host and collectives between devices are listed separately."""
    workload = {"micro_batch_size": 1, "offload_activations": True}
    found = build_scenario("llama-3-8b", H100, workload=workload, layout={"tensor_parallel": 2}).predict()

    assert found.calibration["host"] != found.calibration["collective"]
    assert "host" not in build_scenario("llama-3-8b", H100, layout={"tensor_parallel": 2}).predict().calibration


def test_heading_contains_the_complete_scenario() -> None:
    """The heading contains global batch, chunks, sharding, schedule and sequence parallelism besides the degrees."""
    layout = {"tensor_parallel": 2, "pipeline_parallel": 4, "data_parallel": 2, "zero_stage": 1}
    usual = build_scenario(
        "llama-3-8b", H100, workload={"global_batch_size": 64}, layout={**layout, "virtual_pipeline": 4}
    )
    other = build_scenario(
        "llama-3-8b", H100, layout={**layout, "pipeline_schedule": "gpipe", "sequence_parallel": False}
    )

    one, two = (predict_output(scenario.predict(), scenario) for scenario in (usual, other))
    plain = build_scenario("llama-3-8b", H100)
    assert "b=4 B=64 s=2048" in describe(one)
    assert describe(one).endswith("; TP 2, PP 4, VPP 4, DP 2, ZeRO 1")
    assert "b=4 B=32 s=2048" in describe(two)
    assert describe(two).endswith("; TP 2, PP 4, DP 2, ZeRO 1, gpipe, no SP")
    assert verdict(one)["bubble"].endswith(" %")
    assert "bubble" not in verdict(predict_output(plain.predict(), plain))


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"pipeline_parallel": 4},
        {"pipeline_parallel": 4, "pipeline_schedule": "dualpipe"},
        {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2},
    ],
)
def test_a_step_is_its_operations_and_its_bubble(layout: dict[str, Any]) -> None:
    """Operations of the busiest stage and the bubble add up to the step, over which the job's tokens and FLOPs go.

    Without a known stack the interval holds what stacks made of the kernels: 0.84 to 1.7 times the prediction.
    """
    workload = {"micro_batch_size": 1, "seq_len": 2048, "global_batch_size": 16}
    found = shapewright.predict("llama-3-8b", device="h100-sxm-80gb", workload=workload, layout=layout)
    device_s = found.step_time_s * found.layout.num_devices
    tokens = 16 * 2048
    # 6 FLOPs a token for each weight of a product, and 12 s h of each layer for scores.
    flops = tokens * (6 * (found.parameters.total - 128256 * 4096) + 12 * 32 * 2048 * 4096)

    assert sum(entry.total_time_s for entry in found.busiest_operations) + found.bubble_time_s == pytest.approx(
        found.step_time_s
    )
    assert found.tokens_per_step == tokens
    assert found.tokens_per_s_per_device == pytest.approx(tokens / device_s)
    assert found.mfu == pytest.approx(flops / device_s / found.device.peak_flops_per_s("bf16"), rel=1e-3)
    assert found.hfu == pytest.approx(found.mfu)  # nothing is computed twice
    assert 0.8 < found.step_time_low_s / found.step_time_s <= 0.84
    assert 1.7 <= found.step_time_high_s / found.step_time_s < 1.8


@pytest.mark.parametrize(("vocab_size", "end"), [(1000, "first"), (2_000_000, "last")])
def test_the_slower_end_of_a_pipeline_counts(vocab_size: int, end: str) -> None:
    """Embedding 8192 tokens is more than the logits of the last one, unless there are 2000 times as many words."""
    config = gpt(hidden_size=1024, num_heads=8, num_layers=4, vocab_size=vocab_size, max_position_embeddings=8192)
    workload = {"phase": "prefill", "micro_batch_size": 1, "seq_len": 8192}
    found = shapewright.predict(config, device=H100, workload=workload, layout={"pipeline_parallel": 2})

    assert {entry.operation.stage for entry in found.busiest_operations} == {"every", end}
    assert sum(entry.total_time_s for entry in found.busiest_operations) + found.bubble_time_s == pytest.approx(
        found.step_time_s
    )


@pytest.mark.parametrize(
    ("calibration", "shared_error", "correlation"),
    [
        (CalibrationSource(transfer="exact", record_id="own"), 0.0, 0.3),
        (CalibrationSource(transfer="generic", record_id="another"), 0.0, 0.5),
        (CalibrationSource(transfer="generic", record_id="another"), 0.2, 0.5),
        (CalibrationSource(transfer="generic", record_id="another"), 0.8, 0.86),
        (CalibrationSource(transfer="generic", record_id="another"), 1.0, 1.0),
    ],
)
@pytest.mark.parametrize("stages", [1, 2])
def test_errors_of_operations_cancel_in_part(
    calibration: CalibrationSource, shared_error: float, correlation: float, stages: int
) -> None:
    """Errors of spread w that correlate by r add up to w sqrt(n + n (n - 1) r): between w sqrt(n) and n w.

    Two products and a final norm take 1 s each, and may take 0.1 s less or 0.2 s more. With two stages a token waits
    for the products of the other one as well: as sure a time, stretched. What a device's bias, shared by all, leaves of
    the variance correlates by 0.3: 0.8 + 0.2 x 0.3 = 0.86; a borrowed record's errors by 0.5 and more.
    """
    price = Price(
        time_s=0.5, low_s=0.45, high_s=0.6, compute_s=0.5, memory_s=0.0, start_s=0.0, roofline_s=0.0,
        calibration=calibration, shared_error=shared_error,
    )  # fmt: skip
    gemms = [Gemm(name=name, m=8, n=8, k=8, repeats=2) for name in ("mlp.up", "mlp.down")]
    norm = Pointwise(name="norm", operation="norm", stage="last", read_bytes=8.0, written_bytes=8.0, repeats=2)
    free = PricedOperation(gemms[0], replace(price, time_s=0.0, low_s=0.0, high_s=0.0))
    priced = [free, *(PricedOperation(operation, price) for operation in (*gemms, norm))]
    layout = ParallelLayout(pipeline_parallel=stages)
    found = compose_step(priced, gpt(hidden_size=64, num_heads=1, num_layers=4), Workload(phase="prefill"), layout)
    step_s = 2.0 * stages + 1.0
    spread = (3.0 + 6.0 * correlation) ** 0.5 * step_s / 3.0

    assert found.step_s == step_s
    assert found.step_s - found.step_low_s == pytest.approx(0.1 * spread)
    assert found.step_high_s - found.step_s == pytest.approx(0.2 * spread)
    assert found.layer_forward_s == pytest.approx(2.0 / (4 / stages))
