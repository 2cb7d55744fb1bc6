"""Design review of a shape: its results, and their page with verdict, figures, findings, alternatives, provenance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from shapewright.app.figures.step import describe_ceilings, operations_chart, step_roofline_chart
from shapewright.app.report.catalogue import device_number_columns
from shapewright.app.report.check import better_shape_columns, finding_words
from shapewright.app.report.columns import Column, columns_of, fill
from shapewright.app.report.memory import memory_figure, remedy_columns, verdict_words
from shapewright.app.report.mfu import waterfall_figure
from shapewright.app.report.optimize.candidates import candidate_columns, describe_letters
from shapewright.app.report.optimize.search import describe_space
from shapewright.app.report.outputs.check import check_output
from shapewright.app.report.outputs.memory import memory_output
from shapewright.app.report.outputs.mfu import mfu_output
from shapewright.app.report.outputs.search import search_output, verdict_output
from shapewright.app.report.page import Figure, Section, Table, Words, render_page, table_of
from shapewright.app.report.predict import describe, operation_columns, verdict
from shapewright.core.errors import ShapewrightError
from shapewright.core.records import dataclass
from shapewright.core.units import format_percent
from shapewright.lint.check import check_scenario
from shapewright.lowering.counts import num_microbatches
from shapewright.optimize.search.request import SearchRequest
from shapewright.optimize.search.search import search_shapes
from shapewright.prediction.capacity.fit import estimate_capacity
from shapewright.prediction.scenario import Scenario
from shapewright.prediction.utilization.explain import explain_utilization
from shapewright.pricing.software import TUNED, load_software

if TYPE_CHECKING:
    from shapewright.app.report.outputs.check import CheckOutput, FindingOutput
    from shapewright.optimize.search.result import SearchResult
    from shapewright.prediction.capacity.fit import Capacity
    from shapewright.prediction.predict import Prediction
    from shapewright.prediction.utilization.explain import Utilization
    from shapewright.pricing.calibration.source import CalibrationSource

_OPERATIONS_LISTED = 40
_CANDIDATES_LISTED = 12
_INTERVAL_NOTE = "Ranges in brackets are 90 % intervals, from residuals on held-out shapes."
_STEP_NOTE = (
    "the prediction is for a tuned current stack: no stragglers, no data loading, a host that keeps up, clocks of "
    "kernels measured in isolation, so it tends to be optimistic; the interval covers older software, see --software"
)
_FINDING_COLUMNS = (
    Column("severity", "{severity}", is_text=True),
    Column("rule", "{code} {name}", is_text=True),
    Column("finding", lambda finding: finding_words(finding)["message"], is_text=True),
    Column("cost", "{cost_s}"),
    Column(
        "instead", lambda finding: "; ".join(fill("{title} ({kind})", one) for one in finding.suggestions), is_text=True
    ),
)
_RECORD_COLUMNS = (
    Column("operations", lambda one: one[0], is_text=True),
    Column("calibration record", lambda one: one[1].record_id or "none", is_text=True),
    Column("measured on", lambda one: _measured_on(one[1]), is_text=True),
)


@dataclass(frozen=True, kw_only=True)
class Review:
    """Results that a review is written from.

    Attributes:
        scenario: The reviewed scenario.
        check: Findings of the lint, with the prediction of the step.
        prediction: The same prediction, for figures; None where the layout cannot run at all.
        capacity: Memory against the device; None where the layout cannot run at all.
        utilization: Waterfall from the dense peak to the predicted step; None outside training.
        search: Faster shapes of the same size; None without a search.
        no_search: Why there was no search, in one line.
    """

    scenario: Scenario
    check: CheckOutput
    prediction: Prediction | None
    capacity: Capacity | None
    utilization: Utilization | None
    search: SearchResult | None
    no_search: str = ""


def review_subtitle(review: Review) -> str:
    """One line: model, device, workload, layout."""
    return describe(review.check.step) if review.check.step is not None else review.check.problem


def review_page(review: Review) -> str:
    """Render a review as one HTML document."""
    config = review.scenario.config
    title = f"{config.title} on {review.scenario.device.title}"
    return render_page(title, review_sections(review), subtitle=review_subtitle(review))


def review_sections(review: Review) -> list[Section]:
    """Sections of the page, the most important first."""
    prediction, step = review.prediction, review.check.step
    sections: list[Section] = [_verdict(review)]
    if prediction is not None:
        chart = operations_chart(prediction)
        sections.append(Figure(chart, caption=chart.alt, chart_height_px=110 + 28 * len(chart.categories)))
    if review.utilization is not None:
        sections.append(waterfall_figure(mfu_output(review.utilization)))
    if prediction is not None:
        roofline = step_roofline_chart(prediction)
        sections.append(
            Figure(roofline, caption=f"{roofline.alt} {'; '.join(describe_ceilings(prediction).values())}.")
        )
    sections.append(_findings(review.check.findings))
    if review.capacity is not None:
        sections += _memory(review.capacity)
    sections += _alternatives(review)
    if step is not None:
        listed = operation_columns(step, top=_OPERATIONS_LISTED)
        hidden = len(step.operations) - _OPERATIONS_LISTED
        note = f"{hidden} more operations are omitted." if hidden > 0 else ""
        sections.append(table_of("Operations, slowest first", listed, note=note))
    return [*sections, _assumptions(review), *_provenance(review)]


def _verdict(review: Review) -> Section:
    """The main results in one table."""
    if review.check.step is None:
        return Words("Verdict", [f"Cannot run: {review.check.problem}"])
    facts = verdict(review.check.step)
    if review.capacity is not None:
        facts["memory"] = verdict_words(memory_output(review.capacity))
    costly = [finding for finding in review.check.findings if finding.cost_s is not None]
    facts["findings"] = f"{len(review.check.findings)}" + (
        f"; the costliest, {costly[0].code} {costly[0].name}, takes {format_percent(costly[0].cost_fraction or 0.0)} "
        "of the step"
        if costly
        else ""
    )
    if review.search is not None and review.search.verdict is not None:
        facts["shape of this size"] = verdict_output(review.search.verdict).text
    elif review.search is not None and review.search.candidates:
        best = review.search.candidates[0]
        facts["fastest shape of this size"] = (
            f"{best.speedup.factor:.3f}x ({best.speedup.low:.3f} to {best.speedup.high:.3f}), "
            f"changes {', '.join(best.changed_fields)}"
        )
    rows = tuple(facts.items())
    return Table("Verdict", ("what", "predicted"), rows, words=("what", "predicted"), note=_INTERVAL_NOTE)


def _findings(findings: Sequence[FindingOutput]) -> Section:
    """Findings by predicted cost."""
    if not findings:
        return Words("Findings", ["No findings."])
    note = "exact: same function; runtime: batch, format or layout; retrain: a different model."
    return table_of("Findings", columns_of(findings, _FINDING_COLUMNS), note=note)


def _memory(capacity: Capacity) -> list[Section]:
    """Memory of each stage, and options that fit."""
    output = memory_output(capacity)
    sections: list[Section] = [memory_figure(output)]
    if output.remedies:
        sections.append(table_of("Options that fit: same devices first, then by device time", remedy_columns(output)))
    return sections


def _alternatives(review: Review) -> list[Section]:
    """Nearest and best shapes of the same size."""
    sections: list[Section] = []
    if review.check.better_shapes:
        sections.append(table_of("Nearest better shapes", better_shape_columns(review.check.better_shapes)))
    found = review.search
    if found is None:
        return (
            [*sections, Words("Faster shapes of the same size", [review.no_search])] if review.no_search else sections
        )
    output = search_output(found)
    verdict = [] if output.verdict is None else [Words("Verdict of the search", [f"{output.verdict.text}."])]
    if not output.candidates:
        words = Words("Faster shapes of the same size", [f"None: {describe_space(output)}."])
        return [*sections, *verdict, words]
    shown = output.candidates[:_CANDIDATES_LISTED]
    note = f"{describe_letters(shown, candidate_columns(shown))}. {describe_space(output)}."
    return [*sections, *verdict, table_of("Faster shapes of the same size", candidate_columns(shown), note=note)]


def _assumptions(review: Review) -> Section:
    """Notes, warnings, and the complete scenario."""
    step = review.check.step
    lines: list[str] = [*review.scenario.notes, *(step.warnings if step is not None else ())]
    if step is not None and step.workload.phase == "train" and step.software == TUNED:
        lines.append(_STEP_NOTE)
    scenario = review.scenario
    complete = json.dumps(
        {
            "config": asdict(scenario.config),
            "workload": asdict(scenario.workload),
            "layout": asdict(scenario.layout),
        },
        indent=1,
        default=str,
    )
    return Words("Assumptions, and the complete scenario", list(dict.fromkeys(lines)), code=complete)


def _provenance(review: Review) -> list[Section]:
    """Calibration records of the step, and the numbers of the device with their sources."""
    device = review.scenario.device
    sections: list[Section] = []
    if review.prediction is not None:
        calibration = review.prediction.calibration
        rows = [(kind, part) for kind, source in calibration.items() for part in source.parts]
        records = columns_of(rows, _RECORD_COLUMNS)
        sections.append(table_of("Calibration records", records))
    return [
        *sections,
        table_of(f"Numbers of {device.title}", device_number_columns(device), note=device.notes or ""),
    ]


def _measured_on(source: CalibrationSource) -> str:
    """Device that a record was measured on, in words; what stands in for a record where there is none."""
    if source.is_borrowed:
        return f"borrowed from {source.donor}"
    if source.is_roofline_bound:
        return "not measured: bound of the data sheet"
    return f"assumed: {source.assumption}" if source.assumption else "this device"


def gather_review(scenario: Scenario, *, no_search: bool = False) -> Review:
    """Compute all results of a review.

    Args:
        no_search: Skip the search for faster shapes.

    Raises:
        ShapewrightError: the step cannot be predicted, and no rule explains why.
    """
    report = check_scenario(scenario)
    prediction = report.prediction
    search, no_search_words = None, "Skipped (--no-search)."
    if not no_search:
        search, no_search_words = _search_shapes(scenario, prediction)
    # FLOP conventions, and so the waterfall, exist for training alone.
    is_trained = prediction is not None and scenario.workload.phase == "train"
    return Review(
        scenario=scenario,
        check=check_output(report, scenario),
        prediction=prediction,
        capacity=None if prediction is None else estimate_capacity(scenario),
        utilization=explain_prediction(prediction) if prediction is not None and is_trained else None,
        search=search,
        no_search=no_search_words,
    )


def _search_shapes(scenario: Scenario, prediction: Prediction | None) -> tuple[SearchResult | None, str]:
    """Faster shapes, or the reason why there is no search."""
    if prediction is None:
        return None, "Skipped: the shape itself cannot run."
    try:
        found = search_shapes(scenario, SearchRequest(), notes=())
    except ShapewrightError as error:
        return None, f"The search failed: {error}"
    return found, ""


def explain_prediction(prediction: Prediction) -> Utilization:
    """Break a predicted training step down into the waterfall of a measured one.

    Raises:
        WorkloadError: the step is not a training step.
    """
    workload, layout = prediction.workload, prediction.layout
    per_step = num_microbatches(workload, layout) * layout.data_parallel
    scenario = Scenario.of(
        prediction.config,
        prediction.device,
        replace(workload, global_batch_size=per_step * workload.micro_batch_size),
        layout,
        load_software(prediction.software),
    )
    return explain_utilization(scenario, seconds=prediction.step_time_s, num_devices=layout.num_devices)
