"""Rules on sizes of the model that are not multiples of a full-width load."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shapewright.core.dtypes import get_dtype
from shapewright.core.numeric import round_up
from shapewright.lint.rule import Fix, Violation, rule
from shapewright.lint.shape_fixes import (
    full_width_multiple,
    list_mlp_width_fields,
    nearest_multiples,
    width_fixes,
    with_hidden_size,
)
from shapewright.lowering.shard import wide_gemm_dtype

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig
    from shapewright.prediction.scenario import Scenario


@rule("TC101", "vocab-not-aligned", reads=("config.vocab_size", "layout.tensor_parallel", "workload.dtype"))
def vocab_not_aligned(scenario: Scenario) -> Iterator[Violation]:
    """The vocabulary size is not a multiple of a full-width load, which slows the logit GEMM.

    ## What it does

    Fires when `vocab_size` is not a multiple of the full-width load of dtype and device (64 fp16 elements on Ampere and
    newer, 8 on Volta) times `tensor_parallel`, so that the shard of each device is aligned too. Logits run in 16 bits
    where other GEMMs run in fp8 or narrower.

    ## Why it is slow

    The rows of the logits, and in the backward pass the rows of the transposed embedding, have `vocab_size` elements.
    Where rows are not aligned, the kernel uses narrow loads. On an A100 the logit GEMM (8192 tokens, h = 14336, v
    around 51200) ran at 74 TFLOP/s with odd v, 140 with v divisible by 4, 226 by 8, and 256 by 64 (vocabulary sweep of
    arXiv 2401.14489, logs in EleutherAI/cookbook).

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("TC101", vocab_size=50257)
    True

    ## Use instead

    Pad the embedding to the next multiple; the added rows are never used.

    >>> fires("TC101", vocab_size=50304)
    False

    ## Fix safety

    `exact`. Padding tokens never occur in data; mask their logits (set them to minus infinity) where probabilities of
    all tokens are used. The embedding and logit matrices of a trained checkpoint need the same padding.

    ## When it does not matter

    In decode with small batches, where the logit GEMM is memory-bound, and in large models with a small vocabulary,
    where it is a small share of the step. The predicted cost includes both.

    ## References

    - arXiv 2401.14489, rule 1 and the vocabulary figures.
    - NVIDIA, Matrix Multiplication Background User's Guide, "Requirements to use tensor cores".
    """
    dtype = wide_gemm_dtype(scenario.workload.dtype)
    multiple = full_width_multiple(scenario.device, dtype) * scenario.layout.tensor_parallel
    vocab_size = scenario.config.vocab_size
    if vocab_size % multiple == 0:
        return
    padded = round_up(vocab_size, multiple)
    split = f" over {scenario.layout.tensor_parallel} devices" if scenario.layout.tensor_parallel > 1 else ""
    yield Violation(
        field="config.vocab_size",
        actual=vocab_size,
        wanted=f"a multiple of {multiple}",
        problem=f"is not a multiple of {multiple} ({dtype} on {scenario.device.name}{split})",
        fixes=(Fix(kind="exact", title=f"pad it to {padded}", changes={"vocab_size": padded}),),
    )


# Multiples of a full-width load to try as hidden sizes, until a head count exists for one.
_FACTORS = (1, 2, 4, 8)


@rule("TC102", "hidden-size-not-aligned", reads=("config.hidden_size", "workload.dtype"))
def hidden_size_not_aligned(scenario: Scenario) -> Iterator[Violation]:
    """The hidden size is not a multiple of a full-width load, which slows every GEMM of the model.

    ## What it does

    Fires when `hidden_size` is not a multiple of the full-width load of dtype and device (64 fp16 elements on Ampere
    and newer, 8 on Volta). Tensor parallel shards are reported by `shard-not-aligned`.

    ## Why it is slow

    `hidden_size` is the row length of the residual stream, hence a contiguous dimension of all weight GEMMs, forward
    and backward. On an A100 the logit GEMM (8192 tokens, v = 51200, h around 14336) ran at 72 TFLOP/s with odd h, 173
    with h divisible by 2 or 4, and 256 with h divisible by 8 (hidden size sweep of arXiv 2401.14489, logs in
    EleutherAI/cookbook).

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("TC102", hidden_size=2548, num_heads=26)
    True

    ## Use instead

    >>> fires("TC102", hidden_size=2560, num_heads=20)
    False

    ## Fix safety

    `retrain`. Suggestions keep the head dimension where it divides the new hidden size, the queries per key-value head,
    and the ratio of MLP width to hidden size.

    ## When it does not matter

    With an alignment of 16 bytes (8 fp16 elements) or more, the remaining gain is small on Hopper and zero on Volta,
    which the predicted cost shows. In decode, GEMMs are memory-bound and alignment matters little.

    ## References

    - arXiv 2401.14489, rule 3.
    - NVIDIA, Matrix Multiplication Background User's Guide, "Requirements to use tensor cores".
    """
    multiple = full_width_multiple(scenario.device, scenario.workload.dtype)
    hidden_size = scenario.config.hidden_size
    if hidden_size % multiple == 0:
        return
    yield Violation(
        field="config.hidden_size",
        actual=hidden_size,
        wanted=f"a multiple of {multiple}",
        problem=f"is not a multiple of {multiple} ({scenario.dtype_and_device})",
        fixes=tuple(_aligned_hidden_sizes(scenario, multiple)),
    )


def _aligned_hidden_sizes(scenario: Scenario, multiple: int) -> Iterator[Fix]:
    """Suggest the nearest aligned hidden sizes for which a head count exists, at larger multiples if necessary.

    Where no head count exists for any (7 queries of 75 per key-value head), only the hidden size changes.
    """
    for factor in _FACTORS:
        found = False
        for candidate in nearest_multiples(scenario.config.hidden_size, factor * multiple):
            changes = with_hidden_size(scenario.config, candidate, multiple * scenario.layout.tensor_parallel)
            if changes:
                found = True
                yield Fix(kind="retrain", title=f"use {candidate}", changes=changes)
        if found:
            return
    for candidate in nearest_multiples(scenario.config.hidden_size, multiple):
        alone = {"hidden_size": candidate}
        if scenario.config.embedding_size == scenario.config.hidden_size:
            alone["embedding_size"] = candidate
        yield Fix(kind="retrain", title=f"use {candidate} with the same heads", changes=alone)


@rule(
    "TC105",
    "mlp-width-not-aligned",
    reads=(
        "config.intermediate_size",
        "config.moe_intermediate_size",
        "config.shared_expert_intermediate_size",
        "workload.dtype",
    ),
)
def mlp_width_not_aligned(scenario: Scenario) -> Iterator[Violation]:
    """An MLP width is not a multiple of a full-width load, which slows the largest GEMMs of the model.

    ## What it does

    Fires when `intermediate_size`, `moe_intermediate_size` or `shared_expert_intermediate_size` is not a multiple of
    the full-width load of dtype and device (64 fp16 elements on Ampere and newer, 8 on Volta). The width 8h/3 of a
    gated MLP is reported by `swiglu-width-not-aligned`, tensor parallel shards by `shard-not-aligned`.

    ## Why it is slow

    The MLP width is the row length of the output of the up projection and the input of the down projection. On an A100
    a GEMM of 27648 x n x 4096 ran at 137.9 TFLOP/s with n = 128 and at 96.9 with n = 130; at 227.2 with 256 and at
    116.6 with 258 (sweep of arXiv 2401.14489, logs in EleutherAI/cookbook).

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("TC105", intermediate_size=10242)
    True

    ## Use instead

    >>> fires("TC105", intermediate_size=10240)
    False

    ## Fix safety

    `retrain`. Padding a trained MLP with zero weights is exact, but changes the shape of the checkpoint, so it is not
    suggested as an exact fix.

    ## When it does not matter

    In decode, where the MLP is memory-bound, and with very long sequences, where attention dominates.

    ## References

    - arXiv 2401.14489, rule 3; stas00/ml-engineering, "Vector and matrix size divisibility".
    """
    multiple = full_width_multiple(scenario.device, scenario.workload.dtype)
    for name in list_mlp_width_fields(scenario.config):
        width = getattr(scenario.config, name)
        if width % multiple == 0 or (name == "intermediate_size" and has_eight_thirds_width(scenario.config)):
            continue
        yield Violation(
            field=f"config.{name}",
            actual=width,
            wanted=f"a multiple of {multiple}",
            problem=f"is not a multiple of {multiple} ({scenario.dtype_and_device})",
            fixes=width_fixes(scenario, name),
        )


def has_eight_thirds_width(config: TransformerConfig) -> bool:
    """Return whether a gated MLP has the width 8h/3, rounded up or down."""
    return config.gated_mlp and abs(3 * config.intermediate_size - 8 * config.hidden_size) < 3


@rule(
    "TC106",
    "swiglu-width-not-aligned",
    reads=("config.intermediate_size", "config.hidden_size", "config.gated_mlp", "workload.dtype"),
)
def swiglu_width_not_aligned(scenario: Scenario) -> Iterator[Violation]:
    """A gated MLP has the width 8h/3, which is not a multiple of a full-width load.

    ## What it does

    Fires when the MLP is gated, `intermediate_size` is 8h/3 rounded up or down, and not a multiple of the full-width
    load of dtype and device.

    ## Why it is slow

    A gated MLP has three matrices, so its width is reduced from 4h to 8h/3 to keep the parameter count; for h = 4096
    this is 10922.67. As the row length of the largest GEMMs it forces narrow loads. On an H100 (h = 4096, a batch of
    four 16-bit GEMMs that contract over the width) 10922 ran at 273 TFLOP/s and 10944 at 398, 46 % more (SwiGLU search
    in stas00/ml-engineering).

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("TC106", hidden_size=4096, num_heads=32, gated_mlp=True, intermediate_size=10922)
    True

    ## Use instead

    A nearby multiple: 10944, or 11008 as in Llama.

    >>> fires("TC106", hidden_size=4096, num_heads=32, gated_mlp=True, intermediate_size=11008)
    False

    ## Fix safety

    `retrain`. The parameter count changes by less than one percent.

    ## When it does not matter

    In decode, where the MLP is memory-bound.

    ## References

    - stas00/ml-engineering, training/performance, "SwiGLU-based MLP"; arXiv 2002.05202, section 2, for the factor 2/3.
    - arXiv 2401.14489, section on SwiGLU.
    """
    multiple = full_width_multiple(scenario.device, scenario.workload.dtype)
    width = scenario.config.intermediate_size
    if width % multiple == 0 or not has_eight_thirds_width(scenario.config):
        return
    yield Violation(
        field="config.intermediate_size",
        actual=width,
        wanted=f"a multiple of {multiple} near 8h/3",
        problem=f"is 8h/3 and not a multiple of {multiple} ({scenario.dtype_and_device})",
        fixes=width_fixes(scenario, "intermediate_size"),
    )


_TENSOR_CORE_ALIGNMENT_BITS = 128
"""Alignment that tensor cores need for full-rate loads. [bit] Source: NVIDIA, Matrix Multiplication Background."""
_NARROWEST_ADAPTER_BITS = 16  # adapters are computed in 16 bits where the frozen weights are narrower


@rule("TC110", "adapter-rank-not-aligned", reads=("workload.finetune", "workload.lora_rank", "workload.dtype"))
def adapter_rank_not_aligned(scenario: Scenario) -> Iterator[Violation]:
    """The rank of the adapters is not a multiple of 16 bytes, which slows every GEMM of every adapter.

    ## What it does

    Fires when the rank of LoRA, QLoRA or DoRA adapters is not a multiple of the tensor cores' granularity: 16 bytes,
    which are 8 elements in 16 bits and 4 in 32 bits.

    ## Why it is slow

    An adapter is two tall and thin GEMMs, (T x k)(k x r) and (T x r)(r x n). The rank r is a contiguous dimension of
    the first one's output, of both operands of the second one, and of gradients. Where rows are not a multiple of 16
    bytes, loads are narrower, and older libraries do not use the tensor cores. On an A100 the logit GEMM ran at 74
    TFLOP/s with an odd vocabulary and at 256 with a multiple of 64 (vocabulary sweep of arXiv 2401.14489, logs in
    EleutherAI/cookbook). Adapters have few FLOPs, but their GEMMs are bound by memory and kernel launches, so a larger
    aligned rank takes no more time: rank 16 is as fast as rank 8.

    ## Example

    >>> from shapewright.lint.example import fires
    >>> fires("TC110", finetune="lora", lora_rank=12)
    True

    ## Use instead

    >>> fires("TC110", finetune="lora", lora_rank=16)
    False

    ## Fix safety

    `retrain`. An adapter of another rank must be trained again; the base model does not change. An existing adapter can
    be padded with zero rows and columns, which gives the same outputs.

    ## When it does not matter

    In full fine-tuning, and where few modules have adapters. The predicted cost includes both.

    ## References

    - arXiv 2106.09685, section 4.1: the rank is a free choice, and small ones suffice.
    - NVIDIA, Matrix Multiplication Background User's Guide, "Requirements to use tensor cores".
    """
    workload = scenario.workload
    if not workload.has_adapters:
        return
    multiple = _TENSOR_CORE_ALIGNMENT_BITS // max(get_dtype(workload.dtype).bits, _NARROWEST_ADAPTER_BITS)
    rank = workload.adapter_rank
    if rank % multiple == 0:
        return
    yield Violation(
        field="workload.lora_rank",
        actual=rank,
        wanted=f"a multiple of {multiple}",
        problem=f"is not a multiple of {multiple}, 16 bytes ({scenario.dtype_and_device})",
        fixes=tuple(
            Fix(kind="retrain", title=f"rank {near}", changes={"lora_rank": near})
            for near in nearest_multiples(rank, multiple)
        ),
    )
