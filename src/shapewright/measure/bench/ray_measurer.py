"""Measuring on a Ray cluster: one worker process per device, and one store, which the driver writes.

Every actor reserves one GPU (or one CPU) and owns a worker process, as on a single machine. The driver gives each case
to the next free actor, in order, and commits every row as it arrives. An actor that is lost with its node is restarted
on another one and repeats its case there; a case that loses its actor repeatedly becomes a failed row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from shapewright import __version__
from shapewright.core.errors import BenchError, ClusterError
from shapewright.core.ray_cluster import connect
from shapewright.measure.bench.measuring import one_line, unmeasured_row
from shapewright.measure.bench.run import Outcome, RunRecorder, limit_row_s
from shapewright.measure.bench.worker import Worker, WorkerDiedError

if TYPE_CHECKING:
    from shapewright.measure.bench.device.backend import DeviceFacts
    from shapewright.measure.bench.worker import WorkerOptions
    from shapewright.measure.store.database import Store
    from shapewright.measure.store.record import Case, Row, Run

# Restarts of an actor, and retries of a case whose actor was lost.
_MAX_RESTARTS, _MAX_RETRIES = 5, 2
_POLL_INTERVAL_S = 0.5


class ClusterMeasurer:
    """Worker processes on the devices of a cluster, which must all be of one kind.

    Args:
        ray: The connected ray module.
        options: The device that each worker opens.
        num_actors: Number of workers; None for one per GPU of the cluster, or one per node with CPUs.

    Raises:
        BenchError: the cluster has no GPU, or devices of several kinds.
    """

    def __init__(self, ray: Any, options: WorkerOptions, num_actors: int | None = None) -> None:
        self._ray = ray
        count = num_actors or _count_devices(ray, options)
        needs = {"num_cpus": 1} if options.cpu else {"num_gpus": 1, "num_cpus": 0}
        remote = ray.remote(max_restarts=_MAX_RESTARTS, max_task_retries=_MAX_RETRIES, **needs)(_Actor)
        self._actors = [remote.remote(options, __version__) for _ in range(count)]
        try:
            found = ray.get([actor.facts.remote() for actor in self._actors])
        except ray.exceptions.RayError as error:
            raise getattr(error, "cause", None) or ClusterError(
                f"no measuring process could be started: {one_line(error)}"
            ) from error
        kinds = {(facts.name, facts.library) for facts in found}
        if len(kinds) > 1:
            listed = "; ".join(f"{name} ({library})" for name, library in sorted(kinds))
            raise BenchError(f"the cluster's devices differ ({listed}); one run needs devices of one kind")
        self.facts: DeviceFacts = found[0]

    @property
    def num_devices(self) -> int:
        """Number of devices that measure concurrently."""
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
        """Measure cases on all devices concurrently; see run_cases for the arguments."""
        recorder = RunRecorder(
            cases, self.facts, store, run, retry_failed=retry_failed, on_row=on_row, on_start=on_start
        )
        pending, idle, busy = recorder.pending, list(self._actors), {}
        num_submitted = 0
        while True:
            while idle and num_submitted < len(pending) and (left_s := budget_s - recorder.elapsed_s()) > 0.0:
                case, actor = pending[num_submitted], idle.pop()
                row_s = limit_row_s(case, left_s * self.num_devices / (len(pending) - num_submitted))
                busy[actor.measure.remote(case, run, row_s, ci_fraction)] = (case, actor)
                num_submitted += 1
            if not busy:
                return recorder.outcome()
            for reference in self._ray.wait(list(busy), num_returns=1, timeout=_POLL_INTERVAL_S)[0]:
                case, actor = busy.pop(reference)
                recorder.add(self._fetch(reference, case, run))
                idle.append(actor)

    def close(self) -> None:
        """Stop the processes."""
        for actor in self._actors:
            self._ray.kill(actor)

    def _fetch(self, reference: Any, case: Case, run: Run) -> Row:
        try:
            row: Row = self._ray.get(reference)
        except self._ray.exceptions.RayError as error:
            return unmeasured_row(case, run, f"the measuring process was lost: {one_line(error)}")
        return row


class _Actor:
    """A worker process on one node of the cluster."""

    def __init__(self, options: WorkerOptions, version: str) -> None:
        if version != __version__:
            raise ClusterError(
                f"a node has shapewright {__version__}, the driver has {version}; install the same version on all nodes"
            )
        self._worker = Worker(options)

    def facts(self) -> DeviceFacts:
        """Description of the device."""
        return self._worker.facts

    def measure(self, case: Case, run: Run, budget_s: float, ci_fraction: float) -> Row:
        """Measure a case; if the worker dies, the row is marked as failed."""
        try:
            return self._worker.measure(case, run, budget_s=budget_s, ci_fraction=ci_fraction)
        except WorkerDiedError as death:
            return unmeasured_row(case, run, str(death))


@contextmanager
def open_cluster_measurer(options: WorkerOptions, address: str | None) -> Iterator[ClusterMeasurer]:
    """Connect to a Ray cluster, or start one on this host, and open its devices.

    Raises:
        MissingExtraError: Ray is not installed.
        ClusterError: no cluster answers at the address.
        BenchError: the cluster has no device to measure, or devices of several kinds.
    """
    if options.num_ranks > 1:
        raise BenchError(
            f"collectives run between processes of one node, got num_ranks={options.num_ranks}; use engine='local'"
        )
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
        raise BenchError("the cluster has no GPU; start its nodes with GPUs, or measure its CPUs")
    return count
