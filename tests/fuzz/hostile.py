"""Hostile inputs by kind, and what using one must never do."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType

from fuzz.jobs import make_job, make_requests, make_requests_json, use_job, use_requests
from fuzz.measurements import make_csv, make_kernels, make_parquet, make_store, use_kernels, use_store, use_table
from fuzz.options import make_line, use_line
from fuzz.predictions import (
    make_base,
    make_calibration,
    make_config,
    make_device,
    use_base,
    use_calibration,
    use_config,
    use_device,
)
from shapewright.core.errors import ShapewrightError

# A use that takes this many times its limit is interrupted.
_MOST_LIMITS = 3


@dataclass(frozen=True)
class Attack:
    """One kind of hostile file.

    Attributes:
        suffix: End of the file's name.
        make: Returns the content of a file.
        use: Reads a file and uses what it holds; an AssertionError means that an answer is wrong.
        limit_s: Most processor time that a use may take. [s]
    """

    suffix: str
    make: Callable[[Random], bytes]
    use: Callable[[Path, Random], None]
    limit_s: float = 2.0


class Hang(BaseException):
    """A use took far longer than its limit; not an Exception, which the package might catch."""


ATTACKS: dict[str, Attack] = {
    "configs": Attack(".json", make_config, use_config),
    "bases": Attack(".json", make_base, use_base),
    "calibration": Attack(".json", make_calibration, use_calibration),
    "devices": Attack(".toml", make_device, use_device),
    "stores": Attack(".sqlite", make_store, use_store),
    "parquet": Attack(".parquet", make_parquet, use_table),
    "csv": Attack(".csv", make_csv, use_table),
    "kernels": Attack(".json", make_kernels, use_kernels),
    "requests": Attack(".csv", make_requests, use_requests),
    "requests-json": Attack(".jsonl", make_requests_json, use_requests),
    "jobs": Attack(".txt", make_job, use_job),
    "lines": Attack(".json", make_line, use_line, limit_s=10.0),
}


@contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Interrupt what takes more processor time. [s]"""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise Hang(f"more than {limit_s:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def outcome(attack: Attack, path: Path, seed: int) -> str:
    """Use a file; return ``used`` or ``refused``.

    Raises:
        AssertionError: an answer is wrong, or a message is not one printable line.
        Hang: it does not end.
        Exception: anything but an error of the package.
    """
    try:
        with limited(_MOST_LIMITS * attack.limit_s):
            attack.use(path, Random(seed))
    except ShapewrightError as error:
        message = str(error)
        assert message, "an empty message"
        assert message.isprintable(), f"message {message!r}"
        assert len(message) < 2000, f"message of {len(message)} characters"
        return "refused"
    return "used"
