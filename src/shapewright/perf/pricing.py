"""Price any operation: one entrance that finds the record and the pricing function of its kind.

Operations alike are priced once: a model's layers, forward products that come back in the backward pass, and the same
layer of the next variant that a lint or a search asks about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.operations import Attention, Collective, Gemm, GroupedGemm, Pointwise
from shapewright.perf.calibration import load_record

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.operations import Operation
    from shapewright.perf.price import Price

# Fields that say where and how often an operation runs, and nothing about how long it takes.
_NOT_PRICED = {"name", "pass_name", "stage", "repeats"}
_read_key = {
    cls: attrgetter(*(spec.name for spec in fields(cls) if spec.name not in _NOT_PRICED))
    for cls in (Gemm, GroupedGemm, Attention, Pointwise, Collective)
}

# Prices by device and by what is priced. A device is known by identity, since a user's file may take any name; keeping
# it here keeps its identity its own. Past a limit, about 1 kB each over all devices, everything is forgotten: a search
# has its own, vectorised road.
_MOST_DEVICES, _MOST_PRICES = 256, 50_000
_remembered: dict[tuple[int, bool], tuple[Device, dict[tuple[Any, ...], Price]]] = {}


def price_key(operation: Operation) -> tuple[Any, ...]:
    """What decides the price of an operation: equal keys, equal prices. Sizes may be arrays."""
    kind = type(operation)
    return (kind, *[value.tobytes() if type(value) is np.ndarray else value for value in _read_key[kind](operation)])


def price_operations(operations: Sequence[Operation], device: Device, *, uncalibrated: bool = False) -> list[Price]:
    """Price scalar operations, in their order; those of a kind are evaluated together.

    Args:
        operations: What to price.
        device: Where it runs.
        uncalibrated: Price as if nobody had measured this device.

    Raises:
        UnknownRateError: the device's sheet lacks a number that is needed.
        CalibrationError: there is no record to price with.
        WorkloadError: the device has no kernel for an operation.
    """
    # Copied first: other threads may add devices meanwhile.
    if len(_remembered) > _MOST_DEVICES or sum(len(prices) for _, prices in [*_remembered.values()]) > _MOST_PRICES:
        _remembered.clear()
    _, known = _remembered.setdefault((id(device), uncalibrated), (device, {}))
    keys = [(type(operation), *_read_key[type(operation)](operation)) for operation in operations]
    # Own copies of what is found: another thread may forget everything in between.
    prices = {key: known.get(key) for key in keys}
    fresh = {key: operation for key, operation in zip(keys, operations, strict=True) if prices[key] is None}
    if fresh:
        priced = dict(zip(fresh, _price_fresh(fresh.values(), device, uncalibrated=uncalibrated), strict=True))
        known.update(priced)
        prices |= priced
    return [price for key in keys if (price := prices[key]) is not None]


def _price_fresh(operations: Iterable[Operation], device: Device, *, uncalibrated: bool) -> list[Price]:
    """Price operations that were not seen before, in their order."""
    listed = list(operations)
    prices: dict[int, Price] = {}
    by_kind: dict[type, dict[int, Any]] = {}
    for index, operation in enumerate(listed):
        by_kind.setdefault(type(operation), {})[index] = operation
    for kind, own in by_kind.items():
        record_kind, price_all = _pricing_of(kind)
        record = load_record(record_kind, device, uncalibrated=uncalibrated)
        prices.update(zip(own, price_all(list(own.values()), device, record), strict=True))
    return [prices[index] for index in range(len(listed))]


def _pricing_of(kind: type) -> tuple[str, Callable[..., Sequence[Price]]]:
    """Record kind, and what prices many operations of a kind at once; a command loads what its model needs."""
    if kind is Gemm:
        from shapewright.perf.gemm import price_gemms

        return "gemm", price_gemms
    if kind is GroupedGemm:
        from shapewright.perf.experts import price_grouped_gemms

        return "moe", price_grouped_gemms
    if kind is Attention:
        from shapewright.perf.attention import price_attentions

        return "attention", price_attentions
    if kind is Pointwise:
        from shapewright.perf.pointwise import price_pointwises

        return "pointwise", price_pointwises
    if kind is Collective:
        from shapewright.perf.collectives import price_collectives

        return "collectives", price_collectives
    raise TypeError(f"no price for {kind.__name__}")
