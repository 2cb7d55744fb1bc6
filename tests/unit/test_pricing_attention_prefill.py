"""Prefill kernels on a machine of round numbers, term by term: every time here is worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shapewright.pricing.attention.kernels import AttentionRates, AttentionShape
from shapewright.pricing.attention.prefill import PrefillParameters, estimate_prefill

# A machine with round numbers: one SM multiplies 1e12 flop/s, exponentials and memory cost nothing.
ROUND_RATES = AttentionRates(flops_per_s=4e12, bandwidth_bytes_per_s=1e30, num_sms=4.0, clock_hz=1e30, l2_bytes=0.0)
ROUND_KERNEL = PrefillParameters(
    start_s=1e-6,
    query_tile=64.0,
    key_tile=64.0,
    packs_query_heads=False,
    splits_keys=False,
    kernel_head_dims=(64, 128),
    tensor_fraction={"64": 1.0, "128": 1.0},
    exponentials_per_sm_per_clock=1e30,
    tile_overhead_cycles=0.0,
    wave_tail_fraction=1.0,
    power_drop_fraction=0.0,
    bandwidth_fraction=1.0,
    query_passes=1.0,
    cache_write_passes=1.0,
    cache_write_token_cycles=0.0,
    cache_write_start_s=0.0,
    overlap_power=1.0,
    l2_reach_fraction=1.0,
    l2_bytes_per_sm_clock=1.0,
    window_extra_key_tiles=0.0,
    window_start_s=0.0,
    masked_key_work=0.0,
    backward_rate_fraction=0.5,
)


def shape(*, causal: bool = True, **sizes: float) -> AttentionShape:
    """One call of head width 128, as floats."""
    defaults = {"batch_size": 1, "num_heads": 1, "num_kv_heads": 1, "head_dim": 128, "v_head_dim": 128}
    columns = {name: np.asarray(float(value)) for name, value in {**defaults, "window_size": 0, **sizes}.items()}
    return AttentionShape(causal=causal, element_bytes=2.0, kv_element_bytes=2.0, **columns)


def test_causal_tiles_by_hand() -> None:
    """Four query tiles on four SMs: the last one visits all 256 keys and sets the time."""
    found = estimate_prefill(shape(query_len=256, kv_len=256), ROUND_RATES, ROUND_KERNEL, writes_cache=False)

    # 64 rows x 256 keys x 4 x 128 flop = 8388608 flop on one SM of 1e12 flop/s, after a start of 1 us.
    assert float(found.total_s) == pytest.approx(1e-6 + 8388608 / 1e12)


def test_causal_waves_by_hand() -> None:
    """16 tiles on 4 SMs: four waves of the mean tile, which visits (64 + 128 + 192 + 256) / 4 = 160 keys."""
    sizes = shape(batch_size=4, query_len=256, kv_len=256)
    found = estimate_prefill(sizes, ROUND_RATES, ROUND_KERNEL, writes_cache=False)

    assert float(found.compute_s) == pytest.approx(4 * 64 * 160 * 4 * 128 / 1e12)


def test_idle_sms_take_part_of_a_long_tile() -> None:
    """One tile of 64 rows and 2048 keys takes 2048 keys' time on one SM, and 512 keys' time split over four."""
    sizes = shape(query_len=64, kv_len=2048, causal=False)
    alone = estimate_prefill(sizes, ROUND_RATES, ROUND_KERNEL, writes_cache=False)
    shared = estimate_prefill(sizes, ROUND_RATES, replace(ROUND_KERNEL, splits_keys=True), writes_cache=False)

    assert float(alone.compute_s) == pytest.approx(64 * 2048 * 4 * 128 / 1e12)
    assert float(shared.compute_s) == pytest.approx(64 * 512 * 4 * 128 / 1e12)


def test_partly_empty_wave_is_paid_whole() -> None:
    """17 equal tiles on 4 SMs take five waves."""
    sizes = shape(batch_size=17, query_len=64, kv_len=64, causal=False)
    found = estimate_prefill(sizes, ROUND_RATES, ROUND_KERNEL, writes_cache=False)

    assert float(found.compute_s) == pytest.approx(5 * 64 * 64 * 4 * 128 / 1e12)


def test_odd_head_widths_are_padded_by_copies() -> None:
    """Width 120 needs no copy; 121 copies queries, keys, values and outputs once: twice 4 * 121 * 64 * 2 bytes."""
    padding = replace(ROUND_KERNEL, unaligned_passes=1.0)
    rates = replace(ROUND_RATES, bandwidth_bytes_per_s=1e9)
    for width, copied_bytes in ((120, 0.0), (121, 2.0 * 4 * 121 * 64 * 2)):
        sizes = shape(query_len=64, kv_len=64, head_dim=width, v_head_dim=width)
        plain, padded = (
            estimate_prefill(sizes, rates, kernel, writes_cache=False) for kernel in (ROUND_KERNEL, padding)
        )

        assert float(padded.total_s - plain.total_s) == pytest.approx(copied_bytes / 1e9, abs=1e-12)


def test_window_caps_the_keys_of_a_tile() -> None:
    """With a window of 64 a tile of 64 rows reaches 128 keys, however long the sequence."""
    sizes = shape(batch_size=4, query_len=64, kv_len=4096, window_size=64)
    found = estimate_prefill(sizes, ROUND_RATES, ROUND_KERNEL, writes_cache=False)

    assert float(found.compute_s) == pytest.approx(64 * 128 * 4 * 128 / 1e12)


def test_kernel_that_walks_over_masked_keys_pays_for_them() -> None:
    """At half the price of a key, the 4096 - 128 keys before the window cost 1984 keys more; a window starts later."""
    sizes = shape(batch_size=4, query_len=64, kv_len=4096, window_size=64)
    walking = replace(ROUND_KERNEL, masked_key_work=0.5, window_start_s=3e-6)
    found = estimate_prefill(sizes, ROUND_RATES, walking, writes_cache=False)

    assert float(found.compute_s) == pytest.approx(64 * (128 + 1984) * 4 * 128 / 1e12)
    assert float(found.start_s) == pytest.approx(1e-6 + 3e-6)


def test_backward_is_five_gemms_at_the_backward_rate() -> None:
    """Five GEMMs instead of two: 2.5 times the work at half the rate takes five times as long."""
    sizes = shape(query_len=256, kv_len=256)
    forward = estimate_prefill(sizes, ROUND_RATES, ROUND_KERNEL, writes_cache=False)
    backward = estimate_prefill(sizes, ROUND_RATES, ROUND_KERNEL, writes_cache=False, is_backward=True)

    assert float(backward.compute_s) == pytest.approx(5.0 * float(forward.compute_s))


def test_cache_copy_reads_and_writes_keys_and_values() -> None:
    """Copying 256 keys and values of width 128 in fp16 moves 2 x 256 x 256 x 2 bytes more."""
    rates = replace(ROUND_RATES, bandwidth_bytes_per_s=1e9)
    sizes = shape(query_len=256, kv_len=256)
    without = estimate_prefill(sizes, rates, ROUND_KERNEL, writes_cache=False)
    copying = estimate_prefill(sizes, rates, ROUND_KERNEL, writes_cache=True)

    assert float(copying.total_s - without.total_s) == pytest.approx(2 * 256 * 256 * 2 / 1e9)


def total_s(kernel: PrefillParameters, rates: AttentionRates = ROUND_RATES, **sizes: Any) -> float:
    """Time beyond the start, with nothing copied into a cache. [s]"""
    found = estimate_prefill(shape(**sizes), rates, kernel, writes_cache=False)
    return float(found.total_s - found.start_s)


# Multiplications of one score at width 128: two GEMMs of 128 each.
SCORE_FLOPS = 4 * 128


def test_prompt_chunk_attends_to_earlier_chunks() -> None:
    """The last 128 of 1024 tokens: tiles of 64 visit 960 and 1024 keys; four sequences are two waves, one waits."""
    alone_s, four_s = (total_s(ROUND_KERNEL, batch_size=count, query_len=128, kv_len=1024) for count in (1, 4))

    assert alone_s == pytest.approx(64 * 1024 * SCORE_FLOPS / 1e12)
    assert four_s == pytest.approx(2 * 64 * 992 * SCORE_FLOPS / 1e12)


def test_without_a_mask_every_tile_visits_all_keys() -> None:
    """Eight tiles on four SMs are two waves of 256 keys."""
    found_s = total_s(ROUND_KERNEL, batch_size=4, query_len=128, kv_len=256, causal=False)

    assert found_s == pytest.approx(2 * 64 * 256 * SCORE_FLOPS / 1e12)


def test_steps_over_keys_are_whole_under_a_mask_too() -> None:
    """With steps of 128 keys the first tile of 64 queries visits as many as the second."""
    found_s = total_s(replace(ROUND_KERNEL, key_tile=128.0), batch_size=4, query_len=128, kv_len=128)

    assert found_s == pytest.approx(2 * 64 * 128 * SCORE_FLOPS / 1e12)


def test_window_saves_no_time_where_masked_keys_are_computed() -> None:
    """A kernel with the full cost for masked keys takes as long with a window as without."""
    walking = replace(ROUND_KERNEL, masked_key_work=1.0)
    sizes = {"query_len": 256, "kv_len": 4096}

    assert total_s(walking, **sizes, window_size=64) == pytest.approx(total_s(walking, **sizes))


@pytest.mark.parametrize(
    ("query_len", "kv_len", "causal", "tiles", "keys"),
    [(64, 65, False, 1, 128), (65, 64, False, 2, 64), (1, 1, False, 1, 64), (1, 1, True, 1, 64)],
)
def test_tiles_are_whole(query_len: int, kv_len: int, tiles: int, keys: int, *, causal: bool) -> None:
    """One query or key more is another tile, and a short sequence is a whole tile of 64 by 64."""
    found_s = total_s(ROUND_KERNEL, batch_size=4, query_len=query_len, kv_len=kv_len, causal=causal)

    assert found_s == pytest.approx(tiles * 64 * keys * SCORE_FLOPS / 1e12)


def test_last_wave_may_be_lost_in_part() -> None:
    """17 tiles on 4 SMs are 4.25 waves; half of the last one's emptiness is 0.375 of a wave."""
    found_s = total_s(
        replace(ROUND_KERNEL, wave_tail_fraction=0.5), batch_size=17, query_len=64, kv_len=64, causal=False
    )

    assert found_s == pytest.approx(4.625 * 64 * 64 * SCORE_FLOPS / 1e12)


