"""The same question over several values of some fields: batch against context, degrees against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from shapewright.config import with_changes
from shapewright.errors import ShapewrightError, WorkloadError, close_names
from shapewright.fields import noted_fields
from shapewright.layout import ParallelLayout
from shapewright.perf.software import TUNED
from shapewright.predict import predict
from shapewright.shown import ShownInNotebook
from shapewright.workload import Workload

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.predict import Prediction

MOST_ROWS = 10_000
_MOST_VALUES = 1000
# Sizes of a model that are swept too; those that were derived from one follow it, as they do for flags.
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
    """One combination.

    Attributes:
        values: Value of each swept field.
        prediction: The predicted step; None where it cannot run.
        problem: Why it cannot; empty where it can.
    """

    values: Mapping[str, Any]
    prediction: Prediction | None
    problem: str = ""


@dataclass(frozen=True)
class Sweep(ShownInNotebook):
    """All combinations, the last field fastest.

    Attributes:
        config: The model.
        device: What it runs on.
        axes: Values of each swept field.
        rows: One for each combination.
        notes: What needs to be said, one line each.
    """

    config: TransformerConfig
    device: Device
    axes: Mapping[str, Sequence[Any]]
    rows: tuple[SweptStep, ...]
    notes: tuple[str, ...]


def predict_sweep(
    config: TransformerConfig,
    *,
    device: Device,
    workload: Workload,
    layout: ParallelLayout,
    axes: Mapping[str, Sequence[Any]],
    notes: tuple[str, ...] = (),
    uncalibrated: bool = False,
    software: str = TUNED,
) -> Sweep:
    """Predict a step for every combination of some fields' values.

    Args:
        config: The model.
        device: What it runs on.
        workload: What is run, but for the swept fields.
        layout: How it is spread, but for the swept fields.
        axes: Values by field name of Workload or ParallelLayout, or of SWEPT_SIZES.
        notes: What the caller has to say, kept beside the result.
        uncalibrated: Price as if nobody had measured the device.
        software: Training software that runs it, as predict takes it.

    Raises:
        WorkloadError: a field is not known, or there are too many combinations.
        ShapewrightError: no combination can run; why the first cannot.
    """
    for name in axes:
        _refuse_unknown(name)
    count = prod(len(values) for values in axes.values())
    if not 1 <= count <= MOST_ROWS:
        raise WorkloadError(f"a sweep of {count} combinations is not from 1 to {MOST_ROWS}; give fewer values")
    of_layout = {spec.name for spec in fields(ParallelLayout)}
    of_workload = {spec.name for spec in fields(Workload)}
    rows = []
    refusals = []
    for combination in product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        try:
            prediction = predict(
                with_changes(config, {name: value for name, value in values.items() if name in SWEPT_SIZES}),
                device=device,
                workload=replace(workload, **{name: value for name, value in values.items() if name in of_workload}),
                layout=replace(layout, **{name: value for name, value in values.items() if name in of_layout}),
                uncalibrated=uncalibrated,
                software=software,
            )
            rows.append(SweptStep(values, prediction))
        except ShapewrightError as error:
            refusals.append(error)
            rows.append(SweptStep(values, None, str(error)))
    if len(refusals) == len(rows):
        raise refusals[0]
    return Sweep(config, device, axes, tuple(rows), notes)


def parse_values(text: str) -> tuple[Any, ...]:
    """Read values between commas; ``a..b`` doubles from a to b, ``a..b:step`` adds.

    >>> parse_values("1,3,8..64"), parse_values("0..3000:1000"), parse_values("bf16,fp8")
    ((1, 3, 8, 16, 32, 64), (0, 1000, 2000, 3000), ('bf16', 'fp8'))

    Raises:
        WorkloadError: a range is not one, or has too many values.
    """
    values: list[Any] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if ".." in part:
            values += _read_range(part)
        else:
            values.append(int(part) if part.lstrip("-").isdigit() else part)
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


def _refuse_unknown(name: str) -> None:
    known = [spec.name for cls in (Workload, ParallelLayout) for spec, _ in noted_fields(cls)]
    known += SWEPT_SIZES
    if name not in known:
        hint = close_names(name, known)
        raise WorkloadError(f"cannot sweep {name!r}; {hint + ' ' if hint else ''}sweep one of {', '.join(known)}")
