"""Jobs of a search as Ray tasks, on a cluster that is there or one started here.

Every job goes to a task that asks for one CPU. Findings come back in the order of the jobs, so the answer is the one of
``run_here`` to the last bit. A task whose worker dies is run again elsewhere; only so many tasks wait at a time that
neither the driver nor the object store holds more than a few findings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from shapewright import __version__
from shapewright.cluster import connect
from shapewright.errors import ClusterError
from shapewright.search.engine import run_job
from shapewright.search.findings import Findings, Tally

if TYPE_CHECKING:
    from shapewright.search.engine import Runner
    from shapewright.search.job import Job

# Attempts after the first where a worker or its node is lost.
MOST_RETRIES = 5
_WAITING_PER_CPU = 3
_LOOK_EVERY_S = 0.2


@contextmanager
def ray_runner(address: str | None) -> Iterator[Runner]:
    """Connect to a cluster, or start one here, for as long as jobs are run.

    Args:
        address: ``auto`` for the cluster of this machine, ``host:port`` or ``ray://host:port`` for another; None or
            ``local`` to start one.

    Raises:
        MissingExtraError: Ray is not installed.
        ClusterError: nothing answers at the address.
    """
    with connect(address) as ray:
        yield partial(_run_on_ray, ray)


def _run_on_ray(ray: Any, jobs: Sequence[Job], show: Callable[[int], None]) -> Iterator[Findings]:
    """Run jobs as tasks; an interrupt gives up those that are not done."""
    task = ray.remote(num_cpus=1, max_retries=MOST_RETRIES)(_run_whole)
    most_waiting = max(2, _WAITING_PER_CPU * int(ray.cluster_resources().get("CPU", 1)))
    references: dict[int, Any] = {}
    ready: dict[int, Findings] = {}
    sent = given = done = 0
    try:
        while given < len(jobs):
            while sent < len(jobs) and sent - given < most_waiting:
                references[sent] = task.remote(jobs[sent], __version__)
                sent += 1
            finished, _ = ray.wait(list(references.values()), num_returns=1, timeout=_LOOK_EVERY_S)
            for number in [number for number, reference in references.items() if reference in finished]:
                ready[number] = _fetch(ray, references.pop(number))
                done += jobs[number].space.grid.num_shapes
            show(done)
            while given in ready:
                yield ready.pop(given)
                given += 1
    except KeyboardInterrupt:
        for reference in references.values():
            ray.cancel(reference, force=True)
        yield Findings(Tally(), is_complete=False)


def _fetch(ray: Any, reference: Any) -> Findings:
    """Findings of a finished task; an error of ours is raised as it was."""
    try:
        found = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        words = " ".join(str(error).split())[:200]
        raise ClusterError(f"a task was lost {MOST_RETRIES + 1} times ({words}); look at the cluster") from error
    assert isinstance(found, Findings)
    return found


def _run_whole(job: Job, version: str) -> Findings:
    """One task: a whole job.

    Raises:
        ClusterError: the worker has another version of this package, whose answer would be another.
    """
    if version != __version__:
        raise ClusterError(f"a worker has shapewright {__version__} and not {version}; install the same everywhere")
    findings = Findings(Tally())
    for _ in run_job(job, findings):
        pass
    findings.sort_out()
    return findings
