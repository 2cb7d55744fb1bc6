"""Fit the overhead of generations of training software from published training throughput.

The data folder holds published_training_throughput.csv. At most one parameter is fitted per generation: a factor on all
times, or a host cost per operation. Older kernels of fused attention have a factor of their own per architecture.
Errors and intervals are those of held-out rows: every group (a model size, or a source) is left out in turn. About a
minute on one core.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shapewright.core.errors import ShapewrightError
from shapewright.measure.accuracy.context import Context
from shapewright.measure.accuracy.measured_files import read_columns
from shapewright.measure.accuracy.tables.published_rows import FORMAT
from shapewright.measure.accuracy.tables.training import PublishedRun, read_runs
from shapewright.measure.fit.shared import Array, error_summary, fit_log_times
from shapewright.measure.refit import loss_steps
from shapewright.measure.refit.generations import GENERATIONS, SOURCE, TABLE, Generation, Parameter
from shapewright.measure.refit.record_files import command, write_record
from shapewright.prediction.predict import Prediction, borrowed_fraction, predict
from shapewright.pricing.software import OVERLAP_SHARE, TUNED, UNNAMED, Software, load_software

# Most rows per fit; steps of similar rows have similar errors.
MOST_ROWS = 60
# Quantiles of the interval.
QUANTILES = (0.05, 0.95)


def apply(software: Software, values: dict[Parameter, float]) -> Software:
    """Return the software with fitted parameters."""
    plain: dict[str, Any] = {name: value for name, value in values.items() if isinstance(name, str)}
    attention = {name[1]: value for name, value in values.items() if not isinstance(name, str)}
    return replace(software, **plain, attention_factor={**software.attention_factor, **attention})


def predict_step(software: Software, run: PublishedRun) -> Prediction:
    """Predict a step of a run with some software."""
    return predict(run.config, device=run.device, workload=run.workload, layout=run.layout, software=software)


def predict_steps(software: Software, runs: Sequence[PublishedRun]) -> Array:
    """Predict the time of each step. [s]"""
    return np.array([predict_step(software, run).step_time_s for run in runs])


def mean_borrowed_fraction(software: Software, runs: Sequence[PublishedRun]) -> float:
    """Return the mean share of step time that borrowed records price, which is part of the residuals."""
    return float(np.mean([borrowed_fraction(predict_step(software, run).operations) for run in runs]))


def fit(generation: Generation, runs: Sequence[PublishedRun]) -> dict[Parameter, float]:
    """Fit the free parameters to some rows, evenly selected if there are many."""
    if not generation.free:
        return {}
    chosen = [runs[index] for index in np.unique(np.linspace(0, len(runs) - 1, MOST_ROWS).astype(int))]
    measured = np.array([run.step_s for run in chosen])
    start = {name: 1e-4 if name == "host_s" else 1.2 for name in generation.free}
    return fit_log_times(
        lambda values: predict_steps(apply(generation.software, values), chosen),
        measured,
        start,
        generation.free,
        most_evaluations=12,
    )[0]


def predict_left_out(generation: Generation, runs: Sequence[PublishedRun]) -> Array:
    """Predict the step of each run by a fit to the runs of other groups. [s]"""
    groups = np.array([generation.group_of(run) for run in runs])
    held_out = np.empty(len(runs))
    for group in sorted(set(groups)):
        inside = groups == group
        seen, left_out = ([run for run, here in zip(runs, mask, strict=True) if here] for mask in (~inside, inside))
        held_out[inside] = predict_steps(apply(generation.software, fit(generation, seen)), left_out)
    return held_out


def calibrate(generation: Generation, runs: list[PublishedRun]) -> dict[str, Any]:
    """Fit one generation and return its record, with errors on left-out groups."""
    measured = np.array([run.step_s for run in runs])
    groups = np.array([generation.group_of(run) for run in runs])
    held_out = predict_left_out(generation, runs)
    reports: dict[str, Any] = {
        f"held out {group}": error_summary(held_out[groups == group], measured[groups == group])
        for group in sorted(set(groups))
    }
    values = fit(generation, runs)
    reports["held out"] = error_summary(held_out, measured)
    reports["fit"] = error_summary(predict_steps(apply(generation.software, values), runs), measured)
    reports["as a tuned stack"] = error_summary(predict_steps(load_software(TUNED), runs), measured)
    ratio = measured / held_out
    share = min(1.0, QUANTILES[1] * (len(ratio) + 1) / len(ratio))
    ends = float(np.quantile(ratio, 1.0 - share)), float(np.quantile(ratio, share))
    why = generation.why, "every group held out in turn; the numbers themselves are fitted on all rows"
    fitted = sorted(name if isinstance(name, str) else f"attention:{name[1]}" for name in values)
    final, rows_of = apply(generation.software, values), (generation.source, generation.table)
    return make_record(final, runs, ends, fitted, why, reports, rows_of)


def average_generation(runs: list[PublishedRun]) -> dict[str, Any]:
    """Return the record of unnamed software: the average of all generations, each held out from the average in turn.

    A generation counts once, however many rows it has: in the factor, the mean of the medians of ln(measured / tuned),
    and in the interval, where its rows share its weight.
    """
    measured, tuned = np.array([run.step_s for run in runs]), predict_steps(load_software(TUNED), runs)
    logs, names = np.log(measured / tuned), np.array([run.software for run in runs])
    medians = {str(name): float(np.median(logs[names == name])) for name in sorted(set(names))}
    held_out, reports = np.empty(len(runs)), {}
    for name in medians:
        own = names == name
        held_out[own] = np.exp(np.mean([middle for other, middle in medians.items() if other != name])) * tuned[own]
        reports[f"held out {name}"] = error_summary(held_out[own], measured[own])
    reports["held out"] = error_summary(held_out, measured)
    reports["as a tuned stack"] = error_summary(tuned, measured)
    ratio = measured / held_out
    order = np.argsort(ratio)
    weights = np.cumsum([1.0 / (names == names[row]).sum() / len(medians) for row in order])
    ends = tuple(float(ratio[order[min(int(np.searchsorted(weights, share)), len(order) - 1)]]) for share in QUANTILES)
    middle = Software(
        name=UNNAMED,
        title="unspecified software: geometric mean of all generations",
        time_factor=float(np.exp(np.mean(list(medians.values())))),
    )
    why = "one factor, the geometric mean of the generations above", "every generation held out in turn"
    return make_record(middle, runs, (ends[0], ends[1]), ["time_factor"], why, reports)


def make_record(
    final: Software,
    runs: Sequence[PublishedRun],
    ends: tuple[float, float],
    fitted: list[str],
    why: tuple[str, str],
    reports: dict[str, Any],
    rows_of: tuple[str, str] = (SOURCE, TABLE),
) -> dict[str, Any]:
    """Return the record of a generation.

    Args:
        ends: Ends of its interval, measured over predicted.
        why: Reason for these parameters, and how rows were held out.
        rows_of: Source and file of the rows.
    """
    parameters = {
        "overlap_share": final.overlap_share,
        "tensor_hidden_fraction": final.tensor_hidden_fraction,
        "time_factor": final.time_factor,
        "host_s": final.host_s,
        "host_scope": final.host_scope,
        "expert_hidden_fraction": final.expert_hidden_fraction,
        "workload": dict(final.workload),
        "attention_factor": dict(final.attention_factor),
        "unaligned_heads_fraction": final.unaligned_heads_fraction,
    }
    return {
        "name": final.name,
        "title": final.title,
        "parameters": parameters,
        "interval": {
            "low": min(ends[0], 1.0),
            "high": max(ends[1], 1.0),
            "borrowed_fraction": mean_borrowed_fraction(final, runs),
        },
        "provenance": {
            "source": rows_of[0],
            "files": [rows_of[1]],
            "rows": len(runs),
            "sources": sorted({run.source for run in runs}),
            "fitted": fitted,
            "why": why[0],
            "split": why[1],
            "command": command("software"),
            "reports": reports,
        },
    }


def refit(data: Path) -> None:
    """Fit and write the records of software generations."""
    path = data / TABLE
    neutral = Software(overlap_share=OVERLAP_SHARE)
    runs = []
    for run in read_runs(read_columns(path, FORMAT, Counter()), Context(), has_experts=None):
        try:
            predict_steps(neutral, [run])
        except ShapewrightError:
            continue
        runs.append(run)
    records = {
        generation.software.name: calibrate(
            generation, [run for run in runs if run.software == generation.software.name]
        )
        for generation in GENERATIONS
        if generation.table == TABLE
    }
    records[UNNAMED] = average_generation([run for run in runs if run.software in records])
    if (data / loss_steps.TABLE).exists():
        steps = list(loss_steps.read_measured_steps(data).values())
        generation = next(one for one in GENERATIONS if one.table == loss_steps.TABLE)
        records[generation.software.name] = calibrate(generation, steps)
    for name, record in records.items():
        print(name, record["parameters"], record["interval"], record["provenance"]["reports"]["held out"], flush=True)
        print("  ", {key: report["mean_absolute_error"] for key, report in record["provenance"]["reports"].items()})
        print(write_record("software", name, record))
