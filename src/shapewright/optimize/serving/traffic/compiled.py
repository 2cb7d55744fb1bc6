"""The loop of traffic.stream, compiled by Numba (the ``fast`` extra).

Imported only for many requests: importing Numba and loading the loop takes as long as some ten thousand requests do
without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit
from numba.extending import register_jitable

from shapewright.optimize.serving.traffic import stream


def _compile() -> Callable[..., Any]:
    """Compile on the first call, and cache the result on disk where a folder is writable."""
    for name in ("pass_s", "replica_pass_s", "append_item", "remove_item", "release_prefix", "evict_blocks"):
        register_jitable(getattr(stream, name))
    try:
        found: Callable[..., Any] = njit(cache=True, nogil=True)(stream.run_stream)
    except RuntimeError:  # no writable folder: Numba raises when decorating
        found = njit(nogil=True)(stream.run_stream)
    return found


run_stream = _compile()
