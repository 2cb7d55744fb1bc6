"""search_shapes: shapes of the same size as a baseline that run faster."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.errors import ConfigError, WorkloadError
from shapewright.core.texts import with_fields
from shapewright.core.units import format_bytes, format_count, format_seconds
from shapewright.optimize.search.branches import list_branches
from shapewright.optimize.search.device_search import MOST_COST_FRACTION, DeviceSearch
from shapewright.optimize.search.engine import explore, run_here
from shapewright.optimize.search.findings import Findings
from shapewright.optimize.search.memory import kv_bytes_per_token
from shapewright.optimize.search.objective import OBJECTIVES, Limits
from shapewright.optimize.search.request import LARGEST_TOLERANCE, keep_expressible
from shapewright.optimize.search.result import Candidate, SearchResult
from shapewright.optimize.search.space.guard import ffn_ratio
from shapewright.optimize.search.space.space import COMPILED_HEAD_UNIT
from shapewright.prediction.loss.effect import describe_extrapolation, has_loss_law, require_loss_law
from shapewright.prediction.training_run import SECONDS_PER_HOUR, TrainingRun

if TYPE_CHECKING:
    from shapewright.optimize.search.engine import Progress, Runner
    from shapewright.optimize.search.objective import Goal, Objective
    from shapewright.optimize.search.request import SearchRequest
    from shapewright.optimize.search.space.space import Space
    from shapewright.prediction.scenario import Scenario

# Fewest shapes from which the verdict is made, even if fewer are listed.
_FEWEST_JUDGED = 20
# Growth of the KV cache per token from which a note is given, as a ratio.
_NOTED_CACHE_GROWTH = 1.1
_HEAD_NOTE = (
    with_fields("a {head_dim} that is not a multiple of 32 is computed as the next multiple; it reads less cache, ")
    + "as predicted here, only if the serving library stores heads unpadded"
)
# Source: arXiv 2402.07871 (Scaling laws for fine-grained mixture of experts).
_EXPERTS_NOTE = (
    "total and active parameters are held, but no guard limits the number of experts or how many a token uses; what "
    "fewer, larger experts lose is a wide prior (arXiv 2402.07871)"
)
_FINETUNING_NOTE = (
    "speed is that of fine-tuning; losses are those of training the shape from scratch, which a base model needs first"
)
_BATCH_NOTE = with_fields(
    "the batch of a step grows with the micro-batch, and losses are compared as if they did not depend on it; set "
    "{global_batch_size} to hold it"
)
_RATIO_NOTE = with_fields(
    "the ratio of attention to other layers varies as well ({guard:free}); no loss law knows its effect, so such "
    "shapes have no net speed-up"
)


def search_shapes(
    scenario: Scenario,
    request: SearchRequest,
    *,
    others: Sequence[Scenario] = (),
    serving: Scenario | None = None,
    notes: tuple[str, ...] | None = None,
    run: Runner = run_here,
    progress: Progress | None = None,
) -> SearchResult:
    """Search for shapes of the same size as a baseline that run faster.

    Args:
        scenario: The baseline. Shapes are written in the config format of its model, so only fields that the format can
            hold are varied.
        request: What to vary, and how far.
        others: The baseline on further devices. Shapes are then ranked by their largest regret: the ratio of their cost
            on a device to that of the best shape for it.
        serving: The baseline as it is served, if the goal counts served tokens.
        notes: Notes kept with the result, instead of those of the scenario.
        run: Runs the jobs of the search.
        progress: Called with the number of shapes done and of all shapes.

    Raises:
        ShapewrightError: the baseline cannot run, or the space is empty; the message names the constraint.
    """
    start_s = time.perf_counter()
    scenario, others, image_notes = _without_images(scenario, others)
    objective = _check_goal(request.goal, scenario, others)
    if objective.measures_step and "micro_batch" in request.free_fields():
        raise ConfigError("vary=micro_batch has no meaning for the latency of decode, where 1 is fastest; leave it out")
    request, found_notes = keep_expressible(scenario.model, request)
    scenarios, batch_notes = _fix_global_batch([_apply_software(each) for each in (scenario, *others)], request)
    notes = (*(scenario.notes if notes is None else notes), *image_notes, *found_notes, *batch_notes)
    if "experts" in request.free_fields() and scenario.config.is_moe:
        notes += (_EXPERTS_NOTE,)
    branches = list_branches(scenarios[0], request)
    if any("layer_types" in branch.changed for branch in branches):
        notes += (_RATIO_NOTE,)
    searches = [DeviceSearch(branches, each, request, objective, serving=serving) for each in scenarios]
    first = searches[0]
    if not scenario.workload.trains_all:
        notes += (_FINETUNING_NOTE,)
    notes += _describe_run(request.goal, first)
    limits, limit_notes = first.limits(request)
    notes += limit_notes
    for search in searches[1:]:
        other_limits, limit_notes = search.limits(request)
        limits = replace(limits, memory_bytes=min(limits.memory_bytes, other_limits.memory_bytes))
        notes += limit_notes
    best_on_each: dict[str, Findings] = {}
    if others:
        best_on_each = _search_each_device(searches, limits, request, run, progress)
        limits = _make_regret_limits(limits, searches, best_on_each)
    findings = explore(first.jobs(limits, searches), run, progress)
    _refuse_if_nothing_priced(findings, limits, first.spaces[0])
    add_devices = partial(_add_devices, searches, limits.least_costs)
    found = first.list_candidates(findings, max(request.top, _FEWEST_JUDGED))
    if first.ranking is not None and not others:
        found = first.sort_by_certainty(found)
    found = first.shorten(found, request.top, findings)
    candidates = tuple(add_devices(candidate) for candidate in found)
    notes += _notes_on_candidates(candidates, findings, first, request)
    verdict = first.judge(candidates)
    if others and verdict is not None:
        notes += (f"the verdict is that on {first.device_name} alone, the first of the devices",)
    return SearchResult(
        verdict=verdict,
        objective=objective,
        train_tokens=first.train_tokens,
        horizon=_stated_run(request.goal, first),
        lifetime_usd=_lifetime_usd(request.goal, first),
        model=scenario.model,
        baseline=add_devices(first.baseline),
        candidates=candidates,
        front=tuple(add_devices(candidate) for candidate in first.list_front(findings, candidates)),
        best_on={
            search.device_name: add_devices(found)
            for search in searches
            for found in first.list_best(best_on_each.get(search.device_name))
        },
        tally=findings.tally,
        ranges=first.spaces[0].ranges,
        elapsed_s=time.perf_counter() - start_s,
        is_complete=findings.is_complete,
        notes=tuple(dict.fromkeys(notes)),
    )


def _check_goal(goal: Goal, scenario: Scenario, others: Sequence[Scenario]) -> Objective:
    """Return the objective of a search.

    Raises:
        ConfigError: the loss law does not describe the model.
        WorkloadError: the goal contradicts the phase or the number of devices.
    """
    objective = goal.resolve(scenario.workload.phase)
    if others and (objective.name == "cost" or goal.usd_per_hour is not None):
        raise WorkloadError(
            "shapes are ranked by regret over several devices, which does not depend on prices",
            advice=with_fields(
                "omit objective='cost' and {usd_per_hour}, give one device, or use 'shapewright compare'"
            ),
        )
    if others and (objective.name == "loss-at-budget" or goal.gpu_hours is not None):
        raise WorkloadError(
            with_fields(
                "an hour is worth other tokens on each device, so {gpu_hours} and objective='loss-at-budget' need one "
                "device"
            ),
            advice=with_fields("give {train_tokens} instead, or one device"),
        )
    if not scenario.workload.trains_all and (objective.measures_loss or goal.has_run):
        raise WorkloadError(
            f"the loss law describes training from scratch, not finetune={scenario.workload.finetune!r}",
            advice=with_fields("use objective='time' and omit {train_tokens}, {gpu_hours} and {target_loss_nats}"),
            field="objective",
        )
    if has_loss_law(scenario.config):
        return objective
    if objective.name in ("time-to-loss", "loss-at-budget") or goal.serve_tokens or goal.target_loss_nats:
        if goal.objective is None and goal.target_loss_nats is None:
            return OBJECTIVES["train-tokens-per-s"]
        require_loss_law(scenario.config, "use objective='train-tokens-per-s'")
    return objective if objective.name != "cost" else replace(objective, measures_loss=False)


def _describe_run(goal: Goal, search: DeviceSearch) -> tuple[str, ...]:
    """Return notes on the training run that losses are compared after, and on what the loss law does not cover."""
    tokens = search.train_tokens
    if tokens is None:
        title = search.baseline_prediction.config.title
        return (f"the loss law describes decoders with attention: losses of {title} are not compared",)
    notes = []
    if not goal.has_run:
        notes.append(
            f"losses are compared at {format_count(tokens)} tokens, 20 per parameter; "
            + with_fields("set {train_tokens} for another run")
        )
    return (*notes, *describe_extrapolation(search.baseline_prediction.config, tokens))


def _stated_run(goal: Goal, search: DeviceSearch) -> TrainingRun | None:
    """Return the training run that savings are stated for; None without one."""
    if search.objective.phase != "train" or not (goal.has_run or goal.usd_per_hour is not None):
        return None
    tokens = goal.count_train_tokens(search.baseline_prediction) if search.train_tokens is None else search.train_tokens
    return TrainingRun(train_tokens=round(tokens), usd_per_hour=goal.usd_per_hour)


def _lifetime_usd(goal: Goal, search: DeviceSearch) -> float | None:
    """Return the cost of training the baseline and serving the goal's tokens; None without such tokens. [USD]"""
    if search.lifetime_s is None or goal.usd_per_hour is None:
        return None
    return search.lifetime_s / SECONDS_PER_HOUR * goal.usd_per_hour


