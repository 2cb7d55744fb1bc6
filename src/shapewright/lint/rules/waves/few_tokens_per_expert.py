"""Each expert gets too few tokens to be compute-bound.

## What it does

Training only. Fires when each local expert gets fewer tokens than a GEMM needs to be compute-bound (peak rate over
memory bandwidth), and a larger micro-batch or expert parallel degree reaches that number.

## Why it is slow

The weights of an expert are read once per micro-batch, however few its tokens. On an H100 the experts of Mixtral 8x7B
(bf16, 2 of 8 experts per token) took 1.07 ms for 256 tokens and 1.85 ms for 768, three times the tokens in 1.7 times
the time, but 11.2 ms for 8192 and 22.6 ms for 16384 (vLLM, measurements of ai-dynamo/aiconfigurator): the time is
proportional to the work only from some thousand tokens.

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

In decode, where experts usually get few tokens; only larger batches help.

## References

- arXiv 2101.03961 (Switch Transformers), section 2.2, on tokens per expert; roofline of the device file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.core.dtypes import get_dtype
from shapewright.core.numeric import divisors
from shapewright.lint.layout_fixes import larger_micro_batch_fixes
from shapewright.lint.rule import Fix, Rule, Violation

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


def check(scenario: Scenario) -> Iterator[Violation]:
    """Find experts that are bound by reading their weights."""
    if not (scenario.config.is_moe and scenario.workload.is_training and scenario.is_possible):
        return
    wanted, actual = _wanted_rows(scenario), _rows_per_expert(scenario)
    if actual >= wanted:
        return
    fixes = (*larger_micro_batch_fixes(scenario), *_more_expert_parallel(scenario))
    reaching = tuple(
        fix
        for fix in fixes
        if (after := scenario.try_replace(fix.changes)) is not None and _rows_per_expert(after) >= wanted
    )
    if reaching:
        yield Violation(
            field="workload.micro_batch_size",
            actual=scenario.workload.micro_batch_size,
            wanted=f"{wanted} tokens per expert",
            problem=(
                f"gives each expert {actual:.0f} of the {wanted} tokens that make it compute-bound "
                f"({scenario.dtype_and_device})"
            ),
            fixes=reaching,
        )


def _rows_per_expert(scenario: Scenario) -> float:
    """Return the tokens of one expert in one micro-batch: T k_e ep / E, where experts are split like the MLP."""
    layout = scenario.layout
    tokens = scenario.workload.micro_batch_size * scenario.workload.query_len / layout.context_parallel
    groups = layout.expert_parallel * layout.expert_tensor_degree / layout.tensor_parallel
    return tokens * scenario.config.num_experts_per_token * groups / scenario.config.num_experts


def _wanted_rows(scenario: Scenario) -> int:
    """Return the rows from which 2 FLOPs per row and weight take longer than reading the weight."""
    weight_s = get_dtype(scenario.workload.dtype).num_bytes / scenario.device.memory_bandwidth_bytes_per_s
    return math.ceil(weight_s * scenario.device.peak_flops_per_s(scenario.workload.dtype) / 2.0)


def _more_expert_parallel(scenario: Scenario) -> Iterator[Fix]:
    holders = scenario.layout.devices_per_stage // scenario.layout.expert_tensor_degree
    for degree in divisors(math.gcd(holders, scenario.config.num_experts)):
        if degree > scenario.layout.expert_parallel:
            changes = {"expert_parallel": degree}
            yield Fix(kind="runtime", title=f"use expert_parallel={degree}", changes=changes)


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
