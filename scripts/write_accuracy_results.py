"""Evaluate predictions on measured tables: writes docs/accuracy_results.json and the figures of residuals.

    python scripts/write_accuracy_results.py --data DIR

DIR holds the measured tables. docs/accuracy.md is made from the results and the calibration records; run `make docs`
afterwards. Held-out errors come from the calibration records where these have them; all others are computed here.
Needs the ``fit`` and ``plot`` extras; takes about a minute.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from math import exp
from pathlib import Path
from typing import Any

from accuracy_bars import bars
from coverage_facts import coverage_facts, is_inside
from markdown_parts import DOCS
from residual_facts import (
    FEWEST_ROWS,
    GEMM_DEVICES,
    Curve,
    alignment_curves,
    attention_facts,
    gemm_curves,
    size_curves,
)

from shapewright import __version__
from shapewright.app.figures.chart import PALETTE, Line, Mark, XYChart
from shapewright.app.figures.matplotlib_files import save_chart
from shapewright.measure.accuracy.evaluate import evaluate_folder
from shapewright.measure.fit.shared import round_numbers

RESULTS = DOCS / "accuracy_results.json"
FIGURES = DOCS / "figures"
# Each device has the same colour in every figure.
DEVICE_COLORS = dict(zip((*GEMM_DEVICES, "v100-sxm2-16gb", "mi250x-gcd"), PALETTE, strict=False))
DEVICE_COLORS["a100-sxm-40gb"] = DEVICE_COLORS["a100-sxm-80gb"]
# Tables with a figure of all rows, and the column that distinguishes the lines.
SEEN_TABLES = {"collectives": "device", "pointwise": "part"}
# Tables with a figure of the held-out rows, one line per device.
UNSEEN_TABLES = ("attention_prefill", "attention_decode", "moe")


def error_curves(table: str, word: str, data: Path) -> dict[str, Curve]:
    """Mean error of all rows of a table by measured time; parts of models are grouped by operation."""
    sums: dict[str, dict[float, list[float]]] = {}
    for row in evaluate_folder(data, tables=[table], by=[word, "size"]).rows:
        name = getattr(row, word).split(" ")[-1]
        both = sums.setdefault(name, {}).setdefault(first_second(row.decade), [0.0, 0.0])
        both[0] += row.rows * row.mape
        both[1] += row.rows
    curves = {}
    for name in sorted(sums):
        points = sorted((at, total / rows) for at, (total, rows) in sums[name].items() if rows >= FEWEST_ROWS)
        if points:
            curves[name] = ([at for at, _ in points], [error for _, error in points])
    return curves


def draw_residuals(data: Path) -> None:
    """Draw every figure of residuals."""
    held_out = "held-out rows, mean error by measured time"
    figures = {
        "gemm_bf16": (f"GEMM, bf16: {held_out}", gemm_curves(["bf16"])),
        "gemm_narrow": (f"GEMM, fp8 and fp4: {held_out}", gemm_curves(["fp8", "fp4"])),
        **{
            name: (f"{name.replace('_', ' ')}: {held_out}", size_curves(data, name, "device")) for name in UNSEEN_TABLES
        },
        **{
            name: (f"{name}: all rows, mean error by measured time", error_curves(name, word, data))
            for name, word in SEEN_TABLES.items()
        },
        "gemm_alignment": (
            "the paper's fp16 GEMMs: held-out rows, mean error by the smaller alignment of n and k",
            alignment_curves(data),
        ),
    }
    for name, (title, curves) in figures.items():
        save_chart(
            residual_chart(title, curves, by_time=not name.endswith("alignment")), FIGURES / f"residuals_{name}.svg"
        )


def residual_chart(title: str, curves: Mapping[str, Curve], *, by_time: bool) -> XYChart:
    """Chart of mean errors, one line per curve, over measured time [s] or alignment [byte]."""
    scale, x_label = (1e6, "measured time (us), by decade") if by_time else (1.0, "alignment (byte)")
    errors_of = {name: 100.0 * sum(errors) / len(errors) for name, (_, errors) in curves.items()}
    most_shown = max(100.0 * error for _, errors in curves.values() for error in errors)
    least, most = (pick(errors_of, key=lambda name: errors_of[name]) for pick in (min, max))
    return XYChart(
        title=title,
        x_label=x_label,
        y_label="mean error (%)",
        series=[
            Line(
                name,
                [scale * x for x in at],
                [100.0 * error for error in errors],
                dashed=name.endswith("fp4"),
                color=DEVICE_COLORS.get(name.partition(" ")[0]),
            )
            for name, (at, errors) in curves.items()
        ],
        alt=f"{title}; mean of the points from {errors_of[least]:.0f} % ({least}) to {errors_of[most]:.0f} % ({most})",
        marks=(Mark("y", 10.0, "10 %"),) if most_shown > 10.0 else (),
        x_log=True,
        x_log_base=10 if by_time else 2,
        y_from_zero=True,
    )


def first_second(decade: str) -> float:
    """Middle of a decade such as ``10-100 us``. [s]"""
    numbers, unit = decade.split(" ")
    return float(numbers.split("-")[0]) * 10**0.5 * {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]


def main() -> None:
    """Evaluate, write the results and draw the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the measured tables")
    data = parser.parse_args().data
    together = {row.table: row for row in evaluate_folder(data, by=[]).rows}
    paper = evaluate_folder(data, tables=["paper_layers"], devices=["a100-sxm-40gb"], by=[]).rows
    borrowed = list(evaluate_folder(data, tables=["gemm"], by=["device", "dtype"], uncalibrated=True).rows)
    tables = [
        {
            "table": row.table, "rows": row.rows, "mean": row.mape, "median": row.median_ape, "p90": row.p90_ape,
            "bias": exp(row.bias) - 1.0, "kendall_tau": row.kendall_tau, "coverage_90": row.coverage_90,
            "roofline": row.roofline_mape, "regret_median": row.regret_median, "regret_p90": row.regret_p90,
        }
        for row in together.values()
    ]  # fmt: skip
    coverage = coverage_facts(data, together)
    attention = attention_facts(data)
    content: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "version": __version__,
        "command": "python scripts/write_accuracy_results.py --data DIR",
        "bars": bars(together, borrowed, {row.table: row for row in paper}, coverage, attention),
        "tables": tables,
        "coverage": coverage,
        "attention": attention,
    }
    RESULTS.write_text(json.dumps(round_numbers(content), indent=1) + "\n", encoding="utf-8")
    draw_residuals(data)
    for line in content["bars"]:
        print(" | ".join(line.values()))
    print(
        f"{sum(is_inside(facts['covered']) for facts in coverage)} of {len(coverage)} tables in the range of 85 to 95 %"
    )


if __name__ == "__main__":
    main()
