"""Price of pointwise operations: their traffic over achieved bandwidth, after a fixed start.

    time = kernels x start + bytes / (fraction of the kind x bandwidth) x cache factor

The fraction depends on the kind of operation: a residual addition streams, a norm reads its row twice through one
block, dropout draws random numbers. Small footprints find their operands in the last-level cache (cache factor below
1), but no price goes below bytes over bandwidth.

Assumes: contiguous operands; rows wide enough to fill a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.errors import CalibrationError
from shapewright.perf.gemm import interval_factors
from shapewright.perf.price import Price
from shapewright.perf.roofline import ROOFLINE_HIGH_FACTOR

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shapewright.hardware import Device
    from shapewright.operations import Pointwise
    from shapewright.perf.calibration import CalibrationRecord

    Array = NDArray[np.float64]

# An activation that reads this much more than it writes has a gate: another kernel, with a fraction of its own.
_GATED_READ_RATIO = 1.5
# How sharp the edge of the last-level cache is.
_CACHE_EDGE_POWER = 4.0

# Widening of the logarithmic interval for kinds whose fraction comes from a few medians or from a likeness.
_ASSUMED_WIDENING = 1.6

_ROOFLINE_LABEL = "uncalibrated (roofline bound)"


def price_pointwise(operation: Pointwise, device: Device, record: CalibrationRecord) -> Price:
    """Price a pointwise operation.

    Args:
        operation: The operation; its bytes and num_kernels may be arrays of one shape.
        device: The device.
        record: A record of kind ``pointwise``.

    Returns:
        The price; floats for scalar bytes, arrays for arrays.

    Raises:
        CalibrationError: the record is malformed.
    """
    num_bytes, num_kernels = np.broadcast_arrays(
        np.asarray(operation.num_bytes, dtype=float), np.asarray(operation.num_kernels, dtype=float)
    )
    floor_s = num_bytes / device.memory_bandwidth_bytes_per_s
    if device.roofline_only:
        start_s, memory_s, time_s = np.zeros_like(floor_s), floor_s, floor_s
        low, high = np.ones_like(floor_s), np.full_like(floor_s, ROOFLINE_HIGH_FACTOR)
        label = _ROOFLINE_LABEL
    else:
        start_s, memory_s = _estimate(operation, num_bytes, num_kernels, device, record)
        time_s = np.maximum(start_s + memory_s, floor_s)
        known = record.parameters["kinds"].get(operation.operation, {}).get("in_table", False)
        widening = record.interval_widening * (1.0 if known else _ASSUMED_WIDENING)
        low, high = interval_factors(record.interval, time_s, widening)
        label = record.label
    return Price(
        time_s=_plain(time_s),
        low_s=_plain(np.maximum(time_s * low, floor_s)),
        high_s=_plain(time_s * high),
        compute_s=_plain(np.zeros_like(floor_s)),
        memory_s=_plain(memory_s),
        start_s=_plain(start_s),
        roofline_s=_plain(floor_s),
        calibration=label,
    )


def _estimate(
    operation: Pointwise, num_bytes: Array, num_kernels: Array, device: Device, record: CalibrationRecord
) -> tuple[Array, Array]:
    """Start and traffic time of an operation."""
    try:
        kinds: Mapping[str, Mapping[str, float]] = record.parameters["kinds"]
        plain = kinds.get(operation.operation, kinds["other"])
        gated = kinds.get(f"gated_{operation.operation}", plain)
        has_gate = np.asarray(operation.read_bytes) > _GATED_READ_RATIO * np.asarray(operation.written_bytes)
        fraction = np.where(has_gate, gated["bandwidth_fraction"], plain["bandwidth_fraction"])
        kernel_start_s = np.where(has_gate, gated["start_s"], plain["start_s"])
        reach_bytes = max((device.l2_bytes or 0.0) * record.parameters["l2_reach_fraction"], 1.0)
        l2_speedup = record.parameters["l2_speedup"]
    except KeyError as error:
        raise CalibrationError(
            f"pointwise record {record.id} lacks {error}; run scripts/calibrate_pointwise.py"
        ) from error
    resident = 1.0 / (1.0 + np.minimum(num_bytes / reach_bytes, 1e6) ** _CACHE_EDGE_POWER)
    cache_factor = 1.0 - resident * (1.0 - 1.0 / l2_speedup)
    return num_kernels * kernel_start_s, num_bytes / (device.memory_bandwidth_bytes_per_s * fraction) * cache_factor


def _plain(value: Array) -> Any:
    """A float for a scalar, the array itself otherwise."""
    return float(value) if np.ndim(value) == 0 else value
