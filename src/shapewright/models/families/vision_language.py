"""Vision-language models: the tower of a config and its projector, and families whose layers attend to images.

Source: configuration_*.py and modeling_*.py of transformers 5.23 for each model type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.texts import with_fields
from shapewright.models.families.config_values import ConfigValues
from shapewright.models.families.family import RMSNORM_GATED, Family, Fields
from shapewright.models.families.images import read_patches
from shapewright.models.images import Patches, Projector
from shapewright.models.layers import ATTENTION, CROSS_ATTENTION


class TowerValues(NamedTuple):
    """What a projector is read from.

    Attributes:
        values: The whole config.
        part: The tower's part.
        patches: The tower's patches.
        width: Hidden size of the language model.
    """

    values: ConfigValues
    part: ConfigValues
    patches: Patches
    width: int


class Tower(NamedTuple):
    """How the tower of a vision-language model is read.

    Attributes:
        model_type: Type of its part of the config if that names none of the towers that are known.
        project: Returns the projector.
        defaults: Defaults of the tower's part where they differ from those of its own type.
    """

    model_type: str
    project: Callable[[TowerValues], Projector]
    defaults: Mapping[str, object] = {}


def _project_llava(model: TowerValues) -> Projector:
    layer = model.values.raw("vision_feature_layer")
    if isinstance(layer, list):
        raise ConfigError(
            f"vision_feature_layer={short_repr(layer)} joins several layers of the tower, which is not read; "
            "one layer is"
        )
    bias = model.values.raw("multimodal_projector_bias") is not False
    keeps_class = model.values.raw("vision_feature_select_strategy") == "full"
    return Projector(widths=(model.width, model.width), biases=(bias, bias), keeps_class=keeps_class)


def _project_llava_next(model: TowerValues) -> Projector:
    return replace(_project_llava(model), num_vectors=1)


def _project_mistral3(model: TowerValues) -> Projector:
    bias = model.values.flag("multimodal_projector_bias")
    merge = model.values.optional_count("spatial_merge_size") or 2
    return Projector(
        widths=(model.width, model.width), biases=(bias, bias), merge=merge, merges_linearly=True, norm="before"
    )


def _project_gemma3(model: TowerValues) -> Projector:
    tokens = model.values.optional_count("mm_tokens_per_image") or 256
    rows = model.patches.image_size[0] // model.patches.side
    merge = rows // max(round(tokens**0.5), 1)
    if merge < 1:
        raise ConfigError(f"mm_tokens_per_image={tokens} exceeds the {rows * rows} patches of an image")
    return Projector(widths=(model.width,), biases=(False,), merge=merge, averages=True, norm="after")


def _project_paligemma(model: TowerValues) -> Projector:
    return Projector(widths=(model.part.optional_count("projection_dim") or model.width,), biases=(True,))


def _project_internvl(model: TowerValues) -> Projector:
    ratio = model.values.raw("downsample_ratio")
    if ratio is not None and ratio != 0.5:
        raise ConfigError(f"downsample_ratio={short_repr(ratio)} is not read; only 0.5 is")
    return Projector(widths=(model.width, model.width), biases=(True, True), merge=2, norm="after", norm_bias=True)


def _project_idefics3(model: TowerValues) -> Projector:
    return Projector(widths=(model.width,), biases=(False,), merge=model.values.optional_count("scale_factor") or 2)


def _merge_as_qwen(width_key: str, *, norm_bias: bool) -> Callable[[TowerValues], Projector]:
    """Two linear layers, the first as wide as the merged patches; Qwen3-VL has further ones for earlier layers."""

    def project(model: TowerValues) -> Projector:
        return Projector(
            widths=(-1, model.part.optional_count(width_key) or model.width),
            biases=(True, True),
            merge=model.part.optional_count("spatial_merge_size") or 2,
            norm="before",
            norm_bias=norm_bias,
            num_intermediate=len(model.part.list_of("deepstack_visual_indexes") or []),
        )

    return project


def _project_mllama(model: TowerValues) -> Projector:
    layers = model.part.list_of("intermediate_layers_indices")
    features = 1 + len(_MLLAMA_FEATURES if layers is None else layers)
    width, expected = model.part.optional_count("vision_output_dim"), features * model.part.count("hidden_size")
    if width not in (0, expected):
        raise ConfigError(
            f"vision_output_dim={width} must be {expected}, the width of the outputs of {features} layers",
            field="vision_output_dim",
        )
    return Projector(widths=(model.width,), biases=(True,), num_features=features, keeps_class=True)


_MLLAMA_FEATURES = (3, 7, 15, 23, 30)
_MLLAMA = {"hidden_size": 1280}
_CLIP_LARGE = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 336, "patch_size": 14,
}  # fmt: skip
_SO400M = {
    "hidden_size": 1152, "intermediate_size": 4096, "num_hidden_layers": 27, "num_attention_heads": 16,
    "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
_ONEVISION = {**_SO400M, "intermediate_size": 4304, "num_hidden_layers": 26, "image_size": 384}
_QWEN: dict[str, object] = {"out_hidden_size": 3584}
_DEEPSTACK = {**_QWEN, "deepstack_visual_indexes": [8, 16, 24]}

TOWERS = {
    "llava": Tower("clip_vision_model", _project_llava, _CLIP_LARGE),
    "llava_next": Tower("clip_vision_model", _project_llava_next, _CLIP_LARGE),
    "llava_onevision": Tower("siglip_vision_model", _project_llava_next, _ONEVISION),
    "mistral3": Tower("pixtral", _project_mistral3, {"image_size": 1540, "patch_size": 14}),
    "gemma3": Tower("siglip_vision_model", _project_gemma3),
    "mllama": Tower("mllama_vision_model", _project_mllama, _MLLAMA),
    "paligemma": Tower("siglip_vision_model", _project_paligemma, _SO400M),
    "internvl": Tower("internvl_vision", _project_internvl),
    "idefics3": Tower("idefics3_vision", _project_idefics3),
    "smolvlm": Tower("smolvlm_vision", _project_idefics3),
    "qwen2_vl": Tower("qwen2_vl_vision", _merge_as_qwen("hidden_size", norm_bias=True), {"hidden_size": 3584}),
    "qwen2_5_vl": Tower("qwen2_5_vl_vision", _merge_as_qwen("out_hidden_size", norm_bias=False), _QWEN),
    "qwen3_vl": Tower("qwen3_vl_vision", _merge_as_qwen("out_hidden_size", norm_bias=True), _DEEPSTACK),
    "qwen3_vl_moe": Tower("qwen3_vl_moe_vision", _merge_as_qwen("out_hidden_size", norm_bias=True), _DEEPSTACK),
    "qwen3_5": Tower("qwen3_5_vision", _merge_as_qwen("out_hidden_size", norm_bias=True), _QWEN),
    "qwen3_5_moe": Tower("qwen3_5_moe_vision", _merge_as_qwen("out_hidden_size", norm_bias=True), _QWEN),
}
"""Towers by the model type of the whole config."""

TILED = ("llava_next", "llava_onevision")
"""Model types that cut an image into tiles, each of which is an image of the tower."""

ENCODER_PAIRS = ("clip", "siglip", "siglip2")
"""Model types of an image and a text encoder, of which the image encoder is read."""

_NOT_READ = {
    "llama4": "its tower has an adapter of its own kind",
}


def find_tower(model_type: str) -> Tower:
    """Find how the tower of a model type is read.

    Raises:
        ConfigError: it is not; the message says why.
    """
    if model_type in TOWERS:
        return TOWERS[model_type]
    reason = _NOT_READ.get(model_type, f"those of {', '.join(TOWERS)} are")
    raise ConfigError(
        f"the vision tower of model_type {short_repr(model_type)} is not read: {reason}; leave out images for its "
        f"language model, or trace the model",
        field="model_type",
    )


def tower_part(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a config that describes its tower.

    Raises:
        ConfigError: it is not an object.
    """
    part = values.get("vision_config") or {}
    if not isinstance(part, Mapping):
        raise ConfigError(f"vision_config={short_repr(part)} must be an object", field="vision_config")
    return part


