"""Time of fused attention kernels: tiles of queries against keys (prefill), and keys split over the device (decode).

Legend: b sequences, a query heads, a_kv key-value heads, g = a / a_kv, q query and c key tokens, d head width, SM one
multiprocessor, cycles at the boost clock. Prefill works on tiles of ``query_tile`` rows, one SM each:

    tile_s  = keys it visits x rows x [4 d / (tensor fraction x peak of one SM) + 1 / exponentials of one SM] + overhead
    compute = max(longest tile, waves x mean tile)              a causal tile visits the keys up to its last row
    time    = start + (compute^p + memory^p)^(1/p) + copy of new keys and values into the cache

The second term of a tile is the softmax: its exponentials do not run on the tensor cores and weigh twice as much at
d = 64 as at 128. Decode splits the keys of each head group until every SM has work, and streams them:

    chain   = waves x (block overhead + key tiles per split x time of a key tile)
    time    = start + (chain^p + memory^p)^(1/p) + combination of the splits

Assumes: sequences of one length; no dropout, bias or soft cap in the kernel.
Source: arXiv 2307.08691 (FlashAttention-2: tiles, split of work), 2407.08608 (FlashAttention-3: exponentials).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shapewright.errors import CalibrationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[np.float64]

# Compute time at which half of the power-limited slow-down is reached: clocks fall within about a millisecond. [s]
POWER_HALF_S = 1e-3
# Fewest steps over keys that are worth a part of their own in prefill.
FEWEST_KEY_TILES_PER_SPLIT = 4.0
# How sharp the edge of the last-level cache is; 8 falls from 1 to 0 between 0.75 and 1.35 of its reach.
_CACHE_EDGE_POWER = 8.0
# Head widths are multiples of this in every kernel of flash-attn; others are padded before the call. [element]
_HEAD_MULTIPLE = 8.0
# Rounding in floating division must not open another tile.
_CEIL_SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of attention calls as float arrays of one shape; ``causal`` holds for all of them.

    Attributes:
        batch_size: Sequences.
        query_len: Query tokens per sequence.
        kv_len: Key tokens per sequence.
        num_heads: Query heads.
        num_kv_heads: Key-value heads.
        head_dim: Width of query and key heads. [element]
        v_head_dim: Width of value heads. [element]
        window_size: Latest keys a query sees; 0 means all.
        causal: Whether queries see only keys up to their position.
        element_bytes: Width of queries and outputs. [byte]
        kv_element_bytes: Width of keys and values in memory. [byte]
        values_in_keys: Whether values are part of the keys and need no reading of their own.
    """

    batch_size: Array
    query_len: Array
    kv_len: Array
    num_heads: Array
    num_kv_heads: Array
    head_dim: Array
    v_head_dim: Array
    window_size: Array
    causal: bool
    element_bytes: float
    kv_element_bytes: float
    values_in_keys: bool = False

    @property
    def kv_width(self) -> Array:
        """Elements of one key and its value in memory. [element]"""
        return self.head_dim if self.values_in_keys else self.head_dim + self.v_head_dim

    @property
    def kv_bytes(self) -> Array:
        """Keys and values of all sequences and heads. [byte]"""
        return self.batch_size * self.kv_len * self.num_kv_heads * self.kv_width * self.kv_element_bytes

    @property
    def q_and_out_bytes(self) -> Array:
        """Queries and outputs. [byte]"""
        width = (self.head_dim + self.v_head_dim) * self.element_bytes
        return self.batch_size * self.query_len * self.num_heads * width


