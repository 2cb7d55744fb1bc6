"""Layers and blocks of arXiv 2401.14489 against their logs; flash rows are of held-out hidden sizes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from measured import measured_file

from shapewright.measure.accuracy.evaluate import evaluate_folder
from shapewright.measure.fit.shared import HELD_OUT_FOLD, fold_of_rows

ALL_LIMITS = tomllib.loads((Path(__file__).parent / "limits.toml").read_text(encoding="utf-8"))
LIMITS = ALL_LIMITS["paper_layers"]
A100, MI250X = "a100-sxm-40gb", "mi250x-gcd"


@pytest.mark.parametrize("table", LIMITS)
def test_layers(table: str, tmp_path: Path) -> None:
    """Mean error and rank correlation of a block stay within the limits; flash rows are of held-out hidden sizes."""
    import pandas as pd

    rows = pd.read_csv(measured_file("paper_layers.csv"))
    if table.endswith("-flash"):
        rows = rows[(rows.log == "flash_h_sweep") & (fold_of_rows(rows.hidden_size) == HELD_OUT_FOLD)]
    rows.to_csv(tmp_path / "paper_layers.csv", index=False)
    report = evaluate_folder(tmp_path, devices=[A100], tables=["paper_layers"])
    (row,) = [each for each in report.rows if each.table == f"paper_layers/{table}"]

    assert row.rows > 0
    assert row.mape <= LIMITS[table]["mean"]
    assert row.kendall_tau is not None
    assert row.kendall_tau >= LIMITS[table]["kendall_tau"]
    assert np.isfinite(row.bias)


@pytest.mark.parametrize(("kind", "limits"), ALL_LIMITS["paper_heads"].items())
def test_head_widths_of_every_alignment(kind: str, limits: dict[str, float], tmp_path: Path) -> None:
    """Attention GEMMs of odd head widths are predicted as well as aligned ones, on every device."""
    import pandas as pd

    rows = pd.read_csv(measured_file("paper_layers.csv"))
    width = rows.hidden_size // rows.num_heads
    chosen = {"odd": width % 2 == 1, "narrow": (width % 2 == 0) & (width % 8 != 0), "aligned": width % 8 == 0}[kind]
    rows[chosen].to_csv(tmp_path / "paper_layers.csv", index=False)
    report = evaluate_folder(tmp_path, tables=["paper_layers"])
    tables = [each for each in report.rows if each.table in ("paper_layers/score", "paper_layers/aov")]

    for device, limit in limits.items():
        errors = [(each.rows, each.mape) for each in tables if each.device == device]
        num_rows = sum(count for count, _ in errors)
        assert num_rows > 40
        assert sum(count * mape for count, mape in errors) / num_rows <= limit, device


def test_blocks_of_another_vendor() -> None:
    """Errors of MI250X's attention and MLP blocks, and of their layers, stay within the limits."""
    report = evaluate_folder(measured_file("paper_layers.csv").parent, devices=[MI250X], tables=["paper_layers"])
    errors = {each.table.removeprefix("paper_layers/"): each.mape for each in report.rows}

    for block, limit in ALL_LIMITS["paper_blocks"].items():
        assert errors[block] <= limit, block
