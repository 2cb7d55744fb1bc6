"""What is free in the fit of an attention kernel: constants with start and range, and structures to choose from."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple


class Free(NamedTuple):
    """A constant that is fitted: where it starts, and the ends of what it may be."""

    start: float
    low: float
    high: float


# Constants of perf.attention_prefill.PrefillParameters and perf.attention_decode.DecodeParameters, in their units.
PREFILL = {
    "start_s": Free(1e-5, 3e-6, 3e-5),
    "exponentials_per_sm_per_clock": Free(16.0, 4.0, 64.0),
    "tile_overhead_cycles": Free(2000.0, 100.0, 3e4),
    "wave_tail_fraction": Free(0.5, 1e-3, 1.0),
    "power_drop_fraction": Free(0.02, 1e-5, 0.4),
    "bandwidth_fraction": Free(0.8, 0.3, 0.98),
    "query_passes": Free(1.0, 0.5, 3.0),
    "cache_write_passes": Free(1.0, 0.01, 20.0),
    "cache_write_token_cycles": Free(50.0, 0.1, 5000.0),
    "overlap_power": Free(2.0, 1.0, 12.0),
    "l2_reach_fraction": Free(1.0, 0.1, 5.0),
    "l2_bytes_per_sm_clock": Free(30.0, 5.0, 64.0),
    "window_extra_key_tiles": Free(0.5, 0.01, 3.0),
    "window_start_s": Free(3e-7, 1e-9, 2e-5),
    "masked_key_work": Free(0.01, 1e-4, 1.0),
}
DECODE = {
    "start_s": Free(9e-6, 2.5e-6, 2e-5),
    "most_splits": Free(64.0, 4.0, 256.0),
    "sm_bytes_per_clock": Free(20.0, 4.0, 512.0),
    "key_tile_cycles": Free(300.0, 10.0, 1e4),
    "dram_tile_cycles": Free(100.0, 1.0, 1e4),
    "row_work": Free(1.0, 0.05, 30.0),
    "block_cycles": Free(2000.0, 10.0, 3e4),
    "block_head_cycles": Free(2000.0, 10.0, 3e4),
    "wave_tail_fraction": Free(0.5, 1e-3, 1.0),
    "sequence_s": Free(3e-9, 1e-11, 1e-7),
    "cache_write_passes": Free(0.5, 0.01, 10.0),
    "reorder_s": Free(1e-7, 1e-9, 2e-5),
    "query_passes": Free(1.0, 0.1, 4.0),
    "partial_passes": Free(0.5, 0.01, 3.0),
    "bandwidth_fraction": Free(0.85, 0.5, 0.98),
    "overlap_power": Free(3.0, 1.0, 12.0),
    "combine_s": Free(2e-6, 1e-8, 2e-5),
    "resident_blocks": Free(1.2, 1.0, 8.0),
    "planned_sequence_s": Free(3e-8, 1e-11, 1e-5),
    "planned_pair_s": Free(1e-10, 1e-14, 1e-7),
    "l2_reach_fraction": Free(0.8, 0.1, 3.0),
    "l2_bytes_per_sm_clock": Free(30.0, 5.0, 64.0),
}
# Share of the tensor cores' rate that one head width reaches.
TENSOR_FRACTION = Free(0.7, 0.02, 1.0)
# Structure is chosen on the rows of the fit: FlashAttention 2 and 3 and trtllm differ in it. Sizes are whole numbers,
# which a record keeps exactly: 128 keys must fill one tile of 128. FlashAttention 2 splits keys only in decode (its
# source, mha_varlen_fwd).
PREFILL_CHOICES: list[dict[str, Any]] = [
    {"query_tile": rows, "key_tile": keys, "packs_query_heads": packs, "splits_keys": splits}
    for (rows, keys), packs, splits in product(
        ((64, 64), (128, 64), (128, 128), (256, 128)), (False, True), (False, True)
    )
]
DECODE_CHOICES: list[dict[str, Any]] = [
    {
        "query_tile": 64,
        "key_tile_elements": elements,
        "packs_always": always,
        "key_tiles_per_split": tiles,
        "fill_waves": waves,
    }
    for elements, always, tiles, waves in product((8192, 16384), (False, True), (1.0, 2.0, 4.0), (1.0, 2.0))
]
