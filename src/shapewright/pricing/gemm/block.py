"""Price of a block of GEMMs through one set of candidate kernels, with slow cases, before the roofline bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shapewright.pricing.gemm.batched import time_batches
from shapewright.pricing.gemm.fastest import fastest_s, find_fastest
from shapewright.pricing.gemm.kernels import alignment_factor
from shapewright.pricing.gemm.slow_cases import idle_floor_s, narrow_floor_s, rate_share, small_floor_s
from shapewright.pricing.gemm.tiling import tile_efficiency, wave_efficiency

if TYPE_CHECKING:
    from jaxtyping import Float

    from shapewright.pricing.gemm.kernels import DeviceRates
    from shapewright.pricing.gemm.parameters import GemmParameters
    from shapewright.pricing.gemm.shapes import Gemms

    PerGemm = Float[np.ndarray, "gemms"]


def estimate_block_s(
    gemms: Gemms, parameters: GemmParameters, rates: DeviceRates, *, compiled: bool = False
) -> PerGemm:
    """Time of each GEMM of a block. [s]; ``compiled`` as in fastest_s."""
    own = time_batches(gemms, parameters, rates) if parameters.batch_kernels is not None else None
    if own is not None and own.is_run.all():
        return own.time_s
    factor, _ = _alignment(gemms, parameters, rates)
    rate = _with_slow_rate(factor, gemms, parameters, rates)
    time_s = fastest_s(gemms, rate, parameters, rates, compiled=compiled)
    if parameters.slow_cases is not None:
        time_s = np.maximum(time_s, _slow_kernels_s(gemms, parameters, rates)[1])
    if own is not None:
        time_s = np.where(own.is_run, own.time_s, time_s)
    if parameters.start_growth is not None:
        time_s = time_s - parameters.start_s * parameters.start_growth.missing_share(gemms.m, gemms.batch)
    return time_s


def price_block(gemms: Gemms, parameters: GemmParameters, rates: DeviceRates) -> dict[str, PerGemm]:
    """Choose the fastest kernel for each GEMM of a block; fields of GemmPrice by name."""
    p = parameters
    factor, align = _alignment(gemms, p, rates)
    rate = _with_slow_rate(factor, gemms, p, rates)
    fastest = find_fastest(gemms, rate, p, rates)
    tile_m, tile_n, split_k = p.tile_m[fastest.tile], p.tile_n[fastest.tile], p.split_k[fastest.split]
    num_tiles = gemms.batch * np.ceil(gemms.m / tile_m) * np.ceil(gemms.n / tile_n) * split_k
    num_waves = np.ceil(num_tiles / rates.num_sms)
    time_s, compute_s = fastest.time_s, fastest.compute_s
    rate_share, slow_factor = np.ones_like(time_s), np.ones_like(time_s)
    if p.slow_cases is not None:
        narrow_s, slow_s = _slow_kernels_s(gemms, p, rates)
        rate_share, slow_factor = rate / factor, np.maximum(slow_s / time_s, 1.0)
        factor = np.where(narrow_s > time_s, factor / slow_factor, factor)
        compute_s = np.where(slow_factor > 1.0, slow_s, compute_s)
        time_s = np.maximum(time_s, slow_s)
    start_s = np.full_like(time_s, p.start_s)
    if p.start_growth is not None:
        missing_s = p.start_s * p.start_growth.missing_share(gemms.m, gemms.batch)
        start_s, time_s = start_s - missing_s, time_s - missing_s
    columns = {
        "time_s": time_s,
        "start_s": start_s,
        "compute_s": compute_s,
        "memory_s": fastest.memory_s,
        "tile_m": tile_m,
        "tile_n": tile_n,
        "split_k": split_k,
        "num_tiles": num_tiles,
        "num_waves": num_waves,
        "tile_efficiency": np.asarray(tile_efficiency(gemms.m, gemms.n, tile_m, tile_n)),
        "wave_efficiency": np.asarray(wave_efficiency(num_tiles, num_waves, rates.num_sms)),
        "alignment_bytes": align,
        "alignment_factor": factor,
        "rate_share": rate_share,
        "slow_factor": slow_factor,
    }
    return columns if p.batch_kernels is None else columns | _batch_columns(columns, gemms, p, rates)


def _batch_columns(
    columns: dict[str, PerGemm], gemms: Gemms, parameters: GemmParameters, rates: DeviceRates
) -> dict[str, PerGemm]:
    """Columns of the GEMMs that batch kernels run, with the other GEMMs unchanged."""
    own = time_batches(gemms, parameters, rates)
    if not own.is_run.any():
        return {}
    aligned = time_batches(gemms, parameters, rates, aligned=True)
    one = np.ones_like(own.time_s)
    found = {
        "time_s": own.time_s,
        "compute_s": own.compute_s,
        "memory_s": own.memory_s,
        "tile_m": own.tile_m,
        "tile_n": own.tile_n,
        "split_k": one,
        "num_tiles": own.num_tiles,
        "num_waves": own.num_waves,
        "tile_efficiency": np.asarray(tile_efficiency(gemms.m, gemms.n, own.tile_m, own.tile_n)),
        "wave_efficiency": np.asarray(wave_efficiency(own.num_tiles, own.num_waves, rates.num_sms)),
        # Time of the same sizes on the kernel for aligned ones, over the actual time.
        "alignment_factor": np.minimum(aligned.time_s / own.time_s, 1.0),
        "rate_share": one,
        "slow_factor": one,
    }
    return {name: np.where(own.is_run, value, columns[name]) for name, value in found.items()}


def _alignment(gemms: Gemms, parameters: GemmParameters, rates: DeviceRates) -> tuple[PerGemm, PerGemm]:
    return alignment_factor(gemms, rates.element_bits, parameters)


def _with_slow_rate(factor: PerGemm, gemms: Gemms, parameters: GemmParameters, rates: DeviceRates) -> PerGemm:
    """Rate factor of the alignment, reduced for long contractions and far pages."""
    if parameters.slow_cases is None:
        return factor
    return factor * rate_share(gemms.n, gemms.k, rates.element_bytes, parameters.slow_cases)


def _slow_kernels_s(gemms: Gemms, parameters: GemmParameters, rates: DeviceRates) -> tuple[PerGemm, PerGemm]:
    """Lower bounds of the time: narrow sizes without the start, and all slow kernels with it. [s]"""
    cases = parameters.slow_cases
    assert cases is not None
    peak_flops_per_s = rates.flops_per_s_per_sm * rates.num_sms
    small_s = np.maximum(
        small_floor_s(gemms, peak_flops_per_s, cases),
        idle_floor_s(gemms, rates.num_sms, peak_flops_per_s, cases),
    )
    if not cases.narrow:
        return np.zeros_like(small_s), small_s + parameters.start_s
    m, n, k, batch = gemms.sizes
    elements = batch * (k * (m + rates.stored_b_share * n) + parameters.write_ratio * m * n)
    traffic_s = elements * rates.element_bytes / (parameters.bandwidth_fraction * rates.bandwidth_bytes_per_s)
    narrow_s = narrow_floor_s(gemms, rates.element_bits, traffic_s, peak_flops_per_s, cases)
    return narrow_s, np.maximum(narrow_s, small_s) + parameters.start_s
