"""Price any operation: one entrance that finds the record and the pricing function of its kind.

Operations alike are priced once: a model's layers, forward products that come back in the backward pass, and the same
layer of the next variant that a lint or a search asks about.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from shapewright.operations import Attention, Collective, Gemm, GroupedGemm, Pointwise
from shapewright.perf.attention import price_attention
from shapewright.perf.calibration import load_record
from shapewright.perf.collectives import price_collectives
from shapewright.perf.experts import price_grouped_gemms
from shapewright.perf.gemm import price_gemms
from shapewright.perf.pointwise import price_pointwises

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
_remembered: dict[tuple[int, bool, bool], tuple[Device, dict[tuple[Any, ...], Price]]] = {}


def price_operations(
    operations: Sequence[Operation], device: Device, *, uncalibrated: bool = False, physics_only: bool = False
) -> list[Price]:
    """Price scalar operations, in their order; those of a kind are evaluated together, attention one by one.

    Args:
        operations: What to price.
        device: Where it runs.
        uncalibrated: Price as if nobody had measured this device.
        physics_only: Leave aside what was learned beyond the formulas.

    Raises:
        UnknownRateError: the device's sheet lacks a number that is needed.
        CalibrationError: there is no record to price with.
        WorkloadError: the device has no kernel for an operation.
    """
    # Copied first: other threads may add devices meanwhile.
    if len(_remembered) > _MOST_DEVICES or sum(len(prices) for _, prices in [*_remembered.values()]) > _MOST_PRICES:
        _remembered.clear()
    _, known = _remembered.setdefault((id(device), uncalibrated, physics_only), (device, {}))
    keys = [(type(operation), *_read_key[type(operation)](operation)) for operation in operations]
    # Own copies of what is found: another thread may forget everything in between.
    prices = {key: known.get(key) for key in keys}
    fresh = {key: operation for key, operation in zip(keys, operations, strict=True) if prices[key] is None}
    if fresh:
        priced = dict(zip(fresh, _price_fresh(fresh.values(), device, uncalibrated, physics_only), strict=True))
        known.update(priced)
        prices |= priced
    return [price for key in keys if (price := prices[key]) is not None]


def _price_fresh(
    operations: Iterable[Operation], device: Device, uncalibrated: bool, physics_only: bool
) -> list[Price]:
    """Price operations that were not seen before, in their order."""
    listed = list(operations)
    prices: dict[int, Price] = {}
    products = {index: operation for index, operation in enumerate(listed) if isinstance(operation, Gemm)}
    if products:
        record = load_record("gemm", device, uncalibrated=uncalibrated, physics_only=physics_only)
        prices.update(zip(products, price_gemms(list(products.values()), device, record), strict=True))
    experts = {index: operation for index, operation in enumerate(listed) if isinstance(operation, GroupedGemm)}
    if experts:
        record = load_record("moe", device, uncalibrated=uncalibrated)
        prices.update(zip(experts, price_grouped_gemms(list(experts.values()), device, record), strict=True))
    traffic = {index: operation for index, operation in enumerate(listed) if isinstance(operation, Pointwise)}
    if traffic:
        record = load_record("pointwise", device, uncalibrated=uncalibrated)
        prices.update(zip(traffic, price_pointwises(list(traffic.values()), device, record), strict=True))
    calls = {index: operation for index, operation in enumerate(listed) if isinstance(operation, Collective)}
    if calls:
        record = load_record("collectives", device, uncalibrated=uncalibrated)
        prices.update(zip(calls, price_collectives(list(calls.values()), device, record), strict=True))
    for index, operation in enumerate(listed):
        if isinstance(operation, Attention):
            record = load_record("attention", device, uncalibrated=uncalibrated)
            prices[index] = price_attention(operation, device, record)
    return [prices[index] for index in range(len(listed))]
