"""Learn the residual of the GEMM records' formulas and write it as tables next to them.

The physics are the committed records; the data folder holds gemm.parquet. The tables are learned from every measured
shape. Errors and intervals come from trees that did not see the whole (n, k) shape of a row, on all devices of an
architecture together, nor the others of its fold: errors on the fifth of the shapes that the formulas did not see
either, intervals on the rest. What those trees predict for that fifth is stored next to the tables, so that rows can be
priced as new ones (CalibrationRecord.without_own_shapes). Siblings share a model, so an architecture is learned as a
whole: some minutes each. Parts of a record or its tables for other formats and libraries stay unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from shapewright.hardware.loader import load_device
from shapewright.measure.accuracy.statistics import ranking_regrets
from shapewright.measure.fit.gemm_section import NARROW, Array, interval_per_regime, percentage_errors
from shapewright.measure.fit.shared import split_by_shape
from shapewright.measure.refit.gemm.rows import SOURCES, TABLE, Source
from shapewright.measure.refit.gemm.trees import (
    MIDDLE_TREES,
    OWN_TREES,
    SHARED_TREES,
    Correction,
    LearnedSection,
    combined_section,
    learn_section,
    learn_together,
    shape_folds,
    to_log_steps,
)
from shapewright.measure.refit.record_files import command, read_record, record_path, save_record
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.calibration.residual import LEFT_OUT_PREFIX, LOG_STEP, TABLE_PREFIX, section_name

# Smaller GEMMs are memory-bound: alternatives of one n k hardly differ.
SMALLEST_RANKED_M = 256
LETTERS = ["m", "n", "k"]


class Learner:
    """Corrections of all sections of one architecture and dtype.

    Attributes:
        knots: Columns m, n, k: the grid of the tables, row by row.
        fitted: Knots of whole (n, k) shapes that no device held out of the fit of its formulas.
        folds: Fold of each knot's (n, k), by which it is left out.
        measured_s: Measured times by device and library. [s], shape [knots]
        dtype: Element format.
        are_kernels_shared: Libraries run the same kernels.
        sections: By device and library; an empty library stands for all together.
        found: Learned correction of each section.
    """

    def __init__(self, folder: Path, axes: Mapping[str, Array], sources: Sequence[Source]) -> None:
        grid = np.meshgrid(*axes.values(), indexing="ij")
        self.knots = pd.DataFrame({letter: axis.reshape(-1) for letter, axis in zip(axes, grid, strict=True)})
        self.dtype, self.found = sources[0].dtype, dict[tuple[str, str], Correction]()
        # In 16 bits every library calls the vendor's kernels; in narrower formats each has its own.
        self.are_kernels_shared = self.dtype not in NARROW
        self.measured_s: dict[tuple[str, str], Array] = {}
        held: set[tuple[int, int]] = set()
        for source in sources:
            rows = source.rows(folder)
            held_out = split_by_shape(rows)[1]
            held |= set(zip(held_out.n, held_out.k, strict=True))
            for library, own in rows.groupby("library"):
                times = own.groupby(LETTERS).latency_s.mean()
                self.measured_s[source.device, str(library)] = times.reindex(
                    pd.MultiIndex.from_frame(self.knots)
                ).to_numpy()
        self.fitted = np.array([shape not in held for shape in zip(self.knots.n, self.knots.k, strict=True)])
        shapes = pd.MultiIndex.from_frame(self.knots[["n", "k"]])
        is_measured = np.isfinite(np.stack(list(self.measured_s.values()))).any(axis=0)
        self.folds = shape_folds(self.knots, shapes.isin(shapes[is_measured]), ~self.fitted)
        self.sections = {
            (source.device, library): self.section(source, library)
            for source in sources
            for library in ("", *self.libraries(source.device))
        }

    def libraries(self, device: str) -> list[str]:
        """List the libraries measured on a device."""
        return sorted(library for name, library in self.measured_s if name == device)

    def section(self, source: Source, library: str) -> LearnedSection:
        """Return one section over all knots."""
        device = load_device(source.device)
        own = {one: self.measured_s[source.device, one] for one in self.libraries(source.device)}
        return learn_section(
            self.knots,
            {library: own[library]} if library else own,
            device,
            load_record("gemm", device.with_pricing(physics_only=True)),
            dtype=source.dtype,
            layout=source.layout,
            hot_cache=source.hot_cache,
            library=library,
            uses_kernels=self.are_kernels_shared,
        )

    def learn(self) -> None:
        """Learn libraries together and then their combination; each section separately if kernels differ."""
        names = sorted(self.measured_s)
        devices, libraries = (sorted({name[part] for name in names}) for part in (0, 1))
        marks = np.array([(devices.index(device), libraries.index(library)) for device, library in names])
        if self.are_kernels_shared:
            sections = [self.sections[name] for name in names]
            together = learn_together(sections, marks, self.folds, trees=SHARED_TREES)
            self.found |= dict(zip(names, together, strict=True))
            for device in devices:
                middle = combined_section(self.sections[device, ""], self.knots, self.library_corrections(device))
                self.found[device, ""] = self.learn_alone(middle, MIDDLE_TREES)
        else:
            self.found |= {name: self.learn_alone(section, OWN_TREES) for name, section in self.sections.items()}

    def learn_alone(self, section: LearnedSection, trees: Mapping[str, Any]) -> Correction:
        """Learn one section from its own rows."""
        (found,) = learn_together([section], np.zeros((1, 0)), self.folds, trees=trees)
        return found

    def library_corrections(self, device: str) -> Array:
        """Return each library's correction at knots that it did not see, as logarithms over the common physics."""
        physics_s = self.sections[device, ""].physics_s
        columns = [
            np.log(self.sections[device, library].physics_s / physics_s) + self.found[device, library].left_out
            for library in self.libraries(device)
        ]
        return np.stack([*columns, np.mean(columns, axis=0), columns[-1] - columns[0]], axis=1)

    def tables(self, device: str, library: str) -> tuple[NDArray[np.int8], NDArray[np.int16]]:
        """Return the table of one section in steps, and what to add at held-out shapes to leave them out of it."""
        found = self.found[device, library]
        steps = to_log_steps(found.of_all)
        difference = to_log_steps(found.left_out).astype(np.int16) - steps
        return steps, np.where(self.fitted, 0, difference).astype(np.int16)

    def report(self, device: str, library: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the interval of one section, and errors on the shapes held out of its formulas and its tables."""
        section, found = self.sections[device, library], self.found[device, library]
        held_out_s = section.physics_s * np.exp(LOG_STEP * to_log_steps(found.left_out))

        rows = pd.concat(
            self.knots.assign(latency_s=times, held_out_s=held_out_s, physics_s=section.physics_s, fitted=self.fitted)
            for times in section.measured_s.values()
        )
        rows = rows[rows.latency_s.notna()]
        train, held = rows[rows.fitted], rows[~rows.fitted]
        held_out, physics, measured = (held[name].to_numpy() for name in ("held_out_s", "physics_s", "latency_s"))
        report: dict[str, Any] = {
            "held_out": percentage_errors(held_out, measured),
            "held_out_physics": percentage_errors(physics, measured),
            "by_size": errors_by_decade(held_out, physics, measured),
        }
        if library:
            report["ranking_regret"] = self.ranking_report(device, library, rows)
        return interval_per_regime(train.held_out_s.to_numpy(), train.latency_s.to_numpy()), report

    def ranking_report(self, device: str, library: str, rows: pd.DataFrame) -> dict[str, Any]:
        """Return the regret among shapes of one n k at one m >= 256, each predicted without its own (n, k).

        For comparison the regret of choosing by other libraries' measurements of the same shapes, where they exist:
        what a second collector's data achieve.
        """
        others = np.stack([self.measured_s[device, one] for one in self.libraries(device) if one != library])
        known = np.isfinite(others)
        other = np.where(known, others, 0.0).sum(axis=0) / np.where(known.any(axis=0), known.sum(axis=0), np.nan)
        rows = rows.assign(parameters=rows.n * rows.k, other_s=other[rows.index])
        rows = rows[rows.m >= SMALLEST_RANKED_M]
        report: dict[str, Any] = {}
        for name, column in (("learned", "held_out_s"), ("physics", "physics_s"), ("other_library", "other_s")):
            judged = rows[rows[column].notna()]
            alternatives = judged.groupby(["m", "parameters"]).ngroup().to_numpy(float)
            regret = ranking_regrets(
                judged[column].to_numpy(), judged.latency_s.to_numpy(), alternatives, np.ones(len(judged))
            )
            report[name] = {
                "groups": len(regret),
                "median": round(float(np.median(regret)), 4),
                "mean": round(float(np.mean(regret)), 4),
                "p90": round(float(np.quantile(regret, 0.9)), 4),
            }
        return report


def measured_knots(folder: Path) -> dict[str, Array]:
    """Return the grid of the table: every m, n and k that was measured anywhere."""
    rows = pd.read_parquet(folder / TABLE, columns=LETTERS)
    return {letter: np.sort(rows[letter].unique()).astype(np.int64) for letter in LETTERS}


def errors_by_decade(learned: Array, physics: Array, measured: Array) -> dict[str, dict[str, float]]:
    """Return mean errors by decade of the measured time, keyed by its lower end in seconds."""
    decades = np.floor(np.log10(measured) + 1e-9).astype(int)
    return {
        f"1e{decade}": {
            "rows": int(np.sum(decades == decade)),
            "mean_ape": percentage_errors(learned[decades == decade], measured[decades == decade])["mean_ape"],
            "physics": percentage_errors(physics[decades == decade], measured[decades == decade])["mean_ape"],
        }
        for decade in np.unique(decades)
    }


def write_record(name: str, axes: Mapping[str, Array], learners: Sequence[Learner], command_line: str) -> None:
    """Write the tables of one device, and put intervals and errors into its record."""
    sections = [(learner, library) for learner in learners for library in ("", *learner.libraries(name))]
    reports = [learner.report(name, library) for learner, library in sections]
    # Read last, since formats of one device can be learned at the same time.
    content = read_record("gemm", name)
    path = record_path("gemm", name).with_suffix(".npz")
    with np.load(path) as stored:
        tables = {section: stored[section] for section in stored.files if section not in axes}
    # A record that the step before wrote anew has no tables yet.
    intervals = content.get("residual", {}).get("interval", {"dtypes": {}, "libraries": {}})
    for (learner, library), (found, report) in zip(sections, reports, strict=True):
        section = section_name(learner.dtype, library)
        shape = [len(axis) for axis in axes.values()]
        steps, left_out = learner.tables(name, library)
        tables[TABLE_PREFIX + section] = steps.reshape(shape)
        tables[LEFT_OUT_PREFIX + section] = left_out.reshape(shape)
        print(name, section, json.dumps(report), flush=True)
        origin = content["provenance"]["sections"][learner.dtype]
        if library:
            intervals["libraries"].setdefault(library, {})[learner.dtype] = found
            origin["libraries"][library] = {**report.pop("held_out"), **report}
        else:
            intervals["dtypes"][learner.dtype] = found
            origin.update(report)
    content["residual"] = {"file": path.name, "interval": intervals, "command": command_line}
    save_record("gemm", name, content, digits=6)
    np.savez_compressed(path, **axes, **tables)  # type: ignore[arg-type]


def refit(data: Path, architectures: Sequence[str] = (), dtypes: Sequence[str] = ()) -> None:
    """Learn the residual tables of every GEMM record, or of some architectures and element formats."""
    sources = [source for source in SOURCES if source.table == TABLE]
    architecture_of = {source.device: load_device(source.device).architecture for source in sources}
    axes = measured_knots(data)
    for architecture in architectures or list(dict.fromkeys(architecture_of.values())):
        own = [source for source in sources if architecture_of[source.device] == architecture]
        learners = []
        for dtype in dict.fromkeys(source.dtype for source in own if source.dtype in (dtypes or [source.dtype])):
            learners.append(Learner(data, axes, [source for source in own if source.dtype == dtype]))
            learners[-1].learn()
        for name in dict.fromkeys(source.device for source in own):
            write_record(name, axes, learners, command("gemm-residual", f"--architecture {architecture}"))
