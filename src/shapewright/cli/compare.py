"""shapewright compare: the same job over devices."""

from __future__ import annotations

from typing import Any

import click

from shapewright.cli.console import make_console, print_json
from shapewright.cli.options import GroupedCommand, group_options, job_options

_EPILOG = """\b
Examples:
  shapewright compare llama-3-8b --devices a100-sxm-80gb,h100-sxm-80gb,h200-sxm-141gb --tp 8 --micro-batch-size 1
  shapewright compare gpt3-2.7b --devices a100-sxm-80gb,h100-sxm-80gb --usd-per-hour a100-sxm-80gb=1.5,h100-sxm-80gb=2.8
  shapewright compare llama-3-8b --devices l4,l40s,h100-sxm-80gb --phase decode --context-len 4096 --json
  shapewright compare ./config.json --devices all --dtype fp8 --phase prefill
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@job_options
@click.option(
    "--devices",
    required=True,
    metavar="NAME,NAME,...",
    help="device names, aliases or TOML files, comma-separated; or 'all'",
)
@click.option("--usd-per-hour", metavar="NAME=USD,...", help="price of one device for an hour, for tokens per dollar")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def command(
    config: str | None,
    uncalibrated: bool,
    devices: str,
    usd_per_hour: str | None,
    as_json: bool,
    **given: Any,
) -> int:
    """Compare devices on the same job of CONFIG: step time, tokens per second, dollar and joule, what each waits for.

    A device that cannot run the job is listed with the reason.
    """
    from shapewright.api import compare

    groups = group_options(given)
    found = compare(
        config,
        devices=_read_names(devices),
        usd_per_hour=_read_prices(usd_per_hour or ""),
        workload=groups["workload"],
        layout=groups["layout"],
        overrides=groups["model"],
        uncalibrated=uncalibrated,
    )
    if as_json:
        from shapewright.report.compare import comparison_to_json

        print_json(comparison_to_json(found))
    else:
        from shapewright.report.compare import print_comparison

        print_comparison(found, make_console())
    return 0


def _read_names(text: str) -> list[str]:
    """Names between commas; ``all`` is every device of the package."""
    if text.strip() == "all":
        from shapewright.hardware import list_devices

        return list(list_devices())
    return [name.strip() for name in text.split(",") if name.strip()]


def _read_prices(text: str) -> dict[str, float]:
    """Prices by name, from ``name=price`` between commas."""
    prices = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, price = part.rpartition("=")
        try:
            prices[name.strip()] = float(price)
        except ValueError:
            name = ""
        if not name:
            raise click.UsageError(f"--usd-per-hour {part!r} is not of the form NAME=USD, such as h100-sxm-80gb=2.1")
    return prices
