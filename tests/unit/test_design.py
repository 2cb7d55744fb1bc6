"""Designs: shape, plan and run together, for a size and tokens or for a budget."""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shapewright
from command_line import run
from shapewright.app.cli.commands.design import command as design_command
from shapewright.core.units import format_count
from shapewright.models.parameters import count_parameters
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.models.write import to_config_json
from shapewright.optimize.design import design as design_module
from shapewright.optimize.design import sizes as sizes_module
from shapewright.optimize.design.design import _rank
from shapewright.optimize.design.request import usual_batch_size
from shapewright.optimize.design.result import DesignResult, FrontRun
from shapewright.optimize.plan.plan import plan_job
from shapewright.optimize.plan.request import PlanRequest
from shapewright.optimize.plan.result import PlanResult
from shapewright.optimize.search.baseline import family_models, scale_nearest, usual_model
from shapewright.prediction.loss.effect import estimate_loss_effect
from shapewright.prediction.scenario import Scenario
from shapewright.prediction.speedup import Speedup, compare_times

ASKED: dict[str, Any] = {"device": "h100-sxm-80gb", "num_devices": 8, "workload": {"seq_len": 1024}}
SMALL = ["--params", "300m", "--train-tokens", "6b", "--device", "h100-sxm-80gb", "--gpus", "8"]


def design(config: Any = "gpt2", **changes: Any) -> DesignResult:
    """A design of about 150 million parameters on one node."""
    return shapewright.design(config, **{**ASKED, "num_parameters": 150_000_000, "train_tokens": 10**10, **changes})


@pytest.fixture(scope="module")
def found() -> DesignResult:
    """A design whose results several tests look at."""
    return design(usd_per_hour=2.0, top=8)


def test_its_plan_is_the_one_of_plan(found: DesignResult) -> None:
    """For every listed shape, ``plan`` with the same batch gives the same layout, choices and step."""
    for one in found.designs:
        batch = one.workload.global_batch_size
        raw = to_config_json(found.model, one.config)
        (best, *_) = shapewright.plan(raw, **ASKED, global_batch_size=batch).plans

        assert best.layout == one.plan.layout
        assert replace(best.workload, optimizer=one.workload.optimizer) == one.workload
        assert best.prediction.step_time_s == one.prediction.step_time_s


def test_formats_that_limit_the_plans_are_noted(found: DesignResult) -> None:
    """Two trainers without a common sharding leave plans that neither alone would; kept values are no limits."""
    formats = ["megatron-args", "torchtitan-toml"]
    both = design("llama-3.2-1b", num_parameters=400_000_000, formats=formats, keep={"pipeline_schedule": "1f1b"})

    (note,) = [note for note in both.notes if " can express only " in note]
    assert note.startswith("megatron-args and torchtitan-toml")
    assert "zero_stage=0" in note
    assert "pipeline_schedule" not in note
    assert not [note for note in found.notes if " can express only " in note]


def test_the_answer_is_listed_first_with_reasons_for_the_others(found: DesignResult) -> None:
    """The ranks count up, the family's shape is among them, and the verdict is on the answer."""
    assert [one.rank for one in found.designs] == list(range(1, len(found.designs) + 1))
    assert found.baseline in found.designs
    assert found.baseline.net_speedup.factor == 1.0
    assert found.verdict.net_speedup == found.best.net_speedup.factor
    assert found.best.difference is None
    assert all(one.difference is not None for one in found.designs[1:])
    sizes = [count_parameters(one.config).total for one in found.designs]
    assert all(abs(size / 150e6 - 1.0) <= 0.05 for size in sizes)


def test_what_is_better_is_counted_once(found: DesignResult) -> None:
    """The effect of a design is that of its shape and of the throughputs of both plans."""
    one = found.designs[-1]
    speedup = compare_times(found.baseline.prediction, one.prediction)
    effect = estimate_loss_effect(found.baseline.config, one.config, train_tokens=10**10, speedup=speedup)

    assert (one.speedup, one.effect) == (speedup, effect)


