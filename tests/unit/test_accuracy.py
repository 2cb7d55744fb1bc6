"""Evaluation of small measured tables with known results: errors, order, coverage, groups and regret."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from measured_tables import GEMM_SHAPES, H100, gemm_columns, only_row, paper_layer, write_csv, write_parquet
from shapewright.core.errors import MeasuredFileError
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.accuracy.evaluate import evaluate_folder
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.gemm.price import price_gemm


def test_perfect_times_have_no_error(tmp_path: Path) -> None:
    """Measured as predicted: error 0, order perfect, all inside the interval; the roofline is off."""
    write_parquet(tmp_path / "gemm.parquet", gemm_columns())
    row = only_row(tmp_path)

    assert (row.table, row.device, row.dtype, row.library, row.rows) == ("gemm", H100.name, "bf16", "lib 1", 5)
    assert row.mape == pytest.approx(0.0, abs=1e-12)
    assert row.bias == pytest.approx(0.0, abs=1e-12)
    assert row.kendall_tau == 1.0
    assert row.coverage_90 == 1.0
    assert row.roofline_mape > 0.05


def test_doubled_times(tmp_path: Path) -> None:
    """Measured at twice the prediction: half too small everywhere, bias -ln 2, order still perfect."""
    columns = gemm_columns()
    write_parquet(tmp_path / "gemm.parquet", columns | {"latency_s": 2.0 * columns["latency_s"]})
    row = only_row(tmp_path)

    assert (row.mape, row.median_ape, row.p90_ape) == pytest.approx((0.5, 0.5, 0.5))
    assert row.bias == pytest.approx(-math.log(2.0))
    assert row.kendall_tau == 1.0


def test_shuffled_times_lose_their_order(tmp_path: Path) -> None:
    """Times assigned to other shapes have a tau near 0."""
    random = np.random.default_rng(1)
    m, n, k = (random.integers(1, 128, 2000) * 64 for _ in range(3))
    price = price_gemm(Gemm(name="x", m=m, n=n, k=k), H100, load_record("gemm", H100))
    words = {name: [word] * 2000 for name, word in (("device", "h100_sxm"), ("library", ""), ("kernel", ""))}
    columns = {"m": m, "n": n, "k": k, "latency_s": random.permutation(price.time_s), "dtype": ["bf16"] * 2000, **words}
    write_parquet(tmp_path / "gemm.parquet", columns)

    assert abs(only_row(tmp_path).kendall_tau or 1.0) < 0.1


def test_coverage_is_counted(tmp_path: Path) -> None:
    """Two of five times far above their interval: three fifths are covered."""
    columns = gemm_columns()
    times = columns["latency_s"] * np.array([1.0, 30.0, 1.0, 30.0, 1.0])
    write_parquet(tmp_path / "gemm.parquet", columns | {"latency_s": times})

    assert only_row(tmp_path).coverage_90 == pytest.approx(0.6)


def test_uncalibrated_prices_as_a_sibling_would(tmp_path: Path) -> None:
    """Without its own record a device measured as predicted is predicted differently."""
    write_parquet(tmp_path / "gemm.parquet", gemm_columns())

    assert only_row(tmp_path, uncalibrated=True).mape > 0.01


def test_intervals_have_a_width(tmp_path: Path) -> None:
    """The mean of ln(high / low) is that of the prices; a borrowed record's is wider."""
    write_parquet(tmp_path / "gemm.parquet", gemm_columns())
    m, n, k = (np.array(letters) for letters in zip(*GEMM_SHAPES, strict=True))
    price = price_gemm(Gemm(name="x", m=m, n=n, k=k), H100, load_record("gemm", H100), library="lib 1")
    own, borrowed = only_row(tmp_path), only_row(tmp_path, uncalibrated=True)

    assert own.interval_width == pytest.approx(np.mean(np.log(price.high_s / price.low_s)))
    assert borrowed.interval_width > own.interval_width


