"""Lanes of requests: each limits how many run and wait and how long one takes, and drops requests of lost clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response

from shapewright.app.explorer.problems import problem
from shapewright.app.explorer.search_jobs import QueueFullError
from shapewright.core.child_process import child_environment, python_command
from shapewright.core.deadline import Deadline, TimeLimitError

Answer = TypeVar("Answer")
_Reply = tuple[dict[str, Any], bytes]

# Answers are CPU-bound: more threads would only compete for cores.
NUM_FAST_THREADS = 2
FAST_LIMIT_S, SLOW_LIMIT_S = 10.0, 30.0
MAX_WAITING = 128  # a page sends about ten at once
MAX_FAST_WAITING = 512
_LOOK_EVERY_S = 0.25
_GRACE_S = 1.0  # between the interrupt of a worker and its kill
_MAX_START_S = 90.0  # a busy machine imports slowly

_LOG = logging.getLogger("shapewright.app.explorer")


class Lane:
    """Runs requests, a limited number at the same time.

    Args:
        num_running: Requests that run at the same time.
        limit_s: Time limit of one, from when it starts to run. [s]
        max_waiting: Requests that can wait.
    """

    def __init__(self, num_running: int, limit_s: float, max_waiting: int) -> None:
        self.limit_s, self.max_waiting = limit_s, max_waiting
        self._limiter = anyio.CapacityLimiter(num_running)
        self._running: weakref.WeakSet[Deadline] = weakref.WeakSet()

    async def run(self, request: Request, compute: Callable[[], Answer]) -> Answer:
        """Run a request in a thread, unless its client goes away.

        Raises:
            QueueFullError: too many are waiting.
            TimeLimitError: it takes too long, or its client is gone.
        """

        async def start(deadline: Deadline) -> Answer:
            def work() -> Answer:
                with deadline.running():
                    return compute()

            return await anyio.to_thread.run_sync(work, limiter=self._limiter)

        return await self._attend(request, start)

    async def _attend(self, request: Request, start: Callable[[Deadline], Awaitable[Answer]]) -> Answer:
        """Wait for the answer to a request, and cancel it when the client goes away."""
        if self._limiter.statistics().tasks_waiting >= self.max_waiting:
            raise QueueFullError(f"{self.max_waiting} requests are waiting already; retry in a moment")
        deadline = Deadline(self.limit_s)
        self._running.add(deadline)

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
                answers.append(await start(deadline))
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


def _log_failure(starting: asyncio.Task[None]) -> None:
    """Log why a worker process did not start; a request that waits for it fails with the same error."""
    if not starting.cancelled() and starting.exception() is not None:
        _LOG.warning("no worker process: %r", starting.exception())


class WorkerLane(Lane):
    """Runs requests one at a time in a process of lower priority, which is kept between them.

    A process cannot hold up predictions as a thread of the same interpreter does, and it can be killed.

    Args:
        limit_s: Time limit of a request, from when it starts to run. [s]
        max_waiting: Requests that can wait.
        calibration: Path of the calibration file that the server was started with; empty for none.
        store: Path of its store of measurements; empty for none.
    """

    def __init__(self, limit_s: float, max_waiting: int, *, calibration: str = "", store: str = "") -> None:
        super().__init__(1, limit_s, max_waiting)
        self._files = json.dumps({"calibration": calibration, "store": store}).encode() + b"\n"
        self._process: asyncio.subprocess.Process | None = None
        self._starting: asyncio.Task[None] | None = None
        self._is_closed = False

    async def answer(self, request: Request, name: str, media_type: str) -> Response:
        """Answer a request whose body is valid, unless its client goes away.

        Args:
            request: The request.
            name: Name in SLOW_REQUESTS.
            media_type: Content type of the answer.

        Raises:
            QueueFullError: too many are waiting.
            TimeLimitError: it takes too long, or its client is gone.
        """
        body = await request.body()

        async def start(_deadline: Deadline) -> _Reply:
            async with self._limiter:
                return await self._request(name, body)

        head, content = await self._attend(request, start)
        if "length" in head:
            return Response(content, media_type=media_type)
        if head["status"] == 500:
            _LOG.error("%s failed in the worker\n%s", name, head["detail"])
            head["detail"] = "internal error of shapewright; see the traceback in the server's output"
        return problem(**head)

    def warm_up(self) -> None:
        """Start the process in the background, so that the first request does not wait for its imports."""
        if not self._is_closed and (self._starting is None or self._starting.done()):
            self._starting = asyncio.create_task(self._start())
            self._starting.add_done_callback(_log_failure)

    async def close(self) -> None:
        """Kill the process."""
        self._is_closed = True
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait({self._starting})
        await self._kill()

    def cancel_all(self) -> None:
        """End every request, when the server stops."""
        super().cancel_all()
        self._is_closed = True
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    async def _start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *python_command("shapewright.app.explorer.answer_worker"),
            env=child_environment(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal reaches the server alone, which ends the process
        )
        assert self._process.stdin is not None
        self._process.stdin.write(self._files)
        try:
            async with asyncio.timeout(_MAX_START_S):
                await _read_reply(self._process)
        except TimeoutError:
            await self._kill()  # so that the next request starts another
            raise TimeLimitError(f"the worker process did not start within {_MAX_START_S:g} s") from None

    async def _request(self, name: str, body: bytes) -> _Reply:
        """Send one request to the process and read its reply; a process that does not reply is killed."""
        if self._process is None or self._process.returncode is not None:
            self.warm_up()
        assert self._starting is not None
        await asyncio.shield(self._starting)
        process = self._process
        assert process is not None
        assert process.stdin is not None
        head = {"name": name, "limit_s": self.limit_s, "length": len(body)}
        process.stdin.write(json.dumps(head).encode() + b"\n" + body)
        reading = asyncio.create_task(_read_reply(process))
        try:
            async with asyncio.timeout(self.limit_s + _GRACE_S):  # the process itself ends the request before
                return await asyncio.shield(reading)
        except TimeoutError:
            raise TimeLimitError(f"the answer takes longer than {self.limit_s:g} s, the limit of this server") from None
        except RuntimeError:
            if self._is_closed:
                raise TimeLimitError("the server stops") from None
            raise
        finally:
            if not reading.done():
                with anyio.CancelScope(shield=True):
                    await self._interrupt(process, reading)

    async def _interrupt(self, process: asyncio.subprocess.Process, reading: asyncio.Task[_Reply]) -> None:
        """End the current request of the process; kill and replace a process that does not end it."""
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await asyncio.wait({reading}, timeout=_GRACE_S)
        if not reading.done():
            await self._kill()
            self.warm_up()
        await asyncio.gather(reading, return_exceptions=True)

    async def _kill(self) -> None:
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _read_reply(process: asyncio.subprocess.Process) -> _Reply:
    """Head and content of a worker's next reply.

    Raises:
        RuntimeError: the process ended.
    """
    assert process.stdout is not None
    try:
        head = json.loads(await process.stdout.readuntil(b"\n"))
        return head, await process.stdout.readexactly(head.get("length", 0))
    except asyncio.IncompleteReadError:
        raise RuntimeError(f"the worker process ended with code {await process.wait()}") from None
