"""How much faster than an older chip's record says a device is, by the fastest product that anyone found on it.

    python scripts/calibrate_best_rates.py --data DIR

DIR has mamf.csv: accelerator, dtype, mamf_tflops, M, N, K (stas00/ml-engineering @744d01e). Devices that borrow a
record which one paper's sweeps taught get a factor on its rates, with which their best product comes out at its
measured rate times the usual ratio: that of predicted (by physics alone) to best rates on devices that have a record of
their own, where a prediction of all shapes lies below the best of them. The factors found last are where it starts, so
that a second run changes nothing.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from calibration import RECORDS, argument_parser
from scipy.optimize import brentq

from shapewright.hardware import Device, find_measured_device
from shapewright.operations import Gemm
from shapewright.perf.best_rates import best_rate_scale, speed_up
from shapewright.perf.calibration import CalibrationRecord, load_record
from shapewright.perf.gemm import flatten, price_products
from shapewright.perf.gemm_job import make_gemm_job

# Whose 16-bit products were looked for: other formats were timed without the casts that records contain.
FORMAT = "bf16"
# Factors beyond these are no matter of software.
BOUNDS = (0.5, 2.0)


def best_products(folder: Path) -> pd.DataFrame:
    """Best 16-bit products, with the device and what prices it."""
    rows = pd.read_csv(folder / "mamf.csv")
    rows = rows[(rows.dtype == FORMAT) & rows.mamf_tflops.notna()]
    devices = [find_measured_device(name) for name in rows.accelerator]
    return rows.assign(device=devices, record=[load_record("gemm", each, physics_only=True) for each in devices])


def ratio_at_best(row: Any, scale: float = 1.0) -> float:
    """Predicted over best rate, the kernels made so many times as fast."""
    device: Device = row.device
    record: CalibrationRecord = row.record
    operation = Gemm(name="best", dtype=FORMAT, m=int(row.M), n=int(row.N), k=int(row.K))
    job = make_gemm_job(FORMAT, None, device, record)
    if job.section is None:
        raise SystemExit(f"{device.name} is priced by a roofline, which no best rate changes")
    job = job._replace(section=job.section.carried(lambda kernels: speed_up(kernels, scale)))
    price = price_products(*flatten(operation), job)
    return float(operation.flops / price.time_s / (row.mamf_tflops * 1e12))


def scale_for(row: Any, target: float) -> float:
    """Factor with which the best product is predicted at so many times its best rate."""
    return float(brentq(lambda scale: ratio_at_best(row, scale) - target, *BOUNDS))


def main() -> None:
    """Find the factors and write them."""
    given = argument_parser(__doc__).parse_args()
    rows = best_products(given.data)
    usual = {row.device.name: ratio_at_best(row) for row in rows.itertuples() if row.record.transfer == "exact"}
    target = float(np.exp(np.mean(np.log(list(usual.values())))))
    found, before = {}, {}
    for row in rows.itertuples():
        if row.record.transfer != "generic" or FORMAT in row.record.parameters["dtypes"]:
            continue  # its own record, a sibling's, or one of today's libraries
        known = best_rate_scale(row.device)
        before[row.device.name] = round(ratio_at_best(row, 1.0 / known), 4)
        found[row.device.name] = round(known * scale_for(row, target), 4)
    content = {
        "rate_scale": found,
        "provenance": {
            "command": "python scripts/calibrate_best_rates.py --data DIR",
            "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
            "source": "mamf.csv: stas00/ml-engineering @744d01e",
            "usual_ratio": round(target, 4),
            "ratios": {name: round(one, 4) for name, one in usual.items()},
            "ratios_without": before,
        },
    }
    (RECORDS / "best_rates.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
