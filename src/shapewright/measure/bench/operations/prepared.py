"""A call that is ready to be timed, and helpers to prepare it: input sets, random tensors, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import BenchError
from shapewright.core.records import dataclass

if TYPE_CHECKING:
    from shapewright.measure.bench.device.backend import Backend

# Input sets together take this many times the cache, so that no call finds its inputs in the cache.
_COLD_FACTOR = 2.0
# Upper limits of the number of input sets, since each takes time to make; the row records whether they exceed the
# cache.
_MAX_INPUT_SETS, _MAX_INPUT_SETS_CPU = 32, 8

# Largest norm of the difference over the norm of the reference. Results with 8 and 11 mantissa bits have rounding
# errors of 2**-9 and 2**-12; the rest covers sums of thousands of terms, and softmax. Hopper's tensor cores accumulate
# fp8 products with about 14 bits and truncate, which costs 2 % and more of long sums (arXiv 2412.19437, section 3.3.2).
# A wrong layout has an error above 1.
TOLERANCE_FRACTION = {"fp32": 1e-4, "tf32": 3e-3, "fp16": 4e-3, "bf16": 2e-2, "fp8": 1e-1, "int8": 0.0}


@dataclass(frozen=True, kw_only=True)
class PreparedCall:
    """An operation with its inputs, ready to be timed.

    Attributes:
        inputs: Sets of tensors; calls rotate over them.
        call: Runs the operation on one set.
        check: Error of the result of one set: norm of the difference to a reference over the reference's norm.
        kernel: Name of the library function.
        set_bytes: Bytes that one call reads and writes. [byte]
        capturable: Whether the calls may be captured as a graph, which needs their memory a second time.
        tolerance: Largest accepted error; None for that of the element format.
        figures: Measures quantities other than the time, by names with their units.
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
        """Whether the input sets exceed the cache, so that no call finds its inputs in it."""
        return len(self.inputs) * self.set_bytes >= _COLD_FACTOR * cache_bytes


def num_input_sets(set_bytes: float, backend: Backend) -> int:
    """Number of input sets that together exceed the cache, limited by memory.

    Raises:
        BenchError: not even one set fits.
    """
    usable_bytes = backend.usable_bytes()
    if 2.0 * set_bytes > usable_bytes:  # references and workspaces take as much again
        raise BenchError(
            f"needs 2 x {set_bytes / 1e9:.1f} GB of memory, {usable_bytes / 1e9:.1f} GB are available; "
            "measure a smaller shape"
        )
    limit = _MAX_INPUT_SETS if backend.is_cuda else _MAX_INPUT_SETS_CPU
    wanted = math.ceil(_COLD_FACTOR * backend.cache_bytes / max(set_bytes, 1.0))
    return max(1, min(wanted, limit, int(usable_bytes / (2.0 * set_bytes))))


def torch_dtype(name: str) -> Any:
    """The torch.dtype that stores operands of an element format."""
    import torch

    return {
        "fp32": torch.float32,
        "tf32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8": torch.float8_e4m3fn,
        "int8": torch.int8,
    }[name]


def set_precision(dtype: str) -> None:
    """Let torch multiply 32-bit operands in tf32, or in fp32 for every other format."""
    import torch

    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")


def random_normal(backend: Backend, *shape: int, dtype: str) -> Any:
    """A tensor of random normal numbers on the device; callers must not write to it."""
    return backend.pool.take(shape, torch_dtype(dtype))


def relative_error(found: Any, reference: Any) -> float:
    """Norm of the difference over the norm of the reference, in float64 on the host; NaN if any element is NaN."""
    reference = reference.double().cpu()
    difference = found.double().cpu() - reference
    return float(difference.norm() / reference.norm().clamp_min(1e-30))


def spread_indices(count: int, limit: int) -> list[int]:
    """Up to ``limit`` indices spread evenly over ``range(count)``, the first and the last included.

    >>> spread_indices(10, 4), spread_indices(2, 4)
    ([0, 3, 6, 9], [0, 1])
    """
    if count <= limit:
        return list(range(count))
    return sorted({round(index * (count - 1) / (limit - 1)) for index in range(limit)})
