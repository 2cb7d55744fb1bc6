"""What the kernels of fused attention share: sizes of a call, rates of a device, and how parts of a time join.

Legend: b sequences, a query heads, a_kv key-value heads, g = a / a_kv, q query and c key tokens, d head width, SM one
multiprocessor, cycles at the boost clock. Formulas: perf.attention_prefill and perf.attention_decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np

from shapewright.errors import CalibrationError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from numpy.typing import NDArray

    Array = NDArray[np.float64]
    _Parameters = TypeVar("_Parameters", bound=DataclassInstance)

# How sharp the edge of the last-level cache is; 8 falls from 0.9 to 0.1 between 0.76 and 1.32 of its reach.
_CACHE_EDGE_POWER = 8.0
# Rounding in floating division must not open another tile.
CEIL_SLACK = 1e-9


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


class KernelTime(NamedTuple):
    """Parts of a kernel's time. [s]"""

    total_s: Array
    compute_s: Array
    memory_s: Array
    start_s: Array


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


def pad_head(head_dim: Array, head_dims: tuple[float, ...]) -> Array:
    """Head width that the kernel computes: the next of head_dims, or the width itself beyond the last."""
    if not head_dims:
        return head_dim
    compiled = np.asarray(head_dims, dtype=float)
    index = np.minimum(np.searchsorted(compiled, head_dim), len(compiled) - 1)
    padded: Array = np.maximum(compiled[index], head_dim)
    return padded


class _Cached(Protocol):
    """Constants of a kernel whose traffic the last-level cache may serve."""

    @property
    def l2_reach_fraction(self) -> float: ...

    @property
    def l2_bytes_per_sm_clock(self) -> float: ...


def soften(waves: Array, tail_fraction: float) -> Array:
    """Whole waves, less the part of the last one that is not lost."""
    return waves + tail_fraction * (np.ceil(waves - CEIL_SLACK) - waves)


def join(compute_s: Array, memory_s: Array, power: float) -> Array:
    """Two overlapping parts: their sum at power 1, the longer one as the power grows."""
    worst = np.maximum(compute_s, memory_s)
    joined: Array = worst * ((compute_s / worst) ** power + (memory_s / worst) ** power) ** (1.0 / power)
    return joined


def resident_fraction(footprint_bytes: Array, rates: AttentionRates, p: _Cached) -> Array:
    """Share of traffic that the last-level cache serves: 1 for a small footprint, 0 beyond the cache's reach."""
    reach_bytes = max(rates.l2_bytes * p.l2_reach_fraction, 1.0)
    share: Array = 1.0 / (1.0 + np.minimum(footprint_bytes / reach_bytes, 1e6) ** _CACHE_EDGE_POWER)
    return share


def traffic_factor(resident: Array, rates: AttentionRates, p: _Cached) -> Array:
    """Factor on traffic time, below 1 where the last-level cache serves it faster than memory."""
    cache_bytes_per_s = p.l2_bytes_per_sm_clock * rates.num_sms * rates.clock_hz
    speedup = max(cache_bytes_per_s / rates.bandwidth_bytes_per_s, 1.0)
    factor: Array = 1.0 - resident * (1.0 - 1.0 / speedup)
    return factor
