"""Measure the cases that a store does not contain yet, row by row, within a time budget."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from shapewright import __version__
from shapewright.core.errors import BenchError
from shapewright.core.records import dataclass
from shapewright.measure.bench.measuring import now_utc, unmeasured_row
from shapewright.measure.bench.worker import WorkerDiedError
from shapewright.measure.store.record import OK, STATUSES, Case, Row, Run

if TYPE_CHECKING:
    from shapewright.measure.bench.device.backend import DeviceFacts
    from shapewright.measure.store.database import Store

# Limits of a row's share of the remaining budget. [s]
_MIN_ROW_S, _MAX_ROW_S = 0.03, 2.0
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
    recorder = RunRecorder(
        cases, measurer.facts, store, run, retry_failed=retry_failed, on_row=on_row, on_start=on_start
    )
    pending = recorder.pending
    num_crashes = 0
    for index, case in enumerate(pending):
        left_s = budget_s - recorder.elapsed_s()
        if left_s <= 0.0:
            break
        row_s = limit_row_s(case, left_s / (len(pending) - index))
        try:
            row = measurer.measure(case, run, budget_s=row_s, ci_fraction=ci_fraction)
            num_crashes = 0
        except WorkerDiedError as death:
            num_crashes += 1
            row = unmeasured_row(case, run, str(death))
        recorder.add(row)
        if num_crashes >= _MAX_SUCCESSIVE_CRASHES:
            raise BenchError(
                f"the measuring process died in {num_crashes} successive rows ({row.error}); these rows are stored as "
                "failed, and the next run continues after them"
            )
    return recorder.outcome()


class RunRecorder:
    """The cases that a store lacks, and their rows: each is stored, reported and counted as it arrives.

    Args:
        cases: All cases of the run; those above the device's limit are not measured.
        retry_failed: Whether to measure failed and wrong rows again.
        on_row: Called with each row.
        on_start: Called with the number of cases to measure.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        facts: DeviceFacts,
        store: Store,
        run: Run,
        *,
        retry_failed: bool,
        on_row: Callable[[Row], None],
        on_start: Callable[[int], None],
    ) -> None:
        self._begin = time.monotonic()
        measurable = [case for case in cases if float(case.operation.flops) <= facts.max_operation_flops]
        known = store.finished_keys(statuses=(OK,) if retry_failed else STATUSES)
        self.pending = [case for case in measurable if case.key(run.device, run.library) not in known]
        self._num_known, self._num_too_large = len(measurable) - len(self.pending), len(cases) - len(measurable)
        self._store, self._on_row = store, on_row
        self._measured: list[Row] = []
        self._num_unstored = 0
        store.add_run(run)
        on_start(len(self.pending))

    def elapsed_s(self) -> float:
        """Time since the run began. [s]"""
        return time.monotonic() - self._begin

    def add(self, row: Row) -> None:
        """Commit a row to the store, and report it."""
        self._num_unstored += not self._store.add(row)
        self._measured.append(row)
        self._on_row(row)

    def outcome(self) -> Outcome:
        """Count the cases by what became of them until now."""
        return Outcome(
            measured=tuple(self._measured),
            num_unstored=self._num_unstored,
            num_known=self._num_known,
            num_left=len(self.pending) - len(self._measured),
            num_too_large=self._num_too_large,
            wall_s=self.elapsed_s(),
            kernels_s=sum(row.figures.get("kernels_s", 0.0) for row in self._measured),
            waited_s=sum(row.figures.get("waited_s", 0.0) for row in self._measured),
        )


def limit_row_s(case: Case, share_s: float) -> float:
    """A row's share of the remaining budget, within the limits of its kind. [s]"""
    return min(max(share_s, _MIN_ROW_S), _MAX_ROW_S_BY_KIND.get(case.operation.kind, _MAX_ROW_S))


def stored_rows(cases: Iterable[Case], store: Store, run: Run) -> list[Row]:
    """The store's rows of some cases, from this run and earlier ones."""
    return store.rows(keys=(case.key(run.device, run.library) for case in cases))
