"""The page docs/accuracy.md, from calibration records and docs/accuracy_results.json. Not a script itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

from markdown_parts import DOCS, WRITTEN_BY, join_parts, markdown_table

from shapewright.hardware.loader import list_devices, load_device
from shapewright.pricing.calibration.records import RECORD_KINDS, CalibrationRecord, load_record
from shapewright.pricing.software import TUNED, load_software, software_names

# Coverage outside the accepted range is too low below this value and too high above it.
MIDDLE_COVERAGE = 0.9

# Column of the table by device -> (operation, sections); a device shows the first section that it has.
DEVICE_COLUMNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "GEMM, 16-bit": ("gemm", ("bf16", "fp16")),
    "GEMM, odd sizes": ("gemm", ("bf16, odd sizes",)),
    "GEMM, fp8": ("gemm", ("fp8",)),
    "expert blocks, 16-bit": (
        "moe",
        (
            "bf16, vllm 0.24.0/vllm_unquantizedfusedmoe_triton_tritonexperts",
            "bf16, vllm 0.24.0/vllm_unquantizedfusedmoe_flashinfer_trtllm_trtllmbf16experts",
            "bf16, vllm 0.14.0/vllm_fused_moe",
        ),
    ),
    "attention, prefill": ("attention", ("prefill",)),
    "attention, decode": ("attention", ("decode",)),
    "collectives": ("collectives", ("inside a node",)),
}


def accuracy_page() -> str:
    """Generate docs/accuracy.md."""
    return join_parts(
        [
            "# Accuracy",
            WRITTEN_BY,
            "Absolute percentage errors of predicted times against measured times. *Held-out* rows were not used in "
            "a fit. *p90* is the 90th percentile of the error, *tau* is Kendall's rank correlation, and *coverage* is "
            "the share of measurements inside the 90 % interval. *The paper* is arXiv 2401.14489.",
            *_bars(),
            *_devices(),
            *_tables(),
            *_intervals(),
            *_software(),
            *_residuals(),
            *_records(),
            *_commands(),
        ]
    )


def _bars() -> list[str]:
    """Targets and results."""
    return [
        "## Targets and results",
        f"Evaluated on {results()['date']}; held-out rows, except for the last figure on interval coverage.",
        markdown_table(
            ["prediction", "evaluated on", "target", "stretch target", "result"],
            [[row[key] for key in ("what", "judged_on", "bar", "aim", "reached")] for row in results()["bars"]],
        ),
        "Most of the ranking regret is [noise in the measured rows](decisions/0031-gemm-scatter.md). Methods: "
        "[training steps](decisions/0002-step-composition.md), [GEMMs](decisions/0003-gemm-calibration.md), "
        "[attention](decisions/0004-attention.md), "
        "[pointwise operations and collectives](decisions/0030-pointwise-collectives.md), "
        "[experts](decisions/0007-moe.md). Limits of the tests: `tests/accuracy/limits.toml`.",
    ]


def _devices() -> list[str]:
    """Held-out errors per device and operation."""
    facts = accuracy_facts()
    names = list(dict.fromkeys(fact["device"] for fact in facts if fact["operation"] == "gemm"))
    rows = [[name, *(_device_cell(facts, name, *column) for column in DEVICE_COLUMNS.values())] for name in names]
    return [
        "## By device",
        "Mean / median error on held-out rows, with their number.",
        markdown_table(["device", *DEVICE_COLUMNS], rows),
    ]


def _device_cell(facts: list[dict[str, Any]], device: str, operation: str, sections: tuple[str, ...]) -> str:
    """Mean and median error of one device and operation, with the number of rows."""
    if operation == "attention":
        facts = [{**fact, "operation": operation, "section": fact["phase"]} for fact in results()["attention"]]
    for fact in facts:
        if (fact["device"], fact["operation"]) == (device, operation) and fact["section"] in sections:
            return f"{100 * fact['mean']:.1f} / {100 * fact['median']:.1f} % ({fact['rows']:,})"
    return ""


def _tables() -> list[str]:
    """Every measured table, all rows."""
    return [
        "## All rows of every measured table",
        "Output of `shapewright accuracy DIR --regret`. **Most of these rows were used in fits**: all of `gemm`, `moe` "
        "and `collectives`, most of attention (vLLM and SGLang, from ai-dynamo/aiconfigurator) and all of "
        "`linear_layers` (microsoft/vidur, like `pointwise`); the errors above are of records without a row's shape. "
        "`linear_layers/scaled` predicts the same rows for current libraries times one factor. "
        "*Roofline* is the mean error of max(FLOPs / peak, bytes / bandwidth). *Regret* is how much slower than the "
        "best shape of its size the predicted best is (p90 over sizes).",
        markdown_table(
            ["table", "rows", "mean", "median", "p90", "Kendall tau", "coverage", "roofline", "regret p90"],
            [_table_cells(row) for row in results()["tables"]],
        ),
    ]


def _intervals() -> list[str]:
    """Coverage and width of the 90 % intervals."""
    outside = [
        (facts["table"], cell, share) for facts in results()["coverage"] for cell, share in facts["outside"].items()
    ]
    above = [share for _, _, share in outside if share > MIDDLE_COVERAGE]
    below = [f"`{table}` {cell} ({100.0 * share:.0f} %)" for table, cell, share in outside if share < MIDDLE_COVERAGE]
    return [
        "## Intervals",
        "Coverage and mean width, ln(high / low), of the [90 % intervals](decisions/0012-intervals.md): over all rows "
        "(mostly used in fits), over held-out rows, and with borrowed calibration (minimum and mean over devices). "
        "Cells are combinations of device, format and library with at least 200 rows; the range is 85 to 95 %. "
        "Kernels priced by their work (from `attention_training` on) are judged on layouts left out in turn, each by "
        "the interval that the others give.",
        markdown_table(
            [
                "table",
                "coverage",
                "width",
                "cells in range",
                "held-out rows",
                "coverage",
                "width",
                "cells in range",
                "below 20 us",
                "above 1 ms",
                "device held out",
            ],
            [_coverage_cells(facts) for facts in results()["coverage"]],
        ),
        f"Over all rows, coverage is too high in {len(above)} cells (up to {100.0 * max(above):.0f} %) and too low in "
        f"{', '.join(below) or 'none'}.",
    ]


def _software() -> list[str]:
    """Errors on published training steps by software generation."""
    rows = []
    for name in software_names():
        if name == TUNED:
            continue
        found = load_software(name)
        reports: dict[str, Any] = found.provenance["reports"]
        held_out, tuned = reports["held out"], reports["as a tuned stack"]
        rows.append(
            [
                f"`{name}`: {found.title}",
                str(held_out["rows"]),
                f"{100 * held_out['mean_absolute_error']:.1f} %",
                f"{100 * tuned['mean_absolute_error']:.0f} %",
                re.split(r"[;.] ", found.provenance["why"])[0],
            ]
        )
    return [
        "## Training steps by software",
        "Errors on published training steps, with models held out of each fit. `--software` selects the generation; "
        "without it a tuned stack is predicted, with the error in the fourth column and an interval that spans all "
        "generations ([method](decisions/0002-step-composition.md)).",
        markdown_table(["software", "rows", "mean error", "error as a tuned stack", "difference"], rows),
    ]


def _residuals() -> list[str]:
    """Figures of the errors by time, format and alignment."""
    return [
        "## Residuals",
        "\n\n".join(
            f"![{_alt_text(path)}](figures/{path.name})" for path in sorted((DOCS / "figures").glob("residuals_*.svg"))
        ),
        "GEMMs, attention and expert blocks: held-out rows, each library with its own calibration. Collectives and "
        "pointwise operations: all rows. Errors are largest below 10 us, where two measurements of one shape differ by "
        "2 to 10 %, and for decode above 1 ms with head dimension 512 on Hopper or Triton kernels on B200.",
    ]


def _alt_text(figure: Path) -> str:
    """The description stored in a figure."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", figure.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, figure
    return unescape(" ".join(found[1].split()))


