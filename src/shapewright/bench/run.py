"""The bench: has measured what a store does not hold yet, row by row, until the budget ends."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from shapewright import __version__
from shapewright.bench.measuring import failed_row, now_utc
from shapewright.bench.worker import WorkerDiedError
from shapewright.errors import BenchError
from shapewright.store.record import FAILED, OK, STATUSES, Case, Row, Run, row_facts

if TYPE_CHECKING:
    from shapewright.bench.backend import DeviceFacts
    from shapewright.store.file import Store

# A row gets its share of what is left of the budget, within these. [s]
LEAST_ROW_S, _MOST_ROW_S = 0.03, 2.0
# Layers and steps take longer to know. [s]
_MOST_WHOLE_ROW_S = {"layer": 4.0, "step": 15.0}
# Half width of the median's 95 % interval, over the median, at which a row is known well enough.
DEFAULT_CI_FRACTION = 0.01
# So many workers lost one after the other are the machine's fault, not that of the cases.
_MOST_DEATHS = 5


class Measurer(Protocol):
    """What measures a case, in a process of its own so that this one outlives it."""

    @property
    def facts(self) -> DeviceFacts:
        """What is known of the device."""
        ...

    def measure(self, case: Case, run: Run, *, budget_s: float, ci_fraction: float) -> Row:
        """Measure a case; WorkerDiedError if whoever measured is gone."""
        ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a call of the bench.

    Attributes:
        measured: Rows made, in their order.
        num_known: Cases whose rows the store held already.
        num_left: Cases that the budget did not reach.
        num_left_out: Cases larger than what is worth this device's time.
        wall_s: Time spent. [s]
        kernels_s: Part of it in which the device worked, warm-up included. [s]
        waited_s: Part of it in which a single thread that measures a CPU had no core, for others used it. [s]
    """

    measured: tuple[Row, ...] = ()
    num_known: int = 0
    num_left: int = 0
    num_left_out: int = 0
    wall_s: float = 0.0
    kernels_s: float = 0.0
    waited_s: float = 0.0

    @property
    def overhead_fraction(self) -> float | None:
        """Time outside kernels, without that of waiting for a core, over time in them; None where none ran."""
        return (self.wall_s - self.waited_s) / self.kernels_s - 1.0 if self.kernels_s > 0.0 else None

    @property
    def rows_per_min(self) -> float | None:
        """Rows made in a minute of this call; None where none was."""
        return 60.0 * len(self.measured) / self.wall_s if self.measured else None

    def joined(self, later: Outcome) -> Outcome:
        """This and what was measured after it, as one; what is left is what the later one left."""
        return Outcome(
            measured=self.measured + later.measured,
            num_known=self.num_known + later.num_known,
            num_left=later.num_left,
            num_left_out=self.num_left_out + later.num_left_out,
            wall_s=self.wall_s + later.wall_s,
            kernels_s=self.kernels_s + later.kernels_s,
            waited_s=self.waited_s + later.waited_s,
        )


def make_run(facts: DeviceFacts, *, suite: str, command: str) -> Run:
    """Describe this call of the bench."""
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
    """Measure cases in their order; each finished row is committed before the next one begins.

    Args:
        cases: What to measure.
        measurer: Who measures.
        store: Rows that it holds are not measured again.
        run: Describes this call.
        budget_s: Time after which no further row is begun. [s]
        ci_fraction: Half width of the median's interval, over the median, that is narrow enough.
        retry_failed: Measure rows again that failed or were wrong.
        on_row: Called with each row.
        on_start: Called with the number of cases to measure.

    Raises:
        BenchError: the process that measures was lost time after time; every row until then is stored.
        StoreError: a row cannot be stored.
    """
    begin = time.monotonic()
    worth, pending = pending_cases(cases, measurer.facts, store, run, retry_failed=retry_failed)
    store.add_run(run)
    on_start(len(pending))
    measured: list[Row] = []
    num_deaths = 0
    for index, case in enumerate(pending):
        left_s = budget_s - (time.monotonic() - begin)
        if left_s <= 0.0:
            break
        row_s = min(max(left_s / (len(pending) - index), LEAST_ROW_S), longest_row_s(case))
        try:
            row = measurer.measure(case, run, budget_s=row_s, ci_fraction=ci_fraction)
            num_deaths = 0
        except WorkerDiedError as death:
            num_deaths += 1
            row = failed_row(Row(**row_facts(case, run), measured_utc=now_utc(), status=FAILED), str(death))
        store.add(row)
        measured.append(row)
        on_row(row)
        if num_deaths >= _MOST_DEATHS:
            raise BenchError(
                f"{num_deaths} rows in a row took the process that measures with them, the last one: {row.error}; "
                "they are stored as failed, the same command goes on after them"
            )
    return count_outcome(measured, cases, worth, pending, wall_s=time.monotonic() - begin)


def count_outcome(
    measured: Sequence[Row], cases: Sequence[Case], worth: Sequence[Case], pending: Sequence[Case], *, wall_s: float
) -> Outcome:
    """Outcome of a call of the bench.

    Args:
        measured: Rows made.
        cases: What was asked for.
        worth: What of it was worth this device's time.
        pending: What of that the store did not hold.
        wall_s: Time spent. [s]
    """
    return Outcome(
        measured=tuple(measured),
        num_known=len(worth) - len(pending),
        num_left=len(pending) - len(measured),
        num_left_out=len(cases) - len(worth),
        wall_s=wall_s,
        kernels_s=sum(row.figures.get("kernels_s", 0.0) for row in measured),
        waited_s=sum(row.figures.get("waited_s", 0.0) for row in measured),
    )


def pending_cases(
    cases: Sequence[Case], facts: DeviceFacts, store: Store, run: Run, *, retry_failed: bool
) -> tuple[list[Case], list[Case]]:
    """Cases that are worth this device's time, and those of them that the store does not hold yet."""
    worth = [case for case in cases if float(case.operation.flops) <= facts.most_flops]
    known = store.finished_keys(statuses=(OK,) if retry_failed else STATUSES)
    return worth, [case for case in worth if case.key(run.device, run.library) not in known]


def longest_row_s(case: Case) -> float:
    """Most time that one row may have. [s]"""
    return _MOST_WHOLE_ROW_S.get(case.operation.kind, _MOST_ROW_S)


def rows_of(cases: Iterable[Case], store: Store, run: Run) -> list[Row]:
    """The store's rows of cases, whenever they were measured."""
    return store.rows(keys=(case.key(run.device, run.library) for case in cases))
