"""shapewright devices: list accelerators and their data."""

from __future__ import annotations

import click

from shapewright.app.cli.console import print_output
from shapewright.app.cli.defaults import add_note
from shapewright.app.cli.help_pages import GuidedCommand, describe_next


class DevicesGroup(click.Group):
    """A group that suggests 'show' where a device is named without a command."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a command; suggest 'devices show' for anything else."""
        if not args[0].startswith("-") and args[0] not in self.commands:
            raise click.UsageError(f"no command {args[0]!r}; a device is shown by 'devices show {args[0]}'", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=DevicesGroup,
    invoke_without_command=True,
    epilog="\b\nExamples:\n  shapewright devices\n  shapewright devices show h100-sxm-80gb\n"
    "  shapewright devices template > my-device.toml",
)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> int | None:
    """List devices; 'devices show NAME' shows one with its sources, 'devices template' a file to fill in."""
    if ctx.invoked_subcommand is not None:
        return None
    from shapewright.app.report.catalogue import print_devices
    from shapewright.app.report.outputs.catalogue import devices_output

    print_output(devices_output(), print_devices, as_json=as_json)
    if not as_json:
        click.echo(describe_next(ctx))
    return 0


@command.command("show", cls=GuidedCommand, epilog="\b\nExamples:\n  shapewright devices show h100-sxm-80gb")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def show(name: str, as_json: bool) -> int:
    """Show one device: every number with its source."""
    from shapewright.app.report.catalogue import print_device
    from shapewright.app.report.outputs.catalogue import device_output
    from shapewright.hardware.loader import load_device, note_on_board

    device = load_device(name)
    board = note_on_board(name)
    if board:
        add_note(board, "device")
    print_output(device_output(device), print_device, as_json=as_json)
    return 0


@command.command(
    "template",
    epilog="\b\nExamples:\n  shapewright devices template > my-device.toml",
    short_help="Print a file to fill in.",
)
def template() -> int:
    """Print a device file to fill in; use it with --device ./my-device.toml."""
    from shapewright.hardware.device_file import device_template

    click.echo(device_template())
    return 0
