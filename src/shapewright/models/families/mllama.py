"""Llama 3.2 Vision: a language model whose layers of cross-attention read images, and its tower of tiles.

Source: configuration_mllama.py and modeling_mllama.py of transformers 5.24.
"""

from __future__ import annotations

from dataclasses import replace

from shapewright.core.errors import ConfigError, short_repr
from shapewright.core.texts import with_fields
from shapewright.models.families.config_values import ConfigValues
from shapewright.models.families.family import RMSNORM_GATED, Family, Fields
from shapewright.models.families.images import read_patches
from shapewright.models.layers import ATTENTION, CROSS_ATTENTION

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
