"""Scans of linear attention and of state spaces, and the short causal convolutions before them.

Legend: T tokens, H value heads, d_k and d_v widths of a key and of a value head.

A scan keeps a state of H matrices d_k x d_v per sequence instead of all keys and values. State spaces in these letters
(arXiv 2405.21060, section 7): heads of Mamba-2 are value heads, its B and C are keys and queries shared by groups of
heads, and its state size is d_k. Mamba-1 has one value head of width 1 per channel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shapewright.core.dtypes import get_dtype
from shapewright.core.records import dataclass
from shapewright.lowering.operations.base import OperationBase
from shapewright.models.mixers import STATE_BYTES

if TYPE_CHECKING:
    from shapewright.core.numeric import Count, Numeric


class ScanRule(NamedTuple):
    """How a scan updates its state.

    Attributes:
        products: Products of a token's vectors with the d_k x d_v state: the added outer product and the queries, and
            for delta rules also the removed part.
        inputs: Vectors of value width read for each token: values, and gates of that width.
    """

    products: int
    inputs: int


SCAN_RULES = {
    "gated_delta_net": ScanRule(products=3, inputs=1),  # arXiv 2412.06464, eq. 10
    # arXiv 2510.26692, eq. 1: also a decay of each channel of a key, which is as wide as a value
    "kimi_delta_attention": ScanRule(products=3, inputs=2),
    "lightning_attention": ScanRule(products=2, inputs=1),  # arXiv 2401.04658, eq. 3
    "mamba2": ScanRule(products=2, inputs=1),  # arXiv 2405.21060, section 6
    "mamba": ScanRule(products=2, inputs=3),  # arXiv 2312.00752, algorithm 2: also steps and the gate
}
"""Rules of scans by name."""


@dataclass(frozen=True, kw_only=True)
class Scan(OperationBase):
    """One scan over the tokens of ``batch_size`` sequences.

    Attributes:
        rule: One of SCAN_RULES.
        batch_size: Sequences.
        seq_len: New tokens of each sequence; 1 in decode.
        num_k_heads: Query and key heads on this device (groups of a state space).
        num_v_heads: Value heads on this device.
        k_head_dim: Width of a query and key head (state size of a state space). [element]
        v_head_dim: Width of a value head. [element]
        has_cache: Whether states are read from and written to memory between passes, as in serving.
        is_backward: Whether this is the gradient.
    """

    rule: str
    batch_size: Count
    seq_len: Count
    num_k_heads: Count
    num_v_heads: Count
    k_head_dim: Count
    v_head_dim: Count
    has_cache: bool = False
    is_backward: bool = False

    kind = "scan"

    @property
    def flops(self) -> Numeric:
        """FLOPs of the recurrent form: each multiplication of a token with the state; backward twice as many. [flop]

        >>> Scan(name="x", rule="mamba2", batch_size=1, seq_len=3, num_k_heads=1, num_v_heads=2, k_head_dim=4,
        ...      v_head_dim=8).flops
        768.0
        """
        elements = 1.0 * self.batch_size * self.seq_len * self.num_v_heads * self.k_head_dim * self.v_head_dim
        return (1.0 + self.is_backward) * 2.0 * SCAN_RULES[self.rule].products * elements

    @property
    def state_bytes(self) -> Numeric:
        """Size of the states of all sequences. [byte]"""
        return STATE_BYTES * self.batch_size * self.num_v_heads * self.k_head_dim * self.v_head_dim

    @property
    def num_bytes(self) -> Numeric:
        """Traffic if inputs are read and outputs written once, and in serving the states read and written. [byte]"""
        keys = 2.0 * self.num_k_heads * self.k_head_dim
        values = (1.0 + SCAN_RULES[self.rule].inputs) * self.num_v_heads * self.v_head_dim
        moved = 1.0 * self.batch_size * self.seq_len * (keys + values) * get_dtype(self.dtype).num_bytes
        return (1.0 + self.is_backward) * moved + 2.0 * self.has_cache * self.state_bytes


@dataclass(frozen=True, kw_only=True)
class CausalConv(OperationBase):
    """A causal convolution of each channel over a few tokens, with its activation.

    Attributes:
        rule: Kind of layer that it belongs to, one of SCAN_RULES or ``short_convolution``.
        batch_size: Sequences.
        seq_len: New tokens of each sequence; 1 in decode.
        channels: Channels on this device.
        width: Tokens that an output depends on.
        has_cache: Whether the last inputs are read from and written to memory between passes, as in serving.
        is_backward: Whether this is the gradient.
    """

    rule: str
    batch_size: Count
    seq_len: Count
    channels: Count
    width: Count
    has_cache: bool = False
    is_backward: bool = False

    kind = "convolution"

    @property
    def flops(self) -> Numeric:
        """Multiplications and additions; backward twice as many. [flop]

        >>> CausalConv(name="x", rule="mamba2", batch_size=1, seq_len=3, channels=8, width=4).flops
        192.0
        """
        return (1.0 + self.is_backward) * 2.0 * self.batch_size * self.seq_len * self.channels * self.width

    @property
    def num_bytes(self) -> Numeric:
        """Traffic with each channel of a token read and written once, and in serving its last inputs. [byte]"""
        moved = 2.0 * self.batch_size * self.seq_len * self.channels
        kept = 2.0 * self.has_cache * self.batch_size * self.channels * self.width
        return ((1.0 + 0.5 * self.is_backward) * moved + kept) * get_dtype(self.dtype).num_bytes
