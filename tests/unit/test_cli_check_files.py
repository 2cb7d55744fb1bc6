"""Files written by check: SARIF for code hosts, and a fixed config in its original format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shapewright.app.cli import main
from shapewright.models.read import read_model

DEVICE = ["--device", "a100-sxm-80gb", "--fail-on", "never"]
GPT2 = {
    "model_type": "gpt2",
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
    "bos_token_id": 50256,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "note_to_self": "kept as it is",
}


def run(arguments: list[str]) -> int:
    """Run the command line in this process and give its exit code."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert isinstance(stop.value.code, int)
    return stop.value.code


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder to work in."""
    (tmp_path / "config.json").write_text(json.dumps(GPT2, indent=2), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_fix_keeps_the_form(folder: Path) -> None:
    """Only the vocabulary changes: upstream's field names, the order and every unrelated field stay."""
    assert run(["check", "config.json", *DEVICE, "--fix", "-o", "fixed.json"]) == 0

    fixed = json.loads((folder / "fixed.json").read_text(encoding="utf-8"))
    assert fixed == {**GPT2, "vocab_size": 50304}
    assert list(fixed) == list(GPT2)
    assert json.loads((folder / "config.json").read_text(encoding="utf-8")) == GPT2


def test_fixed_config_has_no_exact_fix(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A second round finds no exact suggestion and changes nothing."""
    run(["check", "config.json", *DEVICE, "--fix", "-o", "once.json"])
    capsys.readouterr()
    run(["check", "once.json", *DEVICE, "--fix", "-o", "twice.json"])

    assert "no exact suggestion" in capsys.readouterr().err
    assert (folder / "once.json").read_text(encoding="utf-8") == (folder / "twice.json").read_text(encoding="utf-8")


def test_preset_is_written_as_upstream_has_it(folder: Path) -> None:
    """A repaired preset is a config.json of its family, which reads as the repaired model."""
    run(["check", "gpt2", *DEVICE, "--fix", "-o", "gpt2.json"])
    written = json.loads((folder / "gpt2.json").read_text(encoding="utf-8"))

    assert (written["model_type"], written["n_embd"], written["vocab_size"]) == ("gpt2", 768, 50304)
    assert read_model(folder / "gpt2.json").config.vocab_size == 50304


@pytest.mark.parametrize(
    ("arguments", "work"),
    [
        (["search", "gpt2", "--device", "l40s", "-o"], "shapewright.app.api.searches.search"),
        (["search", "gpt2", "--device", "l40s", "--html"], "shapewright.app.api.searches.search"),
        (["plan", "gpt2", "--device", "l40s", "--gpus", "8", "--trace"], "shapewright.app.api.searches.plan"),
        (["plan", "gpt2", "--device", "l40s", "--gpus", "8", "--html"], "shapewright.app.api.searches.plan"),
        (["report", "gpt2", "--device", "l40s", "-o"], "shapewright.app.report.review.gather_review"),
        (
            ["serve-plan", "gpt2", "--device", "l40s", "--isl", "8", "--osl", "8", "--html"],
            "shapewright.app.api.serving.serve_plan",
        ),
        (["calibrate", "--store", "none.sqlite", "-o"], "shapewright.measure.store.database.Store"),
    ],
)
@pytest.mark.parametrize("target", ["no-such-folder/x", "."])
def test_search_does_not_start_with_an_unwritable_output(
    arguments: list[str], work: str, target: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line comes at once, and not after a search or a fit."""
    monkeypatch.setattr(work, lambda *_a, **_k: pytest.fail("the work began"))
    with pytest.raises(SystemExit) as stop:
        main([*arguments, target])

    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"shapewright: cannot write {target}: ")


