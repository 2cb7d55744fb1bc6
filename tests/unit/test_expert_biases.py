"""Biases and clamps of routed experts, fused or in separate kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shapewright.hardware.loader import load_device
from shapewright.lowering.model import lower
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.memory.estimate import estimate_memory
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.build import build_scenario
from shapewright.prediction.predict import predict
from shapewright.pricing.software import load_software
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

H, E, K, F, TOKENS = 64, 8, 2, 48, 64
CONFIG = TransformerConfig(
    hidden_size=H,
    num_heads=8,
    num_layers=3,
    vocab_size=96,
    num_experts=E,
    num_experts_per_token=K,
    moe_intermediate_size=F,
    gated_mlp=True,
    expert_bias=True,
    expert_clamp=True,
)
FUSED = Workload(micro_batch_size=2, seq_len=TOKENS // 2)
APART = replace(FUSED, fused_experts=False)
ROWS = TOKENS * K


def moved_bytes(workload: Workload, *names: str, config: TransformerConfig = CONFIG) -> float:
    """Bytes that operations of these names read and write in a layer."""
    return sum(
        each.read_bytes + each.written_bytes
        for each in lower(config, workload, ParallelLayout())
        if isinstance(each, Pointwise) and each.name in names
    )


def test_separate_bias_and_clamp_kernels() -> None:
    """28 and 40 bytes per element for the scaled bias, 8 per clamped element in each pass."""
    assert moved_bytes(APART, "moe.bias") == 28 * ROWS * H
    assert moved_bytes(APART, "moe.bias.backward", "moe.scaled_bias_gradient") == 40 * ROWS * H
    assert moved_bytes(APART, "moe.clamp") == moved_bytes(APART, "moe.clamp.backward") == 8 * ROWS * 2 * F
    clamps = [each for each in lower(CONFIG, APART, ParallelLayout()) if each.name == "moe.clamp"]
    assert [each.num_kernels for each in clamps if isinstance(each, Pointwise)] == [3]  # gate, up, concatenation
    (bias,) = [each for each in lower(CONFIG, APART, ParallelLayout()) if each.name == "moe.bias"]
    assert isinstance(bias, Pointwise)
    assert bias.num_kernels == 2 * E + 2


def test_fused_experts_only_sum_bias_gradients() -> None:
    """A fused stack reads the gradients of both GEMMs once more, to sum the bias gradients."""
    names = {
        each.name for each in lower(CONFIG, FUSED, ParallelLayout()) if "bias" in each.name or "clamp" in each.name
    }
    assert names == {"moe.bias_gradient"}
    assert moved_bytes(FUSED, "moe.bias_gradient") == 2 * ROWS * (2 * F + H)
    assert moved_bytes(APART, "moe.bias_gradient") == 2 * ROWS * 2 * F


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_inference_has_no_separate_kernels(phase: str) -> None:
    """No separate operations outside training."""
    operations = lower(CONFIG, replace(APART, phase=phase, context_len=8), ParallelLayout())
    assert not [each.name for each in operations if "bias" in each.name or "clamp" in each.name]


def test_experts_without_biases_have_no_separate_kernels() -> None:
    """Either way, experts without biases and clamps run the same operations."""
    config = replace(CONFIG, expert_bias=False, expert_clamp=False)
    assert lower(config, APART, ParallelLayout()) == lower(config, FUSED, ParallelLayout())


def test_separate_clamp_saves_its_output() -> None:
    """The clamped input, two bytes per element of both halves, is saved in addition to the clamp's input."""
    fused, apart = (estimate_memory(CONFIG, each, ParallelLayout()) for each in (FUSED, APART))
    assert apart.activations_bytes - fused.activations_bytes == CONFIG.num_layers * ROWS * 2 * F * 2


def test_gpt_oss_has_biases_and_clamps() -> None:
    """The model type of gpt-oss implies both."""
    config = read_model("gpt-oss-20b").config
    assert (config.expert_bias, config.expert_clamp) == (True, True)


def test_dispatch_in_16_bits() -> None:
    """With fp8 GEMMs a dispatched element has 1 byte and its scale, or 2 bytes in both passes."""
    layout = ParallelLayout(data_parallel=4, expert_parallel=4)
    narrow = replace(FUSED, dtype="fp8")
    for workload, width in ((narrow, 1 + 4 / 128), (replace(narrow, narrow_dispatch=False), 2.0)):
        sent = {
            (each.name, each.message_bytes)
            for each in lower(CONFIG, workload, layout)
            if isinstance(each, Collective) and each.axis == "expert"
        }
        assert sent == {
            ("moe.dispatch.alltoall", ROWS * H * width),
            ("moe.combine.alltoall", ROWS * H * 2.0),
            ("moe.combine.backward.alltoall", ROWS * H * width),
            ("moe.dispatch.backward.alltoall", ROWS * H * 2.0),
        }


def test_software_overrides_fused_experts() -> None:
    """A generation of Megatron runs the kernels separately, which its prediction notes; the option has no effect."""
    device, software = load_device("b200-sxm-180gb"), "nemo-moe-2025"
    config, layout = read_model("gpt-oss-20b").config, ParallelLayout(data_parallel=8, expert_parallel=8)
    prediction = predict(config, device=device, workload=Workload(), layout=layout, software=software)
    assert load_software(software).workload == {"fused_experts": False, "narrow_dispatch": False}
    assert not prediction.workload.fused_experts
    assert [entry.operation.name for entry in prediction.operations].count("moe.bias") == 1
    (remark,) = build_scenario(config, device, workload={"fused_experts": True}, software=software).remarks
    assert remark == "fused_experts=True has no effect: software='nemo-moe-2025' sets fused_experts=False"


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        ("llama-3-8b", {"fused_experts": False}, "neither biases nor a clamp"),
        ("gpt-oss-20b", {"fused_experts": False, "phase": "decode", "context_len": 64}, "no effect in decode"),
        ("mixtral-8x7b", {"narrow_dispatch": False}, "affects fp8 experts only"),
    ],
)
def test_option_without_effect_is_noted(model: str, given: dict[str, Any], message: str) -> None:
    """An option without effect is noted in one line."""
    (remark,) = build_scenario(model, "h100-sxm-80gb", workload=given).remarks
    assert message in remark
