"""The Markdown cases of the lint rules, one file per rule, are both documentation and test.

A case is a second-level heading that begins with ``Fires``, ``Silent`` or ``Boundary``, some prose, and TOML blocks. A
block changes fields of GPT-3 2.7B with 20 heads and a vocabulary of 50304 in fp16 on an A100 of 40 GB
(shapewright.lint.example), and may name the ``device``. Its table ``expect`` says:

- ``fires``: whether the rule has a finding; under ``Fires`` and ``Silent`` the heading says it;
- ``field``, ``severity``: of the first finding;
- ``message``: a part of its message;
- ``suggests``: changes of one of its suggestions, and ``kind`` of that suggestion.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from shapewright.lint.evaluate import evaluate
from shapewright.lint.example import example_scenario
from shapewright.lint.rule import Finding, get_rule, list_rules
from shapewright.prediction.scenario import Scenario

CASES = Path(__file__).parents[1] / "lint"
SECTION = re.compile(r"^## (Fires|Silent|Boundary)\b[^\n]*\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FIRES_BY_HEADING = {"Fires": True, "Silent": False}


def blocks_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Heading word and TOML block of every case in a file."""
    return [
        (match.group(1), tomllib.loads(block))
        for match in SECTION.finditer(text)
        for block in BLOCK.findall(match.group(2))
    ]


def all_blocks() -> list[Any]:
    """Every block of every file, named for the report of a failure."""
    return [
        pytest.param(path.stem, heading, block, id=f"{path.stem}-{heading}-{index}")
        for path in sorted(CASES.glob("*.md"))
        for index, (heading, block) in enumerate(blocks_of(path.read_text(encoding="utf-8")))
    ]


def config_changes(block: dict[str, Any]) -> dict[str, Any]:
    """Fields that a block changes, with lists as tuples."""
    return {
        name: tuple(value) if isinstance(value, list) else value for name, value in block.items() if name != "expect"
    }


def findings_of(code: str, scenario: Scenario) -> list[Finding]:
    """Findings of one rule."""
    rule = get_rule(code)
    judged = [evaluate(rule, violation, scenario) for violation in rule.check(scenario)]
    return [finding for finding in judged if finding is not None]


@pytest.mark.parametrize(("code", "heading", "block"), all_blocks())
def test_case(code: str, heading: str, block: dict[str, Any]) -> None:
    """A rule fires or does not, with the message that its case file expects."""
    expected = block.get("expect", {})
    fires = FIRES_BY_HEADING.get(heading, expected.get("fires"))
    found = findings_of(code, example_scenario(**config_changes(block)))

    assert fires is not None, "a block under Boundary says expect.fires"
    assert bool(found) == fires, [finding.message for finding in found]
    for finding in found[:1]:
        check_finding(finding, expected)


@pytest.mark.parametrize(("code", "heading", "block"), all_blocks())
def test_suggestions_of_a_case_resolve_it(code: str, heading: str, block: dict[str, Any]) -> None:
    """With a suggestion applied, the rule does not fire for that field, and the step is not slower."""
    scenario = example_scenario(**config_changes(block))
    for finding in findings_of(code, scenario):
        for suggestion in finding.suggestions:
            after = scenario.try_replace(suggestion.changes)

            assert after is not None
            assert finding.field not in [again.field for again in findings_of(code, after)], heading
            if suggestion.predicted_gain_fraction is not None:
                assert after.time_per_token_s <= scenario.time_per_token_s


def test_an_expert_is_split_by_the_degree_of_experts() -> None:
    """Half of 1410 is whole and a quarter is not; the tensor degree of 2 is that of the other layers."""
    degrees = {"tensor_parallel": 2, "data_parallel": 2, "expert_tensor_parallel": 4}
    scenario = example_scenario(num_experts=8, num_experts_per_token=2, moe_intermediate_size=1410, **degrees)
    (finding,) = findings_of("PL109", scenario)

    assert "does not split over expert_tensor_parallel=4" in finding.message


def check_finding(finding: Finding, expected: dict[str, Any]) -> None:
    """Compare a finding with the expectations of its case."""
    assert expected.get("field", finding.field) == finding.field
    assert expected.get("severity", finding.severity) == finding.severity
    assert expected.get("message", "") in finding.message
    if "suggests" in expected:
        kinds = {
            suggestion.kind
            for suggestion in finding.suggestions
            if expected["suggests"].items() <= dict(suggestion.changes).items()
        }
        assert kinds == {expected.get("kind", next(iter(kinds), None))}, finding.suggestions


@pytest.mark.parametrize("rule", list_rules(), ids=lambda rule: rule.code)
def test_every_rule_has_cases_of_each_sort(rule: Any) -> None:
    """Each rule has a file whose title names it, with cases that fire, stay silent and mark the boundary."""
    text = (CASES / f"{rule.code}.md").read_text(encoding="utf-8")

    assert text.startswith(f"# {rule.code} {rule.name}\n")
    assert {heading for heading, _ in blocks_of(text)} == {"Fires", "Silent", "Boundary"}


def test_every_file_has_a_rule() -> None:
    """There is no case file without a rule."""
    assert {path.stem for path in CASES.glob("*.md")} == {rule.code for rule in list_rules()}


def test_a_wrong_case_fails() -> None:
    """The checker can fail: a case that expects another suggestion is refused."""
    finding = findings_of("TC101", example_scenario(vocab_size=50257))[0]

    with pytest.raises(AssertionError):
        check_finding(finding, {"suggests": {"vocab_size": 50257}})
