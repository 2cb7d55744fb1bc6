"""Breakdown of a step's time by what a layout changes: computation, communication by link, bubble, optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.lowering.operations import Attention, Collective, Gemm, GroupedGemm

if TYPE_CHECKING:
    from shapewright.lowering.operations import Operation
    from shapewright.prediction.predict import Prediction

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
        name = name_of(entry.operation)
        parts[name] = parts.get(name, 0.0) + entry.total_time_s
        if isinstance(entry.operation, Collective) and entry.exposed_fraction < 1.0:
            behind_s = float(entry.price.time_s) * int(entry.operation.repeats) * (1.0 - entry.exposed_fraction)
            hidden[name] = hidden.get(name, 0.0) + behind_s
    if prediction.bubble_time_s > 0.0:
        parts[BUBBLE] = prediction.bubble_time_s
    return Breakdown(_largest_first(parts), _largest_first(hidden))


def name_of(operation: Operation) -> str:
    """Return the part that an operation belongs to."""
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
        return "matrix products"
    return "attention" if isinstance(operation, Attention) else "memory-bound operations"


@dataclass(frozen=True)
class Difference:
    """Difference of the steps of two plans.

    Attributes:
        part: Part of the step that gets slower by most, or ``memory`` if no part does.
        lost_s: Increase of that part. [s]
        gained_s: Decrease of other parts, as a positive number. [s]
        slower_by_s: Difference of the step times. [s]
    """

    part: str
    lost_s: float
    gained_s: float
    slower_by_s: float


def explain_loss(best: Breakdown, other: Breakdown) -> Difference:
    """Return the difference of a plan to a better one."""
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
