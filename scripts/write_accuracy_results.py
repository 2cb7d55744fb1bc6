"""Judge the package on measured tables and keep what came out: docs/accuracy_results.json, and figures of residuals.

    python scripts/write_accuracy_results.py --data DIR

DIR holds the measured tables. The page docs/accuracy.md is made of this file and of the records; run `make docs`
afterwards. Where a record's fit has left rows out, their errors are taken from the record; the rest is judged here.
Needs the ``fit`` and ``plot`` extras; about a minute.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
from accuracy_page import accuracy_facts
from attention_rows import PHASES
from calibration import argument_parser
from coverage_facts import coverage_facts, is_inside
from residual_facts import FEWEST_ROWS, Curve, alignment_curves, attention_facts, gemm_curves, size_curves

from shapewright import __version__
from shapewright.accuracy import Accuracy, judge_folder
from shapewright.hardware import load_device
from shapewright.perf.calibration import load_record
from shapewright.perf.software import TUNED, UNNAMED, load_software, software_names
from shapewright.report.charts import Line, Mark, XYChart
from shapewright.report.matplotlib_charts import save_chart

DOCS = Path(__file__).resolve().parent.parent / "docs"
RESULTS = DOCS / "accuracy_results.json"
FIGURES = DOCS / "figures"
GEMM_DEVICES = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb")
PAPER_DEVICES = ("a100-sxm-80gb", "v100-sxm2-16gb", "mi250x-gcd")
# Tables with a figure of all of their rows: file name, and what the lines tell apart.
SEEN_TABLES = {"collectives": "device", "pointwise": "part"}
# Tables with a figure of the rows that no fit saw, a line for each device.
UNSEEN_TABLES = ("attention_prefill", "attention_decode", "moe")


def percent(value: float) -> str:
    """A fraction as words."""
    return f"{100.0 * value:.1f} %"


def span(values: Iterable[float]) -> str:
    """Smallest and largest of some errors."""
    found = sorted(values)
    low, high = percent(found[0]), percent(found[-1])
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def held_out(operation: str, sections: str = "", device: str = "") -> dict[str, float]:
    """Mean error of a record's left-out rows by device, over its sections with this ending or beginning."""
    sums: dict[str, list[float]] = {}
    for fact in accuracy_facts():
        if fact["operation"] != operation or (device and fact["device"] != device):
            continue
        if sections and not (fact["section"].startswith(sections) or fact["section"].endswith(sections)):
            continue
        both = sums.setdefault(fact["device"], [0.0, 0.0])
        both[0] += fact["rows"] * fact["mean"]
        both[1] += fact["rows"]
    return {name: total / rows for name, (total, rows) in sums.items()}


def attention_spans(attention: list[dict[str, Any]], key: str) -> str:
    """Least and largest mean error over the devices, prefill and decode."""
    means = [(each["phase"], each["mean"] if key == "mean" else each[key]["mean"]) for each in attention]
    return "; ".join(span(mean for found, mean in means if found == phase) for phase in PHASES)


def training_errors(*, has_experts: bool) -> dict[str, tuple[float, int]]:
    """Mean error and rows of models that each generation's fit left out, of dense models or of mixtures of experts."""
    reports = {
        name: load_software(name).provenance["reports"]["held out"]
        for name in software_names()
        if name not in (TUNED, UNNAMED) and ("moe" in name) == has_experts
    }
    return {name: (report["mean_absolute_error"], report["rows"]) for name, report in reports.items()}


def describe_training(table: str, rows: dict[str, Accuracy], *, has_experts: bool) -> str:
    """Mean error of models left out, all and by generation, and the order of all rows."""
    found = training_errors(has_experts=has_experts)
    together = sum(error * count for error, count in found.values()) / sum(count for _, count in found.values())
    each = ", ".join(f"{name} {percent(error)}" for name, (error, _) in found.items())
    return f"{percent(together)} ({each}), tau {rows[table].kendall_tau or 0.0:.2f}"


def ranking_regrets() -> list[dict[str, Any]]:
    """Ranking regret of bf16 products by device and library, each shape priced by a fit that left it out."""
    found = []
    for device in (*GEMM_DEVICES, "l40s"):
        section = load_record("gemm", load_device(device)).provenance["sections"]["bf16"]
        found += [facts["ranking_regret"] for facts in section["libraries"].values()]
    return found


