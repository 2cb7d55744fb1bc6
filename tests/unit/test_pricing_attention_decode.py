"""Terms of a decode kernel's time, each worked out by hand from its definition (attention.decode)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapewright.pricing.attention.decode import DecodeParameters, estimate_decode
from shapewright.pricing.attention.kernels import AttentionRates, AttentionShape

# Four SMs at 1 GHz that multiply 1e12 flop/s each; memory costs nothing unless a test says so.
RATES = AttentionRates(flops_per_s=4e12, bandwidth_bytes_per_s=1e30, num_sms=4.0, clock_hz=1e9, l2_bytes=0.0)
# Tiles of 128 keys of width 128; nothing costs anything.
FREE = DecodeParameters(
    start_s=0.0,
    query_tile=64.0,
    key_tile_elements=128.0 * 128.0,
    packs_always=True,
    key_tiles_per_split=1.0,
    most_splits=1.0,
    fill_waves=1.0,
    sm_bytes_per_clock=1e30,
    key_tile_cycles=0.0,
    dram_tile_cycles=0.0,
    row_work=0.0,
    block_cycles=0.0,
    block_head_cycles=0.0,
    wave_tail_fraction=1.0,
    sequence_s=0.0,
    cache_write_passes=0.0,
    reorder_s=0.0,
    query_passes=1.0,
    partial_passes=1.0,
    bandwidth_fraction=1.0,
    overlap_power=1.0,
    combine_s=0.0,
    l2_reach_fraction=1.0,
    l2_bytes_per_sm_clock=1.0,
    cache_write_start_s=0.0,
)
SLOW_MEMORY = replace(RATES, bandwidth_bytes_per_s=1e12)  # a megabyte a microsecond


def total_ns(
    parameters: DecodeParameters, rates: AttentionRates = RATES, *, writes_cache: bool = False, **sizes: float
) -> float:
    """Time of four sequences of 1024 keys, eight tiles, in one head. [ns]"""
    defaults = {
        "batch_size": 4, "query_len": 1, "kv_len": 1024, "num_heads": 1, "num_kv_heads": 1, "head_dim": 128,
        "v_head_dim": 128, "window_size": 0,
    }  # fmt: skip
    columns = {name: np.asarray(float(value)) for name, value in {**defaults, **sizes}.items()}
    shape = AttentionShape(causal=True, element_bytes=2.0, kv_element_bytes=2.0, **columns)
    found = estimate_decode(shape, rates, parameters, writes_cache=writes_cache, hot_cache=False)
    return float(found.total_s) * 1e9


def test_a_block_goes_through_its_tiles() -> None:
    """Eight tiles of 100 cycles, and 50 from memory, after 200 and 100 of the block; twice that for two rounds."""
    kernel = replace(FREE, key_tile_cycles=100.0, dram_tile_cycles=50.0, block_cycles=200.0, block_head_cycles=100.0)
    assert total_ns(kernel) == pytest.approx(8 * 150 + 300)
    assert total_ns(kernel, batch_size=8) == pytest.approx(2 * (8 * 150 + 300))
    # Five blocks on four SMs: two rounds, of which half of the empty part may be won back.
    assert total_ns(kernel, batch_size=5) == pytest.approx(2 * 1500)
    assert total_ns(replace(kernel, wave_tail_fraction=0.5), batch_size=5) == pytest.approx((1.25 + 0.5 * 0.75) * 1500)
    assert total_ns(kernel, head_dim=64, v_head_dim=64) == pytest.approx(4 * 150 + 250)


def test_an_sm_draws_keys_and_values_at_its_rate() -> None:
    """128 keys of 128 + 128 elements of 2 bytes are 65,536 bytes a tile, 64 of them each cycle."""
    assert total_ns(replace(FREE, sm_bytes_per_clock=64.0)) == pytest.approx(8 * 1024)


def test_heads_of_a_group_share_the_keys_and_not_the_arithmetic() -> None:
    """4 * 128 FLOPs a key and row at 1e12 a second, twice for the kernel's work; eight heads in one block."""
    kernel = replace(FREE, row_work=2.0)
    one = 2 * 8 * 128 * 4 * 128 / 1e12 * 1e9
    assert total_ns(kernel) == pytest.approx(one)
    assert total_ns(kernel, num_heads=8) == pytest.approx(8 * one)
    # Without packing each head is a block: four sequences of eight on four SMs are eight rounds.
    assert total_ns(replace(kernel, packs_always=False), num_heads=8, window_size=512) == pytest.approx(
        8 * one * (4 + 1) / 8
    )


