"""Gather a review: ask check, memory, utilization and search what the page of a design review tells."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shapewright.capacity import estimate_capacity
from shapewright.errors import ShapewrightError
from shapewright.lint import check_model
from shapewright.lowering import num_microbatches
from shapewright.report.design_review import Review
from shapewright.search import SearchRequest, search_shapes
from shapewright.utilization import explain_utilization

if TYPE_CHECKING:
    from shapewright.capacity import Capacity
    from shapewright.lint import CheckReport
    from shapewright.predict import Prediction
    from shapewright.question import Question
    from shapewright.search import SearchResult
    from shapewright.utilization import Utilization


def gather_review(question: Question, *, no_search: bool = False) -> Review:
    """Ask everything that the page tells.

    Args:
        question: What it is about.
        no_search: Leave out the search for faster shapes.

    Raises:
        ShapewrightError: there can be no prediction, and no rule explains why.
    """
    check = check_model(question.config, **question.terms)
    search, no_search_words = None, "Not looked for: --no-search was given."
    if not no_search:
        search, no_search_words = _search(question, check)
    return Review(
        question=question,
        check=check,
        capacity=_capacity(question, check),
        utilization=_utilization(question, check),
        search=search,
        no_search=no_search_words,
    )


def _capacity(question: Question, check: CheckReport) -> Capacity | None:
    """Memory against the device, where the layout can run."""
    if check.prediction is None:
        return None
    return estimate_capacity(question.config, **question.terms, notes=question.notes)


def _search(question: Question, check: CheckReport) -> tuple[SearchResult | None, str]:
    """Faster shapes, or why none could be looked for."""
    if check.prediction is None:
        return None, "Not looked for: the shape itself cannot run."
    try:
        found = search_shapes(
            question.model,
            question.device,
            question.workload,
            question.layout,
            SearchRequest(),
            per_step=question.workload.phase == "decode",
            uncalibrated=question.uncalibrated,
            software=question.software,
        )
    except ShapewrightError as error:
        return None, f"None could be looked for: {error}"
    return found, ""


def _utilization(question: Question, check: CheckReport) -> Utilization | None:
    """From the peak down to the predicted step; only training has conventions to count it by."""
    if check.prediction is None or question.workload.phase != "train":
        return None
    return explain_prediction(check.prediction, uncalibrated=question.uncalibrated)


def explain_prediction(prediction: Prediction, *, uncalibrated: bool) -> Utilization:
    """Say where a predicted training step goes, as if it had been measured.

    Raises:
        WorkloadError: it is no training step.
    """
    workload, layout = prediction.workload, prediction.layout
    per_step = num_microbatches(workload, layout) * layout.data_parallel
    return explain_utilization(
        prediction.config,
        device=prediction.device,
        workload=replace(workload, global_batch_size=per_step * workload.micro_batch_size),
        seconds=prediction.step_time_s,
        num_devices=layout.num_devices,
        layout=layout,
        uncalibrated=uncalibrated,
        software=prediction.software,
    )
