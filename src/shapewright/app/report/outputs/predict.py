"""Outputs of ``predict``, ``predict --explain`` and ``predict --sweep``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from shapewright.app.report.outputs.model import (
    DeviceSummary,
    JobLayout,
    Output,
    described,
    job_layout,
    optional,
    summarize_device,
    take,
    text_only,
)
from shapewright.core.records import dataclass
from shapewright.core.units import format_bytes
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.scan import CausalConv, Scan
from shapewright.lowering.operations.sparse import SparseAttention
from shapewright.memory.states import count_trained_parameters
from shapewright.models.transformer import TransformerConfig
from shapewright.pricing.price import GemmPrice
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.prediction.composition.stages import PricedOperation
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario
    from shapewright.pricing.calibration.source import CalibrationSource


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of parameters."""

    total: int = described("all parameters")
    active: int = described("parameters that one token uses")
    trained: int = described("parameters that training updates, such as those of adapters; 0 in inference")
    by_component: Mapping[str, int] = described("all parameters by component of the model", is_flat=True)


@dataclass(frozen=True, kw_only=True)
class MemoryComponents:
    """Memory of one device by component."""

    weights_bytes: float = described("weights")
    gradients_bytes: float = described("gradients, training only")
    optimizer_bytes: float = described("optimizer states and master weights, training only")
    activations_bytes: float = described("activations saved for the backward pass; tensors of one layer in inference")
    logits_bytes: float = described("logits")
    kv_cache_bytes: float = described("KV cache, inference only")
    gathered_bytes: float = described("weights and gradients gathered by ZeRO stage 3")
    workspace_bytes: float = described("tensors that exist for a moment, such as recomputed activations")
    runtime_bytes: float = described("context of the device's runtime")

    @property
    def by_name(self) -> dict[str, float]:
        """Bytes by component, without the suffix of the fields."""
        return {spec.name.removesuffix("_bytes"): getattr(self, spec.name) for spec in fields(MemoryComponents)}


@dataclass(frozen=True, kw_only=True)
class StepMemory(MemoryComponents):
    """Memory of one device of the fullest pipeline stage."""

    host_bytes: float = described("host memory per device for offloaded tensors; not part of the total")
    stage: int = described("number of that stage, from 0")
    total_bytes: float
    capacity_bytes: float
    fits: bool = described("whether the total is at most the capacity")


@dataclass(frozen=True, kw_only=True)
class OperationOutput:
    """One operation with its price. Keys that its kind does not have are null."""

    name: str = described("module and role, such as `mlp.up.wgrad`")
    kind: str = described("`gemm`, `grouped_gemm`, `attention`, `pointwise` or `collective`")
    pass_name: str = described("`forward`, `backward`, `recompute` or `step`", key="pass")
    stage: str = described("pipeline stages that run it: `every`, `first` or `last`")
    m: int | None = described("rows of C[m,n] = A[m,k] B[k,n]")
    n: int | None = described("columns of C[m,n] = A[m,k] B[k,n]")
    k: int | None = described("contracted dimension of C[m,n] = A[m,k] B[k,n]")
    batch: int | None = described("GEMMs of a batched GEMM, or groups of a grouped one")
    dtype: str = described("element format")
    layout: str | None = described("`NN`, `NT` or `TN`: which dimensions are contiguous")
    shape: str = described("sizes as text")
    repeats: int = described("executions in a step")
    time_s: float = described("time of one execution")
    time_low_s: float = described("lower end of its 90 % interval")
    time_high_s: float = described("upper end of its 90 % interval")
    total_time_s: float = described("`repeats` x `time_s` x `exposed_fraction`")
    exposed_fraction: float = described("share of the time that no computation hides")
    flops: float = described("FLOPs of one execution; attention counts the whole square")
    bytes: float = described("bytes moved by one execution")
    tile: tuple[int, int] | None = described("output tile of the assumed kernel: [tile_m, tile_n]")
    split_k: int | None = described("parts that k is split into")
    num_tiles: int | None = described("output tiles")
    num_waves: int | None = described("waves: passes over the device needed to run every tile")
    tile_efficiency: float | None = described("share of the tiles' area that is output")
    wave_efficiency: float | None = described("share of the slots of all waves that hold a tile")
    alignment: int | None = described("bytes that the contiguous dimensions are aligned to, at most 128")
    bound_by: str = described("`compute`, `memory`, `latency` (kernel start) or `communication`")
    calibration: str = described("calibration record that priced it")
    executed_flops: float = text_only()


