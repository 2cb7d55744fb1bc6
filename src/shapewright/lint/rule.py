"""Rule: one thing that can be wrong with a shape, and how to see it. What it costs is judged for all rules alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shapewright.lint.finding import SuggestionKind
    from shapewright.lint.what_if import WhatIf

FAMILIES = {
    "TC": "tensor core",
    "WQ": "tiles and waves",
    "PL": "parallel layout",
    "ME": "memory",
    "CF": "consistency",
}


@dataclass(frozen=True, kw_only=True)
class Repair:
    """A change that would mend a violation; it becomes a suggestion if it is predicted to pay.

    Attributes:
        kind: How far it changes the model.
        title: What to do, in a few words.
        changes: New values by field name of TransformerConfig, Workload or ParallelLayout.
        at_equal: Values given to both sides before they are compared, such as one global batch; not part of the
            suggestion.
    """

    kind: SuggestionKind
    title: str
    changes: Mapping[str, Any]
    at_equal: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Violation:
    """What a rule saw, before anyone asked what it costs.

    Attributes:
        field: Path of the field, such as ``config.vocab_size``.
        actual: Its value.
        wanted: What would be right, in words.
        problem: Reads on after ``field=actual ``: "is not a multiple of 64 (fp16 on a100-sxm-40gb)".
        repairs: Changes to try; those predicted not to pay are dropped.
        only_best: Whether repairs are steps of one scale, of which only the best is worth saying.
        severity: Set where the violation counts whatever it costs; the predicted cost can only raise it. An ``error``
            here means that the step cannot run, so that repairs are kept even where they are slower.
        severity_at_most: Set where the cost rests on a default that nobody chose.
        has_cost: Whether the repairs' gain is what the violation costs; False where they change the question, as a
            shorter sequence does.
        most_cost_fraction: The most of a step that the violation can cost, where repairs do more than mend it: fewer
            pipeline stages are not only even again, they also wait less.
    """

    field: str
    actual: object
    wanted: str
    problem: str
    repairs: tuple[Repair, ...] = ()
    only_best: bool = False
    severity: str | None = None
    severity_at_most: str | None = None
    has_cost: bool = True
    most_cost_fraction: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule; its page is the text at the top of its module.

    Attributes:
        code: Family and number, such as ``TC101``.
        name: Names the bad pattern; reads after "allow".
        since: First version of the package that has it.
        reads: Paths of the fields that decide it.
        check: Looks for the pattern; does no I/O and gives up cheaply.
    """

    code: str
    name: str
    since: str
    reads: tuple[str, ...]
    check: Callable[[WhatIf], Iterator[Violation]]

    @property
    def page(self) -> str:
        """The rule's documentation as Markdown."""
        module = inspect.getmodule(self.check)
        return inspect.cleandoc((module and module.__doc__) or "")

    @property
    def summary(self) -> str:
        """First line of the page."""
        return self.page.partition("\n")[0]

    @property
    def family(self) -> str:
        """What the letters of the code stand for."""
        return FAMILIES[self.code[:2]]
