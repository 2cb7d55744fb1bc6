"""Select the rows of a store that a fit uses: one device's valid rows, by kind, each measurement once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import CalibrationError, MissingExtraError
from shapewright.measure.store.record import OK

if TYPE_CHECKING:
    import pandas as pd

    from shapewright.measure.store.record import Row


# Suites of random GEMMs: that of the bench, and the imported one of the measuring script that preceded it.
_RANDOM_SUITES = ("random", "campaign linear_random")


def good_rows(rows: Iterable[Row], device: str = "") -> tuple[str, list[Row]]:
    """Return the valid rows of one device without repetitions.

    Args:
        rows: Rows of a store.
        device: Canonical name; may be omitted if the store has one device only.

    Raises:
        CalibrationError: there are none, or rows of several devices and none was named.
    """
    fine = [row for row in rows if row.status == OK and row.repetition == 0 and row.median_s]
    counts = Counter(row.device for row in fine)
    listed = ", ".join(f"{name} ({count:,} rows)" for name, count in counts.most_common()) or "no valid row"
    if not device and len(counts) != 1:
        raise CalibrationError(f"the store holds {listed}; name one device with --device")
    device = device or next(iter(counts))
    if device not in counts:
        raise CalibrationError(f"the store has no valid row of {device}; it holds {listed}")
    return device, [row for row in fine if row.device == device]


def is_held_out_shape(m: int, n: int, k: int) -> bool:
    """Whether a random GEMM of the bench is held out of all fits; about half of them are.

    >>> is_held_out_shape(128, 64, 32), is_held_out_shape(129, 64, 32)
    (True, False)
    """
    return ((m * 31 + n) * 31 + k) % 2 == 0


def gemm_table(rows: Sequence[Row]) -> pd.DataFrame:
    """Return GEMMs as a table with the columns of ``gemm_section``, and layout, dtype and cache state of each row.

    ``is_held_out`` marks the random GEMMs that are held out of all fits.
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
    columns["is_held_out"] = [
        row.suite in _RANDOM_SUITES and is_held_out_shape(int(row.m or 0), int(row.n or 0), int(row.k or 0))
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
