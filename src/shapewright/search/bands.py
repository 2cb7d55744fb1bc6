"""Quality guard: how far a shape may move from the baseline, and how usual it is among public models.

Speed that costs loss is no gain, and a search for speed knows nothing of loss. So shapes stay near what is known:

- depth against width: loss hardly depends on it at equal parameters. Kaplan et al. (arXiv 2001.08361, section 3.1 and
  figure 5) find a few per cent over aspect ratios that differ 40-fold, for the ffn ratio and the head width alike;
  much deeper or shallower than usual loses more (arXiv 2006.12467, Levine et al.).
- head width: heads narrower than 64 limit what a head can express (arXiv 2002.07028, Bhojanapalli et al.).
- queries per key-value head: 8 lose little against 1 (arXiv 2305.13245, Ainslie et al.).

What none of them says is that two shapes are equally good: outside the range of evidence a change needs a trial run.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from shapewright.config import list_presets, read_model
from shapewright.errors import ConfigError

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig

GUARDS = ("usual", "strict", "free")

# A gated MLP has three matrices where a plain one has two: 8/3 h gated is as much as 4 h plain.
_GATED_SHARE = 1.5


@dataclass(frozen=True, kw_only=True)
class Measure:
    """One thing to watch.

    Attributes:
        name: What it is called in reports.
        words: What it is.
        reach: Factor from the baseline, either way, that the guard allows.
        strict_reach: The same under ``strict``.
        usual: Percentiles among public models between which values may lie, whatever the reach.
    """

    name: str
    words: str
    reach: float
    strict_reach: float
    usual: tuple[float, float] = (10.0, 90.0)


MEASURES = (
    Measure(name="aspect", words="width per layer, h / L", reach=1.5, strict_reach=1.2, usual=(2.5, 97.5)),
    Measure(name="head_dim", words="width of a head", reach=2.0, strict_reach=1.6),
    Measure(name="ffn_ratio", words="MLP width over h, 1.5 times it if gated", reach=1.25, strict_reach=1.1),
    Measure(name="kv_group", words="query heads per key-value head", reach=8.0, strict_reach=1.0),
)


def measure_shape(config: TransformerConfig) -> dict[str, float]:
    """Every measure of one model."""
    return {
        "aspect": config.hidden_size / config.num_layers,
        "head_dim": float(config.head_dim),
        "ffn_ratio": ffn_ratio(config, _active_width(config), config.hidden_size),
        "kv_group": config.num_heads / config.num_kv_heads,
    }


def ffn_ratio(config: TransformerConfig, inner_width: Any, hidden_size: Any) -> Any:
    """MLP width over hidden size, in the terms of an MLP without a gate."""
    return inner_width * (_GATED_SHARE if config.gated_mlp else 1.0) / hidden_size


def _active_width(config: TransformerConfig) -> int:
    """Inner width that one token passes through."""
    if not config.is_moe:
        return config.intermediate_size
    return config.num_experts_per_token * config.moe_intermediate_size + config.shared_expert_intermediate_size


@lru_cache(maxsize=1)
def preset_measures() -> Mapping[str, tuple[float, ...]]:
    """Measures of all presets that are decoders, sorted."""
    columns: dict[str, list[float]] = {measure.name: [] for measure in MEASURES}
    for name in list_presets():
        config = read_model(name).config
        if config.stack != "decoder" or config.is_mla:
            continue
        for measure, value in measure_shape(config).items():
            columns[measure].append(value)
    return {name: tuple(sorted(values)) for name, values in columns.items()}


def percentile_of(measure: str, value: float) -> float:
    """Share of public models at or below a value, those at it counted half. [percent]"""
    known = preset_measures()[measure]
    below, up_to = bisect_left(known, value), bisect_right(known, value)
    return 100.0 * (below + up_to) / 2.0 / len(known)


def allowed_range(measure: Measure, baseline: float, guard: str) -> tuple[float, float]:
    """Values that the guard allows, given the baseline's.

    Args:
        measure: What is measured.
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
    """Refuse a guard that does not exist.

    Raises:
        ConfigError: no such guard.
    """
    if guard not in GUARDS:
        raise ConfigError(f"guard={guard!r} is not known; choose one of {', '.join(GUARDS)}")
