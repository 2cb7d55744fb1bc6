"""Results of a search of plans: plans with their predictions, and the Pareto front."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.core.notebook import NotebookDisplay
from shapewright.memory import ALLOCATOR_BAND_FRACTION
from shapewright.prediction.scenario import ScenarioResult

if TYPE_CHECKING:
    from shapewright.optimize.plan.breakdown import Breakdown, Difference
    from shapewright.optimize.plan.findings import Choice, Tally
    from shapewright.optimize.plan.request import PlanRequest
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario
    from shapewright.workload import ParallelLayout, Workload


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One plan of a job, with its prediction.

    Attributes:
        rank: Rank, 1 for the best.
        prediction: Its predicted step, with workload and layout.
        breakdown: Breakdown of the step time.
        loss: Difference to the best plan; None for the best.
        total_bytes: Memory of the fullest device. [byte]
        expected_step_s: The predicted step times the request's straggler factor. [s]
        usd_per_million_tokens: Cost at the request's price; None without one. [USD]
    """

    rank: int
    prediction: Prediction
    breakdown: Breakdown
    loss: Difference | None
    total_bytes: float
    expected_step_s: float
    usd_per_million_tokens: float | None

    @property
    def layout(self) -> ParallelLayout:
        """Layout of the plan."""
        return self.prediction.layout

    @property
    def workload(self) -> Workload:
        """Workload with the plan's micro-batch size and recomputation."""
        return self.prediction.workload

    @property
    def is_tight(self) -> bool:
        """Whether the memory that allocator and buffers may take in addition exceeds what the device has left."""
        return self.total_bytes * (1.0 + ALLOCATOR_BAND_FRACTION) > self.prediction.device.memory_bytes

    @property
    def device_s_per_million_tokens(self) -> float:
        """Device time of a million tokens. [s]"""
        return 1e6 * self.layout.num_devices * self.prediction.step_time_s / self.prediction.tokens_per_step


@dataclass(frozen=True)
class FrontPoint:
    """A plan on the Pareto front of step time, memory and number of devices.

    Attributes:
        choice: The plan.
        step_s: Its step time. [s]
        total_bytes: Memory of its fullest device. [byte]
    """

    choice: Choice
    step_s: float
    total_bytes: float


@dataclass(frozen=True, kw_only=True)
class PlanResult(ScenarioResult, NotebookDisplay):
    """Result of a search of plans.

    Attributes:
        scenario: The job: model, device and workload; each plan has its own layout, micro-batch size and recomputation.
        request: The request.
        plans: The best plans, best first.
        front: The Pareto front, shortest step first.
        tally: Counts of the plans of the space.
        elapsed_s: Wall time of the search. [s]
        is_complete: False if it was interrupted.
        notes: Notes for the reader, one line each.
    """

    scenario: Scenario
    request: PlanRequest
    plans: tuple[Plan, ...]
    front: tuple[FrontPoint, ...]
    tally: Tally
    elapsed_s: float
    is_complete: bool
    notes: tuple[str, ...]

    @property
    def optimizer(self) -> str:
        """Name of the optimizer."""
        return self.scenario.workload.optimizer
