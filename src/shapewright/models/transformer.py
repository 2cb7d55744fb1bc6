"""TransformerConfig: hyperparameters of a transformer, named as in Hugging Face, with symbols of arXiv 2401.14489.

``change_fields`` changes some of them; fields derived from them follow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import lcm
from typing import Any

from shapewright.core.errors import ConfigError, close_names, short_repr
from shapewright.core.fields import doc_field
from shapewright.core.records import dataclass
from shapewright.models.images import Patches
from shapewright.models.layers import (
    ATTENTION,
    COMPRESSED_LAYERS,
    CROSS_ATTENTION,
    WITH_SOFTMAX,
    LayerGroup,
    LayerKind,
    LayerPatterns,
    count_kinds,
    mixers_of,
)
from shapewright.models.validate import MAX_NUM_LAYERS, check_and_resolve

STACKS = ("decoder", "encoder", "encoder-decoder")
NORMS = ("layernorm", "rmsnorm")
POSITION_EMBEDDINGS = ("learned", "rotary", "alibi", "relative", "none")
QK_NORMS = ("none", "per-head", "per-layer", "l2")
WINDOW_KINDS = ("sliding", "chunked")
LINEAR_PROJECTIONS = ("fused", "qkv", "separate")
LAYER_PATTERNS = ("attention_windows", "moe_layers", "rotary_layers", "layer_types", "mlp_layers")
"""Fields with one value per layer, repeated."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Hyperparameters of a decoder, encoder or encoder-decoder, dense or with mixture of experts.

    For an encoder-decoder, ``num_layers`` counts decoder layers and ``num_encoder_layers`` encoder layers; a decoder
    layer then has cross-attention and one normalization more than ``num_norms_per_layer``.
    ``patches`` makes images the input instead of tokens; ``vision`` is the tower whose tokens a language model reads.
    ``kv_lora_rank`` above zero selects multi-head latent attention (MLA); ``head_dim`` is then the total width of a
    query head, including ``qk_rope_head_dim``.

    Attributes:
        patches: Image side of an encoder, or of a diffusion transformer; None for a model of tokens.
        vision: Vision tower with its projector; None for a language model alone.

    Zeros are replaced by defaults: ``num_kv_heads`` = num_heads, ``head_dim`` = hidden_size // num_heads,
    ``v_head_dim`` = head_dim, ``intermediate_size`` = 4 * hidden_size, ``embedding_size`` = hidden_size,
    ``moe_intermediate_size`` = intermediate_size, ``num_encoder_layers`` = num_layers. Tuples over layers are reduced
    to their shortest period.

    Raises:
        ConfigError: a field is out of range, or fields contradict each other.

    >>> config = TransformerConfig(hidden_size=2560, num_layers=32, num_heads=32, vocab_size=50257)
    >>> config.head_dim, config.num_kv_heads, config.intermediate_size
    (80, 32, 10240)
    """

    # Shape
    hidden_size: int = doc_field("width of the residual stream", required=True, symbol="h")
    num_layers: int = doc_field("transformer layers (decoder layers of an encoder-decoder)", required=True, symbol="L")
    num_heads: int = doc_field("query heads", required=True, symbol="a")
    vocab_size: int = doc_field("rows of the embedding and logit matrices", required=True, symbol="v")
    num_kv_heads: int = doc_field(
        "key-value heads; fewer than num_heads is grouped-query attention", default=0, symbol="a_kv"
    )
    head_dim: int = doc_field("width of a query and key head", default=0, symbol="d")
    v_head_dim: int = doc_field("width of a value head", default=0, symbol="d_v")
    intermediate_size: int = doc_field("inner width of the MLP", default=0, symbol="f")
    max_position_embeddings: int = doc_field("maximum sequence length of the model", default=2048)

    # Stack
    stack: str = doc_field("kind of stack", default="decoder", choices=STACKS)
    num_encoder_layers: int = doc_field("encoder layers of an encoder-decoder", default=0)
    parallel_attention_mlp: bool = doc_field(
        "attention and MLP have the same input, and their outputs are added", default=False
    )
    norm: str = doc_field("normalization", default="layernorm", choices=NORMS)
    norm_bias: bool = doc_field("normalizations have a bias", default=False)
    norm_affine: bool = doc_field("normalizations have a learned scale", default=True)
    num_norms_per_layer: int = doc_field("normalizations of the residual stream per layer", default=2)
    has_final_norm: bool = doc_field("a normalization after the last layer", default=True)
    hidden_dropout: float = doc_field("dropout after attention and MLP in training", default=0.0)
    attention_dropout: float = doc_field("dropout on attention weights in training", default=0.0)

    # Attention
    attention_windows: tuple[int, ...] = doc_field(
        "window of each layer, 0 for all positions; repeated over the layers", default=()
    )
    attention_window_kind: str = doc_field(
        "sliding: the last positions; chunked: earlier positions of the same fixed chunk",
        default="sliding",
        choices=WINDOW_KINDS,
    )
    fused_qkv: bool = doc_field("queries, keys and values come from one GEMM", default=False)
    qkv_bias: bool = doc_field(
        "query, key and value projections have a bias (MLA: the down-projections)", default=False
    )
    attention_out_bias: bool = doc_field("the attention output projection has a bias", default=False)
    qk_norm: str = doc_field(
        "normalization of queries and keys; l2 has no weights and applies to layers with rotary positions only",
        default="none",
        choices=QK_NORMS,
    )
    qk_norm_bias: bool = doc_field("normalizations of queries and keys have a bias", default=False)
    attention_sinks: bool = doc_field("one learned logit per head in each softmax", default=False)
    q_lora_rank: int = doc_field("MLA and compressed attention: rank of the compressed queries, 0 for none", default=0)
    kv_lora_rank: int = doc_field("MLA: rank of the compressed keys and values, 0 for no MLA", default=0)
    qk_rope_head_dim: int = doc_field(
        "MLA and compressed attention: width of the rotary part of a query head", default=0
    )

    attention_output_gate: bool = doc_field(
        "attention is multiplied by a gate, which is the other half of a query projection twice as wide", default=False
    )

    index_num_heads: int = doc_field("sparse attention: heads of the indexer", default=0)
    index_head_dim: int = doc_field("sparse attention: width of an indexer's head", default=0)
    index_topk: int = doc_field("sparse attention: latents that a query attends to, 0 for all", default=0)

    # Layers of compressed attention
    sparse_compress_ratio: int = doc_field("tokens of one entry of compressed_sparse_attention", default=0)
    heavy_compress_ratio: int = doc_field("tokens of one entry of heavily_compressed_attention", default=0)
    compressed_window: int = doc_field(
        "latest tokens that layers of compressed attention attend to one by one", default=0
    )
    out_groups: int = doc_field("compressed attention: groups of heads with a first output projection each", default=0)
    out_lora_rank: int = doc_field("compressed attention: width of a group after its output projection", default=0)
    residual_streams: int = doc_field(
        "parallel residual streams, mixed by learned weights around each block (hyper-connections)", default=1
    )

    # Layers of linear attention, state spaces and short convolutions
    layer_types: tuple[str, ...] = doc_field(
        "mixer of each layer, empty for attention in all; repeated over the layers", default=()
    )
    linear_num_key_heads: int = doc_field("key heads of linear attention, groups of a state space", default=0)
    linear_num_value_heads: int = doc_field("value heads of linear attention, heads of a state space", default=0)
    linear_key_head_dim: int = doc_field(
        "width of a key head of linear attention, state size of a state space", default=0
    )
    linear_value_head_dim: int = doc_field("width of a value head of linear attention or of a state space", default=0)
    linear_conv_width: int = doc_field("tokens of the short convolution of these layers, 0 for none", default=0)
    linear_conv_bias: bool = doc_field("that convolution has a bias", default=False)
    linear_bias: bool = doc_field("input and output projections of these layers have a bias", default=False)
    linear_norm: bool = doc_field("state spaces have normalizations of their own", default=True)
    linear_projections: str = doc_field(
        "GEMMs of a gated delta net's inputs: two, four (queries, keys and values in one) or six",
        default="fused",
        choices=LINEAR_PROJECTIONS,
    )
    linear_step_rank: int = doc_field("Mamba-1: rank of the steps, 0 if no layer is", default=0)

    # MLP and experts
    activation: str = doc_field("activation of the MLP", default="gelu")
    gated_mlp: bool = doc_field("the MLP has a gate (SwiGLU, GeGLU): three matrices instead of two", default=False)
    fused_gate_up: bool = doc_field("gate and up projection are one GEMM", default=False)
    mlp_bias: bool = doc_field("MLP projections have a bias", default=False)
    num_experts: int = doc_field("routed experts, 0 for a dense model", default=0, symbol="E")
    num_experts_per_token: int = doc_field("routed experts per token", default=0, symbol="k_e")
    moe_intermediate_size: int = doc_field("inner width of one routed expert", default=0, symbol="f_e")
    shared_expert_intermediate_size: int = doc_field("total inner width of the shared experts", default=0)
    shared_expert_gate: bool = doc_field(
        "a learned gate of one number per token scales the shared experts", default=False
    )
    router_bias: bool = doc_field("the router has a bias", default=False)
    expert_bias: bool = doc_field("projections of routed experts have a bias", default=False)
    expert_clamp: bool = doc_field("inputs of the routed experts' activation are clamped (swiglu_limit)", default=False)
    moe_layers: tuple[bool, ...] = doc_field(
        "which layers have experts, empty for all; repeated over the layers", default=()
    )

    mlp_layers: tuple[bool, ...] = doc_field(
        "which layers have an MLP or experts, empty for all; repeated over the layers", default=()
    )

    # Embeddings and head
    tied_embeddings: bool = doc_field("the logit matrix is the embedding matrix", default=False)
    embedding_size: int = doc_field("width of the embedding, projected to hidden_size if different", default=0)
    embedding_norm: bool = doc_field("a normalization after the embedding", default=False)
    num_special_tokens: int = doc_field("rows of the embedding that the logits do not have", default=0)
    num_token_types: int = doc_field("rows of the token type (segment) embedding, 0 for none", default=0)
    position_embedding: str = doc_field("kind of position embedding", default="rotary", choices=POSITION_EMBEDDINGS)
    rotary_layers: tuple[bool, ...] = doc_field(
        "which layers have rotary positions, empty for all; repeated over the layers", default=()
    )
    position_offset: int = doc_field("unused rows before the first learned position", default=0)
    num_relative_buckets: int = doc_field("rows of the relative position bias per stack, 0 for none", default=0)
    head_transform: bool = doc_field(
        "a square projection, activation and normalization before the logits", default=False
    )
    lm_head_bias: bool = doc_field("the logit matrix has a bias", default=False)

    num_mtp_layers: int = doc_field(
        "layers that predict further tokens in training (multi-token prediction), each with a projection of 2 h to h",
        default=0,
    )

    # Images: not flags, as a config.json states them
    patches: Patches | None = None
    vision: Any = None  # a TransformerConfig; a type that refers to itself would have no finite schema

    # Provenance
    name: str = doc_field("name in reports", default="")
    model_type: str = doc_field("Hugging Face model_type, empty if not read from a config.json", default="")

    def __post_init__(self) -> None:
        for field_name, value in check_and_resolve(self).items():
            object.__setattr__(self, field_name, value)

    @property
    def title(self) -> str:
        """Name for messages: ``name``, else ``model_type``, else ``this model``."""
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
    def shares_keys(self) -> bool:
        """Whether heads have no keys of their own: they share a latent, or the one key of compressed attention."""
        return self.is_mla or bool(self.compressed_layers)

    @property
    def has_indexer(self) -> bool:
        """Whether an indexer selects the tokens that a query attends to."""
        return self.index_topk > 0

    @property
    def has_cross_attention(self) -> bool:
        """Whether layers attend to an encoder, or to the tokens of a caption."""
        return self.stack == "encoder-decoder" or self.num_caption_tokens > 0

    @property
    def attends_to_images(self) -> bool:
        """Whether images enter by layers of cross-attention, and not as tokens of the sequence."""
        return CROSS_ATTENTION in self.layer_types

    @property
    def num_caption_tokens(self) -> int:
        """Tokens of a caption that the layers of a diffusion transformer attend to; 0 without captions."""
        condition = self.patches.condition if self.patches is not None else None
        return condition.caption_len if condition is not None else 0

    @property
    def is_causal(self) -> bool:
        """Whether positions of the main stack attend to earlier ones only."""
        return self.stack != "encoder"

    @property
    def is_hybrid(self) -> bool:
        """Whether any layer has another mixer than attention, or none."""
        return bool(self.layer_types)

    @property
    def hybrid_period(self) -> int:
        """Layers after which the kinds of layers of a hybrid repeat; 1 for other models.

        Depths that are multiples of it have the same share of each kind.
        """
        return lcm(len(self.layer_types), len(self.mlp_layers) or 1) if self.is_hybrid else 1

    @property
    def linear_layers(self) -> tuple[str, ...]:
        """Mixers without softmax attention that the model has, each once."""
        kinds = dict.fromkeys(mixer for layer_type in self.layer_types for mixer in mixers_of(layer_type))
        return tuple(kind for kind in kinds if kind not in WITH_SOFTMAX)

    @property
    def compressed_layers(self) -> tuple[str, ...]:
        """Kinds of compressed attention that the model has, each once."""
        return tuple(kind for kind in dict.fromkeys(self.layer_types) if kind in COMPRESSED_LAYERS)

    @property
    def patterns(self) -> LayerPatterns:
        """Patterns over the layers of the main stack."""
        return LayerPatterns(
            layer_types=self.layer_types or (ATTENTION,),
            windows=self.attention_windows or (0,),
            has_mlp=self.mlp_layers or (True,),
            is_moe=(self.is_moe and self.moe_layers) or (self.is_moe,),
            is_rotary=(self.position_embedding == "rotary" and self.rotary_layers)
            or (self.position_embedding == "rotary",),
        )

    def kind_of_layer(self, index: int) -> LayerKind:
        """Return the kind of a layer of the main stack."""
        return self.patterns.kind_of(index)

    def window_of_layer(self, index: int) -> int:
        """Return the attention window of a layer of the main stack, 0 for all positions."""
        return self.kind_of_layer(index).window

    def is_moe_layer(self, index: int) -> bool:
        """Return whether a layer of the main stack has experts."""
        return self.kind_of_layer(index).mlp == "experts"

    def is_rotary_layer(self, index: int) -> bool:
        """Return whether a layer of the main stack has rotary positions."""
        return self.kind_of_layer(index).is_rotary

    def count_kinds(self, layers: range) -> dict[LayerKind, int]:
        """Count consecutive layers of the main stack by kind."""
        return dict(count_kinds(self.patterns, layers.start, layers.stop))

    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Return the distinct layers of the main stack with their counts, in order of first appearance.

        The main stack is the decoder, or the encoder of an encoder-only model.

        >>> config = TransformerConfig(
        ...     hidden_size=64, num_layers=7, num_heads=4, vocab_size=100, attention_windows=(32, 32, 0)
        ... )
        >>> [(group.window, group.num_layers) for group in config.layer_groups()]
        [(32, 5), (0, 2)]
        """
        patterns = self.patterns._replace(is_rotary=(False,))
        # Sizes of a search are traced: they equal numbers, and must not be cached as such.
        count = count_kinds if type(self.num_layers) is int else count_kinds.__wrapped__
        return tuple(
            LayerGroup(kind.window, kind.mlp == "experts", num_layers, kind.layer_type, kind.mlp != "none")
            for kind, num_layers in count(patterns, 0, self.num_layers)
        )

    def encoder_layer_groups(self) -> tuple[LayerGroup, ...]:
        """Return the layers of the encoder of an encoder-decoder; empty for other models."""
        if not self.num_encoder_layers:
            return ()
        return (LayerGroup(window=0, is_moe=False, num_layers=self.num_encoder_layers),)

    def mtp_layer_groups(self) -> tuple[LayerGroup, ...]:
        """Return the layers of multi-token prediction, which are of the kind of the last layer; mostly empty."""
        if not self.num_mtp_layers:
            return ()
        kind = self.kind_of_layer(self.num_layers - 1)
        return (
            LayerGroup(kind.window, kind.mlp == "experts", self.num_mtp_layers, kind.layer_type, kind.mlp != "none"),
        )


