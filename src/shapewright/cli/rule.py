"""shapewright rule: the page of a rule."""

from __future__ import annotations

import click

from shapewright.cli.console import make_console


@click.command(epilog="\b\nExamples:\n  shapewright rule\n  shapewright rule TC101")
@click.argument("code", required=False)
def command(code: str | None) -> int:
    """Print the page of rule CODE, or list all rules."""
    from shapewright.lint import list_rules, rule_page

    if code is not None:
        from rich.markdown import Markdown

        make_console().print(Markdown(rule_page(code)))
        return 0
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("code", "name", "what it finds"):
        table.add_column(name)
    for rule in list_rules():
        table.add_row(rule.code, rule.name, rule.summary)
    make_console().print(table)
    return 0
