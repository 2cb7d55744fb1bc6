"""Time and memory of pipeline schedules."""

from __future__ import annotations

import re

import pytest

import shapewright
from shapewright.core.errors import LayoutError, WorkloadError
from shapewright.lint.rule import get_rule
from shapewright.lowering.counts import num_microbatches
from shapewright.memory.activations import count_microbatches_in_flight
from shapewright.prediction.build import build_scenario
from shapewright.prediction.composition.stages import WEIGHT_GRADIENTS, combine_stages
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

H100 = "h100-sxm-80gb"


def bubble_share(num_microbatches: int, weight_gradients_s: float = 0.0, **layout: object) -> float:
    """Bubble over the work of a stage that needs one second for each micro-batch."""
    work_s = float(num_microbatches)
    sums = {"every": work_s, "first": 0.0, "last": 0.0, "step": 0.0, WEIGHT_GRADIENTS: weight_gradients_s}
    _, bubble_s = combine_stages(sums, num_microbatches, ParallelLayout(**layout))
    return float(bubble_s) / work_s


def test_bubbles_of_published_formulas() -> None:
    """8 stages, 64 micro-batches: 7/64 of the work with 1F1B and GPipe, a third with 3 chunks (arXiv 2104.04473)."""
    assert bubble_share(64, pipeline_parallel=8) == 0.109375
    assert bubble_share(64, pipeline_parallel=8, pipeline_schedule="gpipe") == 0.109375
    assert bubble_share(64, pipeline_parallel=8, virtual_pipeline=3) == pytest.approx(0.036458, abs=1e-6)


def test_zero_bubble_of_equal_passes() -> None:
    """With T_F = T_B = T_W, ZB-H1 waits a third as long as 1F1B; never less than nothing (arXiv 2401.10241)."""
    layout = {"pipeline_parallel": 8, "pipeline_schedule": "zero-bubble"}
    assert bubble_share(64, 64 / 3, **layout) == pytest.approx(0.109375 / 3)
    assert bubble_share(64, 60.0, **layout) == 0.0


def test_dualpipe_by_its_formula() -> None:
    """With T_F = 1, T_B = 2 and T_W = 1, (8 / 2 - 1) (3 + 2 - 3) = 6 passes' thirds, where 1F1B waits 7 passes."""
    layout = {"pipeline_parallel": 8, "pipeline_schedule": "dualpipe"}
    # 64 passes of a second: F and W are a third of it each, so 6 thirds are 2 s of 64.
    assert bubble_share(64, 64 / 3, **layout) == pytest.approx(2 / 64)


def test_dualpipe_shares_embedding_and_logits() -> None:
    """Embedding and logits are on the same devices, each for half of the micro-batches."""
    sums = {"every": 64.0, "first": 2.0, "last": 6.0, "step": 1.0, WEIGHT_GRADIENTS: 32.0}
    step_s, bubble_s = combine_stages(sums, 64, ParallelLayout(pipeline_parallel=8, pipeline_schedule="dualpipe"))
    assert (step_s, bubble_s) == (64.0 + 4.0 + 1.0, 0.0)


@pytest.mark.parametrize(
    ("layout", "ends_s"),
    [
        (ParallelLayout(), 2.0 + 3.0),
        (ParallelLayout(pipeline_parallel=4), 3.0),
        (ParallelLayout(pipeline_parallel=4, pipeline_schedule="dualpipe"), 0.5 * (2.0 + 3.0)),
    ],
)
def test_both_ends_update_their_weights_at_the_same_time(layout: ParallelLayout, ends_s: float) -> None:
    """Embedding and logits are updated on different devices; DualPipe's have both, with half of their states."""
    sums = {"every": 0.0, "first": 0.0, "last": 0.0, "step": 1.0, "step.first": 2.0, "step.last": 3.0}
    assert combine_stages({**sums, WEIGHT_GRADIENTS: 0.0}, 64, layout)[0] == 1.0 + ends_s


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_operations_of_the_busiest_stage_and_the_bubble_are_the_step(schedule: str) -> None:
    """What runs once per step on the first or the last stage alone included."""
    workload = {"micro_batch_size": 1, "global_batch_size": 64, "offload_optimizer": True}
    layout = {"pipeline_parallel": 4, "pipeline_schedule": schedule}
    found = build_scenario("gemma-2-2b", H100, workload=workload, layout=layout).predict()
    assert {one.operation.stage for one in found.operations if one.operation.pass_name == "step"} >= {"first", "last"}
    busiest_s = sum(one.total_time_s for one in found.busiest_operations)
    assert busiest_s + found.bubble_time_s == pytest.approx(found.step_time_s)


def test_dualpipe_overlaps_expert_exchange() -> None:
    """Three quarters of the exchange overlap with another micro-batch, except half of the first and the last one."""
    layout = {"pipeline_parallel": 2, "data_parallel": 8, "expert_parallel": 8}
    workload = {"micro_batch_size": 1, "global_batch_size": 64, "seq_len": 4096}
    shown, hidden = (
        build_scenario(
            "mixtral-8x7b", H100, workload=workload, layout={**layout, "pipeline_schedule": schedule}
        ).predict()
        for schedule in ("1f1b", "dualpipe")
    )
    (shown_share,), (hidden_share,) = (
        {entry.exposed_fraction for entry in found.operations if "alltoall" in entry.operation.name}
        for found in (shown, hidden)
    )
    assert (shown_share, hidden_share) == (1.0, pytest.approx(1.0 - 0.75 * 7 / 8))
    assert hidden.step_time_s < shown.step_time_s


