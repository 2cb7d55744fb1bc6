"""Fine-tuning: which weights a training step updates, the adapters it adds, and how frozen weights are stored.

Legend: W[n,k] a frozen weight, r the rank of its adapter, A[r,k] and B[n,r] the adapter's matrices.

    lora         y = x W^T + (x A^T) B^T, with W frozen                     arXiv 2106.09685, section 4.1
    qlora        the same with W stored in 4 bits and converted when read   arXiv 2305.14314, section 3
    dora         the same, with rows of W + B A normalized and scaled       arXiv 2402.09353, section 4.1
    last-layers  the last layers are trained; all before them, embedding and logits are frozen

Adapters follow the GEMMs of the model: a fused projection of queries, keys and values has one adapter.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from math import log, sqrt
from typing import TYPE_CHECKING, NamedTuple

from shapewright.core.errors import WorkloadError, close_names
from shapewright.core.ranges import read_integer
from shapewright.core.texts import with_fields
from shapewright.models.compressed import make_compressed
from shapewright.models.layers import ATTENTION, COMPRESSED_LAYERS, CROSS_ATTENTION, LINEAR_LAYERS, mixers_of
from shapewright.models.mixers import make_mixer
from shapewright.workload.layout import ParallelLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shapewright.models.layers import LayerKind
    from shapewright.models.transformer import TransformerConfig

METHODS = ("full", "lora", "qlora", "dora", "last-layers")
ADAPTER_METHODS = ("lora", "qlora", "dora")
DEFAULT_RANK = 16
"""Rank of adapters if none is given. Source: arXiv 2305.14314, appendix A (ranks of 8 to 64 differ little)."""

QUANTIZED_DTYPE = "int4"
"""Format of the frozen weights of QLoRA: 4 bits and 0.125 bits of scales per weight. Source: arXiv 2305.14314, section
3 (NF4 with double quantization: 0.127 bits of scales)."""

ADAPTER_IN, ADAPTER_OUT = ".lora_a", ".lora_b"
"""Endings of the roles of an adapter's two GEMMs."""

CONVERSION = ".dequantize"
"""Ending of the role of a stored weight's conversion, which runs before each GEMM that reads the weight."""

QUANTIZATION = ".quantize"
"""Ending of the role of the quantization of a GEMM's input."""

DORA_WEIGHT, DORA_NORM = ".dora_weight", ".dora_norm"
"""Endings of the roles of DoRA's B A and of the norm of W + B A, constants of the backward pass."""

_ATTENTION = (
    "q", "k", "v", "qkv", "q_a", "q_b", "kv_a", "kv_b", "qkv_a", "compressed_kv", "compressed_gate", "compressed",
    "out",
)  # fmt: skip
_MLP = ("gate", "up", "gate_up", "down")
TARGET_GROUPS = {"all-linear": (*_ATTENTION, *_MLP), "attention": _ATTENTION, "mlp": _MLP}
"""Roles of the adapted GEMMs by the name of a group; router, embedding and logits have no adapters (peft's all-linear
leaves out the logits as well)."""

INPUT_ROLES = (
    "q", "k", "v", "qkv", "q_a", "kv_a", "qkv_a", "compressed_kv", "compressed_gate", "compressed", "gate", "up",
    "gate_up",
)  # fmt: skip
"""Roles of the GEMMs that read the input of a block."""

_ROLES_OF_BLOCK = {
    **dict.fromkeys(("attention", "cross_attention"), _ATTENTION),
    **dict.fromkeys(("mlp", "moe", "shared_expert"), _MLP),
}
_ALIASES = {
    "o": "out",
    "o_proj": "out",
    "dense": "out",
    "linear_qkv": "qkv",
    "linear_proj": "out",
    "linear_fc1": "gate_up",
    "linear_fc2": "down",
    "fc1": "up",
    "fc2": "down",
}
# Members of fused projections: naming them all names the fused one, and the other way round.
_FUSED = {
    "qkv": ("q", "k", "v"),
    "qkv_a": ("q_a", "kv_a"),
    "compressed": ("compressed_kv", "compressed_gate"),
    "gate_up": ("gate", "up"),
}


def read_targets(text: str) -> str:
    """Parse the names of adapted modules; the result is a group, or roles in a fixed order separated by commas.

    Args:
        text: ``all-linear``, ``attention``, ``mlp``, or names such as ``q_proj,v_proj`` or ``linear_qkv``.

    Raises:
        WorkloadError: a name is unknown, or there is none.

    >>> read_targets("v_proj, q_proj"), read_targets("attention")
    ('q,v', 'attention')
    """
    words = [word for word in text.replace(",", " ").split() if word]
    known = (*TARGET_GROUPS, *TARGET_GROUPS["all-linear"])
    if not words:
        raise WorkloadError(f"lora_targets={text!r} is empty; choose among {', '.join(known)}", field="lora_targets")
    if len(words) == 1 and words[0] in TARGET_GROUPS:
        return words[0]
    found: set[str] = set()
    for word in words:
        name = _ALIASES.get(word, word.removesuffix("_proj"))
        name = _ALIASES.get(name, name)
        if name not in known:
            hint = close_names(name, known)
            raise WorkloadError(
                f"lora_targets={word!r} is unknown; {hint + ' ' if hint else ''}choose among {', '.join(known)}",
                field="lora_targets",
            )
        found.update(TARGET_GROUPS.get(name, (name,)))
    return ",".join(role for role in TARGET_GROUPS["all-linear"] if role in found)


