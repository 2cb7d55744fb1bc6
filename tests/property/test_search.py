"""The search in arrays against predictions one by one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapewright.core.errors import ShapewrightError
from shapewright.hardware.loader import load_device
from shapewright.optimize.search import steps
from shapewright.optimize.search.memory import ShapeMemoryEstimator, kv_bytes_per_token
from shapewright.optimize.search.objective import Goal
from shapewright.optimize.search.request import SearchRequest
from shapewright.optimize.search.search import search_shapes
from shapewright.optimize.search.space.grid import Grid
from shapewright.optimize.search.steps import Lowered, Refused, StepTimes, VariedScenario, lower_grid
from shapewright.prediction.build import build_scenario
from shapewright.prediction.loss.effect import estimate_loss_effect, scale_to_baseline
from shapewright.prediction.loss.law import load_loss_law
from shapewright.prediction.loss.terms import ShapeForLoss
from shapewright.prediction.predict import Prediction
from shapewright.prediction.scenario import Scenario
from shapewright.pricing.software import Software, load_software, software_names

MODELS = ("gpt3-125m", "qwen2.5-0.5b", "gemma-2-2b", "mixtral-8x7b", "bert-base")
LAYOUTS = (
    {},
    {"tensor_parallel": 2},
    {"tensor_parallel": 2, "pipeline_parallel": 2, "data_parallel": 2, "zero_stage": 1},
    {"data_parallel": 4, "zero_stage": 3},
    {"pipeline_parallel": 4, "virtual_pipeline": 2, "context_parallel": 2},
    {"pipeline_parallel": 2, "pipeline_schedule": "zero-bubble"},
    {"pipeline_parallel": 2, "pipeline_schedule": "dualpipe"},
)
WORKLOADS = (
    {"phase": "train", "attention": "unfused", "dtype": "fp16"},
    {"phase": "train", "recompute": "full", "global_batch_size": 32},
    {"phase": "train", "offload_activations": True, "offload_optimizer": True},
    {"phase": "train", "kernels": "fused"},
    {"phase": "train", "kernels": "torch", "loss_chunks": 3, "dtype": "fp8"},
    {"phase": "train", "finetune": "qlora", "optimizer": "muon"},
    {"phase": "train", "finetune": "dora", "lora_targets": "attention", "packed": "256,128", "recompute": "full"},
    {"phase": "train", "finetune": "last-layers", "last_layers": 1},
    {"phase": "prefill", "seq_len": 1024},
    {"phase": "decode", "context_len": 500},
)
FOLLOWERS = {"v_head_dim": "head_dim", "embedding_size": "hidden_size"}


def columns(draw: st.DrawFn, is_moe: bool) -> dict[str, dict[str, Any]]:
    """A small grid: sound heads, and any values of the rest, odd ones too."""
    heads = draw(
        st.lists(
            st.tuples(
                st.sampled_from((512, 768, 1000, 1024)),
                st.sampled_from((1, 2, 4)),
                st.sampled_from((1, 2, 4)),
                st.sampled_from((40, 64, 80, 128)),
            ),
            min_size=1,
            max_size=3,
            unique=True,
        )
    )
    sizes = st.lists(st.integers(64, 4096), min_size=1, max_size=2, unique=True)
    return {
        "heads": {
            "hidden_size": [width for width, _, _, _ in heads],
            "num_heads": [kv_heads * group for _, kv_heads, group, _ in heads],
            "num_kv_heads": [kv_heads for _, kv_heads, _, _ in heads],
            "head_dim": [head_dim for _, _, _, head_dim in heads],
        },
        "ffn": {"moe_intermediate_size" if is_moe else "intermediate_size": draw(sizes)},
        "depth": {"num_layers": draw(st.lists(st.integers(1, 12), min_size=1, max_size=2, unique=True))},
        "vocab": {"vocab_size": draw(st.lists(st.integers(100, 60_000), min_size=1, max_size=2, unique=True))},
        "batch": {
            "micro_batch_size": draw(st.lists(st.sampled_from((1, 2, 3, 8)), min_size=1, max_size=2, unique=True))
        },
    }


@st.composite
def problems(draw: st.DrawFn) -> tuple[Grid, VariedScenario]:
    """A grid around some model, with a device, a workload and a layout."""
    name = draw(st.sampled_from(MODELS))
    workload = draw(st.sampled_from(WORKLOADS))
    if name == "bert-base" and workload["phase"] != "train":  # no decoder, and a table of 512 positions
        workload = WORKLOADS[0]
    layout = draw(st.sampled_from(LAYOUTS))
    question = build_scenario(
        name, draw(st.sampled_from(("a100-sxm-80gb", "h100-sxm-80gb"))), workload=workload, layout=layout
    )
    arrays = {
        axis: {field: np.array(values, dtype=np.int64) for field, values in fields.items()}
        for axis, fields in columns(draw, question.config.is_moe).items()
    }
    is_training = question.workload.is_training
    software = load_software(draw(st.sampled_from(software_names()))) if is_training else Software()
    varied = VariedScenario(
        scenario=question.replace(software=software),
        followers=FOLLOWERS,
    )
    return Grid(arrays, frozenset({"hidden_size"})), varied


def every_index(grid: Grid) -> tuple[np.ndarray[Any, Any], ...]:
    """Positions of all shapes of a grid."""
    return tuple(positions.reshape(-1) for positions in np.indices(grid.lengths))


@settings(max_examples=40, deadline=None)
@given(problems(), st.booleans())
def test_arrays_equal_predictions_one_by_one(problem: tuple[Grid, VariedScenario], is_large: bool) -> None:
    """Step time, tokens, memory and KV bytes of every shape are those of predict; shapes it refuses are refused.

    Where a grid is large, some operations are priced for the shapes that are looked at alone: both ways are tried.
    """
    with pytest.MonkeyPatch.context() as patch:
        if is_large:
            patch.setattr(steps, "MOST_CELLS", 0)
        compare_one_by_one(*problem)


def compare_one_by_one(grid: Grid, varied: VariedScenario) -> None:
    """Look at every shape of a grid, and predict each by itself."""
    num_lowered = num_refused = 0
    for part in lower_grid(grid, varied):
        if isinstance(part, Refused):
            num_refused += part.num_shapes
            continue
        assert isinstance(part, Lowered)
        index = every_index(part.grid)
        times, shapes = StepTimes(part, varied), part.grid.fields_at(index)
        memory_bytes, kv_bytes = ShapeMemoryEstimator(varied, part.grid).estimate(index)
        steps_s = times.step_s(index)
        tokens = np.broadcast_to(times.num_tokens(index), steps_s.shape)
        for row in range(len(steps_s)):
            shape = varied.at({name: int(column[row]) for name, column in shapes.items()})
            one = shape.predict()
            assert steps_s[row] == pytest.approx(one.step_time_s, rel=1e-9)
            assert tokens[row] == one.tokens_per_step
            assert memory_bytes[row] == pytest.approx(one.memory.total_bytes, rel=1e-9)
            assert kv_bytes[row] == kv_bytes_per_token(shape.config, shape.workload)
        num_lowered += part.grid.num_shapes
    possible = sum(can_run(varied, shape) for shape in every_shape(grid))
    assert (num_lowered, num_refused) == (possible, grid.num_shapes - possible)


def every_shape(grid: Grid) -> list[dict[str, int]]:
    """Fields of every shape of a grid."""
    shapes = grid.fields_at(every_index(grid))
    return [{name: int(column[row]) for name, column in shapes.items()} for row in range(grid.num_shapes)]


def can_run(varied: VariedScenario, shape: dict[str, int]) -> bool:
    """Whether predict answers at all."""
    return varied.at(shape).is_possible


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(("gpt3-125m", "pythia-160m", "smollm2-135m")),
    st.sampled_from((0.005, 0.02, 0.2)),
    st.sampled_from((("heads", "ffn"), ("vocab", "depth", "kv_heads"), ("width", "vocab"))),
    st.sampled_from(({}, {"tensor_parallel": 2})),
    st.booleans(),
    st.sampled_from((Goal(), Goal(train_tokens=1e10), Goal(train_tokens=1e10, objective="loss-at-budget"))),
)
def test_best_equals_brute_force(
    name: str, tolerance: float, vary: tuple[str, ...], layout: dict[str, int], is_large: bool, goal: Goal
) -> None:
    """The first of the list is what trying every shape of the space by itself finds.

    Where a grid is large, shapes are ruled out by a bound before the last operations are priced: both ways are tried.
    """
    with pytest.MonkeyPatch.context() as patch:
        if is_large:
            patch.setattr(steps, "MOST_CELLS", 0)
        compare_with_brute_force(name, tolerance, vary, layout, goal)


def compare_with_brute_force(
    name: str, tolerance: float, vary: tuple[str, ...], layout: dict[str, int], goal: Goal
) -> None:
    """Search, and try every shape of the space by itself."""
    device = load_device("h100-sxm-80gb")
    try:
        question = build_scenario(name, device, layout=layout)
        baseline = question.predict()
        request = SearchRequest(vary=vary, tolerance_fraction=tolerance, goal=goal)
        result = search_shapes(
            Scenario(model=question.model, device=device, workload=question.workload, layout=question.layout), request
        )
    except ShapewrightError:
        return  # a space without shapes, or a layout that does not divide the model: said in one line
    costs = brute_force_costs(question, request, result, baseline.parameters.total)
    own = cost_of(baseline, baseline, goal)
    faster = [cost for cost, step_s in costs if cost < own * 0.998 and (goal.has_run or step_s < baseline.step_time_s)]
    if not faster:
        assert result.candidates == ()
        return
    best = min(cost_of(shape.prediction, baseline, goal) for shape in result.candidates)
    assert best == pytest.approx(min(faster), rel=1e-9)
    assert len(faster) == result.tally.faster + result.tally.too_large


def cost_of(prediction: Prediction, baseline: Prediction, goal: Goal) -> float:
    """What a search minimizes, of one shape, from the formulas of the loss law for one shape."""
    if not goal.has_run:
        return prediction.step_time_s / prediction.parameters.active
    own = baseline.config
    effect = estimate_loss_effect(own, prediction.config, train_tokens=1e10, speedup=None)
    time_s = prediction.step_time_s / effect.size_ratio
    if goal.objective is None:
        return time_s * effect.tokens_ratio
    law, shape = load_loss_law(), ShapeForLoss.of(own)
    compared = scale_to_baseline(ShapeForLoss.of(prediction.config), shape, effect.size_ratio)
    reached = law.loss_nats(compared, 1e10 * baseline.step_time_s / time_s)
    return float(np.exp(reached - law.loss_nats(shape, 1e10)))


def brute_force_costs(
    question: Scenario, request: SearchRequest, result: Any, wanted: int
) -> list[tuple[float, float]]:
    """Cost and step time of every shape inside guard and budget, predicted one at a time."""
    from shapewright.models.parameters import count_parameters
    from shapewright.optimize.search.space.guard import measure_shape
    from shapewright.optimize.search.space.space import make_space

    baseline = Scenario.of(
        result.baseline.config, result.baseline.prediction.device, question.workload, question.layout
    )
    space = make_space(baseline, request)
    axes = [range(length) for length in space.grid.lengths]
    varied = VariedScenario(scenario=baseline, followers=space.followers)
    found = []
    for position in itertools.product(*axes):
        fields = space.grid.fields_at(tuple(np.array([place]) for place in position))
        shape = varied.at({name: int(column[0]) for name, column in fields.items()})
        measures = measure_shape(shape.config)
        inside = all(
            low * (1 - 1e-9) <= measures[name] <= high * (1 + 1e-9)
            for name, (low, high) in space.ranges.items()
            if name in ("aspect", "ffn_ratio")
        )
        total = count_parameters(shape.config).total
        if not inside or abs(total - wanted) > request.tolerance_fraction * wanted:
            continue
        try:
            one = shape.predict()
        except ShapewrightError:
            continue
        found.append((cost_of(one, result.baseline.prediction, request.goal), one.step_time_s))
    return found
