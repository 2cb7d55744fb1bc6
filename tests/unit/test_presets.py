"""The presets: well-formed files with sources, and published parameter counts."""

from __future__ import annotations

import json
import re
import tomllib
from importlib.resources import files
from typing import Any

import pytest

from shapewright.models.parameters import count_parameters
from shapewright.models.read import list_presets, read_model

_PRESETS: dict[str, dict[str, Any]] = {
    entry.name.removesuffix(".toml"): tomllib.loads(entry.read_text("utf-8"))
    for entry in files("shapewright.models").joinpath("presets").iterdir()
    if entry.name.endswith(".toml")
}
_NAMES = sorted(_PRESETS)

_REQUIRED_KEYS = {"name", "title", "family", "source", "parameters", "parameters_source", "config"}
_OPTIONAL_KEYS = {"notes", "hub_id"}


def _words(text: str) -> set[str]:
    return set(text.split())


# What the project promises to know: the ends of each family's range.
_PROMISED = _words(
    """
    gpt2 gpt2-xl gpt3-125m gpt3-350m gpt3-760m gpt3-1.3b gpt3-2.7b gpt3-6.7b gpt3-13b gpt3-175b pythia-70m pythia-12b
    gpt-neox-20b gpt-j-6b gpt-neo-2.7b opt-125m opt-66b bloom-560m bloom-176b mpt-7b mpt-30b falcon-7b falcon-40b
    llama-7b llama-65b llama-2-70b llama-3-8b llama-3.1-405b llama-3.2-1b llama-4-scout llama-4-maverick mistral-7b
    mixtral-8x7b mixtral-8x22b qwen1.5-moe-a2.7b qwen2.5-0.5b qwen2.5-72b qwen3-0.6b qwen3-32b qwen3-30b-a3b
    qwen3-235b-a22b gemma-2b gemma-7b gemma-2-27b gemma-3-1b gemma-3-27b-text phi-2 phi-3-mini phi-4 deepseek-v2
    deepseek-v2-lite deepseek-v3 olmo-7b olmo-2-13b smollm-135m smollm2-1.7b smollm3-3b stablelm-2-1.6b starcoder2-3b
    starcoder2-15b command-r granite-3.1-8b gpt-oss-20b gpt-oss-120b bert-base bert-large t5-small t5-11b t5-v1.1-xxl
    flan-t5-xl llm-foundry-mpt-7b megatron-gpt-1.7b megatron-gpt-1t dbrx grok-1 olmoe-1b-7b glm-4.5 glm-4.5-air
    glm-4.7-flash minimax-m2 olmo-3-7b olmo-3-32b seed-oss-36b qwen3-next-80b-a3b kimi-linear-48b-a3b minimax-text-01
    nemotron-h-8b granite-4.0-h-small jamba-1.5-large lfm2-1.2b falcon-h1-34b mamba2-2.7b vit-b-16 vit-l-16 vit-h-14
    siglip-so400m qwen2.5-vl-7b gemma-3-4b dit-s-2 dit-xl-2 dit-xl-8
    """
)