@dataclass(frozen=True, kw_only=True)
class AttentionRates:
    """Numbers of a data sheet that attention needs.

    Attributes:
        flops_per_s: Dense rate of the device for the arithmetic's dtype. [flop/s]
        bandwidth_bytes_per_s: Memory bandwidth. [byte/s]
        num_sms: Multiprocessors.
        clock_hz: Boost clock. [Hz]
        l2_bytes: Last-level cache; 0 if unknown. [byte]
    """

    flops_per_s: float
    bandwidth_bytes_per_s: float
    num_sms: float
    clock_hz: float
    l2_bytes: float


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
        tensor_fraction: Share of the tensor peak, by head width.
        exponentials_per_sm_per_clock: Rate of the softmax.
        tile_overhead_cycles: Prologue and epilogue of a tile.
        wave_tail_fraction: Share of the last wave's emptiness that is lost.
        power_drop_fraction: Share of the rate lost under power in long kernels.
        bandwidth_fraction: Achieved share of memory bandwidth.
        query_passes: Traffic of queries and outputs, in units of one read and one write.
        cache_write_passes: Cost of the copy into the cache, in units of its one read and one write.
        cache_write_token_cycles: Cost of each token of that copy, which runs one block per token.
        cache_write_start_s: Part of start_s that belongs to that copy. [s]
        overlap_power: The exponent p.
        l2_reach_fraction: Footprint that still enjoys the last-level cache, as a fraction of it.
        l2_bytes_per_sm_clock: Rate of such traffic, per SM of the device and clock. [byte]
        window_extra_key_tiles: Key tiles visited beyond a window's own.
        window_start_s: What a call with a window costs more, such as building its lists of keys. [s]
        masked_key_work: Cost of a key before the window, in units of one inside: 0 where a kernel starts at the
            window, more where it walks over all keys and skips the products.
        backward_rate_fraction: Rate of the backward kernel relative to the forward one.
        unaligned_passes: Copies that pad a head width which is no multiple of 8, in units of one read and one write of
            queries, keys, values and outputs.
    """

    start_s: float
    query_tile: float
    key_tile: float
    packs_query_heads: bool
    splits_keys: bool
    kernel_head_dims: tuple[float, ...]
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


@dataclass(frozen=True, kw_only=True)
class DecodeParameters:
    """Fitted constants of a decode kernel.

    Attributes:
        start_s: Fixed cost. [s]
        query_tile: Query rows of a block; the heads of a group share it where they are packed. [element]
        key_tile_elements: Elements of one key tile of one head: its keys are this over the head width. [element]
        packs_always: Whether heads of a group are packed, and keys split, also without groups or under a window.
        key_tiles_per_split: Fewest key tiles worth a split of their own.
        most_splits: Upper bound of splits.
        fill_waves: Waves that the splits aim to fill.
        sm_bytes_per_clock: Most that one SM can draw. [byte]
        key_tile_cycles: Latency of a key tile that lies in the last-level cache.
        dram_tile_cycles: What a key tile from memory takes longer.
        row_work: Arithmetic of a key tile, in units of its FLOPs at the peak.
        block_cycles: Overhead of a block.
        block_head_cycles: Overhead of a block per 128 elements of head width.
        wave_tail_fraction: Share of the last wave's emptiness that is lost.
        sequence_s: Cost per sequence of the batch. [s]
        cache_write_passes: Cost of writing the new token into the cache, in units of its one read and one write.
        reorder_s: Copies that packing needs with several key-value heads and sequences. [s]
        query_passes: Traffic of queries and outputs, in units of one read and one write.
        partial_passes: Traffic of the splits' partial outputs, in units of one write and one read in fp32.
        bandwidth_fraction: Achieved share of memory bandwidth.
        overlap_power: The exponent p.
        combine_s: Combination of the splits. [s]
        l2_reach_fraction: Footprint that still enjoys the last-level cache, as a fraction of it.
        l2_bytes_per_sm_clock: Rate of such traffic, per SM of the device and clock. [byte]
        cache_write_start_s: Part of start_s that belongs to writing the new token into the cache. [s]
    """

    start_s: float
    query_tile: float
    key_tile_elements: float
    packs_always: bool
    key_tiles_per_split: float
    most_splits: float
    fill_waves: float
    sm_bytes_per_clock: float
    key_tile_cycles: float
    dram_tile_cycles: float
    row_work: float
    block_cycles: float
    block_head_cycles: float
    wave_tail_fraction: float
    sequence_s: float
    cache_write_passes: float
    reorder_s: float
    query_passes: float
    partial_passes: float
    bandwidth_fraction: float
    overlap_power: float
    combine_s: float
    l2_reach_fraction: float
    l2_bytes_per_sm_clock: float
    cache_write_start_s: float


_Parameters = TypeVar("_Parameters", PrefillParameters, DecodeParameters)


def read_parameters(kind: type[_Parameters], raw: Mapping[str, Any], record_id: str) -> _Parameters:
    """Take one kernel's constants out of a record.

    Raises:
        CalibrationError: a constant is missing.
    """
    missing = [field.name for field in fields(kind) if field.name not in raw and field.default is MISSING]
    if missing:
        raise CalibrationError(
            f"attention record {record_id} lacks {', '.join(missing)}; run scripts/calibrate_attention.py"
        )
    return kind(**{field.name: raw[field.name] for field in fields(kind) if field.name in raw})


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """Parts of a kernel's time. [s]"""

    total_s: Array
    compute_s: Array
    memory_s: Array
    start_s: Array


