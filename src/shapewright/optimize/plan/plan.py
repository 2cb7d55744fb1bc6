"""plan_job: the best layouts of a training job on a number of devices, and how their steps differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import inf, isclose
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.errors import LayoutError
from shapewright.core.units import format_bytes
from shapewright.optimize.plan.engine import explore
from shapewright.optimize.plan.findings import Choice, Findings
from shapewright.optimize.plan.notes import describe_choice, plan_notes, raise_if_none_fits
from shapewright.optimize.plan.request import PlanJob
from shapewright.optimize.plan.result import FrontPoint, Plan, PlanResult, break_down, explain_difference
from shapewright.optimize.plan.space import list_activation_policies, list_shardings

if TYPE_CHECKING:
    from shapewright.optimize.plan.findings import Table
    from shapewright.optimize.plan.request import PlanRequest
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario

    Progress = Callable[[int, int], None]

_SECONDS_PER_HOUR = 3600.0
_SAME_STEP = 1e-8  # relative; summing the same terms in another order changes a step by less
_TOWER_BATCH = 10  # plans predicted with the vision tower before each check whether further ones can be better


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
        notes: Notes kept with the result, instead of those of the scenario.
        progress: Called with the number of splits done and of all splits.

    Raises:
        LayoutError: the devices do not fill whole nodes, no split divides the model, or no plan fits.
        WorkloadError: the phase is not training, or there is no global batch size.
        UnknownRateError: the device's data sheet lacks a number that is needed.
    """
    job = PlanJob(scenario=scenario, request=request)
    started_s = time.perf_counter()
    has_images = scenario.workload.images > 0
    searched = job.of_language_model() if has_images else job
    findings = explore(searched, progress=progress)
    if findings.is_complete:
        raise_if_none_fits(searched, findings)
    if has_images:
        findings = _predict_with_tower(job, findings)
    plans = _make_plans(job, findings)
    return PlanResult(
        scenario=scenario,
        request=request,
        plans=plans,
        front=tuple(_front_points(findings)),
        tally=findings.tally,
        elapsed_s=time.perf_counter() - started_s,
        is_complete=findings.is_complete,
        notes=(*(scenario.notes if notes is None else notes), *plan_notes(job, plans, findings.num_predicted)),
    )


def _predict_with_tower(job: PlanJob, findings: Findings) -> Findings:
    """Predict plans of the language model again, with the vision tower on their first stage.

    The tower only adds time and memory. So plans are tried in the order of the language model alone, until the next
    ones, even without the tower, are no better than the plans found with it.

    Raises:
        LayoutError: none of them fits.
    """
    found = Findings(job.request, tight_above_bytes=findings.tight_above_bytes)
    smallest: tuple[float, Choice] | None = None
    refused: LayoutError | None = None
    tried: set[Choice] = set()
    for table in (findings.best, findings.front):  # the front has plans that need less memory than the best
        for choice, _, row in _list_distinct(findings, table, inf):
            if choice in tried:
                continue
            if len(tried) % _TOWER_BATCH == 0 and _has_best_plans(job, found, table, row):
                break
            tried.add(choice)
            try:
                prediction = _predict(job, choice)
            except LayoutError as error:  # the tower does not divide by the tensor axis
                refused = error
                continue
            needed = prediction.memory.total_bytes
            if smallest is None or needed < smallest[0]:
                smallest = needed, choice
            if needed <= job.limit_bytes:
                _add_plan(found, choice, prediction)
    if refused is not None and smallest is None:
        raise refused
    if smallest is not None and not found.best:
        raise LayoutError(
            f"none of the best plans of the language model fits with the vision tower: the smallest needs "
            f"{format_bytes(smallest[0])} of {format_bytes(job.limit_bytes)} ({describe_choice(smallest[1])}); give "
            f"more devices, or fewer images"
        )
    found.tally, found.is_complete, found.num_predicted = findings.tally, findings.is_complete, len(tried)
    return found


def _has_best_plans(job: PlanJob, found: Findings, table: Table, row: int) -> bool:
    """Return whether enough plans are found, and the plan in a row is no better than them even without the tower."""
    listed = [each for _, _, each in _list_distinct(found, found.best, job.request.top)]
    if len(listed) < job.request.top:
        return False
    return _objective_of(job, table, row) >= _objective_of(job, found.best, listed[-1])


def _objective_of(job: PlanJob, table: Table, row: int) -> float:
    """Return the value that the objective minimizes."""
    needed, step_s, devices = (float(table[name][row]) for name in ("bytes", "step_s", "devices"))
    return {"memory": needed, "time": step_s}.get(job.request.objective, step_s * devices)


def _add_plan(found: Findings, choice: Choice, prediction: Prediction) -> None:
    """Add one predicted plan to findings."""
    row = {
        "step_s": prediction.step_time_s,
        "bytes": prediction.memory.total_bytes,
        "split": len(found.splits),
        "policy": list_activation_policies(found.request).index(choice.policy),
        "sharding": list_shardings(found.request).index(choice.sharding),
        "schedule": len(found.schedules),
        "devices": choice.num_devices,
    }
    found.splits.append(choice.split)
    found.schedules.append(choice.schedule)
    found.add({name: np.array([value]) for name, value in row.items()})


def _predict(job: PlanJob, choice: Choice) -> Prediction:
    return job.scenario.replace(**choice.chosen_workload, layout=choice.layout).predict()


def _make_plans(job: PlanJob, findings: Findings) -> tuple[Plan, ...]:
    """Predict the best plans one by one."""
    request = job.request
    plans: list[Plan] = []
    for choice, total_bytes, _ in _list_distinct(findings, findings.best, request.top):
        prediction = _predict(job, choice)
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
                loss=explain_difference(plans[0].breakdown, breakdown) if plans else None,
                total_bytes=total_bytes,
                expected_step_s=prediction.step_time_s * request.straggler_factor,
                usd_per_million_tokens=cost,
            )
        )
    return tuple(plans)


def _list_distinct(findings: Findings, table: Table, top: float) -> Iterator[tuple[Choice, float, int]]:
    """Yield the first distinct plans of a table with their bytes and rows.

    Variants of a listed split that need no less memory, or take equally long with less, are left out.
    """
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
        yield choice, needed, row
        num_listed += 1
        if num_listed == top:
            return


def _front_points(findings: Findings) -> Iterator[FrontPoint]:
    table: Table = findings.front
    for row in range(len(table.get("step_s", ()))):
        yield FrontPoint(findings.choice(table, row), float(table["step_s"][row]), float(table["bytes"][row]))
