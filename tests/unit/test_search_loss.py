"""Searches by loss and time together: net speed-up, free changes, verdicts, objectives, bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp
from typing import Any

import pytest

from command_line import run as run_command
from shapewright.app.api.designs import design
from shapewright.app.api.searches import search
from shapewright.app.cli.commands.search import command as search_command
from shapewright.core.errors import ConfigError, WorkloadError
from shapewright.models.read import read_model
from shapewright.optimize.search.objective import OBJECTIVES, SPEED, Goal
from shapewright.optimize.search.request import SearchRequest
from shapewright.optimize.search.result import Candidate, SearchResult
from shapewright.optimize.search.search import search_shapes
from shapewright.optimize.search.verdict import VERDICTS, describe_change, judge_search, recommend
from shapewright.prediction.build import build_scenario
from shapewright.prediction.loss.effect import estimate_loss_effect, keeps_loss, scale_to_baseline
from shapewright.prediction.loss.law import load_loss_law
from shapewright.prediction.loss.terms import ShapeForLoss
from shapewright.prediction.speedup import Speedup, compare_times

TOKENS = 3e11


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the search command."""
    return run_command(["search", *words], capsys)


@pytest.fixture(scope="module")
def gpt3() -> SearchResult:
    """GPT-3 2.7B on an A100, 300 B tokens."""
    return search("gpt3-2.7b", device="a100-sxm-80gb", train_tokens=TOKENS)


def test_net_speedup_by_hand() -> None:
    """Half the layers at twice the speed: net = speed-up x size ratio / tokens needed, each from its own formula."""
    own = read_model("gpt3-2.7b").config
    other = replace(own, num_layers=24, intermediate_size=14080)
    speedup = Speedup(factor=1.2, low=1.1, high=1.2 * 1.2 / 1.1, probability_faster=1.0)
    effect = estimate_loss_effect(own, other, train_tokens=TOKENS, speedup=speedup)
    law = load_loss_law()
    # A layer has 4 h^2 + 2 h f weights and 9 h + f + 4 h biases and norms (4 h in q, k, v, out; f and h in the MLP;
    # 4 h in two norms); beside the layers are 50257 h of tokens, 2048 h of positions and 2 h of the last norm.
    h, v, s = 2560, 50257, 2048
    layer_own, layer_other = (4 * h * h + 2 * h * f + 4 * h + f + h + 4 * h for f in (10240, 14080))
    rest = (v + s + 2) * h
    size_ratio = (24 * layer_other + rest) / (32 * layer_own + rest)
    scaled = replace(ShapeForLoss.of(other), num_parameters=24 * layer_other / size_ratio, total_parameters=0)
    own_loss = float(law.loss_nats(ShapeForLoss.of(own), TOKENS))
    tokens_ratio = float(law.tokens_to_reach(scaled, own_loss)) / TOKENS

    assert effect.size_ratio == pytest.approx(size_ratio)
    assert effect.difference_nats == pytest.approx(float(law.loss_nats(scaled, TOKENS)) - own_loss, rel=1e-6)
    assert effect.tokens_ratio == pytest.approx(tokens_ratio)
    assert effect.net_speedup is not None
    assert effect.net_speedup.factor == pytest.approx(1.2 * size_ratio / tokens_ratio)
    assert effect.net_speedup.low < effect.net_speedup.factor / (1.2 / 1.1)  # wider than the speed alone
    assert not effect.is_free


def test_same_shape_has_no_changes() -> None:
    """A shape compared with itself has the baseline's loss, for certain, and the net speed-up is the speed-up."""
    own = read_model("llama-3-8b").config
    speedup = Speedup(factor=1.1, low=1.05, high=1.1 * 1.1 / 1.05, probability_faster=0.99)
    effect = estimate_loss_effect(own, own, train_tokens=TOKENS, speedup=speedup)

    assert (effect.difference_nats, effect.difference_low_nats, effect.difference_high_nats) == (0.0, 0.0, 0.0)
    assert (effect.tokens_ratio, effect.size_ratio) == (1.0, 1.0)
    assert effect.net_speedup is not None
    assert effect.net_speedup.factor == pytest.approx(1.1)
    assert effect.net_speedup.low == pytest.approx(1.05, rel=1e-3)