# Every key is one that config.json files of the hub use; a misspelt key would be ignored in silence by readers.
_HUB_KEYS = _words(
    """
    activation_function alibi apply_residual_connection_post_layernorm architectures attention_bias
    attention_chunk_size
    attention_dropout attention_out_bias attention_probs_dropout_prob attention_types attn_config
    attn_layer_indices attn_layer_offset attn_layer_period attn_logit_softcapping attn_pdrop bias
    block_auto_adjust_ff_dim block_ff_dim block_ffn_dim_multiplier block_multiple_of conv_L_cache conv_bias
    conv_kernel d_ff d_kv d_model decoder_sparse_step do_layer_norm_before dropout dropout_rate emb_pdrop
    embd_pdrop embed_dropout embedding_dropout enable_bias expand expansion_ratio expert_layer_offset
    expert_layer_period feed_forward_proj ffn_config ffn_dim final_logit_softcapping first_k_dense_replace
    full_attention_interval full_attn_idxs head_dim hidden_act hidden_activation hidden_dropout hidden_dropout_prob
    hidden_size hybrid_override_pattern initial_context_length interleave_moe_layer_step intermediate_size
    intermediate_size_mlp is_encoder_decoder kv_lora_rank layer_norm_eps layer_norm_epsilon layer_types
    learned_pos_emb linear_conv_kernel_dim linear_head_dim linear_key_head_dim linear_num_heads
    linear_num_key_heads linear_num_value_heads linear_value_head_dim lm_head_bias logit_scale mamba_conv_bias
    mamba_d_conv mamba_d_head mamba_d_ssm mamba_d_state mamba_dt_rank mamba_expand mamba_head_dim mamba_n_groups
    mamba_n_heads mamba_num_heads mamba_proj_bias mamba_rms_norm max_position_embeddings max_seq_len mlp_bias
    mlp_hidden_act mlp_only_layers model_max_length model_type moe_intermediate_size moe_k moe_layer_end_index
    moe_layer_freq moe_layer_interval moe_layer_start_index moe_num_experts moe_num_shared_experts multi_query
    n_embd n_group n_groups n_head n_heads n_layer n_layers n_positions n_routed_experts n_shared_experts
    new_decoder_architecture no_bias no_rope_layer_interval norm_eps norm_epsilon norm_topk_prob norm_type
    num_attention_heads num_decoder_layers num_experts num_experts_per_tok num_experts_per_token num_heads
    num_hidden_layers num_key_value_heads num_kv_heads num_layers num_local_experts num_mtp_modules
    num_nextn_predict_layers num_shared_experts original_max_position_embeddings parallel_attn
    partial_rotary_factor position_embedding_type q_lora_rank qk_layernorm qk_nope_head_dim qk_rope_head_dim
    quantization_config query_pre_attn_scalar relative_attention_num_buckets resid_dropout resid_pdrop
    residual_dropout rms_norm_eps rope_local_base_freq rope_scaling rope_theta rotary_dim rotary_emb_base
    rotary_pct routed_scaling_factor scoring_func shared_expert_intermediate_size shared_intermediate_size
    sliding_window sliding_window_pattern ssm_state_size state_size swiglu_limit tie_embedding tie_word_embeddings
    time_step_rank topk_group topk_method type_vocab_size use_bias use_conv_bias use_mtp use_parallel_residual
    use_qk_norm use_qkv_bias use_sliding_window v_head_dim vocab_size window_size word_embed_proj_dim
    attention_heads cross_attention_layers dropout image_token_index intermediate_layers_indices max_num_tiles
    num_global_layers supported_aspect_ratios vision_output_dim
    depth fullatt_block_indexes image_size in_channels input_size learn_sigma mlp_ratio mm_tokens_per_image num_channels
    num_classes num_labels out_hidden_size patch_size qkv_bias spatial_merge_size temporal_patch_size text_config
    vision_config vision_use_head
    """
)
_IMAGE_FAMILIES = ("vit", "siglip", "dit")

