"""Communication that computation hides: which computation can, and what is left of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shapewright.adding_up.numeric import larger, smaller
from shapewright.adding_up.priced import PricedOperation
from shapewright.operations import Collective, Gemm, GroupedGemm
from shapewright.perf.software import EXCHANGE_HIDDEN_FRACTION, TUNED_SOFTWARE, Software

if TYPE_CHECKING:
    from shapewright.layout import ParallelLayout
    from shapewright.operations import Operation
    from shapewright.operations.base import Count, Numeric

BESIDE_PRODUCTS = "products"
POOLS = ("forward", "backward", BESIDE_PRODUCTS)
"""Computation that hides communication: forward and backward pass, and in the latter gradients of products alone."""

EXCHANGES = "exchanges"
"""Communication of the expert axis, which the computation of another micro-batch may hide: that of both passes."""

WANTED_POOLS = (*POOLS, EXCHANGES)
"""Communication that can be hidden, by what hides it."""


def pools_of(operation: Operation, pass_name: str) -> tuple[str, ...]:
    """Pools that an operation belongs to: a collective to the one that hides it, any other to those that it covers.

    Collectives of the tensor axis hide behind the gradients of the products that they stand beside, those of the expert
    axis behind another micro-batch if at all, all others behind the whole forward or backward pass.

    Args:
        operation: What runs.
        pass_name: Pass that it runs in, where that is not its own.
    """
    side = "forward" if pass_name == "forward" else "backward"
    if isinstance(operation, Collective):
        if operation.axis == "expert":
            return (EXCHANGES,)
        if not operation.overlaps:
            return ()
        return (BESIDE_PRODUCTS,) if operation.axis == "tensor" and side == "backward" else (side,)
    if pass_name == "step":
        return ()
    is_gradient = pass_name == "backward" and isinstance(operation, Gemm | GroupedGemm)
    return (side, BESIDE_PRODUCTS) if is_gradient else (side,)


def hidden_exchange_fraction(software: Software, layout: ParallelLayout, passes: Count) -> Any:
    """Share of the expert axis' communication that computation of another micro-batch hides where it takes as long.

    The first micro-batch of a step has none before it, and the last none after it.

    Args:
        software: What runs beside what.
        layout: The schedule; DualPipe is made for it.
        passes: Micro-batches of one step.
    """
    share = software.expert_hidden_fraction
    if layout.pipeline_schedule == "dualpipe":
        share = max(share, EXCHANGE_HIDDEN_FRACTION)
    return share * (1.0 - 1.0 / passes)


def cover_of(cover_s: Mapping[str, Numeric], pool: str) -> Any:
    """Computation that communication of a pool hides behind: its own, and for exchanges that of both passes. [s]"""
    return cover_s["forward"] + cover_s["backward"] if pool == EXCHANGES else cover_s[pool]


def exposed_fraction(
    cover_s: Numeric,
    wanted_s: Numeric,
    pool: str = "backward",
    software: Software = TUNED_SOFTWARE,
    hidden_exchanges: Numeric = 0.0,
) -> Numeric:
    """Share of overlapping communication that nothing hides.

    Args:
        cover_s: Computation of its pool. [s]
        wanted_s: Overlapping communication of its pool, above zero. [s]
        pool: One of WANTED_POOLS.
        software: What it can hide behind.
        hidden_exchanges: See hidden_exchange_fraction.
    """
    if pool == EXCHANGES:
        return 1.0 - hidden_exchanges * smaller(1.0, cover_s / wanted_s)
    if pool == BESIDE_PRODUCTS:
        return 1.0 - software.tensor_hidden_fraction * smaller(1.0, cover_s / wanted_s)
    return larger(0.0, 1.0 - software.overlap_share * cover_s / wanted_s)


def hide_communication(
    priced: list[PricedOperation], software: Software = TUNED_SOFTWARE, hidden_exchanges: float = 0.0
) -> list[PricedOperation]:
    """Give overlapping collectives the share of their time that the computation of their pass cannot hide.

    Weights gathered for the forward pass hide behind it, gradients behind the backward pass.

    Args:
        priced: Operations of a step, all of whose time is exposed.
        software: What communication can hide behind.
        hidden_exchanges: See hidden_exchange_fraction.
    """
    wanted = {
        index: pools[0]
        for index, entry in enumerate(priced)
        if isinstance(entry.operation, Collective) and (pools := pools_of(entry.operation, entry.operation.pass_name))
    }
    if not wanted:
        return priced
    cover_s, wanted_s = dict.fromkeys(POOLS, 0.0), dict.fromkeys(WANTED_POOLS, 0.0)
    for index, pool in wanted.items():
        wanted_s[pool] += priced[index].total_time_s
    for entry in priced:
        if not isinstance(entry.operation, Collective):
            for pool in pools_of(entry.operation, entry.operation.pass_name):
                cover_s[pool] += entry.total_time_s
    exposed = {
        pool: float(exposed_fraction(cover_of(cover_s, pool), seconds, pool, software, hidden_exchanges))
        for pool, seconds in wanted_s.items()
        if seconds > 0.0
    }
    hidden = list(priced)
    for index, pool in wanted.items():
        entry = priced[index]
        hidden[index] = PricedOperation(entry.operation, entry.price, exposed.get(pool, 1.0))
    return hidden
