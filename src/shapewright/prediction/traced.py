"""Prediction of a traced PyTorch module on one device: time, interval, utilization, and memory with the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.errors import WorkloadError
from shapewright.core.notebook import NotebookDisplay
from shapewright.core.notes import Note
from shapewright.core.records import dataclass
from shapewright.core.units import format_bytes, format_percent
from shapewright.lowering.flops import sum_flops
from shapewright.lowering.operations import Collective, Operation
from shapewright.lowering.torch_trace.trace import Trace
from shapewright.memory.estimate import CUDA_CONTEXT_BYTES
from shapewright.prediction.composition import PricedOperation, compose_sequence, overlap_communication
from shapewright.prediction.predict import calibration_sources, widen_by_software
from shapewright.prediction.traced_optimizer import optimizer_step
from shapewright.prediction.warnings import warn_of_calibration
from shapewright.pricing.operations import price_operations
from shapewright.pricing.software import TUNED_SOFTWARE

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.lowering.torch_trace.trace import TracedMemory
    from shapewright.prediction.utilization import TraceComparison
    from shapewright.prediction.utilization.kineto import Trace as Profile
    from shapewright.pricing.calibration.source import CalibrationSource


@dataclass(frozen=True, kw_only=True, repr=False)
class TracedPrediction(NotebookDisplay):
    """A predicted step of a traced module.

    Attributes:
        trace: The trace.
        device: The device.
        optimizer: Optimizer of a training step; empty in a forward pass.
        operations: Every operation, priced; in training with the optimizer step.
        step_time_s: Time of one step. [s]
        step_time_low_s: Lower end of its 90 % interval. [s]
        step_time_high_s: Upper end of its 90 % interval. [s]
        tokens_per_s: Tokens per second. [token/s]
        model_flops: FLOPs of the forward and backward pass. [flop]
        hardware_flops: The same with recomputation. [flop]
        mfu: Model FLOPs per second over the device's dense peak of the trace's dtype.
        hfu: The same with recomputation.
        optimizer_bytes: Master weights, moments, and accumulated gradients wider than those of the trace. [byte]
        runtime_bytes: Context of the device's runtime. [byte]
        total_bytes: Peak memory of the step with both. [byte]
        calibration: Calibration records used, by operation kind.
        warnings: Limits of the prediction.
    """

    trace: Trace
    device: Device
    optimizer: str
    operations: tuple[PricedOperation, ...]
    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    tokens_per_s: float
    model_flops: float
    hardware_flops: float
    mfu: float
    hfu: float
    optimizer_bytes: float
    runtime_bytes: float
    total_bytes: float
    calibration: dict[str, CalibrationSource]
    warnings: tuple[Note, ...]

    @property
    def memory(self) -> TracedMemory:
        """Memory of the tensors of the trace."""
        return self.trace.memory

    @property
    def busiest_operations(self) -> tuple[PricedOperation, ...]:
        """All operations: a trace is of one device."""
        return self.operations

    @property
    def fits(self) -> bool:
        """Whether the peak is within the device's memory."""
        return self.total_bytes <= self.device.memory_bytes

    @property
    def mbu(self) -> float:
        """Bytes of all operations over step time and data-sheet bandwidth; communication does not count."""
        moved_bytes = sum(
            float(entry.operation.num_bytes) * int(entry.operation.repeats)
            for entry in self.operations
            if not isinstance(entry.operation, Collective)
        )
        return moved_bytes / (self.step_time_s * self.device.memory_bandwidth_bytes_per_s)


