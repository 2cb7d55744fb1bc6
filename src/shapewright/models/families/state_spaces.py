"""Families with state spaces (Mamba), alone or between attention layers.

Source: configuration_*.py and modeling_*.py of transformers 5.23 for each model type.
"""

from __future__ import annotations

from shapewright.core.errors import ConfigError
from shapewright.models.families.config_values import ConfigValues
from shapewright.models.families.family import (
    ATTENTION_BIAS,
    HEAD_DIM,
    RMSNORM_GATED,
    Family,
    Fields,
    require_known_types,
)
from shapewright.models.families.hybrids import attention_every, layer_names, mixer_fields, note_omitted_mtp
from shapewright.models.families.moe import MIXTRAL, moe_layer_fields
from shapewright.models.families.moe_shared import GRANITE_MOE_SHARED
from shapewright.models.layers import ATTENTION, ATTENTION_AND_MAMBA2, NO_MIXER

# Letters of hybrid_override_pattern, and the blocks they stand for.
_SINGLE_BLOCKS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _mamba2_sizes(values: ConfigValues) -> Fields:
    """Return the sizes of Mamba-2 layers as Bamba and its descendants spell them."""
    inner = values.optional_count("mamba_d_ssm") or values.count("mamba_expand") * values.count("hidden_size")
    heads, given = values.count("mamba_n_heads"), values.raw("mamba_d_head")
    return {
        "linear_num_value_heads": heads,
        "linear_num_key_heads": values.count("mamba_n_groups"),
        "linear_key_head_dim": values.count("mamba_d_state"),
        "linear_value_head_dim": inner // heads if given in (None, "auto") else values.count("mamba_d_head"),
        "linear_conv_width": values.count("mamba_d_conv"),
        "linear_conv_bias": values.flag("mamba_conv_bias"),
        "linear_bias": values.flag("mamba_proj_bias"),
    }


_BAMBA_MAMBA = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_BAMBA_DEFAULTS = {
    **_BAMBA_MAMBA,
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}


def _derive_bamba(values: ConfigValues) -> Fields:
    listed = values.list_of("attn_layer_indices") or []
    num_layers = values.num_layers("num_hidden_layers")
    names = ["full_attention" if index in listed else "linear_attention" for index in range(num_layers)]
    return mixer_fields(names, "mamba2", _mamba2_sizes(values))


BAMBA = Family(
    model_types=("bamba",),
    defaults=_BAMBA_DEFAULTS,
    keys={**HEAD_DIM, **ATTENTION_BIAS, "mlp_bias": ("mlp_bias",)},
    fixed=RMSNORM_GATED,
    derive=_derive_bamba,
)


def _derive_falcon_h1(values: ConfigValues) -> Fields:
    sizes = _mamba2_sizes(values)
    has_bias = values.flag("projectors_bias")
    if has_bias != sizes["linear_bias"]:
        raise ConfigError(
            f"projectors_bias={has_bias} must equal mamba_proj_bias={sizes['linear_bias']} of {values.model_type}: a "
            f"bias of one projection of Mamba-2 alone is not supported"
        )
    return {"layer_types": (ATTENTION_AND_MAMBA2,), "linear_norm": values.flag("mamba_rms_norm"), **sizes}


FALCON_H1 = Family(
    model_types=("falcon_h1",),
    defaults={**_BAMBA_DEFAULTS, "mamba_d_ssm": 1024, "max_position_embeddings": 8192},
    keys=BAMBA.keys,
    fixed=RMSNORM_GATED,
    derive=_derive_falcon_h1,
)


def _derive_granite_hybrid(values: ConfigValues) -> Fields:
    """Read a Granite 4.0 model, which may have neither Mamba layers nor experts."""
    names = layer_names(values, ["linear_attention"] * values.num_layers("num_hidden_layers"))
    read = {
        **mixer_fields(names, "mamba2", _mamba2_sizes(values)),
        "position_embedding": "rotary" if values.text("position_embedding_type") == "rope" else "none",
    }
    return read if values.optional_count("num_local_experts") else {**read, **moe_layer_fields(values, [])}


