"""Measure the GEMMs that a calibration of this device needs, until its predictions are good enough.

Shapes come from one wide distribution. In every round half of them are drawn at random: their predictions, made before
they are measured, tell the error on shapes that no fit saw. The other half are those on which fits to random parts of
the rows disagree most (query by committee). With 72 rows of an H100 that is 6.8 % off on whole (n, k) shapes left out,
against 7.3 % with random shapes alone; on an A100 both are 8.8 % off (docs/decisions/0014).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.records import dataclass
from shapewright.measure.bench.run import Outcome, stored_rows
from shapewright.measure.bench.suites.gemm import calibration_cases
from shapewright.measure.fit.calibrate import describe_measured_device
from shapewright.measure.fit.gemm_record import FEWEST_ROWS, gemm_forms
from shapewright.measure.fit.gemm_section import device_rates, predict_rows
from shapewright.measure.fit.shared import gemm_table
from shapewright.measure.store.record import OK, Case, Row

if TYPE_CHECKING:
    import pandas as pd

    from shapewright.measure.bench.device.backend import DeviceFacts
    from shapewright.measure.store.database import Store
    from shapewright.measure.store.record import Run

FIRST_ROWS, ROUND_ROWS = 24, 12
"""Random shapes before the first fit, and shapes of each later round."""
NUM_COMMITTEE = 3
# Share of the rows that each fit of the committee sees.
_COMMITTEE_SHARE = 0.6
# Candidates whose predictions the committee compares in a round.
_COMPARED = 400
# Distance between shapes beyond which one tells little about the other. [octaves of m, n, k]
_NEARBY_OCTAVES = 1.0
# Random rows of the latest rounds whose mean error must reach the target.
_JUDGED_ROWS = 12


@dataclass(frozen=True)
class CalibrationRound:
    """Error on random shapes, predicted from the rows before them.

    Attributes:
        dtype: Element format.
        num_rows: Rows that the fit had.
        errors: |predicted / measured - 1| of the random shapes of the round.
    """

    dtype: str
    num_rows: int
    errors: tuple[float, ...]

    @property
    def mean_error(self) -> float:
        """Mean error."""
        return float(np.mean(self.errors))


def measure_for_calibration(
    dtypes: Sequence[str],
    facts: DeviceFacts,
    store: Store,
    run: Run,
    measure: Callable[[list[Case], float], Outcome],
    *,
    seed: int,
    budget_s: float,
    target_error: float,
) -> tuple[Outcome, list[Case], list[CalibrationRound]]:
    """Measure rounds of GEMMs in each format until the target or the budget is reached.

    Args:
        dtypes: Element formats, which share the budget.
        store: Store of the rows; those that it has of this device count.
        measure: Measures cases within a time. [s]
        budget_s: Time for all formats. [s]
        target_error: Mean error on random shapes at which a format is done.

    Returns:
        The outcome, the measured cases, and the errors of every round.
    """
    gemm_table(())  # says at once if the packages of a fit are missing
    begin = time.monotonic()
    outcome, measured, rounds = Outcome(), list[Case](), list[CalibrationRound]()
    for index, dtype in enumerate(dtypes):
        left_s = budget_s - (time.monotonic() - begin)
        end = time.monotonic() + max(left_s, 0.0) / (len(dtypes) - index)
        search = _Search(dtype, facts, run, seed)
        errors: list[float] = []
        while time.monotonic() < end and not (
            len(errors) >= _JUDGED_ROWS and np.mean(errors[-_JUDGED_ROWS:]) <= target_error
        ):
            rows = [row for row in store.rows() if row.device == run.device and row.library == run.library]
            drawn, chosen = search.suggest(rows)
            if not drawn and not chosen:
                break
            cases = [*drawn, *chosen]
            latest = measure(cases, max(end - time.monotonic(), 0.0))
            outcome, measured = outcome.followed_by(latest), measured + cases
            if found := search.judge(stored_rows(drawn, store, run)):
                rounds.append(CalibrationRound(dtype, search.num_fitted, found))
                errors += found
            if latest.num_left:
                break
    return outcome, measured, rounds


class _Search:
    """Suggests the GEMMs of the next round, and judges the predictions of the random ones among them."""

    def __init__(self, dtype: str, facts: DeviceFacts, run: Run, seed: int) -> None:
        self.num_fitted = 0
        self._dtype, self._facts, self._run = dtype, facts, run
        self._random = np.random.default_rng(seed)
        limit = facts.max_operation_flops
        cases = calibration_cases(dtype, small=not facts.is_cuda)
        self._cases = [case for case in cases if float(case.operation.flops) <= limit]
        self._predict: Callable[[pd.DataFrame], np.ndarray] | None = None

    def suggest(self, rows: Sequence[Row]) -> tuple[list[Case], list[Case]]:
        """Return random shapes and those that the fits disagree on; both empty once all are measured."""
        known = {row.key for row in rows}
        rest = [case for case in self._cases if case.key(self._run.device, self._run.library) not in known]
        used = [row for row in rows if row.kind == "gemm" and row.dtype == self._dtype and row.status == OK]
        if len(used) < max(FIRST_ROWS, FEWEST_ROWS):
            self._predict = None
            return self._draw(rest, FIRST_ROWS - len(used)), []
        drawn = self._draw(rest, ROUND_ROWS // 2)
        others = [case for case in self._draw(rest, _COMPARED) if case not in drawn]
        return drawn, self._disagreed(used, others, ROUND_ROWS - len(drawn))

    def judge(self, rows: Sequence[Row]) -> tuple[float, ...]:
        """Return the errors of the predictions that were possible before these rows; empty before the first fit."""
        good = [row for row in rows if row.status == OK and row.median_s]
        if self._predict is None or not good:
            return ()
        table = gemm_table(good)
        return tuple(float(error) for error in np.abs(self._predict(table) / table.latency_s.to_numpy() - 1.0))

    def _draw(self, cases: Sequence[Case], count: int) -> list[Case]:
        chosen = self._random.permutation(len(cases))[: max(count, 0)]
        return [cases[place] for place in sorted(int(place) for place in chosen)]

    def _disagreed(self, used: Sequence[Row], cases: Sequence[Case], count: int) -> list[Case]:
        """Return the cases that fits to parts of the rows disagree on most, apart from each other."""
        device, _ = describe_measured_device(self._facts.name, used, self._facts.facts)
        rates = device_rates(device, self._dtype, hot=True)
        table = gemm_table(used)
        table = table[~table.is_held_out.to_numpy(bool)]
        form = gemm_forms(table, device, self._dtype, has_cache=bool(rates.l2_bytes))[0]
        section = form.fit(table, rates)
        self.num_fitted = len(table)
        self._predict = lambda rows: predict_rows(rows, section, rates, "NT")
        if not cases:
            return []
        candidates = _table_of(cases, is_cold=bool(table.is_cold.all()))
        parts = [
            table.sample(frac=_COMMITTEE_SHARE, random_state=int(self._random.integers(2**31)))
            for _ in range(NUM_COMMITTEE)
        ]
        logs = [np.log(predict_rows(candidates, form.fit(part, rates), rates, "NT")) for part in parts]
        score = np.std(logs, axis=0)
        places = np.log2(candidates[["m", "n", "k"]].to_numpy(float))
        chosen: list[int] = []
        while len(chosen) < min(count, len(cases)):
            best = int(np.argmax(score))
            chosen.append(best)
            distance = np.linalg.norm(places - places[best], axis=1) / _NEARBY_OCTAVES
            score = score * (1.0 - np.exp(-0.5 * distance**2))
            score[best] = -1.0
        return [cases[place] for place in chosen]


def _table_of(cases: Sequence[Case], *, is_cold: bool) -> pd.DataFrame:
    """Return GEMM cases as a table with the columns that a prediction needs."""
    import pandas as pd

    names = ("m", "n", "k", "batch", "layout")
    columns = {name: [getattr(case.operation, name) for case in cases] for name in names}
    return pd.DataFrame({**columns, "is_cold": [is_cold] * len(cases)})