def _without_images(scenario: Scenario, others: Sequence[Scenario]) -> tuple[Scenario, list[Scenario], tuple[str, ...]]:
    """Return the scenarios without images, and a note on the time of the vision tower, which all shapes share."""
    if not scenario.workload.images:
        return scenario, list(others), ()
    text_only, *rest = (each.replace(images=0, image_size=None, vision=None) for each in (scenario, *others))
    tower_s = max(scenario.predict().step_time_s - text_only.predict().step_time_s, 0.0)
    note = (
        f"shapes are those of the language model, over as many tokens: beside each the vision tower takes "
        f"{format_seconds(tower_s)} (images={scenario.workload.images}), which no step here includes"
    )
    return text_only, rest, (note,)


def _apply_software(scenario: Scenario) -> Scenario:
    """Return the scenario with workload fields set as its software does."""
    return scenario.replace(workload=scenario.software.settle(scenario.workload))


def _fix_global_batch(scenarios: Sequence[Scenario], request: SearchRequest) -> tuple[list[Scenario], tuple[str, ...]]:
    """Fix the global batch in training if layouts vary, or micro-batches of a pipeline, so that all do the same work.

    Without a global batch, each would run one micro-batch per replica and stage: a smaller micro-batch would take
    fewer sequences to an optimizer step, at the same share of bubble.
    """
    workload, layout, free = scenarios[0].workload, scenarios[0].layout, request.free_fields()
    if not workload.is_training or workload.global_batch_size is not None:
        return list(scenarios), ()
    if "layout" not in free and layout.pipeline_parallel == 1:
        return list(scenarios), (_BATCH_NOTE,) if "micro_batch" in free else ()
    sequences = workload.micro_batch_size * layout.data_parallel * layout.default_microbatches
    each = "two micro-batches" if layout.default_microbatches > layout.pipeline_parallel else "one micro-batch"
    note = (
        f"the global batch is held at the baseline's {sequences} sequences, {each} per replica and stage; "
        + with_fields("set {global_batch_size} for another one")
    )
    return [scenario.replace(global_batch_size=sequences) for scenario in scenarios], (note,)


