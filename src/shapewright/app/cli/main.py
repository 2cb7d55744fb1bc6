"""Entry point: loads a command when it runs, and prints each user error as one line."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from io import TextIOWrapper
from typing import Any

import click

from shapewright import __version__
from shapewright.app.report.flags import with_flags
from shapewright.core.errors import ShapewrightError, close_names, plain_text
from shapewright.core.ranges import read_integer

EXIT_FINE, EXIT_USAGE = 0, 2

# Command -> one-line help, in the order of use. The module of that name in ``commands`` is imported when it runs.
_COMMANDS = {
    "predict": "Predict step time, throughput and memory by operation.",
    "check": "Find slow dimensions: what each costs, and what to use.",
    "check-files": "Check changed config files, for pull requests.",
    "memory": "Estimate memory: does it fit, and what makes it fit.",
    "compare": "Compare devices on one job: time, dollars, joules.",
    "mfu": "Explain a measured step: MFU, HFU, the waterfall.",
    "design": "Design a model for a size, tokens and devices.",
    "plan": "Plan the parallel layout of a training job.",
    "serve-plan": "Plan serving: layout, batch, format, latency.",
    "flops": "Count FLOPs per token; duration and cost of a run.",
    "params": "Count parameters, by component.",
    "batch": "Solve batch = micro-batch x replicas x accumulation.",
    "search": "Find shapes of the same size that run faster.",
    "report": "Write a design review of a shape as one HTML file.",
    "serve": "Open the explorer in the browser.",
    "mcp": "Serve the commands to coding agents (MCP).",
    "devices": "List devices, or show one with its sources.",
    "models": "List model presets.",
    "rule": "Print a rule's page.",
    "accuracy": "Compare predictions with measured tables.",
    "bench": "Measure operations on this machine's GPU or CPU.",
    "proxy": "Train small models on text, and store their loss.",
    "calibrate": "Fit calibration records to a store of measurements.",
    "plot": "Plot measurements and predictions.",
    "store": "Inspect, verify, merge and import measurements.",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they run."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Name the commands, in the order of use."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import one command."""
        if cmd_name not in _COMMANDS:
            return None
        command = import_module(f"shapewright.app.cli.commands.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; suggest similar names for unknown ones."""
        if not args[0].startswith("-") and args[0] not in _COMMANDS:
            words = f"no command {args[0]!r}; {close_names(args[0], _COMMANDS)}"
            raise click.UsageError(words.rstrip("; "), ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run a command; a closed pipe exits with 0, where click would exit with 1 (findings)."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            _drop_output()
            raise click.exceptions.Exit(EXIT_FINE) from None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """List commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


_EPILOG = """\b
Examples:
  shapewright check gpt3-2.7b --device a100-sxm-40gb
  shapewright predict ./config.json --device h100-sxm-80gb --tp 2
"""

_WELCOME = """\
Shapewright predicts how long a transformer of a given shape takes on a GPU, and what a bad dimension costs.

Try:
  shapewright predict llama-3-8b --device h100-sxm-80gb --sweep hidden_size=4096,4097
  shapewright check gpt3-2.7b --device a100-sxm-40gb
  shapewright search gpt3-2.7b --device a100-sxm-40gb

Any ./config.json takes the place of a preset.
'shapewright --help' lists all commands."""


# Objects after which garbage is collected. Imports and tables make lasting objects, and looking through them after
# every 700, as Python does, takes a twentieth of a command, and once after 50,000 takes 15 of the 380 ms of `check`.
_COLLECT_AFTER = 200_000
_MOST_COLUMNS = 10_000
# Characters of a message of click, which quotes values in full, and of a word of any message.
_MOST_CHARACTERS, _LONGEST_WORD = 600, 300


@click.group(
    cls=LazyGroup,
    epilog=_EPILOG,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="shapewright")
@click.pass_context
def cli(context: click.Context) -> None:
    """Which transformer shape fits your hardware, what a bad one costs, and what to use instead."""
    if context.invoked_subcommand is None:
        click.echo(_WELCOME)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 fine, 1 findings, 2 usage or bad input."""
    gc.set_threshold(_COLLECT_AFTER, *gc.get_threshold()[1:])
    atexit.register(gc.freeze)  # the interpreter looks through all objects when it ends, for a sixth of `check`
    for name in ("COLUMNS", "LINES"):
        if not 0 < (read_integer(os.environ.get(name, "")) or 0) <= _MOST_COLUMNS:
            os.environ.pop(name, None)  # libraries would fail on it, or print nothing
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names outside the terminal's encoding are not errors
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
        _fail(with_flags(error.text), details=getattr(error, "user_traceback", ""))
    except BrokenPipeError:
        # The reader of the output closed the pipe (shapewright ... | head), which is not an error.
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
    """Message of a click error in one line, with a pointer to the help."""
    words = plain_text(error.format_message()).rstrip(".")
    if isinstance(error, click.NoSuchOption) and error.option_name == "--gpus":
        words = "no option '--gpus' here: give the degrees of a layout, such as --dp 8 --tp 4; 'plan' chooses them"
    words = _cut(words, _MOST_CHARACTERS)
    if isinstance(error, click.MissingParameter) and error.param is not None and error.param.name == "device":
        return f"{words}; give a device or a device file ('shapewright devices' lists all), or set SHAPEWRIGHT_DEVICE"
    path = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx is not None else "shapewright"
    return f"{words}; see '{path} --help'"


def _cut(text: str, most: int) -> str:
    """Return both ends of a text that is too long."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def _drop_output() -> None:
    """Discard buffered output, which the interpreter would fail to flush at exit."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, *, details: str = "") -> None:
    with suppress(OSError):  # standard error may be full or closed, too
        words = " ".join(_cut(word, _LONGEST_WORD) for word in plain_text(message).split(" "))
        click.echo(f"shapewright: {words}", err=True)
        for line in details.splitlines():
            click.echo(f"{line[: len(line) - len(line.lstrip())]}{plain_text(line)}", err=True)
    sys.exit(EXIT_USAGE)
