"""Compare a trace of a training step with its prediction: which operations are slow, and where the step waits.

Times are per step and device. Losses do not overlap: at any time a device computes, communicates without computing, or
idles. The step without its losses is the predicted time of the matched operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Protocol

from shapewright.core.records import dataclass
from shapewright.core.units import format_seconds
from shapewright.lowering.operations.collective import Collective
from shapewright.memory.estimate import estimate_memory
from shapewright.prediction.predict import Prediction
from shapewright.prediction.utilization.trace_match import (
    GroupSums,
    Key,
    MatchedGroup,
    add_kernel,
    add_prediction,
    finish_group,
    kernel_keys,
    merge_gemms,
)

if TYPE_CHECKING:
    from shapewright.prediction.composition.stages import PricedOperation
    from shapewright.prediction.utilization.kineto import Kernel, Trace

SLOW, HOST, EXPOSED, RECOMPUTED, UNPREDICTED = (
    "slow_kernels",
    "host_gaps",
    "exposed_communication",
    "recomputation",
    "unpredicted_kernels",
)


@dataclass(frozen=True)
class TraceLoss:
    """Time that the step loses in one way.

    Attributes:
        name: One of the names of this module.
        time_s: Time in a step. [s]
        predicted_s: Predicted part of this time. [s]
        why: What the trace shows.
        fix: What to change.
    """

    name: str
    time_s: float
    predicted_s: float
    why: str
    fix: str

    @property
    def gain_s(self) -> float:
        """Time that the fix saves at most. [s]"""
        return max(self.time_s - self.predicted_s, 0.0) if self.name != RECOMPUTED else self.time_s


@dataclass(frozen=True)
class TraceComparison:
    """A trace against the prediction of its step.

    Attributes:
        trace: The trace.
        step_s: Measured time of a step. [s]
        predicted_step_s: Predicted time of a step. [s]
        groups: Kernels with their predictions, those that lose most first.
        losses: Losses of the step, the largest gain first.
        matched_fraction: Share of the kernels' time that was matched to predicted operations.
    """

    trace: Trace
    step_s: float
    predicted_step_s: float
    groups: tuple[MatchedGroup, ...]
    losses: tuple[TraceLoss, ...]
    matched_fraction: float

    @property
    def num_runs(self) -> int:
        """Times that a step runs the predicted passes, as accumulated gradients do, by token embeddings and GEMMs.

        Both count, as a model may look up several embeddings of its tokens, and a GEMM may take several kernels.
        """
        ratios = [one.num_measured / one.num_predicted for one in self.groups if one.kind == "gemm" and one.is_matched]
        runs = round(median(ratios)) if ratios else 1
        return runs if runs == self.trace.num_microbatches else 1

    @property
    def best_fix(self) -> TraceLoss | None:
        """The loss whose fix gains most; None where nothing is lost."""
        return next((loss for loss in self.losses if loss.gain_s > 0.0), None)


class PredictedStep(Protocol):
    """A predicted step of a model or of a traced module."""

    @property
    def step_time_s(self) -> float:
        """Time of the step. [s]"""

    @property
    def busiest_operations(self) -> Sequence[PricedOperation]:
        """Operations of the busiest stage."""


def compare_trace(trace: Trace, prediction: PredictedStep) -> TraceComparison:
    """Match the kernels of a trace to the operations of a prediction, and list where the step loses time.

    Args:
        prediction: The predicted step of the same job, or of the traced module that ran.
    """
    steps = trace.num_steps
    groups: dict[Key, GroupSums] = {}
    for entry in prediction.busiest_operations:
        if entry.operation.pass_name != "recompute":
            add_prediction(groups, entry)
    keys = [kernel_keys(kernel) for kernel in trace.kernels]
    unsized = sum(own == [("gemm",)] for own in keys)
    # Without record_shapes, and for kernels of CUDA graphs, sizes are unknown: all GEMMs are one group.
    has_shapes = 2 * unsized <= sum(own[0][0] == "gemm" for own in keys)
    if not has_shapes:
        groups = merge_gemms(groups)
    recomputed = [kernel for kernel in trace.kernels if kernel.operator and kernel.operator.is_recomputed]
    for kernel, own in zip(trace.kernels, keys, strict=True):
        if kernel.operator and kernel.operator.is_recomputed:
            continue
        # Both gradients of a convolution, which one operator of a CPU computes, have as many FLOPs.
        for key in own:
            sized = key if has_shapes or key[0] != "gemm" else ("gemm",)
            add_kernel(groups, kernel, sized, kernel.time_s / len(own))
    found = sorted((finish_group(group, steps) for group in groups.values()), key=lambda one: -one.lost_s)
    total_s = sum(kernel.time_s for kernel in trace.kernels) / steps
    unmatched_s = sum(one.measured_s for one in found if not one.num_predicted)
    losses = [
        _slow_kernels(found, is_cpu=trace.is_cpu),
        _host_gaps(trace),
        _exposed_communication(trace, prediction),
        _recomputation(recomputed, prediction, steps),
        _unpredicted(found),
    ]
    return TraceComparison(
        trace=trace,
        step_s=trace.span_s / steps,
        predicted_step_s=prediction.step_time_s,
        groups=tuple(found),
        losses=tuple(sorted((loss for loss in losses if loss.time_s > 0.0), key=lambda loss: -loss.gain_s)),
        matched_fraction=1.0 - unmatched_s / total_s if total_s > 0.0 else 0.0,
    )


# Operators of a CPU say which operations run, but not how fast the kernels of another device are.
_ON_CPU = "these operators ran on a CPU: for the kernels of a GPU, profile a step there (ProfilerActivity.CUDA)"


def _slow_kernels(groups: Iterable[MatchedGroup], *, is_cpu: bool) -> TraceLoss:
    """Sum the time of matched kernels beyond their predictions, communication excluded."""
    slow = [
        one for one in groups if one.num_predicted and one.num_measured and one.kind != "collective" and one.lost_s > 0
    ]
    if not slow:
        return TraceLoss(SLOW, 0.0, 0.0, "", "")
    worst = slow[0]
    ratio = worst.measured_s / worst.predicted_s if worst.predicted_s else 0.0
    why = (
        f"{len(slow)} groups of kernels are slower than predicted, most of all {worst.name}: "
        f"{format_seconds(worst.measured_s)} instead of {format_seconds(worst.predicted_s)} ({ratio:.1f} times)"
    )
    fix = _ON_CPU if is_cpu else _advise_on_slow_kernels(worst)
    return TraceLoss(SLOW, sum(one.lost_s for one in slow), 0.0, why, fix)


def _advise_on_slow_kernels(group: MatchedGroup) -> str:
    """Return what to change about a slow group of kernels."""
    if group.in_fp32:
        return "its inputs have 32 bits: run it in bf16 (torch.autocast, or 16-bit parameters)"
    if group.kind == "attention":
        return "use a fused attention kernel for this device (FlashAttention 3 or cuDNN); check which one SDPA chose"
    if group.kind == "pointwise":
        count = group.num_measured / max(group.num_predicted, 1)
        if count > 1.5:
            return (
                f"{count:.1f} times as many kernels as predicted: fuse them (torch.compile, fused norms, fused AdamW)"
            )
        return "fuse memory-bound kernels (torch.compile), and check that their tensors are contiguous"
    if group.kind in ("gemm", "grouped_gemm"):
        return (
            "check alignment with 'shapewright check', the clock under load, and the library: kernel "
            f"{group.kernel[:60]!r} ran"
        )
    return "compare the kernel with the one of a newer library"


def _host_gaps(trace: Trace) -> TraceLoss:
    """Time in which the device runs nothing."""
    if trace.is_cpu:
        busy_s = sum(kernel.time_s for kernel in trace.kernels)
        where = "outside of operators: the interpreter, autograd and the data loader"
    else:
        busy_s = union_s((kernel.start_s, kernel.end_s) for kernel in trace.kernels)
        where = "without a kernel: the host launches too slowly, waits, or loads data"
    idle_s = max(trace.span_s - busy_s, 0.0) / trace.num_steps
    why = f"{format_seconds(idle_s)} of a step {where}"
    fix = (
        "raise the micro-batch, and load data in other processes"
        if trace.is_cpu
        else "capture the step in CUDA graphs (torch.compile(mode='reduce-overhead')), remove synchronizations such as "
        ".item(), raise the micro-batch, and load data in other processes"
    )
    return TraceLoss(HOST, idle_s, 0.0, why, fix)


def _exposed_communication(trace: Trace, prediction: PredictedStep) -> TraceLoss:
    """Time in which the device communicates and computes nothing."""
    everything = union_s((kernel.start_s, kernel.end_s) for kernel in trace.kernels)
    compute = union_s((kernel.start_s, kernel.end_s) for kernel in trace.kernels if not kernel.is_collective)
    exposed_s = max(everything - compute, 0.0) / trace.num_steps
    if trace.is_cpu:
        exposed_s = sum(kernel.time_s for kernel in trace.kernels if kernel.is_collective) / trace.num_steps
    predicted_s = sum(
        entry.total_time_s for entry in prediction.busiest_operations if isinstance(entry.operation, Collective)
    )
    total_s = sum(kernel.time_s for kernel in trace.kernels if kernel.is_collective) / trace.num_steps
    why = (
        f"{format_seconds(exposed_s)} of {format_seconds(total_s)} of communication is not hidden; predicted "
        f"{format_seconds(predicted_s)}"
    )
    fix = (
        "overlap gradients with the backward pass (bucket sizes, FSDP prefetch), accumulate more micro-batches per "
        "step, or lower the tensor degree; a wait for a slower rank also shows here"
    )
    return TraceLoss(EXPOSED, exposed_s, predicted_s, why, fix)


def _recomputation(recomputed: Sequence[Kernel], prediction: PredictedStep, steps: int) -> TraceLoss:
    """Time of forward operators that run again in the backward pass."""
    time_s = sum(kernel.time_s for kernel in recomputed) / steps
    predicted_s = sum(
        entry.total_time_s for entry in prediction.busiest_operations if entry.operation.pass_name == "recompute"
    )
    why = f"{format_seconds(time_s)} of forward operators run again in the backward pass"
    if not isinstance(prediction, Prediction):
        fix = "'shapewright memory' of the module without activation checkpointing says whether it fits"
        return TraceLoss(RECOMPUTED, time_s, predicted_s, why, fix)
    without = replace(prediction.workload.with_recompute("none"), recompute_layers=None)
    needed = estimate_memory(prediction.config, without, prediction.layout).total_bytes
    capacity = prediction.device.memory_bytes
    fix = (
        f"without it the step needs an estimated {needed / capacity:.0%} of the device's memory: "
        f"{'switch activation checkpointing off' if needed <= 0.9 * capacity else 'recompute fewer layers or modules'}"
    )
    return TraceLoss(RECOMPUTED, time_s, predicted_s, why, fix)


def _unpredicted(groups: Iterable[MatchedGroup]) -> TraceLoss:
    """Time of kernels without a predicted counterpart."""
    found = sorted((one for one in groups if not one.num_predicted), key=lambda one: -one.measured_s)
    names = "; ".join(f"{one.name} ({format_seconds(one.measured_s)})" for one in found[:3])
    fix = "compare the model and layout given with those that ran; remove copies and casts between kernels"
    return TraceLoss(UNPREDICTED, sum(one.measured_s for one in found), 0.0, f"not predicted: {names}", fix)


def union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals. [s]

    >>> union_s([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0)])
    4.0
    """
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