FIELD_NAMES = tuple(spec.name for spec in fields(TransformerConfig))


def with_changes(config: TransformerConfig, changes: Mapping[str, Any]) -> TransformerConfig:
    """Return a copy of the config with some fields changed.

    A derived field follows the changes if it has its default value: ``head_dim`` = hidden_size // num_heads,
    ``v_head_dim`` = head_dim, ``num_kv_heads`` = num_heads, ``intermediate_size`` = 4 * hidden_size, ``embedding_size``
    = hidden_size, ``moe_intermediate_size`` = intermediate_size (and vice versa if no layer has a dense MLP). A new
    hidden size alone keeps ``head_dim`` where the model type has a field for it, or where the heads do not divide it.
    Periodic patterns over layers are kept. Other patterns, such as "the first layers are dense", are truncated, or
    extended with their last value.

    Raises:
        ConfigError: an unknown field, or values that contradict each other.

    >>> config = TransformerConfig(hidden_size=2560, num_layers=32, num_heads=32, vocab_size=50257)
    >>> with_changes(config, {"num_heads": 20}).head_dim
    128
    """
    check_field_names(changes)
    values = {name: getattr(config, name) for name in FIELD_NAMES}
    is_derived = {
        "head_dim": not config.is_mla and config.head_dim * config.num_heads == config.hidden_size,
        "v_head_dim": not config.is_mla and config.v_head_dim == config.head_dim,
        "num_kv_heads": config.num_kv_heads == config.num_heads,
        "intermediate_size": config.intermediate_size == 4 * config.hidden_size,
        "embedding_size": config.embedding_size == config.hidden_size,
        "moe_intermediate_size": config.is_moe and config.moe_intermediate_size == config.intermediate_size,
    }
    if not {"num_heads", "head_dim"} & changes.keys() and _keeps_head_dim(config, changes.get("hidden_size")):
        is_derived["head_dim"] = False
    for name, derived in is_derived.items():
        if derived:
            values[name] = 0
    values.update(changes)
    if is_derived["moe_intermediate_size"] and all(group.is_moe for group in config.layer_groups()):
        # These configs have one width under both names; two values could not be written to a config.json.
        widths = [changes[name] for name in ("intermediate_size", "moe_intermediate_size") if name in changes]
        if len(widths) == 1:
            values["intermediate_size"] = values["moe_intermediate_size"] = widths[0]
    num_layers = values["num_layers"]
    if isinstance(num_layers, int):
        for name in LAYER_PATTERNS:
            if name not in changes:
                values[name] = _resize_pattern(values[name], config.num_layers, num_layers)
    return TransformerConfig(**values)


def _keeps_head_dim(config: TransformerConfig, hidden_size: Any) -> bool:
    """Return whether heads keep their dimension at a new hidden size."""
    if not isinstance(hidden_size, int):
        return False
    from shapewright.models.families.registry import FAMILIES

    family = FAMILIES.get(config.model_type)
    return hidden_size % config.num_heads != 0 or (family is not None and "head_dim" in family.keys)


def check_field_names(changes: Mapping[str, Any]) -> None:
    """Check that all names are fields of TransformerConfig.

    Raises:
        ConfigError: an unknown field; the message suggests similar names.
    """
    for name in changes:
        if name not in FIELD_NAMES:
            hint = close_names(str(name), FIELD_NAMES) or "see the fields of TransformerConfig"
            raise ConfigError(f"{short_repr(name)} is not a field of a model; {hint}")


def _resize_pattern(pattern: Sequence[Any], old_num_layers: int, new_num_layers: int) -> tuple[Any, ...]:
    is_repeating = len(pattern) < old_num_layers
    if is_repeating or not pattern or not 0 < new_num_layers <= MAX_NUM_LAYERS:
        return tuple(pattern)
    return (*pattern[:new_num_layers], *[pattern[-1]] * (new_num_layers - len(pattern)))
