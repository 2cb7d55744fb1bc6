"""Sweep: predict a scenario for every combination of values of some fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import ShapewrightError, WorkloadError, close_names
from shapewright.core.fields import documented_fields
from shapewright.core.notebook import NotebookDisplay
from shapewright.core.notes import Refusal
from shapewright.core.ranges import read_integer
from shapewright.core.records import dataclass
from shapewright.models.transformer import with_changes
from shapewright.prediction.predict import predict
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario

MOST_ROWS = 10_000
_MOST_VALUES = 1000
_FLAGS = {"true": True, "false": False}
# Fields of TransformerConfig that can be swept; sizes derived from them change with them.
SWEPT_SIZES = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "num_experts",
    "num_experts_per_token",
    "moe_intermediate_size",
)


@dataclass(frozen=True)
class SweptStep:
    """One combination of values, with its prediction.

    Attributes:
        values: Value of each swept field.
        prediction: The predicted step; None where it cannot run.
        refusal: Why it cannot run; None where it can.
    """

    values: Mapping[str, Any]
    prediction: Prediction | None
    refusal: Refusal | None = None


@dataclass(frozen=True, repr=False)
class Sweep(NotebookDisplay):
    """Predictions of all combinations, in row-major order: the last field changes fastest.

    Attributes:
        config: The model.
        device: The device.
        axes: Values of each swept field.
        rows: One row per combination.
        notes: Notes on the whole sweep.
    """

    config: TransformerConfig
    device: Device
    axes: Mapping[str, Sequence[Any]]
    rows: tuple[SweptStep, ...]
    notes: tuple[str, ...]


def predict_sweep(
    scenario: Scenario, axes: Mapping[str, Sequence[Any]], *, notes: tuple[str, ...] | None = None
) -> Sweep:
    """Predict a step for every combination of the values of some fields.

    Args:
        axes: Values by name of a field of Workload or ParallelLayout, or of one of SWEPT_SIZES.
        notes: Notes of the result; by default those of the scenario.

    Raises:
        WorkloadError: a field is unknown, or there are too many combinations.
        ShapewrightError: no combination can run; the error is that of the first.
    """
    for name in axes:
        _check_swept_field(name)
    count = prod(len(values) for values in axes.values())
    if not 1 <= count <= MOST_ROWS:
        raise WorkloadError(f"a sweep of {count} combinations is not from 1 to {MOST_ROWS}; give fewer values")
    rows = []
    refusals = []
    for combination in product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        try:
            rows.append(SweptStep(values, _predict_at(scenario, values)))
        except ShapewrightError as error:
            refusals.append(error)
            rows.append(SweptStep(values, None, Refusal.of(error)))
    if len(refusals) == len(rows):
        raise refusals[0]
    return Sweep(scenario.config, scenario.device, axes, tuple(rows), scenario.notes if notes is None else notes)


def _predict_at(scenario: Scenario, values: Mapping[str, Any]) -> Prediction:
    sizes = {name: value for name, value in values.items() if name in SWEPT_SIZES}
    return predict(
        with_changes(scenario.config, sizes),
        device=scenario.device,
        workload=replace(scenario.workload, **_fields_of(Workload, values)),
        layout=replace(scenario.layout, **_fields_of(ParallelLayout, values)),
        software=scenario.software,
    )


def _fields_of(cls: type[Workload | ParallelLayout], values: Mapping[str, Any]) -> dict[str, Any]:
    return {spec.name: values[spec.name] for spec in fields(cls) if spec.name in values}


def parse_values(text: str) -> tuple[Any, ...]:
    """Parse comma-separated values; ``a..b`` doubles from a to b, ``a..b:step`` counts in steps.

    >>> parse_values("1,3,8..64"), parse_values("0..3000:1000"), parse_values("bf16,fp8"), parse_values("false,true")
    ((1, 3, 8, 16, 32, 64), (0, 1000, 2000, 3000), ('bf16', 'fp8'), (False, True))

    Raises:
        WorkloadError: a range is malformed, or has too many values.
    """
    values: list[Any] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if ".." in part:
            values += _read_range(part)
        else:
            number = read_integer(part)
            values.append(_FLAGS.get(part.lower(), part) if number is None else number)
    if not values:
        raise WorkloadError(f"{text!r} has no values; give some such as 1,2,4 or 1..64")
    return tuple(dict.fromkeys(values))


def _read_range(text: str) -> list[int]:
    ends, _, step_text = text.partition(":")
    first_text, _, last_text = ends.partition("..")
    try:
        first, last, step = int(first_text), int(last_text), int(step_text or 0)
    except ValueError:
        first, last, step = 0, -1, 0
    if first > last or first < 0 or step < 0 or (not step_text and first == 0) or (step_text and step == 0):
        raise WorkloadError(f"{text!r} is not a range; give 1..64, which doubles, or 0..4096:512, which adds 512")
    if step:
        found = list(range(first, last + 1, step)) if (last - first) // step < _MOST_VALUES else []
    else:
        found = [first << power for power in range((last // first).bit_length())]
    if not found:
        raise WorkloadError(f"{text!r} has more than {_MOST_VALUES} values; give a larger step")
    return found


def _check_swept_field(name: str) -> None:
    known = [spec.name for cls in (Workload, ParallelLayout) for spec, _ in documented_fields(cls)]
    known += SWEPT_SIZES
    if name not in known:
        hint = close_names(name, known)
        raise WorkloadError(f"cannot sweep {name!r}; {hint + ' ' if hint else ''}sweep one of {', '.join(known)}")
