"""Groups of intervals from priced rows: of sections and of libraries. Not a script itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from shapewright.fit.intervals import (
    Interval,
    at_least,
    form_of,
    pool,
    stretch,
    stretch_scores,
    stretches,
    widened,
)

# A third library lies nearer the middle of two than they lie to each other: with spreads alike and independent, its
# distance has 3/2 of the variance of one, and theirs has 2.
THIRD_LIBRARY = np.sqrt(3.0 / 4.0)

Groups = dict[str, Interval | None]
Parts = dict[str, tuple[np.ndarray, np.ndarray]]


def parts_of(rows: pd.DataFrame, by: list[str]) -> Parts:
    """Predicted and measured times of each distinct combination of words."""
    return {
        " ".join(map(str, key)): (part.predicted.to_numpy(), part.measured.to_numpy()) for key, part in rows.groupby(by)
    }


def own_groups(
    rows: pd.DataFrame, regime: str, known: Mapping[str, Interval] | None = None
) -> tuple[Groups, dict[str, Any]]:
    """Intervals of sections: the form of rows the fit saw, stretched by what the unseen ones of a regime ask for.

    Args:
        rows: Rows with ``path`` (name of the group), ``regime_s`` (time that chooses the regime), ``is_unseen`` and
            ``half``.
        regime: Column whose words share a stretch, such as the phase.
        known: Forms of paths whose seen rows say too little, such as those that a table was learned from.

    Returns:
        The groups, and the coverage of unseen rows by stretches from the other half of their shapes.
    """
    forms = {
        path: form_of(part.regime_s.to_numpy(), (part.measured / part.predicted * part.regime_s).to_numpy())
        for path, part in rows[~rows.is_unseen].groupby("path")
    } | {path: at_least(form) for path, form in (known or {}).items()}
    unseen = rows[rows.is_unseen & rows.path.isin(forms)].copy()
    unseen["scores"] = np.nan
    for path, part in unseen.groupby("path"):
        scaled = (part.measured / part.predicted * part.regime_s).to_numpy()
        unseen.loc[part.index, "scores"] = stretch_scores(forms[path], part.regime_s.to_numpy(), scaled)
    groups: Groups = {}
    judged = []
    for word, part in unseen.groupby(regime):
        factors = stretches(part.scores.to_numpy(), part.regime_s.to_numpy())
        groups |= {
            path: stretch(forms[path], factors)
            for path in rows.loc[rows[regime] == word, "path"].unique()
            if path in forms
        }
        for half in (0, 1):
            others, these = part[part.half != half], part[part.half == half]
            if len(others) and len(these):
                factors = stretches(others.scores.to_numpy(), others.regime_s.to_numpy())
                at = np.searchsorted(factors["edges_s"], these.regime_s)
                judged.append(these.assign(covered=these.scores <= np.asarray(factors["factor"])[at]))
    return groups, summary(pd.concat(judged))


def summary(judged: pd.DataFrame) -> dict[str, Any]:
    """Coverage of judged rows: all, by device, dtype and library, and the cells outside 85 to 95 %."""
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
    """Pools of libraries priced with another's section, by device and format, by format, and of all.

    Those of all devices have a twin without each of them, for who prices it as if nobody had measured it.
    """
    groups: Groups = {}
    formats = sorted({*rows.format, *(name.split("/")[0] for name in rows.format)})
    devices = sorted(rows.device.unique())
    for place, ending, there in (
        ("other library", "", rows),
        *((f"other library/{device}", "", rows[rows.device == device]) for device in devices),
        *(("other library", f"/without {device}", rows[rows.device != device]) for device in devices),
    ):
        for name in ("", *formats):
            here = there[(there.format == name) | there.format.str.startswith(f"{name}/")] if name else there
            if len(here):
                parts = parts_of(here, ["device", "library"])
                found = widened(pool(list(parts.values())), THIRD_LIBRARY)
                groups[f"{place}/{name}{ending}" if name else f"{place}{ending}"] = found
    return groups
