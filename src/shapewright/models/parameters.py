"""Exact parameter counts by component.

Legend: h hidden_size, e embedding_size, a num_heads, a_kv num_kv_heads, d head_dim, d_v v_head_dim, f inner width of
an MLP, E num_experts, v vocab_size, r_q and r_kv the ranks of MLA, d_r qk_rope_head_dim.

A projection from x to y features has x*y weights, plus y with a bias. The matrices of a layer are those of
Vaswani et al. (arXiv 1706.03762, sections 3.2 and 3.3), with grouped keys and values (arXiv 2305.13245), gates
(arXiv 2002.05202), MLA (arXiv 2405.04434, section 2.1) and experts (arXiv 2401.06066, section 3).
"""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING

from shapewright.core.records import dataclass
from shapewright.models.compressed_attention import make_compressed
from shapewright.models.image_linears import count_end_parameters, count_scaling_parameters
from shapewright.models.layers import ATTENTION, COMPRESSED_LAYERS, CROSS_ATTENTION, WITH_SOFTMAX, mixers_of
from shapewright.models.mixers import make_mixer

if TYPE_CHECKING:
    from shapewright.models.layers import LayerGroup
    from shapewright.models.transformer import TransformerConfig


@dataclass(frozen=True, kw_only=True)
class LayerParameters:
    """Parameters of one layer.

    Attributes:
        attention: Self-attention, including its normalizations, sinks, biases, compressors and indexer.
        linear: Linear attention, state space or short convolution, with its normalizations.
        cross_attention: Attention to the encoder, in decoder layers of an encoder-decoder, or to images.
        mlp: Dense MLP; 0 in a layer with experts.
        experts: All routed experts.
        active_experts: Routed experts used by one token.
        shared_experts: Shared experts, with their gate.
        router: Router.
        norms: Normalizations of the residual stream, and what scales, shifts, gates or mixes the branches of the layer.
    """

    attention: int
    linear: int = 0
    cross_attention: int = 0
    mlp: int = 0
    experts: int = 0
    active_experts: int = 0
    shared_experts: int = 0
    router: int = 0
    norms: int = 0

    @property
    def total(self) -> int:
        """All parameters of the layer."""
        return self.active - self.active_experts + self.experts

    @property
    def active(self) -> int:
        """Parameters used by one token."""
        mixers = self.attention + self.linear + self.cross_attention
        return mixers + self.mlp + self.shared_experts + self.router + self.norms + self.active_experts


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    """Parameters of a model; a tied logit matrix is counted once, as embedding.

    Attributes:
        token_embedding: Token embedding matrix.
        other_embedding: Positions, token types, relative position biases, embedding normalization and the
            projections between embedding_size and hidden_size.
        final_norms: Normalizations after the last layer of each stack, and the sum of parallel residual streams.
        head: Untied logit matrix, its bias, the transform before it, and the projections and norms of multi-token
            prediction.
        layers: Each kind of layer of the main stack with its parameters.
        encoder_layers: Each kind of layer of the encoder of an encoder-decoder with its parameters.
        mtp_layers: The layers of multi-token prediction with their parameters.
        vision: Vision tower with its projector.
    """

    token_embedding: int
    other_embedding: int
    final_norms: int
    head: int
    layers: tuple[tuple[LayerGroup, LayerParameters], ...]
    encoder_layers: tuple[tuple[LayerGroup, LayerParameters], ...] = ()
    mtp_layers: tuple[tuple[LayerGroup, LayerParameters], ...] = ()
    vision: int = 0

    @property
    def embedding(self) -> int:
        """Parameters before the first layer."""
        return self.token_embedding + self.other_embedding

    @cached_property
    def total(self) -> int:
        """All parameters."""
        return self._outside_layers + sum(group.num_layers * layer.total for group, layer in self._all_layers)

    @cached_property
    def active(self) -> int:
        """Parameters used by one token, embeddings included: all but those of unselected experts."""
        return self._outside_layers + sum(group.num_layers * layer.active for group, layer in self._all_layers)

    @property
    def non_embedding(self) -> int:
        """Parameters without those of the embeddings."""
        return self.total - self.embedding

    @cached_property
    def by_component(self) -> dict[str, int]:
        """Parameters of the model by component; the values add up to ``total``."""
        sums = {"embedding": self.embedding}
        for name in (spec.name for spec in fields(LayerParameters) if spec.name != "active_experts"):
            sums[name] = sum(group.num_layers * getattr(layer, name) for group, layer in self._all_layers)
        sums["final_norms"] = self.final_norms
        sums["head"] = self.head
        if self.vision:
            sums["vision"] = self.vision
        return sums

    @property
    def _all_layers(self) -> tuple[tuple[LayerGroup, LayerParameters], ...]:
        return self.layers + self.encoder_layers + self.mtp_layers

    @property
    def _outside_layers(self) -> int:
        return self.embedding + self.final_norms + self.head + self.vision


