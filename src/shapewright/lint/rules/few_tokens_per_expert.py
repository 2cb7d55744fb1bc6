"""Each expert gets too few tokens to pay for reading its weights.

## What it does

Training only. Fires when routed tokens per local expert are below the number at which a GEMM stops waiting for its
weights (peak rate over memory bandwidth), and a larger micro-batch or expert parallel degree would reach it.

## Why it is slow

An expert's weights are read once per micro-batch, for however few rows. On an H100 the experts of Mixtral 8x7B (bf16,
2 of 8 experts per token) took 1.07 ms for 256 tokens and 1.85 ms for 768, three times the tokens in 1.7 times the time,
but 11.2 ms for 8192 and 22.6 ms for 16384 (vLLM, measurements of ai-dynamo/aiconfigurator): only from some thousand
tokens on does the time grow with the work.

## Example

>>> from shapewright.lint.example import fires
>>> experts = {"num_experts": 64, "num_experts_per_token": 2, "moe_intermediate_size": 1024}
>>> fires("WQ104", num_layers=2, micro_batch_size=1, seq_len=1024, **experts)
True

## Use instead

>>> fires("WQ104", num_layers=2, micro_batch_size=8, seq_len=2048, **experts)
False

## Fix safety

`runtime`.

## When it does not matter

In decode few tokens per expert are the rule, and only more sequences at once help.

## References

- arXiv 2101.03961 (Switch Transformers), section 2.2, on tokens per expert; roofline of the device's own file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.dtypes import get_dtype
from shapewright.integers import divisors
from shapewright.lint.batches import larger_micro_batches
from shapewright.lint.rule import Repair, Rule, Violation

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf


def check(case: WhatIf) -> Iterator[Violation]:
    """Look for experts that wait for their weights."""
    if not (case.config.is_moe and case.workload.is_training and case.is_possible):
        return
    wanted, actual = _wanted_rows(case), _rows_per_expert(case)
    if actual >= wanted:
        return
    repairs = (*larger_micro_batches(case), *_more_expert_parallel(case))
    reaching = tuple(
        repair
        for repair in repairs
        if (after := case.changed(repair.changes)) is not None and _rows_per_expert(after) >= wanted
    )
    if reaching:
        yield Violation(
            field="workload.micro_batch_size",
            actual=case.workload.micro_batch_size,
            wanted=f"{wanted} tokens for each expert",
            problem=f"gives each expert {actual:.0f} tokens of the {wanted} that pay for its weights ({case.setting})",
            repairs=reaching,
        )


def _rows_per_expert(case: WhatIf) -> float:
    """Rows that one expert multiplies in one micro-batch: T k_e ep / E, fewer where it is cut into fewer pieces."""
    layout = case.layout
    tokens = case.workload.micro_batch_size * case.workload.query_len / layout.context_parallel
    groups = layout.expert_parallel * layout.tensor_degree_of_experts / layout.tensor_parallel
    return tokens * case.config.num_experts_per_token * groups / case.config.num_experts


def _wanted_rows(case: WhatIf) -> int:
    """Rows from which 2 flop per row and weight take longer than reading the weight."""
    weight_s = get_dtype(case.workload.dtype).num_bytes / case.device.memory_bandwidth_bytes_per_s
    return math.ceil(weight_s * case.device.peak_flops_per_s(case.workload.dtype) / 2.0)


def _more_expert_parallel(case: WhatIf) -> Iterator[Repair]:
    holders = case.layout.devices_per_stage // case.layout.tensor_degree_of_experts
    for degree in divisors(math.gcd(holders, case.config.num_experts)):
        if degree > case.layout.expert_parallel:
            changes = {"expert_parallel": degree}
            yield Repair(kind="runtime", title=f"use expert_parallel={degree}", changes=changes)


RULE = Rule(
    code="WQ104",
    name="few-tokens-per-expert",
    since="0.1.0",
    reads=(
        "config.num_experts",
        "config.num_experts_per_token",
        "workload.micro_batch_size",
        "workload.seq_len",
        "layout.expert_parallel",
        "layout.expert_tensor_parallel",
    ),
    check=check,
)
