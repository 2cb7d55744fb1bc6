"""Start an explorer server for a benchmark."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def running_explorer() -> Iterator[tuple[str, int]]:
    """Address and process id of a server on a free port of this machine."""
    server = subprocess.Popen(
        [sys.executable, "-m", "shapewright", "serve", "--port", "0", "--no-browser"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        yield server.stdout.readline().split()[-1], server.pid
    finally:
        server.terminate()
        server.wait(timeout=20)
