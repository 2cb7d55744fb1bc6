"""Families of 2025: published config.json files and parameter counts."""

from __future__ import annotations

from typing import Any

import pytest

from shapewright.core.errors import ConfigError
from shapewright.models.hf_config import read_hf_config
from shapewright.models.parameters import count_parameters

_SEED_OSS_36B = {
    "model_type": "seed_oss",
    "vocab_size": 155136,
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_hidden_layers": 64,
    "num_attention_heads": 80,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "attention_out_bias": False,
    "tie_word_embeddings": False,
}
_MINIMAX_M2 = {
    "model_type": "minimax_m2",
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "use_mtp": True,
    "num_mtp_modules": 3,
}
_ERNIE_300B = {
    "model_type": "ernie4_5_moe",
    "vocab_size": 103424,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 54,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "moe_num_experts": 64,
    "moe_k": 8,
    "moe_intermediate_size": 3584,
    "moe_num_shared_experts": 0,
    "moe_layer_start_index": 3,
    "tie_word_embeddings": False,
}
_HUNYUAN_A13B = {
    "model_type": "hunyuan_v1_moe",
    "vocab_size": 128167,
    "hidden_size": 4096,
    "intermediate_size": 3072,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_experts": 64,
    "moe_topk": [8] * 32,
    "tie_word_embeddings": True,
}
_GRANITE_4_MICRO = {
    "model_type": "granitemoehybrid",
    "vocab_size": 100352,
    "hidden_size": 2560,
    "num_hidden_layers": 40,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "shared_intermediate_size": 8192,
    "intermediate_size": 8192,
    "num_local_experts": 0,
    "layer_types": ["attention"] * 40,
    "position_embedding_type": "rope",
    "tie_word_embeddings": True,
    "mamba_d_state": 128,
}
_EXAONE_32B = {
    "model_type": "exaone4",
    "vocab_size": 102400,
    "hidden_size": 5120,
    "intermediate_size": 27392,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "sliding_window_pattern": "LLLG",
    "tie_word_embeddings": False,
}
_GLM_4_32B = {
    "model_type": "glm4",
    "vocab_size": 151552,
    "hidden_size": 6144,
    "intermediate_size": 23040,
    "num_hidden_layers": 61,
    "num_attention_heads": 48,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": False,
}
_EXAONE_3_5 = {
    "model_type": "exaone",
    "activation_function": "silu",
    "vocab_size": 102400,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
}
# A type without a table; one expert for all is an MLP, and its lists say one number for all layers.
_HUNYUAN_7B = {
    "model_type": "hunyuan",
    "vocab_size": 129024,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "attention_head_dim": 128,
    "num_experts": 1,
    "moe_topk": [1] * 32,
    "moe_intermediate_size": [14336] * 32,
    "num_shared_expert": [1] * 32,
    "use_cla": False,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
_DEEPSEEK_V32 = {"model_type": "deepseek_v32", "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        # Billions, as the model cards say them.
        (_SEED_OSS_36B, 36, None),
        (_MINIMAX_M2, 230, None),  # the card's 10 used by a token are without the embedding and the logit matrix
        (_ERNIE_300B, 300, 47),
        (_HUNYUAN_A13B, 80, 13),
        (_GRANITE_4_MICRO, 3.4, None),
        (_EXAONE_32B, 32, None),
        (_GLM_4_32B, 32.6, None),
        (_EXAONE_3_5, 7.82, None),
        (_HUNYUAN_7B, 7.5, None),
        (_DEEPSEEK_V32, 671, 37),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else None,
)
def test_published_counts(config: dict[str, Any], total: float, active: float | None) -> None:
    """Total and active parameters equal the published ones up to rounding."""
    count = count_parameters(read_hf_config(config).config)

    assert count.total / 1e9 == pytest.approx(total, rel=0.01)
    if active is not None:
        assert count.active / 1e9 == pytest.approx(active, rel=0.05)


def test_active_parameters_of_minimax() -> None:
    """MiniMax publishes 10 billion active parameters, without embedding and logit matrix."""
    count = count_parameters(read_hf_config(_MINIMAX_M2).config)
    embedding_and_head = 2 * 200064 * 3072
    assert (count.active - embedding_and_head) / 1e9 == pytest.approx(10, rel=0.05)


def test_the_pattern_of_exaone() -> None:
    """Three layers have a window and rotary positions, the fourth has full attention without positions."""
    config = read_hf_config(_EXAONE_32B).config
    assert [config.window_of_layer(layer) for layer in range(8)] == [4096, 4096, 4096, 0] * 2
    assert config.rotary_layers[:4] == (True, True, True, False)


def test_layers_with_experts_of_ernie() -> None:
    """The first three layers are dense; the last one has experts although its index is given as -1."""
    config = read_hf_config({**_ERNIE_300B, "moe_layer_end_index": -1}).config
    assert [config.is_moe_layer(layer) for layer in (0, 2, 3, 53)] == [False, False, True, True]


def test_granite_with_mamba_layers() -> None:
    """Layers may be attention, Mamba-2 or both kinds; the sizes of Mamba-2 are read only if a layer has it."""
    mixed = read_hf_config({**_GRANITE_4_MICRO, "mamba_n_heads": 80, "layer_types": ["attention", "mamba"] * 20}).config
    assert mixed.layer_types == ("attention", "mamba2")
    assert (mixed.linear_num_value_heads, mixed.linear_value_head_dim, mixed.linear_key_head_dim) == (80, 64, 128)

    plain = read_hf_config(_GRANITE_4_MICRO).config
    assert plain.position_embedding == "rotary"
    assert (plain.layer_types, plain.linear_num_value_heads) == ((), 0)


def test_experts_that_differ_between_layers() -> None:
    """Hunyuan's lists of equal numbers are read as one number; different numbers are an error."""
    with pytest.raises(ConfigError, match=r"moe_topk=.* differs between layers"):
        read_hf_config({**_HUNYUAN_A13B, "moe_topk": [8] * 31 + [4]})


def test_omitted_parts_are_noted() -> None:
    """Multi-token prediction and sparse attention are mentioned in notes."""
    assert any(
        note.startswith("3 multi-token-prediction layer(s) omitted, as in transformers")
        for note in read_hf_config(_MINIMAX_M2).notes
    )
    notes = " ".join(read_hf_config(_DEEPSEEK_V32).notes)
    assert "training, whose kernels are not measured, is priced as dense attention" in notes
    assert "index_topk=2048" in notes


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({"num_hidden_layers": 64}, [0] * 62 + [4096] * 2),
        ({"num_hidden_layers": 64, "sliding_window": None}, [0] * 64),
        ({"num_hidden_layers": 4, "max_window_layers": 1, "sliding_window": 256}, [0, 256, 256, 256]),
        (
            {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            [0, 4096, 0],
        ),
    ],
)
def test_windows_of_dots1(keys: dict[str, Any], windows: list[int]) -> None:
    """Layers from max_window_layers on slide, as in transformers' Dots1Config; a null window leaves none."""
    experts = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
    config = read_hf_config({"model_type": "dots1", **experts, **keys}).config

    assert [config.window_of_layer(layer) for layer in range(config.num_layers)] == windows


def test_window_of_minimax() -> None:
    """Layers of softmax attention slide if there is a window, as in transformers' MiniMaxModel."""
    values = {"model_type": "minimax", "hidden_size": 4096, "num_hidden_layers": 4}
    windows = [read_hf_config({**values, **keys}).config.window_of_layer(0) for keys in ({}, {"sliding_window": 1024})]

    assert windows == [0, 1024]
