"""Quality guard: limits on how far a shape may differ from the baseline, and its rank among public models.

A faster shape with a higher loss is no gain, and a search for speed does not predict loss. So shapes stay close to
those whose quality is known:

- aspect ratio: at equal parameters the loss hardly depends on depth against width. Kaplan et al. (arXiv 2001.08361,
  section 3.1 and figure 5) find a few percent over aspect ratios that differ 40-fold, and likewise for the ratio of the
  MLP and for the head dimension; much deeper or shallower than usual loses more (arXiv 2006.12467, Levine et al.).
- head dimension: below 64 it limits the rank of attention (arXiv 2002.07028, Bhojanapalli et al.).
- query heads per key-value head: groups of 8 lose little against 1 (arXiv 2305.13245, Ainslie et al.).

This evidence does not show that two particular shapes are equally good; a trial run does.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import ConfigError
from shapewright.core.records import dataclass
from shapewright.models.read import list_presets, read_model

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig

GUARDS = ("usual", "strict", "free")

PRESET_MEASURES = Path(__file__).with_name("preset_measures.json")

# A gated MLP has three matrices instead of two: a width of 8/3 h, gated, has the parameters of 4 h without a gate.
_GATED_SHARE = 1.5


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One measure of a shape that the guard limits.

    Attributes:
        name: Its name in reports.
        description: Its definition.
        reach: Allowed ratio to the baseline, in both directions.
        strict_reach: The same for the guard ``strict``.
        usual: Percentiles of public models; values between them are allowed if they are within the reach.
    """

    name: str
    description: str
    reach: float
    strict_reach: float
    usual: tuple[float, float] = (10.0, 90.0)


MEASURES = (
    Measure(name="aspect", description="width per layer, h / L", reach=1.5, strict_reach=1.2, usual=(2.5, 97.5)),
    Measure(name="head_dim", description="width of a head", reach=2.0, strict_reach=1.6),
    Measure(name="ffn_ratio", description="MLP width over h, 1.5 times it if gated", reach=1.25, strict_reach=1.1),
    Measure(name="kv_group", description="query heads per key-value head", reach=8.0, strict_reach=1.0),
)


def measure_shape(config: TransformerConfig) -> dict[str, float]:
    """Return all measures of a model."""
    own_width = config.moe_intermediate_size if config.is_moe else config.intermediate_size
    return {
        "aspect": config.hidden_size / config.num_layers,
        "head_dim": float(config.head_dim),
        "ffn_ratio": ffn_ratio(config, active_ffn_width(config, own_width), config.hidden_size),
        "kv_group": config.num_heads / config.num_kv_heads,
    }


def ffn_ratio(config: TransformerConfig, inner_width: Any, hidden_size: Any) -> Any:
    """Return the ratio of MLP width to hidden size, converted to an MLP without a gate."""
    return inner_width * (_GATED_SHARE if config.gated_mlp else 1.0) / hidden_size


def active_ffn_width(config: TransformerConfig, width: Any) -> Any:
    """Return the MLP width that one token uses.

    Args:
        width: Width of one expert, or of the MLP of a dense model.
    """
    if not config.is_moe:
        return width
    return config.num_experts_per_token * width + config.shared_expert_intermediate_size


def measure_presets() -> dict[str, Any]:
    """Measure all presets, for a file that a search reads instead: reading every preset takes a tenth of a second.

    Returns:
        ``measures``: the sorted measures of decoders, by name; ``types_with_grouped_heads``: model types with fewer
        key-value heads than heads.
    """
    configs = [read_model(name).config for name in list_presets()]
    shapes = [measure_shape(config) for config in configs if config.stack == "decoder" and not config.is_mla]
    return {
        "measures": {measure.name: sorted(shape[measure.name] for shape in shapes) for measure in MEASURES},
        "types_with_grouped_heads": sorted(
            {config.model_type for config in configs if config.num_kv_heads < config.num_heads}
        ),
    }


@lru_cache(maxsize=1)
def _read_preset_measures() -> dict[str, Any]:
    """Read the file that ``scripts/write_preset_measures.py`` writes."""
    read: dict[str, Any] = json.loads(PRESET_MEASURES.read_text(encoding="utf-8"))
    return read


def preset_measures() -> Mapping[str, Sequence[float]]:
    """Return the sorted measures of all presets that are decoders."""
    measures: Mapping[str, Sequence[float]] = _read_preset_measures()["measures"]
    return measures


def has_grouped_heads(model_type: str) -> bool:
    """Return whether public models of a type have grouped key-value heads; others may not support them."""
    return model_type in _read_preset_measures()["types_with_grouped_heads"]


def percentile_of(measure: str, value: float) -> float:
    """Return the percentile of a value among public models; equal values count half. [percent]"""
    known = preset_measures()[measure]
    below, up_to = bisect_left(known, value), bisect_right(known, value)
    return 100.0 * (below + up_to) / 2.0 / len(known)


def allowed_range(measure: Measure, baseline: float, guard: str) -> tuple[float, float]:
    """Return the range of values that the guard allows.

    Args:
        baseline: The baseline's value, which is always allowed.
        guard: One of GUARDS; ``free`` allows everything.

    >>> aspect, head_dim = MEASURES[:2]
    >>> allowed_range(head_dim, 80.0, "usual"), allowed_range(head_dim, 80.0, "strict")
    ((64.0, 128.0), (64.0, 128.0))
    """
    if guard == "free":
        return 0.0, float("inf")
    known = preset_measures()[measure.name]
    low, high = (known[round(share / 100.0 * (len(known) - 1))] for share in measure.usual)
    reach = measure.strict_reach if guard == "strict" else measure.reach
    return max(min(low, baseline), baseline / reach), min(max(high, baseline), baseline * reach)


def check_guard(guard: str) -> None:
    """Refuse an unknown guard.

    Raises:
        ConfigError: the guard is not known.
    """
    if guard not in GUARDS:
        raise ConfigError(f"guard={guard!r} is not known; choose one of {', '.join(GUARDS)}")
