"""Time of fused attention of one new token per sequence: the cached keys are split over the device's SMs.

Letters as in attention.kernels. The keys of each head group are split until every SM has work, and streamed:

    chain_s = rounds x (block overhead + key tiles per split x time of a key tile)
    time_s  = start + (chain^p + memory^p)^(1/p) + combination of the splits + plan of the splits

Blocks on the same SM hide each other's latency and share its rates: c of them take one round, in which a key tile takes
its latency once, and its feed and arithmetic c times.

Assumes: sequences of one length; no bias or soft cap in the kernel.
Source: arXiv 2307.08691 (FlashAttention-2: split of keys).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.core.records import dataclass
from shapewright.pricing.attention.kernels import (
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
    from collections.abc import Sequence

    from jaxtyping import Bool, Float

    PerCall = Float[np.ndarray, "*calls"]
    CallMask = Bool[np.ndarray, "*calls"]

# Largest batch for which flash-attn plans the splits in a separate kernel (31 sequences per warp, 32 warps). Source:
# its hopper/flash_api.cpp, PREPARE_VARLEN_MAX_BATCHES_1CTA.
MOST_PLANNED_SEQUENCES = 992.0


@dataclass(frozen=True, kw_only=True)
class DecodeParameters:
    """Fitted constants of a decode kernel.

    Attributes:
        start_s: Fixed cost. [s]
        query_tile: Query rows of a block; the heads of a group share it where they are packed. [element]
        key_tile_elements: Elements of one key tile of one head; its number of keys is this over the head width.
            [element]
        packs_always: Whether heads of a group are packed, and keys split, also without groups or under a window.
        key_tiles_per_split: Fewest key tiles of a split.
        most_splits: Upper bound of splits.
        fill_waves: Waves that the splits aim to fill.
        sm_bytes_per_clock: Largest load rate of one SM. [byte]
        key_tile_cycles: Latency of a key tile in the last-level cache.
        dram_tile_cycles: Added latency of a key tile in memory.
        row_work: Arithmetic of a key tile, in units of its FLOPs at the peak.
        block_cycles: Overhead of a block.
        block_head_cycles: Overhead of a block per 128 elements of head width.
        wave_tail_fraction: Fraction of an incomplete last wave that is lost.
        sequence_s: Cost per sequence of the batch. [s]
        cache_write_passes: Cost of writing the new token into the cache, in units of its one read and one write.
        reorder_s: Copies that packing needs with several key-value heads and sequences. [s]
        query_passes: Traffic of queries and outputs, in units of one read and one write.
        partial_passes: Traffic of the splits' partial outputs, in units of one write and one read in fp32.
        bandwidth_fraction: Achieved fraction of memory bandwidth.
        overlap_power: The exponent p.
        combine_s: Combination of the splits. [s]
        l2_reach_fraction: Footprint that the last-level cache still serves, as a fraction of its size.
        l2_bytes_per_sm_clock: Rate of such traffic, per SM of the device and clock. [byte]
        cache_write_start_s: Part of start_s that belongs to writing the new token into the cache. [s]
        resident_blocks: Most blocks that one SM runs concurrently.
        planned_sequence_s: Cost per sequence of planning splits, in batches that are planned. [s]
        planned_pair_s: Cost per pair of sequences: each block searches its sequence among all of them. [s]
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
    resident_blocks: float = 1.0
    planned_sequence_s: float = 0.0
    planned_pair_s: float = 0.0


def estimate_decode(
    shape: AttentionShape,
    rates: AttentionRates,
    p: DecodeParameters,
    *,
    writes_cache: bool,
    hot_cache: bool,
    head_dims: Sequence[float] = (),
) -> KernelTime:
    """Time of attention of one (or very few) new tokens per sequence over its cache.

    Args:
        p: The kernel.
        writes_cache: Whether the copy of new keys and values into the cache belongs to the call.
        hot_cache: Whether a short cache may still lie in the last-level cache from the previous run.
        head_dims: Head widths the kernel is compiled for, ascending; empty where all of the shape's are. A tile of
            another width takes the work of the next compiled one, but its own memory traffic.
    """
    parts = _split_keys(shape, rates, p, head_dims)
    sm_bytes_per_s = p.sm_bytes_per_clock * rates.clock_hz
    sm_flops_per_s = rates.flops_per_s / rates.num_sms
    tile_kv_bytes = parts.keys_per_tile * shape.kv_width * shape.kv_element_bytes
    tile_flops = parts.keys_per_tile * np.minimum(parts.rows, p.query_tile) * 4.0 * parts.mean_dim
    read_bytes = shape.kv_bytes * parts.seen / shape.kv_len + shape.q_and_out_bytes * p.query_passes
    resident = resident_fraction(read_bytes, rates, p) if hot_cache else np.zeros_like(read_bytes)
    latency_cycles = p.key_tile_cycles + p.dram_tile_cycles * (1.0 - resident)
    blocks_per_sm = np.maximum(parts.blocks * parts.splits / rates.num_sms, 1.0)
    side_by_side = np.minimum(count_effective_waves(blocks_per_sm, p.wave_tail_fraction), p.resident_blocks)
    rounds = count_effective_waves(np.maximum(blocks_per_sm / p.resident_blocks, 1.0), p.wave_tail_fraction)
    key_tile_work_s = p.row_work * tile_flops / sm_flops_per_s * side_by_side
    key_tile_s = tile_kv_bytes / sm_bytes_per_s * side_by_side + latency_cycles / rates.clock_hz + key_tile_work_s
    block_s = (p.block_cycles + p.block_head_cycles * parts.mean_dim / 128.0) / rates.clock_hz
    chain_s = rounds * (block_s + parts.num_key_tiles / parts.splits * key_tile_s)

    partial_rows = (
        shape.batch_size * shape.num_heads * shape.query_len * np.where(parts.splits > 1.0, parts.splits, 0.0)
    )
    partial_bytes = partial_rows * shape.v_head_dim * 8.0  # fp32, written and read
    memory_s = read_bytes * traffic_factor(resident, rates, p) + partial_bytes * p.partial_passes
    memory_s = memory_s / (rates.bandwidth_bytes_per_s * p.bandwidth_fraction)
    fixed_s = _fixed_s(shape, rates, p, parts, writes_cache=writes_cache)
    start_s = np.full_like(memory_s, p.start_s if writes_cache else p.start_s - p.cache_write_start_s)
    total_s = start_s + fixed_s + join(chain_s, memory_s, p.overlap_power)
    # Arithmetic is the smaller part of the chain; the rest waits for keys and values, as memory traffic does.
    work_s = rounds * parts.num_key_tiles / parts.splits * key_tile_work_s
    feed_s = np.maximum(memory_s, chain_s - work_s)
    return KernelTime(total_s=total_s, compute_s=work_s, memory_s=feed_s, start_s=start_s + fixed_s)


