"""Accuracy targets and results: the first table of docs/accuracy.md. Not a script itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from accuracy_page import accuracy_facts, measured_records
from coverage_facts import is_inside

from shapewright.hardware.loader import load_device
from shapewright.measure.accuracy.evaluate import Accuracy
from shapewright.measure.refit.attention.physics import PHASES
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.software import TUNED, UNNAMED, load_software, software_names

GEMM_DEVICES = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb")
PAPER_DEVICES = ("a100-sxm-80gb", "v100-sxm2-16gb", "mi250x-gcd")


class Bar(NamedTuple):
    """One row of the table of targets and results."""

    what: str
    judged_on: str
    bar: str
    aim: str
    reached: str


def bars(
    rows: dict[str, Accuracy],
    borrowed: list[Accuracy],
    paper: dict[str, Accuracy],
    coverage: list[dict[str, Any]],
    attention: list[dict[str, Any]],
) -> list[dict[str, str]]:
    """Targets and results by kind of prediction.

    Args:
        rows: Errors by table, devices together.
        borrowed: Errors by device and dtype, each device priced with borrowed calibration only.
        paper: Errors of the paper's layers on A100, by table.
        coverage: Coverage and width of intervals, table by table.
        attention: Errors on held-out head layouts, by device and phase.
    """
    found = [
        *_gemm_bars(borrowed),
        _collector_bar(rows),
        *_kernel_bars(attention),
        _paper_bar(paper),
        *_training_bars(rows),
        _interval_bar(rows, coverage),
        _regret_bar(),
    ]
    return [each._asdict() for each in found]


def _gemm_bars(borrowed: list[Accuracy]) -> list[Bar]:
    """GEMMs of serving libraries, of odd sizes, and of held-out devices."""
    facts = [fact for fact in accuracy_facts() if fact["operation"] == "gemm"]
    bf16 = {fact["device"]: fact["mean"] for fact in facts if fact["section"] == "bf16"}
    by_library = {
        (fact["device"], fact["section"]): fact["mean"]
        for fact in facts
        if fact["section"].startswith(("bf16, vllm", "bf16, sglang"))
    }
    odd = {
        fact["device"]: fact["mean"]
        for fact in facts
        if fact["section"].endswith("odd sizes") or fact["section"] == "fp16"
    }
    uncalibrated = {row.device: row.mape for row in borrowed if row.table == "gemm" and row.dtype == "bf16"}
    return [
        Bar(
            "GEMM, calibrated device", "held-out (n, k), bf16: A100, H100, H200, B200; L40S", "5 %; 8 %", "3.5 %; 6 %",
            f"{span(bf16[name] for name in GEMM_DEVICES)}; {percent(bf16['l40s'])} (per library "
            f"{span(mean for (name, _), mean in by_library.items() if name in GEMM_DEVICES)}; "
            f"{span(mean for (name, _), mean in by_library.items() if name == 'l40s')})",
        ),
        Bar(
            "GEMM, odd sizes", "held-out rows of the paper's sweeps: A100; V100; MI250X", "5 %; 8 %", "3 %; 5 %",
            "; ".join(percent(odd[name]) for name in PAPER_DEVICES if name in odd),
        ),
        Bar(
            "GEMM, uncalibrated device", "each device held out, bf16", "8 % from a sibling; 20 %", "6 %; 12 %",
            ", ".join(f"{name} {percent(error)}" for name, error in uncalibrated.items()),
        ),
    ]  # fmt: skip


def _collector_bar(rows: dict[str, Accuracy]) -> Bar:
    """GEMMs timed by another collector."""
    scaled = rows["linear_layers/scaled"]
    vidur = load_record("gemm", load_device("a100-sxm-80gb")).provenance["reports"]["fp16, vidur: models left out"]
    older, older_shapes = vidur["held_out"], vidur["held_out_shapes"]
    return Bar(
        "layer GEMMs timed by vidur",
        "held-out models, after one factor; held-out (n, k), after one factor; current libraries after one factor",
        "8 %, tau 0.97", "6 %",
        f"{percent(older['mean_ape_after_factor'])}, tau {older['kendall_tau']:.3f}; "
        f"{percent(older_shapes['mean_ape_after_factor'])}, tau {older_shapes['kendall_tau']:.3f}; "
        f"{percent(scaled.mape)}, tau {scaled.kendall_tau:.3f}",
    )  # fmt: skip


def _kernel_bars(attention: list[dict[str, Any]]) -> list[Bar]:
    """All kernels other than GEMMs."""
    return [
        Bar("pointwise", "each model held out", "12 %", "8 %", span(
            fact["mean"]
            for fact in accuracy_facts()
            if fact["operation"] == "pointwise" and fact["section"].startswith("without ")
        )),
        Bar(
            "attention prefill; decode", "held-out head layouts, 16-bit (in parentheses: each layout held out in turn)",
            "6 %; 4 %", "4 %; 3 %",
            f"{attention_spans(attention, 'mean')} ({attention_spans(attention, 'in_turn')})",
        ),
        Bar(
            "collectives", "(operation, group size, message size) left out in turn", "8 %", "6 %",
            span(held_out("collectives").values()),
        ),
        Bar(
            "MoE block", "held-out expert layouts, by device (in parentheses: formulas alone, 5-fold)",
            "12 %", "8 %",
            f"{span(held_out_experts().values())} ({span(held_out('moe').values())})",
        ),
    ]  # fmt: skip


def _paper_bar(paper: dict[str, Accuracy]) -> Bar:
    """Decoder layers of the paper."""
    flash_fit = next(fact["mean"] for fact in accuracy_facts() if fact["section"].startswith("pytorch"))
    layer, flash = (paper[f"paper_layers/{name}"] for name in ("layer", "layer-flash"))
    return Bar(
        "paper's layers, unfused; flash", "A100; no row used in a fit; held-out hidden sizes, with attention blocks",
        "5 %, tau 0.95", "3 %",
        f"{percent(layer.mape)}, tau {layer.kendall_tau:.2f}; "
        f"{percent(flash_fit)}, tau {flash.kendall_tau:.2f}",
    )  # fmt: skip


def _training_bars(rows: dict[str, Accuracy]) -> list[Bar]:
    """Published training steps."""
    table = "published_training_throughput"
    return [
        Bar(
            "training step, dense", "models held out from the fit of their software", "8 %", "5 %",
            describe_training(table, rows, has_experts=False),
        ),
        Bar(
            "training step, MoE", "models held out from the fit of their software", "12 %, tau 0.9", "8 %",
            describe_training(f"{table}/moe", rows, has_experts=True),
        ),
    ]  # fmt: skip


def _interval_bar(rows: dict[str, Accuracy], coverage: list[dict[str, Any]]) -> Bar:
    """Coverage of the 90 % intervals."""
    covered = [row.coverage_90 for row in rows.values()]
    inside = sum(map(is_inside, covered))
    unseen = [facts["unseen"] for facts in coverage if facts["unseen"]]
    cells, cells_inside = (sum(facts[key] for facts in unseen) for key in ("cells", "cells_inside"))
    return Bar(
        "90 % interval coverage",
        "held-out rows, by table; cells of device, format and library; all rows, by table",
        "85 to 95 %", "88 to 92 %",
        f"{span(facts['covered'] for facts in unseen)}; {cells_inside} of {cells} cells in range; "
        f"{inside} of {len(covered)} tables in range, {span(covered)}",
    )  # fmt: skip


def _regret_bar() -> Bar:
    """Cost of selecting a GEMM by predicted time."""
    regrets = ranking_regrets()
    return Bar(
        "ranking regret", "bf16 GEMMs with equal tokens and weights, held-out shapes, per library: median; p90",
        "1 %; 5 %", "",
        f"{span(found['learned']['median'] for found in regrets)}; "
        f"{span(found['learned']['p90'] for found in regrets)} (selecting by the other library's times: "
        f"{span(found['other_library']['p90'] for found in regrets)})",
    )  # fmt: skip


def percent(value: float) -> str:
    """Format a fraction as a percentage."""
    return f"{100.0 * value:.1f} %"


def span(values: Iterable[float]) -> str:
    """Format the smallest and largest of some errors."""
    found = sorted(values)
    low, high = percent(found[0]), percent(found[-1])
    return low if low == high else f"{low.removesuffix(' %')} to {high}"


def held_out(operation: str) -> dict[str, float]:
    """Mean error of the held-out rows of one kind of operation, by device."""
    sums: dict[str, list[float]] = {}
    for fact in accuracy_facts():
        if fact["operation"] != operation:
            continue
        both = sums.setdefault(fact["device"], [0.0, 0.0])
        both[0] += fact["rows"] * fact["mean"]
        both[1] += fact["rows"]
    return {name: total / rows for name, (total, rows) in sums.items()}


def held_out_experts() -> dict[str, float]:
    """Mean error of expert blocks on held-out layouts, learned corrections included, by device."""
    found = {}
    for record in measured_records("moe"):
        learned = record.residual["reports"] if record.residual else {}
        reports = [
            learned.get(name.replace(", ", " of ", 1), {}).get("held_out", each.get("held_out_of_the_record"))
            for name, each in record.provenance["reports"].items()
        ]
        counts = [
            (report["rows"], report.get("mean_absolute_error", report.get("mean_ape"))) for report in reports if report
        ]
        found[record.device] = sum(rows * mean for rows, mean in counts) / sum(rows for rows, _ in counts)
    return found


def attention_spans(attention: list[dict[str, Any]], key: str) -> str:
    """Smallest and largest mean error over the devices, for prefill and decode."""
    means = [(each["phase"], each["mean"] if key == "mean" else each[key]["mean"]) for each in attention]
    return "; ".join(span(mean for found, mean in means if found == phase) for phase in PHASES)


def training_errors(*, has_experts: bool) -> dict[str, tuple[float, int]]:
    """Mean error and rows of the held-out models of each software generation, dense or MoE."""
    reports = {
        name: load_software(name).provenance["reports"]["held out"]
        for name in software_names()
        if name not in (TUNED, UNNAMED) and ("moe" in name) == has_experts
    }
    return {name: (report["mean_absolute_error"], report["rows"]) for name, report in reports.items()}


def describe_training(table: str, rows: dict[str, Accuracy], *, has_experts: bool) -> str:
    """Mean error of held-out models in total and by software generation, and Kendall's tau of all rows."""
    found = training_errors(has_experts=has_experts)
    together = sum(error * count for error, count in found.values()) / sum(count for _, count in found.values())
    each = ", ".join(f"{name} {percent(error)}" for name, (error, _) in found.items())
    return f"{percent(together)} ({each}), tau {rows[table].kendall_tau or 0.0:.2f}"


def ranking_regrets() -> list[dict[str, Any]]:
    """Ranking regret of bf16 GEMMs by device and library, each shape priced by a fit that held it out."""
    found = []
    for device in (*GEMM_DEVICES, "l40s"):
        section = load_record("gemm", load_device(device)).provenance["sections"]["bf16"]
        found += [facts["ranking_regret"] for facts in section["libraries"].values()]
    return found
