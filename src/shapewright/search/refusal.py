"""Why a search has nothing to price: which constraint emptied the space, and the nearest that would not."""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from shapewright.errors import ConfigError
from shapewright.search.bands import ffn_ratio
from shapewright.search.request import LARGEST_TOLERANCE
from shapewright.units import format_count

if TYPE_CHECKING:
    from shapewright.search.findings import Findings
    from shapewright.search.job import Limits
    from shapewright.search.space import Space


def refuse_empty(findings: Findings, limits: Limits, space: Space) -> None:
    """Say which constraint left nothing to price.

    Raises:
        ConfigError: nothing was priced.
    """
    tally = findings.tally
    if tally.priced or not findings.is_complete:
        return
    if sum(tally.refused.values()) == tally.num_shapes:
        reason, _ = tally.refused.most_common(1)[0]
        raise ConfigError(
            f"none of {tally.num_shapes:,} shapes can run: {reason}; keep fewer fields, or change the layout"
        )
    if not tally.outside_budget:
        raise ConfigError(_guard_words(tally.num_shapes, space))
    nearest = tally.nearest_parameters
    assert nearest is not None
    away = nearest / limits.num_parameters - 1.0
    wider_percent = abs(100.0 * away) * 1.05 + 0.01
    wider = f"give --tolerance {wider_percent:.3g}%" if wider_percent <= 100.0 * LARGEST_TOLERANCE else "ask for others"
    raise ConfigError(
        f"none of {tally.num_shapes:,} shapes has {format_count(limits.num_parameters)} parameters within "
        f"{100.0 * limits.tolerance_fraction:.3g} %; the nearest inside the guard has {format_count(nearest)} "
        f"({100.0 * away:+.2g} %): {wider}, vary more fields, or --free"
    )


def _guard_words(num_shapes: int, space: Space) -> str:
    """Why the guard leaves nothing, with the nearest values that it would allow."""
    columns = {name: values for axis in space.grid.columns.values() for name, values in axis.items()}
    width, depth = int(np.median(columns["hidden_size"])), columns["num_layers"]
    low, high = space.ranges["aspect"]
    fewest, most = max(ceil(width / high), 1), int(width / low)
    words = f"width / layers from {low:.3g} to {high:.3g}, at width {width} that is {fewest} to {most} layers"
    if depth.max() >= fewest and depth.min() <= most:
        # Not the depth, so the MLP: of what one token passes through, over the width.
        low, high = space.ranges["ffn_ratio"]
        share = ffn_ratio(space.baseline, 1.0, width)
        words = f"MLPs of {ceil(low / share)} to {int(high / share)} at width {width}, counting what a token passes"
    return (
        f"the quality guard leaves none of {num_shapes:,} shapes: it allows {words}; keep other values, or give --free"
    )
