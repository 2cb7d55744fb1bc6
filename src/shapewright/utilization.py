"""Utilization: from a measured step to MFU and HFU, where the rest of the peak went, and what is reachable.

The waterfall starts with the time that the model's arithmetic takes at the dense peak, which is MFU times the measured
time, and adds one loss after another. Losses come from the predicted step of the same job, operation by operation; what
the prediction does not explain is named so. The parts add up to the measured time.

Legend for one GEMM bound by arithmetic: i its arithmetic at peak, c its predicted arithmetic time, A its alignment
factor, T its tile efficiency, W its wave efficiency. c = c (1 - A) + c A (1 - T) + c A T (1 - W) + [c A T W - i] + i.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING

from shapewright.errors import LayoutError, ShapewrightError, WorkloadError
from shapewright.hardware import list_devices, load_device
from shapewright.hardware.nodes import check_units
from shapewright.lowering import num_microbatches, validate_layout
from shapewright.lowering.conventions import CONVENTIONS, StepFlops, count_step_flops, get_convention
from shapewright.operations import Attention, Collective, Pointwise
from shapewright.perf.price import GemmPrice
from shapewright.predict import predict
from shapewright.shown import ShownInNotebook
from shapewright.units import format_percent, format_seconds

if TYPE_CHECKING:
    from shapewright.adding_up import PricedOperation
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.predict import Prediction
    from shapewright.workload import Workload

LOSSES = {
    "uneven": "busiest device's arithmetic less the average that the convention counts: uneven stages, padding, copies",
    "alignment": "contiguous dimensions that force kernels with narrower loads",
    "tiles": "output tiles that reach beyond the matrix",
    "waves": "SMs idle in the last wave of tiles",
    "kernels": "rate of the GEMM kernels under the peak: clock under power, operand feed, fill, start",
    "attention": "fused attention beyond its counted arithmetic at peak; below 0 where masks skip more than is lost",
    "memory_bound": "norms, activations, losses and GEMMs that wait for memory",
    "recompute": "activations computed again",
    "optimizer": "gradient norm and optimiser step",
    "communication": "collectives that nothing hides",
    "offload": "copies to and from the host, and its optimiser step, that nothing hides",
    "bubble": "the pipeline's stages waiting for each other",
    "unexplained": "measured less predicted: data loading, stragglers, host, kernels unlike those assumed",
}
"""Parts of the waterfall after the model's arithmetic, in order, and what each is."""

WAYS_OUT = {
    "uneven": "stages with as many layers each; a padded vocabulary that the ranks divide",
    "alignment": "widths and vocabulary that are multiples of 64: shapewright check",
    "tiles": "sizes that are multiples of the tiles: shapewright search",
    "waves": "sizes or a batch that fill whole waves: shapewright search",
    "kernels": "larger products; the rest is the device under power",
    "attention": "fused attention, wider heads",
    "memory_bound": "fused kernels, larger products, chunked loss",
    "recompute": "none, or selective, where memory allows: shapewright memory",
    "optimizer": "sharded or narrower states: --zero-stage, --optimizer",
    "communication": "smaller tensor groups, none across nodes, larger micro-batches: shapewright plan",
    "offload": "less offloaded: recomputation, sharding, more devices: shapewright memory",
    "bubble": "more micro-batches, model chunks, fewer stages: shapewright plan",
    "unexplained": "data loading, stragglers, host, software",
}
"""What makes each loss smaller."""

SHORTEST_STEP_S, LONGEST_STEP_S, MOST_DEVICES = 1e-9, 1e9, 2**24
"""Measurements outside these are mistakes: a nanosecond, thirty years, more devices than a layout can have."""

MODEL_PART = "model_flops"
_MODEL_WHY = "the model's arithmetic at the dense peak: MFU times the measured time"

# Dies of one card have files of their own; their names differ in the last word only.
_SCOPE_WORDS = ("-gcd", "-card")


@dataclass(frozen=True)
class WaterfallPart:
    """One step from peak to measured.

    Attributes:
        name: ``model_flops`` or one of LOSSES.
        time_s: What it takes of the measured time; negative where it gives some back. [s]
        why: What it is.
    """

    name: str
    time_s: float
    why: str


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


