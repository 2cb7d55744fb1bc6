"""Whether a captured graph is what was captured: a replay has to write its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# What floating-point results are filled with to see whether a replay writes them: every format holds it exactly, it is
# tens of deviations off any result here, and a result that is updated in place moves away from it. Integers get their
# lowest.
_MARK = -12288.0


def fills_results(replay: Callable[[], object], results: object) -> bool:
    """Whether a replay writes every one of the results.

    Args:
        replay: Runs what was captured.
        results: A tensor, or tensors in tuples and lists.
    """
    import torch

    # A mask has two values alone, and lies beside a result that tells.
    tensors = [tensor.detach() for tensor in flatten_tensors(results) if tensor.dtype != torch.bool]
    marks = [_MARK if part.is_floating_point() else torch.iinfo(part.dtype).min for part in tensors]
    for tensor, mark in zip(tensors, marks, strict=True):
        tensor.fill_(mark)
    replay()
    return bool(tensors) and all(bool((tensor != mark).all()) for tensor, mark in zip(tensors, marks, strict=True))


def flatten_tensors(results: object) -> list[Any]:
    """Tensors in tuples and lists, in order.

    >>> flatten_tensors((None, [None]))
    []
    """
    if isinstance(results, tuple | list):
        return [tensor for part in results for tensor in flatten_tensors(part)]
    return [results] if hasattr(results, "fill_") else []
