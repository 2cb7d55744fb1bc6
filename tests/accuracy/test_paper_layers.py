"""Whole layers of arXiv 2401.14489 against their logs; hidden sizes that the old fused kernel's fit did not see."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from measured import measured_file

from shapewright.accuracy.judge import judge_folder
from shapewright.fit.logs import HELD_OUT_FOLD, folds_of

LIMITS = tomllib.loads((Path(__file__).parent / "limits.toml").read_text(encoding="utf-8"))["paper_layers"]
A100 = "a100-sxm-40gb"


@pytest.mark.parametrize("table", LIMITS)
def test_layers(table: str, tmp_path: Path) -> None:
    """Mean error and order of a block's rows stay within the limits; flash rows are those of unseen hidden sizes."""
    import pandas as pd

    rows = pd.read_csv(measured_file("paper_layers.csv"))
    if table.endswith("-flash"):
        rows = rows[(rows.log == "flash_h_sweep") & (folds_of(rows.hidden_size) == HELD_OUT_FOLD)]
    rows.to_csv(tmp_path / "paper_layers.csv", index=False)
    judged = judge_folder(tmp_path, devices=[A100], tables=["paper_layers"])
    (found,) = [each for each in judged.rows if each.table == f"paper_layers/{table}"]

    assert found.rows > 0
    assert found.mape <= LIMITS[table]["mean"]
    assert found.kendall_tau is not None
    assert found.kendall_tau >= LIMITS[table]["kendall_tau"]
    assert np.isfinite(found.bias)