# The sizes that no model can be without, as the families spell them.
_WIDTH_KEYS = {"hidden_size", "n_embd", "d_model"}
_DEPTH_KEYS = {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"}
_HEAD_KEYS = {"num_attention_heads", "n_head", "n_heads", "num_heads"}

# A paper, a file of the hub, or a file in a repository.
_SOURCE = re.compile(
    r"arXiv \d{4}\.\d{5}|config\.json of [\w.-]+/[\w.-]+ on the Hugging Face hub|github\.com/[\w-]+/\S+,"
)

_PUBLISHED_COUNT = re.compile(r"published(?:, with it,)? as ([\d.,]+)(?: ([MBT]))?\b")
_SUFFIXES = {None: 1.0, "M": 1e6, "B": 1e9, "T": 1e12}
# Names round: the largest gap is StarCoder2 "15 B" with 15.96 billion.
_ROUNDING = 0.07

# Parameters that one token uses, as the papers and model cards say it, in billions. Some count the embedding, some do
# not: arXiv 2401.04088 section 2, Qwen blog of 2024-03-28, arXiv 2407.10671 Table 1, 2505.09388 Table 2, 2405.04434
# abstract and appendix B, 2412.19437 abstract, Llama 4 model card, 2508.10925 Table 1, 2409.02060, model cards of DBRX,
# GLM-4.5, Qwen3-Coder, Phi-3.5-MoE and MiniMax-M2, arXiv 2506.05767 (dots.llm1).
_PUBLISHED_ACTIVE = {
    "mixtral-8x7b": 12.9,
    "mixtral-8x22b": 39,
    "qwen1.5-moe-a2.7b": 2.7,
    "qwen2-57b-a14b": 14,
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
    "deepseek-v2": 21,
    "deepseek-v2-lite": 2.4,
    "deepseek-v3": 37,
    "llama-4-scout": 17,
    "llama-4-maverick": 17,
    "olmoe-1b-7b": 1.3,
    "dbrx": 36,
    "glm-4.5": 32,
    "glm-4.5-air": 12,
    "qwen3-coder-480b-a35b": 35,
    "phi-3.5-moe": 6.6,
    "minimax-m2": 10,
    "dots.llm1": 14,
    "gpt-oss-20b": 3.61,
    "gpt-oss-120b": 5.13,
}

# arXiv 2508.06471, Table 1, counts neither the embedding nor the logit matrix, and MiniMax's 10 billion fit without.
_WITHOUT_EMBEDDING_AND_HEAD = {"glm-4.5", "glm-4.5-air", "minimax-m2"}


def test_there_are_enough_presets() -> None:
    """There are more than sixty presets, with the smallest and largest of every family."""
    assert len(_NAMES) >= 70
    assert set(_NAMES) >= _PROMISED


@pytest.mark.parametrize("name", _NAMES)
def test_keys_of_a_preset(name: str) -> None:
    """Every file has its name, a title, a family and a source, and no unknown key."""
    preset = _PRESETS[name]

    assert preset["name"] == name == name.lower()
    assert set(preset) - _OPTIONAL_KEYS == _REQUIRED_KEYS
    assert all(preset[key].strip() == preset[key] != "" for key in set(preset) - {"parameters", "config"})
    assert _SOURCE.search(preset["source"])
    named = re.search(r"config\.json of (\S+?)[,;]? on the Hugging Face hub", preset["source"])
    assert preset.get("hub_id") == (named[1] if named else None)


@pytest.mark.parametrize("name", _NAMES)
def test_configs_have_hub_keys(name: str) -> None:
    """A config has a type, a vocabulary, a width, a depth and (but for Mamba-1) heads, under the hub's keys only."""
    whole = _PRESETS[name]["config"]
    config = whole.get("text_config", whole)

    assert set(whole) | set(whole.get("vision_config", ())) <= _HUB_KEYS
    needed = {"model_type"} if _PRESETS[name]["family"] in _IMAGE_FAMILIES else {"model_type", "vocab_size"}
    assert needed <= set(config) <= _HUB_KEYS
    has_heads = config["model_type"] not in ("mamba", "falcon_mamba")
    for spellings in (_WIDTH_KEYS, _DEPTH_KEYS, *([_HEAD_KEYS] if has_heads else [])):
        assert len(spellings & set(config)) == 1


def test_presets_are_distinct() -> None:
    """No two presets have the same title or config."""
    titles = {preset["title"] for preset in _PRESETS.values()}
    configs = {json.dumps(preset["config"], sort_keys=True) for preset in _PRESETS.values()}

    assert len(titles) == len(_NAMES)
    assert len(configs) == len(_NAMES)


@pytest.mark.parametrize("name", _NAMES)
def test_counts_round_to_published_counts(name: str) -> None:
    """The exact count rounds to the published one, which catches a wrong size or untied embedding."""
    preset = _PRESETS[name]
    config = preset["config"]
    found = _PUBLISHED_COUNT.search(preset["parameters_source"])
    assert found
    published = float(found[1].replace(",", "")) * _SUFFIXES[found[2]]

    count = preset["parameters"]
    if "with the vision tower" in preset["parameters_source"]:
        count = count_parameters(read_model(name).with_vision().config).total
    if config["model_type"] == "t5" and not config["tie_word_embeddings"]:
        count += config["vocab_size"] * config["d_model"]  # the logit matrix of the checkpoint

    assert count == pytest.approx(published, rel=_ROUNDING)


def test_gpt3_13b_has_an_integer_head_width() -> None:
    """Heads of the GPT-3 presets divide the width; 13B has 5120 = 40 heads of 128, not the printed 5140."""
    gpt3 = {name: preset["config"] for name, preset in _PRESETS.items() if preset["family"] == "gpt3"}

    assert all(config["n_embd"] % config["n_head"] == 0 for config in gpt3.values())
    assert (gpt3["gpt3-13b"]["n_embd"], gpt3["gpt3-13b"]["n_head"]) == (5120, 40)
    assert (gpt3["gpt3-2.7b"]["n_embd"], gpt3["gpt3-2.7b"]["n_head"]) == (2560, 32)


def test_the_package_lists_the_files() -> None:
    """list_presets returns the files of the folder."""
    assert list(list_presets()) == _NAMES


@pytest.mark.parametrize("name", _NAMES)
def test_a_preset_reads_to_exactly_its_count(name: str) -> None:
    """Every preset has the parameter count of transformers, and its notes explain the remarks of the reader."""
    model = read_model(name)

    assert not model.notes or _PRESETS[name]["notes"]
    assert model.config.name == name
    assert count_parameters(model.config).total == _PRESETS[name]["parameters"]


@pytest.mark.parametrize("name", sorted(_PUBLISHED_ACTIVE))
def test_active_parameters_equal_published_counts(name: str) -> None:
    """Active parameters equal the published ones, with or without embedding and logit matrix."""
    counts = count_parameters(read_model(name).config)
    published = _PUBLISHED_ACTIVE[name] * 1e9

    if name in _WITHOUT_EMBEDDING_AND_HEAD:
        assert counts.active - counts.token_embedding - counts.head == pytest.approx(published, rel=0.025)
    else:
        assert 0.975 * (counts.active - counts.token_embedding) < published < 1.025 * counts.active
