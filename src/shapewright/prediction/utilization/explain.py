"""Explain a measured step: MFU and HFU, the losses between peak and measurement, and the reachable step times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.errors import LayoutError, ShapewrightError
from shapewright.core.notebook import NotebookDisplay
from shapewright.core.notes import Note
from shapewright.core.records import dataclass
from shapewright.core.texts import FieldName, with_fields
from shapewright.core.units import format_percent, format_seconds
from shapewright.hardware.nodes import check_allocation
from shapewright.lowering.checks import describe_long_sequence, validate_layout
from shapewright.lowering.counts import num_microbatches
from shapewright.models.flop_conventions import CONVENTIONS, get_convention
from shapewright.prediction.utilization.rates import (
    MEASUREMENT_SCOPES,
    MITIGATIONS,
    ConventionResult,
    WaterfallPart,
    build_waterfall,
    find_other_peaks,
    rate_by_convention,
    read_measurement,
)
from shapewright.prediction.utilization.trace_losses import TraceComparison, compare_trace
from shapewright.workload.images import count_images

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario
    from shapewright.prediction.utilization.kineto import Trace
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

_ROUNDING = 1e-9
"""Share of a step below which a loss is rounding error."""


@dataclass(frozen=True)
class ReachableStep:
    """The step time without one loss.

    Attributes:
        without: The loss; for ``unexplained``, the step is the predicted one, from which other losses are subtracted.
        step_time_s: Time of the step without it. [s]
        mfu: MFU of that step, by the chosen convention.
        way_out: How to reduce the loss.
    """

    without: str
    step_time_s: float
    mfu: float
    way_out: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Utilization(NotebookDisplay):
    """A measured step with its utilization and losses.

    Attributes:
        config: The model.
        device: The device.
        workload: The measured workload.
        seconds: Measured time of one step. [s]
        given: Name of the measurement, one of MEASUREMENT_SCOPES.
        num_devices: Devices of the job.
        convention: Name of the convention that mfu and hfu follow.
        conventions: Results by every convention.
        peak_flops_per_s: Dense peak, the denominator of MFU and HFU. [flop/s]
        other_peaks: Other denominators in use, by description. [flop/s]
        layout: Layout of the waterfall; None without a waterfall.
        prediction: The predicted step; None without a waterfall.
        waterfall: Parts that add up to the measured time; empty where no layout is possible.
        notes: Assumptions, and reasons why the measurement may be wrong.
        comparison: A trace of the step against its prediction; None without a trace or a prediction.
    """

    config: TransformerConfig
    device: Device
    workload: Workload
    seconds: float
    given: str
    num_devices: int
    convention: str
    conventions: tuple[ConventionResult, ...]
    peak_flops_per_s: float
    other_peaks: dict[str, float]
    layout: ParallelLayout | None
    prediction: Prediction | None
    waterfall: tuple[WaterfallPart, ...]
    notes: tuple[str, ...]
    comparison: TraceComparison | None = None

    @property
    def result(self) -> ConventionResult:
        """Rates by the chosen convention."""
        return next(result for result in self.conventions if result.name == self.convention)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole job."""
        return (self.workload.global_batch_size or 0) * self.workload.seq_len / self.seconds

    @property
    def images_per_s(self) -> float | None:
        """Images per second of the whole job; None without images."""
        images = count_images(self.config, self.workload) * (self.workload.global_batch_size or 0)
        return images / self.seconds if images else None

    @property
    def reachable(self) -> tuple[ReachableStep, ...]:
        """The predicted step, and the step without each single loss, the largest loss first.

        Not every loss can be recovered in full (kernels run below peak under the power limit), so these are bounds.
        """
        if self.prediction is None:
            return ()
        predicted_s = self.prediction.step_time_s
        losses = [part for part in self.waterfall if part.name in MITIGATIONS and part.name != "unexplained"]
        ranked = sorted(
            (part for part in losses if part.time_s > _ROUNDING * predicted_s), key=lambda part: -part.time_s
        )
        return (
            ReachableStep("unexplained", predicted_s, self.mfu_at(predicted_s), MITIGATIONS["unexplained"]),
            *(
                ReachableStep(
                    part.name,
                    predicted_s - part.time_s,
                    self.mfu_at(predicted_s - part.time_s),
                    MITIGATIONS[part.name],
                )
                for part in ranked
            ),
        )

    def mfu_at(self, step_time_s: float) -> float:
        """Return the MFU at another step time, by the chosen convention."""
        return self.result.mfu * self.seconds / step_time_s


