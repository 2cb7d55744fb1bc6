"""A measurer without a worker process, for tests of its callers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.measure.bench.measuring import measure_case
from shapewright.measure.bench.worker import WorkerDiedError, check_device
from shapewright.measure.store.record import FAILED, Case, Row, Run

if TYPE_CHECKING:
    from shapewright.measure.bench.device.backend import Backend, DeviceFacts


@dataclass(frozen=True)
class LocalMeasurer:
    """Measures in the current process."""

    backend: Backend

    @property
    def facts(self) -> DeviceFacts:
        """Description of the device."""
        return self.backend

    def measure(self, case: Case, run: Run, *, budget_s: float, ci_fraction: float) -> Row:
        """Measure a case."""
        row = measure_case(case, self.backend, run, budget_s=budget_s, ci_fraction=ci_fraction)
        row, is_usable = check_device(row, self.backend)
        if row.status == FAILED and not is_usable:
            raise WorkerDiedError(row.error)
        return row
