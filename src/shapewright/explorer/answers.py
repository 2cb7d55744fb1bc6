"""Answers to questions about one step: prediction, findings, memory, devices, reasons; each as the command gives it.

Every answer is what ``--json`` prints, and under ``text`` the very words and figures that the command prints for a
person, so that a page never formats a number.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shapewright.api import compare
from shapewright.capacity import estimate_capacity
from shapewright.config import write_back
from shapewright.explorer.figures import comparison_figure, memory_figure
from shapewright.explorer.job import job_fields, read_job_model
from shapewright.lint import check_model, to_json
from shapewright.operations import Gemm
from shapewright.report.capacity import capacity_to_json, capacity_words
from shapewright.report.check_text import better_shape_columns, finding_words
from shapewright.report.compare import comparison_columns, comparison_to_json
from shapewright.report.design_review import review_sections, review_subtitle, review_title
from shapewright.report.explain import explain_operation, explanation_rows
from shapewright.report.gather_review import gather_review
from shapewright.report.page import render_page
from shapewright.report.prediction_json import operation_to_json, prediction_to_json
from shapewright.report.prediction_text import describe, operation_columns, verdict
from shapewright.report.question_json import question_to_json
from shapewright.units import format_percent

if TYPE_CHECKING:
    from shapewright.explorer.job import Job
    from shapewright.explorer.known_devices import KnownDevices
    from shapewright.predict import Prediction
    from shapewright.question import Question
    from shapewright.report.columns import Column

Answer = dict[str, Any]

MOST_COMPARED_DEVICES = 64


def answer_predict(question: Question, baseline: Question | None = None) -> Answer:
    """What ``predict --json`` prints, with its text; and beside a baseline, what moved."""
    prediction = question.predict()
    answer = {
        **prediction_to_json(prediction),
        "source": question.model.source,
        "notes": list(question.notes),
        "text": {
            "title": describe(prediction),
            "verdict": verdict(prediction),
            "operations": _operations(prediction),
        },
    }
    if baseline is not None:
        answer["moved"] = _moved(baseline.predict(), prediction)
    return answer


def _operations(prediction: Prediction) -> Answer:
    """The operations table of the command, every row, with the keys that tell rows apart and values to sort by."""
    ranked = sorted(prediction.operations, key=lambda entry: -entry.total_time_s)
    keys = [
        {
            "name": entry.operation.name,
            "pass": entry.operation.pass_name,
            "stage": entry.operation.stage,
            "has_tiles": isinstance(entry.operation, Gemm) and bool(getattr(entry.price, "tile_m", 0)),
        }
        for entry in ranked
    ]
    return {**columns_to_json(operation_columns(prediction)), "keys": keys}


def columns_to_json(columns: Sequence[Column]) -> Answer:
    """A table of the command line: its headings and its texts, row by row."""
    return {
        "columns": [{"name": column.name, "is_text": column.is_text} for column in columns],
        "rows": [list(cells) for cells in zip(*(column.cells for column in columns), strict=True)],
    }


# What is held against a baseline: its name, its value, and whether more of it is better.
_HELD = (
    ("step", "step_time_s", False),
    ("tokens/s/device", "tokens_per_s_per_device", True),
    ("MFU", "mfu", True),
)


def _moved(before: Prediction, after: Prediction) -> list[Answer]:
    """How far the headline numbers are from those of another step, in relation to them."""
    pairs: list[tuple[str, float, float, bool | None]] = [
        (name, getattr(before, key), getattr(after, key), more) for name, key, more in _HELD
    ]
    pairs.append(("memory", before.memory.total_bytes, after.memory.total_bytes, False))
    pairs.append(("parameters", float(before.parameters.total), float(after.parameters.total), None))
    old, new = verdict(before), verdict(after)
    moved = []
    for name, was, now, more_is_better in pairs:
        change = now / was - 1.0 if was else 0.0
        is_better = None if more_is_better is None or not change else (change > 0.0) == more_is_better
        moved.append(
            {
                "name": name,
                "change_fraction": change,
                "is_better": is_better,
                "text": f"{'+' if change > 0.0 else ''}{format_percent(change)}" if change else "same",
                "before": old.get(name, ""),
                "after": new.get(name, ""),
            }
        )
    return moved


def answer_check(question: Question) -> Answer:
    """What ``check --json`` prints, with its text."""
    report = check_model(question.config, **question.terms)
    return {
        **to_json(report),
        **question_to_json(question),
        "text": {
            "findings": [finding_words(finding) for finding in report.findings],
            "better_shapes": columns_to_json(better_shape_columns(report.better_shapes)),
        },
    }


def answer_capacity(question: Question, optimizer: str = "adamw") -> Answer:
    """What ``memory --json`` prints, with its text."""
    found = estimate_capacity(question.config, **question.terms, optimizer=optimizer, notes=question.notes)
    words = capacity_words(found)
    text = {**words, "remedies": columns_to_json(words["remedies"])}
    return {**capacity_to_json(found), "source": question.model.source, "text": text, "figure": memory_figure(found)}


def answer_compare(job: Job, names: Sequence[str], usd_per_hour: dict[str, float], devices: KnownDevices) -> Answer:
    """What ``compare --json`` prints, with its text."""
    fields = job_fields(job)
    compared = [devices.named(name, **job.nodes) for name in names]
    found = compare(
        read_job_model(job),
        devices=compared,
        usd_per_hour={devices.named(name).name: price for name, price in usd_per_hour.items()},
        workload=fields["workload"],
        layout=fields["layout"],
        uncalibrated=job.uncalibrated,
        software=job.software,
    )
    answer = comparison_to_json(found)
    remarks = [line for device in compared for line in devices.remark(device)] if not job.uncalibrated else []
    return {
        **answer,
        "notes": list(dict.fromkeys([*answer["notes"], *remarks])),
        "text": {"devices": columns_to_json(comparison_columns(found))},
        "figure": comparison_figure(found),
    }


def answer_explain(question: Question, operation: str) -> Answer:
    """What ``predict --explain --json`` prints, with its text."""
    facts = explain_operation(question.predict(), operation)
    return {**facts, "text": [explanation_rows(entry) for entry in facts["operations"]]}


def answer_config(question: Question) -> Answer:
    """The model as a config.json object, in the form that it was read in."""
    return {"schema_version": 1, "config": write_back(question.model, question.config)}


def answer_report(question: Question) -> str:
    """The page that ``report`` writes."""
    review = gather_review(question)
    return render_page(review_title(review), review_sections(review), subtitle=review_subtitle(review))


def answer_csv(question: Question) -> str:
    """Every operation as CSV, one row each: the scalar keys of ``predict --json``."""
    prediction = question.predict()
    rows = [operation_to_json(entry) for entry in prediction.operations]
    for row in rows:
        row["tile_m"], row["tile_n"] = row.pop("tile") or (None, None)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
