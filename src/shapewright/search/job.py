"""A part of a search that can be done by itself, and what its shapes must keep to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shapewright.search.space import Space
    from shapewright.search.steps import Setting

# A job of so many shapes takes some seconds at most.
_SHAPES_OF_A_JOB = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a shape must keep to.

    Attributes:
        num_parameters: Parameters wanted.
        num_active: Parameters that a token uses, wanted; None where only the total counts.
        tolerance_fraction: How far from them a shape may be.
        memory_bytes: Most that one device may need. [byte]
        token_s: The baseline's time per token (or per step); slower shapes are of no interest. [s]
        cost: Its cost, that time per parameter a token uses; dearer shapes are only faster because they are smaller.
        per_step: Whether the step itself is to be short, and not the time of a token.
        least_costs: Where several devices are asked, the least cost on each; cost is then the worst ratio to them.
    """

    num_parameters: int
    num_active: int | None = None
    tolerance_fraction: float
    memory_bytes: float
    token_s: float
    cost: float
    per_step: bool = False
    least_costs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Job:
    """A part of a search that can be done by itself.

    Attributes:
        space: The shapes.
        settings: What they have in common, for each device that is asked.
        limits: What they must keep to.
        branch: Which of the search's branches they belong to.
        code: Changes that the branch itself makes, as encode_changes writes them.
    """

    space: Space
    settings: tuple[Setting, ...]
    limits: Limits
    branch: int = 0
    code: int = 0

    def split(self) -> Iterator[Job]:
        """Cut it along the axis of heads into jobs of a few seconds."""
        grid = self.space.grid
        num_rows = grid.lengths[0]
        num_jobs = min(-(-grid.num_shapes // _SHAPES_OF_A_JOB), num_rows)
        for rows in np.array_split(np.arange(num_rows), max(num_jobs, 1)):
            yield replace(self, space=replace(self.space, grid=grid.take(0, rows)))
