"""--experiments: small models that would decide between shapes, as a file of runs for ``shapewright proxy``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from shapewright.app.cli.console import write_text_file

if TYPE_CHECKING:
    from shapewright.app.report.outputs.loss.experiments import ExperimentsOutput
    from shapewright.optimize.design import DesignResult
    from shapewright.optimize.search import SearchResult

experiments_option = click.option(
    "--experiments",
    metavar="FILE",
    help="propose small models to train that would settle undecided shapes, and write them for 'shapewright proxy'",
)


def write_experiments(result: SearchResult | DesignResult, path: str) -> ExperimentsOutput:
    """Write the runs that would decide between the shapes."""
    from shapewright.app.report.outputs.loss.experiments import experiments_output, runs_file
    from shapewright.optimize.experiments import experiments_of

    plan = experiments_of(result)
    write_text_file(path, runs_file(plan))
    click.echo(f"wrote {path}", err=True)
    return experiments_output(plan, path)
