"""Element formats (dtypes): names, aliases and widths."""

from __future__ import annotations

from functools import cache

from shapewright.core.errors import WorkloadError, close_names
from shapewright.core.records import dataclass


@dataclass(frozen=True)
class DType:
    """One element format.

    Attributes:
        name: Canonical name.
        bits: Width of one stored element. [bit]
    """

    name: str
    bits: int

    @property
    def num_bytes(self) -> float:
        """Width of one element. [byte]; 0.5 for the 4-bit formats."""
        return self.bits / 8


_DTYPES = {
    dtype.name: dtype
    for dtype in (
        DType("fp32", 32),
        DType("tf32", 32),
        DType("fp16", 16),
        DType("bf16", 16),
        DType("fp8", 8),
        DType("int8", 8),
        DType("int4", 4),
        DType("fp4", 4),
    )
}

_ALIASES = {
    "float32": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "float8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "nvfp4": "fp4",
    "mxfp4": "fp4",
    "mxfp8": "fp8",
}

DTYPE_NAMES = tuple(_DTYPES)

# Weights below 8 bits store a 16-bit scale per group of 128 (the usual group size, arXiv 2210.17323 and 2306.00978).
# Wider ones have a scale per row or matrix, whose size is negligible.
_SCALE_BYTES_PER_WEIGHT = 2.0 / 128.0
_MIN_BITS_WITHOUT_GROUP_SCALES = 8


@cache
def get_dtype(name: str) -> DType:
    """Return the element format with this name or alias.

    >>> get_dtype("bfloat16").num_bytes
    2.0

    Raises:
        WorkloadError: the name is unknown.
    """
    folded = name.strip().lower().removeprefix("torch.")
    folded = _ALIASES.get(folded, folded)
    if folded not in _DTYPES:
        hint = close_names(folded, _DTYPES) or f"choose one of {', '.join(DTYPE_NAMES)}"
        raise WorkloadError(f"unknown dtype {name!r}; {hint}")
    return _DTYPES[folded]


def stored_weight_bytes(name: str) -> float:
    """Return the bytes of one stored weight, including the group scales of formats below 8 bits. [byte]

    >>> stored_weight_bytes("bf16"), stored_weight_bytes("int4")
    (2.0, 0.515625)

    Raises:
        WorkloadError: the name is unknown.
    """
    dtype = get_dtype(name)
    return dtype.num_bytes + (_SCALE_BYTES_PER_WEIGHT if dtype.bits < _MIN_BITS_WITHOUT_GROUP_SCALES else 0.0)
