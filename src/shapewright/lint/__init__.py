"""Lint: rules on shapes and layouts, with the predicted cost of each finding and suggestions."""

from shapewright.lint.better_shapes import BetterShape as BetterShape
from shapewright.lint.better_shapes import find_better_shapes as find_better_shapes
from shapewright.lint.check import CheckReport as CheckReport
from shapewright.lint.check import check_scenario as check_scenario
from shapewright.lint.check import exact_changes as exact_changes
from shapewright.lint.check import exit_code as exit_code
from shapewright.lint.check import fix_config as fix_config
from shapewright.lint.combined import CombinedFix as CombinedFix
from shapewright.lint.combined import name_changes as name_changes
from shapewright.lint.rule import SEVERITIES as SEVERITIES
from shapewright.lint.rule import Finding as Finding
from shapewright.lint.rule import Rule as Rule
from shapewright.lint.rule import Suggestion as Suggestion
from shapewright.lint.rule import get_rule as get_rule
from shapewright.lint.rule import list_rules as list_rules
from shapewright.lint.rule import rule_page as rule_page
