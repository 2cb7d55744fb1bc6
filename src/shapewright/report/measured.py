"""Measured rows as text and JSON, beside what is predicted for the same operations."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shapewright.errors import ShapewrightError
from shapewright.perf.pricing import price_operations
from shapewright.predict import predict
from shapewright.report.columns import Column, columns_of, print_table
from shapewright.units import GIGA, TERA, format_bytes, format_percent, format_seconds
from shapewright.whole import LayerRun, StepRun

if TYPE_CHECKING:
    from rich.console import Console

    from shapewright.hardware import Device
    from shapewright.operations import Operation

# Sizes of a row that are shown, with the letters that say which they are.
_SHOWN = {
    "gemm": ("batch", "m", "n", "k"),
    "grouped_gemm": ("groups", "m", "n", "k"),
    "attention": ("batch_size", "query_len", "kv_len", "num_heads", "num_kv_heads", "head_dim"),
    "pointwise": ("operation", "row_width"),
    "collective": ("op_name", "num_ranks"),
    "layer": ("passes",),
    "step": (),
}
# Of a layer or step, fields of its config and workload that are shown, with their letters.
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
# Waiting for a core is told where it took more than this share of a call.
_TOLD_WAIT_FRACTION = 0.02
# Longer lists are cut on a screen; the store shows all.
MOST_SHOWN = 60


def predict_rows_s(operations: Sequence[Operation | LayerRun | StepRun], device: Device | None) -> list[float | None]:
    """Predicted time of each operation, None where the device has no price for it. [s]"""
    if device is None:
        return [None] * len(operations)
    found: list[float | None] = []
    for operation in operations:
        try:
            found.append(_predict_s(operation, device))
        except ShapewrightError:
            found.append(None)
    return found


def _predict_s(operation: Operation | LayerRun | StepRun, device: Device) -> float:
    """Predicted time of one operation, of one layer, or of one step. [s]"""
    if isinstance(operation, StepRun):
        config, workload = operation.question()
        return predict(config, device=device, workload=workload).step_time_s
    if isinstance(operation, LayerRun):
        listed = operation.operations()
        prices = price_operations(listed, device)
        return sum(float(price.time_s) * int(entry.repeats) for price, entry in zip(prices, listed, strict=True))
    return float(price_operations([operation], device)[0].time_s)


def print_rows(rows: Sequence[Mapping[str, Any]], console: Console, *, most: int | None = MOST_SHOWN) -> None:
    """Print a table of rows; those that failed say why.

    Args:
        rows: Rows as Row.to_json gives them, with ``predicted_s`` and ``repeats`` where there are any.
        console: Where to.
        most: Rows to print at most.
    """
    shown = rows[:most]
    columns = columns_of([_cells(row) for row in shown], _COLUMNS)
    print_table([column for column in columns if any(column.cells)], console)
    if len(rows) > len(shown):
        console.print(f"{len(rows) - len(shown)} more rows; 'shapewright store show PATH' lists all", soft_wrap=True)


def reading_order(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """Sort key that puts rows of one sweep beside each other, smallest first."""
    numbers = tuple(value for value in row["sizes"].values() if isinstance(value, int | float))
    return row["kind"], row["name"], row["variant"], row["dtype"], row["layout"], numbers, row["repetition"]


def estimate_row_figures(operation: Operation | LayerRun | StepRun) -> dict[str, float]:
    """What the memory planner says of the figures that are measured beside the time."""
    return operation.estimate_figures() if isinstance(operation, LayerRun | StepRun) else {}


def repeatability(rows: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    """By how much medians of the same thing, measured more than once, differ; None where nothing was.

    Returns:
        num_pairs, and the median and the largest difference over the smaller of two.
    """
    first: dict[str, float] = {}
    differences = []
    for row in sorted((row for row in rows if row["median_s"]), key=lambda row: row["repetition"]):
        same = json.dumps([row["kind"], row["dtype"], row["layout"], row["variant"], row["sizes"]], sort_keys=True)
        if same in first and row["repetition"]:
            low_s, high_s = sorted((first[same], row["median_s"]))
            differences.append(high_s / low_s - 1.0)
        first.setdefault(same, row["median_s"])
    if not differences:
        return None
    return {
        "num_pairs": len(differences),
        "median_fraction": statistics.median(differences),
        "largest_fraction": max(differences),
    }


def best_rates(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Highest rate of a product, by element format. [flop/s]"""
    rates: dict[str, float] = {}
    for row in rows:
        if row["kind"] == "gemm" and row["median_s"]:
            rates[row["dtype"]] = max(rates.get(row["dtype"], 0.0), row["flops"] / row["median_s"])
    return rates


