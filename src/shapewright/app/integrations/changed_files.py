"""Check config files that a commit changes: lines for a terminal, one SARIF log, and a comment for a pull request."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shapewright.app.integrations.sarif import to_sarif
from shapewright.app.report.check import combined_fix_words, finding_words, fix_total_words, savings_footnote
from shapewright.core.errors import ShapewrightError, plain_text
from shapewright.core.records import dataclass
from shapewright.core.units import format_number_of, format_percent, format_seconds
from shapewright.lint.check import CheckReport, check_scenario
from shapewright.lint.combined import combine_fixes
from shapewright.models.config_file import read_json_file
from shapewright.models.write import locate_fields

if TYPE_CHECKING:
    from shapewright.lint.combined import CombinedFix
    from shapewright.lint.rule import Finding
    from shapewright.prediction.scenario import Scenario

COMMENT_MARK = "<!-- shapewright -->"
"""First line of the comment, by which a later run finds it."""
_MOST_FINDINGS = 10
# GitHub refuses comments of more than 65,536.
_MOST_CHARACTERS = 60_000
# Keys of which a config.json of a language model has at least one.
_MODEL_KEYS = {"model_type", "architectures", "hidden_size", "d_model", "n_embd", "text_config"}


@dataclass(frozen=True)
class CheckedFile:
    """A config file and what was found in it.

    Attributes:
        path: The file.
        report: Its check; None where it could not be checked.
        problem: Why it could not be checked; empty where it was, or describes no model.
        fix: The combined fix of the findings about the model; None where there is none.
        lines: Line of each field of the model in the file.
    """

    path: str
    report: CheckReport | None = None
    problem: str = ""
    fix: CombinedFix | None = None
    lines: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_model(self) -> bool:
        """Whether the file describes a model."""
        return self.report is not None or bool(self.problem)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings about the model itself: the file does not set batch and layout, whose defaults have findings too."""
        return () if self.report is None else _about_model(self.report.findings)

    @property
    def cost_fraction(self) -> float:
        """Predicted cost of the shape: the sum over its findings, as a fraction of the step."""
        return sum(finding.cost_fraction or 0.0 for finding in self.findings)

    def fails(self, limit_fraction: float) -> bool:
        """Whether the file cannot be used, or its shape costs more than a limit."""
        cannot_run = self.report is not None and self.report.prediction is None
        return bool(self.problem) or cannot_run or self.cost_fraction > limit_fraction


