"""The worker process: a crash costs one row, and killed processes neither lose nor repeat stored rows."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shapewright.core.errors import BenchError
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.bench import run as run_module
from shapewright.measure.bench import worker as worker_module
from shapewright.measure.bench.run import make_run, run_cases
from shapewright.measure.bench.worker import Worker, WorkerOptions
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import FAILED, OK, Case

# A worker without torch: the size of a case selects its failure, and the begun cases are logged.
FAKE = """
import os, signal, sys, time
from dataclasses import replace
from pathlib import Path
from shapewright.measure.bench import measuring, worker
from shapewright.measure.bench.device import backend, open_device
from shapewright.core.errors import BenchError
from shapewright.core.records import dataclass
from shapewright.measure.store.record import Row, row_facts

FOLDER = Path(__file__).parent

@dataclass(frozen=True, kw_only=True)
class Fake(backend.DeviceFacts):
    broken_captures: tuple = ()

    def describe(self):
        return backend.DeviceFacts(**{name: getattr(self, name) for name in backend.DeviceFacts.__dataclass_fields__})

    def synchronize(self):
        if (FOLDER / "poisoned").exists():
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

def open_backend(**_):
    with (FOLDER / "started.txt").open("a") as log:
        print("started", file=log)
    if (FOLDER / "broken").exists():
        raise BenchError("no device here; use the CPU")
    return Fake(is_cuda=False, name="d", facts={}, driver="", runtime="cpu", torch_version="2", dtypes=("fp32",),
                cache_bytes=1.0, max_operation_flops=1e30)

