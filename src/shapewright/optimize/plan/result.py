"""Results of a search of plans: plans with their predictions, step time by part, and the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shapewright.core.notebook import NotebookDisplay
from shapewright.core.records import dataclass
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.memory.estimate import ALLOCATOR_BAND_FRACTION
from shapewright.prediction.scenario import ScenarioResult

if TYPE_CHECKING:
    from shapewright.lowering.operations.operation import Operation
    from shapewright.optimize.plan.findings import Choice, Tally
    from shapewright.optimize.plan.request import PlanRequest
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.scenario import Scenario
    from shapewright.workload.layout import ParallelLayout
    from shapewright.workload.workload import Workload

IN_NODE, BETWEEN_NODES = "in node", "between nodes"
BUBBLE = "pipeline bubble"
HOST = "copies to and from the host"


@dataclass(frozen=True)
class Breakdown:
    """Parts of a step.

    Attributes:
        parts: Time by part, the largest first; the sum is the step time. [s]
        hidden: Communication hidden by computation, by axis and link; not part of the step time. [s]
    """

    parts: Mapping[str, float]
    hidden: Mapping[str, float]

    @property
    def exposed(self) -> dict[str, float]:
        """Exposed communication, by axis and link. [s]"""
        return {name: part_s for name, part_s in self.parts.items() if name.endswith((IN_NODE, BETWEEN_NODES))}


def break_down(prediction: Prediction) -> Breakdown:
    """Break the time of the busiest stage down into parts, which add up to step_time_s."""
    parts: dict[str, float] = {}
    hidden: dict[str, float] = {}
    for entry in prediction.busiest_operations:
        name = _part_of(entry.operation)
        parts[name] = parts.get(name, 0.0) + entry.total_time_s
        if isinstance(entry.operation, Collective) and entry.exposed_fraction < 1.0:
            hidden_s = float(entry.price.time_s) * int(entry.operation.repeats) * (1.0 - entry.exposed_fraction)
            hidden[name] = hidden.get(name, 0.0) + hidden_s
    if prediction.bubble_time_s > 0.0:
        parts[BUBBLE] = prediction.bubble_time_s
    return Breakdown(_largest_first(parts), _largest_first(hidden))


def _part_of(operation: Operation) -> str:
    """Return the part of a breakdown that an operation belongs to."""
    if isinstance(operation, Collective) and operation.is_host:
        return HOST
    if isinstance(operation, Collective):
        link = BETWEEN_NODES if operation.num_ranks > operation.ranks_per_node else IN_NODE
        return f"{operation.axis} communication {link}"
    if operation.pass_name == "step":
        return "optimizer step"
    if operation.pass_name == "recompute":
        return "recomputation"
    if isinstance(operation, Gemm | GroupedGemm):
        return "GEMMs"
    return "attention" if isinstance(operation, Attention) else "memory-bound operations"


@dataclass(frozen=True)
class Difference:
    """Difference of the steps of two plans.

    Attributes:
        part: Part of the step that gets slower by most, or ``memory`` if no part does.
        lost_s: Increase of that part. [s]
        gained_s: Sum of the decreases of other parts, as a positive number. [s]
        slower_by_s: Difference of the step times. [s]
    """

    part: str
    lost_s: float
    gained_s: float
    slower_by_s: float


def explain_difference(best: Breakdown, other: Breakdown) -> Difference:
    """Return how the step of a plan differs from that of a better one, and the part that gets slower by most."""
    names = {**best.parts, **other.parts}
    lost = {name: other.parts.get(name, 0.0) - best.parts.get(name, 0.0) for name in names}
    part = max(lost, key=lambda name: lost[name])
    slower_by_s = sum(lost.values())
    gained_s = -sum(value for value in lost.values() if value < 0.0)
    if lost[part] <= 0.0:
        return Difference("memory", 0.0, gained_s, slower_by_s)
    return Difference(part, lost[part], gained_s, slower_by_s)


def _largest_first(parts: dict[str, float]) -> dict[str, float]:
    return dict(sorted(parts.items(), key=lambda item: -item[1]))


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One plan of a job, with its prediction.

    Attributes:
        rank: Rank, 1 for the best.
        prediction: Its predicted step, with workload and layout.
        breakdown: Breakdown of the step time.
        loss: Difference of its step time to that of the best plan, by part; None for the best.
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
        """Device time of a million tokens, with slow devices as in ``expected_step_s``. [s]"""
        return 1e6 * self.layout.num_devices * self.expected_step_s / self.prediction.tokens_per_step


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


@dataclass(frozen=True, kw_only=True, repr=False)
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
