"""Run independent blocks of compiled array work, which holds no lock of Python's, over the processor's cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

# With fewer blocks a thread is not worth starting.
_FEWEST_BLOCKS_PER_THREAD = 8


def count_threads() -> int:
    """Threads that may be used: OMP_NUM_THREADS, as numeric libraries read it, otherwise the cores of this process."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_over_threads(work: Callable[[int], None], blocks: Sequence[int], *, num_threads: int) -> None:
    """Call ``work`` once for each block, in no order; an error of one is raised when all threads have stopped.

    Args:
        work: Does one block, and touches nothing of another.
        blocks: What it is called with.
        num_threads: Most threads that may work; fewer do where blocks are few.
    """
    num_threads = min(num_threads, len(blocks) // _FEWEST_BLOCKS_PER_THREAD)
    if num_threads < 2:
        for block in blocks:
            work(block)
        return

    def run_share(first: int) -> None:
        for block in blocks[first::num_threads]:
            work(block)

    # Few commands come here, and every one that prices would wait 4 ms for it.
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(run_share, range(num_threads)))
