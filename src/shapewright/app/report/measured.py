"""Measured rows with their predictions, contents of stores, and errors of fits, as text."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shapewright.app.report.columns import Column, columns_of, print_table
from shapewright.app.report.outputs.measure import BenchOutput, BenchRow
from shapewright.core.units import GIGA, TERA, format_bytes, format_percent, format_seconds
from shapewright.prediction.model_runs import LayerRun, StepRun

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.app.report.outputs.measure import CalibrateOutput, FitError
    from shapewright.lowering.operations import Operation
    from shapewright.measure.store.record import Row
    from shapewright.measure.store.summary import RowGroup, StoreSummary

# Sizes of a row that are shown.
_SHOWN = {
    "gemm": ("batch", "m", "n", "k"),
    "grouped_gemm": ("groups", "m", "n", "k"),
    "attention": ("batch_size", "query_len", "kv_len", "num_heads", "num_kv_heads", "head_dim"),
    "pointwise": ("operation", "row_width"),
    "collective": ("op_name", "num_ranks"),
    "layer": ("passes",),
    "step": (),
    "proxy": (),
}
# Fields of the config and workload of a layer or step that are shown, with their symbols.
_SHAPE_LETTERS = {
    "phase": "", "hidden_size": "h", "num_layers": "L", "num_heads": "a", "num_kv_heads": "a_kv",
    "intermediate_size": "f", "vocab_size": "v", "micro_batch_size": "b", "seq_len": "s", "context_len": "c",
    "attention": "", "hidden_dropout": "dropout",
}  # fmt: skip
_LETTERS = {
    "batch_size": "b", "query_len": "s", "kv_len": "keys", "num_heads": "a", "num_kv_heads": "a_kv", "head_dim": "d",
    "groups": "E", "row_width": "width", "operation": "", "op_name": "", "num_ranks": "ranks", "passes": "",
}  # fmt: skip
_COLUMNS = (
    Column("operation", is_text=True),
    Column("sizes", rank=1, is_text=True),
    Column("dtype", rank=5, is_text=True),
    Column("layout", rank=3, is_text=True),
    Column("times", rank=4),
    Column("measured"),
    Column("+-", rank=2),
    Column("predicted"),
    Column("off", rank=1),
    Column("TFLOP/s", rank=2),
    Column("GB/s", rank=3),
    Column("launch", rank=4),
    Column("memory", rank=2),
    Column("planned", rank=2),
    Column("remark", rank=1, is_text=True),
)
# Waiting for a core is reported above this share of a call.
_REPORTED_WAIT_FRACTION = 0.02
# Latest rounds of a calibration whose errors are printed.
_SHOWN_ROUNDS = 6
# Longer lists are cut; 'store show' lists all rows.
MOST_SHOWN = 60


def print_rows(rows: Sequence[BenchRow], console: Console, *, most: int | None = MOST_SHOWN) -> None:
    """Print a table of rows; failed ones have the reason.

    Args:
        rows: The rows.
        console: Console to print on.
        most: Largest number of rows to print.
    """
    shown = rows[:most]
    columns = columns_of([_cells(row) for row in shown], _COLUMNS)
    print_table([column for column in columns if any(column.cells)], console)
    if len(rows) > len(shown):
        console.print(f"{len(rows) - len(shown)} more rows; 'shapewright store show PATH' lists all", soft_wrap=True)


def reading_order(entry: BenchRow) -> tuple[Any, ...]:
    """Sort key that groups the rows of a sweep, smallest sizes first."""
    row = entry.row
    numbers = tuple(value for value in row.sizes.values() if isinstance(value, int | float))
    return row.kind, row.name, row.variant, row.dtype, row.layout, numbers, row.repetition


def estimate_row_figures(operation: Operation | LayerRun | StepRun) -> dict[str, float]:
    """Predicted values of the quantities that are measured in addition to the time."""
    return operation.estimate_figures() if isinstance(operation, LayerRun | StepRun) else {}


def summary_lines(summary: BenchOutput) -> Iterator[str]:
    """Summary of a call of the benchmark, in a few lines."""
    rows = summary.rows
    words = f"{summary.num_measured} rows measured in {format_seconds(summary.wall_s)}"
    if summary.rows_per_min:
        words += f" ({summary.rows_per_min:.0f} per minute)"
    if summary.num_bad:
        words += f", {summary.num_bad} of them failed or wrong"
    if summary.num_unstored:
        words += f", {summary.num_unstored} not stored, since another process had stored the same cases"
    words += f", {summary.num_known} already stored"
    if summary.num_left:
        words += f", {summary.num_left} left for a larger --budget"
    if summary.num_left_out:
        words += f", {summary.num_left_out} too large for this device"
    yield f"{words}; all in {summary.store}"
    if summary.overhead_fraction is not None:
        words = (
            f"the device was busy for {format_seconds(summary.kernels_s)}; preparation, checks and storage added "
            f"{format_percent(summary.overhead_fraction)} of that"
        )
        if summary.waited_s > _REPORTED_WAIT_FRACTION * summary.wall_s:
            words += f"; {format_seconds(summary.waited_s)} were spent waiting for a core"
        yield words
    same = summary.repeatability
    if same:
        yield (
            f"repeated measurements: medians differ by {format_percent(same.median_fraction)} in the median "
            f"of {same.num_pairs} pairs, by {format_percent(same.largest_fraction)} at most"
        )
    kept = [
        entry.predicted_figures["activation_bytes"] / entry.row.figures["activation_bytes"] - 1.0
        for entry in rows
        if "activation_bytes" in entry.row.figures and "activation_bytes" in entry.predicted_figures
    ]
    if kept:
        yield (
            f"activations: predicted bytes differ by {_signed(statistics.median(kept))} from those autograd saved, in "
            f"the median of {len(kept)} layers ({_signed(min(kept))} to {_signed(max(kept))})"
        )
    for dtype, rate in summary.best_flops_per_s.items():
        yield f"best rate of a GEMM in {dtype}: {rate / TERA:.4g} TFLOP/s"
    yield from _calibration_lines(summary)
    timed = [entry.row for entry in rows if entry.row.median_s is not None]
    if not timed:
        return
    num_cold = sum(row.is_cold for row in timed)
    yield f"inputs rotate; in {num_cold} of {len(timed)} rows they exceed the cache, other rows may read from it"


def _calibration_lines(summary: BenchOutput) -> Iterator[str]:
    """Errors on GEMMs before they were measured, and what to do with the rows."""
    rounds = summary.calibration_rounds
    for dtype in dict.fromkeys(each.dtype for each in rounds):
        own = [each for each in rounds if each.dtype == dtype]
        errors = ", ".join(f"{format_percent(each.mean_error)} after {each.num_rows}" for each in own[-_SHOWN_ROUNDS:])
        yield f"{dtype} GEMMs, predicted before they were measured: {errors} rows"
    if rounds:
        yield f"next: shapewright calibrate --store {shlex.quote(summary.store)} -o calibration.json"


def step_line(rows: Sequence[BenchRow]) -> str:
    """Measured and predicted time of the measured operations of a step, in one line."""
    times_s = [(entry.row.median_s or 0.0, entry.predicted_s, entry.repeats or 0) for entry in rows]
    timed = [one for one in times_s if one[0]]
    line = f"measured operations of one step: {format_seconds(sum(measured_s * n for measured_s, _, n in timed))}"
    priced = [(measured_s, predicted_s, n) for measured_s, predicted_s, n in timed if predicted_s]
    if priced:
        predicted_s = sum(predicted_s * n for _, predicted_s, n in priced)
        same_s = sum(measured_s * n for measured_s, _, n in priced)
        line += f"; predicted {format_seconds(predicted_s)} ({_signed(predicted_s / same_s - 1.0)})"
    return line


def _cells(entry: BenchRow) -> list[str]:
    row, predicted_s = entry.row, entry.predicted_s
    median_s = row.median_s or 0.0
    return [
        f"{row.name} {row.variant}".strip(),
        _sizes(row),
        row.dtype,
        row.layout,
        f"{entry.repeats}" if entry.repeats else "",
        format_seconds(median_s) if median_s else "",
        format_percent(row.ci_half_width_s / median_s) if median_s and row.ci_half_width_s is not None else "",
        format_seconds(predicted_s) if predicted_s else "",
        _signed(predicted_s / median_s - 1.0) if median_s and predicted_s else "",
        f"{row.flops / median_s / TERA:.3g}" if median_s and row.flops else "",
        f"{row.num_bytes / median_s / GIGA:.3g}" if median_s else "",
        format_seconds(row.launch_s) if row.launch_s is not None else "",
        _memory(row.figures),
        _memory(entry.predicted_figures),
        f"{row.status}: {row.error}" if row.error else _loss(row.figures),
    ]


def _memory(figures: Mapping[str, float]) -> str:
    """Activations of a layer, or else the peak of a step."""
    for name in ("activation_bytes", "peak_memory_bytes"):
        if name in figures:
            return format_bytes(figures[name])
    return ""


def _loss(figures: Mapping[str, float]) -> str:
    return f"loss {figures['loss_nats']:.4f}" if "loss_nats" in figures else ""


def _sizes(row: Row) -> str:
    sizes = row.sizes
    words = []
    for name in _SHOWN.get(row.kind, tuple(sizes)):
        value = sizes.get(name)
        if value is None or (name == "batch" and value == 1):
            continue
        words.append(f"{_LETTERS.get(name, name)}={value}".lstrip("="))
    if row.kind in ("pointwise", "collective"):
        words.append(f"{sizes.get('message_bytes', row.num_bytes) / 1e6:.3g} MB")
    if row.kind in ("layer", "step", "proxy"):
        fields = {**sizes["config"], **sizes["workload"]}
        shown = {name: letter for name, letter in _SHAPE_LETTERS.items() if name in fields and fields[name] != 1}
        words += [f"{letter}={fields[name]}".lstrip("=") for name, letter in shown.items()]
    if row.kind == "proxy":
        words += [f"seed={row.repetition}", f"{sizes['training']['trained_tokens'] / 1e6:.4g} M tokens"]
    return " ".join(words)


def _signed(fraction: float) -> str:
    return f"{100.0 * fraction:+.1f} %"


_CONTENTS_COLUMNS = (
    Column("suite", is_text=True),
    Column("device", is_text=True),
    Column("kind", is_text=True),
    Column("dtype", is_text=True),
    Column("rows"),
    Column("failed", rank=1),
    Column("median from", rank=1),
    Column("to", rank=1),
    Column("GFLOP from", rank=3),
    Column("to", rank=3),
    Column("last measured", rank=2, is_text=True),
    Column("library", rank=4, is_text=True),
)


def print_contents(contents: StoreSummary, console: Console) -> None:
    """Print one line per group, and one for the whole store."""
    if contents.groups:
        print_table(columns_of((_group_cells(group) for group in contents.groups), _CONTENTS_COLUMNS), console)
    total = sum(contents.statuses.values())
    words = ", ".join(f"{number:,} {status}" for status, number in sorted(contents.statuses.items()))
    console.print(
        f"{contents.path}: {total:,} rows{f' ({words})' if words else ''} of {contents.num_runs} runs, "
        f"{format_bytes(contents.file_bytes)}, schema version {contents.schema_version}",
        soft_wrap=True,
    )


def _group_cells(group: RowGroup) -> list[str]:
    return [
        group.suite,
        group.device,
        group.kind,
        group.dtype,
        f"{group.rows:,}",
        f"{group.failed:,}" if group.failed else "",
        "" if group.least_s is None else format_seconds(group.least_s),
        "" if group.most_s is None else format_seconds(group.most_s),
        f"{group.least_flops / 1e9:.3g}" if group.most_flops else "",
        f"{group.most_flops / 1e9:.3g}" if group.most_flops else "",
        group.last_utc[:16].replace("T", " "),
        group.library,
    ]


_FIT_COLUMNS = (
    Column("records", is_text=True),
    Column("part", is_text=True),
    Column("held-out rows"),
    Column("mean error"),
    Column("median", rank=1),
    Column("p90", rank=1),
    Column("bias", rank=1),
)


def print_calibration(found: CalibrateOutput, console: Console) -> None:
    """Print held-out errors, assumptions, and how to use the file."""
    print_table(columns_of((_fit_cells(error) for error in found.errors), _FIT_COLUMNS), console)
    for remark in found.remarks:
        console.print(f"note: {remark}", soft_wrap=True)
    console.print(
        f"wrote {found.output}; use it with --device {found.device} --calibration {found.output}", soft_wrap=True
    )


def _fit_cells(error: FitError) -> list[str]:
    return [
        error.kind,
        error.part,
        f"{error.rows:,}",
        format_percent(error.mape),
        format_percent(error.median_ape),
        format_percent(error.p90_ape),
        f"{error.bias:+.3f}",
    ]
