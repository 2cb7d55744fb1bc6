"""shapewright serve: the explorer in the browser."""

from __future__ import annotations

from typing import Any

import click

from shapewright.app.cli.help_pages import GroupedCommand
from shapewright.app.cli.options import field_options
from shapewright.app.cli.trace_options import pop_traced_job, trace_config_option, trace_options
from shapewright.core.errors import MissingExtraError

_EPILOG = """\b
Examples:
  shapewright serve
  shapewright serve --port 9000 --no-browser
  shapewright serve --host 0.0.0.0
  shapewright serve --store measured.sqlite --calibration mine.json
  shapewright serve my_model.py:build --inputs "tokens=int64[4,2048]" --dtype bf16
"""

# Fields of a traced module.
_TRACED = ("phase", "dtype", "optimizer", "micro_batch_size", "seq_len")
# Options of the server itself.
_SERVER = ("host", "port", "store_path", "calibration", "public_names", "frame_origins")


@click.command(cls=GroupedCommand, epilog=_EPILOG)
@field_options({"model": (), "workload": _TRACED, "layout": ()}, needs_device=False)
@trace_options
@trace_config_option
@click.option("--device", default="h100-sxm-80gb", metavar="NAME", help="device that the page of a module shows first")
@click.option("--port", type=click.IntRange(0, 65535), default=8265, show_default=True, help="port; 0: a free one")
@click.option("--no-browser", is_flag=True, help="only print the address")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    metavar="ADDRESS",
    help="address to listen on; on any other than loopback, every request needs the printed token",
)
@click.option(
    "--store", "store_path", default="", metavar="PATH", help="store of measurements to show with predictions"
)
@click.option("--calibration", default="", metavar="FILE", help="your own calibration of a device")
@click.option(
    "--public",
    "public_names",
    multiple=True,
    metavar="NAME",
    help="serve everyone who opens it under this host name, without a token: no files, searches of at most 20 s",
)
@click.option(
    "--frame-origin",
    "frame_origins",
    multiple=True,
    metavar="ORIGIN",
    help="site that may show the page in a frame, such as https://huggingface.co",
)
def command(config: str | None, device: str, no_browser: bool, **given: Any) -> int:
    """Open the explorer in the browser: shapes, waves, memory, plans; with a JSON API.

    Sliders for every field, predicted at each move; local maxima to click, findings to apply, a search to run. It
    listens on this machine only, reads no files but store and calibration, and sends nothing anywhere. CONFIG is a
    PyTorch module to trace (FILE.py:CALLABLE, or --trace), which gets a page of its own. Needs the serve extra
    (FastAPI, uvicorn).
    """
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        raise MissingExtraError(
            "the explorer needs FastAPI and uvicorn, which are not installed; pip install 'shapewright[serve]'"
        ) from None
    from shapewright.app.explorer.serve import serve
    from shapewright.app.explorer.views.answers import TracedModule

    server = {name: given.pop(name) for name in _SERVER}
    job = pop_traced_job(config, device, given)
    if job is None and (config is not None or any(value is not None for value in given.values())):
        raise click.UsageError(
            "the page chooses model and workload; give FILE.py:CALLABLE with --inputs, or --trace, for a module"
        )
    serve(
        open_browser=not no_browser,
        say=click.echo,
        traced=TracedModule(job.trace, job.optimizer) if job is not None else None,
        first_device=job.device.name if job is not None else "",
        **server,
    )
    return 0