def _records() -> list[str]:
    """Held-out errors of every calibration record."""
    columns = ["operation", "device", "section", "rows", "mean", "median", "p90", "fitted"]
    rows = []
    for fact in accuracy_facts():
        errors_shown = [f"{100.0 * fact[key]:.1f} %" for key in ("mean", "median", "p90")]
        rows.append(
            [fact["operation"], fact["device"], fact["section"], f"{fact['rows']:,}", *errors_shown, fact["date"]]
        )
    for name in software_names():
        if (provenance := load_software(name).provenance) and (report := provenance["reports"]["held out"]):
            shown = [f"{100.0 * report[f'{key}_absolute_error']:.1f} %" for key in ("mean", "median", "p90")]
            rows.append(["training step", "all", name, f"{report['rows']:,}", *shown, provenance["date"]])
    return [
        "## Calibration records",
        "Errors on held-out rows. Held out are whole (n, k) shapes of GEMMs, expert layouts (5-fold), head layouts of "
        "attention, (operation, group, message size) cells of collectives, and models for pointwise operations and "
        "training software. Sources and licences of the data are in the README.",
        markdown_table(columns, [row for row in rows if row[0] != "attention"]),
        "<details markdown>\n<summary>Attention, each kernel of each library by head dimension</summary>",
        markdown_table(columns, [row for row in rows if row[0] == "attention"]),
        "</details>",
        "16-bit attention, over the kernels that models are priced with. The last columns hold out each layout in turn "
        "from the learned correction, because the split changes the error by one or two points.",
        markdown_table(
            ["device", "phase", "held-out layouts", "rows", "mean", "median", "p90", "rows, in turn", "mean, in turn"],
            [_attention_cells(fact) for fact in results()["attention"]],
        ),
    ]


