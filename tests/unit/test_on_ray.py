"""Searches and measurements on a local Ray cluster: the same answers, and nothing lost with a worker."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapewright.api import search
from shapewright.errors import BenchError, ClusterError
from shapewright.search import job as search_job
from shapewright.search import runners
from shapewright.search.engine import explore, run_here
from shapewright.search.findings import Findings
from shapewright.search.job import Job
from shapewright.search.space import Space
from shapewright.store.file import Store


@dataclass(frozen=True, kw_only=True)
class DeadlySpace(Space):
    """A space whose first reader dies, as a worker does that is killed for its memory."""

    grave: Path

    def allowed(self, grid: Any, rows: Any) -> Any:
        """Die once."""
        if not self.grave.exists():
            self.grave.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().allowed(grid, rows)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two workers, for all of these."""
    ray = pytest.importorskip("ray", reason="needs the ray extra")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=128 * 2**20,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield ray
    ray.shutdown()


def test_ray_gives_the_local_answer_to_the_last_bit(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same jobs, the same rows, the same floats; a worker that dies takes nothing with it."""
    from shapewright.search.on_ray import ray_runner

    monkeypatch.setattr(search_job, "_SHAPES_OF_A_JOB", 50_000)
    jobs: list[Job] = []

    def keep_jobs(asked: Any, show: Any) -> Iterator[Findings]:
        jobs.extend(asked)
        return run_here(asked, show)

    monkeypatch.setattr(runners, "run_here", keep_jobs)
    search("gpt3-1.3b", device="h100-sxm-80gb")
    here = explore(jobs, run_here)
    progress: list[tuple[int, int]] = []
    with ray_runner(None) as runner:
        there = explore(jobs, runner, lambda *shown: progress.append(shown))

    assert cluster.is_initialized()
    assert len(jobs) > 5
    assert there.tally == here.tally
    for mine, other in ((here.best, there.best), (here.front, there.front)):
        assert mine is not None
        assert other is not None
        assert mine.keys() == other.keys()
        assert all(np.array_equal(mine[name], other[name]) for name in mine)
    assert progress[-1] == (here.tally.num_shapes, here.tally.num_shapes)


def test_a_lost_worker_is_replaced(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job whose worker is killed runs again on another one."""
    from shapewright.search.on_ray import ray_runner

    cluster.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    jobs: list[Job] = []

    def keep_jobs(asked: Any, show: Any) -> Iterator[Findings]:
        jobs.extend(asked)
        return run_here(asked, show)

    monkeypatch.setattr(runners, "run_here", keep_jobs)
    search("gpt3-1.3b", device="h100-sxm-80gb", vary=("heads", "ffn", "width"))
    space = jobs[0].space
    deadly = DeadlySpace(
        baseline=space.baseline,
        grid=space.grid,
        followers=space.followers,
        ranges=space.ranges,
        grave=tmp_path / "grave",
    )
    here = explore(jobs, run_here)
    with ray_runner(None) as runner:
        there = explore([replace(jobs[0], space=deadly), *jobs[1:]], runner)

    assert (tmp_path / "grave").exists()
    assert there.tally == here.tally


def test_an_address_that_does_not_answer_is_one_line() -> None:
    """Nothing listens there, or it is no address at all."""
    from shapewright.cluster import _check_answers

    pytest.importorskip("ray", reason="needs the ray extra")
    with pytest.raises(ClusterError, match="no Ray cluster answers"):
        _check_answers("127.0.0.1:1")
    with pytest.raises(ClusterError, match="is no address of a cluster"):
        _check_answers("somewhere")


def test_rows_of_a_cluster_go_to_one_store(cluster: Any, tmp_path: Path) -> None:
    """Two processes measure at a time; one that is lost comes back, and its row is measured again."""
    pytest.importorskip("torch", reason="needs the bench extra")
    from shapewright.bench.on_ray import ClusterMeasurer
    from shapewright.bench.run import make_run
    from shapewright.bench.suites import make_suite
    from shapewright.bench.worker import WorkerOptions

    measurer = ClusterMeasurer(cluster, WorkerOptions(cpu=True), num_actors=2)
    cases = make_suite("smoke", ("fp32",), small=True, seed=0)[:6]
    run = make_run(measurer.facts, suite="smoke", command="test")
    seen: list[Any] = []

    def on_row(row: Any) -> None:
        seen.append(row)
        if len(seen) == 1:
            cluster.kill(measurer._actors[0], no_restart=False)

    with Store(tmp_path / "rows.sqlite") as store:
        asked = {"budget_s": 30.0, "ci_fraction": 1.0, "on_start": lambda _count: None}
        outcome = measurer.run_cases(cases, store, run, retry_failed=False, on_row=on_row, **asked)
        rows = store.rows()
    measurer.close()

    assert measurer.num_devices == 2
    assert outcome.num_left == 0
    assert [row.status for row in rows] == ["ok"] * 6


def test_collectives_stay_on_one_node() -> None:
    """A suite whose processes talk to each other is refused."""
    from shapewright.bench.on_ray import open_cluster_measurer
    from shapewright.bench.worker import WorkerOptions

    with (
        pytest.raises(BenchError, match="processes on one node"),
        open_cluster_measurer(WorkerOptions(cpu=True, num_ranks=2), None),
    ):
        pass
