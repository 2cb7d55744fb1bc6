"""Output of ``mfu``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shapewright.app.report.outputs.model import DeviceSummary, JobLayout, Output, described, job_layout, optional, take
from shapewright.core.records import dataclass
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.utilization.explain import ReachableStep
from shapewright.prediction.utilization.rates import describe_peak
from shapewright.prediction.utilization.trace_match import MatchedGroup
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.prediction.utilization.explain import Utilization
    from shapewright.prediction.utilization.trace_losses import TraceComparison


@dataclass(frozen=True, kw_only=True)
class ScopedDevice(DeviceSummary):
    """A device, its nodes, and the part of it that its numbers describe."""

    scope: str = described("part that the numbers describe: `card`, `die` or `package`")


@dataclass(frozen=True, kw_only=True)
class OtherPeak:
    """MFU over another peak of the device."""

    peak_flops_per_s: float = described("the peak")
    mfu: float = described("model FLOP/s over this peak")


@dataclass(frozen=True, kw_only=True)
class ConventionOutput:
    """Utilization by one FLOP convention. Hardware FLOPs and HFU are null where the convention has none."""

    formula: str = described("FLOPs of one token")
    used_by: str = described("projects and papers that use it")
    model_flops: float = described("model FLOPs of the whole step")
    hardware_flops: float | None = described("FLOPs of the whole step with recomputation")
    model_flops_per_s_per_device: float = described("model FLOP/s per device")
    hardware_flops_per_s_per_device: float | None = described("FLOP/s per device with recomputation")
    mfu: float
    hfu: float | None


@dataclass(frozen=True, kw_only=True)
class WaterfallOutput:
    """One part of the measured time."""

    name: str = described("name of the part")
    time_s: float = described("its time")
    why: str = described("its cause")
    fraction: float = described("its time over the measured time")


@dataclass(frozen=True, kw_only=True)
class ReachableOutput:
    """The predicted step."""

    software: str
    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    mfu: float = described("MFU of the predicted step")
    mfu_low: float = described("MFU at the upper end of the interval of the time")
    mfu_high: float = described("MFU at the lower end of the interval of the time")
    without: list[ReachableStep] = described("the predicted step without each loss alone")


@dataclass(frozen=True, kw_only=True)
class TraceLossOutput:
    """One way in which the traced step loses time."""

    name: str = described(
        "`slow_kernels`, `host_gaps`, `exposed_communication`, `recomputation` or `unpredicted_kernels`"
    )
    time_s: float = described("its time in a step")
    predicted_s: float = described("part of it that was predicted")
    gain_s: float = described("time that the fix saves at most")
    fraction: float = described("its time over the measured step")
    why: str = described("what the trace shows")
    fix: str = described("what to change")


@dataclass(frozen=True, kw_only=True)
class TraceOutput:
    """A trace of torch.profiler against the prediction of its step."""

    file: str = described("name of the file")
    num_steps: int = described("steps that it covers")
    step_s: float = described("measured time of a step")
    predicted_step_s: float = described("predicted time of a step")
    matched_fraction: float = described("share of the kernels' time that was matched to predicted operations")
    is_cpu: bool = described("whether it holds operators of a CPU instead of kernels")
    device_name: str = described("device as the trace names it; empty where it does not")
    groups: list[MatchedGroup] = described("kernels with their predictions, those that lose most first")
    losses: list[TraceLossOutput] = described("losses, the largest gain first")
    best_fix: TraceLossOutput | None = described("the loss whose fix gains most; null where nothing is lost")


@dataclass(frozen=True, kw_only=True)
class MfuOutput(Output):
    """A measured training step, by every FLOP convention, and its distance from the peak."""

    mfu: float = described("MFU by the chosen FLOP convention")
    hfu: float | None = described("HFU by that convention; null where it has none")
    convention: str = described("the chosen FLOP convention")
    model_flops_per_s_per_device: float = described("model FLOP/s per device")
    hardware_flops_per_s_per_device: float | None = described("FLOP/s per device with recomputation")
    model_flops: float = described("model FLOPs of the whole step")
    hardware_flops: float | None = described("FLOPs of the whole step with recomputation")
    given: str = described(
        "how the measurement was given: `seconds`, `tokens_per_s`, `tokens_per_s_per_device`, `steps_per_s` or "
        "`images_per_s`"
    )
    seconds: float = described("measured time of a step")
    num_devices: int = described("devices of the whole job")
    global_batch_size: int | None = described("sequences of one step over all replicas")
    tokens_per_s: float
    tokens_per_s_per_device: float
    images_per_s: float | None = optional("images per second of the whole job; absent without images")
    model_flops_per_image: float | None = optional("model FLOPs of the step per image; absent without images")
    device: ScopedDevice
    peak_flops_per_s: float = described("dense peak that MFU is a fraction of")
    peak_kind: str = described("what that peak describes")
    other_peaks: dict[str, OtherPeak] = described("other peaks in use by name: 2:4 sparse, of a die, of the card")
    sparse_peak_flops_per_s: float | None = described("peak with 2:4 sparsity; null where the data sheet has none")
    conventions: dict[str, ConventionOutput] = described("utilization by FLOP convention")
    waterfall: list[WaterfallOutput] = described(
        "parts of the measured time: model FLOPs at peak first, unexplained last; they add up to `seconds`"
    )
    reachable: ReachableOutput | None = described("the predicted step; null without a layout")
    trace: TraceOutput | None = described("the trace given with --trace against the prediction; null without one")
    config: TransformerConfig
    workload: Workload
    layout: JobLayout | None = described("the layout that the waterfall assumes; null without one")
    notes: list[str]


def mfu_output(found: Utilization) -> MfuOutput:
    """Output of a measured step."""
    chosen, dtype = found.result, found.workload.dtype
    rate, images_per_s = chosen.model_flops_per_s_per_device, found.images_per_s
    return take(
        MfuOutput,
        found,
        chosen,
        chosen.flops,
        found.workload,
        model_flops_per_s_per_device=rate,
        images_per_s=images_per_s,
        model_flops_per_image=images_per_s and chosen.flops.model_flops / (images_per_s * found.seconds),
        tokens_per_s_per_device=found.tokens_per_s / found.num_devices,
        device=take(ScopedDevice, found.device),
        peak_kind=describe_peak(found.device, dtype),
        other_peaks={
            kind: OtherPeak(peak_flops_per_s=peak, mfu=rate / peak) for kind, peak in found.other_peaks.items()
        },
        sparse_peak_flops_per_s=found.device.sparse_flops_per_s.get(dtype),
        conventions={result.name: take(ConventionOutput, result, **vars(result.flops)) for result in found.conventions},
        waterfall=[take(WaterfallOutput, part, fraction=part.time_s / found.seconds) for part in found.waterfall],
        reachable=_reachable(found),
        trace=trace_output(found.comparison),
        layout=None if found.layout is None else job_layout(found.layout),
    )


def trace_output(found: TraceComparison | None) -> TraceOutput | None:
    """Output of a trace against its prediction; None without one."""
    if found is None:
        return None
    losses = [take(TraceLossOutput, loss, fraction=loss.time_s / found.step_s) for loss in found.losses]
    best = found.best_fix
    return take(
        TraceOutput,
        found.trace,
        found,
        file=found.trace.path.name,
        groups=list(found.groups),
        losses=losses,
        best_fix=next((loss for loss in losses if best is not None and loss.name == best.name), None),
    )


def _reachable(found: Utilization) -> ReachableOutput | None:
    prediction = found.prediction
    if prediction is None:
        return None
    ends: Mapping[str, float] = {
        "mfu": prediction.step_time_s,
        "mfu_low": prediction.step_time_high_s,
        "mfu_high": prediction.step_time_low_s,
    }
    return take(
        ReachableOutput,
        prediction,
        **{name: found.mfu_at(time_s) for name, time_s in ends.items()},
        without=list(found.reachable),
    )
