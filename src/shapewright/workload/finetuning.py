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

from shapewright.core.errors import WorkloadError, close_names
from shapewright.core.ranges import read_integer
from shapewright.core.texts import with_fields
from shapewright.models.layers import LINEAR_LAYERS

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
FUSED_ROLES = {
    "qkv": ("q", "k", "v"),
    "qkv_a": ("q_a", "kv_a"),
    "compressed": ("compressed_kv", "compressed_gate"),
    "gate_up": ("gate", "up"),
}
"""Members of fused projections: naming them all names the fused one, and the other way round."""


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
    parts = FUSED_ROLES.get(role)
    if parts:
        return all(part in roles for part in parts)
    return any(role in parts and fused in roles for fused, parts in FUSED_ROLES.items())


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
