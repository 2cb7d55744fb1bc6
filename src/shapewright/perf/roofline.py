"""Roofline: the floor under every price, and the whole price on devices without tiles to model.

Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.operations.base import Numeric

# How much slower than its roofline a device nobody measured may be: the worst of the measured devices' mean over
# GEMMs is 2.3 (A100, all shapes: roofline is 55 % below measurement, docs/decisions/0003-gemm-calibration.md).
ROOFLINE_HIGH_FACTOR = 2.5


def roofline_s(flops: Numeric, num_bytes: Numeric, device: Device, dtype: str) -> Numeric:
    """Shortest time that the data sheet allows: max(flops / peak, bytes / bandwidth). [s]

    Args:
        flops: Arithmetic. [flop]
        num_bytes: Memory traffic. [byte]
        device: The device.
        dtype: Element format of the arithmetic.

    Raises:
        UnknownRateError: the device has no rate for this dtype.
    """
    return np.maximum(flops / device.peak_flops_per_s(dtype), num_bytes / device.memory_bandwidth_bytes_per_s)