def estimate_prefill(
    shape: AttentionShape, rates: AttentionRates, p: PrefillParameters, *, writes_cache: bool, is_backward: bool = False
) -> KernelTime:
    """Time of attention of many queries against the keys of their sequence.

    Args:
        shape: The calls.
        rates: The device.
        p: The kernel.
        writes_cache: Whether the copy of new keys and values into the cache belongs to the call.
        is_backward: Whether this is the gradient: five products instead of two, at backward_rate_fraction, and
            twice the traffic.
    """
    head_dim = (pad_head(shape.head_dim, p.kernel_head_dims) + pad_head(shape.v_head_dim, p.kernel_head_dims)) / 2.0
    group = shape.num_heads / shape.num_kv_heads
    compute_s = _tiles_s(shape, head_dim, np.ones_like(group), rates, p)
    if p.packs_query_heads:
        compute_s = np.minimum(compute_s, _tiles_s(shape, head_dim, group, rates, p))
    sustained = 1.0 - p.power_drop_fraction * compute_s / (compute_s + POWER_HALF_S)
    compute_s = compute_s / sustained
    directions = 2.0 if is_backward else 1.0
    if is_backward:
        widths = shape.head_dim + shape.v_head_dim
        compute_s = compute_s * (3.0 * shape.head_dim + 2.0 * shape.v_head_dim) / widths / p.backward_rate_fraction

    # A window's keys beyond every query's reach are never read.
    reach = np.where(shape.window_size > 0, np.minimum(shape.kv_len, shape.window_size + shape.query_len), shape.kv_len)
    read_kv_bytes = shape.kv_bytes * reach / shape.kv_len
    moved_bytes = directions * (shape.q_and_out_bytes * p.query_passes + read_kv_bytes)
    new_bytes = shape.kv_bytes * np.minimum(shape.query_len / shape.kv_len, 1.0)
    copied_bytes = new_bytes * (1.0 + shape.element_bytes / shape.kv_element_bytes)
    resident = _resident_fraction(shape.q_and_out_bytes + read_kv_bytes + copied_bytes, rates, p)
    seconds_per_byte = _traffic_factor(resident, rates, p) / (rates.bandwidth_bytes_per_s * p.bandwidth_fraction)
    memory_s = moved_bytes * seconds_per_byte
    new_tokens = shape.batch_size * np.minimum(shape.query_len, shape.kv_len)
    copy_s = copied_bytes * p.cache_write_passes * seconds_per_byte
    copy_s = copy_s + new_tokens * p.cache_write_token_cycles / (rates.clock_hz * rates.num_sms)
    copy_s = copy_s if writes_cache else np.zeros_like(copy_s)
    if p.unaligned_passes > 0.0:
        padded_bytes = 2.0 * (shape.q_and_out_bytes + shape.kv_bytes) * p.unaligned_passes
        is_padded = (shape.head_dim % _HEAD_MULTIPLE != 0.0) | (shape.v_head_dim % _HEAD_MULTIPLE != 0.0)
        copy_s = copy_s + np.where(is_padded, padded_bytes / rates.bandwidth_bytes_per_s, 0.0)
    start_s = np.full_like(memory_s, p.start_s if writes_cache else p.start_s - p.cache_write_start_s)
    start_s = start_s + np.where(shape.window_size > 0, p.window_start_s, 0.0)
    total_s = start_s + _join(compute_s, memory_s, p.overlap_power) + copy_s
    return KernelTime(total_s=total_s, compute_s=compute_s, memory_s=memory_s + copy_s, start_s=start_s)


def _tiles_s(
    shape: AttentionShape, head_dim: Array, packed: Array, rates: AttentionRates, p: PrefillParameters
) -> Array:
    """Time that the tiles take, when ``packed`` query heads share one."""
    step = p.query_tile / packed  # query positions of one tile
    num_steps = np.ceil(shape.query_len / step - _CEIL_SLACK)
    all_keys = np.ceil(shape.kv_len / p.key_tile) * p.key_tile
    reach = (np.ceil((shape.window_size + step) / p.key_tile) + p.window_extra_key_tiles) * p.key_tile
    most_keys = np.where(shape.window_size > 0, np.minimum(all_keys, reach), all_keys)
    visited, longest = _visit_keys(shape, step, most_keys, p)
    if p.masked_key_work > 0.0 and np.any(most_keys < all_keys):
        walked, longest_walk = _visit_keys(shape, step, all_keys, p)
        visited = visited + p.masked_key_work * (walked - visited)
        longest = longest + p.masked_key_work * (longest_walk - longest)

    widths = np.array([float(width) for width in p.tensor_fraction])
    fraction = np.interp(np.log(head_dim), np.log(widths), np.array(list(p.tensor_fraction.values())))
    per_score_s = 4.0 * head_dim / (fraction * rates.flops_per_s / rates.num_sms)
    per_score_s = per_score_s + 1.0 / (p.exponentials_per_sm_per_clock * rates.clock_hz)
    overhead_s = np.full_like(visited, p.tile_overhead_cycles / rates.clock_hz)
    waves = shape.batch_size * shape.num_heads / packed * num_steps / rates.num_sms
    if p.splits_keys:
        # Idle SMs take part of each tile's keys; joining the parts costs another epilogue.
        splits = np.minimum(np.floor(1.0 / waves), longest / (FEWEST_KEY_TILES_PER_SPLIT * p.key_tile))
        splits = np.maximum(splits, 1.0)
        longest, visited, waves = longest / splits, visited / splits, waves * splits
        overhead_s = overhead_s * np.where(splits > 1.0, 2.0, 1.0)
    mean_tile_s = visited / num_steps * p.query_tile * per_score_s + overhead_s
    longest_tile_s = longest * p.query_tile * per_score_s + overhead_s
    tiles_s: Array = np.maximum(longest_tile_s, _soften(waves, p.wave_tail_fraction) * mean_tile_s)
    return tiles_s


