"""Sweep one dimension: the predicted step at each value, where waves end, and how the widths are aligned.

Values lie on a grid around the current one, of multiples that a kernel likes and of some that it does not, so that the
curve shows both its cliffs (a wave more) and its stripes (an alignment class less).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from math import lcm, log2
from typing import TYPE_CHECKING, Any, NamedTuple

from shapewright.config import with_changes
from shapewright.errors import ConfigError, ShapewrightError
from shapewright.integers import divisors
from shapewright.layout import ParallelLayout
from shapewright.lowering import lower
from shapewright.operations import Gemm
from shapewright.perf.price import GemmPrice
from shapewright.perf.pricing import price_operations
from shapewright.perf.software import TUNED
from shapewright.predict import predict
from shapewright.workload import Workload

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.operations import Operation
    from shapewright.predict import Prediction

SWEPT_FIELDS = {
    "hidden_size": "model",
    "intermediate_size": "model",
    "moe_intermediate_size": "model",
    "shared_expert_intermediate_size": "model",
    "vocab_size": "model",
    "num_heads": "model",
    "num_kv_heads": "model",
    "head_dim": "model",
    "num_layers": "model",
    "num_experts": "model",
    "micro_batch_size": "workload",
    "seq_len": "workload",
    "context_len": "workload",
    "tensor_parallel": "layout",
}
"""Fields that can be swept, and where they belong."""

MOST_POINTS = 160
# Widths: how far from the current value the sweep reaches, and the coarse grid it always has.
_REACH_FRACTION = 0.4
_WINDOWS_PER_DOUBLING = 8
_COARSE = 64
_NUM_COARSE = 44
_NUM_ODD = 22  # values off that grid, for the alignment classes below it
_MOST_CRESTS = 8  # best values that are named


@dataclass(frozen=True)
class SweepPoint:
    """One value of the swept field.

    Attributes:
        value: Value of the field.
        prediction: The step with it.
        alignment_bytes: Smallest alignment among products whose alignment the field moves; None where it moves none.
            [byte]
        num_waves: Waves of the watched product; None where its tiles are not modelled.
    """

    value: int
    prediction: Prediction
    alignment_bytes: int | None
    num_waves: int | None


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A swept dimension.

    Attributes:
        field: The swept field.
        current: Its value in the question.
        points: Values that can run, ascending.
        watched: The product whose waves are counted: the costliest whose tiles the field changes; empty for none.
        wave_ends: Among the best aligned values, the last ones before the watched product needs a wave more, ascending.
        crests: Values whose model rate is higher than at every neighbour nearby, best first.
    """

    field: str
    current: int
    points: tuple[SweepPoint, ...]
    watched: str
    wave_ends: tuple[int, ...]
    crests: tuple[int, ...]


def sweep_field(
    config: TransformerConfig,
    field: str,
    *,
    device: Device,
    workload: Workload,
    layout: ParallelLayout,
    values: Sequence[int] | None = None,
    uncalibrated: bool = False,
    software: str = TUNED,
) -> Sweep:
    """Predict the step at many values of one field.

    Args:
        config: The model.
        field: A key of SWEPT_FIELDS.
        device: The device.
        workload: What is run.
        layout: How it is spread.
        values: Values to take, at most MOST_POINTS; None for a grid around the current one.
        uncalibrated: Price as if nobody had measured the device.
        software: Training software that runs it, as predict takes it.

    Raises:
        ConfigError: the field cannot be swept, or none of the values can run.
    """
    if field not in SWEPT_FIELDS:
        raise ConfigError(f"{field[:60]!r} cannot be swept; choose one of {', '.join(SWEPT_FIELDS)}")
    owner = {"model": config, "workload": workload, "layout": layout}[SWEPT_FIELDS[field]]
    current = int(getattr(owner, field))
    if current < 1:
        raise ConfigError(f"{field} is {current} in this question: there is nothing to sweep; choose another field")
    grid = sorted({*(values if values is not None else values_around(config, field, current)), current})
    if len(grid) > MOST_POINTS + 1:
        raise ConfigError(f"{len(grid)} values of {field} are too many; give at most {MOST_POINTS}")
    cases: list[tuple[int, _Case]] = []
    problem = ""
    for value in grid:
        try:
            cases.append((value, _at(config, field, value, workload, layout)))
        except ShapewrightError as error:
            problem = str(error)
    _price_together([case for _, case in cases], device, uncalibrated=uncalibrated)
    found: list[tuple[int, Prediction]] = []
    for value, (shape, load, spread) in cases:
        try:
            prediction = predict(
                shape, device=device, workload=load, layout=spread, uncalibrated=uncalibrated, software=software
            )
            found.append((value, prediction))
        except ShapewrightError as error:
            problem = str(error)
    if not found:
        raise ConfigError(f"no value of {field} around {current} can run: {problem}")
    watched = _watch(found)
    alignments = _alignments([prediction for _, prediction in found])
    points = tuple(
        SweepPoint(value, prediction, alignment, _waves(prediction, watched))
        for (value, prediction), alignment in zip(found, alignments, strict=True)
    )
    widest = max((point.alignment_bytes or 0 for point in points), default=0)
    best_aligned = [point for point in points if (point.alignment_bytes or 0) == widest]
    return Sweep(
        field=field,
        current=current,
        points=points,
        watched=watched[0] if watched else "",
        wave_ends=tuple(
            here.value
            for here, after in pairwise(best_aligned)
            if here.num_waves is not None and after.num_waves is not None and here.num_waves < after.num_waves
        ),
        crests=_find_crests(points),
    )


