"""Layers without rotary positions (Llama 4, SmolLM3, Cohere 2): operations and config.json."""

from __future__ import annotations

import pytest

from shapewright.app.formats.registry import write_format
from shapewright.core.errors import ConfigError
from shapewright.lowering.model import lower
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig, with_changes
from shapewright.models.write import to_config_json
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

SMALL = {"hidden_size": 64, "num_heads": 4, "num_layers": 6, "vocab_size": 96}


def repeats(config: TransformerConfig, pipeline_parallel: int = 1) -> dict[str, int]:
    """Count the rotary and QK-norm operations of one prefill."""
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
def test_l2_norm_follows_rotary_positions(model: str, rotary: int, norms: int) -> None:
    """Llama 4 normalises queries and keys in layers with rotary positions only."""
    assert repeats(read_model(model).config) == {"rotary": rotary, "qk_norm": norms}


def test_norms_with_weights_are_on_all_layers() -> None:
    """Norms with weights apply to all layers; only l2 follows the positions."""
    config = TransformerConfig(**SMALL, rotary_layers=(True, True, False), qk_norm="per-head")
    assert repeats(config) == {"rotary": 4, "qk_norm": 6}


def test_the_slowest_stage_has_most_rotary_layers() -> None:
    """With stages of three layers, the slowest stage has three rotary layers."""
    config = TransformerConfig(**SMALL, rotary_layers=(False, True, False, True, True, True), qk_norm="l2")
    assert repeats(config, pipeline_parallel=2) == {"rotary": 3, "qk_norm": 3}


def test_a_deeper_model_continues_the_pattern() -> None:
    """A deeper model repeats the pattern, also in its config.json."""
    model = read_model("llama-4-scout")
    deeper = with_changes(model.config, {"num_layers": 50})
    assert [deeper.is_rotary_layer(layer) for layer in (47, 48, 49)] == [False, True, True]
    assert to_config_json(model, deeper)["num_hidden_layers"] == 50


def test_megatron_no_rope_freq() -> None:
    """Megatron's 1 is a layer without rotary positions, where no_rope_layers of transformers has 0."""
    config = read_model("smollm3-3b").config
    assert "--no-rope-freq [0,0,0,1,0,0,0,1," in write_format("megatron-args", config)
    with pytest.raises(ConfigError, match="rotary_layers"):
        write_format("torchtitan-toml", config)


def test_rotary_layers_need_rotary_positions() -> None:
    """The error names both fields."""
    with pytest.raises(ConfigError, match=r"rotary_layers=.* needs position_embedding='rotary'"):
        TransformerConfig(**SMALL, rotary_layers=(True, False), position_embedding="learned")
    assert TransformerConfig(**SMALL, rotary_layers=(True, True)) == TransformerConfig(**SMALL)
