"""Fit the section of the A100's GEMM record that prices vidur's layers: the libraries of 2024, older than the record's.

    python scripts/calibrate_gemm_vidur.py --data DIR

Run calibrate_gemm.py before: its section of today's libraries is where this fit starts and what it is pulled to. DIR
holds linear_layers.parquet: device, model, kernel, dtype, m, n, k, latency_s (microsoft/vidur @7d47513, MIT). What is
shipped is fitted on every row; how wrong it is, and its interval, come from three models left out in turn. Needs the
``fit`` extra; a minute.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from calibration import argument_parser, read_record, save_record

from shapewright.accuracy.statistics import kendall_tau
from shapewright.fit.gemm import (
    TILES,
    Array,
    Form,
    device_rates,
    fit,
    interval,
    judge,
    predict_rows,
    round_section,
    transform,
)
from shapewright.fit.logs import folds_of
from shapewright.hardware import load_device

NAME, LIBRARY, DTYPE, LAYOUT = "a100-sxm-80gb", "vidur", "fp16", "NT"
SOURCE = "linear_layers.parquet, microsoft/vidur @7d47513, MIT"
# From 6,144 columns on, contractions of up to 4,096 run a slower kernel: at k = 4096 full waves reach 244 to 276
# TFLOP/s with 1,536 to 5,504 columns and 215 to 225 with 6,144 to 22,016; at k = 6144 and more 237 to 257 with any
# number. The paper's layers, of software a year older, lose as much up to 4,095 (calibrate_gemm.OLDER_SPANS). Edges by
# eye, from all rows; the loss is fitted. [element]
SPAN = {"span_first_k": 1.0, "span_last_k": 4096.0, "span_columns": 6144.0}
NUM_SHAPE_FOLDS = 5


def read_rows(folder: Path) -> pd.DataFrame:
    """Measured layers on the A100."""
    rows = pd.read_parquet(folder / "linear_layers.parquet", filters=[("device", "==", "a100_sxm")])
    return rows.assign(batch=1)


def start_of(form: Form, section: dict[str, Any]) -> Array:
    """A section's numbers in the units of a form's fit; the rest starts where the form says.

    So do waves: heuristics that dodge a part-full last wave look like kernels that win it back, which today's on A100
    do not at all. A fit that starts there stays there.
    """
    known = {entry: start for entry, start, _ in form.entries} | {
        name: value for name, value in section.items() if isinstance(value, float) and name != "wave_give_back"
    }
    for name, tile in zip(form.rate_names, section["tiles"], strict=True):
        known |= {name: tile["rate"], "fill_k": tile["fill_k"]}
    return transform([(entry, known[entry], unit) for entry, _, unit in form.entries])


def errors(predicted: Array, measured: Array) -> dict[str, float]:
    """Errors of rows that a fit left out, as they are and after one factor, and how well they are ordered."""
    factor = float(np.median(measured / predicted))
    return {
        **judge(predicted, measured),
        "mean_ape_after_factor": judge(predicted * factor, measured)["mean_ape"],
        "kendall_tau": round(kendall_tau(predicted, measured) or 0.0, 4),
    }


def main() -> None:
    """Fit, judge and put the section into the record."""
    rows = read_rows(argument_parser(__doc__).parse_args().data)
    measured = rows.latency_s.to_numpy()
    record, device = read_record("gemm", NAME), load_device(NAME)
    today = record["parameters"]["dtypes"]["bf16"]
    rates = device_rates(device, DTYPE, hot=False)
    form = Form(
        TILES[device.architecture],
        hot=False,
        alignment=(),
        slow_cases=(("span_loss", 0.05, "logit"),),
        slow_case_edges=SPAN,
        rate_by_shape=True,
    )
    start = start_of(form, today)

    def fitted(part: pd.DataFrame) -> dict[str, Any]:
        found = fit(part, form, rates, LAYOUT, today["alignment_factor"], start=start)
        section = form.section(found, today["alignment_factor"])
        return {**section, **({"batched": today["batched"]} if "batched" in today else {})}

    def left_out(groups: np.ndarray) -> Array:
        predicted = np.empty(len(rows))
        for group in np.unique(groups):
            mine = groups == group
            predicted[mine] = predict_rows(rows[mine], fitted(rows[~mine]), rates, LAYOUT)
        return predicted

    models = left_out(rows.model.to_numpy())
    shapes = left_out(folds_of(rows.n.tolist(), rows.k.tolist()) % NUM_SHAPE_FOLDS)
    section = fitted(rows)
    report = {
        "source": SOURCE,
        "libraries": [LIBRARY],
        "held_out": errors(models, measured),
        "held_out_shapes": errors(shapes, measured),
        "fitted_rows": errors(predict_rows(rows, section, rates, LAYOUT), measured),
        "command": "python scripts/calibrate_gemm_vidur.py --data DIR",
    }
    print(json.dumps(report, indent=1), json.dumps(section["slow_cases"]), flush=True)
    record["parameters"]["libraries"][LIBRARY] = {DTYPE: section}
    record["interval"]["libraries"][LIBRARY] = {DTYPE: interval(models, measured)}
    record["provenance"].setdefault("reports", {})[f"{DTYPE}, {LIBRARY}"] = report
    print(save_record("gemm", NAME, round_section(record)))


if __name__ == "__main__":
    main()
