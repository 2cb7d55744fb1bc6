"""The space of a search: all combinations of the values that its fields may take, around a baseline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.errors import ConfigError
from shapewright.search.bands import MEASURES, allowed_range, ffn_ratio, measure_shape
from shapewright.search.grid import Grid
from shapewright.search.request import VARIED, ffn_field
from shapewright.search.values import HEADS_AXIS, FieldValues

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.config import TransformerConfig
    from shapewright.layout import ParallelLayout
    from shapewright.search.request import SearchRequest
    from shapewright.workload import Workload

# Products of four such sizes, layers times widths squared among them, stay inside 63 bits.
_LARGEST_DIM = 2**20


@dataclass(frozen=True, kw_only=True)
class Space:
    """Shapes to look at.

    Attributes:
        baseline: The model they are variants of.
        grid: All combinations of values.
        followers: Fields that take another field's value: name of the follower to name of the leader.
        ranges: What the quality guard allows, by measure.
    """

    baseline: TransformerConfig
    grid: Grid
    followers: dict[str, str]
    ranges: dict[str, tuple[float, float]]

    @property
    def ffn_field(self) -> str:
        """The MLP width that lies on a grid."""
        return ffn_field(self.baseline)

    def allowed(self, grid: Grid, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Where shapes at some entries of ``heads`` are inside the ranges of depth and ffn; broadcasts over a grid."""
        heads = {name: column[rows].reshape(-1, 1, 1, 1, 1) for name, column in grid.columns["heads"].items()}
        layers = grid.columns["depth"]["num_layers"].reshape(1, 1, -1, 1, 1)
        inner = heads.get(self.ffn_field)
        if inner is None:
            inner = grid.columns["ffn"][self.ffn_field].reshape(1, -1, 1, 1, 1)
        low, high = self.ranges["aspect"]
        aspect = heads["hidden_size"] / layers
        # A hair's width, for the ends of a range come from divisions.
        inside = (aspect >= low * (1 - 1e-9)) & (aspect <= high * (1 + 1e-9))
        low, high = self.ranges["ffn_ratio"]
        ratio = ffn_ratio(self.baseline, active_inner(self.baseline, inner), heads["hidden_size"])
        within: NDArray[np.bool_] = inside & (ratio >= low * (1 - 1e-9)) & (ratio <= high * (1 + 1e-9))
        return within


def active_inner(config: TransformerConfig, inner: Any) -> Any:
    """Inner width that one token passes through, given the width that is varied."""
    if not config.is_moe:
        return inner
    return config.num_experts_per_token * inner + config.shared_expert_intermediate_size


def make_space(
    baseline: TransformerConfig, workload: Workload, layout: ParallelLayout, request: SearchRequest
) -> Space:
    """List the values of every field.

    Raises:
        ConfigError: nothing is left to vary, or a kept value leaves no shape.
    """
    free = set(request.free_fields())
    if not free:
        raise ConfigError("every field is kept: nothing is left to search; give --vary or fewer --keep")
    own = measure_shape(baseline)
    ranges = {measure.name: allowed_range(measure, own[measure.name], request.guard) for measure in MEASURES}
    listed = FieldValues(baseline, layout, request, free, ranges)
    rows = list(listed.heads())
    if not rows:
        raise ConfigError(
            f"no heads fit the width: {listed.kept_words()} leave no whole heads inside the guard; "
            f"{_nearest_words(listed)}keep fewer fields, vary heads, or give --free"
        )
    heads = {
        name: np.array(column, dtype=np.int64) for name, column in zip(HEADS_AXIS, zip(*rows, strict=True), strict=True)
    }
    ffn: dict[str, list[int]] = {}
    width_fields = {"hidden_size"}
    name, widths = ffn_field(baseline), sorted({row[0] for row in rows})
    if "ffn" in free or "intermediate_size" in request.keep or widths == [baseline.hidden_size]:
        ffn[name] = listed.ffn(widths)
    else:
        follow = {width: listed.ffn_at(width) for width in widths}
        heads[name] = np.array([follow[row[0]] for row in rows], dtype=np.int64)
        width_fields.add(name)
    columns: dict[str, dict[str, Any]] = {
        "heads": heads,
        "ffn": ffn,
        "depth": {"num_layers": listed.depth()},
        "vocab": {"vocab_size": listed.vocab()},
        "batch": {"micro_batch_size": listed.micro_batch(workload)},
    }
    arrays = {
        axis: {key: np.asarray(values, dtype=np.int64) for key, values in column.items()}
        for axis, column in columns.items()
    }
    largest = max(int(values.max()) for column in arrays.values() for values in column.values())
    if largest > _LARGEST_DIM:
        raise ConfigError(f"a size of {largest:,} is too large to search around; give sizes up to 2**20")
    return Space(
        baseline=baseline,
        grid=Grid(arrays, frozenset(width_fields)),
        followers=_followers(baseline),
        ranges=ranges,
    )


def _nearest_words(listed: FieldValues) -> str:
    """For each kept field of the heads, the nearest value that would leave shapes, all else kept."""
    keep, found = listed.request.keep, []
    fields = {name: key for key, name in VARIED.items()} | {"head_dim": "heads"}
    for place, name in enumerate(HEADS_AXIS):
        if name not in keep:
            continue
        request = replace(listed.request, keep={key: value for key, value in keep.items() if key != name})
        relaxed = replace(listed, request=request, free=listed.free | {fields[name]})
        values = {row[place] for row in relaxed.heads()} - {keep[name]}
        if values:
            found.append(f"{name}={min(values, key=lambda value: (abs(value - keep[name]), value))}")
    return f"the nearest that would: {' or '.join(found)}; " if found else ""


def _followers(config: TransformerConfig) -> dict[str, str]:
    """Fields that have another one's value in the baseline, and keep having it."""
    pairs = {
        "v_head_dim": "head_dim",
        "embedding_size": "hidden_size",
        "num_encoder_layers": "num_layers",
    }
    followers = {
        follower: leader for follower, leader in pairs.items() if getattr(config, follower) == getattr(config, leader)
    }
    if config.is_moe and config.moe_intermediate_size == config.intermediate_size:
        followers["intermediate_size"] = "moe_intermediate_size"
    if config.is_mla:
        followers.pop("v_head_dim", None)
    return followers
