"""A user's own tables: the example of the page is evaluated, units of time are converted, columns are named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shapewright.core.errors import MeasuredFileError
from shapewright.measure.accuracy.evaluate import evaluate_folder
from shapewright.measure.accuracy.tables.registry import TABLES
from shapewright.measure.store.database import Store
from shapewright.measure.store.imports.files import import_files
from shapewright.measure.store.imports.measured import Overrides

_PAGE = (Path(__file__).parents[2] / "docs" / "measuring.md").read_text("utf-8")
_SECTION = _PAGE.partition("## Tables of your own")[2]
_EXAMPLE = _SECTION.split("```")[1].strip() + "\n"


def errors(folder: Path, text: str) -> list[float]:
    """Mean errors of a folder that holds one gemm.csv."""
    (folder / "gemm.csv").write_text(text, "utf-8")
    return [row.mape for row in evaluate_folder(folder).rows]


def test_the_example_is_judged(tmp_path: Path) -> None:
    """The smallest table of the page has one row and yields an error."""
    (error,) = errors(tmp_path, _EXAMPLE)
    assert 0.0 < error < 1.0


@pytest.mark.parametrize(("unit", "value"), [("s", "230e-6"), ("ms", "0.23"), ("ns", "230000")])
def test_times_come_in_any_usual_unit(tmp_path: Path, unit: str, value: str) -> None:
    """230 microseconds are the same in milliseconds and nanoseconds."""
    other = _EXAMPLE.replace("latency_us", f"latency_{unit}").replace(",230\n", f",{value}\n")
    assert errors(tmp_path, other) == pytest.approx(errors(tmp_path, _EXAMPLE))


def test_the_same_table_goes_into_a_store(tmp_path: Path) -> None:
    """Store import reads the same table: 230 microseconds, in either unit, are one measurement."""
    (tmp_path / "gemm.csv").write_text("\ufeff" + _EXAMPLE, "utf-8")
    (tmp_path / "seconds.csv").write_text(
        _EXAMPLE.replace("latency_us", "latency_s").replace(",230", ",230e-6"), "utf-8"
    )
    import_files(tmp_path / "s.sqlite", [tmp_path / "gemm.csv", tmp_path / "seconds.csv"], Overrides())
    with Store(tmp_path / "s.sqlite", read_only=True) as store:
        rows = store.rows()

    assert [row.median_s for row in rows] == [pytest.approx(230e-6)] * len(rows)
    assert {(row.device, row.dtype, row.library) for row in rows} == {("h100-sxm-80gb", "bf16", "torch 2.8")}


def test_non_finite_times_are_rejected(tmp_path: Path) -> None:
    """Text in place of microseconds makes no row."""
    (tmp_path / "gemm.csv").write_text(_EXAMPLE.replace(",230", ",fast") + _EXAMPLE.splitlines()[1] + "\n", "utf-8")
    import_files(tmp_path / "s.sqlite", [tmp_path / "gemm.csv"], Overrides())
    with Store(tmp_path / "s.sqlite", read_only=True) as store:
        assert [row.median_s for row in store.rows()] == [pytest.approx(230e-6)]


def test_a_column_in_seconds_wins(tmp_path: Path) -> None:
    """If a table has both, the column in seconds is read."""
    both = _EXAMPLE.replace("latency_us", "latency_us,latency_s").replace(",230\n", ",1,230e-6\n")
    assert errors(tmp_path, both) == pytest.approx(errors(tmp_path, _EXAMPLE))


@pytest.mark.parametrize(
    "name", ["gemm", "linear_layers", "attention_prefill", "attention_decode", "collectives", "loss_by_shape"]
)
def test_the_page_names_every_column(name: str) -> None:
    """The columns that the page lists for a file are those that its reader requires."""
    line = next(line for line in _SECTION.splitlines() if line.startswith("|") and f"`{name}`" in line)
    stated = set(re.findall(r"\w+", line.split("|")[2]))
    wanted = TABLES[name].columns
    assert {*wanted.labels, *wanted.numbers, *wanted.positive} <= stated


def test_missing_column_error_names_the_documentation(tmp_path: Path) -> None:
    """The error for a table without a library refers to the page on columns."""
    with pytest.raises(MeasuredFileError, match=r"lacks columns 'library', 'kernel' \(it has .*Tables of your own"):
        errors(tmp_path, "device,dtype,m,n,k,latency_us\nh100-sxm-80gb,bf16,64,64,64,9\n")
