"""Names on the command line: completion in a shell, and CONFIG from standard input."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from shapewright.models.read import Model

Completion = Callable[[click.Context, click.Parameter, str], "list[CompletionItem]"]

STANDARD_INPUT = ("-", "/dev/stdin")
"""Values of CONFIG that stand for standard input."""
CONFIG_FILE = "shapewright.config_file"
"""Key of a command's context for the path of the trainer's file that it got as CONFIG."""


def complete(list_names: Callable[[], Iterable[str]]) -> Completion:
    """Return a completion of names, of the last one in a list with commas."""

    def names(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        before, comma, word = incomplete.rpartition(",")
        return [CompletionItem(before + comma + name) for name in list_names() if name.startswith(word)]

    return names


def complete_device(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a device, or the path of a device file."""
    from shapewright.hardware.loader import list_devices

    return _names_or_file(list_devices(), incomplete)


def complete_devices(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the last name of a list of devices."""
    from shapewright.hardware.loader import list_devices

    return complete(list_devices)(context, parameter, incomplete)


def complete_config(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a preset, or a path."""
    from shapewright.models.read import list_presets

    return _names_or_file(list_presets(), incomplete)


def complete_software(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a training software."""
    from shapewright.pricing.software import software_names

    return complete(software_names)(context, parameter, incomplete)


def complete_rule(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the code or the name of a rule."""
    from shapewright.lint.rule import list_rules

    rules = list_rules()
    return complete(lambda: [*(rule.code for rule in rules), *(rule.name for rule in rules)])(
        context, parameter, incomplete
    )


def _names_or_file(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="file")]


def read_standard_input() -> Model:
    """Read a config.json from standard input.

    Raises:
        ConfigError: it is not a config.json.
    """
    from shapewright.core.errors import ConfigError
    from shapewright.models.config_file import MAX_FILE_BYTES, parse_json_object
    from shapewright.models.read import read_object

    if sys.stdin is None:
        raise ConfigError("standard input is closed; give a preset, a path or a hub id")
    try:
        content = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read standard input: {error}; give a preset, a path or a hub id") from None
    return read_object(parse_json_object(content, "standard input", is_config=True), where="standard input")