GRANITE_MOE_HYBRID = Family(
    model_types=("granitemoehybrid",),
    defaults={**GRANITE_MOE_SHARED.defaults, **_BAMBA_MAMBA, "shared_intermediate_size": 1024},
    keys={
        **GRANITE_MOE_SHARED.keys,
        # In models without routed experts, the shared expert is the MLP; with them, no layer has another.
        "intermediate_size": ("shared_intermediate_size",),
    },
    fixed=GRANITE_MOE_SHARED.fixed,
    derive=_derive_granite_hybrid,
)


def _derive_nemotron_h(values: ConfigValues) -> Fields:
    """Read layers that are each one block: Mamba-2, attention, an MLP or experts.

    Raises:
        ConfigError: an unknown block, or experts on a latent.
    """
    pattern = values.text("hybrid_override_pattern")
    spelled: list[object] = [_SINGLE_BLOCKS.get(each, each) for each in pattern]
    names = spelled or values.list_of("layers_block_type") or values.list_of("layer_types") or _NEMOTRON_H_BLOCKS
    known = {"attention": "full_attention", "mamba": "linear_attention", **{k: k for k in _SINGLE_BLOCKS.values()}}
    require_known_types("layers_block_type", names, known, known)
    blocks = [known[str(name)] for name in names]
    if "moe" in blocks and values.optional_count("moe_latent_size"):
        raise ConfigError(
            f"moe_latent_size={values.raw('moe_latent_size')} of {values.model_type} is not supported: its experts "
            f"work on a projection of the tokens; give a model whose experts have the hidden size"
        )
    mixers = {"full_attention": ATTENTION, "linear_attention": "mamba2"}
    sizes = {
        "linear_num_value_heads": values.count("mamba_num_heads"),
        "linear_num_key_heads": values.count("n_groups", "mamba_n_groups"),
        "linear_key_head_dim": values.count("ssm_state_size"),
        "linear_value_head_dim": values.count("mamba_head_dim"),
        "linear_conv_width": values.count("conv_kernel", "mamba_d_conv"),
        "linear_conv_bias": values.flag("use_conv_bias", "mamba_conv_bias"),
        "linear_bias": values.flag("use_bias"),
    }
    experts = moe_layer_fields(values, [block == "moe" for block in blocks])
    if "moe_layers" in experts:
        experts["shared_expert_intermediate_size"] = values.count("moe_shared_expert_intermediate_size")
    return {
        "num_layers": len(blocks),
        "layer_types": tuple(mixers.get(block, NO_MIXER) for block in blocks),
        "mlp_layers": tuple(block in ("mlp", "moe") for block in blocks),
        **(sizes if "linear_attention" in blocks else {}),
        **experts,
    }


_NEMOTRON_H_BLOCKS: list[object] = ["linear_attention", "moe", "full_attention", "mlp"]
NEMOTRON_H = Family(
    model_types=("nemotron_h",),
    defaults={
        "vocab_size": 131072,
        "hidden_size": 4096,
        "intermediate_size": 21504,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4096,
        "mlp_hidden_act": "relu2",
        "ssm_state_size": 128,
        "mamba_num_heads": 128,
        "mamba_head_dim": 64,
        "n_groups": 8,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
        "tie_word_embeddings": False,
    },
    keys={
        **HEAD_DIM,
        "mlp_bias": ("mlp_bias",),
        "activation": ("mlp_hidden_act",),
        "num_experts": ("n_routed_experts", "num_local_experts"),
        "num_experts_per_token": ("num_experts_per_tok",),
        "moe_intermediate_size": ("moe_intermediate_size",),
    },
    fixed={"norm": "rmsnorm", "num_norms_per_layer": 1, "position_embedding": "none", "tied_embeddings": False},
    derive=_derive_nemotron_h,
    notes=note_omitted_mtp,
)