def bars(
    rows: dict[str, Accuracy],
    borrowed: list[Accuracy],
    paper: dict[str, Accuracy],
    coverage: list[dict[str, Any]],
    attention: list[dict[str, Any]],
) -> list[dict[str, str]]:
    """The table of the design: what, judged on, bar, aim, reached.

    Args:
        rows: Errors by table, devices together.
        borrowed: Errors by device and dtype, as if nobody had measured them.
        paper: Errors of the paper's layers on A100, by table.
        coverage: Coverage and width of intervals, table by table.
        attention: Errors on unseen head layouts, by device and phase.
    """
    bf16 = {
        fact["device"]: fact["mean"]
        for fact in accuracy_facts()
        if fact["operation"] == "gemm" and fact["section"] == "bf16"
    }
    by_library = {
        (fact["device"], fact["section"]): fact["mean"]
        for fact in accuracy_facts()
        if fact["operation"] == "gemm" and fact["section"].startswith(("bf16, vllm", "bf16, sglang"))
    }
    odd = {
        fact["device"]: fact["mean"]
        for fact in accuracy_facts()
        if fact["operation"] == "gemm" and (fact["section"].endswith("odd sizes") or fact["section"] == "fp16")
    }
    strangers = {row.device: row.mape for row in borrowed if row.table == "gemm" and row.dtype == "bf16"}
    experts = held_out("moe")
    flash_fit = next(fact["mean"] for fact in accuracy_facts() if fact["section"].startswith("pytorch"))
    training = {
        table: describe_training(table, rows, has_experts=has_experts)
        for table, has_experts in (
            ("published_training_throughput", False),
            ("published_training_throughput/moe", True),
        )
    }
    covered = [row.coverage_90 for row in rows.values()]
    inside = sum(map(is_inside, covered))
    unseen = [facts["unseen"] for facts in coverage if facts["unseen"]]
    cells, cells_inside = (sum(facts[key] for facts in unseen) for key in ("cells", "cells_inside"))
    scaled = rows["linear_layers/scaled"]
    vidur = load_record("gemm", load_device("a100-sxm-80gb")).provenance["reports"]["fp16, vidur: models left out"]
    older, older_shapes = vidur["held_out"], vidur["held_out_shapes"]
    layer, flash = (paper[f"paper_layers/{name}"] for name in ("layer", "layer-flash"))
    regrets = ranking_regrets()
    return [
        dict(zip(("what", "judged_on", "bar", "aim", "reached"), words, strict=True))
        for words in (
            (
                "GEMM, calibrated device", "unseen (n, k), bf16: A100, H100, H200, B200; L40S", "6 %; 9 %", "4 %; 6 %",
                f"{span(bf16[name] for name in GEMM_DEVICES)}; {percent(bf16['l40s'])} (one library "
                f"{span(mean for (name, _), mean in by_library.items() if name in GEMM_DEVICES)}; "
                f"{span(mean for (name, _), mean in by_library.items() if name == 'l40s')})",
            ),
            (
                "GEMM, odd sizes", "unseen rows of the paper's sweeps: A100; V100; MI250X", "5 %; 10 %", "3 %; 6 %",
                "; ".join(percent(odd[name]) for name in PAPER_DEVICES if name in odd),
            ),
            (
                "GEMM, unseen device", "one device left out, bf16", "20 %", "12 %",
                ", ".join(f"{name} {percent(error)}" for name, error in strangers.items()),
            ),
            (
                "layer GEMMs of another collector",
                "vidur's models left out, after one factor; (n, k) left out; today's libraries after one factor",
                "10 %, tau 0.97", "6 %",
                f"{percent(older['mean_ape_after_factor'])}, tau {older['kendall_tau']:.3f}; "
                f"{percent(older_shapes['mean_ape_after_factor'])}, tau {older_shapes['kendall_tau']:.3f}; "
                f"{percent(scaled.mape)}, tau {scaled.kendall_tau:.3f}",
            ),
            ("pointwise", "one model left out", "20 %", "12 %", span(
                fact["mean"]
                for fact in accuracy_facts()
                if fact["operation"] == "pointwise" and fact["section"].startswith("without ")
            )),
            (
                "attention prefill; decode", "unseen head layouts, 16 bits (each layout left out in turn)",
                "9 %; 9 %", "5 %; 4 %",
                f"{attention_spans(attention, 'mean')} ({attention_spans(attention, 'in_turn')})",
            ),
            ("collectives", "unseen cells", "12 %", "8 %", span(held_out("collectives").values())),
            ("MoE block", "unseen expert layouts, by device", "30 %", "15 %", span(experts.values())),
            (
                "paper's layers, unfused; flash", "A100, no row of a fit; hidden sizes left out, with attention blocks",
                "8 %, tau 0.9", "5 %, tau 0.95",
                f"{percent(layer.mape)}, tau {layer.kendall_tau:.2f}; "
                f"{percent(flash_fit)}, tau {flash.kendall_tau:.2f}",
            ),
            (
                "published training throughput", "models left out of their software's fit", "15 %, tau 0.9", "8 %",
                training["published_training_throughput"],
            ),
            (
                "published training of mixtures of experts", "models left out of their software's fit", "", "",
                training["published_training_throughput/moe"],
            ),
            (
                "90 % interval", "rows no fit saw, by table; cells of device, format, library; all rows, by table",
                "85 to 95 %", "88 to 92 %",
                f"{span(facts['covered'] for facts in unseen)}; {cells_inside} of {cells} cells inside; "
                f"{inside} of {len(covered)} tables inside, {span(covered)}",
            ),
            (
                "ranking regret", "bf16 products alike in tokens and weights, shapes left out, a library: median; p90",
                "1 %; 5 %", "",
                f"{span(found['learned']['median'] for found in regrets)}; "
                f"{span(found['learned']['p90'] for found in regrets)} (choosing by the other library's times: "
                f"{span(found['other_library']['p90'] for found in regrets)})",
            ),
        )
    ]  # fmt: skip


