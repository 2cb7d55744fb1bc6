"""Which fields a shape changes, as a person would count: what only follows another field is no change of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.search.request import ffn_field

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shapewright.search.steps import Setting

CHANGES = ("width", "depth", "heads", "kv_heads", "ffn", "vocab", "micro_batch", "experts", "layout", "recompute")
"""What may change, in the order of the bits of a code; the last three are those of a branch."""

# An MLP width this close to the baseline's proportion still follows the width. [element]
_FOLLOWS_WITHIN = 64


def encode_changes(shapes: Mapping[str, NDArray[np.int64]], setting: Setting) -> NDArray[np.int64]:
    """Changed fields of many shapes, one bit for each of CHANGES."""
    config, name = setting.config, ffn_field(setting.config)
    width, heads, head_dim, kv_heads = (
        shapes[field] for field in ("hidden_size", "num_heads", "head_dim", "num_kv_heads")
    )
    moved = width != config.hidden_size
    # The attention keeps its proportion to the residual stream unless somebody asked for another.
    recut = head_dim != config.head_dim
    if not config.is_mla:
        recut = recut | (heads * head_dim * config.hidden_size != config.num_heads * config.head_dim * width)
    regrouped = (heads * config.num_kv_heads != kv_heads * config.num_heads) & (kv_heads != config.num_kv_heads)
    own = getattr(config, name)
    within = np.where(moved, _FOLLOWS_WITHIN * setting.layout.tensor_parallel, 0)
    refilled = np.abs(shapes[name] * config.hidden_size - own * width) > within * config.hidden_size
    bits = {
        "width": moved,
        "depth": shapes["num_layers"] != config.num_layers,
        "heads": recut,
        "kv_heads": regrouped,
        "ffn": refilled,
        "vocab": shapes["vocab_size"] != config.vocab_size,
        "micro_batch": shapes["micro_batch_size"] != setting.workload.micro_batch_size,
    }
    code: Any = np.zeros(len(width), dtype=np.int64)
    for place, change in enumerate(bits):
        code = code | (bits[change].astype(np.int64) << place)
    return np.asarray(code)


def decode_changes(code: int) -> tuple[str, ...]:
    """Names of the changed fields.

    >>> decode_changes(0b100100)
    ('heads', 'vocab')
    """
    return tuple(change for place, change in enumerate(CHANGES) if code >> place & 1)
