"""Devices of which somebody published the fastest product, and which borrow a record of older software.

Records that one paper's sweeps taught hold what libraries of 2023 reached, on the chip that the paper had. The fastest
product that anyone found on a younger chip says what its own libraries reach there. So arithmetic and operand feed of
the borrowed kernels are multiplied by one number, with which that very product comes out as near to its best rate as
measured devices' best products do. Records of today's libraries stay as they are: a best rate is no nearer to the truth
than they (docs/decisions/0003-gemm-calibration.md).

``data/best_rates.json`` holds the numbers, by ``scripts/calibrate_best_rates.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

import numpy as np

from shapewright.hardware import load_device

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.perf.calibration import CalibrationRecord
    from shapewright.perf.gemm_menu import GemmParameters

# The format that every family was measured in, but for those of which only one paper's sweeps are known.
_WIDE_FORMAT = "bf16"


def borrowed_rate_scale(device: Device, record: CalibrationRecord) -> float:
    """Factor on the rates of products that a device borrows; 1 but from another family's record of older software."""
    is_older = (
        record.kind == "gemm" and record.transfer == "generic" and _WIDE_FORMAT not in record.parameters["dtypes"]
    )
    return best_rate_scale(device) if is_older else 1.0


def best_rate_scale(device: Device) -> float:
    """Factor on the rates of a record of older software that the best rate of a device asks for.

    A device without one takes that of the nearest of its architecture; 1 where nobody published any.
    """
    scales = _scales()
    if device.name in scales:
        return scales[device.name]
    known = [load_device(name) for name in scales]
    kin = [each for each in known if each.architecture == device.architecture]
    return scales[min(kin, key=lambda each: _distance(device, each)).name] if kin else 1.0


def speed_up(parameters: GemmParameters, scale: float) -> GemmParameters:
    """Kernels whose arithmetic and operand feed are so many times as fast; no tile exceeds the peak of its SM."""
    return replace(
        parameters,
        tile_rate_fraction=np.minimum(parameters.tile_rate_fraction * scale, 1.0),
        feed_ratio=parameters.feed_ratio * scale,
    )


@cache
def _scales() -> Mapping[str, float]:
    path = resources.files("shapewright.perf") / "data" / "best_rates.json"
    scales: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["rate_scale"]
    return scales


def _distance(one: Device, other: Device) -> float:
    """How far two chips of an architecture lie apart: the sum of |ln| of the ratios of bandwidths and 16-bit rates."""
    rates = [chip.dense_flops_per_s.get("bf16", 1.0) for chip in (one, other)]
    bandwidths = [chip.memory_bandwidth_bytes_per_s for chip in (one, other)]
    return abs(math.log(rates[0] / rates[1])) + abs(math.log(bandwidths[0] / bandwidths[1]))
