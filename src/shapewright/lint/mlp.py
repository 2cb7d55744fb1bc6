"""Widths of an MLP and the multiples near them; shared by the rules on MLP widths."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.lint.needs import full_width_multiple, neighbours
from shapewright.lint.rule import Repair

if TYPE_CHECKING:
    from shapewright.config.transformer import TransformerConfig
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


def width_repairs(case: WhatIf, name: str) -> tuple[Repair, ...]:
    """The nearest widths that are multiples of a full-width load, and of larger tiles, on each device."""
    multiple = full_width_multiple(case.device, case.workload.dtype) * case.layout.tensor_parallel
    width = getattr(case.config, name)
    # One multiple and four: alignment alone, and whole tiles of the usual kernels (64 and 256 fp16 elements).
    candidates = dict.fromkeys((*neighbours(width, multiple), *neighbours(width, 4 * multiple)))
    return tuple(
        Repair(kind="retrain", title=f"use {candidate}", changes={name: candidate}) for candidate in candidates
    )
