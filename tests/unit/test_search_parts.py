"""Parts of the search: tracing, grids, fronts, changes, bands, requests, comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from shapewright import search
from shapewright.core.errors import ConfigError
from shapewright.core.traced import Tape, evaluate, untraced
from shapewright.models.read import list_presets, read_model
from shapewright.optimize.search import memory as search_memory
from shapewright.optimize.search.findings import best_of_each_kind, pareto_front
from shapewright.optimize.search.request import SearchRequest
from shapewright.optimize.search.space.grid import AXES, Grid, split_by, sum_of
from shapewright.optimize.search.space.guard import (
    MEASURES,
    PRESET_MEASURES,
    allowed_range,
    measure_presets,
    percentile_of,
    preset_measures,
)
from shapewright.optimize.search.steps import VariedScenario
from shapewright.prediction.build import build_scenario
from shapewright.prediction.speedup import compare_times
from shapewright.workload.workload import Workload


def grid_of(**columns: list[int]) -> Grid:
    """A grid with a width on ``heads`` and one field on each of the other axes."""
    axes: dict[str, dict[str, Any]] = {
        "heads": {"hidden_size": columns.get("hidden_size", [64]), "num_heads": columns.get("num_heads", [1])},
        "ffn": {"intermediate_size": columns.get("intermediate_size", [256])},
        "depth": {"num_layers": columns.get("num_layers", [2])},
        "vocab": {"vocab_size": columns.get("vocab_size", [100])},
        "batch": {"micro_batch_size": columns.get("micro_batch_size", [1])},
    }
    arrays = {axis: {name: np.array(values) for name, values in fields.items()} for axis, fields in axes.items()}
    return Grid(arrays, frozenset({"hidden_size"}))


def test_traced_code_equals_plain_code() -> None:
    """Integer and float arithmetic, in both orders of the operands, come out as Python computes them."""

    def formula(width: Any, heads: Any) -> Any:
        return -(-width // heads) * 3 - width % heads + 2.0 * width / heads + heads**2 + 7 // heads + round(width / 7)

    tape = Tape()
    traced = formula(tape.variable("width", 100), tape.variable("heads", 8))
    pairs = [(100, 8), (101, 8), (64, 3)]
    values = {"width": np.array([pair[0] for pair in pairs]), "heads": np.array([pair[1] for pair in pairs])}

    assert untraced(traced) == formula(100, 8)
    assert evaluate(traced.node, values).tolist() == [formula(*pair) for pair in pairs]
    assert tape.guards == []


def test_chunks_of_a_fused_loss_are_traced() -> None:
    """16,384 tokens over vocabularies of 4, 8 and 9 widths are chunks of 4,096, 2,048, and 1,821 rounded up."""
    tape = Tape()
    vocab_size: Any = tape.variable("vocab_size", 16_384)
    chunks: Any = Workload(kernels="fused").count_loss_chunks(16_384, 4096, vocab_size, 1)
    assert untraced(chunks) == 4
    assert evaluate(chunks.node, {"vocab_size": np.array([16_384, 32_768, 36_864])}).tolist() == [4, 8, 8]
    assert tape.guards == []


def test_shapes_are_searched_with_fused_kernels() -> None:
    """The loss of a search's shapes has chunks by their width and vocabulary."""
    found = search("gpt3-125m", device="h100-sxm-80gb", objective="time", workload={"kernels": "fused"}, top=1)
    assert found.candidates[0].speedup.factor > 1.0


