"""Rules on batches that are too small for experts, GEMMs or a pipeline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.core.dtypes import get_dtype
from shapewright.core.numeric import divisors
from shapewright.lint.layout_fixes import effective_global_batch, larger_micro_batch_fixes, sufficient_micro_batch_fix
from shapewright.lint.rule import Fix, Violation, rule

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


@rule(
    "WQ101",
    "micro-batch-too-small",
    reads=("workload.micro_batch_size", "workload.global_batch_size", "layout.data_parallel"),
)
def micro_batch_too_small(scenario: Scenario) -> Iterator[Violation]:
    """The micro-batch is smaller than memory allows, so GEMMs have fewer rows than the device needs.

    ## What it does

    Training only. Fires when a larger `micro_batch_size` that fits in memory is predicted to take at least 1 % less
    time per token at the same global batch (fewer accumulation steps). It suggests the smallest one within 1 % of the
    best.

    ## Why it is slow

    Weights are read once per micro-batch, and GEMMs with few rows use part of the device. On an A100 a GEMM of m x 4096
    by 4096 x m ran at 83 TFLOP/s with m = 1024, 193 with 2048, 239 with 4096 and 252 with 8192 (sweep of arXiv
    2401.14489). End to end, a 182 B model on 384 A100 went from 110 to 157 TFLOP/s with a micro-batch of 2 instead of 1
    (topology log of BLOOM).

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("WQ101", num_layers=4, micro_batch_size=1, seq_len=256)
    True

    ## Use instead

    >>> fires("WQ101", num_layers=4, micro_batch_size=64, seq_len=256)
    False

    ## Fix safety

    `runtime`: the global batch, and so the training run, stays the same. Memory is an estimate: test the step before a
    long run. Without a `global_batch_size` the batch of a step grows with the micro-batch.

    ## When it does not matter

    Where b * s is already some thousand tokens, GEMMs fill the device. In a pipeline, larger micro-batches are fewer
    and make the bubble larger; the prediction includes this.

    ## References

    - arXiv 2401.14489, rule 2; stas00/ml-engineering, "Final recommendations for sizing".
    """
    if not scenario.workload.is_training:
        return
    fix = sufficient_micro_batch_fix(scenario)
    if fix:
        yield Violation(
            field="workload.micro_batch_size",
            actual=scenario.workload.micro_batch_size,
            wanted="as many sequences as fill the device and fit in memory",
            problem="is smaller than memory allows",
            fixes=(fix,),
        )


@rule(
    "WQ104",
    "few-tokens-per-expert",
    reads=(
        "config.num_experts",
        "config.num_experts_per_token",
        "workload.micro_batch_size",
        "workload.seq_len",
        "layout.expert_parallel",
        "layout.expert_tensor_parallel",
    ),
)
def few_tokens_per_expert(scenario: Scenario) -> Iterator[Violation]:
    """Each expert gets too few tokens to be compute-bound.

    ## What it does

    Training only. Fires when each local expert gets fewer tokens than a GEMM needs to be compute-bound (peak rate over
    memory bandwidth), and a larger micro-batch or expert parallel degree reaches that number.

    ## Why it is slow

    The weights of an expert are read once per micro-batch, however few its tokens. On an H100 the experts of Mixtral
    8x7B (bf16, 2 of 8 experts per token) took 1.07 ms for 256 tokens and 1.85 ms for 768, three times the tokens in 1.7
    times the time, but 11.2 ms for 8192 and 22.6 ms for 16384 (vLLM, measurements of ai-dynamo/aiconfigurator): the
    time is proportional to the work only from some thousand tokens.

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
    if not (scenario.config.is_moe and scenario.workload.is_training and scenario.is_possible):
        return
    wanted, actual = _compute_bound_rows(scenario), _rows_per_expert(scenario)
    if actual >= wanted:
        return
    fixes = (*larger_micro_batch_fixes(scenario), *_larger_expert_degree_fixes(scenario))
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


def _compute_bound_rows(scenario: Scenario) -> int:
    """Return the rows from which the GEMMs of an expert are compute-bound.

    From there on, 2 FLOPs per row and weight take longer than reading the weight.
    """
    weight_s = get_dtype(scenario.workload.dtype).num_bytes / scenario.device.memory_bandwidth_bytes_per_s
    return math.ceil(weight_s * scenario.device.peak_flops_per_s(scenario.workload.dtype) / 2.0)


def _larger_expert_degree_fixes(scenario: Scenario) -> Iterator[Fix]:
    largest = scenario.layout.devices_per_stage // scenario.layout.expert_tensor_degree
    for degree in divisors(math.gcd(largest, scenario.config.num_experts)):
        if degree > scenario.layout.expert_parallel:
            changes = {"expert_parallel": degree}
            yield Fix(kind="runtime", title=f"use expert_parallel={degree}", changes=changes)


# Source: arXiv 1811.06965, section 2.3.
ENOUGH_MICRO_BATCHES_PER_STAGE = 4
_MOST_CHUNK_CHOICES = 2


