"""Measured rows with their predictions, contents of stores, and errors of fits and predictions, as text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shapewright.app.report.columns import Column, columns_of, print_table
from shapewright.app.report.outputs.measure import BenchOutput, BenchRow
from shapewright.core.units import (
    GIGA,
    MEGA,
    TERA,
    format_amount,
    format_bytes,
    format_number_of,
    format_percent,
    format_seconds,
)
from shapewright.prediction.model_runs import LayerRun, StepRun

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.app.report.outputs.measure import CalibrateOutput, StoreContentsOutput
    from shapewright.lowering.operations.operation import Operation
    from shapewright.measure.accuracy.evaluate import Evaluation
    from shapewright.measure.store.record import Row


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
# Waiting for a core is reported above this share of a call.
_REPORTED_WAIT_FRACTION = 0.02
# Latest rounds of a calibration whose errors are printed.
_SHOWN_ROUNDS = 6
# Longer lists are cut; 'store show' lists all rows.
MOST_SHOWN = 60


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
    words = f"{format_number_of(summary.num_measured, 'row')} measured in {format_seconds(summary.wall_s)}"
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
    """Errors on GEMMs before they were measured."""
    rounds = summary.calibration_rounds
    for dtype in dict.fromkeys(each.dtype for each in rounds):
        own = [each for each in rounds if each.dtype == dtype]
        errors = ", ".join(f"{format_percent(each.mean_error)} after {each.num_rows}" for each in own[-_SHOWN_ROUNDS:])
        yield f"{dtype} GEMMs, predicted before they were measured: {errors} rows"


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


def _rate_words(entry: BenchRow, amount: float, unit: float) -> str:
    """A rate over the measured time, in three digits."""
    return format_amount(amount / entry.row.median_s / unit) if entry.row.median_s and amount else ""


def _spread_words(row: Row) -> str:
    return (
        format_percent(row.ci_half_width_s / row.median_s) if row.median_s and row.ci_half_width_s is not None else ""
    )


def _difference_words(entry: BenchRow) -> str:
    measured_s, predicted_s = entry.row.median_s, entry.predicted_s
    return _signed(predicted_s / measured_s - 1.0) if measured_s and predicted_s else ""


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
        words.append(f"{format_amount(sizes.get('message_bytes', row.num_bytes) / MEGA)} MB")
    if row.kind in ("layer", "step", "proxy"):
        fields = {**sizes["config"], **sizes["workload"]}
        shown = {name: letter for name, letter in _SHAPE_LETTERS.items() if name in fields and fields[name] != 1}
        words += [f"{letter}={fields[name]}".lstrip("=") for name, letter in shown.items()]
    if row.kind == "proxy":
        words += [f"seed={row.repetition}", f"{sizes['training']['trained_tokens'] / 1e6:.4g} M tokens"]
    return " ".join(words)


def _signed(fraction: float) -> str:
    return f"{100.0 * fraction:+.1f} %"


_COLUMNS = (
    Column("operation", lambda entry: f"{entry.row.name} {entry.row.variant}".strip(), is_text=True),
    Column("sizes", lambda entry: _sizes(entry.row), rank=1, is_text=True),
    Column("dtype", "{row.dtype}", rank=5, is_text=True),
    Column("layout", "{row.layout}", rank=3, is_text=True),
    Column("times", lambda entry: str(entry.repeats or ""), rank=4),
    Column("measured", lambda entry: format_seconds(entry.row.median_s) if entry.row.median_s else ""),
    Column("+-", lambda entry: _spread_words(entry.row), rank=2),
    Column("predicted", lambda entry: format_seconds(entry.predicted_s) if entry.predicted_s else ""),
    Column("off", _difference_words, rank=1),
    Column("TFLOP/s", lambda entry: _rate_words(entry, entry.row.flops, TERA), rank=2),
    Column("GB/s", lambda entry: _rate_words(entry, entry.row.num_bytes, GIGA), rank=3),
    Column("launch", "{row.launch_s}", rank=4),
    Column("memory", lambda entry: _memory(entry.row.figures), rank=2),
    Column("planned", lambda entry: _memory(entry.predicted_figures), rank=2),
    Column("remark", lambda entry: _remark(entry.row), rank=1, is_text=True),
)


def _remark(row: Row) -> str:
    return f"{row.status}: {row.error}" if row.error else _loss(row.figures)


def print_rows(rows: Sequence[BenchRow], console: Console, *, most: int | None = MOST_SHOWN) -> None:
    """Print a table of rows; failed ones have the reason.

    Args:
        most: Largest number of rows to print.
    """
    shown = rows[:most]
    print_table([column for column in columns_of(shown, _COLUMNS) if any(column.cells)], console)
    if len(rows) > len(shown):
        console.print(f"{len(rows) - len(shown)} more rows; 'shapewright store show PATH' lists all", soft_wrap=True)


_CONTENTS_COLUMNS = (
    Column("suite", "{suite}", is_text=True),
    Column("device", "{device}", is_text=True),
    Column("kind", "{kind}", is_text=True),
    Column("dtype", "{dtype}", is_text=True),
    Column("rows", "{rows:,}"),
    Column("failed", lambda group: f"{group.failed:,}" if group.failed else "", rank=1),
    Column("median from", "{least_s}", rank=1),
    Column("to", "{most_s}", rank=1),
    Column("GFLOP from", lambda group: format_amount(group.least_flops / GIGA) if group.most_flops else "", rank=3),
    Column("to", lambda group: format_amount(group.most_flops / GIGA) if group.most_flops else "", rank=3),
    Column("last measured", lambda group: group.last_utc[:16].replace("T", " "), rank=2, is_text=True),
    Column("library", "{library}", rank=4, is_text=True),
)


def print_contents(contents: StoreContentsOutput, console: Console) -> None:
    """Print one line per group, and one for the whole store."""
    if contents.groups:
        print_table(columns_of(contents.groups, _CONTENTS_COLUMNS), console)
    total = sum(contents.statuses.values())
    words = ", ".join(f"{number:,} {status}" for status, number in sorted(contents.statuses.items()))
    console.print(
        f"{contents.path}: {format_number_of(total, 'row')}{f' ({words})' if words else ''} of "
        f"{format_number_of(contents.num_runs, 'run')}, {format_bytes(contents.file_bytes)}, schema version "
        f"{contents.store_schema_version}",
        soft_wrap=True,
    )


_FIT_COLUMNS = (
    Column("records", "{kind}", is_text=True),
    Column("part", "{part}", is_text=True),
    Column("held-out rows", "{rows:,}"),
    Column("mean error", "{mape}"),
    Column("median", "{median_ape}", rank=1),
    Column("p90", "{p90_ape}", rank=1),
    Column("bias", "{bias:+.3f}", rank=1),
)


def print_calibration(found: CalibrateOutput, console: Console) -> None:
    """Print held-out errors, assumptions, and how to use the file."""
    print_table(columns_of(found.errors, _FIT_COLUMNS), console)
    for remark in found.remarks:
        console.print(f"note: {remark}", soft_wrap=True)
    console.print(
        f"wrote {found.output}; use it with --device {found.device} --calibration {found.output}", soft_wrap=True
    )


_WORDS = (
    Column("table", "{table}", is_text=True),
    Column("device", "{device}", is_text=True),
    Column("dtype", "{dtype}", is_text=True),
    Column("library", "{library}", rank=2, is_text=True),
)
_EXTRA_WORDS = {
    "part": Column("part", "{part}", rank=1, is_text=True),
    "decade": Column("measured time", "{decade}", is_text=True),
    "file": Column("file", "{file}", is_text=True),
}
# covered: interval coverage; roofline: mean error of the roofline bound.
_FIGURES = (
    Column("rows", "{rows:,}"),
    Column("mean error", "{mape}"),
    Column("median", "{median_ape}", rank=2),
    Column("p90", "{p90_ape}", rank=2),
    Column("bias (ln)", "{bias:+.3f}", rank=1),
    Column("Kendall tau", "{kendall_tau:.3f}"),
    Column("covered", "{coverage_90:percent}", rank=1),
    Column("roofline", "{roofline_mape}", rank=1),
)
# Slowdown of the shape predicted to be best over the best measured one of its size.
_REGRETS = (
    Column("sizes", lambda row: "" if row.regret_median is None else f"{row.regret_groups:,}"),
    Column("regret", "{regret_median:percent}"),
    Column("regret p90", "{regret_p90:percent}"),
)
# Errors of losses; differences between models of one size, and share of them in the right order.
_LOSSES = (
    Column("nats", "{mean_error_nats:.4f}"),
    Column("difference", "{difference_error_nats:.4f}"),
    Column("in order", "{order_fraction}"),
)
# Reasons for skipped rows that are listed per table; the others are counted.
_MOST_REASONS = 20


def print_accuracy(evaluation: Evaluation, console: Console, *, regret: bool = False) -> None:
    """Print the table and its remarks."""
    extra = separating_words(evaluation)
    losses = any(row.mean_error_nats is not None for row in evaluation.rows)
    headings = (
        *_WORDS,
        *(_EXTRA_WORDS[key] for key in extra),
        *_FIGURES,
        *(_LOSSES if losses else ()),
        *(_REGRETS if regret else ()),
    )
    print_table(columns_of(evaluation.rows, headings), console)
    for line in remark_lines(evaluation):
        console.print(line, soft_wrap=True)


def remark_lines(evaluation: Evaluation) -> list[str]:
    """Notes, skipped rows with their reasons, and files that could not be evaluated."""
    lines = [f"note: {note}" for note in evaluation.notes]
    for table, reasons in evaluation.skipped.items():
        listed = list(reasons.items())
        lines += [f"{table}: skipped {count:,} {_rows(count)}: {reason}" for reason, count in listed[:_MOST_REASONS]]
        rest = listed[_MOST_REASONS:]
        if rest:
            total = sum(count for _, count in rest)
            lines.append(f"{table}: skipped {total:,} rows for {len(rest)} other reasons, such as: {rest[0][0]}")
    lines += [f"{table}: not evaluated: {reason}" for table, reason in evaluation.unreadable.items()]
    return lines


def _rows(count: int) -> str:
    return "row" if count == 1 else "rows"


def separating_words(evaluation: Evaluation) -> tuple[str, ...]:
    """Columns that tell apart rows of one table: part and decade where used, and the file where there are several."""
    separating = [key for key in ("part", "decade") if any(getattr(row, key) != "all" for row in evaluation.rows)]
    files = {(row.table, row.file) for row in evaluation.rows}
    return (*separating, *(["file"] if len(files) > len({table for table, _ in files}) else []))
