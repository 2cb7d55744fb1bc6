"""Layers of linear attention, state spaces and short convolutions: their projections, convolution and scan.

Legend: h hidden_size, H value heads (``linear_num_value_heads``), G key heads (``linear_num_key_heads``; groups of a
state space), N width of a key head (``linear_key_head_dim``; state size), P width of a value head
(``linear_value_head_dim``), R rank of Mamba-1's steps, w tokens of the convolution.

One description gives both the parameters of a layer and its operations. Source of each: modeling_*.py of transformers
5.23 for the named type, and the paper: gated delta net (qwen3_next; arXiv 2412.06464), Kimi delta attention
(kimi_linear; arXiv 2510.26692), lightning attention (minimax; arXiv 2501.08313), Mamba-2 (mamba2; arXiv 2405.21060),
Mamba-1 (jamba; arXiv 2312.00752), short convolution (lfm2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from shapewright.core.records import dataclass

if TYPE_CHECKING:
    from collections.abc import Callable

    from shapewright.models.transformer import TransformerConfig


STATE_BYTES = 4.0
"""Width of one element of a scan's state: vLLM, sglang and transformers keep it in fp32. [byte]"""


class Projection(NamedTuple):
    """A linear layer of a mixer.

    Attributes:
        role: Its task.
        inputs: Width of its input. [element]
        outputs: Width of its output on one device. [element]
        has_bias: Whether it has a bias.
        is_partial: Whether the tensor axis splits its input, so that each device has a part of the sums.
    """

    role: str
    inputs: int
    outputs: int
    has_bias: bool = False
    is_partial: bool = False

    @property
    def num_parameters(self) -> int:
        """Weights and bias."""
        return (self.inputs + self.has_bias) * self.outputs


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """A layer without softmax attention on one device of the tensor axis.

    Attributes:
        kind: One of LINEAR_LAYERS.
        inputs: Projections of the layer's input, in order.
        out: Output projection.
        inner: Projections of what the convolution returns.
        conv_channels: Channels of the convolution; 0 without one.
        conv_width: Tokens that it spans.
        conv_bias: Whether it has a bias.
        num_k_heads: Key heads of the scan; 0 without one.
        num_v_heads: Value heads of the scan.
        k_head_dim: Width of a key head. [element]
        v_head_dim: Width of a value head. [element]
        norm_width: Width of the normalization before the output projection; 0 without one. [element]
        num_others: Parameters of norms, decays and steps.
    """

    kind: str
    inputs: tuple[Projection, ...]
    out: Projection
    inner: tuple[Projection, ...] = ()
    conv_channels: int = 0
    conv_width: int = 0
    conv_bias: bool = False
    num_k_heads: int = 0
    num_v_heads: int = 0
    k_head_dim: int = 0
    v_head_dim: int = 0
    norm_width: int = 0
    num_others: int = 0

    @property
    def projections(self) -> tuple[Projection, ...]:
        """All linear layers."""
        return (*self.inputs, *self.inner, self.out)

    @property
    def num_parameters(self) -> int:
        """Parameters of the layer without the norms of the residual stream."""
        convolution = self.conv_channels * (self.conv_width + self.conv_bias)
        return sum(each.num_parameters for each in self.projections) + convolution + self.num_others

    @property
    def state_elements(self) -> int:
        """Elements of the scan's state of one sequence."""
        return self.num_v_heads * self.k_head_dim * self.v_head_dim

    @property
    def conv_elements(self) -> int:
        """Inputs of the convolution that are kept for one sequence: all but one of those that an output depends on."""
        return self.conv_channels * (self.conv_width - 1) if self.conv_channels else 0


