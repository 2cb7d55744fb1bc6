"""Times of batched GEMMs that fill a device, which libraries run with one kernel chosen by alignment and contraction.

For single GEMMs the fastest candidate kernel is a good guess. For batches libraries choose by few rules, which measured
attention GEMMs of every head width from 1 to 1366 show: row alignment and contraction length select a kernel, and among
its tile widths the narrowest that holds the columns, else the widest. For a tile bm x w:

    columns = floor(n/w) + (edge + (1 - edge) rest/w if there is a rest)    a partly filled tile stores and loads less
    waves   = as in gemm.kernels, of batch ceil(m/bm) columns tiles
    tile_s  = (k + fill) bm w / (MAC/s per SM * rate of w * rate of the alignment)
    traffic = max[k (m + n), k (m ceil(n/w) + n ceil(m/bm)) / feed] + write ratio * m n    caches feed tiles
    time_s  = start + [(waves tile_s)^p + (traffic / bandwidth)^p]^(1/p)

Constants of each kernel are in ``kernels`` of a record section's ``batched``. GEMMs that no kernel accepts, or with too
few tiles for ``kernels_least_waves``, are priced by the other candidate kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.pricing.gemm.alignment import LAST_CLASS, WIDTH_MASK, classes_of_widths
from shapewright.pricing.gemm.kernels import join_s

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from shapewright.pricing.gemm.kernels import DeviceRates
    from shapewright.pricing.gemm.parameters import BatchKernels, GemmParameters
    from shapewright.pricing.gemm.shapes import Gemms

    PerGemm = Float[np.ndarray, "gemms"]
    GemmMask = Bool[np.ndarray, "gemms"]
    GemmIndex = Int[np.ndarray, "gemms"]


class BatchTimes(NamedTuple):
    """Times of batch kernels; entries where ``is_run`` is False are meaningless.

    Attributes:
        is_run: GEMMs that a batch kernel runs. [gemms]
        time_s: Whole time, including the start. [s]
        compute_s: Arithmetic over all waves. [s]
        memory_s: Traffic over bandwidth. [s]
        tile_m: Rows of the tile. [element]
        tile_n: Columns of the tile. [element]
        num_tiles: Tiles of the whole batch.
        num_waves: Waves over the device.
    """

    is_run: GemmMask
    time_s: PerGemm
    compute_s: PerGemm
    memory_s: PerGemm
    tile_m: PerGemm
    tile_n: PerGemm
    num_tiles: PerGemm
    num_waves: PerGemm


def time_batches(gemms: Gemms, parameters: GemmParameters, rates: DeviceRates, *, aligned: bool = False) -> BatchTimes:
    """Time the batched GEMMs that batch kernels run.

    Args:
        parameters: Constants of the record; start, power and wave recovery apply to batch kernels too.
        aligned: Time them as if every dimension were aligned.
    """
    known = parameters.batch_kernels
    assert known is not None
    m, n, k, batch = gemms.sizes
    worst, is_contracted = _worst_alignment(gemms, rates.element_bits, aligned=aligned)
    kernel = _choose_kernels(known, gemms, worst, is_contracted)
    place = np.maximum(kernel, 0)

    chosen = np.minimum((n[:, None] > known.widths[place]).sum(axis=1), known.last_width[place])
    width = known.widths[place, chosen]
    tile_m = known.tile_m[place]
    whole = np.floor(n / width)
    rest = (n - whole * width) / width
    edge = known.edge_share[place]
    columns = whole + np.where(rest > 0.0, edge + (1.0 - edge) * rest, 0.0)
    rows = batch * np.ceil(m / tile_m)
    waves = rows * columns / rates.num_sms
    full_waves = np.ceil(waves)
    busy_waves = full_waves - parameters.wave_give_back * (full_waves - np.maximum(waves, 1.0))

    flops = gemms.flops
    sustained = 1.0 - parameters.power_drop_fraction * flops / (flops + parameters.power_half_flops)
    rate = known.rates[place, chosen] * known.alignment_rates[place, worst] * sustained
    step = known.k_step[place]
    steps_k = np.ceil(k / step) * step + known.fill_k[place]
    compute_s = busy_waves * steps_k * tile_m * width / (rates.flops_per_s_per_sm / 2.0 * rate)

    stored_n = rates.stored_b_share * n
    fed = (m * np.ceil(n / width) + stored_n * np.ceil(m / tile_m)) / known.feed_ratio[place]
    elements = batch * k * np.maximum(m + stored_n, fed) + known.write_ratio[place] * (batch * m * n)
    memory_s = elements * (rates.element_bytes / rates.bandwidth_bytes_per_s) / known.bandwidth_fraction[place]

    num_tiles = rows * np.ceil(n / width)
    return BatchTimes(
        is_run=(kernel >= 0) & (num_tiles >= known.least_waves * rates.num_sms),
        time_s=parameters.start_s + join_s(compute_s, memory_s, known.overlap_power[place]),
        compute_s=compute_s,
        memory_s=memory_s,
        tile_m=tile_m,
        tile_n=width,
        num_tiles=num_tiles,
        num_waves=np.ceil(num_tiles / rates.num_sms),
    )


def _choose_kernels(known: BatchKernels, gemms: Gemms, worst: GemmIndex, is_contracted: GemmMask) -> GemmIndex:
    """Index of the first kernel that accepts each GEMM; -1 where none does."""
    m, n, k, batch = gemms.sizes
    kernel = np.full(len(m), -1)
    takes = known.takes[:, is_contracted.astype(np.intp), worst] & (batch > 1.0)
    for index in range(len(known.tile_m) - 1, -1, -1):
        inside = (k >= known.first_k[index]) & (k <= known.last_k[index]) & (m >= known.tile_m[index])
        inside &= (n >= known.first_n[index]) & (n <= known.last_n[index])
        kernel = np.where(takes[index] & inside, index, kernel)
    return kernel


def _worst_alignment(gemms: Gemms, element_bits: int, *, aligned: bool) -> tuple[GemmIndex, GemmMask]:
    """Alignment class of the least aligned contiguous dimension, and whether that is the contraction."""
    class_of_width, num_gemms = classes_of_widths(element_bits), len(gemms.m)
    classes = {"k": np.full(num_gemms, LAST_CLASS), "free": np.full(num_gemms, LAST_CLASS)}
    for letter, is_contiguous in ({} if aligned else gemms.letters).items():
        size = gemms.size_of(letter).astype(np.int64)
        found = np.where(is_contiguous, class_of_width[size & WIDTH_MASK], LAST_CLASS)
        role = "k" if letter == "k" else "free"
        classes[role] = np.minimum(classes[role], found)
    return np.minimum(classes["k"], classes["free"]), classes["k"] <= classes["free"]
