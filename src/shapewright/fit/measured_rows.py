"""Rows of a store as arrays to fit: one device's good rows, by kind, each measurement once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.errors import CalibrationError, MissingExtraError
from shapewright.fit.split import is_for_judging
from shapewright.store.record import OK

if TYPE_CHECKING:
    import pandas as pd

    from shapewright.store.record import Row


# How suites of random products end, those of the bench and of older scripts.
_RANDOM = "random"


def good_rows(rows: Iterable[Row], device: str = "") -> tuple[str, list[Row]]:
    """Rows to fit, of one device: those that are fine, repetitions left out.

    Args:
        rows: Rows of a store.
        device: Canonical name; may be left out where the store has one device alone.

    Raises:
        CalibrationError: there are none, or of several devices and none was named.
    """
    fine = [row for row in rows if row.status == OK and row.repetition == 0 and row.median_s]
    counts = Counter(row.device for row in fine)
    listed = ", ".join(f"{name} ({count:,} rows)" for name, count in counts.most_common()) or "no good row at all"
    if not device and len(counts) != 1:
        raise CalibrationError(f"the store holds {listed}; name one device with --device")
    device = device or next(iter(counts))
    if device not in counts:
        raise CalibrationError(f"the store has no good row of {device}; it holds {listed}")
    return device, [row for row in fine if row.device == device]


def gemm_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Products with the columns that fit.gemm takes, layout, dtype and temperature of the cache of each row.

    ``is_judged`` marks the random products that no fit may see.
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MissingExtraError(
            "fitting needs pandas and scipy, which are not installed; run: pip install 'shapewright[fit]'"
        ) from error
    names = ("library", "dtype", "layout", "batch", "m", "n", "k", "is_cold")
    kept = [row for row in rows if row.kind == "gemm"]
    columns: dict[str, Any] = {name: [getattr(row, name) for row in kept] for name in names}
    columns["is_judged"] = [
        row.suite.endswith(_RANDOM) and is_for_judging(int(row.m or 0), int(row.n or 0), int(row.k or 0))
        for row in kept
    ]
    return pd.DataFrame({**columns, "latency_s": [row.median_s for row in kept]})


def folds_of_groups(keys: Sequence[object], num_folds: int) -> np.ndarray:
    """Fold of each row, so that rows of one key share a fold and folds have about as many keys.

    >>> folds_of_groups(["a", "b", "a", "c"], 2).tolist()
    [0, 1, 0, 0]
    """
    order = {key: place for place, key in enumerate(dict.fromkeys(keys))}
    return np.array([order[key] % num_folds for key in keys])
