"""fp32 GEMMs on held-out shapes, and on devices priced with another device's record."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from measured import measured_file
from refit_module import load_refit

from shapewright.hardware import load_device
from shapewright.pricing.calibration.records import FP32_GEMM, load_record

LIMITS = tomllib.loads((Path(__file__).parent / "limits.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", LIMITS["gemm_fp32"])
def test_recorded_errors(name: str) -> None:
    """The held-out error that a record states stays within the limit, and its interval covers nine in ten rows."""
    report = load_record(FP32_GEMM, load_device(name)).provenance["sections"]["fp32"]

    assert report["held_out"]["mean_ape"] <= LIMITS["gemm_fp32"][name]
    assert 0.88 <= report["covered_kernels"] <= 0.92


def test_held_out_shapes() -> None:
    """Refitted without a fifth of the shapes, T4 has the error on them that its record states."""
    refit = load_refit("gemm.fp32")
    rows = refit.read_rows(measured_file("gemm_fp32.parquet").parent, "t4")
    found = refit.learn_device(rows, load_device("t4"), {}).report

    assert found["held_out"]["mean_ape"] <= LIMITS["gemm_fp32"]["t4"]
    assert found["held_out"]["mean_ape"] < 0.7 * found["held_out_physics"]["mean_ape"]


@pytest.mark.parametrize("name", LIMITS["gemm_fp32_borrowed"])
def test_devices_left_out(name: str) -> None:
    """Priced with another device's record, kernels stay within the limit."""
    refit = load_refit("gemm.fp32")
    rows = refit.borrowed_rows(measured_file("gemm_fp32.parquet").parent, name)

    assert float((rows.predicted / rows.measured - 1.0).abs().mean()) <= LIMITS["gemm_fp32_borrowed"][name]
