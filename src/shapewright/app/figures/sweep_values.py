"""Sweep of one field of a scenario: predicted step, alignment and number of waves at each value.

The values around the current one include aligned and misaligned ones, so that the curve shows both the drops at the
ends of waves and the penalty of lower alignment classes. A hidden size is swept with the heads as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from math import log2
from typing import TYPE_CHECKING, Any, NamedTuple

from shapewright.core.errors import ConfigError, ShapewrightError
from shapewright.core.numeric import divisors, round_up
from shapewright.core.records import dataclass
from shapewright.core.texts import FieldName, with_fields
from shapewright.lowering.model import lower
from shapewright.lowering.operations.gemm import Gemm
from shapewright.models.transformer import with_changes
from shapewright.prediction.predict import predict
from shapewright.pricing.operations import price_operations
from shapewright.pricing.price import GemmPrice
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.operation import Operation
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario

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
"""Fields that can be swept, with the part of the scenario that they belong to."""

_WIDTHS = (
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "vocab_size",
)
MAX_POINTS = 160
# Widths: the sweep covers -40 % to +40 % of the current value, on an aligned grid plus misaligned values.
_REACH_FRACTION = 0.4
_WINDOWS_PER_DOUBLING = 8
_ALIGNED_STEP = 64
_NUM_ALIGNED = 44
_NUM_MISALIGNED = 22
_MAX_LOCAL_MAXIMA = 8


@dataclass(frozen=True)
class SweepPoint:
    """One value of the swept field.

    Attributes:
        value: Value of the field.
        prediction: Prediction of the step with that value.
        alignment_bytes: Smallest alignment among the GEMMs whose alignment the field changes; None if it changes none.
            [byte]
        num_waves: Waves of the sweep's wave_gemm; None if its tiles are not modelled.
    """

    value: int
    prediction: Prediction
    alignment_bytes: int | None
    num_waves: int | None


@dataclass(frozen=True, kw_only=True)
class FieldSweep:
    """Predictions over the values of one field.

    Attributes:
        field: The swept field.
        current: Its value in the scenario.
        points: Points of the values that can run, ascending.
        wave_gemm: Name of the GEMM whose waves are counted: the most expensive forward GEMM whose number of tiles
            changes over the sweep; empty if there is none.
        wave_ends: Among the best aligned values, the last ones before that GEMM needs another wave, ascending.
        local_maxima: Values with a higher model rate than their neighbours, best first.
    """

    field: str
    current: int
    points: tuple[SweepPoint, ...]
    wave_gemm: str
    wave_ends: tuple[int, ...]
    local_maxima: tuple[int, ...]


def sweep_field(scenario: Scenario, field: str, *, values: Sequence[int] | None = None) -> FieldSweep:
    """Predict the step at many values of one field.

    Args:
        field: A key of SWEPT_FIELDS.
        values: Values to take, at most MAX_POINTS; None for a grid around the current one.

    Raises:
        ConfigError: the field cannot be swept, or none of the values can run.
    """
    if field not in SWEPT_FIELDS:
        raise ConfigError(f"{field[:60]!r} cannot be swept; choose one of {', '.join(SWEPT_FIELDS)}")
    config, workload, layout = scenario.config, scenario.workload, scenario.layout
    owner = {"model": config, "workload": workload, "layout": layout}[SWEPT_FIELDS[field]]
    current = int(getattr(owner, field))
    if current < 1:
        raise ConfigError(
            with_fields("{field} is {current} in this scenario", field=FieldName(field), current=current)
            + " and cannot be swept; choose another field"
        )
    around = {*values_around(config, field, current), *_neighbors(field, current)} if values is None else {*values}
    grid = sorted({*around, current})
    if len(grid) > MAX_POINTS + 1:
        raise ConfigError(
            with_fields("{number} values of {field} are too many", number=len(grid), field=FieldName(field)),
            advice=f"give at most {MAX_POINTS}",
        )
    cases: list[tuple[int, _Case]] = []
    problem = ""
    for value in grid:
        try:
            cases.append((value, _with_value(config, field, value, workload, layout)))
        except ShapewrightError as error:
            problem = error.text
    _price_together([case for _, case in cases], scenario.device)
    found: list[tuple[int, Prediction]] = []
    for value, (shape, load, spread) in cases:
        try:
            prediction = predict(
                shape, device=scenario.device, workload=load, layout=spread, software=scenario.software
            )
            found.append((value, prediction))
        except ShapewrightError as error:
            problem = error.text
    if not found:
        raise ConfigError(
            with_fields("no value of {field} around {current} can run: ", field=FieldName(field), current=current)
            + problem
        )
    wave_gemm = _find_wave_gemm(found)
    alignments = _alignments([prediction for _, prediction in found])
    points = tuple(
        SweepPoint(value, prediction, alignment, _waves(prediction, wave_gemm))
        for (value, prediction), alignment in zip(found, alignments, strict=True)
    )
    widest = max((point.alignment_bytes or 0 for point in points), default=0)
    best_aligned = [point for point in points if (point.alignment_bytes or 0) == widest]
    return FieldSweep(
        field=field,
        current=current,
        points=points,
        wave_gemm=wave_gemm[0] if wave_gemm else "",
        wave_ends=tuple(
            here.value
            for here, after in pairwise(best_aligned)
            if here.num_waves is not None and after.num_waves is not None and here.num_waves < after.num_waves
        ),
        local_maxima=_find_local_maxima(points),
    )


def values_around(config: TransformerConfig, field: str, current: int) -> list[int]:
    """Values to sweep around the current one, aligned and misaligned, that are valid with the other fields."""
    # Rounded to an eighth of an octave: small changes of the value keep the axis range and reuse cached prices.
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
    low, high = max(1, int(middle * (1.0 - _REACH_FRACTION))), int(middle * (1.0 + _REACH_FRACTION)) + 1
    if field == "head_dim":
        return _thinned(range(max(8, low), high + 1), 64)
    aligned = _thinned(range(round_up(low, _ALIGNED_STEP), high + 1, _ALIGNED_STEP), _NUM_ALIGNED)
    return sorted({*aligned, *_thinned(range(low, high + 1), _NUM_MISALIGNED)})


def _neighbors(field: str, current: int) -> tuple[int, ...]:
    """One more, and the aligned widths next to the current one."""
    if field not in _WIDTHS:
        return ()
    above = round_up(current, _ALIGNED_STEP)
    return (max(current // _ALIGNED_STEP, 1) * _ALIGNED_STEP, current + 1, above, above + _ALIGNED_STEP)


def _thinned(values: range, most: int) -> list[int]:
    """At most ``most`` of the values, evenly spread; an odd stride keeps both odd and even values."""
    stride = max(1, -(-len(values) // most))
    return list(values[:: stride + (stride > 1 and stride % 2 == 0)])


_Case = tuple["TransformerConfig", Workload, ParallelLayout]


def _with_value(config: TransformerConfig, field: str, value: int, workload: Workload, layout: ParallelLayout) -> _Case:
    """Model, workload and layout with another value of the field."""
    changes: Mapping[str, Any] = {field: value}
    if field == "hidden_size" and not config.is_mla:
        changes = {field: value, "head_dim": config.head_dim}
    kind = SWEPT_FIELDS[field]
    return (
        with_changes(config, changes) if kind == "model" else config,
        replace(workload, **changes) if kind == "workload" else workload,
        replace(layout, **changes) if kind == "layout" else layout,
    )


def _price_together(cases: Sequence[_Case], device: Device) -> None:
    """Price the operations of all cases in one call, which fills the price cache faster than case by case."""
    operations: list[Operation] = []
    for config, workload, layout in cases:
        with suppress(ShapewrightError):  # reported when the case itself is predicted
            operations += lower(config, workload, layout, node_size=device.node_size)
    with suppress(ShapewrightError):
        price_operations(operations, device)


class _PricedGemm(NamedTuple):
    """Price of a GEMM and its total time over all executions. [s]"""

    price: GemmPrice
    total_time_s: float


def _tiled_gemms(prediction: Prediction) -> dict[tuple[str, str], _PricedGemm]:
    """GEMMs with modelled tiles, by name and pass."""
    return {
        (entry.operation.name, entry.operation.pass_name): _PricedGemm(entry.price, entry.total_time_s)
        for entry in prediction.operations
        if isinstance(entry.operation, Gemm) and isinstance(entry.price, GemmPrice) and entry.price.tile_m
    }


def _find_wave_gemm(found: Sequence[tuple[int, Prediction]]) -> tuple[str, str] | None:
    """The most expensive forward GEMM whose number of tiles changes over the sweep."""
    first, last = _tiled_gemms(found[0][1]), _tiled_gemms(found[-1][1])
    changed = [
        key
        for key in first
        if key in last and key[1] == "forward" and first[key].price.num_tiles != last[key].price.num_tiles
    ]
    return max(changed, key=lambda key: last[key].total_time_s, default=None)


def _waves(prediction: Prediction, wave_gemm: tuple[str, str] | None) -> int | None:
    gemm = _tiled_gemms(prediction).get(wave_gemm) if wave_gemm else None
    return int(gemm.price.num_waves) if gemm is not None else None


def _alignments(predictions: Sequence[Prediction]) -> list[int | None]:
    """Smallest alignment in each step among the GEMMs whose alignment varies over the steps."""
    known = [{key: int(gemm.price.alignment_bytes) for key, gemm in _tiled_gemms(one).items()} for one in predictions]
    moved = {key for one in known for key, alignment in one.items() if alignment != known[0].get(key)}
    return [min((alignment for key, alignment in one.items() if key in moved), default=None) for one in known]


def _find_local_maxima(points: Sequence[SweepPoint]) -> tuple[int, ...]:
    """Values with the highest model rate in their neighbourhood."""
    reach = max(2, len(points) // 16)
    rates = [point.prediction.model_flops_per_s for point in points]
    local_maxima = [
        index
        for index in range(len(points))
        if rates[index] > 0.0 and rates[index] == max(rates[max(0, index - reach) : index + reach + 1])
    ]
    ranked = sorted(local_maxima, key=lambda index: -rates[index])[:_MAX_LOCAL_MAXIMA]
    return tuple(points[index].value for index in ranked)
