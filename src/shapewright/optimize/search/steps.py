"""Step times of grids of shapes: lowering is traced once, operations are priced in arrays, then composed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import ShapewrightError
from shapewright.core.records import dataclass
from shapewright.core.traced import Tape, Traced
from shapewright.lowering.checks import validate_layout
from shapewright.lowering.counts import num_microbatches
from shapewright.lowering.model import lower
from shapewright.lowering.operations.base import STAGES
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.optimize.search.pricing import count_cells, price_at_index, price_key, price_on_grid
from shapewright.optimize.search.space.grid import AXES, MOST_CELLS, Sum, Values, is_constant, split_by
from shapewright.prediction.composition.stages import (
    COLLECTIVE_POOLS,
    COMPUTE_POOLS,
    STEP_FIRST,
    STEP_LAST,
    WEIGHT_GRADIENTS,
    alternates_passes,
    exchange_overlap_fraction,
)
from shapewright.prediction.composition.step import STEP_PARTS, collective_part, compose_parts, compute_part, parts_of
from shapewright.prediction.predict import count_tokens
from shapewright.workload.layout import SPLIT_BACKWARD_SCHEDULES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxtyping import Float, Num

    from shapewright.core.traced import Guard, Node
    from shapewright.lowering.operations.operation import Operation
    from shapewright.models.transformer import TransformerConfig
    from shapewright.optimize.search.space.grid import Grid, Index, OnGrid, Positions
    from shapewright.prediction.scenario import Scenario
    from shapewright.workload.workload import Workload


_COLLECTIVE_PARTS = frozenset(collective_part(pool, stage) for pool in COLLECTIVE_POOLS for stage in STAGES)
_COMPUTE_PARTS = frozenset(map(compute_part, COMPUTE_POOLS))


@dataclass(frozen=True, kw_only=True)
class VariedScenario:
    """A scenario whose fields a search varies, with the fields that follow others.

    Attributes:
        scenario: The baseline: its device, layout and software hold for every shape.
        followers: Fields of the config that take the value of another one: name of the follower to name of the leader.
        fixed: Fields that keep the scenario's value in every shape.
    """

    scenario: Scenario
    followers: Mapping[str, str]
    fixed: frozenset[str] = frozenset()

    def traced(self, tape: Tape, shape: Mapping[str, int]) -> tuple[TransformerConfig, Workload]:
        """Return config and workload whose varied fields are traced numbers with the values of one shape."""
        return self.with_numbers({name: tape.variable(name, value) for name, value in shape.items()})

    def with_numbers(self, shape: Mapping[str, Any]) -> tuple[TransformerConfig, Workload]:
        """Return config and workload with other values of the varied fields; they may be traced, and are unchecked."""
        config, workload = copy.copy(self.scenario.config), copy.copy(self.scenario.workload)
        for name, number in self._with_followers(shape).items():
            object.__setattr__(workload if name == "micro_batch_size" else config, name, number)
        return config, workload

    def at(self, shape: Mapping[str, int]) -> Scenario:
        """Return the scenario of one shape.

        Raises:
            ShapewrightError: its values contradict each other.
        """
        return self.scenario.replace(**self._with_followers({name: int(value) for name, value in shape.items()}))

    def _with_followers(self, shape: Mapping[str, Any]) -> dict[str, Any]:
        values = {**shape, **{name: shape[leader] for name, leader in self.followers.items() if leader in shape}}
        return {name: number for name, number in values.items() if name not in self.fixed}


@dataclass(frozen=True)
class Lowered:
    """A grid whose shapes all lower to the same operations, with traced sizes.

    Attributes:
        grid: The shapes.
        operations: The operations.
        num_passes: Micro-batches of a step.
        num_tokens: New tokens of a step over all devices.
    """

    grid: Grid
    operations: tuple[Operation, ...]
    num_passes: Any
    num_tokens: Any


@dataclass(frozen=True)
class Refused:
    """Shapes that cannot be lowered, and the error of the first of them."""

    num_shapes: int
    error: ShapewrightError


def lower_grid(grid: Grid, varied: VariedScenario) -> Iterator[Lowered | Refused]:
    """Cut a grid into parts that lower to the same operations, and lower each part once."""
    layout, node_size = varied.scenario.layout, varied.scenario.device.node_size
    for axis in range(len(AXES)):
        grid, refused = _drop_refused(grid, axis, varied)
        yield from refused
    pending = [grid] if grid.num_shapes else []
    while pending:
        part = pending.pop()
        tape = Tape()
        config, workload = varied.traced(tape, part.first())
        outcome: Lowered | Refused
        try:
            operations = lower(config, workload, layout, node_size=node_size)
            passes, tokens = num_microbatches(workload, layout), count_tokens(workload, layout)
            outcome = Lowered(part, operations, passes, tokens)
        except ShapewrightError as error:
            outcome = Refused(part.num_shapes, error)
        varying = _first_varying_guard(part, tape.guards)
        if varying is None:
            yield outcome
        else:
            pending += split_by(part, varying.node)


def lower_for_each(grid: Grid, scenarios: Sequence[VariedScenario]) -> Iterator[tuple[Lowered, ...] | Refused]:
    """Cut a grid into parts that lower to the same operations in each of several scenarios, and lower each part once.

    Yields:
        For each part, its operations in every scenario; or the error of the first scenario that refuses it.
    """
    for first in lower_grid(grid, scenarios[0]):
        if isinstance(first, Refused) or len(scenarios) == 1:
            yield first if isinstance(first, Refused) else (first,)
            continue
        for others in lower_for_each(first.grid, scenarios[1:]):
            yield others if isinstance(others, Refused) else (replace(first, grid=others[0].grid), *others)


def _drop_refused(grid: Grid, axis: int, varied: VariedScenario) -> tuple[Grid, list[Refused]]:
    """Remove entries of one axis that the layout does not divide, whatever the values on the other axes.

    Lowering would refuse them too, but each number in its message would cut the grid.
    """
    columns = grid.columns[AXES[axis]]
    per_entry = grid.num_shapes // max(grid.lengths[axis], 1)
    kept, refused = [], []
    for entry in range(grid.lengths[axis]):
        config, workload = varied.with_numbers({name: int(column[entry]) for name, column in columns.items()})
        try:
            validate_layout(config, workload, varied.scenario.layout)
            num_microbatches(workload, varied.scenario.layout)
            kept.append(entry)
        except ShapewrightError as error:
            refused.append(Refused(per_entry, error))
    return (grid.take(axis, np.array(kept, dtype=np.int64)) if refused else grid), refused


def _first_varying_guard(grid: Grid, guards: list[Guard]) -> Guard | None:
    return next((guard for guard in guards if not is_constant(grid, guard.node, guard.outcome)), None)


class StepTimes:
    """Step times of the shapes of a lowered grid, from one sum over the grid for each part of a step.

    Args:
        lowered: The grid with its operations.
        varied: The scenario that its shapes are variants of.
    """

    def __init__(self, lowered: Lowered, varied: VariedScenario) -> None:
        self.grid, self._scenario = lowered.grid, varied.scenario
        self._num_tokens = self._constant_or_sum(lowered.num_tokens)
        self._num_passes = self._constant_or_sum(lowered.num_passes)
        self._sums = {part: Sum(self.grid) for part in STEP_PARTS}
        layout = self._scenario.layout
        # Whether any part of an expert exchange can be hidden; it does not depend on the shape.
        self._overlaps_exchanges = exchange_overlap_fraction(self._scenario.software, layout, 2) > 0.0
        # Their bubble depends on the share of the forward pass.
        self._needs_compute = alternates_passes(layout) and self._scenario.workload.is_training
        self._fills_bubble = layout.pipeline_schedule in SPLIT_BACKWARD_SCHEDULES
        self._per_shape: list[Operation] = []
        self._add_operations(lowered.operations)
        self._overlaps = any(self._sums[part] for part in _COLLECTIVE_PARTS) or any(
            part in _COLLECTIVE_PARTS for operation in self._per_shape for part in self._parts_of(operation)
        )
        if not self._overlaps and layout.pipeline_parallel == 1:
            # The device runs all stages and nothing overlaps, so their times can be added beforehand.
            for part in ("first", "last", "step", STEP_FIRST, STEP_LAST):
                self._sums["every"].merge(self._sums[part])
                self._sums[part] = Sum(self.grid)
        for total in self._sums.values():
            total.fold()

    @property
    def has_per_shape(self) -> bool:
        """Whether some operations are priced per shape, instead of on the axes of the grid."""
        return bool(self._per_shape)

    @property
    def has_bound(self) -> bool:
        """Whether the step time without the operations priced per shape is a lower bound of it, or equal to it."""
        return not self._per_shape or not (self._overlaps or self._needs_compute)

    def step_s(self, index: Index, *, whole: bool = True) -> Float[np.ndarray, " shapes"]:
        """Return the step times of the shapes at an index. [s]

        Args:
            index: Positions on the axes of the grid, one entry per shape.
            whole: False to leave out the operations that are priced per shape.
        """
        per_shape = self._price_per_shape(index) if whole else {}
        num_layers = self.grid.fields_at(index).get("num_layers") if self._has_stages else None
        step_s = self._compose(lambda total: total.at(index), per_shape, num_layers)
        return np.broadcast_to(np.asarray(step_s, dtype=float), index[0].shape)

    def step_on_rows(self, rows: Positions) -> OnGrid:
        """Return lower bounds of the step times of all shapes at some entries of ``heads``, see ``has_bound``. [s]"""
        num_layers = self.grid.columns["depth"].get("num_layers")
        if num_layers is not None:
            num_layers = num_layers.reshape(1, 1, -1, 1, 1)
        return np.asarray(self._compose(lambda total: total.on_rows(rows), {}, num_layers), dtype=float)

    def _compose(self, read: Callable[[Sum], Any], per_shape: Mapping[str, Any], num_layers: Any) -> Any:
        """Return step times, from the parts of a step read from sums over the grid. [s]"""
        unused = frozenset[str]() if self._overlaps or self._needs_compute else _COMPUTE_PARTS
        parts: dict[str, Any] = {
            part: (read(total) if total else 0.0) + per_shape.get(part, 0.0)
            for part, total in self._sums.items()
            if part not in unused and (total or part in per_shape)
        }
        layers_per_stage, num_spare = self._spare_layers(num_layers)
        is_training = self._scenario.workload.is_training
        return compose_parts(
            parts,
            read(self._num_passes) if isinstance(self._num_passes, Sum) else self._num_passes,
            self._scenario.layout,
            self._scenario.software,
            layers_per_stage=layers_per_stage,
            num_spare=num_spare if is_training else 0,
            lacking=0.0 if is_training else num_spare / layers_per_stage,
        )[0]

    def num_tokens(self, index: Index) -> Any:
        """Return the new tokens of one step over all devices."""
        return self._num_tokens.at(index) if isinstance(self._num_tokens, Sum) else self._num_tokens

    def tokens_on_rows(self, rows: Positions) -> Any:
        """Return the tokens of all shapes at some entries of ``heads``; the result broadcasts over the other axes."""
        return self._num_tokens.on_rows(rows) if isinstance(self._num_tokens, Sum) else self._num_tokens

    @property
    def _has_stages(self) -> bool:
        """Whether layers are spread over pipeline stages."""
        scenario = self._scenario
        return scenario.layout.pipeline_parallel > 1 and not scenario.config.num_encoder_layers

    def _spare_layers(self, num_layers: Any) -> tuple[Any, Any]:
        """Return the layers of the busiest stage, and how many the other stages lack in sum."""
        if not self._has_stages:
            return 1, 0
        stages = self._scenario.layout.pipeline_parallel
        num_layers = np.array(self._scenario.config.num_layers) if num_layers is None else num_layers
        per_stage = -(-num_layers // stages)
        return per_stage, stages * per_stage - num_layers

    def _add_operations(self, operations: tuple[Operation, ...]) -> None:
        """Price operations on the grid and add them to the sums; those of too many sizes are priced per shape later."""
        software = self._scenario.software
        priced: dict[tuple[Any, ...], Values] = {}
        by_repeats: dict[tuple[Any, str], tuple[Any, Sum]] = {}
        for operation in operations:
            if isinstance(operation, Pointwise | Collective) and count_cells(operation, self.grid) > MOST_CELLS:
                self._per_shape.append(operation)
                continue
            key = (software.needs_own_price(operation), *price_key(operation))
            if key not in priced:
                priced[key] = price_on_grid(operation, self.grid, self._scenario.device, software=software)
            repeats = operation.repeats.node if isinstance(operation.repeats, Traced) else operation.repeats
            for part in self._parts_of(operation):
                # Operations with equal repeats are added first, then multiplied once.
                _, group = by_repeats.setdefault((repeats, part), (operation.repeats, Sum(self.grid)))
                group.add(priced[key])
        for (_, part), (repeats, group) in by_repeats.items():
            self._sums[part].merge(group.fold(), self._values(repeats))

    def _price_per_shape(self, index: Index) -> dict[str, Any]:
        """Return the times that operations priced per shape add to each part of a step. [s]"""
        sums: dict[str, Any] = {}
        if not self._per_shape:
            return sums
        memo: dict[Node, Num[np.ndarray, ...]] = {}
        for operation in self._per_shape:
            time_s: Any = price_at_index(
                operation, self.grid, index, memo, self._scenario.device, software=self._scenario.software
            )
            repeats: Any = operation.repeats
            if isinstance(repeats, Traced):
                repeats = self.grid.evaluate_at(repeats.node, index, memo)
            time_s = time_s * repeats
            for part in self._parts_of(operation):
                sums[part] = sums.get(part, 0.0) + time_s
        return sums

    def _parts_of(self, operation: Operation) -> tuple[str, ...]:
        """Return the parts of a step that an operation's time is added to."""
        parts = parts_of(operation, overlaps_exchanges=self._overlaps_exchanges)
        return parts if self._fills_bubble else tuple(part for part in parts if part != WEIGHT_GRADIENTS)

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