def test_callbacks_and_the_note_on_fitted_rows(tmp_path: Path) -> None:
    """Callbacks get the table and its five rows; the note on fitted rows is absent with --uncalibrated."""
    write_parquet(tmp_path / "gemm.parquet", gemm_columns())
    begun: list[tuple[str, int]] = []
    priced: list[int] = []
    own = evaluate_folder(tmp_path, on_table=lambda *table: begun.append(table), on_rows=priced.append)
    borrowed = evaluate_folder(tmp_path, uncalibrated=True)

    assert begun == [("gemm", 5)]
    assert sum(priced) == 5
    assert [any("all rows are included" in note for note in found.notes) for found in (own, borrowed)] == [True, False]
    assert not [note for note in own.notes if "is ignored:" in note]


def test_only_selected_tables_are_evaluated(tmp_path: Path) -> None:
    """One of two tables is selected; an empty one has nothing to evaluate."""
    write_parquet(tmp_path / "gemm.parquet", gemm_columns())
    write_csv(tmp_path / "paper_layers.csv", [paper_layer(qkv_tflops=200.0)])

    assert {row.file for row in evaluate_folder(tmp_path).rows} == {"gemm.parquet", "paper_layers.csv"}
    assert {row.file for row in evaluate_folder(tmp_path, tables=["gemm"]).rows} == {"gemm.parquet"}
    empty = {name: values[:0] for name, values in gemm_columns().items()}
    write_parquet(tmp_path / "gemm.parquet", empty)
    with pytest.raises(MeasuredFileError, match=r"nothing to evaluate in .*: no rows$"):
        evaluate_folder(tmp_path, tables=["gemm"])


def test_a_record_without_an_alternative_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A note states that --uncalibrated used the device's own record if no other device has one."""
    monkeypatch.setattr(
        "shapewright.measure.accuracy.context.load_record",
        lambda kind, device: load_record(kind, replace(device, uncalibrated=False)),
    )
    write_parquet(tmp_path / "gemm.parquet", gemm_columns())
    notes = evaluate_folder(tmp_path, uncalibrated=True).notes

    assert f"gemm on {H100.name}: its own record is used, since no other device has one" in notes


def test_groupings(tmp_path: Path) -> None:
    """Rows are grouped by devices, dtypes, parts and decades only on request."""
    columns = gemm_columns(device=["h100_sxm"] * 3 + ["a100_sxm"] * 2, kernel=["a", "b", "a", "b", "a"])
    columns["latency_s"] = [2e-6, 5e-6, 5e-5, 2e-3, 3e-3]
    write_parquet(tmp_path / "gemm.parquet", columns)

    assert [row.rows for row in evaluate_folder(tmp_path, by=()).rows] == [5]
    assert {row.device: row.rows for row in evaluate_folder(tmp_path, by=("device",)).rows} == {
        "a100-sxm-80gb": 2,
        H100.name: 3,
    }
    assert {row.part: row.rows for row in evaluate_folder(tmp_path, by=("part",)).rows} == {"a": 3, "b": 2}
    decades = {row.decade: row.rows for row in evaluate_folder(tmp_path, by=("size",)).rows}
    assert decades == {"1-10 us": 2, "10-100 us": 1, "1-10 ms": 2}
    assert list(decades) == ["1-10 us", "10-100 us", "1-10 ms"]
    assert only_row(tmp_path, devices=["a100-sxm-80gb"]).rows == 2


