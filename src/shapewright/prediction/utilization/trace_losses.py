"""Compare a trace of a training step with its prediction: which operations are slow, and where the step waits.

Kernels are matched to predicted operations by what they compute: GEMMs by their sizes, attention by its pass,
collectives by their kind, memory-bound kernels by their class. Equal GEMMs are one group, as their kernels cannot be
told apart. Times are per step and device.

Losses overlap nothing: a device computes, communicates alone, or idles. What remains of the step is the time that the
matched operations were predicted to take.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from shapewright.core.dtypes import get_dtype
from shapewright.core.fields import shown
from shapewright.core.units import format_seconds
from shapewright.lowering.operations import Attention, Collective, Gemm, GroupedGemm, Pointwise
from shapewright.memory import estimate_memory

if TYPE_CHECKING:
    from shapewright.prediction.composition import PricedOperation
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.utilization.kineto import Kernel, Trace

SLOW, HOST, EXPOSED, RECOMPUTED, UNPREDICTED = (
    "slow_kernels",
    "host_gaps",
    "exposed_communication",
    "recomputation",
    "unpredicted_kernels",
)
_WIDE_TYPES = ("float", "c10::Float")
_CLASSES = (  # of memory-bound kernels, by words in the names of operator and kernel
    ("optimizer", re.compile(r"adam|optimizer|_foreach_|fused_sgd|addcmul|addcdiv|lerp", re.IGNORECASE)),
    ("norm", re.compile(r"layer_?norm|rms_?norm", re.IGNORECASE)),
    ("cross_entropy", re.compile(r"log_softmax|nll_loss|cross_entropy", re.IGNORECASE)),
    ("softmax", re.compile(r"softmax|masked_fill|tril|triu", re.IGNORECASE)),
    ("embedding", re.compile(r"embedding|indexing_backward|index_put|index_select", re.IGNORECASE)),
)
_PREDICTED_CLASSES = {
    "norm": "norm",
    "layernorm": "norm",
    "cross_entropy": "cross_entropy",
    "embedding": "embedding",
    "optimizer": "optimizer",
    "softmax": "softmax",
    "mask": "softmax",
}
_ELEMENTWISE = "elementwise"
_ATTENTION = re.compile(r"scaled_dot_product|flash|fmha|attention", re.IGNORECASE)
_BACKWARD = re.compile(r"backward|bwd", re.IGNORECASE)
_GEMM_OPERATORS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::_scaled_mm")
_GEMM_KERNEL = re.compile(r"gemm|cutlass|nvjet|xmma|cublas|_mm_|Cijk", re.IGNORECASE)
_COLLECTIVES = {
    "all_reduce": re.compile(r"all_?reduce", re.IGNORECASE),
    "all_gather": re.compile(r"all_?gather", re.IGNORECASE),
    "reduce_scatter": re.compile(r"reduce_?scatter", re.IGNORECASE),
    "all_to_all": re.compile(r"all_?to_?all", re.IGNORECASE),
    "send": re.compile(r"send|recv", re.IGNORECASE),
}
_MOST_NAMES = 4

Key = tuple[Any, ...]


@dataclass(frozen=True)
class MatchedGroup:
    """Kernels of one kind and size, and the predicted operations that they run.

    Attributes:
        name: Names of the predicted operations, or of the kernels where none is predicted.
        kind: ``gemm``, ``grouped_gemm``, ``attention``, ``pointwise``, ``collective`` or ``other``.
        measured_s: Time of the kernels in a step. [s]
        predicted_s: Predicted time of the operations in a step; 0 without any. [s]
        num_measured: Kernels or operators in a step.
        num_predicted: Predicted executions in a step.
        kernel: Name of the longest kernel; empty without any.
        in_fp32: Whether its operators have 32-bit inputs although 16 bits or less were predicted.
    """

    name: str
    kind: str
    measured_s: float
    predicted_s: float
    num_measured: float
    num_predicted: int
    kernel: str
    in_fp32: bool

    @property
    @shown
    def lost_s(self) -> float:
        """Time beyond the prediction; negative where the kernels are faster. [s]"""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True)
class TraceLoss:
    """Time that the step loses in one way.

    Attributes:
        name: One of the names of this module.
        time_s: Time in a step. [s]
        predicted_s: Part of it that was predicted. [s]
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
    def best_fix(self) -> TraceLoss | None:
        """The loss whose fix gains most; None where nothing is lost."""
        return next((loss for loss in self.losses if loss.gain_s > 0.0), None)


