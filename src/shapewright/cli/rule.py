"""shapewright rule: the page of a rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from shapewright.cli.console import make_console, print_json

if TYPE_CHECKING:
    from shapewright.lint.rule import Rule


@click.command(
    epilog="\b\nExamples:\n  shapewright rule\n  shapewright rule TC101\n  shapewright rule wave-tail --json"
)
@click.argument("code", required=False)
@click.option("--json", "as_json", is_flag=True, help="print JSON")
def command(code: str | None, as_json: bool) -> int:
    """Print the page of rule CODE (its name does too), or list all rules."""
    from shapewright.lint import get_rule, list_rules, rule_page
    from shapewright.report.columns import Column, columns_of, print_table

    if as_json:
        rules = list_rules() if code is None else (get_rule(code),)
        pages = [_to_json(rule) | ({} if code is None else {"page": rule_page(rule.code)}) for rule in rules]
        print_json({"schema_version": 1, "rules": pages})
    elif code is None:
        rows = [[rule.code, rule.name, rule.summary] for rule in list_rules()]
        headings = (
            Column("code", is_text=True),
            Column("name", is_text=True),
            Column("what it finds", rank=1, is_text=True),
        )
        print_table(columns_of(rows, headings), make_console())
    else:
        _print_page(rule_page(code))
    return 0


def _print_page(page: str) -> None:
    """Print Markdown: set for a terminal, as it is into a pipe or a file."""
    console = make_console()
    if console.is_terminal:
        from rich.markdown import Markdown

        console.print(Markdown(page))
    else:
        click.echo(page, nl=False)


def _to_json(rule: Rule) -> dict[str, Any]:
    return {
        "code": rule.code,
        "name": rule.name,
        "family": rule.family,
        "since": rule.since,
        "reads": list(rule.reads),
        "summary": rule.summary,
    }