def _derive_jamba(values: ConfigValues) -> Fields:
    num_layers = values.num_layers("num_hidden_layers")
    every, place = values.count("expert_layer_period"), values.optional_count("expert_layer_offset")
    is_moe = [index % every == place and values.count("num_experts") > 1 for index in range(num_layers)]
    names = attention_every(values, values.count("attn_layer_period"), values.optional_count("attn_layer_offset"))
    rank = values.raw("mamba_dt_rank")
    sizes = {
        "linear_num_value_heads": values.count("mamba_expand") * values.count("hidden_size"),
        "linear_num_key_heads": 1,
        "linear_key_head_dim": values.count("mamba_d_state"),
        "linear_value_head_dim": 1,
        "linear_conv_width": values.count("mamba_d_conv"),
        "linear_conv_bias": values.flag("mamba_conv_bias"),
        "linear_bias": values.flag("mamba_proj_bias"),
        "linear_step_rank": 0 if rank in (None, "auto") else values.count("mamba_dt_rank"),
    }
    return {**mixer_fields(names, "mamba", sizes), **moe_layer_fields(values, is_moe)}


JAMBA = Family(
    model_types=("jamba",),
    defaults={
        "vocab_size": 65536,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "tie_word_embeddings": False,
        "num_experts_per_tok": 2,
        "num_experts": 16,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": "auto",
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    },
    keys={**HEAD_DIM, **MIXTRAL.keys, "num_experts": ("num_experts", "num_local_experts")},
    fixed={**RMSNORM_GATED, "position_embedding": "none"},
    derive=_derive_jamba,
)


def _derive_mamba2(values: ConfigValues) -> Fields:
    heads = values.count("num_heads")
    return {
        "num_heads": heads,
        "head_dim": values.count("head_dim"),
        "layer_types": ("mamba2",),
        "mlp_layers": (False,),
        "linear_num_value_heads": heads,
        "linear_num_key_heads": values.count("n_groups"),
        "linear_key_head_dim": values.count("state_size"),
        "linear_value_head_dim": values.count("expand") * values.count("hidden_size") // heads,
        "linear_conv_width": values.count("conv_kernel"),
        "linear_conv_bias": values.flag("use_conv_bias"),
        "linear_bias": values.flag("use_bias"),
    }


_MAMBA_FIXED = {"norm": "rmsnorm", "num_norms_per_layer": 1, "position_embedding": "none"}
MAMBA2 = Family(
    model_types=("mamba2",),
    defaults={
        "vocab_size": 32768,
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
        "state_size": 128,
        "expand": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    keys={"num_heads": ("num_heads",), "intermediate_size": ()},
    fixed=_MAMBA_FIXED,
    derive=_derive_mamba2,
)


def _derive_mamba(values: ConfigValues) -> Fields:
    rank = values.raw("time_step_rank")
    return {
        "num_heads": 1,
        "layer_types": ("mamba",),
        "mlp_layers": (False,),
        "linear_num_value_heads": values.optional_count("intermediate_size")
        or values.count("expand") * values.count("hidden_size"),
        "linear_num_key_heads": 1,
        "linear_key_head_dim": values.count("state_size"),
        "linear_value_head_dim": 1,
        "linear_conv_width": values.count("conv_kernel"),
        "linear_conv_bias": values.flag("use_conv_bias"),
        "linear_bias": values.flag("use_bias"),
        "linear_step_rank": 0 if rank in (None, "auto") else values.count("time_step_rank"),
    }


MAMBA = Family(
    model_types=("mamba", "falcon_mamba"),
    defaults={
        "vocab_size": 50280,
        "hidden_size": 768,
        "num_hidden_layers": 32,
        "state_size": 16,
        "expand": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": "auto",
        "hidden_act": "silu",
        "tie_word_embeddings": True,
    },
    keys={"intermediate_size": ()},  # the width of its scan
    fixed={**_MAMBA_FIXED, "linear_norm": False},
    derive=_derive_mamba,
)

FAMILIES = (BAMBA, FALCON_H1, GRANITE_MOE_HYBRID, NEMOTRON_H, JAMBA, MAMBA2, MAMBA)
