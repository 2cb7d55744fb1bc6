"""Findings of the regression grid: each lint rule on the cases of its file in tests/lint."""

from __future__ import annotations

import re
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from regression_answers import Answer, list_cells

from shapewright.lint.evaluate import evaluate
from shapewright.lint.example import example_scenario
from shapewright.lint.rule import get_rule

_CASES = Path(__file__).resolve().parent.parent / "tests" / "lint"
_BLOCK = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def list_rule_codes() -> list[str]:
    """Codes of the rules that have cases."""
    return sorted(path.stem for path in _CASES.glob("*.md"))


def answer_cases(code: str) -> dict[str, Answer]:
    """Findings of a rule on each of its cases."""
    rule = get_rule(code)
    answers: dict[str, Answer] = {}
    for number, block in enumerate(_BLOCK.findall((_CASES / f"{code}.md").read_text(encoding="utf-8")), 1):
        given = {name: value for name, value in tomllib.loads(block).items() if name != "expect"}
        changes: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
        }
        scenario = example_scenario(**changes)
        found = [evaluate(rule, violation, scenario) for violation in rule.check(scenario)]
        findings = [asdict(each) for each in found if each is not None]
        words = " ".join(f"{name}={value}" for name, value in given.items())
        cells: Answer = {"findings": float(len(findings))}
        answers[f"{code}: {number} {words}"] = cells | dict(list_cells(findings, "finding"))
    return answers
