"""Pointwise, normalisation and other operations that move bytes and compute next to nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.operations.base import OperationBase

if TYPE_CHECKING:
    from shapewright.operations.base import Count, Numeric

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
)


@dataclass(frozen=True, kw_only=True)
class Pointwise(OperationBase):
    """One kernel whose time is its memory traffic.

    Attributes:
        operation: What it computes, one of POINTWISE_KINDS.
        read_bytes: Bytes read from memory. [byte]
        written_bytes: Bytes written to memory. [byte]
        num_kernels: Launches that this stands for (an unfused chain has several).
    """

    operation: str
    read_bytes: Numeric
    written_bytes: Numeric
    num_kernels: Count = 1

    kind = "pointwise"

    @property
    def flops(self) -> Numeric:
        """Left out of FLOP counts by convention. [flop]"""
        return 0.0

    @property
    def num_bytes(self) -> Numeric:
        """Bytes moved. [byte]"""
        return self.read_bytes + self.written_bytes
