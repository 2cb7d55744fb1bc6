"""Communication between devices, and between a device and its host."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.records import dataclass
from shapewright.lowering.operations.base import OperationBase

if TYPE_CHECKING:
    from shapewright.core.numeric import Count, Numeric

COLLECTIVE_OPS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "send_recv")
AXES = ("tensor", "pipeline", "data", "context", "expert")

HOST_AXIS = "host"
HOST_OPS = ("host_copy", "host_optimizer")
"""Operations between a device and its host: copies over the host link, and optimizer steps in host memory."""


@dataclass(frozen=True, kw_only=True)
class Collective(OperationBase):
    """A collective, a point-to-point transfer, or an operation of the host.

    Attributes:
        op_name: One of COLLECTIVE_OPS, or on the host axis one of HOST_OPS.
        axis: Axis of the layout, one of AXES, or HOST_AXIS.
        message_bytes: Size of the full buffer: the input of all_reduce, reduce_scatter, alltoall and send_recv, the
            output of all_gather, the copied bytes of host_copy, and what host_optimizer reads and writes for this
            device. [byte]
        num_ranks: Number of participating devices; for host_optimizer, of devices that share the host.
        ranks_per_node: Number of participating devices that share one node.
        overlaps: Whether it can overlap with computation of the same pass (gradient reduction in backward).
        crossing_fraction: Share of an alltoall's traffic to other nodes that crosses the network; below 1 if data for
            several ranks of a node are sent once and copied inside the node.
        backward_bytes: Message of its counterpart in the backward pass, if not message_bytes. [byte]
        keeps_result: Whether a gathered result is saved for the backward pass; otherwise it is gathered again.
        is_served: Whether a serving library runs it, which has an all-reduce of its own.
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
    is_served: bool = False

    kind = "collective"

    @property
    def is_host(self) -> bool:
        """Whether it is between a device and its host instead of between devices."""
        return self.axis == HOST_AXIS

    @property
    def flops(self) -> Numeric:
        """Zero, as FLOP counts omit it by convention. [flop]"""
        return 0.0

    @property
    def num_bytes(self) -> Numeric:
        """Bytes sent by the device that sends most. [byte]

        Ring algorithms: 2 (r-1)/r of the message for all_reduce, (r-1)/r for the others, all of it for send_recv.
        """
        ranks = 1.0 * self.num_ranks
        if self.op_name in ("send_recv", *HOST_OPS):
            return 1.0 * self.message_bytes
        rounds = 2.0 if self.op_name == "all_reduce" else 1.0
        return rounds * (ranks - 1.0) / ranks * self.message_bytes