def test_a_run_costs_its_steps(found: DesignResult) -> None:
    """Hours, device hours, energy and dollars follow from the step; the interval is that of the step."""
    best, tokens = found.best, 10**10
    steps = tokens / best.prediction.tokens_per_step
    hours = steps * best.prediction.step_time_s / 3600.0
    run = best.run

    assert run.hours.mean == pytest.approx(hours)
    assert run.hours.high / run.hours.mean == pytest.approx(best.step_s.high / best.step_s.mean)
    assert run.cost.device_hours == pytest.approx(8 * hours)
    assert run.cost.usd == pytest.approx(2.0 * 8 * hours)
    assert run.cost.energy_kwh == pytest.approx(8 * hours * 0.7)
    assert run.num_steps - 1 < steps <= run.num_steps


def test_no_shape_is_planned_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The frontier takes the plans of the family's shape that the search has made."""
    planned: list[TransformerConfig] = []
    for module in (design_module, sizes_module):

        def plan_once(scenario: Scenario, request: PlanRequest) -> PlanResult:
            planned.append(scenario.config)
            return plan_job(scenario, request)

        monkeypatch.setattr(module, "plan_job", plan_once)
    design(top=2)

    assert len(planned) > 7
    assert len(planned) == len(set(planned))


def test_the_surest_of_the_shapes_for_a_trial_is_taken(found: DesignResult) -> None:
    """The answer of a trial is the one that the verdict of a search names, not a larger gain that is less sure."""
    baseline = found.baseline
    nets = (("larger", 1.20, 0.78), ("surer", 1.05, 0.90), ("unsure", 1.30, 0.60))
    others = [
        replace(
            found.designs[1],
            is_baseline=False,
            plan=replace(
                baseline.plan, prediction=replace(baseline.plan.prediction, config=replace(baseline.config, name=name))
            ),
            effect=replace(
                found.baseline.effect,
                is_free=False,
                net_speedup=Speedup(factor=factor, low=0.9, high=1.5, probability_faster=chance),
            ),
        )
        for name, factor, chance in nets
    ]
    designs, verdict = _rank([baseline, *others], found.request)

    assert verdict.code == "trial"
    assert verdict.chance_better == 0.90
    assert designs[0].config.name == "surer"


def test_no_shape_nearby_is_better() -> None:
    """Among all depths and MLP widths of the size, planned one by one, none beats the best of the joint search."""
    keep = {"hidden_size": 768, "num_heads": 12, "vocab_size": 50304}
    found = design(overrides={"vocab_size": 50304}, keep=keep, top=40)
    own = found.baseline
    shapes = []
    for depth, width in itertools.product(range(8, 20), range(64 * 24, 64 * 90, 128)):
        config = replace(own.config, num_layers=depth, intermediate_size=width)
        if abs(count_parameters(config).total / 150e6 - 1.0) <= 0.02 and 2.5 <= width / 768 <= 5.0:
            shapes.append(config)
    best = 0.0
    for config in shapes:
        raw = to_config_json(found.model, config)
        plan = shapewright.plan(raw, **ASKED, global_batch_size=own.workload.global_batch_size).plans[0]
        speedup = compare_times(own.prediction, plan.prediction)
        effect = estimate_loss_effect(own.config, config, train_tokens=10**10, speedup=speedup)
        assert effect.net_speedup is not None
        best = max(best, effect.net_speedup.factor)

    assert len(shapes) > 10
    assert max(one.net_speedup.factor for one in found.designs) >= best * (1.0 - 0.005)


def test_what_is_kept_stays(found: DesignResult) -> None:
    """Fields of the shape and of the plan have the values that were given."""
    asked = {"heads": 16, "tp": 2, "zero_stage": (0, 1), "micro_batch": 4}
    kept = design(keep=asked, tokenizer_vocab=32000, tolerance_fraction=0.06)

    for one in kept.designs:
        assert one.plan.layout.tensor_parallel == 2
        assert one.plan.layout.zero_stage in (0, 1)
        assert one.workload.micro_batch_size == 4
        assert 32000 <= one.config.vocab_size <= 32000 * 1.02
        assert one.is_baseline or one.config.num_heads == 16
    assert kept.designs[0].config.num_heads == 16
    assert found.baseline.config.vocab_size > 50000