def _about_model(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(each for each in findings if each.field.startswith("config."))


def check_files(
    paths: Iterable[str], build: Callable[[str], Scenario], *, ignore: Sequence[str] = ()
) -> list[CheckedFile]:
    """Check config files; those that describe no model have neither report nor problem.

    Args:
        build: Builds the scenario of a file.
    """
    return [_check_file(path, build, ignore) for path in paths]


def _check_file(path: str, build: Callable[[str], Scenario], ignore: Sequence[str]) -> CheckedFile:
    shown = path.removeprefix("./")
    try:
        if path.endswith(".json") and not _MODEL_KEYS & set(read_json_file(Path(path))):
            return CheckedFile(shown)
        # With a folder, so that a file is never taken for a preset of its name.
        scenario = build(os.path.join(".", path))  # noqa: PTH118
        report = check_scenario(scenario, ignore=ignore)
        fix = combine_fixes(scenario, _about_model(report.findings)).fix if report.prediction is not None else None
        return CheckedFile(shown, report, fix=fix, lines=locate_fields(scenario.model, path))
    except ShapewrightError as error:
        return CheckedFile(shown, problem=str(error))


def describe_file(checked: CheckedFile) -> list[str]:
    """Lines of one file for a terminal."""
    path = plain_text(checked.path)
    if not checked.is_model:
        return [f"{path}: describes no model"]
    if checked.report is None:
        return [f"{path}: {checked.problem}"]
    prediction = checked.report.prediction
    step = f"cannot run: {checked.report.refusal}" if prediction is None else format_seconds(prediction.step_time_s)
    lines = [f"{path}: {step}{'' if checked.findings else ', no findings'}"]
    for finding in checked.findings:
        words = finding_words(finding)
        cost = f" [{words['cost']}]" if words["cost"] else ""
        lines.append(f"  {finding.severity}: {finding.code} {words['message']}{cost}")
        lines += [f"      -> {suggestion}" for suggestion in words["suggestions"]]
    footnote = savings_footnote(checked.findings)
    if footnote:
        lines.append(f"  {footnote}")
    if checked.fix:
        lines.append(f"  {combined_fix_words(checked.fix)}")
    return lines


def describe_verdict(checked: Sequence[CheckedFile], limit_fraction: float) -> str:
    """How many of the configs fail, and the limit.

    Args:
        limit_fraction: Predicted cost above which a file fails.
    """
    models = [each for each in checked if each.is_model]
    failed = sum(each.fails(limit_fraction) for each in models)
    limit = format_percent(limit_fraction)
    return f"{failed} of {len(models)} fail (limit {limit} of the step)" if failed else f"none costs over {limit}"


def join_sarif(checked: Sequence[CheckedFile]) -> dict[str, Any]:
    """One SARIF log with one run, of the findings that count: code scanning refuses several runs of one tool in a file.

    The run states a combined fix only where it is of one file.
    """
    logs = [
        to_sarif(replace(each.report, findings=each.findings, combined_fix=each.fix), each.path, each.lines)
        for each in checked
        if each.report is not None
    ]
    first = logs[0] if logs else to_sarif(CheckReport(prediction=None, findings=()), "")
    run = first["runs"][0]
    if len(logs) > 1:
        run.pop("properties", None)
    for log in logs[1:]:
        other = log["runs"][0]
        for result in other["results"]:
            for location in result["locations"]:
                location["physicalLocation"]["artifactLocation"]["index"] += len(run["artifacts"])
        run["artifacts"] += other["artifacts"]
        run["results"] += other["results"]
    return first


def write_comment(checked: Sequence[CheckedFile], device_title: str, limit_fraction: float) -> str:
    """Markdown text of the comment: a row for each config, first those that fail, and the findings of each.

    Args:
        limit_fraction: Predicted cost above which a file fails.
    """
    models = [each for each in checked if each.is_model]
    models.sort(key=lambda each: not each.fails(limit_fraction))
    text = "\n".join(
        (
            COMMENT_MARK,
            f"### Shapes of {format_number_of(len(models), 'changed config')} on {device_title}: "
            f"{describe_verdict(models, limit_fraction)}",
            "",
            "| config | step | cost of its shape | fix |",
            "| --- | ---: | ---: | --- |\n",
        )
    )
    left_out = 0
    for part in (*(_comment_row(each, limit_fraction) for each in models), *map(_comment_findings, models)):
        is_shown = not left_out and len(text) + len(part) <= _MOST_CHARACTERS
        text += part if is_shown else ""
        left_out += bool(part) and not is_shown
    if left_out:
        text += f"\nRows and lists of findings left out, as a comment has a largest size: {left_out:,}; see the log.\n"
    return text


def _comment_findings(checked: CheckedFile) -> str:
    """The findings of a file, folded; empty where there are none. Code, so that no path mentions a user."""
    if not checked.findings:
        return ""
    number = format_number_of(len(checked.findings), "finding")
    lines = ["", f"<details><summary><code>{_cell(checked.path)}</code>: {number}</summary>", ""]
    lines += [f"- **{finding.code}** {_cell(finding.message)}" for finding in checked.findings[:_MOST_FINDINGS]]
    return "\n".join([*lines, "", "</details>\n"])


def _comment_row(checked: CheckedFile, limit_fraction: float) -> str:
    sign = ":x: " if checked.fails(limit_fraction) else ""
    prediction = checked.report.prediction if checked.report is not None else None
    if checked.report is None or prediction is None:
        reason = checked.problem or str(checked.report.refusal if checked.report else "")
        return f"| {sign}`{_cell(checked.path)}` | | | `{_cell(reason)}` |\n"
    cost = format_percent(checked.cost_fraction) if checked.cost_fraction else ""
    fix = "none needed" if checked.fix is None else f"{checked.fix.title}: {fix_total_words(checked.fix)}"
    return f"| {sign}`{_cell(checked.path)}` | {format_seconds(prediction.step_time_s)} | {cost} | {_cell(fix)} |\n"


def _cell(text: str) -> str:
    """Text that cannot end a table cell, a code span or a tag."""
    return plain_text(text).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")
