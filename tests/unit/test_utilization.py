"""Utilization: published MFU and HFU, FLOP conventions, and a waterfall whose parts add up."""

from __future__ import annotations

import json
from math import fsum

import pytest

import shapewright
from command_line import run
from shapewright.cli.console import make_console
from shapewright.config import TransformerConfig, count_parameters, read_model
from shapewright.errors import LayoutError, WorkloadError
from shapewright.layout import ParallelLayout
from shapewright.lowering.conventions import (
    CONVENTIONS,
    count_rule_of_thumb_flops,
    count_step_flops,
    estimate_training_s,
)
from shapewright.report.utilization import print_utilization, utilization_line, utilization_to_json
from shapewright.utilization import LOSSES, Utilization
from shapewright.workload import Workload

A100_FLOPS_PER_S = 312e12
SECONDS_PER_DAY = 86_400.0

# arXiv 2205.05198, tables 3 and 5, s = 2048, v = 51200. Layers, width, heads, devices, batch, tensor, pipeline and
# virtual degrees, micro-batch; seconds with full recomputation, and with sequence parallelism and the selective one.
PUBLISHED = {
    "22B": ((48, 6144, 64), 8, 4, (8, 1, 1, 4), (1.42, 1.10)),
    "175B": ((96, 12288, 96), 64, 64, (8, 8, 3, 1), (18.13, 13.75)),
    "530B": ((105, 20480, 128), 280, 280, (8, 35, 3, 1), (49.05, 37.83)),
    "1T": ((128, 25600, 160), 512, 512, (8, 64, 1, 1), (94.42, 71.49)),
}


def gpt(num_layers: int, hidden_size: int, num_heads: int, vocab_size: int = 51200) -> TransformerConfig:
    """Return a GPT with a tied embedding and an MLP of four times the width."""
    return TransformerConfig(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        vocab_size=vocab_size,
        tied_embeddings=True,
    )


def measured(name: str, recompute: str) -> Utilization:
    """What the paper measured of one model, in its layout."""
    shape, num_devices, batch, (tensor, pipeline, virtual, micro_batch), seconds = PUBLISHED[name]
    return shapewright.mfu(
        gpt(*shape),
        device="a100-sxm-80gb",
        seconds=seconds[recompute == "selective"],
        num_devices=num_devices,
        global_batch_size=batch,
        workload={"recompute": recompute, "micro_batch_size": micro_batch, "seq_len": 2048},
        layout={"tensor_parallel": tensor, "pipeline_parallel": pipeline, "virtual_pipeline": virtual},
    )


@pytest.mark.parametrize(
    ("name", "model_flops", "hardware_flops"),
    [
        ("22B", 1.143561e15, 1.202934e15),
        ("175B", 1.410915e17, 1.448914e17),
        ("530B", 1.852230e18, 1.882536e18),
        ("1T", 6.425876e18, 6.510318e18),
    ],
)
def test_flops_follow_the_paper(name: str, model_flops: float, hardware_flops: float) -> None:
    """Equations 7 and 9 of arXiv 2205.05198 by hand for its four models."""
    shape, _, batch, _, _ = PUBLISHED[name]
    flops = count_step_flops(gpt(*shape), Workload(seq_len=2048, recompute="selective"), batch, "megatron")

    assert flops.model_flops == pytest.approx(model_flops, rel=1e-6)
    assert flops.hardware_flops == pytest.approx(hardware_flops, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "mfu", "hfu", "mfu_with_full_recompute"),
    [
        ("22B", 41.65, 43.81, 32.26),
        ("175B", 51.39, 52.77, 38.97),
        ("530B", 56.05, 56.96, 43.23),
        ("1T", 56.27, 57.01, 42.60),
    ],
)
def test_published_utilization(name: str, mfu: float, hfu: float, mfu_with_full_recompute: float) -> None:
    """MFU and HFU in percent from the step times of arXiv 2205.05198, table 5.

    It prints 41.5/43.7, 51.4/52.8, 56.0/57.0 and 56.3/57.0: 22B differs since 1.10 s is rounded to 0.5 %.
    """
    selective, full = measured(name, "selective"), measured(name, "full")

    assert 100 * selective.result.mfu == pytest.approx(mfu, abs=0.01)
    assert 100 * (selective.result.hfu or 0) == pytest.approx(hfu, abs=0.01)
    assert 100 * full.result.mfu == pytest.approx(mfu_with_full_recompute, abs=0.01)


