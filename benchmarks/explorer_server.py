"""A server of the explorer for a benchmark, and the heading of its record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


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


def heading() -> dict[str, Any]:
    """What every record says: when, how, and on how busy a machine."""
    return {
        "schema_version": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(sys.argv),
        "load_average": os.getloadavg()[0],
    }


def show_record(record: dict[str, Any], output: Path | None) -> None:
    """Print a record, and write it where a file is given."""
    text = json.dumps(record, indent=2)
    print(text)
    if output:
        output.write_text(text + "\n", encoding="utf-8")
