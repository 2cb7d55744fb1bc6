"""shapewright report: the case for or against a shape, as one file to hand on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shapewright.cli.console import write_text_file
from shapewright.cli.options import GroupedCommand, ask_from_options, question_options
from shapewright.errors import ShapewrightError
from shapewright.units import format_bytes

if TYPE_CHECKING:
    from shapewright.capacity import Capacity
    from shapewright.lint import CheckReport
    from shapewright.question import Question
    from shapewright.report.design_review import Review
    from shapewright.search import SearchResult
    from shapewright.utilization import Utilization

_EPILOG = """\b
Examples:
  shapewright report gpt3-2.7b --device a100-sxm-40gb --attention unfused -o review.html
  shapewright report ./config.json --device h100-sxm-80gb --tp 8 --dp 8 -o review.html --pdf review.pdf
  shapewright report llama-3-8b --device h200-sxm-141gb --phase decode --no-search -o decode.html
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@question_options
@click.option("-o", "--output", metavar="FILE", required=True, help="the page to write, such as review.html")
@click.option("--pdf", metavar="FILE", help="print the page to a PDF too; needs Chromium, Chrome or Edge")
@click.option("--no-search", is_flag=True, help="leave out the search for faster shapes")
def command(
    config: str | None,
    device: str,
    uncalibrated: bool,
    output: str,
    pdf: str | None,
    no_search: bool,
    **given: Any,
) -> int:
    """Write the case for or against CONFIG's shape as one self-contained HTML file, for a design review.

    Verdict, figures, findings, memory, faster shapes of the same size, assumptions, and where every number comes from.
    The file needs nothing from elsewhere. Exit code 0: written, whatever it says; 2: bad input.
    """
    from shapewright.report.design_review import review_sections, review_subtitle, review_title
    from shapewright.report.page import render_page

    if output == "-":
        raise click.UsageError("-o needs a file name, such as review.html")
    question = ask_from_options(config, device, given)
    review = _review(question, uncalibrated=uncalibrated, no_search=no_search)
    page = render_page(review_title(review), review_sections(review), subtitle=review_subtitle(review))
    write_text_file(output, page)
    click.echo(review_subtitle(review))
    click.echo(f"wrote {output} ({format_bytes(float(len(page.encode())))})", err=True)
    if pdf:
        from shapewright.report.pdf import print_to_pdf

        print_to_pdf(Path(output), Path(pdf))
        click.echo(f"wrote {pdf}", err=True)
    return 0


def _review(question: Question, *, uncalibrated: bool, no_search: bool) -> Review:
    """Ask everything that the page tells."""
    from shapewright.lint import check_model
    from shapewright.report.design_review import Review

    check = check_model(
        question.config,
        device=question.device,
        workload=question.workload,
        layout=question.layout,
        uncalibrated=uncalibrated,
    )
    search, no_search_words = None, "Not looked for: --no-search was given."
    if not no_search:
        search, no_search_words = _search(question, check, uncalibrated=uncalibrated)
    return Review(
        question=question,
        check=check,
        capacity=_capacity(question, check, uncalibrated=uncalibrated),
        utilization=_utilization(question, check, uncalibrated=uncalibrated),
        search=search,
        no_search=no_search_words,
    )


def _capacity(question: Question, check: CheckReport, *, uncalibrated: bool) -> Capacity | None:
    """Memory against the device, where the layout can run."""
    from shapewright.capacity import estimate_capacity

    if check.prediction is None:
        return None
    return estimate_capacity(
        question.config,
        device=question.device,
        workload=question.workload,
        layout=question.layout,
        notes=question.notes,
        uncalibrated=uncalibrated,
    )


def _search(question: Question, check: CheckReport, *, uncalibrated: bool) -> tuple[SearchResult | None, str]:
    """Faster shapes, or why none could be looked for."""
    from shapewright.search import SearchRequest, search_shapes

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
            uncalibrated=uncalibrated,
        )
    except ShapewrightError as error:
        return None, f"None could be looked for: {error}"
    return found, ""


def _utilization(question: Question, check: CheckReport, *, uncalibrated: bool) -> Utilization | None:
    """From the peak down to the predicted step; only training has conventions to count it by."""
    from shapewright.lowering import num_microbatches
    from shapewright.utilization import explain_utilization

    if check.prediction is None or question.workload.phase != "train":
        return None
    per_step = num_microbatches(question.workload, question.layout) * question.layout.data_parallel
    whole = replace(question.workload, global_batch_size=per_step * question.workload.micro_batch_size)
    return explain_utilization(
        question.config,
        device=question.device,
        workload=whole,
        seconds=check.prediction.step_time_s,
        num_devices=question.layout.num_devices,
        layout=question.layout,
        uncalibrated=uncalibrated,
    )
