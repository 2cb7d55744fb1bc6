"""Products that a library runs on slow kernels, or whose operands outgrow what caches and page tables reach.

Tiles and alignment classes of perf.kernels say nothing of these; records of devices where they were measured do, in a
section's ``slow_cases``. Legend: m, n, k in BLAS letters, one entry per shape.

    long      rate / (1 + k / long_k)                 SMs that share operands drift apart along a long contraction
    reach     rate * (1 - reach_loss r), r = 1 / (1 + (reach_bytes / bytes of B)^steepness)     pages out of reach
    spans     rate * (1 - loss) within ranges of k and n     a kernel that the library keeps for them;
              of reach and spans the most costly one counts
    narrow    a contiguous dimension below an edge that is poorly aligned: start + traffic + work / (fraction * peak)
    small     m, n <= small_edge and at most small_outputs of C: start + work / (fraction * peak), whatever k is
    idle      n beyond idle_columns, B beyond idle_elements and a last wave of tiles that fills less than half of the
              SMs, or B beyond idle_always_elements: start + work / (fraction * peak), without tensor cores

A slow kernel runs at a share of the device's peak that does not depend on tiles: it is a floor under the time. A narrow
one does not overlap its arithmetic with its traffic, and works on whole steps of the narrow dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.errors import CalibrationError
from shapewright.perf.alignment import alignment_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.perf.products import Products

    Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class NarrowCase:
    """A kernel for narrow and poorly aligned dimensions, as heads of odd width make them.

    Attributes:
        role: Role of the dimension, ``contracted`` or ``free``.
        alignments_bytes: Alignments of it that this kernel takes. [byte]
        edge: Dimensions below this are narrow. [element]
        step: What it is padded to. [element]
        fraction: Share of the device's peak that the kernel reaches on what is padded.
    """

    role: str
    alignments_bytes: tuple[int, ...]
    edge: float
    step: float
    fraction: float


@dataclass(frozen=True, kw_only=True)
class Span:
    """Sizes that a library runs on a slower kernel, ends included.

    Attributes:
        first_k: Shortest contraction. [element]
        last_k: Longest one.
        first_n: Fewest columns. [element]
        last_n: Most.
        loss: Share of the rate that is lost.
    """

    first_k: float = 0.0
    last_k: float = np.inf
    first_n: float = 0.0
    last_n: float = np.inf
    loss: float

    def holds(self, n: Array, k: Array) -> NDArray[np.bool_]:
        """Which products lie inside."""
        inside: NDArray[np.bool_] = (k >= self.first_k) & (k <= self.last_k) & (n >= self.first_n) & (n <= self.last_n)
        return inside


@dataclass(frozen=True, kw_only=True)
class SlowCases:
    """What a record knows of slow cases; the defaults are none.

    Attributes:
        long_k: Contraction at which a tile takes twice as long per element as a short one, 0 for never. [element]
        reach_bytes: Size of B at which half of reach_loss is lost, 0 for never. [byte]
        reach_loss: Share of the rate that is lost beyond it.
        reach_steepness: How sharply B leaves the reach of page tables; a smooth stand-in for a step.
        spans: Sizes that slower kernels run.
        narrow: Kernels for narrow dimensions.
        small_edge: Largest m and n of a small product. [element]
        small_outputs: Largest number of its outputs, batch included. [element]
        small_fraction: Share of the device's peak that it reaches at most, 0 where small products are like others.
        idle_columns: Columns of C up to which none of this happens. [element]
        idle_elements: Size of B beyond which a last wave that is less than half full costs the fast kernels. [element]
        idle_always_elements: Size of B beyond which they are lost however full the last wave is. [element]
        idle_tile_m: Rows of the tiles that make those waves. [element]
        idle_tile_n: Columns of them. [element]
        idle_fraction: Share of the device's peak that the kernel in their place reaches, 0 where this does not happen.
    """

    long_k: float = 0.0
    reach_bytes: float = 0.0
    reach_loss: float = 0.0
    reach_steepness: float = 4.0
    spans: tuple[Span, ...] = ()
    narrow: tuple[NarrowCase, ...] = ()
    small_edge: float = 0.0
    small_outputs: float = 0.0
    small_fraction: float = 0.0
    idle_columns: float = 0.0
    idle_elements: float = 0.0
    idle_always_elements: float = np.inf
    idle_tile_m: float = 256.0
    idle_tile_n: float = 128.0
    idle_fraction: float = 0.0


def read_slow_cases(raw: Mapping[str, Any] | None) -> SlowCases | None:
    """Unfold ``slow_cases`` of a record's section; None where it has none.

    Raises:
        CalibrationError: a name is unknown.
    """
    if raw is None:
        return None
    values = {name: float(value) for name, value in raw.items() if name not in ("narrow", "spans")}
    try:
        spans = tuple(Span(**span) for span in raw.get("spans", ()))
        narrow = [
            NarrowCase(**{**case, "alignments_bytes": tuple(case["alignments_bytes"])})
            for case in raw.get("narrow", ())
        ]
        return SlowCases(narrow=tuple(narrow), spans=spans, **values)
    except (KeyError, TypeError) as error:
        known = ", ".join(sorted(field.name for field in fields(SlowCases)))
        raise CalibrationError(f"slow_cases of a gemm record: {error}; they know {known}") from error


def rate_share(n: Array, k: Array, element_bytes: float, cases: SlowCases) -> Array | float:
    """Share of the rate that long contractions, far pages and spans leave, in (0, 1].

    Args:
        n: Columns of C. [element]
        k: Contraction. [element]
        element_bytes: Width of an element of B. [byte]
        cases: What the record knows.
    """
    loss: Array | float = 0.0
    if cases.reach_bytes:
        loss = cases.reach_loss / (1.0 + (cases.reach_bytes / (n * k * element_bytes)) ** cases.reach_steepness)
    for span in cases.spans:
        loss = np.maximum(loss, np.where(span.holds(n, k), span.loss, 0.0))
    share: Array | float = 1.0 - loss
    return share / (1.0 + k / cases.long_k) if cases.long_k else share


def narrow_floor_s(
    products: Products, element_bits: int, traffic_s: Array, flops_per_s: float, cases: SlowCases
) -> Array:
    """Time under which a product with a narrow dimension cannot come, 0 for all others. [s]

    Args:
        products: Their sizes and contiguous dimensions.
        element_bits: Width of an element. [bit]
        traffic_s: Time of reading A and B and writing C. [s]
        flops_per_s: Peak of the device. [flop/s]
        cases: What the record knows.
    """
    floor_s = np.zeros_like(products.m)
    for case in cases.narrow:
        for letter, is_contiguous in products.letters.items():
            if (letter == "k") != (case.role == "contracted"):
                continue
            dim = products.size_of(letter)
            is_narrow = (dim < case.edge) & is_contiguous
            if not is_narrow.any():
                continue
            is_narrow &= np.isin(alignment_bytes(dim, element_bits), case.alignments_bytes)
            padded = np.ceil(dim / case.step) * case.step
            alone_s = products.flops * (padded / dim) / (flops_per_s * case.fraction)
            floor_s = np.maximum(floor_s, np.where(is_narrow, traffic_s + alone_s, 0.0))
    return floor_s


def small_floor_s(products: Products, flops_per_s: float, cases: SlowCases) -> Array:
    """Time under which a small product cannot come, 0 for all others. [s]; see narrow_floor_s."""
    m, n, _, batch = products.sizes
    if not cases.small_fraction:
        return np.zeros_like(m)
    is_small = (np.maximum(m, n) <= cases.small_edge) & (batch * m * n <= cases.small_outputs)
    return np.where(is_small, products.flops / (flops_per_s * cases.small_fraction), 0.0)


def leaves_fast_kernels(m: Array, n: Array, k: Array, num_sms: float, cases: SlowCases) -> NDArray[np.bool_]:
    """Whether B is so large that the library leaves its fast kernels, given how full the last wave of tiles is.

    Args:
        m: Rows of C. [element]
        n: Columns of C. [element]
        k: Contraction. [element]
        num_sms: SMs, which take one tile each in a wave.
        cases: What the record knows.
    """
    num_tiles = np.ceil(m / cases.idle_tile_m) * np.ceil(n / cases.idle_tile_n)
    last_wave = num_tiles % num_sms  # tiles in it; 0 is a full one
    is_half_empty = (last_wave > 0.0) & (2.0 * last_wave < num_sms)
    is_far = (n > cases.idle_columns) & (n * k > cases.idle_elements)
    found: NDArray[np.bool_] = is_far & (is_half_empty | (n * k > cases.idle_always_elements))
    return found


def idle_floor_s(products: Products, num_sms: float, flops_per_s: float, cases: SlowCases) -> Array:
    """Time under which a single product with such a B cannot come, 0 for all others. [s]; see leaves_fast_kernels."""
    m, n, k, batch = products.sizes
    if not cases.idle_fraction:
        return np.zeros_like(m)
    is_slow = leaves_fast_kernels(m, n, k, num_sms, cases) & (batch == 1)
    return np.where(is_slow, products.flops / (flops_per_s * cases.idle_fraction), 0.0)