def seen_curves(table: str, word: str, data: Path) -> dict[str, Curve]:
    """Mean error of all rows of a table by measured time."""
    found = [row for row in judge_folder(data, tables=[table], by=[word, "size"]).rows if row.rows >= FEWEST_ROWS]
    curves = {}
    for name in sorted({getattr(row, word) for row in found}):
        points = sorted((first_second(row.decade), row.mape) for row in found if getattr(row, word) == name)
        curves[name] = ([at for at, _ in points], [error for _, error in points])
    return curves


def draw_residuals(data: Path) -> None:
    """Every figure of residuals."""
    unseen = "unseen rows, mean error by measured time"
    figures = {
        "gemm_bf16": (f"products in bf16: {unseen}", gemm_curves(["bf16"])),
        "gemm_narrow": (f"products in fp8 and fp4: {unseen}", gemm_curves(["fp8", "fp4"])),
        **{name: (f"{name.replace('_', ' ')}: {unseen}", size_curves(data, name, "device")) for name in UNSEEN_TABLES},
        **{
            name: (f"{name}: all rows, mean error by measured time", seen_curves(name, word, data))
            for name, word in SEEN_TABLES.items()
        },
        "gemm_alignment": (
            "the paper's products in fp16: unseen rows, mean error by the alignment of the worse of n and k",
            alignment_curves(data),
        ),
    }
    for name, (title, curves) in figures.items():
        at = "alignment [byte]" if name.endswith("alignment") else "measured time [s], by decade"
        save_chart(residual_chart(title, at, curves), FIGURES / f"residuals_{name}.svg")


def residual_chart(title: str, x_label: str, curves: Mapping[str, Curve]) -> XYChart:
    """Mean errors, a line for each of what they tell apart."""
    return XYChart(
        title=title,
        x_label=x_label,
        y_label="mean error [%]",
        series=[Line(name, at, [100.0 * error for error in errors]) for name, (at, errors) in curves.items()],
        alt=title,
        marks=(Mark("y", 10.0, "10 %"),),
        x_log=True,
        y_from_zero=True,
    )


def first_second(decade: str) -> float:
    """Middle of a decade such as ``10-100 us``. [s]"""
    numbers, unit = decade.split(" ")
    return float(numbers.split("-")[0]) * 10**0.5 * {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]


def main() -> None:
    """Judge, write the file and draw the figures."""
    data = argument_parser(__doc__).parse_args().data
    together = {row.table: row for row in judge_folder(data, by=[]).rows}
    paper = judge_folder(data, tables=["paper_layers"], devices=["a100-sxm-40gb"], by=[]).rows
    borrowed = list(judge_folder(data, tables=["gemm"], by=["device", "dtype"], uncalibrated=True).rows)
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
    RESULTS.write_text(json.dumps(_short(content), indent=1) + "\n", encoding="utf-8")
    draw_residuals(data)
    for line in content["bars"]:
        print(" | ".join(line.values()))
    print(f"{sum(is_inside(facts['covered']) for facts in coverage)} of {len(coverage)} tables inside 85 to 95 %")


def _short(value: Any) -> Any:
    """Four digits are more than any of these numbers knows."""
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float | np.floating) else value


if __name__ == "__main__":
    main()
