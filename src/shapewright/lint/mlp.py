"""Widths of an MLP and the multiples near them; shared by the rules on MLP widths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.lint.needs import full_width_multiple, neighbours
from shapewright.lint.rule import Repair

if TYPE_CHECKING:
    from shapewright.config.transformer import TransformerConfig
    from shapewright.layout import ParallelLayout
    from shapewright.lint.what_if import WhatIf


def mlp_width_fields(config: TransformerConfig) -> tuple[str, ...]:
    """Fields that hold the width of an MLP that the model has."""
    names = []
    if not config.is_moe or any(not group.is_moe for group in config.layer_groups()):
        names.append("intermediate_size")
    if config.is_moe:
        names.append("moe_intermediate_size")
    if config.shared_expert_intermediate_size:
        names.append("shared_expert_intermediate_size")
    return tuple(names)


def pieces_of_width(layout: ParallelLayout, name: str) -> int:
    """Devices that share an MLP's width; routed experts can have a number of their own."""
    return layout.tensor_degree_of_experts if name == "moe_intermediate_size" else layout.tensor_parallel


def whole_experts(case: WhatIf) -> tuple[Repair, ...]:
    """Give whole experts to the devices that share each of them now, as many experts fewer; none where it cannot be."""
    layout, workload = case.layout, case.workload
    pieces = layout.tensor_degree_of_experts
    degree = layout.expert_parallel * pieces
    can_send = layout.sequence_parallel or layout.tensor_parallel == 1 or not workload.is_training
    if pieces == 1 or case.config.num_experts % degree or not can_send:
        return ()
    title = f"use expert_tensor_parallel=1 with expert_parallel={degree}"
    return (Repair(kind="runtime", title=title, changes={"expert_tensor_parallel": 1, "expert_parallel": degree}),)


def width_repairs(case: WhatIf, name: str) -> tuple[Repair, ...]:
    """The nearest widths that are multiples of a full-width load, and of larger tiles, on each device."""
    multiple = full_width_multiple(case.device, case.workload.dtype) * pieces_of_width(case.layout, name)
    width = getattr(case.config, name)
    # One multiple and four: alignment alone, and whole tiles of the usual kernels (64 and 256 fp16 elements).
    candidates = dict.fromkeys((*neighbours(width, multiple), *neighbours(width, 4 * multiple)))
    return tuple(
        Repair(kind="retrain", title=f"use {candidate}", changes={name: candidate}) for candidate in candidates
    )
