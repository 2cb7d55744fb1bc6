"""Options without effect on a model are noted in one line, in predictions and plans."""

from __future__ import annotations

from typing import Any

import pytest

import shapewright
from shapewright.optimize.plan.result import PlanResult
from shapewright.prediction.build import build_scenario

DEVICE = "h100-sxm-80gb"
CUT = "expert_tensor_parallel=1 has no effect in a model without experts"
KERNEL = "expert_kernel=as-16-bit has no effect on experts in 16 bits or more"


def plan(model: str = "llama-3-8b", **given: Any) -> PlanResult:
    """A small job."""
    return shapewright.plan(model, device=DEVICE, num_devices=8, global_batch_size=64, top=3, **given)


@pytest.mark.parametrize(
    ("model", "workload", "is_said"),
    [
        ("mixtral-8x7b", {}, True),
        ("mixtral-8x7b", {"dtype": "bf16"}, True),
        ("mixtral-8x7b", {"dtype": "fp8"}, False),
        ("deepseek-v3", {"dtype": "fp8"}, False),
    ],
)
def test_a_kernel_of_experts_in_16_bits(model: str, workload: dict[str, str], is_said: bool) -> None:
    """In 16 bits there is one expert kernel: an explicit option is noted, the default of block checkpoints is not."""
    given = {"phase": "decode", **workload}
    requested = build_scenario(model, DEVICE, workload={**given, "expert_kernel": "as-16-bit"})
    assert (KERNEL in requested.notes) == is_said
    assert KERNEL not in build_scenario(model, DEVICE, workload=given).notes


@pytest.mark.parametrize(("model", "layout", "is_said"), [
    ("llama-3-8b", {"expert_tensor_parallel": 1}, True),
    ("llama-3-8b", {}, False),
    ("mixtral-8x7b", {"expert_tensor_parallel": 1}, False),
])  # fmt: skip
def test_experts_that_are_not_there_are_not_cut(model: str, layout: dict[str, int], is_said: bool) -> None:
    """A dense model ignores the option and notes that."""
    assert (CUT in build_scenario(model, DEVICE, layout=layout).notes) == is_said


def test_a_plan_of_a_dense_model_does_not_hang_on_the_cut_of_experts() -> None:
    """The same plans, with a line more; before, tensor degrees above 1 were left out."""
    free, stated = plan(), plan(layout={"expert_tensor_parallel": 1})
    assert [each.layout for each in stated.plans] == [each.layout for each in free.plans]
    assert stated.tally == free.tally
    assert CUT in stated.notes
    assert CUT not in free.notes


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        ("llama-3-8b", {}, "moe has no effect in a model without experts"),
        ("llama-3-8b", {"recompute": "full"}, "affects selective recomputation only"),
        ("qwen1.5-moe-a2.7b", {}, None),
    ],
)
def test_parts_that_a_plan_computes_again(model: str, given: dict[str, str], message: str | None) -> None:
    """A plan tries selective recomputation itself; only modules that the model lacks are noted."""
    found = plan(model, workload={"recompute_modules": "moe_act", "seq_len": 2048, **given})
    lines = [line for line in found.notes if line.startswith("recompute_modules=")]
    assert [message in line for line in lines] == ([True] if message else [])