def _visit_keys(shape: AttentionShape, step: Array, most_keys: Array, p: PrefillParameters) -> tuple[Array, Array]:
    """Keys that the tiles of one head visit together, and those of the longest tile.

    Args:
        shape: The calls.
        step: Query positions of one tile.
        most_keys: Keys that one tile can visit at most.
        p: The kernel.
    """
    num_steps = np.ceil(shape.query_len / step - _CEIL_SLACK)
    if shape.causal:
        # Tile i (from 0) ends at query (i + 1) step, which sees that many keys and those before the first query;
        # the sum over tiles grows until most_keys is reached.
        before = np.maximum(shape.kv_len - shape.query_len, 0.0)
        num_growing = np.clip(np.floor((most_keys - before) / step), 0.0, num_steps)
        visited = step * num_growing * (num_growing + 1.0) / 2.0 + num_growing * before
        visited = visited + (num_steps - num_growing) * most_keys
        longest = np.minimum(most_keys, np.maximum(num_steps * step + before, p.key_tile))
    else:
        visited, longest = num_steps * most_keys, most_keys
    return np.maximum(visited, num_steps * np.minimum(p.key_tile, most_keys)), longest


def estimate_decode(
    shape: AttentionShape,
    rates: AttentionRates,
    p: DecodeParameters,
    *,
    writes_cache: bool,
    hot_cache: bool,
    head_dims: tuple[float, ...] = (),
) -> KernelTime:
    """Time of attention of one (or very few) new tokens per sequence against its cache.

    Args:
        shape: The calls.
        rates: The device.
        p: The kernel.
        writes_cache: Whether the copy of new keys and values into the cache belongs to the call.
        hot_cache: Whether a short cache may still lie in the last-level cache from the previous run.
        head_dims: Head widths the kernel is compiled for, ascending; empty where all of the shape's are. A tile of
            another width fills the place of the next one and takes its work, though memory sends only what there is.
    """
    group = shape.num_heads / shape.num_kv_heads
    windowed = (shape.window_size > 0) & (shape.window_size < shape.kv_len)
    seen = np.where(windowed, shape.window_size, shape.kv_len)
    packs = np.full(np.shape(group), True) if p.packs_always else (group > 1.0) & (shape.window_size == 0)
    rows = shape.query_len * np.where(packs, group, 1.0)
    heads = np.where(packs, shape.num_kv_heads, shape.num_heads)
    blocks = shape.batch_size * heads * np.ceil(rows / p.query_tile)

    mean_dim = (pad_head(shape.head_dim, head_dims) + pad_head(shape.v_head_dim, head_dims)) / 2.0
    keys_per_tile = np.clip(p.key_tile_elements / mean_dim, 32.0, 256.0)
    # A window rarely starts at a tile's edge.
    num_key_tiles = np.ceil(seen / keys_per_tile) + np.where(windowed, 1.0, 0.0)
    room = np.minimum(rates.num_sms * p.fill_waves / blocks, num_key_tiles / p.key_tiles_per_split)
    splits = np.where(packs, np.maximum(np.floor(np.minimum(room, p.most_splits)), 1.0), 1.0)

    sm_bytes_per_s = p.sm_bytes_per_clock * rates.clock_hz
    sm_flops_per_s = rates.flops_per_s / rates.num_sms
    tile_kv_bytes = keys_per_tile * shape.kv_width * shape.kv_element_bytes
    tile_flops = keys_per_tile * np.minimum(rows, p.query_tile) * 4.0 * mean_dim
    read_bytes = shape.kv_bytes * seen / shape.kv_len + shape.q_and_out_bytes * p.query_passes
    resident = _resident_fraction(read_bytes, rates, p) if hot_cache else np.zeros_like(read_bytes)
    latency_cycles = p.key_tile_cycles + p.dram_tile_cycles * (1.0 - resident)
    key_tile_s = tile_kv_bytes / sm_bytes_per_s + latency_cycles / rates.clock_hz
    key_tile_work_s = p.row_work * tile_flops / sm_flops_per_s
    key_tile_s = key_tile_s + key_tile_work_s
    block_s = (p.block_cycles + p.block_head_cycles * mean_dim / 128.0) / rates.clock_hz
    waves = _soften(np.maximum(blocks * splits / rates.num_sms, 1.0), p.wave_tail_fraction)
    chain_s = waves * (block_s + num_key_tiles / splits * key_tile_s)

    partial_rows = shape.batch_size * shape.num_heads * shape.query_len * np.where(splits > 1.0, splits, 0.0)
    partial_bytes = partial_rows * shape.v_head_dim * 8.0  # fp32, written and read
    memory_s = read_bytes * _traffic_factor(resident, rates, p) + partial_bytes * p.partial_passes
    memory_s = memory_s / (rates.bandwidth_bytes_per_s * p.bandwidth_fraction)
    fixed_s = np.where(splits > 1.0, p.combine_s, 0.0) + shape.batch_size * p.sequence_s
    reorders = packs & (group > 1.0) & (shape.num_kv_heads > 1.0) & (shape.batch_size > 1.0)
    fixed_s = fixed_s + np.where(reorders, p.reorder_s, 0.0)
    if writes_cache:
        new_tokens = shape.batch_size * shape.query_len * shape.num_kv_heads * shape.kv_width
        copied_bytes = new_tokens * (shape.element_bytes + shape.kv_element_bytes)
        fixed_s = fixed_s + copied_bytes * p.cache_write_passes / rates.bandwidth_bytes_per_s
    start_s = np.full_like(memory_s, p.start_s if writes_cache else p.start_s - p.cache_write_start_s)
    total_s = start_s + fixed_s + _join(chain_s, memory_s, p.overlap_power)
    # Of the chain, arithmetic is the smaller part: the rest waits for keys and values, as the whole device does.
    work_s = waves * num_key_tiles / splits * key_tile_work_s
    feed_s = np.maximum(memory_s, chain_s - work_s)
    return KernelTime(total_s=total_s, compute_s=work_s, memory_s=feed_s, start_s=start_s + fixed_s)


