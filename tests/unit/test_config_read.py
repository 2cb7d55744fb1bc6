"""read_model: where models come from, overrides on top, and input that is no config."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shapewright.config import list_presets, load_preset, read_model
from shapewright.config.json_file import LARGEST_FILE_BYTES
from shapewright.errors import ConfigError, UnknownModelError

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 176,
    "vocab_size": 100,
    "head_dim": 24,
}
FLAGS: dict[str, Any] = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100}


def write_config(folder: Path, content: object) -> Path:
    """Write a config.json into a folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def one_line(source: object, overrides: dict[str, Any] | None = None) -> str:
    """Read something that must fail, and return the message."""
    with pytest.raises(ConfigError) as caught:
        read_model(source, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert message.isascii()
    return message


def test_a_preset() -> None:
    """A bare name is a preset, in upper or lower case."""
    model = read_model("GPT3-2.7b")
    assert (model.source, model.config.name) == ("preset gpt3-2.7b", "gpt3-2.7b")
    assert (model.config.hidden_size, model.config.num_heads, model.config.head_dim) == (2560, 32, 80)


def test_a_null_in_a_preset() -> None:
    """TOML has no null; the one preset that needs it still holds what the published file holds."""
    assert load_preset("deepseek-v2-lite").config["q_lora_rank"] is None


def test_every_preset_can_be_read() -> None:
    """No preset is damaged, and each knows its own name."""
    for name in list_presets():
        assert load_preset(name).name == name == read_model(name).config.name


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_file_or_its_folder(tmp_path: Path, as_folder: bool) -> None:
    """A config.json and the folder that holds it read alike, named after the folder; the object is kept."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    path = write_config(folder, {**LLAMA, "unrelated": [1, 2]})
    model = read_model(folder if as_folder else path)
    assert (model.config.name, model.config.head_dim) == ("my-model", 24)
    assert model.raw == {**LLAMA, "unrelated": [1, 2]}
    assert model.source == str(path)


def test_a_path_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """organisation/name is a path if something is there."""
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    write_config(folder, LLAMA)
    monkeypatch.chdir(tmp_path)
    assert read_model("org/name").config.name == "name"


def test_flags_alone() -> None:
    """Four flags make a model."""
    model = read_model(None, FLAGS)
    assert (model.config.head_dim, model.raw, model.source) == (16, None, "flags")


def test_too_few_flags() -> None:
    """The flags that are missing are named."""
    assert "missing: num_heads, vocab_size" in one_line(None, {"hidden_size": 64, "num_layers": 2})


def test_overrides_on_a_preset() -> None:
    """Overrides go on top, derived widths follow, and a note says which."""
    model = read_model("gpt3-2.7b", {"num_heads": 20})
    assert (model.config.head_dim, model.config.num_kv_heads, model.config.intermediate_size) == (128, 20, 10240)
    assert "followed the overrides: head_dim=128" in model.notes[0]
    assert read_model("gpt3-2.7b", {"hidden_size": 2048}).config.intermediate_size == 8192
    assert read_model("llama-3-8b", {"hidden_size": 2048}).config.intermediate_size == 14336


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"num_heads": "20"}, "num_heads='20' must be a whole number"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_haeds": 20}, "did you mean 'num_heads'"),
        ({"num_heads": 24}, "hidden_size=2560 is not divisible by num_heads=24"),
    ],
)
def test_overrides_that_make_no_sense(overrides: dict[str, Any], words: str) -> None:
    """Overrides are checked like everything else."""
    assert words in one_line("gpt3-2.7b", overrides)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt3-2.7", "did you mean 'gpt3-2.7b'"),
        ("lama-3-8b", "did you mean 'llama-3-8b'"),
        ("", "no preset, file or folder ''"),
        ("xyzzy\nplugh", "shapewright models"),
        ("a\0b", "a\\x00b"),
        ("x" * 5000, "File name too long"),
        ("~nobody-of-this-name/model", "cannot read '~nobody-of-this-name/model'"),
        ("./nothing/here", "nothing at path"),
        ("nothing.json", "nothing at path"),
        ("../../etc/presets/gpt2", "nothing at path"),
    ],
)
def test_names_of_nothing(name: str, words: str) -> None:
    """A name that leads nowhere is one line with what was meant, or where to look."""
    assert words in one_line(name)


def test_unknown_preset_has_its_own_error() -> None:
    """The error of an unknown name can be told from others."""
    with pytest.raises(UnknownModelError):
        load_preset("gpt3-2.7")


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    """A folder that holds no config.json says so."""
    assert "has no config.json" in one_line(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"\x80\x02}q\x00.", "not UTF-8"),
        (b'{"hidden_size": 64', "not valid JSON at line 1"),
        (b'{"hidden_size": 64,}', "not valid JSON"),
        (b"[1, 2]", "holds an array"),
        (b"null", "holds null"),
        (b'"text"', "holds a text"),
        (b'{"hidden_size": NaN}', "NaN is not a JSON number"),
        (b'{"hidden_size": -Infinity}', "-Infinity is not a JSON number"),
        (b'{"a": 1, "a": 2}', "key 'a' appears twice"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nests deeper than 64"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "10000 digits"),
        (b'{"a": 1' + b" " * LARGEST_FILE_BYTES + b"}", "larger than 8 MiB"),
        (b'{"model_type": "llama", "hidden_size": 1e999}', "hidden_size=inf"),
        (b'{"model_type": "\\ud800", "hidden_size": 0}', "hidden_size=0"),
        (b"{}", "hidden_size or"),
    ],
)
def test_files_that_are_no_config(tmp_path: Path, content: bytes, words: str) -> None:
    """Whatever the bytes, the answer is one line that says what is wrong with them."""
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert words in one_line(path)


def test_the_message_names_the_file(tmp_path: Path) -> None:
    """A value that makes no sense is reported with the file that it stands in."""
    path = write_config(tmp_path, {**LLAMA, "num_attention_heads": 0})
    assert one_line(path).endswith("num_attention_heads=0 must be a whole number from 1 to 2**40")
    assert one_line(path).startswith("in '")


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path) -> None:
    """Files that editors on Windows wrote are read."""
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert read_model(path).config.hidden_size == 64


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    """A pipe, which could block for ever, is refused."""
    path = tmp_path / "config.json"
    os.mkfifo(path)
    assert "no regular file" in one_line(path)


def test_import_is_light() -> None:
    """Importing the package of models loads neither NumPy nor the hub's client nor TOML."""
    heavy = ("numpy", "huggingface_hub", "tomllib")
    code = f"import sys, shapewright.config; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