def _search_each_device(
    searches: Sequence[DeviceSearch], limits: Limits, request: SearchRequest, run: Runner, progress: Progress | None
) -> dict[str, Findings]:
    """Search each device by itself, and return the findings by name of the device.

    Raises:
        ConfigError: nothing was priced, or no shape fits on a device.
    """
    found = {}
    for search in searches:
        device_limits, _ = search.limits(request)
        # No limits of cost and time: the best shape is needed even if none beats the baseline.
        device_limits = replace(
            device_limits, memory_bytes=limits.memory_bytes, cost=float("inf"), token_s=float("inf")
        )
        found[search.device_name] = explore(search.jobs(device_limits, [search]), run, progress)
        _refuse_if_nothing_priced(found[search.device_name], device_limits, searches[0].spaces[0])
        if found[search.device_name].best is None and found[search.device_name].is_complete:
            smallest = min(searches, key=lambda each: each.scenario.device.memory_bytes)
            needed = smallest.baseline_prediction.memory.total_bytes
            raise ConfigError(
                f"no shape fits the {format_bytes(device_limits.memory_bytes)} of {smallest.device_name}, where the "
                f"baseline needs {format_bytes(needed)}; leave the device out, or give a layout that fits it"
            )
    return found


def _make_regret_limits(limits: Limits, searches: Sequence[DeviceSearch], found: Mapping[str, Findings]) -> Limits:
    """Return the limits of a search whose cost is the largest regret of a shape over the devices."""
    baseline_costs = [search.baseline_cost for search in searches]
    # If a search was interrupted before it found a shape, the baseline is the best.
    least_costs = tuple(
        baseline_cost if each.best is None else float(each.best["cost"].min())
        for baseline_cost, each in zip(baseline_costs, found.values(), strict=True)
    )
    regret = max(cost / least_cost for cost, least_cost in zip(baseline_costs, least_costs, strict=True))
    return replace(limits, least_costs=least_costs, token_s=float("inf"), cost=regret * MOST_COST_FRACTION)


