"""Suites by name, their default element formats, and the order in which their cases are measured.

A suite is a list of sweeps. Each sweep is measured coarse steps first, the sweeps alternate, and rows are shuffled in
blocks: a small budget covers all sweeps, and drift of clocks or temperature does not look like an effect of the shape.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Protocol

from shapewright.core.errors import BenchError, close_names
from shapewright.core.records import dataclass
from shapewright.measure.bench.suites.gemm import (
    alignment_suite,
    batched_suite,
    experts_suite,
    random_suite,
    tiles_suite,
)
from shapewright.measure.bench.suites.kernels import (
    attention_suite,
    collective_sweeps,
    paper_suite,
    pointwise_suite,
    smoke_suite,
)
from shapewright.measure.bench.suites.layers import compiled_suite, decode_suite, layer_suite, memory_suite, model_suite
from shapewright.measure.store.record import Case

MAMF, COLLECTIVES, CALIBRATION = "mamf", "collectives", "calibration"

CALIBRATION_SUITES = (CALIBRATION, "pointwise", "attention")
"""Suites that a calibration needs, which share a budget."""

# Blocks are long enough to mix sweeps and short enough that coarse rows still come first.
_SHUFFLE_BLOCK_ROWS = 32


class MakeSweeps(Protocol):
    """Builds the sweeps of a suite for one element format."""

    def __call__(self, dtype: str, *, small: bool) -> list[list[Case]]:
        """Build the sweeps; see make_suite for the arguments."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A named set of cases.

    Attributes:
        make_sweeps: Builds the sweeps; None where the cases depend on earlier measurements or on the number of ranks.
        default_dtypes: Element formats measured by default on a GPU; None for every format of the device.
        needs_ranks: Whether each case runs on several communicating processes.
        searches_best_rate: Whether the suite is the search for the best matmul rate.
        is_adaptive: Whether each round of cases depends on fits to the rows before it.
    """

    make_sweeps: MakeSweeps | None = None
    default_dtypes: tuple[str, ...] | None = ("bf16",)
    needs_ranks: bool = False
    searches_best_rate: bool = False
    is_adaptive: bool = False


SUITES: Mapping[str, Suite] = {
    "smoke": Suite(make_sweeps=smoke_suite),
    "paper": Suite(make_sweeps=paper_suite, default_dtypes=("bf16", "fp16")),
    "alignment": Suite(make_sweeps=alignment_suite, default_dtypes=None),
    "tiles": Suite(make_sweeps=tiles_suite),
    "attention": Suite(make_sweeps=attention_suite),
    "pointwise": Suite(make_sweeps=pointwise_suite),
    "random": Suite(make_sweeps=random_suite, default_dtypes=("bf16", "fp16")),
    "batched": Suite(make_sweeps=batched_suite),
    "experts": Suite(make_sweeps=experts_suite),
    "layer": Suite(make_sweeps=layer_suite),
    "compiled": Suite(make_sweeps=compiled_suite),
    "model": Suite(make_sweeps=model_suite),
    "decode": Suite(make_sweeps=decode_suite),
    "memory": Suite(make_sweeps=memory_suite),
    MAMF: Suite(searches_best_rate=True),
    COLLECTIVES: Suite(needs_ranks=True),
    CALIBRATION: Suite(is_adaptive=True),
}


def get_suite(name: str) -> Suite:
    """Look up a suite by its name.

    Raises:
        BenchError: the suite is unknown.
    """
    if name not in SUITES:
        hint = close_names(name, SUITES) or "choose one of " + ", ".join(SUITES)
        raise BenchError(f"unknown suite {name!r}; {hint}")
    return SUITES[name]


def choose_dtypes(preferred: tuple[str, ...] | None, device_dtypes: Sequence[str], *, cpu: bool) -> tuple[str, ...]:
    """Element formats to measure by default: the preferred ones that the device supports.

    Args:
        preferred: Formats measured on a GPU; None for every format of the device.
        cpu: Whether the device is a CPU, which measures fp32.
    """
    if cpu:
        return ("fp32",)
    if preferred is None:
        return tuple(device_dtypes)
    return tuple(dtype for dtype in preferred if dtype in device_dtypes) or tuple(device_dtypes[:1])


def make_suite(name: str, dtypes: Sequence[str], *, small: bool, seed: int) -> list[Case]:
    """List the cases of a suite in the order of measurement.

    Args:
        name: A key of SUITES, other than MAMF, COLLECTIVES and CALIBRATION.
        small: Whether to scale the sweeps down to shapes that a few CPU cores can measure.
        seed: Seed of the shuffle within blocks.

    Raises:
        BenchError: the suite is unknown, or has no fixed list of cases.
    """
    make_sweeps = get_suite(name).make_sweeps
    if make_sweeps is None:
        raise BenchError(f"the suite {name} has no fixed list of cases; choose another one")
    sweeps = [sweep for dtype in dtypes for sweep in make_sweeps(dtype, small=small)]
    return _shuffle_in_blocks(_deduplicate(_alternate(sweeps)), seed)


def collective_cases(num_ranks: int, dtypes: Sequence[str], *, small: bool, seed: int) -> list[Case]:
    """List the cases of the collectives suite in the order of measurement.

    Args:
        small: Whether to limit messages to what a CPU can measure.
        seed: Seed of the shuffle within blocks.
    """
    sweeps = collective_sweeps(dtypes, num_ranks=num_ranks, small=small)
    return _shuffle_in_blocks(list(_alternate(sweeps)), seed)


def coarse_first(count: int) -> list[int]:
    """Order in which the points of a sweep are measured: both ends, the middle, then ever finer gaps.

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


def _alternate(sweeps: Sequence[Sequence[Case]]) -> Iterator[Case]:
    """One case of each sweep, then the next of each, every sweep coarse steps first."""
    ordered = [[sweep[index] for index in coarse_first(len(sweep))] for sweep in sweeps]
    for turn in zip_longest(*ordered):
        yield from (case for case in turn if case is not None)


def _deduplicate(cases: Iterator[Case]) -> list[Case]:
    """Keep the first of equal cases, even if their names differ."""
    found: dict[str, Case] = {}
    for case in cases:
        found.setdefault(case.key("", ""), case)
    return list(found.values())


def _shuffle_in_blocks(cases: Sequence[Case], seed: int) -> list[Case]:
    """Shuffle within blocks of rows, in the same way for the same seed."""
    shuffled = list(cases)
    generator = random.Random(seed)
    for start in range(0, len(shuffled), _SHUFFLE_BLOCK_ROWS):
        block = shuffled[start : start + _SHUFFLE_BLOCK_ROWS]
        generator.shuffle(block)
        shuffled[start : start + _SHUFFLE_BLOCK_ROWS] = block
    return shuffled
