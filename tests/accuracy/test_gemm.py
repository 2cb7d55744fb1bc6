"""GEMM records against measured rows whose whole (n, k) shapes no fit saw."""

from __future__ import annotations

import importlib
import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from measured import measured_file

from shapewright.hardware import load_device
from shapewright.operations import Gemm
from shapewright.perf.calibration import load_record
from shapewright.perf.gemm import price_gemm

REPOSITORY = Path(__file__).parents[2]
LIMITS = tomllib.loads((Path(__file__).parent / "limits.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def calibrate() -> ModuleType:
    """The script that made the records; its split decides which rows are unseen."""
    pytest.importorskip("pandas", reason="judging needs the fit extra")
    pytest.importorskip("scipy", reason="judging needs the fit extra")
    sys.path.insert(0, str(REPOSITORY / "scripts"))
    return importlib.import_module("calibrate_gemm")


def mean_error(
    calibrate: ModuleType, name: str, dtype: str, folder: Path, library: str = "", is_slowest: bool | None = None
) -> float:
    """Mean |predicted / measured - 1| over the unseen rows, priced as the package prices."""
    source = next(source for source in calibrate.SOURCES if (source.device, source.dtype) == (name, dtype))
    _, unseen = calibrate.split_by_shape(source.rows(folder))
    unseen = unseen[unseen.library == library] if library else unseen
    unseen = unseen if is_slowest is None else unseen[unseen.slowest.astype(bool) == is_slowest]
    device = load_device(name)
    record = load_record("gemm", device)
    dims = {letter: unseen[letter].to_numpy() for letter in ("m", "n", "k", "batch")}
    operation = Gemm(name="x", dtype=dtype, layout=source.layout, **dims)
    price = price_gemm(operation, device, record, hot_cache=source.hot_cache, library=library)
    overhead = record.provenance["sections"][dtype].get("collector_overhead_s", 0.0)
    return float(np.mean(np.abs((price.time_s + overhead) / unseen.latency_s.to_numpy() - 1.0)))


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, dtypes in LIMITS["gemm_all"].items() for dtype in dtypes]
)
def test_middle_of_libraries(calibrate: ModuleType, name: str, dtype: str) -> None:
    """Without a library the price is the middle of those measured; their own spread is in this error."""
    folder = measured_file("gemm.parquet").parent

    assert mean_error(calibrate, name, dtype, folder) <= LIMITS["gemm_all"][name][dtype]


@pytest.mark.parametrize(
    ("library", "name", "dtype"),
    [
        (library, name, dtype)
        for library, devices in LIMITS["gemm_library"].items()
        for name, dtypes in devices.items()
        for dtype in dtypes
    ],
)
def test_one_library(calibrate: ModuleType, library: str, name: str, dtype: str) -> None:
    """One library against its own measurements, shapes the fit never saw."""
    folder = measured_file("gemm.parquet").parent

    error = mean_error(calibrate, name, dtype, folder, library)

    assert error <= LIMITS["gemm_library"][library][name][dtype]


@pytest.mark.parametrize("part", ["sweeps", "layers"])
@pytest.mark.parametrize("name", ["v100-sxm2-16gb", "mi250x-gcd"])
def test_paper_tables(calibrate: ModuleType, name: str, part: str) -> None:
    """The paper's clean sweeps with odd sizes and the products of its layers, whole (n, k) unseen."""
    folder = measured_file("paper_gemm.csv").parent
    measured_file("paper_layers.csv")

    error = mean_error(calibrate, name, "fp16", folder, is_slowest=part == "layers")

    assert error <= LIMITS["gemm_paper"][part][name]


def test_paper_sweeps_on_a100(calibrate: ModuleType) -> None:
    """On A100 kernels come from today's libraries and alignment from the paper; the paper's unseen rows judge both."""
    folder = measured_file("paper_gemm.csv").parent
    _, unseen = calibrate.split_by_shape(calibrate.paper_rows("a100")(folder))
    device = load_device("a100-sxm-80gb")
    record = load_record("gemm", device)
    dims = {letter: unseen[letter].to_numpy() for letter in ("m", "n", "k", "batch")}
    price = price_gemm(Gemm(name="x", dtype="fp16", layout="NN", **dims), device, record)
    overhead = record.provenance["sections"]["bf16"]["alignment"]["collector_overhead_s"]
    error = np.abs((price.time_s + overhead) / unseen.latency_s.to_numpy() - 1.0)

    assert float(np.mean(error)) <= LIMITS["gemm_paper"]["sweeps"]["a100-sxm-80gb"]


def test_the_limits_can_fail(calibrate: ModuleType) -> None:
    """The plain roofline on the same rows is far outside every limit."""
    folder = measured_file("gemm.parquet").parent
    source = next(source for source in calibrate.SOURCES if source.device == "h100-sxm-80gb")
    _, unseen = calibrate.split_by_shape(source.rows(folder))
    device = load_device(source.device)
    dims = {letter: unseen[letter].to_numpy() for letter in ("m", "n", "k", "batch")}
    price = price_gemm(Gemm(name="x", **dims), device, load_record("gemm", device))

    assert float(np.mean(np.abs(price.roofline_s / unseen.latency_s.to_numpy() - 1.0))) > 0.3


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "src/shapewright/perf/data/gemm").glob("*.json")), ids=lambda path: path.stem
)
def test_records_carry_their_provenance(path: Path) -> None:
    """Each record says what it was fitted on, when, how, and how wrong it is on rows it did not see."""
    record = json.loads(path.read_text(encoding="utf-8"))

    assert record["id"] == f"gemm/{path.stem}/{record['provenance']['date']}"
    assert "calibrate_gemm.py" in record["provenance"]["command"]
    for section in record["provenance"]["sections"].values():
        assert section["held_out"]["rows"] > 40
        assert section["rows_fitted"] > 200
    assert set(record["interval"]["dtypes"]) == set(record["parameters"]["dtypes"])
    assert set(record["interval"]["libraries"]) == set(record["parameters"]["libraries"])


def test_interval_covers_ninety_percent(calibrate: ModuleType) -> None:
    """Of rows whose shapes the interval was not made from, 85 to 95 % lie inside (a tenth of them were fitted)."""
    folder = measured_file("gemm.parquet").parent
    source = next(source for source in calibrate.SOURCES if source.device == "h100-sxm-80gb")
    rows = source.rows(folder)
    _, seen_by_interval = calibrate.split_by_shape(rows)
    unseen = rows.drop(rows.index[rows.set_index(["n", "k"]).index.isin(seen_by_interval.set_index(["n", "k"]).index)])
    device = load_device(source.device)
    sample = unseen.sample(6000, random_state=2)
    dims = {letter: sample[letter].to_numpy() for letter in ("m", "n", "k", "batch")}
    price = price_gemm(replace(Gemm(name="x", m=1, n=1, k=1), **dims), device, load_record("gemm", device))
    inside = (sample.latency_s.to_numpy() >= price.low_s) & (sample.latency_s.to_numpy() <= price.high_s)

    assert 0.85 <= float(np.mean(inside)) <= 0.95