def explain_utilization(
    scenario: Scenario,
    *,
    seconds: float | None = None,
    tokens_per_s: float | None = None,
    tokens_per_s_per_device: float | None = None,
    steps_per_s: float | None = None,
    images_per_s: float | None = None,
    num_devices: int,
    has_layout: bool = True,
    convention: str = "megatron",
    notes: tuple[str, ...] | None = None,
    trace: Trace | None = None,
) -> Utilization:
    """Compute the utilization of a measured step and explain its losses.

    Args:
        scenario: Training with a global batch; the measurement is compared with its software.
        seconds: Measured time of one optimizer step; give this or one of the next four. [s]
        tokens_per_s: Measured tokens per second of the whole job. [token/s]
        tokens_per_s_per_device: Measured tokens per second and device. [token/s]
        steps_per_s: Measured optimizer steps per second. [1/s]
        images_per_s: Measured images per second of the whole job. [image/s]
        has_layout: Whether the layout of the scenario is known; without it there is no waterfall.
        notes: Notes of the result; by default those of the scenario.
        trace: Trace of the step, which is compared with its prediction.

    Raises:
        WorkloadError: the measurement or the number of devices is invalid, or the workload is not training.
        LayoutError: the layout has another number of devices, does not divide the model, or uses part of a node.
        UnknownRateError: the device has no rate for the dtype.
    """
    config, device, workload = scenario.config, scenario.device, scenario.workload
    layout = scenario.layout if has_layout else None
    given, seconds = read_measurement(
        workload,
        num_devices,
        seconds=seconds,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s_per_device,
        steps_per_s=steps_per_s,
        images_per_s=images_per_s,
        num_images=count_images(config, workload),
    )
    if layout is not None and layout.num_devices != num_devices:
        raise LayoutError(
            f"the layout has {layout.num_devices} devices (tensor * pipeline * data * context = "
            f"{layout.tensor_parallel} * {layout.pipeline_parallel} * {layout.data_parallel} * "
            f"{layout.context_parallel}), but num_devices={num_devices}; change one of them"
        )
    check_allocation(num_devices, device)
    if layout is not None:
        validate_layout(config, workload, layout)
        num_microbatches(workload, layout)
    peak = device.peak_flops_per_s(workload.dtype)
    get_convention(convention)
    stages = 1 if layout is None else layout.pipeline_parallel
    results = tuple(
        rate_by_convention(name, scenario, seconds, num_devices, peak, num_stages=stages) for name in CONVENTIONS
    )
    chosen = next(result for result in results if result.name == convention)
    prediction: Prediction | None = None
    waterfall: tuple[WaterfallPart, ...] = ()
    found_notes = [*(scenario.notes if notes is None else notes), *describe_long_sequence(config, workload)]
    if layout is not None:
        try:
            prediction = scenario.predict()
            waterfall = build_waterfall(prediction, seconds, chosen.mfu * seconds, peak)
        except ShapewrightError as error:
            found_notes.append(Note("no waterfall: " + error.text, "no-waterfall"))
    found_notes += _measurement_notes(chosen, prediction, given, seconds)
    found_notes += () if trace is None else trace.notes
    return Utilization(
        config=config,
        device=device,
        workload=workload,
        seconds=seconds,
        given=given,
        num_devices=num_devices,
        convention=convention,
        conventions=results,
        peak_flops_per_s=peak,
        other_peaks=find_other_peaks(device, workload.dtype),
        layout=layout if prediction is not None else None,
        prediction=prediction,
        waterfall=waterfall,
        notes=tuple(found_notes),
        comparison=compare_trace(trace, prediction) if trace is not None and prediction is not None else None,
    )


def _measurement_notes(
    chosen: ConventionResult, prediction: Prediction | None, given: str, seconds: float
) -> list[Note]:
    """Return notes where a measurement is implausible or outside the predicted interval."""
    notes = []
    if chosen.mfu > 1.0:
        problem = f"MFU of {format_percent(chosen.mfu)} by convention {chosen.name} exceeds the peak of the device"
        advice = with_fields(
            "check {given} ({scope}?), {num_devices}, {global_batch_size} and {dtype}",
            given=FieldName(given),
            scope=MEASUREMENT_SCOPES[given],
        )
        notes.append(Note(f"{problem}; " + advice, "implausible", given))
    if prediction is None:
        return notes
    low_s, high_s = prediction.step_time_low_s, prediction.step_time_high_s
    interval = (
        f"the predicted {format_seconds(prediction.step_time_s)} ({format_seconds(low_s)} to {format_seconds(high_s)})"
    )
    if seconds < prediction.step_time_s:
        text = f"measured faster than {interval}: unexplained is negative"
        if seconds < low_s:
            text += ", by more than the interval"
        notes.append(Note(text, "faster-than-predicted", given))
    elif seconds > high_s:
        text = f"measured slower than {interval}: the prediction does not include the cause"
        notes.append(Note(text, "slower-than-predicted", given))
    needed = prediction.memory.total_bytes / prediction.device.memory_bytes
    if needed > 1.0:
        text = f"this layout needs an estimated {format_percent(needed)} of the device memory; check the layout"
        notes.append(Note(text, "does-not-fit", "layout"))
    return notes