@dataclass(frozen=True, kw_only=True)
class PredictOutput(Output):
    """The predicted step."""

    config: TransformerConfig
    device: DeviceSummary
    workload: Workload
    layout: JobLayout
    parameters: Parameters
    step_time_s: float
    step_time_low_s: float
    step_time_high_s: float
    bubble_time_s: float = described("part of the step in which the busiest pipeline stage waits")
    layer_forward_time_s: float = described("forward pass of one average layer over one micro-batch")
    tokens_per_step: int
    tokens_per_s_per_device: float
    images_per_s_per_device: float | None = optional("images per second and device; absent without images")
    model_flops_per_s: float = described("model FLOP/s per device, recomputation not counted")
    hardware_flops_per_s: float = described("FLOP/s per device with recomputed FLOPs")
    mfu: float
    hfu: float
    mbu: float
    memory: StepMemory = described("memory of one device of the fullest pipeline stage")
    operations: list[OperationOutput] = described("operations that one device of the busiest stage runs, in order")
    software: str
    calibration: str = described("id of the GEMM record, or `uncalibrated` where the device has none of its own")
    calibration_records: dict[str, str] = described("record id by kind of operation, with the donor of a borrowed one")
    warnings: list[str] = described("one line each: does not fit, exceeds the model's length, borrowed calibration")
    source: str
    notes: list[str]
    dense_flops_per_s: Mapping[str, float] = text_only()


def _image_rate(prediction: Prediction) -> float | None:
    images = prediction.images_per_step
    return images / prediction.tokens_per_step * prediction.tokens_per_s_per_device if images else None


def predict_output(prediction: Prediction, scenario: Scenario) -> PredictOutput:
    """Output of a prediction of a scenario."""
    memory, capacity_bytes = prediction.memory, prediction.device.memory_bytes
    return take(
        PredictOutput,
        prediction,
        device=summarize_device(prediction.device),
        images_per_s_per_device=_image_rate(prediction),
        layout=job_layout(prediction.layout),
        parameters=take(
            Parameters,
            prediction.parameters,
            trained=count_trained_parameters(prediction.config, prediction.workload),
        ),
        memory=take(StepMemory, memory, capacity_bytes=capacity_bytes, fits=memory.total_bytes <= capacity_bytes),
        operations=[operation_output(entry) for entry in prediction.operations],
        calibration=_main_record(prediction.calibration),
        calibration_records={kind: source.label for kind, source in prediction.calibration.items()},
        source=scenario.model.source,
        notes=scenario.notes,
        dense_flops_per_s=prediction.device.dense_flops_per_s,
    )


def prediction_output(prediction: Prediction) -> PredictOutput:
    """Output of a prediction without the scenario that it was made of."""
    from shapewright.prediction.scenario import Scenario

    scenario = Scenario.of(prediction.config, prediction.device, prediction.workload, prediction.layout)
    return predict_output(prediction, scenario)


def _main_record(calibration: Mapping[str, CalibrationSource]) -> str:
    """The GEMM record's id, or ``uncalibrated`` where the device has none of its own."""
    source = calibration.get("gemm") or next(iter(calibration.values()), None)
    return "uncalibrated" if source is None or source.is_uncalibrated else source.label


def operation_output(entry: PricedOperation) -> OperationOutput:
    """One operation with its price."""
    return OperationOutput(**operation_fields(entry))


def operation_fields(entry: PricedOperation) -> dict[str, Any]:
    """Fields of ``OperationOutput``."""
    operation, price = entry.operation, entry.price
    gemm = price if isinstance(price, GemmPrice) and price.tile_m else None
    aligned = price if isinstance(price, GemmPrice) and price.alignment_bytes else None
    batch = operation.batch if isinstance(operation, Gemm) else getattr(operation, "groups", None)
    return {
        "name": operation.name,
        "kind": operation.kind,
        "pass_name": operation.pass_name,
        "stage": operation.stage,
        "m": getattr(operation, "m", None),
        "n": getattr(operation, "n", None),
        "k": getattr(operation, "k", None),
        "batch": batch,
        "dtype": operation.dtype,
        "layout": getattr(operation, "layout", None),
        "shape": _describe_shape(entry),
        "repeats": operation.repeats,
        "time_s": float(price.time_s),
        "time_low_s": float(price.low_s),
        "time_high_s": float(price.high_s),
        "total_time_s": entry.total_time_s,
        "exposed_fraction": entry.exposed_fraction,
        "flops": float(operation.flops),
        "bytes": float(operation.num_bytes),
        "tile": (int(gemm.tile_m), int(gemm.tile_n)) if gemm else None,
        "split_k": int(gemm.split_k) if gemm else None,
        "num_tiles": int(gemm.num_tiles) if gemm else None,
        "num_waves": int(gemm.num_waves) if gemm else None,
        "tile_efficiency": float(gemm.tile_efficiency) if gemm else None,
        "wave_efficiency": float(gemm.wave_efficiency) if gemm else None,
        "alignment": int(aligned.alignment_bytes) if aligned else None,
        "bound_by": "communication" if isinstance(operation, Collective) else price.bound_by,
        "calibration": price.calibration.label,
        # Of attention without what the mask leaves out: rates of the whole square could exceed the peak.
        "executed_flops": float(operation.executed_flops if isinstance(operation, Attention) else operation.flops),
    }