@pytest.mark.parametrize("model", ["llama-3-8b", "gemma-2-2b", "mixtral-8x7b", "t5-base"])
def test_one_formula_holds_for_many_shapes(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of 200 widths and vocabularies needs only a few traces."""
    question = build_scenario(model, device="h100-sxm-80gb", layout={"pipeline_parallel": 2})
    traced: list[Any] = []
    estimate = search_memory.estimate_memory
    monkeypatch.setattr(
        search_memory, "estimate_memory", lambda *job, **words: (traced.append(job), estimate(*job, **words))[1]
    )
    varied = VariedScenario(scenario=question, followers={})
    widths = question.config.intermediate_size + 64 * np.arange(200)
    columns = {axis: dict[str, Any]() for axis in AXES}
    columns |= {"ffn": {"intermediate_size": widths}, "vocab": {"vocab_size": 32_000 + 8 * np.arange(200)}}
    zeros, places = np.zeros(200, dtype=np.int64), np.arange(200)
    grid = Grid(columns, frozenset())
    found_bytes, _ = search_memory.ShapeMemoryEstimator(varied, grid).estimate((zeros, places, zeros, places, zeros))

    assert len(traced) <= 4
    assert len(set(found_bytes.tolist())) == 200


def test_branches_become_guards() -> None:
    """A comparison, a truth value, a range and a float() each record one guard."""
    tape = Tape()
    width = tape.variable("width", 100)

    assert min(width, 200) is width
    assert min(width, 200) is width
    assert width % 3
    assert len(range(width)) == 100
    assert float(width * 0.5) == 50.0
    assert [(guard.node.op, guard.outcome) for guard in tape.guards] == [
        ("gt", False),
        ("ne", True),
        ("variable", 100),
        ("mul", 50.0),
    ]


def test_width_dependent_operations_are_computed_per_width() -> None:
    """Entries of one width share their values; sums over the grid still give one value per shape."""
    grid = grid_of(hidden_size=[64, 64, 128], num_heads=[1, 2, 2], num_layers=[2, 3, 4])
    tape = Tape()
    width, heads, layers = (tape.variable(name, 1) for name in ("hidden_size", "num_heads", "num_layers"))

    assert grid.evaluate((width * layers).node).array.shape == (2, 1, 3, 1, 1)
    total = sum_of(grid, (layers * (width * width + heads) + 5).node)
    index = tuple(np.array(positions) for positions in ([0, 2, 1], [0, 0, 0], [0, 2, 1], [0, 0, 0], [0, 0, 0]))
    assert total.at(index).tolist() == [2 * (64 * 64 + 1) + 5, 4 * (128 * 128 + 2) + 5, 3 * (64 * 64 + 2) + 5]
    dense = np.broadcast_to(total.on_rows(np.array([1, 2])), (2, 1, 3, 1, 1))
    assert dense[:, 0, :, 0, 0].tolist() == [
        [layer * (64 * 64 + 2) + 5 for layer in (2, 3, 4)],
        [layer * (128 * 128 + 2) + 5 for layer in (2, 3, 4)],
    ]


def test_head_independent_operations_are_equal_in_all_rows() -> None:
    """A sum over depth alone has one row, shared by all entries of heads."""
    grid = grid_of(hidden_size=[64, 128], num_heads=[1, 2], num_layers=[2, 3, 4])
    total = sum_of(grid, (Tape().variable("num_layers", 1) * 3).node)

    dense = np.broadcast_to(total.on_rows(np.array([0, 1])), (2, 1, 3, 1, 1))
    assert dense[:, 0, :, 0, 0].tolist() == [[6, 9, 12], [6, 9, 12]]


def test_grids_are_cut_where_a_branch_changes() -> None:
    """The parts cover the grid, and each guard is constant on each part."""
    grid = grid_of(hidden_size=[64, 65, 66, 68], num_heads=[1, 1, 1, 1], num_layers=[2, 3])
    tape = Tape()
    node = (tape.variable("hidden_size", 64) % 2).node
    parts = list(split_by(grid, node))

    assert sorted(part.columns["heads"]["hidden_size"].tolist() for part in parts) == [[64, 66, 68], [65]]
    assert sum(part.num_shapes for part in parts) == grid.num_shapes


def table_of(rows: list[tuple[float, float, float, float]], changes: list[int] | None = None) -> dict[str, Any]:
    """A table from time per token, parameters, KV bytes and memory."""
    columns = np.array(rows, dtype=float).T
    return {
        "token_s": columns[0],
        "cost": columns[0] / columns[1],
        "quality": columns[1],
        "kv_bytes": columns[2],
        "memory_bytes": columns[3],
        "changes": np.array(changes or [0] * len(rows)),
    }


def test_front_keeps_undominated_points() -> None:
    """A row is removed if another is as good in all four respects; the best in any respect remains."""
    table = table_of(
        [
            (1.00, 1e9, 100.0, 1e10),  # fastest
            (1.10, 1e9, 100.0, 1e10),  # slower, otherwise the same
            (1.10, 1e9, 50.0, 1e10),  # slower, half the cache
            (1.20, 1.1e9, 100.0, 1e10),  # slower, more parameters
            (1.001, 1e9, 100.0, 1e10),  # as fast as anybody can tell
        ]
    )

    assert sorted(pareto_front(table)["token_s"].tolist()) == [1.0, 1.1, 1.2]


def test_front_keeps_the_cheapest_despite_rounding() -> None:
    """A row 0.4 % slower with 0.02 % more parameters falls into the next step of size and the same of time: both stay.

    Steps are half a per cent of a natural logarithm: ln 1e9 = 20.723 lies in step 4144, which ends at e^20.725,
    1.00174e9.
    """
    cheapest, larger = (1.000, 1.0017e9, 100.0, 1e10), (1.004, 1.0019e9, 100.0, 1e10)

    for rows in ([cheapest, larger], [larger, cheapest]):
        assert pareto_front(table_of(rows))["token_s"].tolist() == [1.000, 1.004]


def test_best_of_each_kind_of_change() -> None:
    """Of each kind the cheapest few stay."""
    table = table_of([(time, 1.0, 1.0, 1.0) for time in (3.0, 1.0, 2.0, 5.0, 4.0)], changes=[1, 1, 1, 4, 4])

    best = best_of_each_kind(table, 2)

    assert list(zip(best["changes"].tolist(), best["token_s"].tolist(), strict=True)) == [
        (1, 1.0),
        (1, 2.0),
        (4, 4.0),
        (4, 5.0),
    ]


def test_same_shape_has_no_uncertainty() -> None:
    """Errors that two shapes share cancel: against itself a shape is neither faster nor unsure."""
    own = build_scenario("gpt3-2.7b", "a100-sxm-40gb").predict()
    speedup = compare_times(own, own)

    assert (speedup.factor, speedup.low, speedup.high, speedup.probability_faster) == (1.0, 1.0, 1.0, 0.5)


def test_small_changes_are_surer_than_their_steps() -> None:
    """A vocabulary padded alone leaves most of the step the same; its interval is far narrower than the step's."""
    own, padded = (
        build_scenario(
            "gpt3-2.7b", "a100-sxm-40gb", workload={"dtype": "fp16"}, overrides={"vocab_size": size}
        ).predict()
        for size in (50257, 50304)
    )
    speedup = compare_times(own, padded)

    assert speedup.low < speedup.factor < speedup.high
    assert speedup.high / speedup.low < 0.6 * own.step_time_high_s / own.step_time_low_s
    assert speedup.probability_faster > 0.95
    back = compare_times(padded, own)
    assert back.probability_faster == pytest.approx(1.0 - speedup.probability_faster)


def test_intervals_are_the_same_to_the_last_digit_everywhere() -> None:
    """Widths are added up in the order of the operations, whatever a process hashes them to."""
    work = """
from shapewright.prediction.build import build_scenario
from shapewright.prediction.speedup import compare_times
from shapewright.workload.workload import Workload
shapes = [{"num_heads": 32}, {"num_heads": 20}, {"num_heads": 40}, {"num_layers": 33}, {"intermediate_size": 8192}]
own, *others = (build_scenario("gpt3-2.7b", "h200-sxm-141gb", overrides=shape).predict() for shape in shapes)
print([compare_times(own, other) for other in others])
"""
    message = {
        subprocess.run(
            [sys.executable, "-c", work], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in "1234"
    }
    assert len(message) == 1


def test_guard_is_narrower_when_strict_and_holds_the_baseline() -> None:
    """The range of every measure has the baseline's value in it; strict ranges lie inside the usual ones."""
    for measure in MEASURES:
        for value in (0.3, 1.0, 4.0, 80.0, 128.0, 1000.0):
            usual, strict = (allowed_range(measure, value, guard) for guard in ("usual", "strict"))
            assert usual[0] <= strict[0] <= value <= strict[1] <= usual[1]
    assert allowed_range(MEASURES[0], 80.0, "free") == (0.0, float("inf"))


def test_usual_shapes_are_those_of_most_public_models() -> None:
    """Without a limit on reach, the range covers the stated percentiles of the presets and ends at presets."""
    for measure in MEASURES:
        known = preset_measures()[measure.name]
        middle = known[len(known) // 2]
        low, high = allowed_range(measure, middle, "usual")
        wanted = (measure.usual[1] - measure.usual[0]) / 100.0
        if low > middle / measure.reach * 1.001 and high < middle * measure.reach * 0.999:
            share = sum(low <= value <= high for value in known) / len(known)
            assert share >= wanted - 1.0 / len(known)
            assert low in known
            assert high in known
        assert allowed_range(measure, middle, "strict")[1] <= middle * measure.strict_reach * 1.001
    decoders = [read_model(name).config for name in list_presets()]
    wide = [config for config in decoders if config.stack == "decoder" and not config.is_mla]
    assert {len(values) for values in preset_measures().values()} == {len(wide)}


def test_percentiles_come_from_the_presets() -> None:
    """A head width of 128 is what most public models have, 16 what none has."""
    assert 30.0 < percentile_of("head_dim", 128.0) < 90.0
    assert percentile_of("head_dim", 16.0) == 0.0
    assert percentile_of("head_dim", 10_000.0) == 100.0
    assert len(preset_measures()["head_dim"]) > 100


def test_stored_measures_are_those_of_the_presets() -> None:
    """The file that a search reads is what scripts/write_preset_measures.py writes now."""
    assert json.loads(PRESET_MEASURES.read_text(encoding="utf-8")) == measure_presets()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vary": ("heads", "colour")}, "'colour' is not known"),
        ({"vary": ("head",)}, "did you mean 'heads'"),
        ({"vary": ("intermediate_size",)}, "did you mean 'ffn'"),
        ({"keep": {"nope": 1}}, "'nope' is not a field"),
        ({"keep": {"norm": 1}}, "has no effect"),
        ({"keep": {"heads": 16, "num_heads": 20}}, "num_heads=16 and num_heads=20"),
        ({"keep": {"heads": 0}}, "heads=0"),
        ({"num_parameters": 0}, "must be a number from 100000"),
        ({"num_parameters": 10**18}, "must be a number from 100000"),
        ({"tolerance_fraction": -0.1}, "tolerance_fraction="),
        ({"tolerance_fraction": float("nan")}, "tolerance_fraction="),
        ({"top": 0}, "top=0"),
        ({"guard": "none"}, "guard='none'"),
    ],
)
def test_requests_that_make_no_sense_are_refused(fields: dict[str, Any], words: str) -> None:
    """Each invalid request gives a one-line error."""
    with pytest.raises(ConfigError) as caught:
        SearchRequest(**fields)

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
