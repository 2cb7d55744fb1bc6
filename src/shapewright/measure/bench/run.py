"""Measure the cases that a store does not contain yet, row by row, within a time budget."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from shapewright import __version__
from shapewright.core.errors import BenchError
from shapewright.core.records import dataclass
from shapewright.measure.bench.measuring import failed_row, now_utc
from shapewright.measure.bench.worker import WorkerDiedError
from shapewright.measure.store.record import FAILED, OK, STATUSES, Case, Row, Run, row_facts

if TYPE_CHECKING:
    from shapewright.measure.bench.device.backend import DeviceFacts
    from shapewright.measure.store.database import Store

# Limits of a row's share of the remaining budget. [s]
MIN_ROW_S, _MAX_ROW_S = 0.03, 2.0
# Layers and steps need more time for the same precision. [s]
_MAX_ROW_S_BY_KIND = {"layer": 4.0, "step": 15.0}
# Half width of the median's 95 % confidence interval over the median at which sampling stops.
DEFAULT_CI_FRACTION = 0.01
# After this many successive crashes the cause is the machine, not the cases.
_MAX_SUCCESSIVE_CRASHES = 5


class Measurer(Protocol):
    """Measures cases in another process, so that a crash does not end this one."""

    @property
    def facts(self) -> DeviceFacts:
        """Description of the device."""
        ...

    def measure(self, case: Case, run: Run, *, budget_s: float, ci_fraction: float) -> Row:
        """Measure a case; raises WorkerDiedError if the measuring process dies."""
        ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of running cases.

    Attributes:
        measured: New rows, in the order of measurement.
        num_unstored: Rows of these that were not stored, because another process had stored the same case by then.
        num_known: Cases that the store already contained.
        num_left: Cases that the budget did not reach.
        num_too_large: Cases above the device's limit, which are not measured.
        wall_s: Elapsed time. [s]
        kernels_s: Part of it in which the device executed calls, warm-up included. [s]
        waited_s: Part of it in which a single CPU thread waited for a core. [s]
    """

    measured: tuple[Row, ...] = ()
    num_unstored: int = 0
    num_known: int = 0
    num_left: int = 0
    num_too_large: int = 0
    wall_s: float = 0.0
    kernels_s: float = 0.0
    waited_s: float = 0.0

    @property
    def overhead_fraction(self) -> float | None:
        """Time outside kernels, without the wait for a core, over the time in kernels; None if none ran."""
        return (self.wall_s - self.waited_s) / self.kernels_s - 1.0 if self.kernels_s > 0.0 else None

    @property
    def rows_per_min(self) -> float | None:
        """New rows per minute; None if there are none."""
        return 60.0 * len(self.measured) / self.wall_s if self.measured else None

    def followed_by(self, later: Outcome) -> Outcome:
        """Add a later outcome to this one; the cases that are left are the later one's."""
        return Outcome(
            measured=self.measured + later.measured,
            num_unstored=self.num_unstored + later.num_unstored,
            num_known=self.num_known + later.num_known,
            num_left=later.num_left,
            num_too_large=self.num_too_large + later.num_too_large,
            wall_s=self.wall_s + later.wall_s,
            kernels_s=self.kernels_s + later.kernels_s,
            waited_s=self.waited_s + later.waited_s,
        )


def make_run(facts: DeviceFacts, *, suite: str, command: str) -> Run:
    """Describe a run on a device."""
    return Run(
        run_id=uuid.uuid4().hex,
        started_utc=now_utc(),
        command=command,
        suite=suite,
        device=facts.name,
        device_facts=facts.facts,
        driver=facts.driver,
        runtime=facts.runtime,
        torch_version=facts.torch_version,
        library=facts.library,
        shapewright_version=__version__,
    )


def run_cases(
    cases: Sequence[Case],
    measurer: Measurer,
    store: Store,
    run: Run,
    *,
    budget_s: float,
    ci_fraction: float = DEFAULT_CI_FRACTION,
    retry_failed: bool = False,
    on_row: Callable[[Row], None] = lambda _row: None,
    on_start: Callable[[int], None] = lambda _count: None,
) -> Outcome:
    """Measure cases in order; each row is committed before the next one begins.

    Args:
        store: Store for the rows; the rows that it contains are not measured again.
        budget_s: Time after which no further row is begun. [s]
        ci_fraction: Half width of the median's confidence interval over the median at which sampling may stop.
        retry_failed: Whether to measure failed and wrong rows again.
        on_start: Called with the number of cases to measure.

    Raises:
        BenchError: the measuring process died several times in succession; every row until then is stored.
        StoreError: a row cannot be stored.
    """
    begin = time.monotonic()
    measurable, pending = pending_cases(cases, measurer.facts, store, run, retry_failed=retry_failed)
    store.add_run(run)
    on_start(len(pending))
    measured: list[Row] = []
    num_crashes = num_unstored = 0
    for index, case in enumerate(pending):
        left_s = budget_s - (time.monotonic() - begin)
        if left_s <= 0.0:
            break
        row_s = min(max(left_s / (len(pending) - index), MIN_ROW_S), max_row_s(case))
        try:
            row = measurer.measure(case, run, budget_s=row_s, ci_fraction=ci_fraction)
            num_crashes = 0
        except WorkerDiedError as death:
            num_crashes += 1
            row = failed_row(Row(**row_facts(case, run), measured_utc=now_utc(), status=FAILED), str(death))
        num_unstored += not store.add(row)
        measured.append(row)
        on_row(row)
        if num_crashes >= _MAX_SUCCESSIVE_CRASHES:
            raise BenchError(
                f"the measuring process died in {num_crashes} successive rows ({row.error}); these rows are stored as "
                "failed, and the next run continues after them"
            )
    wall_s = time.monotonic() - begin
    return count_outcome(measured, num_unstored, cases, measurable, pending, wall_s=wall_s)


def count_outcome(
    measured: Sequence[Row],
    num_unstored: int,
    cases: Sequence[Case],
    measurable: Sequence[Case],
    pending: Sequence[Case],
    *,
    wall_s: float,
) -> Outcome:
    """Count the cases of a run by what became of them.

    Args:
        num_unstored: Rows of these that the store did not take.
        pending: Those of them that the store did not contain.
        wall_s: Elapsed time. [s]
    """
    return Outcome(
        measured=tuple(measured),
        num_unstored=num_unstored,
        num_known=len(measurable) - len(pending),
        num_left=len(pending) - len(measured),
        num_too_large=len(cases) - len(measurable),
        wall_s=wall_s,
        kernels_s=sum(row.figures.get("kernels_s", 0.0) for row in measured),
        waited_s=sum(row.figures.get("waited_s", 0.0) for row in measured),
    )


def pending_cases(
    cases: Sequence[Case], facts: DeviceFacts, store: Store, run: Run, *, retry_failed: bool
) -> tuple[list[Case], list[Case]]:
    """Cases within the device's limit, and those of them that the store does not contain yet."""
    measurable = [case for case in cases if float(case.operation.flops) <= facts.max_operation_flops]
    known = store.finished_keys(statuses=(OK,) if retry_failed else STATUSES)
    return measurable, [case for case in measurable if case.key(run.device, run.library) not in known]


def max_row_s(case: Case) -> float:
    """Upper limit of the time for one row. [s]"""
    return _MAX_ROW_S_BY_KIND.get(case.operation.kind, _MAX_ROW_S)


def stored_rows(cases: Iterable[Case], store: Store, run: Run) -> list[Row]:
    """The store's rows of some cases, from this run and earlier ones."""
    return store.rows(keys=(case.key(run.device, run.library) for case in cases))
