"""Experiments that would decide between shapes: what they leave open, what they cost, and the runs they propose."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import run
from shapewright.hardware.loader import load_device
from shapewright.measure.proxy.runs import make_spec, read_runs
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.optimize.experiments import propose, small_models
from shapewright.optimize.experiments.propose import ENOUGH_CHANCE, ExperimentPlan, propose_experiments
from shapewright.optimize.experiments.small_models import scale_down
from shapewright.prediction.loss.law import LossLaw
from shapewright.prediction.loss.terms import COEFFICIENTS, ShapeForLoss
from shapewright.prediction.speedup import Speedup

H100 = load_device("h100-sxm-80gb")
BASE = read_model("gpt3-2.7b").config
DEEPER = {"num_layers": 40, "hidden_size": 2304, "num_heads": 18}
EVEN = Speedup(factor=1.0, low=0.98, high=1.02, probability_faster=0.5)
TOKENS = 3e11
VALUES = {
    "floor_nats": 1.7, "log_capacity_nats": 0.65, "capacity_exponent": 0.11, "log_token_nats": -1.0,
    "token_exponent": 0.5, "token_size_exponent": 0.16, "curvature": 0.1, "log_best_width_per_layer": 4.2,
}  # fmt: skip
DEVIATIONS = {"curvature": 0.1, "log_best_width_per_layer": 0.3, "best_width_growth": 0.1}
LAW = LossLaw(
    name="law of the tests",
    coefficients=dict.fromkeys(COEFFICIENTS, 0.0) | VALUES,
    covariance=np.diag([DEVIATIONS.get(name, 0.0) ** 2 for name in COEFFICIENTS]),
    scatter_nats=0.003,
    scatter_length=1.0,
    parameters_range=(1e6, 1e9),
    tokens_range=(1e9, 1e11),
)


@pytest.fixture(autouse=True)
def quiet_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds that differ little enough for small models to settle something under the law of the tests."""
    monkeypatch.setattr(propose, "SEED_NATS", 0.007)


def proposed(*changes: dict[str, Any], speedup: Speedup = EVEN, **options: Any) -> ExperimentPlan:
    """Propose experiments for changes of GPT-3 2.7B."""
    contenders = [(read_model(BASE, change).config, speedup) for change in changes]
    given = {"train_tokens": TOKENS, "full_gpu_hours": 3000.0, "device": H100, "law": LAW}
    given |= options
    return propose_experiments(BASE, contenders, **given)


def test_undecided_change_gets_pairs_of_small_models() -> None:
    """Both shapes are trained at each size, the interval shrinks, and the cost stays a small part of the training."""
    plan = proposed(DEEPER)
    (question,) = plan.questions

    names = {run.name for run in plan.experiments}
    assert names == set(question.experiments)
    assert {name.replace("shape-1", "baseline") for name in names} <= names
    assert question.net_low < 1.0 < question.net_high
    assert question.after_high / question.after_low < 0.95 * question.net_high / question.net_low
    assert 0.0 < plan.gpu_hours <= 0.05 * plan.full_gpu_hours
    for one in plan.experiments:
        assert one.num_parameters < 0.5 * float(ShapeForLoss.of(BASE).num_parameters)


def test_decided_and_free_changes_need_no_experiment() -> None:
    """A change whose interval excludes 1, and one that keeps the loss, ask no question."""
    fast = Speedup(factor=30.0, low=29.0, high=31.0, probability_faster=1.0)

    assert proposed(DEEPER, speedup=fast).questions == ()
    assert proposed({"num_heads": 20}).questions == ()
    assert proposed({"num_heads": 20}).gpu_hours == 0.0


