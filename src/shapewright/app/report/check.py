"""A check as text: verdict, findings by cost, slowest operations, nearest better shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from shapewright.app.report.columns import Column, columns_of, print_notes, print_table
from shapewright.app.report.outputs.check import describe_loss, describe_net
from shapewright.app.report.predict import operation_columns, print_verdict
from shapewright.core.units import format_count, format_number_of, format_percent, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import Console

    from shapewright.app.report.outputs.check import BetterShapeOutput, CheckOutput, FindingOutput
    from shapewright.lint.combined import CombinedFix
    from shapewright.lint.rule import Finding, Suggestion

_STYLES = {"error": "bold red", "warning": "yellow", "info": "cyan"}
OPERATIONS_SHOWN = 8
# Cost and saving that differ by more than this share of the step are explained.
_UNLIKE_FRACTION = 0.05


def print_check(output: CheckOutput, console: Console) -> None:
    """Print a whole check."""
    step = output.step
    if step is not None:
        print_verdict(step, console)
        console.print()
    _print_findings(output, console)
    if step is not None:
        console.print()
        print_table(operation_columns(step, top=OPERATIONS_SHOWN), console)
        shown = min(OPERATIONS_SHOWN, len(step.operations))
        console.print(
            f"slowest {shown} of {len(step.operations)} operations; 'shapewright predict' lists more", style="dim"
        )
        if output.better_shapes:
            _print_better_shapes(output, console)
    print_notes((*output.notes, *output.other_warnings), console)


def _print_findings(output: CheckOutput, console: Console) -> None:
    """Print the findings and the combined fix; without any, whether the step can run."""
    has_said = False
    for finding in output.findings:
        if finding.is_assumed and not has_said:
            console.print(f"with {_list_changes(output.assumed_changes)}, with which the step can run:", style="bold")
            has_said = True
        print_finding(finding, console)
    footnote = savings_footnote(output.findings)
    if footnote:
        console.print(footnote, style="dim")
    if output.combined_fix is not None:
        console.print(combined_fix_words(output.combined_fix), style="bold", soft_wrap=True)
    if not output.findings:
        if output.step is not None:
            console.print("no findings", style="green")
        else:
            # Shown even if the rule that explains it is ignored.
            console.print(f"cannot run: {output.problem}", style=_STYLES["error"], soft_wrap=True)
    if output.num_suppressed:
        console.print(
            f"{format_number_of(output.num_suppressed, 'finding')} suppressed by --ignore or [tool.shapewright]",
            style="dim",
        )


def savings_footnote(findings: Sequence[Finding | FindingOutput]) -> str:
    """What costs and savings are; empty where each finding costs about what its suggestions save."""
    if not any(map(_saves_otherwise, findings)):
        return ""
    return "costs: each finding's share of what all cost together; savings: of all that the line sets"


def _saves_otherwise(finding: Finding | FindingOutput) -> bool:
    """Whether a suggestion saves much more or less than its finding costs, as it does beside other findings."""
    cost = finding.cost_fraction
    gains = [each.predicted_gain_fraction for each in finding.suggestions if each.predicted_gain_fraction is not None]
    return cost is not None and any(abs(gain - cost) > _UNLIKE_FRACTION for gain in gains)


def _print_better_shapes(output: CheckOutput, console: Console) -> None:
    """Print the nearest better shapes, and the tokens after which their losses are compared."""
    given = output.train_tokens
    tokens = "20 tokens per parameter" if given is None else f"{format_count(given)} tokens"
    console.print()
    console.print(
        f"nearest better shapes of almost the same size, after {tokens} (except for a padded vocabulary, they need "
        "retraining)",
        style="bold",
    )
    print_table(better_shape_columns(output.better_shapes), console)


def combined_fix_words(fix: CombinedFix) -> str:
    """The combined fix in one line: every field it sets, and its total."""
    return f"combined fix of {', '.join(dict.fromkeys(fix.codes))}: {fix.title}: {fix_total_words(fix)}"


def fix_total_words(fix: CombinedFix) -> str:
    """What the combined fix does to the step, and what kind of change it is."""
    parts = [fix.kind, fix_saving_words(fix)]
    if fix.parameters_change_fraction:
        parts.append(f"{_change_words(fix.parameters_change_fraction)} parameters")
    before, after = format_seconds(fix.step_time_before_s), format_seconds(fix.step_time_s)
    return f"step {before} -> {after} ({', '.join(parts)})"


def _saving_words(fix: Suggestion | CombinedFix, gain_fraction: float, compared_at: Mapping[str, Any]) -> str:
    """What a fix saves: of a changed model per parameter, which is said where it makes a difference."""
    saved = format_percent(gain_fraction)
    of_step = 1.0 - (1.0 - gain_fraction) * (1.0 + fix.parameters_change_fraction)
    per = " per parameter" if fix.kind == "retrain" and format_percent(of_step) != saved else ""
    return f"saves {saved}{per}{_equal_words(compared_at)}"


def _equal_words(compared_at: Mapping[str, Any]) -> str:
    """Condition of a comparison: `` at an equal global batch of 64``."""
    others = {name: value for name, value in compared_at.items() if name != "global_batch_size"}
    words = f" at an equal global batch of {compared_at['global_batch_size']}" if len(others) < len(compared_at) else ""
    return words + (f" at {_list_changes(others)}" if others else "")


def _list_changes(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in changes.items())


class FindingWords(TypedDict):
    """Texts of one finding: what is wrong, what it costs if it costs time, a line and the saving of each suggestion."""

    message: str
    cost: str
    suggestions: list[str]
    savings: list[str]


def finding_words(finding: Finding | FindingOutput) -> FindingWords:
    """Describe one finding."""
    cost = ""
    if finding.cost_s is not None and finding.cost_fraction is not None:
        cost = f"costs {format_seconds(finding.cost_s)}, {format_percent(finding.cost_fraction)} of the step"
    suggestions, savings = [], []
    for suggestion in finding.suggestions:
        saving = ""
        if suggestion.predicted_gain_fraction is not None:
            compared_at = {**finding.only_with, **suggestion.compared_at}
            saving = _saving_words(suggestion, suggestion.predicted_gain_fraction, compared_at)
        savings.append(saving)
        facts: list[str] = [suggestion.kind, *([saving] if saving else [])]
        if suggestion.parameters_change_fraction:
            facts.append(f"{_change_words(suggestion.parameters_change_fraction)} parameters")
        suggestions.append(f"{suggestion.title} ({', '.join(facts)})")
    return {"message": finding.statement, "cost": cost, "suggestions": suggestions, "savings": savings}


def fix_saving_words(fix: CombinedFix) -> str:
    """What the combined fix saves."""
    return _saving_words(fix, fix.gain_fraction, fix.compared_at)


def print_finding(finding: FindingOutput, console: Console) -> None:
    """Print one finding: code, message, cost, suggestions."""
    words = finding_words(finding)
    cost = f" [{words['cost']}]" if words["cost"] else ""
    console.print(
        f"{finding.severity}: {finding.code} {finding.name}: {words['message']}{cost}",
        style=_STYLES[finding.severity],
        soft_wrap=True,
    )
    for line in words["suggestions"]:
        console.print(f"    -> {line}", soft_wrap=True)


_BETTER_COLUMNS = (
    Column("change", "{title}", is_text=True),
    Column("step", "{step_time_s}", rank=2),
    Column("speed-up", "{speedup:.3f}x"),
    Column("loss (nats)", lambda shape: describe_loss(shape.effect), rank=3, is_text=True),
    Column("to the same loss", lambda shape: describe_net(shape.effect), is_text=True),
    Column("parameters", lambda shape: _change_words(shape.parameters_change_fraction) or "same", rank=1),
)


def better_shape_columns(shapes: Sequence[BetterShapeOutput]) -> list[Column]:
    """Alternatives, best first, as the columns of a table."""
    return columns_of(shapes, _BETTER_COLUMNS)


def _change_words(fraction: float) -> str:
    """A change in percent with its sign; empty where there is none."""
    return f"{100.0 * fraction:+.2g} %" if fraction else ""
