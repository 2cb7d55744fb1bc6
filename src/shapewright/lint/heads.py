"""Whether attention kernels like a head width, and which other widths there are; shared by the two rules on heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shapewright.lint.needs import FUSED_ALIGNMENT_BYTES, FUSED_HEAD_DIMS, full_width_multiple
from shapewright.lint.reshape import HEAD_DIMS, head_dims_near, with_head_dim
from shapewright.lint.rule import Repair

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf

# Fused kernels reach their plateau here, and the paper's shapes their best. Source: flash-attention's benchmark figures
# (head dimension 64 against 128); arXiv 2401.14489, figure 12 (flat from h/a of about 80 on).
LARGE_ENOUGH_HEAD_DIM = 128

_ATTENTION_BITS = 16  # attention stays 16 bits wide around GEMMs of 8 and less


@dataclass(frozen=True)
class HeadDimProblem:
    """Why a head width is awkward.

    Attributes:
        text: Reads on after ``head_dim=80 ``.
        wanted: What would be right.
    """

    text: str
    wanted: str


def head_dim_problem(case: WhatIf, head_dim: int = 0) -> HeadDimProblem | None:
    """Say why a head width does not suit the kernels in use; None where it does.

    Args:
        case: The model and its setting.
        head_dim: The width to judge; 0 for the model's own.
    """
    head_dim = head_dim or case.config.head_dim
    if case.config.is_mla:
        return None
    if case.workload.attention == "unfused":
        multiple = full_width_multiple(case.device, _attention_dtype(case))
        if head_dim % multiple == 0:
            return None
        return HeadDimProblem(
            text=f"is not a multiple of {multiple} (unfused, {case.setting})", wanted=f"a multiple of {multiple}"
        )
    wanted = "one of " + ", ".join(map(str, FUSED_HEAD_DIMS))
    multiple = FUSED_ALIGNMENT_BYTES * 8 // _ATTENTION_BITS
    if head_dim % multiple:
        return HeadDimProblem(text=f"is not a multiple of {multiple}, so fused attention pads it", wanted=wanted)
    if head_dim in FUSED_HEAD_DIMS:
        return None
    larger = next((width for width in FUSED_HEAD_DIMS if width > head_dim), None)
    if larger is None:
        return HeadDimProblem(text=f"is above {FUSED_HEAD_DIMS[-1]}, which fused kernels stop at", wanted=wanted)
    return HeadDimProblem(text=f"runs in the fused kernel for {larger}, padded", wanted=wanted)


def reheading_repairs(case: WhatIf, *, larger_only: bool, smallest: int = 0) -> tuple[Repair, ...]:
    """The same width cut into heads of every usual width that the kernels like."""
    repairs = []
    for head_dim in head_dims_near(case.config):
        if (
            head_dim < smallest
            or (larger_only and head_dim <= case.config.head_dim)
            or head_dim_problem(case, head_dim)
        ):
            continue
        changes = with_head_dim(case.config, head_dim)
        if changes and _splits(changes["num_heads"], changes["num_kv_heads"], case.layout.tensor_parallel):
            title = f"use num_heads={changes['num_heads']} (head_dim {head_dim})"
            repairs.append(Repair(kind="retrain", title=title, changes=changes))
    return tuple(repairs)


def resizing_repairs(case: WhatIf) -> tuple[Repair, ...]:
    """As many heads of the nearest widths that the kernels like, for a width that no other heads fill."""
    own = case.config.head_dim
    liked = [width for width in HEAD_DIMS if head_dim_problem(case, width) is None]
    nearest = [width for width in liked if width < own][-1:] + [width for width in liked if width > own][:1]
    repairs = []
    for width in nearest:
        changes = {"head_dim": width}
        if case.config.v_head_dim == own:
            changes["v_head_dim"] = width
        repairs.append(Repair(kind="retrain", title=f"use head_dim={width}", changes=changes))
    return tuple(repairs)


def without_small_heads(case: WhatIf, repairs: tuple[Repair, ...]) -> tuple[Repair, ...]:
    """Repairs without heads that are small, and narrower than they are, where others are faster than the present ones.

    Else one rule would ask for heads that the next one finds too small.
    """
    least = min(case.config.head_dim, LARGE_ENOUGH_HEAD_DIM)
    wide = tuple(repair for repair in repairs if repair.changes["head_dim"] >= least)
    return wide if any(_is_faster(case, repair) for repair in wide) else repairs


def _is_faster(case: WhatIf, repair: Repair) -> bool:
    after = case.changed(repair.changes)
    if after is None or not case.is_possible or not after.is_possible:
        return False
    return after.time_per_token_s < case.time_per_token_s


def _splits(num_heads: int, num_kv_heads: int, degree: int) -> bool:
    """Whether heads divide over the tensor axis, key-value heads perhaps as copies."""
    return num_heads % degree == 0 and (num_kv_heads % degree == 0 or degree % num_kv_heads == 0)


def _attention_dtype(case: WhatIf) -> str:
    return case.workload.dtype if case.workload.dtype in ("fp32", "tf32", "fp16", "bf16") else "bf16"
