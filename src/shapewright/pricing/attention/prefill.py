"""Time of fused attention over many queries: tiles of queries over the keys that their mask leaves.

Tiles have ``query_tile`` rows, one SM each; letters as in attention.kernels:

    tile_s    = keys visited x rows x [4 d / (tensor fraction x peak of one SM) + 1 / exponentials/s of one SM] +
    overhead compute_s = max(longest tile, waves x mean tile)            a causal tile visits the keys up to its last
    row time_s    = start + (compute^p + memory^p)^(1/p) + copy of new keys and values into the cache

The second term of a tile is the softmax: its exponentials do not run on the tensor cores and weigh twice as much at d =
64 as at 128.

Assumes: sequences of one length; no dropout, bias or soft cap in the kernel.
Source: arXiv 2307.08691 (FlashAttention-2: tiles, work partitioning), 2407.08608 (FlashAttention-3: exponentials).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.records import dataclass
from shapewright.pricing.attention.kernels import (
    CEIL_SLACK,
    AttentionRates,
    AttentionShape,
    KernelTime,
    count_effective_waves,
    join,
    pad_head,
    resident_fraction,
    traffic_factor,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    PerCall = Float[np.ndarray, "*calls"]
    PerPacking = Float[np.ndarray, "packings *calls"]
    AnyShape = Float[np.ndarray, "..."]
    CallMask = Bool[np.ndarray, "*calls"]

# Compute time at which half of the power loss is reached: clocks drop within about a millisecond. [s]
POWER_HALF_S = 1e-3
# Fewest key tiles per part when prefill splits keys over idle SMs.
FEWEST_KEY_TILES_PER_SPLIT = 4.0
# Multiple that head widths are padded to before a call of any flash-attn kernel. [element]
_HEAD_MULTIPLE = 8.0


@dataclass(frozen=True, kw_only=True)
class PrefillParameters:
    """Fitted constants of a prefill kernel.

    Attributes:
        start_s: Fixed cost. [s]
        query_tile: Rows of a tile. [element]
        key_tile: Keys of a step. [element]
        packs_query_heads: Whether the query heads of one key-value head may share a tile.
        splits_keys: Whether idle SMs take part of a tile's keys, where tiles do not fill the device.
        kernel_head_dims: Head widths the kernel is compiled for, ascending; others are padded to the next.
        tensor_fraction: Fraction of the tensor peak, by head width.
        exponentials_per_sm_per_clock: Rate of the softmax.
        tile_overhead_cycles: Prologue and epilogue of a tile.
        wave_tail_fraction: Fraction of an incomplete last wave that is lost.
        power_drop_fraction: Fraction of the rate lost under power in long kernels.
        bandwidth_fraction: Achieved fraction of memory bandwidth.
        query_passes: Traffic of queries and outputs, in units of one read and one write.
        cache_write_passes: Cost of the copy into the cache, in units of its one read and one write.
        cache_write_token_cycles: Cost per token of that copy, which runs one block per token.
        cache_write_start_s: Part of start_s that belongs to that copy. [s]
        overlap_power: The exponent p.
        l2_reach_fraction: Footprint that the last-level cache still serves, as a fraction of its size.
        l2_bytes_per_sm_clock: Rate of such traffic, per SM of the device and clock. [byte]
        window_extra_key_tiles: Key tiles visited beyond a window's own.
        window_start_s: Added fixed cost of a call with a window, such as building its lists of keys. [s]
        masked_key_work: Cost of a key before the window, in units of one inside: 0 where a kernel starts at the window,
            more where it iterates over all keys and skips the GEMMs.
        backward_rate_fraction: Rate of the backward kernel relative to the forward one.
        unaligned_passes: Copies that pad a head width to a multiple of 8, in units of one read and one write of
            queries, keys, values and outputs.
    """

    start_s: float
    query_tile: float
    key_tile: float
    packs_query_heads: bool
    splits_keys: bool
    kernel_head_dims: Sequence[float]
    tensor_fraction: Mapping[str, float]
    exponentials_per_sm_per_clock: float
    tile_overhead_cycles: float
    wave_tail_fraction: float
    power_drop_fraction: float
    bandwidth_fraction: float
    query_passes: float
    cache_write_passes: float
    cache_write_token_cycles: float
    cache_write_start_s: float
    overlap_power: float
    l2_reach_fraction: float
    l2_bytes_per_sm_clock: float
    window_extra_key_tiles: float
    window_start_s: float
    masked_key_work: float
    backward_rate_fraction: float
    unaligned_passes: float = 0.0

    @cached_property
    def rate_knots(self) -> tuple[Float[np.ndarray, " widths"], Float[np.ndarray, " widths"]]:
        """Logarithms of the measured head widths, and the fraction of the tensor peak at each. [widths]"""
        widths = np.array([float(width) for width in self.tensor_fraction])
        return np.log(widths), np.array(list(self.tensor_fraction.values()))


def estimate_prefill(
    shape: AttentionShape,
    rates: AttentionRates,
    p: PrefillParameters,
    *,
    writes_cache: bool,
    is_backward: bool | CallMask = False,
) -> KernelTime:
    """Time of attention of many queries over the keys of their sequence.

    Args:
        p: The kernel.
        writes_cache: Whether the copy of new keys and values into the cache belongs to the call.
        is_backward: Whether this is the gradient, one for all or one for each: five GEMMs instead of two, at
            backward_rate_fraction, and twice the traffic.
    """
    group = shape.num_heads / shape.num_kv_heads
    packings = np.ones((1 + p.packs_query_heads, *group.shape))
    packings[-1] = group if p.packs_query_heads else 1.0
    compute_s = _tiles_s(shape, packings, rates, p).min(axis=0)
    compute_s = compute_s / (1.0 - p.power_drop_fraction * compute_s / (compute_s + POWER_HALF_S))
    if np.any(is_backward):
        more_work = (3.0 * shape.head_dim + 2.0 * shape.v_head_dim) / (shape.head_dim + shape.v_head_dim)
        compute_s = compute_s * np.where(is_backward, more_work / p.backward_rate_fraction, 1.0)

    q_and_out_bytes, kv_bytes = shape.q_and_out_bytes, shape.kv_bytes
    # Keys outside the window of every query are not read.
    reach = np.where(shape.window_size > 0, np.minimum(shape.kv_len, shape.window_size + shape.query_len), shape.kv_len)
    read_kv_bytes = kv_bytes * reach / shape.kv_len
    moved_bytes = (1.0 + is_backward) * (q_and_out_bytes * p.query_passes + read_kv_bytes)
    new_bytes = kv_bytes * np.minimum(shape.query_len / shape.kv_len, 1.0)
    copied_bytes = new_bytes * (1.0 + shape.element_bytes / shape.kv_element_bytes)
    resident = resident_fraction(q_and_out_bytes + read_kv_bytes + copied_bytes, rates, p)
    seconds_per_byte = traffic_factor(resident, rates, p) / (rates.bandwidth_bytes_per_s * p.bandwidth_fraction)
    memory_s = moved_bytes * seconds_per_byte
    copy_s = np.zeros_like(memory_s)
    if writes_cache:
        new_tokens = shape.batch_size * np.minimum(shape.query_len, shape.kv_len)
        copy_s = copied_bytes * p.cache_write_passes * seconds_per_byte
        copy_s = copy_s + new_tokens * p.cache_write_token_cycles / (rates.clock_hz * rates.num_sms)
    if p.unaligned_passes > 0.0:
        padded_bytes = 2.0 * (q_and_out_bytes + kv_bytes) * p.unaligned_passes
        is_padded = (shape.head_dim % _HEAD_MULTIPLE != 0.0) | (shape.v_head_dim % _HEAD_MULTIPLE != 0.0)
        copy_s = copy_s + np.where(is_padded, padded_bytes / rates.bandwidth_bytes_per_s, 0.0)
    plain_start_s = p.start_s if writes_cache else p.start_s - p.cache_write_start_s
    start_s = plain_start_s + np.where(shape.window_size > 0, p.window_start_s, 0.0)
    total_s = start_s + join(compute_s, memory_s, p.overlap_power) + copy_s
    return KernelTime(total_s=total_s, compute_s=compute_s, memory_s=memory_s + copy_s, start_s=start_s)


def _per_score_s(shape: AttentionShape, rates: AttentionRates, p: PrefillParameters) -> PerCall:
    """Time of one score of a query and a key: both GEMMs at the kernel's head width, and the exponential. [s]"""
    head_dim = (pad_head(shape.head_dim, p.kernel_head_dims) + pad_head(shape.v_head_dim, p.kernel_head_dims)) / 2.0
    fraction = np.interp(np.log(head_dim), *p.rate_knots)
    gemms_s = 4.0 * head_dim / (fraction * rates.flops_per_s / rates.num_sms)
    per_score_s: PerCall = gemms_s + 1.0 / (p.exponentials_per_sm_per_clock * rates.clock_hz)
    return per_score_s