@rule(
    "PL107",
    "pipeline-bubble",
    reads=(
        "workload.global_batch_size",
        "workload.micro_batch_size",
        "layout.pipeline_parallel",
        "layout.virtual_pipeline",
    ),
)
def pipeline_bubble(scenario: Scenario) -> Iterator[Violation]:
    """Too few micro-batches for the pipeline: stages idle while it fills and drains.

    ## What it does

    Training only. Fires when micro-batches times model chunks per stage are fewer than four times the number of stages.

    ## Why it is slow

    With m micro-batches on p stages, each stage idles for p - 1 of m + p - 1 time slots, which is almost half of the
    time if m = p. A 182 B model on 384 A100 with 12 stages ran at 114 TFLOP/s with a global batch of 512, 136 with
    1024, and 152 with 2048 (topology log of BLOOM).

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("PL107", pipeline_parallel=4, global_batch_size=16, micro_batch_size=4)
    True

    ## Use instead

    >>> fires("PL107", pipeline_parallel=4, global_batch_size=64, micro_batch_size=4)
    False

    ## Fix safety

    `runtime`. Interleaving (`virtual_pipeline`) adds communication between stages, and smaller micro-batches may slow
    GEMMs down; the prediction includes both. A larger global batch, which changes the training run, is suggested only
    where neither is sufficient.

    ## When it does not matter

    Without a `global_batch_size` the step is assumed to have one micro-batch per stage, and the finding is at most an
    `info`: set the actual one.

    ## References

    - arXiv 1811.06965 (GPipe), section 2.3: the bubble is negligible with four or more micro-batches per stage.
    - arXiv 2104.04473, section 2.2, on interleaving: bubble (p - 1) / (v m).
    """
    stages = scenario.layout.pipeline_parallel
    if stages == 1 or not scenario.workload.is_training or _has_enough_micro_batches(scenario):
        return
    fixes = tuple(fix for fix in _smaller_bubble_fixes(scenario) if _fills_pipeline(scenario, fix)) or (
        _larger_batch_fix(scenario),
    )
    yield Violation(
        field="workload.global_batch_size",
        actual=effective_global_batch(scenario),
        wanted=f"{ENOUGH_MICRO_BATCHES_PER_STAGE} micro-batches for each of {stages} stages",
        problem=f"makes {_count_micro_batches(scenario):.0f} micro-batches for {stages} stages",
        fixes=fixes,
        most_severity=None if scenario.workload.global_batch_size else "info",
    )


def _count_micro_batches(scenario: Scenario) -> float:
    return effective_global_batch(scenario) / (scenario.workload.micro_batch_size * scenario.layout.data_parallel)


def _has_enough_micro_batches(scenario: Scenario) -> bool:
    chunks = _count_micro_batches(scenario) * scenario.layout.virtual_pipeline
    return chunks >= ENOUGH_MICRO_BATCHES_PER_STAGE * scenario.layout.pipeline_parallel


def _fills_pipeline(scenario: Scenario, fix: Fix) -> bool:
    after = scenario.try_replace(fix.changes)
    return after is not None and _has_enough_micro_batches(after) and (after.fits or not scenario.fits)


def _smaller_bubble_fixes(scenario: Scenario) -> Iterator[Fix]:
    workload = scenario.workload
    for chunks in _enough_chunks(scenario)[:_MOST_CHUNK_CHOICES]:
        yield Fix(kind="runtime", title=f"use virtual_pipeline={chunks}", changes={"virtual_pipeline": chunks})
    size = workload.micro_batch_size // 2
    while size and workload.micro_batch_size % size == 0:
        changes = {"micro_batch_size": size, "global_batch_size": effective_global_batch(scenario)}
        yield Fix(kind="runtime", title=f"use micro_batch_size={size}", changes=changes)
        size //= 2


def _enough_chunks(scenario: Scenario) -> list[int]:
    """Return the numbers of model chunks per stage that make the bubble small, the fewest first.

    They divide the layers of the fullest stage. Interleaving needs a number of micro-batches that the stages divide;
    more chunks communicate more.
    """
    stages, micro_batches = scenario.layout.pipeline_parallel, _count_micro_batches(scenario)
    if micro_batches % stages:
        return []
    return [
        chunks
        for chunks in divisors(-(-scenario.config.num_layers // stages))
        if chunks > scenario.layout.virtual_pipeline
        and micro_batches * chunks >= ENOUGH_MICRO_BATCHES_PER_STAGE * stages
    ]


def _larger_batch_fix(scenario: Scenario) -> Fix:
    """Suggest a larger global batch, for pipelines where no change at this batch makes the bubble small."""
    workload, layout = scenario.workload, scenario.layout
    enough = (
        ENOUGH_MICRO_BATCHES_PER_STAGE * layout.pipeline_parallel * workload.micro_batch_size * layout.data_parallel
    )
    title = f"use global_batch_size={enough}, another training run"
    return Fix(kind="runtime", title=title, changes={"global_batch_size": enough})
