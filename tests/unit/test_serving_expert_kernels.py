"""The kernel of experts that a server has: in predictions, plans and notes."""

from __future__ import annotations

import pytest

import shapewright
from served import plan
from shapewright.prediction.build import build_scenario


def test_experts_with_server_kernels() -> None:
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
    assert any("set expert_kernel=as-16-bit" in line for line in measured.warnings)
    assert not any("set expert_kernel" in line for line in own.warnings)


def test_a_plan_takes_the_kernel_of_experts() -> None:
    """The option reaches every pass of a plan and its JSON."""
    wanted = {"formats": [], "workload": {"dtype": "fp8"}, "layout": {"tensor_parallel": 1}}
    own, measured = (
        plan("mixtral-8x7b", **wanted | {"workload": {"dtype": "fp8", "expert_kernel": kernel}})
        for kernel in ("as-16-bit", "measured")
    )

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
def test_expert_kernel_without_effect_is_noted(model: str, phase: str, words: str) -> None:
    """The option has no effect in training and on dense models, which is noted."""
    question = build_scenario(model, "h100-sxm-80gb", workload={"phase": phase, "expert_kernel": "as-16-bit"})

    assert any(words in line for line in question.notes)
