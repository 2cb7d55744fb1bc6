"""Reading config.json objects: text parts, unknown types, notes, invalid values."""

from __future__ import annotations

from typing import Any

import pytest

from shapewright.core.errors import ConfigError
from shapewright.models.hf_config import NATIVE_MODEL_TYPE, read_hf_config

TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}


def test_text_part_of_a_multimodal_config() -> None:
    """The language model of a multimodal config is read; a note lists the parts that are not modelled."""
    reading = read_hf_config(
        {"model_type": "llava", "vision_config": {"hidden_size": 999}, "text_config": {"model_type": "llama", **TINY}}
    )
    assert (reading.config.hidden_size, reading.config.model_type) == (64, "llama")
    assert "only the text part (text_config) is modelled" in reading.notes


def test_text_part_within_a_part() -> None:
    """Nested parts are followed (thinker_config.text_config), and a type can be implied by its parent's."""
    reading = read_hf_config({"model_type": "gemma3", "thinker_config": {"model_type": "gemma3", "text_config": TINY}})
    assert reading.text_path == ("thinker_config", "text_config")
    assert reading.config.model_type == "gemma3_text"
    assert reading.config.qk_norm == "per-head"


def test_sizes_of_the_text_part_of_a_vision_model() -> None:
    """Sizes of the language model at the top level, next to a vision part, are read, with the same note."""
    reading = read_hf_config(
        {"model_type": "qwen2_vl", **TINY, "num_key_value_heads": 2, "vision_config": {"depth": 32}}
    )
    assert reading.config.num_kv_heads == 2
    assert any("only the language model" in note for note in reading.notes)


def test_tying_is_inherited_by_the_text_part() -> None:
    """tie_word_embeddings at the top level applies to the text part unless that has its own."""
    part = {"model_type": "llama", **TINY}
    assert read_hf_config({"tie_word_embeddings": True, "text_config": part}).config.tied_embeddings
    assert not read_hf_config(
        {"tie_word_embeddings": True, "text_config": {**part, "tie_word_embeddings": False}}
    ).config.tied_embeddings


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "fp8", "weight_block_size": None}, False),
        ({"quant_method": "gptq", "bits": 4}, False),
        ({}, False),
        (None, False),
    ],
)
def test_block_scales_of_fp8_checkpoints(quantization: object, expected: bool) -> None:
    """Block scales are recognized in quantization_config, at the top level or in the text part."""
    plain = {"model_type": "llama", **TINY}
    own = {**plain, "quantization_config": quantization}

    assert read_hf_config(own).has_block_scales == expected
    assert read_hf_config({"quantization_config": quantization, "text_config": plain}).has_block_scales == expected
    assert read_hf_config({"text_config": own}).has_block_scales == expected
    assert not read_hf_config(plain).has_block_scales


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ("fp8", "quantization_config='fp8' must be an object"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size=128 must be a list"),
    ],
)
def test_malformed_quantization_configs(quantization: object, words: str) -> None:
    """A quantization config of the wrong type, or without a list of block sizes, is an error."""
    with pytest.raises(ConfigError, match=words):
        read_hf_config({"model_type": "llama", **TINY, "quantization_config": quantization})


