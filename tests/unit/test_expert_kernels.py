"""Which kernel prices served experts: fp8 checkpoints with block scales run others than was measured on Hopper."""

from __future__ import annotations

from typing import Any

import pytest

import shapewright
from shapewright.models.read import Model, load_preset, read_object
from shapewright.prediction.build import build_scenario

DECODE = {"phase": "decode", "dtype": "fp8", "micro_batch_size": 64, "context_len": 4096}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def qwen(**added: Any) -> Model:
    """Qwen3-30B-A3B, which is published in 16 bits and, apart, in fp8 blocks."""
    return read_object({**load_preset("qwen3-30b-a3b").config, **added}, where="here")


def kernel_of(model: Model | str, device: str = "h100-sxm-80gb", **given: Any) -> str:
    """The kernel that a question comes to."""
    return build_scenario(model, device, workload={**DECODE, **given}).workload.expert_kernel


def test_fp8_blocks_are_priced_as_16_bit_kernels_on_hopper() -> None:
    """A config with block scales decodes as with the option, much faster than the measured kernel, and is noted."""
    blocks, plain, requested = (
        shapewright.predict(model, device="h100-sxm-80gb", workload=workload)
        for model, workload in (
            (qwen(quantization_config=BLOCKS), DECODE),
            (qwen(), DECODE),
            (qwen(), {**DECODE, "expert_kernel": "as-16-bit"}),
        )
    )
    message = [line for line in blocks.warnings if "expert_kernel" in line]

    assert blocks.step_time_s == requested.step_time_s < 0.7 * plain.step_time_s
    assert len(message) == 1
    assert "as for DeepGEMM or triton" in message[0]
    assert "expert_kernel=measured" in message[0]


@pytest.mark.parametrize("model", ["deepseek-v3", "kimi-k2"])
def test_presets_published_in_fp8_blocks(model: str) -> None:
    """DeepSeek-V3 and Kimi K2 are checkpoints of fp8 blocks; an explicit option overrides that."""
    assert kernel_of(model) == kernel_of(model, "h200-sxm-141gb", phase="prefill") == "as-16-bit"
    assert kernel_of(model, expert_kernel="measured") == "measured"


@pytest.mark.parametrize(
    ("model", "device", "phase"),
    [
        ("deepseek-v3", "b200-sxm-180gb", "decode"),
        ("deepseek-v3", "l40s", "decode"),
        ("deepseek-v3", "h100-sxm-80gb", "train"),
        ("deepseek-v2-lite", "h100-sxm-80gb", "decode"),
        ("mixtral-8x7b", "h100-sxm-80gb", "decode"),
    ],
)
def test_everything_else_is_priced_as_measured(model: str, device: str, phase: str) -> None:
    """The default stays for good measured kernels, training, and checkpoints without block scales."""
    assert kernel_of(model, device, phase=phase) == "measured"


def test_fp8_block_plan_names_its_kernel_once() -> None:
    """serve-plan uses the default as well, also for fp8 among several formats."""
    given: dict[str, Any] = {
        "device": "h200-sxm-141gb",
        "prompt_len": 1000,
        "output_len": 200,
        "layout": {"tensor_parallel": 1},
    }
    blocks, requested = (
        shapewright.serve_plan(model, formats=["fp8"], workload=workload, **given)
        for model, workload in ((qwen(quantization_config=BLOCKS), {}), (qwen(), {"expert_kernel": "as-16-bit"}))
    )

    assert blocks.points == requested.points
    assert sum("expert_kernel=measured" in line for line in blocks.notes) == 1
