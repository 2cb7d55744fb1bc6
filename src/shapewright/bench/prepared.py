"""Prepared: an operation made ready to run, with its inputs, its call and its judge."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shapewright.errors import BenchError

if TYPE_CHECKING:
    from shapewright.bench.backend import Backend

# Inputs rotate over so many bytes that none of what a call reads is left from the last round: twice the cache.
_COLD_FACTOR = 2.0
# More sets than these cost more time to make than they are worth; the row says whether they were enough.
_MOST_INPUTS, _MOST_INPUTS_ON_CPU = 32, 8

# Largest norm of the difference over the norm of the reference. Operands of 8 and 11 bits of mantissa round their
# result by 2**-9 and 2**-12; the rest is room for sums of thousands of terms and for softmax. Hopper's matrix units sum
# products of fp8 in about 14 bits and cut the rest off: 2 % and more of long sums (arXiv 2412.19437, section 3.3.2). A
# wrong layout is off by more than all of the reference.
TOLERANCE_FRACTION = {"fp32": 1e-4, "tf32": 3e-3, "fp16": 4e-3, "bf16": 2e-2, "fp8": 1e-1, "int8": 0.0}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """An operation ready to run.

    Attributes:
        inputs: Sets of tensors; calls rotate over them.
        call: Runs the operation on one set.
        check: Compares the result of one set with a reference: norm of the difference over the reference's norm.
        kernel: What runs, in the library's words.
        set_bytes: Bytes that one call reads and writes. [byte]
        capturable: Whether a graph of the calls may be made; it costs as much memory as the calls once more.
        tolerance: Largest difference that is right; None for that of the format.
        figures: Measures what there is to know beside the time, by a name with its unit.
    """

    inputs: list[tuple[Any, ...]]
    call: Callable[..., Any]
    check: Callable[[Any, tuple[Any, ...]], float]
    kernel: str
    set_bytes: float
    capturable: bool = True
    tolerance: float | None = None
    figures: Callable[[], dict[str, float]] = dict

    def is_cold(self, cache_bytes: float) -> bool:
        """Whether no input is left in the cache when its turn comes again."""
        return len(self.inputs) * self.set_bytes >= _COLD_FACTOR * cache_bytes


def num_input_sets(set_bytes: float, backend: Backend) -> int:
    """Sets of inputs that exceed the cache together, as far as memory and a sensible number allow.

    Raises:
        BenchError: not even one set fits.
    """
    usable_bytes = backend.usable_bytes()
    if 2.0 * set_bytes > usable_bytes:  # the references and what a library needs beside them take as much again
        raise BenchError(
            f"needs {set_bytes / 1e9:.1f} GB twice over, and {usable_bytes / 1e9:.1f} GB of memory are free; "
            "measure a smaller shape"
        )
    most = _MOST_INPUTS if backend.is_cuda else _MOST_INPUTS_ON_CPU
    wanted = math.ceil(_COLD_FACTOR * backend.cache_bytes / max(set_bytes, 1.0))
    return max(1, min(wanted, most, int(usable_bytes / (2.0 * set_bytes))))


def torch_dtype(name: str) -> Any:
    """The torch.dtype that operands of a format are stored in."""
    import torch

    return {
        "fp32": torch.float32,
        "tf32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8": torch.float8_e4m3fn,
        "int8": torch.int8,
    }[name]


def normal(backend: Backend, *shape: int, dtype: str) -> Any:
    """A tensor of random normal numbers on the device; nobody may write to it."""
    return backend.pool.take(shape, torch_dtype(dtype))


def relative_error(found: Any, reference: Any) -> float:
    """Norm of the difference over the norm of the reference, both in float64 on the host; NaN stays NaN."""
    reference = reference.double().cpu()
    difference = found.double().cpu() - reference
    return float(difference.norm() / reference.norm().clamp_min(1e-30))


def some_indices(count: int, limit: int) -> list[int]:
    """Up to ``limit`` indices spread over ``count``, first and last among them.

    >>> some_indices(10, 4), some_indices(2, 4)
    ([0, 3, 6, 9], [0, 1])
    """
    if count <= limit:
        return list(range(count))
    return sorted({round(place * (count - 1) / (limit - 1)) for place in range(limit)})