def test_unknown_type_is_read_by_field_names() -> None:
    """An unknown model_type is read by common field names; a note lists the assumptions."""
    reading = read_hf_config(
        {
            "model_type": "brandnew",
            "n_embd": 96,
            "n_layers": 3,
            "n_heads": 6,
            "vocab_size": 100,
            "num_kv_heads": 2,
            "rms_norm_eps": 1e-5,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
        }
    )
    config = reading.config
    assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads) == (96, 3, 6, 2)
    assert (config.num_experts, config.moe_layers) == (8, (False, True, True))
    assert config.norm == "rmsnorm"
    assert config.gated_mlp
    (note,) = reading.notes
    assert "'brandnew' is not known" in note
    assert "assuming a decoder, RMSNorm, a gated MLP, rotary positions" in note


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({"mlp_layer_types": ["dense", "sparse", "sparse"]}, (False, True, True)),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"], "first_k_dense_replace": 1}, (True, False, True)),
        ({"num_dense_layers": 2}, (False, False, True)),
        ({"first_k_dense_replace": 1}, (False, True, True)),
        ({}, (True, True, True)),
    ],
)
def test_layers_with_experts_of_an_unknown_type(stated: dict[str, Any], expected: tuple[bool, ...]) -> None:
    """Layers with experts come from mlp_layer_types, or else all but the first dense layers have them."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "rms_norm_eps": 1e-5}
    config = read_hf_config({"model_type": "brandnew", **TINY, "num_hidden_layers": 3, **experts, **stated}).config
    assert tuple(config.is_moe_layer(layer) for layer in range(3)) == expected


@pytest.mark.parametrize("key", ["hidden_act", "activation_function", "hidden_activation"])
def test_unknown_type_with_a_gate(key: str) -> None:
    """SiLU implies a gated MLP, under any of the keys for the activation."""
    assert read_hf_config({"model_type": "brandnew", **TINY, key: "silu"}).config.gated_mlp
    for plain in ("gelu_new", "gelu_pytorch_tanh"):  # GPT-BigCode has the second
        assert not read_hf_config({"model_type": "brandnew", **TINY, key: plain}).config.gated_mlp


def test_unknown_encoder_decoder() -> None:
    """An unknown encoder-decoder is read with both stacks."""
    values = {"model_type": "brandnew", "is_encoder_decoder": True, "d_model": 64, "vocab_size": 100}
    layers = {"encoder_layers": 3, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96}
    config = read_hf_config({**values, **layers}).config
    assert (config.stack, config.num_encoder_layers, config.num_layers) == ("encoder-decoder", 3, 2)
    assert config.intermediate_size == 96


def test_unknown_encoder() -> None:
    """Token types imply an encoder, unless is_decoder is true."""
    assert read_hf_config({**TINY, "model_type": "brandnew", "type_vocab_size": 2}).config.stack == "encoder"
    decoder = {**TINY, "model_type": "brandnew", "type_vocab_size": 2, "is_decoder": True}
    assert read_hf_config(decoder).config.stack == "decoder"


def test_config_without_model_type() -> None:
    """Without model_type, the config is read by common field names."""
    reading = read_hf_config({**TINY, "activation_function": "gelu_new"})
    assert (reading.config.norm, reading.config.position_embedding) == ("layernorm", "learned")
    assert "no model_type" in reading.notes[0]


def test_unknown_type_without_a_size() -> None:
    """A required size without a default is an error that lists the accepted keys."""
    with pytest.raises(ConfigError, match=r"hidden_size or n_embd or d_model .* is missing"):
        read_hf_config({"model_type": "brandnew", "num_hidden_layers": 2})


def test_assumed_sizes_are_noted() -> None:
    """Sizes taken from the defaults of transformers are listed in a note."""
    (note,) = read_hf_config({"model_type": "mistral", **TINY, "num_attention_heads": 8}).notes
    assert "transformers defaults of mistral" in note
    assert "num_key_value_heads=8, intermediate_size=14336" in note
    assert "hidden_size" not in note.partition(":")[2]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": None}, ["hidden_size is null"]),
        ({"hidden_size": "4096"}, ["hidden_size='4096'", "an integer"]),
        ({"num_attention_heads": 0}, ["num_attention_heads=0"]),
        ({"num_attention_heads": -4}, ["num_attention_heads=-4"]),
        ({"num_attention_heads": [4, 4]}, ["num_attention_heads=[4, 4]"]),
        ({"num_hidden_layers": 10**18}, ["num_hidden_layers=1000000000000000000"]),
        ({"attention_bias": "false"}, ["attention_bias='false'", "true or false"]),
        ({"attention_dropout": "0.1"}, ["attention_dropout='0.1'"]),
        ({"hidden_act": 7}, ["hidden_act=7", "text"]),
        ({"model_type": 7}, ["model_type=7"]),
        ({"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full_attention"]}, ["1 entries"]),
        ({"model_type": "olmo3", "layer_types": ["mamba", "mamba"]}, ["'mamba'", "known are full_attention"]),
        ({"model_type": "olmo3", "layer_types": "full"}, ["layer_types='full'", "list"]),
        ({"model_type": "gpt_neo", "attention_types": [[["global"], 10**12]]}, ["attention_types"]),
        (
            {"model_type": "gpt_neo", "num_layers": 3, "attention_types": [[["global"], 2]]},
            ["2 layers", "num_layers=3"],
        ),
        ({"model_type": "mpt", "attn_config": 3}, ["attn_config=3", "object"]),
        ({"model_type": "mpt", "attn_config": {"attn_type": "ring"}}, ["attn_type='ring'", "multihead_attention"]),
        ({"model_type": "qwen3_moe", "mlp_only_layers": ["1"]}, ["mlp_only_layers holds '1'"]),
    ],
)
def test_invalid_values(values: dict[str, Any], words: list[str]) -> None:
    """The error names the key as the config spells it, the value, and what is allowed, on one line."""
    with pytest.raises(ConfigError) as caught:
        read_hf_config({"model_type": "llama", **TINY, **values})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "mistral", "sliding_window": 32}, (32,)),
        ({"model_type": "mistral"}, (4096,)),
        ({"model_type": "qwen2", "sliding_window": 32}, ()),
        ({"model_type": "qwen2", "sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}, (0, 32)),
        ({"model_type": "qwen3_moe", "sliding_window": 32}, ()),
        ({"model_type": "qwen3_moe", "sliding_window": 32, "use_sliding_window": True}, (32,)),
        ({"model_type": "gemma2", "sliding_window": 32}, (32, 0)),
        ({"model_type": "gpt_oss", "layer_types": ["full_attention", "sliding_attention"]}, (0, 128)),
    ],
)
def test_windows(values: dict[str, Any], windows: tuple[int, ...]) -> None:
    """Each family's keys for sliding windows are read, including an explicit null."""
    assert read_hf_config({**TINY, "num_key_value_heads": 2, **values}).config.attention_windows == windows


