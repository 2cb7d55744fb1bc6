"""Baselines of a given size: the nearest public model of a family, scaled."""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import TYPE_CHECKING

from shapewright.core.errors import ConfigError, close_names
from shapewright.core.texts import with_fields
from shapewright.models.parameters import count_parameters
from shapewright.models.read import Model, list_presets, load_preset, read_model
from shapewright.models.transformer import with_changes
from shapewright.optimize.search.request import check_num_parameters

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from shapewright.models.transformer import TransformerConfig

# Relative deviation of the parameters up to which a model is not scaled. Names round: GPT-3 2.7B has 2.65 B parameters,
# Qwen3-30B-A3B 30.5 B. It is also the tolerance of a search.
_UNSCALED_WITHIN = 0.02
_UNIT = 128  # elements; widths of public models are multiples of it
# Accepted deviation of a scaled model: embeddings keep their rows, so a small model with a large vocabulary could be
# several times as large as wanted.
_MOST_DEVIATION_FRACTION = 0.05
_HEADS_AROUND = 8  # key-value heads tried below and above the scaled number
_EXPERT_WIDTHS_AROUND = 2  # widths of experts tried below and above the scaled one
_FAMILY_ALIASES = {"gpt": "gpt3"}


def usual_model(
    num_parameters: int, family: str, tensor_parallel: int = 1, *, overrides: Mapping[str, object] | None = None
) -> Model:
    """Return a model of a family, scaled to a number of parameters.

    Args:
        family: Prefix of preset names, such as ``llama``; ``gpt`` stands for GPT-3.
        tensor_parallel: Tensor degree that should divide its heads.
        overrides: TransformerConfig fields to change before it is scaled.

    Raises:
        ConfigError: there is no such family, or no model of that size.
    """
    return scale_nearest(family_models(family, overrides=overrides), num_parameters, tensor_parallel)


def scale_nearest(models: Sequence[Model], num_parameters: int, tensor_parallel: int = 1) -> Model:
    """Return the model nearest to a number of parameters, scaled to it; see scale_model."""
    check_num_parameters(num_parameters)
    nearest = min(models, key=lambda model: abs(log(count_parameters(model.config).total / num_parameters)))
    return scale_model(nearest, num_parameters, tensor_parallel)


def family_models(
    family: str, *, overrides: Mapping[str, object] | None = None, least_positions: int = 0
) -> Sequence[Model]:
    """Return the public models of a family that a shape can be scaled from.

    Args:
        family: As in ``usual_model``.
        overrides: As in ``usual_model``.
        least_positions: Context window that its sequences need; models with a shorter one are left out if the family
            has others.

    Raises:
        ConfigError: there is no such family.
    """
    prefix = _FAMILY_ALIASES.get(family.casefold(), family.casefold())
    names = [name for name in list_presets() if name == prefix or name.startswith((f"{prefix}-", f"{prefix}."))]
    names = names or [name for name in list_presets() if prefix and name.startswith(prefix)]
    models = [read_model(name, overrides) for name in names]
    models = [
        model
        for model in models
        if model.config.stack == "decoder" and not (model.config.is_moe or model.config.attends_to_images)
    ]
    # A language model alone is designed; that of a vision-language model only where its family has no other.
    models = [model for model in models if not (model.raw or {}).get("vision_config")] or models
    if names and not models:
        raise ConfigError(
            f"family={family!r}: its presets are no dense decoders of text ({', '.join(names[:3])})",
            advice="give another family, or one of them as the model",
            field="family",
        )
    if not models:
        families = sorted({load_preset(name).family for name in list_presets()} | {"gpt", "llama"})
        hint = close_names(prefix, families) or "see 'shapewright models'"
        raise ConfigError(f"family={family!r}: no dense decoder preset begins with it; {hint}")
    return [model for model in models if model.config.max_position_embeddings >= least_positions] or models


