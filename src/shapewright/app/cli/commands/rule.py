"""shapewright rule: print the documentation of a lint rule."""

from __future__ import annotations

import click

from shapewright.app.cli.console import make_console, print_json
from shapewright.app.cli.help_pages import GroupedCommand
from shapewright.app.cli.names import complete_rule


@click.command(
    cls=GroupedCommand,
    epilog="\b\nExamples:\n  shapewright rule\n  shapewright rule TC101\n  shapewright rule wave-tail --json",
)
@click.argument("code", required=False, shell_complete=complete_rule)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def command(code: str | None, as_json: bool) -> int:
    """Print the page of a rule, by code or name, or list all rules."""
    from shapewright.app.report.columns import Column, columns_of, print_table
    from shapewright.lint.rule import list_rules, rule_page

    if as_json:
        from shapewright.app.report.outputs.catalogue import rules_output

        print_json(rules_output(code).to_json())
    elif code is None:
        headings = (
            Column("code", "{code}", is_text=True),
            Column("name", "{name}", is_text=True),
            Column("what it finds", "{summary}", rank=1, is_text=True),
        )
        print_table(columns_of(list_rules(), headings), make_console())
    else:
        _print_page(rule_page(code))
    return 0


def _print_page(page: str) -> None:
    """Print Markdown: rendered on a terminal, as source elsewhere."""
    console = make_console()
    if console.is_terminal:
        from rich.markdown import Markdown

        console.print(Markdown(page))
    else:
        click.echo(page, nl=False)
