"""Fit the section of A100's GEMM record for vidur's layers, measured with libraries of 2024.

The fit starts at the section of the current libraries and has its prior there. The data folder holds
linear_layers.parquet: device, model, kernel, dtype, m, n, k, latency_s (microsoft/vidur @7d47513, MIT). The committed
section is fitted on every row; errors and interval are those of three models left out in turn. A minute.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from shapewright.hardware.architectures import find_architecture
from shapewright.hardware.loader import load_device
from shapewright.measure.accuracy.statistics import kendall_tau
from shapewright.measure.accuracy.tables.linear_layers import flops_of_runs
from shapewright.measure.fit.gemm_section import (
    Array,
    FitParameters,
    device_rates,
    fit,
    percentage_errors,
    predict_rows,
    transform,
)
from shapewright.measure.fit.shared import fold_of_rows, predict_in_turn
from shapewright.measure.refit.intervals.residual_intervals import (
    Interval,
    is_inside,
    leave_one_out_widening,
    pool,
    widen_interval,
)
from shapewright.measure.refit.record_files import command, read_record, save_record

NAME, LIBRARY, DTYPE, LAYOUT = "a100-sxm-80gb", "vidur", "fp16", "NT"
SOURCE = "linear_layers.parquet, microsoft/vidur @7d47513, MIT"
# From 5,504 columns on, contractions of up to 4,096 run a slower kernel: at k = 4096, where power limits the clock,
# full waves reach 240 TFLOP/s with 4,096 columns and 205 to 225 with 5,504 to 22,016; at k = 6144 and more 230 to 257
# with any number. The paper's layers, of software a year older, lose as much up to 4,095 (physics.OLDER_SPANS). These
# limits fit best of all between measured sizes, for all rows and for each two models; the loss is fitted. [element]
SPAN = {"last_k": 4096.0, "first_n": 5504.0}
NUM_SHAPE_FOLDS = 5
# Steepness of the clock's fall with the work of a run: a smooth step, as slow_cases.reach_steepness.
RUN_STEEPNESS = 4.0
# Parameters that do not start at the current section: those of another mechanism, and waves (start_of).
OWN_STARTS = ("wave_give_back", "power_half_flops")


def read_rows(folder: Path) -> pd.DataFrame:
    """Read the layers measured on A100, with the work of the run in which each was timed."""
    rows = pd.read_parquet(folder / "linear_layers.parquet", filters=[("device", "==", "a100_sxm")])
    run = rows.groupby(["model", "tensor_parallel", "m"]).ngroup().to_numpy()
    kernel, flops = pd.factorize(rows.kernel)[0], (2.0 * rows.m * rows.n * rows.k).to_numpy()
    return rows.assign(batch=1, run_flops=flops_of_runs(run, kernel, flops))


class SpanParameters(FitParameters):
    """Free parameters with a rate per tile shape, a slower kernel's loss, and a clock that follows a run's work."""

    def __init__(self, architecture: str) -> None:
        loss = (("span_loss", 0.05, "logit"),)
        super().__init__(
            find_architecture(architecture).gemm_tiles, hot=False, alignment=(), slow_cases=loss, rate_by_shape=True
        )

    def section(self, x: Array, factors: dict[str, dict[str, float]] | None) -> dict[str, Any]:
        """Return the section of the record; ``factors`` is the alignment table."""
        found = super().section(x, factors)
        spans = [{**SPAN, "loss": found["slow_cases"]["span_loss"]}]
        return {**found, "power_run_steepness": RUN_STEEPNESS, "slow_cases": {"spans": spans}}


def start_of(parameters: FitParameters, section: dict[str, Any]) -> Array:
    """Return a section's parameters in the units of the fit; parameters that it lacks start at their defaults.

    So do waves: heuristics that avoid a partial last wave look like kernels that recover its loss, which the current
    ones on A100 do not. A fit that starts there stays there.
    """
    known = {entry: start for entry, start, _ in parameters.entries} | {
        name: value for name, value in section.items() if isinstance(value, float) and name not in OWN_STARTS
    }
    for name, tile in zip(parameters.rate_names, section["tiles"], strict=True):
        known |= {name: tile["rate"], "fill_k": tile["fill_k"]}
    return transform([(entry, known[entry], unit) for entry, _, unit in parameters.entries])


def errors(predicted: Array, measured: Array) -> dict[str, float]:
    """Return the errors of held-out rows, the same after one factor, and the rank correlation."""
    factor = float(np.median(measured / predicted))
    return {
        **percentage_errors(predicted, measured),
        "mean_ape_after_factor": percentage_errors(predicted * factor, measured)["mean_ape"],
        "kendall_tau": round(kendall_tau(predicted, measured) or 0.0, 4),
    }


def fit_section(rows: pd.DataFrame, current: dict[str, Any]) -> dict[str, Any]:
    """Fit a section to rows, starting from that of the current libraries."""
    device = load_device(NAME)
    parameters = SpanParameters(device.architecture)
    factors, rates = current["alignment_factor"], device_rates(device, DTYPE, hot=False)
    section = parameters.section(
        fit(rows, parameters, rates, LAYOUT, factors, start=start_of(parameters, current)), factors
    )
    return {**section, **({"batched": current["batched"]} if "batched" in current else {})}


def predict(rows: pd.DataFrame, section: dict[str, Any]) -> Array:
    """Price rows with a section. [s]"""
    return predict_rows(rows, section, device_rates(load_device(NAME), DTYPE, hot=False), LAYOUT)


def predict_left_out(rows: pd.DataFrame, groups: np.ndarray, current: dict[str, Any]) -> Array:
    """Price each row with a section that saw no row of its group. [s]"""
    return predict_in_turn(groups, lambda seen, left: predict(rows[left], fit_section(rows[seen], current)))


def interval_of_models(parts: Mapping[str, tuple[Array, Array]]) -> Interval:
    """Return the interval of equally weighted models, widened until each lies in the interval of the others."""
    return widen_interval(pool(list(parts.values())), leave_one_out_widening(parts))


def covered_in_turn(parts: Mapping[str, tuple[Array, Array]]) -> float:
    """Return the share of each model's rows, equally weighted, inside an interval made of the other models."""
    others = {name: {other: part for other, part in parts.items() if other != name} for name in parts}
    shares = [float(is_inside(interval_of_models(others[name]), *part).mean()) for name, part in parts.items()]
    return round(float(np.mean(shares)), 3)


