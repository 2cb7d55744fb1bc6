"""Rules on the number and the size of attention heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.lint.layout_fixes import dividing_degree_fixes, tensor_parallel_fix
from shapewright.lint.rule import Fix, Violation, rule
from shapewright.lint.shape_fixes import (
    LARGE_ENOUGH_HEAD_DIM,
    drop_smaller_heads,
    head_count_fixes,
    head_dim_fixes,
    head_dim_problem,
    split_head_fixes,
)

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario


@rule(
    "TC103",
    "head-dim-not-aligned",
    reads=("config.head_dim", "config.num_heads", "workload.attention", "workload.dtype"),
)
def head_dim_not_aligned(scenario: Scenario) -> Iterator[Violation]:
    """The head dimension does not match the tiles of the attention kernels, which pad it.

    ## What it does

    Fires when the attention kernels in use are slow for `head_dim`. Unfused: it is not a multiple of a full-width load,
    64 elements for 16-bit formats on Ampere and newer. Fused: it is not a multiple of 8, or not one of the head
    dimensions that fused kernels are compiled for (32, 64, 96, 128, 192, 256) and padded to the next larger one.
    Multi-head latent attention has its own kernels and is ignored.

    ## Why it is slow

    Unfused attention is two batched GEMMs whose contiguous dimension is `head_dim`. On an A100, scores for h >= 16384
    ran at 85 TFLOP/s with an odd head dimension, 135 with one divisible by 4, 197 by 8, and 202 by 64 (figure 7 of
    arXiv 2401.14489). Fused kernels pad: FlashAttention on an H100 dropped from 370 TFLOP/s at 128 to 219 at 132
    (Dao-AILab/flash-attention issue 1141).

    ## Example

    GPT-3 2.7B has 32 heads of 80.

    >>> from shapewright.lint.example import fires
    >>> fires("TC103", num_heads=32, attention="unfused")
    True

    ## Use instead

    The same hidden size with 20 heads of 128: 1.18 times faster per layer on an A100 (119.47 to 140.70 TFLOP/s, section
    7 of the paper), with the same number of parameters.

    >>> fires("TC103", num_heads=20, attention="unfused")
    False

    ## Fix safety

    `retrain`. The number of parameters does not change.

    ## When it does not matter

    With short sequences attention is a small share of the step. In decode attention is bound by reading the KV cache,
    whose size does not depend on the number of heads.

    ## References

    - arXiv 2401.14489, rule 3 and figures 7 and 8.
    - Dao-AILab/flash-attention, README of the training code: "Headdim 128 is faster than headdim 80".
    """
    problem = head_dim_problem(scenario)
    if problem is None:
        return
    yield Violation(
        field="config.head_dim",
        actual=scenario.config.head_dim,
        wanted=problem.wanted,
        problem=problem.text,
        fixes=drop_smaller_heads(scenario, head_count_fixes(scenario, larger_only=False)) or head_dim_fixes(scenario),
    )


@rule("TC104", "small-heads", reads=("config.num_heads", "config.head_dim", "workload.attention"))
def small_heads(scenario: Scenario) -> Iterator[Violation]:
    """Many small heads are slower than fewer large heads with the same total width.

    ## What it does

    Fires when `head_dim` is below 128 and supported by the kernels, and the same width in fewer heads is predicted to
    be faster. Queries per key-value head stay the same.

    ## Why it is slow

    The number of scores, their softmax and memory traffic grow with the number of heads, while the FLOPs of the GEMMs
    do not: with small heads the matrix units wait. On an A100 a layer with h = 2048 ran at 129.66 TFLOP/s with 16 heads
    of 128 and at 155.29 with 8 heads of 256; one with h = 2560 at 108.51 with 40 heads of 64 and at 140.70 with 20
    heads of 128 (arXiv 2401.14489, logs in jahatef/TransformerSizing). End to end, a 182 B model on 384 A100 ran at 110
    TFLOP/s with 128 heads of 108 and at 157 with 64 heads of 216 (topology log of BLOOM).

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("TC104", num_heads=40, attention="unfused")
    True

    ## Use instead

    >>> fires("TC104", num_heads=20, attention="unfused")
    False

    ## Fix safety

    `retrain`. Fewer heads may reduce model quality; published models of similar size use head dimensions of 64 to 256
    without a clear loss.

    ## When it does not matter

    With short sequences attention is a small share of the step. In decode attention is bound by the KV cache, whose
    size stays the same.

    ## References

    - arXiv 2401.14489, rule 3 and figure 8; stas00/ml-engineering, "Number and size of attention heads".
    """
    head_dim = scenario.config.head_dim
    if head_dim >= LARGE_ENOUGH_HEAD_DIM or scenario.config.num_heads == 1 or head_dim_problem(scenario) is not None:
        return
    yield Violation(
        field="config.num_heads",
        actual=scenario.config.num_heads,
        wanted=f"heads of {LARGE_ENOUGH_HEAD_DIM} or more",
        problem=f"gives a head_dim of only {head_dim}",
        fixes=head_count_fixes(scenario, larger_only=True, smallest=LARGE_ENOUGH_HEAD_DIM),
    )


@rule("PL101", "heads-split-unevenly", reads=("config.num_heads", "config.num_kv_heads", "layout.tensor_parallel"))
def heads_split_unevenly(scenario: Scenario) -> Iterator[Violation]:
    """The heads do not divide over the tensor parallel devices.

    ## What it does

    Fires when `tensor_parallel` does not divide `num_heads`, or neither divides `num_kv_heads` nor is a multiple of it.

    ## Why it is slow

    Each device computes whole heads. Where they do not divide, frameworks refuse to start. Padding would compute
    ceil(a/t) t heads: 64 heads over 6 devices cost as much as 66. On Summit, with 6 GPUs per node, this excludes most
    published shapes (arXiv 2401.14489, section on 6-GPU nodes).

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
    t, config = scenario.layout.tensor_parallel, scenario.config
    has_own_kv_heads = not config.shares_keys and config.num_kv_heads != config.num_heads
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
                least_severity="error",
            )


