"""The schedule of a pipeline, 1F1B or GPipe: which stage works on which micro-batch when.

Every stage is drawn as slow as the busiest one, which is how a step is added up (shapewright.adding_up): m passes of
it and a bubble of (p - 1) passes. What is drawn ends where the step ends, but for the work that runs once per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.errors import LayoutError
from shapewright.lowering import num_microbatches

if TYPE_CHECKING:
    from shapewright.predict import Prediction

_Order = list[tuple[str, int]]

MOST_SLOTS = 4096
"""Passes that are drawn; longer steps are cut after as many."""

MOST_STAGES = 64
"""Stages that are drawn; of more, none could be told from the next."""


@dataclass(frozen=True)
class Slot:
    """One pass of one micro-batch through one stage.

    Attributes:
        stage: Stage, from 0.
        microbatch: Micro-batch, from 0.
        pass_name: ``forward`` or ``backward``.
        start_s: When it starts. [s]
        end_s: When it ends. [s]
    """

    stage: int
    microbatch: int
    pass_name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class PipelineSchedule:
    """A step of a pipeline in time.

    Attributes:
        slots: What runs, stage by stage in order of time.
        num_stages: Stages.
        num_microbatches: Micro-batches of one step.
        num_drawn: Micro-batches that slots hold.
        bubble_time_s: Part of the step in which the busiest stage waits. [s]
        step_time_s: The step. [s]
    """

    slots: tuple[Slot, ...]
    num_stages: int
    num_microbatches: int
    num_drawn: int
    bubble_time_s: float
    step_time_s: float


def schedule_pipeline(prediction: Prediction) -> PipelineSchedule:
    """Lay a training step's passes out in time.

    Raises:
        LayoutError: there is no pipeline, or no backward pass to schedule.

    Source: arXiv 2104.04473, figures 3 (GPipe) and 4 (1F1B).
    """
    stages = prediction.layout.pipeline_parallel
    if stages < 2 or not prediction.workload.is_training:
        raise LayoutError(
            f"there is no pipeline to draw: pipeline_parallel={stages}, phase={prediction.workload.phase}; "
            f"use --pipeline-parallel 2 or more in training"
        )
    layout = prediction.layout
    if layout.pipeline_schedule not in _ORDERS or layout.virtual_pipeline > 1:
        how = "interleaved" if layout.virtual_pipeline > 1 else layout.pipeline_schedule
        raise LayoutError(f"the {how} schedule is not drawn; its bubble is in the numbers: draw 1f1b or gpipe instead")
    if stages > MOST_STAGES:
        raise LayoutError(f"{stages} stages are too many to draw; up to {MOST_STAGES} are")
    passes = num_microbatches(prediction.workload, layout)
    sums = {"forward": 0.0, "backward": 0.0}
    for entry in prediction.busiest_operations:
        name = entry.operation.pass_name
        if name != "step":
            sums["forward" if name == "forward" else "backward"] += entry.total_time_s / passes
    drawn = min(passes, MOST_SLOTS // (2 * stages))
    return PipelineSchedule(
        slots=_run(_ORDERS[layout.pipeline_schedule](stages, drawn), sums["forward"], sums["backward"]),
        num_stages=stages,
        num_microbatches=passes,
        num_drawn=drawn,
        bubble_time_s=prediction.bubble_time_s,
        step_time_s=prediction.step_time_s,
    )


def _one_forward_one_backward(stages: int, passes: int) -> list[_Order]:
    """Each stage runs as many forward passes as there are stages after it, then alternates."""
    orders: list[_Order] = []
    for stage in range(stages):
        warm = min(stages - 1 - stage, passes)
        order = [("forward", index) for index in range(warm)]
        for index in range(passes - warm):
            order += [("forward", warm + index), ("backward", index)]
        order += [("backward", index) for index in range(passes - warm, passes)]
        orders.append(order)
    return orders


def _all_forward_then_backward(stages: int, passes: int) -> list[_Order]:
    """GPipe: no stage starts backward before all its forward passes are done."""
    order = [(name, index) for name in ("forward", "backward") for index in range(passes)]
    return [order] * stages


_ORDERS = {"1f1b": _one_forward_one_backward, "gpipe": _all_forward_then_backward}


def _run(orders: list[_Order], forward_s: float, backward_s: float) -> tuple[Slot, ...]:
    """Let every stage work through its order, each pass as soon as what it needs is there."""
    stages = len(orders)
    ends: dict[tuple[str, int, int], float] = {}
    clocks, nexts, slots = [0.0] * stages, [0] * stages, []
    progress = True
    while progress:
        progress = False
        for stage, order in enumerate(orders):
            while nexts[stage] < len(order):
                name, index = order[nexts[stage]]
                needed = _needed(name, index, stage, stages)
                if needed is not None and needed not in ends:
                    break
                start_s = max(clocks[stage], ends[needed] if needed is not None else 0.0)
                end_s = start_s + (forward_s if name == "forward" else backward_s)
                slots.append(Slot(stage, index, name, start_s, end_s))
                ends[name, index, stage] = clocks[stage] = end_s
                nexts[stage] += 1
                progress = True
    return tuple(sorted(slots, key=lambda slot: (slot.stage, slot.start_s)))


def _needed(name: str, index: int, stage: int, stages: int) -> tuple[str, int, int] | None:
    """The pass that must have ended before this one can start."""
    if name == "forward":
        return None if stage == 0 else ("forward", index, stage - 1)
    return ("forward", index, stage) if stage == stages - 1 else ("backward", index, stage + 1)
