"""Run the jobs of a search: in this process, or as tasks on a Ray cluster.

On Ray every job is a task that requests one CPU. Findings are returned in the order of the jobs, so the result is
bit-identical to that of ``run_here``. A task whose worker dies is retried elsewhere. The number of submitted tasks is
limited, so driver and object store hold only a few findings at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from shapewright import __version__
from shapewright.core.errors import ConfigError
from shapewright.core.ray_cluster import MOST_RETRIES, check_engine, check_version, connect, fetch_result
from shapewright.optimize.search.engine import run_here, run_job
from shapewright.optimize.search.findings import Findings, Tally
from shapewright.prediction.loss.law import REFERENCE, load_loss_law

if TYPE_CHECKING:
    from shapewright.optimize.search.engine import Job, Runner

_TASKS_PER_CPU = 3
_POLL_INTERVAL_S = 0.2


def _run_on_ray(ray: Any, jobs: Sequence[Job], show: Callable[[int], None]) -> Iterator[Findings]:
    """Run jobs as tasks; an interrupt cancels those that are not done."""
    task = ray.remote(num_cpus=1, max_retries=MOST_RETRIES)(_run_whole)
    most_submitted = max(2, _TASKS_PER_CPU * int(ray.cluster_resources().get("CPU", 1)))
    references: dict[int, Any] = {}
    ready: dict[int, Findings] = {}
    num_submitted = num_returned = done = 0
    try:
        while num_returned < len(jobs):
            while num_submitted < len(jobs) and num_submitted - num_returned < most_submitted:
                references[num_submitted] = task.remote(jobs[num_submitted], __version__)
                num_submitted += 1
            finished, _ = ray.wait(list(references.values()), num_returns=1, timeout=_POLL_INTERVAL_S)
            for number in [number for number, reference in references.items() if reference in finished]:
                ready[number] = fetch_result(ray, references.pop(number))
                done += jobs[number].space.grid.num_shapes
            show(done)
            while num_returned in ready:
                yield ready.pop(num_returned)
                num_returned += 1
    except KeyboardInterrupt:
        for reference in references.values():
            ray.cancel(reference, force=True)
        yield Findings(Tally(), is_complete=False)


def _run_whole(job: Job, version: str) -> Findings:
    """Run a whole job, as one task.

    Raises:
        ClusterError: the worker has another version of this package, whose result could differ.
    """
    check_version(version)
    findings = Findings(Tally())
    for _ in run_job(job, findings):
        pass
    findings.merge_collected()
    return findings


@contextmanager
def runner_of(engine: str, address: str | None) -> Iterator[Runner]:
    """Yield the runner of an engine.

    Args:
        engine: One of ``shapewright.core.ray_cluster.ENGINES``.
        address: With Ray ``auto`` for the cluster of this machine, ``host:port`` or ``ray://host:port`` for another;
            None or ``local`` to start one on this machine.

    Raises:
        ConfigError: the engine is not known, or an address is given without Ray.
        MissingExtraError: Ray is not installed.
        ClusterError: no cluster answers at the address.
    """
    check_engine(engine, address)
    if engine != "ray":
        yield run_here
        return
    if load_loss_law().name != REFERENCE:
        raise ConfigError("engine='ray' has the loss law of the package alone; search here, or without your own law")
    with connect(address) as ray:
        yield partial(_run_on_ray, ray)
