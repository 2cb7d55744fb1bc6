"""The padded vocabulary does not divide over the tensor parallel devices, so vLLM and SGLang do not start.

## What it does

Fires in prefill and decode when the vocabulary, padded to a multiple of 64 as vLLM and SGLang do, is no multiple of
`tensor_parallel`. TensorRT-LLM pads it to a multiple of the degree and starts. Heads that a degree does not divide are
refused by all three engines: `heads-split-unevenly` and `kv-heads-replicated` report them.

## Why it is slow

It does not start: "128256 is not divisible by 7". Degrees that are powers of two up to 64 always divide it, so the rule
is about nodes with 3, 5, 6 or 7 usable devices.

## Example

>>> from shapewright.lint.example import fires
>>> fires("SV102", phase="decode", tensor_parallel=5, vocab_size=50257)
True

## Use instead

>>> fires("SV102", phase="decode", tensor_parallel=4, vocab_size=50257)
False

## Fix safety

`runtime`: a smaller degree. A vocabulary padded in the checkpoint is `vocab-not-aligned`'s suggestion.

## When it does not matter

In engines that pad to the degree.

## References

- vLLM 0.10.2, `model_executor/layers/vocab_parallel_embedding.py` (DEFAULT_VOCAB_PADDING_SIZE and `divide`); SGLang
  0.5.3, `srt/layers/vocab_parallel_embedding.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.layout_fixes import smaller_degree_fixes
from shapewright.lint.rule import Rule, Violation

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario

PADDING = 64
"""Multiple that vLLM and SGLang pad a vocabulary to (DEFAULT_VOCAB_PADDING_SIZE)."""


def check(scenario: Scenario) -> Iterator[Violation]:
    """Compare the padded vocabulary with the degree."""
    t, vocab_size = scenario.layout.tensor_parallel, scenario.config.vocab_size
    padded = -(-vocab_size // PADDING) * PADDING
    if scenario.workload.is_training or padded % t == 0:
        return
    fixes = smaller_degree_fixes(scenario, t)
    yield Violation(
        field="config.vocab_size",
        actual=vocab_size,
        wanted=f"a multiple of tensor_parallel={t}, padded to a multiple of {PADDING}",
        problem=f"is padded to {padded} by vLLM and SGLang, which tensor_parallel={t} does not divide: neither starts",
        fixes=tuple(fix for fix in fixes if padded % fix.changes["tensor_parallel"] == 0),
        severity="warning",
        has_cost=False,
    )


RULE = Rule(
    code="SV102",
    name="vocab-split-unevenly",
    since="0.1.0",
    reads=("config.vocab_size", "layout.tensor_parallel", "workload.phase"),
    check=check,
)
