"""The order of measuring: each sweep coarse first, sweeps in turns, rows shuffled in blocks.

So whatever a small budget reaches is spread over all sweeps, and drift does not look like shape.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shapewright.store.record import Case

# Rows are shuffled within blocks of so many, so that drift of clocks and temperature does not look like shape while the
# coarse rows still come first.
_BLOCK_ROWS = 32


def coarse_first(count: int) -> list[int]:
    """Order in which a sweep is walked: both ends, the middle, then ever finer gaps.

    >>> coarse_first(5)
    [0, 4, 2, 1, 3]
    """
    order = [0, count - 1] if count > 1 else list(range(count))
    gaps = [(0, count - 1)]
    while gaps:
        narrower = []
        for low, high in gaps:
            middle = (low + high) // 2
            if low < middle < high:
                order.append(middle)
                narrower += [(low, middle), (middle, high)]
        gaps = narrower
    return order


def walked_coarse_first(sweeps: Sequence[Sequence[Case]]) -> list[list[Case]]:
    """Each sweep in the order in which it is walked."""
    return [[sweep[index] for index in coarse_first(len(sweep))] for sweep in sweeps]


def take_turns(sweeps: Sequence[Sequence[Case]]) -> Iterator[Case]:
    """One case of each sweep, then the next of each."""
    for turn in zip_longest(*sweeps):
        yield from (case for case in turn if case is not None)


def drop_repeated(cases: Sequence[Case]) -> list[Case]:
    """Keep the first of equal cases, whatever they are called."""
    found: dict[str, Case] = {}
    for case in cases:
        found.setdefault(case.key("", ""), case)
    return list(found.values())


def interleave(cases: Sequence[Case], seed: int) -> list[Case]:
    """Shuffle within blocks, the same way for the same seed."""
    shuffled = list(cases)
    generator = random.Random(seed)
    for start in range(0, len(shuffled), _BLOCK_ROWS):
        block = shuffled[start : start + _BLOCK_ROWS]
        generator.shuffle(block)
        shuffled[start : start + _BLOCK_ROWS] = block
    return shuffled
