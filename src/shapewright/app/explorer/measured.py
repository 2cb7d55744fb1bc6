"""Measured GEMMs and steps of a store, which the explorer shows with its predictions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import OK, Case
from shapewright.prediction.model_runs import StepRun, step_run
from shapewright.workload.layout import ParallelLayout

if TYPE_CHECKING:
    from pathlib import Path

    from shapewright.measure.store.record import Row
    from shapewright.prediction.predict import Prediction


class Measurement(NamedTuple):
    """Fastest measurement of one GEMM or step on one device.

    Attributes:
        time_s: Median time. [s]
        library: Software that ran it, with versions.
    """

    time_s: float
    library: str


class Measurements:
    """Looks up measurements with exactly the same shape, format, workload and device.

    Args:
        rows: Rows of a store; failed rows and other kinds are ignored.
        path: Path of the store; empty for none.
    """

    def __init__(self, rows: Iterable[Row] = (), path: str = "") -> None:
        self.path = path
        self._fastest: dict[str, Measurement] = {}
        for row in rows:
            if row.status != OK or not row.median_s or row.kind not in (Gemm.kind, StepRun.kind):
                continue
            key = Case(operation=row.operation()).key(row.device, "")
            if key not in self._fastest or row.median_s < self._fastest[key].time_s:
                self._fastest[key] = Measurement(row.median_s, row.library)

    def __len__(self) -> int:
        return len(self._fastest)

    def find_gemm(self, gemm: Gemm, device: str) -> Measurement | None:
        """Measurement of a GEMM, whatever operation of a step it belongs to."""
        return self._fastest.get(Case(operation=gemm).key(device, ""))

    def find_step(self, prediction: Prediction) -> Measurement | None:
        """Measurement of a whole step; only single-device steps are measured."""
        if not self._fastest or prediction.layout != ParallelLayout():
            return None
        step = step_run(prediction.config, prediction.workload)
        return self._fastest.get(Case(operation=step).key(prediction.device.name, ""))


def read_measurements(path: str | Path) -> Measurements:
    """Read the measurements of a store.

    Raises:
        StoreError: the store does not exist or is corrupt.
    """
    with Store(path, read_only=True) as store:
        return Measurements(store.rows(), str(path))