def test_size_alone_is_no_gain() -> None:
    """A larger model of the same proportions and as much slower is worth the same: losses are at equal size."""
    own = read_model("llama-3-8b").config
    shape = ShapeForLoss.of(own)
    law = load_loss_law()
    larger = scale_to_baseline(replace(shape, num_parameters=1.02 * shape.num_parameters), shape, 1.02)

    assert float(law.loss_nats(larger, TOKENS)) == pytest.approx(float(law.loss_nats(shape, TOKENS)))


@pytest.mark.parametrize(
    ("model", "changes", "is_free"),
    [
        ("gpt3-2.7b", {"num_heads": 20}, True),  # 128 wide instead of 80
        ("gpt3-2.7b", {"num_heads": 40}, True),  # 64
        ("gpt3-2.7b", {"num_heads": 64}, False),  # 40
        ("gpt3-2.7b", {"num_heads": 5}, False),  # 512
        ("gpt3-2.7b", {"vocab_size": 50304}, True),
        ("gpt3-2.7b", {"vocab_size": 50256}, False),
        ("gpt3-2.7b", {"num_heads": 20, "vocab_size": 50304}, True),
        ("gpt3-2.7b", {"num_heads": 20, "num_layers": 31}, False),
        ("gpt3-2.7b", {"intermediate_size": 10368}, False),
        ("llama-3-8b", {"num_heads": 16, "num_kv_heads": 4, "head_dim": 256, "v_head_dim": 256}, True),
        ("llama-3-8b", {"num_heads": 16, "num_kv_heads": 8, "head_dim": 256, "v_head_dim": 256}, False),
        ("llama-3-8b", {"num_kv_heads": 4}, False),
    ],
)
def test_free_memory(model: str, changes: dict[str, int], is_free: bool) -> None:
    """Heads of 64 to 256 with the same attention width and a padded vocabulary keep the loss; nothing else does."""
    own = read_model(model).config
    heads = changes.get("num_heads", own.num_heads)
    if model == "gpt3-2.7b":
        width = 2560 // heads
        changes = {**changes, "num_heads": heads, "num_kv_heads": heads, "head_dim": width, "v_head_dim": width}

    assert keeps_loss(own, replace(own, **changes)) is is_free


def test_twenty_heads_come_first_and_free(gpt3: SearchResult) -> None:
    """The paper's change leads, marked free, and so does the verdict."""
    assert gpt3.objective.name == "time-to-loss"
    first = gpt3.candidates[0]
    assert gpt3.verdict is not None

    assert (gpt3.verdict.code, gpt3.verdict.rank) == ("free", 1)
    assert gpt3.verdict.changes["num_heads"] == (32, 20)
    assert "heads 32 -> 20" in gpt3.verdict.text
    assert "same loss" in gpt3.verdict.text
    assert first.is_free
    assert first.effect is not None
    assert first.effect.net_speedup is not None
    assert first.effect.net_speedup.factor == pytest.approx(first.speedup.factor)


def test_without_tokens_speed_is_ranked_and_the_loss_shown() -> None:
    """The ranking is by speed at equal size; losses are stated at 20 tokens per parameter, for the verdict."""
    result = search("gpt3-2.7b", device="a100-sxm-80gb")
    sizes = [shape.equal_size_speedup for shape in result.candidates]

    assert result.objective.name == "train-tokens-per-s"
    assert result.train_tokens == 20 * result.baseline.prediction.parameters.active
    assert sizes == sorted(sizes, reverse=True)
    assert all(shape.effect is not None and shape.effect.net_speedup is not None for shape in result.candidates)
    assert any("20 per parameter" in note for note in result.notes)
    assert result.horizon is None
    assert result.verdict is not None
    assert result.verdict.code == "free"
    assert result.candidates[result.verdict.rank - 1].is_free


def test_large_model_is_kept_or_surely_better() -> None:
    """Llama-3-8B: keep it, try, or a change whose interval excludes no gain."""
    layout = {"data_parallel": 8, "zero_stage": 3}
    verdict = search("llama-3-8b", device="h100-sxm-80gb", layout=layout, train_tokens=15e12).verdict
    assert verdict is not None

    assert verdict.code in ("keep", "trial") or verdict.net_speedup_low > 1.0
    assert verdict.text.startswith("keep your shape") == (verdict.code in ("keep", "trial"))


def candidate_with(result: SearchResult, rank: int, net: Speedup, *, is_free: bool) -> Candidate:
    """A candidate with another net speed-up."""
    shape = result.candidates[0]
    assert shape.effect is not None
    return replace(shape, rank=rank, effect=replace(shape.effect, net_speedup=net, is_free=is_free))


