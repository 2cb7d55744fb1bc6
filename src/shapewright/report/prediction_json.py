"""A prediction as JSON: a stable form with a schema version."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from shapewright.operations import Attention, Collective, Gemm, GroupedGemm
from shapewright.perf.price import GemmPrice
from shapewright.report.question_json import device_to_json
from shapewright.units import format_bytes

if TYPE_CHECKING:
    from shapewright.adding_up import PricedOperation
    from shapewright.predict import Prediction

SCHEMA_VERSION = 1


def prediction_to_json(prediction: Prediction) -> dict[str, Any]:
    """Turn a prediction into plain dicts, lists, numbers and strings; units stand in the keys."""
    parameters, memory = prediction.parameters, prediction.memory
    return {
        "schema_version": SCHEMA_VERSION,
        "config": asdict(prediction.config),
        "device": device_to_json(prediction.device),
        "workload": asdict(prediction.workload),
        "layout": {**asdict(prediction.layout), "num_devices": prediction.layout.num_devices},
        "parameters": {"total": parameters.total, "active": parameters.active, **parameters.by_component},
        "step_time_s": prediction.step_time_s,
        "step_time_low_s": prediction.step_time_low_s,
        "step_time_high_s": prediction.step_time_high_s,
        "bubble_time_s": prediction.bubble_time_s,
        "layer_forward_time_s": prediction.layer_forward_time_s,
        "tokens_per_step": prediction.tokens_per_step,
        "tokens_per_s_per_device": prediction.tokens_per_s_per_device,
        "model_flops_per_s": prediction.model_flops_per_s,
        "hardware_flops_per_s": prediction.hardware_flops_per_s,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "mbu": prediction.mbu,
        "memory": {
            **{spec.name: getattr(memory, spec.name) for spec in fields(memory)},
            "total_bytes": memory.total_bytes,
            "capacity_bytes": prediction.device.memory_bytes,
            "fits": memory.total_bytes <= prediction.device.memory_bytes,
        },
        "operations": [operation_to_json(entry) for entry in prediction.operations],
        "software": prediction.software,
        "calibration": _main_record(prediction.calibration),
        "calibration_records": prediction.calibration,
        "warnings": list(prediction.warnings),
    }


def operation_to_json(entry: PricedOperation) -> dict[str, Any]:
    """One operation with its price; keys that a kind does not have are null."""
    operation, price = entry.operation, entry.price
    gemm = price if isinstance(price, GemmPrice) and price.tile_m else None
    known = price if isinstance(price, GemmPrice) and price.alignment_bytes else None
    return {
        "name": operation.name,
        "kind": operation.kind,
        "pass": operation.pass_name,
        "stage": operation.stage,
        "m": getattr(operation, "m", None),
        "n": getattr(operation, "n", None),
        "k": getattr(operation, "k", None),
        "batch": operation.batch
        if isinstance(operation, Gemm)
        else operation.groups
        if isinstance(operation, GroupedGemm)
        else None,
        "dtype": operation.dtype,
        "layout": getattr(operation, "layout", None),
        "shape": _shape_words(entry),
        "repeats": operation.repeats,
        "time_s": float(price.time_s),
        "time_low_s": float(price.low_s),
        "time_high_s": float(price.high_s),
        "total_time_s": entry.total_time_s,
        "exposed_fraction": entry.exposed_fraction,
        "flops": float(operation.flops),
        "bytes": float(operation.num_bytes),
        "tile": [int(gemm.tile_m), int(gemm.tile_n)] if gemm else None,
        "split_k": int(gemm.split_k) if gemm else None,
        "num_tiles": int(gemm.num_tiles) if gemm else None,
        "num_waves": int(gemm.num_waves) if gemm else None,
        "tile_efficiency": float(gemm.tile_efficiency) if gemm else None,
        "wave_efficiency": float(gemm.wave_efficiency) if gemm else None,
        "alignment": int(known.alignment_bytes) if known else None,
        "bound_by": "communication" if isinstance(operation, Collective) else price.bound_by,
        "calibration": price.calibration,
    }


def _main_record(calibration: dict[str, str]) -> str:
    """The GEMM record's id, or ``uncalibrated`` where the device's own record is missing."""
    label = calibration.get("gemm") or next(iter(calibration.values()), "uncalibrated")
    return "uncalibrated" if label.startswith("uncalibrated") else label


def _shape_words(entry: PricedOperation) -> str:
    """Sizes in a form a person can read."""
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
    if isinstance(operation, Collective) and operation.is_host:
        where = "host link" if operation.op_name == "host_copy" else "host's memory"
        return f"{format_bytes(float(operation.num_bytes))} ({where})"
    if isinstance(operation, Collective):
        return f"{format_bytes(float(operation.num_bytes))} over {operation.num_ranks} ({operation.axis})"
    return f"{format_bytes(float(operation.num_bytes))} moved"
