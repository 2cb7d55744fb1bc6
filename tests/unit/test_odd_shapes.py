"""Odd shapes: predicted and searched with their heads kept, and checked with findings and a combined fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shapewright
from command_line import run
from shapewright.models.read import read_model
from shapewright.models.write import to_config_json

_ODD = ["llama-3-8b", "--hidden-size", "4097", "--device", "h100-sxm-80gb"]


@pytest.mark.parametrize(("hidden_size", "head_dim"), [(4097, 128), (4160, 128), (5120, 128)])
def test_a_new_width_keeps_the_heads_of_a_preset(hidden_size: int, head_dim: int) -> None:
    """The hidden size alone changes: Llama-3-8B keeps heads of 128, and a note says so."""
    model = read_model("llama-3-8b", {"hidden_size": hidden_size})
    assert (model.config.num_heads, model.config.head_dim) == (32, head_dim)
    assert any("head_dim=128 is kept: 32 heads are 4096 wide" in note for note in model.notes)


def test_heads_without_a_field_follow_the_width() -> None:
    """The config.json of GPT-2 has no head width: it follows where the heads divide the width, else it is kept."""
    assert read_model("gpt2", {"hidden_size": 960}).config.head_dim == 80
    assert read_model("gpt2", {"hidden_size": 1000}).config.head_dim == 64


def test_odd_width_can_be_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    """The command of the README's first paragraph runs as typed."""
    code, out, _ = run(["predict", *_ODD], capsys)
    assert code == 0
    assert "--hidden-size is 4097" in out


def test_odd_baseline_is_searched(capsys: pytest.CaptureFixture[str]) -> None:
    """A baseline off every grid: its neighbour 4096 is listed, 3.4 times as fast, and no field is left out."""
    code, out, _ = run(["search", *_ODD, "--head-dim", "128", "--json"], capsys)
    assert code == 0
    found = json.loads(out)
    changes = [shape["changes"] for shape in found["candidates"]]
    neighbours = [each for each in changes if each.get("hidden_size", {}).get("to") == 4096]
    assert any(set(each) <= {"hidden_size", "intermediate_size"} for each in neighbours)
    assert not any("is not varied" in note for note in found["notes"])


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 3000, "intermediate_size": 11007, "head_dim": 100, "num_heads": 30, "num_kv_heads": 10},
        {"hidden_size": 4097, "num_heads": 17},
        {"hidden_size": 4104, "num_heads": 32, "head_dim": 128},
    ],
)
def test_baselines_off_every_grid_have_faster_neighbours(sizes: dict[str, int]) -> None:
    """Whatever the baseline, aligned widths around it are among the shapes searched."""
    result = shapewright.search(overrides={**sizes, "num_layers": 32, "vocab_size": 32003}, device="h100-sxm-80gb")
    widths = {candidate.config.hidden_size for candidate in result.candidates}
    assert any(width % 64 == 0 for width in widths)


@pytest.mark.parametrize(
    ("name", "layout", "overrides", "changes"),
    [
        ("mixtral-8x7b", {"tensor_parallel": 8}, {"hidden_size": 4097}, {"hidden_size": (4097, 4096)}),
        (
            "gpt2-xl",
            {},
            {"hidden_size": 1601},
            {"hidden_size": (1601, 1600), "intermediate_size": (6404, 6400)},
        ),
        ("gpt3-2.7b", {}, {"intermediate_size": 10241}, {"intermediate_size": (10241, 10240)}),
    ],
)
def test_aligned_neighbor_is_listed(
    name: str, layout: dict[str, int], overrides: dict[str, int], changes: dict[str, tuple[int, int]]
) -> None:
    """Also where a range ended at the baseline, and where another MLP width is slightly faster per parameter."""
    result = shapewright.search(name, overrides=overrides, device="a100-sxm-40gb", layout=layout)
    assert changes in [candidate.changes for candidate in result.candidates]


