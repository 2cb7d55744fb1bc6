"""Products, plain, batched and grouped, in the memory layouts that training uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shapewright.bench.prepared import Prepared, normal, num_input_sets, relative_error, some_indices
from shapewright.errors import BenchError

if TYPE_CHECKING:
    from shapewright.bench.backend import Backend
    from shapewright.operations import Gemm, GroupedGemm

# Rows, columns and products of the batch that are compared with float64.
_CHECKED_ROWS, _CHECKED_BATCH = 48, 3
GROUPED = "grouped"


def prepare_gemm(operation: Gemm, backend: Backend) -> Prepared:
    """Make C[m,n] = A[m,k] B[k,n] ready; the operands lie in memory as the layout says.

    Raises:
        BenchError: it does not fit, or the library has no such product in this format.
    """
    import torch

    torch.set_float32_matmul_precision("high" if operation.dtype == "tf32" else "highest")
    m, n, k, batch = (int(size) for size in (operation.m, operation.n, operation.k, operation.batch))
    set_bytes = float(operation.num_bytes)
    count = num_input_sets(set_bytes, backend)
    lead = (batch,) if batch > 1 else ()

    def operand(rows: int, columns: int, letter: str) -> Any:
        """A matrix that lies in memory as written (N) or transposed (T)."""
        if letter == "N":
            return normal(backend, *lead, rows, columns, dtype=operation.dtype)
        return normal(backend, *lead, columns, rows, dtype=operation.dtype).transpose(-1, -2)

    inputs = [(operand(m, k, operation.layout[0]), operand(k, n, operation.layout[1])) for _ in range(count)]
    if operation.dtype in ("fp8", "int8"):
        if batch > 1 or operation.layout != "NT":
            raise BenchError(
                f"{operation.dtype} products have one layout, NT without batch; got {operation.layout} x {batch}"
            )
        call, name = _narrow_product(operation.dtype, backend)
        return Prepared(inputs=inputs, call=call, check=check_product, kernel=name, set_bytes=set_bytes)
    call = torch.bmm if batch > 1 else torch.mm
    return Prepared(inputs=inputs, call=call, check=check_product, kernel=call.__name__, set_bytes=set_bytes)


def _narrow_product(dtype: str, backend: Backend) -> tuple[Callable[..., Any], str]:
    """Torch's product of 8-bit operands, with its name."""
    import torch

    if dtype == "int8":
        return torch._int_mm, "int_mm"
    one = torch.ones((), device=backend.torch_device)

    def scaled(a: Any, b: Any) -> Any:
        return torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

    return scaled, "scaled_mm"


def prepare_grouped_gemm(operation: GroupedGemm, backend: Backend, variant: str = "") -> Prepared:
    """Make the products of one expert layer ready, rows spread evenly over the groups.

    Args:
        operation: The products.
        backend: Where they run.
        variant: GROUPED for torch's one kernel for all groups; empty for one call each.

    Raises:
        BenchError: it does not fit, some groups would be empty, or this torch has no such kernel.
    """
    import torch

    torch.set_float32_matmul_precision("high" if operation.dtype == "tf32" else "highest")
    m, n, k, groups = (int(size) for size in (operation.m, operation.n, operation.k, operation.groups))
    splits_k = operation.layout == "TN"
    split = k if splits_k else m
    if split < groups:
        raise BenchError(f"{split} rows are fewer than groups={groups}; measure one with at least a row per group")
    sizes = [split // groups + (index < split % groups) for index in range(groups)]
    set_bytes = float(operation.num_bytes)
    count = num_input_sets(set_bytes, backend)
    transposed = operation.layout[1] == "T"

    def make() -> tuple[Any, ...]:
        if splits_k:
            return normal(backend, k, m, dtype=operation.dtype), normal(backend, k, n, dtype=operation.dtype)
        shape = (groups, n, k) if transposed else (groups, k, n)
        weights = normal(backend, *shape, dtype=operation.dtype)
        return normal(backend, m, k, dtype=operation.dtype), weights.transpose(1, 2) if transposed else weights

    ends = torch.tensor(sizes, device=backend.torch_device).cumsum(0).to(torch.int32)
    if variant and (variant != GROUPED or not hasattr(torch, "_grouped_mm")):
        raise BenchError(f"grouped products have the kernel {GROUPED!r} of torch 2.8 or later, got {variant!r}")

    def call(a: Any, b: Any) -> Any:
        if variant:
            return torch._grouped_mm(a.t() if splits_k else a, b, offs=ends)
        if splits_k:
            pairs = zip(a.split(sizes), b.split(sizes), strict=True)
            return [torch.mm(left.t(), right) for left, right in pairs]
        return [torch.mm(rows, weight) for rows, weight in zip(a.split(sizes), b, strict=True)]

    def check(found: Any, arguments: tuple[Any, ...]) -> float:
        a, b = arguments
        # The largest of some numbers need not be the NaN among them.
        if not all(bool(part.isfinite().all()) for part in ([found] if variant else found)):
            return float("nan")
        if variant and not splits_k:
            found = found.split(sizes)
        right = b.split(sizes) if splits_k else b
        left = [part.t() if splits_k else part for part in a.split(sizes)]
        chosen = some_indices(groups, _CHECKED_BATCH)
        return max(check_product(found[index], (left[index], right[index])) for index in chosen)

    inputs = [make() for _ in range(count)]
    kernel = "grouped_mm" if variant else f"mm x {groups}"
    return Prepared(inputs=inputs, call=call, check=check, kernel=kernel, set_bytes=set_bytes)


def check_product(found: Any, operands: tuple[Any, ...]) -> float:
    """Compare some rows and columns of a product with float64; every element must be finite."""
    a, b = operands
    if not bool(found.isfinite().all()):
        return float("nan")
    if a.dim() == 3:
        chosen = some_indices(a.shape[0], _CHECKED_BATCH)
        return max(check_product(found[index], (a[index], b[index])) for index in chosen)
    if a.element_size() == 1:  # torch cannot pick rows of 8-bit floats; 16 bits hold 8 of any kind exactly
        a, b = a.bfloat16(), b.bfloat16()
    rows, columns = some_indices(a.shape[0], _CHECKED_ROWS), some_indices(b.shape[1], _CHECKED_ROWS)
    reference = a[rows].double().cpu() @ b[:, columns].double().cpu()
    return relative_error(found[rows][:, columns], reference)