def measure_case(case, device, run, *, budget_s, ci_fraction, may_capture=True):
    m = case.operation.m
    with (FOLDER / "begun.txt").open("a") as log:
        print(m, file=log, flush=True)
    row = Row(**row_facts(case, run), measured_utc="x", status="ok", median_s=1.0, num_samples=1)
    if m == 1001:
        os.kill(os.getpid(), signal.SIGKILL)
    if m == 1002:
        print("segmentation fault ahead", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if m == 1003:
        os._exit(7)
    if m == 1004:
        time.sleep(60)
    if m == 1005:
        (FOLDER / "poisoned").touch()
        return replace(row, status="failed", error="CUDA error: an illegal memory access was encountered")
    if m == 1006 and may_capture:
        object.__setattr__(device, "broken_captures", ("operation not permitted when stream is capturing",))
    (FOLDER / "poisoned").unlink(missing_ok=True)
    time.sleep(2e-3)
    return row

open_device.open_backend, measuring.measure_case = open_backend, measure_case
if __name__ == "__main__":
    worker.main()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A worker that measures nothing, and its folder."""
    (tmp_path / "fake_worker.py").write_text(FAKE, encoding="utf-8")
    monkeypatch.setattr(worker_module, "COMMAND", (sys.executable, str(tmp_path / "fake_worker.py")))
    return tmp_path


def cases(*sizes: int) -> list[Case]:
    """GEMMs that differ in m."""
    return [Case(operation=Gemm(name="x", m=m, n=1, k=1)) for m in sizes]


def test_a_lost_worker_costs_one_row(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that is killed, crashes, exits, hangs or loses its context fails one row with the reason."""
    monkeypatch.setattr(worker_module, "_ROW_TIMEOUT_S", 0.3)
    sizes = (1, 1001, 2, 1002, 3, 1003, 1004, 4, 1005, 5)
    with Worker(WorkerOptions()) as worker, Store(fake / "s.sqlite") as store:
        run = make_run(worker.facts, suite="s", command="c")
        outcome = run_cases(cases(*sizes), worker, store, run, budget_s=9.0)
        rows = {row.m: row for row in store.rows()}

    assert [row.m for row in outcome.measured] == list(sizes)
    assert {m for m, row in rows.items() if row.status == OK} == {1, 2, 3, 4, 5}
    words = {1001: "SIGKILL", 1002: "SIGSEGV", 1003: "code 7", 1004: "did not answer", 1005: "context was lost"}
    for m, word in words.items():
        assert rows[m].status == FAILED
        assert word in rows[m].error
        assert "\n" not in rows[m].error
    assert rows[1002].error.endswith("segmentation fault ahead")


def test_repeatedly_failed_captures_are_not_retried(fake: Path) -> None:
    """After two failed captures, a third similar case is not captured, since each failure costs a new process."""
    alike = [Case(operation=Gemm(name="x", m=1006, n=n, k=1)) for n in range(5)]
    with Worker(WorkerOptions()) as worker, Store(fake / "s.sqlite") as store:
        run = make_run(worker.facts, suite="s", command="c")
        outcome = run_cases(alike, worker, store, run, budget_s=9.0)

    assert [row.status for row in outcome.measured] == [OK] * 5
    assert (fake / "started.txt").read_text(encoding="utf-8").count("started") == 3


def test_successive_crashes_end_the_run(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After several successive crashes the run stops with a one-line error; the rows are stored."""
    monkeypatch.setattr(run_module, "_MAX_SUCCESSIVE_CRASHES", 2)
    with Worker(WorkerOptions()) as worker, Store(fake / "s.sqlite") as store:
        run = make_run(worker.facts, suite="s", command="c")
        alike = [Case(operation=Gemm(name="x", m=1003, n=n, k=1)) for n in range(1, 5)]
        with pytest.raises(BenchError, match="2 successive rows"):
            run_cases(alike, worker, store, run, budget_s=5.0)

        assert [row.status for row in store.rows()] == [FAILED, FAILED]


def test_errors_of_opening_are_raised_in_the_parent(fake: Path) -> None:
    """An error of the worker is raised in the parent; a worker that dies at once is reported."""
    (fake / "broken").touch()
    with pytest.raises(BenchError, match=r"^no device here; use the CPU$"):
        Worker(WorkerOptions())
    (fake / "fake_worker.py").write_text("raise SystemExit('no such library')", encoding="utf-8")
    with pytest.raises(BenchError, match=r"does not start.*code 1: no such library"):
        Worker(WorkerOptions())


def test_workers_end_with_their_parent(fake: Path) -> None:
    """Closing a worker stops all of its processes."""
    worker = Worker(WorkerOptions())
    (rank,) = worker._ranks
    worker.close()

    with pytest.raises(ProcessLookupError):
        os.kill(rank._process.pid, 0)
    assert (fake / "fake_worker.py").exists()


# A parent process like the command line's, with the fake worker.
PARENT = """
import sys
from pathlib import Path
from shapewright.measure.bench import worker as worker_module
from shapewright.measure.bench.run import make_run, run_cases
from shapewright.measure.bench.worker import Worker, WorkerOptions
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.store.database import Store
from shapewright.measure.store.record import Case

folder = Path(sys.argv[1])
worker_module.COMMAND = (sys.executable, str(folder / "fake_worker.py"))
cases = [Case(operation=Gemm(name="x", m=m + 2000, n=1, k=1)) for m in range(3000)]
with Worker(WorkerOptions()) as worker, Store(folder / "s.sqlite") as store:
    (rank,) = worker._ranks
    print("worker", rank._process.pid, flush=True)
    run = make_run(worker.facts, suite="s", command="c")
    run_cases(cases, worker, store, run, budget_s=60.0, on_row=lambda row: print("committed", row.m, flush=True))
"""


def test_twenty_kills_lose_no_rows(fake: Path) -> None:
    """Twenty kill -9 at random times, of the parent and its worker alternately, each followed by a new run.

    All committed rows are kept, none is measured again, and the store is undamaged.
    """
    generator = random.Random(3)
    (fake / "parent.py").write_text(PARENT, encoding="utf-8")
    committed: set[int] = set()
    for turn in range(20):
        begun_before = len(begun(fake))
        parent = subprocess.Popen([sys.executable, str(fake / "parent.py"), str(fake)], stdout=subprocess.PIPE)
        assert parent.stdout is not None
        worker_pid = int(parent.stdout.readline().split()[1])
        lines = [parent.stdout.readline() for _ in range(generator.randrange(1, 40))]
        time.sleep(generator.random() * 4e-3)
        if turn % 2:
            os.kill(worker_pid, signal.SIGKILL)  # the parent goes on with another one
            lines += [parent.stdout.readline() for _ in range(5)]
        os.kill(parent.pid, signal.SIGKILL)
        lines += parent.communicate()[0].splitlines(keepends=True)
        now_committed = {int(line.split()[1]) for line in lines if line.endswith(b"\n")}

        assert not set(begun(fake)[begun_before:]) & committed
        committed |= now_committed
    with Store(fake / "s.sqlite", read_only=True) as store:
        stored = {row.m: row.status for row in store.rows()}

        assert store.verify() == []
    assert committed <= set(stored)
    assert len(committed) > 200
    assert 5 <= list(stored.values()).count(FAILED) <= 10


def begun(folder: Path) -> list[int]:
    """Cases that workers have begun, in order."""
    path = folder / "begun.txt"
    return [int(line) for line in path.read_text(encoding="utf-8").split()] if path.exists() else []
