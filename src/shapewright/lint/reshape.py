"""Changes of a shape that keep the rest of the model sound: other heads, another width, another depth.

Legend: h hidden_size, a num_heads, a_kv num_kv_heads, d head_dim, f intermediate_size, L num_layers.

Each function returns new values by field name, complete in themselves, or None where the model has no such shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.lint.needs import largest_power_of_two

if TYPE_CHECKING:
    from shapewright.config.transformer import TransformerConfig

HEAD_DIMS = (64, 80, 96, 128, 160, 192, 256)
"""Head widths that published models use and fused kernels run."""

USUAL_HEAD_DIM = 128
"""The width that most models published since 2023 use; wider heads are faster still, and rarer the wider they are."""

_SMALLEST_SPLIT = 2  # an odd number of heads leaves no tensor parallelism at all

Changes = dict[str, Any]


def with_head_dim(config: TransformerConfig, head_dim: int) -> Changes | None:
    """Cut the same width into heads of another size; a d and a_kv d stay, and with them every parameter.

    >>> from shapewright.config.transformer import TransformerConfig
    >>> gpt3_2_7b = TransformerConfig(hidden_size=2560, num_layers=32, num_heads=32, vocab_size=50257)
    >>> with_head_dim(gpt3_2_7b, 128)["num_heads"]
    20
    """
    if config.is_mla or config.v_head_dim != config.head_dim or head_dim == config.head_dim:
        return None
    query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    if query_width % head_dim or kv_width % head_dim:
        return None
    num_heads, num_kv_heads = query_width // head_dim, kv_width // head_dim
    if num_heads % num_kv_heads or not splits_as_before(config.num_heads, num_heads, _SMALLEST_SPLIT):
        return None
    return {
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "v_head_dim": head_dim,
    }


def splits_as_before(old: int, new: int, largest: int) -> bool:
    """Whether a new count of heads still divides by the powers of two, up to a limit, that the old one did.

    >>> splits_as_before(32, 20, 4), splits_as_before(14, 7, 2), splits_as_before(25, 5, 2)
    (True, False, True)
    """
    return new % min(largest, largest_power_of_two(old)) == 0


def head_dims_near(config: TransformerConfig) -> tuple[int, ...]:
    """Widths to try: up to the usual one, or from there up to twice the model's own.

    Fewer and wider heads are nearly always faster, so that without a limit every model would be told to have a few
    heads of 256. The paper's cases go from 80 to 128 and from 128 to 256 (arXiv 2401.14489).
    """
    largest = USUAL_HEAD_DIM if config.head_dim < USUAL_HEAD_DIM else 2 * config.head_dim
    return tuple(width for width in HEAD_DIMS if width <= largest and width != config.head_dim)


def has_square_attention(config: TransformerConfig) -> bool:
    """Whether the heads together are as wide as the residual stream."""
    return not config.is_mla and config.num_heads * config.head_dim == config.hidden_size


def with_hidden_size(config: TransformerConfig, hidden_size: int, multiple: int) -> Changes | None:
    """Widen or narrow the residual stream, and with it heads and MLP in the proportions they have.

    The head width stays where it divides the new width; otherwise the nearest usual one is taken. Queries per
    key-value head and f / h stay, f rounded to a multiple.
    """
    changes: Changes = {"hidden_size": hidden_size}
    if has_square_attention(config):
        queries_per_kv = config.num_heads // config.num_kv_heads
        usual = sorted({config.head_dim, *HEAD_DIMS}, key=lambda width: abs(width - config.head_dim))
        for head_dim in usual:
            num_heads, rest = divmod(hidden_size, head_dim)
            if not rest and num_heads and num_heads % queries_per_kv == 0:
                changes |= {"num_heads": num_heads, "num_kv_heads": num_heads // queries_per_kv, "head_dim": head_dim}
                changes["v_head_dim"] = head_dim if config.v_head_dim == config.head_dim else config.v_head_dim
                break
        else:
            return None
    ratio = config.intermediate_size / config.hidden_size
    changes["intermediate_size"] = max(multiple, round(ratio * hidden_size / multiple) * multiple)
    if config.embedding_size == config.hidden_size:
        changes["embedding_size"] = hidden_size
    return changes


def can_change_depth(config: TransformerConfig) -> bool:
    """Whether a layer more or less is the same kind of model: one stack, and layers that repeat a pattern."""
    return config.stack != "encoder-decoder" and len(config.moe_layers) < config.num_layers