def test_each_wave_pays_for_exponentials_and_ends_of_its_tiles() -> None:
    """At 1 GHz: 64 exponentials a clock take 64 clocks for 64 x 64 scores, and 1000 clocks are the tile's ends."""
    rates = replace(ROUND_RATES, clock_hz=1e9)
    kernel = replace(ROUND_KERNEL, exponentials_per_sm_per_clock=64.0, tile_overhead_cycles=1000.0)
    found_s = total_s(kernel, rates, batch_size=8, query_len=64, kv_len=64, causal=False)

    assert found_s == pytest.approx(2 * (64 * 64 * SCORE_FLOPS / 1e12 + 64e-9 + 1e-6))


@pytest.mark.parametrize(("keys", "splits"), [(2048, 4), (512, 2), (128, 1)])
def test_a_part_of_a_tile_is_worth_four_steps(keys: int, splits: int) -> None:
    """Three idle SMs take parts of at least four steps of 64 keys, and joining parts is another end of a tile."""
    rates = replace(ROUND_RATES, clock_hz=1e9)
    kernel = replace(ROUND_KERNEL, splits_keys=True, tile_overhead_cycles=1000.0)
    found_s = total_s(kernel, rates, query_len=64, kv_len=keys, causal=False)

    assert found_s == pytest.approx(64 * keys / splits * SCORE_FLOPS / 1e12 + (1e-6 if splits == 1 else 2e-6))


