"""Outputs of ``predict``, ``check``, ``memory`` and ``mfu`` for a traced PyTorch module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shapewright.app.report.outputs.check import FindingOutput, finding_output, other_warnings
from shapewright.app.report.outputs.mfu import TraceOutput, trace_output
from shapewright.app.report.outputs.model import DeviceSummary, Output, described, summarize_device, take, text_only
from shapewright.app.report.outputs.predict import OperationOutput, operation_output
from shapewright.core.records import dataclass
from shapewright.lowering.torch_trace.trace import UnknownOperator, share_within

if TYPE_CHECKING:
    from shapewright.lint.traced import TracedCheck
    from shapewright.prediction.traced import TracedPrediction, TracedUtilization


@dataclass(frozen=True, kw_only=True)
class TraceSummary:
    """What was traced."""

    source: str
    module_type: str = described("class of the module")
    inputs: str = described("inputs, such as `tokens=int64[4,2048]`")
    phase: str = described("`train` (forward and backward pass) or `prefill` (forward pass)")
    dtype: str = described("element format of most FLOPs")
    parameter_dtype: str = described("element format of most parameters")
    is_fused: bool = described("whether chains of pointwise operations are merged as torch.compile merges them")
    num_parameters: int = described("parameters, shared ones once")
    num_trainable: int = described("parameters that require a gradient")
    num_tokens: int = described(
        "tokens of a step of one rank: elements of the first integer input, else its first size, of three sizes the "
        "first two"
    )
    counts_samples: bool = described("whether `num_tokens` and rates count samples, such as images, instead of tokens")
    num_ranks: int = described("ranks that the module is distributed over, of which one is traced; 1 if it runs alone")
    title: str = text_only()


@dataclass(frozen=True, kw_only=True)
class TracedMemoryParts:
    """Peak memory of the step by component."""

    weights_bytes: float = described("parameters and buffers")
    inputs_bytes: float = described("inputs")
    gradients_bytes: float = described("gradients of parameters that exist at the peak")
    activations_bytes: float = described("tensors of the forward pass that exist at the peak")
    workspace_bytes: float = described("other tensors of the backward pass that exist at the peak")
    optimizer_bytes: float = described("master weights, moments, and accumulated gradients wider than the weights")
    runtime_bytes: float = described("context of the device's runtime")
    saved_bytes: float = described("tensors that exist between forward and backward pass, without weights")
    peak_operation: str = described("operation that reaches the peak")
    total_bytes: float = described("peak memory with optimizer states and runtime")
    capacity_bytes: float
    fits: bool = described("whether the total is at most the capacity")


@dataclass(frozen=True, kw_only=True)
class TracedPredictOutput(Output):
    """The predicted step of a traced module."""

    trace: TraceSummary = described("what was traced")
    device: DeviceSummary
    optimizer: str = described("optimizer of a training step; empty in a forward pass")
    step_time_s: float = described("predicted time of one step")
    step_time_low_s: float
    step_time_high_s: float
    tokens_per_s: float
    model_flops: float = described("FLOPs of forward and backward pass")
    hardware_flops: float = described("the same with recomputation")
    mfu: float
    hfu: float
    mbu: float
    memory: TracedMemoryParts = described("peak memory of the step")
    operations: list[OperationOutput] = described("operations by module path, in order")
    unknown_operators: list[UnknownOperator] = described("operators without a model, those with most bytes first")
    calibration_records: dict[str, str] = described("record id by kind of operation, with the donor of a borrowed one")
    warnings: list[str] = described("one line each: how the module was run, does not fit, borrowed calibration")
    dense_flops_per_s: Mapping[str, float] = text_only()


@dataclass(frozen=True, kw_only=True)
class TracedCheckOutput(Output):
    """Findings about the linear layers, attention heads, format and memory of a traced module."""

    trace: TraceSummary = described("what was traced")
    device: DeviceSummary
    step_time_s: float = described("predicted time of one step")
    num_suppressed: int = described("findings suppressed by `--ignore`")
    findings: list[FindingOutput] = described("findings, the costliest first; `field` begins with the module path")
    warnings: list[str] = described("limits of the prediction, one line each")
    step: TracedPredictOutput = text_only()
    memory: TracedMemoryOutput = text_only()
    other_warnings: list[str] = text_only()


@dataclass(frozen=True, kw_only=True)
class TracedModuleOutput:
    """One module without its submodules, or several equal ones."""

    path: str = described("module path; of several equal modules with ranges, such as `layers.0-31.attn`")
    type_name: str = described("class of the module")
    count: int = described("number of equal modules")
    num_parameters: int = described("parameters of one of them")
    num_trainable: int = described("parameters of one that require a gradient")
    weights_bytes: float = described("parameters and buffers of one")
    saved_bytes: float = described("tensors that one made in the forward pass and that the backward pass needs")
    peak_bytes: float = described("tensors that one made and that exist at the peak, gradients included")
    total_bytes: float = described("weights and tensors at the peak of all of them, submodules included")


@dataclass(frozen=True, kw_only=True)
class TracedMemoryOutput(Output):
    """Memory of a traced step by component and by module, and over time."""

    trace: TraceSummary = described("what was traced")
    device: DeviceSummary
    optimizer: str = described("optimizer of a training step; empty in a forward pass")
    memory: TracedMemoryParts = described("peak memory of the step")
    modules: list[TracedModuleOutput] = described("modules in the order of the model")
    timeline_bytes: list[float] = described("tensors that exist, at a few hundred points of the step")
    backward_start: int = described("index in the timeline at which the backward pass begins")
    warnings: list[str] = described("limits of the prediction, one line each")


@dataclass(frozen=True, kw_only=True)
class TracedPart:
    """Predicted time of one kind of work."""

    name: str = described("pass and kind of operation")
    time_s: float = described("predicted time in a step")
    fraction: float = described("share of the measured time")


@dataclass(frozen=True, kw_only=True)
class TracedMfuOutput(Output):
    """A measured step of a traced module against its prediction."""

    trace: TraceSummary = described("what was traced")
    device: DeviceSummary
    measured_time_s: float = described("measured time of one step on one device")
    step_time_s: float = described("predicted time of one step")
    step_time_low_s: float
    step_time_high_s: float
    model_flops: float = described("FLOPs of forward and backward pass")
    hardware_flops: float = described("the same with recomputation")
    mfu: float = described("MFU of the measured step")
    hfu: float = described("the same with recomputation")
    reachable_mfu: float = described("MFU of the predicted step")
    unexplained_s: float = described("measured minus predicted time: host, data, communication, slower kernels")
    parts: list[TracedPart] = described("predicted time by pass and kind of operation, largest first")
    profile: TraceOutput | None = described("the trace given with --trace against the prediction; null without one")
    warnings: list[str] = described("limits of the prediction, one line each")


def _shared(prediction: TracedPrediction) -> dict[str, object]:
    return {"trace": take(TraceSummary, prediction.trace), "device": summarize_device(prediction.device)}


def _memory_parts(prediction: TracedPrediction) -> TracedMemoryParts:
    return take(
        TracedMemoryParts,
        prediction.memory,
        optimizer_bytes=prediction.optimizer_bytes,
        runtime_bytes=prediction.runtime_bytes,
        total_bytes=prediction.total_bytes,
        capacity_bytes=prediction.device.memory_bytes,
        fits=prediction.fits,
    )


def traced_predict_output(prediction: TracedPrediction) -> TracedPredictOutput:
    """Output of the prediction of a trace."""
    return take(
        TracedPredictOutput,
        prediction,
        **_shared(prediction),
        memory=_memory_parts(prediction),
        operations=[operation_output(entry) for entry in prediction.operations],
        unknown_operators=list(prediction.trace.unknown_operators),
        calibration_records={kind: source.label for kind, source in prediction.calibration.items()},
        dense_flops_per_s=prediction.device.dense_flops_per_s,
    )


def traced_check_output(report: TracedCheck) -> TracedCheckOutput:
    """Output of the check of a trace."""
    prediction = report.prediction
    return take(
        TracedCheckOutput,
        report,
        **_shared(prediction),
        step_time_s=prediction.step_time_s,
        findings=[finding_output(finding) for finding in report.findings],
        warnings=prediction.warnings,
        step=traced_predict_output(prediction),
        memory=traced_memory_output(prediction),
        other_warnings=other_warnings(report.findings, prediction.warnings),
    )


def traced_memory_output(prediction: TracedPrediction) -> TracedMemoryOutput:
    """Output of the memory of a trace."""
    modules = prediction.trace.modules
    totals = {
        one.path: sum(
            other.count
            * (other.weights_bytes + other.peak_bytes)
            * (1.0 if one.path == "(model)" else share_within(other.path, one.path))
            for other in modules
        )
        for one in modules
    }
    return take(
        TracedMemoryOutput,
        prediction,
        **_shared(prediction),
        memory=_memory_parts(prediction),
        modules=[take(TracedModuleOutput, one, total_bytes=totals[one.path]) for one in modules],
        timeline_bytes=prediction.memory.timeline_bytes,
        backward_start=prediction.memory.backward_start,
    )


def traced_mfu_output(found: TracedUtilization) -> TracedMfuOutput:
    """Output of a measured step of a trace."""
    prediction = found.prediction
    parts: Mapping[str, float] = found.parts_s
    comparison = found.comparison
    return take(
        TracedMfuOutput,
        prediction,
        **_shared(prediction),
        measured_time_s=found.measured_time_s,
        mfu=found.mfu,
        hfu=found.hfu,
        reachable_mfu=prediction.mfu,
        unexplained_s=found.measured_time_s - prediction.step_time_s,
        parts=[
            TracedPart(name=name, time_s=time_s, fraction=time_s / found.measured_time_s)
            for name, time_s in parts.items()
        ],
        profile=trace_output(comparison),
        warnings=(*prediction.warnings, *found.notes),
    )