def test_keys_are_split_until_the_device_is_full() -> None:
    """One sequence on four SMs: four splits of two tiles, fewer where a split is worth four tiles, one if need be."""
    kernel = replace(FREE, key_tile_cycles=100.0, most_splits=64.0, combine_s=1e-6)
    assert total_ns(kernel, batch_size=1) == pytest.approx(2 * 100 + 1000)
    assert total_ns(replace(kernel, key_tiles_per_split=4.0), batch_size=1) == pytest.approx(4 * 100 + 1000)
    assert total_ns(replace(kernel, fill_waves=0.5), batch_size=1) == pytest.approx(4 * 100 + 1000)
    assert total_ns(replace(kernel, most_splits=2.0), batch_size=1) == pytest.approx(4 * 100 + 1000)
    assert total_ns(kernel) == pytest.approx(8 * 100)


def test_partial_outputs_are_written_and_read_in_fp32() -> None:
    """Four splits of two heads of 128: 4 * 2 * 128 * 8 bytes, as often as the kernel passes over them."""
    kernel = replace(FREE, most_splits=64.0, partial_passes=3.0)
    plain, twice = (
        total_ns(replace(kernel, partial_passes=passes), SLOW_MEMORY, batch_size=1, num_heads=2)
        for passes in (0.0, 3.0)
    )
    assert twice - plain == pytest.approx(3 * 4 * 2 * 128 * 8 / 1e12 * 1e9)


def test_memory_sends_the_cache_and_the_queries() -> None:
    """4 * 1024 keys of 512 bytes, and 4 rows of 512 bytes three times over, at half of 1 TB/s."""
    kernel = replace(FREE, query_passes=3.0, bandwidth_fraction=0.5)
    assert total_ns(kernel, SLOW_MEMORY) == pytest.approx(2 * (4 * 1024 * 512 + 3 * 4 * 512) / 1e12 * 1e9)
    # Of a window of 256 a quarter is read.
    assert total_ns(kernel, SLOW_MEMORY, window_size=256) == pytest.approx(
        2 * (4 * 256 * 512 + 3 * 4 * 512) / 1e12 * 1e9
    )


def test_a_window_starts_amid_a_tile() -> None:
    """300 keys lie in three tiles, or four where the first is cut; a window wider than the cache has no effect."""
    kernel = replace(FREE, key_tile_cycles=100.0)
    assert total_ns(kernel, window_size=300) == pytest.approx(4 * 100)
    assert total_ns(kernel, window_size=1024) == pytest.approx(8 * 100)


def test_sequence_cost_equals_the_plan() -> None:
    """10 ns a sequence; plans of up to 992 sequences cost 2 ns each and 0.01 ns a pair."""
    assert total_ns(replace(FREE, sequence_s=1e-8)) == pytest.approx(4 * 10)
    planned = replace(FREE, planned_sequence_s=2e-9, planned_pair_s=1e-11)
    assert total_ns(planned, batch_size=992) == pytest.approx(992 * 2 + 992**2 * 0.01)
    assert total_ns(planned, batch_size=993) == pytest.approx(0.0, abs=1e-6)
    assert total_ns(replace(FREE, planned_pair_s=1e-11)) == pytest.approx(16 * 0.01)


def test_new_tokens_are_copied_into_the_cache() -> None:
    """4 tokens of 256 elements, 2 bytes read and 2 written; without the copy its fixed cost is absent too."""
    kernel = replace(FREE, start_s=5e-6, cache_write_start_s=2e-6, cache_write_passes=3.0)
    with_copy, without = (total_ns(kernel, SLOW_MEMORY, writes_cache=writes) for writes in (True, False))
    assert without - total_ns(FREE, SLOW_MEMORY) == pytest.approx(3000)
    assert with_copy - without == pytest.approx(2000 + 3 * 4 * 256 * 4 / 1e12 * 1e9)


@pytest.mark.parametrize(
    ("sizes", "is_reordered"),
    [
        ({"num_heads": 8, "num_kv_heads": 2}, True),
        ({"num_heads": 8, "num_kv_heads": 1}, False),
        ({"num_heads": 8, "num_kv_heads": 8}, False),
        ({"num_heads": 8, "num_kv_heads": 2, "batch_size": 1}, False),
    ],
)
def test_packed_groups_of_several_heads_and_sequences_are_reordered(
    sizes: dict[str, float], is_reordered: bool
) -> None:
    """Copies are needed where rows of a group do not lie side by side."""
    assert total_ns(replace(FREE, reorder_s=1e-6), **sizes) == pytest.approx(1000.0 * is_reordered, abs=1e-6)


def test_blocks_side_by_side_hide_latency_and_share_the_rest() -> None:
    """Eight blocks on four SMs, two at once: one round with the latency once and the feed twice."""
    kernel = replace(FREE, key_tile_cycles=100.0, sm_bytes_per_clock=64.0)
    assert total_ns(kernel, batch_size=8) == pytest.approx(2 * 8 * (100 + 1024))
    assert total_ns(replace(kernel, resident_blocks=2.0), batch_size=8) == pytest.approx(8 * (100 + 2 * 1024))