def count_parameters(config: TransformerConfig) -> ParameterCounts:
    """Count the parameters of a model with its language head.

    >>> from shapewright.models.transformer import TransformerConfig
    >>> llama_3_8b = TransformerConfig(
    ...     hidden_size=4096, num_layers=32, num_heads=32, num_kv_heads=8, intermediate_size=14336,
    ...     vocab_size=128256, norm="rmsnorm", gated_mlp=True,
    ... )
    >>> count_parameters(llama_3_8b).total
    8030261248
    """
    h, e, v = config.hidden_size, config.embedding_size, config.vocab_size
    num_stacks = 2 if config.num_encoder_layers else 1
    start, head = count_end_parameters(config) if config.patches is not None else (0, 0)
    if not config.tied_embeddings:
        head += e * v
    if config.lm_head_bias:
        head += v
    head += count_head_transform(config)
    # Norms of the token's embedding, of the hidden state and of the result; the matrix that joins the first two.
    head += config.num_mtp_layers * (2 * h * h + 3 * _norm(config))
    return ParameterCounts(
        token_embedding=v * e,
        other_embedding=start + count_other_embedding(config),
        final_norms=(num_stacks * _norm(config) if config.has_final_norm else 0) + _count_stream_sum(config),
        head=head,
        layers=tuple((group, count_layer_parameters(config, group)) for group in config.layer_groups()),
        encoder_layers=tuple(
            (group, count_layer_parameters(config, group, is_encoder=True)) for group in config.encoder_layer_groups()
        ),
        mtp_layers=tuple((group, count_layer_parameters(config, group)) for group in config.mtp_layer_groups()),
        vision=count_parameters(config.vision).total if config.vision is not None else 0,
    )


IMAGE_GATES = 2
"""Learned factors of a layer of cross-attention to images, one of each block (transformers, modeling_mllama.py)."""


def count_layer_parameters(
    config: TransformerConfig, group: LayerGroup, *, is_encoder: bool = False
) -> LayerParameters:
    """Count the parameters of one layer.

    Args:
        group: The kind of layer, one of ``config.layer_groups()`` or ``config.encoder_layer_groups()``.
        is_encoder: Whether the layer belongs to the encoder of an encoder-decoder.
    """
    has_cross_attention = config.has_cross_attention and not is_encoder
    num_norms = config.num_norms_per_layer + has_cross_attention
    mixers = mixers_of(group.layer_type)
    attention = 0
    if ATTENTION in mixers:
        attention = _latent_attention(config) if config.is_mla else _attention(config)
    elif group.layer_type in COMPRESSED_LAYERS:
        attention = make_compressed(config, group.layer_type).num_parameters
    linear = sum(make_mixer(config, mixer).num_parameters for mixer in mixers if mixer not in WITH_SOFTMAX)
    cross_attention = _attention(config) if has_cross_attention else 0
    if CROSS_ATTENTION in mixers:
        # Norms of each head's queries and keys, and gates of attention and MLP.
        cross_attention = _attention(config) + 2 * config.head_dim + IMAGE_GATES
    norms = num_norms * _norm(config) + count_scaling_parameters(config) + _count_stream_mixing(config)
    if not group.is_moe:
        mlp = _mlp(config, config.intermediate_size, has_bias=config.mlp_bias) if group.has_mlp else 0
        return LayerParameters(
            attention=attention, linear=linear, cross_attention=cross_attention, mlp=mlp, norms=norms
        )
    h = config.hidden_size
    expert = _mlp(config, config.moe_intermediate_size, has_bias=config.expert_bias)
    return LayerParameters(
        attention=attention,
        linear=linear,
        cross_attention=cross_attention,
        experts=config.num_experts * expert,
        active_experts=config.num_experts_per_token * expert,
        # the gate is one number per token
        shared_experts=_mlp(config, config.shared_expert_intermediate_size, has_bias=False)
        + h * config.shared_expert_gate,
        router=(h + config.router_bias) * config.num_experts,
        norms=norms,
    )


def stream_weights(config: TransformerConfig) -> int:
    """Count the weights that mix n residual streams around one block: n before it, n after it, n^2 between streams.

    Source: arXiv 2409.19606, section 2; modeling_deepseek_v4.py of transformers 5.24 (DeepseekV4HyperConnection).
    """
    streams = config.residual_streams
    return (2 + streams) * streams


