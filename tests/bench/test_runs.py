"""Running cases into a store: resuming, errors and budgets."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_cases import CASES, attention
from local_measurer import LocalMeasurer

from command_line import run
from shapewright.core.errors import BenchError
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.measure.bench import measuring, request
from shapewright.measure.bench.device.backend import Backend
from shapewright.measure.bench.device.open_device import open_backend
from shapewright.measure.bench.run import Outcome, make_run, run_cases
from shapewright.measure.bench.suites.registry import make_suite
from shapewright.measure.store.database import Store
from shapewright.measure.store.export import export_store
from shapewright.measure.store.record import FAILED, OK, WRONG, Case

torch = pytest.importorskip("torch", reason="measuring needs the bench extra")


def measured(cases: list[Case], backend: Backend, folder: Path, **options: Any) -> Any:
    """Run cases into a store, and return the outcome."""
    with Store(folder / "s.sqlite") as store:
        return run_cases(
            cases,
            LocalMeasurer(backend),
            store,
            make_run(backend, suite="x", command="c"),
            **{"budget_s": 5.0, **options},
        )


def test_finished_rows_are_not_measured_again(backend: Backend, tmp_path: Path) -> None:
    """A second run measures nothing, and a third one only the added cases."""
    cases = [case for case in CASES if isinstance(case.operation, GroupedGemm)]
    first, second = (measured(cases[:2], backend, tmp_path) for _ in range(2))
    third = measured(cases, backend, tmp_path)

    assert [row.status for row in first.measured] == [OK, OK]
    assert all(row.state_before["load_average"] >= 0.0 for row in first.measured)
    assert (second.measured, second.num_known) == ((), 2)
    assert [row.key for row in third.measured] == [cases[2].key("cpu", backend.library)]


def test_rows_of_another_process_are_counted(backend: Backend, tmp_path: Path) -> None:
    """A row whose case another process stored in the meantime is not stored, and counted as such."""
    cases = [case for case in CASES if isinstance(case.operation, GroupedGemm)][:2]

    class Late(LocalMeasurer):
        """Another process stores each case while it is measured here."""

        def measure(self, case: Case, run: Any, **options: Any) -> Any:
            row = super().measure(case, run, **options)
            with Store(tmp_path / "s.sqlite") as other:
                other.add_run(run)
                other.add(row)
            return row

    with Store(tmp_path / "s.sqlite") as store:
        run = make_run(backend, suite="x", command="c")
        outcome = run_cases(cases, Late(backend), store, run, budget_s=5.0)

    assert (len(outcome.measured), outcome.num_unstored) == (2, 2)


def test_suites_share_the_remaining_budget(backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of three suites gets an equal share of the time that is left of 12 s."""
    now_s, budgets_s = 100.0, []
    takes_s = iter([8.0, 1.0, 30.0])

    class Clocked:
        """Measures nothing, but advances the clock."""

        facts = backend

        def run_cases(self, _cases: list[Case], *, budget_s: float, **_others: Any) -> Outcome:
            nonlocal now_s
            budgets_s.append(budget_s)
            now_s += next(takes_s)
            return Outcome()

    monkeypatch.setattr(request, "open_measurer", lambda _options: nullcontext(Clocked()))
    monkeypatch.setattr(request.time, "monotonic", lambda: now_s)
    suites = ("smoke", "pointwise", "alignment")
    results = request.run_bench(request.BenchRequest(suites=suites, budget_s=12.0), tmp_path / "s.sqlite")

    assert [result.name for result in results] == list(suites)
    assert budgets_s == pytest.approx([4.0, 2.0, 3.0])


def test_errors_become_rows(backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed and wrong cases become rows with the reason; the run continues, and can retry them."""
    good = CASES[0]
    huge = Case(operation=Gemm(name="x", dtype="fp32", m=10**6, n=10**6, k=1))
    windowed = Case(operation=attention(window_size=4))
    monkeypatch.setitem(measuring.TOLERANCE_FRACTION, "bf16", 0.0)
    inexact = replace(good, operation=replace(good.operation, dtype="bf16", m=64))
    outcome = measured([huge, windowed, inexact, good], replace(backend, max_operation_flops=1e30), tmp_path)
    statuses = [row.status for row in outcome.measured]
    words = " ".join(row.error for row in outcome.measured)

    assert statuses == [FAILED, FAILED, WRONG, OK]
    assert "memory" in words
    assert "window" in words
    assert "relative error" in words
    monkeypatch.undo()
    again = measured(
        [huge, windowed, inexact, good], replace(backend, max_operation_flops=1e30), tmp_path, retry_failed=True
    )
    assert [row.status for row in again.measured] == [FAILED, FAILED, OK]


def test_thread_counts_are_part_of_the_key(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU rows with different thread counts are different measurements."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    try:
        other = open_backend(cpu=True)
    finally:
        torch.set_num_threads(1)

    assert other.name == backend.name == "cpu"
    assert CASES[0].key(other.name, other.library) != CASES[0].key(backend.name, backend.library)


def test_budget_ends_the_run(backend: Backend, tmp_path: Path) -> None:
    """After the budget no row begins; remaining and too large cases are counted."""
    cases = make_suite("pointwise", ("fp32",), small=True, seed=0)
    outcome = measured(cases, backend, tmp_path, budget_s=0.3)

    assert outcome.measured
    assert len(outcome.measured) + outcome.num_left == len(cases)
    assert outcome.wall_s < 2.0
    assert measured(CASES[:1], replace(backend, max_operation_flops=1.0), tmp_path).num_too_large == 1


def test_accuracy_reads_an_export(backend: Backend, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An export contains tables that the accuracy command reads, and one table with every row."""
    pytest.importorskip("pyarrow", reason="parquet needs the fit extra")
    cases = [CASES[0], CASES[1], *CASES[-9:-2], *(Case(operation=attention(**more)) for more in ({}, {"query_len": 1}))]
    cases = [replace(case, operation=replace(case.operation, dtype="bf16")) for case in cases[:1]] + cases[1:]
    measured(cases, replace(backend, name="h100-sxm-80gb"), tmp_path)
    with Store(tmp_path / "s.sqlite") as store:
        written = export_store(store, tmp_path / "tables")
    code, out, _ = run(["accuracy", str(tmp_path / "tables"), "--json", "--table", "gemm"], capsys)

    assert written == {
        "gemm.parquet": 1, "pointwise.parquet": 4,  # torch's attention fills no cache, as those of the tables do
        "measurements.parquet": len(cases),
    }  # fmt: skip
    assert code == 0
    assert json.loads(out)[0]["rows"] == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_cpu_is_suggested() -> None:
    """Without a GPU the error suggests measuring the CPU."""
    with pytest.raises(BenchError, match="measure the CPU"):
        open_backend()
