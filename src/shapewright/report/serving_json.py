"""Serving plans as plain values."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shapewright.report.prediction_json import SCHEMA_VERSION
from shapewright.report.question_json import device_to_json
from shapewright.report.serving_text import MODES
from shapewright.serving.layouts import degrees_of

if TYPE_CHECKING:
    from shapewright.layout import ParallelLayout
    from shapewright.serving import OperatingPoint, ServingFormat, ServingPlan


def serving_to_json(found: ServingPlan) -> dict[str, Any]:
    """Turn a plan into plain values; units stand in the keys."""
    request = found.request
    price = request.usd_per_hour
    return {
        "schema_version": SCHEMA_VERSION,
        "device": device_to_json(found.device),
        "config": asdict(found.config),
        "request": {name: value for name, value in asdict(request).items() if name != "speculation"},
        "speculation": None
        if request.speculation is None
        else {**asdict(request.speculation), "tokens_per_pass": request.speculation.tokens_per_pass},
        "attention": found.workload.attention,
        "expert_kernel": found.workload.expert_kernel,
        "formats": [format_to_json(one) for one in found.formats],
        "keeps_limits": found.best() is not None,
        "best": point_to_json(found.best(), price),
        "best_by_mode": {mode: point_to_json(found.best(mode), price) for mode in MODES},
        "best_by_format": {one.name: point_to_json(found.best(format_name=one.name), price) for one in found.formats},
        "front": {mode: [point_to_json(point, price) for point in found.front(mode)] for mode in MODES},
        "capacities": [
            {
                "format": capacity.format.name,
                "layout": layout_to_json(capacity.layout),
                "weights_bytes": capacity.weights_bytes,
                "free_bytes": capacity.free_bytes,
                "cache_bytes_per_token": capacity.cache_bytes_per_token,
                "cache_tokens": capacity.cache_tokens,
                "most_sequences": capacity.most_sequences,
            }
            for capacity in found.capacities
        ],
        "num_points": len(found.points),
        "notes": list(found.notes),
    }


def format_to_json(one: ServingFormat) -> dict[str, str]:
    """A format with its name."""
    return {"name": one.name, **asdict(one)}


def layout_to_json(layout: ParallelLayout | None) -> dict[str, int | None] | None:
    """Degrees of an instance."""
    if layout is None:
        return None
    return {**degrees_of(layout), "num_devices": layout.num_devices}


def point_to_json(point: OperatingPoint | None, usd_per_hour: float | None) -> dict[str, Any] | None:
    """One way to serve, at the price of a device; null where there is none."""
    if point is None:
        return None
    return {
        "mode": point.mode,
        "format": point.format.name,
        "layout": layout_to_json(point.layout),
        "prefill_layout": layout_to_json(point.prefill_layout),
        "num_instances": point.num_instances,
        "num_prefill_instances": point.num_prefill_instances,
        "num_devices": point.num_devices,
        "batch_size": point.batch_size,
        "num_sequences": point.num_sequences,
        "prefill_tokens": point.prefill_tokens,
        "prefill_load_fraction": point.prefill_load_fraction,
        "ttft_s": point.ttft.middle_s,
        "ttft_low_s": point.ttft.low_s,
        "ttft_high_s": point.ttft.high_s,
        "tpot_s": point.tpot.middle_s,
        "tpot_low_s": point.tpot.low_s,
        "tpot_high_s": point.tpot.high_s,
        "requests_per_s": point.requests_per_s,
        "tokens_per_s": point.tokens_per_s,
        "tokens_per_s_per_device": point.tokens_per_s_per_device,
        "tokens_per_s_per_user": point.tokens_per_s_per_user,
        "usd_per_million_tokens": point.usd_per_million_tokens(usd_per_hour),
    }
