"""Searches and measurements on a local Ray cluster: identical results, and recovery from lost workers."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shapewright.app.api.searches import search
from shapewright.app.api.traffic import serve_traffic
from shapewright.core.errors import BenchError, ClusterError
from shapewright.core.records import dataclass
from shapewright.measure.store.database import Store
from shapewright.optimize.search import engine as search_engine
from shapewright.optimize.search import runners
from shapewright.optimize.search.engine import Job, explore, run_here
from shapewright.optimize.search.findings import Findings
from shapewright.optimize.search.space.space import Space


@dataclass(frozen=True, kw_only=True)
class DeadlySpace(Space):
    """A search space whose first user dies, like a worker that is killed for lack of memory."""

    grave: Path

    def allowed(self, grid: Any, rows: Any) -> Any:
        """Die once."""
        if not self.grave.exists():
            self.grave.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().allowed(grid, rows)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two workers for all tests in this file."""
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


def test_ray_gives_exactly_the_local_result(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs, rows and floats are identical to a local search, even if a worker dies."""
    from shapewright.optimize.search.runners import runner_of

    monkeypatch.setattr(search_engine, "_SHAPES_OF_A_JOB", 15_000)
    jobs: list[Job] = []

    def keep_jobs(requested: Any, show: Any) -> Iterator[Findings]:
        jobs.extend(requested)
        return run_here(requested, show)

    monkeypatch.setattr(runners, "run_here", keep_jobs)
    search("gpt3-1.3b", device="h100-sxm-80gb")
    here = explore(jobs, run_here)
    progress: list[tuple[int, int]] = []
    with runner_of("ray", None) as runner:
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
    from shapewright.optimize.search.runners import runner_of

    cluster.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    jobs: list[Job] = []

    def keep_jobs(requested: Any, show: Any) -> Iterator[Findings]:
        jobs.extend(requested)
        return run_here(requested, show)

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
    with runner_of("ray", None) as runner:
        there = explore([replace(jobs[0], space=deadly), *jobs[1:]], runner)

    assert (tmp_path / "grave").exists()
    assert there.tally == here.tally


def test_an_address_that_does_not_answer_is_one_line() -> None:
    """An unreachable or malformed address is a one-line error."""
    from shapewright.core.ray_cluster import _check_reachable

    pytest.importorskip("ray", reason="needs the ray extra")
    for address in ("127.0.0.1:1", "a..b:80", "a\0b:80", "127.0.0.1:\u00b2", "127.0.0.1:" + "9" * 5000):
        with pytest.raises(ClusterError, match="no Ray cluster answers"):
            _check_reachable(address)
    with pytest.raises(ClusterError, match="is not a cluster address"):
        _check_reachable("somewhere")


def test_rows_of_a_cluster_go_to_one_store(cluster: Any, tmp_path: Path) -> None:
    """Two processes measure concurrently; a lost one is restarted and repeats its row."""
    pytest.importorskip("torch", reason="needs the bench extra")
    from shapewright.measure.bench.ray_measurer import ClusterMeasurer
    from shapewright.measure.bench.run import make_run
    from shapewright.measure.bench.suites.registry import make_suite
    from shapewright.measure.bench.worker import WorkerOptions

    measurer = ClusterMeasurer(cluster, WorkerOptions(cpu=True), num_actors=2)
    cases = make_suite("smoke", ("fp32",), small=True, seed=0)[:6]
    run = make_run(measurer.facts, suite="smoke", command="test")
    seen: list[Any] = []

    def on_row(row: Any) -> None:
        seen.append(row)
        if len(seen) == 1:
            cluster.kill(measurer._actors[0], no_restart=False)

    with Store(tmp_path / "rows.sqlite") as store:
        requested = {"budget_s": 30.0, "ci_fraction": 1.0, "on_start": lambda _count: None}
        outcome = measurer.run_cases(cases, store, run, retry_failed=False, on_row=on_row, **requested)
        rows = store.rows()
    measurer.close()

    assert measurer.num_devices == 2
    assert outcome.num_left == 0
    assert [row.status for row in rows] == ["ok"] * 6


def test_collectives_stay_on_one_node() -> None:
    """The collectives suite is rejected on a cluster."""
    from shapewright.measure.bench.ray_measurer import open_cluster_measurer
    from shapewright.measure.bench.worker import WorkerOptions

    with (
        pytest.raises(BenchError, match="processes of one node"),
        open_cluster_measurer(WorkerOptions(cpu=True, num_ranks=2), None),
    ):
        pass


def test_ray_simulates_the_same_traffic(cluster: Any) -> None:
    """Two devices and two rates: every figure of every run is identical to a local simulation."""
    given: dict[str, Any] = {
        "device": "h100-sxm-80gb",
        "devices": ["l40s"],
        "arrivals": "1/s,2/s",
        "prompt_len": "lognormal:300,200",
        "output_len": "geometric:40",
        "num_requests": 200,
        "num_layouts": 1,
        "ttft_p90_s": 0.5,
        "layout": {"tensor_parallel": 1},
    }
    here = serve_traffic("llama-3-8b", **given)
    there = serve_traffic("llama-3-8b", engine="ray", **given)

    assert cluster.is_initialized()
    assert len(here.runs) == 4
    assert there.runs == here.runs
    assert [one.largest_rate_per_s for one in there.servers] == [one.largest_rate_per_s for one in here.servers]
