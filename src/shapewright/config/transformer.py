"""TransformerConfig: the shape of a transformer, spelled as Hugging Face spells it, with the paper's letters as symbols."""

from __future__ import annotations

from dataclasses import dataclass

from shapewright.fields import note

STACKS = ("decoder", "encoder", "encoder-decoder")
NORMS = ("layernorm", "rmsnorm")
POSITION_EMBEDDINGS = ("learned", "rotary", "alibi", "relative", "none")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Hyperparameters of one transformer, dense or mixture of experts, of any of the three stacks.

    For an encoder-decoder, ``num_layers`` counts decoder layers and ``num_encoder_layers`` encoder layers.
    Multi-head latent attention (MLA) is on when ``kv_lora_rank`` is above zero; ``head_dim`` is then the whole width
    of a query head (the part without position plus ``qk_rope_head_dim``).

    Raises:
        ConfigError: fields that contradict each other.
    """

    # Shape
    hidden_size: int = note("width of the residual stream", required=True, symbol="h")
    num_layers: int = note("transformer layers (decoder layers of an encoder-decoder)", required=True, symbol="L")
    num_heads: int = note("query heads", required=True, symbol="a")
    vocab_size: int = note("rows of the embedding and of the logit matrix", required=True, symbol="v")
    num_kv_heads: int = note("key-value heads; fewer than num_heads is grouped-query attention", default=0, symbol="a_kv")
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
    num_norms_per_layer: int = note("normalisations of the residual stream in one layer", default=2)
    has_final_norm: bool = note("a normalisation after the last layer", default=True)
    hidden_dropout: float = note("dropout after attention and MLP in training", default=0.0)
    attention_dropout: float = note("dropout on attention weights in training", default=0.0)

    # Attention
    attention_windows: tuple[int, ...] = note("window of each layer, 0 for all positions; repeated over the layers", default=())
    fused_qkv: bool = note("queries, keys and values come from one GEMM", default=False)
    qkv_bias: bool = note("query, key and value projections have a bias", default=False)
    attention_out_bias: bool = note("the projection after attention has a bias", default=False)
    qk_norm: str = note("normalisation of queries and keys", default="none", choices=("none", "per-head", "per-layer"))
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
    moe_layers: tuple[bool, ...] = note("which layers have experts; repeated over the layers", default=())

    # Embeddings and head
    tied_embeddings: bool = note("the logit matrix is the embedding matrix", default=False)
    position_embedding: str = note("how positions enter", default="rotary", choices=POSITION_EMBEDDINGS)
    lm_head_bias: bool = note("the logit matrix has a bias", default=False)

    # Provenance
    name: str = note("name to print", default="")
    model_type: str = note("Hugging Face model_type that this was read from, empty for flags", default="")