def _describe_shape(entry: PricedOperation) -> str:
    """Sizes of an operation as text."""
    operation = entry.operation
    if isinstance(operation, Gemm):
        batch = f"{operation.batch} x " if operation.batch != 1 else ""
        return f"{batch}{operation.m} x {operation.n} x {operation.k}"
    if isinstance(operation, GroupedGemm):
        return f"{operation.m} x {operation.n} x {operation.k} in {operation.groups} groups"
    if isinstance(operation, Attention):
        heads = f"{operation.num_heads}"
        if operation.num_heads != operation.num_kv_heads:
            heads += f"/{operation.num_kv_heads}"
        return f"{operation.batch_size} x {operation.query_len}/{operation.kv_len}, {heads} x {operation.head_dim}"
    if isinstance(operation, SparseAttention):
        heads = f"{operation.num_heads} x {operation.head_dim}"
        return (
            f"{operation.batch_size} x {operation.query_len}/{operation.kv_len}, {heads}, {operation.selected} selected"
        )
    if isinstance(operation, Scan):
        state = f"{operation.num_v_heads} x {operation.k_head_dim} x {operation.v_head_dim}"
        return f"{operation.batch_size} x {operation.seq_len}, state {state}"
    if isinstance(operation, CausalConv):
        return f"{operation.batch_size} x {operation.seq_len}, {operation.channels} x {operation.width}"
    if isinstance(operation, Collective) and operation.is_host:
        where = "host link" if operation.op_name == "host_copy" else "host's memory"
        return f"{format_bytes(float(operation.num_bytes))} ({where})"
    if isinstance(operation, Collective):
        return f"{format_bytes(float(operation.num_bytes))} over {operation.num_ranks} ({operation.axis})"
    return f"{format_bytes(float(operation.num_bytes))} moved"


@dataclass(frozen=True, kw_only=True)
class ExplainedTerms:
    """Terms of the time of one execution, before they are combined."""

    start_s: float = described("kernel start")
    compute_s: float = described("arithmetic")
    memory_s: float = described("memory traffic")
    roofline_s: float = described("lower bound from the data sheet")


@dataclass(frozen=True, kw_only=True)
class ExplainedDevice:
    """Numbers of the data sheet that the price depends on."""

    name: str = described("canonical name")
    peak_flops_per_s: float | None = described("dense peak of the dtype")
    memory_bandwidth_bytes_per_s: float = described("memory bandwidth")
    num_sms: int | None = described("streaming multiprocessors or compute units")


@dataclass(frozen=True, kw_only=True)
class ExplainedRecord:
    """The calibration record that priced an operation."""

    id: str = described("id of the record")
    transfer: str = described("`exact` for the device's own record, else how it was borrowed")
    adjustments: str = described("changes of the record's numbers for this device and software; empty without any")
    words: str = described("relation of the calibration donor to this device; empty for the device's own record")
    provenance: Mapping[str, Any] = described("how the record was measured and fitted")


@dataclass(frozen=True, kw_only=True)
class ExplainedOperation(OperationOutput):
    """One operation with its formula, inputs and calibration record."""

    formula: str = described("formula of its time")
    module: str = described("Python module of the formula")
    terms: ExplainedTerms = described("terms of the time, before they are combined")
    device: ExplainedDevice = described("numbers of the data sheet that the price depends on")
    contiguous_dims: dict[str, str] | None = optional("contiguous dimension of A, B and C; GEMMs only")
    alignment_factor: float | None = optional("factor of the rate for the alignment; GEMMs only")
    rate_share: float | None = optional("factor of the rate for long contractions and distant pages; GEMMs only")
    slow_factor: float | None = optional("factor of the time for narrow or small sizes; GEMMs only")
    correction: float | None = optional("learned factor in the time; GEMMs and attention only")
    record: ExplainedRecord = described("calibration record that priced it")
    tile_choice: str | None = optional("tiles of grouped GEMMs as text")
    inputs: dict[str, Any] = described("fields of the operation")


@dataclass(frozen=True, kw_only=True)
class ExplainOutput(Output):
    """Operations whose name starts with the given one, each with everything that its price depends on."""

    operations: list[ExplainedOperation] = described("the operations")
