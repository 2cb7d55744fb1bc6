"""Why an operation takes the time it is predicted to take: formula, inputs, source, record."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shapewright.errors import WorkloadError, close_names
from shapewright.operations import Collective, GroupedGemm
from shapewright.operations.gemm import contiguous_dims
from shapewright.perf.calibration import load_record
from shapewright.perf.experts import say_tiles
from shapewright.perf.price import AttentionPrice, GemmPrice
from shapewright.report.prediction_json import SCHEMA_VERSION, operation_to_json
from shapewright.units import format_percent, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.adding_up import PricedOperation
    from shapewright.predict import Prediction

_FORMULAS = {
    "gemm": "time = start + [(waves x max(tile, feed))^p + (traffic / bandwidth)^p]^(1/p) + split cost",
    "grouped_gemm": "as a gemm of each expert that gets rows, through the kernels and starts of measured expert blocks",
    "attention": "time = start + [(waves of query or key tiles)^p + (traffic / bandwidth)^p]^(1/p)",
    "pointwise": "time = kernels x start + bytes / achieved bandwidth",
    "collective": "time = latency + ring bytes / bus bandwidth, inside a node and between nodes",
    "host": "copy = bytes / (0.8 x host link); step = bytes x devices of the host / 109 GB/s",
}
_MODULES = {
    "gemm": "shapewright.perf.kernels",
    "grouped_gemm": "shapewright.perf.experts",
    "attention": "shapewright.perf.attention",
    "pointwise": "shapewright.perf.pointwise",
    "collective": "shapewright.perf.collectives",
    "host": "shapewright.perf.host",
}
_RECORD_KINDS = {
    "gemm": "gemm",
    "grouped_gemm": "moe",
    "attention": "attention",
    "pointwise": "pointwise",
    "collective": "collectives",
}


def explain_operation(prediction: Prediction, name: str) -> dict[str, Any]:
    """Collect everything behind the operations whose name begins with ``name``.

    Raises:
        WorkloadError: no operation has this name.
    """
    chosen = [entry for entry in prediction.operations if entry.operation.name == name]
    chosen = chosen or [entry for entry in prediction.operations if entry.operation.name.startswith(name)]
    if not chosen:
        known = list(dict.fromkeys(entry.operation.name for entry in prediction.operations))
        shown = ", ".join(known[:8]) + (", ... (--all lists them)" if len(known) > 8 else "")
        hint = close_names(name, known) or f"it has {shown}"
        raise WorkloadError(f"no operation {name!r} in this step; {hint}")
    return {"schema_version": SCHEMA_VERSION, "operations": [_explain(prediction, entry) for entry in chosen]}


def _explain(prediction: Prediction, entry: PricedOperation) -> dict[str, Any]:
    price, device = entry.price, prediction.device
    is_host = isinstance(entry.operation, Collective) and entry.operation.is_host
    kind = "host" if is_host else entry.operation.kind
    facts = operation_to_json(entry)
    facts["formula"], facts["module"] = _FORMULAS[kind], _MODULES[kind]
    facts["terms"] = {
        "start_s": float(price.start_s),
        "compute_s": float(price.compute_s),
        "memory_s": float(price.memory_s),
        "roofline_s": float(price.roofline_s),
    }
    facts["device"] = {
        "name": device.name,
        "peak_flops_per_s": device.dense_flops_per_s.get(entry.operation.dtype),
        "memory_bandwidth_bytes_per_s": device.memory_bandwidth_bytes_per_s,
        "num_sms": device.num_sms,
    }
    if isinstance(price, GemmPrice):
        letters = contiguous_dims(facts["layout"])
        facts["contiguous_dims"] = dict(zip("ABC", letters, strict=True))
        facts["alignment_factor"] = float(price.alignment_factor)
        facts["rate_share"], facts["slow_factor"] = float(price.rate_share), float(price.slow_factor)
    if isinstance(price, (AttentionPrice, GemmPrice)) and not device.physics_only:
        facts["correction"] = float(price.correction)
    if is_host:
        facts["record"] = {"id": "none", "transfer": price.calibration, "words": "", "provenance": {}}
    else:
        record = load_record(_RECORD_KINDS[kind], device, uncalibrated=price.calibration.startswith("uncalibrated"))
        facts["record"] = {
            "id": record.id,
            "transfer": record.transfer,
            "words": "" if record.transfer == "exact" else record.distance_words,
            "provenance": record.provenance,
        }
        if isinstance(entry.operation, GroupedGemm):
            facts["tile_choice"] = say_tiles(entry.operation, device, record)
    facts["inputs"] = asdict(entry.operation)
    return facts


def print_explanation(facts: dict[str, Any], console: Console) -> None:
    """Print explanations for a person."""
    for index, entry in enumerate(facts["operations"]):
        if index:
            console.print()
        console.print(
            f"{entry['name']} ({entry['pass']}): {entry['shape']}, {entry['dtype']}", style="bold", soft_wrap=True
        )
        rows = explanation_rows(entry)
        margin = max(map(len, rows))
        for name, text in rows.items():
            console.print(f"{name:<{margin}}  {text}", soft_wrap=True)


def _say_record(record: dict[str, Any], label: str) -> str:
    """A record and how far it is used, with what the price's label adds: kernels left out, formats that stand in."""
    added = label.partition(record["id"])[2].replace(")", "", 1).strip(" ,")
    return f"{record['id']} ({record['transfer']}{f'; {added}' if added else ''})"


def explanation_rows(entry: dict[str, Any]) -> dict[str, str]:
    """One explanation in words by name."""
    middle, low, high = (format_seconds(entry[key]) for key in ("time_s", "time_low_s", "time_high_s"))
    rows = {
        "predicted": f"{middle}, 90 % between {low} and {high}",
        "formula": entry["formula"],
        **{name.removesuffix("_s"): format_seconds(value) for name, value in entry["terms"].items()},
        "bound by": entry["bound_by"],
    }
    if entry["tile"]:
        contiguous = ", ".join(f"{matrix} along {dim}" for matrix, dim in entry["contiguous_dims"].items())
        rows["tile"] = (
            f"{entry['tile'][0]} x {entry['tile'][1]}, split of k {entry['split_k']}, "
            f"{format_percent(entry['tile_efficiency'])} of it is output"
        )
        rows["waves"] = (
            f"{entry['num_tiles']} tiles in {entry['num_waves']} waves on {entry['device']['num_sms']} SMs, "
            f"{format_percent(entry['wave_efficiency'])} full"
        )
        rows["alignment"] = (
            f"{entry['alignment']} bytes (contiguous: {contiguous}): rate x {entry['alignment_factor']:.3f}"
        )
        if entry["rate_share"] < 1.0:
            rows["long"] = f"rate x {entry['rate_share']:.3f}, lost along the contraction and on pages far apart"
        if entry["slow_factor"] > 1.0:
            rows["slow kernel"] = f"time x {entry['slow_factor']:.2f}: narrow or small sizes, which no tile serves"
    if entry.get("tile_choice"):
        rows["tiles"] = entry["tile_choice"]
    if "correction" in entry:
        rows["learned"] = f"time x {entry['correction']:.3f}, what measured shapes near it took beyond the formula"
    rows["runs"] = f"{entry['repeats']} a step, {format_seconds(entry['total_time_s'])} in all"
    rows["record"] = _say_record(entry["record"], entry["calibration"])
    if entry["record"]["words"]:
        rows["interval"] = (
            f"lent ({entry['record']['words']}): from measured devices left out in turn, the error that all rows of "
            "one share and their scatter"
        )
    rows["code"] = entry["module"]
    return rows
