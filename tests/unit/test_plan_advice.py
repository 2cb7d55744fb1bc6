"""Advice with plans: order of equally fast plans, their assumptions, and better requests."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

import shapewright
from command_line import run
from shapewright.core.units import format_seconds
from shapewright.optimize.plan.result import PlanResult
from shapewright.workload.layout import ParallelLayout

H100 = "h100-sxm-80gb"


def small_plan(**keywords: Any) -> PlanResult:
    """Plan Llama-3-8B on two nodes."""
    return shapewright.plan("llama-3-8b", device=H100, num_devices=16, global_batch_size=64, **keywords)


def test_equal_steps_go_to_the_least_sharding_that_leaves_room() -> None:
    """Where computation hides all communication, ZeRO 1 comes before 3, which the front has; no tight one does."""
    roomy = shapewright.plan("llama-3.2-3b", device=H100, num_devices=64, global_batch_size=512)
    best, shards_all = roomy.plans[0], {"data_parallel": 64, "zero_stage": 3}
    alike = shapewright.predict("llama-3.2-3b", device=H100, workload=best.workload, layout=shards_all)

    assert (best.layout.data_parallel, best.layout.zero_stage) == (64, 1)
    assert alike.step_time_s == pytest.approx(best.prediction.step_time_s, rel=1e-9)
    assert alike.memory.total_bytes < best.total_bytes
    assert len({round(plan.prediction.step_time_s, 9) for plan in roomy.plans}) == len(roomy.plans)
    assert any(point.choice.sharding.zero_stage == 3 for point in roomy.front)

    cramped = shapewright.plan("llama-2-7b", device="a100-sxm-40gb", num_devices=8, global_batch_size=512)

    assert cramped.plans[0].layout.zero_stage == 3
    assert not cramped.plans[0].is_tight


def test_sharded_weights_note_their_assumption() -> None:
    """A best plan of ZeRO 3 notes that it assumes overlap; other plans and named software have no such note."""
    kept = {"tensor_parallel": (1,), "pipeline_parallel": (1,), "zero_stage": (3,)}
    best = small_plan(keep=kept).plans[0]
    exposed = shapewright.predict(
        "llama-3-8b", device=H100, workload=best.workload, layout=best.layout, software="fsdp-2024"
    )
    (message,) = [note for note in small_plan(keep=kept).notes if "set software=" in note]

    assert f"PyTorch FSDP of 2024, which does not, takes {format_seconds(exposed.step_time_s)} for rank 1" in message
    assert not any("overlaps the gathers" in note for note in small_plan(keep={"zero_stage": (1,)}).notes)
    assert not any("overlaps the gathers" in note for note in small_plan(keep=kept, software="fsdp-2024").notes)


@pytest.mark.parametrize(("batch", "message"), [(100, "a batch of 96 allows 32"), (64, ""), (128, ""), (48, "")])
def test_a_batch_that_leaves_few_replicas_is_noted(batch: int, message: str) -> None:
    """100 sequences on 64 devices allow 4 replicas, and 96 nearby 32; 48 have no neighbour within a quarter."""
    notes = shapewright.plan("llama-3-8b", device=H100, num_devices=64, global_batch_size=batch).notes
    found = [note for note in notes if note.startswith("global_batch_size=")]

    assert [message in note for note in found] == ([True] if message else [])


def test_equally_fast_plans_are_labelled(capsys: pytest.CaptureFixture[str]) -> None:
    """A device without tiles has many plans that take equally long: they lose by nothing, and not by 0 ns."""
    job = ["llama-3-8b", "--device", "tpu-v5p", "--gpus", "64", "--global-batch", "512", "--seq-len", "8192"]
    code, out, _ = run(["plan", *job], capsys)

    assert code == 0
    assert "equally fast" in out
    assert re.search(r"^rank 2 \(.*\) is equally fast$", out, re.MULTILINE)
    assert "0 ns" not in out
    assert "not time" not in out


def test_gradients_sharded_under_a_pipeline_come_with_the_way_out() -> None:
    """A best plan of ZeRO 2 on stages names what Megatron-LM does instead, and the first such plan of the list."""
    job = {"device": "a100-sxm-80gb", "num_devices": 1024, "global_batch_size": 1536, "workload": {"seq_len": 2048}}
    found = shapewright.plan("gpt3-175b", **job, top=40)
    once = next(plan.rank for plan in found.plans if plan.layout.zero_stage < 2)
    (message,) = [note for note in found.notes if "reduces them in each micro-batch" in note]
    kept = shapewright.plan("gpt3-175b", **job, keep={"zero_stage": (0, 1)})

    assert (found.plans[0].layout.zero_stage, found.plans[0].layout.pipeline_parallel > 1) == (2, True)
    assert message.endswith(f"so does rank {once}")
    assert not any("reduces them in each micro-batch" in note for note in kept.notes)


@pytest.mark.parametrize(
    ("model", "device", "num_devices", "batch", "seq_len"),
    [
        ("llama-3-70b", H100, 512, 1024, 8192),
        ("qwen3-30b-a3b", H100, 64, 1024, 4096),
        ("bloom-176b", "a100-sxm-80gb", 384, 2048, 2048),
        ("llama-3-8b", "l40s", 8, 64, 4096),
    ],
)
def test_check_has_no_suggestion_for_the_best_plan(
    model: str, device: str, num_devices: int, batch: int, seq_len: int
) -> None:
    """For the best plan, check proposes no other layout, batch or schedule."""
    workload = {"seq_len": seq_len}
    best = shapewright.plan(
        model, device=device, num_devices=num_devices, global_batch_size=batch, workload=workload
    ).plans[0]
    report = shapewright.check(model, device=device, workload=best.workload, layout=best.layout)

    assert not [made.title for finding in report.findings for made in finding.suggestions if made.kind == "runtime"]


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
def test_complete_layout_can_be_kept(model: str) -> None:
    """Every field of a plan's layout, experts cut as other matrices among them, can be kept, and gives that plan."""
    job: dict[str, Any] = {"device": H100, "num_devices": 16, "global_batch_size": 64}
    best = shapewright.plan(model, **job, keep={"expert_tensor_parallel": (None,)}).plans[0]
    kept = {spec.name: (getattr(best.layout, spec.name),) for spec in fields(ParallelLayout)}
    again = shapewright.plan(model, **job, keep={**kept, "micro_batch_size": (best.workload.micro_batch_size,)}).plans[
        0
    ]

    assert best.layout.expert_tensor_parallel is None
    assert again.layout == best.layout
    assert again.prediction.step_time_s == best.prediction.step_time_s
