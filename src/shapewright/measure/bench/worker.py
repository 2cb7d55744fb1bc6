"""Worker processes that run cases on the device, so that a crash costs one row only.

The parent owns the store and sends one case at a time; the worker returns its row. A worker that is killed, crashes,
does not answer or loses its device context is replaced, and the row records why. The ranks of collectives are workers
that receive the same cases at the same time.
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
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from shapewright.core.child_process import child_environment, python_command
from shapewright.core.errors import BenchError, MissingExtraError, ShapewrightError
from shapewright.core.records import dataclass
from shapewright.measure.store.record import FAILED, OK, Case, Row, Run

if TYPE_CHECKING:
    from shapewright.measure.bench.device.backend import Backend, DeviceFacts

# Command that starts a worker; the file descriptor of its connection is appended.
COMMAND: Sequence[str] = python_command("shapewright.measure.bench.worker")
# The first start imports torch and may load its libraries from a slow disk. [s]
_START_TIMEOUT_S = 300.0
# In addition to the row's budget: compilation, allocation and reference of the largest cases. [s]
_ROW_TIMEOUT_S = 240.0
_END_TIMEOUT_S = 5.0
# A failed capture costs a new process, which takes longer than dozens of rows: after this many, similar cases are timed
# without a graph.
_MAX_BROKEN_CAPTURES = 2
_MAX_OUTPUT_LENGTH = 300
# prctl(2): PR_SET_PDEATHSIG.
_PARENT_DEATH_SIGNAL = 1


class WorkerDiedError(BenchError):
    """A worker process died or was stopped, and the case that it measured failed."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The device that workers open.

    Attributes:
        cpu: Use the CPU instead of a GPU.
        device_index: Index of the GPU.
        num_ranks: Number of communicating processes; 1 for everything but collectives.
        names_kernels: Whether rows of a GPU record the names of the kernels that ran.
    """

    cpu: bool = False
    device_index: int = 0
    num_ranks: int = 1
    names_kernels: bool = False


class Worker:
    """The parent's handle of one worker process, or of one per rank.

    Args:
        options: The device to open.

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
        """Measure a case in the worker.

        Raises:
            WorkerDiedError: the worker died before it returned a row.
        """
        if not self._ranks:
            self._start()
        options: dict[str, float | bool] = {"budget_s": budget_s, "ci_fraction": ci_fraction}
        if self._broken_captures[_capture_group(case)] >= _MAX_BROKEN_CAPTURES:
            options["may_capture"] = False
        message = (case, run, options)
        try:
            for rank in self._ranks:
                rank.send(message)
            answers = self._receive(budget_s + _ROW_TIMEOUT_S)
        except WorkerDiedError:
            self.close()
            raise
        row: Row = answers[0][0]
        if not all(is_usable for _, is_usable in answers):
            self._broken_captures[_capture_group(case)] += row.status == OK
            self.close()
        return row

    def close(self) -> None:
        """Stop the processes; the next case starts new ones."""
        for rank in self._ranks:
            rank.end()
        self._ranks = []

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> DeviceFacts:
        rendezvous = Path(tempfile.mkdtemp(prefix="shapewright-")) / "ranks" if self._options.num_ranks > 1 else None
        try:
            self._ranks = [_Rank(index) for index in range(self._options.num_ranks)]
            for rank in self._ranks:
                rank.send((self._options, rank.index, str(rendezvous or "")))
            answers = self._receive(_START_TIMEOUT_S)
        except WorkerDiedError as death:
            self.close()
            raise BenchError(f"the measuring process does not start: {death}") from death
        finally:
            if rendezvous:
                rendezvous.unlink(missing_ok=True)
                rendezvous.parent.rmdir()
        for answer in answers:
            if isinstance(answer, ShapewrightError):  # the worker could not open the device
                self.close()
                raise answer
        facts: DeviceFacts = answers[0]
        return facts

    def _receive(self, limit_s: float) -> list[Any]:
        """One answer of each rank, in the order of ranks; raises as soon as one rank is lost."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + limit_s
        while len(answers) < len(self._ranks):
            waiting = {rank.connection: rank for rank in self._ranks if rank.index not in answers}
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerDiedError(f"the measuring process did not answer within {limit_s:.0f} s and was stopped")
            for connection in ready:
                rank = waiting[cast(Connection, connection)]
                answers[rank.index] = rank.receive()
        return [answers[rank.index] for rank in self._ranks]


class _Rank:
    """One worker process and the connection to it."""

    def __init__(self, index: int) -> None:
        self.index = index
        parent_end, worker_end = socket.socketpair()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the process)
        with worker_end:
            self._process = subprocess.Popen(
                [*COMMAND, str(worker_end.fileno())],
                pass_fds=[worker_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env=child_environment(),
            )
        self.connection = Connection(parent_end.detach())

    def send(self, message: object) -> None:
        try:
            self.connection.send(message)
        except OSError as error:
            raise WorkerDiedError(self._exit_reason()) from error

    def receive(self) -> Any:
        try:
            return self.connection.recv()
        except (EOFError, OSError) as error:
            raise WorkerDiedError(self._exit_reason()) from error

    def end(self) -> None:
        self.connection.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process.poll() is None:
                self._process.terminate()
                self._process.wait(_END_TIMEOUT_S)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._output.close()

    def _exit_reason(self) -> str:
        """Why the process ended, with the last line of its output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)
        code = self._process.poll()
        cause = f"ended with code {code}"
        if code is not None and code < 0:
            cause = f"was killed by {signal.Signals(-code).name}"
            cause += " (out of memory?)" if code == -signal.SIGKILL else ""
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").strip().splitlines()
        return f"the measuring process {cause}" + (f": {lines[-1][:_MAX_OUTPUT_LENGTH]}" if lines else "")


