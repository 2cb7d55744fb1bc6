"""Fit the section of the A100's GEMM record that prices vidur's layers: the libraries of 2024, older than the record's.

    python scripts/calibrate_gemm_vidur.py --data DIR

Run calibrate_gemm.py before: its section of today's libraries is where this fit starts and what it is pulled to. DIR
holds linear_layers.parquet: device, model, kernel, dtype, m, n, k, latency_s (microsoft/vidur @7d47513, MIT). What is
shipped is fitted on every row; how wrong it is, and its interval, come from three models left out in turn. Needs the
``fit`` extra; a minute.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from calibration import argument_parser, read_record, save_record

from shapewright.accuracy.linear_layers import flops_of_runs
from shapewright.accuracy.statistics import kendall_tau
from shapewright.fit.gemm import (
    TILES,
    Array,
    Form,
    device_rates,
    fit,
    judge,
    predict_rows,
    round_section,
    transform,
)
from shapewright.fit.intervals import Interval, is_inside, pool, spread_over, widened
from shapewright.fit.logs import folds_of
from shapewright.hardware import load_device

NAME, LIBRARY, DTYPE, LAYOUT = "a100-sxm-80gb", "vidur", "fp16", "NT"
SOURCE = "linear_layers.parquet, microsoft/vidur @7d47513, MIT"
# From 5,504 columns on, contractions of up to 4,096 run a slower kernel: at k = 4096, where power holds the clock down,
# full waves reach 240 TFLOP/s with 4,096 columns and 205 to 225 with 5,504 to 22,016; at k = 6144 and more 230 to 257
# with any number. The paper's layers, of software a year older, lose as much up to 4,095 (calibrate_gemm.OLDER_SPANS).
# Of all edges between measured sizes these fit best, to all rows and to each two models; the loss is fitted. [element]
SPAN = {"last_k": 4096.0, "first_n": 5504.0}
NUM_SHAPE_FOLDS = 5
# How sharply the clock falls with the work of a run: a smooth stand-in for a step, as slow_cases.reach_steepness is.
RUN_STEEPNESS = 4.0
# Numbers that do not start from today's section: those of another mechanism, and waves (start_of).
OWN_STARTS = ("wave_give_back", "power_half_flops")


def read_rows(folder: Path) -> pd.DataFrame:
    """Measured layers on the A100, and the work of the runs that they were timed in."""
    rows = pd.read_parquet(folder / "linear_layers.parquet", filters=[("device", "==", "a100_sxm")])
    run = rows.groupby(["model", "tensor_parallel", "m"]).ngroup().to_numpy()
    kernel, flops = pd.factorize(rows.kernel)[0], (2.0 * rows.m * rows.n * rows.k).to_numpy()
    return rows.assign(batch=1, run_flops=flops_of_runs(run, kernel, flops))


class SpanForm(Form):
    """A rate for each tile shape, what the slower kernel loses, and a clock that follows the work of a whole run."""

    def __init__(self, architecture: str) -> None:
        loss = (("span_loss", 0.05, "logit"),)
        super().__init__(TILES[architecture], hot=False, alignment=(), slow_cases=loss, rate_by_shape=True)

    def section(self, x: Array, factors: dict[str, dict[str, float]] | None) -> dict[str, Any]:
        """The record's section; factors is the alignment table."""
        found = super().section(x, factors)
        spans = [{**SPAN, "loss": found["slow_cases"]["span_loss"]}]
        return {**found, "power_run_steepness": RUN_STEEPNESS, "slow_cases": {"spans": spans}}


def start_of(form: Form, section: dict[str, Any]) -> Array:
    """A section's numbers in the units of a form's fit; the rest starts where the form says.

    So do waves: heuristics that dodge a part-full last wave look like kernels that win it back, which today's on A100
    do not at all. A fit that starts there stays there.
    """
    known = {entry: start for entry, start, _ in form.entries} | {
        name: value for name, value in section.items() if isinstance(value, float) and name not in OWN_STARTS
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


def fit_section(rows: pd.DataFrame, today: dict[str, Any]) -> dict[str, Any]:
    """A section fitted on these rows, from today's libraries' on."""
    device = load_device(NAME)
    form = SpanForm(device.architecture)
    factors, rates = today["alignment_factor"], device_rates(device, DTYPE, hot=False)
    section = form.section(fit(rows, form, rates, LAYOUT, factors, start=start_of(form, today)), factors)
    return {**section, **({"batched": today["batched"]} if "batched" in today else {})}


def predict(rows: pd.DataFrame, section: dict[str, Any]) -> Array:
    """Price rows with a section. [s]"""
    return predict_rows(rows, section, device_rates(load_device(NAME), DTYPE, hot=False), LAYOUT)


def predict_left_out(rows: pd.DataFrame, groups: np.ndarray, today: dict[str, Any]) -> Array:
    """Price each row with a section that saw no row of its group. [s]"""
    predicted = np.empty(len(rows))
    for group in np.unique(groups):
        mine = groups == group
        predicted[mine] = predict(rows[mine], fit_section(rows[~mine], today))
    return predicted


def interval_of_models(parts: Mapping[str, tuple[Array, Array]]) -> Interval:
    """Interval of models that count alike, as much wider as each asks of the others' when it is left out."""
    return widened(pool(list(parts.values())), spread_over(parts))


def covered_in_turn(parts: Mapping[str, tuple[Array, Array]]) -> float:
    """Share of each model's rows, models alike in weight, inside an interval made of the others."""
    others = {name: {other: part for other, part in parts.items() if other != name} for name in parts}
    shares = [float(is_inside(interval_of_models(others[name]), *part).mean()) for name, part in parts.items()]
    return round(float(np.mean(shares)), 3)


def main() -> None:
    """Fit, judge and put the section into the record."""
    rows = read_rows(argument_parser(__doc__).parse_args().data)
    measured, groups = rows.latency_s.to_numpy(), rows.model.to_numpy()
    record = read_record("gemm", NAME)
    today = record["parameters"]["dtypes"]["bf16"]
    models = predict_left_out(rows, groups, today)
    parts = {model: (models[groups == model], measured[groups == model]) for model in np.unique(groups)}
    shapes = predict_left_out(rows, folds_of(rows.n.tolist(), rows.k.tolist()) % NUM_SHAPE_FOLDS, today)
    section = fit_section(rows, today)
    report = {
        "source": SOURCE,
        "libraries": [LIBRARY],
        "held_out": errors(models, measured) | {"covered": covered_in_turn(parts)},
        "held_out_shapes": errors(shapes, measured),
        "fitted_rows": errors(predict(rows, section), measured),
        "command": "python scripts/calibrate_gemm_vidur.py --data DIR",
    }
    print(json.dumps(report, indent=1), json.dumps(section["slow_cases"]), flush=True)
    record["parameters"]["libraries"][LIBRARY] = {DTYPE: section}
    record["interval"]["libraries"][LIBRARY] = {DTYPE: interval_of_models(parts)}
    record["provenance"].setdefault("reports", {})[f"{DTYPE}, {LIBRARY}: models left out"] = report
    print(save_record("gemm", NAME, round_section(record)))


if __name__ == "__main__":
    main()
