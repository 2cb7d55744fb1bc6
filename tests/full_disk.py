"""A disk that is full after some bytes of a file."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def full_after(num_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size; writing more is an OSError, as on a full disk.

    Modules that are imported meanwhile are not cached: Python would keep the part of a cache file that fits.
    """
    before, was_cacheless = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = was_cacheless