@dataclass
class _Group:
    """Sums of one group while it is filled."""

    kind: str
    names: list[str] = field(default_factory=list)
    measured_s: float = 0.0
    predicted_s: float = 0.0
    num_measured: int = 0
    num_predicted: int = 0
    longest: tuple[float, str] = (0.0, "")
    num_wide: int = 0
    is_narrow: bool = False


def compare_trace(trace: Trace, prediction: Prediction) -> TraceComparison:
    """Match the kernels of a trace to the operations of a prediction, and list where the step loses time.

    Args:
        prediction: The predicted step of the same job.
    """
    steps = trace.num_steps
    groups: dict[Key, _Group] = {}
    for entry in prediction.busiest_operations:
        if entry.operation.pass_name != "recompute":
            _add_prediction(groups, entry)
    keys = [_key_of(kernel) for kernel in trace.kernels]
    unsized = sum(key == ("gemm",) for key in keys)
    # Without record_shapes, and for kernels of CUDA graphs, sizes are unknown: all GEMMs are one group.
    has_shapes = 2 * unsized <= sum(key[0] == "gemm" for key in keys)
    if not has_shapes:
        groups = _merge_gemms(groups)
    recomputed = [kernel for kernel in trace.kernels if kernel.operator and kernel.operator.is_recomputed]
    for kernel, key in zip(trace.kernels, keys, strict=True):
        if not (kernel.operator and kernel.operator.is_recomputed):
            _add_kernel(groups, kernel, key if has_shapes or key[0] != "gemm" else ("gemm",))
    found = sorted((_finish(group, steps) for group in groups.values()), key=lambda one: -one.lost_s)
    total_s = sum(kernel.time_s for kernel in trace.kernels) / steps
    unmatched_s = sum(one.measured_s for one in found if not one.num_predicted)
    losses = [
        _slow_kernels(found),
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


def _add_prediction(groups: dict[Key, _Group], entry: PricedOperation) -> None:
    """Add a predicted operation to its group."""
    operation = entry.operation
    if isinstance(operation, Collective):
        key: Key = ("collective", "send" if operation.axis == "pipeline" else operation.op_name)
    elif isinstance(operation, Gemm):
        key = gemm_key(int(operation.batch), int(operation.m), int(operation.n), int(operation.k))
    elif isinstance(operation, GroupedGemm):
        key = ("grouped_gemm",)
    elif isinstance(operation, Attention):
        key = ("attention", bool(operation.is_backward))
    else:
        assert isinstance(operation, Pointwise)
        key = ("pointwise", _PREDICTED_CLASSES.get(operation.operation, _ELEMENTWISE))
    group = groups.setdefault(key, _Group(str(key[0])))
    group.names.append(operation.name)
    group.predicted_s += float(entry.price.time_s) * int(operation.repeats)
    group.num_predicted += int(operation.repeats)
    group.is_narrow |= get_dtype(operation.dtype).bits <= 16


def gemm_key(batch: int, m: int, n: int, k: int) -> Key:
    """Key of a GEMM: a GEMM and its transpose have the same key.

    >>> gemm_key(1, 8, 4, 2) == gemm_key(1, 4, 8, 2), gemm_key(1, 8, 4, 2) == gemm_key(1, 8, 2, 4)
    (True, False)
    """
    return ("gemm", batch, min(m, n), max(m, n), k)


def _merge_gemms(groups: dict[Key, _Group]) -> dict[Key, _Group]:
    """Merge all GEMMs into one group, for traces that do not record shapes."""
    merged: dict[Key, _Group] = {}
    for key, group in groups.items():
        own = merged.setdefault(("gemm",) if key[0] == "gemm" else key, _Group(group.kind))
        own.names += group.names
        own.predicted_s += group.predicted_s
        own.num_predicted += group.num_predicted
        own.is_narrow |= group.is_narrow
    return merged


def _add_kernel(groups: dict[Key, _Group], kernel: Kernel, key: Key) -> None:
    """Add a kernel to the group of the operation that it runs."""
    group = groups.setdefault(key, _Group(str(key[0])))
    group.measured_s += kernel.time_s
    group.num_measured += 1
    group.longest = max(group.longest, (kernel.time_s, kernel.name))
    group.num_wide += bool(kernel.operator and kernel.operator.dtype in _WIDE_TYPES)
    if not group.num_predicted and len(group.names) < _MOST_NAMES:
        name = kernel.operator.name if kernel.operator else kernel.name
        group.names += [] if name in group.names else [name]


def _key_of(kernel: Kernel) -> Key:
    """Return the key of the group of a kernel."""
    operator = kernel.operator
    words = f"{operator.name if operator else ''} {kernel.name}"
    if kernel.is_collective:
        return ("collective", next((name for name, pattern in _COLLECTIVES.items() if pattern.search(words)), "other"))
    if operator and operator.name in _GEMM_OPERATORS:
        sizes = _gemm_sizes(operator.name, operator.dims)
        return gemm_key(*sizes) if sizes else ("gemm",)
    if "grouped" in words.lower() and _GEMM_KERNEL.search(words):
        return ("grouped_gemm",)
    if _ATTENTION.search(words):
        return ("attention", bool(_BACKWARD.search(words)))
    if _GEMM_KERNEL.search(words):
        return ("gemm",)
    if kernel.name.startswith(("Memcpy", "Memset")):
        return ("other", "copies")
    return ("pointwise", next((name for name, pattern in _CLASSES if pattern.search(words)), _ELEMENTWISE))


def _gemm_sizes(name: str, dims: Sequence[tuple[int, ...]]) -> tuple[int, int, int, int] | None:
    """Batch, m, n and k of a GEMM operator from the dimensions of its inputs; None if they are not those of one.

    >>> _gemm_sizes("aten::addmm", ((12,), (8, 4), (4, 12))), _gemm_sizes("aten::linear", ((2, 8, 4), (12, 4)))
    ((1, 8, 12, 4), (1, 16, 12, 4))
    """
    if name in ("aten::addmm", "aten::baddbmm"):
        dims = dims[1:]
    if len(dims) < 2:
        return None
    first, second = dims[0], dims[1]
    if name == "aten::linear" and len(second) == 2:
        rows = 1
        for size in first[:-1]:
            rows *= size
        return 1, rows, second[0], second[1]
    if len(first) == len(second) == 3:
        return first[0], first[1], second[2], first[2]
    return (1, first[0], second[1], first[1]) if len(first) == len(second) == 2 else None


def _finish(group: _Group, steps: int) -> MatchedGroup:
    names = list(dict.fromkeys(group.names))
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return MatchedGroup(
        name=", ".join(names[:_MOST_NAMES]) + more,
        kind=group.kind,
        measured_s=group.measured_s / steps,
        predicted_s=group.predicted_s,
        num_measured=group.num_measured / steps,
        num_predicted=group.num_predicted,
        kernel=group.longest[1],
        in_fp32=group.is_narrow and 2 * group.num_wide > group.num_measured > 0,
    )


def _slow_kernels(groups: Iterable[MatchedGroup]) -> TraceLoss:
    """Sum what matched kernels of the computation take beyond their predictions."""
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
    return TraceLoss(SLOW, sum(one.lost_s for one in slow), 0.0, why, _fix_of(worst))


def _fix_of(group: MatchedGroup) -> str:
    """What to change about the slowest group of kernels."""
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
        "capture the step in CUDA graphs (torch.compile(mode='reduce-overhead')), remove synchronizations such as "
        ".item(), raise the micro-batch, and load data in other processes"
    )
    return TraceLoss(HOST, idle_s, 0.0, why, fix)


def _exposed_communication(trace: Trace, prediction: Prediction) -> TraceLoss:
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


def _recomputation(recomputed: Sequence[Kernel], prediction: Prediction, steps: int) -> TraceLoss:
    """Time of forward operators that run again in the backward pass."""
    time_s = sum(kernel.time_s for kernel in recomputed) / steps
    predicted_s = sum(
        entry.total_time_s for entry in prediction.busiest_operations if entry.operation.pass_name == "recompute"
    )
    without = replace(prediction.workload.with_recompute("none"), recompute_layers=None)
    needed = estimate_memory(prediction.config, without, prediction.layout).total_bytes
    capacity = prediction.device.memory_bytes
    fits = (
        f"without it the step needs an estimated {needed / capacity:.0%} of the device's memory: "
        f"{'switch activation checkpointing off' if needed <= 0.9 * capacity else 'recompute fewer layers or modules'}"
    )
    why = f"{format_seconds(time_s)} of forward operators run again in the backward pass"
    return TraceLoss(RECOMPUTED, time_s, predicted_s, why, fits)


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
