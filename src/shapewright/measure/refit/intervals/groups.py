"""Groups of intervals made of priced rows: those of sections and those of libraries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from shapewright.measure.refit.intervals.residual_intervals import (
    Interval,
    fitted_interval,
    pool,
    stretch,
    stretch_factors,
    stretch_scores,
    widen_interval,
    with_minimum_width,
)

# A third library lies nearer to the mean of two than they to each other: with equal and independent spreads, its
# squared distance is 3/2 of one variance, and theirs is 2.
THIRD_LIBRARY = np.sqrt(3.0 / 4.0)

Groups = dict[str, Interval | None]
Parts = dict[str, tuple[np.ndarray, np.ndarray]]


def parts_of(rows: pd.DataFrame, by: list[str]) -> Parts:
    """Return predicted and measured times of each distinct combination of labels."""
    return {
        " ".join(map(str, key)): (part.predicted.to_numpy(), part.measured.to_numpy()) for key, part in rows.groupby(by)
    }


def own_groups(
    rows: pd.DataFrame, regime: str, known: Mapping[str, Interval] | None = None
) -> tuple[Groups, dict[str, Any]]:
    """Return intervals of sections: those of fitted rows, stretched as the held-out rows of a regime need.

    Args:
        rows: Rows with ``path`` (name of the group), ``regime_s`` (time that selects the regime), ``is_unseen`` and
            ``half``.
        regime: Column whose values share a stretch, such as the phase.
        known: Intervals of paths whose fitted rows are not representative, such as those with a learned table.

    Returns:
        The groups, and the coverage of held-out rows by stretches from the other half of their shapes.
    """
    fitted = {
        path: fitted_interval(part.regime_s.to_numpy(), (part.measured / part.predicted * part.regime_s).to_numpy())
        for path, part in rows[~rows.is_unseen].groupby("path")
    } | {path: with_minimum_width(form) for path, form in (known or {}).items()}
    unseen = rows[rows.is_unseen & rows.path.isin(fitted)].copy()
    unseen["scores"] = np.nan
    for path, part in unseen.groupby("path"):
        scaled = (part.measured / part.predicted * part.regime_s).to_numpy()
        unseen.loc[part.index, "scores"] = stretch_scores(fitted[path], part.regime_s.to_numpy(), scaled)
    groups: Groups = {}
    judged = []
    for word, part in unseen.groupby(regime):
        factors = stretch_factors(part.scores.to_numpy(), part.regime_s.to_numpy())
        groups |= {
            path: stretch(fitted[path], factors)
            for path in rows.loc[rows[regime] == word, "path"].unique()
            if path in fitted
        }
        for half in (0, 1):
            others, these = part[part.half != half], part[part.half == half]
            if len(others) and len(these):
                factors = stretch_factors(others.scores.to_numpy(), others.regime_s.to_numpy())
                at = np.searchsorted(factors["edges_s"], these.regime_s)
                judged.append(these.assign(covered=these.scores <= np.asarray(factors["factor"])[at]))
    return groups, summary(pd.concat(judged))


def summary(judged: pd.DataFrame) -> dict[str, Any]:
    """Return coverage: overall, and of the cells (device, dtype, library) outside 85 to 95 %."""
    cells = judged.groupby(["table", "device", "dtype", "library"]).covered.agg(["mean", "size"])
    cells = cells[cells["size"] >= 200]
    outside = cells[(cells["mean"] < 0.85) | (cells["mean"] > 0.95)]
    return {
        "rows": len(judged),
        "covered": round(float(judged.covered.mean()), 3),
        "cells": len(cells),
        "cells_inside": len(cells) - len(outside),
        "outside": {" ".join(map(str, key)): round(float(row["mean"]), 3) for key, row in outside.iterrows()},
    }


def library_groups(rows: pd.DataFrame) -> Groups:
    """Return pools of libraries priced with another's section, by device and format, by format, and of all.

    Pools of all devices have a version without each of them, for pricing that device as unmeasured.

    Args:
        rows: Rows with ``format`` and ``format_family``, by each of which groups are named.
    """
    groups: Groups = {}
    formats = sorted({*rows.format, *rows.format_family})
    devices = sorted(rows.device.unique())
    for place, ending, there in (
        ("other library", "", rows),
        *((f"other library/{device}", "", rows[rows.device == device]) for device in devices),
        *(("other library", f"/without {device}", rows[rows.device != device]) for device in devices),
    ):
        for name in ("", *formats):
            here = there[(there.format == name) | (there.format_family == name)] if name else there
            if len(here):
                parts = parts_of(here, ["device", "library"])
                found = widen_interval(pool(list(parts.values())), THIRD_LIBRARY)
                groups[f"{place}/{name}{ending}" if name else f"{place}{ending}"] = found
    return groups
