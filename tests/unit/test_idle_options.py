"""Options that change nothing in a model are told in one line, where they are given to a prediction or to a plan."""

from __future__ import annotations

from typing import Any

import pytest

import shapewright
from shapewright.plan import PlanResult
from shapewright.question import ask

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
    """There is one kernel for them; it is said of the option alone, not of the default of checkpoints in blocks."""
    given = {"phase": "decode", **workload}
    asked = ask(model, DEVICE, workload={**given, "expert_kernel": "as-16-bit"})
    assert (KERNEL in asked.notes) == is_said
    assert KERNEL not in ask(model, DEVICE, workload=given).notes


@pytest.mark.parametrize(("model", "layout", "is_said"), [
    ("llama-3-8b", {"expert_tensor_parallel": 1}, True),
    ("llama-3-8b", {}, False),
    ("mixtral-8x7b", {"expert_tensor_parallel": 1}, False),
])  # fmt: skip
def test_experts_that_are_not_there_are_not_cut(model: str, layout: dict[str, int], is_said: bool) -> None:
    """A dense model takes the option and says so."""
    assert (CUT in ask(model, DEVICE, layout=layout).notes) == is_said


def test_a_plan_of_a_dense_model_does_not_hang_on_the_cut_of_experts() -> None:
    """The same plans, with a line more; before, tensor degrees above 1 were left out."""
    free, told = plan(), plan(layout={"expert_tensor_parallel": 1})
    assert [each.layout for each in told.plans] == [each.layout for each in free.plans]
    assert told.tally == free.tally
    assert CUT in told.notes
    assert CUT not in free.notes


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        ("llama-3-8b", {}, "moe has no effect in a model without experts"),
        ("llama-3-8b", {"recompute": "full"}, "changes selective recomputation alone"),
        ("qwen1.5-moe-a2.7b", {}, None),
    ],
)
def test_parts_that_a_plan_computes_again(model: str, given: dict[str, str], said: str | None) -> None:
    """A plan tries the selective recomputation itself; only what it would take and is not there is told."""
    found = plan(model, workload={"recompute_modules": "moe_act", "seq_len": 2048, **given})
    lines = [line for line in found.notes if line.startswith("recompute_modules=")]
    assert [said in line for line in lines] == ([True] if said else [])
