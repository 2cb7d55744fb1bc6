"""shapewright compare: the same job over devices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shapewright.app.cli.console import echo, print_output, write_chart
from shapewright.app.cli.device_options import calibration_option, compared_devices, given_nodes, node_options
from shapewright.app.cli.help_pages import GroupedCommand
from shapewright.app.cli.names import complete_devices
from shapewright.app.cli.options import api_keywords, job_options, software_option
from shapewright.app.cli.param_types import PRICES

if TYPE_CHECKING:
    from shapewright.app.report.outputs.compare import CompareOutput

_EPILOG = """\b
Examples:
  shapewright compare llama-3-8b --devices a100-sxm-80gb,h100-sxm-80gb,h200-sxm-141gb --tp 8 --micro-batch-size 1
  shapewright compare gpt3-2.7b --devices a100-sxm-80gb,h100-sxm-80gb --usd-per-hour a100-sxm-80gb=1.5,h100-sxm-80gb=2.8
  shapewright compare llama-3-8b --devices l4,l40s,h100-sxm-80gb --phase decode --context-len 4096 --json
  shapewright compare ./config.json --devices all --dtype fp8 --phase prefill
  shapewright compare llama-3-8b --devices h100-sxm-80gb,h200-sxm-141gb,b200-sxm-180gb --tp 8 -o devices.svg
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@job_options
@click.option(
    "--devices",
    required=True,
    metavar="NAME,NAME,...",
    shell_complete=complete_devices,
    help="device names, aliases or TOML files, comma-separated; or 'all'",
)
@calibration_option
@node_options
@software_option
@click.option(
    "--usd-per-hour", type=PRICES, metavar="NAME=USD,...", help="price of one device for an hour, for tokens per dollar"
)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@click.option("--html", metavar="FILE", help="also write an HTML page with the figure")
@click.option("-o", "--output", metavar="FILE", help="also draw the figure, as .svg, .png or .pdf")
def command(config: str | None, devices: str, as_json: bool, html: str | None, output: str | None, **given: Any) -> int:
    """Compare devices on the same job of CONFIG: step time, tokens per second, dollar and joule, what each is bound by.

    A device that cannot run the job is listed with the reason.
    """
    from shapewright.app.api.steps import compare
    from shapewright.app.report.compare import comparison_page, print_comparison
    from shapewright.app.report.outputs.compare import compare_output

    keywords = api_keywords(given, with_defaults=True)
    found = compare(config, devices=compared_devices(_read_names(devices)), **keywords)
    if words := given_nodes():
        found = replace(found, notes=(f"every device in {words}", *found.notes))
    report = compare_output(found)
    if output:
        _draw(report, output)
    print_output(report, print_comparison, as_json=as_json, html=html, page=comparison_page)
    return 0


def _draw(report: CompareOutput, output: str) -> None:
    """Draw the figure into a file."""
    from shapewright.app.figures.devices import comparison_chart
    from shapewright.app.figures.matplotlib_files import FORMATS

    if Path(output).suffix not in FORMATS:
        raise click.UsageError(f"-o {output!r} does not end in {', '.join(FORMATS)}; --html writes a page")
    write_chart(comparison_chart(report), output)
    echo(f"wrote {output}", err=True)


def _read_names(text: str) -> list[str]:
    """Names between commas; ``all`` is every device of the package."""
    if text.strip() == "all":
        from shapewright.hardware.loader import list_devices

        return list(list_devices())
    return [name.strip() for name in text.split(",") if name.strip()]
