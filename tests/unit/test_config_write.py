"""write_back: the form a model was read in, with what changed and nothing else."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapewright.config import Model, list_presets, read_model, with_changes, write_back
from shapewright.config.hf import read_hf
from shapewright.errors import ConfigError


def changed_keys(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Change a preset, write it back, and return what differs from its config.json."""
    model = read_model(name)
    before = copy.deepcopy(model.raw)
    written = write_back(model, with_changes(model.config, changes))
    assert model.raw == before, "the model that was read must stay as it is"
    assert before is not None
    assert not before.keys() - written.keys()
    return {key: value for key, value in written.items() if key not in before or before[key] != value}


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("gpt3-2.7b", {"num_heads": 20}, {"n_head": 20}),
        ("gpt3-2.7b", {"hidden_size": 2048, "vocab_size": 50304}, {"n_embd": 2048, "vocab_size": 50304}),
        ("mpt-7b", {"hidden_size": 4352, "num_heads": 34}, {"d_model": 4352, "n_heads": 34}),
        ("opt-1.3b", {"intermediate_size": 8256}, {"ffn_dim": 8256}),
        ("bloom-560m", {"num_layers": 20}, {"n_layer": 20}),
        ("t5-base", {"vocab_size": 32256}, {"vocab_size": 32256}),
        ("llama-3-8b", {"num_kv_heads": 4}, {"num_key_value_heads": 4}),
        ("mixtral-8x7b", {"moe_intermediate_size": 14592}, {"intermediate_size": 14592}),
        ("deepseek-v2-lite", {"num_heads": 32}, {"num_attention_heads": 32, "num_key_value_heads": 32}),
    ],
)
def test_only_what_changed_under_the_familys_keys(name: str, changes: dict[str, Any], expected: dict[str, Any]) -> None:
    """Each family's own spelling takes the new value; all other keys stay."""
    assert changed_keys(name, changes) == expected


def test_a_width_that_no_longer_follows_is_spelled_out() -> None:
    """head_dim appears in the file only when it cannot be derived any more."""
    assert "head_dim" not in changed_keys("qwen2.5-7b", {"hidden_size": 3584 + 28 * 8})
    assert changed_keys("qwen2.5-7b", {"head_dim": 136}) == {"head_dim": 136}


def test_lists_per_layer_fit_the_new_depth() -> None:
    """layer_types is cut to the new number of layers."""
    changes = changed_keys("gpt-oss-20b", {"num_layers": 6})
    assert changes.pop("num_hidden_layers") == 6
    if changes:
        assert changes == {"layer_types": ["sliding_attention", "full_attention"] * 3}


@pytest.mark.parametrize(("num_layers", "kinds"), [(3, ["dense", "sparse", "sparse"]), (5, ["dense", *["sparse"] * 4])])
def test_kinds_of_mlp_fit_the_new_depth(num_layers: int, kinds: list[str]) -> None:
    """A list of dense and sparse layers is cut, or continued with its last entry."""
    raw = {"model_type": "glm4_moe_lite", "num_hidden_layers": 4, "mlp_layer_types": ["dense", *["sparse"] * 3]}
    model = Model(config=read_hf(raw).config, raw=raw, source="test")
    written = write_back(model, with_changes(model.config, {"num_layers": num_layers}))
    assert (written["num_hidden_layers"], written["mlp_layer_types"]) == (num_layers, kinds)


def test_other_lists_fit_the_new_depth() -> None:
    """Granite's layers stay attention and its whole MLP takes the width; ERNIE's experts go on to the last layer."""
    granite = changed_keys("granite-4.0-micro", {"num_layers": 42, "intermediate_size": 8320})
    assert granite == {
        "num_hidden_layers": 42, "layer_types": ["full_attention"] * 42, "shared_intermediate_size": 8320
    }  # fmt: skip
    assert changed_keys("ernie-4.5-21b-a3b", {"num_layers": 30}) == {"num_hidden_layers": 30, "moe_layer_end_index": 29}


def test_a_list_of_another_length_is_refused() -> None:
    """Kinds of MLP for three of four layers say nothing of the fourth."""
    raw = {"model_type": "glm4_moe_lite", "num_hidden_layers": 4, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    with pytest.raises(ConfigError, match="mlp_layer_types has 3 entries but num_hidden_layers=4"):
        read_hf(raw)


def test_gpt_neo_pattern_fits_the_new_depth() -> None:
    """gpt_neo's nested list of layer kinds is written anew."""
    assert changed_keys("gpt-neo-1.3b", {"num_layers": 3}) == {
        "num_layers": 3,
        "attention_types": [[["global", "local", "global"], 1]],
    }


def test_the_text_part_of_a_multimodal_config() -> None:
    """The change goes into the text part; the other parts stay."""
    raw = {
        "model_type": "llava",
        "vision_config": {"hidden_size": 999},
        "text_config": {"model_type": "llama", "num_hidden_layers": 2},
    }
    config = read_hf(raw).config
    written = write_back(Model(config, raw, "test"), with_changes(config, {"vocab_size": 32064}))
    assert written == {**raw, "text_config": {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 32064}}


@pytest.mark.parametrize(
    ("name", "changes"),
    [("gpt2", {"norm": "rmsnorm"}), ("falcon-7b", {"num_kv_heads": 71}), ("gpt2", {"head_dim": 80})],
)
def test_changes_that_a_family_cannot_express(name: str, changes: dict[str, Any]) -> None:
    """A change that the family's config.json has no key for is an error that names it."""
    with pytest.raises(ConfigError, match=f"cannot express {next(iter(changes))}"):
        changed_keys(name, changes)


def test_flags_are_written_in_our_own_form(tmp_path: Path) -> None:
    """A model from flags is written field by field, and reads back the same."""
    flags = {"hidden_size": 64, "num_layers": 6, "num_heads": 4, "vocab_size": 100, "attention_windows": (8, 0)}
    model = read_model(None, flags)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(write_back(model, model.config)), encoding="utf-8")
    again = read_model(path)
    assert with_changes(again.config, {"name": ""}) == model.config
    assert again.notes == ()


@given(
    name=st.sampled_from(list_presets()),
    changes=st.fixed_dictionaries(
        {}, optional={"vocab_size": st.integers(1, 300_000), "num_layers": st.integers(1, 100)}
    ),
)
def test_what_is_written_reads_as_it_was_meant(name: str, changes: dict[str, int]) -> None:
    """For every preset: depth and vocabulary can be changed, and the result says exactly the new config."""
    model = read_model(name)
    wanted = with_changes(model.config, changes)
    assert with_changes(read_hf(write_back(model, wanted)).config, {"name": name}) == wanted
