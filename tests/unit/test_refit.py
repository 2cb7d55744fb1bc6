"""The command that refits the package's records: its order, its options, its errors and its comparison."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import numpy as np
import pytest

from shapewright.core.errors import CalibrationError
from shapewright.measure.fit.shared import coverage_of, crossed_coverage, fold_of_rows, interval_of
from shapewright.measure.refit.__main__ import OPTIONS, main, run_apart
from shapewright.measure.refit.record_files import compare_folders
from shapewright.measure.refit.steps import STEPS, Step, find_steps


def test_steps_run_in_their_order() -> None:
    """Without names every step but those on request runs; names are put into the order of the table."""
    usual = [step.name for step in find_steps([])]

    assert usual[0] == "gemm"
    assert usual[-1] == "intervals"
    assert "gemm-alignment" not in usual
    assert [step.name for step in find_steps(["moe-residual", "gemm", "moe"])] == ["gemm", "moe", "moe-residual"]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_steps_take_their_options(step: Step) -> None:
    """The function of a step exists, and its arguments are the data folder and the options of the command."""
    for package in ("pandas", "pyarrow", "scipy", "lightgbm"):
        pytest.importorskip(package, reason="refits need the fit extra")
    _folder, *options = inspect.signature(step.load()).parameters

    assert options == [f"{name}s" for name in step.options]
    assert set(step.options) <= set(OPTIONS)


def test_software_names_all_tables_that_it_reads() -> None:
    """Without the table of the Gemstones models, their generation would keep its record from before, silently."""
    for package in ("pandas", "pyarrow", "scipy", "lightgbm"):
        pytest.importorskip(package, reason="refits need the fit extra")
    from shapewright.measure.refit.software import GENERATIONS

    (step,) = find_steps(["software"])

    assert set(step.tables) == {generation.table for generation in GENERATIONS}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pointwise"], "give one with --data DIR"),
        (["pointwise", "--data", "/nowhere"], "lacks pointwise.parquet, norms.csv, paper_layers.csv"),
        (["tuned-experts", "--data", ".", "--device", "l40s"], "--device does not apply to tuned-experts"),
        (["gem"], "unknown refit 'gem'; choose from gemm, "),
    ],
)
def test_errors_say_what_to_do(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong call ends with exit code 2 and one line."""
    for package in ("pandas", "pyarrow", "scipy", "lightgbm"):
        pytest.importorskip(package, reason="refits need the fit extra")

    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_list_names_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    """The list has one line for each step, and needs neither data nor the fit extra."""
    assert main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [step.name for step in STEPS]


def test_a_failed_step_stops_the_run(tmp_path: Path) -> None:
    """Steps after one that failed do not run."""
    with pytest.raises(CalibrationError, match="gemm failed with exit code 2; later refits did not run"):
        run_apart(find_steps(["gemm", "moe"]), tmp_path, [])


