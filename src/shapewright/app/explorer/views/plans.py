"""The Plan view: layouts of a training job over devices, where their steps go, and memory against time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.app.api.searches import plan
from shapewright.app.explorer.requests import job_fields, read_job_model
from shapewright.app.explorer.views.answers import columns_to_json
from shapewright.app.explorer.views.outputs import figure
from shapewright.app.figures.plan import plan_front_chart, plan_steps_chart
from shapewright.app.report.optimize.plan import (
    describe_losses,
    describe_plan_job,
    describe_space,
    plan_columns,
    warnings_of,
)
from shapewright.app.report.outputs.model import plain
from shapewright.app.report.outputs.plan import plans_output
from shapewright.core.units import format_bytes, format_seconds
from shapewright.optimize.plan.request import PLAN_FIELDS

if TYPE_CHECKING:
    from shapewright.app.explorer.device_lookup import DeviceLookup
    from shapewright.app.explorer.requests import PlanRequestBody
    from shapewright.app.report.outputs.plan import PlansOutput

Answer = dict[str, Any]

# Fields that a plan chooses, and the one that belongs to a recomputation which it does not know.
_CHOSEN = (*PLAN_FIELDS, "recompute_layers")
# Sequences of an optimizer step where none are given.
_USUAL_GLOBAL_BATCH = 512


def answer_plan(body: PlanRequestBody, devices: DeviceLookup) -> Answer:
    """JSON and text output of ``plan``, with its figures."""
    job = body.job
    device = devices.find(job.device, **job.node_options).with_pricing(uncalibrated=job.uncalibrated)
    workload = {name: value for name, value in job_fields(job)["workload"].items() if name not in _CHOSEN}
    output = plans_output(
        plan(
            read_job_model(job),
            num_devices=body.num_devices,
            global_batch_size=body.global_batch_size or workload.get("global_batch_size", _USUAL_GLOBAL_BATCH),
            objective=body.objective,
            usd_per_hour=body.usd_per_hour,
            device=device,
            workload=workload,
            software=job.software,
        )
    )
    answer = output.to_json()
    notes = [] if job.uncalibrated else devices.calibration_notes(device)
    return {
        **answer,
        "notes": [*dict.fromkeys([*answer["notes"], *warnings_of(output), *notes])],
        "text": {
            "request": describe_plan_job(output),
            "space": describe_space(output),
            "plans": columns_to_json(plan_columns(output)),
            "verdict": _verdict(output),
        },
        "figures": _figures(output) if output.plans else {},
    }


def _verdict(output: PlansOutput) -> str:
    """The best plan in one line, and why the next one loses."""
    if not output.plans:
        return f"no plan fits on {output.request.num_devices} devices; use more"
    best = output.plans[0]
    return f"{best.plan}: {format_seconds(best.expected_step_time_s)} a step" + "".join(
        f"; {line}" for line in describe_losses(output)[:1]
    )


def _figures(output: PlansOutput) -> Answer:
    """Parts of the steps of the best plans, and the Pareto front."""
    steps = plan_steps_chart(output)
    parts = {
        part.name: [
            f"{name}: {part.name} {format_seconds(value)}"
            for name, value in zip(steps.categories, part.values, strict=True)
        ]
        for part in steps.parts
    }
    front = plan_front_chart(output)
    points: dict[str, list[str]] = {}
    for point in output.pareto:
        points.setdefault(f"{point.layout.num_devices} GPUs", []).append(
            f"{point.plan}: step {format_seconds(point.step_time_s)}, {format_bytes(point.total_bytes)}"
        )
    return {"steps": plain(figure(steps, parts)), "front": plain(figure(front, points))}
