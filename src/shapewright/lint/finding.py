"""Finding and Suggestion: what the lint says, in numbers and in one line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

SEVERITIES = ("info", "warning", "error")
"""From least to most severe."""

SuggestionKind = Literal["exact", "runtime", "retrain"]
"""exact: the same function, faster; runtime: batch, dtype or layout only; retrain: another model."""


@dataclass(frozen=True, kw_only=True)
class Suggestion:
    """Something to do instead.

    Attributes:
        kind: How far it changes the model.
        title: What to do, in a few words.
        changes: New values by field name of TransformerConfig, Workload or ParallelLayout.
        parameters_change_fraction: Parameters gained (or, below zero, lost), as a fraction of all.
        predicted_gain_fraction: Share of the time per token that it saves; of a ``retrain`` suggestion, of the time
            per token and parameter, so that a smaller model is not praised for being small. None where the step
            cannot run as it is.
    """

    kind: SuggestionKind
    title: str
    changes: Mapping[str, Any]
    parameters_change_fraction: float = 0.0
    predicted_gain_fraction: float | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, what it costs, and what to do.

    Attributes:
        code: Code of the rule, such as ``TC101``.
        name: Name of the rule, such as ``vocab-not-aligned``.
        severity: One of SEVERITIES; follows the predicted cost unless the step cannot run or contradicts itself.
        field: Path of the field, such as ``config.vocab_size``.
        actual: Its value.
        wanted: What would be right, in words.
        message: All of it in one line.
        cost_s: Predicted cost in one step; None where it is not a matter of time. [s]
        cost_fraction: The same as a fraction of the step.
        suggestions: What to do, best first.
    """

    code: str
    name: str
    severity: str
    field: str
    actual: object
    wanted: str
    message: str
    cost_s: float | None = None
    cost_fraction: float | None = None
    suggestions: tuple[Suggestion, ...] = ()
