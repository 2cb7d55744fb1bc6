"""Schedules of a pipeline, simulated pass by pass, against the formulas that predictions use."""

from __future__ import annotations

import itertools

import pytest

from shapewright.core.errors import LayoutError
from shapewright.memory.activations import count_microbatches_in_flight
from shapewright.optimize.plan.timeline import (
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Pass,
    PassTimes,
    pass_times,
    simulate_pipeline,
)
from shapewright.prediction.build import build_scenario
from shapewright.prediction.composition.stages import WEIGHT_GRADIENTS, combine_stages
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

SCHEDULES = [("1f1b", 1), ("1f1b", 3), ("gpipe", 1), ("zero-bubble", 1)]


def simulate(
    schedule: str, chunks: int, stages: int = 4, passes: int = 12, first_s: tuple[float, float] = (0.0, 0.0)
) -> tuple[ParallelLayout, list[Pass]]:
    """Simulate passes of 1 s forward, 2 s backward, of which 0.9 s are gradients of weights."""
    layout = ParallelLayout(pipeline_parallel=stages, virtual_pipeline=chunks, pipeline_schedule=schedule)
    weights_s = 0.9 if schedule == "zero-bubble" else 0.0
    times = PassTimes(1.0 / chunks, (2.0 - weights_s) / chunks, weights_s, first_s)
    return layout, simulate_pipeline(layout, passes, times)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_simulated_length_is_the_formula(schedule: str, chunks: int) -> None:
    """Work and bubble of combine_stages are the simulated length, to the last bit but for rounding."""
    layout, passes = simulate(schedule, chunks)
    sums = {"every": 12 * 3.0, "first": 0.0, "last": 0.0, "step": 0.0, WEIGHT_GRADIENTS: 12 * 0.9}
    step_s, _ = combine_stages(sums, 12, layout)

    assert max(each.end_s for each in passes) == pytest.approx(step_s, rel=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
@pytest.mark.parametrize(("stages", "passes"), [(2, 4), (4, 8), (4, 32)])
def test_simulated_length_with_a_slow_last_stage_is_the_formula(schedule: str, stages: int, passes: int) -> None:
    """The last stage, 1.6 s slower, sets the pace; one micro-batch also passes the additional 0.3 s of the first."""
    layout = ParallelLayout(pipeline_parallel=stages, pipeline_schedule=schedule)
    weights_s = 0.9 if schedule == "zero-bubble" else 0.0
    times = PassTimes(1.0, 2.0 - weights_s, weights_s, first_s=(0.2, 0.1), last_s=(0.6, 1.0))
    sums = {"every": 3.0, "first": 0.3, "last": 1.6, "step": 0.0, WEIGHT_GRADIENTS: 0.9}
    step_s, _ = combine_stages({name: passes * each_s for name, each_s in sums.items()}, passes, layout)

    assert max(each.end_s for each in simulate_pipeline(layout, passes, times)) == pytest.approx(step_s, rel=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
@pytest.mark.parametrize(("stages", "passes"), [(2, 1), (2, 4), (4, 2), (4, 3), (4, 4), (4, 32), (8, 5), (8, 16)])
@pytest.mark.parametrize("backward_s", [2.0, 3.0])  # without recomputation, and with all of it
@pytest.mark.parametrize("first", [0.0, 0.1, 0.4, 1.0, 3.5])
@pytest.mark.parametrize("last", [0.0, 0.3])
def test_simulated_length_with_slow_ends_is_the_formula(
    schedule: str, stages: int, passes: int, backward_s: float, first: float, last: float
) -> None:
    """A slow first stage, such as one with a vision tower, fills a part of the bubble with its own passes.

    Few micro-batches leave ZB-H1 no gradients of weights to fill the bubble with.
    """
    layout = ParallelLayout(pipeline_parallel=stages, pipeline_schedule=schedule)
    weights_s = 0.9 if schedule == "zero-bubble" else 0.0
    ends_s = [(own, backward_s * own) for own in (first, last)]
    times = PassTimes(1.0, backward_s - weights_s, weights_s, *ends_s)
    each_s = {"every": 1.0 + backward_s, "first": sum(ends_s[0]), "last": sum(ends_s[1]), WEIGHT_GRADIENTS: weights_s}
    sums = {"step": 0.0, **{name: passes * own_s for name, own_s in each_s.items()}}
    step_s, bubble_s = combine_stages(sums, passes, layout, forward_fraction=1.0 / (1.0 + backward_s))

    assert max(each.end_s for each in simulate_pipeline(layout, passes, times)) == pytest.approx(step_s, rel=1e-12)
    busiest_s = passes * (each_s["every"] + max(each_s["first"], each_s["last"]))
    assert step_s == pytest.approx(busiest_s + bubble_s, rel=1e-12)


@pytest.mark.parametrize(("stages", "chunks", "passes"), [(2, 2, 4), (4, 2, 4), (4, 3, 12), (8, 2, 32), (8, 8, 16)])
@pytest.mark.parametrize("first", [0.0, 0.02, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("last", [0.0, 0.1, 0.3, 1.0])
def test_simulated_length_of_interleaved_stages_is_the_formula(
    stages: int, chunks: int, passes: int, first: float, last: float
) -> None:
    """The last stage waits for p micro-batches of the first chunk; a first stage that is slower is near the formula."""
    layout = ParallelLayout(pipeline_parallel=stages, virtual_pipeline=chunks)
    times = PassTimes(1.0 / chunks, 2.0 / chunks, first_s=(first, 2.0 * first), last_s=(last, 2.0 * last))
    sums = {"every": 3.0, "first": 3.0 * first, "last": 3.0 * last, "step": 0.0}
    step_s, _ = combine_stages({name: passes * own_s for name, own_s in sums.items()}, passes, layout)

    near = 1e-12 if last >= first else 0.06
    assert max(each.end_s for each in simulate_pipeline(layout, passes, times)) == pytest.approx(step_s, rel=near)


def test_zero_bubble_with_few_micro_batches_by_hand() -> None:
    """One micro-batch passes 8 stages in 8 (1 + 1) s, and its last weight gradient takes 1 s; 17 s, not 10."""
    layout = ParallelLayout(pipeline_parallel=8, pipeline_schedule="zero-bubble")
    sums = {"every": 3.0, "first": 0.0, "last": 0.0, "step": 0.0, WEIGHT_GRADIENTS: 1.0}
    assert combine_stages(sums, 1, layout) == (17.0, 14.0)


@pytest.mark.parametrize(("frozen_s", "last_s"), [((0.6, 0.0), (0.0, 0.0)), ((0.9, 1.8), (0.2, 0.4))])
def test_slow_first_stages_of_other_shares_are_near_their_simulation(
    frozen_s: tuple[float, float], last_s: tuple[float, float]
) -> None:
    """A frozen tower has no backward pass; with logits on the last stage both ends are slower than the middle."""
    layout = ParallelLayout(pipeline_parallel=4)
    times = PassTimes(1.0, 2.0, first_s=frozen_s, last_s=last_s)
    sums = {"every": 3.0, "first": sum(frozen_s), "last": sum(last_s), "step": 0.0}
    step_s, _ = combine_stages({name: 16 * each_s for name, each_s in sums.items()}, 16, layout)

    assert max(each.end_s for each in simulate_pipeline(layout, 16, times)) == pytest.approx(step_s, rel=0.03)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("first_s", [(0.0, 0.0), (5.0, 9.0)])  # a slow first stage keeps the others waiting
def test_passes_hold_only_needed_fields(schedule: str, chunks: int, first_s: tuple[float, float]) -> None:
    """No stage does two things at once, forward comes from the stage before, backward from the stage behind."""
    _layout, passes = simulate(schedule, chunks, first_s=first_s)
    found = {(each.stage, each.kind, each.microbatch, each.chunk): each for each in passes}
    kinds = 3 if schedule == "zero-bubble" else 2
    assert len(found) == len(passes) == 4 * 12 * chunks * kinds
    for stage in range(4):
        own = [each for each in passes if each.stage == stage]
        assert all(before.end_s <= after.start_s for before, after in itertools.pairwise(own))
    for each in passes:
        if each.kind == FORWARD and each.stage > 0:
            assert found[each.stage - 1, FORWARD, each.microbatch, each.chunk].end_s <= each.start_s
        if each.kind == FORWARD and each.stage == 0 and each.chunk > 0:
            assert found[3, FORWARD, each.microbatch, each.chunk - 1].end_s <= each.start_s
        if each.kind == BACKWARD and each.stage == 3 and each.chunk < chunks - 1:
            assert found[0, BACKWARD, each.microbatch, each.chunk + 1].end_s <= each.start_s
        if each.kind == BACKWARD:
            assert found[each.stage, FORWARD, each.microbatch, each.chunk].end_s <= each.start_s
            if each.stage < 3:
                assert found[each.stage + 1, BACKWARD, each.microbatch, each.chunk].end_s <= each.start_s
        if each.kind == WEIGHTS:
            assert found[each.stage, BACKWARD, each.microbatch, each.chunk].end_s <= each.start_s


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_simulated_memory_is_within_the_formula(schedule: str, chunks: int, stage: int) -> None:
    """Most micro-batches that a stage holds between forward and its last use: the formula's, or fewer for ZB-H1."""
    layout, passes = simulate(schedule, chunks)
    own = [each for each in passes if each.stage == stage]
    held = most = 0
    for each in own:  # in the order in which the stage runs them
        held += each.kind == FORWARD
        most = max(most, held)
        held -= each.kind == (WEIGHTS if schedule == "zero-bubble" else BACKWARD)
    formula = count_microbatches_in_flight(Workload(global_batch_size=12, micro_batch_size=1), layout, stage)

    assert most / chunks == pytest.approx(formula)


def test_predicted_passes_make_the_predicted_step() -> None:
    """Simulated with a prediction's own times, a deep batch takes what was predicted, but for its unequal ends."""
    workload = {"micro_batch_size": 1, "global_batch_size": 64}
    for schedule in ("1f1b", "zero-bubble"):
        layout = {"pipeline_parallel": 4, "pipeline_schedule": schedule}
        prediction = build_scenario("llama-3-70b", "h100-sxm-80gb", workload=workload, layout=layout).predict()
        passes = simulate_pipeline(prediction.layout, 64, pass_times(prediction))
        step_s = sum(one.total_time_s for one in prediction.busiest_operations if one.operation.pass_name == "step")
        assert max(each.end_s for each in passes) + step_s == pytest.approx(prediction.step_time_s, rel=0.01)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("1f1b", 2), ("zero-bubble", 1)])
def test_passes_of_a_prediction_hold_all_of_its_time(schedule: str, chunks: int) -> None:
    """Each part of each micro-batch, as often as it runs, is what the prediction has, but for what runs once a step."""
    workload = {"micro_batch_size": 1, "global_batch_size": 64, "recompute": "selective"}
    layout = {"pipeline_parallel": 4, "pipeline_schedule": schedule, "virtual_pipeline": chunks}
    prediction = build_scenario("llama-3-70b", "h100-sxm-80gb", workload=workload, layout=layout).predict()
    times = pass_times(prediction)

    def total_s(stage: str, *, forward: bool | None = None) -> float:
        return sum(
            entry.total_time_s
            for entry in prediction.operations
            if entry.operation.stage == stage
            and entry.operation.pass_name != "step"
            and (forward is None or (entry.operation.pass_name == "forward") == forward)
        )

    each_pass_s = times.forward_s + times.backward_s + times.weights_s
    assert 64 * chunks * each_pass_s == pytest.approx(total_s("every"))
    assert 64 * chunks * times.forward_s == pytest.approx(total_s("every", forward=True))
    assert (times.weights_s > 0.0) == (schedule == "zero-bubble")
    for stage, own_s in (("first", times.first_s), ("last", times.last_s)):
        assert [64 * part for part in own_s] == pytest.approx([total_s(stage, forward=side) for side in (True, False)])


def test_ragged_microbatches_cannot_be_interleaved() -> None:
    """Interleaving needs micro-batches in groups of the number of stages."""
    with pytest.raises(LayoutError, match="10 micro-batches cannot be interleaved over pipeline_parallel=4"):
        simulate_pipeline(ParallelLayout(pipeline_parallel=4, virtual_pipeline=2), 10, PassTimes(1.0, 2.0))


@pytest.mark.parametrize("chunks", [1, 2])
def test_ends_of_the_model_lengthen_its_first_and_last_pass(chunks: int) -> None:
    """The embedding is in the first chunk of the first stage, the loss in the last of the last, in both directions."""
    layout = ParallelLayout(pipeline_parallel=2, virtual_pipeline=chunks)
    passes = simulate_pipeline(layout, 2, PassTimes(1.0, 2.0, first_s=(0.5, 0.25), last_s=(4.0, 8.0)))
    lengths_s = {(each.stage, each.chunk, each.kind): each.end_s - each.start_s for each in passes}
    in_the_middle = {(stage, chunk) for stage in range(2) for chunk in range(chunks)} - {(0, 0), (1, chunks - 1)}

    assert (lengths_s.pop((0, 0, FORWARD)), lengths_s.pop((0, 0, BACKWARD))) == (1.5, 2.25)
    assert (lengths_s.pop((1, chunks - 1, FORWARD)), lengths_s.pop((1, chunks - 1, BACKWARD))) == (5.0, 10.0)
    assert lengths_s == {
        (*place, kind): own_s for place in in_the_middle for kind, own_s in ((FORWARD, 1.0), (BACKWARD, 2.0))
    }
