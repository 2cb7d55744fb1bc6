"""The heads do not divide over the tensor parallel devices.

## What it does

Fires when `tensor_parallel` does not divide `num_heads`, or neither divides `num_kv_heads` nor is a multiple of it.

## Why it is slow

Each device computes whole heads. Where they do not divide, frameworks refuse to start. Padding would compute ceil(a/t)
t heads: 64 heads over 6 devices cost as much as 66. On Summit, with 6 GPUs per node, this excludes most published
shapes (arXiv 2401.14489, section on 6-GPU nodes).

## Example

>>> from shapewright.lint.example import fires
>>> fires("PL101", num_heads=20, tensor_parallel=8)
True

## Use instead

>>> fires("PL101", num_heads=20, tensor_parallel=4)
False

## Fix safety

`runtime` for another degree; `retrain` for another number of heads.

## When it does not matter

Never: the step cannot run.

## References

- arXiv 1909.08053, section 3; arXiv 2401.14489, rule 4.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.layout_fixes import dividing_degree_fixes
from shapewright.lint.rule import Rule, Violation
from shapewright.lint.shape_fixes import head_count_fixes, split_head_fixes

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find head counts that do not divide over the tensor axis."""
    t, config = scenario.layout.tensor_parallel, scenario.config
    has_own_kv_heads = not config.is_mla and config.num_kv_heads != config.num_heads
    for name in ("num_heads", "num_kv_heads") if has_own_kv_heads else ("num_heads",):
        count = getattr(config, name)
        if count % t and not (name == "num_kv_heads" and t % count == 0):
            yield Violation(
                field=f"config.{name}",
                actual=count,
                wanted=f"a multiple of tensor_parallel={t}",
                problem=f"does not split over tensor_parallel={t}",
                fixes=(
                    *dividing_degree_fixes(scenario),
                    *split_head_fixes(scenario),
                    *head_count_fixes(scenario, larger_only=False),
                ),
                severity="error",
            )


RULE = Rule(
    code="PL101",
    name="heads-split-unevenly",
    since="0.1.0",
    reads=("config.num_heads", "config.num_kv_heads", "layout.tensor_parallel"),
    check=check,
)