def _commands() -> list[str]:
    """How to refit the calibration records and write the results."""
    return [
        "## Reproduce",
        "With the measured tables in DIR:",
        "```\npython -m shapewright.measure.refit --data DIR\n" + results()["command"] + "\n```",
    ]


@cache
def results() -> dict[str, Any]:
    """Content of docs/accuracy_results.json."""
    content: dict[str, Any] = json.loads((DOCS / "accuracy_results.json").read_text(encoding="utf-8"))
    return content


def _table_cells(row: dict[str, Any]) -> list[str]:
    """Cells of one measured table; missing figures stay empty."""
    shares = [row[key] for key in ("mean", "median", "p90", "coverage_90", "roofline", "regret_p90")]
    mean, median, p90, covered, roofline, regret = (
        "" if share is None else f"{100.0 * share:.1f} %" for share in shares
    )
    tau = "" if row["kendall_tau"] is None else f"{row['kendall_tau']:.3f}"
    return [row["table"], f"{row['rows']:,}", mean, median, p90, tau, covered, roofline, regret]


def _coverage_cells(facts: dict[str, Any]) -> list[str]:
    """Cells on the intervals of one table."""

    def percent(share: float | None) -> str:
        return "" if share is None else f"{100.0 * share:.0f} %"

    def inside(number: int, count: int) -> str:
        return f"{number} of {count}" if count else ""

    unseen, devices = facts["unseen"], list((facts["left_out"] or {}).values())
    cells = [facts["table"], percent(facts["covered"]), f"{facts['width']:.2f}"]
    cells.append(inside(facts["cells"] - len(facts["outside"]), facts["cells"]))
    if unseen:
        width = f"{unseen['width']:.2f}" if "width" in unseen else ""
        cells += [f"{unseen['rows']:,}", percent(unseen["covered"]), width]
        cells += [inside(unseen["cells_inside"], unseen["cells"])]
        cells += [percent(unseen.get(name)) for name in ("below 20 us", "above 1 ms")]
    else:
        cells += [""] * 6
    mean = sum(devices) / len(devices) if devices else None
    return [*cells, f"{percent(min(devices))}, {percent(mean)}" if devices else ""]


def _attention_cells(fact: dict[str, Any]) -> list[str]:
    """Cells on attention on one device in one phase."""
    shares = [f"{100.0 * fact[key]:.1f} %" for key in ("mean", "median", "p90")]
    counts = [f"{fact[key]:,}" for key in ("layouts", "rows")]
    return [
        fact["device"],
        fact["phase"],
        *counts,
        *shares,
        f"{fact['in_turn']['rows']:,}",
        f"{100.0 * fact['in_turn']['mean']:.1f} %",
    ]


def accuracy_facts() -> list[dict[str, Any]]:
    """Held-out errors stored in the calibration records, one entry per record and section."""
    facts = []
    for kind in RECORD_KINDS:
        for record in measured_records(kind):
            origin = record.provenance
            for section, report, is_part in held_out_reports(origin):
                recipient = section.removeprefix("without ")
                is_recipient = recipient in list_devices()
                facts.append(
                    {
                        "operation": kind,
                        "device": recipient if is_recipient else record.device,
                        "section": "around the paper's GEMMs, held-out hidden sizes" if is_recipient else section,
                        "rows": report["rows"],
                        "is_part": is_part,
                        "mean": report.get("mean_ape", report.get("mean_absolute_error")),
                        "median": report.get("median_ape", report.get("median_absolute_error")),
                        "p90": report.get("p90_ape", report.get("p90_absolute_error")),
                        "date": origin["date"],
                    }
                )
    return facts


def measured_records(kind: str) -> list[CalibrationRecord]:
    """Calibration records of one kind, without duplicates."""
    found = (load_record(kind, load_device(name)) for name in list_devices())
    return sorted({record.id: record for record in found if record.transfer == "exact"}.values(), key=lambda it: it.id)


def held_out_reports(origin: Any) -> Iterator[tuple[str, Any, bool]]:
    """Reports on held-out rows: section, report, and whether another section contains the same rows.

    A section with ``own_rows`` apart has the held-out rows of a sibling's record.
    """
    for name, section in origin.get("sections", {}).items():
        yield name, section["held_out"], "own_rows" in section
        yield from ((f"{name}, {library}", report, True) for library, report in section.get("libraries", {}).items())
        if "held_out" in section.get("alignment", {}):
            yield f"{name}, odd sizes", section["alignment"]["held_out"], False
    for name, report in origin.get("reports", {}).items():
        if name == "held_out":
            yield "inside a node", report, False
        elif name.startswith("held out "):
            yield f"without {name.removeprefix('held out ')}", report, False
        elif report.get("held_out"):
            yield name.replace("/main", ""), report["held_out"], False
