"""Timeline of a pipeline step: its schedule, simulated with the predicted times of its passes.

Legend: p stages, m micro-batches, v chunks a stage, F forward pass, B backward pass to the activations, W gradients of
weights (part of B unless the schedule splits them off).

Each stage runs its passes in the order of the schedule; a pass starts when its stage is free and its inputs from other
stages are ready. Times of sends are included in the passes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shapewright.core.errors import LayoutError
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.lowering.counts import num_microbatches

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shapewright.prediction.predict import Prediction
    from shapewright.workload.layout import ParallelLayout

FORWARD, BACKWARD, WEIGHTS = "forward", "backward", "weight gradients"
SIMULATED_SCHEDULES = ("1f1b", "gpipe", "zero-bubble")
"""Schedules that are simulated; DualPipe, whose devices run two stages at once, is priced by a formula only."""


class Pass(NamedTuple):
    """One pass of one micro-batch through one chunk of layers.

    Attributes:
        stage: Pipeline stage.
        kind: FORWARD, BACKWARD or WEIGHTS.
        microbatch: Micro-batch, from 0.
        chunk: Chunk of the stage's layers, from 0.
        start_s: When it starts. [s]
        end_s: When it ends. [s]
    """

    stage: int
    kind: str
    microbatch: int
    chunk: int
    start_s: float
    end_s: float


class _Task(NamedTuple):
    kind: str
    microbatch: int
    chunk: int


@dataclass(frozen=True)
class PassTimes:
    """Times of one pass through one chunk of a middle stage, and what the first and the last stage add. [s]

    Attributes:
        forward_s: Forward pass.
        backward_s: Backward pass, without the gradients of weights where the schedule splits them off.
        weights_s: Gradients of weights, 0 if they are part of the backward pass.
        first_s: Additional time of the first stage, forward and backward.
        last_s: Additional time of the last stage, forward and backward.
    """

    forward_s: float
    backward_s: float
    weights_s: float = 0.0
    first_s: tuple[float, float] = (0.0, 0.0)
    last_s: tuple[float, float] = (0.0, 0.0)


def pass_times(prediction: Prediction) -> PassTimes:
    """Return the times of the passes of a prediction, exposed communication included."""
    layout = prediction.layout
    passes = num_microbatches(prediction.workload, layout)
    kinds = (FORWARD, BACKWARD, WEIGHTS)
    times_s = dict.fromkeys(((stage, kind) for stage in ("every", "first", "last") for kind in kinds), 0.0)
    has_weight_passes = layout.pipeline_schedule == "zero-bubble"
    for entry in prediction.operations:
        operation = entry.operation
        if operation.pass_name == "step":
            continue
        kind = FORWARD if operation.pass_name == "forward" else BACKWARD
        if has_weight_passes and operation.stage == "every" and operation.is_weight_gradient:
            kind = WEIGHTS
        times_s[operation.stage, kind] += entry.total_time_s / passes
    chunks = layout.virtual_pipeline
    return PassTimes(
        forward_s=times_s["every", FORWARD] / chunks,
        backward_s=times_s["every", BACKWARD] / chunks,
        weights_s=times_s["every", WEIGHTS] / chunks,
        first_s=(times_s["first", FORWARD], times_s["first", BACKWARD]),
        last_s=(times_s["last", FORWARD], times_s["last", BACKWARD]),
    )


def simulate_pipeline(layout: ParallelLayout, num_passes: int, times: PassTimes) -> list[Pass]:
    """Simulate one step of a pipeline.

    Args:
        num_passes: Micro-batches of a step; interleaving needs a multiple of the stages.

    Returns:
        Every pass, by stage in the order in which it runs.

    Raises:
        LayoutError: the micro-batches cannot be interleaved.

    >>> from shapewright.workload.layout import ParallelLayout
    >>> passes = simulate_pipeline(ParallelLayout(pipeline_parallel=4), 8, PassTimes(1.0, 2.0))
    >>> max(each.end_s for each in passes)  # 8 passes of 3 s, and 3 more to fill and to drain
    33.0

    Source: arXiv 1811.06965 (GPipe); 2104.04473, section 2.2 (1F1B and interleaved); 2401.10241, section 2.1 (ZB-H1).
    """
    stages = layout.pipeline_parallel
    orders = [list(_order(layout, num_passes, stage)) for stage in range(stages)]
    ends: dict[tuple[int, _Task], float] = {}
    clocks, positions = [0.0] * stages, [0] * stages
    done: list[list[Pass]] = [[] for _ in range(stages)]
    while any(position < len(order) for position, order in zip(positions, orders, strict=True)):
        has_advanced = False
        for stage in range(stages):
            while positions[stage] < len(orders[stage]):
                task = orders[stage][positions[stage]]
                ready = _ready_s(task, stage, layout, ends)
                if ready is None:
                    break
                start = max(clocks[stage], ready)
                end = start + _duration_s(task, stage, layout, times)
                ends[stage, task] = clocks[stage] = end
                done[stage].append(Pass(stage, *task, start, end))
                positions[stage] += 1
                has_advanced = True
        assert has_advanced, "in a valid schedule, every pass can start at some time"
    return [each for passes in done for each in passes]


def _order(layout: ParallelLayout, num_passes: int, stage: int) -> Iterator[_Task]:
    """Yield the passes of a stage in the order of the schedule."""
    stages = layout.pipeline_parallel
    if layout.pipeline_schedule == "gpipe":
        yield from (_Task(FORWARD, index, 0) for index in range(num_passes))
        yield from (_Task(BACKWARD, index, 0) for index in reversed(range(num_passes)))
        return
    if layout.pipeline_schedule == "zero-bubble":
        yield from _zero_bubble(stages, num_passes, stage)
        return
    chunks = layout.virtual_pipeline
    if chunks > 1 and num_passes % stages:
        raise LayoutError(
            f"{num_passes} micro-batches cannot be interleaved over pipeline_parallel={stages}: they must be a "
            f"multiple of it",
            advice=with_fields("change {global_batch_size} or {micro_batch_size}"),
        )
    total = num_passes * chunks
    warm_up = stages - 1 - stage if chunks == 1 else 2 * (stages - 1 - stage) + (chunks - 1) * stages
    warm_up = min(warm_up, total)
    forward = [_Task(FORWARD, *_microbatch_and_chunk(index, stages, chunks)) for index in range(total)]
    backward = [_backward_of(index, stages, chunks) for index in range(total)]
    yield from forward[:warm_up]
    for index in range(total - warm_up):
        yield forward[warm_up + index]
        yield backward[index]
    yield from backward[total - warm_up :]


def _zero_bubble(stages: int, num_passes: int, stage: int) -> Iterator[_Task]:
    """Yield the passes of ZB-H1: 1F1B with weight gradients delayed by one micro-batch per earlier stage."""
    warm_up = min(stages - 1 - stage, num_passes)
    yield from (_Task(FORWARD, index, 0) for index in range(warm_up))
    num_weights_done = 0
    for index in range(num_passes):
        if warm_up + index < num_passes:
            yield _Task(FORWARD, warm_up + index, 0)
        yield _Task(BACKWARD, index, 0)
        if index >= stage:
            yield _Task(WEIGHTS, num_weights_done, 0)
            num_weights_done += 1
    yield from (_Task(WEIGHTS, index, 0) for index in range(num_weights_done, num_passes))


def _microbatch_and_chunk(index: int, stages: int, chunks: int) -> tuple[int, int]:
    """Return micro-batch and chunk of the index-th forward pass: p micro-batches run each chunk before the next."""
    if chunks == 1:
        return index, 0
    group, rest = divmod(index, stages * chunks)
    chunk, within = divmod(rest, stages)
    return group * stages + within, chunk


def _backward_of(index: int, stages: int, chunks: int) -> _Task:
    microbatch, chunk = _microbatch_and_chunk(index, stages, chunks)
    return _Task(BACKWARD, microbatch, chunks - 1 - chunk)


def _ready_s(task: _Task, stage: int, layout: ParallelLayout, ends: dict[tuple[int, _Task], float]) -> float | None:
    """Return when the inputs of a pass are ready; None while that is not known. [s]"""
    last_stage, last_chunk = layout.pipeline_parallel - 1, layout.virtual_pipeline - 1
    if task.kind == WEIGHTS:
        return ends.get((stage, _Task(BACKWARD, task.microbatch, task.chunk)))
    if task.kind == FORWARD:
        if stage > 0:
            return ends.get((stage - 1, task))
        return ends.get((last_stage, task._replace(chunk=task.chunk - 1))) if task.chunk > 0 else 0.0
    if stage < last_stage:
        return ends.get((stage + 1, task))
    if task.chunk < last_chunk:
        return ends.get((0, task._replace(chunk=task.chunk + 1)))
    return ends.get((stage, _Task(FORWARD, task.microbatch, task.chunk)))


def _duration_s(task: _Task, stage: int, layout: ParallelLayout, times: PassTimes) -> float:
    if task.kind == WEIGHTS:
        return times.weights_s
    side = 0 if task.kind == FORWARD else 1
    duration_s = times.forward_s if side == 0 else times.backward_s
    if stage == 0 and task.chunk == 0:
        duration_s += times.first_s[side]
    if stage == layout.pipeline_parallel - 1 and task.chunk == layout.virtual_pipeline - 1:
        duration_s += times.last_s[side]
    return duration_s
