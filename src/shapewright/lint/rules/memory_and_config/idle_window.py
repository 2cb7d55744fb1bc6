"""The attention window is at least as long as the sequence, so it has no effect.

## What it does

Fires when no attention window of the model is shorter than the sequence.

## Why it is slow

It is as slow as without a window: a model chosen for its window runs full attention. Mistral 7B with its window of 4096
costs the same at 4096 tokens as a model without one; at 32768 tokens the window reduces the average number of keys from
16384 to 3840. (Arithmetic.)

## Example

>>> from shapewright.lint.example import fires
>>> fires("CF102", attention_windows=(4096,), seq_len=2048)
True

## Use instead

>>> fires("CF102", attention_windows=(1024,), seq_len=2048)
False

## Fix safety

No fix is needed; predict with the sequence length that you will run.

## When it does not matter

When you run short sequences only.

## References

- arXiv 2310.06825 (Mistral 7B), section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.rule import Rule, Violation

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(scenario: Scenario) -> Iterator[Violation]:
    """Compare the windows with the sequence length."""
    windows = [window for window in scenario.config.attention_windows if window]
    length = scenario.workload.kv_len
    if not windows or min(windows) < length:
        return
    yield Violation(
        field="config.attention_windows",
        actual=min(windows),
        wanted=f"below the {length} tokens of a sequence",
        problem=f"is not shorter than the sequence of {length} tokens, so it has no effect",
        severity="info",
    )


RULE = Rule(
    code="CF102",
    name="idle-window",
    since="0.1.0",
    reads=("config.attention_windows", "workload.seq_len", "workload.context_len"),
    check=check,
)
