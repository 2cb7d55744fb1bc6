"""Small configs of image encoders and vision-language models, and the models that transformers builds from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ENCODER: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 112,
    "image_size": 56, "patch_size": 14,
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "vit": {**_ENCODER, "num_labels": 10},
    "dinov2": {**_ENCODER, "num_labels": 10},
    "dinov2/gated": {**_ENCODER, "num_labels": 10, "use_swiglu_ffn": True},
    "dinov2_with_registers": {**_ENCODER, "num_labels": 10, "num_register_tokens": 3},
    "clip_vision_model": _ENCODER,
    "siglip_vision_model": _ENCODER,
    "siglip_vision_model/plain": {**_ENCODER, "vision_use_head": False},
    "pixtral": _ENCODER,
}
_BUILDERS = {
    "vit": "ViTForImageClassification",
    "dinov2": "Dinov2ForImageClassification",
    "dinov2_with_registers": "Dinov2WithRegistersForImageClassification",
    "clip_vision_model": "CLIPVisionModel",
    "siglip_vision_model": "SiglipVisionModel",
    "pixtral": "PixtralVisionModel",
}

_TEXT: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "intermediate_size": 176, "vocab_size": 320, "max_position_embeddings": 256,
}  # fmt: skip
_QWEN_TEXT: dict[str, Any] = {
    **_TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4},
}  # fmt: skip
_QWEN: dict[str, Any] = {
    "depth": 3, "hidden_size": 64, "num_heads": 4, "intermediate_size": 112, "patch_size": 14, "out_hidden_size": 96,
}  # fmt: skip
_CLIP = {**_ENCODER, "model_type": "clip_vision_model"}
_SIGLIP = {**_ENCODER, "model_type": "siglip_vision_model", "vision_use_head": False}
VISION_LANGUAGE: dict[str, dict[str, Any]] = {
    "llava": {"text_config": _TEXT, "vision_config": _CLIP, "vision_feature_layer": -1},
    "llava/full": {
        "text_config": _TEXT, "vision_config": _SIGLIP, "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full", "multimodal_projector_bias": False,
    },
    "llava_next": {
        "text_config": _TEXT, "vision_config": _CLIP, "vision_feature_layer": -1, "image_grid_pinpoints": [[56, 56]],
    },
    "llava_onevision": {
        "text_config": {**_TEXT, "model_type": "qwen2"}, "vision_config": _SIGLIP, "vision_feature_layer": -1,
        "image_grid_pinpoints": [[56, 56]],
    },
    "paligemma": {
        "text_config": {**_TEXT, "model_type": "gemma", "head_dim": 16},
        "vision_config": {**_SIGLIP, "projection_dim": 96}, "projection_dim": 96,
    },
    "gemma3": {
        "text_config": {**_TEXT, "model_type": "gemma3_text", "head_dim": 16}, "vision_config": _SIGLIP,
        "mm_tokens_per_image": 4,
    },
    "internvl": {
        "text_config": {**_TEXT, "model_type": "qwen2"},
        "vision_config": {**_ENCODER, "image_size": [56, 56], "patch_size": [14, 14]},
        "tie_word_embeddings": False,
    },
    "idefics3": {"text_config": _TEXT, "vision_config": _ENCODER, "scale_factor": 2},
    "smolvlm": {"text_config": _TEXT, "vision_config": _ENCODER, "scale_factor": 4},
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral", "head_dim": 16},
        "vision_config": {**_ENCODER, "model_type": "pixtral"}, "vision_feature_layer": -1,
        "tie_word_embeddings": False,
    },
    "mllama": {
        "text_config": {
            **_TEXT, "model_type": "mllama_text_model", "num_hidden_layers": 4, "cross_attention_layers": [1, 3],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "pad_token_id": 3,
        },
        "vision_config": {
            **_ENCODER, "model_type": "mllama_vision_model", "num_hidden_layers": 3, "num_global_layers": 2,
            "attention_heads": 4, "vision_output_dim": 192, "intermediate_layers_indices": [0, 2], "max_num_tiles": 2,
            "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        },
    },
    "qwen2_vl": {
        "text_config": {**_QWEN_TEXT, "model_type": "qwen2_vl_text"},
        "vision_config": {**_QWEN, "embed_dim": 64, "hidden_size": 96, "mlp_ratio": 2},
    },
    "qwen2_5_vl": {
        "text_config": {**_QWEN_TEXT, "model_type": "qwen2_5_vl_text"},
        "vision_config": {**_QWEN, "window_size": 28, "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": {
        "text_config": {**_QWEN_TEXT, "model_type": "qwen3_vl_text", "head_dim": 16},
        "vision_config": {**_QWEN, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
    },
}  # fmt: skip


def image_config(key: str) -> dict[str, Any]:
    """The config.json object of an image encoder or a vision-language model."""
    return {"model_type": key.partition("/")[0], **{**ENCODERS, **VISION_LANGUAGE}[key]}


def build_image_model(config: dict[str, Any], device: str = "meta") -> torch.nn.Module:
    """Build the model of a config with its classifier or language head, without memory unless told otherwise."""
    import torch
    import transformers

    given = dict(config)
    model_type = given.pop("model_type")
    resolved = transformers.AutoConfig.for_model(model_type, **given)
    resolved._attn_implementation = "eager"
    with torch.device(device):
        if model_type in _BUILDERS:
            return getattr(transformers, _BUILDERS[model_type])(resolved)
        return transformers.AutoModelForImageTextToText.from_config(resolved)
