"""Layers and blocks of arXiv 2401.14489 against their logs; flash rows are of held-out hidden sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judging import ALL_LIMITS, load_refit, measured_file

from shapewright.hardware.loader import load_device
from shapewright.measure.accuracy.evaluate import evaluate_folder
from shapewright.measure.fit.gemm_section import device_rates, predict_rows
from shapewright.measure.fit.shared import HELD_OUT_FOLD, fold_of_rows
from shapewright.pricing.calibration.records import load_record

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


def test_fit_recovers_slow_cases_of_generated_blocks() -> None:
    """MLPs are 4h x h and h x 4h, attention 3h x h and h x h and a mask, a layer all four and the mask.

    Widths are those at which far pages cost a part of their rate; every third one judges.
    """
    fit_blocks = load_refit("gemm.paper_device").fit_blocks
    import pandas as pd

    device = load_device(MI250X)
    rates, mask_s, other_s = device_rates(device, "fp16", hot=False), 0.03, 0.002
    section: dict[str, Any] = load_record("gemm", device).parameters["dtypes"]["fp16"]
    truth = {**section["slow_cases"], "reach_bytes": 2.0e9, "reach_loss": 0.2, "spans": []}
    rows = []
    for h in range(8192, 20480, 1024):
        mlp, attention = [(4 * h, h), (h, 4 * h)], [(3 * h, h), (h, h)]
        for kind, pairs in (("mlp", mlp), ("attention", attention), ("layer", mlp + attention)):
            n, k = zip(*pairs, strict=True)
            gemms = pd.DataFrame({"m": 8192, "n": n, "k": k, "batch": 1}).astype(float)
            gemms_s = float(np.sum(predict_rows(gemms, {**section, "slow_cases": truth}, rates, "NT")))
            rows.append((kind, 8192, h, gemms_s + (0.0 if kind == "mlp" else mask_s) + other_s, other_s))
    blocks = pd.DataFrame(rows, columns=["kind", "tokens", "hidden_size", "measured_s", "other_s"])
    is_held_out = (blocks.hidden_size // 1024 % 3 == 0).to_numpy()
    cases, report = fit_blocks(blocks, is_held_out, section, [], rates)

    assert report["mask_s"] == pytest.approx(mask_s, rel=0.02)
    assert cases["reach_bytes"] == pytest.approx(truth["reach_bytes"], rel=0.05)
    assert cases["reach_loss"] == pytest.approx(truth["reach_loss"], abs=0.02)
    assert (report["rows"], report["mean_ape"]) == (4, pytest.approx(0.0, abs=0.005))
    assert (cases["spans"], cases["small_edge"]) == ([], truth["small_edge"])
