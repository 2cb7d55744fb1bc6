"""What going through a space of plans has found: the best, the Pareto front, and what became of all others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.plan.memory import layout_of
from shapewright.plan.space import modes, shardings

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.layout import ParallelLayout
    from shapewright.plan.request import PlanRequest
    from shapewright.plan.space import Frame, Mode, Order, Sharding

    Table = dict[str, NDArray[Any]]

# Plans that are kept, best first: far more than anybody lists.
_KEPT = 1000
# What a slower plan must save of the memory to be on the Pareto front, as a fraction.
_MEMORY_RESOLUTION = 0.01


class Choice(NamedTuple):
    """One plan: a frame with what comes on top."""

    frame: Frame
    order: Order
    mode: Mode
    sharding: Sharding
    num_devices: int

    @property
    def layout(self) -> ParallelLayout:
        """How it is spread."""
        return replace(layout_of(self.frame), zero_stage=self.sharding.zero_stage, **self.order._asdict())

    @property
    def chosen_workload(self) -> dict[str, Any]:
        """Fields of the workload that the plan chooses."""
        return {
            "micro_batch_size": self.frame.micro_batch_size,
            **self.mode._asdict(),
            "offload_optimizer": self.sharding.offload_optimizer,
        }


@dataclass
class Tally:
    """How many plans went where.

    Attributes:
        num_plans: Plans of the space: splits of the devices with micro-batch, recomputation, ZeRO stage, schedule and
            what the host keeps.
        num_fitting: Those whose fullest device has room; their steps were predicted.
        refused: Splits that do not divide the model, by reason.
    """

    num_plans: int = 0
    num_fitting: int = 0
    refused: Counter[str] = field(default_factory=Counter)


@dataclass
class Findings:
    """The best plans so far, best first.

    Attributes:
        request: What was asked for.
        roomy_bytes: Memory that leaves a device what allocator and buffers may take on top. [byte]
        tally: What became of the space.
        is_complete: Whether all of it was looked at.
    """

    request: PlanRequest
    roomy_bytes: float = inf
    tally: Tally = field(default_factory=Tally)
    is_complete: bool = True
    frames: list[Frame] = field(default_factory=list)
    orders: list[Order] = field(default_factory=list)
    best: Table = field(default_factory=dict)
    front: Table = field(default_factory=dict)
    smallest: tuple[float, Choice] | None = None

    def choice(self, table: Table, row: int) -> Choice:
        """The plan in a row of ``best`` or ``front``."""
        return Choice(
            self.frames[int(table["frame"][row])],
            self.orders[int(table["order"][row])],
            modes(self.request)[int(table["mode"][row])],
            shardings(self.request)[int(table["sharding"][row])],
            int(table["devices"][row]),
        )

    def add(self, table: Table) -> None:
        """Take in plans that fit."""
        self.tally.num_fitting += len(table["step_s"])
        if len(table["step_s"]):
            joined = _join(self.best, table)
            self.best = _rows(joined, best_first(joined, self.request.objective, self.roomy_bytes)[:_KEPT])
            self.front = pareto(_join(self.front, table))


# Differences of cost below this are none: no prediction tells them apart, and more devices are done sooner.
COST_RESOLUTION = 0.001


def best_first(table: Table, objective: str, roomy_bytes: float = inf) -> NDArray[np.int64]:
    """Rows in the order of an objective; ties go to plans with room to spare, then to those that shard least.

    What computation hides takes no time, and the less of it there is the less can go wrong: ZeRO stage 1 before 3 where
    both fit. Further ties go to less memory (or time), then to the plainer schedule. Of costs alike to a thousandth the
    one on more devices comes first, for it is done sooner.
    """
    step_s, needed, sharding = table["step_s"], table["bytes"], table["sharding"]
    is_tight = needed > roomy_bytes
    # Sums of the same terms in another order differ in the last bits; that is no difference.
    step = np.round(np.log(step_s), 9)
    keys: tuple[NDArray[Any], ...]
    if objective == "memory":
        keys = (sharding, step_s, np.round(np.log(needed), 9))
    elif objective == "time":
        keys = (needed, sharding, is_tight, step)
    else:
        cost = np.log(step_s * table["devices"])
        place = np.floor((cost - cost.min(initial=inf)) / COST_RESOLUTION + 1e-6)
        keys = (needed, sharding, is_tight, step, -table["devices"], place)
    return np.lexsort((table["order"], table["mode"], *keys))


def pareto(table: Table) -> Table:
    """Plans that no other beats in step time, memory and number of devices, shortest step first."""
    kept: list[int] = []
    best_bytes: dict[int, float] = {}
    for row in np.lexsort((table["bytes"], table["step_s"])).tolist():
        devices, needed = int(table["devices"][row]), float(table["bytes"][row])
        rivals = [least for count, least in best_bytes.items() if count <= devices]
        if rivals and needed > min(rivals) * (1.0 - _MEMORY_RESOLUTION):
            continue
        kept.append(row)
        best_bytes[devices] = needed
    return _rows(table, np.array(kept, dtype=np.int64))


def _join(one: Table, other: Table) -> Table:
    return {name: np.concatenate([one[name], other[name]]) for name in other} if one else other


def _rows(table: Table, rows: NDArray[np.int64]) -> Table:
    return {name: column[rows] for name, column in table.items()}
