"""Entry point: commands by name, loaded when used; one line for every error a user can cause."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import click

from shapewright import __version__
from shapewright.errors import ShapewrightError, close_names

EXIT_FINE, EXIT_USAGE = 0, 2

# Command -> (module, one-line help). Modules load when their command runs, so that --help stays quick.
_COMMANDS = {
    "predict": ("shapewright.cli.predict", "Predict step time, throughput and memory, operation by operation."),
    "check": ("shapewright.cli.check", "Lint a model's shape against a device, with what each flaw costs."),
    "memory": ("shapewright.cli.memory", "Estimate memory: does it fit, what is the largest batch, what to turn on."),
    "compare": ("shapewright.cli.compare", "Compare devices on the same job: time, tokens per dollar and joule."),
    "mfu": ("shapewright.cli.mfu", "Explain a measured training step: MFU, HFU, and where the rest went."),
    "plan": ("shapewright.cli.plan", "Plan how to spread a training job over devices."),
    "serve-plan": (
        "shapewright.cli.serve_plan",
        "Plan serving: layout, batch, format, time to first token.",
    ),
    "flops": ("shapewright.cli.flops", "Count FLOPs of a token by every convention; days and cost of a training run."),
    "params": ("shapewright.cli.params", "Count parameters, by component."),
    "batch": ("shapewright.cli.batch", "Solve global batch = micro-batch x replicas x accumulation."),
    "search": ("shapewright.cli.search", "Find shapes of the same size that run faster."),
    "report": ("shapewright.cli.report", "Write the case for or against a shape as one HTML file."),
    "serve": ("shapewright.cli.serve", "Open the explorer: all of it to look at, in the browser."),
    "devices": ("shapewright.cli.devices", "List devices, or show one with its sources."),
    "models": ("shapewright.cli.models", "List model presets."),
    "rule": ("shapewright.cli.rule", "Print a rule's page."),
    "accuracy": ("shapewright.cli.accuracy", "Compare predictions with measured tables."),
    "bench": ("shapewright.cli.bench", "Measure operations on this machine's GPU or CPU."),
    "calibrate": ("shapewright.cli.calibrate", "Fit calibration records to a store of measurements."),
    "plot": ("shapewright.cli.plot", "Draw measured and predicted on the same axes."),
    "store": ("shapewright.cli.store", "Look into a store of measurements, merge, import, export."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Name the commands, in the order of use."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import one command."""
        if cmd_name not in _COMMANDS:
            return None
        module, _ = _COMMANDS[cmd_name]
        command = import_module(module).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command, or name those that are spelled like it."""
        if not args[0].startswith("-") and args[0] not in _COMMANDS:
            words = f"no command {args[0]!r}; {close_names(args[0], _COMMANDS)}"
            raise click.UsageError(words.rstrip("; "), ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; a reader that goes away ends it before click turns that into exit code 1, findings here."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _drop_output()
            raise click.exceptions.Exit(EXIT_FINE) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


_EPILOG = """\b
Examples:
  shapewright check gpt3-2.7b --device a100-sxm-40gb
  shapewright predict llama-3-8b --device h100-sxm-80gb --tp 2 --dtype fp8
  shapewright predict ./config.json --device my-gpu.toml --phase decode --context-len 8192
  shapewright check --hidden-size 4096 --num-layers 32 --num-heads 32 --vocab-size 50257 --device mi300x
  shapewright memory llama-3-8b --device h100-sxm-80gb --dp 8 --zero-stage 1 --micro-batch-size 1
  shapewright devices show h200-sxm-141gb
"""


@click.group(
    cls=LazyGroup, epilog=_EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}
)
@click.version_option(__version__, prog_name="shapewright")
def cli() -> None:
    """Which transformer shape fits your hardware, what a bad one costs, and what to use instead."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 fine, 1 findings, 2 usage or bad input."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name outside the terminal's alphabet is no error
    try:
        code = cli.main(args=arguments, prog_name="shapewright", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(EXIT_USAGE)
    except click.ClickException as error:
        _fail(_usage_words(error))
    except ShapewrightError as error:
        _fail(str(error))
    except BrokenPipeError:
        # The reader of our output went away (shapewright ... | head): nothing is wrong.
        _drop_output()
        sys.exit(EXIT_FINE)
    except OSError as error:
        _drop_output()
        _fail(f"cannot write the output ({error.strerror or error}); write it to another place")
    except (KeyboardInterrupt, click.Abort):
        click.echo("stopped", err=True)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else EXIT_FINE)


def _usage_words(error: click.ClickException) -> str:
    """What click has to say, in one line that ends with where to look."""
    words = " ".join(error.format_message().split()).rstrip(".")
    if isinstance(error, click.MissingParameter) and error.param is not None and error.param.name == "device":
        return f"{words}; give the name of a device or a device file, 'shapewright devices' lists all"
    path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx is not None else "shapewright"
    return f"{words}; see '{path} --help'"


def _drop_output() -> None:
    """Send what is still buffered nowhere, or the interpreter would complain about it at its end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> None:
    click.echo(f"shapewright: {' '.join(message.split())}", err=True)
    sys.exit(EXIT_USAGE)
