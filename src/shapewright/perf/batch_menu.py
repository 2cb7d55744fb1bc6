"""Kernels that a library takes for batches of products, as a record holds them; perf.batch_kernels times them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.errors import CalibrationError
from shapewright.perf.alignment import ALIGNMENT_CLASSES_BYTES

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

# Joined like this and above, arithmetic and traffic are their larger one.
_LARGEST_POWER = 32.0


@dataclass(frozen=True, kw_only=True)
class BatchKernel:
    """A kernel for batches of products, and which products it takes.

    Attributes:
        role: ``contracted`` or ``free``: the least aligned of the contiguous dimensions; empty for either.
        alignments_bytes: Alignments of that dimension. [byte]
        first_k: Shortest contraction that it takes. [element]
        last_k: Longest one.
        first_n: Fewest columns that it takes. [element]
        last_n: Most.
        tile_m: Rows of its tiles. [element]
        widths: Columns of its tiles, rising. [element]
        rates: Rate of a busy SM with each width, as a fraction of its peak.
        alignment_rates: Factor on them by alignment in bytes, where it is not 1.
        edge_share: What a tile of one column costs of a whole one.
        k_step: Granularity of the contraction loop. [element]
        fill_k: Prologue and epilogue of a tile, in elements of k that would take as long. [element]
        bandwidth_fraction: Achieved share of memory bandwidth.
        write_ratio: Cost of writing a byte of C, in bytes read.
        feed_ratio: Rate at which caches feed operands to tiles, over that of memory; endless where they never wait.
        overlap_power: The exponent p; 1 where arithmetic waits for traffic.
    """

    role: str = ""
    alignments_bytes: tuple[int, ...]
    first_k: float = 0.0
    last_k: float = np.inf
    first_n: float = 0.0
    last_n: float = np.inf
    tile_m: float
    widths: tuple[float, ...]
    rates: tuple[float, ...]
    alignment_rates: Mapping[str, float] = field(default_factory=dict)
    edge_share: float
    k_step: float
    fill_k: float
    bandwidth_fraction: float
    write_ratio: float
    feed_ratio: float = np.inf
    overlap_power: float


class BatchKernels(NamedTuple):
    """Kernels of a section, first match first; arrays with an entry for each of them.

    Attributes:
        takes: Which classes of alignment they take, by whether the contraction is the least aligned dimension;
            [kernels, 2, classes].
        first_k: Shortest contractions. [element]
        last_k: Longest ones.
        first_n: Fewest columns. [element]
        last_n: Most.
        tile_m: Rows of tiles. [element]
        widths: Columns of tiles, rising and endless after the last. [element], [kernels, widths]
        last_width: Place of the widest.
        rates: Rates with each width. [kernels, widths]
        alignment_rates: Factors on them. [kernels, classes]
        edge_share: See BatchKernel, as for the rest.
        k_step: Granularity of the contraction. [element]
        fill_k: Prologue and epilogue. [element]
        bandwidth_fraction: Share of memory bandwidth.
        write_ratio: Cost of a written byte in bytes read.
        feed_ratio: Rate of caches over that of memory.
        overlap_power: The exponent p.
        least_waves: Waves of its tiles below which a batch is too small for such a kernel.
    """

    takes: NDArray[np.bool_]
    first_k: Array
    last_k: Array
    first_n: Array
    last_n: Array
    tile_m: Array
    widths: Array
    last_width: NDArray[np.intp]
    rates: Array
    alignment_rates: Array
    edge_share: Array
    k_step: Array
    fill_k: Array
    bandwidth_fraction: Array
    write_ratio: Array
    feed_ratio: Array
    overlap_power: Array
    least_waves: float


def read_batch_kernels(raw: Mapping[str, Any]) -> BatchKernels | None:
    """Unfold ``kernels`` of a section of batches; None where it has none.

    Raises:
        CalibrationError: a name is unknown or missing.
    """
    if "kernels" not in raw:
        return None

    def read(kernel: Mapping[str, Any]) -> BatchKernel:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in kernel.items()
        }
        return BatchKernel(**values)

    try:
        return join_kernels([read(kernel) for kernel in raw["kernels"]], float(raw["kernels_least_waves"]))
    except (KeyError, TypeError) as error:
        known = ", ".join(field.name for field in fields(BatchKernel))
        raise CalibrationError(f"kernels of a gemm record's batches: {error}; they know {known}") from error


def join_kernels(kernels: Sequence[BatchKernel], least_waves: float) -> BatchKernels:
    """Kernels as arrays."""
    roles = [("", "free"), ("", "contracted")]  # by whether the contraction is the least aligned
    classes = [np.isin(ALIGNMENT_CLASSES_BYTES, kernel.alignments_bytes) for kernel in kernels]
    most = max(len(kernel.widths) for kernel in kernels)

    def padded(values: Sequence[float], filling: float) -> list[float]:
        return [*values, *[filling] * (most - len(values))]

    names = ("first_k", "last_k", "first_n", "last_n", "tile_m", "edge_share", "k_step", "fill_k")
    more = ("bandwidth_fraction", "write_ratio", "feed_ratio")
    return BatchKernels(
        takes=np.array(
            [[taken & (kernel.role in role) for role in roles] for kernel, taken in zip(kernels, classes, strict=True)]
        ),
        widths=np.array([padded(kernel.widths, np.inf) for kernel in kernels]),
        last_width=np.array([len(kernel.widths) - 1 for kernel in kernels]),
        rates=np.array([padded(kernel.rates, 1.0) for kernel in kernels]),
        alignment_rates=np.array(
            [[kernel.alignment_rates.get(str(width), 1.0) for width in ALIGNMENT_CLASSES_BYTES] for kernel in kernels]
        ),
        overlap_power=np.array([min(kernel.overlap_power, _LARGEST_POWER) for kernel in kernels]),
        least_waves=least_waves,
        **{name: np.array([float(getattr(kernel, name)) for kernel in kernels]) for name in (*names, *more)},
    )
