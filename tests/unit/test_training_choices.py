"""Optimizer, chunked loss and recomputation of some layers: what they change in memory, operations and time."""

from __future__ import annotations

from typing import Any

import pytest

import shapewright
from shapewright.core.errors import WorkloadError
from shapewright.lowering.flops import count_convention_flops, count_hardware_flops, count_model_flops
from shapewright.lowering.model import lower
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.memory.estimate import estimate_memory
from shapewright.models.flop_conventions import CONVENTIONS
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

ONE = ParallelLayout()
CONFIG = TransformerConfig(hidden_size=256, num_layers=8, num_heads=4, vocab_size=1000, intermediate_size=1024)


def moved_bytes(optimizer: str, dtype: str = "bf16") -> tuple[float, float]:
    """Bytes that the optimizer reads and writes per weight of the layers."""
    workload = Workload(micro_batch_size=1, seq_len=128, optimizer=optimizer, dtype=dtype)
    (step,) = [one for one in lower(CONFIG, workload, ONE) if one.name == "optimizer.layers"]
    assert isinstance(step, Pointwise)
    weights = 12 * 8 * 256 * 256
    return float(step.read_bytes) / weights, float(step.written_bytes) / weights


@pytest.mark.parametrize(
    ("optimizer", "dtype", "read", "written"),
    [
        ("adamw", "bf16", 4 + 4 + 8, 4 + 8 + 2),
        ("adamw", "fp32", 4 + 4 + 8, 4 + 8),
        ("adamw-8bit", "bf16", 4 + 4 + 2, 4 + 2 + 2),
        ("lion", "bf16", 4 + 4 + 4, 4 + 4 + 2),
        ("adamw-bf16", "bf16", 2 + 2 + 4, 2 + 4),
    ],
)
def test_optimizer_traffic(optimizer: str, dtype: str, read: float, written: float) -> None:
    """Gradient, master or weight, and states are read; states, master and weight written."""
    assert moved_bytes(optimizer, dtype) == (read, written)


def predict_step(**workload: Any) -> float:
    """Predicted step of Llama-3-8B on one H100. [s]"""
    fields = {"micro_batch_size": 1, "seq_len": 2048, **workload}
    return shapewright.predict("llama-3-8b", device="h100-sxm-80gb", workload=fields).step_time_s


def test_optimizer_traffic_changes_the_step_time() -> None:
    """Fewer bytes take less time; Muon's iteration takes more than AdamW, whose states it halves."""
    adamw_s = predict_step()
    assert predict_step(optimizer="lion") < adamw_s
    assert predict_step(optimizer="adamw-8bit") < predict_step(optimizer="lion")
    assert predict_step(optimizer="muon") > 2.0 * adamw_s


def test_newton_schulz_by_hand() -> None:
    """Each matrix of s x l runs 5 (4 s^2 l + 2 s^3) FLOPs: per layer q, k, v, o of 256^2 and two of 256 x 1024."""
    config = TransformerConfig(
        hidden_size=256,
        num_layers=8,
        num_heads=4,
        vocab_size=1000,
        intermediate_size=1024,
        fused_qkv=False,
    )
    workload = Workload(micro_batch_size=1, seq_len=128, optimizer="muon")
    operations = [one for one in lower(config, workload, ONE) if one.name.startswith("newton_schulz")]
    assert all(isinstance(one, Gemm) and one.pass_name == "step" for one in operations)
    square, wide = 5 * 6 * 256**3, 5 * (4 * 256**2 * 1024 + 2 * 256**3)
    flops = sum(float(one.flops) * int(one.repeats) for one in operations)
    assert flops == 8 * (4 * square + 2 * wide)


def test_newton_schulz_is_divided_among_replicas() -> None:
    """With sharded states eight replicas orthogonalize an eighth each; model FLOPs do not count it."""

    def flops(zero_stage: int) -> float:
        layout = ParallelLayout(data_parallel=8, zero_stage=zero_stage)
        step = Workload(micro_batch_size=1, seq_len=128, global_batch_size=8, optimizer="muon")
        found = [one for one in lower(CONFIG, step, layout) if one.name.startswith("newton_schulz")]
        return sum(float(one.flops) * int(one.repeats) for one in found)

    assert flops(1) == flops(0) / 8
    plain, muon = (Workload(seq_len=128, optimizer=name) for name in ("adamw", "muon"))
    assert count_model_flops(CONFIG, plain) == count_model_flops(CONFIG, muon)


def test_loss_chunks_reduce_logits_memory() -> None:
    """A loss in 8 parts keeps an eighth of the logits, does the same arithmetic, and takes no less time."""
    whole, parts = (Workload(micro_batch_size=4, seq_len=2048, loss_chunks=chunks) for chunks in (1, 8))
    config = read_model("llama-3-8b").config
    kept, cut = (estimate_memory(config, step, ONE) for step in (whole, parts))

    assert cut.logits_bytes == kept.logits_bytes / 8
    assert cut.total_bytes < kept.total_bytes
    assert count_model_flops(config, parts) == pytest.approx(count_model_flops(config, whole))
    assert predict_step(loss_chunks=8) >= predict_step()
    logits = {one.name: one for one in lower(config, parts, ONE) if one.name.startswith("logits")}
    forward, weight_gradient = logits["logits"], logits["logits.wgrad"]
    assert isinstance(forward, Gemm)
    assert isinstance(weight_gradient, Gemm)
    assert (forward.m, forward.repeats) == (4 * 2048 / 8, 8)
    assert (weight_gradient.k, weight_gradient.repeats) == (4 * 2048 / 8, 8)


