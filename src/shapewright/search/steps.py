"""Step time of whole grids: the one lowering, traced, its operations priced in arrays and added up as predict does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.adding_up import (
    EXCHANGES,
    POOLS,
    WANTED_POOLS,
    WEIGHT_GRADIENTS,
    cover_of,
    exposed_fraction,
    hidden_exchange_fraction,
    join_stages,
    pools_of,
    settle_ends,
)
from shapewright.errors import ShapewrightError
from shapewright.layout import SPLIT_SCHEDULES
from shapewright.lowering import is_weight_gradient, lower, num_microbatches, validate_layout
from shapewright.operations import Collective, Pointwise
from shapewright.perf.software import TUNED_SOFTWARE, Software
from shapewright.predict import count_tokens
from shapewright.search.grid import AXES, Sum, Values, is_constant, split_by
from shapewright.search.pricing import count_cells, price_columns, price_key, price_on_grid
from shapewright.search.trace import Tape, Traced, evaluate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.operations import Operation
    from shapewright.search.grid import Grid, Index
    from shapewright.search.trace import Guard, Node
    from shapewright.workload import Workload


# Operations with more different sizes than this are priced for the shapes that are looked at, not for the whole grid.
_MOST_CELLS = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all shapes of a search have in common.

    Attributes:
        config: The model that the shapes are variants of.
        device: What it runs on.
        workload: What is run.
        layout: How it is spread.
        uncalibrated: Price as if nobody had measured the device.
        software: What the training software makes of the kernels.
        followers: Fields of the config that take the value of another one: name of the follower to name of the leader.
    """

    config: TransformerConfig
    device: Device
    workload: Workload
    layout: ParallelLayout
    uncalibrated: bool = False
    software: Software = TUNED_SOFTWARE
    followers: Mapping[str, str]

    def traced(self, tape: Tape, shape: Mapping[str, int]) -> tuple[TransformerConfig, Workload]:
        """Config and workload whose varied fields are traced numbers with the values of one shape."""
        return self.with_numbers({name: tape.variable(name, value) for name, value in shape.items()})

    def with_numbers(self, shape: Mapping[str, Any]) -> tuple[TransformerConfig, Workload]:
        """Config and workload with other values of the varied fields, unchecked: traced numbers pass."""
        numbers = dict(shape)
        numbers |= {name: numbers[leader] for name, leader in self.followers.items() if leader in numbers}
        config, workload = copy.copy(self.config), copy.copy(self.workload)
        for name, number in numbers.items():
            object.__setattr__(workload if name == "micro_batch_size" else config, name, number)
        return config, workload

    def concrete(self, shape: Mapping[str, int]) -> tuple[TransformerConfig, Workload]:
        """Config and workload of one shape.

        Raises:
            ShapewrightError: its values contradict each other.
        """
        values: dict[str, Any] = {name: int(value) for name, value in shape.items()}
        values |= {name: values[leader] for name, leader in self.followers.items() if leader in values}
        micro_batch_size = values.pop("micro_batch_size", self.workload.micro_batch_size)
        return replace(self.config, **values), replace(self.workload, micro_batch_size=micro_batch_size)


@dataclass(frozen=True)
class Lowered:
    """A grid on which one lowering holds for every shape."""

    grid: Grid
    operations: tuple[Operation, ...]
    num_passes: Any
    num_tokens: Any


@dataclass(frozen=True)
class Refused:
    """Shapes that cannot be lowered, and why the first of them cannot."""

    num_shapes: int
    reason: ShapewrightError


def lower_grid(grid: Grid, setting: Setting) -> Iterator[Lowered | Refused]:
    """Cut a grid into parts that lower alike, and lower each once."""
    for axis in range(len(AXES)):
        grid, refused = _drop_refused(grid, axis, setting)
        yield from refused
    waiting = [grid] if grid.num_shapes else []
    while waiting:
        part = waiting.pop()
        tape = Tape()
        config, workload = setting.traced(tape, part.first())
        outcome: Lowered | Refused
        try:
            operations = lower(config, workload, setting.layout, node_size=setting.device.node_size)
            passes, tokens = num_microbatches(workload, setting.layout), count_tokens(workload, setting.layout)
            outcome = Lowered(part, operations, passes, tokens)
        except ShapewrightError as error:
            outcome = Refused(part.num_shapes, error)
        differing = _first_differing(part, tape.guards)
        if differing is None:
            yield outcome
        else:
            waiting += split_by(part, differing.node)


