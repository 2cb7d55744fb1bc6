"""plan_job: the best layouts of a training job on a number of devices, and the differences between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import inf, isclose
from typing import TYPE_CHECKING

from shapewright.optimize.plan.engine import explore
from shapewright.optimize.plan.findings import Choice, Findings
from shapewright.optimize.plan.notes import plan_notes, refuse_if_none_fits
from shapewright.optimize.plan.request import PlanJob
from shapewright.optimize.plan.result import FrontPoint, Plan, PlanResult, break_down, explain_loss

if TYPE_CHECKING:
    from shapewright.optimize.plan.findings import Table
    from shapewright.optimize.plan.request import PlanRequest
    from shapewright.prediction.scenario import Scenario

    Progress = Callable[[int, int], None]

_SECONDS_PER_HOUR = 3600.0
_SAME_STEP = 1e-8  # rounding of sums of the same terms in another order is smaller


def plan_job(
    scenario: Scenario,
    request: PlanRequest,
    *,
    notes: tuple[str, ...] | None = None,
    progress: Progress | None = None,
) -> PlanResult:
    """Search the best layouts of a training job on a number of devices.

    Args:
        scenario: The job: model, device, sequence length, dtype, attention, optimizer and global batch size; plans
            choose layout, micro-batch size and recomputation.
        request: Devices, objective and kept values.
        notes: Notes kept with the result, instead of those of the scenario.
        progress: Called with the number of splits done and of all splits.

    Raises:
        LayoutError: the devices do not fill whole nodes, no split divides the model, or no plan fits.
        WorkloadError: the phase is not training, or there is no global batch size.
        UnknownRateError: the device's data sheet lacks a number that is needed.
    """
    job = PlanJob(scenario=scenario, request=request)
    started_s = time.perf_counter()
    findings = explore(job, progress=progress)
    if findings.is_complete:
        refuse_if_none_fits(job, findings)
    plans = _make_plans(job, findings)
    return PlanResult(
        scenario=scenario,
        request=request,
        plans=plans,
        front=tuple(_front_points(findings)),
        tally=findings.tally,
        elapsed_s=time.perf_counter() - started_s,
        is_complete=findings.is_complete,
        notes=(*(scenario.notes if notes is None else notes), *plan_notes(job, plans)),
    )


def _make_plans(job: PlanJob, findings: Findings) -> tuple[Plan, ...]:
    """Predict the best plans one by one."""
    request = job.request
    plans: list[Plan] = []
    for choice, total_bytes in _list_choices(findings, request.top):
        prediction = job.scenario.replace(**choice.chosen_workload, layout=choice.layout).predict()
        breakdown = break_down(prediction)
        cost = None
        if request.usd_per_hour is not None:
            hours = prediction.layout.num_devices * prediction.step_time_s * request.straggler_factor
            cost = 1e6 * request.usd_per_hour * hours / _SECONDS_PER_HOUR / prediction.tokens_per_step
        plans.append(
            Plan(
                rank=len(plans) + 1,
                prediction=prediction,
                breakdown=breakdown,
                loss=explain_loss(plans[0].breakdown, breakdown) if plans else None,
                total_bytes=total_bytes,
                expected_step_s=prediction.step_time_s * request.straggler_factor,
                usd_per_million_tokens=cost,
            )
        )
    return tuple(plans)


def _list_choices(findings: Findings, top: int) -> Iterator[tuple[Choice, float]]:
    """Yield the best plans with their bytes.

    Variants of a listed plan that need no less memory, or take as long with less, are left out.
    """
    table = findings.best
    least_bytes: dict[object, float] = {}
    listed_s: dict[object, float] = {}
    num_listed = 0
    for row in range(len(table.get("step_s", ()))):
        choice, needed, step_s = findings.choice(table, row), float(table["bytes"][row]), float(table["step_s"][row])
        split = choice.split._replace(sequence_parallel=True)
        if needed >= least_bytes.get(split, inf):
            continue
        least_bytes[split] = needed
        if isclose(step_s, listed_s.get(split, inf), rel_tol=_SAME_STEP):
            continue
        listed_s[split] = step_s
        yield choice, needed
        num_listed += 1
        if num_listed == top:
            return


def _front_points(findings: Findings) -> Iterator[FrontPoint]:
    table: Table = findings.front
    for row in range(len(table.get("step_s", ()))):
        yield FrontPoint(findings.choice(table, row), float(table["step_s"][row]), float(table["bytes"][row]))
