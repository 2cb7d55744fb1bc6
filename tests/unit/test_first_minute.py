"""What a new user meets in the first minute: odd shapes that can be asked about, searched and checked."""

from __future__ import annotations

import json

import pytest

import shapewright
from command_line import COMMANDS, run
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