def test_runs_at_full_size_leave_the_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the shapes themselves are trained, without noise, only the uncertainty of the step time is left."""
    size = float(ShapeForLoss.of(BASE).num_parameters)
    monkeypatch.setattr(propose, "_SIZES", (size,))
    monkeypatch.setattr(propose, "_LARGEST_SIZE_FRACTION", 1.0)
    monkeypatch.setattr(propose, "_MOST_COST_FRACTION", 100.0)
    monkeypatch.setattr(small_models, "_TOKENS_PER_PARAMETER", TOKENS / size)
    monkeypatch.setattr(propose, "SEED_NATS", 1e-6)
    (question,) = proposed(DEEPER).questions

    assert question.net_high / question.net_low > 1.2
    assert question.after_high / question.after_low == pytest.approx(EVEN.high / EVEN.low, rel=0.01)


def test_questions_share_the_runs_of_the_baseline() -> None:
    """Two questions that need the same sizes train the baseline once."""
    plan = proposed(DEEPER, {"num_layers": 24, "hidden_size": 2944, "num_heads": 23})
    names = [run.name for run in plan.experiments]

    assert len(plan.questions) == 2
    assert len(names) == len(set(names)) < sum(len(question.experiments) for question in plan.questions)
    assert plan.gpu_hours == pytest.approx(sum(run.gpu_hours for run in plan.experiments))


def test_larger_budgets_decide_more() -> None:
    """A larger budget never lowers the chance to decide, and undecided changes are reported."""
    poor, rich = (proposed(DEEPER, full_gpu_hours=hours) for hours in (1.0, 1e6))

    assert poor.questions[0].chance_settled <= rich.questions[0].chance_settled
    assert rich.gpu_hours > poor.gpu_hours
    if poor.questions[0].chance_settled < ENOUGH_CHANCE:
        assert any("stay open" in note for note in poor.notes)


def test_runs_that_narrow_most_are_named_where_none_settles() -> None:
    """Where scatter hides what small models say, none is proposed; the best for a hundredth of the cost is named."""
    hopeless = replace(LAW, scatter_nats=0.05, scatter_length=0.1)
    (question,) = proposed(DEEPER, law=hopeless).questions

    assert question.experiments == ()
    assert question.narrowing
    assert 0.0 < question.narrowing_gpu_hours <= 30.0
    assert question.net_low < question.after_low < question.after_high < question.net_high
    assert proposed(DEEPER).questions[0].narrowing == ()


def test_experts_are_not_proposed() -> None:
    """The proxy trainer has no experts: none are proposed, for that reason."""
    base = read_model("mixtral-8x7b").config
    plan = propose_experiments(
        base,
        [(replace(base, num_layers=28, name=""), EVEN)],
        train_tokens=TOKENS,
        full_gpu_hours=1e5,
        device=H100,
        law=LAW,
    )

    assert plan.experiments == ()
    assert plan.why_none.startswith("experts")


@pytest.mark.parametrize("name", ["gpt3-2.7b", "llama-3-8b", "gemma-2b", "qwen3-0.6b", "pythia-1.4b"])
@pytest.mark.parametrize("scale", [1 / 8, 1 / 100])
def test_small_models_keep_proportions_and_size(name: str, scale: float) -> None:
    """Size is met within 10 %, width per layer and heads stay as they were, and 'proxy' reads back the same model."""
    config = read_model(name).config
    wanted = scale * float(ShapeForLoss.of(config).num_parameters)
    small = scale_down(config, scale, 0.0)

    assert float(ShapeForLoss.of(small).num_parameters) == pytest.approx(wanted, rel=0.1)
    assert small.head_dim == config.head_dim
    assert small.num_heads % small.num_kv_heads == 0
    assert small.hidden_size / small.num_layers == pytest.approx(config.hidden_size / config.num_layers, rel=0.6)


def test_proposed_runs_are_read_by_proxy() -> None:
    """The columns of a proposed run make the same model, tokens and batch."""
    for one in proposed(DEEPER).experiments:
        spec = make_spec(one.run_columns())

        assert ShapeForLoss.of(spec.config) == ShapeForLoss.of(one.config)
        assert isinstance(spec.config, TransformerConfig)
        assert spec.train_tokens == pytest.approx(one.train_tokens, rel=0.01)
        assert spec.recipe.batch_tokens == one.batch_tokens


def test_search_writes_runs_that_proxy_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--experiments writes a file of runs, prints what they would settle, and is refused outside training."""
    path = tmp_path / "runs.csv"
    arguments = ["search", "gpt2", "--device", "a100-sxm-80gb", "--vary", "depth,width", "--experiments", str(path)]
    code, out, err = run([*arguments, "--train-tokens", "30b", "--json"], capsys)
    found = json.loads(out)["experiments"]

    why_none = found["why_none"]
    assert bool(why_none) != bool(found["experiments"])
    words = f"note: {path} is not written, as no run is proposed: {why_none}" if why_none else f"wrote {path}"
    assert (code, err) == (0, f"{words}\n")
    assert found["file"] == ("" if why_none else str(path))
    assert path.exists() != bool(why_none)
    written = [] if why_none else read_runs(path)
    assert [spec.name for spec in written] == [one["name"] for one in found["experiments"]]
    assert {name for one in found["questions"] for name in one["experiments"]} == {spec.name for spec in written}

    code, _, err = run([*arguments, "--objective", "prefill"], capsys)
    assert code == 2
    assert "compares the training" in err


def test_design_writes_runs_that_proxy_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--experiments of design asks about the listed designs that are undecided, by their ranks."""
    path = tmp_path / "runs.csv"
    job = ["--params", "150m", "--train-tokens", "10b", "--device", "h100-sxm-80gb", "--gpus", "8"]
    code, out, err = run(["design", *job, "--seq-len", "1024", "--experiments", str(path), "--json"], capsys)
    found = json.loads(out)
    nets = {
        one["rank"]: one["net_speedup"] for one in found["designs"] if not one["is_free"] and not one["is_baseline"]
    }
    undecided = {rank for rank, net in nets.items() if net["low"] < 1.0 < net["high"]}

    assert code == 0
    assert str(path) in err
    assert undecided
    assert {one["rank"] for one in found["experiments"]["questions"]} == set(sorted(undecided)[:5])
    runs = found["experiments"]["experiments"]
    assert [spec.name for spec in read_runs(path)] == [one["name"] for one in runs] if runs else not path.exists()

    assert run(["design", *job, "--experiments", "-"], capsys)[0] == 2