def test_falcon_variants() -> None:
    """Falcon's flags decide heads and normalizations (checked against transformers in the oracle tests)."""
    multi_query = read_hf_config({"model_type": "falcon", **TINY}).config
    assert (multi_query.num_kv_heads, multi_query.num_norms_per_layer) == (1, 1)
    new = read_hf_config({"model_type": "falcon", **TINY, "new_decoder_architecture": True, "num_kv_heads": 2}).config
    assert (new.num_kv_heads, new.num_norms_per_layer, new.parallel_attention_mlp) == (2, 2, True)


def test_nested_objects_of_dbrx() -> None:
    """Key-value heads come from attn_config, experts from ffn_config; an invalid value in there is named."""
    experts = {"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 2, "ffn_act_fn": {"name": "gelu"}}
    sizes = {"model_type": "dbrx", "d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 320}
    config = read_hf_config(
        {**sizes, "attn_config": {"kv_n_heads": 2, "attn_pdrop": 0.1}, "ffn_config": experts}
    ).config
    assert (config.num_heads, config.num_kv_heads, config.attention_dropout) == (4, 2, 0.1)
    assert (config.num_experts, config.num_experts_per_token, config.moe_intermediate_size) == (6, 2, 48)
    assert config.activation == "gelu"
    with pytest.raises(ConfigError, match="moe_top_k"):
        read_hf_config({**sizes, "ffn_config": {**experts, "moe_top_k": "two"}})


def test_omitted_parts_are_noted() -> None:
    """Multi-token-prediction layers and T5's separate logit matrix are mentioned in notes."""
    (deepseek,) = (
        note
        for note in read_hf_config({"model_type": "deepseek_v3", "num_nextn_predict_layers": 1}).notes
        if "multi-token" in note
    )
    assert deepseek.startswith("1 ")
    assert any(
        "logit matrix" in note for note in read_hf_config({"model_type": "t5", "tie_word_embeddings": False}).notes
    )
    assert not any("logit matrix" in note for note in read_hf_config({"model_type": "t5"}).notes)


@pytest.mark.parametrize(
    ("model_type", "of_branches", "of_scores"),
    [
        ("gpt2", "resid_pdrop", "attn_pdrop"),
        ("gptj", "resid_pdrop", "attn_pdrop"),
        ("gpt_neo", "resid_dropout", "attention_dropout"),
        ("gpt_neox", "hidden_dropout", "attention_dropout"),
        ("opt", "dropout", "attention_dropout"),
        ("bloom", "hidden_dropout", "attention_dropout"),
        ("falcon", "hidden_dropout", "attention_dropout"),
        ("bert", "hidden_dropout_prob", "attention_probs_dropout_prob"),
        ("roberta", "hidden_dropout_prob", "attention_probs_dropout_prob"),
        ("phi", "resid_pdrop", "attention_dropout"),
        ("phi3", "resid_pdrop", "attention_dropout"),
        ("starcoder2", "residual_dropout", "attention_dropout"),
        ("stablelm", "hidden_dropout", "attention_dropout"),
        ("llama", "", "attention_dropout"),
        ("mixtral", "", "attention_dropout"),
        ("deepseek_v3", "", "attention_dropout"),
    ],
)
def test_dropout_of_branches_and_of_scores(model_type: str, of_branches: str, of_scores: str) -> None:
    """Hidden dropout and attention dropout are read from each family's keys."""
    given = {of_branches: 0.25, of_scores: 0.125, "attention_types": [[["global", "local"], 1]]}
    config = read_hf_config({"model_type": model_type, **TINY, "num_key_value_heads": 4, **given}).config
    assert (config.hidden_dropout, config.attention_dropout) == (0.25 if of_branches else 0.0, 0.125)


def test_dropout_of_t5() -> None:
    """dropout_rate applies to hidden states and attention weights."""
    config = read_hf_config({"model_type": "t5", "dropout_rate": 0.25}).config
    assert (config.hidden_dropout, config.attention_dropout) == (0.25, 0.25)


def test_a_type_without_a_table_may_be_traced() -> None:
    """A size that field names do not give may still be one that transformers knows."""
    with pytest.raises(ConfigError, match=r"is missing in the config of rwkv; .*or trace the model"):
        read_hf_config({"model_type": "rwkv", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100})
    with pytest.raises(ConfigError, match=r"is missing in the config of .*; give an integer$"):
        read_hf_config({"model_type": NATIVE_MODEL_TYPE, "num_layers": 2, "num_heads": 4, "vocab_size": 100})
