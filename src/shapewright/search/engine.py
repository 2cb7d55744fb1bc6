"""Go through spaces: count parameters everywhere, price what has the right size, keep the best.

Spaces are cut into jobs that need nothing of each other. What the jobs find is put together in their order, so that
the answer is the same to the last bit wherever they run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.config import count_parameters
from shapewright.errors import ConfigError
from shapewright.search.changes import encode_changes
from shapewright.search.findings import Findings, Tally
from shapewright.search.front import take
from shapewright.search.grid import AXES, sum_of
from shapewright.search.memory import MemoryOfShapes
from shapewright.search.steps import Lowered, Refused, StepTimes, lower_grid
from shapewright.search.trace import Tape, plain

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.search.front import Table
    from shapewright.search.grid import Grid, Index
    from shapewright.search.job import Job
    from shapewright.search.steps import Setting

    Progress = Callable[[int, int], None]
    Runner = Callable[[Sequence[Job], Callable[[int], None]], Iterator[Findings]]

# Shapes counted at once: eight bytes for each of a few columns.
_CHUNK = 1 << 20
# Shapes priced at once, so that their columns stay in a core's cache.
_PRICED_AT_ONCE = 1 << 16
# Sums over more parameters would leave 63 bits.
_MOST_COUNTED = 2**60


def explore(jobs: Sequence[Job], run: Runner, progress: Progress | None = None) -> Findings:
    """Look at every shape of some jobs.

    Args:
        jobs: The jobs, whose limits are the same.
        run: Runs them and gives their findings in their order, such as ``run_here``.
        progress: Told now and then how many shapes of how many are done.

    Returns:
        The best of them; what there is so far where the user interrupts.
    """
    for job in jobs:
        _refuse_overflow(job.space.grid, job.settings[0])
    num_shapes = sum(job.space.grid.num_shapes for job in jobs)
    findings = Findings(Tally())

    def show(done: int) -> None:
        if progress is not None:
            progress(done, num_shapes)

    for found in run(jobs, show):
        findings.merge(found, jobs[0].limits.num_parameters)
    findings.tally.num_shapes = num_shapes
    return findings


def run_here(jobs: Sequence[Job], show: Callable[[int], None]) -> Iterator[Findings]:
    """Run jobs one after the other; an interrupt ends them with what the last one has found so far."""
    done = 0
    for job in jobs:
        findings = Findings(Tally())
        try:
            for num_shapes in run_job(job, findings):
                done += num_shapes
                show(done)
        except KeyboardInterrupt:
            findings.is_complete = False
        findings.sort_out()
        yield findings
        if not findings.is_complete:
            return


def run_job(job: Job, findings: Findings) -> Iterator[int]:
    """Look at the shapes of one job; yields how many were done, chunk by chunk."""
    grid = job.space.grid
    findings.tally.num_shapes = grid.num_shapes
    for parts in zip(*(lower_grid(grid, setting) for setting in job.settings), strict=True):
        refused = next((part for part in parts if isinstance(part, Refused)), None)
        if refused is not None:
            findings.tally.refused[_without_numbers(str(refused.reason))] += refused.num_shapes
            yield refused.num_shapes
            continue
        lowered = [part for part in parts if isinstance(part, Lowered)]
        assert all(part.grid.num_shapes == lowered[0].grid.num_shapes for part in lowered)
        yield from _Explorer(job, lowered, findings).run()


def _without_numbers(message: str) -> str:
    """What is wrong, the same for all shapes with which it is wrong.

    >>> _without_numbers("tensor_parallel=8 must divide num_heads=20; try 4")
    'tensor_parallel=8 must divide num_heads'
    """
    wrong = message.partition(";")[0]
    return re.sub(
        r"\b(num_heads|num_kv_heads|intermediate_size|moe_intermediate_size|vocab_size|num_layers)=\d+", r"\1", wrong
    )


def _refuse_overflow(grid: Grid, setting: Setting) -> None:
    largest = {name: int(column.max()) for axis in AXES for name, column in grid.columns[axis].items()}
    total = plain(count_parameters(setting.traced(Tape(), largest)[0]).total)
    if total > _MOST_COUNTED:
        raise ConfigError(f"shapes of up to {total:.1e} parameters are too large to search; start from a smaller model")


class _Explorer:
    """Goes through the part of a space that lowers alike."""

    def __init__(self, job: Job, parts: Sequence[Lowered], findings: Findings) -> None:
        self._job, self._limits, self._findings = job, job.limits, findings
        self._grid = parts[0].grid
        self._times = [StepTimes(part, setting) for part, setting in zip(parts, job.settings, strict=True)]
        setting = job.settings[0]
        self._memory = MemoryOfShapes(setting)
        counts = count_parameters(setting.traced(tape := Tape(), self._grid.first())[0])
        total, active = tape.node_of(counts.total), tape.node_of(counts.active)
        self._parameters = sum_of(self._grid, total)
        self._active = self._parameters if active is total else sum_of(self._grid, active)

    def run(self) -> Iterator[int]:
        """Go through all shapes; yields how many were done, chunk by chunk."""
        num_rows = self._grid.lengths[0]
        per_row = self._grid.num_shapes // num_rows
        rows_at_once = max(1, _CHUNK * self._grid.lengths[-1] // per_row)
        for first in range(0, num_rows, rows_at_once):
            rows = np.arange(first, min(first + rows_at_once, num_rows))
            for index in self._of_right_size(rows):
                self._findings.add(self._price(index))
            yield per_row * len(rows)

    def _of_right_size(self, rows: NDArray[np.int64]) -> Iterator[Index]:
        """Indices of the shapes inside guard and budget."""
        limits, tally = self._limits, self._findings.tally
        num_batches = self._grid.lengths[-1]
        shape = (len(rows), *self._grid.lengths[1:-1], 1)
        allowed = np.broadcast_to(self._job.space.allowed(self._grid, rows), shape)
        total = np.broadcast_to(self._parameters.on_rows(rows), shape)
        distance = np.abs(total - limits.num_parameters)
        hits = allowed & (distance <= limits.tolerance_fraction * limits.num_parameters)
        if limits.num_active is not None:
            away = np.abs(np.broadcast_to(self._active.on_rows(rows), shape) - limits.num_active)
            hits &= away <= limits.tolerance_fraction * limits.num_active
        num_allowed, num_hits = int(allowed.sum()), int(hits.sum())
        tally.outside_guard += (allowed.size - num_allowed) * num_batches
        tally.outside_budget += (num_allowed - num_hits) * num_batches
        if num_allowed and not num_hits and not tally.priced:
            nearest = int(np.argmin(np.where(allowed, distance, np.iinfo(np.int64).max)))
            size = int(total.reshape(-1)[nearest])
            known = tally.nearest_parameters
            if known is None or abs(size - limits.num_parameters) < abs(known - limits.num_parameters):
                tally.nearest_parameters = size
        found = np.flatnonzero(hits)
        for first in range(0, len(found), _PRICED_AT_ONCE):
            place = np.unravel_index(found[first : first + _PRICED_AT_ONCE], shape)
            repeated = [np.repeat(positions, num_batches) for positions in place[:-1]]
            batches = np.tile(np.arange(num_batches), len(place[0]))
            yield (rows[repeated[0]], *repeated[1:], batches)

    def _price(self, index: Index) -> Table:
        """Shapes at an index that are faster than the baseline and fit."""
        limits, tally = self._limits, self._findings.tally
        tally.priced += len(index[0])
        if all(times.has_bound for times in self._times):
            # Without the operations that are priced shape by shape a step is shorter still: what is too dear then is.
            _, token_s, cost = self._judge(index, whole=False)
            index = tuple(positions[(cost < limits.cost) & (token_s < limits.token_s)] for positions in index)
        step_s, token_s, cost = self._judge(index, whole=True)
        faster = np.flatnonzero((cost < limits.cost) & (token_s < limits.token_s))
        index = tuple(positions[faster] for positions in index)
        fields = self._grid.fields_at(index)
        memory_bytes, kv_bytes = self._memory.estimate(fields) if len(faster) else (np.zeros(0), np.zeros(0))
        table: Table = {
            **fields,
            "step_s": step_s[faster],
            "token_s": token_s[faster],
            "cost": cost[faster],
            "parameters": self._parameters.at(index),
            "memory_bytes": memory_bytes,
            "kv_bytes": kv_bytes,
            "changes": encode_changes(fields, self._job.settings[0]) | self._job.code,
            "branch": np.full(len(faster), self._job.branch, dtype=np.int64),
        }
        fits = memory_bytes <= limits.memory_bytes
        tally.faster += int(fits.sum())
        tally.too_large += int((~fits).sum())
        if len(memory_bytes):
            least = float(memory_bytes.min())
            tally.least_memory_bytes = min(least, tally.least_memory_bytes or least)
        return take(table, np.flatnonzero(fits))

    def _judge(self, index: Index, *, whole: bool) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """Step time and time per token on the first device [s], and cost over all of them."""
        active = self._active.at(index)
        steps_s = [times.step_s(index, whole=whole) for times in self._times]
        per_step = self._limits.per_step
        tokens_s = [
            step_s / (1.0 if per_step else times.num_tokens(index))
            for step_s, times in zip(steps_s, self._times, strict=True)
        ]
        if not self._limits.least_costs:
            return steps_s[0], tokens_s[0], tokens_s[0] / active
        worst = np.zeros(len(index[0]))
        for token_s, least in zip(tokens_s, self._limits.least_costs, strict=True):
            worst = np.maximum(worst, token_s / active / least)
        return steps_s[0], tokens_s[0], worst