def test_changes_of_suggestions_leave_out_what_stays() -> None:
    """Of Llama-3-8B at 4097 the MLP is aligned already: it is a part of no suggestion, as it is of no title."""
    report = shapewright.check("llama-3-8b", overrides={"hidden_size": 4097}, device="h100-sxm-80gb")
    changes = [suggestion.changes for finding in report.findings for suggestion in finding.suggestions]
    assert {"hidden_size": 4096, "embedding_size": 4096} in changes
    assert not any(each.get("intermediate_size") == 14336 for each in changes)


def test_a_fix_of_the_width_leaves_experts_as_they_are() -> None:
    """Mixtral has experts alone: a width of the dense MLP sets nothing, and typed would set that of the experts."""
    given = {"hidden_size": 4196}
    report = shapewright.check("mixtral-8x7b", overrides=given, device="h100-sxm-80gb")
    assert report.combined_fix is not None
    assert set(report.combined_fix.changes) == {"hidden_size", "embedding_size"}
    typed = shapewright.predict(
        "mixtral-8x7b", overrides={**given, **report.combined_fix.changes}, device="h100-sxm-80gb"
    )
    assert typed.step_time_s == pytest.approx(report.combined_fix.step_time_s)


def test_a_combined_fix_states_what_would_follow() -> None:
    """The MLP of GPT-3 follows a typed hidden size; where the fix was predicted with its old width, it says so."""
    given, layout = {"hidden_size": 2584, "vocab_size": 50258}, {"tensor_parallel": 4}
    report = shapewright.check("gpt3-2.7b", overrides=given, layout=layout, device="a100-sxm-80gb")
    fix = report.combined_fix
    assert fix is not None
    assert "intermediate_size=10336" in fix.title
    degrees = {name: fix.changes[name] for name in ("tensor_parallel", "data_parallel")}
    sizes = {name: value for name, value in fix.changes.items() if name not in degrees}
    typed = shapewright.predict(
        "gpt3-2.7b",
        overrides={**given, **sizes},
        layout=degrees,
        workload=dict(fix.compared_at),
        device="a100-sxm-80gb",
    )
    assert typed.step_time_s == pytest.approx(fix.step_time_s)


_UNALIGNED = {
    "hidden_size": 3000,
    "num_layers": 32,
    "intermediate_size": 11007,
    "vocab_size": 32003,
    "head_dim": 100,
    "num_heads": 30,
    "num_kv_heads": 10,
    "gated_mlp": True,
}


def unaligned(**layout: int) -> shapewright.CheckReport:
    """Check h=3000, f=11007, v=32003 with heads of 100 on an H100."""
    return shapewright.check(None, overrides=_UNALIGNED, device="h100-sxm-80gb", layout=layout)


@pytest.mark.parametrize(
    "sizes", [{"hidden_size": 769}, {"hidden_size": 1000, "num_heads": 10}, {"num_heads": 8}, {"hidden_size": 1030}]
)
def test_shapes_around_an_odd_width_can_be_written(sizes: dict[str, int]) -> None:
    """The config.json of GPT-2 has no head width, so heads divide every width found, and every field is varied."""
    result = shapewright.search("gpt2", overrides=sizes, device="h100-sxm-80gb", top=40)

    assert {candidate.config.vocab_size for candidate in result.candidates} & {50304, 50432}
    assert not any("has no field for it" in note for note in result.notes)
    for candidate in result.candidates:
        config = candidate.config
        assert config.hidden_size == config.num_heads * config.head_dim
        assert to_config_json(read_model("gpt2"), config)["n_embd"] == config.hidden_size


def test_the_right_field_is_blamed() -> None:
    """The odd MLP width costs most; the hidden size, a multiple of 8, has only what it costs once that is fixed."""
    costs = {finding.code: finding.cost_fraction or 0.0 for finding in unaligned().findings}

    assert costs["TC105"] > 0.5
    assert costs["TC102"] < 0.05
    assert sum(costs.values()) < 1.0