_SPECIAL_TOKENS = 8
"""Rows of the embedding beyond the vocabulary: the token of an image and reserved ones."""
_TILE_SHAPES = 8
"""Arrangements of up to four tiles, where a config lists none."""
_TOKEN_MULTIPLE = 8
"""The tokens of a tile are padded to this multiple."""


def _cross_layers(values: ConfigValues) -> list[int]:
    """Read the indices of the layers of cross-attention."""
    num_layers = values.num_layers("num_hidden_layers")
    listed = values.list_of("cross_attention_layers") or []
    for index in listed:
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < num_layers:
            raise ConfigError(
                with_fields("{cross_attention_layers} has {index}", index=short_repr(index)),
                advice=f"each entry must be the index of one of {num_layers} layers",
                field="cross_attention_layers",
            )
    return [index for index in listed if isinstance(index, int)]


def _derive_text(values: ConfigValues) -> Fields:
    cross = _cross_layers(values)
    num_layers = values.num_layers("num_hidden_layers")
    kinds = tuple(CROSS_ATTENTION if index in cross else ATTENTION for index in range(num_layers))
    return {"layer_types": kinds}


def _note_images(values: ConfigValues) -> list[str]:
    cross = _cross_layers(values)
    if not cross:
        return []
    return [
        f"its {len(cross)} layers of cross-attention run where there are images; "
        + with_fields("without {images} they are skipped, as in transformers")
    ]


