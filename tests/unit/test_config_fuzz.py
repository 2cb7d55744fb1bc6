"""Reading a corrupted config gives a model or an error on one line."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from shapewright.core.errors import ShapewrightError
from shapewright.models.parameters import count_parameters
from shapewright.models.read import Model, list_presets, load_preset, read_model
from shapewright.models.transformer import with_changes
from shapewright.models.write import to_config_json

REAL_CONFIGS: list[dict[str, Any]] = [load_preset(name).config for name in list_presets()]
# One multimodal config, so that the way down to the text part is walked as well.
REAL_CONFIGS.append({"model_type": "llama4", "text_config": load_preset("llama-4-scout").config, "vision_config": {}})

GARBAGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-10, 10),
    st.integers(),
    st.sampled_from([10**18, -(10**18), 2**40, 2**40 + 1, 10**300, 0, -1, math.inf, math.nan, 0.5, 1e308]),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.sampled_from(["8", "4096", "gelu", "", "\ud800", "\n", "gated-", "gpt2", "llama", "mpt", "t5", "unheard-of"]),
    st.recursive(
        st.one_of(st.none(), st.integers(-3, 100), st.text(max_size=3)),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=6,
    ),
)


@st.composite
def mutated_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Strategy: a real config with some keys dropped, replaced by garbage, or taken from another family."""
    config = copy.deepcopy(draw(st.sampled_from(REAL_CONFIGS)))
    other = draw(st.sampled_from(REAL_CONFIGS))
    for _ in range(draw(st.integers(1, 4))):
        part = config
        if isinstance(config.get("text_config"), dict) and draw(st.booleans()):
            part = config["text_config"]
        keys = sorted(part) or ["hidden_size"]
        kind = draw(st.sampled_from(["drop", "garbage", "borrow", "nest"]))
        if kind == "drop":
            part.pop(draw(st.sampled_from(keys)), None)
        elif kind == "garbage":
            part[draw(st.sampled_from(keys))] = draw(GARBAGE)
        elif kind == "borrow":
            key = draw(st.sampled_from(sorted(other)))
            part[key] = copy.deepcopy(other[key])
        else:
            part["text_config"] = draw(GARBAGE)
    return config


def assert_model_or_one_line(path: Path, overrides: dict[str, Any]) -> None:
    """Read a config; count its parameters, or check that the error has one line."""
    try:
        model = read_model(path, overrides)
    except ShapewrightError as error:
        message = str(error)
        assert message
        assert "\n" not in message
        assert len(message) < 1000
        message.encode("utf-8")
        return
    assert isinstance(model, Model)
    assert count_parameters(model.config).total >= model.config.vocab_size
    assert all("\n" not in note for note in model.notes)
    if model.config.vocab_size < 2**40:
        is_of_images = model.config.patches is not None  # which have no vocabulary
        changes = {} if is_of_images else {"vocab_size": model.config.vocab_size + 1}
        wanted = with_changes(model.config, changes)
        assert json.loads(json.dumps(to_config_json(model, wanted)))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of the mutated config."""
    return tmp_path / "config.json"


OVERRIDES = st.dictionaries(
    st.sampled_from(["hidden_size", "num_heads", "num_layers", "attention_windows", "moe_layers", "norm", "nonsense"]),
    GARBAGE,
    max_size=2,
)


@given(config=mutated_configs(), overrides=OVERRIDES)
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@example(config={"model_type": "gpt_neo", "num_layers": 2**40}, overrides={})
@example(config={"model_type": "qwen3_moe", "num_hidden_layers": 2**40}, overrides={})
@example(config={"model_type": "gemma2", "num_hidden_layers": 65536, "layer_types": None}, overrides={})
@example(config={"model_type": "shapewright", "hidden_size": []}, overrides={})
def test_mutated_configs(path: Path, config: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Dropped keys and garbage values never cause a traceback."""
    path.write_text(json.dumps(config), encoding="utf-8")
    assert_model_or_one_line(path, overrides)


@given(
    text=st.sampled_from(REAL_CONFIGS).map(json.dumps),
    cut=st.floats(0, 1),
    inserted=st.binary(max_size=6),
)
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damaged_files(path: Path, text: str, cut: float, inserted: bytes) -> None:
    """Truncated files and files with inserted bytes never cause a traceback."""
    content = text.encode()
    place = int(cut * len(content))
    path.write_bytes(content[:place] + inserted)
    assert_model_or_one_line(path, {})
    path.write_bytes(content[:place] + inserted + content[place:])
    assert_model_or_one_line(path, {})


@given(name=st.text(max_size=40).filter(lambda text: "/" not in text))
@example(name="~")
@example(name="CON")
@example(name="..")
def test_arbitrary_names(name: str) -> None:
    """Any text as a name is a model or an error on one line; hub ids are tested elsewhere."""
    message = ""
    try:
        read_model(name)
    except ShapewrightError as error:
        message = str(error)
    assert "\n" not in message
