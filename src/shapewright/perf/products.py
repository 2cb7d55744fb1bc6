"""Many products as arrays: what the kernels of perf are asked to price, and how a serving library runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.perf.alignment import Letters

    Array = NDArray[np.float64]


class ExpertChoice(NamedTuple):
    """What a serving library chooses an expert layer's kernel by, or has chosen; 1-d arrays of one length.

    Attributes:
        step: Kernel of its rule, perf.expert_tiles.TUNED for the fastest of its menu.
        inner: Width between an expert's two products. [element]
        hidden: Width before and after them. [element]
    """

    step: NDArray[np.intp]
    inner: Array
    hidden: Array

    def rows(self, part: slice | NDArray[np.bool_]) -> ExpertChoice:
        """Some of them."""
        return ExpertChoice(self.step[part], self.inner[part], self.hidden[part])


class Products(NamedTuple):
    """Sizes of products, 1-d float arrays of one length, and which of their dimensions are contiguous.

    Attributes:
        m: Rows of C. [element]
        n: Columns of C. [element]
        k: Contraction. [element]
        batch: Equal products in one launch.
        letters: See perf.alignment.contiguous_letters.
        choice: Of expert layers that a serving library runs; None for all else.
        run_flops: Work of the run that each was timed in, itself included; None where nobody said. [flop]
    """

    m: Array
    n: Array
    k: Array
    batch: Array
    letters: Letters
    choice: ExpertChoice | None = None
    run_flops: Array | None = None

    @property
    def sizes(self) -> tuple[Array, Array, Array, Array]:
        """The sizes alone: m, n, k and batch."""
        return self.m, self.n, self.k, self.batch

    @property
    def flops(self) -> Array:
        """Multiplications and additions. [flop]"""
        return 2.0 * self.batch * self.m * self.n * self.k

    def size_of(self, letter: str) -> Array:
        """A dimension by its letter. [element]"""
        return {"m": self.m, "n": self.n, "k": self.k}[letter]

    def rows(self, part: slice | NDArray[np.bool_]) -> Products:
        """Some of them."""
        letters = {letter: one if isinstance(one, bool) else one[part] for letter, one in self.letters.items()}
        choice = None if self.choice is None else self.choice.rows(part)
        run_flops = None if self.run_flops is None else self.run_flops[part]
        return Products(self.m[part], self.n[part], self.k[part], self.batch[part], letters, choice, run_flops)