def _capture_group(case: Case) -> tuple[object, ...]:
    """Properties that decide whether a case can be captured as a graph; cases that share them are treated alike."""
    operation = case.operation
    details = (getattr(operation, name, None) for name in ("operation", "is_backward", "passes"))
    return operation.kind, operation.dtype, case.variant, *details


def serve(connection: Connection) -> None:
    """Open the device, then measure the cases that the parent sends until it closes the connection."""
    from shapewright.measure.bench.device.open_device import open_backend
    from shapewright.measure.bench.measuring import measure_case

    options, rank, rendezvous_file = connection.recv()
    try:
        if options.num_ranks > 1:
            from shapewright.measure.bench.operations.collectives import measure_collective, open_ranks

            backend = open_ranks(options.num_ranks, rank, rendezvous_file, cpu=options.cpu)
            measure = measure_collective
        else:
            backend = open_backend(cpu=options.cpu, device_index=options.device_index)
            if options.names_kernels:
                backend = replace(backend, names_kernels=True)
            measure = measure_case
    except (BenchError, MissingExtraError) as error:
        connection.send(error)
        return
    connection.send(backend.describe())
    while True:
        case, run, measure_options = connection.recv()
        row = measure(case, backend, run, **measure_options)
        row, is_usable = check_device(row, backend)
        connection.send((row, is_usable))
        if not is_usable:
            return


def check_device(row: Row, backend: Backend) -> tuple[Row, bool]:
    """Check whether the process can measure further cases; a lost device context is added to the row's error."""
    from shapewright.measure.bench.measuring import one_line

    if row.status != FAILED:
        return row, not backend.broken_captures
    try:
        backend.synchronize()
    except RuntimeError as error:
        return replace(row, error=f"{row.error}; the device context was lost ({one_line(error)})"), False
    return row, not backend.broken_captures


def main() -> None:
    """Run as a worker process; the argument is the file descriptor of the connection."""
    # Ctrl-C is sent to the whole process group; the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        # If the parent is killed, the worker must not keep the device busy during the next run.
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        serve(connection)
    # torch's clean-up of a lost context can hang.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
