"""Results of a design: shapes with their plans and runs, compared with the shape of the family, and the frontier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shapewright.core.notebook import NotebookDisplay
from shapewright.core.records import dataclass

if TYPE_CHECKING:
    from shapewright.models.read import Model
    from shapewright.models.transformer import TransformerConfig
    from shapewright.optimize.design.request import DesignRequest
    from shapewright.optimize.plan.result import Difference, Plan
    from shapewright.optimize.search.result import Verdict
    from shapewright.prediction.loss.effect import LossEffect
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.speedup import Speedup
    from shapewright.prediction.training_run import RunCost, RunSchedule
    from shapewright.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A number with its 90 % interval.

    Attributes:
        mean: Expected value.
        low: Lower end of the interval.
        high: Upper end.
    """

    mean: float
    low: float
    high: float

    def scaled(self, factor: float) -> Estimate:
        """Multiply the number and its interval by a positive factor."""
        return Estimate(mean=factor * self.mean, low=factor * self.low, high=factor * self.high)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The training run of a design.

    Attributes:
        train_tokens: Tokens of the run.
        schedule: Optimizer steps and the learning rate over them.
        hours: Wall time, without evaluation, checkpoints and failures. [h]
        cost: Device hours, energy and price.
        cost_low: The same at the lower end of the step time.
        cost_high: The same at the upper end.
    """

    train_tokens: int
    schedule: RunSchedule
    hours: Estimate
    cost: RunCost
    cost_low: RunCost
    cost_high: RunCost

    @property
    def num_steps(self) -> int:
        """Optimizer steps."""
        return self.schedule.num_steps


@dataclass(frozen=True, kw_only=True)
class Design:
    """A shape with its best plan.

    Attributes:
        rank: Rank, 1 for the answer.
        is_baseline: Whether it is the shape of the family.
        plan: Its best plan.
        changes: Old (baseline) and new value of every field of the shape that differs, by name.
        run: Its training run.
        speedup: Throughput over that of the baseline, each with its own plan.
        effect: Difference of the loss, tokens needed for the loss of the baseline, and the time to it.
        difference: Difference of its step time to the answer's, by part; None for the answer.
    """

    rank: int
    is_baseline: bool
    plan: Plan
    changes: Mapping[str, tuple[Any, Any]]
    run: Run
    speedup: Speedup
    effect: LossEffect
    difference: Difference | None = None

    @property
    def config(self) -> TransformerConfig:
        """The shape."""
        return self.plan.prediction.config

    @property
    def is_free(self) -> bool:
        """Whether it keeps the loss of the baseline."""
        return self.effect.is_free

    @property
    def gain(self) -> Speedup:
        """What the verdict judges."""
        return self.net_speedup

    @property
    def net_speedup(self) -> Speedup:
        """Time of the baseline to its loss over the time to the same loss."""
        assert self.effect.net_speedup is not None  # a design trains
        return self.effect.net_speedup

    @property
    def prediction(self) -> Prediction:
        """The predicted step of its plan."""
        return self.plan.prediction

    @property
    def workload(self) -> Workload:
        """The workload with the micro-batch and the recomputation of its plan."""
        return self.plan.workload

    @property
    def step_s(self) -> Estimate:
        """Step time. [s]"""
        one = self.prediction
        return Estimate(mean=one.step_time_s, low=one.step_time_low_s, high=one.step_time_high_s)

    @property
    def mfu(self) -> Estimate:
        """Model FLOP/s over the peak."""
        one, step_s = self.prediction, self.step_s
        work_s = one.mfu * one.step_time_s
        return Estimate(mean=one.mfu, low=work_s / step_s.high, high=work_s / step_s.low)


@dataclass(frozen=True, kw_only=True)
class FrontRun:
    """One run of the family: a size and a number of tokens.

    Attributes:
        num_parameters: Parameters of the shape.
        train_tokens: Tokens of the run.
        hours: Wall time of the run. [h]
        loss_nats: Expected loss, of the law's own data and recipe. [nat]
        loss_low_nats: Lower end of its 90 % interval. [nat]
        loss_high_nats: Upper end. [nat]
        is_on_front: Whether no other run reaches a lower loss in less time.
    """

    num_parameters: int
    train_tokens: float
    hours: float
    loss_nats: float
    loss_low_nats: float
    loss_high_nats: float
    is_on_front: bool = False


@dataclass(frozen=True, kw_only=True, repr=False)
class DesignResult(NotebookDisplay):
    """Result of a design.

    Attributes:
        request: The request, with size and tokens as they were chosen.
        verdict: The answer compared with the shape of the family.
        model: The shape of the family at that size, in the form it was read in, as models.to_config_json takes it.
        baseline: The shape of the family on its best plan.
        designs: The answer first, then the runners-up; the baseline is among them.
        front: Runs of the family: loss against time, by size and tokens.
        num_shapes: Shapes that the searches evaluated.
        num_planned: Shapes whose plans were searched.
        num_plans: Plans of all of them.
        elapsed_s: Wall time of the search. [s]
        is_complete: False if it was interrupted.
        notes: Notes for the reader, one line each.
    """

    request: DesignRequest
    verdict: Verdict
    model: Model
    baseline: Design
    designs: tuple[Design, ...]
    front: tuple[FrontRun, ...]
    num_shapes: int
    num_planned: int
    num_plans: int
    elapsed_s: float
    is_complete: bool
    notes: tuple[str, ...]

    @property
    def best(self) -> Design:
        """The answer."""
        return self.designs[0]
