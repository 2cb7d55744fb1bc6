"""Matrix multiplications: C[m,n] = A[m,k] B[k,n], BLAS letters, k contracts.

Legend: m rows of the output, n columns of the output, k contraction, all counted in elements.

The two letters of a layout say for A and for B whether the matrix lies in memory as written (N) or transposed (T),
rows first. For y = x W^T, as torch.nn.functional.linear computes it:

    pass      product                      layout   contiguous dims of A, B, C
    forward   y[m,n]  = x[m,k]   W[n,k]^T  NT       k, k, n
    dgrad     dx[m,k] = dy[m,n]  W[n,k]    NN       its k (= n above), its n (= k above), its n
    wgrad     dW[n,k] = dy[m,n]^T x[m,k]   TN       its m (= n above), its n (= k above), its n

So alignment in all three is decided by the layer's input and output widths; tokens only count tiles and waves.
(cuBLAS names matrices column first: it calls these TN, NN and NT.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.dtypes import get_dtype, stored_weight_bytes
from shapewright.operations.base import OperationBase

if TYPE_CHECKING:
    from shapewright.operations.base import Count, Numeric


@dataclass(frozen=True, kw_only=True)
class Gemm(OperationBase):
    """A matrix product, or ``batch`` equal ones in one launch.

    Attributes:
        m: Rows of C. [element]
        n: Columns of C. [element]
        k: Contracted dimension. [element]
        batch: Number of independent products.
        layout: How A and B lie in memory, see the module's text.
        weight_dtype: Element format of B in memory where it is narrower than the product's and widened on the way to
            the matrix units; None means ``dtype``.
    """

    m: Count
    n: Count
    k: Count
    batch: Count = 1
    layout: str = "NT"
    weight_dtype: str | None = None

    kind = "gemm"

    @property
    def flops(self) -> Numeric:
        """Multiplications and additions of one execution. [flop]

        >>> Gemm(name="x", m=2, n=3, k=4).flops
        48.0
        """
        return 2.0 * self.m * self.n * self.k * self.batch

    @property
    def num_bytes(self) -> Numeric:
        """Operands read once and the result written once. [byte]"""
        width = get_dtype(self.dtype).num_bytes
        weight_width = stored_weight_bytes(self.weight_dtype) if self.weight_dtype else width
        elements = 1.0 * self.m * self.k + 1.0 * self.m * self.n
        return (elements * width + 1.0 * self.k * self.n * weight_width) * self.batch

    @property
    def contiguous_dims(self) -> tuple[str, str, str]:
        """Letter of the dimension that is contiguous in A, in B and in C."""
        return contiguous_dims(self.layout)


@dataclass(frozen=True, kw_only=True)
class GroupedGemm(OperationBase):
    """Products of one expert layer: rows are split over groups, each with its own B[k,n].

    Attributes:
        m: Rows over all groups together. [element]
        n: Columns of each C. [element]
        k: Contracted dimension. [element]
        groups: Number of weight matrices (local experts).
        layout: How A and B lie in memory, as for Gemm.
        weight_dtype: Element format of B in memory, as for Gemm.
        is_training: Whether a training stack runs it, which has grouped kernels of its own, and not a serving library.
        tokens: Tokens that reach the device, by which serving libraries choose tiles; None where none does.
        experts: Experts of the device, with and without rows; None likewise.
        inner: Width between the two products of an expert; None likewise. [element]
        leaves_poor_kernel: Whether a server leaves a poor match of the measured library aside, as training stacks do.
    """

    m: Count
    n: Count
    k: Count
    groups: Count
    layout: str = "NT"
    weight_dtype: str | None = None
    is_training: bool = False
    tokens: Count | None = None
    experts: Count | None = None
    inner: Count | None = None
    leaves_poor_kernel: bool = False

    kind = "grouped_gemm"

    @property
    def flops(self) -> Numeric:
        """Multiplications and additions of one execution. [flop]"""
        return 2.0 * self.m * self.n * self.k

    @property
    def num_bytes(self) -> Numeric:
        """Rows read and written once, every group's weights read once. [byte]

        For wgrad (layout TN) k is the split dimension and each group writes its own C[m,n].
        """
        width = get_dtype(self.dtype).num_bytes
        if self.layout == "TN":
            return width * (1.0 * self.k * (self.m + self.n) + 1.0 * self.groups * self.m * self.n)
        weight_width = stored_weight_bytes(self.weight_dtype) if self.weight_dtype else width
        return width * 1.0 * self.m * (self.k + self.n) + weight_width * 1.0 * self.groups * self.k * self.n

    @property
    def contiguous_dims(self) -> tuple[str, str, str]:
        """Letter of the dimension that is contiguous in A, in B and in C."""
        return contiguous_dims(self.layout)


def contiguous_dims(layout: str) -> tuple[str, str, str]:
    """Letters of the contiguous dimension of A[m,k], B[k,n] and C[m,n] (C is stored rows first).

    >>> contiguous_dims("NT"), contiguous_dims("TN")
    (('k', 'k', 'n'), ('m', 'n', 'n'))
    """
    return ("k" if layout[0] == "N" else "m", "n" if layout[1] == "N" else "k", "n")
