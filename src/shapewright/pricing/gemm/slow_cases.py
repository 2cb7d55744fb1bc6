"""GEMMs that libraries run on slow kernels, or whose operands exceed the reach of caches and page tables.

Measured deviations from the tiles and alignment classes of gemm.kernels, in ``slow_cases`` of a record's section.
Legend: m, n, k in BLAS letters, one entry per shape.

    long      rate / (1 + k / long_k)                 SMs that share operands drift apart along a long contraction
    reach     rate * (1 - reach_loss r), r = 1 / (1 + (reach_bytes / bytes of B)^steepness)     pages out of reach
    spans     rate * (1 - loss) within ranges of k and n     sizes for which the library uses a slower kernel;
              of reach and spans, the larger loss applies
    narrow    a poorly aligned contiguous dimension below an edge: start + traffic + work / (fraction * peak)
    small     m, n <= small_edge and at most small_outputs of C: start + work / (fraction * peak), for any k
    idle      n above idle_columns, B above idle_elements and a last wave that fills less than half of the SMs, or B
              above idle_always_elements: start + work / (fraction * peak), without tensor cores

A slow kernel runs at a fraction of the device's peak that does not depend on tiles: a lower bound of the time. A narrow
one does not overlap arithmetic with traffic, and pads the narrow dimension to whole steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.errors import CalibrationError
from shapewright.core.records import dataclass
from shapewright.pricing.gemm.alignment import alignment_bytes

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from shapewright.pricing.gemm.shapes import Gemms

    PerGemm = Float[np.ndarray, "gemms"]
    GemmMask = Bool[np.ndarray, "gemms"]


@dataclass(frozen=True, kw_only=True)
class NarrowCase:
    """Kernel for narrow and poorly aligned dimensions, such as odd head widths.

    Attributes:
        role: Role of the dimension, ``contracted`` or ``free``.
        alignments_bytes: Alignments of it that this kernel accepts. [byte]
        edge: Dimensions below this are narrow. [element]
        step: Multiple that it is padded to. [element]
        fraction: Fraction of the device's peak that the kernel reaches on the padded size.
    """

    role: str
    alignments_bytes: tuple[int, ...]
    edge: float
    step: float
    fraction: float


@dataclass(frozen=True, kw_only=True)
class Span:
    """Range of sizes that a library runs on a slower kernel, ends included.

    Attributes:
        first_k: Shortest contraction. [element]
        last_k: Longest contraction. [element]
        first_n: Fewest columns. [element]
        last_n: Most columns. [element]
        loss: Fraction of the rate that is lost.
    """

    first_k: float = 0.0
    last_k: float = np.inf
    first_n: float = 0.0
    last_n: float = np.inf
    loss: float

    def contains(self, n: PerGemm, k: PerGemm) -> GemmMask:
        """Select the GEMMs inside the range."""
        inside: GemmMask = (k >= self.first_k) & (k <= self.last_k) & (n >= self.first_n) & (n <= self.last_n)
        return inside


@dataclass(frozen=True, kw_only=True)
class SlowCases:
    """Slow cases of a record's section; the defaults mean none.

    Attributes:
        long_k: Contraction at which a tile takes twice as long per element as a short one, 0 for never. [element]
        reach_bytes: Size of B at which half of reach_loss is lost, 0 for never. [byte]
        reach_loss: Fraction of the rate that is lost beyond it.
        reach_steepness: Steepness at which B leaves the reach of page tables; a smooth step.
        spans: Ranges of sizes that slower kernels run.
        narrow: Kernels for narrow dimensions.
        small_edge: Largest m and n of a small GEMM. [element]
        small_outputs: Largest number of its outputs, including the batch. [element]
        small_fraction: Upper bound of its rate as a fraction of the device's peak, 0 where small GEMMs are not slow.
        idle_columns: Columns of C up to which the idle case does not occur. [element]
        idle_elements: Size of B above which a last wave that is less than half full disables the fast kernels.
            [element]
        idle_always_elements: Size of B above which they are disabled for any last wave. [element]
        idle_tile_m: Rows of the tiles that form those waves. [element]
        idle_tile_n: Columns of them. [element]
        idle_fraction: Fraction of the device's peak that the replacement kernel reaches, 0 where this does not occur.
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
    """Read ``slow_cases`` of a record's section; None where it has none.

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
        raise CalibrationError(f"slow_cases of a gemm record: {error}; known keys are {known}") from error


def rate_share(n: PerGemm, k: PerGemm, element_bytes: float, cases: SlowCases) -> PerGemm | float:
    """Fraction of the rate that remains after long contractions, far pages and spans, in (0, 1].

    Args:
        n: Columns of C. [element]
        k: Contraction. [element]
        element_bytes: Width of an element of B. [byte]
    """
    loss: PerGemm | float = 0.0
    if cases.reach_bytes:
        loss = cases.reach_loss / (1.0 + (cases.reach_bytes / (n * k * element_bytes)) ** cases.reach_steepness)
    for span in cases.spans:
        loss = np.maximum(loss, np.where(span.contains(n, k), span.loss, 0.0))
    share: PerGemm | float = 1.0 - loss
    return share / (1.0 + k / cases.long_k) if cases.long_k else share


def narrow_floor_s(
    gemms: Gemms, element_bits: int, traffic_s: PerGemm, flops_per_s: float, cases: SlowCases
) -> PerGemm:
    """Lower bound of the time of GEMMs with a narrow dimension, 0 for all others. [s]

    Args:
        element_bits: Width of an element. [bit]
        traffic_s: Time of reading A and B and writing C. [s]
        flops_per_s: Peak of the device. [flop/s]
    """
    floor_s = np.zeros_like(gemms.m)
    for case in cases.narrow:
        for letter, is_contiguous in gemms.letters.items():
            if (letter == "k") != (case.role == "contracted"):
                continue
            dim = gemms.size_of(letter)
            is_narrow = (dim < case.edge) & is_contiguous
            if not is_narrow.any():
                continue
            is_narrow &= np.isin(alignment_bytes(dim, element_bits), case.alignments_bytes)
            padded = np.ceil(dim / case.step) * case.step
            alone_s = gemms.flops * (padded / dim) / (flops_per_s * case.fraction)
            floor_s = np.maximum(floor_s, np.where(is_narrow, traffic_s + alone_s, 0.0))
    return floor_s


def small_floor_s(gemms: Gemms, flops_per_s: float, cases: SlowCases) -> PerGemm:
    """Lower bound of the time of small GEMMs, 0 for all others. [s]; arguments as in narrow_floor_s."""
    m, n, _, batch = gemms.sizes
    if not cases.small_fraction:
        return np.zeros_like(m)
    is_small = (np.maximum(m, n) <= cases.small_edge) & (batch * m * n <= cases.small_outputs)
    return np.where(is_small, gemms.flops / (flops_per_s * cases.small_fraction), 0.0)


def is_idle_case(m: PerGemm, n: PerGemm, k: PerGemm, num_sms: float, cases: SlowCases) -> GemmMask:
    """Whether B is so large that the library leaves its fast kernels, given the fill of the last wave of tiles.

    Args:
        m: Rows of C. [element]
        n: Columns of C. [element]
        k: Contraction. [element]
        num_sms: SMs, which run one tile each in a wave.
    """
    num_tiles = np.ceil(m / cases.idle_tile_m) * np.ceil(n / cases.idle_tile_n)
    last_wave = num_tiles % num_sms  # number of tiles; 0 means full
    is_half_empty = (last_wave > 0.0) & (2.0 * last_wave < num_sms)
    is_far = (n > cases.idle_columns) & (n * k > cases.idle_elements)
    found: GemmMask = is_far & (is_half_empty | (n * k > cases.idle_always_elements))
    return found


def idle_floor_s(gemms: Gemms, num_sms: float, flops_per_s: float, cases: SlowCases) -> PerGemm:
    """Lower bound of the time of single GEMMs with such a B, 0 for all others. [s]; see is_idle_case."""
    m, n, k, batch = gemms.sizes
    if not cases.idle_fraction:
        return np.zeros_like(m)
    is_slow = is_idle_case(m, n, k, num_sms, cases) & (batch == 1)
    return np.where(is_slow, gemms.flops / (flops_per_s * cases.idle_fraction), 0.0)
