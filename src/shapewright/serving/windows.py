"""Windows of a batch whose sequences stand at every place of their answers: each layer sees what it sees on the mean.

A batch in the middle of its answers sees all of a chunk or next to nothing of it, by a few tokens of the prompt; the
sequences of a real batch are spread over their answers, and what their attention reads is the mean.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig

_MOST_PASSES = 11
"""Passes of a prompt that are priced. Odd, so that they do not fall on the same place of every chunk, whose tokens and
those of a pass are powers of two."""


def spread_windows(config: TransformerConfig, context_len: int, num_contexts: int) -> TransformerConfig:
    """The model with each window as long as what a decode pass sees of it on the mean.

    Lowered behind the middle one of these contexts, a layer without a window sees the mean already.

    Args:
        config: The model.
        context_len: Tokens in the cache before the first of the passes.
        num_contexts: Passes, each with a token more in the cache.
    """
    if num_contexts == 1 or not any(config.attention_windows):
        return config
    is_chunked = config.attention_window_kind == "chunked"
    seen = {
        window: mean_seen(window, context_len, num_contexts, is_chunked=is_chunked)
        for window in set(config.attention_windows)
        if window
    }
    windows = tuple(seen.get(window, 0) for window in config.attention_windows)
    return replace(config, attention_windows=windows, attention_window_kind="sliding")


def contexts_of_passes(config: TransformerConfig, mean_context: int, tokens: int, num_passes: int) -> tuple[int, ...]:
    """Cached tokens before the passes that stand for all in which a prompt is prefilled: their mean time is the mean.

    What layers without a window take grows evenly from pass to pass, so the pass in the middle is the mean; where they
    slide it is by 0.2 % (Gemma 2). With chunks, which every so often begin anew, some passes are taken, evenly over the
    prompt.

    Args:
        config: The model.
        mean_context: Tokens in the cache before a pass, on the mean over them.
        tokens: Prompt tokens of a pass.
        num_passes: Passes of the prompt.

    >>> from shapewright.config import TransformerConfig
    >>> chunks = {"attention_windows": (32, 0), "attention_window_kind": "chunked"}
    >>> model = TransformerConfig(hidden_size=64, num_layers=2, num_heads=4, vocab_size=100, **chunks)
    >>> contexts_of_passes(model, 16, 16, 3)
    (0, 16, 32)
    """
    if not any(config.attention_windows) or config.attention_window_kind != "chunked":
        return (mean_context,)
    first = mean_context - (num_passes - 1) * tokens // 2
    count = min(num_passes, _MOST_PASSES)
    return tuple(first + (2 * index + 1) * num_passes // (2 * count) * tokens for index in range(count))


def mean_seen(window: int, context_len: int, num_contexts: int, *, is_chunked: bool) -> int:
    """Tokens that one new token sees on the mean over contexts, itself among them, rounded up.

    Args:
        window: Its window, above 0.
        context_len: Tokens in the cache before the first pass.
        num_contexts: Passes, each with a token more in the cache.
        is_chunked: Whether a chunk that is full is left behind; otherwise the window slides.

    >>> mean_seen(4, 2, 4, is_chunked=True), mean_seen(4, 2, 4, is_chunked=False)  # 3 4 1 2 and 3 4 4 4
    (3, 4)
    """
    last = context_len + num_contexts
    total = _sum_seen(window, last, is_chunked=is_chunked) - _sum_seen(window, context_len, is_chunked=is_chunked)
    return -(-total // num_contexts)


def _sum_seen(window: int, num_tokens: int, *, is_chunked: bool) -> int:
    """What the tokens of a sequence see, added up: 1 + 2 + ... + window, then again or window for ever."""
    num_chunks, rest = divmod(num_tokens, window)
    triangle = window * (window + 1) // 2
    if is_chunked:
        return num_chunks * triangle + rest * (rest + 1) // 2
    return triangle + (num_tokens - window) * window if num_chunks else rest * (rest + 1) // 2