@pytest.mark.parametrize(("name", "overhead"), [("175B", 2.7), ("530B", 1.6)])
def test_selective_recompute_costs_few_flops(name: str, overhead: float) -> None:
    """Arithmetic added by selective recomputation, in percent: arXiv 2205.05198, section 5."""
    flops = measured(name, "selective").result.flops
    assert flops.hardware_flops is not None
    assert 100 * (flops.hardware_flops / flops.model_flops - 1) == pytest.approx(overhead, abs=0.05)


@pytest.mark.parametrize(
    ("num_layers", "hidden_size", "num_heads", "seconds", "tflops"),
    [
        (70, 14336, 112, 102.03, 153.68),
        (70, 14336, 112, 104.50, 150.05),
        (70, 14336, 112, 104.70, 149.77),
        (72, 14336, 112, 110.42, 146.00),
        (78, 13824, 108, 103.51, 156.92),
        (96, 12288, 96, 142.17, 111.30),
    ],
)
def test_bloom_logs(num_layers: int, hidden_size: int, num_heads: int, seconds: float, tflops: float) -> None:
    """TFLOP/s per device that BLOOM's logs print: 384 A100, batch 2048, s = 2048, v = 250880, full recomputation."""
    config = gpt(num_layers, hidden_size, num_heads, vocab_size=250880)
    flops = count_step_flops(config, Workload(seq_len=2048, recompute="full"), 2048, "megatron")

    assert flops.hardware_flops is not None
    assert flops.hardware_flops / (384 * seconds) / 1e12 == pytest.approx(tflops, abs=0.01)


def test_conventions_of_llama_3_8b() -> None:
    """FLOPs per token at s = 8192, from W counted by hand and N = 8,030,261,248."""
    config = read_model("llama-3-8b").config
    workload = Workload(seq_len=8192)
    per_token = {name: count_step_flops(config, workload, 4, name).model_flops / (4 * 8192) for name in CONVENTIONS}
    # Per layer 2 * 4096^2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 = 218,103,808; logits 128256 * 4096 = 525,336,576.
    weights = 32 * 218_103_808 + 525_336_576
    square = 12 * 32 * 4096 * 8192

    assert per_token["megatron"] == pytest.approx(6 * weights + square, rel=1e-12)
    assert per_token["megatron-causal"] == pytest.approx(6 * weights + square / 2, rel=1e-12)
    assert per_token["torchtitan"] == per_token["llm-foundry"] == 6 * 8_030_261_248 + square
    assert per_token["torchtitan"] / 1e9 == pytest.approx(61.06, abs=0.01)  # the figure torchtitan divides by
    assert per_token["6n"] == 6 * 8_030_261_248


def test_torchtitan_publishes_56_8_percent() -> None:
    """Llama-3-8B, 2904 tokens a second and A100 at s = 8192: 56.8 % of 312 TFLOP/s (torchtitan, 2024)."""
    flops = count_step_flops(read_model("llama-3-8b").config, Workload(seq_len=8192), 1, "torchtitan").model_flops
    assert 2904 * flops / 8192 / A100_FLOPS_PER_S == pytest.approx(0.568, abs=5e-4)


@pytest.mark.parametrize(("recompute", "ratio"), [("none", 1.0), ("selective", 1.0), ("full", 4 / 3)])
def test_llm_foundry_hardware_flops(recompute: str, ratio: float) -> None:
    """llm-foundry multiplies by 4/3 where activations are checkpointed."""
    flops = count_step_flops(gpt(24, 2048, 16), Workload(recompute=recompute), 8, "llm-foundry")
    assert flops.hardware_flops == pytest.approx(ratio * flops.model_flops)


