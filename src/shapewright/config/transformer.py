"""TransformerConfig: the shape of a transformer, with Hugging Face's names and the paper's letters as symbols."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from shapewright.config.validate import check_and_resolve
from shapewright.fields import note

STACKS = ("decoder", "encoder", "encoder-decoder")
NORMS = ("layernorm", "rmsnorm")
POSITION_EMBEDDINGS = ("learned", "rotary", "alibi", "relative", "none")
QK_NORMS = ("none", "per-head", "per-layer", "l2")
WINDOW_KINDS = ("sliding", "chunked")


class LayerGroup(NamedTuple):
    """Layers of one stack that are alike.

    Attributes:
        window: Positions that a query may see, 0 for all.
        is_moe: Whether the MLP is a mixture of experts.
        num_layers: How many such layers there are.
    """

    window: int
    is_moe: bool
    num_layers: int


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Hyperparameters of one transformer, dense or mixture of experts, of any of the three stacks.

    For an encoder-decoder, ``num_layers`` counts decoder layers and ``num_encoder_layers`` encoder layers; a decoder
    layer then has cross-attention, with one normalisation more than ``num_norms_per_layer``.
    Multi-head latent attention (MLA) is on when ``kv_lora_rank`` is above zero; ``head_dim`` is then the whole width
    of a query head (the part without position plus ``qk_rope_head_dim``).

    Zeros that stand for a default are filled in: ``num_kv_heads`` by num_heads, ``head_dim`` by hidden_size //
    num_heads, ``v_head_dim`` by head_dim, ``intermediate_size`` by 4 * hidden_size, ``embedding_size`` by hidden_size,
    ``moe_intermediate_size`` by intermediate_size, ``num_encoder_layers`` by num_layers. Tuples over layers are cut
    to their shortest repeating part.

    Raises:
        ConfigError: a field out of its range, or fields that contradict each other.

    >>> config = TransformerConfig(hidden_size=2560, num_layers=32, num_heads=32, vocab_size=50257)
    >>> config.head_dim, config.num_kv_heads, config.intermediate_size
    (80, 32, 10240)
    """

    # Shape
    hidden_size: int = note("width of the residual stream", required=True, symbol="h")
    num_layers: int = note("transformer layers (decoder layers of an encoder-decoder)", required=True, symbol="L")
    num_heads: int = note("query heads", required=True, symbol="a")
    vocab_size: int = note("rows of the embedding and of the logit matrix", required=True, symbol="v")
    num_kv_heads: int = note(
        "key-value heads; fewer than num_heads is grouped-query attention", default=0, symbol="a_kv"
    )
    head_dim: int = note("width of a query and key head", default=0, symbol="d")
    v_head_dim: int = note("width of a value head", default=0, symbol="d_v")
    intermediate_size: int = note("inner width of the MLP", default=0, symbol="f")
    max_position_embeddings: int = note("longest sequence that the model is made for", default=2048)

    # Stack
    stack: str = note("which stacks there are", default="decoder", choices=STACKS)
    num_encoder_layers: int = note("encoder layers of an encoder-decoder", default=0)
    parallel_attention_mlp: bool = note("attention and MLP read the same input and are added together", default=False)
    norm: str = note("normalisation", default="layernorm", choices=NORMS)
    norm_bias: bool = note("normalisations have a bias", default=False)
    norm_affine: bool = note("normalisations have a learned scale", default=True)
    num_norms_per_layer: int = note("normalisations of the residual stream in one layer", default=2)
    has_final_norm: bool = note("a normalisation after the last layer", default=True)
    hidden_dropout: float = note("dropout after attention and MLP in training", default=0.0)
    attention_dropout: float = note("dropout on attention weights in training", default=0.0)

    # Attention
    attention_windows: tuple[int, ...] = note(
        "window of each layer, 0 for all positions; repeated over the layers", default=()
    )
    attention_window_kind: str = note(
        "sliding: the last positions; chunked: the part of a fixed chunk before the query",
        default="sliding",
        choices=WINDOW_KINDS,
    )
    fused_qkv: bool = note("queries, keys and values come from one GEMM", default=False)
    qkv_bias: bool = note(
        "query, key and value projections have a bias (MLA: their first, compressing ones)", default=False
    )
    attention_out_bias: bool = note("the projection after attention has a bias", default=False)
    qk_norm: str = note(
        "normalisation of queries and keys; l2 has no weights, and is on layers with rotary positions alone",
        default="none",
        choices=QK_NORMS,
    )
    qk_norm_bias: bool = note("normalisations of queries and keys have a bias", default=False)
    attention_sinks: bool = note("one learned logit per head joins each softmax", default=False)
    q_lora_rank: int = note("MLA: rank of the compressed queries, 0 for none", default=0)
    kv_lora_rank: int = note("MLA: rank of the compressed keys and values, 0 for no MLA", default=0)
    qk_rope_head_dim: int = note("MLA: part of a query head that carries the position", default=0)

    # MLP and experts
    activation: str = note("activation of the MLP", default="gelu")
    gated_mlp: bool = note("the MLP has a gate (SwiGLU, GeGLU): three matrices instead of two", default=False)
    fused_gate_up: bool = note("gate and up projection are one GEMM", default=False)
    mlp_bias: bool = note("MLP projections have a bias", default=False)
    num_experts: int = note("routed experts, 0 for a dense model", default=0, symbol="E")
    num_experts_per_token: int = note("routed experts that each token uses", default=0, symbol="k_e")
    moe_intermediate_size: int = note("inner width of one routed expert", default=0, symbol="f_e")
    shared_expert_intermediate_size: int = note("inner width of all shared experts together", default=0)
    shared_expert_gate: bool = note("a learned gate of one number per token scales the shared experts", default=False)
    router_bias: bool = note("the router has a bias", default=False)
    expert_bias: bool = note("projections of routed experts have a bias", default=False)
    expert_clamp: bool = note("what routed experts activate is clamped first (swiglu_limit)", default=False)
    moe_layers: tuple[bool, ...] = note(
        "which layers have experts, empty for all; repeated over the layers", default=()
    )

    # Embeddings and head
    tied_embeddings: bool = note("the logit matrix is the embedding matrix", default=False)
    embedding_size: int = note("width of the embedding, projected to hidden_size where they differ", default=0)
    embedding_norm: bool = note("a normalisation after the embedding", default=False)
    num_token_types: int = note("rows of the token type (segment) embedding, 0 for none", default=0)
    position_embedding: str = note("how positions enter", default="rotary", choices=POSITION_EMBEDDINGS)
    rotary_layers: tuple[bool, ...] = note(
        "which layers have the rotary positions, empty for all; repeated over the layers", default=()
    )
    position_offset: int = note("unused rows before the first learned position", default=0)
    num_relative_buckets: int = note("rows of the relative position bias of one stack, 0 for none", default=0)
    head_transform: bool = note("a square projection, activation and normalisation before the logits", default=False)
    lm_head_bias: bool = note("the logit matrix has a bias", default=False)

    # Provenance
    name: str = note("name to print", default="")
    model_type: str = note("Hugging Face model_type that this was read from, empty for flags", default="")

    def __post_init__(self) -> None:
        for field_name, value in check_and_resolve(self).items():
            object.__setattr__(self, field_name, value)

    @property
    def title(self) -> str:
        """What to call it in a sentence: its name, or its family, or ``this model``."""
        return self.name or self.model_type or "this model"

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return self.num_experts > 0

    @property
    def is_mla(self) -> bool:
        """Whether attention is multi-head latent attention."""
        return self.kv_lora_rank > 0

    @property
    def has_cross_attention(self) -> bool:
        """Whether decoder layers attend to an encoder."""
        return self.stack == "encoder-decoder"

    @property
    def is_causal(self) -> bool:
        """Whether a position of the main stack sees only those before it."""
        return self.stack != "encoder"

    def window_of_layer(self, index: int) -> int:
        """Window of one layer of the main stack, 0 for all positions."""
        return self.attention_windows[index % len(self.attention_windows)] if self.attention_windows else 0

    def is_moe_layer(self, index: int) -> bool:
        """Whether one layer of the main stack has experts."""
        return self.is_moe and (not self.moe_layers or self.moe_layers[index % len(self.moe_layers)])

    def is_rotary_layer(self, index: int) -> bool:
        """Whether one layer of the main stack turns queries and keys by their positions."""
        if self.position_embedding != "rotary":
            return False
        return not self.rotary_layers or self.rotary_layers[index % len(self.rotary_layers)]

    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Distinct layers of the main stack with their counts, in order of first appearance.

        The main stack is the decoder; of an encoder-only model, the encoder.

        >>> config = TransformerConfig(
        ...     hidden_size=64, num_layers=7, num_heads=4, vocab_size=100, attention_windows=(32, 32, 0)
        ... )
        >>> list(map(tuple, config.layer_groups()))
        [(32, False, 5), (0, False, 2)]
        """
        windows, experts = self.attention_windows or (0,), (self.is_moe and self.moe_layers) or (self.is_moe,)
        period = math.lcm(len(windows), len(experts))
        counts: dict[tuple[int, bool], int] = {}
        for first in range(min(period, self.num_layers)):
            kind = (windows[first % len(windows)], experts[first % len(experts)])
            # Layers first, first + period, first + 2 * period, ... are the same by construction.
            counts[kind] = counts.get(kind, 0) + -(-(self.num_layers - first) // period)
        return tuple(LayerGroup(window, is_moe, num_layers) for (window, is_moe), num_layers in counts.items())

    def encoder_layer_groups(self) -> tuple[LayerGroup, ...]:
        """Layers of the encoder of an encoder-decoder; empty for all other models."""
        if not self.has_cross_attention:
            return ()
        return (LayerGroup(window=0, is_moe=False, num_layers=self.num_encoder_layers),)
