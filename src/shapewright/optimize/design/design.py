"""design_model: the best shape, training plan and run length for a size and tokens, or for a budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from math import ceil
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import ConfigError, ShapewrightError
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.models.parameters import count_parameters
from shapewright.optimize.design.result import Design, DesignResult, Estimate, Run
from shapewright.optimize.design.sizes import FamilySizes, SizedPlan
from shapewright.optimize.plan.notes import describe_plan
from shapewright.optimize.plan.plan import plan_job
from shapewright.optimize.plan.request import PLANNED_WORKLOAD_FIELDS
from shapewright.optimize.plan.result import explain_difference
from shapewright.optimize.search.request import DEFAULT_VARIED, DEFAULT_VARIED_WITH_STAGES, VARIED
from shapewright.optimize.search.search import search_shapes
from shapewright.optimize.search.verdict import VERDICTS, describe_change, judge_search
from shapewright.prediction.loss.effect import describe_extrapolation, estimate_loss_effect, is_far_outside
from shapewright.prediction.loss.law import load_loss_law
from shapewright.prediction.speedup import compare_times
from shapewright.prediction.training_run import (
    MOST_TOKENS,
    TrainingRun,
    estimate_run_cost,
    require_a_step,
    usual_schedule,
)

if TYPE_CHECKING:
    from shapewright.models.read import Model
    from shapewright.models.transformer import TransformerConfig
    from shapewright.optimize.design.request import DesignRequest
    from shapewright.optimize.plan.result import Plan, PlanResult
    from shapewright.optimize.search.result import Verdict
    from shapewright.prediction.scenario import Scenario
    from shapewright.workload.layout import ParallelLayout

    Progress = Callable[[int, int], None]

_SECONDS_PER_HOUR = 3600.0
_SAME_HOURS_FRACTION = 0.01
_SHAPE_FIELDS = (*VARIED.values(), "moe_intermediate_size")
_MOST_ROUNDS = 3
_PLANNED_EACH_ROUND = 8
# The first searches for shapes use the layouts of the family's plans within 2 % of the best step, at most three.
_MOST_STARTS, _NEARLY_AS_FAST = 3, 1.02
MOST_PLANNED = 1 + (_MOST_STARTS + _MOST_ROUNDS - 1) * _PLANNED_EACH_ROUND
"""Most shapes that one joint search plans."""

_LISTED_SHAPES, _LISTED_PLANS = 40, 10


@dataclass
class JointSearch:
    """Alternates searches for shapes and for plans, starting from the family's shape of one size.

    Attributes:
        scenario: The shape of the family, with the global batch; plans choose layout, micro-batch and recomputation.
        request: Devices, kept values, limits of the shapes.
        refusal: Returns why a plan cannot be written in the requested file formats; empty if it can.
        results: Plans of each shape, in the order in which the shapes were planned.
        num_shapes: Shapes that the searches evaluated.
        num_plans: Plans that were evaluated, over all shapes.
        is_complete: False if it was interrupted.
        notes: Notes of the searches.
        refusals: Why layouts have no shapes.
    """

    scenario: Scenario
    request: DesignRequest
    refusal: Callable[[Plan], str] = lambda _plan: ""
    results: dict[TransformerConfig, PlanResult] = field(default_factory=dict)
    num_shapes: int = 0
    num_plans: int = 0
    is_complete: bool = True
    notes: dict[str, None] = field(default_factory=dict)
    refusals: list[ShapewrightError] = field(default_factory=list)
    _refused: set[TransformerConfig] = field(default_factory=set)

    @property
    def baseline_plan(self) -> Plan:
        """The best plan of the family's shape.

        Raises:
            ShapewrightError: no plan fits, or none can be written in the requested file formats.
        """
        config = self.scenario.config
        if config not in self.results:
            result = self._plan(config, top=_LISTED_PLANS)
            plans = tuple(plan for plan in result.plans if not self.refusal(plan))
            if not plans:
                raise ShapewrightError(self.refusal(result.plans[0]))
            self.results[config] = replace(result, plans=plans)
        return self.results[config].plans[0]

    @property
    def plans(self) -> list[Plan]:
        """The best plan of each shape."""
        return [result.plans[0] for result in self.results.values()]

    def run(self, score: Callable[[Plan], float], progress: Progress | None = None) -> None:
        """Search for shapes in the layouts of plans, then for plans of these shapes, until the best layout repeats.

        Args:
            score: Value of a shape with its plan; higher is better.
            progress: Called with the number of shapes planned and the most that may be.
        """
        searched = set[Any]()
        plans = self._starting_plans()
        for _ in range(_MOST_ROUNDS):
            plans = [plan for plan in plans if _layout_and_batch(plan) not in searched]
            if not plans or not self.is_complete:
                break
            for plan in plans:
                searched.add(_layout_and_batch(plan))
                for config in self._unplanned_shapes(plan):
                    self._try_to_plan(config)
                    if progress is not None:
                        progress(min(len(self.results), MOST_PLANNED - 1), MOST_PLANNED)
            plans = [max(self.plans, key=score)]
        if progress is not None:
            progress(MOST_PLANNED, MOST_PLANNED)

    def _starting_plans(self) -> list[Plan]:
        """Return the best plan of the family's shape, and nearly as fast plans with other parallel degrees."""
        best = self.baseline_plan
        plans = self.results[self.scenario.config].plans
        near = [plan for plan in plans if plan.prediction.step_time_s <= _NEARLY_AS_FAST * best.prediction.step_time_s]
        by_degrees = {_degrees(plan.layout): plan for plan in reversed(near)}
        return [plan for plan in near if by_degrees[_degrees(plan.layout)] is plan][:_MOST_STARTS]

    def _unplanned_shapes(self, plan: Plan) -> Iterator[TransformerConfig]:
        """Search in the layout, micro-batch and recomputation of a plan; yield the best shapes not planned before."""
        fields = {name: getattr(plan.workload, name) for name in PLANNED_WORKLOAD_FIELDS}
        scenario = self.scenario.replace(**fields, layout=plan.layout)
        vary = DEFAULT_VARIED if plan.layout.pipeline_parallel == 1 else DEFAULT_VARIED_WITH_STAGES
        request = self.request.search_request(vary, _LISTED_SHAPES)
        if not request.free_fields():
            return
        try:
            result = search_shapes(scenario, request, notes=())
        except ShapewrightError as error:
            self.notes[f"no other shape was searched in the layout {describe_plan(plan)}: " + error.text] = None
            self.refusals.append(error)
            return
        self.num_shapes += result.tally.num_shapes
        self.is_complete = self.is_complete and result.is_complete
        known = {_main_sizes(config) for config in (*self.results, *self._refused)}
        chosen: list[TransformerConfig] = []
        for candidate in result.candidates:
            sizes = _main_sizes(candidate.config)
            if sizes not in known and len(chosen) < _PLANNED_EACH_ROUND:
                known.add(sizes)
                chosen.append(candidate.config)
        yield from chosen

    def _try_to_plan(self, config: TransformerConfig) -> None:
        """Plan a shape; refuse it if no plan fits, or if the best one cannot be written in the requested formats."""
        try:
            result = self._plan(config)
        except ShapewrightError:
            self._refused.add(config)
            return
        if self.refusal(result.plans[0]):
            self._refused.add(config)
        else:
            self.results[config] = result

    def _plan(self, config: TransformerConfig, top: int = 1) -> PlanResult:
        """Return the plans of a shape.

        Raises:
            ShapewrightError: no plan fits.
        """
        scenario = self.scenario.replace(model=replace(self.scenario.model, config=config))
        result = plan_job(scenario, self.request.plan_request(top))
        self.num_plans += result.tally.num_plans
        self.is_complete = self.is_complete and result.is_complete
        if not result.plans:
            raise ShapewrightError("interrupted before a plan was found")
        return result


