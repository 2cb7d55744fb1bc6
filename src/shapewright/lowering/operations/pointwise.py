"""Memory-bound operations: elementwise operations, normalization, softmax, gather and scatter, optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.records import dataclass
from shapewright.lowering.operations.base import OperationBase

if TYPE_CHECKING:
    from shapewright.core.numeric import Count, Numeric

POINTWISE_KINDS = (
    "norm",
    "layernorm",
    "activation",
    "residual",
    "rotary",
    "mask",
    "softmax",
    "dropout",
    "embedding",
    "bias",
    "router",
    "permute",
    "cross_entropy",
    "optimizer",
    "other",
    "unknown",
)


NORM_KINDS = ("norm", "layernorm")

LOG_SOFTMAX = "log_softmax"
"""Role of the softmax of a traced cross entropy, whose other operator picks the targets."""


@dataclass(frozen=True, kw_only=True)
class Pointwise(OperationBase):
    """A memory-bound operation, whose time follows from its memory traffic.

    Attributes:
        operation: Kind of computation, one of POINTWISE_KINDS; ``other`` has no kernel of its own in the records, and
            of ``unknown`` only the bytes are known.
        read_bytes: Bytes read from memory. [byte]
        written_bytes: Bytes written to memory. [byte]
        num_kernels: Number of kernel launches (several for an unfused chain).
        is_backward: Whether it is the gradient of a norm, a kernel unlike the norm's; other gradients stream as their
            operations do.
        is_gated: Whether it is an activation with a gate, or the gradient of one: a kernel unlike that of others. None
            where the bytes tell: measured activations that read two inputs have a gate.
        is_chain: Whether it is a chain of PyTorch's kernels where a fused kernel exists.
        fuses_dropout: Whether it also applies dropout to one of its inputs; its traffic includes the mask.
    """

    operation: str
    read_bytes: Numeric
    written_bytes: Numeric
    num_kernels: Count = 1
    is_backward: bool = False
    is_gated: bool | None = None
    is_chain: bool = False
    fuses_dropout: bool = False

    kind = "pointwise"

    @property
    def flops(self) -> Numeric:
        """Zero, as FLOP counts omit it by convention. [flop]"""
        return 0.0

    @property
    def num_bytes(self) -> Numeric:
        """Bytes moved. [byte]"""
        return self.read_bytes + self.written_bytes
