"""Lowering of adapters and of frozen weights that are stored in fewer bits.

Legend: T tokens of this device, W[n,k] a frozen weight as this device holds it, r the rank.

An adapter is two GEMMs beside that of its weight, (T x k)(k x r) and (T x r)(r x n), and an addition to its output that
includes the scale. In the backward pass W has no weight gradient, so that it costs 4 FLOPs per token instead of 6;
adapters have both gradients. A tensor axis that splits n splits B, one that splits k splits A: partial outputs and
partial input gradients are added to those of W, so that adapters communicate nothing of their own. The first layer's
input gradient is computed as in all others (embedding outputs require gradients under activation checkpointing).
GEMMs of frozen weights in 8 bits or less include the quantization of their inputs and output gradients.

Source: arXiv 2106.09685, section 4.1; arXiv 2305.14314, section 3 (weights are converted to 16 bits before each GEMM
that reads them, in both passes); arXiv 2402.09353, section 4.1 and equation 11 (the norm of W + B A is a constant in
the backward pass).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.core.dtypes import get_dtype, stored_weight_bytes
from shapewright.lowering.builders import MAX_NARROW_BITS, display_name, dropout, pointwise, quantization
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.workload.finetuning import (
    ADAPTER_IN,
    ADAPTER_OUT,
    CONVERSION,
    DORA_NORM,
    DORA_WEIGHT,
    INPUT_ROLES,
    is_target,
)

if TYPE_CHECKING:
    from shapewright.core.numeric import Numeric
    from shapewright.lowering.operations.operation import Operation
    from shapewright.lowering.shard import Shard


def add_adapters(shard: Shard, layers: list[Operation]) -> list[Operation]:
    """Insert adapters and conversions of stored weights into the forward operations of the layers."""
    workload = shard.workload
    if not workload.has_adapters:
        return layers
    operations: list[Operation] = []
    for operation in layers:
        if not isinstance(operation, Gemm | GroupedGemm) or operation.multiplies_activations:
            operations.append(operation)
            continue
        operations += _convert_weight(shard, operation) + _quantize_input(shard, operation)
        operations.append(operation)
        if workload.adapts(operation.block, operation.role):
            operations += _lower_adapter(shard, operation)
    return operations


def _convert_weight(shard: Shard, gemm: Gemm | GroupedGemm) -> list[Operation]:
    """Lower the conversion of a weight that is stored in fewer bits than its GEMM reads."""
    stored = shard.workload.weight_dtype
    is_stored_narrow = stored is not None and is_target("all-linear", gemm.block, gemm.role)
    if stored is None or not is_stored_narrow or get_dtype(stored).bits >= get_dtype(gemm.dtype).bits:
        return []
    weights = _num_weights(gemm)
    converted = pointwise(
        shard, gemm.block, f"{gemm.role}{CONVERSION}", "activation", gemm.repeats, read=0.0, written=weights
    )
    return [converted.changed(read_bytes=weights * stored_weight_bytes(stored), stage=gemm.stage)]


def _quantize_input(shard: Shard, gemm: Gemm | GroupedGemm) -> list[Operation]:
    """Lower the quantization of the input of a frozen weight's GEMM in 8 bits or less.

    A norm writes the narrow copy of its output itself, once for all GEMMs that read it.
    """
    if get_dtype(gemm.dtype).bits > MAX_NARROW_BITS or not is_target("all-linear", gemm.block, gemm.role):
        return []
    if gemm.role in _LATER_READERS:
        return []
    elements = 1.0 * gemm.m * gemm.k
    read = 0.0 if gemm.role in INPUT_ROLES else elements
    return [quantization(gemm, shard.width_bytes, read=read, written=elements)]


# GEMMs that read the same input as the first one of their block.
_LATER_READERS = ("k", "v", "kv_a", "compressed_kv", "compressed_gate", "compressed", "up")


def _lower_adapter(shard: Shard, gemm: Gemm | GroupedGemm) -> list[Operation]:
    """Lower the two GEMMs of an adapter and the addition of its output."""
    rank, role = shard.workload.adapter_rank, gemm.role
    inner, outer = (
        gemm.changed(
            name=display_name(shard, gemm.block, role + ending),
            role=role + ending,
            dtype=shard.wide_dtype,
            weight_dtype=None,
            **sizes,
        )
        for ending, sizes in ((ADAPTER_IN, {"n": rank}), (ADAPTER_OUT, {"k": rank}))
    )
    outputs = 1.0 * gemm.m * gemm.n
    added = pointwise(
        shard, gemm.block, f"{role}.lora_add", "residual", gemm.repeats, read=2.0 * outputs, written=outputs
    )
    operations: list[Operation] = [inner, outer, added]
    if shard.workload.lora_dropout > 0.0:
        dropped = dropout(shard, gemm.block, gemm.repeats, elements=1.0 * gemm.m * gemm.k)
        role_of_dropout = f"{role}.lora_dropout"
        operations.insert(
            0, dropped.changed(name=display_name(shard, gemm.block, role_of_dropout), role=role_of_dropout)
        )
    if shard.workload.finetune == "dora":
        operations += _lower_magnitude(shard, gemm, outputs)
    return operations


def _lower_magnitude(shard: Shard, gemm: Gemm | GroupedGemm, outputs: Numeric) -> list[Operation]:
    """Lower DoRA's weight B A, the norm of the rows of W + B A, and the scale of the outputs."""
    role, weights = gemm.role, _num_weights(gemm)
    product = Gemm(
        name=display_name(shard, gemm.block, f"{role}{DORA_WEIGHT}"),
        block=gemm.block,
        role=f"{role}{DORA_WEIGHT}",
        stage=gemm.stage,
        repeats=gemm.repeats,
        dtype=shard.wide_dtype,
        m=gemm.n,
        n=gemm.k,
        k=shard.workload.adapter_rank,
        batch=gemm.groups if isinstance(gemm, GroupedGemm) else gemm.batch,
        layout="NN",
    )
    # The sum of both weights and the norm of its rows are two kernels.
    norm = pointwise(
        shard,
        gemm.block,
        f"{role}{DORA_NORM}",
        "norm",
        gemm.repeats,
        read=3.0 * weights,
        written=weights,
        num_kernels=2,
    )
    # Its gradient reads the output as well, as that of an activation does.
    scale = pointwise(
        shard, gemm.block, f"{role}.dora_scale", "activation", gemm.repeats, read=outputs, written=outputs
    )
    return [product, norm, scale.changed(is_gated=False)]


def _num_weights(gemm: Gemm | GroupedGemm) -> Numeric:
    """Number of weights that one execution reads. [element]"""
    copies = gemm.groups if isinstance(gemm, GroupedGemm) else gemm.batch
    return 1.0 * copies * gemm.n * gemm.k
