"""Biases and clamps of routed experts: where software runs kernels of their own for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shapewright.config import TransformerConfig, read_model
from shapewright.hardware import load_device
from shapewright.layout import ParallelLayout
from shapewright.lowering import lower
from shapewright.memory import estimate_memory
from shapewright.operations import Collective, Pointwise
from shapewright.perf.software import load_software
from shapewright.predict import predict
from shapewright.question import ask
from shapewright.workload import Workload

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


def test_kernels_of_their_own() -> None:
    """28 and 40 bytes an element of a result for the scaled bias, 8 both ways for what is clamped."""
    assert moved_bytes(APART, "moe.bias") == 28 * ROWS * H
    assert moved_bytes(APART, "moe.bias.backward", "moe.scaled_bias_gradient") == 40 * ROWS * H
    assert moved_bytes(APART, "moe.clamp") == moved_bytes(APART, "moe.clamp.backward") == 8 * ROWS * 2 * F
    (bias,) = [each for each in lower(CONFIG, APART, ParallelLayout()) if each.name == "moe.bias"]
    assert isinstance(bias, Pointwise)
    assert bias.num_kernels == 2 * E + 2


def test_fused_experts_sum_gradients_alone() -> None:
    """A fused stack reads the gradients of both products once more, for those of the biases."""
    names = {
        each.name for each in lower(CONFIG, FUSED, ParallelLayout()) if "bias" in each.name or "clamp" in each.name
    }
    assert names == {"moe.bias_gradient"}
    assert moved_bytes(FUSED, "moe.bias_gradient") == 2 * ROWS * (2 * F + H)
    assert moved_bytes(APART, "moe.bias_gradient") == 2 * ROWS * 2 * F


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_servers_have_them_in_their_kernels(phase: str) -> None:
    """Nothing is listed outside of training."""
    operations = lower(CONFIG, replace(APART, phase=phase, context_len=8), ParallelLayout())
    assert not [each.name for each in operations if "bias" in each.name or "clamp" in each.name]


def test_experts_without_biases_cost_nothing_more() -> None:
    """Either way, experts without biases and clamps run the same operations."""
    config = replace(CONFIG, expert_bias=False, expert_clamp=False)
    assert lower(config, APART, ParallelLayout()) == lower(config, FUSED, ParallelLayout())


def test_a_clamp_of_its_own_keeps_what_it_made() -> None:
    """What is clamped, two bytes an element of both halves, is kept beside what the clamp read."""
    fused, apart = (estimate_memory(CONFIG, each, ParallelLayout()) for each in (FUSED, APART))
    assert apart.activations_bytes - fused.activations_bytes == CONFIG.num_layers * ROWS * 2 * F * 2


def test_gpt_oss_has_both() -> None:
    """Its configuration file says so by its type."""
    config = read_model("gpt-oss-20b").config
    assert (config.expert_bias, config.expert_clamp) == (True, True)


def test_rows_travel_in_sixteen_bits_where_software_sends_so() -> None:
    """In fp8 a dispatched element is 1 byte and its scale, or 2 both ways."""
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


def test_software_decides_whatever_was_asked() -> None:
    """A generation of Megatron runs them apart, and its prediction says so; what was asked has no effect."""
    device, software = load_device("b200-sxm-180gb"), "nemo-moe-2025"
    config, layout = read_model("gpt-oss-20b").config, ParallelLayout(data_parallel=8, expert_parallel=8)
    prediction = predict(config, device=device, workload=Workload(), layout=layout, software=software)
    assert load_software(software).workload == {"fused_experts": False, "narrow_dispatch": False}
    assert not prediction.workload.fused_experts
    assert [entry.operation.name for entry in prediction.operations].count("moe.bias") == 1
    (remark,) = ask(config, device, workload={"fused_experts": True}, software=software).remarks
    assert remark == "fused_experts=True has no effect: software='nemo-moe-2025' decides it, fused_experts=False"


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        ("llama-3-8b", {"fused_experts": False}, "neither biases nor a clamp"),
        ("gpt-oss-20b", {"fused_experts": False, "phase": "decode", "context_len": 64}, "no effect in decode"),
        ("mixtral-8x7b", {"narrow_dispatch": False}, "no effect but on experts in fp8"),
    ],
)
def test_a_choice_without_effect_is_said(model: str, given: dict[str, Any], said: str) -> None:
    """One line says why."""
    (remark,) = ask(model, "h100-sxm-80gb", workload=given).remarks
    assert said in remark
