"""Learn what the physics of the GEMM records leaves over, and store it as tables beside them.

Usage: python scripts/calibrate_gemm_residual.py --data DIR [--device a100-sxm-80gb]

Run calibrate_gemm.py before: its records are the physics. DIR holds gemm.parquet. The same fifth of whole (n, k) shapes
stays unseen and judges; intervals come from shapes left out in turn among the rest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from calibration import argument_parser, read_record, save_record
from gemm_rows import SOURCES, Source

from shapewright.fit.gemm import Array, interval, judge, round_section
from shapewright.fit.ranking import ranking_regret
from shapewright.fit.residual import features, fit_trees, predict_left_out, price_physics, to_log_steps
from shapewright.fit.split import split_by_shape
from shapewright.hardware import load_device
from shapewright.perf.calibration import load_record
from shapewright.perf.residual import LOG_STEP, section_name

TABLE = "gemm.parquet"
# Smaller products are bound by the memory's bandwidth: alternatives of one n k hardly differ.
SMALLEST_RANKED_M = 256


def measured_knots(folder: Path) -> dict[str, Array]:
    """The grid of the table: every m, n and k that was measured anywhere."""
    rows = pd.read_parquet(folder / TABLE, columns=["m", "n", "k"])
    return {letter: np.sort(rows[letter].unique()).astype(np.int64) for letter in ("m", "n", "k")}


def learn_section(
    source: Source, library: str, folder: Path, knots: dict[str, Array]
) -> tuple[Array, dict[str, Any], dict[str, Any]]:
    """Table, interval and report of one dtype of one library, or of all libraries together."""
    device = load_device(source.device)
    record = load_record("gemm", device, physics_only=True)
    words = {"dtype": source.dtype, "layout": source.layout, "hot_cache": source.hot_cache, "library": library}

    everything = source.rows(folder)
    train, held = split_by_shape(everything)
    train, held = (rows[rows.library == library] if library else rows for rows in (train, held))
    prices = [price_physics(rows, device, record, **words) for rows in (train, held)]  # type: ignore[arg-type]
    seen = features(train, prices[0])
    physics = [np.asarray(price.time_s) for price in prices]
    target = np.log(train.latency_s.to_numpy() / physics[0])
    left_out = physics[0] * np.exp(predict_left_out(train, seen, target))

    trees = fit_trees(seen, target)
    axes = np.meshgrid(*knots.values(), indexing="ij")
    grid = pd.DataFrame({letter: axis.reshape(-1) for letter, axis in zip(knots, axes, strict=True)})
    at_knots = trees.predict(features(grid, price_physics(grid, device, record, **words)))  # type: ignore[arg-type]
    table = to_log_steps(at_knots).reshape([len(axis) for axis in knots.values()])

    place = tuple(np.searchsorted(knots[letter], held[letter].to_numpy()) for letter in knots)
    unseen = physics[1] * np.exp(LOG_STEP * table[place])
    measured = held.latency_s.to_numpy()
    report = {
        "held_out": judge(unseen, measured),
        "held_out_physics": judge(physics[1], measured),
        "by_size": errors_by_size(unseen, physics[1], measured),
    }
    if library:
        rows = pd.concat([train, held])
        report["ranking_regret"] = judge_ranking(
            rows, {"learned": np.concatenate([left_out, unseen]), "physics": np.concatenate(physics)}, everything
        )
    return table, interval(left_out, train.latency_s.to_numpy()), report


def errors_by_size(learned: Array, physics: Array, measured: Array) -> dict[str, dict[str, float]]:
    """Mean errors by decade of the measured time, named by its lower end in seconds."""
    decades = np.floor(np.log10(measured) + 1e-9).astype(int)
    return {
        f"1e{decade}": {
            "rows": int(np.sum(decades == decade)),
            "mean_ape": judge(learned[decades == decade], measured[decades == decade])["mean_ape"],
            "physics": judge(physics[decades == decade], measured[decades == decade])["mean_ape"],
        }
        for decade in np.unique(decades)
    }


def judge_ranking(rows: pd.DataFrame, predicted: dict[str, Array], everything: pd.DataFrame) -> dict[str, Any]:
    """Regret among shapes of one n k at one m >= 256, each predicted by a fit that did not see its (n, k).

    Beside it the regret of choosing by other libraries' measurements of the same shapes, where they have the group:
    what the choice is worth to a second collector.
    """
    shape = ["m", "n", "k"]
    others = everything[everything.library != rows.library.iloc[0]].groupby(shape).latency_s.mean()
    other = others.reindex(pd.MultiIndex.from_frame(rows[shape])).to_numpy()
    rows = rows.assign(parameters=rows.n * rows.k, **predicted, other_library=other)
    rows = rows[rows.m >= SMALLEST_RANKED_M]
    report: dict[str, Any] = {}
    for name in (*predicted, "other_library"):
        known = rows[rows[name].notna()]
        regret = ranking_regret(known, known[name].to_numpy(), ["m", "parameters"])
        report[name] = {
            "groups": len(regret),
            "median": round(float(np.median(regret)), 4),
            "mean": round(float(np.mean(regret)), 4),
            "p90": round(float(np.quantile(regret, 0.9)), 4),
        }
    return report


def main() -> None:
    """Learn the residuals of every record, or of one device's."""
    sources = [source for source in SOURCES if source.table == TABLE]
    devices = list(dict.fromkeys(source.device for source in sources))
    given = argument_parser(__doc__, devices).parse_args()
    knots = measured_knots(given.data)
    for name in given.device or devices:
        tables: dict[str, Array] = {}
        intervals: dict[str, Any] = {"dtypes": {}, "libraries": {}}
        content = read_record("gemm", name)
        for source in (source for source in sources if source.device == name):
            origin = content["provenance"]["sections"][source.dtype]
            for library in ("", *sorted(source.rows(given.data).library.unique())):
                section = section_name(source.dtype, library)
                tables[section], found, report = learn_section(source, library, given.data, knots)
                print(name, section, json.dumps(report), flush=True)
                if library:
                    intervals["libraries"].setdefault(library, {})[source.dtype] = found
                    origin["libraries"][library] = {**report.pop("held_out"), **report}
                else:
                    intervals["dtypes"][source.dtype] = found
                    origin.update(report)
        content["residual"] = {
            "file": f"{name}.npz",
            "interval": intervals,
            "command": f"python scripts/calibrate_gemm_residual.py --data DIR --device {name}",
        }
        path = save_record("gemm", name, round_section(content))
        np.savez_compressed(
            path.with_suffix(".npz"), **knots, **{f"residual:{section}": table for section, table in tables.items()}
        )


if __name__ == "__main__":
    main()
