"""Work of linear attention and of sparse attention, as kernels and as modules of a layer.

Legend: b sequences, q new tokens of each, T = b q tokens, c tokens that the last one may attend to, a heads.

Linear attention keeps a state of d_k x d_v per value head. A prompt is scanned in chunks, one after the other; decode
reads and writes every state. Sparse attention scores all cached tokens with a cheap indexer, selects some, and attends
to those alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.pricing.kernels.work import NOMINAL_START_S, KernelRates, KernelWork, narrow_rate, tail_of

if TYPE_CHECKING:
    from jaxtyping import Float

    from shapewright.hardware.device import Device

    PerCall = Float[np.ndarray, "*calls"]

CHUNK_TOKENS = 64.0
"""Tokens that a scan takes in one step. Source: chunk_gated_delta_rule of flash-linear-attention."""

_ELEMENT_BYTES, _STATE_BYTES = 2.0, 4.0
# Unit of one step of a scan, and of one round of blocks. [cycle]
_STEP_CYCLES, _ROUND_CYCLES = 1000.0, 1000.0


def convolution_work(
    rates: KernelRates, *, batch_size: PerCall, seq_len: PerCall, channels: PerCall, width: PerCall
) -> KernelWork:
    """Work of a causal convolution over a few tokens of each channel, with its state of the last ones."""
    tokens = batch_size * seq_len
    moved_s = 2.0 * tokens * channels * _ELEMENT_BYTES / rates.bytes_per_s
    states_s = 2.0 * batch_size * channels * width * _ELEMENT_BYTES / rates.bytes_per_s
    rounds = np.ceil(batch_size * np.ceil(channels / 256.0) / rates.num_sms)
    return KernelWork(
        compute={"products": tokens * channels * width / (128.0 * rates.num_sms * rates.clock_hz)},
        memory={"activations": moved_s, "states": states_s},
        serial={
            "start": np.full_like(moved_s, NOMINAL_START_S),
            "rounds": rounds * _ROUND_CYCLES / rates.clock_hz,
            "chunks": np.ceil(seq_len / CHUNK_TOKENS) * _STEP_CYCLES / 100.0 / rates.clock_hz,
        },
        roofline_s=moved_s,
        places={"channels": channels, "sequences": batch_size, "tokens": tokens, "tokens of a sequence": seq_len},
    )


def scan_work(
    device: Device,
    rates: KernelRates,
    *,
    batch_size: PerCall,
    seq_len: PerCall,
    num_k_heads: PerCall,
    num_v_heads: PerCall,
    k_head_dim: PerCall,
    v_head_dim: PerCall,
    removes: bool = True,
) -> KernelWork:
    """Work of a gated delta rule over the tokens of each sequence.

    Args:
        k_head_dim: Width of a query and key head. [element]
        v_head_dim: Width of a value head. [element]
        removes: Whether a token also removes from the state, which takes scores and an inverse for every value head; a
            state space or lightning attention has scores for every key head alone.
    """
    peak, tokens = narrow_rate(device, "bf16"), batch_size * seq_len
    heads = batch_size * num_v_heads
    steps = np.ceil(seq_len / CHUNK_TOKENS)
    # Within a chunk scores and their inverse; across chunks the state's update and its product with the queries.
    score_width = 2.0 * k_head_dim if removes else k_head_dim * num_k_heads / num_v_heads
    per_token = 2.0 * CHUNK_TOKENS * (score_width + v_head_dim) + 4.0 * k_head_dim * v_head_dim
    flops = tokens * num_v_heads * per_token
    moved = tokens * (2.0 * num_k_heads * k_head_dim + 2.0 * num_v_heads * v_head_dim) * _ELEMENT_BYTES
    states_s = 2.0 * heads * k_head_dim * v_head_dim * _STATE_BYTES / rates.bytes_per_s
    chunk_states = heads * steps * k_head_dim * v_head_dim * _ELEMENT_BYTES
    moved_s = moved / rates.bytes_per_s
    return KernelWork(
        compute={
            "chunks": flops / peak,
            "tail": tail_of(heads, rates.num_sms) * flops / peak / np.maximum(heads / rates.num_sms, 1e-9),
        },
        memory={"activations": moved_s, "states": states_s, "states of chunks": chunk_states / rates.bytes_per_s},
        serial={
            "start": np.full_like(moved_s, NOMINAL_START_S),
            "steps": steps * _STEP_CYCLES / rates.clock_hz,
            "tokens": seq_len * 10.0 / rates.clock_hz,
            "rounds": np.ceil(heads / rates.num_sms) * _ROUND_CYCLES / rates.clock_hz,
        },
        roofline_s=np.maximum(flops / peak / 4.0, moved_s),
        places={
            "heads": num_v_heads,
            "sequences": batch_size,
            "sequences x heads": heads,
            "tokens of a sequence": seq_len,
        },
        rare=frozenset({"tokens"}),
    )


def sparse_work(
    device: Device,
    rates: KernelRates,
    *,
    batch_size: PerCall,
    query_len: PerCall,
    context_len: PerCall,
    num_heads: PerCall,
    compress_ratio: PerCall,
    hidden_size: float,
    selected: float,
    is_module: bool,
    gemm_dtype: str,
    cache_dtype: str,
) -> KernelWork:
    """Work of sparse attention: indexer, selection, attention to the selected tokens, and projections of a module.

    Args:
        context_len: Tokens that the last one may attend to.
        num_heads: Query heads of this device.
        compress_ratio: Tokens that one compressed token stands for; 1 where none are compressed.
        hidden_size: Width of the residual stream. [element]
        selected: Most tokens that a query attends to.
        is_module: Whether the projections belong to it.
    """
    head_dim, index_dim = 512.0, 128.0
    tokens = batch_size * query_len
    ratio = np.maximum(compress_ratio, 1.0)
    seen = (context_len - (query_len - 1.0) / 2.0) / ratio
    attended = np.minimum(seen, selected)
    wide, narrow = narrow_rate(device, "bf16"), narrow_rate(device, "fp8")
    cache_bytes = get_dtype(cache_dtype).num_bytes
    scores = tokens * seen
    blocks = tokens * np.ceil(num_heads / 64.0)
    compute = {
        "indexer": scores * 64.0 * index_dim * 2.0 / narrow,
        "attention": tokens * attended * num_heads * 4.0 * head_dim / wide,
        "padded heads": tokens * attended * np.ceil(num_heads / 64.0) * 64.0 * 4.0 * head_dim / wide,
    }
    memory = {
        "selection": scores * 8.0 / rates.bytes_per_s,
        "cache": batch_size * context_len / ratio * (head_dim + index_dim) * cache_bytes / rates.bytes_per_s,
        "gathered": tokens * attended * head_dim * cache_bytes / rates.bytes_per_s,
        "queries": tokens * num_heads * 2.0 * head_dim * _ELEMENT_BYTES / rates.bytes_per_s,
    }
    serial = {
        "start": np.full_like(tokens, NOMINAL_START_S),
        "rounds": np.ceil(blocks / rates.num_sms) * _ROUND_CYCLES / rates.clock_hz,
        "chain": seen * 10.0 / rates.clock_hz,
    }
    rare = {"padded heads", "chain"}
    if is_module:
        peak, width = narrow_rate(device, gemm_dtype), get_dtype(gemm_dtype).num_bytes
        rows = np.ceil(tokens / 64.0) * 64.0
        down, per_head = hidden_size * 2048.0 + 64.0 * index_dim * 1536.0, 1536.0 * 192.0 + 128.0 * hidden_size
        compute["projections"] = 2.0 * rows * down / peak
        compute["heads"] = 2.0 * rows * num_heads * (per_head + 128.0 * head_dim * 2.0) / peak
        memory["weights"] = down * width / rates.bytes_per_s + np.zeros_like(tokens)
        memory["weights of heads"] = num_heads * per_head * width / rates.bytes_per_s
        memory["activations"] = tokens * hidden_size * 4.0 * _ELEMENT_BYTES / rates.bytes_per_s
    return KernelWork(
        compute=compute,
        memory=memory,
        serial=serial,
        roofline_s=np.maximum(compute["attention"] / 4.0, memory["cache"] / 8.0),
        places={
            "heads": num_heads,
            "sequences": batch_size,
            "sequences x heads": batch_size * num_heads,
            "queries": query_len,
            "keys": context_len,
            "tokens": tokens,
        },
        rare=frozenset(rare),
    )
