"""The worker: the process that touches the device, so that whatever happens there costs one row and no more.

The parent holds the store and sends one case at a time; the worker answers with its row. A worker that is killed, that
crashes, that does not answer, or whose device context is spoilt is replaced, and the case's row says why. Ranks of
collectives are workers that get the same cases at the same time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from shapewright import errors
from shapewright.errors import BenchError, MissingExtraError
from shapewright.store.record import OK, Case, Row, Run

if TYPE_CHECKING:
    from shapewright.bench.backend import Backend, DeviceFacts

# How a worker is started; its number and the descriptor of its connection follow.
COMMAND: Sequence[str] = (sys.executable, "-m", "shapewright.bench.worker")
# Where this package was imported from, wherever the process has gone since.
_ROOT = str(Path(__file__).resolve().parents[2])
# A first start imports torch and loads its libraries from a disk that may be cold. [s]
_LONGEST_START_S = 300.0
# Beyond the row's budget: compilation, allocation and reference of the largest cases. [s]
_LONGEST_ROW_S = 240.0
_LONGEST_END_S = 5.0
# A capture that breaks costs a new process, which takes longer than dozens of rows: after so many, calls like it are
# timed one by one.
_MOST_BROKEN_CAPTURES = 2
_TAIL_CHARACTERS = 300
# prctl(2): PR_SET_PDEATHSIG.
_PARENT_DEATH_SIGNAL = 1


class WorkerDiedError(BenchError):
    """The worker is gone; the case that it measured failed."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """What workers are to open.

    Attributes:
        cpu: The CPU instead of a GPU.
        device_index: Which GPU.
        num_ranks: Processes that communicate; 1 for everything but collectives.
        names_kernels: Whether rows of a GPU name the kernels that ran.
    """

    cpu: bool = False
    device_index: int = 0
    num_ranks: int = 1
    names_kernels: bool = False


class Worker:
    """Parent's side of the worker processes.

    Args:
        options: What to open.

    Raises:
        BenchError: the device cannot be opened.
        MissingExtraError: PyTorch is not installed.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._ranks: list[_Rank] = []
        self._broken_captures: Counter[tuple[object, ...]] = Counter()
        self.facts: DeviceFacts = self._start()

    def measure(self, case: Case, run: Run, *, budget_s: float, ci_fraction: float) -> Row:
        """Have a case measured.

        Raises:
            WorkerDiedError: the worker is gone, and with it the row.
        """
        if not self._ranks:
            self._start()
        options: dict[str, float | bool] = {"budget_s": budget_s, "ci_fraction": ci_fraction}
        if self._broken_captures[_alike(case)] >= _MOST_BROKEN_CAPTURES:
            options["may_capture"] = False
        message = (case, run, options)
        try:
            for rank in self._ranks:
                rank.send(message)
            answers = self._receive(budget_s + _LONGEST_ROW_S)
        except WorkerDiedError:
            self.close()
            raise
        row: Row = answers[0][0]
        if not all(is_usable for _, is_usable in answers):
            self._broken_captures[_alike(case)] += row.status == OK
            self.close()
        return row

    def close(self) -> None:
        """End the processes; the next case starts new ones."""
        for rank in self._ranks:
            rank.end()
        self._ranks = []

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> DeviceFacts:
        meeting = Path(tempfile.mkdtemp(prefix="shapewright-")) / "ranks" if self._options.num_ranks > 1 else None
        try:
            self._ranks = [_Rank(index) for index in range(self._options.num_ranks)]
            for rank in self._ranks:
                rank.send((self._options, rank.index, str(meeting or "")))
            answers = self._receive(_LONGEST_START_S)
        except WorkerDiedError as death:
            self.close()
            raise BenchError(f"the process that measures does not start: {death}") from death
        finally:
            if meeting:
                meeting.unlink(missing_ok=True)
                meeting.parent.rmdir()
        facts: Any = answers[0]
        for answer in answers:
            if isinstance(answer, tuple):
                self.close()
                name, words = answer
                raise getattr(errors, name, BenchError)(words)
        found: DeviceFacts = facts
        return found

    def _receive(self, limit_s: float) -> list[Any]:
        """One answer of each rank, the first one's first; ranks that wait for a lost one are not waited for."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + limit_s
        while len(answers) < len(self._ranks):
            silent = {rank.connection: rank for rank in self._ranks if rank.index not in answers}
            ready = wait(list(silent), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerDiedError(f"gave no answer within {limit_s:.0f} s and was stopped")
            for connection in ready:
                rank = silent[cast(Connection, connection)]
                answers[rank.index] = rank.receive()
        return [answers[rank.index] for rank in self._ranks]


class _Rank:
    """One worker process and the connection to it."""

    def __init__(self, index: int) -> None:
        self.index = index
        ours, theirs = socket.socketpair()
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        with theirs:
            self._process = subprocess.Popen(
                [*COMMAND, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))},
            )
        self.connection = Connection(ours.detach())

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError as error:
            raise WorkerDiedError(self._obituary()) from error

    def receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerDiedError(self._obituary()) from error

    def end(self) -> None:
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process.poll() is None:
                self._process.terminate()
                self._process.wait(_LONGEST_END_S)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._said.close()

    def _obituary(self) -> str:
        """What the process died of, with the last thing that it said."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LONGEST_END_S)
        code = self._process.poll()
        cause = f"ended with code {code}"
        if code is not None and code < 0:
            cause = f"was killed by {signal.Signals(-code).name}"
            cause += " (out of memory?)" if code == -signal.SIGKILL else ""
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        return f"the process that measured it {cause}" + (f": {lines[-1][:_TAIL_CHARACTERS]}" if lines else "")


def _alike(case: Case) -> tuple[object, ...]:
    """What decides whether calls can be captured, as far as the case tells."""
    operation = case.operation
    what = (getattr(operation, name, None) for name in ("operation", "is_backward", "passes"))
    return operation.kind, operation.dtype, case.variant, *what


def serve(connection: Connection) -> None:
    """Open the device, then measure what the parent sends until it is gone."""
    from shapewright.bench.measuring import measure_case
    from shapewright.bench.open_device import open_backend

    options, rank, meeting = connection.recv()
    try:
        if options.num_ranks > 1:
            from shapewright.bench.collectives import measure_collective, open_ranks

            backend = open_ranks(options.num_ranks, rank, meeting, cpu=options.cpu)
            measure = measure_collective
        else:
            backend = open_backend(cpu=options.cpu, device_index=options.device_index)
            if options.names_kernels:
                backend = replace(backend, names_kernels=True)
            measure = measure_case
    except (BenchError, MissingExtraError) as error:
        connection.send((type(error).__name__, str(error)))
        return
    connection.send(backend.describe())
    while True:
        case, run, how = connection.recv()
        row = measure(case, backend, run, **how)
        row, is_usable = judge_device(row, backend)
        connection.send((row, is_usable))
        if not is_usable:
            return


def judge_device(row: Row, backend: Backend) -> tuple[Row, bool]:
    """Find out whether a row took the device's context, or torch's state, with it."""
    from shapewright.bench.measuring import one_line

    if row.status != "failed":
        return row, not backend.broken_captures
    try:
        backend.synchronize()
    except RuntimeError as error:
        return replace(row, error=f"{row.error}; the device's context was lost ({one_line(error)})"), False
    return row, not backend.broken_captures


def main() -> None:
    """Run as the worker of the process that passed a connection."""
    # Ctrl-C reaches the whole group; what it means is the parent's to say.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        # A parent that is killed must not leave its last row running beside the first one of the next call.
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(connection)
    # Torch's own clean-up of a lost context can hang.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
