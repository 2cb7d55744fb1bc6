"""Output of ``mfu``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.app.report.outputs.model import Output, described, take
from shapewright.app.report.outputs.predict import DeviceSummary, JobLayout, job_layout
from shapewright.models import TransformerConfig
from shapewright.prediction.utilization import describe_peak
from shapewright.workload import Workload

if TYPE_CHECKING:
    from shapewright.prediction.utilization import Utilization


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
class ReachableWithout:
    """The predicted step without one of its losses."""

    without: str = described("name of the loss")
    step_time_s: float = described("predicted time of the step without it")
    mfu: float = described("MFU without it")
    way_out: str = described("how to avoid it")


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
    without: list[ReachableWithout] = described("the predicted step without each loss alone")


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
    given: str = described("how the measurement was given: `seconds`, `tokens_per_s` or `tokens_per_s_per_device`")
    seconds: float = described("measured time of a step")
    num_devices: int = described("devices of the whole job")
    global_batch_size: int | None = described("sequences of one step over all replicas")
    tokens_per_s: float
    tokens_per_s_per_device: float
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
    config: TransformerConfig
    workload: Workload
    layout: JobLayout | None = described("the layout that the waterfall assumes; null without one")
    notes: list[str]


def mfu_output(found: Utilization) -> MfuOutput:
    """Output of a measured step."""
    chosen, dtype = found.result, found.workload.dtype
    rate = chosen.model_flops_per_s_per_device
    return take(
        MfuOutput,
        found,
        mfu=chosen.mfu,
        hfu=chosen.hfu,
        model_flops_per_s_per_device=rate,
        hardware_flops_per_s_per_device=chosen.hardware_flops_per_s_per_device,
        model_flops=chosen.flops.model_flops,
        hardware_flops=chosen.flops.hardware_flops,
        global_batch_size=found.workload.global_batch_size,
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
        layout=None if found.layout is None else job_layout(found.layout),
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
        without=[take(ReachableWithout, step) for step in found.reachable],
    )
