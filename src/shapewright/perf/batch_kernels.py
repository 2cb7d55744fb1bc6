"""Batches of products that fill a device: the one kernel that a library takes, by alignment and length of contraction.

For single products the fastest kernel of a menu is a fair guess. For batches libraries decide by few rules, which the
attention products of every head width from 1 to 1366 show: the alignment of the rows and the length of the contraction
choose a kernel, and of its tiles the narrowest that holds the columns, else the widest. For tile bm x w:

    columns = floor(n/w) + (edge + (1 - edge) rest/w if a rest is left)     a partly filled tile stores and loads less
    waves   = soft(batch ceil(m/bm) columns / SMs)                          as in perf.kernels
    tile_s  = (k + fill) bm w / (rate per SM * rate of w * rate of the alignment)
    time    = start + [(waves tile_s)^p + (traffic / bandwidth)^p]^(1/p)

Each kernel has its own numbers, which a record holds in ``kernels`` of a section's ``batched``. Products that none of
them takes, or that are too few tiles for ``kernels_least_waves``, are priced by the menu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.perf.alignment import ALIGNMENT_CLASSES_BYTES, LAST_CLASS, WIDTH_MASK, classes_of_widths

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.perf.alignment import Letters
    from shapewright.perf.batch_menu import BatchKernel
    from shapewright.perf.kernels import DeviceRates, GemmParameters

    Array = NDArray[np.float64]
    Index = NDArray[np.intp]

# Joined like this and above, arithmetic and traffic are their larger one.
_LARGEST_POWER = 32.0


class BatchTimes(NamedTuple):
    """What kernels for batches take, for the products that they run; the rest of each array means nothing.

    Attributes:
        is_run: Which products they run. [products]
        time_s: Whole time, start included. [s]
        compute_s: Arithmetic over all waves. [s]
        memory_s: Traffic over bandwidth. [s]
        tile_m: Rows of the tile. [element]
        tile_n: Columns of the tile. [element]
        num_tiles: Tiles of the whole batch.
        num_waves: Passes over the device.
    """

    is_run: NDArray[np.bool_]
    time_s: Array
    compute_s: Array
    memory_s: Array
    tile_m: Array
    tile_n: Array
    num_tiles: Array
    num_waves: Array


def time_batches(
    m: Array,
    n: Array,
    k: Array,
    batch: Array,
    letters: Letters,
    element_bits: int,
    parameters: GemmParameters,
    rates: DeviceRates,
    *,
    aligned: bool = False,
) -> BatchTimes:
    """Time the batches that kernels of their own run.

    Args:
        m: Rows of C. [element], one for each product, as are n, k and batch.
        n: Columns of C.
        k: Contraction.
        batch: Independent products.
        letters: Contiguous dimensions, see perf.alignment.contiguous_letters.
        element_bits: Width of an element. [bit]
        parameters: Holder of the kernels; its start, power and wave tails are theirs too.
        rates: The device's rates.
        aligned: Time them as if every dimension were aligned.
    """
    known = parameters.batch_kernels
    assert known is not None
    chosen = _choose(m, n, k, batch, *_worst_alignment(m, n, k, letters, element_bits, aligned=aligned), known.kernels)
    times = [
        _time(m, n, k, batch, kernel, alignment_rate, parameters, rates)
        for kernel, alignment_rate in zip(known.kernels, chosen.alignment_rates, strict=True)
    ]
    place = np.maximum(chosen.kernel, 0)[None]
    columns = [np.take_along_axis(np.stack(column), place, axis=0)[0] for column in zip(*times, strict=True)]
    is_run = (chosen.kernel >= 0) & (columns[-2] >= known.least_waves * rates.num_sms)
    return BatchTimes(is_run, *columns)


class _Choice(NamedTuple):
    kernel: Index
    alignment_rates: list[Array]


def _worst_alignment(
    m: Array, n: Array, k: Array, letters: Letters, element_bits: int, *, aligned: bool
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Alignment class of the least aligned contiguous dimension, and whether that is the contraction."""
    class_of_width, dims = classes_of_widths(element_bits), {"m": m, "n": n, "k": k}
    classes = {"k": np.full(np.shape(m), LAST_CLASS), "free": np.full(np.shape(m), LAST_CLASS)}
    for letter, is_contiguous in ({} if aligned else letters).items():
        found = np.where(is_contiguous, class_of_width[dims[letter].astype(np.int64) & WIDTH_MASK], LAST_CLASS)
        role = "k" if letter == "k" else "free"
        classes[role] = np.minimum(classes[role], found)
    return np.minimum(classes["k"], classes["free"]), classes["k"] <= classes["free"]


