"""Coverage and width of 90 % intervals on held-out rows."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from judging import ALL_LIMITS, load_refit, measured_file

from shapewright.measure.refit.intervals.residual_intervals import is_inside, pool

TABLES = ("gemm", "attention_prefill", "attention_decode", "moe", "collectives")
LIMITS = ALL_LIMITS["interval"]
# Rows priced for a test; a cell of device, format and library then has some thousands.
ROWS = 60_000
FEWEST_ROWS = 200


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The refit of the intervals, with the rows that it reads."""
    return load_refit("intervals.gemm")


@cache
def held_out(table: str) -> Any:
    """Return held-out rows of a table with their prices."""
    rows = load_refit("intervals.rows")
    folder = measured_file(f"{table}.parquet").parent
    found = rows.price_rows(table, rows.sampled(rows.held_out_rows(folder, table), ROWS), as_new_shapes=True)
    return found.assign(
        covered=(found.measured >= found.low) & (found.measured <= found.high), width=np.log(found.high / found.low)
    )


@pytest.mark.parametrize("table", TABLES)
def test_interval_covers_90_percent_of_held_out_rows(table: str) -> None:
    """88 to 93 % of a table's held-out rows, and no cell of device, format and library is far outside it."""
    rows = held_out(table)
    cells = rows.groupby(["device", "dtype", "library"]).covered.agg(["mean", "size"])
    cells = cells[cells["size"] >= FEWEST_ROWS]
    outside = cells[(cells["mean"] < 0.85) | (cells["mean"] > 0.95)]

    assert 0.88 <= rows.covered.mean() <= 0.93
    assert len(outside) <= LIMITS["cells_outside"][table], outside.to_string()


@pytest.mark.parametrize("table", TABLES)
def test_intervals_do_not_get_wider(table: str) -> None:
    """The mean logarithmic width stays within its limit, so that coverage is not reached by width."""
    assert held_out(table).width.mean() <= LIMITS["mean_width"][table]


@pytest.mark.parametrize("table", ["gemm", "attention_prefill", "attention_decode", "moe"])
def test_interval_is_wider_for_unmeasured_cases(table: str) -> None:
    """Short and long times have the same coverage, within a few percent."""
    rows = held_out(table)
    tiny, large = rows[rows.predicted < 2e-5], rows[rows.predicted > 1e-3]

    for part in (tiny, large):
        assert len(part) < FEWEST_ROWS or part.covered.mean() == pytest.approx(0.9, abs=0.06)


@pytest.mark.parametrize("kind", ["attention", "moe", "collectives"])
def test_stretched_intervals_cover_held_out_shapes(kind: str) -> None:
    """Fitted to half of the held-out shapes, intervals cover 88 to 93 % of the other half."""
    folder = Path(__file__).parents[2] / "src/shapewright/pricing/data/intervals"
    report = json.loads((folder / f"{kind}.json").read_text(encoding="utf-8"))["held_out"]

    assert 0.88 <= report["covered"] <= 0.93
    assert len(report["outside"]) == report["cells"] - report["cells_inside"]
    assert report["cells"] - report["cells_inside"] <= LIMITS["crossed_cells_outside"][kind]


def test_older_software_covers_a_held_out_model(script: ModuleType) -> None:
    """Of each model of the collection of 2024, 80 % and more lie inside an interval fitted to the others."""
    folder = measured_file("linear_layers.parquet").parent
    columns = script.with_labels(script.read_table(folder, "linear_layers"), library="")
    rows = script.price_rows("linear_layers", columns)
    rows = rows[rows.table == "linear_layers"]
    parts = script.parts_of(rows.assign(model=rows.part.str.split().str[0]), ["model"])

    for name, (predicted, measured) in parts.items():
        others = pool([times for other, times in parts.items() if other != name])
        assert is_inside(others, predicted, measured).mean() > 0.80, name


@pytest.mark.parametrize(("table", "most"), LIMITS["uncovered_device"].items())
def test_devices_left_out_are_covered_in_the_mean(table: str, most: float, script: ModuleType) -> None:
    """A device priced as unmeasured, with intervals of the other devices, covers its own rows."""
    file_name = f"{table}.csv" if table.startswith("paper") else f"{table}.parquet"
    columns = script.sampled(script.read_table(measured_file(file_name).parent, table), ROWS // 2)
    rows = script.price_rows(table, columns, uncalibrated=True)
    devices = rows.assign(covered=(rows.measured >= rows.low) & (rows.measured <= rows.high)).groupby("device")

    assert 0.85 <= devices.covered.mean().mean() <= 0.97, devices.covered.mean().to_string()
    assert 1.0 - devices.covered.mean().min() <= most, devices.covered.mean().to_string()
    widths = np.log(rows.high / rows.low).groupby(rows.device).mean()
    assert widths.mean() <= LIMITS["left_out_width"][table], widths.to_string()


@pytest.mark.parametrize(("table", "most"), LIMITS["uncovered_library"].items())
def test_unknown_libraries_on_devices_left_out_are_covered(table: str, most: float, script: ModuleType) -> None:
    """With device and library both unmeasured, the interval includes both errors."""
    rows = load_refit("intervals.rows")
    columns = rows.sampled(rows.held_out_rows(measured_file(f"{table}.parquet").parent, table), ROWS // 2)
    words = {"library": "another"} | ({"kernel": "another"} if table != "gemm" else {})
    found = script.price_rows(table, script.with_labels(columns, **words), uncalibrated=True, as_new_shapes=True)
    covered = ((found.measured >= found.low) & (found.measured <= found.high)).groupby(found.device).mean()

    assert 1.0 - covered.mean() <= most, covered.to_string()
    assert covered.mean() <= 0.97, covered.to_string()


@pytest.mark.parametrize(("part", "most"), LIMITS["uncovered_products"].items())
def test_layers_of_other_generations_and_vendors_are_covered(part: str, most: float, script: ModuleType) -> None:
    """GEMMs of the paper's layers on A100, V100 and MI250X, each priced as an unmeasured device."""
    rows = script.borrowed_paper_rows(measured_file("paper_layers.csv").parent)
    rows = rows[rows.table == f"paper_layers/{part}"]
    devices = rows.assign(covered=(rows.measured >= rows.low) & (rows.measured <= rows.high)).groupby("device")

    assert 1.0 - devices.covered.mean().mean() <= most, devices.covered.mean().to_string()


@pytest.mark.parametrize(("name", "most"), LIMITS["uncovered_blocks"].items())
def test_blocks_of_another_vendor_are_covered(name: str, most: float, script: ModuleType) -> None:
    """Errors common to all GEMMs of a device do not cancel in its MLPs: MI250X priced as unmeasured."""
    layers = script.read_table(measured_file("paper_layers.csv").parent, "paper_layers")
    layers = layers.take(layers.labels["gpu"].values == "mi250x")
    rows = script.price_rows("paper_layers", layers, uncalibrated=True).query(f"table == 'paper_layers/{name}'")

    assert len(rows) > 60
    assert 1.0 - ((rows.measured >= rows.low) & (rows.measured <= rows.high)).mean() <= most