def _degrees(layout: ParallelLayout) -> tuple[int, ...]:
    """Return the degrees that must divide a shape."""
    return layout.tensor_parallel, layout.pipeline_parallel, layout.context_parallel, layout.expert_parallel


def _layout_and_batch(plan: Plan) -> tuple[Any, ...]:
    """Return the layout and the workload fields of a plan that a search for shapes holds fixed."""
    return plan.layout, *(getattr(plan.workload, name) for name in PLANNED_WORKLOAD_FIELDS)


def _main_sizes(config: TransformerConfig) -> tuple[int, ...]:
    """Return the sizes that distinguish shapes; MLP width and vocabulary vary only slightly, so they are left out."""
    return config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim


def design_model(
    base: Scenario,
    request: DesignRequest,
    *,
    model_of: Callable[[int], Model],
    global_batch_size: int | None = None,
    refusal: Callable[[Plan], str] = lambda _plan: "",
    notes: tuple[str, ...] = (),
    progress: Progress | None = None,
) -> DesignResult:
    """Design a model and its training run.

    Args:
        base: A shape of the family on the device, with sequence length and element format.
        request: Size and tokens, or a budget; kept values of shapes and plans.
        model_of: Returns the shape of the family at a number of parameters.
        global_batch_size: Sequences of a step; None for those that suit the run.
        refusal: Returns why a plan cannot be written in the requested file formats; empty if it can.
        progress: Called with the number of shapes planned and the most that may be.

    Raises:
        ShapewrightError: the loss law does not describe the model, nothing fits, or the budget pays for no step.
    """
    started_s = time.perf_counter()
    sizes = FamilySizes(base, model_of, request, load_loss_law(), global_batch_size)
    num_parameters, train_tokens = sizes.choose()
    # If size or tokens were chosen for the budget, every shape must keep it; otherwise a note compares it with the run.
    is_limited = request.num_parameters is None or request.train_tokens is None
    limit_hours = request.budget_device_hours if is_limited else None
    most_tokens = request.train_tokens or MOST_TOKENS
    request = replace(request, num_parameters=num_parameters, train_tokens=train_tokens)
    search = JointSearch(sizes.scenario_of(num_parameters), request, refusal)
    baseline_plan = search.baseline_plan
    require_a_step(train_tokens, baseline_plan.prediction)
    sizes.add(SizedPlan(num_parameters, search.scenario, search.results[search.scenario.config]))

    def judge(plan: Plan) -> Design:
        tokens = train_tokens
        if limit_hours is not None:
            speed = plan.prediction.tokens_per_s_per_device / request.straggler_factor
            affordable = limit_hours * _SECONDS_PER_HOUR * speed
            tokens = min(most_tokens, int(affordable))
        return _make_design(plan, baseline_plan, request, tokens)

    search.run(lambda plan: judge(plan).net_speedup.factor, progress)
    if search.is_complete and len(search.results) == 1 and (kept := _missing(search.scenario.config, request)):
        reason = search.refusals[0].text if search.refusals else "no shape fits in a plan; keep another value"
        raise ConfigError(f"with {' and '.join(kept)}, " + reason, field="keep")
    designs, verdict = _rank([judge(plan) for plan in search.plans], request)
    best = designs[0]
    return DesignResult(
        request=request,
        verdict=verdict,
        model=search.scenario.model,
        baseline=next(one for one in designs if one.is_baseline),
        designs=designs,
        front=sizes.front(num_parameters, train_tokens) if search.is_complete else (),
        num_shapes=search.num_shapes,
        num_planned=len(search.results),
        num_plans=search.num_plans,
        elapsed_s=time.perf_counter() - started_s,
        is_complete=search.is_complete,
        notes=tuple(
            dict.fromkeys(
                (
                    *notes,
                    *_note_budget(best, request),
                    *describe_extrapolation(best.config, train_tokens),
                    *search.notes,
                    *search.results[best.config].notes,
                )
            )
        ),
    )