def test_older_software_is_evaluated_again_after_one_factor(tmp_path: Path) -> None:
    """All rows 1.2 times slower than predicted, one GEMM of each run: no error is left after the factor."""
    device = load_device("a100-sxm-80gb")
    m = np.array([256, 1024, 4096])
    record = load_record("gemm", device.with_pricing(physics_only=True))
    price = price_gemm(Gemm(name="x", dtype="fp16", m=m, n=4096, k=4096), device, record, run_flops=np.array(np.inf))
    words = {"device": "a100_sxm", "library": "of 2023", "model": "m", "kernel": "up", "dtype": "fp16"}
    columns = {key: [value] * 3 for key, value in ({"n": 4096, "k": 4096, "tensor_parallel": 1} | words).items()}
    write_parquet(tmp_path / "linear_layers.parquet", columns | {"m": m, "latency_s": 1.2 * price.time_s})
    rows = {row.table: row for row in evaluate_folder(tmp_path).rows}

    assert rows["linear_layers"].bias == pytest.approx(-math.log(1.2))
    assert rows["linear_layers/scaled"].mape == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(("uncalibrated", "is_own"), [(False, True), (True, False)])
def test_software_with_a_section_is_priced_by_it(tmp_path: Path, uncalibrated: bool, is_own: bool) -> None:
    """Times of the record's section of 2024's software have no error, unless the record is ignored."""
    device = load_device("a100-sxm-80gb")
    layer_gemm = Gemm(name="x", dtype="fp16", m=2000, n=8192, k=4096)
    price = price_gemm(layer_gemm, device, load_record("gemm", device), library="vidur")
    words = {"device": "a100_sxm", "library": "vidur", "model": "m", "kernel": "up", "dtype": "fp16"}
    row = words | {"m": 2000, "n": 8192, "k": 4096, "tensor_parallel": 1, "latency_s": float(price.time_s)}
    write_parquet(tmp_path / "linear_layers.parquet", {key: [value] for key, value in row.items()})
    evaluation = evaluate_folder(tmp_path, uncalibrated=uncalibrated)
    rows = {found.table: found for found in evaluation.rows}

    assert (rows["linear_layers"].mape < 1e-9) is is_own
    assert any("which was fitted to its" in note for note in evaluation.notes) is is_own
    assert any("lack some of their 4 GEMMs" in note for note in evaluation.notes)
    assert rows["linear_layers/scaled"].mape == pytest.approx(0.0, abs=1e-12)  # one row is its own median


def test_gemms_of_one_run_share_a_clock(tmp_path: Path) -> None:
    """A small GEMM in a run with a large one is priced slower than among small ones, as in an incomplete run."""
    rows = pd.DataFrame({"kernel": ["qkv", "out", "down", "up"], "m": 2000, "n": 2048, "k": 4096, "latency_s": 3e-4})
    rows = rows.assign(device="a100_sxm", library="vidur", model="m", dtype="fp16", tensor_parallel=1)
    bias = {}
    for name, table in {"small": rows, "large": rows.assign(n=[2048, 2048, 2048, 49152]), "cut": rows[1:]}.items():
        table.to_parquet(tmp_path / "linear_layers.parquet")
        found = {(row.table, row.part): row.bias for row in evaluate_folder(tmp_path, by=("part",)).rows}
        bias[name] = found["linear_layers", "m down"]

    assert bias["large"] > bias["small"] + 0.05
    assert bias["cut"] == pytest.approx(bias["large"], abs=0.002)  # a run of 1.6e12 flop is as good as endless


def test_regret_of_choosing_heads(tmp_path: Path) -> None:
    """Two layers of one size: the one predicted faster (fewer, wider heads) was twice as slow, which is the regret."""
    rows = [
        paper_layer(num_heads=20, layer_s=0.02, layer_tflops=70.0),
        paper_layer(num_heads=80, layer_s=0.01, layer_tflops=140.0),
        paper_layer(hidden_size=5120, num_heads=40, layer_s=0.04, layer_tflops=140.0),
    ]
    write_csv(tmp_path / "paper_layers.csv", rows)
    (found,) = evaluate_folder(tmp_path).rows

    assert (found.regret_groups, found.regret_median, found.regret_p90) == (1, pytest.approx(1.0), pytest.approx(1.0))