def write_record(folder: Path, name: str, content: object) -> None:
    """Write a record with a table of residuals."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    np.savez_compressed(folder / f"{name}.npz", residual=np.arange(3))


def test_comparison_names_the_differences(tmp_path: Path) -> None:
    """Dates and commands may differ; numbers, entries and tables may not."""
    old = {"id": "gemm/x/2026-01-01", "parameters": {"a": [1.0, 2.0], "b": 3.0}, "provenance": {"date": "1"}}
    new = {"id": "gemm/x/2026-02-02", "parameters": {"a": [1.0, 2.5], "c": 3.0}, "provenance": {"date": "2"}}
    write_record(tmp_path / "old", "x", old)
    write_record(tmp_path / "same", "x", {**old, "id": "gemm/x/2026-03-03"})
    write_record(tmp_path / "new", "x", new)
    np.savez_compressed(tmp_path / "new" / "x.npz", residual=np.arange(4))

    assert compare_folders(tmp_path / "old", tmp_path / "same", compares_reports=True) == []
    assert compare_folders(tmp_path / "old", tmp_path / "new", compares_reports=True) == [
        "x.json: parameters.a[1] was 2.0, is 2.5",
        "x.json: parameters.b is missing",
        "x.json: parameters.c is new",
        "x.npz: residual differs",
    ]


def test_comparison_of_a_first_step_ignores_fields_of_later_steps(tmp_path: Path) -> None:
    """A step that writes records from scratch lacks sections, reports and tables of later steps."""
    old = {"parameters": {"a": 1.0, "later": 2.0}, "provenance": {"rows": 3}, "residual": {"file": "x.npz"}}
    write_record(tmp_path / "old", "x", old)
    write_record(tmp_path / "new", "x", {"parameters": {"a": 1.0}, "provenance": {"rows": 4}})

    assert compare_folders(tmp_path / "old", tmp_path / "new", compares_reports=False) == []


def test_intervals_are_judged_on_shapes_that_did_not_make_them() -> None:
    """Where the halves of the shapes err in opposite directions, no row is inside the interval of the other half."""
    shapes = np.repeat(np.arange(200), 5)
    half = fold_of_rows(["half"] * shapes.size, shapes) % 2 == 0
    predicted, measured = np.full(shapes.size, 1e-3), np.where(half, 2e-3, 0.5e-3)

    assert 300 < half.sum() < 700
    assert coverage_of(interval_of(predicted, measured), predicted, measured) == 1.0
    assert crossed_coverage(predicted, measured, (shapes,)) == 0.0
    assert crossed_coverage(predicted, np.full(shapes.size, 1.1e-3), (shapes,)) == 1.0
    assert crossed_coverage(predicted, measured, (np.zeros(shapes.size),)) is None


def test_scatter_of_a_model_is_that_of_the_others() -> None:
    """A model far off is judged by the scatter of those near the law, not by one that it widened itself."""
    pytest.importorskip("scipy", reason="refits need the fit extra")
    from shapewright.measure.refit.loss import scatter_of_others
    from shapewright.prediction.loss.law import Z_90

    model = np.repeat(["near", "far"], 10)
    errors = np.where(model == "far", 0.5, 0.01)

    scatter_nats = scatter_of_others(errors, np.zeros(20), model)

    assert Z_90 * scatter_nats == pytest.approx(np.where(model == "far", 0.01, 0.5))


def test_records_of_software_state_how_many_rows_were_fitted() -> None:
    """Sixty rows at most are fitted, and none where a generation has no free parameter."""
    for package in ("pandas", "pyarrow", "scipy", "lightgbm"):
        pytest.importorskip(package, reason="refits need the fit extra")
    from shapewright.measure.refit.record_files import read_record
    from shapewright.measure.refit.software import GENERATIONS, select_evenly

    facts = {one.software.name: read_record("software", one.software.name)["provenance"] for one in GENERATIONS}

    assert (facts["fsdp-2023"]["rows"], facts["fsdp-2023"]["rows_fitted"]) == (158, 60)
    assert (facts["nemo-2024"]["rows"], facts["nemo-2024"]["rows_fitted"]) == (75, 0)
    assert (facts["fsdp-2024"]["rows"], facts["fsdp-2024"]["rows_fitted"]) == (7, 7)
    assert [len(select_evenly(range(rows))) for rows in (7, 60, 61, 158)] == [7, 60, 60, 60]  # type: ignore[arg-type]


def test_a_scaled_section_is_judged_on_shapes_that_did_not_scale_it() -> None:
    """Of two shapes, one twice as slow as the donor, each has the other's factor: twice the time, and half of it.

    A single shape is left out of nothing: its section has the errors and the interval of a sibling's.
    """
    pd = pytest.importorskip("pandas", reason="refits need the fit extra")
    for package in ("pyarrow", "scipy", "lightgbm"):
        pytest.importorskip(package, reason="refits need the fit extra")
    from shapewright.hardware.loader import load_device
    from shapewright.measure.fit.gemm_section import device_rates, predict_rows
    from shapewright.measure.refit.gemm.amd import Section, scale_to_int8
    from shapewright.measure.refit.record_files import read_record

    device = load_device("mi308x")
    content = read_record("gemm", "mi308x")["parameters"]["libraries"]["aiter tuned, per_token, shuffled"]["fp8"]
    donor = Section(content, None, {}, {}, {})
    tokens = [256, 1024, 4096, 16384]
    rows = pd.DataFrame({"batch": 1, "m": tokens * 2, "n": [4096] * 4 + [8192] * 4, "k": [4096] * 4 + [2048] * 4})
    donors_s = predict_rows(rows, content, device_rates(device, "int8", hot=False), "NT")
    rows = rows.assign(latency_s=donors_s * np.where(rows.n == 8192, 2.0, 1.0))

    of_two = scale_to_int8(donor, rows, device)
    of_one = scale_to_int8(donor, rows[rows.n == 8192], device, of_two)

    assert of_two.report["held_out"]["mean_ape"] == pytest.approx((1.0 + 0.5) / 2.0, rel=0.01)
    assert (of_one.report["time_factor"], of_one.report["shapes"]) == (pytest.approx(2.0), 1)
    assert of_one.interval == of_two.interval
    assert of_one.report["held_out"] == of_two.report["held_out"]
