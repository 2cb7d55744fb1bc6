"""Answers on one step: prediction, findings, memory, comparison of devices, explanation, exports.

Every answer is the JSON output of the corresponding command and, under ``text``, the text output of that command, so
that the page never formats a number.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shapewright.app.api.steps import compare
from shapewright.app.explorer.requests import job_fields, read_job_model
from shapewright.app.explorer.views.figures import comparison_figure, memory_figure
from shapewright.app.explorer.views.outputs import ConfigOutput, figure
from shapewright.app.figures.step import timeline_chart
from shapewright.app.report.check import (
    better_shape_columns,
    combined_fix_words,
    finding_words,
    fix_saving_words,
)
from shapewright.app.report.compare import comparison_columns
from shapewright.app.report.explain import explain_operation, explanation_rows
from shapewright.app.report.memory import component_rows, largest_sizes, remedy_columns, verdict_words
from shapewright.app.report.outputs.check import check_output
from shapewright.app.report.outputs.compare import compare_output
from shapewright.app.report.outputs.memory import memory_output
from shapewright.app.report.outputs.model import plain
from shapewright.app.report.outputs.predict import operation_output, predict_output
from shapewright.app.report.predict import describe, operation_columns, verdict
from shapewright.app.report.review import gather_review, review_page
from shapewright.app.report.traced.outputs import traced_check_output
from shapewright.app.report.traced.report import (
    component_facts,
    describe_trace,
    memory_columns,
    prediction_facts,
)
from shapewright.core.units import format_percent
from shapewright.lint.check import check_scenario
from shapewright.lint.traced import check_trace
from shapewright.lowering.operations.gemm import Gemm
from shapewright.models.write import to_config_json
from shapewright.prediction.capacity.fit import estimate_capacity

if TYPE_CHECKING:
    from shapewright.app.explorer.device_lookup import DeviceLookup
    from shapewright.app.explorer.requests import Job
    from shapewright.app.report.columns import Column
    from shapewright.app.report.outputs.predict import OperationOutput, PredictOutput
    from shapewright.hardware.device import Device
    from shapewright.lowering.torch_trace.trace import Trace
    from shapewright.prediction.scenario import Scenario


Answer = dict[str, Any]


# Warnings that the page shows beside the number they are about.
_SHOWN_WARNINGS = ("does-not-fit",)
# The page shows these changes beside their fields.
_FIELD_OF_FOLLOWED = "overrides"


def answer_predict(
    scenario: Scenario, followed: Mapping[str, tuple[int, int]], baseline: Scenario | None = None
) -> Answer:
    """JSON and text output of ``predict``; with a baseline also the relative changes.

    Args:
        followed: Fields that the job changes without setting them: value without its changes, and value now.
    """
    prediction = scenario.predict()
    warnings = [note for note in prediction.warnings if note.code not in _SHOWN_WARNINGS]
    notes = [note for note in scenario.notes if note.field != _FIELD_OF_FOLLOWED]
    output = predict_output(prediction, scenario)
    answer = {
        **output.to_json(),
        "text": {
            "title": describe(output),
            "verdict": verdict(output),
            "notes": [*map(str, notes), *map(str, warnings)],
            "followed": {
                name: f"{name.replace('_', ' ')} {before:,} \u2192 {now:,}" for name, (before, now) in followed.items()
            },
            "operations": _operations(output),
        },
    }
    if baseline is not None:
        answer["moved"] = _compare_with_baseline(predict_output(baseline.predict(), baseline), output)
    return answer


def _operations(output: PredictOutput) -> Answer:
    """All rows of the operations table, with keys that identify their operations."""
    ranked = sorted(output.operations, key=lambda entry: -entry.total_time_s)
    of_name: dict[str, list[OperationOutput]] = {}
    for entry in output.operations:
        of_name.setdefault(entry.name, []).append(entry)
    keys = [
        {
            "name": entry.name,
            "pass": entry.pass_name,
            "explained": of_name[entry.name].index(entry),  # its place in the answer of explain
            "stage": entry.stage,
            "has_tiles": entry.kind == Gemm.kind and entry.tile is not None,
        }
        for entry in ranked
    ]
    return {**columns_to_json(operation_columns(output)), "keys": keys}


def columns_to_json(columns: Sequence[Column]) -> Answer:
    """Column headings and cell texts of a table, by row."""
    return {
        "columns": [{"name": column.name, "is_text": column.is_text, "rank": column.rank} for column in columns],
        "rows": [list(cells) for cells in zip(*(column.cells for column in columns), strict=True)],
    }


# Values compared with a baseline: label, attribute, and whether higher is better.
_COMPARED = (
    ("step", "step_time_s", False),
    ("tokens/s/device", "tokens_per_s_per_device", True),
    ("MFU", "mfu", True),
)


def _compare_with_baseline(before: PredictOutput, after: PredictOutput) -> list[Answer]:
    """Relative changes of the headline numbers between two steps."""
    pairs: list[tuple[str, float, float, bool | None]] = [
        (name, getattr(before, key), getattr(after, key), more) for name, key, more in _COMPARED
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


def answer_check(scenario: Scenario) -> Answer:
    """JSON and text output of ``check``."""
    output = check_output(check_scenario(scenario), scenario)
    return {
        **output.to_json(),
        "text": {
            "findings": [finding_words(finding) for finding in output.findings],
            "combined_fix": combined_fix_words(output.combined_fix) if output.combined_fix else "",
            "combined_saving": fix_saving_words(output.combined_fix) if output.combined_fix else "",
            "better_shapes": columns_to_json(better_shape_columns(output.better_shapes)),
        },
    }


def answer_capacity(scenario: Scenario) -> Answer:
    """JSON and text output of ``memory``."""
    output = memory_output(estimate_capacity(scenario))
    text = {
        "verdict": verdict_words(output),
        "components": component_rows(output),
        "largest": largest_sizes(output),
        "remedies": columns_to_json(remedy_columns(output)),
    }
    return {**output.to_json(), "text": text, "figure": plain(memory_figure(output))}


def answer_compare(job: Job, names: Sequence[str], usd_per_hour: dict[str, float], devices: DeviceLookup) -> Answer:
    """JSON and text output of ``compare``."""
    fields = job_fields(job)
    compared = [devices.find(name, **job.node_options).with_pricing(uncalibrated=job.uncalibrated) for name in names]
    found = compare(
        read_job_model(job),
        devices=compared,
        usd_per_hour={devices.find(name).name: price for name, price in usd_per_hour.items()},
        workload=fields["workload"],
        layout=fields["layout"],
        software=job.software,
    )
    output = compare_output(found)
    answer = output.to_json()
    notes = [line for device in compared for line in devices.calibration_notes(device)] if not job.uncalibrated else []
    return {
        **answer,
        "notes": list(dict.fromkeys([*answer["notes"], *notes])),
        "text": {"devices": columns_to_json(comparison_columns(output))},
        "figure": plain(comparison_figure(output)),
    }


def answer_explain(scenario: Scenario, operation: str) -> Answer:
    """JSON and text output of ``predict --explain``."""
    output = explain_operation(scenario.predict(), operation)
    return {**output.to_json(), "text": [explanation_rows(each) for each in output.operations]}


def answer_config(scenario: Scenario) -> Answer:
    """The model as a config.json object, in the format of the input."""
    return ConfigOutput(config=to_config_json(scenario.model, scenario.config)).to_json()


def answer_report(scenario: Scenario) -> str:
    """HTML page of ``report``."""
    return review_page(gather_review(scenario))


def answer_csv(scenario: Scenario) -> str:
    """All operations as CSV, with the scalar keys of ``predict --json``."""
    prediction = scenario.predict()
    rows = [plain(operation_output(entry)) for entry in prediction.operations]
    for row in rows:
        row["tile_m"], row["tile_n"] = row.pop("tile") or (None, None)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


class TracedModule(NamedTuple):
    """A traced module, and the optimizer of its training step; None for the default."""

    trace: Trace
    optimizer: str | None = None


def answer_trace(trace: Trace, device: Device, optimizer: str | None) -> Answer:
    """JSON output of ``check`` for a trace, with ``predict`` under ``step`` and ``memory`` under ``by_module``."""
    output = traced_check_output(check_trace(trace, device, optimizer=optimizer))
    return {
        **output.to_json(),
        "step": output.step.to_json(),
        "by_module": output.memory.to_json(),
        "text": {
            "title": describe_trace(output),
            "verdict": prediction_facts(output.step),
            "findings": [finding_words(finding) for finding in output.findings],
            "operations": columns_to_json(operation_columns(output.step)),
            "components": component_facts(output.memory),
            "modules": columns_to_json(memory_columns(output.memory)),
        },
        "figure": plain(figure(timeline_chart(output.memory.timeline_bytes, output.memory.backward_start))),
    }