def test_dualpipe_doubles_weights() -> None:
    """A device has a stage from each end: weights and gradients twice, optimizer states once."""
    workload = {"micro_batch_size": 1, "global_batch_size": 16}
    one, two = (
        build_scenario(
            "llama-3-8b", H100, workload=workload, layout={"pipeline_parallel": 4, "pipeline_schedule": schedule}
        )
        .predict()
        .memory
        for schedule in ("zero-bubble", "dualpipe")
    )
    assert two.weights_bytes == 2.0 * one.weights_bytes
    assert two.gradients_bytes == 2.0 * one.gradients_bytes
    assert two.optimizer_bytes == one.optimizer_bytes


@pytest.mark.parametrize(("batch", "words"), [(14, "use global_batch_size=16"), (19, "=20")])
def test_dualpipe_requires_two_micro_batches_per_stage(batch: int, words: str) -> None:
    """Fewer or an odd number are rejected with the next batch that works."""
    layout = ParallelLayout(pipeline_parallel=8, pipeline_schedule="dualpipe")
    with pytest.raises(WorkloadError, match=words):
        num_microbatches(Workload(global_batch_size=batch, micro_batch_size=1), layout)
    assert num_microbatches(Workload(micro_batch_size=1), layout) == 16


def test_predicted_zero_bubble() -> None:
    """A predicted bubble is (p - 1) (T_F + T_B - T_W): the weight gradients of a pass leave it twice."""
    layout = {"pipeline_parallel": 4}
    workload = {"micro_batch_size": 1, "global_batch_size": 16}
    plain = build_scenario("llama-3-8b", H100, workload=workload, layout=layout).predict()
    filled = build_scenario(
        "llama-3-8b", H100, workload=workload, layout={**layout, "pipeline_schedule": "zero-bubble"}
    ).predict()
    weights_s = sum(
        entry.total_time_s
        for entry in plain.operations
        if entry.operation.stage == "every" and entry.operation.is_weight_gradient
    )

    assert plain.bubble_time_s - filled.bubble_time_s == pytest.approx(3 / 16 * 2 * weights_s)
    assert plain.step_time_s - filled.step_time_s == pytest.approx(3 / 16 * 2 * weights_s)


def test_score_gradients_are_not_weight_gradients() -> None:
    """Both gradients of unfused scores are of activations, which earlier layers wait for."""
    workload = {"attention": "unfused", "dtype": "fp16"}
    names = [
        entry.operation.name
        for entry in build_scenario("gpt3-125m", "a100-sxm-80gb", workload=workload).predict().operations
        if entry.operation.is_weight_gradient
    ]

    assert "mlp.up.wgrad" in names
    assert not [name for name in names if "score" in name or "over_value" in name]


@pytest.mark.parametrize(
    ("schedule", "chunks", "expected"),
    [
        ("1f1b", 1, [8, 7, 1]),
        ("1f1b", 2, [23 / 2, 21 / 2, 9 / 2]),  # 2 (p - i - 1) + (v - 1) p + 1 chunks
        ("gpipe", 1, [64, 64, 64]),
        ("zero-bubble", 1, [8, 8, 8]),
        ("dualpipe", 1, [9, 9, 9]),
    ],
)
def test_microbatches_in_flight(schedule: str, chunks: int, expected: list[float]) -> None:
    """First, second and last of 8 stages, 64 micro-batches a step."""
    layout = ParallelLayout(pipeline_parallel=8, virtual_pipeline=chunks, pipeline_schedule=schedule)
    workload = Workload(global_batch_size=64, micro_batch_size=1)
    assert [count_microbatches_in_flight(workload, layout, stage) for stage in (0, 1, 7)] == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"pipeline_schedule": "2f2b"},
            "pipeline_schedule='2f2b' is unknown; choose one of 1f1b, gpipe, zero-bubble, dualpipe",
        ),
        ({"pipeline_schedule": "dualpipe", "pipeline_parallel": 3}, "pipeline_parallel=3 must be even; use 2 or 4"),
        ({"pipeline_schedule": "gpipe"}, "pipeline_schedule='gpipe' needs pipeline_parallel above 1"),
        (
            {"pipeline_schedule": "zero-bubble", "pipeline_parallel": 4, "virtual_pipeline": 2},
            "virtual_pipeline=2 requires pipeline_schedule='1f1b', not 'zero-bubble'",
        ),
    ],
)
def test_invalid_schedules_are_rejected(fields: dict[str, object], message: str) -> None:
    """An unknown schedule, or one that contradicts the degrees, is one line."""
    with pytest.raises(LayoutError, match=re.escape(message)):
        ParallelLayout(**fields)


def test_the_default_batch_of_dualpipe_is_that_of_two_micro_batches_per_stage() -> None:
    """2 x 4 micro-batches of 4 sequences are 32: prediction, memory, check and search agree without --global-batch.

    With 8 micro-batches, 5 of them are in flight on 4 stages.
    """
    layout = {"pipeline_parallel": 4, "pipeline_schedule": "dualpipe"}
    scenarios = [
        build_scenario("llama-3-8b", "h100-sxm-80gb", workload={"global_batch_size": batch}, layout=layout)
        for batch in (None, 32)
    ]
    default, given = (scenario.predict() for scenario in scenarios)
    (violation,) = get_rule("PL107").check(scenarios[0])
    searched = shapewright.search(
        "llama-3-8b", device="h100-sxm-80gb", workload={"phase": "train"}, layout=layout, vary=("ffn",)
    )

    assert (default.step_time_s, default.memory) == (given.step_time_s, given.memory)
    assert count_microbatches_in_flight(scenarios[0].workload, scenarios[0].layout, 0) == 5
    assert (violation.actual, violation.fixes[0].changes["global_batch_size"]) == (32, 32)
    assert searched.baseline.prediction.workload.global_batch_size == 32
