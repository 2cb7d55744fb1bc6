"""Arrays of GEMM sizes: the input of the GEMM model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from shapewright.pricing.gemm.alignment import Letters

    PerGemm = Float[np.ndarray, "gemms"]
    GemmMask = Bool[np.ndarray, "gemms"]
    GemmIndex = Int[np.ndarray, "gemms"]


class ExpertChoice(NamedTuple):
    """Sizes by which a serving library chooses an expert layer's kernel, and its choice; 1-d arrays of one length.

    Attributes:
        step: Step of the library's tile rule; experts.tiles.TUNED for the fastest candidate kernel.
        inner: Width between an expert's two GEMMs. [element]
        hidden: Width before and after them. [element]
    """

    step: GemmIndex
    inner: PerGemm
    hidden: PerGemm

    def rows(self, part: slice | GemmMask) -> ExpertChoice:
        """Select some of them."""
        return ExpertChoice(self.step[part], self.inner[part], self.hidden[part])


class Gemms(NamedTuple):
    """Sizes of many GEMMs C[m,n] = A[m,k] B[k,n] as 1-d float arrays of one length.

    Attributes:
        m: Rows of C. [element]
        n: Columns of C. [element]
        k: Contraction. [element]
        batch: Equal GEMMs in one launch.
        letters: Contiguous dimensions (gemm.alignment.contiguous_letters).
        choice: Kernel choice of expert layers in a serving library; None for everything else.
        run_flops: Work of the run of GEMMs that each was timed in, including itself; None if unknown. [flop]
    """

    m: PerGemm
    n: PerGemm
    k: PerGemm
    batch: PerGemm
    letters: Letters
    choice: ExpertChoice | None = None
    run_flops: PerGemm | None = None

    @property
    def sizes(self) -> tuple[PerGemm, PerGemm, PerGemm, PerGemm]:
        """m, n, k and batch."""
        return self.m, self.n, self.k, self.batch

    @property
    def flops(self) -> PerGemm:
        """Floating-point operations, two per multiply-add. [flop]"""
        flops: PerGemm = 2.0 * self.batch * self.m * self.n * self.k
        return flops

    def size_of(self, letter: str) -> PerGemm:
        """Size of a dimension by its letter. [element]"""
        return {"m": self.m, "n": self.n, "k": self.k}[letter]

    def rows(self, part: slice | GemmMask) -> Gemms:
        """Select some of them."""
        letters = {letter: one if isinstance(one, bool) else one[part] for letter, one in self.letters.items()}
        choice = None if self.choice is None else self.choice.rows(part)
        run_flops = None if self.run_flops is None else self.run_flops[part]
        return Gemms(self.m[part], self.n[part], self.k[part], self.batch[part], letters, choice, run_flops)