def summary_lines(summary: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], store_path: str) -> Iterator[str]:
    """What a call of the bench came to, in a few lines."""
    words = f"{summary['num_measured']} rows measured in {format_seconds(summary['wall_s'])}"
    if summary["rows_per_min"]:
        words += f" ({summary['rows_per_min']:.0f} a minute)"
    if summary["num_bad"]:
        words += f", {summary['num_bad']} of them failed or wrong"
    words += f", {summary['num_known']} known before"
    if summary["num_left"]:
        words += f", {summary['num_left']} left for a larger --budget"
    if summary["num_left_out"]:
        words += f", {summary['num_left_out']} too large for this device"
    yield f"{words}; all in {store_path}"
    if summary["overhead_fraction"] is not None:
        words = (
            f"the device worked for {format_seconds(summary['kernels_s'])} of it; preparing, checking and storing took "
            f"{format_percent(summary['overhead_fraction'])} of that besides"
        )
        if summary["waited_s"] > _TOLD_WAIT_FRACTION * summary["wall_s"]:
            words += f"; {format_seconds(summary['waited_s'])} went by waiting for a core that others used"
        yield words
    same = summary["repeatability"]
    if same:
        yield (
            f"the same thing measured twice: medians differ by {format_percent(same['median_fraction'])} in the median "
            f"of {same['num_pairs']} pairs, by {format_percent(same['largest_fraction'])} at most"
        )
    kept = [
        row["predicted_figures"]["activation_bytes"] / row["figures"]["activation_bytes"] - 1.0
        for row in rows
        if "activation_bytes" in row["figures"] and "activation_bytes" in row["predicted_figures"]
    ]
    if kept:
        yield (
            f"activations: the planner's bytes are {_signed(statistics.median(kept))} off those that autograd kept, in "
            f"the median of {len(kept)} layers ({_signed(min(kept))} to {_signed(max(kept))})"
        )
    for dtype, rate in summary["best_flops_per_s"].items():
        yield f"best rate of a product in {dtype}: {rate / TERA:.4g} TFLOP/s"
    timed = [row for row in rows if row["median_s"] is not None]
    if not timed:
        return
    num_cold = sum(row["is_cold"] for row in timed)
    yield f"inputs rotate; in {num_cold} of {len(timed)} rows they exceed the cache, the others may read from it"


def step_line(rows: Sequence[Mapping[str, Any]]) -> str:
    """Measured and predicted time of what was measured of a step, in one line."""
    timed = [row for row in rows if row["median_s"]]
    measured_s = sum(row["median_s"] * row["repeats"] for row in timed)
    line = f"measured operations of one step: {format_seconds(measured_s)}"
    priced = [row for row in timed if row.get("predicted_s")]
    if priced:
        predicted_s = sum(row["predicted_s"] * row["repeats"] for row in priced)
        same_s = sum(row["median_s"] * row["repeats"] for row in priced)
        line += f"; predicted {format_seconds(predicted_s)} ({_signed(predicted_s / same_s - 1.0)})"
    return line


def _cells(row: Mapping[str, Any]) -> list[str]:
    median_s, predicted_s = row["median_s"], row.get("predicted_s")
    timed = bool(median_s)
    return [
        f"{row['name']} {row['variant']}".strip(),
        _sizes(row),
        row["dtype"],
        row["layout"],
        f"{row['repeats']}" if row.get("repeats") else "",
        format_seconds(median_s) if timed else "",
        format_percent(row["ci_half_width_s"] / median_s) if timed and row["ci_half_width_s"] is not None else "",
        format_seconds(predicted_s) if predicted_s else "",
        _signed(predicted_s / median_s - 1.0) if timed and predicted_s else "",
        f"{row['flops'] / median_s / TERA:.3g}" if timed and row["flops"] else "",
        f"{row['num_bytes'] / median_s / GIGA:.3g}" if timed else "",
        format_seconds(row["launch_s"]) if row["launch_s"] is not None else "",
        *(_memory(row.get(name)) for name in ("figures", "predicted_figures")),
        f"{row['status']}: {row['error']}" if row["error"] else "",
    ]


def _memory(figures: Mapping[str, float] | None) -> str:
    """What a layer keeps, or else the peak of a step."""
    for name in ("activation_bytes", "peak_memory_bytes"):
        if figures and name in figures:
            return format_bytes(figures[name])
    return ""


def _sizes(row: Mapping[str, Any]) -> str:
    sizes = row["sizes"]
    words = []
    for name in _SHOWN.get(row["kind"], tuple(sizes)):
        value = sizes.get(name)
        if value is None or (name == "batch" and value == 1):
            continue
        words.append(f"{_LETTERS.get(name, name)}={value}".lstrip("="))
    if row["kind"] in ("pointwise", "collective"):
        words.append(f"{sizes.get('message_bytes', row['num_bytes']) / 1e6:.3g} MB")
    if row["kind"] in ("layer", "step"):
        fields = {**sizes["config"], **sizes["workload"]}
        shown = {name: letter for name, letter in _SHAPE_LETTERS.items() if name in fields and fields[name] != 1}
        words += [f"{letter}={fields[name]}".lstrip("=") for name, letter in shown.items()]
    return " ".join(words)


def _signed(fraction: float) -> str:
    return f"{100.0 * fraction:+.1f} %"
