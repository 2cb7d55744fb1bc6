"""Times of an operation for a grid of shapes; distinct sizes are priced once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.traced import Traced
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.base import UNPRICED_FIELDS
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.lowering.operations.scan import CausalConv, Scan
from shapewright.lowering.operations.sparse import SparseAttention
from shapewright.optimize.search.space.grid import Values
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.collectives import price_collective
from shapewright.pricing.experts.price import estimate_grouped_gemm_s
from shapewright.pricing.gemm.price import estimate_gemm_s
from shapewright.pricing.kernels.scans import price_scan
from shapewright.pricing.kernels.sparse import price_sparse_attention
from shapewright.pricing.operations import PRICED_BY
from shapewright.pricing.pointwise import estimate_pointwise_s
from shapewright.pricing.price import Price

if TYPE_CHECKING:
    from jaxtyping import Float, Int, Num

    from shapewright.core.traced import Node
    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.operation import Operation
    from shapewright.optimize.search.space.grid import Grid, Index
    from shapewright.pricing.software import Software

# Pricing function of operations with arrays for sizes, which returns a time or a price, by kind of operation.
_PRICES: dict[type, Callable[..., Any]] = {
    Gemm: estimate_gemm_s,
    GroupedGemm: estimate_grouped_gemm_s,
    Attention: price_attention,
    SparseAttention: price_sparse_attention,
    Scan: price_scan,
    CausalConv: price_scan,
    Pointwise: estimate_pointwise_s,
    Collective: price_collective,
}


def price_key(operation: Operation) -> tuple[Any, ...]:
    """Return a key on which alone the price of an operation depends; sizes may be traced.

    The pass is part of the key because training software prices the optimizer step differently.
    """
    values = (getattr(operation, spec.name) for spec in fields(operation) if spec.name not in UNPRICED_FIELDS)
    return (
        type(operation),
        operation.pass_name == "step",
        *(value.node if isinstance(value, Traced) else value for value in values),
    )


def _traced_sizes(operation: Operation) -> dict[str, Node]:
    """Return the sizes of an operation that vary and that its price depends on, by field."""
    numbers = {spec.name: getattr(operation, spec.name) for spec in fields(operation)}
    return {
        name: number.node
        for name, number in numbers.items()
        if isinstance(number, Traced) and name not in UNPRICED_FIELDS
    }


def count_cells(operation: Operation, grid: Grid) -> int:
    """Return an upper bound of the distinct sizes of an operation on the grid."""
    return grid.count_cells(frozenset().union(*(node.variables for node in _traced_sizes(operation).values())))


def price_at_index(
    operation: Operation,
    grid: Grid,
    index: Index,
    memo: dict[Node, Num[np.ndarray, ...]],
    device: Device,
    *,
    software: Software,
) -> Float[np.ndarray, ...]:
    """Return the time of one execution of an operation for each shape at an index. [s]

    Args:
        index: Positions on the axes of the grid, one entry per shape.
        memo: Expressions computed so far for these shapes; extended.
        software: Training software, which may change the price.
    """
    sizes: dict[str, Any] = {
        name: grid.evaluate_at(node, index, memo) for name, node in _traced_sizes(operation).items()
    }
    time_s = _price(replace(operation, name="", repeats=1, **sizes), device, software)
    return np.asarray(time_s, dtype=float)


def price_on_grid(operation: Operation, grid: Grid, device: Device, *, software: Software) -> Values:
    """Return the time of one execution of an operation, over the axes that its sizes depend on. [s]"""
    names = _traced_sizes(operation)
    aligned = grid.align(*map(grid.evaluate, names.values()))
    arrays = np.broadcast_arrays(*(values.array for values in aligned)) if names else []
    shape = arrays[0].shape if names else (1,) * 5
    rows = [array.reshape(-1) for array in arrays]
    inverse: Any = slice(None)
    if not isinstance(operation, Pointwise | Collective):  # computing their short formulas is faster than sorting
        rows, inverse = _distinct(rows)
    sizes: dict[str, Any] = dict(zip(names, rows, strict=True))
    time_s = _price(replace(operation, name="", repeats=1, **sizes), device, software)
    times_s = np.broadcast_to(np.asarray(time_s, dtype=float), (1,) if not names else rows[0].shape)
    return Values(times_s[inverse].reshape(shape), bool(names) and aligned[0].by_heads)


def _price(operation: Operation, device: Device, software: Software) -> Any:
    """Return the time of operations whose sizes are numbers or arrays of one length. [s]"""
    kind = type(operation)
    found = _PRICES[kind](operation, device, load_record(PRICED_BY[kind][0], device))
    time_s = found.time_s if isinstance(found, Price) else found
    return software.adjusted_s(operation, time_s, device)


def _distinct(
    columns: list[Num[np.ndarray, " rows"]],
) -> tuple[list[Num[np.ndarray, " distinct"]], Int[np.ndarray, " rows"]]:
    """Return the distinct rows, column by column, and the index of each row among them."""
    if not columns:
        return [], np.zeros(1, dtype=np.int64)
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, code = np.unique(column, return_inverse=True)
        _, codes = np.unique(codes * len(values) + np.asarray(code).reshape(-1), return_inverse=True)
        codes = np.asarray(codes).reshape(-1)
    _, first = np.unique(codes, return_index=True)
    return [column[first] for column in columns], codes