def _tiles_s(shape: AttentionShape, packed: PerPacking, rates: AttentionRates, p: PrefillParameters) -> PerPacking:
    """Time of all tiles when ``packed`` query heads share one. [s], [packings, *calls] as ``packed``"""
    step = p.query_tile / packed  # query positions of one tile
    num_steps = np.ceil(shape.query_len / step - CEIL_SLACK)
    all_keys = np.ceil(shape.kv_len / p.key_tile) * p.key_tile
    most_keys = all_keys
    if (shape.window_size > 0).any():
        reach = (np.ceil((shape.window_size + step) / p.key_tile) + p.window_extra_key_tiles) * p.key_tile
        most_keys = np.where(shape.window_size > 0, np.minimum(all_keys, reach), all_keys)
    visited, longest = _visit_keys(shape, step, num_steps, most_keys, p)
    if p.masked_key_work > 0.0 and (most_keys < all_keys).any():
        walked, longest_walk = _visit_keys(shape, step, num_steps, all_keys, p)
        visited = visited + p.masked_key_work * (walked - visited)
        longest = longest + p.masked_key_work * (longest_walk - longest)

    per_score_s = _per_score_s(shape, rates, p)
    overhead_s: AnyShape | float = p.tile_overhead_cycles / rates.clock_hz
    waves = shape.batch_size * shape.num_heads / packed * num_steps / rates.num_sms
    if p.splits_keys:
        # Idle SMs take part of each tile's keys; combining the parts costs another epilogue.
        splits = np.minimum(np.floor(1.0 / waves), longest / (FEWEST_KEY_TILES_PER_SPLIT * p.key_tile))
        splits = np.maximum(splits, 1.0)
        longest, visited, waves = longest / splits, visited / splits, waves * splits
        overhead_s = overhead_s * np.where(splits > 1.0, 2.0, 1.0)
    mean_tile_s = visited / num_steps * p.query_tile * per_score_s + overhead_s
    longest_tile_s = longest * p.query_tile * per_score_s + overhead_s
    tiles_s: PerPacking = np.maximum(longest_tile_s, count_effective_waves(waves, p.wave_tail_fraction) * mean_tile_s)
    return tiles_s


def _visit_keys(
    shape: AttentionShape, step: PerPacking, num_steps: PerPacking, most_keys: AnyShape, p: PrefillParameters
) -> tuple[AnyShape, AnyShape]:
    """Keys that all tiles of one head visit, and those of the longest tile.

    Args:
        step: Query positions of one tile.
        num_steps: Tiles of one head.
        most_keys: Upper bound of keys that one tile visits.
        p: The kernel.
    """
    if shape.causal:
        # Tile i (from 0) ends at query (i + 1) step, which attends to that many keys and those before the first query;
        # the sum over tiles grows until most_keys is reached.
        before = np.maximum(shape.kv_len - shape.query_len, 0.0)
        num_growing = np.minimum(np.maximum(np.floor((most_keys - before) / step), 0.0), num_steps)
        visited = step * num_growing * (num_growing + 1.0) / 2.0 + num_growing * before
        visited = visited + (num_steps - num_growing) * most_keys
        longest = np.minimum(most_keys, np.maximum(num_steps * step + before, p.key_tile))
    else:
        visited, longest = num_steps * most_keys, most_keys
    return np.maximum(visited, num_steps * np.minimum(p.key_tile, most_keys)), longest
