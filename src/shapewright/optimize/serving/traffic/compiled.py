"""The loop of traffic.stream, compiled by Numba (the ``fast`` extra).

It is imported only for many requests: importing Numba and loading the loop takes as long as simulating tens of
thousands of requests in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.extending import register_jitable

from shapewright.optimize.serving.traffic import stream


def _compile() -> Callable[..., Any]:
    """Return run_stream, compiled on its first call; the result is cached on disk if a folder is writable."""
    for name in ("pass_s", "replica_pass_s", "append_item", "remove_item", "release_prefix", "evict_blocks"):
        register_jitable(getattr(stream, name))
    try:
        found: Callable[..., Any] = njit(cache=True, nogil=True)(stream.run_stream)
    except RuntimeError:  # without a writable folder, Numba raises on decoration
        found = njit(nogil=True)(stream.run_stream)
    return found


run_stream = _compile()
