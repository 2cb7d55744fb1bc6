"""read_model: sources of models, overrides, and invalid input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shapewright.core.errors import ConfigError, ShapewrightError, UnknownModelError
from shapewright.hardware.loader import read_device_file
from shapewright.models.config_file import MAX_FILE_BYTES, parse_json_object, read_json_file
from shapewright.models.read import list_presets, load_preset, read_model
from shapewright.optimize.serving.traffic.trace import read_trace
from shapewright.prediction.loss.law import read_loss_law
from shapewright.pricing.calibration.file import read_calibration

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
    """Read an invalid source and return the error message, which has one line."""
    with pytest.raises(ConfigError) as caught:
        read_model(source, overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert message.isascii()
    return message


def test_a_preset() -> None:
    """A plain name is a preset, in any case."""
    model = read_model("GPT3-2.7b")
    assert (model.source, model.config.name) == ("preset gpt3-2.7b", "gpt3-2.7b")
    assert (model.config.hidden_size, model.config.num_heads, model.config.head_dim) == (2560, 32, 80)


def test_a_null_in_a_preset() -> None:
    """The preset whose config has a null is read with it, although TOML has no null."""
    assert load_preset("deepseek-v2-lite").config["q_lora_rank"] is None


def test_every_preset_can_be_read() -> None:
    """Every preset can be read and has the right name."""
    for name in list_presets():
        assert load_preset(name).name == name == read_model(name).config.name


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_file_or_its_folder(tmp_path: Path, as_folder: bool) -> None:
    """A config.json and its folder give the same model, named after the folder; the object is kept."""
    folder = tmp_path / "my-model"
    folder.mkdir()
    path = write_config(folder, {**LLAMA, "unrelated": [1, 2]})
    model = read_model(folder if as_folder else path)
    assert (model.config.name, model.config.head_dim) == ("my-model", 24)
    assert model.raw == {**LLAMA, "unrelated": [1, 2]}
    assert model.source == str(path)


def test_a_path_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """organization/name is a path if the path exists."""
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    write_config(folder, LLAMA)
    monkeypatch.chdir(tmp_path)
    assert read_model("org/name").config.name == "name"


def test_fields_alone() -> None:
    """Four fields make a model."""
    model = read_model(None, FLAGS)
    assert (model.config.head_dim, model.raw, model.source) == (16, None, "flags")


def test_missing_fields() -> None:
    """The missing fields are listed."""
    assert "missing: num_heads, vocab_size" in one_line(None, {"hidden_size": 64, "num_layers": 2})


def test_overrides_on_a_preset() -> None:
    """Overrides change fields, derived widths follow, and a note lists them."""
    model = read_model("gpt3-2.7b", {"num_heads": 20})
    assert (model.config.head_dim, model.config.num_kv_heads, model.config.intermediate_size) == (128, 20, 10240)
    assert "changed with the overrides: head_dim=128" in model.notes[0]
    assert read_model("gpt3-2.7b", {"hidden_size": 2048}).config.intermediate_size == 8192
    assert read_model("llama-3-8b", {"hidden_size": 2048}).config.intermediate_size == 14336
    # The width of the embedding is the hidden size, as in every other model.
    assert not any("embedding_size" in note for note in read_model("llama-3-8b", {"hidden_size": 2048}).notes)


KINDS_OF_CONFIG = {
    "preset": "gpt3-2.7b",
    "dict": load_preset("gpt3-2.7b").config,
    "Model": read_model("gpt3-2.7b"),
    "TransformerConfig": read_model("gpt3-2.7b").config,
}


@pytest.mark.parametrize("kind", KINDS_OF_CONFIG)
def test_overrides_apply_to_every_kind_of_config(kind: str) -> None:
    """Overrides change the fields of any kind of config, derived fields follow, and the original is unchanged."""
    source = KINDS_OF_CONFIG[kind]
    before = read_model(source)
    after = read_model(source, {"num_heads": 20, "num_layers": 8})

    assert (before.config.num_heads, before.config.num_layers) == (32, 32)
    assert (after.config.num_heads, after.config.head_dim, after.config.num_layers) == (20, 128, 8)
    assert after.notes == (*before.notes, "changed with the overrides: head_dim=128, num_kv_heads=20")
    assert (after.raw, after.source) == (before.raw, before.source)


@pytest.mark.parametrize("kind", KINDS_OF_CONFIG)
def test_unknown_overrides_are_errors_for_every_kind_of_config(kind: str) -> None:
    """A misspelt field is never ignored."""
    assert "did you mean 'num_heads'" in one_line(KINDS_OF_CONFIG[kind], {"num_haeds": 20})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"num_heads": "20"}, "num_heads='20' must be an integer"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_haeds": 20}, "did you mean 'num_heads'"),
        ({"num_heads": 24}, "hidden_size=2560 is not divisible by num_heads=24"),
    ],
)
def test_invalid_overrides(overrides: dict[str, Any], words: str) -> None:
    """Overrides are validated like other fields."""
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
        ("my_model.py:build", "is a module of PyTorch, which the commands predict, check, memory,"),
        ("./torchtitan/none.py::8B", "nothing at path"),
        ("../../etc/presets/gpt2", "nothing at path"),
    ],
)
def test_unknown_names(name: str, words: str) -> None:
    """An unknown name is an error on one line with similar names, or where to look."""
    assert words in one_line(name)


def test_a_python_file_that_is_no_config(tmp_path: Path) -> None:
    """It says how a callable is named, and not that Python is no JSON."""
    path = tmp_path / "model.py"
    path.write_text("def build(): ...", encoding="utf-8")

    assert "to trace a module, name what returns it, as FILE.py:CALLABLE" in one_line(path)


def test_unknown_preset_has_its_own_error() -> None:
    """An unknown name raises UnknownModelError."""
    with pytest.raises(UnknownModelError):
        load_preset("gpt3-2.7")


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    """A folder without config.json is an error."""
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
        (b'{"hidden_size": NaN}', "hidden_size=nan must be an integer"),
        (b'{"hidden_size": -Infinity}', "hidden_size=-inf must be an integer"),
        (b'{"hidden_size": {"__float__": "Infinity"}}', "hidden_size=inf must be an integer"),
        (b'{"__float__": "Infinity"}', "holds a number"),
        (b'{"a": 1, "a": 2}', "key 'a' appears twice"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nests deeper than 64"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "10000 digits"),
        (b'{"a": 1' + b" " * MAX_FILE_BYTES + b"}", "larger than 8 MiB"),
        (b'{"model_type": "llama", "hidden_size": 1e999}', "hidden_size=inf"),
        (b'{"model_type": "\\ud800", "hidden_size": 0}', "model_type="),
        (b"{}", "hidden_size or"),
    ],
)
def test_invalid_files(tmp_path: Path, content: bytes, words: str) -> None:
    """Invalid content is an error with a one-line message."""
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert words in one_line(path)


@pytest.mark.parametrize("limit", ["Infinity", "-Infinity", "NaN", '{"__float__": "Infinity"}'])
def test_infinite_numbers_of_other_fields_are_read(tmp_path: Path, limit: str) -> None:
    """Fields that are not read may hold what transformers writes for an infinite number."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA)[:-1] + f', "time_step_limit": [0.0, {limit}]}}', encoding="utf-8")
    assert read_model(path).config == read_model(write_config(tmp_path, LLAMA)).config