def test_a_budget_chooses_the_tokens() -> None:
    """Without tokens, every design trains as long as the budget lasts, however it is given."""
    by_hours = design(train_tokens=None, hours=2.0)
    by_usd = design(train_tokens=None, usd=48.0, usd_per_hour=3.0)

    for one in by_hours.designs:
        assert one.run.cost.device_hours == pytest.approx(16.0, rel=1e-3)
    assert by_hours.request.train_tokens == by_usd.request.train_tokens
    assert by_usd.best.run.cost.usd == pytest.approx(48.0, rel=1e-3)


def test_a_budget_may_have_a_suffix() -> None:
    """Thousands and millions of hours and dollars are written as those of tokens are, and hours as days."""
    types = {option.name: option.type for option in design_command.params}

    assert types["gpu_hours"].convert("20k", None, None) == 20_000.0
    assert types["gpu_hours"].convert("0.5", None, None) == 0.5
    assert types["usd"].convert("1.5m", None, None) == 1_500_000.0
    assert [types["hours"].convert(text, None, None) for text in ("36", "36h", "1.5d")] == [36.0] * 3


def test_a_budget_chooses_the_size() -> None:
    """No other size of the frontier has a lower loss in the hours of the budget, and larger budgets buy more."""
    sizes = []
    for hours in (2.0, 32.0):
        found = design(num_parameters=None, train_tokens=None, hours=hours, top=2)
        by_size: dict[int, list[FrontRun]] = {}
        for point in found.front:
            by_size.setdefault(point.num_parameters, []).append(point)
        losses = {
            size: float(
                np.interp(np.log(hours), np.log([one.hours for one in points]), [one.loss_nats for one in points])
            )
            for size, points in by_size.items()
            if points[0].hours <= hours <= points[-1].hours
        }
        own = found.baseline.prediction.parameters.total

        assert len(losses) >= 4
        assert losses[own] <= min(losses.values()) + 0.003
        sizes.append(own)
    assert sizes[1] > 1.5 * sizes[0]


def test_a_budget_and_tokens_choose_the_largest_size() -> None:
    """With both, the size is the largest whose run fits: the run takes nearly all of the budget, and never more."""
    found = design(num_parameters=None, gpu_hours=40.0)

    assert found.baseline.run.cost.device_hours == pytest.approx(40.0, rel=0.05)
    assert all(one.run.cost.device_hours <= 40.0 * 1.001 for one in found.designs)
    assert all(one.run.train_tokens <= 10**10 for one in found.designs)


def test_slow_devices_and_headroom_count() -> None:
    """Stragglers lengthen the run and not the predicted step; headroom leaves memory free."""
    found = design(straggler_factor=1.3, headroom_fraction=0.6)
    run, plan = found.best.run, found.best.plan

    assert run.hours.mean * 3600.0 == pytest.approx(
        1.3 * plan.prediction.step_time_s * 10**10 / plan.prediction.tokens_per_step
    )
    assert plan.total_bytes <= 0.4 * plan.prediction.device.memory_bytes


def test_a_run_over_budget_is_noted() -> None:
    """Size and tokens that are both given stay; a note says by how much they exceed the budget."""
    found = design(hours=0.5)

    assert found.best.run.train_tokens == 10**10
    assert any("times the budget of 4" in note for note in found.notes)


def test_the_front_cannot_be_beaten(found: DesignResult) -> None:
    """A run is on the frontier exactly if none is both as fast and of lower loss, and losses fall along it."""
    for point in found.front:
        beaten = any(other.hours <= point.hours and other.loss_nats < point.loss_nats for other in found.front)
        assert point.is_on_front != beaten
        assert point.loss_low_nats < point.loss_nats < point.loss_high_nats
    losses = [point.loss_nats for point in found.front if point.is_on_front]
    assert losses == sorted(losses, reverse=True)