def test_causal_convention_halves_the_core_whatever_runs_it() -> None:
    """72 B L s h^2 (1 + s/(12h) + v/(12hL)), and s/(6h) where the core is recomputed: half of eq. 7 and 9."""
    gpt = TransformerConfig(hidden_size=1024, num_layers=4, num_heads=8, vocab_size=51200)
    matrices, tokens = 72.0 * 4 * 1024**2, 8 * 2048
    for attention in ("flash", "unfused"):
        for recompute, core in (("none", 1 / 12), ("selective", 1 / 6)):
            step = Workload(seq_len=2048, attention=attention, recompute=recompute)
            counted = count_step_flops(gpt, step, 8, "megatron-causal")
            terms = 1.0 + 51200 / (12 * 1024 * 4)
            assert counted.model_flops == pytest.approx(matrices * tokens * (terms + 2048 / 1024 / 12))
            assert counted.hardware_flops == pytest.approx(matrices * tokens * (terms + core * 2048 / 1024))


def test_bidirectional_attention_is_not_halved() -> None:
    """An encoder sees the whole square, so that both Megatron conventions agree."""
    config = read_model("bert-large").config
    by_square, by_half = (
        count_step_flops(config, Workload(seq_len=512), 8, name).model_flops for name in ("megatron", "megatron-causal")
    )
    assert by_square == by_half


def test_experts_count_as_far_as_they_are_used() -> None:
    """Mixtral's rule of thumb takes the 12.9 billion parameters that a token uses, and not all 46.7."""
    config = read_model("mixtral-8x7b").config
    flops = count_step_flops(config, Workload(seq_len=4096), 2, "6n").model_flops
    assert flops == 6 * count_parameters(config).active * 2 * 4096


def test_one_liner_of_the_rule_of_thumb() -> None:
    """8 FLOPs a parameter and token: 52 B parameters, batch 1024 x 2048, 127 s, 64 devices (ml-engineering)."""
    flops = count_rule_of_thumb_flops(52e9, 1024 * 2048, recompute="full")
    assert flops / (127 * 64 * 1e12) == pytest.approx(107.334551181102, rel=1e-13)


@pytest.mark.parametrize(
    ("parameters", "tokens", "devices", "rate", "days"),
    [(175e9, 300e9, 1024, 140e12, 33.9), (1e12, 450e9, 3072, 163e12, 83.2)],
)
def test_days_of_training(parameters: float, tokens: float, devices: int, rate: float, days: float) -> None:
    """Equation 4 of arXiv 2104.04473: 34 and 84 days, as the paper rounds them."""
    duration_s = estimate_training_s(parameters, tokens, num_devices=devices, flops_per_s_per_device=rate)
    assert duration_s / SECONDS_PER_DAY == pytest.approx(days, abs=0.05)


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_waterfall_adds_up(name: str, recompute: str) -> None:
    """Arithmetic at peak and all losses are the measured time; the first part is MFU times it."""
    found = measured(name, recompute)
    parts = {part.name: part.time_s for part in found.waterfall}

    assert list(parts) == ["model_flops", *LOSSES]
    assert fsum(parts.values()) == pytest.approx(found.seconds, rel=1e-12)
    assert parts["model_flops"] == pytest.approx(found.result.mfu * found.seconds, rel=1e-12)
    assert found.prediction is not None
    assert parts["unexplained"] == pytest.approx(found.seconds - found.prediction.step_time_s)
    assert parts["bubble"] == found.prediction.bubble_time_s
    assert all(parts[loss] >= 0 for loss in ("alignment", "tiles", "waves", "memory_bound", "communication"))
    assert parts["recompute"] > 0


def explain(config: TransformerConfig, seconds: float = 10.0, **workload: object) -> dict[str, float]:
    """Waterfall of one model on one A100, in seconds by part."""
    found = shapewright.mfu(
        config, device="a100-sxm-80gb", seconds=seconds, num_devices=1, global_batch_size=4, workload=workload
    )
    return {part.name: part.time_s for part in found.waterfall}


