"""Whether a checkpoint is in fp8 with a scale for each block of a weight, which decides the kernel of its experts."""

from __future__ import annotations

from collections.abc import Mapping

from shapewright.config.hf_values import HfValues
from shapewright.config.validate import shown
from shapewright.errors import ConfigError

# Parts of names that patterns of compressed-tensors give to MLPs, of which experts are one kind.
_MLP_WORDS = ("expert", "mlp", "ffn", "feed_forward", "block_sparse_moe")


def has_block_scales(values: Mapping[str, object], model_type: str) -> bool:
    """Whether a config.json object says so of the weights of experts.

    Two forms do: transformers' FineGrainedFP8Config (``quant_method`` fp8 with ``weight_block_size``), and groups of
    compressed-tensors with the strategy ``block``, as llm-compressor's scheme FP8_BLOCK writes them. Where several
    groups are in different formats, or experts are left out, the answer is no.

    Args:
        values: The object, or its language model's part.
        model_type: The family, for messages.

    Raises:
        ConfigError: the object is not one of either form.

    Source: transformers 5.23, utils/quantization_config.py; compressed-tensors, quant_config.py and quant_scheme.py
        (FP8_BLOCK); vllm, compressed_tensors_moe.py (experts in blocks run as those of FineGrainedFP8Config do).

    >>> has_block_scales({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "qwen3_moe")
    True
    """
    name = model_type or "an unknown model"
    quantization = HfValues(values, {}, name).nested("quantization_config", {})
    if quantization.raw("quant_method") == "fp8":
        return bool(quantization.list_of("weight_block_size"))
    if quantization.raw("quant_method") != "compressed-tensors":
        return False
    groups = quantization.raw("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise ConfigError(f"config_groups={shown(groups)} must be an object")
    read = [HfValues(groups, {}, name).nested(group, {}) for group in groups]
    ignored = quantization.list_of("ignore") or []
    return (
        bool(read)
        and all(_is_in_blocks(group) for group in read)
        and any(_takes_experts(group.list_of("targets")) for group in read)
        and not any(_names_experts(entry) for entry in ignored)
    )


def _is_in_blocks(group: HfValues) -> bool:
    """Whether a group's products are in fp8 on both sides, its weights with a scale for each block."""
    weights, inputs = group.nested("weights", {}), group.nested("input_activations", {})
    both = all(each.raw("type") == "float" and each.raw("num_bits") == 8 for each in (weights, inputs))
    return both and weights.raw("strategy") == "block"


def _takes_experts(targets: list[object] | None) -> bool:
    """Whether a group is of all linear layers, or of some in MLPs; patterns are looked at as texts alone."""
    return targets is None or any(
        target == "Linear" or (isinstance(target, str) and any(word in target for word in _MLP_WORDS))
        for target in targets
    )


def _names_experts(entry: object) -> bool:
    """Whether a name or pattern is of routed experts; shared ones and their gates are others."""
    return isinstance(entry, str) and "experts" in entry.replace("shared_experts", "")
