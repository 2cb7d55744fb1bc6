"""Work of attention kernels of encoders, and of latent attention (MLA) as a kernel, a batched GEMM or a whole module.

Legend: b sequences, s and q query tokens, c key tokens (a query's own included), a query heads, d_qk and d_v widths of
a query-key and a value head, T = b q tokens.

A causal prefill visits the keys up to the end of each tile of 128 queries. MLA's absorbed form attends to the cached
latents with one key-value head of 512 + 64 elements whose first 512 are the values; the other form expands them to
heads of 128 + 64 and 128 elements first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.core.records import dataclass
from shapewright.pricing.kernels.work import NOMINAL_START_S, KernelRates, KernelWork, narrow_rate, tail_of

if TYPE_CHECKING:
    from jaxtyping import Float

    from shapewright.hardware.device import Device

    PerCall = Float[np.ndarray, "*calls"]

QUERY_TILE, KEY_TILE, DECODE_KEY_TILE = 128.0, 128.0, 64.0
# Unit of rounds of tiles and of chains of key tiles. [cycle]
_ROUND_CYCLES, _CHAIN_CYCLES = 1000.0, 100.0
# Unit of the compute time at which power limits the clock. [s]
_POWER_HALF_S = 1e-3
# The same of long kernels, whose chips warm up: rates of cuDNN's backward fall by a tenth from 10 to 400 ms. [s]
_HEAT_HALF_S = 3e-2
# Narrowest compiled head width of flash-attn, and the next one.
_NARROW_HEAD, _WIDE_HEAD = 64.0, 96.0
_ELEMENT_BYTES = 2.0


def encoder_work(
    device: Device,
    rates: KernelRates,
    *,
    batch_size: PerCall,
    seq_len: PerCall,
    num_heads: PerCall,
    head_dim: PerCall,
) -> KernelWork:
    """Work of non-causal self-attention in 16 bits with as many key-value heads as query heads."""
    peak = narrow_rate(device, "bf16")
    keys = np.ceil(seq_len / KEY_TILE) * KEY_TILE
    tiles = batch_size * num_heads * np.ceil(seq_len / QUERY_TILE)
    scores = tiles * QUERY_TILE * keys
    gemm_s, exponentials_s = scores * 4.0 * head_dim / peak, scores / rates.exponentials_per_s
    waves = np.maximum(tiles / rates.num_sms, 1e-9)
    flops = 4.0 * batch_size * num_heads * seq_len**2 * head_dim
    moved_s = batch_size * seq_len * num_heads * head_dim * 4.0 * _ELEMENT_BYTES / rates.bytes_per_s
    return KernelWork(
        compute={
            "gemm": gemm_s,
            "exponentials": exponentials_s,
            "tail": tail_of(tiles, rates.num_sms) * (gemm_s + exponentials_s) / waves,
            "power": 0.1 * gemm_s**2 / (gemm_s + _POWER_HALF_S),
        },
        memory={"bytes": moved_s},
        serial={
            "start": np.full_like(moved_s, NOMINAL_START_S),
            "rounds": np.ceil(waves) * _ROUND_CYCLES / rates.clock_hz,
        },
        roofline_s=np.maximum(flops / peak, moved_s),
        places={
            "heads": num_heads,
            "sequences": batch_size,
            "sequences x heads": batch_size * num_heads,
            "keys": seq_len,
        },
    )


@dataclass(frozen=True, kw_only=True)
class LatentSizes:
    """Sizes of multi-head latent attention, without heads. [element]

    Attributes:
        hidden: Width of the residual stream.
        query_rank: Width of the query latent.
        rank: Width of the key-value latent.
        rope: Rotated part of a query and of the shared key.
        nope: Part of a query and key head without positions.
        value: Width of a value head.
    """

    hidden: float = 7168.0
    query_rank: float = 1536.0
    rank: float = 512.0
    rope: float = 64.0
    nope: float = 128.0
    value: float = 128.0


DEEPSEEK_V3 = LatentSizes()
"""The model that the measured modules are of."""


def latent_bmm_work(
    device: Device, rates: KernelRates, *, num_heads: PerCall, num_tokens: PerCall, k: float, n: float, dtype: str
) -> KernelWork:
    """Work of the GEMM of every head with its latent weight [k, n], before or after absorbed attention."""
    peak = narrow_rate(device, dtype)
    tiles = num_heads * np.ceil(num_tokens / 128.0) * np.ceil(n / 128.0)
    flops = 2.0 * num_heads * num_tokens * k * n
    activations_s = 2.0 * num_heads * num_tokens * (k + n) / rates.bytes_per_s
    weights_s = num_heads * k * n * get_dtype(dtype).num_bytes / rates.bytes_per_s
    return KernelWork(
        compute={
            "gemm": 2.0 * num_heads * np.ceil(num_tokens / 64.0) * 64.0 * k * n / peak,
            "tail": tail_of(tiles, rates.num_sms) * 2.0 * 128.0 * 128.0 * k / (peak / rates.num_sms),
        },
        memory={"activations": activations_s, "weights": weights_s},
        serial={"start": np.full_like(activations_s, NOMINAL_START_S)},
        roofline_s=np.maximum(flops / peak, activations_s + weights_s),
        places={"heads": num_heads, "tokens": num_tokens, "tokens x heads": num_tokens * num_heads},
    )


def latent_attention_work(
    device: Device,
    rates: KernelRates,
    *,
    batch_size: PerCall,
    query_len: PerCall,
    context_len: PerCall,
    num_heads: PerCall,
    is_decode: bool,
    is_absorbed: bool,
    dtype: str,
    cache_dtype: str,
    sizes: LatentSizes = DEEPSEEK_V3,
    projections: str = "",
) -> KernelWork:
    """Work of causal attention over latents.

    Args:
        context_len: Tokens that the last one attends to.
        is_decode: Whether keys are split over the SMs, as for one new token.
        is_absorbed: Whether heads attend to the latents themselves.
        projections: Format of the GEMMs of the whole module: projections down and up, and the output; empty for
            attention alone.
    """
    peak, tokens = narrow_rate(device, dtype), batch_size * query_len
    d_qk, d_v = (sizes.rank + sizes.rope, sizes.rank) if is_absorbed else (sizes.nope + sizes.rope, sizes.value)
    pairs = batch_size * num_heads * query_len * (context_len - (query_len - 1.0) / 2.0)
    cache_s = batch_size * context_len * (sizes.rank + sizes.rope) * get_dtype(cache_dtype).num_bytes
    outside_s = tokens * num_heads * (d_qk + d_v) * _ELEMENT_BYTES / rates.bytes_per_s
    start_s = np.full_like(outside_s, NOMINAL_START_S)
    compute, serial = {}, {"start": start_s}
    if is_decode:
        visited = pairs
        blocks = batch_size * np.ceil(num_heads / 64.0)
        splits = np.maximum(np.floor(np.minimum(rates.num_sms / blocks, context_len / 128.0)), 1.0)
        serial["chain"] = np.ceil(context_len / splits / DECODE_KEY_TILE) * _CHAIN_CYCLES / rates.clock_hz
        keys_s = cache_s / rates.bytes_per_s
    else:
        steps = np.ceil(query_len / QUERY_TILE)
        tiles = batch_size * num_heads * steps
        mean_keys = np.minimum(context_len, context_len - query_len + (query_len + QUERY_TILE) / 2.0)
        visited = tiles * QUERY_TILE * mean_keys
        per_score_s = 2.0 * (d_qk + d_v) / peak + 1.0 / rates.exponentials_per_s
        tile_s = QUERY_TILE * context_len * per_score_s * rates.num_sms
        compute["tail"] = tail_of(tiles, rates.num_sms) * tile_s / 2.0
        serial["rounds"] = np.ceil(tiles / rates.num_sms) * _ROUND_CYCLES / rates.clock_hz
        expanded_s = tokens * num_heads * (d_qk + d_v) * _ELEMENT_BYTES
        keys_s = (cache_s if is_absorbed else expanded_s) / rates.bytes_per_s
    compute |= {
        "attention": visited * 2.0 * (d_qk + d_v) / peak,
        "exponentials": visited / rates.exponentials_per_s,
    }
    memory = {"keys": keys_s, "queries": outside_s}
    bound_flops_s = pairs * 2.0 * (d_qk + d_v) / peak
    if projections:
        more_compute, more_memory = _projections(
            device, rates, num_heads, tokens, sizes, projections, is_absorbed=is_absorbed
        )
        compute, memory = compute | more_compute, memory | more_memory
        bound_flops_s = bound_flops_s + sum(more_compute.values())
    return KernelWork(
        compute=compute,
        memory=memory,
        serial=serial,
        roofline_s=np.maximum(bound_flops_s, keys_s),
        places={
            "heads": num_heads,
            "sequences": batch_size,
            "sequences x heads": batch_size * num_heads,
            "keys": context_len,
            "queries": query_len,
        },
    )


def _projections(
    device: Device,
    rates: KernelRates,
    num_heads: PerCall,
    tokens: PerCall,
    sizes: LatentSizes,
    dtype: str,
    *,
    is_absorbed: bool,
) -> tuple[dict[str, PerCall], dict[str, PerCall]]:
    """Arithmetic and traffic of a module around attention. [s]"""
    peak, width = narrow_rate(device, dtype), get_dtype(dtype).num_bytes
    rows = np.ceil(tokens / 64.0) * 64.0
    down = sizes.hidden * (sizes.query_rank + sizes.rank + sizes.rope)
    up = sizes.query_rank * num_heads * (sizes.nope + sizes.rope) + num_heads * sizes.value * sizes.hidden
    latent = num_heads * sizes.rank * (sizes.nope + sizes.value)
    compute = {"gemm": 2.0 * rows * (down + up) / peak}
    memory = {}
    weights = (down + up) * width
    if is_absorbed:
        compute["latent"] = 2.0 * rows * latent / narrow_rate(device, "bf16")
        memory["latent weights"] = latent * _ELEMENT_BYTES / rates.bytes_per_s
    else:
        compute["latent"] = 2.0 * rows * latent / peak
        weights = weights + latent * width
    wide = 3.0 * sizes.hidden + 3.0 * sizes.query_rank + num_heads * 4.0 * (sizes.nope + sizes.rope + sizes.value)
    memory["weights"] = weights / rates.bytes_per_s
    memory["activations"] = tokens * wide * _ELEMENT_BYTES / rates.bytes_per_s
    return compute, memory


def training_work(
    device: Device,
    rates: KernelRates,
    *,
    batch_size: PerCall,
    query_len: PerCall,
    kv_len: PerCall,
    num_heads: PerCall,
    num_kv_heads: PerCall,
    head_dim: PerCall,
    v_head_dim: PerCall,
    window_size: PerCall,
    is_causal: PerCall,
    is_backward: bool,
    dtype: str,
) -> KernelWork:
    """Work of a training framework's attention, forward or backward.

    Args:
        head_dim: Width of a query and key head. [element]
        v_head_dim: Width of a value head. [element]
        window_size: Latest keys that a query attends to; 0 for all.
        is_causal: Whether a query attends only to keys up to its own position, 1 or 0.
        is_backward: Whether this is the gradient: five GEMMs over the scores instead of two.
    """
    peak, width = narrow_rate(device, dtype), get_dtype(dtype).num_bytes
    flops_per_score = 2.0 * (head_dim + v_head_dim) if not is_backward else 2.0 * (3.0 * head_dim + 2.0 * v_head_dim)
    steps = np.ceil(query_len / QUERY_TILE)
    all_keys = np.ceil(kv_len / KEY_TILE) * KEY_TILE
    seen_keys = np.where(is_causal > 0.0, np.minimum((all_keys + KEY_TILE) / 2.0, all_keys), all_keys)
    is_windowed = (window_size > 0.0) & (window_size < kv_len)
    reach = np.where(is_windowed, window_size + QUERY_TILE, all_keys)
    mean_keys = np.minimum(seen_keys, reach)
    tiles = batch_size * num_heads * steps
    visited = tiles * QUERY_TILE * mean_keys
    gemm_s = visited * flops_per_score / peak
    exponentials_s = visited / rates.exponentials_per_s
    waves = tiles / rates.num_sms
    longest_s = QUERY_TILE * np.minimum(all_keys, reach) * (flops_per_score / peak * rates.num_sms)
    is_equal = head_dim == v_head_dim
    q_and_out = batch_size * query_len * num_heads * (head_dim + v_head_dim)
    keys_and_values = batch_size * kv_len * num_kv_heads * (head_dim + v_head_dim)
    moved_s = (1.0 + is_backward) * (q_and_out + keys_and_values) * width / rates.bytes_per_s
    pairs = batch_size * num_heads * query_len * np.where(is_causal > 0.0, (kv_len + 1.0) / 2.0, kv_len)
    pairs = np.where(window_size > 0.0, np.minimum(pairs, batch_size * num_heads * query_len * window_size), pairs)
    return KernelWork(
        compute={
            "gemm": gemm_s,
            "unequal heads": gemm_s * ~is_equal,
            "exponentials": exponentials_s,
            "tail": tail_of(tiles, rates.num_sms) * longest_s,
            "power": 0.1 * gemm_s**2 / (gemm_s + _POWER_HALF_S),
            "heat": 0.1 * gemm_s**2 / (gemm_s + _HEAT_HALF_S),
            "edges of windows": is_windowed * tiles * QUERY_TILE * KEY_TILE * flops_per_score / peak,
            "before windows": tiles * QUERY_TILE * (seen_keys - mean_keys) * flops_per_score / peak,
            "after the query": tiles * QUERY_TILE * (all_keys - seen_keys) * flops_per_score / peak,
        },
        memory={"bytes": moved_s},
        serial={
            "start": np.full_like(moved_s, NOMINAL_START_S),
            "rounds": np.ceil(waves) * _ROUND_CYCLES / rates.clock_hz,
        },
        roofline_s=np.maximum(pairs * flops_per_score / peak, moved_s),
        places={
            "keys": kv_len,
            "mask": 1.0 + is_causal + 2.0 * is_windowed,
            "queries x heads": batch_size * query_len * num_heads,
        },
        rare=frozenset({"unequal heads", "edges of windows", "before windows", "after the query"}),
    )
