"""A baseline of a given size: the nearest public model of a family, scaled."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import TYPE_CHECKING

from shapewright.config import Model, count_parameters, list_presets, load_preset, read_model, with_changes
from shapewright.errors import ConfigError, close_names
from shapewright.search.request import FEWEST_PARAMETERS, MOST_PARAMETERS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shapewright.config import TransformerConfig

_NEAR_ENOUGH_FRACTION = 0.01  # of the parameters wanted: a model this near is taken as it is
_UNIT = 128  # elements; what public models of some size keep to
# How far a scaled model may be from its size: embeddings keep their rows, so that small models of large vocabularies
# would end up several times as large as asked for, and be held against shapes of that size.
_FARTHEST_FRACTION = 0.05
_HEADS_AROUND = 8  # key-value heads tried on either side of the scaled number
_EXPERT_WIDTHS_AROUND = 2  # inner widths of experts tried on either side of the scaled one
_FAMILY_OF_WORD = {"gpt": "gpt3"}  # the table that later GPT-like models were copied from


def usual_model(num_parameters: int, family: str, tensor_parallel: int = 1) -> Model:
    """A model of a family, scaled to a number of parameters.

    Args:
        num_parameters: Parameters wanted.
        family: Beginning of preset names, such as ``llama``; ``gpt`` means the GPT-3 table.
        tensor_parallel: Devices that are to share its heads.

    Raises:
        ConfigError: there is no such family, or no whole model of that size.
    """
    if not FEWEST_PARAMETERS <= num_parameters <= MOST_PARAMETERS:
        raise ConfigError(
            f"--params {num_parameters:,} is out of range; give from {FEWEST_PARAMETERS:,} to {MOST_PARAMETERS:.0e} "
            f"parameters, such as 2.7b"
        )
    word = _FAMILY_OF_WORD.get(family.casefold(), family.casefold())
    names = [name for name in list_presets() if name == word or name.startswith((f"{word}-", f"{word}."))]
    models = [read_model(name) for name in names or [n for n in list_presets() if word and n.startswith(word)]]
    models = [model for model in models if model.config.stack == "decoder" and not model.config.is_moe]
    if not models:
        families = sorted({load_preset(name).family for name in list_presets()} | {"gpt", "llama"})
        hint = close_names(word, families) or "see 'shapewright models'"
        raise ConfigError(f"--family {family!r}: no dense decoder preset begins with it; {hint}")
    nearest = min(models, key=lambda model: abs(log(count_parameters(model.config).total / num_parameters)))
    return scale_model(nearest, num_parameters, tensor_parallel)


def scale_model(model: Model, num_parameters: int, tensor_parallel: int = 1) -> Model:
    """Scale width and depth alike until a model has a number of parameters; heads keep their width.

    A mixture of experts keeps the number of its experts, and of those that a token uses.

    Args:
        model: What to start from; returned as it is where its size is already within 1 %.
        num_parameters: Parameters wanted.
        tensor_parallel: Devices that are to share the heads of a scaled model, where numbers near allow it.

    Raises:
        ConfigError: no whole model of that size.
    """
    config, own = model.config, count_parameters(model.config).total
    if abs(own / num_parameters - 1.0) <= _NEAR_ENOUGH_FRACTION:
        return model
    if config.is_mla or config.stack != "decoder":
        raise ConfigError(
            f"--params {num_parameters:,}: {config.title} has {own:,} parameters, and only decoders whose heads share "
            f"no latents are scaled; leave --params out, or give a config of that size"
        )
    factor = (num_parameters / own) ** (1.0 / 3.0)
    near = _numbers_of_kv_heads(config, factor)
    shared = [number for number in near if _shares(config, number, tensor_parallel)]
    scaled = _scaled(config, shared or near, num_parameters)
    size = count_parameters(scaled).total
    if abs(size / num_parameters - 1.0) > _FARTHEST_FRACTION:
        raise ConfigError(
            f"--params {num_parameters:,}: the nearest that {config.title} scales to has {size:,} parameters, with "
            f"{config.vocab_size:,} words in its vocabulary; give --params {size}, or a model with fewer words"
        )
    words = f"{config.title} scaled to {size:,} parameters: L={scaled.num_layers}, h={scaled.hidden_size}"
    return replace(model, config=scaled, source=f"{model.source}, scaled", notes=(*model.notes, words))


def _numbers_of_kv_heads(config: TransformerConfig, factor: float) -> list[int]:
    """Key-value heads around the scaled number."""
    middle = round(config.num_kv_heads * factor)
    return list(range(max(1, middle - _HEADS_AROUND), middle + _HEADS_AROUND + 1))


def _shares(config: TransformerConfig, num_kv_heads: int, degree: int) -> bool:
    """Whether devices can share that many key-value heads, each copied where there are fewer, and their query heads."""
    num_heads = num_kv_heads * (config.num_heads // config.num_kv_heads)
    return num_heads % degree == 0 and (num_kv_heads % degree == 0 or degree % num_kv_heads == 0)


def _scaled(config: TransformerConfig, numbers_of_kv_heads: list[int], num_parameters: int) -> TransformerConfig:
    """The shape nearest to the scaled one among widths and depths around it."""
    group = config.num_heads // config.num_kv_heads
    inner = config.num_heads * config.head_dim / config.hidden_size
    best: tuple[float, TransformerConfig] | None = None
    for num_kv_heads in numbers_of_kv_heads:
        num_heads = num_kv_heads * group
        width = num_heads * config.head_dim
        if inner != 1.0:
            width = max(1, round(width / inner / _UNIT)) * _UNIT
        heads = {"hidden_size": width, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        if config.embedding_size == config.hidden_size:
            heads["embedding_size"] = width
        for inner_widths in _inner_widths(config, width):
            sizes = {**heads, **inner_widths}
            layers = _fitting_layers(config, sizes, num_parameters)
            for num_layers in {max(1, layers - 1), layers, layers + 1}:
                shape = with_changes(config, {**sizes, "num_layers": num_layers})
                off = abs(log(count_parameters(shape).total / num_parameters))
                # Ten per cent of proportion weigh as much as one of size.
                off += 0.1 * abs(log(width / num_layers * config.num_layers / config.hidden_size))
                if best is None or off < best[0]:
                    best = off, shape
    assert best is not None
    return best[1] if config.is_moe else _refit_ffn(best[1], num_parameters)


def _refit_ffn(config: TransformerConfig, num_parameters: int) -> TransformerConfig:
    """Make up with the MLP width for what whole layers miss, where that is a little."""
    unit = _UNIT if config.hidden_size > 8 * _UNIT else 8
    per_unit = (3 if config.gated_mlp else 2) * config.hidden_size * config.num_layers * unit
    steps = round((num_parameters - count_parameters(config).total) / per_unit)
    most = config.intermediate_size // (10 * unit)
    return replace(config, intermediate_size=config.intermediate_size + min(max(steps, -most), most) * unit)


def _inner_widths(config: TransformerConfig, width: int) -> list[dict[str, int]]:
    """Inner widths of MLP and experts in proportion to a width; of experts some around, for each is a large step."""
    unit = _UNIT if width > 8 * _UNIT else 8
    ratio = width / config.hidden_size
    ffn = max(1, round(config.intermediate_size * ratio / unit)) * unit
    if not config.is_moe:
        return [{"intermediate_size": ffn}]
    unit = unit // 2 if unit == _UNIT else unit
    middle = round(config.moe_intermediate_size * ratio / unit)
    has_one_width = config.moe_intermediate_size == config.intermediate_size
    found = []
    for steps in range(max(1, middle - _EXPERT_WIDTHS_AROUND), middle + _EXPERT_WIDTHS_AROUND + 1):
        expert = steps * unit
        shared = round(config.shared_expert_intermediate_size / config.moe_intermediate_size * expert / unit) * unit
        found.append(
            {
                "intermediate_size": expert if has_one_width else ffn,
                "moe_intermediate_size": expert,
                "shared_expert_intermediate_size": shared,
            }
        )
    return found


def _fitting_layers(config: TransformerConfig, sizes: Mapping[str, int], num_parameters: int) -> int:
    # Each layer beyond those that a pattern tells apart adds as much as the one before.
    first = config.num_layers if config.is_moe else 1
    one, two = (
        count_parameters(with_changes(config, {**sizes, "num_layers": layers})).total for layers in (first, first + 1)
    )
    return min(max(1, (num_parameters - one) // (two - one) + first), 2**15)