def scale_model(model: Model, num_parameters: int, tensor_parallel: int = 1) -> Model:
    """Scale width and depth of a model by one factor to a number of parameters; heads keep their dimension.

    A mixture of experts keeps the number of its experts, and of those that a token uses.

    Args:
        model: What to start from; returned as it is where its size is already within 2 %.
        tensor_parallel: Tensor degree that divides the heads of a scaled model, if a number of heads nearby allows it.

    Raises:
        ConfigError: the model does not scale to that size.
    """
    config, own = model.config, count_parameters(model.config).total
    if abs(own / num_parameters - 1.0) <= _UNSCALED_WITHIN:
        return model
    if config.shares_keys or config.stack != "decoder":
        raise ConfigError(
            f"num_parameters={num_parameters:,}: {config.title} has {own:,} parameters, and only decoders without "
            f"latent or compressed attention are scaled",
            advice=with_fields("give {num_parameters} {own}, or a config of the size that you want", own=own),
        )
    factor = (num_parameters / own) ** (1.0 / 3.0)
    near = _numbers_of_kv_heads(config, factor)
    divided = [number for number in near if _divides_heads(config, number, tensor_parallel)]
    scaled = _scale(config, divided or near, num_parameters)
    size = count_parameters(scaled).total
    if abs(size / num_parameters - 1.0) > _MOST_DEVIATION_FRACTION:
        raise ConfigError(
            f"num_parameters={num_parameters:,}: the nearest that {config.title} scales to has {size:,} parameters, "
            f"with a vocabulary of {config.vocab_size:,}",
            advice=with_fields("give {num_parameters} {size}, or a model with a smaller one", size=size),
        )
    note = f"{config.title} scaled to {size:,} parameters: L={scaled.num_layers}, h={scaled.hidden_size}"
    return replace(model, config=scaled, source=f"{model.source}, scaled", notes=(*model.notes, note))


def _numbers_of_kv_heads(config: TransformerConfig, factor: float) -> list[int]:
    """Return the numbers of key-value heads around the scaled number."""
    middle = round(config.num_kv_heads * factor)
    return list(range(max(1, middle - _HEADS_AROUND), middle + _HEADS_AROUND + 1))


def _divides_heads(config: TransformerConfig, num_kv_heads: int, degree: int) -> bool:
    """Return whether a tensor degree divides the heads; key-value heads are replicated if they are fewer."""
    num_heads = num_kv_heads * (config.num_heads // config.num_kv_heads)
    return num_heads % degree == 0 and (num_kv_heads % degree == 0 or degree % num_kv_heads == 0)


def _scale(config: TransformerConfig, numbers_of_kv_heads: list[int], num_parameters: int) -> TransformerConfig:
    """Return the shape nearest to the wanted size and aspect ratio, of widths and depths around the scaled ones."""
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
            layers = _fit_layers(config, sizes, num_parameters)
            for num_layers in {max(1, layers - 1), layers, layers + 1}:
                shape = with_changes(config, {**sizes, "num_layers": num_layers})
                deviation = abs(log(count_parameters(shape).total / num_parameters))
                # Ten percent of aspect ratio weigh as much as one percent of size.
                deviation += 0.1 * abs(log(width / num_layers * config.num_layers / config.hidden_size))
                if best is None or deviation < best[0]:
                    best = deviation, shape
    assert best is not None
    return best[1] if config.is_moe else _refit_ffn(best[1], num_parameters)


def _refit_ffn(config: TransformerConfig, num_parameters: int) -> TransformerConfig:
    """Adjust the MLP width to come closer to the number of parameters, by at most a tenth."""
    unit = _UNIT if config.hidden_size > 8 * _UNIT else 8
    per_unit = (3 if config.gated_mlp else 2) * config.hidden_size * config.num_layers * unit
    steps = round((num_parameters - count_parameters(config).total) / per_unit)
    most = config.intermediate_size // (10 * unit)
    return replace(config, intermediate_size=config.intermediate_size + min(max(steps, -most), most) * unit)


def _inner_widths(config: TransformerConfig, width: int) -> list[dict[str, int]]:
    """Return MLP and expert widths in proportion to a width; for experts also neighbors, because steps are large."""
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


def _fit_layers(config: TransformerConfig, sizes: Mapping[str, int], num_parameters: int) -> int:
    """Return the number of layers with which a model of given widths has nearly a number of parameters."""
    # Beyond the layers that a pattern distinguishes, each layer adds the same number of parameters.
    first = config.num_layers if config.is_moe else 1
    one, two = (
        count_parameters(with_changes(config, {**sizes, "num_layers": layers})).total for layers in (first, first + 1)
    )
    return min(max(1, (num_parameters - one) // (two - one) + first), 2**15)