def values_around(config: TransformerConfig, field: str, current: int) -> list[int]:
    """Values worth looking at around the current one: those that the other fields allow, aligned and not."""
    # The window stays where it is while the value moves a little: a reader's eye, and prices known, stay with it.
    middle = round(2.0 ** (round(_WINDOWS_PER_DOUBLING * log2(max(current, 1))) / _WINDOWS_PER_DOUBLING))
    is_derived = config.head_dim * config.num_heads == config.hidden_size
    if field == "num_heads" and is_derived:
        return [count for count in divisors(config.hidden_size) if 16 <= config.hidden_size // count <= 512]
    if field == "num_kv_heads":
        return list(divisors(config.num_heads))
    if field == "tensor_parallel":
        return [2**power for power in range(7)]
    if field in ("seq_len", "context_len"):
        return [2**power for power in range(7, 18)]
    if field in ("num_layers", "num_heads", "num_experts", "micro_batch_size"):
        low, high = max(1, middle // 2), max(2 * middle, 16)
        return _thinned(range(low, high + 1), 64)
    step = config.num_heads if field == "hidden_size" and is_derived else 1
    low, high = max(1, int(middle * (1.0 - _REACH_FRACTION))), int(middle * (1.0 + _REACH_FRACTION)) + 1
    if field == "head_dim":
        return _thinned(range(max(8, low), high + 1), 64)
    grain = lcm(_COARSE, step)
    coarse = _thinned(range(-(-low // grain) * grain, high + 1, grain), _NUM_COARSE)
    odd = _thinned(range(-(-low // step) * step, high + 1, step), _NUM_ODD)
    return sorted({*coarse, *odd})


def _thinned(values: range, most: int) -> list[int]:
    """At most so many of the values, evenly spread; the stride keeps odd and even ones in turn."""
    stride = max(1, -(-len(values) // most))
    return list(values[:: stride + (stride > 1 and stride % 2 == 0)])


_Case = tuple["TransformerConfig", Workload, ParallelLayout]


def _at(config: TransformerConfig, field: str, value: int, workload: Workload, layout: ParallelLayout) -> _Case:
    """The question with another value of the field."""
    changes: Mapping[str, Any] = {field: value}
    kind = SWEPT_FIELDS[field]
    return (
        with_changes(config, changes) if kind == "model" else config,
        replace(workload, **changes) if kind == "workload" else workload,
        replace(layout, **changes) if kind == "layout" else layout,
    )


def _price_together(cases: Sequence[_Case], device: Device, *, uncalibrated: bool) -> None:
    """Price the operations of all cases in one go, which pricing remembers: faster than one case after the other."""
    operations: list[Operation] = []
    for config, workload, layout in cases:
        with suppress(ShapewrightError):  # what cannot run is told by its own prediction
            operations += lower(config, workload, layout, node_size=device.node_size)
    with suppress(ShapewrightError):
        price_operations(operations, device, uncalibrated=uncalibrated)


class _Product(NamedTuple):
    """A product of a step: its price, and its time over all executions. [s]"""

    price: GemmPrice
    total_time_s: float


def _products(prediction: Prediction) -> dict[tuple[str, str], _Product]:
    """Products with tiles by name and pass."""
    return {
        (entry.operation.name, entry.operation.pass_name): _Product(entry.price, entry.total_time_s)
        for entry in prediction.operations
        if isinstance(entry.operation, Gemm) and isinstance(entry.price, GemmPrice) and entry.price.tile_m
    }


def _watch(found: Sequence[tuple[int, Prediction]]) -> tuple[str, str] | None:
    """The costliest forward product whose number of tiles changes over the sweep."""
    first, last = _products(found[0][1]), _products(found[-1][1])
    changed = [
        key
        for key in first
        if key in last and key[1] == "forward" and first[key].price.num_tiles != last[key].price.num_tiles
    ]
    return max(changed, key=lambda key: last[key].total_time_s, default=None)


def _waves(prediction: Prediction, watched: tuple[str, str] | None) -> int | None:
    product = _products(prediction).get(watched) if watched else None
    return int(product.price.num_waves) if product is not None else None


def _alignments(predictions: Sequence[Prediction]) -> list[int | None]:
    """Smallest alignment in each step among the products whose alignment is not the same in all of them."""
    known = [
        {key: int(product.price.alignment_bytes) for key, product in _products(one).items()} for one in predictions
    ]
    moved = {key for one in known for key, alignment in one.items() if alignment != known[0].get(key)}
    return [min((alignment for key, alignment in one.items() if key in moved), default=None) for one in known]


def _find_crests(points: Sequence[SweepPoint]) -> tuple[int, ...]:
    """Values that no other nearby beats in model rate."""
    reach = max(2, len(points) // 16)
    rates = [point.prediction.model_flops_per_s for point in points]
    crests = [
        index
        for index in range(len(points))
        if rates[index] > 0.0 and rates[index] == max(rates[max(0, index - reach) : index + reach + 1])
    ]
    ranked = sorted(crests, key=lambda index: -rates[index])[:_MOST_CRESTS]
    return tuple(points[index].value for index in ranked)
