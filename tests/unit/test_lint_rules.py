"""Registry of the lint rules: codes, names, pages with examples, fields, look-up."""

from __future__ import annotations

import doctest
import importlib
import math
import re
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

import pytest

from shapewright.core.errors import UnknownRuleError
from shapewright.hardware.device import Device
from shapewright.lint.rule import FAMILIES, get_rule, list_rules, rule_page
from shapewright.lint.rules.alignment import has_eight_thirds_width
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

HEADINGS = (
    "What it does",
    "Why it is slow",
    "Example",
    "Use instead",
    "Fix safety",
    "When it does not matter",
    "References",
)


def test_codes_and_names_are_unique_and_well_formed() -> None:
    """A code is a known family and three digits, a name is words with hyphens, and neither repeats."""
    rules = list_rules()

    assert len({rule.code for rule in rules}) == len({rule.name for rule in rules}) == len(rules)
    for rule in rules:
        assert re.fullmatch(r"[A-Z]{2}\d{3}", rule.code), rule.code
        assert rule.code[:2] in FAMILIES
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.name), rule.name


@pytest.mark.parametrize("rule", list_rules(), ids=lambda rule: rule.code)
def test_checks_are_named_after_their_rule(rule: Any) -> None:
    """The function of a rule has the rule's name."""
    assert rule.check.__name__ == rule.name.replace("-", "_")


@pytest.mark.parametrize("rule", list_rules(), ids=lambda rule: rule.code)
def test_every_page_has_all_headings(rule: Any) -> None:
    """A page has a one-line summary, all headings in order, and a number under the reason."""
    page = rule_page(rule.code)
    reason = page.partition("## Why it is slow")[2].partition("\n## ")[0]

    assert re.findall(r"^## (.+)$", page, re.MULTILINE) == list(HEADINGS)
    assert page.startswith(f"# {rule.code} {rule.name}\n\n{rule.summary}\n")
    assert rule.summary.endswith(".")
    assert re.search(r"\d", reason)


@pytest.mark.parametrize("rule", list_rules(), ids=lambda rule: rule.code)
def test_examples_on_pages_hold(rule: Any) -> None:
    """The rule fires on the example, and not on the replacement."""
    (example,) = doctest.DocTestFinder(recurse=False).find(rule.check, rule.name)
    outcome = doctest.DocTestRunner().run(example)

    assert outcome.failed == 0
    assert outcome.attempted >= 3


@pytest.mark.parametrize("name", ["shape_fixes"])
def test_examples_in_helpers_hold(name: str) -> None:
    """Doctests of the shared modules hold."""
    assert doctest.testmod(importlib.import_module(f"shapewright.lint.{name}")).failed == 0


@pytest.mark.parametrize("rule", list_rules(), ids=lambda rule: rule.code)
def test_rules_read_fields_that_exist(rule: Any) -> None:
    """Paths under ``reads`` name fields of config, workload, layout or device."""
    known = {
        "config": {spec.name for spec in fields(TransformerConfig)},
        "workload": {spec.name for spec in fields(Workload)},
        "layout": {spec.name for spec in fields(ParallelLayout)},
        "device": {spec.name for spec in fields(Device)},
    }
    for path in rule.reads:
        owner, _, name = path.partition(".")
        assert name in known[owner], path


def test_field_names_of_config_workload_and_layout_do_not_overlap() -> None:
    """Changes are given by bare field names, so names must be unique."""
    names = [spec.name for owner in (TransformerConfig, Workload, ParallelLayout) for spec in fields(owner)]

    assert len(names) == len(set(names))


@pytest.mark.parametrize("given", ["TC101", "tc101", " vocab-not-aligned "])
def test_rules_are_found_by_code_and_name(given: str) -> None:
    """Look-up ignores case and surrounding blanks."""
    assert get_rule(given).code == "TC101"


@pytest.mark.parametrize(
    ("given", "hint"), [("TC11", "'TC101'"), ("vocab-unaligned", "'vocab-not-aligned'"), ("?", "PL101, ")]
)
def test_an_unknown_rule_is_an_error_with_close_names(given: str, hint: str) -> None:
    """The error names the given rule and the known ones."""
    with pytest.raises(UnknownRuleError, match="unknown rule") as caught:
        rule_page(given)

    assert repr(given) in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize("hidden_size", [768, 1024, 1025, 2560, 4096])
def test_eight_thirds_of_a_width_are_rounded_up_or_down(hidden_size: int) -> None:
    """The two integers around 8h/3 are taken for it, or the one that it is, and none beside them."""
    exact = Fraction(8 * hidden_size, 3)
    around = range(math.floor(exact) - 3, math.ceil(exact) + 4)
    config = TransformerConfig(hidden_size=hidden_size, num_layers=2, num_heads=1, vocab_size=1024, gated_mlp=True)
    found = {width for width in around if has_eight_thirds_width(replace(config, intermediate_size=width))}

    assert found == {math.floor(exact), math.ceil(exact)}
