"""Explanation of the price of an operation: formula, inputs, calibration record."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from shapewright.app.report.columns import print_fact_lines
from shapewright.app.report.outputs.model import take
from shapewright.app.report.outputs.predict import (
    ExplainedDevice,
    ExplainedOperation,
    ExplainedRecord,
    ExplainedTerms,
    ExplainOutput,
    operation_fields,
)
from shapewright.core.errors import WorkloadError, close_names
from shapewright.core.units import format_percent, format_seconds
from shapewright.lowering.operations.base import MEANING_FIELDS
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm, contiguous_dims
from shapewright.pricing.calibration.records import FORMAT_RECORD_KINDS, KERNEL_KINDS, load_record
from shapewright.pricing.experts.price import describe_tiles
from shapewright.pricing.price import AttentionPrice, GemmPrice

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.hardware.device import Device
    from shapewright.prediction.composition.stages import PricedOperation
    from shapewright.prediction.predict import Prediction
    from shapewright.pricing.calibration.records import CalibrationRecord
    from shapewright.pricing.calibration.source import CalibrationSource


class _Pricing(NamedTuple):
    """How a kind of operation is priced.

    Attributes:
        formula: Formula of its time.
        module: Python module of the formula.
        record_kind: Kind of its calibration records; empty without any.
    """

    formula: str
    module: str
    record_kind: str = ""


_PRICING = {
    "gemm": _Pricing(
        formula="time = start + [(waves x max(tile, feed))^p + (traffic / bandwidth)^p]^(1/p) + split cost",
        module="shapewright.pricing.gemm.kernels",
        record_kind="gemm",
    ),
    "grouped_gemm": _Pricing(
        formula="as one GEMM per expert with rows, with kernels and starts of measured expert blocks",
        module="shapewright.pricing.experts.price",
        record_kind="moe",
    ),
    "attention": _Pricing(
        formula="time = start + [(waves of query or key tiles)^p + (traffic / bandwidth)^p]^(1/p)",
        module="shapewright.pricing.attention.price",
        record_kind="attention",
    ),
    "sparse_attention": _Pricing(
        formula="time = start + chain of keys + [(arithmetic)^p + (cache and selection)^p]^(1/p)",
        module="shapewright.pricing.kernels.sparse",
        record_kind="sparse_attention",
    ),
    "scan": _Pricing(
        formula="time = start + steps of chunks + [(arithmetic)^p + (traffic and states)^p]^(1/p)",
        module="shapewright.pricing.kernels.scans",
        record_kind="linear_attention",
    ),
    "convolution": _Pricing(
        formula="time = start + rounds of blocks + [(arithmetic)^p + (traffic)^p]^(1/p)",
        module="shapewright.pricing.kernels.scans",
        record_kind="linear_attention",
    ),
    "pointwise": _Pricing(
        formula="time = kernels x start + bytes / achieved bandwidth",
        module="shapewright.pricing.pointwise",
        record_kind="pointwise",
    ),
    "collective": _Pricing(
        formula="time = latency + ring bytes / bus bandwidth, inside a node and between nodes",
        module="shapewright.pricing.collectives",
        record_kind="collectives",
    ),
    "host": _Pricing(
        formula="copy = bytes / (0.8 x host link); step = bytes x devices of the host / 109 GB/s",
        module="shapewright.pricing.host",
    ),
}
_NAMES_LISTED = 8  # operations that the message about an unknown one lists


def explain_operation(prediction: Prediction, name: str) -> ExplainOutput:
    """Explain the operation of this name, or all whose name starts with it.

    Raises:
        WorkloadError: there is no such operation.
    """
    chosen = [entry for entry in prediction.operations if entry.operation.name == name]
    chosen = chosen or [entry for entry in prediction.operations if entry.operation.name.startswith(name)]
    if not chosen:
        known = list(dict.fromkeys(entry.operation.name for entry in prediction.operations))
        shown = ", ".join(known[:_NAMES_LISTED]) + (", ... (--all lists them)" if len(known) > _NAMES_LISTED else "")
        hint = close_names(name, known) or f"it has {shown}"
        raise WorkloadError(f"no operation {name!r} in this step; {hint}")
    return ExplainOutput(operations=[_explain(prediction, entry) for entry in chosen])


def _explain(prediction: Prediction, entry: PricedOperation) -> ExplainedOperation:
    operation, price, device = entry.operation, entry.price, prediction.device
    is_host = isinstance(operation, Collective) and operation.is_host
    pricing = _PRICING["host" if is_host else operation.kind]
    explanation: dict[str, Any] = {}
    if isinstance(price, GemmPrice) and isinstance(operation, Gemm | GroupedGemm):
        explanation["contiguous_dims"] = dict(zip("ABC", contiguous_dims(operation.layout), strict=True))
        explanation["alignment_factor"] = float(price.alignment_factor)
        explanation["rate_share"] = float(price.rate_share)
        explanation["slow_factor"] = float(price.slow_factor)
    if isinstance(price, (AttentionPrice, GemmPrice)) and not device.physics_only:
        explanation["correction"] = float(price.correction)
    if is_host:
        record = ExplainedRecord(id="none", transfer=price.calibration.label, adjustments="", words="", provenance={})
    else:
        source = price.calibration
        found = _find_record(source, pricing.record_kind, device)
        words = "" if found.transfer == "exact" else found.distance_words
        adjustments = source.adjustments if source.record_id == found.id else ""
        record = take(ExplainedRecord, found, words=words, adjustments=adjustments)
        if isinstance(operation, GroupedGemm):
            explanation["tile_choice"] = describe_tiles(operation, device, found)
    return ExplainedOperation(
        **operation_fields(entry),
        formula=pricing.formula,
        module=pricing.module,
        terms=ExplainedTerms(
            start_s=float(price.start_s),
            compute_s=float(price.compute_s),
            memory_s=float(price.memory_s),
            roofline_s=float(price.roofline_s),
        ),
        device=ExplainedDevice(
            name=device.name,
            peak_flops_per_s=device.dense_flops_per_s.get(operation.dtype),
            memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s,
            num_sms=device.num_sms,
        ),
        record=record,
        inputs={name: value for name, value in asdict(operation).items() if name not in MEANING_FIELDS},
        **explanation,
    )


def _find_record(source: CalibrationSource, usual_kind: str, device: Device) -> CalibrationRecord:
    """Record that a price rests on: formats, passes and layers have kinds of their own, with which their ids begin."""
    kind = source.record_id.partition("/")[0]
    if kind in (*FORMAT_RECORD_KINDS, *KERNEL_KINDS):
        found = load_record(kind, device)
        if found.id == source.record_id:
            return found
    return load_record(usual_kind, device)


def print_explanations(output: ExplainOutput, console: Console) -> None:
    """Print explained operations as text."""
    for index, entry in enumerate(output.operations):
        if index:
            console.print()
        console.print(f"{entry.name} ({entry.pass_name}): {entry.shape}, {entry.dtype}", style="bold", soft_wrap=True)
        print_fact_lines(explanation_rows(entry), console)


def explanation_rows(entry: ExplainedOperation) -> dict[str, str]:
    """Texts of one explained operation by name."""
    middle, low, high = (format_seconds(time_s) for time_s in (entry.time_s, entry.time_low_s, entry.time_high_s))
    rows = {
        "predicted": f"{middle}, 90 % between {low} and {high}",
        "formula": entry.formula,
        **{name.removesuffix("_s"): format_seconds(value) for name, value in vars(entry.terms).items()},
        "bound by": entry.bound_by,
    }
    rows |= _describe_kernel(entry)
    if entry.tile_choice:
        rows["tiles"] = entry.tile_choice
    if entry.correction is not None:
        rows["learned"] = f"time x {entry.correction:.3f}, residual of measured shapes near it"
    rows["runs"] = f"{entry.repeats} per step, {format_seconds(entry.total_time_s)} in total"
    adjustments = f"; {entry.record.adjustments}" if entry.record.adjustments else ""
    rows["record"] = f"{entry.record.id} ({entry.record.transfer}{adjustments})"
    if entry.record.words:
        rows["interval"] = (
            f"borrowed ({entry.record.words}): from leave-one-device-out errors, common offset and scatter of rows"
        )
    rows["code"] = entry.module
    return rows


def _describe_kernel(entry: ExplainedOperation) -> dict[str, str]:
    """Tile, waves and alignment of a GEMM; empty for other operations."""
    if entry.tile is None or entry.contiguous_dims is None:
        return {}
    contiguous = ", ".join(f"{matrix} along {dim}" for matrix, dim in entry.contiguous_dims.items())
    rows = {
        "tile": f"{entry.tile[0]} x {entry.tile[1]}, split of k {entry.split_k}, "
        f"{format_percent(entry.tile_efficiency or 0.0)} of it is output",
        "waves": f"{entry.num_tiles} tiles in {entry.num_waves} waves on {entry.device.num_sms} SMs, "
        f"{format_percent(entry.wave_efficiency or 0.0)} full",
        "alignment": f"{entry.alignment} bytes (contiguous: {contiguous}): rate x {entry.alignment_factor:.3f}",
    }
    if entry.rate_share is not None and entry.rate_share < 1.0:
        rows["long"] = f"rate x {entry.rate_share:.3f}, loss over long contractions and distant memory pages"
    if entry.slow_factor is not None and entry.slow_factor > 1.0:
        rows["slow kernel"] = f"time x {entry.slow_factor:.2f}: sizes too narrow or small for the tiles"
    return rows
