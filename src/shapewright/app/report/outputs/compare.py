"""Output of ``compare``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shapewright.app.report.outputs.model import (
    DeviceSummary,
    JobLayout,
    Output,
    described,
    job_layout,
    problem_keys,
    summarize_device,
    take,
)
from shapewright.core.records import dataclass
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.prediction.compare import ComparedDevice, Comparison
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.sweep import Sweep, SweptStep


@dataclass(frozen=True, kw_only=True)
class ComparedDeviceOutput(DeviceSummary):
    """One device. Numbers of the step are null where it cannot run the job."""

    runs: bool = described("whether it can run the job")
    problem: str
    problem_code: str
    problem_field: str
    problem_statement: str = described("`problem` without the name of the device")
    fits: bool = described("whether it can run the job and has enough memory")
    capacity_bytes: float
    usd_per_hour: float | None
    tdp_watts: float | None = described("board power, an upper bound of what the device draws")
    tokens_per_s: float | None
    speed_fraction: float | None = described("`tokens_per_s` over that of the first device that runs the job")
    tokens_per_usd: float | None = described("tokens per dollar of one device; null without a price")
    tokens_per_joule: float | None = described("tokens per joule at the board power, a lower bound")
    bound_by: str | None = described("the largest of `bound_fractions`")
    bound_fractions: dict[str, float] = described(
        "share of the step spent on `compute`, `memory`, `latency`, `communication` and `bubble`; they add up to 1"
    )
    step_time_s: float | None
    step_time_low_s: float | None
    step_time_high_s: float | None
    tokens_per_s_per_device: float | None
    mfu: float | None
    hfu: float | None
    mbu: float | None
    total_bytes: float | None
    workload: Workload | None = described("every field of Workload, with the format that this device runs")


@dataclass(frozen=True, kw_only=True)
class CompareOutput(Output):
    """The same job on several devices. Keys of the job are null where no device runs it."""

    config: TransformerConfig | None
    software: str | None
    layout: JobLayout | None
    workload: Workload | None = described("every field of Workload, as the first device that runs the job has them")
    parameters: int | None
    tokens_per_step: int | None
    devices: list[ComparedDeviceOutput] = described("the devices, in the order given")
    notes: list[str]


def compare_output(found: Comparison) -> CompareOutput:
    """Output of a comparison."""
    first = next((row.prediction for row in found.rows if row.prediction is not None), None)
    return CompareOutput(
        config=None if first is None else first.config,
        software=None if first is None else first.software,
        layout=None if first is None else job_layout(first.layout),
        workload=None if first is None else first.workload,
        parameters=None if first is None else first.parameters.total,
        tokens_per_step=None if first is None else first.tokens_per_step,
        devices=[compared_device(found, row) for row in found.rows],
        notes=list(found.notes),
    )


def compared_device(found: Comparison, row: ComparedDevice) -> ComparedDeviceOutput:
    """One device of a comparison."""
    prediction = row.prediction
    device = take(DeviceSummary, row.device)
    return take(
        ComparedDeviceOutput,
        row,
        **vars(device),
        runs=prediction is not None,
        **problem_keys(row.refusal),
        problem_statement="" if row.refusal is None else row.refusal.statement,
        capacity_bytes=row.device.memory_bytes,
        tdp_watts=row.device.tdp_watts,
        speed_fraction=found.speed_fraction(row),
        bound_by=row.bound_by or None,
        workload=None if prediction is None else prediction.workload,
        **step_numbers(prediction),
    )


@dataclass(frozen=True, kw_only=True)
class SweptRow:
    """One combination of values. Numbers are null where the step cannot run."""

    values: Mapping[str, Any] = described("value of each swept field")
    problem: str
    problem_code: str
    problem_field: str
    step_time_s: float | None
    step_time_low_s: float | None
    step_time_high_s: float | None
    tokens_per_step: int | None
    tokens_per_s_per_device: float | None
    tokens_per_s_per_sequence: float | None = described("tokens per second of one sequence; null in training")
    mfu: float | None
    hfu: float | None
    mbu: float | None
    parameters: int | None
    total_bytes: float | None
    fits: bool = described("whether the step can run and fits in memory")


@dataclass(frozen=True, kw_only=True)
class SweepOutput(Output):
    """One row per combination of the swept values, the last field fastest."""

    config: TransformerConfig
    device: DeviceSummary
    workload: Workload = described("every field of Workload, of the first combination that can run")
    axes: Mapping[str, list[Any]] = described("values by swept field")
    rows: list[SweptRow] = described("the combinations")
    notes: list[str]
    source: str


def sweep_output(found: Sweep, source: str = "") -> SweepOutput:
    """Output of a sweep over a scenario whose model was read from a source."""
    first = next(row.prediction for row in found.rows if row.prediction is not None)
    return take(
        SweepOutput,
        found,
        device=summarize_device(found.device),
        workload=first.workload,
        axes={name: list(values) for name, values in found.axes.items()},
        rows=[swept_row(row) for row in found.rows],
        source=source,
    )


_STEP_NUMBERS = (
    "step_time_s",
    "step_time_low_s",
    "step_time_high_s",
    "tokens_per_s_per_device",
    "mfu",
    "hfu",
    "mbu",
)


def step_numbers(prediction: Prediction | None) -> dict[str, Any]:
    """Numbers of a predicted step that every table of steps has; None without a prediction."""
    numbers = {name: None if prediction is None else getattr(prediction, name) for name in _STEP_NUMBERS}
    return {**numbers, "total_bytes": None if prediction is None else prediction.memory.total_bytes}


def swept_row(row: SweptStep) -> SweptRow:
    """One combination of a sweep."""
    prediction = row.prediction
    is_inference = prediction is not None and not prediction.workload.is_training
    return SweptRow(
        values=row.values,
        **problem_keys(row.refusal),
        tokens_per_s_per_sequence=prediction.workload.query_len / prediction.step_time_s
        if prediction is not None and is_inference
        else None,
        tokens_per_step=None if prediction is None else prediction.tokens_per_step,
        parameters=None if prediction is None else prediction.parameters.total,
        fits=prediction is not None and prediction.memory.total_bytes <= prediction.device.memory_bytes,
        **step_numbers(prediction),
    )