MLLAMA = Family(
    model_types=("mllama_text_model",),
    defaults={
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "hidden_act": "silu",
        "max_position_embeddings": 131072,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
    },
    keys={"attention_dropout": ("dropout",), "tied_embeddings": ()},
    fixed={**RMSNORM_GATED, "num_special_tokens": _SPECIAL_TOKENS},
    derive=_derive_text,
    notes=_note_images,
    unread={"tie_word_embeddings": False},
)


def _derive_tower(values: ConfigValues) -> Fields:
    shapes = values.list_of("supported_aspect_ratios")
    num_global = values.optional_count("num_global_layers")
    read = read_patches(values, num_class_tokens=1, has_bias=False, token_multiple=_TOKEN_MULTIPLE)
    patches = read["patches"]
    tiled = replace(
        patches,
        # positions are those of one tile, without its padding
        num_positions=patches.count_patches() + 1,
        tiles=values.count("max_num_tiles"),
        tile_shapes=_TILE_SHAPES if shapes is None else len(shapes),
        num_gated_layers=num_global,
    )
    return {
        "patches": tiled,
        "max_position_embeddings": tiled.count_tokens(),
        "num_layers": values.num_layers("num_hidden_layers") + num_global,
    }


MLLAMA_VISION = Family(
    model_types=("mllama_vision_model",),
    defaults={
        "hidden_size": 1280,
        "hidden_act": "gelu",
        "num_hidden_layers": 32,
        "num_global_layers": 8,
        "attention_heads": 16,
        "num_channels": 3,
        "intermediate_size": 5120,
        "image_size": 448,
        "patch_size": 14,
        "max_num_tiles": 4,
    },
    keys={"vocab_size": (), "num_heads": ("attention_heads", "num_attention_heads")},
    fixed={
        "stack": "encoder",
        "norm": "layernorm",
        "norm_bias": True,
        "mlp_bias": True,
        "position_embedding": "learned",
        "embedding_norm": True,
        "vocab_size": 0,
    },
    derive=_derive_tower,
)

FAMILIES = (MLLAMA, MLLAMA_VISION)
