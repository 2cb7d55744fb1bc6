"""Options of a Ray cluster, apart from others since few commands have them."""

from __future__ import annotations

from typing import Any

import click

from shapewright.app.cli.device_options import Command
from shapewright.core.ray_cluster import ENGINES

ENGINE: dict[str, Any] = {
    "type": click.Choice(ENGINES),
    "help": "where to run: here (default), or on a Ray cluster (extra ray)",
}
"""Keywords of --engine."""
ADDRESS: dict[str, Any] = {
    "metavar": "ADDRESS",
    "help": "Ray cluster: auto, HOST:PORT, ray://HOST:PORT, or local to start one (default)",
}
"""Keywords of --address."""


def cluster_options(command: Command) -> Command:
    """Add --engine and --address to a command."""
    command = click.option("--address", **ADDRESS)(command)
    return click.option("--engine", default=ENGINES[0], **ENGINE)(command)
