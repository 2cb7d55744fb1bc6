"""fp32 GEMMs and pointwise operations: sizes that no fit saw, and devices priced with another device's record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from judging import ALL_LIMITS as LIMITS
from judging import load_refit, mean_error, measured_file

from shapewright.hardware.loader import load_device
from shapewright.pricing.calibration.records import FP32_GEMM, FP32_POINTWISE, load_record

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("name", LIMITS["gemm_fp32"])
def test_recorded_errors_of_gemms(name: str) -> None:
    """The held-out error stays within the limit; the interval of half of the shapes covers nine in ten of the rest."""
    report = load_record(FP32_GEMM, load_device(name)).provenance["sections"]["fp32"]

    assert report["rows_fitted"] <= 2 * 4000  # of linear layers and of batches
    assert report["held_out"]["mean_ape"] <= LIMITS["gemm_fp32"][name]
    assert 0.85 <= report["covered_kernels"] <= 0.95


def test_held_out_shapes_of_gemms() -> None:
    """Refitted without a fifth of the shapes, T4 has the error on them that its record states."""
    refit = load_refit("gemm.fp32")
    rows = refit.read_rows(measured_file("gemm_fp32.parquet").parent, "t4")
    found = refit.learn_device(rows, load_device("t4"), {}).report

    assert found["held_out"]["mean_ape"] <= LIMITS["gemm_fp32"]["t4"]
    assert found["held_out"]["mean_ape"] < 0.7 * found["held_out_physics"]["mean_ape"]


@pytest.mark.parametrize("name", LIMITS["pointwise_fp32"])
def test_held_out_sizes_of_pointwise_operations(name: str) -> None:
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

    assert mean_error(predicted, held.latency_s.to_numpy()) <= LIMITS["pointwise_fp32"][name]
    assert 0.88 <= report["covered_kernels"] <= 0.95


@pytest.mark.parametrize(
    ("kind", "module", "name"),
    [
        *(("gemm_fp32", "gemm.fp32", name) for name in LIMITS["gemm_fp32_borrowed"]),
        *(("pointwise_fp32", "pointwise_fp32", name) for name in LIMITS["pointwise_fp32_borrowed"]),
    ],
)
def test_devices_left_out(kind: str, module: str, name: str) -> None:
    """Priced with another device's record, kernels stay within the limit."""
    rows = load_refit(module).borrowed_rows(measured_file(f"{kind}.parquet").parent, name)

    assert mean_error(rows.predicted, rows.measured) <= LIMITS[f"{kind}_borrowed"][name]


@pytest.mark.parametrize(
    ("kind", "module", "name"),
    [("gemm_fp32", "gemm.fp32", "h100-sxm-80gb"), ("pointwise_fp32", "pointwise_fp32", "a100-pcie-80gb")],
)
def test_rows_of_devices_left_out_are_chosen_by_prediction(
    kind: str, module: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which rows count does not depend on how long they took: else those faster than predicted would be left out."""
    refit, folder = load_refit(module), measured_file(f"{kind}.parquet").parent
    read_rows, chosen = refit.read_rows, refit.borrowed_rows(folder, name)

    def read_faster_rows(data: Path, alias: str) -> Any:
        rows = read_rows(data, alias)
        return rows.assign(latency_s=0.5 * rows.latency_s)

    monkeypatch.setattr(refit, "read_rows", read_faster_rows)

    assert list(refit.borrowed_rows(folder, name).index) == list(chosen.index)
