"""Apply the suggestions that change no output: ``exact`` ones only."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shapewright.config.transformer import TransformerConfig
    from shapewright.lint.check import CheckReport


def exact_changes(report: CheckReport) -> dict[str, Any]:
    """New values of the model's fields from the first exact suggestion of each finding."""
    changes: dict[str, Any] = {}
    for finding in report.findings:
        exact = [suggestion for suggestion in finding.suggestions if suggestion.kind == "exact"]
        if exact:
            changes = {**exact[0].changes, **changes}
    return changes


def fix_config(config: TransformerConfig, report: CheckReport) -> TransformerConfig:
    """The model with every exact suggestion taken; the same object where there is none."""
    changes = exact_changes(report)
    return replace(config, **changes) if changes else config