def test_query_heads_of_a_group_share_a_tile() -> None:
    """16 queries of four heads fill one tile of 64 rows: one wave of four tiles instead of four."""
    sizes = {"batch_size": 4, "num_heads": 4, "query_len": 16, "kv_len": 64, "causal": False}
    packing = replace(ROUND_KERNEL, packs_query_heads=True)

    assert total_s(ROUND_KERNEL, **sizes) == pytest.approx(4 * 64 * 64 * SCORE_FLOPS / 1e12)
    assert total_s(packing, **sizes) == pytest.approx(64 * 64 * SCORE_FLOPS / 1e12)
    # Nothing is shared where each head has keys of its own.
    assert total_s(packing, **sizes, num_kv_heads=4) == total_s(ROUND_KERNEL, **sizes)


def test_a_window_may_visit_a_tile_more() -> None:
    """A window of 64 reaches 128 keys from a tile of 64 rows; a kernel that starts a tile early visits 192."""
    extra = replace(ROUND_KERNEL, window_extra_key_tiles=1.0)
    found_s = total_s(extra, batch_size=4, query_len=64, kv_len=4096, window_size=64)

    assert found_s == pytest.approx(64 * 192 * SCORE_FLOPS / 1e12)


def test_rates_of_head_widths_between_compiled_widths() -> None:
    """Keys of 128 with values of 64 have mean width 96; the peak fraction is linear in the logarithm of the width."""
    kernel = replace(ROUND_KERNEL, tensor_fraction={"64": 0.5, "128": 1.0})
    halfway = (64 * 128) ** 0.5
    uncompiled = replace(kernel, kernel_head_dims=())
    sizes = {"batch_size": 4, "query_len": 64, "kv_len": 64, "causal": False}

    assert total_s(ROUND_KERNEL, **sizes, v_head_dim=64) == pytest.approx(64 * 64 * 4 * 96 / 1e12)
    assert total_s(kernel, **sizes, head_dim=65, v_head_dim=65) == pytest.approx(64 * 64 * SCORE_FLOPS / 1e12)
    assert total_s(uncompiled, **sizes, head_dim=halfway, v_head_dim=halfway) == pytest.approx(
        64 * 64 * 4 * halfway / 0.75e12
    )


