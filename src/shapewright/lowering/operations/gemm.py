"""GEMMs: C[m,n] = A[m,k] B[k,n] in BLAS letters.

Legend: m rows of the output, n columns of the output, k contracted dimension, all in elements.

The two letters of a layout state for A and for B whether the matrix is stored row-major as written (N) or transposed
(T). For y = x W^T, as torch.nn.functional.linear computes it:

    pass      GEMM                         layout   contiguous dims of A, B, C
    forward   y[m,n]  = x[m,k]   W[n,k]^T  NT       k, k, n
    dgrad     dx[m,k] = dy[m,n]  W[n,k]    NN       its k (= n above), its n (= k above), its n
    wgrad     dW[n,k] = dy[m,n]^T x[m,k]   TN       its m (= n above), its n (= k above), its n

So the layer's input and output widths determine the alignment of all three, while the number of tokens only affects
tiles and waves. (cuBLAS assumes column-major storage and calls these layouts TN, NN and NT.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.dtypes import get_dtype, stored_weight_bytes
from shapewright.core.records import dataclass
from shapewright.lowering.operations.base import OperationBase

if TYPE_CHECKING:
    from shapewright.core.numeric import Count, Numeric


@dataclass(frozen=True, kw_only=True)
class Gemm(OperationBase):
    """A GEMM, or ``batch`` GEMMs of equal size in one launch.

    Attributes:
        m: Rows of C. [element]
        n: Columns of C. [element]
        k: Contracted dimension. [element]
        batch: Number of independent GEMMs.
        layout: Storage of A and B: NT, NN, TN or TT; see the module's docstring.
        weight_dtype: Element format of B in memory if it is narrower than ``dtype`` and converted when read; None
            means ``dtype``.
        is_training: Whether a training framework runs it, whose 8-bit GEMMs have one scale per tensor.
        library: Library and version that runs it; empty for the mean of those measured.
    """

    m: Count
    n: Count
    k: Count
    batch: Count = 1
    layout: str = "NT"
    weight_dtype: str | None = None
    is_training: bool = False
    library: str = ""

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
        """Traffic if operands are read once and the result is written once. [byte]"""
        width = get_dtype(self.dtype).num_bytes
        weight_width = stored_weight_bytes(self.weight_dtype) if self.weight_dtype else width
        elements = 1.0 * self.m * self.k + 1.0 * self.m * self.n
        return (elements * width + 1.0 * self.k * self.n * weight_width) * self.batch

    @property
    def contiguous_dims(self) -> tuple[str, str, str]:
        """Letters of the contiguous dimensions of A, B and C."""
        return contiguous_dims(self.layout)


@dataclass(frozen=True, kw_only=True)
class GroupedGemm(OperationBase):
    """A grouped GEMM of an expert layer: rows are divided among groups, each with its own B[k,n].

    Attributes:
        m: Rows of all groups together. [element]
        n: Columns of each C. [element]
        k: Contracted dimension. [element]
        groups: Number of weight matrices (experts of this device that get rows).
        layout: Storage of A and B, as for Gemm.
        weight_dtype: Element format of B in memory, as for Gemm.
        is_training: Whether it is run by a training framework, whose grouped kernels differ from those of serving
            libraries.
        tokens: Tokens routed to the device, by which serving libraries select tiles; None in training.
        experts: Experts of the device, with or without rows; None in training.
        inner: Width between the two GEMMs of an expert; None in training. [element]
        leaves_poor_kernel: Whether a server avoids a measured kernel that is much slower than 16-bit kernels, as
            training frameworks do.
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
        """Traffic if rows are read and written once and the weights of every group are read once. [byte]

        For wgrad (layout TN) the groups divide k, and each group writes its own C[m,n].
        """
        width = get_dtype(self.dtype).num_bytes
        if self.layout == "TN":
            return width * (1.0 * self.k * (self.m + self.n) + 1.0 * self.groups * self.m * self.n)
        weight_width = stored_weight_bytes(self.weight_dtype) if self.weight_dtype else width
        return width * 1.0 * self.m * (self.k + self.n) + weight_width * 1.0 * self.groups * self.k * self.n

    @property
    def contiguous_dims(self) -> tuple[str, str, str]:
        """Letters of the contiguous dimensions of A, B and C."""
        return contiguous_dims(self.layout)


def contiguous_dims(layout: str) -> tuple[str, str, str]:
    """Letters of the contiguous dimensions of A[m,k], B[k,n] and C[m,n]; C is row-major.

    >>> contiguous_dims("NT"), contiguous_dims("TN")
    (('k', 'k', 'n'), ('m', 'n', 'n'))
    """
    return ("k" if layout[0] == "N" else "m", "n" if layout[1] == "N" else "k", "n")
