"""A new user's first commands: odd shapes in predict, search and check, and what they print."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete

import shapewright
from command_line import COMMANDS, run
from fuzz.hostile import sound_store
from shapewright.app.cli.defaults import read_settings
from shapewright.app.cli.main import cli
from shapewright.core.notebook import NotebookDisplay
from shapewright.models import read_model

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


@pytest.mark.parametrize("path", COMMANDS)
def test_help_fits_one_screen(path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--help takes at most 40 lines of a terminal with 80 columns, and --help-all has what it leaves out."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run([*path.split(), "--help"], capsys)
    assert code == 0
    assert sum(max(1, -(-len(line) // 80)) for line in out.splitlines()) <= 40
    if "--help-all' explains" in out:
        _, whole, _ = run([*path.split(), "--help-all"], capsys)
        flags = {flag for parameter in COMMANDS[path].params for flag in parameter.opts if flag.startswith("-")}
        assert all(flag in whole for flag in flags)


def test_a_bare_call_shows_what_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command there are three commands to try, each of which exists."""
    code, out, _ = run([], capsys)
    tried = [line.split()[1] for line in out.splitlines() if line.startswith("  shapewright ")]
    assert code == 0
    assert len(tried) == 3
    assert set(tried) <= set(COMMANDS)


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


def _project(folder: Path, settings: str) -> Path:
    """Make a repository with these settings in its pyproject.toml, and return a folder inside it."""
    (folder / ".git").mkdir()
    (folder / "pyproject.toml").write_text(f"[tool.shapewright]\n{settings}\n", encoding="utf-8")
    inner = folder / "models"
    inner.mkdir()
    return inner


def test_default_device_of_the_environment(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """SHAPEWRIGHT_DEVICE is the device where none is given, and the output says so; a wrong one is named."""
    monkeypatch.setenv("SHAPEWRIGHT_DEVICE", "h200-sxm-141gb")
    code, out, _ = run(["predict", "gpt2"], capsys)
    assert (code, "note: device h200-sxm-141gb: SHAPEWRIGHT_DEVICE" in out) == (0, True)

    _, out, _ = run(["predict", "gpt2", "--device", "a100-sxm-40gb", "--json"], capsys)
    assert json.loads(out)["device"]["name"] == "a100-sxm-40gb"

    monkeypatch.setenv("SHAPEWRIGHT_DEVICE", "h2000")
    code, _, err = run(["predict", "gpt2"], capsys)
    assert (code, err.startswith("shapewright: SHAPEWRIGHT_DEVICE: unknown device 'h2000'")) == (2, True)


def test_settings_of_a_repository(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device, layout and ignored rules come from the pyproject.toml of the repository; flags override them."""
    monkeypatch.delenv("SHAPEWRIGHT_DEVICE", raising=False)
    settings = 'device = "h200-sxm-141gb"\nlayout = { tp = 2 }\nignore = ["TC101"]'
    monkeypatch.chdir(_project(tmp_path, settings))
    _, out, _ = run(["check", "gpt2", "--json"], capsys)
    report = json.loads(out)
    assert (report["device"]["name"], report["layout"]["tensor_parallel"]) == ("h200-sxm-141gb", 2)
    assert report["num_suppressed"] == 1
    assert any("tensor_parallel=2: [tool.shapewright] of" in note for note in report["notes"])

    _, out, _ = run(["check", "gpt2", "--tp", "1", "--json"], capsys)
    assert json.loads(out)["layout"]["tensor_parallel"] == 1


@pytest.mark.parametrize(
    ("settings", "word"),
    [("devices = 3", "'devices'"), ("layout = { width = 2 }", "'width'"), ("device = 3", "device=3")],
)
def test_wrong_settings_are_named(
    settings: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown or malformed setting is an error in one line."""
    monkeypatch.chdir(_project(tmp_path, settings))
    code, _, err = run(["predict", "gpt2", "--device", "h100-sxm-80gb"], capsys)
    assert (code, err.count("\n"), word in err) == (2, 1, True)


def test_settings_outside_of_the_repository_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pyproject.toml above the root of the repository, or above a folder outside of one, is left alone."""
    (tmp_path / "pyproject.toml").write_text('[tool.shapewright]\ndevice = "a100-sxm-40gb"\n', encoding="utf-8")
    inner = tmp_path / "repository"
    inner.mkdir()
    monkeypatch.chdir(inner)
    assert read_settings().device is None
    (inner / ".git").mkdir()
    assert read_settings().device is None
    assert read_settings(tmp_path).device == "a100-sxm-40gb"


def test_the_present_gpu_is_the_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU that nvidia-smi reports is used where nothing names one."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H100 80GB HBM3, 81559'\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("SHAPEWRIGHT_DEVICE", raising=False)
    monkeypatch.chdir(tmp_path)
    _, out, _ = run(["predict", "gpt2"], capsys)
    assert "note: device h100-sxm-80gb: the GPU of this machine" in out


def test_h100_means_the_sxm_board(capsys: pytest.CaptureFixture[str]) -> None:
    """A name that several boards share is the usual one, with a note that lists the others, in Python too."""
    _, out, _ = run(["predict", "gpt2", "--device", "h100"], capsys)
    assert "NVIDIA H100 SXM5 80 GB" in out
    assert "note: h100 is taken for h100-sxm-80gb; there are also h100-nvl-94gb, h100-pcie-80gb" in out
    assert any("taken for" in note for note in shapewright.build_scenario("gpt2", "h100").notes)
    assert not shapewright.build_scenario("gpt2", "h100-sxm-80gb").notes


@pytest.mark.parametrize("place", ["-", "/dev/stdin"])
@pytest.mark.parametrize("command", [["check", "--device", "h100-sxm-80gb"], ["params"]])
def test_config_from_standard_input(
    place: str, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CONFIG ``-`` and /dev/stdin read a config.json from standard input."""
    text = '{"model_type": "gpt2", "n_layer": 2}'
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(text.encode())))
    code, out, err = run([command[0], place, *command[1:], "--json"], capsys)
    assert (code in (0, 1), err) == (True, "")
    assert json.loads(out)["config"]["num_layers"] == 2


