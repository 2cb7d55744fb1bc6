"""Learn the residual tables of the attention records.

The physics are the committed records; the data folder holds attention_prefill.parquet and attention_decode.parquet. The
same fifth of whole head layouts is held out; intervals, and whether a kernel gets a table, come from layouts left out
in turn among the rest. A minute per device.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from shapewright.hardware import Device, load_device
from shapewright.measure.fit.shared import HELD_OUT_FOLD, Array, error_summary, interval_of
from shapewright.measure.refit.attention.kernel_fit import (
    AIMED_COVERAGE,
    Source,
    error_of,
    layout_folds,
    shape_from_rows,
)
from shapewright.measure.refit.attention.residual_tables import (
    TREES,
    Physics,
    features_of,
    knots_of,
    predict_left_out,
    tabulate,
)
from shapewright.measure.refit.attention.rows import OTHER_SECTIONS, PHASES, SECTIONS, read_rows
from shapewright.measure.refit.record_files import DEVICES, command, fit_trees, read_record, save_record
from shapewright.pricing.attention.residual import AttentionResidual, log_correction
from shapewright.pricing.attention.sections import SMALL_GROUPS
from shapewright.pricing.calibration.records import load_record

# A kernel gets a table if its error on layouts left out in turn is below that of its physics times this.
WORTHWHILE_RATIO = 0.97


class Learner:
    """Tables of one device, fitted once for each source and phase."""

    def __init__(self, data: Path, name: str) -> None:
        self.data, self.alias = data, DEVICES[name]
        self.device: Device = load_device(name)
        self.record = load_record("attention", self.device.with_pricing(physics_only=True))
        self.knots: dict[str, dict[str, Array]] = {}
        self.tables: dict[tuple[str, int], Array] = {}
        self.intervals: dict[str, Any] = {}
        self.reports: dict[str, Any] = {}
        self.done: set[str] = set()

    def learn(self, phase: str, source: Source) -> None:
        """Fit one phase of one source: a table, an interval and a report per kernel."""
        rows = read_rows(self.data, phase, self.alias, source)
        origin = "/".join(source)
        if rows.empty or f"{origin}/{phase}" in self.done:
            return
        self.done.add(f"{origin}/{phase}")
        if phase not in self.knots:
            everything = [read_rows(self.data, phase, self.alias, other) for other in _sources()]
            self.knots[phase] = knots_of(pd.concat(everything))
        held_out = layout_folds(rows) == HELD_OUT_FOLD
        physics = Physics(self.device, self.record, source[1] if phase == "prefill" else "bf16", source[2])
        physics_s, seen = features_of(rows, physics)
        target = np.log(rows.latency_s.to_numpy() / physics_s)
        train = rows[~held_out].reset_index(drop=True)
        trees = fit_trees(seen[~held_out], target[~held_out], TREES)
        left_out_s = physics_s[~held_out] * np.exp(predict_left_out(train, seen[~held_out], target[~held_out]))
        families = sorted(rows.family.unique())
        for (family, width), index in train.groupby(["family", "head_dim"]).indices.items():
            part, name = train.iloc[index], f"{origin}/{family}_{width}/{phase}"
            own_physics_s = physics_s[~held_out][index]
            if error_of(left_out_s[index], part) > WORTHWHILE_RATIO * error_of(own_physics_s, part):
                print(self.alias, name, "gets no table", flush=True)
                continue
            ours = ((rows.family == family) & (rows.head_dim == width)).to_numpy()
            table = tabulate(trees, rows[ours], self.knots[phase], physics, families.index(family))
            for window, steps in zip(table.windows, table.log_steps, strict=True):
                self.tables[name, int(window)] = steps
            self.intervals[name] = interval_of(left_out_s[index], part.latency_s.to_numpy(), AIMED_COVERAGE)
            self.reports[name] = {"left_out": error_summary(left_out_s[index], part.latency_s.to_numpy())}
            judged = rows[held_out & ours]
            if len(judged):
                corrected_s = correct(table, judged, source, float(width), physics_s[held_out & ours])
                self.reports[name]["held_out"] = error_summary(corrected_s, judged.latency_s.to_numpy())
            print(
                self.alias,
                name,
                json.dumps({key: value["mean_absolute_error"] for key, value in self.reports[name].items()}),
                flush=True,
            )

    def table_of(self, path: str) -> str | None:
        """Return the name of the table that corrects a kernel of the record, by the path of its interval."""
        *library, section, kernel, phase = path.split("/")
        sources = OTHER_SECTIONS if library else SECTIONS
        if section not in sources or (library and not library[0].startswith(sources[section][0])):
            return None
        maker, dtype, kv_dtype = sources[section]
        own = (maker, dtype if phase == "prefill" else "bf16", kv_dtype)
        fallback = (maker, "bf16", "bfloat16" if phase == "prefill" else kv_dtype)
        plain = kernel
        for _, family in SMALL_GROUPS:
            plain = plain.replace(family, "flashinfer") if phase == "prefill" else plain
        measured = "borrowed" not in self.record.provenance["reports"][path]
        name = "/".join((*(own if measured else fallback), plain, phase))
        return name if name in self.intervals else None


def correct(table: AttentionResidual, rows: pd.DataFrame, source: Source, width: float, physics_s: Array) -> Array:
    """Return times of rows of one kernel by physics and its table. [s]"""
    is_decode = bool(rows.query_len.max() == 1)
    logs, _ = log_correction(table, shape_from_rows(rows, source), width, is_decode=is_decode)
    corrected_s: Array = physics_s * np.exp(logs)
    return corrected_s


def report_held_out(content: dict[str, Any]) -> None:
    """Put the held-out errors with tables into a record's reports, next to those of physics only."""
    reports, learned = content["provenance"]["reports"], content["residual"]
    for path, table in learned["tables"].items():
        found = learned["reports"][table].get("held_out")
        if found and reports[path].get("held_out"):
            reports[path].setdefault("held_out_physics", reports[path]["held_out"])
            reports[path]["held_out"] = found


def _sources() -> list[Source]:
    """List the measured sources: prefill in its own arithmetic, decode in 16 bits."""
    return [*SECTIONS.values(), *OTHER_SECTIONS.values()]


def refit(data: Path, devices: Sequence[str] = ()) -> None:
    """Learn the residual tables of every attention record, or of some devices."""
    for name in devices or DEVICES:
        learner = Learner(data, name)
        for phase in PHASES:
            for source in _sources():
                if phase == "prefill" or source[1] == "bf16" or (source[0], "bf16", source[2]) not in _sources():
                    learner.learn(phase, source if phase == "prefill" else (source[0], "bf16", source[2]))
        content = read_record("attention", name)
        used = {kernel: table for kernel in content["interval"] if (table := learner.table_of(kernel))}
        content["residual"] = {
            "file": f"{name}.npz",
            "tables": used,
            "interval": {table: learner.intervals[table] for table in sorted(set(used.values()))},
            "reports": {table: learner.reports[table] for table in sorted(set(used.values()))},
            "command": command("attention-residual", f"--device {name}"),
        }
        report_held_out(content)
        knots: dict[str, Any] = {
            f"{axis}/{phase}": values.astype(np.int32)
            for phase, axes in learner.knots.items()
            for axis, values in axes.items()
        }
        names = set(used.values())
        kept: dict[str, Any] = {
            f"{table}@{window}": steps for (table, window), steps in learner.tables.items() if table in names
        }
        tables = save_record("attention", name, content).with_suffix(".npz")
        np.savez_compressed(tables, **knots, **kept)
        print(name, f"{tables.stat().st_size / 1e3:.0f} kB", flush=True)