def _drop_refused(grid: Grid, axis: int, setting: Setting) -> tuple[Grid, list[Refused]]:
    """Leave out entries of one axis that the layout does not divide, whatever the other axes say.

    Lowering would find them as well, but cuts the grid for every number that its message mentions.
    """
    columns = grid.columns[AXES[axis]]
    per_entry = grid.num_shapes // max(grid.lengths[axis], 1)
    kept, refused = [], []
    for entry in range(grid.lengths[axis]):
        config, workload = setting.with_numbers({name: int(column[entry]) for name, column in columns.items()})
        try:
            validate_layout(config, workload, setting.layout)
            num_microbatches(workload, setting.layout)
            kept.append(entry)
        except ShapewrightError as error:
            refused.append(Refused(per_entry, error))
    return (grid.take(axis, np.array(kept, dtype=np.int64)) if refused else grid), refused


def _first_differing(grid: Grid, guards: list[Guard]) -> Guard | None:
    return next((guard for guard in guards if not is_constant(grid, guard.node, guard.outcome)), None)


class StepTimes:
    """Step times of a lowered grid, in sums that are added up where a shape is looked at."""

    def __init__(self, lowered: Lowered, setting: Setting) -> None:
        self.grid, self._layout = lowered.grid, setting.layout
        self._num_tokens = self._constant_or_sum(lowered.num_tokens)
        self._num_passes = self._constant_or_sum(lowered.num_passes)
        self._stages = {stage: Sum(self.grid) for stage in ("every", "first", "last", "step")}
        self._weight_gradients = Sum(self.grid)
        # Computation that overlapping communication hides behind, and that communication, by pool and stage.
        self._cover = {pool: Sum(self.grid) for pool in POOLS}
        self._wanted = {(pool, stage): Sum(self.grid) for pool in WANTED_POOLS for stage in ("every", "first", "last")}
        # Most of an exchange shows, or all of it; which one depends on no shape.
        self._hides_exchanges = hidden_exchange_fraction(setting.software, setting.layout, 2) > 0.0
        self._add_operations(lowered.operations, setting)
        self._hides = any(self._wanted.values()) or any(
            isinstance(operation, Collective) and operation.overlaps for operation in self._late
        )
        if not self._hides and self._layout.pipeline_parallel == 1:
            # All stages are one device, so that their times can be added up at once.
            for stage in ("first", "last", "step"):
                self._stages["every"].merge(self._stages[stage])
                self._stages[stage] = Sum(self.grid)
        for total in (*self._stages.values(), self._weight_gradients, *self._cover.values(), *self._wanted.values()):
            total.fold()

    @property
    def has_bound(self) -> bool:
        """Whether leaving out what is priced shape by shape saves work and can only make a step shorter."""
        return bool(self._late) and not self._hides

    def step_s(self, index: Index, *, whole: bool = True) -> NDArray[np.float64]:
        """Step times of the shapes at an index; unless ``whole``, without what is priced shape by shape. [s]"""
        late = self._late_sums(index) if whole else {}
        sums: dict[str, Any] = {stage: self._read_sum(total, index, late) for stage, total in self._stages.items()}
        if self._hides:
            covers = {pool: self._read_sum(cover, index, late) for pool, cover in self._cover.items()}
            software = self._setting.software
            num_passes = self._read(self._num_passes, index)
            hidden = hidden_exchange_fraction(software, self._layout, num_passes)
            for pool in WANTED_POOLS:
                wanted = {
                    stage: self._read_sum(self._wanted[pool, stage], index, late)
                    for stage in ("every", "first", "last")
                }
                wanted_s = np.asarray(sum(wanted.values()))
                exposed = exposed_fraction(cover_of(covers, pool), np.maximum(wanted_s, 1e-300), pool, software, hidden)
                shown = np.where(wanted_s > 0.0, exposed, 1.0)
                for stage, part_s in wanted.items():
                    sums[stage] = sums[stage] + shown * part_s
        sums[WEIGHT_GRADIENTS] = self._read_sum(self._weight_gradients, index, late)
        if self._setting.workload.is_training and self._layout.pipeline_parallel > 1:
            self._settle(sums, index)
        step_s, _ = join_stages(sums, self._read(self._num_passes, index), self._layout)
        return np.asarray(step_s, dtype=float)

    def _settle(self, sums: dict[str, Any], index: Index) -> None:
        """Take off the ends of the model what their stages make up for with fewer layers."""
        config, stages = self._setting.config, self._layout.pipeline_parallel
        num_layers = self.grid.fields_at(index).get("num_layers", np.array(config.num_layers))
        per_stage = -(-num_layers // stages)
        num_spare = stages * per_stage - num_layers
        if num_spare.any() and not config.num_encoder_layers:
            ends = sums["first"], sums["last"], np.asarray(sums["every"]) / per_stage
            sums["first"], sums["last"] = settle_ends(*ends, num_spare, per_stage, self._layout.counted_ends)

    def num_tokens(self, index: Index) -> Any:
        """New tokens of one step over all devices."""
        return self._read(self._num_tokens, index)

    def _add_operations(self, operations: tuple[Operation, ...], setting: Setting) -> None:
        priced: dict[tuple[Any, ...], Values] = {}
        self._setting, self._late = setting, []
        by_repeats: dict[tuple[Any, Sum], tuple[Any, Sum]] = {}
        for operation in operations:
            if isinstance(operation, Pointwise | Collective) and count_cells(operation, self.grid) > _MOST_CELLS:
                self._late.append(operation)
                continue
            key = (setting.software.tells_apart(operation), *price_key(operation))
            if key not in priced:
                priced[key] = price_on_grid(
                    operation,
                    self.grid,
                    setting.device,
                    uncalibrated=setting.uncalibrated,
                    software=setting.software,
                )
            repeats = operation.repeats.node if isinstance(operation.repeats, Traced) else operation.repeats
            for target in self._targets(operation):
                # Operations that run equally often are added before they are multiplied.
                _, group = by_repeats.setdefault((repeats, target), (operation.repeats, Sum(self.grid)))
                group.add(priced[key])
        for (_, target), (repeats, group) in by_repeats.items():
            target.merge(group.fold(), self._values(repeats))

    def _late_sums(self, index: Index) -> dict[int, Any]:
        """What the operations that differ on too many axes add to each sum, priced for these shapes alone. [s]"""
        sums: dict[int, Any] = {}
        if not self._late:
            return sums
        columns = self.grid.fields_at(index)
        memo: dict[Node, NDArray[Any]] = {}
        for operation in self._late:
            time_s: Any = price_columns(
                operation,
                columns,
                memo,
                self._setting.device,
                uncalibrated=self._setting.uncalibrated,
                software=self._setting.software,
            )
            repeats: Any = operation.repeats
            time_s = time_s * (evaluate(repeats.node, columns, memo) if isinstance(repeats, Traced) else repeats)
            for target in self._targets(operation):
                sums[id(target)] = sums.get(id(target), 0.0) + time_s
        return sums

    def _targets(self, operation: Operation) -> Iterator[Sum]:
        """Sums that an operation's time belongs to."""
        pools = pools_of(operation, operation.pass_name)
        if pools == (EXCHANGES,) and not self._hides_exchanges:
            pools = ()
        if isinstance(operation, Collective) and pools:
            yield self._wanted[pools[0], operation.stage]
        else:
            yield self._stages["step" if operation.pass_name == "step" else operation.stage]
            for pool in pools:
                yield self._cover[pool]
        fills_bubble = self._layout.pipeline_schedule in SPLIT_SCHEDULES and operation.stage == "every"
        if fills_bubble and is_weight_gradient(operation):
            yield self._weight_gradients

    def _values(self, number: Any) -> Values:
        if isinstance(number, Traced):
            return self.grid.evaluate(number.node)
        return Values(np.full((1,) * len(self.grid.lengths), number), by_heads=False)

    def _constant_or_sum(self, number: Any) -> Any:
        if not isinstance(number, Traced):
            return number
        total = Sum(self.grid)
        total.add(self.grid.evaluate(number.node))
        return total

    @staticmethod
    def _read_sum(total: Sum, index: Index, late: dict[int, Any]) -> Any:
        """A sum at an index, with what was priced late. [s]"""
        return (total.at(index) if total else 0.0) + late.get(id(total), 0.0)

    @staticmethod
    def _read(number: Any, index: Index) -> Any:
        return number.at(index) if isinstance(number, Sum) else number
