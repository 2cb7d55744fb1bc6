"""Layers without rotary positions (Llama 4, SmolLM3, Cohere 2): what they do not run, and how they are written."""

from __future__ import annotations

import pytest

from shapewright.config import TransformerConfig, read_model
from shapewright.config.changes import with_changes
from shapewright.config.write import write_back
from shapewright.errors import ConfigError
from shapewright.formats import write_format
from shapewright.layout import ParallelLayout
from shapewright.lowering import lower
from shapewright.workload import Workload

SMALL = {"hidden_size": 64, "num_heads": 4, "num_layers": 6, "vocab_size": 96}


def repeats(config: TransformerConfig, pipeline_parallel: int = 1) -> dict[str, int]:
    """How often one prefill turns queries and keys, and normalises them."""
    operations = lower(
        config, Workload(phase="prefill", seq_len=64), ParallelLayout(pipeline_parallel=pipeline_parallel)
    )
    counted = {operation.name: int(operation.repeats) for operation in operations}
    return {name: counted.get(f"attention.{name}", 0) for name in ("rotary", "qk_norm")}


@pytest.mark.parametrize(
    ("model", "rotary", "norms"),
    [
        ("llama-4-scout", 36, 36),  # every fourth of 48 layers has neither
        ("llama-4-maverick", 36, 0),  # use_qk_norm is false
        ("smollm3-3b", 27, 0),  # every fourth of 36
        ("qwen3-8b", 36, 36),
    ],
)
def test_layers_without_positions_turn_and_normalise_nothing(model: str, rotary: int, norms: int) -> None:
    """Llama 4 normalises queries and keys where it turns them, and nowhere else."""
    assert repeats(read_model(model).config) == {"rotary": rotary, "qk_norm": norms}


def test_norms_with_weights_are_on_all_layers() -> None:
    """Only l2 follows the positions."""
    config = TransformerConfig(**SMALL, rotary_layers=(True, True, False), qk_norm="per-head")
    assert repeats(config) == {"rotary": 4, "qk_norm": 6}


def test_the_busiest_stage_is_one_with_most_positions() -> None:
    """Of stages of three layers, one has three with positions and the other one."""
    config = TransformerConfig(**SMALL, rotary_layers=(False, True, False, True, True, True), qk_norm="l2")
    assert repeats(config, pipeline_parallel=2) == {"rotary": 3, "qk_norm": 3}


def test_a_deeper_model_goes_on_with_the_pattern() -> None:
    """And its config.json says so."""
    model = read_model("llama-4-scout")
    deeper = with_changes(model.config, {"num_layers": 50})
    assert [deeper.is_rotary_layer(layer) for layer in (47, 48, 49)] == [False, True, True]
    assert write_back(model, deeper)["num_hidden_layers"] == 50


def test_megatron_is_told_which_layers_have_none() -> None:
    """Its 1 is a layer without rotary positions, where no_rope_layers of transformers has a 0."""
    config = read_model("smollm3-3b").config
    assert "--no-rope-freq [0,0,0,1,0,0,0,1," in write_format("megatron-args", config)
    with pytest.raises(ConfigError, match="rotary_layers"):
        write_format("torchtitan-toml", config)


def test_positions_of_another_kind_have_no_such_layers() -> None:
    """The message names both fields."""
    with pytest.raises(ConfigError, match=r"rotary_layers=.* needs position_embedding='rotary'"):
        TransformerConfig(**SMALL, rotary_layers=(True, False), position_embedding="learned")
    assert TransformerConfig(**SMALL, rotary_layers=(True, True)) == TransformerConfig(**SMALL)
