"""The sequence is longer than the model was made for.

## What it does

Fires when `seq_len`, with `context_len` in prefill and decode, is above `max_position_embeddings`. ALiBi models, made
to run beyond their training length, and models without positions are left alone.

## Why it is slow

It is wrong rather than slow: a table of learned positions ends, and rotary positions leave the range seen in training.
The prediction is for a run that gives no useful output. Attention of such a run also grows with the square of the
length: from 2048 to 4096 tokens the attention core of a GPT-3 2.7B layer goes from 4 b s^2 h to four times as much.

## Example

>>> from shapewright.lint.example import fires
>>> fires("CF101", seq_len=4096, max_position_embeddings=2048)
True

## Use instead

>>> fires("CF101", seq_len=2048, max_position_embeddings=2048)
False

## Fix safety

`runtime` for a shorter sequence. Raising `max_position_embeddings` means training, or scaling rotary positions.

## When it does not matter

Where rotary positions are scaled at run time and the config was not changed.

## References

- arXiv 2108.12409 (ALiBi), section 2; arXiv 2306.15595 (position interpolation), section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shapewright.lint.rule import Repair, Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf

_BOUNDED = ("learned", "rotary")


def check(case: WhatIf) -> Iterator[Violation]:
    """Compare the longest sequence with what the model was made for."""
    config, workload = case.config, case.workload
    length = workload.seq_len if workload.is_training else workload.kv_len
    limit = config.max_position_embeddings
    if length <= limit or config.position_embedding not in _BOUNDED:
        return
    name = "context_len" if workload.phase == "decode" else "seq_len"
    rest = length - getattr(workload, name)
    changes: dict[str, Any] = {name: limit - rest}
    # A shorter sequence takes less time per token, which is no merit of the suggestion: it is about sense, not speed.
    repairs = (Repair(kind="runtime", title=f"use {name}={limit - rest}", changes=changes),) if limit > rest else ()
    yield Violation(
        field=f"workload.{name}",
        actual=getattr(workload, name),
        wanted=f"at most max_position_embeddings={limit}",
        problem=f"reaches beyond max_position_embeddings={limit}",
        repairs=repairs,
        severity="warning",
        has_cost=False,
    )


RULE = Rule(
    code="CF101",
    name="sequence-over-context-window",
    since="0.1.0",
    reads=(
        "workload.seq_len",
        "workload.context_len",
        "config.max_position_embeddings",
        "config.position_embedding",
    ),
    check=check,
)