def test_odd_width_is_an_alignment_loss() -> None:
    """One column more than a multiple of 64 makes alignment the largest loss of quantization; 2048 loses none."""
    even = explain(TransformerConfig(hidden_size=2048, num_layers=8, num_heads=16, vocab_size=50304))
    odd = explain(TransformerConfig(hidden_size=2049, head_dim=128, num_layers=8, num_heads=16, vocab_size=50304))

    assert even["alignment"] == pytest.approx(0.0, abs=1e-6)
    assert odd["alignment"] > max(odd["tiles"], odd["waves"])


def test_recompute_is_its_own_loss() -> None:
    """Full recomputation adds about a forward pass, a third of the arithmetic, and changes no other loss."""
    config = TransformerConfig(hidden_size=2048, num_layers=8, num_heads=16, vocab_size=50304)
    without, with_it = (explain(config, recompute=mode) for mode in ("none", "full"))

    assert without["recompute"] == 0.0
    assert with_it["recompute"] > 0.25 * with_it["model_flops"]
    same = set(LOSSES) - {"recompute", "unexplained"}
    assert {name: with_it[name] for name in same} == {name: without[name] for name in same}


def test_faster_than_predicted_is_said() -> None:
    """A measurement faster than the prediction leaves a negative rest, with a note, and never a hidden one."""
    slow = measured("175B", "selective")
    assert slow.prediction is not None
    shape, num_devices, batch, (tensor, pipeline, virtual, micro_batch), _ = PUBLISHED["175B"]
    fast = shapewright.mfu(
        gpt(*shape),
        device="a100-sxm-80gb",
        seconds=0.5 * slow.prediction.step_time_s,
        num_devices=num_devices,
        global_batch_size=batch,
        workload={"recompute": "selective", "micro_batch_size": micro_batch},
        layout={"tensor_parallel": tensor, "pipeline_parallel": pipeline, "virtual_pipeline": virtual},
    )
    assert fast.waterfall[-1].time_s < 0
    assert any("unexplained is negative, and by more than the interval allows" in note for note in fast.notes)


def test_more_than_the_peak_is_doubted() -> None:
    """An MFU above 1 is reported with a warning that names what to check."""
    found = shapewright.mfu("gpt2", device="a100-sxm-80gb", seconds=1e-3, num_devices=1, global_batch_size=64)
    assert found.result.mfu > 1
    assert any("more than the device can do" in note for note in found.notes)


def test_slower_than_the_interval_is_said() -> None:
    """Beyond the prediction's interval something took time that it does not know; inside nothing is said."""
    job: dict[str, object] = {"device": "h100-sxm-80gb", "num_devices": 8, "global_batch_size": 64}
    predicted = shapewright.mfu("llama-3-8b", seconds=10.0, **job).prediction
    assert predicted is not None
    for seconds, is_slow in ((1.01 * predicted.step_time_high_s, True), (0.99 * predicted.step_time_high_s, False)):
        notes = shapewright.mfu("llama-3-8b", seconds=seconds, **job).notes
        assert any("what the prediction does not know took the rest" in note for note in notes) == is_slow


@pytest.mark.parametrize("convention", sorted(CONVENTIONS))
def test_the_chosen_convention_is_the_headline(convention: str) -> None:
    """Any of them; what is reachable and the waterfall's first part are counted by it too."""
    found = shapewright.mfu(
        "llama-3-8b", device="h100-sxm-80gb", seconds=5.0, num_devices=8, global_batch_size=64, convention=convention
    )
    assert found.result.name == convention
    assert found.waterfall[0].time_s == pytest.approx(found.result.mfu * 5.0)
    assert found.mfu_at(2.5) == pytest.approx(2.0 * found.result.mfu)


def test_layout_is_assumed_and_said() -> None:
    """Without degrees the waterfall takes a layout of all devices that fits, and says which."""
    found = shapewright.mfu("llama-3-8b", device="h100-sxm-80gb", seconds=5.0, num_devices=8, global_batch_size=64)

    assert found.layout is not None
    assert found.prediction is not None
    assert found.layout.num_devices == 8
    assert found.prediction.memory.total_bytes <= found.device.memory_bytes
    assert any(note.startswith("assumed for the waterfall") for note in found.notes)


