"""The fit of slow cases to whole blocks recovers the parameters that blocks were made with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shapewright.hardware import load_device
from shapewright.pricing.calibration.records import load_record

pd = pytest.importorskip("pandas", reason="needs the fit extra")
pytest.importorskip("scipy", reason="needs the fit extra")

from shapewright.measure.fit.gemm_section import device_rates, predict_rows
from shapewright.measure.refit.gemm.paper_device import fit_blocks

DEVICE = load_device("mi250x-gcd")
RATES = device_rates(DEVICE, "fp16", hot=False)
SECTION: dict[str, Any] = load_record("gemm", DEVICE).parameters["dtypes"]["fp16"]
MASK_S, OTHER_S = 0.03, 0.002


def gemms_s(tokens: int, pairs: list[tuple[int, int]], slow_cases: dict[str, Any]) -> float:
    """Time of consecutive GEMMs with the same number of rows and these n and k. [s]"""
    n, k = zip(*pairs, strict=True)
    rows = pd.DataFrame({"m": tokens, "n": n, "k": k, "batch": 1}).astype(float)
    return float(np.sum(predict_rows(rows, {**SECTION, "slow_cases": slow_cases}, RATES, "NT")))


def test_fit_recovers_the_parameters_of_generated_blocks() -> None:
    """MLPs are 4h x h and h x 4h, attention 3h x h and h x h and a mask, a layer all four and the mask.

    Widths are those at which far pages cost a part of their rate; every third one judges.
    """
    truth = {**SECTION["slow_cases"], "reach_bytes": 2.0e9, "reach_loss": 0.2, "spans": []}
    rows = []
    for h in range(8192, 20480, 1024):
        mlp, attention = [(4 * h, h), (h, 4 * h)], [(3 * h, h), (h, h)]
        for kind, pairs in (("mlp", mlp), ("attention", attention), ("layer", mlp + attention)):
            mask_s = 0.0 if kind == "mlp" else MASK_S
            rows.append((kind, 8192, h, gemms_s(8192, pairs, truth) + mask_s + OTHER_S, OTHER_S))
    blocks = pd.DataFrame(rows, columns=["kind", "tokens", "hidden_size", "measured_s", "other_s"])
    is_held_out = (blocks.hidden_size // 1024 % 3 == 0).to_numpy()
    cases, report = fit_blocks(blocks, is_held_out, SECTION, [], RATES)

    assert report["mask_s"] == pytest.approx(MASK_S, rel=0.02)
    assert cases["reach_bytes"] == pytest.approx(truth["reach_bytes"], rel=0.05)
    assert cases["reach_loss"] == pytest.approx(truth["reach_loss"], abs=0.02)
    assert (report["rows"], report["mean_ape"]) == (4, pytest.approx(0.0, abs=0.005))
    assert (cases["spans"], cases["small_edge"]) == ([], truth["small_edge"])