def test_requests_hold_no_infinite_numbers() -> None:
    """JSON that is no config has finite numbers."""
    with pytest.raises(ConfigError, match="NaN is not a JSON number"):
        parse_json_object(b'{"hidden_size": NaN}', "request body")


def test_the_message_names_the_file(tmp_path: Path) -> None:
    """An invalid value is reported with the path of its file."""
    path = write_config(tmp_path, {**LLAMA, "num_attention_heads": 0})
    assert one_line(path).endswith("num_attention_heads=0 must be an integer from 1 to 2**40")
    assert one_line(path).startswith("in '")


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    """Files with a byte order mark, as written by editors on Windows, are read."""
    path = tmp_path / "config.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert read_model(path).config.hidden_size == 64


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_an_error(tmp_path: Path) -> None:
    """A pipe, which could block forever, is an error wherever a user names a file."""
    path = tmp_path / "config.json"
    os.mkfifo(path)
    assert "not a regular file" in one_line(path)
    for read in (read_calibration, read_device_file, read_loss_law, read_trace):
        with pytest.raises(ShapewrightError, match="not a regular file"):
            read(path)


def test_import_is_light() -> None:
    """Importing the models package loads neither NumPy nor the hub client nor tomllib."""
    heavy = ("numpy", "huggingface_hub", "tomllib")
    code = f"import sys, shapewright.models; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.skipif(not Path("/proc/kmsg").exists(), reason="there is no kernel log to read")
def test_files_of_the_kernel_do_not_block() -> None:
    """The kernel's log, which looks like a regular file and waits for its next message, is an error at once."""
    with pytest.raises(ConfigError):
        read_json_file(Path("/proc/kmsg"))


def test_a_file_without_content_yet_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is opened so that a read which would wait fails."""
    flags: list[int] = []
    opened = os.open

    def watch(path: Any, given: int) -> int:
        flags.append(given)
        return opened(path, given)

    monkeypatch.setattr(os, "open", watch)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    read_json_file(tmp_path / "config.json")

    assert flags[0] & os.O_NONBLOCK