def is_target(targets: str, block: str, role: str) -> bool:
    """Whether a GEMM has an adapter.

    >>> is_target("attention", "attention", "qkv"), is_target("q,v", "attention", "k"), is_target("mlp", "logits", "")
    (True, False, False)
    """
    if block in LINEAR_LAYERS:  # only as a whole: roles such as a and b mean other things elsewhere
        return targets == "all-linear"
    if role not in _ROLES_OF_BLOCK.get(block, ()):
        return False
    roles = TARGET_GROUPS.get(targets) or tuple(targets.split(","))
    if role in roles:
        return True
    parts = _FUSED.get(role)
    if parts:
        return all(part in roles for part in parts)
    return any(role in parts and fused in roles for fused, parts in _FUSED.items())


def check_targets(config: TransformerConfig, targets: str) -> None:
    """Check that the model has every adapted module that is named.

    Raises:
        WorkloadError: it has no such GEMM, or only a part of a fused one is named.
    """
    if targets in TARGET_GROUPS:
        return
    one = ParallelLayout()
    kinds = config.count_kinds(range(config.num_layers))
    linears = {(linear.block, linear.role) for kind in kinds for linear in list_linears(config, one, kind)}
    for name in targets.split(","):
        adapted = [role for block, role in linears if is_target(targets, block, role)]
        if any(role == name or role in _FUSED.get(name, ()) or name in _FUSED.get(role, ()) for role in adapted):
            continue
        roles = sorted({role for _, role in linears})
        raise WorkloadError(
            f"lora_targets={targets!r} names {name!r}, which is not a GEMM of this model; choose among "
            f"{', '.join(roles)}",
            field="lora_targets",
        )


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


def read_documents(text: str) -> tuple[int, ...]:
    """Parse the lengths of the documents packed into one sequence; their order has no effect.

    Args:
        text: Lengths separated by commas, such as ``512,1536``; ``8x256`` is eight documents of 256 tokens.
            ``mean:700`` is read by pack_sequence.

    Raises:
        WorkloadError: a length is not a positive integer.

    >>> read_documents("2x256, 1536")
    (1536, 256, 256)
    """
    lengths: list[int] = []
    for word in text.replace(",", " ").split():
        copies, _, tokens = word.rpartition("x")
        count, length = read_integer(copies or "1"), read_integer(tokens)
        if length is None or count is None or not 0 < count <= _MOST_DOCUMENTS:
            raise WorkloadError(
                f"packed={word!r} is not a length; give the tokens of each document of a sequence, such as 512,1536 or "
                f"8x256",
                field="packed",
            )
        lengths += [length] * count
    if not lengths or min(lengths) < 1 or len(lengths) > _MOST_DOCUMENTS:
        raise WorkloadError(
            f"packed={text!r} must have 1 to {_MOST_DOCUMENTS} documents of at least 1 token", field="packed"
        )
    return tuple(sorted(lengths, reverse=True))


def pack_sequence(text: str, seq_len: int) -> tuple[int, ...]:
    """Return the lengths of the documents of one sequence, longest first; tokens that are left are one more document.

    Args:
        text: Lengths as for read_documents, or ``mean:700`` for documents of an exponential distribution, the widest of
            a given mean: equally likely quantiles, scaled to fill the sequence.

    Raises:
        WorkloadError: the text is malformed, or the documents are longer than the sequence.

    >>> pack_sequence("512,1024", 2048), pack_sequence("mean:1024", 4096)
    ((1024, 512, 512), (2325, 1096, 526, 149))
    """
    word, _, length = text.strip().partition(":")
    if word == "mean":
        mean = read_integer(length)
        if mean is None or mean <= 0:
            raise WorkloadError(f"packed={text!r} has no mean length; give it as mean:700", field="packed")
        count = min(max(1, round(seq_len / mean)), _MOST_DOCUMENTS)
        drawn = [-log(1.0 - (index + 0.5) / count) for index in reversed(range(count))]
        ends = [round(seq_len * part / sum(drawn)) for part in accumulate(drawn)]
        return tuple(sorted((end - start for start, end in pairwise([0, *ends]) if end > start), reverse=True))
    documents = read_documents(text)
    rest = seq_len - sum(documents)
    if rest < 0:
        raise WorkloadError(
            f"packed={text!r} has documents of {sum(documents)} tokens together, more than seq_len={seq_len}",
            advice=with_fields("drop documents or raise {seq_len}"),
            field="packed",
        )
    return tuple(sorted((*documents, rest), reverse=True)) if rest else documents


_MOST_GROUPS = 8


def group_documents(lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return pairs of a length and the number of documents of it, at most eight.

    Neighbouring lengths are merged into documents of equal tokens and, but for rounding, equal query-key pairs.

    >>> group_documents((1024, 512, 512)), len(group_documents(tuple(range(100, 0, -1))))
    ([(1024, 1), (512, 2)], 8)
    """
    counted = [(length, lengths.count(length)) for length in dict.fromkeys(lengths)]
    if len(counted) <= _MOST_GROUPS:
        return counted
    size = -(-len(lengths) // _MOST_GROUPS)
    groups = (lengths[start : start + size] for start in range(0, len(lengths), size))
    return [(round(sqrt(sum(one * one for one in group) / len(group))), len(group)) for group in groups]


_MOST_DOCUMENTS = 4096
