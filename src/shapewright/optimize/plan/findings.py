"""Findings of a search of plans: the best plans, the Pareto front, and counts of the plans evaluated."""

from __future__ import annotations

from collections import Counter
from dataclasses import field, replace
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.core.notes import Refusal
from shapewright.core.records import dataclass
from shapewright.optimize.plan.memory import layout_of
from shapewright.optimize.plan.space import list_activation_policies, list_shardings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.optimize.plan.request import PlanRequest
    from shapewright.optimize.plan.space import ActivationPolicy, Schedule, Sharding, Split
    from shapewright.workload.layout import ParallelLayout

    Table = dict[str, NDArray[Any]]

# Most plans that are kept, best first; far fewer are listed.
_KEPT = 1000
# Memory that a slower plan must save to be on the Pareto front, as a fraction.
_MEMORY_RESOLUTION = 0.01


class Choice(NamedTuple):
    """One plan: a split with its schedule, activation policy and sharding."""

    split: Split
    schedule: Schedule
    policy: ActivationPolicy
    sharding: Sharding
    num_devices: int

    @property
    def layout(self) -> ParallelLayout:
        """Layout of the plan."""
        return replace(layout_of(self.split), zero_stage=self.sharding.zero_stage, **self.schedule._asdict())

    @property
    def chosen_workload(self) -> dict[str, Any]:
        """Fields of the workload that the plan chooses."""
        return {
            "micro_batch_size": self.split.micro_batch_size,
            **self.policy._asdict(),
            "offload_optimizer": self.sharding.offload_optimizer,
        }


@dataclass
class Tally:
    """Counts of the plans of a space.

    Attributes:
        num_plans: Plans of the space: splits of the devices with micro-batch size, recomputation, ZeRO stage, schedule
            and offload.
        num_fitting: Plans that fit the memory; their steps were predicted.
        refused: Splits that do not divide the model, by reason.
    """

    num_plans: int = 0
    num_fitting: int = 0
    refused: Counter[Refusal] = field(default_factory=Counter)


@dataclass
class Findings:
    """The best plans so far, best first.

    Attributes:
        request: The request.
        tight_above_bytes: Memory above which a plan is tight: allocator and buffers may take more than is left. [byte]
        tally: Counts of the plans of the space.
        is_complete: Whether all of it was evaluated.
        splits: Splits that the rows of the tables refer to.
        schedules: Schedules that they refer to.
        best: Table of the best plans, one row each.
        front: Table of the Pareto front.
        smallest: Bytes of the plan of least memory, and the plan.
        num_predicted: Plans whose step was predicted with the vision tower.
    """

    request: PlanRequest
    tight_above_bytes: float = inf
    tally: Tally = field(default_factory=Tally)
    is_complete: bool = True
    splits: list[Split] = field(default_factory=list)
    schedules: list[Schedule] = field(default_factory=list)
    best: Table = field(default_factory=dict)
    front: Table = field(default_factory=dict)
    smallest: tuple[float, Choice] | None = None
    num_predicted: int = 0

    def choice(self, table: Table, row: int) -> Choice:
        """Return the plan in a row of ``best`` or ``front``."""
        return Choice(
            split=self.splits[int(table["split"][row])],
            schedule=self.schedules[int(table["schedule"][row])],
            policy=list_activation_policies(self.request)[int(table["policy"][row])],
            sharding=list_shardings(self.request)[int(table["sharding"][row])],
            num_devices=int(table["devices"][row]),
        )

    def add(self, table: Table) -> None:
        """Add plans that fit, and update the best plans and the front."""
        self.tally.num_fitting += len(table["step_s"])
        if len(table["step_s"]):
            joined = _join(self.best, table)
            self.best = _rows(joined, sort_plans(joined, self.request.objective, self.tight_above_bytes)[:_KEPT])
            self.front = pareto_front(_join(self.front, table))


# Smaller relative differences of cost are within the error of a prediction; the plan on more devices is then preferred.
COST_RESOLUTION = 0.001


def sort_plans(table: Table, objective: str, tight_above_bytes: float = inf) -> NDArray[np.int64]:
    """Return the rows in the order of an objective; ties go to plans that are not tight, then to less sharding.

    Communication that computation hides takes no time in a prediction, but less of it is more robust: ZeRO stage 1
    comes before 3 if both fit. Further ties go to less memory (or time), then to the simpler schedule. Of costs within
    a thousandth the plan on more devices comes first, because it finishes earlier.
    """
    step_s, needed, sharding = table["step_s"], table["bytes"], table["sharding"]
    is_tight = needed > tight_above_bytes
    # Sums of the same terms in another order differ in the last bits.
    step = np.round(np.log(step_s), 9)
    keys: tuple[NDArray[Any], ...]
    if objective == "memory":
        keys = (sharding, step_s, np.round(np.log(needed), 9))
    elif objective == "time":
        keys = (needed, sharding, is_tight, step)
    else:
        cost = np.log(step_s * table["devices"])
        cost_step = np.floor((cost - cost.min(initial=inf)) / COST_RESOLUTION + 1e-6)
        keys = (needed, sharding, is_tight, step, -table["devices"], cost_step)
    return np.lexsort((table["schedule"], table["policy"], *keys))


def pareto_front(table: Table) -> Table:
    """Return the Pareto front of step time, memory and number of devices, shortest step first."""
    kept: list[int] = []
    best_bytes: dict[int, float] = {}
    for row in _smaller_than_faster(table).tolist():
        devices, needed = int(table["devices"][row]), float(table["bytes"][row])
        least_of_faster = [least for count, least in best_bytes.items() if count <= devices]
        if least_of_faster and needed > min(least_of_faster) * (1.0 - _MEMORY_RESOLUTION):
            continue
        kept.append(row)
        best_bytes[devices] = needed
    return _rows(table, np.array(kept, dtype=np.int64))


def _smaller_than_faster(table: Table) -> NDArray[np.int64]:
    """Return the plans that need no more memory than every faster one on as many devices, shortest step first."""
    order = np.lexsort((table["bytes"], table["devices"], table["step_s"]))
    needed, devices = table["bytes"][order], table["devices"][order]
    is_smaller = np.ones(len(order), dtype=bool)
    for count in np.unique(devices):
        alike = devices == count
        is_smaller[alike] = needed[alike] <= np.minimum.accumulate(needed[alike])
    return order[is_smaller]


def _join(one: Table, other: Table) -> Table:
    return {name: np.concatenate([one[name], other[name]]) for name in other} if one else other


def _rows(table: Table, rows: NDArray[np.int64]) -> Table:
    return {name: column[rows] for name, column in table.items()}
