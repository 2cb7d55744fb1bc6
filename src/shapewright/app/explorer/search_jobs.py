"""Queue of searches and designs: one runs at a time in its own process, with a time limit; recent results are kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import time
from collections import OrderedDict
from dataclasses import field
from typing import Any, Literal

from shapewright.app.explorer.views.outputs import SearchRunOutput
from shapewright.core.child_process import child_environment, python_command
from shapewright.core.records import dataclass

MAX_WAITING = 8
MAX_KEPT = 32
MAX_RUN_S = 120.0
PUBLIC_RUN_S = 20.0
"""Time limit of a search on a public server. [s]"""
_MAX_START_S = 90.0  # a busy machine imports slowly
_GRACE_S = 20.0  # between the request to stop and the kill
_MAX_LINE_BYTES = 16 * 2**20  # a result with its Pareto front has a few hundred kB

State = Literal["waiting", "running", "done", "failed", "cancelled"]


class QueueFullError(RuntimeError):
    """The queue is full."""


@dataclass
class SearchRun:
    """One search or design.

    Attributes:
        id: Identifier that cannot be guessed.
        request: Body of the request, and its ``kind``, ``search`` or ``design``.
        state: Current state.
        done: Shapes evaluated.
        num_shapes: Shapes to evaluate; 0 until known.
        result: JSON output of the search command and its text; the best so far for a cancelled search.
        error: Reason of a failure, in one line.
        error_kind: Name of the error class.
    """

    request: dict[str, Any]
    id: str = field(default_factory=lambda: secrets.token_urlsafe(12))
    state: State = "waiting"
    done: int = 0
    num_shapes: int = 0
    result: dict[str, Any] | None = None
    error: str = ""
    error_kind: str = ""
    is_cancelled: bool = False
    process: asyncio.subprocess.Process | None = None

    @property
    def is_over(self) -> bool:
        """Whether the search is done, failed or cancelled."""
        return self.state in ("done", "failed", "cancelled")

    def to_json(self) -> dict[str, Any]:
        """State, progress and result as JSON."""
        output = SearchRunOutput(
            id=self.id,
            state=self.state,
            done=self.done,
            num_shapes=self.num_shapes,
            progress_fraction=self.done / self.num_shapes if self.num_shapes else 0.0,
            result=self.result,
            error=self.error,
            error_kind=self.error_kind,
        )
        return output.to_json()


class SearchQueue:
    """Runs searches one after the other, each in its own process.

    Args:
        max_run_s: Time limit, after which a search returns its best so far. [s]
        calibration: Path of the calibration file that the server was started with; empty for none.
    """

    def __init__(self, max_run_s: float = MAX_RUN_S, *, calibration: str = "") -> None:
        self._max_run_s, self._calibration = max_run_s, calibration
        self._runs: OrderedDict[str, SearchRun] = OrderedDict()
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, request: dict[str, Any]) -> SearchRun:
        """Add a search to the queue.

        Raises:
            QueueFullError: the queue is full.
        """
        if sum(run.state == "waiting" for run in self._runs.values()) >= MAX_WAITING:
            raise QueueFullError(
                f"{MAX_WAITING} searches are waiting, the limit of the queue; cancel one or retry later"
            )
        run = SearchRun({**request, "calibration": self._calibration})
        self._runs[run.id] = run
        over = [key for key, other in self._runs.items() if other.is_over]
        for key in over[: max(0, len(self._runs) - MAX_KEPT)]:
            del self._runs[key]
        task = asyncio.create_task(self._work(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return run

    def find(self, run_id: str) -> SearchRun | None:
        """Search by identifier; None if unknown or no longer kept."""
        return self._runs.get(run_id)

    def cancel(self, run: SearchRun) -> None:
        """Stop a search: a waiting one never starts, a running one returns its best so far."""
        if run.is_over:
            return
        run.is_cancelled = True
        if run.process is None:
            run.state = "cancelled"
        else:
            _interrupt(run.process)

    async def close(self) -> None:
        """Kill all running searches."""
        for run in self._runs.values():
            run.is_cancelled = True
            if run.process is not None and run.process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    run.process.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _work(self, run: SearchRun) -> None:
        async with self._turn:
            if run.is_cancelled:
                return
            run.state = "running"
            run.process = await asyncio.create_subprocess_exec(
                *python_command("shapewright.app.explorer.search_worker"),
                env=child_environment(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=_MAX_LINE_BYTES,
            )
            try:
                await self._listen(run, run.process)
            finally:
                if run.process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        run.process.kill()
                await run.process.wait()
                _conclude(run)

    async def _listen(self, run: SearchRun, process: asyncio.subprocess.Process) -> None:
        """Read the worker's output until it exits, is cancelled or reaches the time limit."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(run.request).encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        # The time limit starts with the worker's first line, which it prints once its imports are done.
        stop_s = time.monotonic() + _MAX_START_S
        is_interrupted = has_started = False
        while True:
            if not is_interrupted and run.is_cancelled:
                stop_s, is_interrupted = time.monotonic() + _GRACE_S, True
            try:
                line = await asyncio.wait_for(process.stdout.readline(), max(0.0, min(stop_s - time.monotonic(), 0.5)))
            except TimeoutError:
                if time.monotonic() < stop_s:
                    continue
                if is_interrupted:
                    return
                # Time limit reached: the worker gets a grace period to return its best so far.
                run.error = f"stopped after {self._max_run_s:g} s; vary fewer fields, or run 'shapewright search'"
                _interrupt(process)
                stop_s, is_interrupted = time.monotonic() + _GRACE_S, True
                continue
            if not line:
                return
            if not has_started and not is_interrupted:
                stop_s, has_started = time.monotonic() + self._max_run_s, True
            message = json.loads(line)
            if "result" in message:
                run.result, run.num_shapes = message["result"], run.num_shapes or message["of"]
            elif "error" in message:
                run.error, run.error_kind = run.error or message["error"], message["kind"]
            else:
                run.done, run.num_shapes = message["done"], message["of"]


def _conclude(run: SearchRun) -> None:
    """Set the final state of a search."""
    run.process, run.request = None, {}
    if run.is_cancelled:
        run.state, run.error, run.error_kind = "cancelled", "", ""
    elif run.result is not None:
        run.state = "done"
        run.done = run.num_shapes
    else:
        run.state = "failed"
        run.error = run.error or "the search ended without a result; run 'shapewright search' to see why"


def _interrupt(process: asyncio.subprocess.Process) -> None:
    """Make the worker return its best so far."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
