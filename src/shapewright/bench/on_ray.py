"""The bench on a Ray cluster: one measuring process per device, rows to one store through the driver.

Every actor asks for one GPU (or one CPU) and holds a worker process, as on one machine. The driver hands out the cases
in their order, each to whichever actor is free, and commits every row as it comes. An actor that is lost with its node
is started again elsewhere, and measures its case there; a case that loses one time after time becomes a failed row that
says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shapewright import __version__
from shapewright.bench.measuring import failed_row, now_utc, one_line
from shapewright.bench.run import LEAST_ROW_S, Outcome, count_outcome, longest_row_s, pending_cases
from shapewright.bench.worker import Worker, WorkerDiedError
from shapewright.cluster import connect
from shapewright.errors import BenchError, ClusterError
from shapewright.store.record import FAILED, Row, row_facts

if TYPE_CHECKING:
    from shapewright.bench.backend import DeviceFacts
    from shapewright.bench.worker import WorkerOptions
    from shapewright.store.file import Store
    from shapewright.store.record import Case, Run

# Lives that an actor has after the first, and attempts at a case whose actor was lost.
_MOST_RESTARTS, _MOST_RETRIES = 5, 2
_LOOK_EVERY_S = 0.5


class ClusterMeasurer:
    """Measuring processes on the devices of a cluster, all of one kind.

    Args:
        ray: The ray module, connected.
        options: What each process opens.
        num_actors: How many; None for one per GPU of the cluster, or one per node on CPUs.

    Raises:
        BenchError: the cluster has no GPU, or devices of several kinds.
    """

    def __init__(self, ray: Any, options: WorkerOptions, num_actors: int | None = None) -> None:
        self._ray = ray
        count = num_actors or _count_devices(ray, options)
        needs = {"num_cpus": 1} if options.cpu else {"num_gpus": 1, "num_cpus": 0}
        remote = ray.remote(max_restarts=_MOST_RESTARTS, max_task_retries=_MOST_RETRIES, **needs)(_Actor)
        self._actors = [remote.remote(options, __version__) for _ in range(count)]
        try:
            found = ray.get([actor.facts.remote() for actor in self._actors])
        except ray.exceptions.RayError as error:
            raise getattr(error, "cause", None) or ClusterError(f"no process measures: {one_line(error)}") from error
        kinds = {(facts.name, facts.library) for facts in found}
        if len(kinds) > 1:
            words = "; ".join(f"{name} ({library})" for name, library in sorted(kinds))
            raise BenchError(f"the cluster's devices differ ({words}); rows of one suite need devices of one kind")
        self.facts: DeviceFacts = found[0]

    @property
    def num_devices(self) -> int:
        """Devices that measure at a time."""
        return len(self._actors)

    def measure(self, case: Case, run: Run, *, budget_s: float, ci_fraction: float) -> Row:
        """Measure one case on the first device."""
        row: Row = self._ray.get(self._actors[0].measure.remote(case, run, budget_s, ci_fraction))
        return row

    def run_cases(
        self,
        cases: Sequence[Case],
        store: Store,
        run: Run,
        *,
        budget_s: float,
        ci_fraction: float,
        retry_failed: bool,
        on_row: Callable[[Row], None],
        on_start: Callable[[int], None],
    ) -> Outcome:
        """Measure cases on all devices at once; as bench.run.run_cases otherwise."""
        begin = time.monotonic()
        worth, pending = pending_cases(cases, self.facts, store, run, retry_failed=retry_failed)
        store.add_run(run)
        on_start(len(pending))
        idle, busy = list(self._actors), {}
        measured: list[Row] = []
        given = 0
        while True:
            while idle and given < len(pending) and (left_s := budget_s - (time.monotonic() - begin)) > 0.0:
                case, actor = pending[given], idle.pop()
                share_s = left_s * self.num_devices / (len(pending) - given)
                row_s = min(max(share_s, LEAST_ROW_S), longest_row_s(case))
                busy[actor.measure.remote(case, run, row_s, ci_fraction)] = (case, actor)
                given += 1
            if not busy:
                break
            for reference in self._ray.wait(list(busy), num_returns=1, timeout=_LOOK_EVERY_S)[0]:
                case, actor = busy.pop(reference)
                row = self._fetch(reference, case, run)
                store.add(row)
                measured.append(row)
                on_row(row)
                idle.append(actor)
        return count_outcome(measured, cases, worth, pending, wall_s=time.monotonic() - begin)

    def close(self) -> None:
        """End the processes."""
        for actor in self._actors:
            self._ray.kill(actor)

    def _fetch(self, reference: Any, case: Case, run: Run) -> Row:
        try:
            row: Row = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            words = f"the process that measured it was lost: {one_line(error)}"
            return failed_row(Row(**row_facts(case, run), measured_utc=now_utc(), status=FAILED), words)
        return row


class _Actor:
    """One measuring process, on some node."""

    def __init__(self, options: WorkerOptions, version: str) -> None:
        if version != __version__:
            raise ClusterError(f"a node has shapewright {__version__} and not {version}; install the same everywhere")
        self._worker = Worker(options)

    def facts(self) -> DeviceFacts:
        """What is known of the device."""
        return self._worker.facts

    def measure(self, case: Case, run: Run, budget_s: float, ci_fraction: float) -> Row:
        """Measure a case; what takes the process with it is a failed row."""
        try:
            return self._worker.measure(case, run, budget_s=budget_s, ci_fraction=ci_fraction)
        except WorkerDiedError as death:
            return failed_row(Row(**row_facts(case, run), measured_utc=now_utc(), status=FAILED), str(death))


@contextmanager
def open_cluster_measurer(options: WorkerOptions, address: str | None) -> Iterator[ClusterMeasurer]:
    """Connect to a cluster, or start one here, and open its devices.

    Raises:
        MissingExtraError: Ray is not installed.
        ClusterError: nothing answers at the address.
        BenchError: there is nothing to measure on, or several kinds of it.
    """
    if options.num_ranks > 1:
        raise BenchError("collectives need processes on one node; run that suite without --engine ray")
    with connect(address) as ray:
        measurer = ClusterMeasurer(ray, options)
        try:
            yield measurer
        finally:
            measurer.close()


def _count_devices(ray: Any, options: WorkerOptions) -> int:
    if options.cpu:
        return max(1, sum(1 for node in ray.nodes() if node["Alive"]))
    count = int(ray.cluster_resources().get("GPU", 0))
    if not count:
        raise BenchError("the cluster has no GPU; start it with --num-gpus, or give --cpu to measure its CPUs")
    return count
