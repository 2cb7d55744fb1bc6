"""Inputs: random normal numbers, drawn once and handed out to row after row in slices.

Drawing and allocating them anew for every row would take longer than many rows are measured.
"""

from __future__ import annotations

import math
from typing import Any

# Slices begin where an allocator would put a tensor of its own. [byte]
_ALIGNMENT_BYTES = 512
# New numbers are drawn for at least so much at once, so that small rows share them. [byte]
_CHUNK_BYTES = 32 << 20
# Numbers of formats that fp32 must be narrowed to are drawn in parts, so that the wide ones fit beside them. [element]
_DRAWN_AT_ONCE = 16 << 20
# Formats that a row does not use are dropped where everything together is more than this. [byte]
_KEPT_BYTES = 2 << 30
# Standard deviation of 8-bit integers: three of them stay within the range.
_INT8_DEVIATION = 32.0


class InputPool:
    """Random numbers on a device.

    Args:
        torch_device: Where they lie.
    """

    def __init__(self, torch_device: Any) -> None:
        self._torch_device = torch_device
        # Of each format the chunks that there are, with the number of elements that this row has taken.
        self._chunks: dict[Any, list[tuple[Any, int]]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory that it holds. [byte]"""
        return sum(chunk.nbytes for chunks in self._chunks.values() for chunk, _ in chunks)

    def begin(self) -> None:
        """Hand everything out anew: what the last row took is free."""
        if self.num_bytes > _KEPT_BYTES:
            self._chunks.clear()
        self._chunks = {kind: [(chunk, 0) for chunk, _ in chunks] for kind, chunks in self._chunks.items()}

    def clear(self) -> None:
        """Give the memory back."""
        self._chunks.clear()

    def take(self, shape: tuple[int, ...], kind: Any) -> Any:
        """A tensor of random normal numbers that this row has not got yet; nobody may write to it.

        Args:
            shape: Its sizes.
            kind: Its torch.dtype.
        """
        count = math.prod(shape)
        step = max(1, _ALIGNMENT_BYTES // kind.itemsize)
        padded = -(-count // step) * step
        chunks = self._chunks.setdefault(kind, [])
        for place, (chunk, taken) in enumerate(chunks):
            if taken + padded <= chunk.numel():
                chunks[place] = (chunk, taken + padded)
                return chunk[taken : taken + count].view(shape)
        chunk = _draw(max(padded, _CHUNK_BYTES // kind.itemsize), kind, self._torch_device)
        chunks.append((chunk, padded))
        return chunk[:count].view(shape)


def _draw(count: int, kind: Any, torch_device: Any) -> Any:
    import torch

    if kind.is_floating_point and kind.itemsize > 1:
        return torch.randn(count, device=torch_device, dtype=kind)
    drawn = torch.empty(count, device=torch_device, dtype=kind)
    for start in range(0, count, _DRAWN_AT_ONCE):
        part = drawn[start : start + _DRAWN_AT_ONCE]
        numbers = torch.randn(part.numel(), device=torch_device)
        if not kind.is_floating_point:
            numbers = (numbers * _INT8_DEVIATION).round().clamp(-127, 127)
        part.copy_(numbers)
    return drawn
