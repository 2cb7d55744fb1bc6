"""Lowering of what image models have beside their layers: patches, classifiers, projectors, and conditioning.

A vision tower is a model of its own: it is lowered with its own sizes, and its operations belong to the first stage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.lowering.attention.core import lower_pooling
from shapewright.lowering.builders import activation, bias_gradients, pointwise, weight_gemm
from shapewright.lowering.gradients import lower_backward
from shapewright.models.image_linears import EndLinear, list_end_linears, modulation_width

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shapewright.lowering.operations.base import Block
    from shapewright.lowering.operations.operation import Operation
    from shapewright.lowering.shard import Shard
    from shapewright.models.images import Patches

TOWER_PREFIX = "vision."
"""Prefix of the displayed names of a tower's operations."""


def of_tower(operations: Iterable[Operation]) -> list[Operation]:
    """Place the operations of a tower on the first stage, under its name."""
    return [operation.changed(name=f"{TOWER_PREFIX}{operation.name}", stage="first") for operation in operations]


def lower_start(shard: Shard) -> list[Operation]:
    """Lower the embedding of patches, and of what conditions a diffusion transformer."""
    return [operation for each in _linears(shard, is_start=True) for operation in _lower_linear(shard, each)]


def lower_start_backward(shard: Shard) -> list[Operation]:
    """Lower the gradients of ``lower_start``; data need none."""
    operations: list[Operation] = []
    for each in reversed(_linears(shard, is_start=True)):
        gradients = lower_backward(_lower_linear(shard, each))
        operations += [one for one in gradients if not (each.reads_data and one.gradient == "dgrad")]
        operations += _bias_gradient(shard, each)
    return operations


def lower_final(shard: Shard) -> list[Operation]:
    """Lower the classifier, the pooling, the output of pixels or the projector."""
    operations: list[Operation] = []
    for each in _linears(shard, is_start=False):
        operations += _lower_linear(shard, each)
        if each.role == "pool_kv":
            operations += [one.changed(stage="last") for one in lower_pooling(shard, shard.num_passes)]
    return operations


def lower_final_backward(shard: Shard) -> list[Operation]:
    """Lower the gradients of ``lower_final``."""
    operations = lower_backward(lower_final(shard), shard.workload)
    if shard.workload.trains_all:
        for each in _linears(shard, is_start=False):
            operations += _bias_gradient(shard, each)
    return operations


def lower_scalings(shard: Shard, num_layers: int) -> list[Operation]:
    """Lower what scales, shifts and gates the branches of layers: kernels of their own, as in eager mode."""
    patches = shard.config.patches
    if patches is None or not patches.num_scalings_per_layer:
        return []
    repeats, h = shard.num_passes * num_layers, shard.config.hidden_size
    operations: list[Operation] = []
    width = modulation_width(shard.config)
    if width:
        operations.append(weight_gemm(shard, "norm", "modulation", repeats, m=shard.batch_size, n=width, k=h))
    elements = 1.0 * shard.num_residual_tokens * h
    scalings = repeats * patches.num_scalings_per_layer
    operations.append(pointwise(shard, "residual", "scale", "other", scalings, read=elements, written=elements))
    return operations


def _place(each: EndLinear) -> tuple[Block, str]:
    """Block and stage of a linear layer before or after the layers."""
    return ("embedding", "first") if each.is_start else ("logits", "last")


def _patches(shard: Shard) -> Patches:
    patches = shard.config.patches
    assert patches is not None
    return patches


def _linears(shard: Shard, *, is_start: bool) -> list[EndLinear]:
    return [each for each in list_end_linears(shard.config) if each.is_start == is_start]


def _rows(shard: Shard, each: EndLinear) -> int:
    """Rows of one pass of a linear layer."""
    patches, images = _patches(shard), shard.batch_size
    of_image, tokens = shard.query_len - patches.num_class_tokens, shard.query_len
    if patches.tiles > 1 or patches.token_multiple > 1:  # padding is neither embedded nor projected
        of_image = patches.tiles * patches.count_patches(shard.workload.image_pixels)
        tokens = of_image + patches.tiles * patches.num_class_tokens
    merge = patches.projector.merge if patches.projector is not None else 1
    return (
        images
        * {
            "patch": of_image,
            "token": tokens,
            "merged": of_image // merge**2,
            "image": 1,
            "side": 2,
            "caption": shard.config.num_caption_tokens,
        }[each.rows]
    )


def _lower_linear(shard: Shard, each: EndLinear) -> list[Operation]:
    """Lower one linear layer; it is complete on every rank of the tensor axis."""
    block, stage = _place(each)
    repeats, rows = shard.num_passes * each.num_runs, _rows(shard, each)
    gemm = weight_gemm(
        shard, block, each.role, repeats, m=rows, n=each.outputs, k=each.inputs, dtype=shard.wide_dtype, stage=stage
    )
    if not each.has_activation:
        return [gemm]
    role = f"{each.role}_activation"
    return [
        gemm,
        activation(shard, block, repeats, width=each.outputs, tokens=rows, gated=False, role=role, stage=stage),
    ]


def _bias_gradient(shard: Shard, each: EndLinear) -> list[Operation]:
    if not each.has_bias:
        return []
    block, stage = _place(each)
    sums = bias_gradients(
        shard, block, shard.num_passes * each.num_runs, widths=[each.outputs], tokens=_rows(shard, each)
    )
    return [one.changed(stage=stage, name=f"{block}.{each.role}.bias_gradient") for one in sums]