def make_mixer(config: TransformerConfig, kind: str, degree: int = 1) -> Mixer:
    """Describe a layer of a model.

    Args:
        kind: One of LINEAR_LAYERS.
        degree: Devices of the tensor axis, which split heads and channels.
    """
    if kind == "short_convolution":
        return _short_convolution(config, degree)
    return _SCANS[kind](config, config.linear_num_value_heads // degree, -(-config.linear_num_key_heads // degree))


def _short_convolution(config: TransformerConfig, degree: int) -> Mixer:
    """Two gates and values of width h; the gates are multiplied before and after the convolution."""
    h, own, has_bias = config.hidden_size, config.hidden_size // degree, config.linear_bias
    return Mixer(
        kind="short_convolution",
        inputs=(Projection("in", h, 3 * own, has_bias),),
        out=Projection("out", own, h, has_bias),
        conv_channels=own,
        conv_width=config.linear_conv_width,
        conv_bias=config.linear_conv_bias,
    )


def _gated_delta_net(config: TransformerConfig, heads: int, key_heads: int) -> Mixer:
    """Queries, keys, values, an output gate, and two numbers per value head: decay and step."""
    h, key, value = config.hidden_size, key_heads * config.linear_key_head_dim, heads * config.linear_value_head_dim
    widths = {
        "fused": {"qkvz": 2 * key + 2 * value, "ba": 2 * heads},
        "qkv": {"qkv": 2 * key + value, "z": value, "b": heads, "a": heads},
        "separate": {"q": key, "k": key, "v": value, "a": heads, "b": heads, "g": value},
    }[config.linear_projections]
    return Mixer(
        kind="gated_delta_net",
        inputs=tuple(Projection(role, h, width, config.linear_bias) for role, width in widths.items()),
        out=Projection("out", value, h, config.linear_bias),
        norm_width=value,
        # one decay and one step of each head, and a norm that the heads share
        num_others=2 * heads + config.linear_value_head_dim,
        **_scan(config, heads, key_heads, 2 * key + value),
    )


def _kimi_delta_attention(config: TransformerConfig, heads: int, key_heads: int) -> Mixer:
    """A gated delta net whose decay is one number per key channel; decay and gate have rank P."""
    h, key, value = config.hidden_size, key_heads * config.linear_key_head_dim, heads * config.linear_value_head_dim
    rank = config.linear_value_head_dim
    return Mixer(
        kind="kimi_delta_attention",
        inputs=(
            Projection("q", h, key),
            Projection("k", h, key),
            Projection("v", h, value),
            Projection("f_a", h, rank),
            Projection("f_b", rank, key),
            Projection("b", h, heads),
            Projection("g_a", h, rank),
            Projection("g_b", rank, value),
        ),
        out=Projection("out", value, h),
        norm_width=value,
        num_others=key + heads + config.linear_value_head_dim,
        **_scan(config, heads, key_heads, 2 * key + value),
    )


def _lightning_attention(config: TransformerConfig, heads: int, key_heads: int) -> Mixer:
    """Queries, keys and values of equal width from one GEMM, a fixed decay per head, and a gate."""
    h, value = config.hidden_size, heads * config.linear_value_head_dim
    key = key_heads * config.linear_key_head_dim
    return Mixer(
        kind="lightning_attention",
        inputs=(Projection("qkv", h, 2 * key + value), Projection("gate", h, value)),
        out=Projection("out", value, h),
        norm_width=value,
        num_others=value,
        **_scan(config, heads, key_heads, 0),
    )


def _mamba2(config: TransformerConfig, heads: int, key_heads: int) -> Mixer:
    """Gate, values, keys and queries of each group, and a step per head, from one GEMM."""
    h, value = config.hidden_size, heads * config.linear_value_head_dim
    channels = value + 2 * key_heads * config.linear_key_head_dim
    norm_width = value if config.linear_norm else 0
    return Mixer(
        kind="mamba2",
        inputs=(Projection("in", h, value + channels + heads, config.linear_bias),),
        out=Projection("out", value, h, config.linear_bias),
        norm_width=norm_width,
        # decay, step and skip of each head
        num_others=3 * heads + norm_width,
        **_scan(config, heads, key_heads, channels),
    )


def _mamba(config: TransformerConfig, heads: int, key_heads: int) -> Mixer:
    """Gate and values; steps of low rank, keys and queries are projected from the convolved values."""
    h, value, rank = config.hidden_size, heads * config.linear_value_head_dim, config.linear_step_rank
    state = config.linear_key_head_dim
    return Mixer(
        kind="mamba",
        inputs=(Projection("in", h, 2 * value, config.linear_bias),),
        inner=(Projection("x", value, rank + 2 * state, is_partial=True), Projection("dt", rank, value, has_bias=True)),
        out=Projection("out", value, h, config.linear_bias),
        # decay of each channel and state, skip of each channel, and norms of steps, keys and queries
        num_others=value * state + value + (rank + 2 * state if config.linear_norm else 0),
        **_scan(config, heads, key_heads, value),
    )


_SCANS: dict[str, Callable[[TransformerConfig, int, int], Mixer]] = {
    "gated_delta_net": _gated_delta_net,
    "kimi_delta_attention": _kimi_delta_attention,
    "lightning_attention": _lightning_attention,
    "mamba2": _mamba2,
    "mamba": _mamba,
}


def _scan(config: TransformerConfig, heads: int, key_heads: int, channels: int) -> dict[str, Any]:
    """Sizes of the scan, and of the convolution of ``channels``."""
    return {
        "num_k_heads": key_heads,
        "num_v_heads": heads,
        "k_head_dim": config.linear_key_head_dim,
        "v_head_dim": config.linear_value_head_dim,
        "conv_channels": channels,
        "conv_width": config.linear_conv_width,
        "conv_bias": config.linear_conv_bias,
    }
