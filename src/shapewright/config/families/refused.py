"""Models that are no stack of attention and MLP layers of one kind each: refused by name or by what they say they hold.

Read by the names of their fields they would be priced as something else: the parameter counts of the types below came
out 2 to 800,000 % off those that transformers 5.23 builds.
"""

from __future__ import annotations

from collections.abc import Mapping

from shapewright.config.families.family import KNOWN_LAYER_TYPES
from shapewright.config.validate import shown
from shapewright.errors import ConfigError

# What is in a layer of these types that no lowering knows, where no key of the config tells of it.
# Source: modeling_*.py of transformers 5.23 for each model type; of those that it does not have, the models' own code.
_NOT_MODELLED = {
    "arctic": "a dense MLP beside the experts of a layer",
    "bailing_moe_linear": "linear attention",
    "bitnet": "weights of three values, and norms inside attention and MLP",
    "blt": "encoders of byte patches around the model",
    "deepseek_v4": "attention over compressed tokens and several residual streams",
    "doge": "experts that are looked up by product keys",
    "gemma3n": "embeddings of their own, parallel residual streams and shared caches in its layers",
    "gemma3n_text": "embeddings of their own, parallel residual streams and shared caches in its layers",
    "gemma4": "embeddings of their own and heads of several widths in its layers",
    "gemma4_text": "embeddings of their own and heads of several widths in its layers",
    "gemma4_unified": "heads of several widths",
    "gemma4_unified_text": "heads of several widths",
    "hrm_text": "layers that run again and again",
    "jetmoe": "experts of attention",
    "longcat_flash": "two attentions and dense MLPs beside the experts of a layer, and experts that compute nothing",
    "mimo_v2_flash": "other key-value heads in sliding layers than in full ones",
    "modernbert-decoder": "layers of several kinds",
    "moshi": "a second decoder over depth",
    "nemotron-nas": "layers of different widths, some without attention",
    "step3_text": "queries in two factors, and layers with experts that it lists in words",
    "xlstm": "recurrent layers",
}
# Starts of keys that only layers without softmax attention have (Mamba, RWKV, linear attention, convolutions).
_OTHER_LAYERS = (
    "mamba_",
    "ssm_",
    "state_size",
    "linear_attn_",
    "linear_num_",
    "linear_key_",
    "conv_",
    "attn_layer_",
    "rwkv",
    "lru_",
    "kda_",
    "hybrid_override_pattern",
)
# Keys that list the kind of each layer, and how those spell softmax attention beside the names that are known (MiniMax
# has 1, and 0 for lightning attention).
_LAYER_KINDS = ("layer_types", "layers_block_type", "block_types", "attn_type_list")
_SOFTMAX_ATTENTION = (*KNOWN_LAYER_TYPES, "attention", 1)
# Keys that tell of layers which take keys and values of another one (Hunyuan-Large, Gemma 3n), where they are not 0.
_SHARED_CACHES = ("use_cla", "num_kv_shared_layers")


def refuse_other_layers(model_type: str, part: Mapping[str, object]) -> None:
    """Refuse a model that has layers which are not modelled.

    Raises:
        ConfigError: it has, by its type or by its keys; the message says which.
    """
    if model_type in _NOT_MODELLED:
        raise ConfigError(
            f"model_type {shown(model_type)} is not modelled: it has {_NOT_MODELLED[model_type]}; give a transformer "
            f"of attention and MLP layers"
        )
    sharing = next((key for key in _SHARED_CACHES if part.get(key)), None)
    if sharing:
        raise ConfigError(
            f"model_type {shown(model_type)} has layers that share the keys and values of others ({sharing}="
            f"{shown(part[sharing])}), which is not modelled: give a transformer whose layers have their own"
        )
    if part.get("residual_moe"):  # Grok-2
        raise ConfigError(
            f"model_type {shown(model_type)} has a dense MLP beside the experts of a layer (residual_moe), which is "
            f"not modelled: give a transformer whose layers have one or the other"
        )
    told = _other_layers(part)
    if told:
        raise ConfigError(
            f"{f'model_type {shown(model_type)}' if model_type else 'the config'} has layers without softmax attention "
            f"({', '.join(told[:3])}); state-space, linear-attention and convolution layers are not modelled: give a "
            f"transformer of attention and MLP layers"
        )


def _other_layers(part: Mapping[str, object]) -> list[str]:
    """What tells of layers without softmax attention: kinds that are listed, then keys in the order of the alphabet."""
    kinds = []
    for key in _LAYER_KINDS:
        listed = part.get(key)
        others = [kind for kind in listed if kind not in _SOFTMAX_ATTENTION] if isinstance(listed, list) else []
        if others:
            kinds.append(f"{key} {shown(others[0])}")
    return kinds + sorted(key for key in part if isinstance(key, str) and key.startswith(_OTHER_LAYERS) and part[key])