def _add_devices(searches: Sequence[DeviceSearch], least_costs: Sequence[float], candidate: Candidate) -> Candidate:
    """Return a candidate with its speedup and regret on each of several devices."""
    if not least_costs:
        return candidate
    on_devices = {
        search.device_name: search.on_device(candidate, least)
        for search, least in zip(searches, least_costs, strict=True)
    }
    return replace(candidate, on_devices=on_devices)


def _notes_on_candidates(
    candidates: Sequence[Candidate], findings: Findings, search: DeviceSearch, request: SearchRequest
) -> tuple[str, ...]:
    """Return notes on the listed shapes, and on faster shapes that do not fit."""
    notes: list[str] = []
    config, device = search.baseline_prediction.config, search.scenario.device
    if not candidates:
        experts = "experts, " if config.is_moe and "experts" not in request.vary else ""
        notes.append(
            f"no shape inside the limits is predicted to be {'better' if search.ranking else 'faster'}; vary {experts}"
            + with_fields("more fields, raise {tolerance_fraction}, or set {guard:free}")
        )
    notes += _notes_on_cache(candidates, search)
    decodes = search.baseline_prediction.workload.phase == "decode"
    if decodes and any(shape.config.head_dim % COMPILED_HEAD_UNIT for shape in candidates):
        notes.append(_HEAD_NOTE)
    if findings.tally.too_large:
        note = f"{findings.tally.too_large:,} faster shapes do not fit the memory of {device.name}"
        least_bytes = findings.tally.least_memory_bytes
        if not candidates and least_bytes is not None:
            note += f": the smallest needs {format_bytes(least_bytes)} of {format_bytes(device.memory_bytes)}"
        notes.append(note)
    return tuple(notes)


