"""Communication between devices, and of a device with its host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.operations.base import OperationBase

if TYPE_CHECKING:
    from shapewright.operations.base import Count, Numeric

COLLECTIVE_OPS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "send_recv")
AXES = ("tensor", "pipeline", "data", "context", "expert")

HOST_AXIS = "host"
HOST_OPS = ("host_copy", "host_optimizer")
"""What a device has with its host: copies over the host link, and optimiser steps in the host's memory."""


@dataclass(frozen=True, kw_only=True)
class Collective(OperationBase):
    """One collective call.

    Attributes:
        op_name: One of COLLECTIVE_OPS, or on the host axis one of HOST_OPS.
        axis: The axis of the layout it runs over, one of AXES, or HOST_AXIS.
        message_bytes: Size of the whole buffer: what all_reduce reduces, what all_gather ends with, what
            reduce_scatter and alltoall begin with, what send_recv sends; what host_copy copies, and what
            host_optimizer reads and writes for this device. [byte]
        num_ranks: Devices that take part; of host_optimizer those that share the host.
        ranks_per_node: How many of them share one node; the rest is reached over the network between nodes.
        overlaps: Whether it can hide behind computation of the same pass (gradient reduction in backward).
        crossing_fraction: Part of what an alltoall has for other nodes that crosses the network: below 1 where what
            several ranks of a node want alike is sent once and copied inside it.
        backward_bytes: What its mirror image in the backward pass sends; None for as much as itself. [byte]
        keeps_result: Whether what was gathered is kept for the backward pass; otherwise it is gathered again.
    """

    op_name: str
    axis: str
    message_bytes: Numeric
    num_ranks: Count
    ranks_per_node: Count
    overlaps: bool = False
    crossing_fraction: float = 1.0
    backward_bytes: Numeric | None = None
    keeps_result: bool = False

    kind = "collective"

    @property
    def is_host(self) -> bool:
        """Whether it is between a device and its host, and not between devices."""
        return self.axis == HOST_AXIS

    @property
    def flops(self) -> Numeric:
        """Left out of FLOP counts by convention. [flop]"""
        return 0.0

    @property
    def num_bytes(self) -> Numeric:
        """Bytes that the busiest device sends. [byte]

        Ring volumes: all_reduce 2 (r-1)/r, the others (r-1)/r of the message, send_recv all of it.
        """
        ranks = 1.0 * self.num_ranks
        if self.op_name in ("send_recv", *HOST_OPS):
            return 1.0 * self.message_bytes
        rounds = 2.0 if self.op_name == "all_reduce" else 1.0
        return rounds * (ranks - 1.0) / ranks * self.message_bytes