@pytest.mark.parametrize(("alone_s", "sustained"), [(1e-6, 1.0), (1e-3, 0.9), (1.0, 0.8)])
def test_long_kernels_lose_clock_under_power(alone_s: float, sustained: float) -> None:
    """A kernel of a millisecond loses half of what a long one does, a short one nothing."""
    rates = replace(ROUND_RATES, flops_per_s=4 * 64 * 64 * SCORE_FLOPS / alone_s)
    kernel = replace(ROUND_KERNEL, power_drop_fraction=0.2)

    assert total_s(kernel, rates, query_len=64, kv_len=64, causal=False) == pytest.approx(alone_s / sustained, rel=1e-3)


# Memory alone: multiplications cost nothing, 1 GB/s, half of it reached.
SLOW_MEMORY = replace(ROUND_RATES, flops_per_s=1e30, bandwidth_bytes_per_s=1e9)
HALF_OF_IT = replace(ROUND_KERNEL, bandwidth_fraction=0.5)
ROW_BYTES = 256 * 2  # of a query and its output, or of a key and its value


def test_traffic_by_hand() -> None:
    """64 queries and outputs of four heads, read and written twice, and 256 keys and values of one; backward twice."""
    sizes = {"num_heads": 4, "query_len": 64, "kv_len": 256}
    kernel = replace(HALF_OF_IT, query_passes=2.0)
    backward = estimate_prefill(shape(**sizes), SLOW_MEMORY, kernel, writes_cache=False, is_backward=True)
    moved_bytes = (2 * 4 * 64 + 256) * ROW_BYTES

    assert total_s(kernel, SLOW_MEMORY, **sizes) == pytest.approx(moved_bytes / 0.5e9)
    assert float(backward.memory_s) == pytest.approx(2 * moved_bytes / 0.5e9)


@pytest.mark.parametrize(("window_size", "keys"), [(0, 4096), (64, 128), (8192, 4096)])
def test_keys_beyond_every_window_are_not_read(window_size: int, keys: int) -> None:
    """64 queries with a window of 64 reach 128 keys together."""
    found_s = total_s(HALF_OF_IT, SLOW_MEMORY, query_len=64, kv_len=4096, window_size=window_size)

    assert found_s == pytest.approx((64 + keys) * ROW_BYTES / 0.5e9)


def test_only_new_tokens_go_into_the_cache() -> None:
    """128 of 512 tokens are new: read in 16 bits and written in 8, each with 40 cycles of one of four SMs at 1 GHz.

    Without the copy, its fixed cost is absent too.
    """
    kernel = replace(HALF_OF_IT, cache_write_token_cycles=40.0, cache_write_start_s=4e-7)
    rates = replace(SLOW_MEMORY, clock_hz=1e9)
    sizes = replace(shape(query_len=128, kv_len=512), kv_element_bytes=1.0)
    with_copy, without = (estimate_prefill(sizes, rates, kernel, writes_cache=writes) for writes in (True, False))

    assert float(with_copy.start_s) == pytest.approx(1e-6)
    assert float(without.start_s) == pytest.approx(6e-7)
    assert float(with_copy.memory_s - without.memory_s) == pytest.approx(128 * 256 * 3 / 0.5e9 + 128 * 40e-9 / 4)


def test_a_footprint_at_the_caches_reach_is_served_half() -> None:
    """Queries, outputs, keys, values and their copy are 64 x 4 rows; a cache of that size at twice the bandwidth.

    Half of the traffic takes half as long: three quarters of the time in total.
    """
    rates = replace(SLOW_MEMORY, clock_hz=1e9, l2_bytes=2.0 * 64 * 4 * ROW_BYTES)
    kernel = replace(ROUND_KERNEL, l2_reach_fraction=0.5, l2_bytes_per_sm_clock=0.5)
    found = estimate_prefill(shape(query_len=64, kv_len=64), rates, kernel, writes_cache=True)

    assert float(found.memory_s) == pytest.approx(0.75 * 64 * 4 * ROW_BYTES / 1e9)


def test_backward_of_latent_heads_weighs_keys_and_values() -> None:
    """Three of the five GEMMs have key width, two value width: 192 and 128 give 832, where forward has 320."""
    sizes = shape(query_len=64, kv_len=64, head_dim=192, v_head_dim=128)
    kernel = replace(ROUND_KERNEL, kernel_head_dims=())
    forward, backward = (
        estimate_prefill(sizes, ROUND_RATES, kernel, writes_cache=False, is_backward=is_backward)
        for is_backward in (False, True)
    )

    assert float(backward.compute_s / forward.compute_s) == pytest.approx(832 / 320 / 0.5)