def test_sizes_outside_the_data_are_noted() -> None:
    """Far from the losses that the law was fitted to there is an answer, with a note and a wider interval."""
    near, far = (design("llama-3.2-1b", num_parameters=size, num_devices=64, top=2) for size in (10**9, 20 * 10**9))

    assert any("outside the data of the loss law" in note for note in far.notes)
    assert not any("outside the data of the loss law" in note for note in near.notes)


@pytest.mark.parametrize(
    ("num_parameters", "tokens", "devices", "seq_len"),
    [
        (10**6, 10**8, 1, 1024),
        (3 * 10**9, 3 * 10**11, 64, 4096),
        (7 * 10**10, 15 * 10**12, 3072, 8192),
        (10**8, 10**6, 96, 2048),
    ],
)
def test_batches_can_be_shared(num_parameters: int, tokens: int, devices: int, seq_len: int) -> None:
    """The chosen batch is the number of devices times a power of two, or that number over one, and near the fit."""
    batch = usual_batch_size(num_parameters, tokens, devices, seq_len)
    wanted = 0.2920 * (6.0 * num_parameters * tokens) ** 0.3271 / seq_len
    larger, smaller = max(batch, devices), min(batch, devices)

    assert larger % smaller == 0
    assert (larger // smaller).bit_count() == 1
    assert 0.45 <= batch / wanted <= 2.2 or batch * seq_len <= tokens or smaller == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--params", "1b"], "the length of the run is missing; give --train-tokens"),
        ([], "nothing to design for: --params is missing, and so is a budget"),
        (["--params", "1b", "--hours", "2", "--gpu-hours", "3"], "--hours and --gpu-hours are both budgets"),
        (["--usd", "100"], "usd=100 needs the price of a device"),
        (["--hours", "nan"], "hours=nan must be"),
        (["--gpu-hours", "0"], "gpu_hours=0"),
        (["--params", "100m", "--train-tokens", "1k"], "a run of 1,000 tokens is shorter than one step of"),
        (["--gpu-hours", "20kh"], "'20kh' is no number of GPU hours such as 5000 or 20k"),
        (["--usd", "much", "--usd-per-hour", "2"], "'much' is no number of dollars such as 5000 or 20k"),
        (["--hours", "2 weeks"], "'2 weeks' is not a time such as 336, 336h or 14d"),
        (["--params", "x", "--train-tokens", "1b"], "'x' is no number of parameters"),
        (["--params", "1b", "--train-tokens", "1b", "--family", "gemmma"], "no dense decoder preset begins with it"),
        (["gpt2", "--params", "1b", "--train-tokens", "1b", "--family", "llama"], "family has no effect with a model"),
        (["--params", "1b", "--train-tokens", "1b", "--keep", "heads"], "is not FIELD=VALUE"),
        (["--params", "1b", "--train-tokens", "1b", "--keep", "heads=a"], "takes one whole number"),
        (["--params", "1b", "--train-tokens", "1b", "--keep", "head=4"], "is not a field of a model"),
        (["--params", "1b", "--train-tokens", "1b", "--format", "megatron-args"], "--format has no effect without -o"),
        (["--params", "1b", "--train-tokens", "1b", "-o", ""], "-o needs the name of a folder"),
        (["--params", "1b", "--train-tokens", "1b", "--format", "x", "-o", "out"], "unknown format 'x'"),
        (["--params", "1b", "--train-tokens", "1b", "--global-batch-tokens", "7"], "global_batch_tokens=7 must be"),
        (["--params", "70b", "--train-tokens", "1t"], "no plan fits 8 h100-sxm-80gb"),
        (["--params", "1b", "--train-tokens", "1b", "--tolerance", "x"], "is not a fraction"),
        (["--gpu-hours", "1e-9"], "pays for no"),
        (["--params", "1b", "--train-tokens", "1b", "--tokenizer-vocab", "1"], "tokenizer_vocab=1 must be"),
    ],
)
def test_bad_questions(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What cannot be answered is one line on standard error with what to do, exit code 2, and no file."""
    monkeypatch.chdir(tmp_path)
    code, out, err = run(["design", "--device", "h100-sxm-80gb", "--gpus", "8", *arguments], capsys)

    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_devices_without_a_network_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """More devices than a node need a network, which can be given."""
    asked = ["design", "--params", "1b", "--train-tokens", "1b", "--device", "rtx-4090", "--gpus", "64"]
    code, _, err = run(asked, capsys)

    assert code == 2
    assert "set --network-gbit-per-s" in err


def test_a_config_alone_has_the_size_and_its_design() -> None:
    """Without a size and a budget the shapes have the size of the given model; tokens may be a whole float."""
    found = design("gpt2", num_parameters=None, train_tokens=1e10)

    assert found.baseline.config == read_model("gpt2").config
    assert found.request.num_parameters == count_parameters(read_model("gpt2").config).total


def test_given_fields_of_a_plan_stay() -> None:
    """Fields of the workload and the layout that a plan chooses keep their values where they are given."""
    found = design(workload={"seq_len": 1024, "micro_batch_size": 2}, layout={"tensor_parallel": 2}, top=2)

    assert {one.plan.layout.tensor_parallel for one in found.designs} == {2}
    assert {one.workload.micro_batch_size for one in found.designs} == {2}


def test_files_hold_the_design(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """config.json is the shape, the trainers get shape and layout, the page needs no network, the JSON is --json's."""
    folder = tmp_path / "new" / "design"
    asked = ["design", *SMALL, "--format", "torchtitan-toml,megatron-args", "-o", str(folder), "--json"]
    code, out, err = run(asked, capsys)
    printed = json.loads(out)
    best = printed["designs"][0]

    assert code == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "design.html", "design.json", "megatron.args", "torchtitan.toml",
    ]  # fmt: skip
    assert "wrote config.json" in err
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert written["architectures"] == ["LlamaForCausalLM"]  # without it vLLM and SGLang refuse to serve the model
    config = read_model(folder / "config.json").config
    assert config.num_layers == best["config"]["num_layers"]
    assert config.hidden_size == best["config"]["hidden_size"]
    words = (folder / "megatron.args").read_text(encoding="utf-8").split()
    assert words[words.index("--num-layers") + 1] == str(config.num_layers)
    assert words[words.index("--tensor-model-parallel-size") + 1] == str(best["plan"]["layout"]["tensor_parallel"])
    toml = tomllib.loads((folder / "torchtitan.toml").read_text(encoding="utf-8"))
    assert toml["parallelism"]["pipeline_parallel_degree"] == best["plan"]["layout"]["pipeline_parallel"]
    page = (folder / "design.html").read_text(encoding="utf-8")
    assert printed["verdict"]["text"].split(":")[0] in page.replace("&gt;", ">").replace("&#x27;", "'")
    assert "https://" not in page.split("<script>")[0]
    assert json.loads((folder / "design.json").read_text(encoding="utf-8"))["config_json"] == printed["config_json"]


