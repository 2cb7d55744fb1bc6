"""Plans of a model family by size: the best size for a budget, and the frontier of loss against time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, replace
from math import inf, sqrt
from typing import TYPE_CHECKING

from shapewright.core.errors import ConfigError, ShapewrightError, WorkloadError
from shapewright.core.records import dataclass
from shapewright.core.texts import with_fields
from shapewright.lowering.flops import count_rule_of_thumb_flops
from shapewright.models.parameters import count_parameters
from shapewright.optimize.design.request import usual_batch_size
from shapewright.optimize.design.result import FrontRun
from shapewright.optimize.plan.plan import plan_job
from shapewright.optimize.search.request import FEWEST_PARAMETERS, MOST_PARAMETERS
from shapewright.prediction.loss.law import Z_90
from shapewright.prediction.loss.terms import ShapeForLoss
from shapewright.prediction.training_run import CHINCHILLA_TOKENS_PER_PARAMETER

if TYPE_CHECKING:
    from shapewright.models.read import Model
    from shapewright.optimize.design.request import DesignRequest
    from shapewright.optimize.plan.result import PlanResult
    from shapewright.prediction.loss.law import LossLaw
    from shapewright.prediction.scenario import Scenario

_SECONDS_PER_HOUR = 3600.0
# MFU assumed for the first guess of the size, which predictions then correct.
_GUESSED_MFU = 0.4
_MOST_STEPS = 12
_SAME_COST_FRACTION = 0.01
# Sizes and tokens of the frontier, relative to the chosen ones.
_FRONT_SIZES = tuple(2.0**power for power in (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0))
_FRONT_TOKENS = tuple(2.0 ** (power / 2.0) for power in range(-6, 5))


@dataclass(frozen=True)
class SizedPlan:
    """The shape of the family at one size, with its plans.

    Attributes:
        num_parameters: Parameters requested; the shape may differ slightly.
        scenario: The shape with its global batch.
        result: Its plans.
    """

    num_parameters: int
    scenario: Scenario
    result: PlanResult

    @property
    def token_s(self) -> float:
        """Wall time of the job per token, with the best plan. [s]"""
        plan = self.result.plans[0]
        return plan.expected_step_s / plan.prediction.tokens_per_step

    def device_hours(self, train_tokens: float) -> float:
        """Device hours of a run. [h]"""
        return train_tokens * self.token_s * self.result.request.num_devices / _SECONDS_PER_HOUR

    def tokens_for(self, device_hours: float) -> float:
        """Tokens that a number of device hours pays for."""
        return device_hours * _SECONDS_PER_HOUR / (self.token_s * self.result.request.num_devices)


@dataclass
class FamilySizes:
    """Plans of the family's shape by size; each size is planned once.

    Attributes:
        base: A shape of the family on the device, with sequence length and element format.
        model_of: Returns the shape of a number of parameters.
        request: Devices, budget and kept values.
        law: The law of loss.
        global_batch_size: Sequences of a step; None for usual_batch_size of each size.
    """

    base: Scenario
    model_of: Callable[[int], Model]
    request: DesignRequest
    law: LossLaw
    global_batch_size: int | None = None
    _results: dict[int, SizedPlan | ShapewrightError] = field(default_factory=dict)

    def at(self, num_parameters: int) -> SizedPlan:
        """Return the shape of a size with its plans.

        Raises:
            ShapewrightError: the family has no shape of that size, or it fits in no plan.
        """
        if num_parameters not in self._results:
            try:
                self._results[num_parameters] = self._plan(num_parameters)
            except ShapewrightError as error:
                self._results[num_parameters] = error
        found = self._results[num_parameters]
        if isinstance(found, ShapewrightError):
            raise found
        return found

    def add(self, sized: SizedPlan) -> None:
        """Take the plans of a size that are known, instead of planning it."""
        self._results[sized.num_parameters] = sized

    def _plan(self, num_parameters: int) -> SizedPlan:
        scenario = self.scenario_of(num_parameters)
        result = plan_job(scenario, self.request.plan_request(top=1))
        if not result.plans:
            raise WorkloadError("interrupted before a plan was found")
        return SizedPlan(num_parameters, scenario, result)

    def scenario_of(self, num_parameters: int) -> Scenario:
        """Return the shape of a size with its global batch.

        Raises:
            ShapewrightError: the family has no shape of that size.
        """
        batch = self.global_batch_size or usual_batch_size(
            num_parameters,
            self.request.train_tokens or self._guess_tokens(num_parameters),
            self.request.num_devices,
            self.base.workload.seq_len,
        )
        model = self.model_of(num_parameters)
        return replace(self.base, model=model).replace(global_batch_size=batch)

    def loss_nats(self, sized: SizedPlan, train_tokens: float) -> float:
        """Return the loss that the law expects of a shape after a number of tokens, in the law's own recipe. [nat]"""
        return float(self.law.loss_nats(ShapeForLoss.of(sized.scenario.config), train_tokens))

    def _half_interval_nats(self, sized: SizedPlan, train_tokens: float) -> float:
        """Return half the width of the 90 % interval of ``loss_nats``. [nat]"""
        return Z_90 * float(self.law.standard_deviation_nats(ShapeForLoss.of(sized.scenario.config), train_tokens))

    def choose(self) -> tuple[int, int]:
        """Return size and tokens of the design.

        Returns:
            Those of the request. A missing size is the one of lowest loss within the budget, and missing tokens are
            those that the budget pays for.

        Raises:
            ShapewrightError: the budget pays for no step, or nothing fits.
        """
        request = self.request
        size, tokens = request.num_parameters, request.train_tokens
        if size is None:
            size = self._affordable_size(tokens) if tokens is not None else self._best_size()
        if tokens is None:
            assert request.budget_device_hours is not None
            sized = self.at(size)
            tokens = int(sized.tokens_for(request.budget_device_hours))
            if tokens < sized.result.plans[0].prediction.tokens_per_step:
                raise WorkloadError(
                    f"a budget of {request.budget_device_hours:.3g} device hours pays for no step of "
                    f"{count_parameters(sized.scenario.config).total:,} parameters; give a larger one, or another size"
                )
        return size, tokens

    def _best_size(self) -> int:
        """Return the size of lowest loss for the budget: bracket it in factors of two, then fit a parabola to three."""
        budget, start = self.request.budget_device_hours, self._guess_size()
        assert budget is not None

        def loss(power: float) -> float:
            size = _round_to_two_digits(start * 2.0**power)
            if not FEWEST_PARAMETERS <= size <= MOST_PARAMETERS:
                return inf
            try:
                sized = self.at(size)
            except ShapewrightError:
                return inf
            tokens = sized.tokens_for(budget)
            return self.loss_nats(sized, tokens) if tokens >= 1.0 else inf

        values = {0: loss(0)}
        for _ in range(_MOST_STEPS):
            best = min(values, key=lambda power: values[power])
            # Until a feasible size is found, the range is extended at both ends.
            ends = (best - 1, best + 1) if values[best] < inf else (min(values) - 1, max(values) + 1)
            untried = [power for power in ends if power not in values]
            if not untried:
                break
            values |= {power: loss(power) for power in untried}
        best = min(values, key=lambda power: values[power])
        if values[best] == inf:
            self._raise_why_no_size()
        left, right = values.get(best - 1, inf), values.get(best + 1, inf)
        curvature = left - 2.0 * values[best] + right
        vertex = best + 0.5 * (left - right) / curvature if 0.0 < curvature < inf else float(best)
        return _round_to_two_digits(start * 2.0 ** (vertex if loss(vertex) <= values[best] else best))

    def _affordable_size(self, train_tokens: int) -> int:
        """Return the largest size whose run fits the budget."""
        assert self.request.budget_device_hours is not None
        size, found = self._guess_size(), 0
        for _ in range(_MOST_STEPS):
            size = _round_to_two_digits(min(max(size, FEWEST_PARAMETERS), MOST_PARAMETERS))
            try:
                ratio = self.at(size).device_hours(train_tokens) / self.request.budget_device_hours
            except ConfigError:  # smaller than the family's vocabulary allows
                size *= 2.0
                continue
            except ShapewrightError:
                size /= 2.0
                continue
            if ratio <= 1.0:
                found = max(found, size)
            if 1.0 - _SAME_COST_FRACTION <= ratio <= 1.0:
                break
            size = size * (1.0 - 0.5 * _SAME_COST_FRACTION) / ratio
        if not found:
            self._raise_why_no_size()
        return found

    def _raise_why_no_size(self) -> None:
        """Raise the error of the smallest size if none could be planned, else that the budget pays for none."""
        errors = {size: error for size, error in self._results.items() if isinstance(error, ShapewrightError)}
        if len(errors) == len(self._results) and errors:
            raise errors[min(errors)]
        raise WorkloadError(
            f"a budget of {self.request.budget_device_hours:.3g} device hours pays for no model",
            advice=with_fields("give a larger budget, or fewer {train_tokens}"),
        )

    def _guess_flops(self) -> float:
        """Return the FLOPs that the budget pays for, at the assumed MFU. [flop]"""
        device, dtype = self.base.device, self.base.workload.dtype
        peak = device.peak_flops_per_s(dtype)
        return (self.request.budget_device_hours or 0.0) * _SECONDS_PER_HOUR * peak * _GUESSED_MFU

    def _guess_size(self) -> float:
        flops_per_pair = count_rule_of_thumb_flops(1.0, 1.0)
        pairs = self._guess_flops() / flops_per_pair  # parameters times tokens
        tokens = self.request.train_tokens
        size = pairs / tokens if tokens is not None else sqrt(pairs / CHINCHILLA_TOKENS_PER_PARAMETER)
        return min(max(size, FEWEST_PARAMETERS), MOST_PARAMETERS)

    def _guess_tokens(self, num_parameters: int) -> float:
        return self._guess_flops() / count_rule_of_thumb_flops(num_parameters, 1.0)

    def front(self, num_parameters: int, train_tokens: int) -> tuple[FrontRun, ...]:
        """Return runs of the family around the size and tokens of a design; sizes that no plan fits are left out."""
        points: list[FrontRun] = []
        for factor in _FRONT_SIZES:
            size = num_parameters if factor == 1.0 else _round_to_two_digits(factor * num_parameters)
            try:
                sized = self.at(size)
            except ShapewrightError:
                continue
            for share in _FRONT_TOKENS:
                tokens = share * train_tokens
                loss_nats, half_nats = self.loss_nats(sized, tokens), self._half_interval_nats(sized, tokens)
                points.append(
                    FrontRun(
                        num_parameters=count_parameters(sized.scenario.config).total,
                        train_tokens=tokens,
                        hours=tokens * sized.token_s / _SECONDS_PER_HOUR,
                        loss_nats=loss_nats,
                        loss_low_nats=loss_nats - half_nats,
                        loss_high_nats=loss_nats + half_nats,
                    )
                )
        return mark_front(points)


def mark_front(points: list[FrontRun]) -> tuple[FrontRun, ...]:
    """Return the runs in order of time, those on the Pareto front of time and loss marked."""
    marked: list[FrontRun] = []
    least = inf
    for point in sorted(points, key=lambda one: (one.hours, one.loss_nats)):
        marked.append(replace(point, is_on_front=point.loss_nats < least))
        least = min(least, point.loss_nats)
    return tuple(marked)


def _round_to_two_digits(num_parameters: float) -> int:
    """Return a size with two significant digits, so that nearby sizes share one plan."""
    return int(float(f"{num_parameters:.2g}"))
