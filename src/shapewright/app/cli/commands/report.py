"""shapewright report: a design review of a shape as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from shapewright.app.cli.console import echo, refuse_unwritable, write_text_file
from shapewright.app.cli.help_pages import GroupedCommand
from shapewright.app.cli.options import question_options, scenario_from_options, software_option
from shapewright.app.cli.trace_options import pop_traced_job, trace_config_option, trace_options
from shapewright.core.units import format_bytes

_EPILOG = """\b
Examples:
  shapewright report gpt3-2.7b --device a100-sxm-40gb --attention unfused -o review.html
  shapewright report ./config.json --device h100-sxm-80gb --tp 8 --dp 8 -o review.html --pdf review.pdf
  shapewright report llama-3-8b --device h200-sxm-141gb --phase decode --no-search -o decode.html
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@question_options
@software_option
@trace_options
@trace_config_option
@click.option("-o", "--output", metavar="FILE", required=True, help="HTML file to write, such as review.html")
@click.option("--pdf", metavar="FILE", help="also print the page to a PDF; needs Chromium, Chrome or Edge")
@click.option("--no-search", is_flag=True, help="skip the search for faster shapes")
def command(
    config: str | None,
    device: str,
    software: str | None,
    output: str,
    pdf: str | None,
    no_search: bool,
    **given: Any,
) -> int:
    """Write a design review of CONFIG's shape as one self-contained HTML file.

    Verdict, figures, findings, memory, faster shapes of the same size, assumptions, and where every number comes from.
    The file is self-contained. Exit code 0: written; 2: bad input.
    """
    from shapewright.app.report.review import gather_review, review_page, review_subtitle

    if output == "-":
        raise click.UsageError("-o needs a file name, such as review.html")
    refuse_unwritable(output, pdf)
    job = pop_traced_job(config, device, given, software=software, pdf=pdf)
    if job is not None:
        from shapewright.app.report.traced.outputs import traced_check_output
        from shapewright.app.report.traced.report import describe_trace, review_page_of_trace
        from shapewright.lint.traced import check_trace

        traced = traced_check_output(check_trace(job.trace, job.device, optimizer=job.optimizer))
        write_text_file(output, review_page_of_trace(traced))
        echo(describe_trace(traced))
        echo(f"wrote {output}", err=True)
        return 0
    scenario = scenario_from_options(config, device, given, software=software)
    review = gather_review(scenario, no_search=no_search)
    page = review_page(review)
    write_text_file(output, page)
    echo(review_subtitle(review))
    echo(f"wrote {output} ({format_bytes(float(len(page.encode())))})", err=True)
    if pdf:
        from shapewright.app.report.page import print_to_pdf

        print_to_pdf(Path(output), Path(pdf))
        echo(f"wrote {pdf}", err=True)
    return 0
