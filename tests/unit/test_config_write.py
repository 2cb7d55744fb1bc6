"""to_config_json: the original config.json with the changed fields updated."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapewright.core.errors import ConfigError
from shapewright.models.hf_config import read_hf_config
from shapewright.models.read import Model, list_presets, read_model
from shapewright.models.transformer import with_changes
from shapewright.models.write import to_config_json


def changed_keys(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Change a preset, write it, and return the keys that differ from its config.json."""
    model = read_model(name)
    before = copy.deepcopy(model.raw)
    written = to_config_json(model, with_changes(model.config, changes))
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
def test_only_changed_fields_are_written_with_the_keys_of_the_family(
    name: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    """The family's own key has the new value; all other keys stay."""
    assert changed_keys(name, changes) == expected


def test_head_dim_is_written_if_not_derived() -> None:
    """head_dim is added to the file only if it cannot be derived any more."""
    assert "head_dim" not in changed_keys("qwen2.5-7b", {"hidden_size": 4096, "num_heads": 32})
    assert changed_keys("llama-3-8b", {"hidden_size": 4097}) == {"hidden_size": 4097, "head_dim": 128}
    assert changed_keys("qwen2.5-7b", {"head_dim": 136}) == {"head_dim": 136}


def test_lists_per_layer_fit_the_new_depth() -> None:
    """layer_types is truncated to the new number of layers."""
    changes = changed_keys("gpt-oss-20b", {"num_layers": 6})
    assert changes.pop("num_hidden_layers") == 6
    if changes:
        assert changes == {"layer_types": ["sliding_attention", "full_attention"] * 3}


@pytest.mark.parametrize(("num_layers", "kinds"), [(3, ["dense", "sparse", "sparse"]), (5, ["dense", *["sparse"] * 4])])
def test_kinds_of_mlp_fit_the_new_depth(num_layers: int, kinds: list[str]) -> None:
    """A list of dense and sparse layers is truncated, or extended with its last entry."""
    raw = {"model_type": "glm4_moe_lite", "num_hidden_layers": 4, "mlp_layer_types": ["dense", *["sparse"] * 3]}
    model = Model(config=read_hf_config(raw).config, raw=raw, source="test")
    written = to_config_json(model, with_changes(model.config, {"num_layers": num_layers}))
    assert (written["num_hidden_layers"], written["mlp_layer_types"]) == (num_layers, kinds)


def test_other_lists_fit_the_new_depth() -> None:
    """Granite's layers stay attention and its MLP has the new width; ERNIE's experts extend to the last layer."""
    granite = changed_keys("granite-4.0-micro", {"num_layers": 42, "intermediate_size": 8320})
    assert granite == {
        "num_hidden_layers": 42, "layer_types": ["full_attention"] * 42, "shared_intermediate_size": 8320
    }  # fmt: skip
    assert changed_keys("ernie-4.5-21b-a3b", {"num_layers": 30}) == {"num_hidden_layers": 30, "moe_layer_end_index": 29}


def test_a_list_of_another_length_is_an_error() -> None:
    """mlp_layer_types with three entries for four layers is an error."""
    raw = {"model_type": "glm4_moe_lite", "num_hidden_layers": 4, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    with pytest.raises(ConfigError, match="mlp_layer_types has 3 entries but num_hidden_layers=4"):
        read_hf_config(raw)


def test_gpt_neo_pattern_fits_the_new_depth() -> None:
    """gpt_neo's nested list of layer types is rewritten."""
    assert changed_keys("gpt-neo-1.3b", {"num_layers": 3}) == {
        "num_layers": 3,
        "attention_types": [[["global", "local", "global"], 1]],
    }


def test_the_text_part_of_a_multimodal_config() -> None:
    """The change is written to the text part; other parts stay."""
    raw = {
        "model_type": "llava",
        "vision_config": {"hidden_size": 999},
        "text_config": {"model_type": "llama", "num_hidden_layers": 2},
    }
    config = read_hf_config(raw).config
    written = to_config_json(Model(config, raw, "test"), with_changes(config, {"vocab_size": 32064}))
    assert written == {**raw, "text_config": {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 32064}}


@pytest.mark.parametrize(
    ("name", "changes"),
    [("gpt2", {"norm": "rmsnorm"}), ("falcon-7b", {"num_kv_heads": 71}), ("gpt2", {"head_dim": 80})],
)
def test_changes_that_a_family_cannot_express(name: str, changes: dict[str, Any]) -> None:
    """A change without a key in the family's config.json is an error that names the field."""
    with pytest.raises(ConfigError, match=f"cannot express {next(iter(changes))}"):
        changed_keys(name, changes)


def test_models_without_a_config_json(tmp_path: Path) -> None:
    """A model described by fields is written field by field, and reads back the same."""
    flags = {"hidden_size": 64, "num_layers": 6, "num_heads": 4, "vocab_size": 100, "attention_windows": (8, 0)}
    model = read_model(None, flags)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_config_json(model, model.config)), encoding="utf-8")
    again = read_model(path)
    assert with_changes(again.config, {"name": ""}) == model.config
    assert again.notes == ()


@given(
    name=st.sampled_from([name for name in list_presets() if read_model(name).config.vocab_size]),
    changes=st.fixed_dictionaries(
        # 3 layers or fewer would all be dense in some presets with experts, which is an error.
        {},
        optional={"vocab_size": st.integers(1, 300_000), "num_layers": st.integers(4, 100)},
    ),
)
def test_written_configs_read_back(name: str, changes: dict[str, int]) -> None:
    """For every preset, depth and vocabulary can be changed, and the written config reads as the new one."""
    model = read_model(name)
    wanted = with_changes(model.config, changes)
    assert with_changes(read_hf_config(to_config_json(model, wanted)).config, {"name": name}) == wanted
