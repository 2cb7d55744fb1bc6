"""Fit rate factors of devices that borrow an older chip's GEMM record, from their best measured GEMM.

The data folder holds mamf.csv: accelerator, dtype, mamf_tflops, M, N, K (stas00/ml-engineering @744d01e). Devices that
borrow a record fitted to the paper's sweeps get a factor on its rates. With it their best GEMM is predicted at its
measured rate times the usual ratio, which is that of devices with a record of their own (by physics only): a prediction
for all shapes lies below the best of them. The fit starts from the committed factors, so that a second run changes
nothing.
"""

from __future__ import annotations

import datetime
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import brentq

from shapewright.hardware.device import Device
from shapewright.hardware.loader import find_measured_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.measure.refit.record_files import RECORDS, command
from shapewright.pricing.calibration.records import CalibrationRecord, list_records, load_record
from shapewright.pricing.gemm.price import flatten, price_shaped
from shapewright.pricing.gemm.section import prepare_gemm_pricing
from shapewright.pricing.gemm.transfer import best_rate_scale, scale_rates

# Only 16-bit GEMMs: other formats were timed without the casts that records contain.
FORMAT = "bf16"
# Record that prices chips of its vendor whose own libraries were not measured.
OLDER_DONOR = "mi250x-gcd"
# Range of the factor; larger ones cannot be explained by software.
BOUNDS = (0.5, 2.0)


def best_gemms(folder: Path) -> pd.DataFrame:
    """Read the best 16-bit GEMMs, with the device and the record that prices it."""
    rows = pd.read_csv(folder / "mamf.csv")
    rows = rows[(rows.dtype == FORMAT) & rows.mamf_tflops.notna()]
    devices = [find_measured_device(name) for name in rows.accelerator]
    return rows.assign(device=devices, record=[_record_of(each) for each in devices])


def _record_of(device: Device) -> CalibrationRecord:
    """Return the record that prices a device, or priced it before kernels tuned for each shape were measured on it."""
    record = load_record("gemm", device.with_pricing(physics_only=True))
    if not record.parameters.get("is_tuned"):
        return record
    older = next(one for one in list_records("gemm") if one.device == OLDER_DONOR)
    return replace(older, transfer="generic", recipient=device.name, residual=None)


def ratio_at_best(row: Any, scale: float = 1.0) -> float:
    """Return predicted over measured best rate, with kernels ``scale`` times as fast."""
    device: Device = row.device
    record: CalibrationRecord = row.record
    operation = Gemm(name="best", dtype=FORMAT, m=int(row.M), n=int(row.N), k=int(row.K))
    pricing = prepare_gemm_pricing(FORMAT, None, device, record)
    if pricing.section is None:
        raise SystemExit(f"{device.name} is priced by a roofline, which no best rate changes")
    pricing = pricing._replace(section=pricing.section.map_parameters(lambda kernels: scale_rates(kernels, scale)))
    price = price_shaped(*flatten(operation), pricing)
    return float(operation.flops / price.time_s / (row.mamf_tflops * 1e12))


def scale_for(row: Any, target: float) -> float:
    """Return the factor that brings the predicted best rate to ``target`` times the measured one."""
    return float(brentq(lambda scale: ratio_at_best(row, scale) - target, *BOUNDS))


def refit(data: Path) -> None:
    """Fit the rate factors and write them."""
    rows = best_gemms(data)
    ratios = {row.device.name: ratio_at_best(row) for row in rows.itertuples() if row.record.transfer == "exact"}
    target = float(np.exp(np.mean(np.log(list(ratios.values())))))
    found, before = {}, {}
    for row in rows.itertuples():
        if row.record.transfer != "generic" or FORMAT in row.record.parameters["dtypes"]:
            continue  # its own record, a sibling's, or one of the current libraries
        known = best_rate_scale(row.device)
        before[row.device.name] = round(ratio_at_best(row, 1.0 / known), 4)
        found[row.device.name] = round(known * scale_for(row, target), 4)
    content = {
        "rate_scale": found,
        "provenance": {
            "command": command("best-rates"),
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            "source": "mamf.csv: stas00/ml-engineering @744d01e",
            "usual_ratio": round(target, 4),
            "ratios": {name: round(one, 4) for name, one in ratios.items()},
            "ratios_without": before,
        },
    }
    (RECORDS / "best_rates.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(content, indent=1))
