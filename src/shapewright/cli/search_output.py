"""What 'shapewright search' gives: a report, files, and measurements of the shapes that it found."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from shapewright.cli.console import (
    counting_line,
    make_console,
    print_json,
    refuse_unwritable,
    write_json_file,
    write_text_file,
)
from shapewright.errors import ConfigError

if TYPE_CHECKING:
    from shapewright.search import Candidate, SearchResult
    from shapewright.search.verified import Verification


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What is printed: a table, or one of these instead.

    Attributes:
        explain: Rank of the shape to hold against the baseline, operation by operation.
        as_json: Print JSON.
        as_csv: Print a row for each shape.

    Raises:
        UsageError: more than one of them.
    """

    explain: int | None
    as_json: bool
    as_csv: bool

    def __post_init__(self) -> None:
        if self.as_json + self.as_csv + (self.explain is not None) > 1:
            raise click.UsageError("--json, --csv and --explain contradict each other: give one of them")


def check_files(output: str | None, html: str | None, format_name: str) -> None:
    """Refuse files and forms that could not be written, before the search.

    Raises:
        UsageError: a form without a file, or standard output as a file.
        ShapewrightError: there is no such form, or a file cannot be written.
    """
    if format_name != "hf":
        from shapewright.formats import check_format

        check_format(format_name)
        if not output:
            raise click.UsageError("--format has no effect without -o: give -o FILE, or leave it out")
    if "-" in (output, html):
        raise click.UsageError("-o and --html need a file name: standard output carries the report")
    refuse_unwritable(output, html)


def show_result(result: SearchResult, verified: Verification | None, shown: Shown) -> None:
    """Print what was found, and what was measured of it."""
    if shown.as_csv:
        from shapewright.report.search_json import search_to_rows

        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(search_to_rows(result))
        click.echo(text.getvalue(), nl=False)
        return
    if shown.as_json:
        from shapewright.report.search_json import search_to_json
        from shapewright.report.verification import verification_to_json

        measured = {} if verified is None else {"verification": verification_to_json(verified)}
        print_json({**search_to_json(result), **measured})
        return
    if shown.explain is not None:
        from shapewright.report.side_by_side import print_side_by_side

        print_side_by_side(result, _ranked(result, shown.explain, "--explain"), make_console())
    else:
        from shapewright.report.search_text import print_search

        print_search(result, make_console())
    if verified is not None:
        from shapewright.report.verification import print_verification

        print_verification(verified, make_console())


def write_page(result: SearchResult, path: str) -> None:
    """Write the result as one page."""
    from shapewright.report.search_page import search_page

    write_text_file(path, search_page(result))
    click.echo(f"wrote {path}", err=True)


def write_shape(result: SearchResult, rank: int, output: str, format_name: str) -> None:
    """Write the shape of a rank in a form, and say what the form cannot hold."""
    candidate = _ranked(result, rank, "--pick")
    prediction = candidate.prediction
    if format_name == "hf":
        from shapewright.config import write_back

        write_json_file(output, write_back(result.model, candidate.config))
    else:
        from shapewright.formats import write_format

        text = write_format(format_name, candidate.config, workload=prediction.workload, layout=prediction.layout)
        write_text_file(output, text)
    words = f"wrote {output} (rank {candidate.rank})"
    if format_name == "hf":
        words += _flags_beside(candidate)
    click.echo(words, err=True)


def _flags_beside(candidate: Candidate) -> str:
    """What of a shape no config.json can say: batch, layout and recomputation, as flags."""
    layout, workload = candidate.prediction.layout, candidate.prediction.workload
    flags = {
        "micro_batch": [f"--micro-batch-size {workload.micro_batch_size}"],
        "recompute": [f"--recompute {workload.recompute}"],
        "layout": [
            f"--{name.replace('_', '-')} {getattr(layout, name)}"
            for name in ("tensor_parallel", "pipeline_parallel", "data_parallel", "context_parallel", "expert_parallel")
        ],
    }
    said = [flag for change, words in flags.items() if change in candidate.changed_fields for flag in words]
    return f"; it is fastest with {' '.join(said)}" if said else ""


def _ranked(result: SearchResult, rank: int, option: str) -> Candidate:
    if not 1 <= rank <= len(result.candidates):
        found = f"ranks 1 to {len(result.candidates)}" if result.candidates else "no faster shape"
        raise ConfigError(f"{option} {rank}: the search found {found}; give one of them, or a higher --top")
    return result.candidates[rank - 1]


def measure_shapes(result: SearchResult, num_shapes: int, budget_s: float) -> Verification:
    """Measure on the GPU of this machine, or on its CPU where there is none."""
    from shapewright.bench.verify import verify_search
    from shapewright.bench.worker import Worker, WorkerOptions

    show = counting_line("measurements")
    with Worker(WorkerOptions(cpu=not _has_gpu())) as worker:
        return verify_search(result, num_shapes, worker, budget_s=budget_s, **({"on_case": show} if show else {}))


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False  # opening the CPU says what is missing
    return bool(torch.cuda.is_available())
