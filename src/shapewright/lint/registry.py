"""Registry of the rules: look-up by code, name or family, and their documentation pages."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import TYPE_CHECKING

from shapewright.core.errors import UnknownRuleError, close_names
from shapewright.lint import rules
from shapewright.lint.rule import FAMILIES, RULES, Rule

if TYPE_CHECKING:
    from collections.abc import Iterable


@cache
def list_rules() -> tuple[Rule, ...]:
    """Return all rules, sorted by code."""
    for module in pkgutil.iter_modules(rules.__path__, f"{rules.__name__}."):
        importlib.import_module(module.name)
    return tuple(RULES[code] for code in sorted(RULES))


def get_rule(code_or_name: str) -> Rule:
    """Find a rule by its code or its name.

    Raises:
        UnknownRuleError: there is no such rule.
    """
    wanted = code_or_name.strip().casefold()
    for rule in list_rules():
        if wanted in (rule.code.casefold(), rule.name):
            return rule
    known = [word for rule in list_rules() for word in (rule.code.casefold(), rule.name)]
    hint = close_names(code_or_name, known) or _all_codes()
    for rule in list_rules():
        hint = hint.replace(f"'{rule.code.casefold()}'", f"'{rule.code}'")
    raise UnknownRuleError(f"unknown rule {code_or_name!r}; {hint}")


def rule_page(code_or_name: str) -> str:
    """Return the documentation of a rule as a Markdown page.

    Raises:
        UnknownRuleError: there is no such rule.
    """
    rule = get_rule(code_or_name)
    fields = ", ".join(f"`{path}`" for path in rule.reads)
    about = f"Family: {rule.family}. Since version {rule.since}. Reads {fields}."
    summary, _, body = rule.page.partition("\n")
    return f"# {rule.code} {rule.name}\n\n{summary}\n\n{about}\n\n{_fence_examples(body.strip())}\n"


def _fence_examples(text: str) -> str:
    """Put doctests into code blocks, since Markdown reads their prompts as quotations."""
    parts = [f"```python\n{part.strip()}\n```" if part.startswith(">>> ") else part for part in text.split("\n\n")]
    return "\n\n".join(parts)


def select_rules(patterns: Iterable[str]) -> frozenset[str]:
    """Return the rule codes selected by codes, names or families (``TC``).

    Raises:
        UnknownRuleError: a pattern matches no rule.
    """
    selected: set[str] = set()
    for pattern in patterns:
        family = pattern.strip().upper()
        if family in FAMILIES:
            selected |= {rule.code for rule in list_rules() if rule.code.startswith(family)}
        else:
            selected.add(get_rule(pattern).code)
    return frozenset(selected)


def _all_codes() -> str:
    return "choose one of " + ", ".join(rule.code for rule in list_rules())
