"""The page of accuracy: what the records and scripts/write_accuracy_results.py found. Not a script itself."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

from markdown_parts import DOCS, WRITTEN_BY, join_parts, markdown_table

from shapewright.hardware import list_devices, load_device
from shapewright.perf.calibration import RECORD_KINDS, CalibrationRecord, load_record
from shapewright.perf.software import TUNED, load_software, software_names

# A cell that covers less than it should lies below, one that covers more above.
MIDDLE_COVERAGE = 0.9


def accuracy_page() -> str:
    """How far predictions lie from measurements, table by table and record by record."""
    return join_parts(
        [
            "# Accuracy",
            WRITTEN_BY,
            "How far predicted times lie from measured ones, as absolute percentage errors: what was asked and what is "
            "reached, every measured table, the intervals, training by software, and each record. *Unseen* rows are "
            "those that a fit left out; nine of ten rows err less than *p90*; Kendall's *tau* is 1 where predictions "
            "and measurements have one order; *covered* is the share of measurements inside the 90 % interval.",
            *_bars(),
            *_tables(),
            *_intervals(),
            *_software(),
            *_residuals(),
            *_records(),
            *_commands(),
        ]
    )


def _bars() -> list[str]:
    """What was asked of predictions, and what they reach."""
    return [
        "## Asked and reached",
        f"Judged on {results()['date']}. *Bar* is what was to be reached, *aim* what was hoped for. Rows that a fit "
        "saw are counted in the intervals alone.",
        markdown_table(
            ["what", "judged on", "bar", "aim", "reached"],
            [[row[key] for key in ("what", "judged_on", "bar", "aim", "reached")] for row in results()["bars"]],
        ),
        "What was tried, what fell short and why stands in the decisions: "
        "[whole steps](decisions/0002-adding-up-a-step.md), [GEMMs](decisions/0003-gemm-calibration.md), "
        "[attention, pointwise operations, collectives](decisions/0004-attention-pointwise-collectives.md), "
        "[experts](decisions/0007-moe.md). Of the ranking regret most is in the measured rows themselves: "
        "[who knows every row but the one asked](decisions/0003-gemm-calibration.md#ranking-regret) chooses no better "
        "than 6.6 to 16.2 % on five of ten sections. Tests hold left-out errors to `tests/accuracy/limits.toml`, whose "
        "limits only tighten; `make drift` shows how far predictions moved.",
    ]


def _tables() -> list[str]:
    """Every measured table, judged whole."""
    return [
        "## Every table, all rows",
        "As `shapewright accuracy DIR --regret` judges it, devices, formats and libraries together. **Fits saw most of "
        "these rows**: most of the first five, all of `linear_layers`, none of `linear_layers/scaled`, the same "
        "rows priced by today's libraries and one factor. *Roofline* is the mean error of max(FLOPs / peak, "
        "bytes / bandwidth), *regret* how much slower than the best of its size the shape is that would be chosen (p90 "
        "over sizes). The first five are of vllm and sglang (ai-dynamo/aiconfigurator), `linear_layers` and "
        "`pointwise` of microsoft/vidur, `paper_...` of arXiv 2401.14489, the last two of published training runs.",
        markdown_table(
            ["table", "rows", "mean", "median", "p90", "Kendall tau", "covered", "roofline", "regret p90"],
            [_table_cells(row) for row in results()["tables"]],
        ),
    ]


def _intervals() -> list[str]:
    """How often, and how narrowly, intervals hold what was measured."""
    return [
        "## Intervals",
        "How many measurements lie inside the 90 % interval, and how wide it is (mean ln(high / low)): all rows, which "
        "a fit mostly saw; rows that none saw; and each device priced as if nobody had measured it, with intervals of "
        "the other devices alone (least and mean of the devices). Cells are those of device, format and library with "
        "200 rows and more, inside 85 to 95 %. Which residuals make an interval, and what stays outside: "
        "[intervals](decisions/0012-intervals.md).",
        markdown_table(
            [
                "table",
                "covered",
                "width",
                "cells inside",
                "unseen rows",
                "covered",
                "width",
                "cells inside",
                "below 20 us",
                "above 1 ms",
                "device left out",
            ],
            [_coverage_cells(facts) for facts in results()["coverage"]],
        ),
        "Of all rows, which a fit mostly saw, intervals are too wide in "
        + ", ".join(
            f"{len(above)} cells of `{facts['table']}` (up to {100.0 * max(above):.0f} %)"
            for facts in results()["coverage"]
            if (above := [share for share in facts["outside"].values() if share > MIDDLE_COVERAGE])
        ).replace(" 1 cells", " one")
        + ", too narrow in "
        + "; ".join(
            f"`{facts['table']}` {cell} {100.0 * share:.0f} %"
            for facts in results()["coverage"]
            for cell, share in facts["outside"].items()
            if share < MIDDLE_COVERAGE
        )
        + ".",
    ]


def _software() -> list[str]:
    """Generations of training software: errors of models left out of their fits, and of predictions that know none."""
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
        "Published training steps, time per row, models left out of each fit; what a source leaves open is assumed. "
        "`--software` chooses the generation. Without it a tuned stack of today is predicted, which is as far off as "
        "the fourth column says, and the interval of a training step spans all of them. "
        "[How each was found](decisions/0002-adding-up-a-step.md#which-software)",
        markdown_table(["software", "rows", "mean error", "as a tuned stack", "what differs"], rows),
    ]


def _residuals() -> list[str]:
    """Figures of the errors by size, format and alignment."""
    return [
        "## Where the residuals are",
        "\n\n".join(
            f"![{_alt_text(path)}](figures/{path.name})" for path in sorted((DOCS / "figures").glob("residuals_*.svg"))
        ),
        "Products, attention and expert blocks: rows that no fit saw, each library by its own section. Collectives and "
        "pointwise operations: all rows. Short times err most: below 10 us a kernel is its "
        "start, and two collections of the same shape differ by 2 to 10 %. Odd sizes err no more than aligned ones. "
        "Decode beyond a millisecond errs by Hopper's heads of 512 and B200's triton kernels, which few layouts "
        "taught.",
    ]


def _alt_text(figure: Path) -> str:
    """What the figure says of itself."""
    found = re.search(r"<dc:description>(.*?)</dc:description>", figure.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None, figure
    return unescape(" ".join(found[1].split()))


def _records() -> list[str]:
    """Errors of every calibration record on rows that its fit did not see."""
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
        "Absolute percentage error of predicted against measured time, on rows that the fit did not see: whole (n, k) "
        "shapes of GEMMs, whole layouts of expert blocks (each fifth of them left out in turn), whole head layouts of "
        "attention, whole (operation, group, message) cells of collectives, one whole model of pointwise operations, "
        "whole models of training software. Splits and what is assumed are in the decisions "
        "([GEMMs](decisions/0003-gemm-calibration.md) first), sources and "
        "licences of the data in the README.",
        markdown_table(columns, [row for row in rows if row[0] != "attention"]),
        "<details markdown>\n<summary>Attention, each kernel of each library by head width</summary>",
        markdown_table(columns, [row for row in rows if row[0] == "attention"]),
        "</details>",
        "Attention in 16 bits, all kernels that price models together. A device has 3 to 16 unseen layouts, and which "
        "ones they are moves its error by a point or two; beside it the mean over every layout, left out of the trees "
        "in turn (the formulas' few constants saw most of them).",
        markdown_table(
            ["device", "phase", "unseen layouts", "rows", "mean", "median", "p90", "rows left out in turn", "mean"],
            [_attention_cells(fact) for fact in results()["attention"]],
        ),
    ]


def _commands() -> list[str]:
    """How to make the records, and what is shown of them, anew: in the order that scripts/README.md gives."""
    steps = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    commands = [f"python scripts/{name} --data DIR" for name in re.findall(r"calibrate_\w+\.py", steps)]
    return [
        "Reproduce, with the measured tables in DIR and in this order:",
        "```\n" + "\n".join([*dict.fromkeys(commands), results()["command"]]) + "\n```",
    ]


@cache
def results() -> dict[str, Any]:
    """What scripts/write_accuracy_results.py found."""
    content: dict[str, Any] = json.loads((DOCS / "accuracy_results.json").read_text(encoding="utf-8"))
    return content


def _table_cells(row: dict[str, Any]) -> list[str]:
    """One judged table; a figure that it lacks stays empty."""
    shares = [row[key] for key in ("mean", "median", "p90", "coverage_90", "roofline", "regret_p90")]
    mean, median, p90, covered, roofline, regret = (
        "" if share is None else f"{100.0 * share:.1f} %" for share in shares
    )
    tau = "" if row["kendall_tau"] is None else f"{row['kendall_tau']:.3f}"
    return [row["table"], f"{row['rows']:,}", mean, median, p90, tau, covered, roofline, regret]


def _coverage_cells(facts: dict[str, Any]) -> list[str]:
    """Intervals of one table."""

    def percent(share: float | None) -> str:
        return "" if share is None else f"{100.0 * share:.0f} %"

    def inside(number: int, count: int) -> str:
        return f"{number} of {count}" if count else ""

    unseen, devices = facts["unseen"], list((facts["left_out"] or {}).values())
    cells = [facts["table"], percent(facts["covered"]), f"{facts['width']:.2f}"]
    cells.append(inside(facts["cells"] - len(facts["outside"]), facts["cells"]))
    if unseen:
        cells += [f"{unseen['rows']:,}", percent(unseen["covered"]), f"{unseen['width']:.2f}"]
        cells += [inside(unseen["cells_inside"], unseen["cells"])]
        cells += [percent(unseen[name]) for name in ("below 20 us", "above 1 ms")]
    else:
        cells += [""] * 6
    mean = sum(devices) / len(devices) if devices else None
    return [*cells, f"{percent(min(devices))}, {percent(mean)}" if devices else ""]


def _attention_cells(fact: dict[str, Any]) -> list[str]:
    """Errors of attention on one device in one phase."""
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
    """Held-out errors that the records carry, one entry per record and section."""
    facts = []
    for kind in RECORD_KINDS:
        for record in measured_records(kind):
            origin = record.provenance
            for section, report, is_part in held_out_reports(origin):
                borrower = section.removeprefix("without ")
                is_borrower = borrower in list_devices()
                facts.append(
                    {
                        "operation": kind,
                        "device": borrower if is_borrower else record.device,
                        "section": "around the paper's products, other hidden sizes" if is_borrower else section,
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
    """Records of a kind, each once."""
    found = (load_record(kind, load_device(name)) for name in list_devices())
    return sorted({record.id: record for record in found if record.transfer == "exact"}.values(), key=lambda it: it.id)


def held_out_reports(origin: Any) -> Iterator[tuple[str, Any, bool]]:
    """Reports on held-out rows: section, report, and whether its rows are part of another section's."""
    for name, section in origin.get("sections", {}).items():
        yield name, section["held_out"], False
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