def test_text_says_what_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict, the plan and a reason for every runner-up are printed."""
    code, text, _ = run(["design", *SMALL], capsys)
    _, out, _ = run(["design", *SMALL, "--json"], capsys)
    facts = json.loads(out)

    assert code == 0
    assert facts["verdict"]["text"] in text
    assert facts["designs"][0]["why"] == ""
    (own,) = (one for one in facts["designs"] if one["is_baseline"])
    assert f"{own['config']['name']} ({format_count(own['parameters'])})," in text
    for one in facts["designs"][1:]:
        assert one["why"]
        assert one["why"] in " ".join(text.split())  # long reasons take several lines of a table
    assert "Loss against time" in text


def test_answer_has_the_values_that_are_kept() -> None:
    """The shape of the family is no answer where it lacks a kept value; a value that no shape has is refused."""
    found = shapewright.design(
        device="h100-sxm-80gb", num_devices=8, num_parameters=300_000_000, train_tokens=6 * 10**9, keep={"depth": 12}
    )
    assert found.baseline.config.num_layers != 12
    assert found.designs[0].config.num_layers == 12
    assert "take the shape of" not in found.verdict.text
    with pytest.raises(shapewright.ShapewrightError, match="with num_layers=60, the quality guard leaves none of"):
        shapewright.design(
            device="h100-sxm-80gb",
            num_devices=8,
            num_parameters=300_000_000,
            train_tokens=6 * 10**9,
            keep={"depth": 60},
        )


def test_reasons_explain_the_net_speedup(capsys: pytest.CaptureFixture[str]) -> None:
    """Speed, size and tokens of a reason multiply to the ratio of net speed-ups, to the digits that are printed."""
    _, out, _ = run(["design", *SMALL, "--json"], capsys)
    best, *others = json.loads(out)["designs"]

    def ratio(why: str, more: str, less: str) -> float:
        found = re.search(rf"([\d.]+) % (?:({more})|{less})", why)
        if found is None:
            return 1.0
        return 1.0 + (1.0 if found[2] else -1.0) * float(found[1]) / 100.0

    for one in others:
        why = one["why"].replace("needs ", "")
        speed, size = ratio(why, "faster", "slower"), ratio(why, "larger", "smaller")
        explained = speed * size / ratio(why, "more tokens", "fewer tokens")
        assert explained == pytest.approx(one["net_speedup"]["mean"] / best["net_speedup"]["mean"], rel=2e-3)


def test_a_family_is_designed_as_it_is_first_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Positions are not stretched, the context window holds the sequence, and a model of one is left as it is."""
    folder = tmp_path / "design"
    assert run(["design", *SMALL, "--format", "megatron-args", "-o", str(folder)], capsys)[0] == 0
    written = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert "rope_scaling" not in written
    assert written["max_position_embeddings"] == 8192
    assert "rope-scaling" not in (folder / "megatron.args").read_text(encoding="utf-8")

    long = shapewright.design(
        **{**ASKED, "workload": {"seq_len": 16384}}, num_parameters=300_000_000, train_tokens=10**9
    )
    assert long.baseline.config.max_position_embeddings == 16384
    own = design("llama-3.2-1b", num_parameters=400_000_000, train_tokens=10**9)
    assert own.baseline.config.max_position_embeddings == 131072