def speedup_of(low: float, factor: float, chance: float) -> Speedup:
    """A net speed-up."""
    return Speedup(factor=factor, low=low, high=factor * factor / low, probability_faster=chance)


@pytest.mark.parametrize(
    ("free", "trade", "only_free", "expected"),
    [
        (speedup_of(1.01, 1.05, 0.99), speedup_of(1.02, 1.20, 0.97), False, ("free", 1)),  # 1.02 is below 1.05
        (speedup_of(1.01, 1.05, 0.99), speedup_of(1.06, 1.20, 0.99), False, ("change", 2)),
        (speedup_of(1.01, 1.05, 0.99), speedup_of(1.06, 1.20, 0.99), True, ("free", 1)),
        (speedup_of(0.99, 1.05, 0.80), speedup_of(0.9, 1.20, 0.78), False, ("trial", 1)),
        (speedup_of(0.90, 1.01, 0.55), speedup_of(1.01, 1.03, 0.99), False, ("change", 2)),
        (speedup_of(0.90, 1.01, 0.55), speedup_of(0.99, 1.03, 0.80), False, ("trial", 2)),
        (speedup_of(0.90, 1.01, 0.55), speedup_of(1.01, 1.03, 0.99), True, ("trial", 2)),
        (speedup_of(0.90, 1.01, 0.55), speedup_of(0.90, 1.03, 0.75), False, None),
    ],
)
def test_verdict_cases(
    gpt3: SearchResult, free: Speedup, trade: Speedup, only_free: bool, expected: tuple[str, int] | None
) -> None:
    """The whole interval is above 1, of a trade above the free one too; else a trial from 75 % certainty on."""
    shapes = [candidate_with(gpt3, 1, free, is_free=True), candidate_with(gpt3, 2, trade, is_free=False)]
    found = recommend(shapes, only_free=only_free)
    verdict = judge_search(shapes, is_training=True, only_free=only_free)
    assert verdict is not None

    assert (found and (found[0], found[1].rank)) == expected
    assert (verdict.code, verdict.rank) == (expected or ("keep", 0))
    assert verdict.code in VERDICTS


def test_empty_keep_list() -> None:
    """Without candidates the verdict is to keep the shape; a model without the loss law has none."""
    verdict = judge_search([], is_training=True)
    assert verdict is not None

    assert (verdict.code, verdict.text) == ("keep", "keep your shape: nothing is better with more than 75 % certainty")
    assert search("bert-base", device="l40s", vary=("vocab",)).verdict is None


def test_inference_trades_are_named() -> None:
    """In decode a faster shape of another loss is not recommended, and the difference is stated."""
    result = search("gpt3-2.7b", device="a100-sxm-80gb", objective="decode-latency", vary=("depth", "width"))
    assert result.verdict is not None

    assert result.verdict.code == "trade"
    assert "nats" in result.verdict.text
    assert all(shape.effect is not None and shape.effect.net_speedup is None for shape in result.candidates)


def test_words_of_a_change(gpt3: SearchResult) -> None:
    """Fields that follow from others are left out, the rest is in the order of depth, width, heads."""
    shape = replace(
        gpt3.candidates[0],
        changes={"vocab_size": (50257, 50304), "num_heads": (32, 20), "head_dim": (80, 128), "num_kv_heads": (32, 20)},
    )

    assert describe_change(shape) == "heads 32 -> 20, head width 80 -> 128, vocabulary 50257 -> 50304"
    assert describe_change(replace(shape, changes={"num_heads": (32, 36), "num_kv_heads": (8, 36)})) == (
        "heads 32 -> 36, KV heads 8 -> 36"
    )


def test_a_run_is_given_in_three_ways() -> None:
    """Hours and a target loss come down to the tokens that they are worth; hours rank by the loss at that budget."""
    given = {"device": "a100-sxm-80gb", "vary": ("heads", "vocab")}
    by_tokens = search("gpt3-2.7b", train_tokens=TOKENS, **given)
    own = by_tokens.baseline.prediction
    by_hours = search("gpt3-2.7b", gpu_hours=TOKENS / own.tokens_per_s_per_device / 3600.0, **given)
    loss_nats = float(load_loss_law().loss_nats(ShapeForLoss.of(own.config), TOKENS))
    by_loss = search("gpt3-2.7b", target_loss_nats=loss_nats, **given)

    assert (by_hours.objective.name, by_loss.objective.name) == ("loss-at-budget", "time-to-loss")
    assert by_hours.train_tokens == pytest.approx(TOKENS)
    assert by_loss.train_tokens == pytest.approx(TOKENS)
    assert by_loss.candidates[0].config == by_tokens.candidates[0].config == by_hours.candidates[0].config


