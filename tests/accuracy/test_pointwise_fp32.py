"""fp32 pointwise operations on sizes that no fit saw, and on devices priced with another device's record."""

from __future__ import annotations

import tomllib
from pathlib import Path

import numpy as np
import pytest
from measured import measured_file
from refit_module import load_refit

from shapewright.hardware import load_device
from shapewright.pricing.calibration.records import FP32_POINTWISE, load_record

LIMITS = tomllib.loads((Path(__file__).parent / "limits.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", LIMITS["pointwise_fp32"])
def test_held_out_sizes(name: str) -> None:
    """Fitted without a fifth of the sizes, the record's error on those is within the limit."""
    refit = load_refit("pointwise_fp32")
    device = load_device(name)
    report = load_record(FP32_POINTWISE, device).provenance["report"]
    rows = refit.read_rows(measured_file("pointwise_fp32.parquet").parent, refit.MEASURED[name])
    held = rows[rows.held_out & rows.kind.isin(report["launch_s"])]
    kinds = load_record(FP32_POINTWISE, device).parameters["kinds"]
    free = {("bandwidth_fraction", kind): kinds[kind]["bandwidth_fraction"] for kind in report["launch_s"]}
    free |= {("launch_s", kind): launch_s for kind, launch_s in report["launch_s"].items()}
    parameters = load_record(FP32_POINTWISE, device).parameters
    free |= {(part, ""): parameters[part] for part in ("l2_reach_fraction", "l2_speedup")}
    predicted, _ = refit.predict({**free, ("hidden_s", ""): report["hidden_s"]}, held, device)

    assert float(np.mean(np.abs(predicted / held.latency_s.to_numpy() - 1.0))) <= LIMITS["pointwise_fp32"][name]
    assert 0.88 <= report["covered_kernels"] <= 0.95


@pytest.mark.parametrize("name", LIMITS["pointwise_fp32_borrowed"])
def test_devices_left_out(name: str) -> None:
    """Priced with another device's record, kernels stay within the limit."""
    refit = load_refit("pointwise_fp32")
    rows = refit.borrowed_rows(measured_file("pointwise_fp32.parquet").parent, name)

    assert float((rows.predicted / rows.measured - 1.0).abs().mean()) <= LIMITS["pointwise_fp32_borrowed"][name]