def test_colours_can_be_forced(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """FORCE_COLOR colours a pipe, and NO_COLOR wins over it."""
    question = ["predict", "gpt2", "--device", "h100-sxm-80gb"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in run(question, capsys)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in run(question, capsys)[1]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["predict", "gpt2", "--device"], "h100-sxm-80gb"),
        (["predict"], "llama-3-8b"),
        (["predict", "gpt2", "--software"], "nemo-2024"),
        (["rule"], "TC101"),
        (["check", "gpt2", "--ignore"], "TC101"),
        (["search", "gpt2", "--device"], "h100-sxm-80gb"),
    ],
)
def test_names_are_completed(words: list[str], expected: str) -> None:
    """A shell completes devices, presets, software and rules."""
    found = ShellComplete(cli, {}, "shapewright", "_SHAPEWRIGHT_COMPLETE").get_completions(words, expected[:3])
    assert expected in [item.value for item in found]


def test_a_table_is_judged_by_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Accuracy takes one csv of any name, known by its columns, and its help has them."""
    _, page, _ = run(["accuracy", "--help"], capsys)
    (header,) = [line.strip() for line in page.splitlines() if line.strip().startswith("device,")]
    path = tmp_path / "mine.csv"
    path.write_text(f"{header}\nh100-sxm-80gb,torch 2.8,gemm,bf16,4096,4096,4096,230\n", encoding="utf-8")
    code, out, _ = run(["accuracy", str(path)], capsys)
    assert (code, "torch 2.8" in out) == (0, True)

    path.write_text("a,b\n1,2\n", encoding="utf-8")
    code, _, err = run(["accuracy", str(path)], capsys)
    assert (code, "device, library, kernel, dtype, m, n, k, latency_us" in err) == (2, True)


@pytest.mark.parametrize(("sweep", "num_rows"), [([], 33), (["--sweep", "micro_batch_size=1,2"], 2)])
def test_predictions_as_csv(sweep: list[str], num_rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Predict --csv prints a row per operation, or per step of a sweep."""
    _, out, _ = run(["predict", "gpt2", "--device", "h100-sxm-80gb", "--csv", *sweep], capsys)
    header, *rows = csv.reader(out.splitlines())
    assert all(len(row) == len(header) for row in rows)
    assert len(rows) >= num_rows
    assert "time_low_s" in header or "step_time_low_s" in header


