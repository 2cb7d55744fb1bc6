"""Simulated traffic against request logs of vLLM that nothing was fitted to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from judging import ALL_LIMITS, measured_file

from shapewright.measure.accuracy.evaluate import evaluate_folder

LIMITS = ALL_LIMITS["serving_runs"]


@pytest.mark.parametrize("quantity", list(LIMITS))
def test_request_logs(quantity: str, tmp_path: Path) -> None:
    """Mean error over runs stays within the limit, which the roofline exceeds."""
    for name in ("serving_runs.csv", "serving_requests.parquet"):
        shutil.copy(measured_file(name), tmp_path)
    rows = evaluate_folder(tmp_path, by=()).rows
    (row,) = (row for row in rows if row.table == f"serving_runs/{quantity}")

    assert row.rows >= 3
    assert row.mape <= LIMITS[quantity]
    assert row.roofline_mape is not None
    assert row.roofline_mape > LIMITS[quantity]