def pad_head(head_dim: Array, head_dims: tuple[float, ...]) -> Array:
    """Head width that the kernel computes: the next of head_dims, or the width itself beyond the last."""
    if not head_dims:
        return head_dim
    compiled = np.asarray(head_dims, dtype=float)
    index = np.minimum(np.searchsorted(compiled, head_dim), len(compiled) - 1)
    padded: Array = np.maximum(compiled[index], head_dim)
    return padded


def _soften(waves: Array, tail_fraction: float) -> Array:
    """Whole waves, less the part of the last one that is not lost."""
    return waves + tail_fraction * (np.ceil(waves - _CEIL_SLACK) - waves)


def _join(compute_s: Array, memory_s: Array, power: float) -> Array:
    """Two overlapping parts: their sum at power 1, the longer one as the power grows."""
    worst = np.maximum(compute_s, memory_s)
    joined: Array = worst * ((compute_s / worst) ** power + (memory_s / worst) ** power) ** (1.0 / power)
    return joined


def _resident_fraction(footprint_bytes: Array, rates: AttentionRates, p: PrefillParameters | DecodeParameters) -> Array:
    """Share of traffic that the last-level cache serves: 1 for a small footprint, 0 beyond the cache's reach."""
    reach_bytes = max(rates.l2_bytes * p.l2_reach_fraction, 1.0)
    share: Array = 1.0 / (1.0 + np.minimum(footprint_bytes / reach_bytes, 1e6) ** _CACHE_EDGE_POWER)
    return share


def _traffic_factor(resident: Array, rates: AttentionRates, p: PrefillParameters | DecodeParameters) -> Array:
    """Factor on traffic time, below 1 where the last-level cache serves it faster than memory."""
    cache_bytes_per_s = p.l2_bytes_per_sm_clock * rates.num_sms * rates.clock_hz
    speedup = max(cache_bytes_per_s / rates.bandwidth_bytes_per_s, 1.0)
    factor: Array = 1.0 - resident * (1.0 - 1.0 / speedup)
    return factor
