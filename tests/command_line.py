"""The command line: its commands, what their help pages show, and calls in this process."""

from __future__ import annotations

import click
import pytest

from shapewright.app.cli.main import cli, main


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, captured.out, captured.err


def commands(group: click.Group = cli, path: tuple[str, ...] = ()) -> dict[str, click.Command]:
    """Every command by its path, such as ``devices show``; the group itself by its own."""
    found: dict[str, click.Command] = {" ".join(path): group}
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            found |= commands(command, (*path, name))
        else:
            found[" ".join((*path, name))] = command
    return found


COMMANDS = commands()


def examples() -> list[str]:
    """Every example that a --help page shows."""
    pages = [command.epilog or "" for command in COMMANDS.values()]
    lines = [line.strip() for page in pages for line in page.splitlines()]
    return sorted({line for line in lines if line.startswith("shapewright ")})