def test_cost_of_recomputing_some_layers() -> None:
    """Two of eight layers: a quarter of the way in memory kept, in time and in hardware FLOPs."""

    def activations(recompute: str, layers: int | None = None) -> float:
        step = Workload(micro_batch_size=1, seq_len=512, recompute=recompute, recompute_layers=layers)
        return estimate_memory(CONFIG, step, ONE).activations_bytes

    def flops(recompute: str, layers: int | None = None, stages: int = 1) -> float:
        step = Workload(micro_batch_size=1, seq_len=512, recompute=recompute, recompute_layers=layers)
        layout = ParallelLayout(pipeline_parallel=stages)
        return count_hardware_flops(CONFIG, step, layout) / stages

    none, full, some = activations("none"), activations("full"), activations("full", 2)
    assert some == pytest.approx(none - 2 / 8 * (none - full))
    assert activations("full", 8) == activations("full", 99) == full
    assert flops("full", 2) == pytest.approx(flops("none") + 2 / 8 * (flops("full") - flops("none")))
    assert flops("full", 1, stages=2) == pytest.approx(flops("full", 2))
    step_s = [
        predict_step(recompute=mode, recompute_layers=layers)
        for mode, layers in (("none", None), ("full", 8), ("full", None))
    ]
    assert step_s == sorted(step_s)


@pytest.mark.parametrize("convention", sorted(CONVENTIONS))
def test_conventions_count_recomputed_layers(convention: str) -> None:
    """A quarter of the layers costs a quarter of what all cost, and two layers of each of two stages are four."""

    def hardware_flops(layers: int | None, mode: str = "full", num_stages: int = 1) -> float | None:
        step = Workload(seq_len=512, recompute=mode, recompute_layers=layers)
        return count_convention_flops(CONFIG, step, 8, convention, num_stages=num_stages).hardware_flops

    none, some, every = hardware_flops(None, "none"), hardware_flops(2), hardware_flops(None)
    assert (some is None) == convention.startswith("torchtitan")
    if none is not None and some is not None and every is not None:
        assert some - none == pytest.approx((every - none) / 4)
        assert hardware_flops(8) == hardware_flops(100) == pytest.approx(every)
    assert hardware_flops(2, num_stages=2) == hardware_flops(4)
    # Eight layers on five stages are 2, 2, 2, 2 and none.
    assert hardware_flops(1, num_stages=5) == hardware_flops(4)


def test_utilization_and_prediction_agree_on_recomputation() -> None:
    """MFU and HFU of a pipeline that recomputes 8 layers of each stage, measured and predicted, agree."""
    again = {"micro_batch_size": 1, "seq_len": 2048, "recompute": "full", "recompute_layers": 8}
    job: dict[str, Any] = {"device": "h100-sxm-80gb", "layout": {"pipeline_parallel": 2, "data_parallel": 4}}
    predicted = shapewright.predict("llama-3-8b", workload={**again, "global_batch_size": 64}, **job)
    explained = shapewright.mfu(
        "llama-3-8b", seconds=predicted.step_time_s, num_devices=8, global_batch_size=64, workload=again, **job
    )
    assert explained.result.hfu == pytest.approx(predicted.hfu)
    assert explained.result.mfu == pytest.approx(predicted.mfu)
    assert explained.prediction is not None


def test_with_recompute_drops_recompute_layers() -> None:
    """A search that varies recomputation, and a check that suggests one, start from some layers as from all."""
    some = Workload(recompute="full", recompute_layers=2)
    assert some.with_recompute("full") == some
    assert some.with_recompute("selective") == Workload(recompute="selective")
    assert Workload().with_recompute("full") == Workload(recompute="full")
    workload = {"micro_batch_size": 1, "seq_len": 512, "recompute": "full", "recompute_layers": 2}
    found = shapewright.search(CONFIG, device="h100-sxm-80gb", workload=workload, vary=["recompute"])
    modes = {
        (each.prediction.workload.recompute, each.prediction.workload.recompute_layers) for each in found.candidates
    }
    assert ("none", None) in modes


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"optimizer": "adamx"}, "unknown optimizer 'adamx'; did you mean"),
        ({"optimizer": "adamw-bf16", "dtype": "fp32"}, "cannot train in dtype=fp32"),
        ({"recompute_layers": 2}, "recompute_layers=2 requires recompute='full'"),
        ({"recompute": "full", "recompute_layers": 0}, "recompute_layers=0"),
        ({"loss_chunks": 0}, "loss_chunks=0"),
        ({"phase": "decode", "loss_chunks": 2}, "no effect in decode"),
    ],
)
def test_contradicting_options_are_rejected(fields: dict[str, Any], words: str) -> None:
    """Each error states the wrong value and the allowed ones."""
    with pytest.raises(WorkloadError, match=words):
        Workload(**fields)


def test_plan_uses_the_optimizer() -> None:
    """A plan's step uses its optimizer; plans do not vary partial recomputation."""
    job = {"device": "h100-sxm-80gb", "num_devices": 8, "global_batch_size": 32, "top": 2}
    lion, adamw = (shapewright.plan("llama-3-8b", optimizer=name, **job).plans[0] for name in ("lion", "adamw"))
    assert lion.prediction.workload.optimizer == "lion"
    assert lion.prediction.step_time_s < adamw.prediction.step_time_s
    with pytest.raises(WorkloadError, match="recompute_layers=2 cannot be planned"):
        shapewright.plan("llama-3-8b", workload={"recompute": "full", "recompute_layers": 2}, **job)
