"""Defaults of the command line: device, settings of a repository, standard input, colours, completion."""

from __future__ import annotations

import json
import os
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

import shapewright
from command_line import run
from shapewright.app.cli.defaults import read_settings
from shapewright.app.cli.main import cli


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


def test_settings_reach_every_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands other than check take device, layout and ignored rules of the repository too, and name them next."""
    monkeypatch.delenv("SHAPEWRIGHT_DEVICE", raising=False)
    settings = 'device = "h200-sxm-141gb"\nlayout = { tp = 2 }\nignore = ["TC101"]'
    monkeypatch.chdir(_project(tmp_path, settings))
    _, out, _ = run(["search", "gpt2", "--vary", "heads", "--top", "1"], capsys)
    assert "H200" in out
    assert "; TP 2" in out
    assert "next: shapewright report gpt2 --device h200-sxm-141gb" in out
    _, out, _ = run(["compare", "gpt2", "--devices", "h100,a100"], capsys)
    assert "; TP 2" in out
    Path("config.json").write_text('{"model_type": "gpt2", "vocab_size": 50258}', encoding="utf-8")
    code, out, err = run(["check-files", "config.json"], capsys)
    assert (code, "TC101" in out, "tensor_parallel=2" in err) == (0, False, True)
    code, _, err = run(["plot", "roofline", "-o", "roofline.html"], capsys)
    assert (code, "h200-sxm-141gb" in err) == (0, True)


@pytest.mark.parametrize(
    ("settings", "command", "words"),
    [
        ("layout = { tp = 16 }", "predict gpt2", "(tensor_parallel=16: [tool.shapewright] of "),
        ('ignore = ["TC999"]', "check gpt2", "pyproject.toml': unknown rule 'TC999'"),
        ('device = "v100-sxm2-32gb"', "predict gpt2 --dtype fp8", "(device v100-sxm2-32gb: [tool.shapewright] of "),
        ("layout = { tp = 2 }", "predict gpt2 --tp 16", None),
    ],
)
def test_errors_say_which_default_they_are_of(
    settings: str,
    command: str,
    words: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A value that nobody typed is named with the file that has it; one that was typed is not."""
    monkeypatch.delenv("SHAPEWRIGHT_DEVICE", raising=False)
    device = "" if "device" in settings else "device = 'h100-sxm-80gb'\n"
    monkeypatch.chdir(_project(tmp_path, device + settings))
    code, _, err = run(command.split(), capsys)

    assert (code, err.count("\n")) == (2, 1)
    assert "[tool.shapewright]" not in err if words is None else words in err


@pytest.mark.parametrize("command", ["search gpt2 --vary heads --top 1", "compare gpt2 --devices a100,h100"])
def test_the_next_command_comes_last(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes on defaults come before the next command, also where they go to standard error."""
    monkeypatch.chdir(_project(tmp_path, 'device = "h200-sxm-141gb"\nlayout = { tp = 2 }'))
    lines = CliRunner().invoke(cli, command.split(), prog_name="shapewright").output.splitlines()

    assert lines[-1].startswith("next: ")
    assert any("tensor_parallel=2: [tool.shapewright]" in line for line in lines)


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


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_a_malformed_file_of_settings_is_said(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings that cannot be read are not dropped without a word, in text and in JSON."""
    monkeypatch.chdir(_project(tmp_path, 'ignore = ["TC101"'))
    _, out, _ = run(["check", "gpt2", "--device", "h100-sxm-80gb", *arguments], capsys)

    assert "is malformed" in out
    assert "its settings are not used" in out


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


def test_a_model_of_standard_input_has_no_next_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command with - for CONFIG would wait for input where it is pasted."""
    content = b'{"model_type": "gpt2", "n_embd": 768, "n_layer": 2, "n_head": 12}'
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(content)))
    _, out, _ = run(["predict", "-", "--device", "h100-sxm-80gb"], capsys)

    assert "next:" not in out


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
        (["accuracy", "--device"], "h100-sxm-80gb"),
        (["compare", "gpt2", "--devices"], "h100-sxm-80gb"),
    ],
)
def test_names_are_completed(words: list[str], expected: str) -> None:
    """A shell completes devices, presets, software and rules."""
    found = ShellComplete(cli, {}, "shapewright", "_SHAPEWRIGHT_COMPLETE").get_completions(words, expected[:3])
    assert expected in [item.value for item in found]


@pytest.mark.parametrize("value", ["[" * 3000, "9" * 5000, "[]\na" + ".a" * 30_000 + " = 1"])
def test_settings_that_cannot_be_parsed(value: str, tmp_path: Path) -> None:
    """Nesting and digits beyond Python's limits stop no command, nor do keys that it takes minutes for."""
    inner = _project(tmp_path, f"ignore = {value}")

    assert read_settings(inner).where == ""


def test_settings_in_a_file_that_never_ends(tmp_path: Path) -> None:
    """A link to a file of the kernel that waits for its next message holds no settings, and does not stop commands."""
    waiting = Path("/proc/kmsg")
    if not os.access(waiting, os.R_OK):
        pytest.skip("only root may read it")
    (tmp_path / "pyproject.toml").symlink_to(waiting)

    assert read_settings(tmp_path).where == ""
