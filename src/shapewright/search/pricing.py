"""Price an operation of a whole grid of shapes: each distinct one once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.operations import Attention, Collective, Gemm, GroupedGemm, Pointwise
from shapewright.perf.attention import price_attention
from shapewright.perf.calibration import load_record
from shapewright.perf.collectives import price_collective
from shapewright.perf.experts import estimate_grouped_gemm_s
from shapewright.perf.gemm import estimate_gemm_s
from shapewright.perf.pointwise import price_pointwise
from shapewright.perf.price import Price
from shapewright.search.grid import Values
from shapewright.search.trace import Traced, evaluate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shapewright.hardware import Device
    from shapewright.operations import Operation
    from shapewright.perf.software import Software
    from shapewright.search.grid import Grid
    from shapewright.search.trace import Node

# Record kind, and what gives a time or a price that holds one, by kind of operation.
_PRICES: dict[type, tuple[str, Callable[..., Any]]] = {
    Gemm: ("gemm", estimate_gemm_s),
    GroupedGemm: ("moe", estimate_grouped_gemm_s),
    Attention: ("attention", price_attention),
    Pointwise: ("pointwise", price_pointwise),
    Collective: ("collectives", price_collective),
}
_NOT_PRICED = ("name", "pass_name", "stage", "repeats")


def price_key(operation: Operation) -> tuple[Any, ...]:
    """What decides the price of an operation: equal keys, equal prices. Software treats a step's end differently."""
    values = (getattr(operation, spec.name) for spec in fields(operation) if spec.name not in _NOT_PRICED)
    return (
        type(operation),
        operation.pass_name == "step",
        *(value.node if isinstance(value, Traced) else value for value in values),
    )


def count_cells(operation: Operation, grid: Grid) -> int:
    """Different values that the sizes of an operation can take together, as far as axes tell."""
    numbers = (getattr(operation, spec.name) for spec in fields(operation) if spec.name not in _NOT_PRICED)
    variables = frozenset().union(*(number.node.variables for number in numbers if isinstance(number, Traced)))
    return grid.count_cells(variables)


def price_columns(
    operation: Operation,
    columns: Mapping[str, NDArray[Any]],
    memo: dict[Node, NDArray[Any]],
    device: Device,
    *,
    uncalibrated: bool,
    software: Software,
) -> NDArray[np.float64]:
    """Time of one execution of an operation for some shapes, each by itself. [s]

    Args:
        operation: The operation, with traced sizes.
        columns: Fields of the shapes.
        memo: What has been computed so far for these shapes; extended.
        device: The device.
        uncalibrated: Price as if nobody had measured it.
        software: What the training software makes of the price.
    """
    traced = {spec.name: getattr(operation, spec.name) for spec in fields(operation) if spec.name not in _NOT_PRICED}
    sizes: dict[str, Any] = {
        name: evaluate(number.node, columns, memo) for name, number in traced.items() if isinstance(number, Traced)
    }
    time_s = _price(replace(operation, name="", repeats=1, **sizes), device, software, uncalibrated=uncalibrated)
    return np.asarray(time_s, dtype=float)


def price_on_grid(
    operation: Operation, grid: Grid, device: Device, *, uncalibrated: bool, software: Software
) -> Values:
    """Time of one execution of an operation, over the axes that its sizes depend on; see price_columns. [s]"""
    names = [spec.name for spec in fields(operation) if isinstance(getattr(operation, spec.name), Traced)]
    names = [name for name in names if name not in _NOT_PRICED]
    aligned = grid.align(*(grid.evaluate(getattr(operation, name).node) for name in names))
    arrays = np.broadcast_arrays(*(values.array for values in aligned)) if names else []
    shape = arrays[0].shape if names else (1,) * 5
    rows = [array.reshape(-1) for array in arrays]
    inverse: Any = slice(None)
    if not isinstance(operation, Pointwise | Collective):  # a formula of few terms is sooner computed than sorted
        rows, inverse = _distinct(rows)
    sizes: dict[str, Any] = dict(zip(names, rows, strict=True))
    time_s = _price(replace(operation, name="", repeats=1, **sizes), device, software, uncalibrated=uncalibrated)
    times_s = np.broadcast_to(np.asarray(time_s, dtype=float), (1,) if not names else rows[0].shape)
    return Values(times_s[inverse].reshape(shape), bool(names) and aligned[0].by_heads)


def _price(operation: Operation, device: Device, software: Software, *, uncalibrated: bool) -> Any:
    """Time of operations whose sizes are numbers or arrays of one length. [s]"""
    for kind, (record_kind, price) in _PRICES.items():
        if isinstance(operation, kind):
            record = load_record(record_kind, device, uncalibrated=uncalibrated)
            found = price(operation, device, record)
            time_s = found.time_s if isinstance(found, Price) else found
            return software.adjusted_s(operation, time_s, device)
    raise TypeError(f"no price for {type(operation).__name__}")


def _distinct(columns: list[NDArray[Any]]) -> tuple[list[NDArray[Any]], NDArray[np.int64]]:
    """Distinct rows, column by column, and which of them each row is."""
    if not columns:
        return [], np.zeros(1, dtype=np.int64)
    codes = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, code = np.unique(column, return_inverse=True)
        _, codes = np.unique(codes * len(values) + np.asarray(code).reshape(-1), return_inverse=True)
        codes = np.asarray(codes).reshape(-1)
    _, first = np.unique(codes, return_index=True)
    return [column[first] for column in columns], codes
