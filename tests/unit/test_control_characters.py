"""Control characters in names of files and their values reach neither messages nor printed pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import run
from shapewright.core.errors import ConfigError, ShapewrightError
from shapewright.hardware.device_file import device_template
from shapewright.hardware.loader import load_device
from shapewright.models.read import read_model

LLAMA = {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512}
HOSTILE = "\x1b]0;title\x07\x9b31m"


def controls(text: str) -> list[str]:
    """Characters of a text that a terminal acts on."""
    return [c for c in text if not c.isprintable() and c != "\n"]


def test_messages_are_one_printable_line() -> None:
    """An error quotes a name with its escape sequences written out."""
    assert str(ShapewrightError(f"no file {HOSTILE}\nat all")) == "no file \\x1b]0;title\\x07\\x9b31m at all"


@pytest.mark.parametrize(
    "arguments", [["predict", HOSTILE], ["rule", HOSTILE], [HOSTILE], ["predict", "--x" + HOSTILE]]
)
def test_arguments_are_not_echoed_raw(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Messages about arguments have no control characters."""
    code, out, err = run([*arguments], capsys)

    assert code == 2
    assert controls(out + err) == []


@pytest.mark.parametrize("value", ["9" * 5000, "word " * 2000, "\ud800" * 3000])
@pytest.mark.parametrize("arguments", [["predict", "--micro-batch-size"], ["plan", "--attention"], ["search", "--top"]])
def test_long_values_are_quoted_in_part(arguments: list[str], value: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A refused value of thousands of characters leaves the option and the pointer to the help to be read."""
    code, _, err = run([*arguments, value], capsys)

    assert code == 2
    assert len(err) < 1000
    assert err.endswith(" --help'\n")
    assert all(option in err for option in arguments[1:])


@pytest.mark.parametrize(
    "arguments",
    [["search", "gpt2", "--vary"], ["plan", "gpt2", "--gpus", "2", "--global-batch", "4", "--keep"], ["rule"]],
)
def test_long_names_are_quoted_in_part(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Names that the library refuses are cut too, and what is known stays."""
    device = [] if arguments == ["rule"] else ["--device", "h100-sxm-80gb"]
    code, _, err = run([arguments[0], *arguments[1:2], *device, *arguments[2:], "x" * 5000], capsys)

    assert code == 2
    assert len(err) < 1000
    assert "x" * 301 not in err


def test_names_of_folders_are_printed_without_controls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model named after its folder has a printable title."""
    folder = tmp_path / HOSTILE.replace("/", "")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    code, out, err = run(["predict", str(folder), "--device", "h100-sxm-80gb"], capsys)

    assert code == 0
    assert controls(out + err) == []


@pytest.mark.parametrize("model_type", ["\ud800", HOSTILE])
def test_types_that_cannot_be_printed_are_refused(model_type: str) -> None:
    """A model type with control characters or half of a surrogate pair is an error."""
    with pytest.raises(ConfigError, match=r"model_type=.* must be a text such as 'llama'"):
        read_model({**LLAMA, "model_type": model_type})
    with pytest.raises(ConfigError, match=r"name=.* printable characters"):
        read_model({**LLAMA, "model_type": "shapewright", "num_layers": 2, "num_heads": 4, "name": model_type})


def test_titles_of_devices_are_printable(tmp_path: Path) -> None:
    """A device file whose title has an escape sequence is refused."""
    file = tmp_path / "own.toml"
    template = device_template()
    assert 'title = "' in template
    file.write_text(template.replace('title = "', 'title = "\\u001b[31m'), encoding="utf-8")

    with pytest.raises(ShapewrightError, match=r"title=.* has control characters"):
        load_device(str(file))


def test_paths_and_keys_of_files_are_printed_without_controls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths that a command has written to, and unknown keys of a trainer's file, do not reach the terminal raw."""
    folder = tmp_path / HOSTILE.replace("/", "")
    folder.mkdir()
    (folder / "ds.json").write_text(json.dumps({"train_batch_size": 8, "bf16": {"enabled": True}, HOSTILE: 1}), "utf-8")
    code, out, err = run(
        ["report", "gpt2", "--device", "h100-sxm-80gb", "--no-search", "-o", str(folder / "x.html"),
         "--layout-from", str(folder / "ds.json")],
        capsys,
    )  # fmt: skip

    assert code == 0
    assert "wrote " in err
    assert "without " in err
    assert controls(out + err) == []
