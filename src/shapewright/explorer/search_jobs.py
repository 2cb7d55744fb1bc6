"""Searches that run beside the server: one at a time, a short queue, a time limit, results that are kept a while."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import signal
import sys
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Literal

MOST_WAITING = 8
MOST_KEPT = 32
LONGEST_RUN_S = 120.0
_LONGEST_START_S = 30.0
_GRACE_S = 20.0  # between being asked to stop and being stopped
_LONGEST_LINE_BYTES = 16 * 2**20  # a result with its Pareto front has some hundred kB

State = Literal["waiting", "running", "done", "failed", "cancelled"]


class QueueFullError(RuntimeError):
    """More searches wait than the queue takes."""


@dataclass
class SearchRun:
    """One search.

    Attributes:
        id: Its name, which nobody can guess.
        request: What it was asked.
        state: How far it is.
        done: Shapes looked at.
        num_shapes: Shapes to look at; 0 until it is known.
        result: What the search command prints as JSON, with its text; of a cancelled search the best so far.
        error: Why it failed, in one line.
        error_kind: Name of the error's class.
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
        """Whether nothing will change any more."""
        return self.state in ("done", "failed", "cancelled")

    def to_json(self) -> dict[str, Any]:
        """State, progress and what came out."""
        return {
            "schema_version": 1,
            "id": self.id,
            "state": self.state,
            "done": self.done,
            "num_shapes": self.num_shapes,
            "progress_fraction": self.done / self.num_shapes if self.num_shapes else 0.0,
            "result": self.result,
            "error": self.error,
            "error_kind": self.error_kind,
        }


class SearchQueue:
    """Runs searches one after the other, each in a process of its own.

    Args:
        longest_run_s: Time after which a search is stopped with its best so far. [s]
        calibration: Path of the calibration file that the server was started with; empty for none.
    """

    def __init__(self, longest_run_s: float = LONGEST_RUN_S, *, calibration: str = "") -> None:
        self._longest_run_s, self._calibration = longest_run_s, calibration
        self._runs: OrderedDict[str, SearchRun] = OrderedDict()
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, request: dict[str, Any]) -> SearchRun:
        """Put a search into the queue.

        Raises:
            QueueFullError: enough are waiting already.
        """
        if sum(run.state == "waiting" for run in self._runs.values()) >= MOST_WAITING:
            raise QueueFullError(
                f"{MOST_WAITING} searches wait already, as many as the queue takes; cancel one, or ask again later"
            )
        run = SearchRun({**request, "calibration": self._calibration})
        self._runs[run.id] = run
        over = [key for key, other in self._runs.items() if other.is_over]
        for key in over[: max(0, len(self._runs) - MOST_KEPT)]:
            del self._runs[key]
        task = asyncio.create_task(self._work(run))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return run

    def find(self, run_id: str) -> SearchRun | None:
        """A search by its name; None where there is none, or none any more."""
        return self._runs.get(run_id)

    def cancel(self, run: SearchRun) -> None:
        """Stop a search: one that waits never starts, one that runs gives its best so far."""
        if run.is_over:
            return
        run.is_cancelled = True
        if run.process is None:
            run.state = "cancelled"
        else:
            _interrupt(run.process)

    async def close(self) -> None:
        """End everything that runs."""
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
                sys.executable,
                "-m",
                "shapewright.explorer.search_worker",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=_LONGEST_LINE_BYTES,
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
        """Read the worker's lines until it ends, is told to, or has had its time."""
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(run.request).encode() + b"\n")
        with contextlib.suppress(ConnectionError):
            await process.stdin.drain()
        # The clock starts with the worker's first line, which says that it has loaded what it needs.
        stop_s = time.monotonic() + _LONGEST_START_S
        is_told = is_begun = False
        while True:
            if not is_told and run.is_cancelled:
                stop_s, is_told = time.monotonic() + _GRACE_S, True
            try:
                line = await asyncio.wait_for(process.stdout.readline(), max(0.0, min(stop_s - time.monotonic(), 0.5)))
            except TimeoutError:
                if time.monotonic() < stop_s:
                    continue
                if is_told:
                    return
                # Out of time: the best so far, and a short while to hand it over.
                run.error = f"stopped after {self._longest_run_s:g} s; vary fewer fields, or run 'shapewright search'"
                _interrupt(process)
                stop_s, is_told = time.monotonic() + _GRACE_S, True
                continue
            if not line:
                return
            if not is_begun and not is_told:
                stop_s, is_begun = time.monotonic() + self._longest_run_s, True
            message = json.loads(line)
            if "result" in message:
                run.result = message["result"]
            elif "error" in message:
                run.error, run.error_kind = run.error or message["error"], message["kind"]
            else:
                run.done, run.num_shapes = message["done"], message["of"]


def _conclude(run: SearchRun) -> None:
    """Name what a search ended as."""
    run.process, run.request = None, {}
    if run.is_cancelled:
        run.state, run.error, run.error_kind = "cancelled", "", ""
    elif run.result is not None:
        run.state = "done"
        run.done = run.num_shapes = run.num_shapes or run.result["space"]["size"]
    else:
        run.state = "failed"
        run.error = run.error or "the search ended without a result; run 'shapewright search' to see why"


def _interrupt(process: asyncio.subprocess.Process) -> None:
    """Ask for the best so far."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
