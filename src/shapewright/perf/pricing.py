"""Price any operation: one entrance that finds the record and the pricing function of its kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shapewright.operations import Attention, Collective, Gemm, GroupedGemm, Pointwise
from shapewright.perf.attention import price_attention
from shapewright.perf.calibration import load_record
from shapewright.perf.collectives import price_collective
from shapewright.perf.gemm import as_gemm, price_gemms
from shapewright.perf.pointwise import price_pointwise

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.operations import Operation
    from shapewright.perf.price import Price


def price_operations(operations: Sequence[Operation], device: Device, *, uncalibrated: bool = False) -> list[Price]:
    """Price scalar operations, in their order; all GEMMs are evaluated together.

    Args:
        operations: What to price.
        device: Where it runs.
        uncalibrated: Price as if nobody had measured this device.

    Raises:
        UnknownRateError: the device's sheet lacks a number that is needed.
        CalibrationError: there is no record to price with.
        WorkloadError: the device has no kernel for an operation.
    """
    products = {
        index: as_gemm(operation) if isinstance(operation, GroupedGemm) else operation
        for index, operation in enumerate(operations)
        if isinstance(operation, Gemm | GroupedGemm)
    }
    prices: dict[int, Price] = {}
    if products:
        record = load_record("gemm", device, uncalibrated=uncalibrated)
        prices.update(zip(products, price_gemms(list(products.values()), device, record), strict=True))
    for index, operation in enumerate(operations):
        if isinstance(operation, Attention):
            prices[index] = price_attention(
                operation, device, load_record("attention", device, uncalibrated=uncalibrated)
            )
        elif isinstance(operation, Pointwise):
            prices[index] = price_pointwise(
                operation, device, load_record("pointwise", device, uncalibrated=uncalibrated)
            )
        elif isinstance(operation, Collective):
            prices[index] = price_collective(
                operation, device, load_record("collectives", device, uncalibrated=uncalibrated)
            )
    return [prices[index] for index in range(len(operations))]
