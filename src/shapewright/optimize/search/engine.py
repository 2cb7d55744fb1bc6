"""Evaluate grids of shapes: count the parameters of all, predict the steps of those of the right size, keep the best.

The grids are cut into independent jobs. Their findings are merged in the order of the jobs, so the result does not
depend on where the jobs run.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import fields, replace
from math import floor
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import ConfigError
from shapewright.core.records import dataclass
from shapewright.core.traced import Tape, Traced, untraced
from shapewright.models.parameters import count_parameters
from shapewright.optimize.search.branches import encode_changes
from shapewright.optimize.search.findings import Findings, Tally, take
from shapewright.optimize.search.memory import ShapeMemoryEstimator
from shapewright.optimize.search.objective import Limits
from shapewright.optimize.search.space.grid import AXES, Sum, sum_of
from shapewright.optimize.search.steps import Lowered, Refused, StepTimes, lower_for_each
from shapewright.prediction.loss.effect import count_active_parameters
from shapewright.prediction.loss.terms import ShapeForLoss

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from shapewright.optimize.search.findings import Table
    from shapewright.optimize.search.space.grid import Grid, Index, OnGrid
    from shapewright.optimize.search.space.space import Space
    from shapewright.optimize.search.steps import VariedScenario

    Times = Float[np.ndarray, " shapes"]
    _PerFaster = Float[np.ndarray, " faster"]
    # Index, step times, times per token, costs, and ratios of tokens needed.
    _Faster = tuple[tuple[Int[np.ndarray, " faster"], ...], _PerFaster, _PerFaster, _PerFaster, _PerFaster]
    Progress = Callable[[int, int], None]
    Runner = Callable[[Sequence["Job"], Callable[[int], None]], Iterator[Findings]]

# Shapes whose parameters are counted at once, so that their columns stay in a core's cache.
_CHUNK = 1 << 17
# If at least this share of shapes has the right size, bounds of all are computed at once, on the axes of the grid.
_DENSE_FROM = 0.25
# Shapes whose memory is estimated at once; many, because the estimate is evaluated once for each number of layers.
_MEMORY_ESTIMATED_AT_ONCE = 1 << 18
# Shapes priced at once, so that their columns stay in a core's cache.
_PRICED_AT_ONCE = 1 << 16
# glibc returns large freed blocks to the system, so each new array faults its pages in again. Once a block of about
# this size has been freed, it keeps them: a search is 1.1 times as fast. Source: mallopt(3), M_MMAP_THRESHOLD. [byte]
_MALLOC_THRESHOLD_BYTES = (32 << 20) - 65536
# Sums over larger parameter counts would overflow 63 bits.
_MOST_COUNTED = 2**60
# The loss depends on the first three axes: heads, ffn and depth.
_LOSS_AXES = 3
# Shapes of one job, which then takes a few seconds.
_SHAPES_OF_A_JOB = 1 << 23


@dataclass(frozen=True)
class Job:
    """An independent part of a search.

    Attributes:
        space: The shapes.
        scenarios: The scenario that they are variants of, on each device.
        limits: Limits that they must keep.
        branch: Index of their branch.
        code: Changes that the branch makes, see encode_changes.
        serving: The scenario that the model is served in; None if serving does not count.
    """

    space: Space
    scenarios: tuple[VariedScenario, ...]
    limits: Limits
    branch: int = 0
    code: int = 0
    serving: VariedScenario | None = None

    def split(self) -> Iterator[Job]:
        """Cut the job along the axis of heads into jobs of a few seconds."""
        grid = self.space.grid
        num_rows = grid.lengths[0]
        num_jobs = min(-(-grid.num_shapes // _SHAPES_OF_A_JOB), num_rows)
        for rows in np.array_split(np.arange(num_rows), max(num_jobs, 1)):
            yield replace(self, space=replace(self.space, grid=grid.take(0, rows)))


def explore(jobs: Sequence[Job], run: Runner, progress: Progress | None = None) -> Findings:
    """Evaluate every shape of some jobs.

    Args:
        jobs: The jobs, all with the same limits.
        run: Runs them and yields their findings in order, such as ``run_here``.
        progress: Called with the number of shapes done and of all shapes.

    Returns:
        The best shapes; after an interrupt, the best so far.
    """
    for job in jobs:
        _refuse_overflow(job.space.grid, job.scenarios[0])
    num_shapes = sum(job.space.grid.num_shapes for job in jobs)
    findings = Findings(Tally())

    def report(done: int) -> None:
        if progress is not None:
            progress(done, num_shapes)

    for found in run(jobs, report):
        findings.merge(found, jobs[0].limits.num_parameters)
    findings.tally.num_shapes = num_shapes
    return findings


def run_here(jobs: Sequence[Job], report: Callable[[int], None]) -> Iterator[Findings]:
    """Run jobs one after the other in this process; an interrupt ends them with the findings so far."""
    done = 0
    for job in jobs:
        findings = Findings(Tally())
        try:
            with closing(run_job(job, findings)) as parts:
                for num_shapes in parts:
                    done += num_shapes
                    report(done)
        except KeyboardInterrupt:
            findings.is_complete = False
        findings.merge_collected()
        yield findings
        if not findings.is_complete:
            return


def run_job(job: Job, findings: Findings) -> Generator[int, None, None]:
    """Evaluate the shapes of one job; yields the number of shapes done, chunk by chunk."""
    grid = job.space.grid
    np.empty(_MALLOC_THRESHOLD_BYTES, dtype=np.uint8)  # allocated and freed to raise the threshold
    findings.tally.num_shapes = grid.num_shapes
    scenarios = (*job.scenarios, *([job.serving] if job.serving else []))
    for part in lower_for_each(grid, scenarios):
        if isinstance(part, Refused):
            findings.tally.refused[part.error.reason] += part.num_shapes
            yield part.num_shapes
        else:
            yield from _Evaluation(job, part, findings).run()


def _refuse_overflow(grid: Grid, varied: VariedScenario) -> None:
    largest = {name: int(column.max()) for axis in AXES for name, column in grid.columns[axis].items()}
    total = untraced(count_parameters(varied.traced(Tape(), largest)[0]).total)
    if total > _MOST_COUNTED:
        raise ConfigError(f"shapes of up to {total:.1e} parameters are too large to search; start from a smaller model")


def _is_within(
    sizes: OnGrid, target: int, tolerance_fraction: float
) -> Bool[np.ndarray, "heads ffn depth vocab batch"]:
    """Return which sizes are within a tolerance."""
    reach = floor(tolerance_fraction * target)
    within: Bool[np.ndarray, "heads ffn depth vocab batch"] = (sizes >= target - reach) & (sizes <= target + reach)
    return within


class _Evaluation:
    """Evaluates a part of a space whose shapes all lower to the same operations."""

    def __init__(self, job: Job, parts: Sequence[Lowered], findings: Findings) -> None:
        self._job, self._limits, self._findings = job, job.limits, findings
        self._grid = parts[0].grid
        num_devices = len(job.scenarios)
        self._times = [StepTimes(part, varied) for part, varied in zip(parts[:num_devices], job.scenarios, strict=True)]
        self._serving = StepTimes(parts[-1], job.serving) if job.serving else None
        varied = job.scenarios[0]
        self._memory = ShapeMemoryEstimator(varied, self._grid)
        counts = count_parameters(varied.traced(tape := Tape(), self._grid.first())[0])
        total, active = tape.node_for(counts.total), tape.node_for(counts.active)
        self._parameters = sum_of(self._grid, total)
        self._active = self._parameters if active is total else sum_of(self._grid, active)
        self._faster: list[_Faster] = []
        self._loss_fields: dict[str, Sum | Any] = {}
        if self._limits.ranking is not None:
            config, _ = varied.traced(Tape(), self._grid.first())
            shape = ShapeForLoss.of(config)
            numbers = {spec.name: getattr(shape, spec.name) for spec in fields(shape)}
            if not config.is_moe:
                numbers["total_parameters"] = 0
            numbers["num_compared"] = count_active_parameters(config, varied.scenario.config.vocab_size)
            self._loss_fields = {
                name: sum_of(self._grid, number.node) if isinstance(number, Traced) else number
                for name, number in numbers.items()
            }

    def run(self) -> Iterator[int]:
        """Evaluate all shapes; yields the number of shapes done, chunk by chunk."""
        num_rows = self._grid.lengths[0]
        per_row = self._grid.num_shapes // num_rows
        rows_at_once = max(1, _CHUNK * self._grid.lengths[-1] // per_row)
        try:
            for first in range(0, num_rows, rows_at_once):
                rows = np.arange(first, min(first + rows_at_once, num_rows))
                for index, columns in self._of_right_size(rows):
                    self._faster.append(self._price(index, columns))
                    if sum(len(cost) for _, _, _, cost, _ in self._faster) >= _MEMORY_ESTIMATED_AT_ONCE:
                        self._add_fitting()
                yield per_row * len(rows)
        finally:  # an interrupted search keeps what it found
            self._add_fitting()

    def _of_right_size(self, rows: Int[np.ndarray, " rows"]) -> Iterator[tuple[Index, Table | None]]:
        """Yield indices of the shapes inside the quality guard and the parameter budget.

        If they are many, those that a lower bound of their step times rules out are dropped. The columns computed for
        the bound are then yielded with the indices; otherwise None is.
        """
        limits, tally = self._limits, self._findings.tally
        num_batches = self._grid.lengths[-1]
        shape = (len(rows), *self._grid.lengths[1:-1], 1)
        allowed = self._job.space.allowed(self._grid, rows)
        num_allowed = int(np.count_nonzero(allowed)) * (int(np.prod(shape)) // allowed.size)
        total = self._parameters.on_rows(rows)
        hits = allowed & _is_within(total, limits.num_parameters, limits.tolerance_fraction)
        if limits.num_active is not None:
            hits = hits & _is_within(self._active.on_rows(rows), limits.num_active, limits.tolerance_fraction)
        hits = np.broadcast_to(hits, shape)
        num_hits = int(np.count_nonzero(hits))
        tally.outside_guard += (hits.size - num_allowed) * num_batches
        tally.outside_budget += (num_allowed - num_hits) * num_batches
        if num_allowed and not num_hits and not tally.priced:
            distance = np.where(allowed, np.abs(total - limits.num_parameters), np.iinfo(np.int64).max)
            size = int(np.broadcast_to(total, distance.shape).reshape(-1)[np.argmin(distance)])
            known = tally.nearest_parameters
            if known is None or abs(size - limits.num_parameters) < abs(known - limits.num_parameters):
                tally.nearest_parameters = size
        tally.priced += num_hits * num_batches
        table: Table | None = None
        if num_batches == 1 and num_hits >= _DENSE_FROM * hits.size and all(times.has_bound for times in self._times):
            may_be_better, table = self._bound(rows)
            hits = hits & may_be_better
        found = np.flatnonzero(hits)
        for first in range(0, len(found), _PRICED_AT_ONCE):
            part = found[first : first + _PRICED_AT_ONCE]
            columns = table and {
                name: np.broadcast_to(column, shape).reshape(-1)[part] for name, column in table.items()
            }
            index = [np.repeat(positions, num_batches) for positions in np.unravel_index(part, shape)[:-1]]
            yield (rows[index[0]], *index[1:], np.tile(np.arange(num_batches), len(part))), columns

    def _bound(self, rows: Int[np.ndarray, " rows"]) -> tuple[Bool[np.ndarray, "rows ffn depth vocab 1"], Table]:
        """Return which shapes at some entries of ``heads`` a lower bound of the step time leaves, and their columns.

        Each number is an array over the axes that it depends on, so most numbers are computed for few entries.
        """
        limits, ranking = self._limits, self._limits.ranking
        if ranking is None:
            columns: Table = {"active": self._active.on_rows(rows)}
        else:
            columns = self._loss_columns(lambda total: total.on_rows(rows))
        if self._serving is not None:
            columns["served_s"] = self._serving.step_on_rows(rows) / self._serving.tokens_on_rows(rows)
        steps_s = [times.step_on_rows(rows) for times in self._times]
        tokens = [times.tokens_on_rows(rows) for times in self._times]
        _, token_s, cost = self._cost(steps_s, tokens, columns)
        better: Bool[np.ndarray, "rows ffn depth vocab 1"] = cost < limits.cost
        return (better if limits.token_s == np.inf else better & (token_s < limits.token_s)), columns

    def _price(self, index: Index, columns: Table | None) -> _Faster:
        """Return the shapes at an index that keep the limits of cost and time, with their times and costs.

        Args:
            index: Positions on the axes of the grid.
            columns: Their columns if a bound of their times was computed before; None otherwise.
        """
        limits, is_bounded = self._limits, columns is not None
        columns = self._columns(index) if columns is None else columns
        if (
            not is_bounded
            and any(times.has_per_shape for times in self._times)
            and all(times.has_bound for times in self._times)
        ):
            # The bound without the operations that are priced per shape rules out most shapes.
            _, token_s, cost = self._times_and_cost(index, columns, whole=False)
            left = np.flatnonzero((cost < limits.cost) & (token_s < limits.token_s))
            index, columns = tuple(positions[left] for positions in index), take(columns, left)
        step_s, token_s, cost = self._times_and_cost(index, columns, whole=True)
        faster = np.flatnonzero((cost < limits.cost) & (token_s < limits.token_s))
        tokens_ratio = columns["tokens_ratio"][faster] if limits.ranking else np.zeros(len(faster))
        index = tuple(positions[faster] for positions in index)
        return index, step_s[faster], token_s[faster], cost[faster], tokens_ratio

    def _add_fitting(self) -> None:
        """Estimate the memory of the faster shapes so far, and add those that fit to the findings."""
        if not self._faster:
            return
        limits, tally = self._limits, self._findings.tally
        indices, *numbers = zip(*self._faster, strict=True)
        self._faster.clear()
        index: Index = tuple(np.concatenate(positions) for positions in zip(*indices, strict=True))
        step_s, token_s, cost, tokens_ratio = (np.concatenate(column) for column in numbers)
        memory_bytes, kv_bytes = self._memory.estimate(index) if len(cost) else (np.zeros(0), np.zeros(0))
        fits = np.flatnonzero(memory_bytes <= limits.memory_bytes)
        tally.faster += len(fits)
        tally.too_large += len(cost) - len(fits)
        if len(memory_bytes):
            least = float(memory_bytes.min())
            tally.least_memory_bytes = min(least, tally.least_memory_bytes or least)
        index = tuple(positions[fits] for positions in index)
        fields, parameters = self._grid.fields_at(index), self._parameters.at(index)
        table: Table = {
            **fields,
            "step_s": step_s[fits],
            "token_s": token_s[fits],
            "cost": cost[fits],
            "parameters": parameters,
            "quality": 1.0 / tokens_ratio[fits] if limits.ranking else parameters,
            "memory_bytes": memory_bytes[fits],
            "kv_bytes": kv_bytes[fits],
            "changes": encode_changes(fields, self._job.scenarios[0].scenario, self._job.space.ffn_spacing)
            | self._job.code,
            "branch": np.full(len(fits), self._job.branch, dtype=np.int64),
        }
        self._findings.add(table)

    def _columns(self, index: Index) -> Table:
        """Return the columns, other than times, that the costs of the shapes at an index are computed from.

        The loss depends on neither vocabulary nor micro-batch: it is computed once for shapes that differ in them only.
        """
        ranking = self._limits.ranking
        if ranking is None:
            return {"active": self._active.at(index)}
        cell: Any = np.zeros(1, dtype=np.int64)
        for positions, length in zip(index[:_LOSS_AXES], self._grid.lengths, strict=False):
            cell = cell * length + positions
        is_first = np.r_[True, cell[1:] != cell[:-1]][: len(index[0])]
        first = tuple(positions[is_first] for positions in index)
        columns = take(self._loss_columns(lambda total: total.at(first)), np.cumsum(is_first) - 1)
        if self._serving is not None:
            tokens = self._serving.num_tokens(index)
            columns["served_s"] = self._serving.step_s(index) / tokens
        return columns

    def _loss_columns(self, read: Callable[[Sum], Any]) -> Table:
        """Return the columns that a ranking by loss is computed from, read from sums over the grid."""
        assert self._limits.ranking is not None
        shapes = {
            name: read(number) if isinstance(number, Sum) else number for name, number in self._loss_fields.items()
        }
        num_compared = shapes.pop("num_compared")
        return self._limits.ranking.columns(ShapeForLoss(**shapes), num_compared)

    def _times_and_cost(self, index: Index, columns: Table, *, whole: bool) -> tuple[Times, Times, Times]:
        """Return step time and time per token on the first device [s], and the cost, see _cost."""
        steps_s = [times.step_s(index, whole=whole) for times in self._times]
        return self._cost(steps_s, [times.num_tokens(index) for times in self._times], columns)

    def _cost(self, steps_s: list[Times], tokens: list[Any], columns: Table) -> tuple[Times, Times, Times]:
        """Return step time and time per token on the first device [s], and the cost: with several devices the regret.

        Args:
            steps_s: Step times on each device. [s]
            tokens: Tokens of a step on each device.
        """
        ranking, per_step = self._limits.ranking, self._limits.per_step
        tokens_s = [
            step_s / (1.0 if per_step else num_tokens) for step_s, num_tokens in zip(steps_s, tokens, strict=True)
        ]
        costs = [
            token_s / columns["active"] if ranking is None else ranking.costs(token_s, columns) for token_s in tokens_s
        ]
        if not self._limits.least_costs:
            return steps_s[0], tokens_s[0], costs[0]
        regret = np.zeros(costs[0].shape)
        for cost, least in zip(costs, self._limits.least_costs, strict=True):
            regret = np.maximum(regret, cost / least)
        return steps_s[0], tokens_s[0], regret
