"""Lint rules and what they find: Rule, Violation and Fix, and the Finding and Suggestion reported for them.

A registry holds the rules of ``lint.rules``: look-up by code, name or family, and their documentation pages.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from shapewright.core.errors import UnknownRuleError, close_names
from shapewright.core.records import dataclass
from shapewright.lint import rules

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shapewright.prediction.scenario import Scenario

SEVERITIES = ("info", "warning", "error")
"""From least to most severe."""

SuggestionKind = Literal["exact", "runtime", "retrain"]
"""exact: same output; runtime: changes batch, dtype or layout only; retrain: changes the model."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """A change that resolves a finding.

    Attributes:
        kind: ``exact`` (same function), ``runtime`` (batch, format or layout) or ``retrain`` (another model).
        title: Short description.
        changes: New values by field name of TransformerConfig, Workload or ParallelLayout.
        parameters_change_fraction: Relative change of the parameter count.
        predicted_gain_fraction: Relative saving of time per token; for ``retrain`` suggestions, of time per token and
            parameter, so that a smaller model does not count as a gain. None where the step cannot run unchanged.
        compared_at: Values that both sides have in the comparison, such as an equal global batch.
    """

    kind: SuggestionKind
    title: str
    changes: Mapping[str, Any]
    parameters_change_fraction: float = 0.0
    predicted_gain_fraction: float | None = None
    compared_at: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A violation with its cost, severity and suggestions.

    Attributes:
        code: Code of the rule, such as ``TC101``.
        name: Name of the rule, such as ``vocab-not-aligned``.
        severity: One of SEVERITIES; follows the predicted cost, unless the step cannot run or is inconsistent.
        field: Path of the field, such as ``config.vocab_size``.
        actual: Its value.
        wanted: Description of valid values.
        subject: The field as messages name it, with the module or tower that it belongs to.
        problem: Continues ``subject=actual`` in the message, as in Violation.
        cost_s: Predicted cost in one step, its share of the gain of the combined fix; None where the cost is not time.
            [s]
        cost_fraction: Predicted cost as a fraction of the step.
        suggestions: Suggestions, best first.
        slowest: The operation that loses the most time to the violation, with its slowdown; empty for none.
        condition: Changes without which it costs no time, in words; empty where it needs none.
        is_assumed: Whether it was found with the changes that let the step run, CheckReport.assumed_changes.
        only_with: Changes of other findings without which its suggestions save nothing; empty where they save alone.
        least_severity: Minimum severity, whatever the cost; None for none.
        most_severity: Maximum severity, whatever the cost; None for none.
        max_cost_fraction: Upper bound of the cost, as in Violation.
    """

    code: str
    name: str
    severity: str
    field: str
    actual: object
    wanted: str
    subject: str
    problem: str
    cost_s: float | None = None
    cost_fraction: float | None = None
    suggestions: tuple[Suggestion, ...] = ()
    slowest: str = ""
    condition: str = ""
    is_assumed: bool = False
    only_with: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    least_severity: str | None = None
    most_severity: str | None = None
    max_cost_fraction: float = 1.0

    @property
    def statement(self) -> str:
        """What is wrong, without suggestions."""
        slowest = f": {self.slowest}" if self.slowest else ""
        condition = f", {self.condition}" if self.condition else ""
        return f"{self.subject}={self.actual} {self.problem}{slowest}{condition}"

    @property
    def message(self) -> str:
        """The finding in one line: what is wrong, and what to do."""
        advice = " or ".join(suggestion.title for suggestion in self.suggestions)
        return f"{self.statement}; {advice}" if advice else self.statement


FAMILIES = {
    "TC": "tensor core",
    "WQ": "tiles and waves",
    "PL": "parallel layout",
    "ME": "memory",
    "CF": "consistency",
    "SV": "serving",
}


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A candidate change for a violation; it becomes a Suggestion if it is predicted to be faster.

    Attributes:
        kind: One of SuggestionKind.
        title: Short description.
        changes: New values by field name of TransformerConfig, Workload or ParallelLayout.
        common_changes: Values applied to both scenarios before they are compared, such as an equal global batch; not
            part of the suggestion.
    """

    kind: SuggestionKind
    title: str
    changes: Mapping[str, Any]
    common_changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A violation of a rule, without its cost.

    Attributes:
        field: Path of the field, such as ``config.vocab_size``.
        actual: Its value.
        wanted: Description of valid values.
        problem: Continues ``field=actual `` in the message: "is not a multiple of 64 (fp16 on a100-sxm-40gb)".
        fixes: Candidate changes; those that are not predicted to be faster are dropped.
        only_best: Whether only the best fix is suggested, where fixes are values of one field.
        least_severity: Minimum severity, whatever the cost. An ``error`` means that the step cannot run; then slower
            fixes are suggested too.
        most_severity: Maximum severity, set where the cost depends on a default value that was not given.
        has_cost: Whether the gain of the best fix is the cost of the violation; False where fixes change the task, such
            as a shorter sequence.
        max_cost_fraction: Upper bound of the cost as a fraction of the step, set where fixes gain more than the
            violation costs: fewer pipeline stages also have a smaller bubble.
    """

    field: str
    actual: object
    wanted: str
    problem: str
    fixes: tuple[Fix, ...] = ()
    only_best: bool = False
    least_severity: str | None = None
    most_severity: str | None = None
    has_cost: bool = True
    max_cost_fraction: float = 1.0


Check = Callable[["Scenario"], Iterator[Violation]]
"""Yields the violations of a scenario; it does no I/O, and tests cheap conditions first."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A lint rule; its documentation is the docstring of its check.

    Attributes:
        code: Family and number, such as ``TC101``.
        name: Name of the bad pattern; reads well after "allow".
        since: First version of the package with the rule.
        reads: Paths of the fields that the rule depends on.
        check: Yields the violations of a scenario.
    """

    code: str
    name: str
    since: str
    reads: tuple[str, ...]
    check: Check

    @property
    def page(self) -> str:
        """The rule's documentation as Markdown."""
        return inspect.cleandoc(self.check.__doc__ or "")

    @property
    def summary(self) -> str:
        """First line of the page."""
        return self.page.partition("\n")[0]

    @property
    def family(self) -> str:
        """Name of the family."""
        return FAMILIES[self.code[:2]]


RULES: dict[str, Rule] = {}
"""The rules of the imported modules, by code."""


def rule(code: str, name: str, *, reads: tuple[str, ...], since: str = "0.1.0") -> Callable[[Check], Check]:
    """Make a rule of its check, whose docstring is the page of the rule.

    Args:
        code: Family and number, such as ``TC101``.
        name: Name of the bad pattern; reads well after "allow".
        reads: Paths of the fields that the rule depends on.
        since: First version of the package with the rule.
    """

    def register(check: Check) -> Check:
        RULES[code] = Rule(code=code, name=name, since=since, reads=reads, check=check)
        return check

    return register


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
    hint = close_names(code_or_name, known) or "choose one of " + ", ".join(rule.code for rule in list_rules())
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