def _count_stream_mixing(config: TransformerConfig) -> int:
    """Each block's mixing: a projection of all streams to its weights, a bias of each, and three scales."""
    if config.residual_streams == 1:
        return 0
    return 2 * (stream_weights(config) * (config.residual_streams * config.hidden_size + 1) + 3)


def _count_stream_sum(config: TransformerConfig) -> int:
    """The sum of all streams after the last layer: a projection to one weight of each, their biases, and a scale."""
    streams = config.residual_streams
    return streams * (streams * config.hidden_size + 1) + 1 if streams > 1 else 0


def _attention(config: TransformerConfig) -> int:
    """Queries h -> a*d, keys h -> a_kv*d, values h -> a_kv*d_v, output a*d_v -> h."""
    h = config.hidden_size
    queries = config.num_heads * config.head_dim * (1 + config.attention_output_gate)
    qkv = queries + config.num_kv_heads * (config.head_dim + config.v_head_dim)
    out = config.num_heads * config.v_head_dim * h
    return (h + config.qkv_bias) * qkv + out + h * config.attention_out_bias + _qk_norm(config) + _sinks(config)


def _latent_attention(config: TransformerConfig) -> int:
    """MLA (arXiv 2405.04434, section 2.1): low-rank queries and one low-rank latent for keys and values."""
    h, a, d = config.hidden_size, config.num_heads, config.head_dim
    r_q, r_kv, d_r = config.q_lora_rank, config.kv_lora_rank, config.qk_rope_head_dim
    # h -> r_q (with bias, if any), a normalization of r_q, then r_q -> a*d; without r_q, h -> a*d
    queries = (h + config.qkv_bias) * r_q + r_q + r_q * a * d if r_q else h * a * d
    # h -> r_kv + d_r, a normalization of r_kv, then r_kv -> non-rotary keys and values of every head
    keys_values = (h + config.qkv_bias) * (r_kv + d_r) + r_kv + r_kv * a * (d - d_r + config.v_head_dim)
    out = a * config.v_head_dim * h + h * config.attention_out_bias
    return queries + keys_values + out + _sinks(config) + count_indexer(config)


def count_indexer(config: TransformerConfig) -> int:
    """Count the parameters of an indexer: queries, one key with its layer norm, and a weight for each head.

    Source: DeepSeek-V3.2 technical report, eq. 1; transformers 5.23, modeling_deepseek_v32.py.
    """
    heads, width = config.index_num_heads, config.index_head_dim
    return config.q_lora_rank * heads * width + config.hidden_size * (width + heads) + 2 * width


def _qk_norm(config: TransformerConfig) -> int:
    if config.qk_norm == "per-head":  # one scale of width d for all query heads, one for all key heads
        width = 2 * config.head_dim
    elif config.qk_norm == "per-layer":  # a scale for every feature of every head
        width = (config.num_heads + config.num_kv_heads) * config.head_dim
    else:
        width = 0
    return width * (1 + config.qk_norm_bias)


def _sinks(config: TransformerConfig) -> int:
    return config.num_heads * config.attention_sinks


def _mlp(config: TransformerConfig, inner: int, *, has_bias: bool) -> int:
    """Up (and gate) h -> f, down f -> h."""
    h, num_up = config.hidden_size, 2 if config.gated_mlp else 1
    return (num_up + 1) * h * inner + (num_up * inner + h) * has_bias


def _norm(config: TransformerConfig) -> int:
    return config.hidden_size * (config.norm_affine + config.norm_bias)


def count_head_transform(config: TransformerConfig) -> int:
    """Count the parameters of BERT's linear layer and norm before the logits; 0 without them."""
    h = config.hidden_size
    return h * h + h + _norm(config) if config.head_transform else 0


def count_other_embedding(config: TransformerConfig) -> int:
    """Count the parameters before the first layer beside those of tokens and patches."""
    h, e, num_stacks = config.hidden_size, config.embedding_size, 2 if config.num_encoder_layers else 1
    total = (config.num_token_types + config.num_special_tokens) * h
    if config.position_embedding == "learned" and config.patches is None:
        total += (config.max_position_embeddings + config.position_offset) * h
    if config.embedding_norm:
        total += _norm(config)
    if e != h:
        total += 2 * e * h  # into the stack and out of it
    # one bias per head and bucket, shared by the layers of a stack
    return total + num_stacks * config.num_relative_buckets * config.num_heads
