"""Files that users name: only regular ones are opened, since pipes and files of the kernel can block for ever.

Written ones are replaced once they are complete. Their TOML is parsed in a time that does not grow with the square of
its size.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

_MOST_DOTS = 200


def open_file(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading bytes.

    Raises:
        OSError: the file cannot be opened, or is a folder, pipe, socket or device.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a zero byte, or half of a surrogate pair
        raise OSError(errno.EINVAL, "not a path") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return open(descriptor, "rb")  # noqa: PTH123 (the caller closes it)


def read_start(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Read a regular file up to a number of bytes; empty where a file of the kernel has nothing to give yet.

    Raises:
        OSError: as of open_file.
    """
    with open_file(path) as file:
        return file.read(most_bytes) or b""


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: it is malformed, nested too deeply, or has a line of hundreds of dots. Python takes time and memory
            with the square of the parts of a dotted key, minutes for one of 100 kB.
    """
    import tomllib

    if any(line.count(".") > _MOST_DOTS for line in text.split("\n")):
        raise ValueError(f"a line has more than {_MOST_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def draft_of(target: Path) -> Path:
    """Return the temporary file of this process that replaces a target once it is complete."""
    return target.parent / f".{target.name}.{os.getpid()}.tmp"


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary file beside the target, to be made anew, which replaces the target once it is complete.

    What has its name before is removed: a link that someone else put there is not followed.
    """
    draft = draft_of(target)
    draft.unlink(missing_ok=True)
    try:
        yield draft
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
