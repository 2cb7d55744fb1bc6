"""The space of a search: all combinations of the values of its fields, around a baseline."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import ConfigError
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.optimize.search.request import VARIED, ffn_field
from shapewright.optimize.search.space.grid import Grid
from shapewright.optimize.search.space.guard import MEASURES, active_ffn_width, allowed_range, ffn_ratio, measure_shape
from shapewright.optimize.search.space.values import HEADS_AXIS, FieldValues

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

    from shapewright.models import TransformerConfig
    from shapewright.optimize.search.request import SearchRequest
    from shapewright.prediction.scenario import Scenario

# The product of four such sizes, such as layers times width squared, fits in 63 bits.
_LARGEST_DIM = 2**20


@dataclass(frozen=True, kw_only=True)
class Space:
    """The shapes of a search.

    Attributes:
        baseline: The model they are variants of.
        grid: All combinations of values.
        followers: Fields that take another field's value: name of the follower to name of the leader.
        ranges: Ranges that the quality guard allows, by measure.
    """

    baseline: TransformerConfig
    grid: Grid
    followers: dict[str, str]
    ranges: dict[str, tuple[float, float]]

    @property
    def ffn_field(self) -> str:
        """Field of the MLP width that is varied."""
        return ffn_field(self.baseline)

    def allowed(self, grid: Grid, rows: Int[np.ndarray, " rows"]) -> Bool[np.ndarray, "rows ffn depth 1 1"]:
        """Return whether shapes are inside the ranges of depth and MLP width; the result broadcasts over the grid.

        Args:
            grid: The grid, or a part of it.
            rows: Entries of ``heads``.
        """
        heads = {name: column[rows].reshape(-1, 1, 1, 1, 1) for name, column in grid.columns["heads"].items()}
        layers = grid.columns["depth"]["num_layers"].reshape(1, 1, -1, 1, 1)
        inner = heads.get(self.ffn_field)
        if inner is None:
            inner = grid.columns["ffn"][self.ffn_field].reshape(1, -1, 1, 1, 1)
        low, high = self.ranges["aspect"]
        aspect = heads["hidden_size"] / layers
        # The ends of the ranges are results of divisions, so they are compared with a tolerance.
        inside = (aspect >= low * (1 - 1e-9)) & (aspect <= high * (1 + 1e-9))
        low, high = self.ranges["ffn_ratio"]
        ratio = ffn_ratio(self.baseline, active_ffn_width(self.baseline, inner), heads["hidden_size"])
        within: Bool[np.ndarray, "rows ffn depth 1 1"] = (
            inside & (ratio >= low * (1 - 1e-9)) & (ratio <= high * (1 + 1e-9))
        )
        return within


def make_space(scenario: Scenario, request: SearchRequest) -> Space:
    """Make the space of a search from the values of every field.

    Args:
        scenario: The baseline; widths are multiples of its parallel degrees.

    Raises:
        ConfigError: nothing is left to vary, or a kept value leaves no shape.
    """
    baseline = scenario.config
    free = set(request.free_fields())
    if not free:
        raise ConfigError("every field is kept, so nothing is left to search; vary more fields or keep fewer")
    own = measure_shape(baseline)
    ranges = {measure.name: allowed_range(measure, own[measure.name], request.guard) for measure in MEASURES}
    if request.goal.resolve(scenario.workload.phase).measures_loss and request.guard != "free":
        # More key-value heads train to a lower loss, but the baseline's were chosen for serving, which training does
        # not pay for.
        ranges["kv_group"] = (max(own["kv_group"], ranges["kv_group"][0]), max(own["kv_group"], ranges["kv_group"][1]))
    listed = FieldValues(baseline, scenario.layout, request, free, ranges)
    rows = list(listed.heads())
    if not rows:
        raise ConfigError(
            f"no heads divide the width: {listed.describe_kept()} leave no head dimension inside the guard; "
            f"{_describe_nearest(listed)}" + with_fields("keep fewer fields, vary heads, or set {guard:free}")
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
        "batch": {"micro_batch_size": listed.micro_batch(scenario.workload)},
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


def _describe_nearest(listed: FieldValues) -> str:
    """Return, for each kept field of the heads, the nearest value that would leave shapes."""
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
    return f"the nearest value that does: {' or '.join(found)}; " if found else ""


def _followers(config: TransformerConfig) -> dict[str, str]:
    """Return the fields that have the value of another field in the baseline, and follow it."""
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
