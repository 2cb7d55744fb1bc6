"""Devices of which nothing but a best rate of products is known: how far off is the record they borrow? Not a script.

``mamf.csv`` holds the fastest product that anyone found on a device (stas00/ml-engineering @744d01e). It says nothing
of scatter, but something of a device's bias: whether all its rows will be faster or slower than its lender's record
says.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from shapewright.hardware import Device, find_measured_device
from shapewright.operations import Gemm
from shapewright.perf.calibration import CalibrationRecord, list_records, load_record
from shapewright.perf.gemm import price_gemm

# Whose 16-bit products were looked for: other formats were timed without the casts that records contain.
_FORMAT = "bf16"
# Who lends to other makers' chips where none of theirs was measured.
_FOREIGN_LENDER = "a100-sxm-80gb"


def best_rate_biases(folder: Path) -> dict[str, dict[str, float]]:
    """ln(measured / predicted) of each device's best product, by how far its lender is, then by device.

    A sibling's is taken beside its lender's own best product, since best products lie at one end of what any record is
    wrong by; the nearest listed device of the lender's architecture stands for one that is not listed. Other makers'
    chips are priced by A100's record, as if none of theirs had been measured.
    """
    rows = pd.read_csv(folder / "mamf.csv")
    rows = rows[(rows.dtype == _FORMAT) & rows.mamf_tflops.notna()]
    found: dict[str, dict[str, float]] = {"architecture": {}, "foreign": {}}
    own: dict[str, float] = {}
    for row in rows.itertuples():
        device = find_measured_device(str(row.accelerator))
        record = load_record("gemm", device)
        if device.vendor != "NVIDIA":
            lender = next(each for each in list_records("gemm") if each.device == _FOREIGN_LENDER)
            record = replace(lender, transfer="generic", farther="foreign", borrower=device.name)
        bias = _bias(row, device, record)
        if record.transfer == "exact":
            own[device.architecture] = bias
        elif record.distance in found:
            found[record.distance][device.name] = bias
    for name in found["architecture"]:
        found["architecture"][name] -= own[load_record("gemm", find_measured_device(name)).architecture]
    return found


def _bias(row: Any, device: Device, record: CalibrationRecord) -> float:
    operation = Gemm(name="best", dtype=_FORMAT, m=int(row.M), n=int(row.N), k=int(row.K))
    measured_s = operation.flops / (float(row.mamf_tflops) * 1e12)
    return float(np.log(measured_s / price_gemm(operation, device, record).time_s))