def test_loss_at_budget_is_the_loss_after_as_much_time() -> None:
    """The cost of a shape is exp(loss above the baseline's) after the tokens that it trains on in the same time."""
    result = search("gpt3-2.7b", device="a100-sxm-80gb", train_tokens=TOKENS, objective="loss-at-budget")
    law, own = load_loss_law(), ShapeForLoss.of(result.baseline.config)
    for shape in result.candidates[:5]:
        assert shape.effect is not None
        compared = scale_to_baseline(ShapeForLoss.of(shape.config), own, shape.effect.size_ratio)
        tokens = TOKENS * shape.speedup.factor * shape.effect.size_ratio
        expected = float(law.loss_nats(compared, tokens)) - float(law.loss_nats(own, TOKENS))
        assert shape.cost_ratio == pytest.approx(exp(expected))
        assert shape.cost_ratio < 1.0


def test_serving_moves_the_cost() -> None:
    """With many tokens served, what a served token costs decides; without any, cost is time to the loss."""
    given: dict[str, Any] = {"device": "a100-sxm-80gb", "train_tokens": 1e10, "usd_per_hour": 2.0, "objective": "cost"}
    alone = search("gpt3-2.7b", **given)
    served = search("gpt3-2.7b", serve_tokens=1e13, **given)

    def decode_s(shape: Candidate) -> float:
        workload = {"phase": "decode", "micro_batch_size": 64, "context_len": 1024}
        return build_scenario(shape.config, "a100-sxm-80gb", workload=workload).predict().step_time_s

    for shape in alone.candidates:
        effect = shape.effect
        assert effect is not None
        assert shape.cost_ratio == pytest.approx(effect.tokens_ratio / shape.speedup.factor / effect.size_ratio)
    best = min(served.candidates, key=lambda shape: shape.cost_ratio)
    assert decode_s(best) < decode_s(min(alone.candidates, key=lambda shape: shape.cost_ratio))
    own_s, best_s = decode_s(served.baseline), decode_s(best)
    train_s = 1e10 / served.baseline.prediction.tokens_per_s_per_device
    assert best.effect is not None
    training = train_s * best.effect.tokens_ratio / best.speedup.factor
    expected = (training + 1e13 / 64 * best_s) / best.effect.size_ratio / (train_s + 1e13 / 64 * own_s)
    assert best.cost_ratio == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("served_tokens", "is_training"), [(1e5, True), (1e16, False)])
def test_lifetime_gain_is_as_sure_as_what_costs_most(served_tokens: float, *, is_training: bool) -> None:
    """The interval of the dollars is that of the time to the loss with few served tokens, of decoding with many."""
    given: dict[str, Any] = {"device": "a100-sxm-80gb", "train_tokens": TOKENS, "usd_per_hour": 2.0}
    result = search("gpt3-2.7b", objective="cost", serve_tokens=served_tokens, **given)
    shape = max(result.candidates, key=lambda each: len(each.changed_fields))
    assert shape.lifetime is not None
    assert shape.effect is not None
    net = shape.effect.net_speedup
    assert net is not None
    workload = {"phase": "decode", "micro_batch_size": 64, "context_len": 1024}
    decode = [build_scenario(one.config, "a100-sxm-80gb", workload=workload) for one in (result.baseline, shape)]
    decoding = compare_times(*(one.predict() for one in decode))
    expected, other = (net, decoding) if is_training else (decoding, net)

    assert shape.lifetime.high / shape.lifetime.low == pytest.approx(expected.high / expected.low, rel=1e-3)
    assert other.high / other.low != pytest.approx(expected.high / expected.low, rel=0.01)


def test_heads_for_serving_stay_few() -> None:
    """By loss, key-value heads are not added: training would never pay for their cache."""
    result = search("llama-3-8b", device="h100-sxm-80gb", train_tokens=TOKENS)
    ratios = {shape.config.num_heads / shape.config.num_kv_heads for shape in result.candidates}

    assert min(ratios) >= 4.0


