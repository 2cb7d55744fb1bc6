"""HTTP connections with limits: idle ones are closed, and there are never more than the process has files for."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import Mapping
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_LIMIT_S = 20.0
"""Time in which a client must send a whole request, or its next one. [s]"""
# Files that the process needs for other purposes: its log, pipes to searches, stores.
_OTHER_FILES = 48
_MOST_CONNECTIONS, _LEAST_CONNECTIONS = 1024, 8
_LOG_EVERY_S = 10.0

_LOG = logging.getLogger("shapewright.app.explorer")


def max_connections() -> int:
    """Number of connections that the process has files for, after raising its own limit as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_CONNECTIONS + _OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if allowed > soft:
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
            soft = allowed
    files = wanted if soft == resource.RLIM_INFINITY else soft
    return max(_LEAST_CONNECTIONS, min(_MOST_CONNECTIONS, files - _OTHER_FILES))


class LimitedProtocol(H11Protocol):
    """An HTTP/1.1 connection of a server with a limited number of them.

    A connection is idle until a whole request has arrived, and again after its answer. Beyond the limit a new
    connection closes the one that has been idle for longest, or itself where none is idle.
    """

    limit_s = IDLE_LIMIT_S
    most = _MOST_CONNECTIONS
    idle: dict[LimitedProtocol, asyncio.TimerHandle] = {}  # noqa: RUF012 (shared, in the order of becoming idle)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, if there is room."""
        super().connection_made(transport)
        if len(self.connections) > self.most:
            oldest = next(iter(self.idle), self)
            oldest.close_now()
            if oldest is self:
                return
        self._rest()

    def data_received(self, data: bytes) -> None:
        """Read data; a request that is complete ends the idle time."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete and not self.cycle.more_body:
            self._wake()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        if self.cycle is None or self.cycle.response_complete:
            self._rest()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._wake()
        super().connection_lost(exc)

    def close_now(self) -> None:
        """Close the connection without an answer."""
        self._wake()
        self.transport.abort()

    def _rest(self) -> None:
        self._wake()
        if not self.transport.is_closing():
            self.idle[self] = self.loop.call_later(self.limit_s, self.close_now)

    def _wake(self) -> None:
        timer = self.idle.pop(self, None)
        if timer is not None:
            timer.cancel()


class QuietLog:
    """Handler of an event loop's errors that logs one line in ten seconds.

    A socket that cannot be accepted for lack of files is reported for every try, hundreds of times a second.
    """

    def __init__(self) -> None:
        self._next_s, self._left_out = 0.0, 0

    def __call__(self, _loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Log an error, or count it."""
        if time.monotonic() < self._next_s:
            self._left_out += 1
            return
        self._next_s = time.monotonic() + _LOG_EVERY_S
        more = f" ({self._left_out} more like it)" if self._left_out else ""
        self._left_out = 0
        _LOG.error("%s: %s%s", context.get("message"), context.get("exception"), more)
