"""Parameters by component, with the formula of each; Term holds a number with its formula.

Legend: h hidden_size, e embedding_size, L layers (L_a with attention, L_d with an MLP, L_m with experts, L_e of the
encoder), a num_heads, a_kv num_kv_heads, d head_dim, d_v v_head_dim, f intermediate_size, f_m moe_intermediate_size,
f_s shared_expert_intermediate_size, E num_experts, v vocab_size, s positions, r_q and r_kv ranks of MLA, d_r
qk_rope_head_dim, k token types, n_b relative position buckets.

Terms that a model lacks, such as biases, are omitted. A test compares every formula with ``count_parameters``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from shapewright.core.records import dataclass
from shapewright.models.compressed_attention import make_compressed
from shapewright.models.image_linears import list_end_linears
from shapewright.models.layers import ATTENTION, CROSS_ATTENTION, WITH_SOFTMAX, mixers_of
from shapewright.models.mixers import make_mixer
from shapewright.models.parameters import IMAGE_GATES, count_parameters

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig


_LETTERS = re.compile(r"[A-Za-z][A-Za-z_]*")


@dataclass(frozen=True)
class Term:
    """One number of a calculation.

    Attributes:
        name: Name of the number.
        formula: Formula in letters; ``*`` multiplies and ``^`` raises.
        numbers: The formula with the values of the letters.
        value: The result.
    """

    name: str
    formula: str
    numbers: str
    value: float


def substitute(formula: str, values: Mapping[str, float]) -> str:
    """Substitute values for the letters of a formula.

    >>> substitute("L*(h*h + a_kv*d)", {"L": 2, "h": 64, "a_kv": 1, "d": 16})
    '2*(64*64 + 1*16)'
    """
    return _LETTERS.sub(lambda match: f"{values[match[0]]:.15g}", formula)


def explain_parameters(config: TransformerConfig) -> tuple[Term, ...]:
    """Return the parameters of each component of a model, with formulas.

    >>> from shapewright.models.transformer import TransformerConfig
    >>> gpt = TransformerConfig(hidden_size=64, num_layers=2, num_heads=4, vocab_size=100, tied_embeddings=True)
    >>> [(term.name, term.formula, term.value) for term in explain_parameters(gpt)][:2]
    [('embedding', 'v*h', 6400), ('attention', 'L*(h*3*a*d + a*d*h)', 32768)]
    """
    values = _letters(config)
    formulas = _formulas(config)
    return tuple(
        Term(name, formulas[name], substitute(formulas[name], values), count)
        for name, count in count_parameters(config).by_component.items()
        if count
    )


def _letters(config: TransformerConfig) -> dict[str, float]:
    groups = (*config.layer_groups(), *config.mtp_layer_groups())
    return {
        "h": config.hidden_size,
        "e": config.embedding_size,
        "v": config.vocab_size,
        "a": config.num_heads,
        "a_kv": config.num_kv_heads,
        "d": config.head_dim,
        "d_v": config.v_head_dim,
        "f": config.intermediate_size,
        "f_m": config.moe_intermediate_size or 0,
        "f_s": config.shared_expert_intermediate_size or 0,
        "E": config.num_experts,
        "s": config.max_position_embeddings + config.position_offset,
        "k": config.num_token_types,
        "r_q": config.q_lora_rank,
        "r_kv": config.kv_lora_rank,
        "d_r": config.qk_rope_head_dim,
        "L": config.num_layers + config.num_mtp_layers,
        "L_d": sum(group.num_layers for group in groups if group.has_mlp and not group.is_moe),
        "L_a": sum(group.num_layers for group in groups if ATTENTION in mixers_of(group.layer_type)),
        "L_m": sum(group.num_layers for group in groups if group.is_moe),
        "L_e": sum(group.num_layers for group in config.encoder_layer_groups()),
        "n_b": config.num_relative_buckets,
    }


def _formulas(config: TransformerConfig) -> dict[str, str]:
    """Return the formula of each component, by its name in ``by_component``."""
    all_layers = "(L + L_e)" if config.has_cross_attention else "L_a" if config.is_hybrid else "L"
    has_other_layers = config.num_experts > 0 or bool(config.mlp_layers)
    mlp_layers = "(L_d + L_e)" if config.has_cross_attention else "L_d" if has_other_layers else "L"
    norm = _norm(config)
    layer_norms = f"L*{config.num_norms_per_layer + config.has_cross_attention}*{norm}"
    if config.has_cross_attention:
        layer_norms += f" + L_e*{config.num_norms_per_layer}*{norm}"
    stream_sum = ""
    if config.residual_streams > 1:
        n = config.residual_streams
        layer_norms += f" + L*2*({(2 + n) * n}*({n}*h + 1) + 3)"
        stream_sum = f" + {n}*({n}*h + 1) + 1"
    image_formulas = {}
    if config.patches is not None:
        counts = count_parameters(config)
        image_formulas = {
            "embedding": _end_linears(config, counts.embedding, is_start=True),
            "norms": f"L*{counts.by_component['norms'] // config.num_layers}",
            "head": _end_linears(config, counts.head, is_start=False),
        }
    return {
        "embedding": _embedding(config),
        "attention": _compressed(config) if config.compressed_layers else f"{all_layers}*({_attention(config)})",
        "linear": _linear(config),
        "cross_attention": _cross_attention(config),
        "mlp": f"{mlp_layers}*({_mlp(config, 'f', has_bias=config.mlp_bias)})",
        "experts": f"L_m*E*({_mlp(config, 'f_m', has_bias=config.expert_bias)})",
        "shared_experts": f"L_m*({_mlp(config, 'f_s', has_bias=False)}" + " + h" * config.shared_expert_gate + ")",
        "router": "L_m*E*" + ("(h + 1)" if config.router_bias else "h"),
        "norms": layer_norms,
        "final_norms": (f"2*{norm}" if config.has_cross_attention else norm) + stream_sum,
        "head": _head(config),
        "vision": str(count_parameters(config.vision).total) if config.vision is not None else "0",
        **image_formulas,
    }


def _end_linears(config: TransformerConfig, count: int, *, is_start: bool) -> str:
    """Return the formula of an image model's linear layers before or after its transformer layers.

    Its other weights there are added as a number, the rest of ``count``.
    """
    linears = [each for each in list_end_linears(config) if each.is_start == is_start]
    parts = [f"{each.num_weights}*{each.inputs + each.has_bias}*{each.outputs}" for each in linears]
    rest = count - sum(each.num_parameters for each in linears)
    return " + ".join([*parts, *([str(rest)] if rest else [])])


def _norm(config: TransformerConfig) -> str:
    """Return the formula of a norm: a scale, a shift, or both."""
    return "2*h" if config.norm_affine and config.norm_bias else "h"


def _embedding(config: TransformerConfig) -> str:
    width = "h" if config.embedding_size == config.hidden_size else "e"
    parts = [f"v*{width}"]
    if config.num_token_types:
        parts.append("k*h")
    if config.num_special_tokens:
        parts.append(f"{config.num_special_tokens}*h")
    if config.position_embedding == "learned":
        parts.append("s*h")
    if config.embedding_norm:
        parts.append(_norm(config))
    if width == "e":
        parts.append("2*e*h")
    if config.num_relative_buckets:
        parts.append(f"{2 if config.has_cross_attention else 1}*n_b*a")
    return " + ".join(parts)


def _linear(config: TransformerConfig) -> str:
    """Return the formula of mixers without softmax: layers times projections (inputs x outputs) and other weights."""
    parts = []
    for group in config.layer_groups():
        for kind in (mixer for mixer in mixers_of(group.layer_type) if mixer not in WITH_SOFTMAX):
            mixer = make_mixer(config, kind)
            weights = [f"{each.inputs}*{each.outputs}" for each in mixer.projections]
            rest = mixer.num_parameters - sum(each.inputs * each.outputs for each in mixer.projections)
            parts.append(f"{group.num_layers}*({' + '.join([*weights, str(rest)])})")
    return " + ".join(parts)


def _compressed(config: TransformerConfig) -> str:
    """Return the formula of compressed attention: layers of each kind times linear layers and other parameters."""
    parts = []
    for group in (*config.layer_groups(), *config.mtp_layer_groups()):
        layer = make_compressed(config, group.layer_type)
        weights = [f"{each.inputs}*{each.outputs}" for each in (*layer.projections, *layer.indexer)]
        weights.append(f"{layer.num_groups}*{layer.group_width}*{layer.group_rank}")
        parts.append(f"{group.num_layers}*({' + '.join([*weights, str(layer.num_others)])})")
    return " + ".join(parts)


def _cross_attention(config: TransformerConfig) -> str:
    if not config.attends_to_images:
        return f"L*({_heads_attention(config)})"
    count = sum(group.num_layers for group in config.layer_groups() if group.layer_type == CROSS_ATTENTION)
    return f"{count}*({_heads_attention(config)} + 2*d + {IMAGE_GATES})"


def _attention(config: TransformerConfig) -> str:
    return _latent_attention(config) if config.is_mla else _heads_attention(config)


def _heads_attention(config: TransformerConfig) -> str:
    """Return the formula of query, key, value and output projections, with norms and sinks."""
    v = "d" if config.v_head_dim == config.head_dim else "d_v"
    if config.attention_output_gate:
        width = f"(2*a*d + a_kv*(d + {v}))"
    elif config.num_kv_heads == config.num_heads and v == "d":
        width = "3*a*d"
    elif v == "d":
        width = "(a + 2*a_kv)*d"
    else:
        width = f"(a*d + a_kv*(d + {v}))"
    parts = [f"{'(h + 1)' if config.qkv_bias else 'h'}*{width}", f"a*{v}*h"]
    if config.attention_out_bias:
        parts.append("h")
    times = "2*" if config.qk_norm_bias else ""
    if config.qk_norm == "per-head":
        parts.append(f"{times}2*d")
    elif config.qk_norm == "per-layer":
        parts.append(f"{times}(a + a_kv)*d")
    if config.attention_sinks:
        parts.append("a")
    return " + ".join(parts)


def _latent_attention(config: TransformerConfig) -> str:
    """Return the formula of multi-head latent attention (arXiv 2405.04434, section 2.1)."""
    h = "(h + 1)" if config.qkv_bias else "h"
    parts = [f"{h}*r_q + r_q + r_q*a*d" if config.q_lora_rank else "h*a*d"]
    parts += [f"{h}*(r_kv + d_r) + r_kv + r_kv*a*(d - d_r + d_v)", "a*d_v*h"]
    if config.attention_out_bias:
        parts.append("h")
    if config.attention_sinks:
        parts.append("a")
    if config.has_indexer:
        heads, width = config.index_num_heads, config.index_head_dim
        parts.append(f"r_q*{heads * width} + h*{heads + width} + {2 * width}")
    return " + ".join(parts)


def _mlp(config: TransformerConfig, inner: str, *, has_bias: bool) -> str:
    """Return the formula of up, gate and down projections."""
    num_up = 2 if config.gated_mlp else 1
    bias = (f" + {num_up}*{inner} + h" if num_up > 1 else f" + {inner} + h") if has_bias else ""
    return f"{num_up + 1}*h*{inner}{bias}"


def _head(config: TransformerConfig) -> str:
    parts = []
    if not config.tied_embeddings:
        parts.append("h*v" if config.embedding_size == config.hidden_size else "e*v")
    if config.lm_head_bias:
        parts.append("v")
    if config.head_transform:
        parts.append(f"h*h + h + {_norm(config)}")
    if config.num_mtp_layers:
        parts.append(f"{config.num_mtp_layers}*(2*h*h + 3*{_norm(config)})")
    return " + ".join(parts)
