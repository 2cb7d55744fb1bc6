"""Utilization: published MFU and HFU, the waterfall, and notes."""

from __future__ import annotations

from math import fsum

import pytest

import shapewright
from published_gpts import PUBLISHED, gpt, measured
from shapewright.core.errors import LayoutError, WorkloadError
from shapewright.models.flop_conventions import CONVENTIONS
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.utilization.rates import LOSSES
from shapewright.workload.layout import ParallelLayout


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


@pytest.mark.parametrize("name", PUBLISHED)
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_waterfall_adds_up(name: str, recompute: str) -> None:
    """Model FLOPs at peak and all losses add up to the measured time; the first part is MFU times it."""
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


def test_faster_than_predicted_has_a_note() -> None:
    """A measurement faster than the prediction has a negative unexplained part and a note."""
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
    assert any("unexplained is negative, by more than the interval" in note for note in fast.notes)


def test_mfu_above_one_has_a_note() -> None:
    """An MFU above 1 is reported with a warning that names what to check."""
    found = shapewright.mfu("gpt2", device="a100-sxm-80gb", seconds=1e-3, num_devices=1, global_batch_size=64)
    assert found.result.mfu > 1
    assert any("exceeds the peak of the device" in note for note in found.notes)


def test_slower_than_the_interval_has_a_note() -> None:
    """A measurement slower than the interval has a note; one inside has none."""
    job: dict[str, object] = {"device": "h100-sxm-80gb", "num_devices": 8, "global_batch_size": 64}
    predicted = shapewright.mfu("llama-3-8b", seconds=10.0, **job).prediction
    assert predicted is not None
    for seconds, is_slow in ((1.01 * predicted.step_time_high_s, True), (0.99 * predicted.step_time_high_s, False)):
        notes = shapewright.mfu("llama-3-8b", seconds=seconds, **job).notes
        assert any("the prediction does not include the cause" in note for note in notes) == is_slow


@pytest.mark.parametrize("convention", sorted(CONVENTIONS))
def test_the_chosen_convention_is_the_headline(convention: str) -> None:
    """MFU, the reachable steps and the first part of the waterfall follow the chosen convention."""
    found = shapewright.mfu(
        "llama-3-8b", device="h100-sxm-80gb", seconds=5.0, num_devices=8, global_batch_size=64, convention=convention
    )
    assert found.result.name == convention
    assert found.waterfall[0].time_s == pytest.approx(found.result.mfu * 5.0)
    assert found.mfu_at(2.5) == pytest.approx(2.0 * found.result.mfu)


def test_assumed_layout_has_a_note() -> None:
    """Without degrees the waterfall assumes a layout that fits on all devices, and a note names it."""
    found = shapewright.mfu("llama-3-8b", device="h100-sxm-80gb", seconds=5.0, num_devices=8, global_batch_size=64)

    assert found.layout is not None
    assert found.prediction is not None
    assert found.layout.num_devices == 8
    assert found.prediction.memory.total_bytes <= found.device.memory_bytes
    assert any(note.startswith("assumed for the waterfall") for note in found.notes)


def test_mfu_needs_no_layout() -> None:
    """Seven devices and a batch of three have no layout: MFU is computed without a waterfall, with a note."""
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


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"seconds": 0.0}, WorkloadError, "seconds=0.0 must be a number from 1e-09"),
        ({"seconds": float("nan")}, WorkloadError, "seconds=nan must be a number from"),
        ({"seconds": 1e-310}, WorkloadError, "seconds=1e-310 must be a number from"),
        ({"num_devices": 0}, WorkloadError, "num_devices=0 must be an integer from 1 to 16777216"),
        ({"num_devices": 10**18}, WorkloadError, "must be an integer from 1 to 16777216"),
        ({"workload": {"phase": "decode"}}, WorkloadError, "phase='decode'"),
        ({"convention": "palm"}, WorkloadError, "unknown FLOP convention 'palm'"),
        ({"layout": {"tensor_parallel": 3}}, LayoutError, "num_devices=8 must be a multiple of"),
        ({"layout": {"data_parallel": 16}}, LayoutError, "the layout has 16 devices"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_impossible_measurements(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    """Invalid measurements raise an error with the given and the allowed values."""
    job = {"seconds": 1.0, "num_devices": 8, "global_batch_size": 8} | arguments
    with pytest.raises(error, match=words):
        shapewright.mfu("gpt2", device="a100-sxm-80gb", **job)
