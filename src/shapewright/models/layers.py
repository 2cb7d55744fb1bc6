"""Kinds of layers of a model, and their counts over a pattern that repeats."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    IntArray = NDArray[np.int64]

Item = TypeVar("Item")

ATTENTION = "attention"
ATTENTION_AND_MAMBA2 = "attention+mamba2"
NO_MIXER = "none"
LINEAR_LAYERS = (
    "gated_delta_net",
    "kimi_delta_attention",
    "lightning_attention",
    "mamba2",
    "mamba",
    "short_convolution",
)
"""Mixers of tokens that keep a state of constant size instead of keys and values."""

WINDOW_ATTENTION = "window_attention"
SPARSE_COMPRESSED = "compressed_sparse_attention"
HEAVILY_COMPRESSED = "heavily_compressed_attention"
COMPRESSED_LAYERS = (WINDOW_ATTENTION, SPARSE_COMPRESSED, HEAVILY_COMPRESSED)
"""Attention of DeepSeek-V4: one head that is both key and value, of the latest tokens and, but for the first kind, of
groups of earlier tokens that are compressed to one each; of the second kind an indexer selects some."""

CROSS_ATTENTION = "cross_attention"
"""Attention to the tokens of images in place of self-attention; without images the whole layer is skipped."""

LAYER_TYPES = (ATTENTION, *LINEAR_LAYERS, *COMPRESSED_LAYERS, CROSS_ATTENTION, ATTENTION_AND_MAMBA2, NO_MIXER)
"""Values of ``layer_types``: softmax attention, those of LINEAR_LAYERS and COMPRESSED_LAYERS, attention to images,
attention beside Mamba-2 on the same input, or no mixer (a layer with an MLP alone)."""

WITH_SOFTMAX = (ATTENTION, *COMPRESSED_LAYERS, CROSS_ATTENTION)
"""Mixers with attention, which have no scan, convolution or state of constant size."""


def mixers_of(layer_type: str) -> tuple[str, ...]:
    """Return the mixers of a layer.

    >>> mixers_of("attention+mamba2"), mixers_of("mamba2"), mixers_of("none")
    (('attention', 'mamba2'), ('mamba2',), ())
    """
    return () if layer_type == NO_MIXER else tuple(layer_type.split("+"))


def describe_pattern(layer_types: tuple[str, ...]) -> str:
    """Return the share of layers with attention.

    >>> describe_pattern(("mamba2", "mamba2", "mamba2", "attention")), describe_pattern(())
    ('attention in 1 of 4', 'attention in all')
    """
    if set(layer_types) & set(COMPRESSED_LAYERS):
        counts = {kind: layer_types.count(kind) for kind in COMPRESSED_LAYERS if kind in layer_types}
        return ", ".join(f"{kind} in {count} of {len(layer_types)}" for kind, count in counts.items())
    with_attention = sum(ATTENTION in mixers_of(each) for each in layer_types)
    return f"attention in {with_attention} of {len(layer_types)}" if layer_types else "attention in all"


class LayerGroup(NamedTuple):
    """Layers of one stack with the same operations.

    Attributes:
        window: Attention window in positions, 0 for all, and for layers without attention.
        is_moe: Whether the MLP is a mixture of experts.
        num_layers: Number of such layers.
        layer_type: One of LAYER_TYPES.
        has_mlp: Whether there is an MLP, dense or of experts.
    """

    window: int
    is_moe: bool
    num_layers: int
    layer_type: str = ATTENTION
    has_mlp: bool = True


class LayerKind(NamedTuple):
    """What decides the operations of a layer.

    Attributes:
        layer_type: One of LAYER_TYPES.
        window: Attention window, 0 for all positions and for layers without attention.
        mlp: ``dense``, ``experts`` or ``none``.
        is_rotary: Whether it has attention with rotary positions.
    """

    layer_type: str = ATTENTION
    window: int = 0
    mlp: str = "dense"
    is_rotary: bool = False

    @property
    def has_attention(self) -> bool:
        """Whether it has softmax attention."""
        return ATTENTION in mixers_of(self.layer_type)


class LayerPatterns(NamedTuple):
    """Patterns of a model over its layers, each repeated; none is empty.

    Attributes:
        layer_types: Value of LAYER_TYPES.
        windows: Attention window.
        has_mlp: Whether there is an MLP.
        is_moe: Whether an MLP is one of experts.
        is_rotary: Whether attention has rotary positions.
    """

    layer_types: tuple[str, ...]
    windows: tuple[int, ...]
    has_mlp: tuple[bool, ...]
    is_moe: tuple[bool, ...]
    is_rotary: tuple[bool, ...]

    @property
    def period(self) -> int:
        """Layers after which all patterns repeat together."""
        return math.lcm(*(len(pattern) for pattern in self))

    def kind_of(self, index: int) -> LayerKind:
        """Return the kind of one layer."""
        layer_type = self.layer_types[index % len(self.layer_types)]
        window, is_rotary = self.windows[index % len(self.windows)], self.is_rotary[index % len(self.is_rotary)]
        if ATTENTION not in mixers_of(layer_type):
            window, is_rotary = 0, False
        mlp = "experts" if self.is_moe[index % len(self.is_moe)] else "dense"
        return LayerKind(layer_type, window, mlp if self.has_mlp[index % len(self.has_mlp)] else "none", is_rotary)


_MOST_TRACED_LAYERS = 256


@lru_cache(maxsize=1024)
def count_kinds(patterns: LayerPatterns, start: int, stop: int) -> tuple[tuple[LayerKind, int], ...]:
    """Count consecutive layers by kind, in order of first appearance.

    >>> import numpy as np
    >>> patterns = LayerPatterns(("attention",), (32, 0), (True,), (False,), (True,))
    >>> [(kind.window, count) for kind, count in count_kinds(patterns, 0, 5)]
    [(32, 3), (0, 2)]
    """
    counts: dict[LayerKind, int] = {}
    period = patterns.period
    if period > _MOST_TRACED_LAYERS:
        # Expressions of a traced number would have a term for every layer of a period.
        stop = int(stop)
    for first in range(start, min(start + period, stop)):
        kind = patterns.kind_of(first)
        # Layers first, first + period, first + 2 * period, ... are equal.
        counts[kind] = counts.get(kind, 0) + -(-(stop - first) // period)
    return tuple(counts.items())


def number_layers(patterns: Sequence[tuple[Any, ...]], num_layers: int) -> tuple[list[int], IntArray]:
    """Number the combinations of values of patterns that repeat.

    Returns:
        The first layer with each combination, and the number of each layer's combination.

    >>> firsts, layers = number_layers(((32, 0), (True, False, False)), 7)
    >>> firsts, layers.tolist()
    ([0, 1, 2, 3], [0, 1, 2, 3, 2, 1, 0])
    """
    import numpy as np  # imported here, because reading a model must not wait for NumPy

    columns = [np.resize(np.unique(pattern, return_inverse=True)[1], num_layers) for pattern in patterns]
    _, firsts, layers = np.unique(np.stack(columns), axis=1, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return firsts[order].tolist(), rank[layers.reshape(-1)]


def count_ranges(patterns: LayerPatterns, starts: IntArray, stops: IntArray) -> tuple[list[LayerKind], IntArray]:
    """Count the layers of each kind in ranges of consecutive layers.

    Args:
        starts: First layer of each range.
        stops: Layer after the last one of each range.

    Returns:
        The kinds, and their numbers as an array of ranges by kinds.

    >>> import numpy as np
    >>> patterns = LayerPatterns(("attention",), (32, 32, 0), (True,), (False,), (True,))
    >>> kinds, counts = count_ranges(patterns, np.array([0, 2]), np.array([2, 6]))
    >>> [kind.window for kind in kinds], counts.tolist()
    ([32, 0], [[2, 0], [2, 2]])
    """
    import numpy as np

    combined, layers = number_layers(patterns, int(stops.max()))
    kinds = [patterns.kind_of(first) for first in combined]
    before = np.zeros((len(layers) + 1, len(kinds)), dtype=np.int64)
    np.cumsum(layers[:, None] == np.arange(len(kinds)), axis=0, out=before[1:])
    return kinds, before[stops] - before[starts]


def count_unlike_layers(layers: IntArray) -> int:
    """Count the layers up to the end of the first repetition of those that repeat until the last layer.

    >>> import numpy as np
    >>> count_unlike_layers(np.array([7, 0, 1, 0, 1, 0]))  # one layer, then a period of two
    3
    """
    reverse = layers[::-1].tolist()
    # From the last layer: a suffix of n layers has the period n minus its longest border.
    return len(reverse) - max(_longest_borders(reverse), default=0)


def shortest_period(items: Sequence[Item]) -> tuple[Item, ...]:
    """Return the shortest prefix that gives the sequence when repeated and truncated.

    >>> shortest_period((4, 4, 0, 4, 4, 0, 4))
    (4, 4, 0)
    """
    return tuple(items[: len(items) - _longest_borders(items)[-1]]) if items else ()


def _longest_borders(items: Sequence[Any]) -> list[int]:
    """Return for each prefix the length of its longest border: a start, shorter than it, that it ends with too.

    Source: Knuth, Morris and Pratt, SIAM Journal on Computing 6(2), 1977.
    """
    borders = [0] * len(items)
    for index in range(1, len(items)):
        border = borders[index - 1]
        while border and items[index] != items[border]:
            border = borders[border - 1]
        borders[index] = border + (items[index] == items[border])
    return borders
