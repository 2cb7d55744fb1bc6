"""Kernels that a library takes for batches of products, as a record holds them; perf.batch_kernels times them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np

from shapewright.errors import CalibrationError


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
    overlap_power: float


class BatchKernels(NamedTuple):
    """Kernels of a section, first match first.

    Attributes:
        kernels: The kernels.
        least_waves: Waves of its tiles below which a batch is too small for such a kernel.
    """

    kernels: tuple[BatchKernel, ...]
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
        return BatchKernels(tuple(map(read, raw["kernels"])), float(raw["kernels_least_waves"]))
    except (KeyError, TypeError) as error:
        known = ", ".join(field.name for field in fields(BatchKernel))
        raise CalibrationError(f"kernels of a gemm record's batches: {error}; they know {known}") from error
