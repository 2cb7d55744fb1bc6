"""Rounds of GEMMs for a calibration: they end at the target, resume, and judge predictions made beforehand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("scipy", reason="fitting needs the fit extra")
pytest.importorskip("pandas", reason="fitting needs the fit extra")

from shapewright.measure.bench.calibration_search import FIRST_ROWS, CalibrationRound, measure_for_calibration
from shapewright.measure.bench.run import Outcome
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import Case, Row, Run, row_facts

FACTS: Any = SimpleNamespace(
    name="cpu", facts={"num_threads": 1, "memory_bytes": 16e9}, is_cuda=False, max_operation_flops=2e9
)
RUN = Run(
    run_id="r", started_utc="", command="", suite="calibration", device="cpu", device_facts=FACTS.facts, driver="",
    runtime="", torch_version="", library="l", shapewright_version="",
)  # fmt: skip


def time_s(case: Case) -> float:
    """A device of one rate, one bandwidth and one start."""
    return 2e-6 + max(float(case.operation.flops) / 1e11, float(case.operation.num_bytes) / 2e10)


def measured(folder: Path, *, target_error: float, budget_s: float = 60.0) -> tuple[int, list[CalibrationRound]]:
    """Rows of a store after a call, and the rounds of the call."""
    with Store(folder / "s.sqlite") as store:

        def measure(cases: list[Case], _seconds: float) -> Outcome:
            rows = [
                Row(**row_facts(case, RUN), measured_utc="", status="ok", median_s=time_s(case), is_cold=True)
                for case in cases
            ]
            store.add_all([RUN], rows)
            return Outcome(measured=tuple(rows))

        _, _, rounds = measure_for_calibration(
            ("fp32",), FACTS, store, RUN, measure, seed=0, budget_s=budget_s, target_error=target_error
        )
        return len(store.rows()), rounds


def test_it_ends_at_the_target_and_resumes(tmp_path: Path) -> None:
    """A device that is a roofline is predicted well after a few rounds; a second call needs no first round."""
    num_rows, rounds = measured(tmp_path, target_error=0.1)

    assert rounds[0].num_rows == FIRST_ROWS
    assert rounds[-1].mean_error <= 0.1
    assert num_rows < 120
    again, later = measured(tmp_path, target_error=0.1)
    assert later[0].num_rows == num_rows
    assert again > num_rows


def test_no_budget_measures_nothing(tmp_path: Path) -> None:
    """A budget of zero measures no rows and runs no rounds."""
    assert measured(tmp_path, target_error=0.1, budget_s=0.0) == (0, [])