def refit(data: Path) -> None:
    """Fit the section of the 2024 libraries, with held-out errors, and write it into the record of A100."""
    rows = read_rows(data)
    measured, groups = rows.latency_s.to_numpy(), rows.model.to_numpy()
    record = read_record("gemm", NAME)
    current = record["parameters"]["dtypes"]["bf16"]
    models = predict_left_out(rows, groups, current)
    parts = {model: (models[groups == model], measured[groups == model]) for model in np.unique(groups)}
    shapes = predict_left_out(rows, fold_of_rows(rows.n.tolist(), rows.k.tolist()) % NUM_SHAPE_FOLDS, current)
    section = fit_section(rows, current)
    report = {
        "source": SOURCE,
        "libraries": [LIBRARY],
        "held_out": errors(models, measured) | {"covered": covered_in_turn(parts)},
        "held_out_shapes": errors(shapes, measured),
        "fitted_rows": errors(predict(rows, section), measured),
        "command": command("gemm-older-libraries"),
    }
    print(json.dumps(report, indent=1), json.dumps(section["slow_cases"]), flush=True)
    record["parameters"]["libraries"][LIBRARY] = {DTYPE: section}
    record["interval"]["libraries"][LIBRARY] = {DTYPE: interval_of_models(parts)}
    record["provenance"].setdefault("reports", {})[f"{DTYPE}, {LIBRARY}: models left out"] = report
    print(save_record("gemm", NAME, record, digits=6))
