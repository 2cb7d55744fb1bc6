"""Tuned AMD GEMMs on (n, k) shapes that were left out in turn."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from measured import measured_file
from refit_module import load_refit

from shapewright.hardware import load_device
from shapewright.pricing.calibration.records import load_record

LIMITS = tomllib.loads((Path(__file__).parent / "limits.toml").read_text(encoding="utf-8"))["gemm_amd"]


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, formats in LIMITS.items() for dtype in formats])
def test_recorded_errors(name: str, dtype: str) -> None:
    """The held-out error that a record states stays within the limit, below that of the formulas or equal to it.

    Intervals aim at 97 % of the rows that they are made of: rows of one shape err alike, and there are few shapes.
    """
    report = load_record("gemm", load_device(name)).provenance["sections"][dtype]

    assert report["held_out"]["mean_ape"] <= LIMITS[name][dtype]
    assert report["held_out"]["mean_ape"] <= report["held_out_physics"]["mean_ape"]
    assert 0.96 <= report["covered"] <= 0.99


def test_shapes_left_out() -> None:
    """Fitted again, MI308X's bf16 section is as near to shapes left out as its record states."""
    refit = load_refit("gemm.amd")
    rows = refit.read_rows(measured_file("gemm_amd.parquet").parent, "mi308x")
    report = refit.fit_section(rows[rows.dtype == "bf16"], load_device("mi308x"), "bf16").report

    assert report["held_out"]["mean_ape"] <= LIMITS["mi308x"]["bf16"]