def test_no_layout_leaves_mfu_alone() -> None:
    """Seven devices and a batch of three divide nothing: MFU stays, the waterfall is left out, a note says why."""
    config = TransformerConfig(hidden_size=2048, num_layers=5, num_heads=16, vocab_size=50304)
    found = shapewright.mfu(config, device="a100-sxm-80gb", seconds=1.0, num_devices=7, global_batch_size=3)

    assert found.result.mfu > 0
    assert found.waterfall == ()
    assert found.reachable == ()
    assert any(note.startswith("no waterfall") for note in found.notes)


def test_missing_data_axis_takes_the_rest() -> None:
    """--tp 4 --pp 2 on 64 devices leaves 8 replicas."""
    found = shapewright.mfu(
        gpt(24, 4096, 32),
        device="a100-sxm-80gb",
        seconds=5.0,
        num_devices=64,
        global_batch_size=64,
        layout={"tensor_parallel": 4, "pipeline_parallel": 2},
    )
    assert found.layout == ParallelLayout(tensor_parallel=4, pipeline_parallel=2, data_parallel=8)


def test_die_and_card_name_each_other() -> None:
    """One die of an MI250X is judged by its own peak, and the card's is named beside it."""
    found = shapewright.mfu("gpt2", device="mi250x-gcd", seconds=1.0, num_devices=1, global_batch_size=8)
    assert found.peak_flops_per_s == 191.5e12
    assert found.other_peaks == {"dense bf16, per card (mi250x-card)": 383e12}


