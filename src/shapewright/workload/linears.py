"""Linear layers of one layer as one device holds them: what adapters are added to and gradients are projected of."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from shapewright.core.errors import WorkloadError
from shapewright.models.compressed_attention import make_compressed
from shapewright.models.layers import ATTENTION, COMPRESSED_LAYERS, CROSS_ATTENTION, mixers_of
from shapewright.models.mixers import make_mixer
from shapewright.workload.finetuning import FUSED_ROLES, TARGET_GROUPS, is_target
from shapewright.workload.layout import ParallelLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shapewright.models.layers import LayerKind
    from shapewright.models.transformer import TransformerConfig


class Linear(NamedTuple):
    """A weight W[n,k] of one layer as one device holds it.

    Attributes:
        block: Part of the layer, as in the lowered operations.
        role: Its GEMM there.
        n: Output features. [element]
        k: Input features. [element]
        copies: Number of such weights: 1, or the experts of the device.
    """

    block: str
    role: str
    n: int
    k: int
    copies: int = 1


def list_linears(
    config: TransformerConfig, layout: ParallelLayout, kind: LayerKind, *, has_cross_attention: bool = False
) -> Iterator[Linear]:
    """Yield the linear layers of one layer on one device, without the router and the gate of shared experts."""
    h, t = config.hidden_size, layout.tensor_parallel
    for mixer in mixers_of(kind.layer_type):
        if mixer == ATTENTION:
            yield from _list_attention(config, t)
        elif mixer in COMPRESSED_LAYERS:
            # Neither the first output projection, a block of each group, nor the indexer has adapters.
            projections = make_compressed(config, mixer, t).projections
            yield from (Linear("attention", each.role, each.outputs, each.inputs) for each in projections)
        elif mixer != CROSS_ATTENTION:
            projections = make_mixer(config, mixer, t).projections
            yield from (Linear(mixer, each.role, each.outputs, each.inputs) for each in projections)
    if has_cross_attention or kind.layer_type == CROSS_ATTENTION:
        heads, kv_heads = config.num_heads // t, -(-config.num_kv_heads // t)
        widths = {"q": heads * config.head_dim, "k": kv_heads * config.head_dim, "v": kv_heads * config.v_head_dim}
        yield from (Linear("cross_attention", role, width, h) for role, width in widths.items())
        yield Linear("cross_attention", "out", h, heads * config.v_head_dim)
    if kind.mlp == "none":
        return
    if kind.mlp == "dense":
        yield from _list_mlp("mlp", config, config.intermediate_size // t)
        return
    inner = config.moe_intermediate_size // layout.expert_tensor_degree
    own_experts = config.num_experts // layout.expert_parallel
    up = ("gate_up", 2 * inner) if config.gated_mlp else ("up", inner)
    yield Linear("moe", up[0], up[1], h, own_experts)
    yield Linear("moe", "down", h, inner, own_experts)
    if config.shared_expert_intermediate_size:
        yield from _list_mlp("shared_expert", config, config.shared_expert_intermediate_size // t)


def _list_attention(config: TransformerConfig, t: int) -> Iterator[Linear]:
    """Yield the matrices of self-attention on one of ``t`` devices."""
    h = config.hidden_size
    heads, kv_heads = config.num_heads // t, -(-config.num_kv_heads // t)
    queries = heads * config.head_dim * (1 + config.attention_output_gate)
    widths = {"q": queries, "k": kv_heads * config.head_dim, "v": kv_heads * config.v_head_dim}
    if config.is_mla:
        if config.q_lora_rank:
            yield Linear("attention", "q_a", config.q_lora_rank, h)
            yield Linear("attention", "q_b", widths["q"], config.q_lora_rank)
        else:
            yield Linear("attention", "q", widths["q"], h)
        yield Linear("attention", "kv_a", config.kv_lora_rank + config.qk_rope_head_dim, h)
        expanded = heads * (config.head_dim - config.qk_rope_head_dim + config.v_head_dim)
        yield Linear("attention", "kv_b", expanded, config.kv_lora_rank)
    elif config.fused_qkv:
        yield Linear("attention", "qkv", widths["q"] + widths["k"] + widths["v"], h)
    else:
        yield from (Linear("attention", role, width, h) for role, width in widths.items())
    yield Linear("attention", "out", h, heads * config.v_head_dim)


def _list_mlp(block: str, config: TransformerConfig, inner: int) -> Iterator[Linear]:
    """Yield the matrices of a dense MLP of this device's inner width."""
    h = config.hidden_size
    if config.gated_mlp and config.fused_gate_up:
        yield Linear(block, "gate_up", 2 * inner, h)
    else:
        yield from (Linear(block, role, inner, h) for role in (("gate", "up") if config.gated_mlp else ("up",)))
    yield Linear(block, "down", h, inner)


def count_adapter(linear: Linear, rank: int, *, has_magnitude: bool) -> int:
    """Count the parameters of the adapter of one weight: r (n + k), with a magnitude n more. [element]

    >>> count_adapter(Linear("attention", "q", 4096, 4096), 8, has_magnitude=False)
    65536
    """
    return linear.copies * (rank * (linear.n + linear.k) + linear.n * has_magnitude)


def find_missing_targets(config: TransformerConfig, targets: str) -> list[str]:
    """List the named modules that a model lacks, or of which it has a fused form that is named in part alone."""
    if targets in TARGET_GROUPS:
        return []
    adapted = [role for block, role in _list_names(config) if is_target(targets, block, role)]
    return [
        name
        for name in targets.split(",")
        if not any(name in (role, *FUSED_ROLES.get(role, ())) or role in FUSED_ROLES.get(name, ()) for role in adapted)
    ]


def check_targets(config: TransformerConfig, targets: str) -> None:
    """Check that the model has every adapted module that is named.

    Raises:
        WorkloadError: it has no such GEMM, or only a part of a fused one is named.
    """
    for name in find_missing_targets(config, targets):
        roles = sorted({role for _, role in _list_names(config)})
        raise WorkloadError(
            f"lora_targets={targets!r} names {name!r}, which is not a GEMM of this model; choose among "
            f"{', '.join(roles)}",
            field="lora_targets",
        )


def _list_names(config: TransformerConfig) -> set[tuple[str, str]]:
    """Blocks and roles of the linear layers of all layers of a model."""
    one = ParallelLayout()
    kinds = config.count_kinds(range(config.num_layers))
    return {(linear.block, linear.role) for kind in kinds for linear in list_linears(config, one, kind)}