@pytest.mark.parametrize("target", ["missing/s.sqlite", ".", "notes.txt", "notes.txt/s.sqlite", "/proc/s.sqlite"])
def test_bench_does_not_start_with_an_unwritable_store(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line before a process is started and PyTorch is loaded; what was there stays as it was."""
    (tmp_path / "notes.txt").write_text("no store " * 20, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "shapewright.measure.bench.request.open_measurer", lambda _options: pytest.fail("the work began")
    )
    with pytest.raises(SystemExit) as stop:
        main(["bench", "smoke", "--cpu", "--store", target])
    err = capsys.readouterr().err

    assert stop.value.code == 2
    assert err.startswith(f"shapewright: store {target}: ")
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("target", ["missing/fixed.json", ".", "nul\0byte"])
def test_unwritable_target_leaves_no_file(folder: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """If the config cannot be written there is one line, no report and no half-written file."""
    before = sorted(folder.rglob("*"))
    code = run(["check", "config.json", *DEVICE, "--fix", "-o", target])
    captured = capsys.readouterr()

    assert (code, captured.out) == (2, "")
    assert captured.err.startswith("shapewright: cannot write ")
    assert captured.err.count("\n") == 1
    assert sorted(folder.rglob("*")) == before


def test_flags_alone_have_no_form(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model given by flags cannot be written back; the error comes before any report."""
    shape = ["--hidden-size", "1024", "--num-layers", "2", "--num-heads", "16", "--vocab-size", "50257"]
    code = run(["check", *shape, *DEVICE, "--fix", "-o", "fixed.json"])
    captured = capsys.readouterr()

    assert (code, captured.out) == (2, "")
    assert "no form to write back" in captured.err
    assert not (folder / "fixed.json").exists()


def sarif(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The SARIF log that was printed."""
    captured = capsys.readouterr()
    assert captured.err == ""
    log = json.loads(captured.out)
    assert isinstance(log, dict)
    return log


def test_sarif(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A SARIF 2.1.0 log: each result names a rule that the log describes, and the file it is about."""
    assert folder.is_dir()
    run(["check", "config.json", *DEVICE, "--format", "sarif"])
    log = sarif(capsys)
    (sole_run,) = log["runs"]
    rules = [rule["id"] for rule in sole_run["tool"]["driver"]["rules"]]

    assert log["version"] == "2.1.0"
    assert len(rules) == len(set(rules))
    assert "TC101" in {result["ruleId"] for result in sole_run["results"]}
    for result in sole_run["results"]:
        assert rules[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in {"note", "warning", "error"}
        assert "\n" not in result["message"]["text"]
        assert result["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "config.json"


def test_sarif_place_is_a_uri(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path with a blank is written as URIs have it."""
    (folder / "my model").mkdir()
    (folder / "config.json").rename(folder / "my model" / "config.json")
    run(["check", "my model/config.json", *DEVICE, "--format", "sarif"])
    (artifact,) = sarif(capsys)["runs"][0]["artifacts"]

    assert artifact["location"]["uri"] == "my%20model/config.json"


def test_sarif_without_findings(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log without results is a log all the same."""
    assert folder.is_dir()
    run(["check", "config.json", *DEVICE, "--format", "sarif", "--ignore", "TC,WQ,PL,ME,CF"])

    assert sarif(capsys)["runs"][0]["results"] == []


def test_json_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The JSON report lists suppressed findings, the cost of each finding and the nearest better shapes."""
    assert folder.is_dir()
    run(["check", "config.json", *DEVICE, "--json", "--ignore", "tile-tail"])
    report = json.loads(capsys.readouterr().out)
    (vocabulary,) = [finding for finding in report["findings"] if finding["code"] == "TC101"]

    assert report["schema_version"] == 1
    assert report["num_suppressed"] >= 0
    assert vocabulary["cost_s"] == pytest.approx(vocabulary["cost_fraction"] * report["step_time_s"])
    assert vocabulary["suggestions"][0]["changes"] == {"vocab_size": 50304}
    assert report["better_shapes"][0]["step_time_s"] < report["step_time_s"]
