"""A decoder layer in torch that runs exactly the GEMMs that the lowering lists for it.

Legend: b sequences, s tokens of one pass, h hidden size, a and a_kv heads, d and d_v head dimensions, f intermediate
size.

Weights are a dictionary and the forward pass is a function of them, so that no framework overhead is timed. Norms,
softmax, dropout and masks are one kernel each, as the lowering counts them; rotary embeddings and gates are chains of
kernels in eager mode, which ``torch.compile`` fuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import BenchError
from shapewright.core.records import dataclass

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.workload.workload import Workload

Weights = dict[str, Any]
# Makes a tensor of a shape; the second argument is the standard deviation of its elements, 0 for a tensor of ones.
MakeTensor = Callable[[tuple[int, ...], float], Any]

_ROTARY_BASE = 10000.0
# A usual scale of initialization, small against the activations.
_BIAS_DEVIATION = 0.02
_NORM_EPSILON = 1e-5
_ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu", "swish": "silu", "relu": "relu",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PassContext:
    """What all layers of one pass share.

    Attributes:
        config: The model.
        workload: What is run.
        rotary: Cosines and sines of the new positions, (s, d) each; None without rotary embeddings.
        causal_mask: True where a key comes after the query, (s, kv); None if no mask is needed or the kernel masks.
        context_len: Tokens already in the cache.
        query_block: Queries per block of causal training attention written in plain torch; 0 for torch's own kernel.
    """

    config: TransformerConfig
    workload: Workload
    rotary: tuple[Any, Any] | None
    causal_mask: Any
    context_len: int
    query_block: int = 0


def require_supported(config: TransformerConfig, workload: Workload) -> None:
    """Check that this implementation supports a model and workload.

    Raises:
        BenchError: the model has experts, latent attention, windows or another unsupported feature.
    """
    unsupported = {
        f"stack={config.stack}": config.stack != "decoder",
        f"num_experts={config.num_experts}": config.is_moe,
        f"kv_lora_rank={config.kv_lora_rank}": config.is_mla,
        f"layer_types={', '.join(sorted(set(config.layer_types)))}": config.is_hybrid,
        f"attention_windows={config.attention_windows}": any(
            0 < window < workload.kv_len for window in config.attention_windows
        ),
        f"position_embedding={config.position_embedding}": config.position_embedding in ("alibi", "relative"),
        f"rotary_layers={config.rotary_layers}": len(set(config.rotary_layers)) > 1,
        f"qk_norm={config.qk_norm}": config.qk_norm not in ("none", "per-head"),
        f"attention_sinks={config.attention_sinks}": config.attention_sinks,
        f"activation={config.activation}": config.activation not in _ACTIVATIONS,
        f"num_norms_per_layer={config.num_norms_per_layer}": config.num_norms_per_layer
        not in ((1, 2) if config.parallel_attention_mlp else (2, 4)),
        f"recompute={workload.recompute}": workload.recompute != "none",
        "offload_activations": workload.offload_activations,
        "offload_optimizer": workload.offload_optimizer,
        f"dtype={workload.dtype}": workload.dtype not in ("fp32", "tf32", "fp16", "bf16"),
        f"kv_cache_dtype={workload.kv_cache_dtype}": workload.kv_cache_dtype not in (None, workload.dtype),
        "context_len in prefill": workload.phase == "prefill" and workload.context_len > 0,
        "head_transform": config.head_transform,
        f"num_token_types={config.num_token_types}": config.num_token_types > 0,
    }
    for feature, is_used in unsupported.items():
        if is_used:
            raise BenchError(
                f"whole layers and steps are measured for plain decoders only, got {feature}; measure the model's "
                "operations instead"
            )


def make_layer(config: TransformerConfig, make: MakeTensor) -> Weights:
    """Make the weights of one layer; those of linear layers are stored as W[out, in]."""
    h, f = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    values, attended = config.num_kv_heads * config.v_head_dim, config.num_heads * config.v_head_dim
    inner = {"qkv": queries + keys + values} if config.fused_qkv else {"q": queries, "k": keys, "v": values}
    linears = {name: (width, h, config.qkv_bias) for name, width in inner.items()}
    linears["out"] = (h, attended, config.attention_out_bias)
    if config.gated_mlp and config.fused_gate_up:
        linears["gate_up"] = (2 * f, h, config.mlp_bias)
    elif config.gated_mlp:
        linears |= {"gate": (f, h, config.mlp_bias), "up": (f, h, config.mlp_bias)}
    else:
        linears["up"] = (f, h, config.mlp_bias)
    linears["down"] = (h, f, config.mlp_bias)
    weights: Weights = {}
    for name, (fan_out, fan_in, has_bias) in linears.items():
        weights[name] = make((fan_out, fan_in), fan_in**-0.5)
        if has_bias:
            weights[f"{name}.bias"] = make((fan_out,), _BIAS_DEVIATION)
    for index in range(config.num_norms_per_layer):
        weights |= make_norm(config, f"norm_{index}", h, make)
    if config.qk_norm == "per-head":
        for letter in ("q", "k"):
            weights[f"{letter}_norm"] = make((config.head_dim,), 0.0)
            if config.qk_norm_bias:
                weights[f"{letter}_norm.bias"] = make((config.head_dim,), _BIAS_DEVIATION)
    return weights


def make_norm(config: TransformerConfig, name: str, width: int, make: MakeTensor) -> Weights:
    """Make the scale and shift of one norm, as far as the model has them."""
    weights: Weights = {}
    if config.norm_affine:
        weights[name] = make((width,), 0.0)
    if config.norm_bias:
        weights[f"{name}.bias"] = make((width,), _BIAS_DEVIATION)
    return weights


def make_pass_context(config: TransformerConfig, workload: Workload, like: Any, *, num_tokens: int = 0) -> PassContext:
    """Make what all layers of a pass share: rotary angles, causal mask, and the length of the cache.

    Args:
        like: A tensor with the device and format of the activations.
        num_tokens: New tokens per sequence; 0 for those of the workload.
    """
    import torch

    tokens = num_tokens or workload.query_len
    first = workload.context_len if workload.phase == "decode" else 0
    rotary = None
    if config.is_rotary_layer(0):
        half = config.head_dim // 2
        frequencies = _ROTARY_BASE ** (-torch.arange(half, device=like.device, dtype=torch.float32) / half)
        positions = torch.arange(first, first + tokens, device=like.device, dtype=torch.float32)
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        rotary = angles.cos().to(like.dtype), angles.sin().to(like.dtype)
    causal_mask = None
    if workload.attention == "unfused" and tokens > 1:
        causal_mask = torch.ones(tokens, tokens, dtype=torch.bool, device=like.device).triu(1)
    return PassContext(config=config, workload=workload, rotary=rotary, causal_mask=causal_mask, context_len=first)


def run_layer(weights: Mapping[str, Any], x: Any, context: PassContext, cache: tuple[Any, Any] | None = None) -> Any:
    """Run one layer on the residual stream.

    Args:
        x: Residual stream of shape (b, s, h).
        context: What all layers of the pass share.
        cache: Keys and values of shape (b, a_kv, tokens, d), to which the new ones are written; None in training.

    Returns:
        The residual stream after the layer, of shape (b, s, h).
    """
    config = context.config
    if config.parallel_attention_mlp:
        normed = run_norm(weights, "norm_0", x, config)
        second = run_norm(weights, "norm_1", x, config) if config.num_norms_per_layer > 1 else normed
        attended = dropout(_run_attention(weights, normed, context, cache), context)
        return x + attended + dropout(_run_mlp(weights, second, config), context)
    sandwich = config.num_norms_per_layer == 4
    attended = _run_attention(weights, run_norm(weights, "norm_0", x, config), context, cache)
    if sandwich:
        attended = run_norm(weights, "norm_2", attended, config)
    x = x + dropout(attended, context)
    inner = _run_mlp(weights, run_norm(weights, "norm_1", x, config), config)
    if sandwich:
        inner = run_norm(weights, "norm_3", inner, config)
    return x + dropout(inner, context)


def run_norm(weights: Mapping[str, Any], name: str, x: Any, config: TransformerConfig) -> Any:
    """Normalize the last dimension."""
    from torch.nn import functional

    scale, shift = weights.get(name), weights.get(f"{name}.bias")
    if config.norm == "layernorm":
        return functional.layer_norm(x, x.shape[-1:], scale, shift)
    normed = functional.rms_norm(x, x.shape[-1:], scale, _NORM_EPSILON)
    return normed if shift is None else normed + shift


def linear(weights: Mapping[str, Any], name: str, x: Any) -> Any:
    """Linear layer x W^T, plus a bias if the layer has one."""
    from torch.nn import functional

    return functional.linear(x, weights[name], weights.get(f"{name}.bias"))


def _run_attention(weights: Mapping[str, Any], x: Any, context: PassContext, cache: tuple[Any, Any] | None) -> Any:
    config = context.config
    b, s, _ = x.shape
    a, a_kv, d, d_v = config.num_heads, config.num_kv_heads, config.head_dim, config.v_head_dim
    if config.fused_qkv:
        q, k, v = linear(weights, "qkv", x).split([a * d, a_kv * d, a_kv * d_v], -1)
    else:
        q, k, v = (linear(weights, letter, x) for letter in ("q", "k", "v"))
    q, k = q.view(b, s, a, d), k.view(b, s, a_kv, d)
    v = v.view(b, s, a_kv, d_v).transpose(1, 2)
    if config.qk_norm == "per-head":
        q, k = run_norm(weights, "q_norm", q, config), run_norm(weights, "k_norm", k, config)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    if context.rotary:
        q, k = _rotate(q, *context.rotary), _rotate(k, *context.rotary)
    if cache is not None:
        k, v = _append_to_cache(k, v, cache, context.context_len)
    core = _unfused_core if context.workload.attention == "unfused" else _fused_core
    if context.query_block:
        core = _blocked_core
    return linear(weights, "out", core(q, k, v, context).transpose(1, 2).reshape(b, s, a * d_v))


def _rotate(x: Any, cosines: Any, sines: Any) -> Any:
    import torch

    first, second = x.chunk(2, -1)
    return x * cosines + torch.cat((-second, first), -1) * sines


def _append_to_cache(k: Any, v: Any, cache: tuple[Any, Any], context_len: int) -> tuple[Any, Any]:
    """Append new keys and values to the cache, and return all of them."""
    end = context_len + k.shape[2]
    whole = []
    for new, cached in zip((k, v), cache, strict=True):
        cached[:, :, context_len:end] = new
        whole.append(cached[:, :, :end])
    return whole[0], whole[1]


def _fused_core(q: Any, k: Any, v: Any, context: PassContext) -> Any:
    from torch.nn.functional import scaled_dot_product_attention

    config = context.config
    grouped = {"enable_gqa": True} if config.num_kv_heads != config.num_heads else {}
    dropped = config.attention_dropout if context.workload.is_training else 0.0
    return scaled_dot_product_attention(q, k, v, dropout_p=dropped, is_causal=q.shape[2] > 1, **grouped)


def _unfused_core(q: Any, k: Any, v: Any, context: PassContext) -> Any:
    """Two batched GEMMs with mask, softmax and dropout between them; the first one applies the scale."""
    import torch
    from torch.nn import functional

    b, a, s, d = q.shape
    k, v = (_repeat_heads(part, a) for part in (k, v))
    keys = k.shape[2]
    # With beta = 0 the first operand is never read, so that one element is enough.
    scores = torch.baddbmm(
        q.new_empty(1, 1, 1).expand(b * a, s, keys),
        q.reshape(b * a, s, d),
        k.reshape(b * a, keys, d).transpose(1, 2),
        beta=0.0,
        alpha=1.0 / math.sqrt(d),
    )
    if s > 1:
        scores = scores.masked_fill(context.causal_mask, -math.inf)
    probabilities = torch.softmax(scores, -1)
    if context.workload.is_training and context.config.attention_dropout > 0.0:
        probabilities = functional.dropout(probabilities, context.config.attention_dropout)
    return torch.bmm(probabilities, v.reshape(b * a, keys, v.shape[-1])).view(b, a, s, v.shape[-1])


def _blocked_core(q: Any, k: Any, v: Any, context: PassContext) -> Any:
    """Causal attention by blocks of queries, each with the keys up to its last query; the softmax is in fp32.

    Compiled on a CPU, this is faster than scaled_dot_product_attention, whose backward pass is slow there.
    """
    import torch
    from torch.nn import functional

    b, a, s, d = q.shape
    q, k, v = (_repeat_heads(part, a).reshape(b * a, s, -1).to(v.dtype) for part in (q / math.sqrt(d), k, v))
    outputs = []
    for first in range(0, s, context.query_block):
        end = min(first + context.query_block, s)
        future = torch.full((end - first, end), -math.inf, device=q.device).triu(first + 1)
        scores = torch.bmm(q[:, first:end], k[:, :end].transpose(1, 2)).float() + future
        probabilities = torch.softmax(scores, -1).to(v.dtype)
        if context.config.attention_dropout > 0.0:
            probabilities = functional.dropout(probabilities, context.config.attention_dropout)
        outputs.append(torch.bmm(probabilities, v[:, :end]))
    return torch.cat(outputs, 1).view(b, a, s, v.shape[-1])


def _repeat_heads(x: Any, num_heads: int) -> Any:
    """Repeat each KV head for every query head that uses it."""
    b, a_kv, tokens, width = x.shape
    if a_kv == num_heads:
        return x
    return x[:, :, None].expand(b, a_kv, num_heads // a_kv, tokens, width).reshape(b, num_heads, tokens, width)


def _run_mlp(weights: Mapping[str, Any], x: Any, config: TransformerConfig) -> Any:
    if config.gated_mlp:
        if config.fused_gate_up:
            gate, up = linear(weights, "gate_up", x).chunk(2, -1)
        else:
            gate, up = linear(weights, "gate", x), linear(weights, "up", x)
        inner = _activate(gate, config) * up
    else:
        inner = _activate(linear(weights, "up", x), config)
    return linear(weights, "down", inner)


def _activate(x: Any, config: TransformerConfig) -> Any:
    from torch.nn import functional

    kind = _ACTIVATIONS[config.activation]
    if kind in ("gelu", "gelu_tanh"):
        return functional.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    return functional.silu(x) if kind == "silu" else functional.relu(x)


def dropout(x: Any, context: PassContext) -> Any:
    """Drop elements of the residual stream in training, if the model does."""
    from torch.nn import functional

    dropped = context.config.hidden_dropout
    return functional.dropout(x, dropped) if context.workload.is_training and dropped > 0.0 else x
