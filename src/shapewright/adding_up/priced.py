"""An operation of a step with its price, and how much of its time counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shapewright.operations import Operation
    from shapewright.perf.price import Price


@dataclass(frozen=True)
class PricedOperation:
    """An operation with its price; ``operation.repeats`` says how often it runs in a step.

    Attributes:
        operation: What runs.
        price: Time of one execution, and why.
        exposed_fraction: Share of its time that nothing hides: 1 for all but overlapped communication, and the ends of
            a model whose stages have fewer layers for them.
    """

    operation: Operation
    price: Price
    exposed_fraction: float = 1.0

    @property
    def total_time_s(self) -> float:
        """Exposed time over all its executions in one step. [s]"""
        return float(self.price.time_s) * int(self.operation.repeats) * self.exposed_fraction
