"""Models with layers that nothing here prices are refused by name, never read as a transformer of their sizes."""

from __future__ import annotations

from typing import Any

import pytest

from shapewright.config.hf import read_hf
from shapewright.errors import ConfigError

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "rms_norm_eps": 1e-5}


@pytest.mark.parametrize(
    ("model_type", "key", "value", "told"),
    [
        # Keys as config.json files of the hub have them.
        ("jamba", "attn_layer_period", 8, "attn_layer_period"),
        ("falcon_h1", "mamba_d_state", 256, "mamba_d_state"),
        ("nemotron_h", "hybrid_override_pattern", "M-M*-", "hybrid_override_pattern"),
        ("kimi_linear", "linear_attn_config", {"kda_layers": [1]}, "linear_attn_config"),
        ("qwen3_next", "linear_num_key_heads", 16, "linear_num_key_heads"),
        ("lfm2", "conv_L_cache", 3, "conv_L_cache"),
        ("zamba2", "layers_block_type", ["attention", "mamba"], "layers_block_type 'mamba'"),
        ("qwen3_5_text", "layer_types", ["linear_attention", "full_attention"], "layer_types 'linear_attention'"),
        ("minimax_m1", "attn_type_list", [0, 1], "attn_type_list 0"),
        ("recurrent_gemma", "lru_width", 2560, "lru_width"),
    ],
)
def test_layers_without_softmax_attention(model_type: str, key: str, value: object, told: str) -> None:
    """State-space, linear-attention and convolution layers are refused, with the key that tells of them."""
    with pytest.raises(ConfigError) as caught:
        read_hf({**TINY, "model_type": model_type, key: value})

    message = str(caught.value)
    assert message.startswith(f"model_type '{model_type}' has layers without softmax attention ({told})")
    assert "give a transformer" in message


@pytest.mark.parametrize("beside", [{}, {"rms_norm_eps": 1e-6}])
def test_a_model_without_heads(beside: dict[str, Any]) -> None:
    """A pure state-space model is refused for what it is, not for the heads that it lacks."""
    mamba = {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "state_size": 16}
    with pytest.raises(ConfigError, match=r"without softmax attention \(state_size\)"):
        read_hf({**mamba, **beside})


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("gemma3n_text", "embeddings of their own"),
        ("gemma4_text", "heads of several widths"),
        ("longcat_flash", "two attentions"),
        ("nemotron-nas", "different widths"),
        ("step3_text", "queries in two factors"),
        ("xlstm", "recurrent layers"),
    ],
)
def test_types_whose_keys_do_not_tell(model_type: str, words: str) -> None:
    """Types that have sizes like everybody's and layers like nobody's are refused by name, with what they have."""
    with pytest.raises(ConfigError, match=f"'{model_type}' is not modelled: it has .*{words}"):
        read_hf({**TINY, "model_type": model_type})


@pytest.mark.parametrize(("key", "value"), [("use_cla", True), ("num_kv_shared_layers", 10)])
def test_layers_that_share_keys_and_values(key: str, value: object) -> None:
    """Hunyuan-Large's layers share caches in twos: their keys and values would be counted twice."""
    with pytest.raises(
        ConfigError, match=f"'hunyuan' has layers that share the keys and values of others .{key}={value}"
    ):
        read_hf({**TINY, "model_type": "hunyuan", key: value})
    assert read_hf({**TINY, "model_type": "hunyuan", key: type(value)(0)}).config.num_layers == 2


def test_a_dense_mlp_beside_experts() -> None:
    """Grok-2's layers run a dense MLP beside their experts: 269 billion would be read as 150."""
    with pytest.raises(ConfigError, match="'git' has a dense MLP beside the experts of a layer"):
        read_hf({**TINY, "model_type": "git", "residual_moe": True})


def test_layers_of_different_sizes_are_named() -> None:
    """A list that gives each layer another size is refused as that, one that gives all the same is a size."""
    config = {**TINY, "model_type": "brandnew", "intermediate_size": [128, 256]}
    with pytest.raises(ConfigError, match=r"intermediate_size=\[128, 256\] differs between layers"):
        read_hf(config)
    assert read_hf({**config, "intermediate_size": [128, 128]}).config.intermediate_size == 128


def test_a_part_of_a_multimodal_model_is_refused_too() -> None:
    """What stands within text_config counts as what stands at the top."""
    part = {**TINY, "model_type": "gemma3n_text", "intermediate_size": [128, 128]}
    with pytest.raises(ConfigError, match="'gemma3n_text' is not modelled"):
        read_hf({"model_type": "gemma3n", "text_config": part})


def test_a_config_without_a_type_is_refused_too() -> None:
    """Without model_type the keys tell."""
    with pytest.raises(ConfigError, match=r"the config has layers without softmax attention \(ssm_cfg\)"):
        read_hf({**TINY, "ssm_cfg": {"layer": "Mamba2"}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("layers_block_type", ["attention", "attention"]),
        ("attn_type_list", [1, 1]),
        ("mamba_d_state", None),
        ("conv_bias", False),
    ],
)
def test_layers_that_are_all_softmax_attention(key: str, value: object) -> None:
    """Lists that name softmax attention alone, and keys that are null or false, tell of no other layers."""
    reading = read_hf({**TINY, "model_type": "brandnew", key: value, "sliding_window": 16})
    assert reading.config.num_layers == 2