def _notes_on_cache(candidates: Sequence[Candidate], search: DeviceSearch) -> list[str]:
    """Return a note if shapes for training have a larger KV cache, which only serving needs."""
    config, workload = search.baseline_prediction.config, search.baseline_prediction.workload
    own_bytes = float(kv_bytes_per_token(config, workload))
    if not workload.is_training or own_bytes <= 0.0:
        return []
    growth = {
        shape.rank: shape.kv_bytes_per_token / own_bytes
        for shape in candidates
        if shape.config.num_kv_heads > config.num_kv_heads
    }
    worse = [rank for rank, factor in growth.items() if factor > _NOTED_CACHE_GROWTH]
    if not worse:
        return []
    which = f"ranks {', '.join(map(str, worse))} have" if len(worse) > 1 else f"rank {worse[0]} has"
    return [
        f"{which} up to {max(growth.values()):.1f} times the KV cache per token, which training "
        "does not pay for and serving does; "
        + with_fields("{keep} num_kv_heads={heads} to avoid it", heads=config.num_kv_heads)
    ]


def _refuse_if_nothing_priced(findings: Findings, limits: Limits, space: Space) -> None:
    """Refuse a search in which no shape was priced; the message gives the constraint and the nearest value allowed.

    Raises:
        ConfigError: nothing was priced.
    """
    tally = findings.tally
    if tally.priced or not findings.is_complete:
        return
    if sum(tally.refused.values()) == tally.num_shapes:
        reason, _ = tally.refused.most_common(1)[0]
        raise ConfigError(
            f"none of {tally.num_shapes:,} shapes can run: {reason}; keep fewer fields, or change the layout"
        )
    if not tally.outside_budget:
        raise ConfigError(_explain_guard(tally.num_shapes, space))
    nearest = tally.nearest_parameters
    assert nearest is not None
    deviation = nearest / limits.num_parameters - 1.0
    wider_percent = abs(100.0 * deviation) * 1.05 + 0.01
    hint = with_fields("give {tolerance_fraction} {wider:.3g}", wider=wider_percent / 100.0)
    if wider_percent > 100.0 * LARGEST_TOLERANCE:
        hint = with_fields("give another {num_parameters}")
    raise ConfigError(
        f"none of {tally.num_shapes:,} shapes has {format_count(limits.num_parameters)} parameters within "
        f"{100.0 * limits.tolerance_fraction:.3g} %; the nearest inside the guard has {format_count(nearest)} "
        f"({100.0 * deviation:+.2g} %): " + hint + with_fields(", vary more fields, or set {guard:free}")
    )


def _explain_guard(num_shapes: int, space: Space) -> str:
    """Return that the quality guard excludes all shapes, with the values that it allows."""
    columns = {name: values for axis in space.grid.columns.values() for name, values in axis.items()}
    width, depth = int(np.median(columns["hidden_size"])), columns["num_layers"]
    low, high = space.ranges["aspect"]
    fewest, most = max(ceil(width / high), 1), int(width / low)
    allowed = f"width / layers from {low:.3g} to {high:.3g}, at width {width} that is {fewest} to {most} layers"
    if depth.max() >= fewest and depth.min() <= most:
        # The depth is allowed, so the guard excludes the MLP widths.
        low, high = space.ranges["ffn_ratio"]
        share = ffn_ratio(space.baseline, 1.0, width)
        allowed = f"MLPs of {ceil(low / share)} to {int(high / share)} at width {width}, counting what one token uses"
    return f"the quality guard leaves none of {num_shapes:,} shapes: it allows {allowed}; " + with_fields(
        "keep other values, or set {guard:free}"
    )