def _rank(candidates: Sequence[Design], request: DesignRequest) -> tuple[tuple[Design, ...], Verdict]:
    """Return the answer and its runners-up, with the verdict.

    The runners-up are the shape of the family, the fastest shape, the shape of the lowest loss, and the next best.
    """
    candidates = sorted(candidates, key=lambda one: -one.net_speedup.factor)
    others = [replace(one, rank=rank) for rank, one in enumerate((one for one in candidates if not one.is_baseline), 1)]
    baseline = next(one for one in candidates if one.is_baseline)
    is_far = is_far_outside(baseline.config, baseline.effect.train_tokens)
    verdict = judge_search(others, is_training=True, only_free=is_far)
    assert verdict is not None  # every design has an effect
    answer = others[verdict.rank - 1] if verdict.rank else baseline
    missing = _missing(baseline.config, request)
    if answer is baseline and missing and others:
        answer = others[0]
    listed = [
        answer,
        baseline,
        *sorted(others, key=lambda one: -one.speedup.factor)[:1],
        *sorted(others, key=lambda one: one.effect.difference_nats)[:1],
        *others,
    ]
    kept = list({one.config: one for one in listed}.values())[: max(request.top, 2)]
    kept.sort(key=lambda one: (one.config != answer.config, -one.net_speedup.factor))
    breakdown = answer.plan.breakdown
    designs = tuple(
        replace(one, rank=rank, difference=explain_difference(breakdown, one.plan.breakdown) if rank > 1 else None)
        for rank, one in enumerate(kept, 1)
    )
    net = answer.net_speedup
    return designs, replace(
        verdict,
        text=_verdict_text(answer, verdict.code),
        rank=1,
        changes=answer.changes,
        net_speedup=net.factor,
        net_speedup_low=net.low,
        net_speedup_high=net.high,
        chance_better=net.probability_faster,
    )