@dataclass(frozen=True)
class ConventionResult:
    """Rates by one FLOP convention.

    Attributes:
        name: The convention.
        formula: FLOPs per token.
        used_by: Who publishes by it.
        flops: FLOPs of the step over all devices.
        model_flops_per_s_per_device: Model rate. [flop/s]
        hardware_flops_per_s_per_device: The same with recomputation; None where the convention has none. [flop/s]
        mfu: Model rate over the dense peak.
        hfu: Hardware rate over the dense peak.
    """

    name: str
    formula: str
    used_by: str
    flops: StepFlops
    model_flops_per_s_per_device: float
    hardware_flops_per_s_per_device: float | None
    mfu: float
    hfu: float | None


@dataclass(frozen=True, kw_only=True)
class Utilization(ShownInNotebook):
    """What a measured step means.

    Attributes:
        config: The model.
        device: The device.
        workload: What was run.
        seconds: Measured time of one step. [s]
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
        ranked = sorted((part for part in losses if part.time_s > 0.0), key=lambda part: -part.time_s)
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
    seconds: float,
    num_devices: int,
    layout: ParallelLayout | None,
    convention: str = "megatron",
    notes: tuple[str, ...] = (),
    uncalibrated: bool = False,
) -> Utilization:
    """Turn a measured step time into utilization, and explain it.

    Args:
        config: The model.
        device: What it ran on.
        workload: Training, with its global batch.
        seconds: Measured time of one optimiser step. [s]
        num_devices: Devices that took part.
        layout: How it was spread; None leaves the waterfall out.
        convention: The FLOP convention of the headline.
        notes: What the caller assumed, to be kept beside the result.
        uncalibrated: Price as if nobody had measured the device.

    Raises:
        WorkloadError: seconds or devices make no sense, or this is no training step.
        LayoutError: the layout has another number of devices, does not divide the model, or leaves a part of a node.
        UnknownRateError: the device has no rate for the dtype.
    """
    check_measurement(workload, seconds, num_devices)
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
    results = tuple(_rate(name, config, workload, seconds, num_devices, peak) for name in CONVENTIONS)
    chosen = next(result for result in results if result.name == convention)
    prediction: Prediction | None = None
    waterfall: tuple[WaterfallPart, ...] = ()
    said = list(notes)
    if layout is not None:
        try:
            prediction = predict(config, device=device, workload=workload, layout=layout, uncalibrated=uncalibrated)
            waterfall = _pour(prediction, seconds, chosen.mfu * seconds, peak)
        except ShapewrightError as error:
            said.append(f"no waterfall: {error}")
    said += _doubts(chosen, prediction, seconds)
    return Utilization(
        config=config,
        device=device,
        workload=workload,
        seconds=seconds,
        num_devices=num_devices,
        convention=convention,
        conventions=results,
        peak_flops_per_s=peak,
        other_peaks=_find_other_peaks(device, workload.dtype),
        layout=layout if prediction is not None else None,
        prediction=prediction,
        waterfall=waterfall,
        notes=tuple(said),
    )


def check_measurement(workload: Workload, seconds: float, num_devices: int) -> None:
    """Refuse what cannot be a measurement.

    Args:
        workload: What was run.
        seconds: Measured time of one optimiser step. [s]
        num_devices: Devices that took part.

    Raises:
        WorkloadError: it is no training step, or a number is out of range.
    """
    if not workload.is_training:
        raise WorkloadError(f"utilization is explained for training, not phase={workload.phase!r}; leave --phase out")
    if not SHORTEST_STEP_S <= seconds <= LONGEST_STEP_S:
        raise WorkloadError(
            f"seconds={seconds!r} must be from {SHORTEST_STEP_S:g} to {LONGEST_STEP_S:g}; give the time of one "
            f"optimiser step"
        )
    if not 1 <= num_devices <= MOST_DEVICES:
        raise WorkloadError(f"gpus={num_devices} must be from 1 to {MOST_DEVICES}; give the devices of the whole job")
    if workload.global_batch_size is None:
        raise WorkloadError("global_batch_size is missing; give the sequences of one optimiser step over all replicas")


def _rate(
    name: str, config: TransformerConfig, workload: Workload, seconds: float, num_devices: int, peak: float
) -> ConventionResult:
    """Rates by one convention."""
    convention = get_convention(name)
    flops = count_step_flops(config, workload, workload.global_batch_size or 0, name)
    model = flops.model_flops / (seconds * num_devices)
    hardware = None if flops.hardware_flops is None else flops.hardware_flops / (seconds * num_devices)
    return ConventionResult(
        name=name,
        formula=convention.formula,
        used_by=convention.used_by,
        flops=flops,
        model_flops_per_s_per_device=model,
        hardware_flops_per_s_per_device=hardware,
        mfu=model / peak,
        hfu=None if hardware is None else hardware / peak,
    )


def _find_other_peaks(device: Device, dtype: str) -> dict[str, float]:
    """Dense peaks of the card that a die is half of, or of a die of it, where they have files."""
    stem = device.name
    for word in _SCOPE_WORDS:
        stem = stem.removesuffix(word)
    if stem == device.name:
        return {}
    siblings = [
        name for name in list_devices() if name != device.name and name in {stem + word for word in _SCOPE_WORDS}
    ]
    found = {name: load_device(name).dense_flops_per_s.get(dtype) for name in siblings}
    return {f"dense, {name}": rate for name, rate in found.items() if rate is not None}


def _pour(prediction: Prediction, seconds: float, model_s: float, peak: float) -> tuple[WaterfallPart, ...]:
    """Divide the measured time into the model's arithmetic at peak and the losses."""
    losses: dict[str, list[float]] = {name: [] for name in LOSSES}
    arithmetic_s: list[float] = []
    for entry in prediction.busiest_operations:
        _attribute(entry, peak, losses, arithmetic_s)
    losses["bubble"].append(prediction.bubble_time_s)
    losses["uneven"] = [*arithmetic_s, -model_s]
    losses["unexplained"] = [seconds, -prediction.step_time_s]
    parts = [WaterfallPart(MODEL_PART, model_s, _MODEL_WHY)]
    return (*parts, *(WaterfallPart(name, fsum(losses[name]), why) for name, why in LOSSES.items()))


