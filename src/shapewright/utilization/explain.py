"""From a measured step to MFU and HFU, where the rest of the peak went, and what is reachable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.errors import LayoutError, ShapewrightError
from shapewright.hardware.nodes import check_units
from shapewright.lowering import describe_overlong, num_microbatches, validate_layout
from shapewright.lowering.conventions import CONVENTIONS, get_convention
from shapewright.perf.software import TUNED
from shapewright.predict import predict
from shapewright.shown import ShownInNotebook
from shapewright.units import format_percent, format_seconds
from shapewright.utilization.measured import OF_WHAT, read_measurement
from shapewright.utilization.rates import ConventionResult, find_other_peaks, rate_by
from shapewright.utilization.waterfall import WAYS_OUT, WaterfallPart, pour_waterfall

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.predict import Prediction
    from shapewright.workload import Workload

_ROUNDING = 1e-9
"""Share of a step below which a loss is what sums of seconds leave over."""


@dataclass(frozen=True)
class ReachableStep:
    """The step without one loss.

    Attributes:
        without: The loss; ``unexplained`` stands for the predicted step, the others are taken from that.
        step_time_s: The step then. [s]
        mfu: MFU then, by the chosen convention.
        way_out: What makes the loss smaller.
    """

    without: str
    step_time_s: float
    mfu: float
    way_out: str


@dataclass(frozen=True, kw_only=True)
class Utilization(ShownInNotebook):
    """What a measured step means.

    Attributes:
        config: The model.
        device: The device.
        workload: What was run.
        seconds: Measured time of one step. [s]
        given: What was measured: ``seconds``, ``tokens_per_s`` or ``tokens_per_s_per_device``.
        num_devices: Devices of the job.
        convention: Name of the convention that mfu and hfu follow.
        conventions: Results by every convention.
        peak_flops_per_s: The dense peak that utilization is a fraction of. [flop/s]
        other_peaks: Peaks that somebody else might divide by, by what they are. [flop/s]
        layout: The layout that the waterfall assumes; None where there is no waterfall.
        prediction: The predicted step; None where there is no waterfall.
        waterfall: Parts that add up to the measured time; empty where there can be none.
        notes: What was assumed and what looks wrong, one line each.
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

    @property
    def result(self) -> ConventionResult:
        """Rates by the chosen convention."""
        return next(result for result in self.conventions if result.name == self.convention)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole job."""
        return (self.workload.global_batch_size or 0) * self.workload.seq_len / self.seconds

    @property
    def reachable(self) -> tuple[ReachableStep, ...]:
        """The predicted step, and what it would be without each of its losses alone, the largest first.

        A loss that cannot be had back in full, such as the kernels' rate under power, is a bound and no promise.
        """
        if self.prediction is None:
            return ()
        predicted_s = self.prediction.step_time_s
        losses = [part for part in self.waterfall if part.name in WAYS_OUT and part.name != "unexplained"]
        ranked = sorted(
            (part for part in losses if part.time_s > _ROUNDING * predicted_s), key=lambda part: -part.time_s
        )
        return (
            ReachableStep("unexplained", predicted_s, self.mfu_at(predicted_s), WAYS_OUT["unexplained"]),
            *(
                ReachableStep(
                    part.name,
                    predicted_s - part.time_s,
                    self.mfu_at(predicted_s - part.time_s),
                    WAYS_OUT[part.name],
                )
                for part in ranked
            ),
        )

    def mfu_at(self, step_time_s: float) -> float:
        """MFU, by the chosen convention, if the step took another time."""
        return self.result.mfu * self.seconds / step_time_s


def explain_utilization(
    config: TransformerConfig,
    *,
    device: Device,
    workload: Workload,
    seconds: float | None = None,
    tokens_per_s: float | None = None,
    tokens_per_s_per_device: float | None = None,
    num_devices: int,
    layout: ParallelLayout | None,
    convention: str = "megatron",
    notes: tuple[str, ...] = (),
    uncalibrated: bool = False,
    software: str = TUNED,
) -> Utilization:
    """Turn a measured step into utilization, and explain it.

    Args:
        config: The model.
        device: What it ran on.
        workload: Training, with its global batch.
        seconds: Measured time of one optimiser step; or one of the next two instead. [s]
        tokens_per_s: Measured tokens of a second over the whole job. [token/s]
        tokens_per_s_per_device: The same, divided by the devices. [token/s]
        num_devices: Devices that took part.
        layout: How it was spread; None leaves the waterfall out.
        convention: The FLOP convention of the headline.
        notes: What the caller assumed, to be kept beside the result.
        uncalibrated: Price as if nobody had measured the device.
        software: Training software that the step is held against, as predict takes it.

    Raises:
        WorkloadError: the measurement or devices make no sense, or this is no training step.
        LayoutError: the layout has another number of devices, does not divide the model, or leaves a part of a node.
        UnknownRateError: the device has no rate for the dtype.
    """
    given, seconds = read_measurement(
        workload,
        num_devices,
        seconds=seconds,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s_per_device,
    )
    if layout is not None and layout.num_devices != num_devices:
        raise LayoutError(
            f"the layout has {layout.num_devices} devices (tensor * pipeline * data * context = "
            f"{layout.tensor_parallel} * {layout.pipeline_parallel} * {layout.data_parallel} * "
            f"{layout.context_parallel}), but gpus={num_devices}; change one of them"
        )
    check_units(num_devices, device)
    if layout is not None:
        validate_layout(config, workload, layout)
        num_microbatches(workload, layout)
    peak = device.peak_flops_per_s(workload.dtype)
    get_convention(convention)
    stages = 1 if layout is None else layout.pipeline_parallel
    results = tuple(
        rate_by(name, config, workload, seconds, num_devices, peak, num_stages=stages) for name in CONVENTIONS
    )
    chosen = next(result for result in results if result.name == convention)
    prediction: Prediction | None = None
    waterfall: tuple[WaterfallPart, ...] = ()
    said = [*notes, *describe_overlong(config, workload)]
    if layout is not None:
        try:
            prediction = predict(
                config,
                device=device,
                workload=workload,
                layout=layout,
                uncalibrated=uncalibrated,
                software=software,
            )
            waterfall = pour_waterfall(prediction, seconds, chosen.mfu * seconds, peak)
        except ShapewrightError as error:
            said.append(f"no waterfall: {error}")
    said += _doubts(chosen, prediction, given, seconds)
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
        notes=tuple(said),
    )


def _doubts(chosen: ConventionResult, prediction: Prediction | None, given: str, seconds: float) -> list[str]:
    """What looks wrong, or at least needs to be said, about a measurement."""
    said = []
    if chosen.mfu > 1.0:
        said.append(
            f"MFU of {format_percent(chosen.mfu)} by convention {chosen.name} is more than the device can do; check "
            f"{given} ({OF_WHAT[given]}?), gpus, global batch and dtype"
        )
    if prediction is None:
        return said
    low_s, high_s = prediction.step_time_low_s, prediction.step_time_high_s
    interval = (
        f"the predicted {format_seconds(prediction.step_time_s)} ({format_seconds(low_s)} to {format_seconds(high_s)})"
    )
    if seconds < prediction.step_time_s:
        said.append(
            f"measured faster than {interval}: unexplained is negative"
            + (", and by more than the interval allows" if seconds < low_s else "")
        )
    elif seconds > high_s:
        said.append(f"measured slower than {interval}: what the prediction does not know took the rest")
    needed = prediction.memory.total_bytes / prediction.device.memory_bytes
    if needed > 1.0:
        said.append(
            f"this layout is estimated to need {format_percent(needed)} of the device's memory: was it another layout?"
        )
    return said
