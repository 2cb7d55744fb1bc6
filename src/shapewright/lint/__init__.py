"""Lint: what is wrong with a shape on a device, what it costs, and what to use instead."""

from shapewright.lint.check import CheckReport as CheckReport
from shapewright.lint.check import check_model as check_model
from shapewright.lint.check import exit_code as exit_code
from shapewright.lint.finding import SEVERITIES as SEVERITIES
from shapewright.lint.finding import Finding as Finding
from shapewright.lint.finding import Suggestion as Suggestion
from shapewright.lint.fix import exact_changes as exact_changes
from shapewright.lint.fix import fix_config as fix_config
from shapewright.lint.nearest import BetterShape as BetterShape
from shapewright.lint.nearest import find_better_shapes as find_better_shapes
from shapewright.lint.output import to_json as to_json
from shapewright.lint.output import to_sarif as to_sarif
from shapewright.lint.registry import get_rule as get_rule
from shapewright.lint.registry import list_rules as list_rules
from shapewright.lint.registry import rule_page as rule_page
from shapewright.lint.rule import Rule as Rule
