"""Pricing of any operation: finds the record and the pricing function of its kind.

Equal operations are priced once: a model's layers, forward GEMMs that recur in the backward pass, and unchanged layers
of the variants that a lint or a search prices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from shapewright.core.deadline import check_deadline
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.base import UNPRICED_FIELDS
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.lowering.operations.rows import OperationRows
from shapewright.lowering.operations.scan import CausalConv, Scan
from shapewright.lowering.operations.sparse import SparseAttention
from shapewright.pricing.calibration.records import load_record

if TYPE_CHECKING:
    from jaxtyping import Int
    from numpy.typing import NDArray

    from shapewright.hardware.device import Device
    from shapewright.lowering.operations.operation import Operation
    from shapewright.pricing.price import Price

# Kind of record, module of this package and its function that prices many operations, by kind of operation. Modules are
# imported when they are needed, to load only what a command uses.
PRICED_BY: dict[type, tuple[str, str, str]] = {
    Gemm: ("gemm", "gemm.price", "price_gemms"),
    GroupedGemm: ("moe", "experts.price", "price_grouped_gemms"),
    Attention: ("attention", "attention.price", "price_attentions"),
    SparseAttention: ("sparse_attention", "kernels.sparse", "price_sparse_attentions"),
    Scan: ("linear_attention", "kernels.scans", "price_scans"),
    CausalConv: ("linear_attention", "kernels.scans", "price_scans"),
    Pointwise: ("pointwise", "pointwise", "price_pointwises"),
    Collective: ("collectives", "collectives", "price_collectives"),
}
_key_fields = {cls: tuple(spec.name for spec in fields(cls) if spec.name not in UNPRICED_FIELDS) for cls in PRICED_BY}
_read_key = {cls: attrgetter(*names) for cls, names in _key_fields.items()}

# Prices by device and by price_key. A device is keyed by identity, since a user's file may have any name; the reference
# stored here keeps the identity unique. Above a limit, about 1 kB per price over all devices, the cache is cleared:
# searches have their own vectorized path.
_MOST_DEVICES, _MOST_PRICES = 256, 50_000
_price_cache: dict[int, tuple[Device, dict[tuple[Any, ...], Price]]] = {}


def price_key(operation: Operation) -> tuple[Any, ...]:
    """Key of everything that decides the price of an operation: equal keys, equal prices. Sizes may be arrays."""
    kind = type(operation)
    return (kind, *[value.tobytes() if _is_array(value) else value for value in _read_key[kind](operation)])


def _is_array(value: object) -> TypeGuard[NDArray[Any]]:
    return type(value) is np.ndarray


def price_operations(operations: Sequence[Operation], device: Device) -> list[Price]:
    """Price scalar operations, in their order; operations of one kind are evaluated together.

    Raises:
        UnknownRateError: the device's data sheet lacks a number that is needed.
        CalibrationError: there is no record to price with.
        WorkloadError: the device has no kernel for an operation.
    """
    check_deadline()
    # Copied first: other threads may add devices meanwhile.
    if len(_price_cache) > _MOST_DEVICES or sum(len(prices) for _, prices in [*_price_cache.values()]) > _MOST_PRICES:
        _price_cache.clear()
    _, known = _price_cache.setdefault(id(device), (device, {}))
    keys = [(type(operation), *_read_key[type(operation)](operation)) for operation in operations]
    # Local copies: another thread may clear the cache in between.
    prices = {key: known.get(key) for key in keys}
    fresh = {key: operation for key, operation in zip(keys, operations, strict=True) if prices[key] is None}
    if fresh:
        priced = dict(zip(fresh, _price_fresh(fresh.values(), device), strict=True))
        known.update(priced)
        prices |= priced
    return [price for key in keys if (price := prices[key]) is not None]


def price_rows(
    groups: Iterable[OperationRows], device: Device
) -> tuple[list[Operation], list[Price], list[Int[np.ndarray, "rows operations"]]]:
    """Price the operations of many passes with arrays for sizes: single operations are made of distinct ones alone.

    Returns:
        The distinct operations, their prices, and for each group the place of its operations among them.
    """
    known: dict[tuple[Any, ...], dict[tuple[Any, ...], int]] = {}
    distinct: list[Operation] = []
    places = []
    for group in groups:
        columns = [_place(operation, group.num_rows, known, distinct) for operation in group.operations]
        places.append(np.array(columns, dtype=int).reshape(len(columns), group.num_rows).T)
    return distinct, price_operations(distinct, device), places


def _place(
    operation: Operation,
    num_rows: int,
    known: dict[tuple[Any, ...], dict[tuple[Any, ...], int]],
    distinct: list[Operation],
) -> list[int]:
    """Return the place in ``distinct`` of an operation of each row, and add those that are new.

    Args:
        known: Places by what the rows share, and by sizes.
    """
    kind = type(operation)
    arrays: dict[str, list[Any]] = {}
    shared: list[Any] = [kind]
    for name, value in zip(_key_fields[kind], _read_key[kind](operation), strict=True):
        if _is_array(value):
            arrays[name] = value.tolist()
            shared.append(None)
        else:
            shared.append(value)
    own = known.setdefault(tuple(shared), {})
    rows = list(zip(*arrays.values(), strict=True)) if arrays else [()]
    found = []
    for row in rows:
        place = own.setdefault(row, len(distinct))
        if place == len(distinct):
            distinct.append(operation.changed(**dict(zip(arrays, row, strict=True))) if row else operation)
        found.append(place)
    return found if arrays else found * num_rows


def _price_fresh(operations: Iterable[Operation], device: Device) -> list[Price]:
    """Price operations that are not in the cache, in their order."""
    listed = list(operations)
    prices: dict[int, Price] = {}
    by_kind: dict[type, dict[int, Any]] = {}
    for index, operation in enumerate(listed):
        by_kind.setdefault(type(operation), {})[index] = operation
    for kind, own in by_kind.items():
        record_kind, module, function = PRICED_BY[kind]
        price_all = getattr(import_module(f"shapewright.pricing.{module}"), function)
        record = load_record(record_kind, device)
        prices.update(zip(own, price_all(list(own.values()), device, record), strict=True))
    return [prices[index] for index in range(len(listed))]