def test_json_states_verdict_and_losses(capsys: pytest.CaptureFixture[str]) -> None:
    """The verdict is the first key; every candidate has its loss difference, tokens, net speed-up and chance."""
    code, out, _ = run(["gpt3-2.7b", "--device", "a100-sxm-80gb", "--train-tokens", "300b", "--json"], capsys)
    facts = json.loads(out)
    first = facts["candidates"][0]

    assert code == 0
    assert list(facts)[:2] == ["schema_version", "verdict"]
    assert set(facts["verdict"]) >= {"code", "text", "changes", "net_speedup", "chance_better"}
    assert facts["verdict"]["changes"]["num_heads"] == {"from": 32, "to": 20}
    assert (facts["objective"], facts["train_tokens"]) == ("time-to-loss", 3e11)
    assert first["is_free"]
    assert first["loss_difference_low_nats"] <= first["loss_difference_nats"] <= first["loss_difference_high_nats"]
    assert first["net_speedup_low"] <= first["net_speedup"] <= first["net_speedup_high"]
    assert first["tokens_to_loss"] == pytest.approx(3e11)
    assert 0.75 < first["chance_better"] <= 1.0


def test_verdict_is_the_first_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The text begins with the verdict, and marks free changes."""
    code, out, _ = run(["gpt3-2.7b", "--device", "a100-sxm-80gb", "--train-tokens", "300b", "--top", "3"], capsys)

    assert code == 0
    assert out.startswith("verdict: change heads 32 -> 20")
    assert "  free  " in out


def test_command_knows_every_objective() -> None:
    """The choices of --objective are the objectives of a search, and the speed of the phase."""
    option = next(parameter for parameter in search_command.params if parameter.name == "objective")

    assert SPEED in option.type.choices
    assert tuple(name for name in option.type.choices if name != SPEED) == tuple(OBJECTIVES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--target-loss", "1.2"], "never falls below"),
        (["--target-loss", "0.9"], "a loss in nats per token is bits per byte x ln 2 x bytes per token"),
        (["--target-loss", "2.3bpb"], "no loss in nats per token such as 2.3; that is bits per byte x ln 2"),
        (["--target-loss", "nan"], "target_loss_nats=nan must be a number"),
        (["--target-loss", "0"], "above 0"),
        (["--gpu-hours", "-1"], "above 0"),
        (["--gpu-hours", "1e-6"], "is shorter than one step of"),
        (["--train-tokens", "1000"], "give --train-tokens for many steps, such as 53"),
        (["--gpu-hours", "5", "--train-tokens", "1b"], "each fix the length"),
        (["--objective", "cost"], "give --usd-per-hour"),
        (["--serve-tokens", "1t"], "no effect without objective='cost'"),
        (["--train-tokens", "1e30"], "'1e30' is no number of tokens from 0 to less than 1e18"),
        (["--serve-tokens", "many"], "'many' is no number of tokens"),
        (["--phase", "decode", "--train-tokens", "1b"], "no effect in decode"),
        (["--phase", "prefill", "--objective", "time-to-loss"], "measured in phase=train"),
    ],
)
def test_bad_goals_are_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Meaningless runs give one line and exit code 2."""
    code, out, err = run(["gpt3-2.7b", "--device", "a100-sxm-80gb", *words], capsys)

    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_far_outside_the_data_only_free_changes_are_recommended() -> None:
    """A run of 100,000 times the tokens of the data gives a note, wide intervals, and no verdict that trades."""
    result = search("gpt3-2.7b", device="a100-sxm-80gb", train_tokens=1e17)

    assert any("outside the data of the loss law" in note for note in result.notes)
    assert result.verdict is not None
    assert result.verdict.code in ("keep", "free", "trial")


def test_unsupported_models_of_the_law_are_errors() -> None:
    """Encoders and models without attention have no loss law; hours are worth other tokens on each device."""
    for name in ("bert-base", "mamba2-2.7b"):
        with pytest.raises(ConfigError, match=f"the loss law describes decoders with attention, which {name} is not"):
            search(name, device="l40s", objective="time-to-loss")
    with pytest.raises(ConfigError, match=r"mamba2-2\.7b is not; search its shapes by speed"):
        design("mamba2-2.7b", num_parameters=27 * 10**8, train_tokens=10**10, device="l40s", num_devices=8)
    with pytest.raises(ConfigError, match=r"bert-base is not; search its shapes by speed"):
        design("bert-base", num_parameters=10**8, train_tokens=10**9, device="l40s", num_devices=8)
    with pytest.raises(WorkloadError, match="give train_tokens"):
        search("gpt2", devices=("l40s", "h100-sxm-80gb"), gpu_hours=10.0)
    with pytest.raises(ConfigError, match="objective='fast'"):
        Goal(objective="fast")
    saved = search("bert-base", device="l40s", train_tokens=1e9, vary=("vocab",))
    assert saved.objective.name == "train-tokens-per-s"
    assert saved.horizon is not None


