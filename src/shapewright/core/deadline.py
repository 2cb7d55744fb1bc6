"""Time limits of work that was requested over a network: long loops check them, since a thread cannot be stopped."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from shapewright.core.errors import ShapewrightError


class TimeLimitError(ShapewrightError):
    """The work took longer than its time limit, or was cancelled."""

    code = "time-limit"


class Deadline:
    """A time limit that can also be cut short from another thread.

    Args:
        limit_s: Time from the start of the work. [s]
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.is_cancelled = False
        self._stop_s = float("inf")

    def cancel(self) -> None:
        """Make the next check fail."""
        self.is_cancelled = True

    def check(self) -> None:
        """Raise if the time is over.

        Raises:
            TimeLimitError: the work was cancelled, or takes longer than allowed.
        """
        if self.is_cancelled:
            raise TimeLimitError("the request was cancelled")
        if time.monotonic() > self._stop_s:
            raise TimeLimitError(
                f"the answer takes longer than {self.limit_s:g} s, the limit of this server; request fewer layers or "
                "values, or use the command line"
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start the time, and make it the limit of the work in this context."""
        self._stop_s = time.monotonic() + self.limit_s
        token = _CURRENT.set(self)
        try:
            self.check()
            yield
        finally:
            _CURRENT.reset(token)


_CURRENT: ContextVar[Deadline | None] = ContextVar("deadline", default=None)


def check_deadline() -> None:
    """Raise if the work of this context has a time limit that is over; called by every step of long work.

    Raises:
        TimeLimitError: the time is over, or the work was cancelled.
    """
    current = _CURRENT.get()
    if current is not None:
        current.check()
