"""A measurer without a process of its own, for tests of what asks it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.bench.measuring import measure_case
from shapewright.bench.worker import WorkerDiedError, judge_device
from shapewright.store.record import FAILED, Case, Row, Run

if TYPE_CHECKING:
    from shapewright.bench.backend import Backend, DeviceFacts


@dataclass(frozen=True)
class LocalMeasurer:
    """Measures in this very process, which a case may take with it."""

    backend: Backend

    @property
    def facts(self) -> DeviceFacts:
        """What is known of the device."""
        return self.backend

    def measure(self, case: Case, run: Run, *, budget_s: float, ci_fraction: float) -> Row:
        """Measure a case."""
        row = measure_case(case, self.backend, run, budget_s=budget_s, ci_fraction=ci_fraction)
        row, is_usable = judge_device(row, self.backend)
        if row.status == FAILED and not is_usable:
            raise WorkerDiedError(row.error)
        return row