def test_layers_that_the_data_of_the_law_lack_are_noted() -> None:
    """A hybrid is judged as if all its layers had attention, and says so; a state space alone is not judged."""
    hybrid = search("qwen3-next-80b-a3b", device="b200-sxm-180gb", train_tokens=1e12, vary=("heads",), top=1)
    state_space = search("mamba-2.8b", device="l40s", train_tokens=1e11, top=1)

    assert any("attention layers only: those of gated_delta_net count as such" in note for note in hybrid.notes)
    assert state_space.train_tokens is None
    assert any("losses of mamba-2.8b are not compared" in note for note in state_space.notes)


def test_devices_share_the_loss() -> None:
    """Over several devices by time to the loss, the cost of a shape is its worst ratio to the best of each device."""
    request = SearchRequest(vary=("heads", "vocab"), goal=Goal(train_tokens=TOKENS))
    places = [build_scenario("gpt3-2.7b", name) for name in ("a100-sxm-80gb", "h100-sxm-80gb")]
    result = search_shapes(places[0], request, others=places[1:])
    first = result.candidates[0]

    assert first.is_free
    assert max(there.regret for there in first.on_devices.values()) <= max(
        there.regret for shape in result.best_on.values() for there in shape.on_devices.values()
    )
    for there in first.on_devices.values():
        assert there.effect is not None
        assert there.effect.net_speedup is not None
        assert there.effect.net_speedup.factor == pytest.approx(there.speedup.factor)


def test_several_devices_are_compared_by_what_is_minimized(capsys: pytest.CaptureFixture[str]) -> None:
    """By time to a loss, each device shows that gain: one behind another in speed may be ahead of it, as here."""
    job = ["llama-3-8b", "--devices", "h100-sxm-80gb,a100-sxm-80gb", "--train-tokens", "1t", "--top", "1"]
    _, text, _ = run(job, capsys)
    found = json.loads(run([*job, "--json"], capsys)[1])
    for device in found["devices"]:
        there = found["candidates"][0]["on_devices"][device["name"]]
        assert there["net_speedup"] != pytest.approx(there["speedup"], rel=0.02)
        assert f"{device['name']}: rank 1 gives {there['net_speedup']:.3f}x; the best" in text
    assert "slower" not in text


@pytest.mark.parametrize("objective", ["time-to-loss", "train-tokens-per-s"])
def test_verdict_does_not_depend_on_how_many_shapes_are_shown(objective: str) -> None:
    """With one or two shapes shown, the recommended one is listed and the verdict is that of the whole list."""
    job: dict[str, Any] = {"device": "a100-sxm-80gb", "train_tokens": TOKENS, "objective": objective}
    long = search("gpt3-2.7b", **job)
    assert long.verdict is not None
    for top in (1, 2):
        short = search("gpt3-2.7b", top=top, **job)
        assert short.verdict is not None
        assert short.verdict.text == long.verdict.text
        assert short.candidates[short.verdict.rank - 1].changes == long.verdict.changes
        assert [shape.rank for shape in short.candidates] == [*range(1, len(short.candidates) + 1)]
        assert top <= len(short.candidates) <= top + 1


def test_verdict_on_a_served_model_counts_what_serving_costs() -> None:
    """Fewer key-value heads train no sooner, and are recommended where many tokens are served."""
    job: dict[str, Any] = {"device": "h100-sxm-80gb", "vary": ("kv_heads",), "train_tokens": TOKENS}
    job["objective"] = "cost"
    trained = search("llama-3-8b", usd_per_hour=2.5, **job)
    served = search("llama-3-8b", usd_per_hour=2.5, serve_tokens=1e12, **job)
    assert trained.verdict is not None
    assert served.verdict is not None
    best = served.candidates[served.verdict.rank - 1]
    assert best.effect is not None
    assert best.effect.net_speedup is not None
    assert best.lifetime is not None

    assert trained.verdict.code == "keep"
    assert served.verdict.code == "change"
    assert "dollars" in served.verdict.text
    assert best.effect.net_speedup.factor < 1.0 < best.lifetime.low
    assert best.lifetime.factor == pytest.approx(1.0 / best.cost_ratio)
    assert served.lifetime_usd is not None
    assert trained.lifetime_usd is None