def _choose(
    m: Array,
    n: Array,
    k: Array,
    batch: Array,
    worst: NDArray[np.int64],
    is_contracted: NDArray[np.bool_],
    kernels: Sequence[BatchKernel],
) -> _Choice:
    """Index of the first kernel that takes each product, -1 for none, and each kernel's rate by alignment."""
    found, rates = np.full(np.shape(m), -1), []
    for index, kernel in enumerate(kernels):
        takes_class = np.isin(ALIGNMENT_CLASSES_BYTES, kernel.alignments_bytes)
        by_class = np.array([kernel.alignment_rates.get(str(width), 1.0) for width in ALIGNMENT_CLASSES_BYTES])
        takes = takes_class[worst] & (m >= kernel.tile_m) & (batch > 1.0)
        takes &= (k >= kernel.first_k) & (k <= kernel.last_k) & (n >= kernel.first_n) & (n <= kernel.last_n)
        if kernel.role:
            takes &= is_contracted == (kernel.role == "contracted")
        found = np.where((found < 0) & takes, index, found)
        rates.append(by_class[worst])
    return _Choice(found, rates)


def _time(
    m: Array,
    n: Array,
    k: Array,
    batch: Array,
    kernel: BatchKernel,
    alignment_rate: Array,
    parameters: GemmParameters,
    rates: DeviceRates,
) -> tuple[Array, ...]:
    """Columns of BatchTimes but the first, with one kernel."""
    widths, own_rates = np.array(kernel.widths), np.array(kernel.rates)
    chosen = np.minimum(np.searchsorted(widths, n), len(widths) - 1)
    width = widths[chosen]
    whole = np.floor(n / width)
    rest = n - whole * width
    columns = whole + np.where(rest > 0.0, kernel.edge_share + (1.0 - kernel.edge_share) * rest / width, 0.0)
    rows = batch * np.ceil(m / kernel.tile_m)
    waves = rows * columns / rates.num_sms
    full_waves = np.ceil(waves)
    busy_waves = full_waves - parameters.wave_give_back * (full_waves - np.maximum(waves, 1.0))

    flops = 2.0 * batch * m * n * k
    sustained = 1.0 - parameters.power_drop_fraction * flops / (flops + parameters.power_half_flops)
    macs_per_s = rates.flops_per_s_per_sm / 2.0 * own_rates[chosen] * alignment_rate * sustained
    steps_k = np.ceil(k / kernel.k_step) * kernel.k_step + kernel.fill_k
    compute_s = busy_waves * steps_k * kernel.tile_m * width / macs_per_s
    elements = batch * (k * (m + rates.stored_b_share * n) + kernel.write_ratio * m * n)
    memory_s = elements * rates.element_bytes / (kernel.bandwidth_fraction * rates.bandwidth_bytes_per_s)
    power = min(kernel.overlap_power, _LARGEST_POWER)
    worst = np.maximum(compute_s, memory_s)
    joined_s = worst * (1.0 + (np.minimum(compute_s, memory_s) / worst) ** power) ** (1.0 / power)
    num_tiles = rows * np.ceil(n / width)
    tile_m = np.full_like(width, kernel.tile_m)
    num_waves = np.ceil(num_tiles / rates.num_sms)
    return parameters.start_s + joined_s, compute_s, memory_s, tile_m, width, num_tiles, num_waves
