"""Helpers for the examples on rule pages: a base scenario, and whether a rule fires on a variant of it."""

from __future__ import annotations

from functools import cache
from typing import Any

from shapewright.hardware.loader import load_device
from shapewright.lint.evaluate import evaluate
from shapewright.lint.rule import get_rule
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.scenario import Scenario
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

# GPT-3 2.7B with 20 heads of 128 and a padded vocabulary, on which no shape rule fires.
_BASE: dict[str, Any] = {
    "hidden_size": 2560,
    "num_layers": 32,
    "num_heads": 20,
    "vocab_size": 50304,
    "max_position_embeddings": 2048,
    "position_embedding": "learned",
}
_DTYPE, _DEVICE = "fp16", "a100-sxm-40gb"
_WORKLOAD_NAMES = frozenset(Workload.__dataclass_fields__)
_LAYOUT_NAMES = frozenset(ParallelLayout.__dataclass_fields__)


def fires(code: str, *, device: str = _DEVICE, **changes: Any) -> bool:
    """Return whether a rule has a finding on GPT-3 2.7B (20 heads, vocabulary of 50304) with some fields changed.

    Args:
        code: Code or name of the rule.
        device: Name of the device.
        **changes: Fields of TransformerConfig, Workload and ParallelLayout.
    """
    return bool(messages(code, device=device, **changes))


def messages(code: str, *, device: str = _DEVICE, **changes: Any) -> list[str]:
    """Return the messages of a rule's findings, for the arguments of ``fires``."""
    rule, scenario = get_rule(code), example_scenario(device=device, **changes)
    findings = [evaluate(rule, violation, scenario) for violation in rule.check(scenario)]
    return [finding.message for finding in findings if finding is not None]


def example_scenario(*, device: str = _DEVICE, **changes: Any) -> Scenario:
    """Build a scenario of GPT-3 2.7B with some fields changed."""
    layout_changes = {name: value for name, value in changes.items() if name in _LAYOUT_NAMES}
    workload_changes = {name: value for name, value in changes.items() if name in _WORKLOAD_NAMES}
    config_changes = {name: value for name, value in changes.items() if name not in _LAYOUT_NAMES | _WORKLOAD_NAMES}
    return Scenario.of(
        TransformerConfig(**{**_BASE, **config_changes}),
        _load(device),
        Workload(**{"dtype": _DTYPE, **workload_changes}),
        ParallelLayout(**layout_changes),
    )


@cache
def _load(name: str) -> Any:
    return load_device(name)
