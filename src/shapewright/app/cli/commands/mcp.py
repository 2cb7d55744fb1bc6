"""shapewright mcp: the MCP server for coding agents."""

from __future__ import annotations

from pathlib import Path

import click

from shapewright.app.cli.help_pages import GroupedCommand
from shapewright.app.cli.param_types import SECONDS
from shapewright.core.errors import MissingExtraError, ShapewrightError

_EPILOG = """\b
Examples:
  shapewright mcp
  shapewright mcp --root . --limit 30s
"""


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@click.option(
    "--root",
    "roots",
    multiple=True,
    metavar="FOLDER",
    help="folder whose config files the tools may read, by paths relative to it; may be repeated; without it, none",
)
@click.option("--hub", "allows_hub", is_flag=True, help="let the tools download config.json files from the hub")
@click.option("--limit", "limit_s", type=SECONDS, default="60s", show_default=True, help="time limit of a call")
def command(roots: tuple[str, ...], allows_hub: bool, limit_s: float) -> int:
    """Serve check, predict, search, design, plan and serve-plan to coding agents (Model Context Protocol).

    It speaks on standard input and output, and is started by the agent, as in .mcp.json. It reads no file outside of
    --root, runs one call at a time, and sends nothing anywhere. Needs the mcp extra.
    """
    try:
        import mcp  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "the MCP server needs the mcp package, which is not installed; pip install 'shapewright[mcp]'"
        ) from None
    from shapewright.app.integrations.mcp_inputs import Access
    from shapewright.app.integrations.mcp_server import make_server

    folders = [Path(root).resolve() for root in roots]
    for folder in folders:
        if not folder.is_dir():
            raise ShapewrightError(f"--root {folder} is no folder; give one that holds config files")
    make_server(Access(tuple(folders), allows_hub, limit_s)).run("stdio")
    return 0
