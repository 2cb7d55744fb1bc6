"""Plans as JSON: a stable form with a schema version."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from shapewright.plan import SEARCHED, describe_choice
from shapewright.report.prediction_json import SCHEMA_VERSION
from shapewright.report.question_json import device_to_json

if TYPE_CHECKING:
    from shapewright.plan import FrontPoint, Plan, PlanResult


def plan_to_json(result: PlanResult) -> dict[str, Any]:
    """Turn a result into plain dicts, lists, numbers and strings; units stand in the keys."""
    request, tally = result.request, result.tally
    return {
        "schema_version": SCHEMA_VERSION,
        "config": asdict(result.config),
        "device": {**device_to_json(result.device), "memory_bytes": result.device.memory_bytes},
        "workload": {name: value for name, value in asdict(result.workload).items() if name not in SEARCHED},
        "request": {
            "num_devices": request.num_devices,
            "objective": request.objective,
            "kept": {name: list(values) for name, values in request.kept.items()},
            "usd_per_hour": request.usd_per_hour,
            "straggler_factor": request.straggler_factor,
            "headroom_fraction": request.headroom_fraction,
            "optimizer": result.optimizer,
        },
        "plans": [one_plan_to_json(plan) for plan in result.plans],
        "pareto": [_point_to_json(point) for point in result.front],
        "space": {
            "size": tally.num_plans,
            "priced": tally.num_fitting,
            "refused": dict(tally.refused),
        },
        "elapsed_s": result.elapsed_s,
        "is_complete": result.is_complete,
        "notes": list(result.notes),
    }


def one_plan_to_json(plan: Plan) -> dict[str, Any]:
    """One plan; ``loss`` is null for the best."""
    prediction = plan.prediction
    return {
        "rank": plan.rank,
        "layout": {**asdict(plan.layout), "num_devices": plan.layout.num_devices},
        "micro_batch_size": plan.workload.micro_batch_size,
        "recompute": plan.workload.recompute,
        "offload_activations": plan.workload.offload_activations,
        "offload_optimizer": plan.workload.offload_optimizer,
        "software": prediction.software,
        "step_time_s": prediction.step_time_s,
        "step_time_low_s": prediction.step_time_low_s,
        "step_time_high_s": prediction.step_time_high_s,
        "expected_step_time_s": plan.expected_step_s,
        "tokens_per_s": prediction.tokens_per_step / plan.expected_step_s,
        "tokens_per_s_per_device": prediction.tokens_per_s_per_device,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "total_bytes": plan.total_bytes,
        "tight": plan.is_tight,
        "device_s_per_million_tokens": plan.device_s_per_million_tokens,
        "usd_per_million_tokens": plan.usd_per_million_tokens,
        "breakdown_s": dict(plan.breakdown.parts),
        "hidden_communication_s": dict(plan.breakdown.hidden),
        "loss": None if plan.loss is None else asdict(plan.loss),
        "warnings": list(prediction.warnings),
    }


def _point_to_json(point: FrontPoint) -> dict[str, Any]:
    return {
        "plan": describe_choice(point.choice),
        "layout": {**asdict(point.choice.layout), "num_devices": point.choice.num_devices},
        **point.choice.chosen_workload,
        "step_time_s": point.step_s,
        "total_bytes": point.total_bytes,
    }