def _missing(config: TransformerConfig, request: DesignRequest) -> list[str]:
    """Return the kept values that a shape does not have."""
    return [f"{name}={value}" for name, value in request.keep_shape.items() if getattr(config, name, value) != value]


def _verdict_text(answer: Design, code: str) -> str:
    """Return the verdict in one sentence, for a model that does not exist yet."""
    name = answer.plan.prediction.config.title
    if answer.is_baseline:
        return f"take the shape of {name}: {VERDICTS['keep']}"
    net = answer.net_speedup
    gain = f"{net.factor:.3g}x ({net.low:.3g} to {net.high:.3g})"
    change = f"change {describe_change(answer)} of {name}"
    if code == "free":
        return f"{change}: same loss, {gain}"
    words = f"{change}: to the same loss {gain}, better with {100.0 * net.probability_faster:.0f} % certainty"
    if code == "keep":
        return f"of the shapes with the values that are kept, {words}"
    return words if code == "change" else f"{words}; a trial of both decides"


def _make_design(plan: Plan, baseline_plan: Plan, request: DesignRequest, run_tokens: int) -> Design:
    """Make a design of a plan, compared with the plan of the family's shape.

    Args:
        baseline_plan: The plan of the shape of the family.
        request: The request, with size and tokens.
        run_tokens: Tokens of its run; losses are compared after those of the request.
    """
    config, before = plan.prediction.config, baseline_plan.prediction.config
    assert request.train_tokens is not None
    speedup = compare_times(baseline_plan.prediction, plan.prediction)
    return Design(
        rank=0,
        is_baseline=plan is baseline_plan,
        plan=plan,
        changes={
            name: (getattr(before, name), getattr(config, name))
            for name in _SHAPE_FIELDS
            if getattr(before, name, None) != getattr(config, name, None)
        },
        run=_make_run(plan, run_tokens, request.usd_per_hour),
        speedup=speedup,
        effect=estimate_loss_effect(before, config, train_tokens=request.train_tokens, speedup=speedup),
    )


def _make_run(plan: Plan, train_tokens: int, usd_per_hour: float | None) -> Run:
    prediction = plan.prediction
    cost = estimate_run_cost(prediction, TrainingRun(train_tokens=train_tokens, usd_per_hour=usd_per_hour))
    cost = cost.scaled(plan.expected_step_s / prediction.step_time_s)
    low, high = (end / prediction.step_time_s for end in (prediction.step_time_low_s, prediction.step_time_high_s))
    hours = cost.device_hours / prediction.layout.num_devices
    num_parameters = int(count_parameters(prediction.config).active)
    return Run(
        train_tokens=train_tokens,
        schedule=usual_schedule(num_parameters, train_tokens, ceil(train_tokens / prediction.tokens_per_step)),
        hours=Estimate(mean=hours, low=hours * low, high=hours * high),
        cost=cost,
        cost_low=cost.scaled(low),
        cost_high=cost.scaled(high),
    )


def _note_budget(best: Design, request: DesignRequest) -> Iterator[str]:
    """Note if the run exceeds the budget, or does so at the upper end of its interval."""
    budget = request.budget_device_hours
    if budget is None:
        return
    cost, high = best.run.cost.device_hours, best.run.cost_high.device_hours
    if cost > budget * (1.0 + _SAME_HOURS_FRACTION):
        yield (
            f"the run takes {cost:,.0f} device hours, {cost / budget:.3g} times the budget of {budget:,.0f}; "
            + with_fields("give fewer {train_tokens}, fewer {num_parameters}, or a larger budget")
        )
    elif high > budget * (1.0 + _SAME_HOURS_FRACTION):
        yield f"at the upper end of the step time the run takes {high:,.0f} device hours of a budget of {budget:,.0f}"