def _attribute(entry: PricedOperation, peak: float, losses: dict[str, list[float]], arithmetic_s: list[float]) -> None:
    """Divide the time of one operation."""
    operation, price, total_s = entry.operation, entry.price, entry.total_time_s
    if operation.pass_name == "recompute":
        losses["recompute"].append(total_s)
    elif isinstance(operation, Collective):
        losses["offload" if operation.is_host else "communication"].append(total_s)
    elif isinstance(operation, Pointwise):
        losses["optimizer" if operation.pass_name == "step" else "memory_bound"].append(total_s)
    else:
        repeats = int(operation.repeats)
        ideal_s = float(operation.flops) * repeats / peak
        arithmetic_s.append(ideal_s)
        if isinstance(operation, Attention):
            losses["attention"].append(total_s - ideal_s)
        elif price.compute_s < price.memory_s:
            losses["memory_bound"].append(total_s - ideal_s)
        elif not isinstance(price, GemmPrice):
            losses["kernels"].append(total_s - ideal_s)
        else:
            compute_s = float(price.compute_s) * repeats
            kept_s = compute_s
            for name, efficiency in (
                ("alignment", price.alignment_factor),
                ("tiles", price.tile_efficiency),
                ("waves", price.wave_efficiency),
            ):
                # A kernel may win back part of its last wave: no loss reaches below the arithmetic itself.
                left_s = max(kept_s * min(float(efficiency), 1.0), min(ideal_s, kept_s))
                losses[name].append(kept_s - left_s)
                kept_s = left_s
            losses["kernels"] += [total_s - compute_s, kept_s - ideal_s]


def _doubts(chosen: ConventionResult, prediction: Prediction | None, seconds: float) -> list[str]:
    """What looks wrong, or at least needs to be said, about a measurement."""
    said = []
    if chosen.mfu > 1.0:
        said.append(
            f"MFU of {format_percent(chosen.mfu)} by convention {chosen.name} is more than the device can do; check "
            f"seconds (of a whole optimiser step?), gpus, global batch and dtype"
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
