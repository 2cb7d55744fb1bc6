"""Prediction of a traced PyTorch module on one device: time, interval, utilization, memory, and the optimizer step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from shapewright.core.dtypes import get_dtype
from shapewright.core.errors import WorkloadError
from shapewright.core.notebook import NotebookDisplay
from shapewright.core.notes import Note
from shapewright.core.records import dataclass
from shapewright.core.units import format_bytes, format_percent
from shapewright.lowering.flops import sum_flops
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.operation import Operation
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.lowering.optimizer_step import matrix_gemms
from shapewright.lowering.torch_trace.trace import Trace
from shapewright.memory.estimate import CUDA_CONTEXT_BYTES
from shapewright.prediction.composition.stages import PricedOperation, overlap_communication
from shapewright.prediction.composition.step import compose_sequence
from shapewright.prediction.predict import calibration_sources, widen_by_software
from shapewright.prediction.warnings import warn_of_calibration, warn_of_scans
from shapewright.pricing.operations import price_operations
from shapewright.pricing.software import TUNED_SOFTWARE
from shapewright.workload.optimizers import OPTIMIZERS, find_recipe
from shapewright.workload.projection import DEFAULT_INTERVAL, RANK_DIVISOR

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shapewright.hardware.device import Device
    from shapewright.lowering.torch_trace.trace import TracedMemory
    from shapewright.prediction.utilization.kineto import Trace as Profile
    from shapewright.prediction.utilization.trace_losses import TraceComparison
    from shapewright.pricing.calibration.source import CalibrationSource
    from shapewright.workload.optimizers import Optimizer


_DEFAULT_OPTIMIZER = "adamw"


def lower_optimizer_step(trace: Trace, optimizer: str | None) -> tuple[list[Operation], str, float, float]:
    """Return the operations of a trace's optimizer step, with the memory that the optimizer adds and saves.

    Args:
        optimizer: One of OPTIMIZERS; ``adamw`` by default.

    Returns:
        The operations; the name of the optimizer, empty in a forward pass; the bytes of its states; and the bytes of
        weights and gradients that the trace counts, but that do not exist with this optimizer.

    Raises:
        WorkloadError: the optimizer is unknown, cannot train in the format of the weights, or has no effect.
    """
    if not trace.is_training:
        if optimizer is not None:
            raise WorkloadError(f"optimizer={optimizer} has no effect in a forward pass", field="optimizer")
        return [], "", 0.0, 0.0
    name = optimizer or _DEFAULT_OPTIMIZER
    dtype = trace.parameter_dtype if trace.parameter_dtype in ("fp32", "fp16", "bf16") else "bf16"
    recipe = find_recipe(name, dtype)
    matrices = list(_matrices(trace)) if OPTIMIZERS[name].works_on_matrices else []
    weights = float(trace.num_trainable if trace.num_updated is None else trace.num_updated)
    rank = _rank(matrices)
    if matrices and trace.num_trainable:
        matrix_weights = sum(float(one.num_weights) for one in matrices)
        share = min(matrix_weights / trace.num_trainable, 1.0)
        matrix_bytes, other_bytes = recipe.optimizer_bytes, recipe.embedding_optimizer_bytes or recipe.optimizer_bytes
        if OPTIMIZERS[name].projection_bytes:
            matrix_bytes = sum(_moment_bytes(one, OPTIMIZERS[name], rank) for one in matrices) / matrix_weights
        recipe = replace(recipe, optimizer_bytes=share * matrix_bytes + (1.0 - share) * other_bytes)
    updates: list[Operation] = [
        Pointwise(
            name=role,
            block="optimizer",
            role=role,
            pass_name="step",
            dtype="fp32",
            operation="optimizer",
            read_bytes=weights * read_bytes,
            written_bytes=weights * written_bytes,
        )
        for role, read_bytes, written_bytes in (
            ("gradient_norm", recipe.gradient_bytes, 0.0),
            ("optimizer", recipe.step_read_bytes, recipe.step_written_bytes),
        )
        if weights
    ]
    updates += [gemm for one in matrices for gemm in _matrix_gemms(one, OPTIMIZERS[name], trace.dtype, rank)]
    # The trace has gradients in the format of the weights. A buffer that accumulates them in a wider format exists
    # during the whole step.
    is_wider = recipe.gradient_bytes > recipe.weight_bytes and recipe.keeps_gradients
    buffer_bytes = recipe.gradient_bytes if is_wider else 0.0
    freed_bytes = 0.0
    if not recipe.keeps_gradients:
        # Each layer is updated in the backward pass, so the gradients of all other layers do not exist.
        memory = trace.memory
        largest = max((one.short * one.long for one in matrices), default=0) * recipe.gradient_bytes
        lowest = memory.weights_bytes + memory.inputs_bytes + memory.saved_bytes
        freed_bytes = min(max(memory.gradients_bytes - largest, 0.0), max(memory.peak_bytes - lowest, 0.0))
    stored_bytes = get_dtype(dtype).num_bytes - recipe.weight_bytes
    if matrices and stored_bytes > 0.0:
        freed_bytes += stored_bytes * min(sum(float(one.num_weights) for one in matrices), weights)
    return updates, name, weights * (recipe.optimizer_bytes + buffer_bytes), freed_bytes


class _Matrix(NamedTuple):
    """Equal matrices that have gradients: name of the operation, shorter and longer side, and number of matrices."""

    name: str
    short: int
    long: int
    copies: int

    @property
    def num_weights(self) -> int:
        return self.short * self.long * self.copies


def _rank(matrices: Sequence[_Matrix]) -> int:
    """Rank of GaLore's projections: a quarter of the shorter side that most weights have, usually the hidden size."""
    weights: Counter[int] = Counter()
    for one in matrices:
        weights[one.short] += one.num_weights
    return max(max(weights, key=weights.__getitem__, default=0) // RANK_DIVISOR, 1)


def _moment_bytes(matrix: _Matrix, optimizer: Optimizer, rank: int) -> float:
    """Moments of equal matrices' projected gradients, with the projections. [byte]"""
    rank = min(rank, matrix.short)
    one = matrix.short * rank * optimizer.projection_bytes + rank * matrix.long * optimizer.state_bytes
    return matrix.copies * one


def _matrices(trace: Trace) -> Iterator[_Matrix]:
    """Yield the matrices whose updates Muon orthogonalizes, or whose gradients GaLore projects.

    Embeddings and the output layer are left to AdamW. The output layer is the last linear layer, if it has as many
    weights as an embedding.

    Assumes: a matrix that runs twice in a step counts twice.
    """
    tables = {one.num_parameters for one in trace.modules if "Embedding" in one.type_name}
    head = trace.linears[-1] if trace.linears else None
    is_head = head is not None and head.in_features * head.out_features in tables
    skipped = f"{head.operation_name}.wgrad" if head is not None and is_head else ""
    for one in trace.operations:
        if not isinstance(one, Gemm | GroupedGemm) or one.gradient != "wgrad" or one.name == skipped:
            continue
        copies = one.groups if isinstance(one, GroupedGemm) else one.batch
        short, long = sorted((int(one.m), int(one.n)))
        yield _Matrix(one.name.removesuffix(".wgrad"), short, long, int(copies) * int(one.repeats))


def _matrix_gemms(matrix: _Matrix, optimizer: Optimizer, dtype: str, rank: int) -> Iterator[Gemm]:
    """Yield the GEMMs of the optimizer's step on equal matrices."""
    steps = optimizer.newton_schulz_steps
    method = "newton_schulz" if steps else "galore"
    for part, part_dtype, m, n, k in matrix_gemms(optimizer, dtype, matrix.short, matrix.long, rank, DEFAULT_INTERVAL):
        yield Gemm(
            name=f"{method}.{matrix.name}.{part}",
            block="optimizer",
            role=f"{method}_{part}",
            pass_name="step",
            repeats=max(steps, 1) * matrix.copies,
            dtype=part_dtype,
            m=m,
            n=n,
            k=k,
        )


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
        tokens_per_s: Tokens per second of the whole job. [token/s]
        model_flops: FLOPs of the forward and backward pass. [flop]
        hardware_flops: The same with recomputation. [flop]
        mfu: Model FLOPs per second over the device's dense peak of the trace's dtype.
        hfu: The same with recomputation.
        optimizer_bytes: Master weights, moments, and accumulated gradients wider than those of the trace. [byte]
        runtime_bytes: Context of the device's runtime. [byte]
        total_bytes: Peak memory of the step, with the optimizer's states and the runtime. [byte]
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
    updates, optimizer, state_bytes, freed_bytes = lower_optimizer_step(trace, optimizer)
    operations = (*(_place_on_nodes(one, device) for one in trace.operations), *updates)
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
        tokens_per_s=trace.num_job_tokens / times.step_s if times.step_s else 0.0,
        model_flops=model_flops,
        hardware_flops=hardware_flops,
        mfu=model_flops / peak_work if peak_work else 0.0,
        hfu=hardware_flops / peak_work if peak_work else 0.0,
        optimizer_bytes=state_bytes,
        runtime_bytes=CUDA_CONTEXT_BYTES,
        total_bytes=total_bytes,
        calibration=sources,
        warnings=(
            *_warnings_of(trace, device, total_bytes),
            *warn_of_scans(priced),
            *warn_of_calibration(device, sources),
        ),
    )


def _place_on_nodes(operation: Operation, device: Device) -> Operation:
    """Fill nodes with the ranks of a collective; collectives with one rank per node stay unchanged."""
    if not isinstance(operation, Collective) or operation.ranks_per_node == 1:
        return operation
    return operation.changed(ranks_per_node=min(int(operation.num_ranks), device.node_size))


def _warnings_of(trace: Trace, device: Device, total_bytes: float) -> list[Note]:
    """Return the notes of a trace, and warnings of memory that does not fit and of unknown operators."""
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

    @property
    def notes(self) -> tuple[Note, ...]:
        """What about a profile makes its step another one than the predicted."""
        if self.comparison is None:
            return ()
        runs = self.comparison.num_runs
        accumulated = Note(
            f"a step of the profile runs the module {runs} times, as accumulated gradients do, and the prediction is "
            f"of one run: MFU is {runs} times the one shown; profile a step of one run",
            "accumulated-gradients",
            "trace",
        )
        return (*self.comparison.trace.notes, *((accumulated,) if runs > 1 else ()))


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