def test_suggestions_show_every_field_they_set() -> None:
    """A suggestion names each field that it changes, and applying it gives the stated result."""
    scenario = shapewright.build_scenario(None, "h100-sxm-80gb", overrides=_UNALIGNED)
    for finding in unaligned().findings:
        for suggestion in finding.suggestions:
            named = {name for name in suggestion.changes if name in suggestion.title} | {finding.field.split(".")[1]}
            silent = set(suggestion.changes) - named - {"v_head_dim", "embedding_size"}
            assert all(getattr(scenario.config, name) == suggestion.changes[name] for name in silent)


def test_combined_fix_is_predicted_and_faster() -> None:
    """The combined fix is predicted with its stated time, less than before, and costs add up to what it saves."""
    report = unaligned()
    fix = report.combined_fix
    assert fix is not None
    assert report.prediction is not None
    after = shapewright.predict(None, overrides={**_UNALIGNED, **fix.changes}, device="h100-sxm-80gb")

    assert fix.step_time_s == after.step_time_s < report.prediction.step_time_s / 2.0
    assert sum(finding.cost_fraction or 0.0 for finding in report.findings) == pytest.approx(fix.gain_fraction)
    assert set(fix.codes) == {"TC101", "TC102", "TC105"}


def test_an_aligned_neighbour_is_offered(capsys: pytest.CaptureFixture[str]) -> None:
    """Check of 4097 offers 4096 first, in the finding, the combined fix and the better shapes."""
    _, out, _ = run(["check", *_ODD, "--json"], capsys)
    report = json.loads(out)
    (finding,) = [each for each in report["findings"] if each["code"] == "TC102"]

    assert finding["suggestions"][0]["changes"]["hidden_size"] == 4096
    assert report["combined_fix"]["changes"]["hidden_size"] == 4096
    assert any(shape["changes"].get("hidden_size") == 4096 for shape in report["better_shapes"])


def test_layout_errors_do_not_hide_findings(capsys: pytest.CaptureFixture[str]) -> None:
    """Heads that do not split get head counts too, and findings about the shape are shown for a layout that can run."""
    report = unaligned(tensor_parallel=8)
    (heads, *_) = report.findings
    changes = [suggestion.changes for suggestion in heads.suggestions]
    assert heads.code == "PL101"
    assert {"num_heads": 32, "num_kv_heads": 8} in changes
    assert {"TC101", "TC102", "TC105"} <= {finding.code for finding in report.findings if finding.is_assumed}
    assert report.assumed_changes["tensor_parallel"] != 8

    _, out, _ = run(["check", "llama-3-8b", "--vocab-size", "128257", "--tp", "3", "--device", "h100-sxm-80gb"], capsys)
    before, _, after = out.partition("with tensor_parallel=2, with which the step can run:")
    assert "PL101" in before
    assert "TC101" in after


def test_savings_of_batch_rules_name_the_equal_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """A larger micro-batch is compared at an equal global batch, which text and JSON say."""
    question = ["check", "gpt3-125m", "--device", "h100-sxm-80gb", "--micro-batch-size", "1"]
    _, out, _ = run(question, capsys)
    (line,) = [line for line in out.splitlines() if line.startswith("    -> use ") and "global batch" in line]
    assert "at an equal global batch of " in line

    _, out, _ = run([*question, "--json"], capsys)
    (finding,) = [each for each in json.loads(out)["findings"] if each["code"] == "WQ101"]
    assert finding["suggestions"][0]["compared_at"]["global_batch_size"] > 1


