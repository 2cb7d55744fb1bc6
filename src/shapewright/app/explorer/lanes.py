"""Lanes of requests: each limits how many run and wait and how long one takes, and drops requests of lost clients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request

from shapewright.app.explorer.search_jobs import QueueFullError
from shapewright.core.deadline import Deadline, TimeLimitError

Answer = TypeVar("Answer")

# Answers are CPU-bound: more threads would only compete for cores.
NUM_FAST_THREADS = 2
FAST_LIMIT_S, SLOW_LIMIT_S = 10.0, 30.0
MAX_WAITING = 128  # a page sends about ten at once
_MAX_FAST_WAITING = 512
_LOOK_EVERY_S = 0.25


class Lane:
    """Runs requests in threads.

    Args:
        num_threads: Requests that run at the same time.
        limit_s: Time limit of one, from when it starts to run. [s]
        max_waiting: Requests that can wait.
    """

    def __init__(self, num_threads: int, limit_s: float, max_waiting: int) -> None:
        self.limit_s, self.max_waiting = limit_s, max_waiting
        self._limiter = anyio.CapacityLimiter(num_threads)
        self._running: weakref.WeakSet[Deadline] = weakref.WeakSet()

    async def run(self, request: Request, compute: Callable[[], Answer]) -> Answer:
        """Run a request, unless its client goes away.

        Raises:
            QueueFullError: too many are waiting.
            TimeLimitError: it takes too long, or its client is gone.
        """
        if self._limiter.statistics().tasks_waiting >= self.max_waiting:
            raise QueueFullError(f"{self.max_waiting} requests are waiting already; retry in a moment")
        deadline = Deadline(self.limit_s)
        self._running.add(deadline)

        def work() -> Answer:
            with deadline.running():
                return compute()

        async def watch(scope: anyio.CancelScope) -> None:
            while not await request.is_disconnected():
                await anyio.sleep(_LOOK_EVERY_S)
            deadline.cancel()  # a thread that runs ends at its next check, one that waits never starts
            scope.cancel()

        answers: list[Answer] = []
        errors: list[Exception] = []
        async with anyio.create_task_group() as group:
            group.start_soon(watch, group.cancel_scope)
            try:
                answers.append(await anyio.to_thread.run_sync(work, limiter=self._limiter))
            except Exception as error:
                errors.append(error)  # raised below: a task group would wrap it
            group.cancel_scope.cancel()
        if errors:
            raise errors[0]
        if not answers:
            raise TimeLimitError("the client closed the connection")
        return answers[0]

    def cancel_all(self) -> None:
        """Make every request end at its next check, when the server stops."""
        for deadline in list(self._running):
            deadline.cancel()


def make_lanes() -> tuple[Lane, Lane]:
    """Lane of single predictions, and lane of answers that take many."""
    return Lane(NUM_FAST_THREADS, FAST_LIMIT_S, _MAX_FAST_WAITING), Lane(1, SLOW_LIMIT_S, MAX_WAITING)
