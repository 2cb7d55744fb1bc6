"""Learn the residual tables of the attention records with boosted trees.

Features are a call and its predicted quantities; the target is ln(measured / physics) with damped outliers, for all
kernels of one library, phase and pair of element formats together. The trees are evaluated at the knots of a grid over
sequences, keys, key-value heads and heads per key-value head, so that pricing needs the tables only.

The physics are the committed records; the data folder holds attention_prefill.parquet and attention_decode.parquet. The
same fifth of whole head layouts is held out; intervals, and whether a kernel gets a table, come from layouts left out
in turn among the rest. A minute per device.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from shapewright.core.records import dataclass
from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.measure.fit.shared import (
    HELD_OUT_FOLD,
    Array,
    error_summary,
    fold_of_rows,
    interval_of,
    mean_error,
    predict_in_turn,
)
from shapewright.measure.refit.attention.kernel_fit import (
    AIMED_COVERAGE,
    Source,
    layout_folds,
    shape_from_rows,
)
from shapewright.measure.refit.attention.physics import OTHER_SECTIONS, PHASES, SECTIONS, read_rows
from shapewright.measure.refit.record_files import DEVICES, command, fit_trees, read_record, save_record
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.attention.residual import LOG_STEP, AttentionResidual, log_correction
from shapewright.pricing.attention.sections import SMALL_GROUPS
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.calibration.residual import FADE_DOUBLINGS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from shapewright.pricing.calibration.records import CalibrationRecord

# Chosen by head layouts left out in turn, seven tables of five devices (physics 7.5 %): absolute error and 200 trees
# 4.4 %, 400 trees 4.2 %, squared error 4.4 %, Huber's 4.1 %, as with 31 or 127 leaves; random splits 5.0 %.
TREES: dict[str, Any] = {
    "objective": "huber",
    "alpha": 0.1,
    "n_estimators": 500,
    "learning_rate": 0.04,
    "num_leaves": 63,
    "min_child_samples": 10,
    "colsample_bytree": 0.8,
}
# Knots of key-value heads and of query heads for each: public models lie on these or between two of them.
KV_HEAD_KNOTS = (1, 2, 4, 8, 16, 32, 64, 96)
GROUP_KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96)
# Query heads of the largest models on one device; knots beyond are unmeasured.
MOST_HEADS = 128
_SIZES = ("batch_size", "query_len", "kv_len", "num_heads", "num_kv_heads", "head_dim", "window_size")


@dataclass(frozen=True)
class Physics:
    """Prices rows of some kernels without the learned residual.

    Attributes:
        device: The device.
        record: Its record, without residual.
        dtype: Element format of the GEMMs.
        kv_dtype: Element format of the cache.
    """

    device: Device
    record: CalibrationRecord
    dtype: str
    kv_dtype: str

    def features(self, rows: pd.DataFrame, family: int) -> tuple[Array, Array]:
        """Return times of rows of one library and kernel [s], and their features; shape [rows, features]."""
        sizes = {name: rows[name].to_numpy() for name in _SIZES}
        operation = Attention(
            name="row",
            dtype=self.dtype,
            kv_cache_dtype=self.kv_dtype,
            writes_cache=True,
            v_head_dim=sizes["head_dim"],
            **sizes,
        )
        price = price_attention(
            operation,
            self.device,
            self.record,
            hot_cache=True,
            library=rows.library.iloc[0],
            kernel=rows.kernel.iloc[0],
        )
        batch, keys, heads, kv_heads = (
            np.log2(sizes[name].astype(float)) for name in ("batch_size", "kv_len", "num_heads", "num_kv_heads")
        )
        columns = [batch, keys, heads, kv_heads, batch + kv_heads, batch + heads, heads - kv_heads]
        columns += [batch + kv_heads + keys, batch + heads + 2.0 * keys]
        columns += [sizes["window_size"], sizes["head_dim"], np.full(len(rows), float(family))]
        time_s, compute_s, memory_s = (np.asarray(part) for part in (price.time_s, price.compute_s, price.memory_s))
        columns += [np.log(time_s), np.log(compute_s / np.maximum(memory_s, 1e-12))]
        return time_s, np.stack(columns, axis=1)


def features_of(rows: pd.DataFrame, physics: Physics) -> tuple[Array, Array]:
    """Return times [s] and features of rows of any kernels."""
    times, seen = np.empty(len(rows)), None
    families = sorted(rows.family.unique())
    for (_, _, family), index in rows.groupby(["library", "kernel", "family"]).indices.items():
        times[index], columns = physics.features(rows.iloc[index], families.index(family))
        seen = np.empty((len(rows), columns.shape[1])) if seen is None else seen
        seen[index] = columns
    assert seen is not None
    return times, seen


def predict_left_out(rows: pd.DataFrame, seen: Array, target: Array) -> Array:
    """Return the correction of each row by trees that saw no row of its head layout.

    If all layouts of a kernel fall into one fold, its batch sizes are left out instead, so that its own rows judge it.
    """
    folds = layout_folds(rows)
    for index in rows.groupby(["family", "head_dim"]).indices.values():
        if len(set(folds[index])) == 1:
            folds[index] = fold_of_rows(rows.batch_size.to_numpy()[index])

    def correct_fold(others: Any, left: Any) -> Array:
        if not others.any():
            return np.zeros(len(rows))
        found: Array = fit_trees(seen[others], target[others], TREES).predict(seen[left])
        return found

    return predict_in_turn(folds, correct_fold)


def knots_of(rows: pd.DataFrame) -> dict[str, Array]:
    """Return the grid of the tables of one phase: every measured batch and length, and counts of heads."""
    measured = {name: np.sort(rows[name].unique()).astype(float) for name in ("batch_size", "kv_len")}
    heads = {"num_kv_heads": np.array(KV_HEAD_KNOTS, dtype=float), "group": np.array(GROUP_KNOTS, dtype=float)}
    return heads | measured


def tabulate(
    trees: Any, rows: pd.DataFrame, knots: Mapping[str, Array], physics: Physics, family: int
) -> AttentionResidual:
    """Return the corrections of one kernel at the knots, for each measured window.

    Axes of heads end with the first knot beyond all measured layouts. Batches larger than any measured with as many
    keys keep the value of the largest measured one.
    """
    import pandas as pd

    most = {"num_kv_heads": rows.num_kv_heads.max(), "group": (rows.num_heads / rows.num_kv_heads).max()}
    kept = {
        name: axis[: max(2, np.searchsorted(axis, most[name]) + 1)] if name in most else axis
        for name, axis in knots.items()
    }
    axes = np.meshgrid(*kept.values(), indexing="ij")
    cells = pd.DataFrame({name: axis.reshape(-1) for name, axis in zip(kept, axes, strict=True)})
    cells = cells.assign(
        num_heads=cells.num_kv_heads * cells.group,
        query_len=1.0 if rows.query_len.max() == 1 else cells.kv_len,
        head_dim=float(rows.head_dim.iloc[0]),
        library=rows.library.iloc[0],
        kernel=rows.kernel.iloc[0],
    )
    fits = [_work_of(cells, heads) <= _work_of(rows, heads).max() for heads in ("num_kv_heads", "num_heads")]
    is_measured = (fits[0] & fits[1]).to_numpy().reshape(axes[0].shape)
    tables = {}
    for window in sorted(int(size) for size in rows.window_size.unique()):
        logs = trees.predict(physics.features(cells.assign(window_size=float(window)), family)[1])
        steps = np.clip(np.rint(logs / LOG_STEP), -127, 127).astype(np.int8)
        table = steps.reshape(axes[0].shape)
        for place in range(1, table.shape[2]):
            table[:, :, place] = np.where(is_measured[:, :, place], table[:, :, place], table[:, :, place - 1])
        tables[window] = fade_past_most_heads(table, *list(kept.values())[:2])
    return AttentionResidual(
        knots_log2=tuple(np.log2(axis) for axis in kept.values()),
        windows=tuple(tables),
        log_steps=np.stack(list(tables.values())),
    )


def fade_past_most_heads(table: NDArray[np.int8], kv_heads: Array, groups: Array) -> NDArray[np.int8]:
    """Return the table with knots beyond MOST_HEADS fading from the widest group within, by doubling.

    Args:
        table: Corrections in steps; shape [kv_heads, groups, ...].
        groups: Knots of query heads per key-value head, rising from 1.
    """
    faded = table.copy()
    for row, num_kv_heads in enumerate(kv_heads):
        doublings = np.log2(num_kv_heads * groups / MOST_HEADS)
        within = int(np.flatnonzero(doublings <= 0.0).max())
        for column in range(within + 1, len(groups)):
            share = max(1.0 - doublings[column] / FADE_DOUBLINGS, 0.0)
            faded[row, column] = np.rint(share * table[row, within])
    return faded


def _work_of(rows: pd.DataFrame, heads: str) -> Any:
    """Return keys times sequences times heads: proportional to memory traffic or to work."""
    return rows.batch_size * rows.kv_len * rows[heads]


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
            own_physics_s, measured = physics_s[~held_out][index], part.latency_s.to_numpy()
            if mean_error(left_out_s[index], measured) > WORTHWHILE_RATIO * mean_error(own_physics_s, measured):
                print(self.alias, name, "gets no table", flush=True)
                continue
            ours = ((rows.family == family) & (rows.head_dim == width)).to_numpy()
            table = tabulate(trees, rows[ours], self.knots[phase], physics, families.index(family))
            for window, steps in zip(table.windows, table.log_steps, strict=True):
                self.tables[name, int(window)] = steps
            self.intervals[name] = interval_of(left_out_s[index], measured, AIMED_COVERAGE)
            self.reports[name] = {"left_out": error_summary(left_out_s[index], measured)}
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