def test_plan_of_a_bad_shape_points_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    """A plan does not change an odd width, and points to check."""
    _, out, _ = run(["plan", *_ODD, "--gpus", "8", "--global-batch", "64"], capsys)
    assert "hidden_size=4097" in out
    assert "check says what they cost" in out
    assert out.splitlines()[-1].startswith("next: shapewright check llama-3-8b --hidden-size 4097 ")


@pytest.mark.parametrize("path", ["predict", "check", "memory"])
def test_next_command_keeps_the_scenario(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The next command is about the same model and layout, with options that it knows."""
    given = [
        "gpt2",
        "--num-layers",
        "3",
        "--device",
        "h100-sxm-80gb",
        "--tp",
        "2",
        "--dtype",
        "fp16",
        "--no-qkv-bias",
        "--node-size",
        "4",
    ]
    _, out, _ = run([path, *given], capsys)
    words = shlex.split(out.splitlines()[-1])[2:]
    assert "--software" not in words  # which was not given
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None
    parsed = command.make_context(words[0], words[1:]).params

    assert (parsed["model__num_layers"], parsed["model__qkv_bias"]) == (3, False)
    if words[0] != "plan":  # which chooses the layout
        assert (parsed["layout__tensor_parallel"], parsed["workload__dtype"]) == (2, "fp16")


@pytest.mark.parametrize(
    "command",
    [
        "check llama-3-8b --hidden-size 4097 --device h100-sxm-80gb",
        "check-files {config} --device h100-sxm-80gb",
        "predict gpt2 --device h100-sxm-80gb",
        "search gpt2 --device h100-sxm-80gb --top 1",
        "search gpt2 --device h100-sxm-80gb --top 1 --explain 1",
        "report gpt2 --device h100-sxm-80gb --no-search -o {folder}/review.html",
        "params gpt2",
        "devices",
        "devices show h100-sxm-80gb",
        "rule",
        "batch --global-batch 96",
        "store ls {store}",
        "store show {store}",
        "store verify {store}",
        "store export {store} {folder}/tables --format csv",
        "store merge {folder}/all.sqlite {store}",
        "store rescue {folder}/new.sqlite {store}",
        "accuracy {store}",
        "plot roofline --device h100-sxm-80gb -o {folder}/roofline.html",
    ],
)
def test_outputs_end_with_the_next_command(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line of a text output is a command that exists; JSON has none."""
    store, config = tmp_path / "own store.sqlite", tmp_path / "config.json"
    store.write_bytes(sound_store())
    config.write_text('{"model_type": "gpt2", "vocab_size": 50257}', encoding="utf-8")
    words = [word.format(store=store, config=config, folder=tmp_path) for word in command.split()]
    _, out, _ = run(words, capsys)
    first, second, *following = shlex.split(out.splitlines()[-1])
    assert (first, second) == ("next:", "shapewright")
    assert following[0] in COMMANDS or " ".join(following[:2]) in COMMANDS
    if any(word.endswith(".sqlite") for word in following):
        assert any(Path(word).exists() for word in following)
    if words[0] in ("check", "predict", "search", "params", "devices", "batch", "rule", "accuracy"):
        _, out, _ = run([*words, "--json"], capsys)
        assert "next: " not in out


@pytest.mark.parametrize(
    ("width", "command"),
    [
        ("140", "plan llama-3-70b --device h100-sxm-80gb --gpus 64 --global-batch 256"),
        ("100", "plan llama-3-70b --device h100-sxm-80gb --gpus 64 --global-batch 256"),
        ("100", "serve-plan llama-3-8b --device h100-sxm-80gb --isl 4000 --osl 500"),
        ("100", "search gpt3-2.7b --device a100-sxm-40gb --top 3"),
        ("80", "compare llama-3-8b --devices a100-sxm-80gb,h100-sxm-80gb --tp 8"),
    ],
)
def test_intervals_are_dropped_last(
    width: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A narrow table keeps an interval, says which columns it leaves out, and explains none of those."""
    monkeypatch.setenv("COLUMNS", width)
    _, out, _ = run(command.split(), capsys)
    assert "90 % interval  " in out
    left_out = {
        name.strip()
        for line in out.splitlines()
        if line.startswith(f"not shown at {width} columns: ")
        for name in line.partition(": ")[2].split(",")
    }
    assert left_out
    legend = next((line for line in out.splitlines() if line.startswith("letters: ")), "")
    assert not any(f"; {name}: " in legend for name in left_out)


def _results() -> list[NotebookDisplay]:
    """One result of each kind that is quick to make."""
    on = {"device": "h100-sxm-80gb"}
    return [
        shapewright.predict("gpt2", **on),
        shapewright.check("gpt2", **on),
        shapewright.fits("gpt2", **on),
        shapewright.compare("gpt2", devices=["h100-sxm-80gb", "a100-sxm-80gb"]),
        shapewright.sweep("gpt2", axes={"micro_batch_size": [1, 2]}, **on),
        shapewright.plan("gpt2", num_devices=8, global_batch_size=64, **on),
        shapewright.serve_plan("gpt2", prompt_len=100, output_len=10, **on),
        shapewright.search("gpt2", **on),
        shapewright.mfu("gpt2", seconds=1.0, num_devices=1, global_batch_size=64, **on),
    ]


def test_results_are_short_and_become_dicts_and_frames() -> None:
    """Printing a result takes a line, to_dict is the JSON of the command, to_frame has its rows."""
    pytest.importorskip("pandas", reason="to_frame needs pandas")
    for result in _results():
        assert len(repr(result)) < 1000
        assert str(result).startswith(type(result).__name__)
        assert json.loads(json.dumps(result.to_dict()))["schema_version"] == 1
        assert len(result.to_frame()) >= 1


def test_public_names_are_listed() -> None:
    """dir() lists the functions before they are imported."""
    assert {"predict", "check", "search", "TransformerConfig"} <= set(dir(shapewright))


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"tp": 2}, "tensor_parallel is a field: layout={'tensor_parallel': 2}"),
        ({"seq_len": 4096}, "seq_len is a field: workload={'seq_len': 4096}"),
        ({"hidden_size": 64}, "hidden_size is a field: overrides={'hidden_size': 64}"),
        ({"devise": "h100"}, "did you mean 'device'"),
    ],
)
def test_unknown_keywords_are_explained(keywords: dict[str, Any], words: str) -> None:
    """A keyword that a function does not have names the argument that takes it."""
    with pytest.raises(TypeError, match=re.escape(words)):
        shapewright.predict("gpt2", device="h100-sxm-80gb", **keywords)


def test_utilizations_above_one_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """HFU above 1 counts masked attention, which the JSON says."""
    question = ["llama-3-8b", "--device", "h100-sxm-80gb", "--seq-len", "1000000", "--micro-batch-size", "1"]
    _, out, _ = run(["predict", *question, "--tp", "8", "--recompute", "full", "--json"], capsys)
    found = json.loads(out)
    assert found["hfu"] > 1.0
    assert any(f"HFU is {found['hfu']:.0%}, above 1: it counts" in warning for warning in found["warnings"])