def predict_trace(trace: Trace, device: Device, *, optimizer: str | None = None) -> TracedPrediction:
    """Predict one step of a traced module.

    Args:
        optimizer: Optimizer of a training step, one of OPTIMIZERS; ``adamw`` by default.

    Returns:
        The prediction, with every operation and its price.

    Raises:
        WorkloadError: the optimizer is unknown or cannot be priced for a trace, or has no effect; or the device has no
            kernel for an operation.
        UnknownRateError: the device has no rate for a dtype.

    Assumes: one device; the host is fast enough to launch every kernel; no data loading.
    """
    updates, optimizer, state_bytes, freed_bytes = optimizer_step(trace, optimizer)
    operations = (*(_on_device(one, device) for one in trace.operations), *updates)
    priced = overlap_communication(list(map(PricedOperation, operations, price_operations(operations, device))))
    times = compose_sequence(priced)
    low_s, high_s = widen_by_software(times, priced, TUNED_SOFTWARE, is_training=trace.is_training)
    model_flops = sum_flops(operations, ("forward", "backward"))
    hardware_flops = model_flops + sum_flops(operations, ("recompute",))
    peak_work = times.step_s * device.peak_flops_per_s(trace.dtype)
    sources = calibration_sources(priced)
    total_bytes = trace.memory.peak_bytes - freed_bytes + state_bytes + CUDA_CONTEXT_BYTES
    return TracedPrediction(
        trace=trace,
        device=device,
        optimizer=optimizer,
        operations=tuple(priced),
        step_time_s=times.step_s,
        step_time_low_s=low_s,
        step_time_high_s=high_s,
        tokens_per_s=trace.num_tokens / times.step_s if times.step_s else 0.0,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        mfu=model_flops / peak_work if peak_work else 0.0,
        hfu=hardware_flops / peak_work if peak_work else 0.0,
        optimizer_bytes=state_bytes,
        runtime_bytes=CUDA_CONTEXT_BYTES,
        total_bytes=total_bytes,
        calibration=sources,
        warnings=(*_warn(trace, device, total_bytes), *warn_of_calibration(device, sources)),
    )


def _on_device(operation: Operation, device: Device) -> Operation:
    """Place the ranks of a collective on nodes, the first ones together; some are on nodes of their own."""
    if not isinstance(operation, Collective) or operation.ranks_per_node == 1:
        return operation
    return operation.changed(ranks_per_node=min(int(operation.num_ranks), device.node_size))


def _warn(trace: Trace, device: Device, total_bytes: float) -> list[Note]:
    """Memory that does not fit, and unknown operators."""
    notes = [Note(text, "trace") for text in trace.notes]
    if total_bytes > device.memory_bytes:
        notes.append(
            Note(
                f"does not fit: needs {format_bytes(total_bytes)}, {device.name} has "
                f"{format_bytes(device.memory_bytes)}",
                "does-not-fit",
            )
        )
    if trace.unknown_operators:
        shown = ", ".join(
            f"{one.name} ({one.count} calls, {format_percent(one.bytes_fraction)} of the bytes)"
            for one in trace.unknown_operators[:5]
        )
        notes.append(
            Note(
                f"operators without a model, priced as memory traffic with a wide interval: {shown}", "unknown-operator"
            )
        )
    return notes


@dataclass(frozen=True, kw_only=True)
class TracedUtilization:
    """A measured step of a traced module.

    Attributes:
        prediction: The predicted step.
        measured_time_s: Measured time of one step on one device. [s]
        mfu: Model FLOPs over measured time and peak.
        hfu: The same with recomputation.
        parts_s: Predicted time by pass and kind of operation, largest first. [s]
        comparison: A profile of the step against the prediction; None without one.
    """

    prediction: TracedPrediction
    measured_time_s: float
    mfu: float
    hfu: float
    parts_s: dict[str, float]
    comparison: TraceComparison | None = None


def explain_traced_step(
    prediction: TracedPrediction, measured_time_s: float | None, profile: Profile | None = None
) -> TracedUtilization:
    """Compute MFU and HFU of a measured step, and divide the predicted time by pass and kind of operation.

    Args:
        prediction: The predicted step.
        measured_time_s: Measured time of the step; that of the profile by default. [s]
        profile: What torch.profiler wrote of the step, whose kernels are matched to predicted operations.

    Raises:
        WorkloadError: the time is not positive.
    """
    from shapewright.prediction.utilization.trace_losses import compare_trace

    comparison = None if profile is None else compare_trace(profile, prediction)
    if measured_time_s is None:
        measured_time_s = 0.0 if comparison is None else comparison.step_s
    if not 0.0 < measured_time_s < float("inf"):
        raise WorkloadError(f"seconds={measured_time_s}; give the positive time of one step", field="seconds")
    parts: dict[str, float] = {}
    for entry in prediction.operations:
        name = f"{entry.operation.pass_name} {entry.operation.kind}"
        parts[name] = parts.get(name, 0.0) + entry.total_time_s
    peak_work = measured_time_s * prediction.device.peak_flops_per_s(prediction.trace.dtype)
    return TracedUtilization(
        prediction=prediction,
        measured_time_s=measured_time_s,
        mfu=prediction.model_flops / peak_work,
        hfu=prediction.hardware_flops / peak_work,
        parts_s=dict(sorted(parts.items(), key=lambda part: -part[1])),
        comparison=comparison,
    )