@rule(
    "PL102",
    "batched-heads-split-unevenly",
    reads=("workload.micro_batch_size", "config.num_heads", "layout.tensor_parallel"),
)
def batched_heads_split_unevenly(scenario: Scenario) -> Iterator[Violation]:
    """The number of attention GEMMs, b * a, is not divisible by the tensor parallel degree.

    ## What it does

    Fires when `tensor_parallel` does not divide `micro_batch_size * num_heads`.

    ## Why it is slow

    Attention scores and values are b a / t GEMMs on each device. Where t does not divide b a, some devices wait for
    others: with 4 sequences of 20 heads on 32 devices, 16 devices compute three GEMMs and 16 compute two, so a sixth of
    the time is idle. (Arithmetic; rule 4 of arXiv 2401.14489.)

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("PL102", micro_batch_size=1, num_heads=20, tensor_parallel=8)
    True

    ## Use instead

    >>> fires("PL102", micro_batch_size=1, num_heads=20, tensor_parallel=4)
    False

    ## Fix safety

    `runtime`.

    ## When it does not matter

    Where `tensor_parallel` divides `num_heads`, it divides every batch. Most frameworks split heads and require that:
    see `heads-split-unevenly`.

    ## References

    - arXiv 2401.14489, rule 4.
    """
    t, num_gemms = scenario.layout.tensor_parallel, scenario.workload.micro_batch_size * scenario.config.num_heads
    if num_gemms % t == 0:
        return
    yield Violation(
        field="layout.tensor_parallel",
        actual=t,
        wanted=f"a divisor of micro_batch_size * num_heads = {num_gemms}",
        problem=(
            f"does not divide micro_batch_size * num_heads = {scenario.workload.micro_batch_size} * "
            f"{scenario.config.num_heads}"
        ),
        fixes=dividing_degree_fixes(scenario),
        least_severity="error",
    )


@rule("PL103", "kv-heads-replicated", reads=("config.num_kv_heads", "layout.tensor_parallel", "workload.phase"))
def kv_heads_replicated(scenario: Scenario) -> Iterator[Violation]:
    """The model has fewer key-value heads than tensor parallel devices, so they are replicated.

    ## What it does

    Fires when `tensor_parallel` exceeds `num_kv_heads`: each device stores at least one key-value head, so t / a_kv
    devices store the same one. In prefill and decode it is always reported, since the cost is memory. The reported time
    is at most that of computing, and in decode reading, keys and values that other devices have too: a smaller degree
    saves communication as well.

    ## Why it is slow

    Key and value projections are computed redundantly, and the KV cache is stored and read redundantly. With 8
    key-value heads on 16 devices a cache of 40 GB takes 80 GB over all devices, so half as many sequences fit.
    (Arithmetic; no published measurement isolates it.)

    ## Example

    >>> from shapewright.lint.example import fires
    >>> gqa = {"num_heads": 32, "num_kv_heads": 4, "hidden_size": 4096}
    >>> fires("PL103", phase="decode", tensor_parallel=8, **gqa)
    True

    ## Use instead

    >>> fires("PL103", phase="decode", tensor_parallel=4, **gqa)
    False

    ## Fix safety

    `runtime` for a smaller degree with more replicas, which in decode trades latency for throughput; `retrain` for more
    key-value heads, which adds parameters but no time.

    ## When it does not matter

    In training, where the key and value projections are a few percent of a layer.

    ## References

    - arXiv 2305.13245 (GQA), section 2.2: more heads than devices avoid "wasteful replication".
    """
    t, num_kv_heads = scenario.layout.tensor_parallel, scenario.config.num_kv_heads
    if scenario.config.shares_keys or t <= num_kv_heads or t % num_kv_heads:
        return
    fixes: list[Fix | None] = [tensor_parallel_fix(scenario, num_kv_heads)]
    if scenario.config.num_heads % t == 0:
        fixes.append(Fix(kind="retrain", title=f"use num_kv_heads={t}", changes={"num_kv_heads": t}))
    yield Violation(
        field="config.num_kv_heads",
        actual=num_kv_heads,
        wanted=f"at least tensor_parallel={t}",
        problem=f"is below tensor_parallel={t}, so {t // num_kv_heads} devices store the same keys and values",
        fixes=tuple(filter(None, fixes)),
        least_severity=None if scenario.workload.is_training else "info",
        max_cost_fraction=_redundant_fraction(scenario),
    )


_CACHE_READERS = frozenset(("fused", "score", "over_value", "repeat_kv"))


def _redundant_fraction(scenario: Scenario) -> float:
    """Return the share of the step in which devices compute or read keys and values that other devices have too."""
    if not scenario.is_possible:
        return 1.0
    t, config, prediction = scenario.layout.tensor_parallel, scenario.config, scenario.predict()
    # Each device has one key-value head.
    kv_width = config.head_dim + config.v_head_dim
    query_width = config.num_heads // t * config.head_dim * (1 + config.attention_output_gate)
    shares = {"k": 1.0, "v": 1.0, "qkv": kv_width / (kv_width + query_width)}
    if scenario.workload.phase == "decode":
        shares |= dict.fromkeys(_CACHE_READERS, 1.0)
    kv_share = sum(
        shares.get(entry.operation.role, 0.0) * prediction.share_of_step(entry)
        for entry in prediction.operations
        if entry.operation.block == "attention"
    )
    return (1.0 - config.num_kv_heads / t) * kv_share
