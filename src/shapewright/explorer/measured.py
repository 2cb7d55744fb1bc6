"""Measurements that the explorer sets beside its predictions: products and whole steps of a store, read at start."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from shapewright.layout import ParallelLayout
from shapewright.operations import Gemm
from shapewright.store.file import Store
from shapewright.store.record import OK, Case
from shapewright.whole import StepRun, step_run

if TYPE_CHECKING:
    from pathlib import Path

    from shapewright.predict import Prediction
    from shapewright.store.record import Row


class Measurement(NamedTuple):
    """The fastest of the measurements of one thing on one device.

    Attributes:
        time_s: Median of its samples. [s]
        library: What ran it, with versions.
    """

    time_s: float
    library: str


class Measurements:
    """What was measured, found by exactly what was asked: the same shape, format, workload and device.

    Args:
        rows: Rows of a store; those that failed and those of other kinds are left out.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._fastest: dict[str, Measurement] = {}
        for row in rows:
            if row.status != OK or not row.median_s or row.kind not in (Gemm.kind, StepRun.kind):
                continue
            key = Case(operation=row.operation()).key(row.device, "")
            if key not in self._fastest or row.median_s < self._fastest[key].time_s:
                self._fastest[key] = Measurement(row.median_s, row.library)

    def __len__(self) -> int:
        return len(self._fastest)

    def find_product(self, product: Gemm, device: str) -> Measurement | None:
        """The measurement of a product, wherever in a step it stood."""
        return self._fastest.get(Case(operation=product).key(device, ""))

    def find_step(self, prediction: Prediction) -> Measurement | None:
        """The measurement of a whole step; only steps of one device are measured."""
        if not self._fastest or prediction.layout != ParallelLayout():
            return None
        step = step_run(prediction.config, prediction.workload)
        return self._fastest.get(Case(operation=step).key(prediction.device.name, ""))


def read_measurements(path: str | Path) -> Measurements:
    """Read a store once; nothing that a request says chooses a file.

    Raises:
        StoreError: there is no store, or it is broken.
    """
    with Store(path, read_only=True) as store:
        return Measurements(store.rows())