def test_models_of_a_short_context_are_no_family_of_longer_sequences() -> None:
    """Near 33 B the nearest Llama has 2048 positions: with sequences of 4096 a later one is scaled."""
    short, enough = (
        scale_nearest(family_models("llama", least_positions=length), 33 * 10**9) for length in (2048, 4096)
    )

    assert short.config.max_position_embeddings == 2048
    assert enough.config.max_position_embeddings >= 4096


@pytest.mark.parametrize(("family", "size"), [("llama", 10e9), ("llama", 90e9), ("llama-3", 10e9), ("qwen2.5", 7e9)])
def test_language_models_are_designed_from_language_models(family: str, size: float) -> None:
    """Layers that attend to images run only with images, and a vision tower is no part of a text model."""
    model = usual_model(int(size), family)

    assert not model.config.attends_to_images
    assert "vision_config" not in (model.raw or {})


def test_a_wider_tolerance_finds_a_kept_value() -> None:
    """No shape of 20 heads is within 2 % of the size, so that one must be accepted beyond it."""
    job: dict[str, Any] = {
        "num_parameters": 3 * 10**9,
        "train_tokens": 3 * 10**11,
        "device": "h100-sxm-80gb",
        "num_devices": 64,
    }
    with pytest.raises(shapewright.ShapewrightError, match="with num_heads=20, none of"):
        shapewright.design(**job, keep={"num_heads": 20})
    found = shapewright.design(**job, keep={"num_heads": 20}, tolerance_fraction=0.05)

    assert found.designs[0].config.num_heads == 20
