"""Models with unsupported layers are errors and never read as a plain transformer."""

from __future__ import annotations

from typing import Any

import pytest

from shapewright.core.errors import ConfigError
from shapewright.models.hf_config import read_hf_config

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100, "rms_norm_eps": 1e-5}


@pytest.mark.parametrize(
    ("model_type", "key", "value", "stated"),
    [
        # Keys as config.json files of the hub have them.
        ("zamba2", "layers_block_type", ["attention", "mamba"], "layers_block_type='mamba'"),
        ("minimax_m1", "attn_type_list", [0, 1], "attn_type_list=0"),
        ("recurrent_gemma", "lru_width", 2560, "lru_width"),
        ("rwkv", "rwkv_version", 5, "rwkv_version"),
    ],
)
def test_layers_without_softmax_attention(model_type: str, key: str, value: object, stated: str) -> None:
    """State-space, linear-attention and convolution layers are errors that name the key."""
    with pytest.raises(ConfigError) as caught:
        read_hf_config({**TINY, "model_type": model_type, key: value})

    message = str(caught.value)
    assert message.startswith(f"model_type '{model_type}' has layers without softmax attention ({stated})")
    assert "give a transformer" in message


@pytest.mark.parametrize("beside", [{}, {"rms_norm_eps": 1e-6}])
def test_a_model_without_heads(beside: dict[str, Any]) -> None:
    """An unknown pure state-space model is rejected for its layers, not for its missing heads."""
    mamba = {"model_type": "mamba3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "state_size": 16}
    with pytest.raises(ConfigError, match=r"without softmax attention \(state_size\)"):
        read_hf_config({**mamba, **beside})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "qwen3_next", "layer_types": ["linear_attention", "mlp"]}, "layer_types has 'mlp'"),
        ({"model_type": "qwen3_5_text", "layer_types": ["conv"]}, "layer_types has 1 entries but num_hidden_layers=2"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "MX"}, "layers_block_type has 'X'"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "ME", "moe_latent_size": 32}, "moe_latent_size=32"),
        ({"model_type": "falcon_h1", "projectors_bias": True}, "projectors_bias=True must equal mamba_proj_bias=False"),
        ({"model_type": "lfm2", "block_ffn_dim_multiplier": "x"}, "block_ffn_dim_multiplier='x' must be a positive"),
        ({"model_type": "granitemoehybrid", "mamba_n_heads": 0}, "mamba_n_heads=0"),
    ],
)
def test_hybrids_with_values_that_are_not_read(config: dict[str, object], words: str) -> None:
    """Unknown kinds of layers and unsupported parts of hybrids are errors that name the key and its value."""
    with pytest.raises(ConfigError) as caught:
        read_hf_config({**TINY, **config})

    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("gemma3n_text", "per-layer embeddings"),
        ("gemma4_text", "several head widths"),
        ("longcat_flash", "two attention blocks"),
        ("nemotron-nas", "different widths"),
        ("step3_text", "factorised query projections"),
        ("xlstm", "recurrent layers"),
    ],
)
def test_unsupported_model_types(model_type: str, words: str) -> None:
    """Types that cannot be recognized by their keys are rejected by name, with the unsupported part."""
    with pytest.raises(ConfigError, match=f"'{model_type}' is not supported: it has .*{words}"):
        read_hf_config({**TINY, "model_type": model_type})


@pytest.mark.parametrize(("key", "value"), [("use_cla", True), ("num_kv_shared_layers", 10)])
def test_layers_that_share_keys_and_values(key: str, value: object) -> None:
    """Hunyuan-Large shares KV caches between pairs of layers, which would be counted twice."""
    with pytest.raises(
        ConfigError, match=f"'hunyuan' has layers that share the keys and values of other layers .{key}={value}"
    ):
        read_hf_config({**TINY, "model_type": "hunyuan", key: value})
    assert read_hf_config({**TINY, "model_type": "hunyuan", key: type(value)(0)}).config.num_layers == 2


def test_a_dense_mlp_in_layers_with_experts() -> None:
    """Grok-2's layers have a dense MLP and experts: 269 billion parameters would be read as 150 billion."""
    with pytest.raises(ConfigError, match="'git' has layers with both a dense MLP and experts"):
        read_hf_config({**TINY, "model_type": "git", "residual_moe": True})


def test_sizes_that_differ_between_layers() -> None:
    """A list of different sizes is an error, a list of equal sizes is one size."""
    config = {**TINY, "model_type": "brandnew", "intermediate_size": [128, 256]}
    with pytest.raises(ConfigError, match=r"intermediate_size=\[128, 256\] differs between layers"):
        read_hf_config(config)
    assert read_hf_config({**config, "intermediate_size": [128, 128]}).config.intermediate_size == 128


def test_unsupported_text_part() -> None:
    """Unsupported layers in text_config are found too."""
    part = {**TINY, "model_type": "gemma3n_text", "intermediate_size": [128, 128]}
    with pytest.raises(ConfigError, match="'gemma3n_text' is not supported"):
        read_hf_config({"model_type": "gemma3n", "text_config": part})


def test_unsupported_layers_without_model_type() -> None:
    """Without model_type, the keys are checked."""
    with pytest.raises(ConfigError, match=r"the config has layers without softmax attention \(ssm_cfg\)"):
        read_hf_config({**TINY, "ssm_cfg": {"layer": "Mamba2"}})


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
def test_keys_of_supported_layers(key: str, value: object) -> None:
    """Lists with softmax attention only, and keys that are null or false, are accepted."""
    reading = read_hf_config({**TINY, "model_type": "brandnew", key: value, "sliding_window": 16})
    assert reading.config.num_layers == 2


@pytest.mark.parametrize("name", ["FluxTransformer2DModel", "SD3Transformer2DModel"])
def test_two_streams_of_a_diffusion_transformer(name: str) -> None:
    """A transformer of diffusers whose text has weights of its own is refused with the reason."""
    with pytest.raises(ConfigError, match="two streams of tokens"):
        read_hf_config({"_class_name": name, "num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 16})


SPARSE = {**TINY, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "intermediate_size": 128}


@pytest.mark.parametrize("model_type", ["hy_v3", "glm4_moe", "unknown_moe"])
@pytest.mark.parametrize("kinds", [["dense"], ["dense", "sparse", "sparse"], ["dense", "spare"]])
def test_kinds_of_layers_that_do_not_fit(model_type: str, kinds: list[str]) -> None:
    """A list of another length, or with an unknown kind, is refused for types with and without a table."""
    with pytest.raises(ConfigError, match="mlp_layer_types"):
        read_hf_config({**SPARSE, "model_type": model_type, "mlp_layer_types": kinds})


@pytest.mark.parametrize("key", ["mlp_layer_types", "first_k_dense_replace"])
def test_a_mixture_without_sparse_layers_is_dense(key: str) -> None:
    """A type without a table whose layers are all dense has no experts."""
    value = ["dense", "dense"] if key == "mlp_layer_types" else 2
    config = read_hf_config({**SPARSE, "model_type": "unknown_moe", key: value}).config

    assert (config.num_experts, config.intermediate_size, config.shared_expert_gate) == (0, 128, False)


def test_the_router_of_phimoe_takes_two_experts() -> None:
    """Another number is refused: the model computes two."""
    with pytest.raises(ConfigError, match="num_experts_per_tok=4 of model_type 'phimoe'"):
        read_hf_config({**TINY, "model_type": "phimoe", "num_experts_per_tok": 4})