def test_sarif_has_places_and_fingerprints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each result has the line of its field, and an identity that does not depend on the value."""
    sizes = '"hidden_size": 4100, "head_dim": 128, "num_hidden_layers": 4,'
    lines = ['{"model_type": "llama",', sizes, '"vocab_size": 32003}']
    path = tmp_path / "config.json"
    found = []
    for vocab_size in ("32003", "32005"):
        path.write_text("\n".join(lines).replace("32003", vocab_size), encoding="utf-8")
        _, out, _ = run(["check", str(path), "--device", "h100-sxm-80gb", "--format", "sarif"], capsys)
        (log,) = json.loads(out)["runs"]
        found.append({result["ruleId"]: result for result in log["results"]})
    first, second = found
    regions = {code: each["locations"][0]["physicalLocation"]["region"] for code, each in first.items()}

    assert (regions["TC102"]["startLine"], regions["TC101"]["startLine"]) == (2, 3)
    assert all(region["startLine"] >= 1 for region in regions.values())
    assert [each["TC101"]["partialFingerprints"] for each in (first, second)] == [
        first["TC101"]["partialFingerprints"]
    ] * 2
    assert len({str(result["partialFingerprints"]) for result in first.values()}) == len(first)


def test_plan_of_a_bad_shape_points_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan does not change an odd width, and points to check."""
    _, out, _ = run(["plan", *_ODD, "--gpus", "8", "--global-batch", "64"], capsys)
    assert "hidden_size=4097" in out
    assert "check says what they cost" in out
    assert out.splitlines()[-1].startswith("next: shapewright check llama-3-8b --hidden-size 4097 ")


def test_a_shape_that_a_format_cannot_hold_names_one_that_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best shape has an MLP width that nanoGPT's config has no field for; a later one can be written."""
    output = tmp_path / "model.py"
    search = ["search", "gpt2", "--device", "h100-sxm-80gb", "--format", "nanogpt", "-o", str(output)]
    code, _, err = run(search, capsys)
    assert code == 2
    assert "shapewright: rank 1: format nanogpt cannot express intermediate_size=" in err
    rank = err.strip().rpartition("--pick ")[2]
    assert not output.exists()

    code, _, err = run([*search, "--pick", rank], capsys)
    assert code == 0
    assert "n_embd = " in output.read_text(encoding="utf-8")


def test_plans_for_a_format_that_cannot_hold_the_model_are_not_searched(capsys: pytest.CaptureFixture[str]) -> None:
    """The model is refused at once, instead of a search that finds no plan to fit."""
    plan = ["plan", "llama-3-8b", "--device", "h100-sxm-80gb", "--gpus", "8", "--global-batch", "8"]
    code, _, err = run([*plan, "--format", "nanogpt"], capsys)

    assert code == 2
    assert "format nanogpt cannot express norm='rmsnorm'" in err


def test_a_search_keeps_the_shares_of_layer_types_that_do_not_repeat_evenly() -> None:
    """Nemotron-H names 52 layers whose first 46 repeat: 46 layers would have fewer Mamba layers an attention layer."""
    kept, free = (
        shapewright.search("nemotron-h-8b", device="h100-sxm-80gb", guard=guard, top=10) for guard in ("usual", "free")
    )

    assert {candidate.config.num_layers for candidate in kept.candidates} == {52}
    assert any("depth is not varied: the pattern of 46 layers" in note for note in kept.notes)
    assert {candidate.config.num_layers for candidate in free.candidates} != {52}


def test_the_combined_fix_is_of_the_findings_that_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """A finding that saves next to nothing is neither listed nor part of the fix: heads of GPT-2 keep their width."""
    _, out, _ = run(["check", "gpt2", "--tp", "8", "--device", "h100-sxm-80gb", "--json"], capsys)
    found = json.loads(out)
    codes = {finding["code"] for finding in found["findings"]}

    assert set(found["combined_fix"]["codes"]) <= codes
    assert "head_dim" not in found["combined_fix"]["changes"]


def test_the_verdict_over_several_devices_names_its_device() -> None:
    """The first device decides; shapes are ranked over all."""
    several, one = (
        shapewright.search("gpt3-2.7b", devices=devices, train_tokens=300 * 10**9, top=3)
        for devices in (["h100-sxm-80gb", "mi300x"], ["h100-sxm-80gb"])
    )

    words = "the verdict is that on h100-sxm-80gb alone"
    assert any(words in note for note in several.notes)
    assert not any(words in note for note in one.notes)
