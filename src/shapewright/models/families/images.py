"""Image encoders, such as ViT, SigLIP and the towers of vision-language models, and diffusion transformers.

Source: configuration_*.py and modeling_*.py of transformers 5.23 for each model type; diffusers 0.42,
models/transformers; facebookresearch/DiT, models.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.ranges import check_number
from shapewright.models.families.config_values import ConfigValues
from shapewright.models.families.family import Family, FieldKeys, Fields
from shapewright.models.images import Condition, Patches
from shapewright.models.validate import check_count

_DEFAULT_LABELS = 2
"""Labels of a classifier whose config names none, as in transformers."""

_AUTOENCODER_SCALE = 8
"""Pixels of an image per latent of the usual autoencoders, along a side (arXiv 2112.10752, f = 8)."""

_LONGEST_CAPTION = 300
"""Tokens of a PixArt-Sigma caption (arXiv 2403.04692, section 3); PixArt-alpha has 120. No config states it."""

_BIASES = {"norm_bias": True, "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}
_ENCODER: Fields = {
    "stack": "encoder",
    "norm": "layernorm",
    "position_embedding": "learned",
    "vocab_size": 0,
    **_BIASES,
}


def _sides(values: ConfigValues, key: str) -> tuple[int, int]:
    """Read a size that is one number or a height and a width; 0 if it is absent."""
    value = values.raw(key)
    if isinstance(value, list | tuple) and len(value) == 2:
        return check_count(key, value[0], low=1), check_count(key, value[1], low=1)
    side = values.optional_count(key)
    return side, side


def _patch_side(values: ConfigValues) -> int:
    height, width = _sides(values, "patch_size")
    if height != width or not height:
        raise ConfigError(f"patch_size={short_repr(values.raw('patch_size'))} must be one number of pixels, above 0")
    return height


def read_patches(
    values: ConfigValues, *, num_class_tokens: int = 0, has_positions: bool = True, **fields: Any
) -> Fields:
    """Read patches and, unless told otherwise, a learned position for each patch and class token."""
    side, image_size = _patch_side(values), _sides(values, "image_size")
    if not all(image_size):
        raise ConfigError(f"image_size={short_repr(values.raw('image_size'))} must be above 0", field="image_size")
    channels = values.raw("num_channels", "in_channels", "in_chans")
    patches = Patches(
        side=side,
        image_size=image_size,
        channels=check_count("num_channels", channels, low=1),
        num_class_tokens=num_class_tokens,
        **fields,
    )
    table = patches.count_tokens() if has_positions else 0
    patches = replace(patches, num_positions=patches.num_positions or table)
    return {"patches": patches, "max_position_embeddings": patches.count_tokens()}


def _num_labels(values: ConfigValues) -> int:
    labels = values.raw("id2label")
    return values.optional_count("num_labels") or (len(labels) if isinstance(labels, dict) else _DEFAULT_LABELS)


def _derive_vit(values: ConfigValues) -> Fields:
    return read_patches(values, num_class_tokens=1, num_classes=_num_labels(values))


def _derive_dinov2(values: ConfigValues) -> Fields:
    registers = values.optional_count("num_register_tokens")
    inner = values.count("hidden_size") * values.count("mlp_ratio")
    read = read_patches(
        values,
        num_class_tokens=1 + registers,
        has_mask_token=True,
        num_classes=_num_labels(values),
        classifies_mean=True,
        scales_layers=True,
    )
    patches = read["patches"]
    read["patches"] = replace(patches, num_positions=patches.num_positions - registers)
    if not values.flag("use_swiglu_ffn"):
        return {**read, "intermediate_size": inner}
    # Two thirds of the width, in multiples of 8 (Dinov2SwiGLUFFN).
    width = (int(inner * 2 / 3) + 7) // 8 * 8
    return {**read, "intermediate_size": width, "gated_mlp": True, "activation": "silu"}


def _derive_siglip(values: ConfigValues) -> Fields:
    return read_patches(values, pools=values.flag("vision_use_head"))


def _derive_siglip2(values: ConfigValues) -> Fields:
    pixels = round(values.count("num_patches") ** 0.5) * _patch_side(values)
    patches = Patches(
        side=_patch_side(values),
        image_size=(pixels, pixels),
        channels=values.count("num_channels"),
        num_positions=values.count("num_patches"),
        pools=values.flag("vision_use_head"),
    )
    return {"patches": patches, "max_position_embeddings": patches.num_positions}


def _derive_clip(values: ConfigValues) -> Fields:
    return read_patches(values, num_class_tokens=1, has_bias=False)


def _derive_pixtral(values: ConfigValues) -> Fields:
    return read_patches(values, has_positions=False, has_bias=False)


def _derive_internvl(values: ConfigValues) -> Fields:
    is_rms = values.text("norm_type") == "rms_norm"
    return {
        **read_patches(
            values,
            num_class_tokens=1,
            has_positions=values.flag("use_absolute_position_embeddings"),
            has_mask_token=values.flag("use_mask_token"),
            scales_layers=True,
        ),
        "norm": "rmsnorm" if is_rms else "layernorm",
        "norm_bias": not is_rms,
        "qk_norm": "per-layer" if values.flag("use_qk_norm") else "none",
        "has_final_norm": not values.flag("use_mean_pooling"),
    }


def _qwen_patches(values: ConfigValues, **fields: Any) -> Fields:
    read = read_patches(values, has_positions=False, frames=values.count("temporal_patch_size"), **fields)
    return {"num_kv_heads": 0, **read}


def _derive_qwen2_vl(values: ConfigValues) -> Fields:
    return {
        **_qwen_patches(values, has_bias=False),
        "intermediate_size": values.count("embed_dim") * values.count("mlp_ratio"),
    }


def _derive_qwen2_5_vl(values: ConfigValues) -> Fields:
    window = (values.count("window_size") // _patch_side(values)) ** 2
    full = values.list_of("fullatt_block_indexes") or []
    num_layers = values.num_layers("depth")
    return {
        **_qwen_patches(values, has_bias=False),
        "attention_windows": tuple(0 if index in full else window for index in range(num_layers)),
        "attention_window_kind": "chunked",
    }


def _derive_qwen3_vl(values: ConfigValues) -> Fields:
    return _qwen_patches(values, num_positions=values.count("num_position_embeddings"))


_VIT_DEFAULTS: dict[str, object] = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072,
    "hidden_act": "gelu", "image_size": 224, "patch_size": 16, "num_channels": 3,
}  # fmt: skip
_NO_VOCABULARY: FieldKeys = {"vocab_size": ()}
_DROPOUTS: FieldKeys = {
    **_NO_VOCABULARY,
    "hidden_dropout": ("hidden_dropout_prob",),
    "attention_dropout": ("attention_probs_dropout_prob",),
    "qkv_bias": ("qkv_bias",),
}

VIT = Family(
    model_types=("vit",), defaults={**_VIT_DEFAULTS, "qkv_bias": True}, keys=_DROPOUTS, fixed=_ENCODER,
    derive=_derive_vit,
)  # fmt: skip
DINOV2 = Family(
    model_types=("dinov2",),
    defaults={**_VIT_DEFAULTS, "qkv_bias": True, "mlp_ratio": 4, "patch_size": 14},
    keys=_DROPOUTS,
    fixed=_ENCODER,
    derive=_derive_dinov2,
)
DINOV2_WITH_REGISTERS = replace(
    DINOV2,
    model_types=("dinov2_with_registers",),
    defaults={**DINOV2.defaults, "patch_size": 16, "num_register_tokens": 4},
)
_SIGLIP_DEFAULTS = {**_VIT_DEFAULTS, "hidden_act": "gelu_pytorch_tanh", "vision_use_head": True}
SIGLIP = Family(
    model_types=("siglip_vision_model",), defaults=_SIGLIP_DEFAULTS, keys=_NO_VOCABULARY, fixed=_ENCODER,
    derive=_derive_siglip,
)  # fmt: skip
SIGLIP2 = Family(
    model_types=("siglip2_vision_model",),
    defaults={**_SIGLIP_DEFAULTS, "num_patches": 256},
    keys=_NO_VOCABULARY,
    fixed=_ENCODER,
    derive=_derive_siglip2,
)
CLIP = Family(
    model_types=("clip_vision_model",),
    defaults={**_VIT_DEFAULTS, "hidden_act": "quick_gelu", "patch_size": 32},
    keys=_NO_VOCABULARY,
    fixed={**_ENCODER, "embedding_norm": True},
    derive=_derive_clip,
)
_WITHOUT_BIASES: Fields = {**_ENCODER, **dict.fromkeys(_BIASES, False), "norm": "rmsnorm", "has_final_norm": False}
PIXTRAL = Family(
    model_types=("pixtral",),
    defaults={**_VIT_DEFAULTS, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    | {"intermediate_size": 4096, "image_size": 1024},
    keys={**_NO_VOCABULARY, "head_dim": ("head_dim",)},
    fixed={**_WITHOUT_BIASES, "gated_mlp": True, "position_embedding": "rotary", "embedding_norm": True},
    derive=_derive_pixtral,
)
INTERNVL = Family(
    model_types=("internvl_vision",),
    defaults={**_VIT_DEFAULTS, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    | {"intermediate_size": 4096, "image_size": [448, 448], "patch_size": [14, 14], "norm_type": "layer_norm"}
    | {"use_absolute_position_embeddings": True, "use_mean_pooling": True, "attention_bias": False},
    keys={**_NO_VOCABULARY, "qkv_bias": ("attention_bias",), "hidden_dropout": ("hidden_dropout_prob",)},
    fixed=_ENCODER,
    derive=_derive_internvl,
)
IDEFICS3 = Family(
    model_types=("idefics3_vision", "smolvlm_vision"),
    defaults={**_SIGLIP_DEFAULTS, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
    | {"vision_use_head": False},
    keys=_NO_VOCABULARY,
    fixed=_ENCODER,
    derive=_derive_siglip,
)
_QWEN_KEYS: FieldKeys = {**_NO_VOCABULARY, "num_layers": ("depth",), "num_heads": ("num_heads",)}
_QWEN_DEFAULTS: dict[str, object] = {
    "depth": 32, "num_heads": 16, "hidden_act": "quick_gelu", "patch_size": 14, "temporal_patch_size": 2,
    "in_channels": 3, "image_size": 448, "mlp_ratio": 4,
}  # fmt: skip
_QWEN: Fields = {**_ENCODER, "position_embedding": "rotary", "fused_qkv": True, "has_final_norm": False}
QWEN2_VL = Family(
    model_types=("qwen2_vl_vision",),
    defaults={**_QWEN_DEFAULTS, "embed_dim": 1280},
    keys={**_QWEN_KEYS, "hidden_size": ("embed_dim",)},
    fixed=_QWEN,
    derive=_derive_qwen2_vl,
)
QWEN2_5_VL = Family(
    model_types=("qwen2_5_vl_vision",),
    defaults={**_QWEN_DEFAULTS, "hidden_size": 3584, "intermediate_size": 3420, "hidden_act": "silu"}
    | {"window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31]},
    keys=_QWEN_KEYS,
    fixed={**_QWEN, "norm": "rmsnorm", "norm_bias": False, "gated_mlp": True},
    derive=_derive_qwen2_5_vl,
)
QWEN3_VL = Family(
    model_types=("qwen3_vl_vision", "qwen3_vl_moe_vision", "qwen3_5_vision", "qwen3_5_moe_vision"),
    defaults={**_QWEN_DEFAULTS, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
    | {"hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 2304},
    keys=_QWEN_KEYS,
    fixed=_QWEN,
    derive=_derive_qwen3_vl,
)


def _derive_dit(values: ConfigValues) -> Fields:
    pixels = values.count("input_size") * _AUTOENCODER_SCALE
    channels = values.count("in_channels")
    patches = Patches(
        side=_patch_side(values),
        image_size=(pixels, pixels),
        channels=channels,
        pixels_per_input=_AUTOENCODER_SCALE,
        output_channels=channels * (2 if values.flag("learn_sigma") else 1),
        condition=Condition(num_classes=values.count("num_classes") + 1),
    )
    ratio = check_number("mlp_ratio", values.raw("mlp_ratio"), 0, 2**20, error=ConfigError, exclude_low=True)
    inner = int(values.count("hidden_size") * ratio)
    return {
        "patches": patches, "max_position_embeddings": patches.count_tokens(), "intermediate_size": inner,
        "num_kv_heads": 0,
    }  # fmt: skip


def _derive_diffusers(values: ConfigValues) -> Fields:
    """Read the transformers of diffusers; each layer of its DiT has embedders of its own."""
    is_pixart = values.model_type.startswith("PixArt")
    heads, width = values.count("num_attention_heads"), values.count("attention_head_dim")
    sample = values.count("sample_size")
    channels = values.count("in_channels")
    num_layers = values.num_layers("num_layers")
    hidden_size = heads * width
    caption_width = values.optional_count("caption_channels")
    if is_pixart and values.optional_count("cross_attention_dim") not in (0, hidden_size):
        raise ConfigError(
            f"cross_attention_dim={values.raw('cross_attention_dim')} must equal num_attention_heads * "
            f"attention_head_dim = {hidden_size}",
            field="cross_attention_dim",
        )
    embeds_resolution = values.raw("use_additional_conditions")
    patches = Patches(
        side=_patch_side(values),
        image_size=(sample * _AUTOENCODER_SCALE,) * 2,
        channels=channels,
        pixels_per_input=_AUTOENCODER_SCALE,
        output_channels=values.optional_count("out_channels") or channels,
        condition=Condition(
            is_shared=True,
            embeds_resolution=bool(sample == 128 if embeds_resolution is None else embeds_resolution),
            caption_width=caption_width,
            caption_len=_LONGEST_CAPTION,
        )
        if is_pixart
        else Condition(num_classes=values.count("num_embeds_ada_norm") + 1, num_embedders=num_layers),
    )
    gate, _, activation = values.text("activation_fn").rpartition("-")
    is_gated = "glu" in activation
    return {
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "head_dim": width,
        "num_kv_heads": 0,
        "patches": patches,
        "max_position_embeddings": patches.count_tokens(),
        "activation": "gelu" if gate else activation,
        "gated_mlp": is_gated,
        "fused_gate_up": is_gated,
    }


_DIFFUSION: Fields = {**_ENCODER, "position_embedding": "none", "norm_bias": False, "norm_affine": False}
DIT = Family(
    model_types=("dit",),
    defaults={
        "hidden_size": 1152, "depth": 28, "num_heads": 16, "mlp_ratio": 4.0, "input_size": 32, "patch_size": 2,
        "in_channels": 4, "num_classes": 1000, "learn_sigma": True, "hidden_act": "gelu_tanh",
    },
    keys=_QWEN_KEYS,
    fixed={**_DIFFUSION, "fused_qkv": True},
    derive=_derive_dit,
)  # fmt: skip
DIFFUSERS_DIT = Family(
    model_types=("DiTTransformer2DModel",),
    defaults={
        "num_attention_heads": 16, "attention_head_dim": 72, "in_channels": 4, "num_layers": 28, "sample_size": 32,
        "patch_size": 2, "activation_fn": "gelu-approximate", "num_embeds_ada_norm": 1000, "attention_bias": True,
    },
    keys={**_NO_VOCABULARY, "num_layers": ("num_layers",), "qkv_bias": ("attention_bias",)},
    fixed=_DIFFUSION,
    derive=_derive_diffusers,
)  # fmt: skip
PIXART = replace(
    DIFFUSERS_DIT,
    model_types=("PixArtTransformer2DModel",),
    defaults={**DIFFUSERS_DIT.defaults, "sample_size": 128, "out_channels": 8},
    notes=lambda _: [f"captions of {_LONGEST_CAPTION} tokens, as PixArt-Sigma has them; the config does not state it"],
)

FAMILIES = (
    VIT, DINOV2, DINOV2_WITH_REGISTERS, SIGLIP, SIGLIP2, CLIP, PIXTRAL, INTERNVL, IDEFICS3, QWEN2_VL, QWEN2_5_VL,
    QWEN3_VL, DIT, DIFFUSERS_DIT, PIXART,
)  # fmt: skip