@pytest.mark.parametrize(
    ("device", "peaks"),
    [
        ("h100-sxm-80gb", {"sparse bf16 (2:4), per card": 1978.9}),
        ("b200-sxm-180gb", {"sparse bf16 (2:4), per package": 4500, "dense bf16, per die (1 of 2)": 1125}),
        ("mi250x-card", {"dense bf16, per die (mi250x-gcd)": 191.5}),
        ("mi300x", {"sparse bf16 (2:4), per package": 2614.9, "dense bf16, per die (1 of 8)": 163.425}),
        ("tpu-v5p", {}),
    ],
)
def test_every_peak_is_named(device: str, peaks: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    """The report says which peak MFU divides by, and what it would read against the others."""
    found = shapewright.mfu("llama-3-8b", device=device, seconds=9.0, num_devices=8, global_batch_size=64)
    data = utilization_to_json(found)
    print_utilization(found, make_console())
    printed = capsys.readouterr().out

    assert {name: rate / 1e12 for name, rate in found.other_peaks.items()} == pytest.approx(peaks)
    assert data["peak_kind"] == f"dense bf16, per {found.device.scope}"
    assert f"{data['peak_kind']} *" in printed
    for name, rate in found.other_peaks.items():
        assert name in printed
        assert data["other_peaks"][name]["mfu"] == pytest.approx(found.result.mfu * found.peak_flops_per_s / rate)
    sparse = next((rate * 1e12 for name, rate in peaks.items() if name.startswith("sparse")), None)
    assert data["sparse_peak_flops_per_s"] == (None if sparse is None else pytest.approx(sparse))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"seconds": 0.0}, WorkloadError, "seconds=0.0 must be from 1e-09"),
        ({"seconds": float("nan")}, WorkloadError, "seconds=nan must be from"),
        ({"seconds": 1e-310}, WorkloadError, "seconds=1e-310 must be from"),
        ({"num_devices": 0}, WorkloadError, "gpus=0 must be from 1 to 16777216"),
        ({"num_devices": 10**18}, WorkloadError, "must be from 1 to 16777216"),
        ({"workload": {"phase": "decode"}}, WorkloadError, "phase='decode'"),
        ({"convention": "palm"}, WorkloadError, "unknown FLOP convention 'palm'"),
        ({"layout": {"tensor_parallel": 3}}, LayoutError, "gpus=8 must be a multiple of"),
        ({"layout": {"data_parallel": 16}}, LayoutError, "the layout has 16 devices"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_impossible_measurements(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    """What cannot be a measurement is refused with the value and what is allowed."""
    job = {"seconds": 1.0, "num_devices": 8, "global_batch_size": 8} | arguments
    with pytest.raises(error, match=words):
        shapewright.mfu("gpt2", device="a100-sxm-80gb", **job)


def test_line_for_logs_is_parsable() -> None:
    """The one-line form is name=value pairs that say what the JSON says."""
    found = measured("175B", "selective")
    facts = dict(pair.split("=") for pair in utilization_line(found).split())
    full = utilization_to_json(found)

    assert float(facts["mfu"]) == pytest.approx(full["mfu"], abs=1e-4)
    assert float(facts["hfu"]) == pytest.approx(full["hfu"], abs=1e-4)
    assert facts["convention"] == "megatron"


FLAGS = ["--num-layers", "48", "--hidden-size", "6144", "--num-heads", "64", "--vocab-size", "51200"]
JOB = ["--device", "a100-sxm-80gb", "--seconds", "1.10", "--gpus", "8", "--global-batch", "4", "--seq-len", "2048"]


def test_command_line_takes_a_model_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """The 22 B model in flags, without a layout: MFU 41.65 %, HFU 43.81 %, and a waterfall that adds up."""
    code, out, err = run(["mfu", *FLAGS, *JOB, "--recompute", "selective", "--json"], capsys)
    facts = json.loads(out)

    assert (code, err) == (0, "")
    assert (facts["mfu"], facts["hfu"]) == (pytest.approx(0.4165, abs=1e-4), pytest.approx(0.4381, abs=1e-4))
    assert facts["model_flops_per_s_per_device"] == pytest.approx(129.95e12, rel=1e-4)
    assert fsum(part["time_s"] for part in facts["waterfall"]) == pytest.approx(1.10)
    assert facts["reachable"]["mfu_low"] < facts["reachable"]["mfu"] < facts["reachable"]["mfu_high"]


def test_command_line_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    """The report names conventions, peak, waterfall and what is reachable; --oneline is one line."""
    _, report, _ = run(["mfu", *FLAGS, *JOB, "--recompute", "selective", "--tp", "8"], capsys)
    _, line, _ = run(["mfu", *FLAGS, *JOB, "--recompute", "selective", "--tp", "8", "--oneline"], capsys)

    for words in (
        "41.7 %",
        "dense bf16, per card",
        "megatron-causal",
        "unexplained",
        "reachable: ",
        "sparse bf16 (2:4)",
    ):
        assert words in report
    assert line.startswith("mfu=0.4165 hfu=0.4381 ")
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("recompute", "words"),
    [
        ([], "bf16, no recompute"),
        (["--recompute", "full"], "bf16, full recompute\n"),
        (["--recompute", "full", "--recompute-layers", "3"], "full recompute of 3 layers a stage"),
        (["--recompute", "selective", "--recompute-modules", "mlp,layernorm"], "selective recompute of layernorm,mlp"),
    ],
)
def test_the_headline_says_what_was_computed_again(
    recompute: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Some layers are not all of them, and some parts are not the usual one."""
    _, report, _ = run(["mfu", *FLAGS, *JOB, "--tp", "8", *recompute], capsys)
    assert words in report.splitlines(keepends=True)[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seconds", "1", "--gpus", "8"], "Missing option '--global-batch'"),
        (["--seconds", "1", "--global-batch", "8"], "Missing option '--gpus'"),
        (["--seconds", "-1", "--gpus", "8", "--global-batch", "8"], "seconds=-1.0"),
        (["--seconds", "1", "--gpus", "8", "--global-batch", "0"], "global_batch_size=0"),
        (["--seconds", "1", "--gpus", "8", "--global-batch", "8", "--json", "--oneline"], "contradict"),
    ],
)
def test_bad_measurement_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    code, out, err = run(["mfu", "gpt2", "--device", "a100-sxm-80gb", *arguments], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
