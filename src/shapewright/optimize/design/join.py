"""Joint search of shape and plan at one size: searches for shapes and for plans take turns until neither moves.

    plan of the family's shape -> shapes that are best in its layout -> a plan for each of them -> the best of all
    -> shapes that are best in that layout, if it is another one -> ...

A search for shapes prices millions of them in one layout, and a search for plans prices every layout of one shape; both
are those of ``search`` and ``plan``, so a design has the plan that ``plan`` gives its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import ShapewrightError
from shapewright.core.records import dataclass
from shapewright.optimize.plan import plan_job
from shapewright.optimize.plan.notes import describe_plan
from shapewright.optimize.search import DEFAULT_VARIED, DEFAULT_VARIED_WITH_STAGES, search_shapes

if TYPE_CHECKING:
    from shapewright.models import TransformerConfig
    from shapewright.optimize.design.request import DesignRequest
    from shapewright.optimize.plan import Plan, PlanResult
    from shapewright.prediction.scenario import Scenario
    from shapewright.workload import ParallelLayout

    Progress = Callable[[int, int], None]

_MOST_ROUNDS = 3
_PLANNED_EACH_ROUND = 8
# Plans of the family's shape in whose layouts the first searches are made: those within 2 % of the best step.
_MOST_STARTS, _NEARLY_AS_FAST = 3, 1.02
MOST_PLANNED = 1 + (_MOST_STARTS + _MOST_ROUNDS - 1) * _PLANNED_EACH_ROUND
"""Most shapes whose plans one joint search looks for."""

_LISTED_SHAPES, _LISTED_PLANS = 40, 10
_CHOSEN_FIELDS = ("micro_batch_size", "recompute", "offload_activations", "offload_optimizer")


@dataclass
class JointSearch:
    """A joint search around one shape.

    Attributes:
        scenario: The shape of the family, with the global batch; plans choose layout, micro-batch and recomputation.
        request: Devices, kept values, limits of the shapes.
        refusal: Returns why a plan cannot be written in the formats that are wanted; empty if it can.
        results: Plans of each shape, in the order in which they were looked for.
        num_shapes: Shapes that the searches looked at.
        num_plans: Plans of all shapes.
        is_complete: False if it was interrupted.
        notes: Notes of the searches.
    """

    scenario: Scenario
    request: DesignRequest
    refusal: Callable[[Plan], str] = lambda _plan: ""
    results: dict[TransformerConfig, PlanResult] = field(default_factory=dict)
    num_shapes: int = 0
    num_plans: int = 0
    is_complete: bool = True
    notes: dict[str, None] = field(default_factory=dict)
    _refused: set[TransformerConfig] = field(default_factory=set)

    @property
    def own(self) -> Plan:
        """The plan of the family's shape.

        Raises:
            ShapewrightError: it has none.
        """
        config = self.scenario.config
        if config not in self.results:
            result = self._plan(config, top=_LISTED_PLANS)
            if reason := self.refusal(result.plans[0]):
                raise ShapewrightError(reason)
            self.results[config] = result
        return self.results[config].plans[0]

    @property
    def plans(self) -> list[Plan]:
        """The best plan of each shape."""
        return [result.plans[0] for result in self.results.values()]

    def run(self, score: Callable[[Plan], float], progress: Progress | None = None) -> None:
        """Search until the best shape is the best in the layout of its own plan.

        Args:
            score: What is wanted of a shape with its plan; higher is better.
            progress: Called with the number of shapes planned and the most that may be.
        """
        searched = set[Any]()
        waiting = self._starts()
        for _ in range(_MOST_ROUNDS):
            waiting = [plan for plan in waiting if _place(plan) not in searched]
            if not waiting or not self.is_complete:
                break
            for plan in waiting:
                searched.add(_place(plan))
                for config in self._shapes_in(plan):
                    self._try(config)
                    if progress is not None:
                        progress(min(len(self.results), MOST_PLANNED - 1), MOST_PLANNED)
            waiting = [max(self.plans, key=score)]
        if progress is not None:
            progress(MOST_PLANNED, MOST_PLANNED)

    def _starts(self) -> list[Plan]:
        """Return the best plan of the family's shape, and others of nearly its speed that split the model otherwise."""
        best = self.own
        plans = self.results[self.scenario.config].plans
        near = [plan for plan in plans if plan.prediction.step_time_s <= _NEARLY_AS_FAST * best.prediction.step_time_s]
        by_degrees = {_degrees(plan.layout): plan for plan in reversed(near)}
        return [plan for plan in near if by_degrees[_degrees(plan.layout)] is plan][:_MOST_STARTS]

    def _shapes_in(self, plan: Plan) -> Iterator[TransformerConfig]:
        """Yield the best shapes that have no plan yet in the layout, micro-batch and recomputation of a plan."""
        fields = {name: getattr(plan.workload, name) for name in _CHOSEN_FIELDS}
        place = self.scenario.replace(**fields, layout=plan.layout)
        vary = DEFAULT_VARIED if plan.layout.pipeline_parallel == 1 else DEFAULT_VARIED_WITH_STAGES
        request = self.request.search_request(vary, _LISTED_SHAPES)
        if not request.free_fields():
            return
        try:
            result = search_shapes(place, request, notes=())
        except ShapewrightError as error:
            self.notes[f"no other shape was searched in the layout {describe_plan(plan)}: {error}"] = None
            return
        self.num_shapes += result.tally.num_shapes
        self.is_complete = self.is_complete and result.is_complete
        known = {_skeleton(config) for config in (*self.results, *self._refused)}
        chosen: list[TransformerConfig] = []
        for candidate in result.candidates:
            skeleton = _skeleton(candidate.config)
            if skeleton not in known and len(chosen) < _PLANNED_EACH_ROUND:
                known.add(skeleton)
                chosen.append(candidate.config)
        yield from chosen

    def _try(self, config: TransformerConfig) -> None:
        """Plan a shape; one without a plan, or whose plan no wanted format can express, is left out."""
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
            ShapewrightError: none fits.
        """
        scenario = self.scenario.replace(model=replace(self.scenario.model, config=config))
        result = plan_job(scenario, self.request.plan_request(top))
        self.num_plans += result.tally.num_plans
        self.is_complete = self.is_complete and result.is_complete
        if not result.plans:
            raise ShapewrightError("interrupted before a plan was found")
        return result


def _degrees(layout: ParallelLayout) -> tuple[int, ...]:
    """Return the degrees that decide which shapes suit a layout."""
    return layout.tensor_parallel, layout.pipeline_parallel, layout.context_parallel, layout.expert_parallel


def _place(plan: Plan) -> tuple[Any, ...]:
    """Return what a search for shapes takes from a plan."""
    return plan.layout, *(getattr(plan.workload, name) for name in _CHOSEN_FIELDS)


def _skeleton(config: TransformerConfig) -> tuple[int, ...]:
    """Return the sizes that tell shapes apart: others differ only by a little more or less MLP or vocabulary."""
    return config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim
