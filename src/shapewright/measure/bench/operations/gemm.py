"""Plain, batched and grouped GEMMs in the memory layouts of forward, dgrad and wgrad."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shapewright.core.errors import BenchError
from shapewright.measure.bench.operations.prepared import (
    PreparedCall,
    num_input_sets,
    random_normal,
    relative_error,
    set_precision,
    spread_indices,
)

if TYPE_CHECKING:
    from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
    from shapewright.measure.bench.device.backend import Backend

# Rows and columns, and GEMMs of a batch, that are compared with float64.
_CHECKED_ROWS, _CHECKED_BATCH = 48, 3
GROUPED = "grouped"
"""Variant of a grouped GEMM that runs as one kernel for all groups."""


def prepare_gemm(operation: Gemm, backend: Backend) -> PreparedCall:
    """Prepare C[m,n] = A[m,k] B[k,n] with operands in the memory layout of the operation.

    Raises:
        BenchError: it does not fit, or torch does not support this layout in this format.
    """
    import torch

    set_precision(operation.dtype)
    m, n, k, batch = (int(size) for size in (operation.m, operation.n, operation.k, operation.batch))
    set_bytes = float(operation.num_bytes)
    count = num_input_sets(set_bytes, backend)
    lead = (batch,) if batch > 1 else ()

    def operand(rows: int, columns: int, letter: str) -> Any:
        """A matrix that is stored as it is (N) or transposed (T)."""
        if letter == "N":
            return random_normal(backend, *lead, rows, columns, dtype=operation.dtype)
        return random_normal(backend, *lead, columns, rows, dtype=operation.dtype).transpose(-1, -2)

    inputs = [(operand(m, k, operation.layout[0]), operand(k, n, operation.layout[1])) for _ in range(count)]
    if operation.dtype in ("fp8", "int8"):
        if batch > 1 or operation.layout != "NT":
            raise BenchError(
                f"{operation.dtype} GEMMs support layout=NT with batch=1 only, got layout={operation.layout} with "
                f"batch={batch}"
            )
        call, name = _eight_bit_gemm(operation.dtype, backend)
        return PreparedCall(inputs=inputs, call=call, check=check_gemm, kernel=name, set_bytes=set_bytes)
    call = torch.bmm if batch > 1 else torch.mm
    return PreparedCall(inputs=inputs, call=call, check=check_gemm, kernel=call.__name__, set_bytes=set_bytes)


def _eight_bit_gemm(dtype: str, backend: Backend) -> tuple[Callable[..., Any], str]:
    """Torch's GEMM of 8-bit operands, and its name."""
    import torch

    if dtype == "int8":
        return torch._int_mm, "int_mm"
    one = torch.ones((), device=backend.torch_device)

    def scaled(a: Any, b: Any) -> Any:
        return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return scaled, "scaled_mm"


def prepare_grouped_gemm(operation: GroupedGemm, backend: Backend, variant: str = "") -> PreparedCall:
    """Prepare the grouped GEMM of one expert layer, with rows spread evenly over the groups.

    Args:
        variant: GROUPED for torch's grouped kernel; empty for one call per group.

    Raises:
        BenchError: it does not fit, a group would be empty, or the installed torch lacks the grouped kernel.
    """
    import torch

    set_precision(operation.dtype)
    m, n, k, groups = (int(size) for size in (operation.m, operation.n, operation.k, operation.groups))
    splits_k = operation.layout == "TN"
    split = k if splits_k else m
    if split < groups:
        raise BenchError(f"{split} rows are fewer than groups={groups}; each group needs at least one row")
    sizes = [split // groups + (index < split % groups) for index in range(groups)]
    set_bytes = float(operation.num_bytes)
    count = num_input_sets(set_bytes, backend)
    transposed = operation.layout[1] == "T"

    def make() -> tuple[Any, ...]:
        if splits_k:
            return random_normal(backend, k, m, dtype=operation.dtype), random_normal(
                backend, k, n, dtype=operation.dtype
            )
        shape = (groups, n, k) if transposed else (groups, k, n)
        weights = random_normal(backend, *shape, dtype=operation.dtype)
        return random_normal(backend, m, k, dtype=operation.dtype), weights.transpose(1, 2) if transposed else weights

    ends = torch.tensor(sizes, device=backend.torch_device).cumsum(0).to(torch.int32)
    if variant and (variant != GROUPED or not hasattr(torch, "_grouped_mm")):
        raise BenchError(
            f"variant={variant!r} is not available; grouped GEMMs have the variant {GROUPED!r}, with torch 2.8 or later"
        )

    def call(a: Any, b: Any) -> Any:
        if variant:
            return torch._grouped_mm(a.t() if splits_k else a, b, offs=ends)
        if splits_k:
            pairs = zip(a.split(sizes), b.split(sizes), strict=True)
            return [torch.mm(left.t(), right) for left, right in pairs]
        return [torch.mm(rows, weight) for rows, weight in zip(a.split(sizes), b, strict=True)]

    def check(found: Any, arguments: tuple[Any, ...]) -> float:
        a, b = arguments
        # Checked first, since max() may drop a NaN.
        if not all(bool(part.isfinite().all()) for part in ([found] if variant else found)):
            return float("nan")
        if variant and not splits_k:
            found = found.split(sizes)
        right = b.split(sizes) if splits_k else b
        left = [part.t() if splits_k else part for part in a.split(sizes)]
        chosen = spread_indices(groups, _CHECKED_BATCH)
        return max(check_gemm(found[index], (left[index], right[index])) for index in chosen)

    inputs = [make() for _ in range(count)]
    kernel = "grouped_mm" if variant else f"mm x {groups}"
    return PreparedCall(inputs=inputs, call=call, check=check, kernel=kernel, set_bytes=set_bytes)


def check_gemm(found: Any, operands: tuple[Any, ...]) -> float:
    """Error of some rows and columns of a GEMM against float64; NaN unless every element is finite."""
    a, b = operands
    if not bool(found.isfinite().all()):
        return float("nan")
    if a.dim() == 3:
        chosen = spread_indices(a.shape[0], _CHECKED_BATCH)
        return max(check_gemm(found[index], (a[index], b[index])) for index in chosen)
    if a.element_size() == 1:  # torch cannot index 8-bit floats; bf16 represents all 8-bit values exactly
        a, b = a.bfloat16(), b.bfloat16()
    rows, columns = spread_indices(a.shape[0], _CHECKED_ROWS), spread_indices(b.shape[1], _CHECKED_ROWS)
    reference = a[rows].double().cpu() @ b[:, columns].double().cpu()
    return relative_error(found[rows][:, columns], reference)
