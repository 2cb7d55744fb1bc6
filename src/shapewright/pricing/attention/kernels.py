"""Shared parts of the fused-attention model: sizes of a call, rates of a device, and how parts of a time combine.

Legend: b sequences, a query heads, a_kv key-value heads, g = a / a_kv, q query and c key tokens, d head width, SM a
streaming multiprocessor, cycles at the boost clock. Formulas: attention.prefill and attention.decode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from shapewright.core.errors import CalibrationError
from shapewright.core.records import dataclass

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from jaxtyping import Float

    PerCall = Float[np.ndarray, "*calls"]
    AnyShape = Float[np.ndarray, "..."]
    _Parameters = TypeVar("_Parameters", bound=DataclassInstance)

# Steepness of the last-level cache's edge: with 8, the resident fraction falls from 0.9 to 0.1 between 0.76 and 1.32 of
# its reach.
_CACHE_EDGE_POWER = 8.0
# Slack so that rounding in floating division does not open another tile.
CEIL_SLACK = 1e-9

CALL_SIZES = ("batch_size", "query_len", "kv_len", "num_heads", "num_kv_heads", "head_dim", "v_head_dim", "window_size")
"""Sizes of a call, as operations and AttentionShape name them."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Sizes of attention calls as float arrays of one shape; ``causal`` applies to all of them.

    Attributes:
        batch_size: Sequences.
        query_len: Query tokens per sequence.
        kv_len: Key tokens per sequence.
        num_heads: Query heads.
        num_kv_heads: Key-value heads.
        head_dim: Width of query and key heads. [element]
        v_head_dim: Width of value heads. [element]
        window_size: Latest keys that a query attends to; 0 means all.
        causal: Whether queries attend only to keys up to their position.
        element_bytes: Width of queries and outputs. [byte]
        kv_element_bytes: Width of keys and values in memory. [byte]
        values_in_keys: Whether values are part of the keys and need no separate read.
    """

    batch_size: PerCall
    query_len: PerCall
    kv_len: PerCall
    num_heads: PerCall
    num_kv_heads: PerCall
    head_dim: PerCall
    v_head_dim: PerCall
    window_size: PerCall
    causal: bool
    element_bytes: float
    kv_element_bytes: float
    values_in_keys: bool = False

    @property
    def kv_width(self) -> PerCall:
        """Elements of one key and its value in memory. [element]"""
        return self.head_dim if self.values_in_keys else self.head_dim + self.v_head_dim

    @property
    def kv_bytes(self) -> PerCall:
        """Keys and values of all sequences and heads. [byte]"""
        num_keys = self.batch_size * self.kv_len * self.num_kv_heads
        num_bytes: PerCall = num_keys * self.kv_width * self.kv_element_bytes
        return num_bytes

    @property
    def q_and_out_bytes(self) -> PerCall:
        """Queries and outputs. [byte]"""
        width = (self.head_dim + self.v_head_dim) * self.element_bytes
        num_bytes: PerCall = self.batch_size * self.query_len * self.num_heads * width
        return num_bytes


@dataclass(frozen=True, kw_only=True)
class AttentionRates:
    """Data-sheet numbers that attention needs.

    Attributes:
        flops_per_s: Dense rate of the device for the arithmetic's dtype. [flop/s]
        bandwidth_bytes_per_s: Memory bandwidth. [byte/s]
        num_sms: Number of SMs.
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

    total_s: PerCall
    compute_s: PerCall
    memory_s: PerCall
    start_s: PerCall


def read_parameters(kind: type[_Parameters], raw: Mapping[str, Any], record_id: str) -> _Parameters:
    """Read one kernel's constants from a record.

    Raises:
        CalibrationError: a constant is missing.
    """
    missing = [field.name for field in fields(kind) if field.name not in raw and field.default is MISSING]
    if missing:
        raise CalibrationError(
            f"attention record {record_id} lacks {', '.join(missing)}; "
            "run python -m shapewright.measure.refit attention"
        )
    return kind(**{field.name: raw[field.name] for field in fields(kind) if field.name in raw})


def pad_head(head_dim: PerCall, head_dims: Sequence[float]) -> PerCall:
    """Head width that the kernel computes: the next of head_dims, or the width itself beyond the last. [element]"""
    if not head_dims:
        return head_dim
    compiled = np.asarray(head_dims, dtype=float)
    index = np.minimum(np.searchsorted(compiled, head_dim), len(compiled) - 1)
    padded: PerCall = np.maximum(compiled[index], head_dim)
    return padded


@runtime_checkable
class _Cached(Protocol):
    """Constants of a kernel whose traffic the last-level cache may serve."""

    @property
    def l2_reach_fraction(self) -> float: ...

    @property
    def l2_bytes_per_sm_clock(self) -> float: ...


def count_effective_waves(waves: AnyShape, tail_fraction: float) -> AnyShape:
    """Full waves plus a fraction of the incomplete last one: waves + tail_fraction * (ceil(waves) - waves)."""
    effective: AnyShape = waves + tail_fraction * (np.ceil(waves - CEIL_SLACK) - waves)
    return effective


def join(compute_s: AnyShape, memory_s: AnyShape, power: float) -> AnyShape:
    """Time of two overlapping parts: (compute^p + memory^p)^(1/p). [s]

    Their sum at p = 1, the longer one as p grows.
    """
    worst = np.maximum(compute_s, memory_s)
    joined: AnyShape = worst * ((compute_s / worst) ** power + (memory_s / worst) ** power) ** (1.0 / power)
    return joined


def resident_fraction(footprint_bytes: AnyShape, rates: AttentionRates, p: _Cached) -> AnyShape:
    """Fraction of traffic that the last-level cache serves: 1 for a small footprint, 0 beyond the cache's reach."""
    reach_bytes = max(rates.l2_bytes * p.l2_reach_fraction, 1.0)
    share: AnyShape = 1.0 / (1.0 + np.minimum(footprint_bytes / reach_bytes, 1e6) ** _CACHE_EDGE_POWER)
    return share


def traffic_factor(resident: AnyShape, rates: AttentionRates, p: _Cached) -> AnyShape:
    """Factor on traffic time, below 1 where the last-level cache serves it faster than memory."""
    cache_bytes_per_s = p.l2_bytes_per_sm_clock * rates.num_sms * rates.clock_hz
    speedup = max(cache_bytes_per_s / rates.bandwidth_bytes_per_s, 1.0)
    factor: AnyShape = 1.0 - resident * (1.0 - 1.0 / speedup)
    return factor
