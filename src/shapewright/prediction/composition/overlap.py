"""Overlap of communication with computation: which computation a collective overlaps with, and what stays exposed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shapewright.core.numeric import maximum, minimum
from shapewright.lowering.operations import Collective, Gemm, GroupedGemm
from shapewright.pricing.software import EXCHANGE_HIDDEN_FRACTION, TUNED_SOFTWARE, Software

if TYPE_CHECKING:
    from shapewright.core.numeric import Count, Numeric
    from shapewright.lowering.operations import Operation
    from shapewright.pricing.price import Price
    from shapewright.workload import ParallelLayout

GRADIENT_GEMMS = "gradient_gemms"
COMPUTE_POOLS = ("forward", "backward", GRADIENT_GEMMS)
"""Computation that communication overlaps with: the forward pass, the backward pass, and the GEMMs of the latter."""

EXPERT_EXCHANGES = "exchanges"
"""Communication of the expert axis, which may overlap with the computation of another micro-batch in both passes."""

COLLECTIVE_POOLS = (*COMPUTE_POOLS, EXPERT_EXCHANGES)
"""Communication that can be overlapped, by the computation that it overlaps with."""


@dataclass(frozen=True)
class PricedOperation:
    """An operation with its price; ``operation.repeats`` is the number of executions in a step.

    Attributes:
        operation: The operation.
        price: Time of one execution, with its breakdown.
        exposed_fraction: Share of its time that adds to the step. It is 1 except for overlapped communication, and for
            the ends of a model whose pipeline stages have fewer layers to compensate.
    """

    operation: Operation
    price: Price
    exposed_fraction: float = 1.0

    @property
    def total_time_s(self) -> float:
        """Exposed time over all executions in one step. [s]"""
        return float(self.price.time_s) * int(self.operation.repeats) * self.exposed_fraction


def overlap_pools(operation: Operation, pass_name: str) -> tuple[str, ...]:
    """Return the pools of an operation: for a collective the one it overlaps with, otherwise those it belongs to.

    In the backward pass, collectives of the tensor axis overlap with the gradient GEMMs next to them. Collectives of
    the expert axis overlap with another micro-batch, if at all; all others with the whole forward or backward pass.

    Args:
        operation: The operation.
        pass_name: Pass that it runs in, which may differ from its own.
    """
    side = "forward" if pass_name == "forward" else "backward"
    if isinstance(operation, Collective):
        if operation.axis == "expert":
            return (EXPERT_EXCHANGES,)
        if not operation.overlaps:
            return ()
        return (GRADIENT_GEMMS,) if operation.axis == "tensor" and side == "backward" else (side,)
    if pass_name == "step":
        return ()
    is_gradient = pass_name == "backward" and isinstance(operation, Gemm | GroupedGemm)
    return (side, GRADIENT_GEMMS) if is_gradient else (side,)


def exchange_overlap_fraction(software: Software, layout: ParallelLayout, passes: Count) -> Any:
    """Return the share of expert-axis communication that overlaps, if another micro-batch computes as long.

    The first micro-batch of a step has no predecessor, and the last has no successor.

    Args:
        software: Determines what overlaps.
        layout: Its schedule counts: DualPipe is built for this overlap.
        passes: Micro-batches of one step.
    """
    share = software.expert_hidden_fraction
    if layout.pipeline_schedule == "dualpipe":
        share = max(share, EXCHANGE_HIDDEN_FRACTION)
    return share * (1.0 - 1.0 / passes)


def pool_compute_s(compute_s: Mapping[str, Numeric], pool: str) -> Any:
    """Return the computation that communication of a pool overlaps with; exchanges overlap with both passes. [s]"""
    return compute_s["forward"] + compute_s["backward"] if pool == EXPERT_EXCHANGES else compute_s[pool]


def exposed_fraction(
    compute_s: Numeric,
    collective_s: Numeric,
    pool: str = "backward",
    software: Software = TUNED_SOFTWARE,
    exchange_overlap: Numeric = 0.0,
) -> Numeric:
    """Return the share of overlappable communication that stays exposed.

    Args:
        compute_s: Computation of its pool. [s]
        collective_s: Overlappable communication of its pool, above zero. [s]
        pool: One of COLLECTIVE_POOLS.
        software: Determines what overlaps.
        exchange_overlap: See exchange_overlap_fraction.
    """
    if pool == EXPERT_EXCHANGES:
        return 1.0 - exchange_overlap * minimum(1.0, compute_s / collective_s)
    if pool == GRADIENT_GEMMS:
        return 1.0 - software.tensor_hidden_fraction * minimum(1.0, compute_s / collective_s)
    return maximum(0.0, 1.0 - software.overlap_share * compute_s / collective_s)


def overlap_communication(
    priced: list[PricedOperation], software: Software = TUNED_SOFTWARE, exchange_overlap: float = 0.0
) -> list[PricedOperation]:
    """Set the exposed fraction of overlapping collectives.

    Weight gathers of the forward pass overlap with it, gradient reductions with the backward pass.

    Args:
        priced: Operations of a step, with all of their time exposed.
        software: Determines what overlaps.
        exchange_overlap: See exchange_overlap_fraction.
    """
    overlapping = {
        index: pools[0]
        for index, entry in enumerate(priced)
        if isinstance(entry.operation, Collective)
        and (pools := overlap_pools(entry.operation, entry.operation.pass_name))
    }
    if not overlapping:
        return priced
    compute_s, collective_s = dict.fromkeys(COMPUTE_POOLS, 0.0), dict.fromkeys(COLLECTIVE_POOLS, 0.0)
    for index, pool in overlapping.items():
        collective_s[pool] += priced[index].total_time_s
    for entry in priced:
        if not isinstance(entry.operation, Collective):
            for pool in overlap_pools(entry.operation, entry.operation.pass_name):
                compute_s[pool] += entry.total_time_s
    exposed = {
        pool: float(exposed_fraction(pool_compute_s(compute_s, pool), seconds, pool, software, exchange_overlap))
        for pool, seconds in collective_s.items()
        if seconds > 0.0
    }
    result = list(priced)
    for index, pool in overlapping.items():
        entry = priced[index]
        result[index] = PricedOperation(entry.operation, entry.price, exposed.get(pool, 1.0))
    return result