class _Parts(NamedTuple):
    """Blocks of a decode kernel, and how the keys are split over them.

    Attributes:
        seen: Keys that a query attends to.
        packs: Whether the query heads of a group share a block.
        rows: Query rows of a head, or of its whole group where that is packed.
        blocks: Blocks without splits.
        mean_dim: Mean width of a key and a value head as the kernel pads them. [element]
        keys_per_tile: Keys of a key tile.
        num_key_tiles: Key tiles of a block that takes all keys.
        splits: Blocks that share them.
    """

    seen: PerCall
    packs: CallMask
    rows: PerCall
    blocks: PerCall
    mean_dim: PerCall
    keys_per_tile: PerCall
    num_key_tiles: PerCall
    splits: PerCall


def _split_keys(
    shape: AttentionShape, rates: AttentionRates, p: DecodeParameters, head_dims: Sequence[float]
) -> _Parts:
    """Split the keys of each head group until every SM has work or splits are too small."""
    group = shape.num_heads / shape.num_kv_heads
    windowed = (shape.window_size > 0) & (shape.window_size < shape.kv_len)
    seen = np.where(windowed, shape.window_size, shape.kv_len)
    packs = np.ones(np.shape(group), dtype=bool) if p.packs_always else (group > 1.0) & (shape.window_size == 0)
    rows = shape.query_len * np.where(packs, group, 1.0)
    heads = np.where(packs, shape.num_kv_heads, shape.num_heads)
    blocks = shape.batch_size * heads * np.ceil(rows / p.query_tile)

    mean_dim = (pad_head(shape.head_dim, head_dims) + pad_head(shape.v_head_dim, head_dims)) / 2.0
    keys_per_tile = np.clip(p.key_tile_elements / mean_dim, 32.0, 256.0)
    # A window rarely starts at a tile's edge.
    num_key_tiles = np.ceil(seen / keys_per_tile) + np.where(windowed, 1.0, 0.0)
    room = np.minimum(rates.num_sms * p.fill_waves / blocks, num_key_tiles / p.key_tiles_per_split)
    splits = np.where(packs, np.maximum(np.floor(np.minimum(room, p.most_splits)), 1.0), 1.0)
    return _Parts(seen, packs, rows, blocks, mean_dim, keys_per_tile, num_key_tiles, splits)


def _fixed_s(
    shape: AttentionShape, rates: AttentionRates, p: DecodeParameters, parts: _Parts, *, writes_cache: bool
) -> PerCall:
    """Fixed costs: combining and planning splits, reordering, writing the cache. [s]"""
    fixed_s = np.where(parts.splits > 1.0, p.combine_s, 0.0) + shape.batch_size * p.sequence_s
    is_grouped = shape.num_heads > shape.num_kv_heads
    reorders = parts.packs & is_grouped & (shape.num_kv_heads > 1.0) & (shape.batch_size > 1.0)
    fixed_s = fixed_s + np.where(reorders, p.reorder_s, 0.0)
    if p.planned_sequence_s > 0.0 or p.planned_pair_s > 0.0:
        plan_s = shape.batch_size * (p.planned_sequence_s + shape.batch_size * p.planned_pair_s)
        fixed_s = fixed_s + np.where(shape.batch_size <= MOST_PLANNED_SEQUENCES, plan_s, 0.0)
    if writes_cache:
        new_tokens = shape.batch_size * shape.query_len * shape.num_kv_heads * shape.kv_width
        copied_bytes = new_tokens * (shape.element_bytes + shape.kv_element_bytes)
        fixed_s = fixed_s + copied_bytes * p.cache_write_passes / rates.bandwidth_bytes_per_s
    return fixed_s
