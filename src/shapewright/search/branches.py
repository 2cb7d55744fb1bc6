"""Branches of a search: what a shape runs on and with, where that is varied too, and mixtures of experts.

A space of arrays has one layout, one recomputation and one set of experts. Each combination of them is a branch with a
space of its own; what the branches find is compared as one. The first branch is the baseline's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shapewright.errors import ConfigError, ShapewrightError, WorkloadError
from shapewright.lowering import num_microbatches
from shapewright.search.changes import CHANGES
from shapewright.search.layouts import other_layouts
from shapewright.workload import RECOMPUTE_MODES

if TYPE_CHECKING:
    from shapewright.config import TransformerConfig
    from shapewright.hardware import Device
    from shapewright.layout import ParallelLayout
    from shapewright.search.request import SearchRequest
    from shapewright.workload import Workload

_EXPERT_UNIT = 64  # elements: a multiple of it keeps the rows of an expert aligned to a cache line
_FINEST, _COARSEST = 4, 4  # times as many, or as few, experts as the baseline's
_MOST_SHARED = 4  # shared experts
_MOST_PER_TOKEN = 32
_MOST_EXPERTS = 1024


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One way to run shapes.

    Attributes:
        config: The baseline, with the branch's experts.
        workload: The workload, with the branch's recomputation.
        layout: The branch's layout.
        changed: What differs from the baseline, among ``experts``, ``layout`` and ``recompute``.
    """

    config: TransformerConfig
    workload: Workload
    layout: ParallelLayout
    changed: tuple[str, ...] = ()

    @property
    def code(self) -> int:
        """What differs, as encode_changes writes it."""
        return sum(1 << CHANGES.index(change) for change in self.changed)


def list_branches(
    config: TransformerConfig, device: Device, workload: Workload, layout: ParallelLayout, request: SearchRequest
) -> list[Branch]:
    """List the branches that a request asks for, the baseline's first.

    Raises:
        ConfigError: experts are to be varied and there are none.
        WorkloadError: recomputation is to be varied where nothing is recomputed.
    """
    free = request.free_fields()
    layouts = [layout]
    if "layout" in free:
        layouts += other_layouts(config, device, workload, layout)
    modes = [workload.recompute]
    if "recompute" in free:
        if not workload.is_training:
            raise WorkloadError(f"--vary recompute has no meaning in {workload.phase}; leave it out")
        modes += [mode for mode in RECOMPUTE_MODES if mode != workload.recompute]
    experts = [config]
    if "experts" in free:
        if not config.is_moe:
            raise ConfigError("--vary experts needs a mixture of experts, and this model is dense; leave it out")
        experts += list(_other_experts(config, request.tolerance_fraction))
    branches = []
    for one in experts:
        for other in layouts:
            for mode in modes:
                pairs = {"experts": one != config, "layout": other != layout, "recompute": mode != workload.recompute}
                changed = tuple(name for name, differs in pairs.items() if differs)
                asked = workload.with_recompute(mode)
                branches.append(Branch(config=one, workload=asked, layout=other, changed=changed))
    return [branch for branch in branches if not branch.changed or _runs(branch)]


def _runs(branch: Branch) -> bool:
    """Whether the batch can be cut as the layout needs, at least for micro-batches of the baseline's size."""
    try:
        num_microbatches(branch.workload, branch.layout)
    except ShapewrightError:
        return False
    return True


def _other_experts(config: TransformerConfig, tolerance: float) -> Iterator[TransformerConfig]:
    """Experts of other number and width, and of other use, with as many parameters in all and per token.

    With E routed experts of width f, k of them per token and n shared ones of that width, the total is (E + n) f and
    what a token uses (k + n) f; both stay what they are. Whatever f follows from the second is held to the first.
    """
    own = config.moe_intermediate_size
    total = config.num_experts * own + config.shared_expert_intermediate_size
    active = config.num_experts_per_token * own + config.shared_expert_intermediate_size
    has_shared = config.shared_expert_intermediate_size > 0
    numbers = [config.num_experts * factor for factor in range(1, _FINEST + 1) if factor & (factor - 1) == 0]
    numbers += [config.num_experts // factor for factor in (2, _COARSEST) if config.num_experts % factor == 0]
    seen = {(config.num_experts, config.num_experts_per_token, config.shared_expert_intermediate_size)}
    for num_experts in sorted(number for number in set(numbers) if 1 < number <= _MOST_EXPERTS):
        for num_shared in range(_MOST_SHARED + 1) if has_shared else (0,):
            for per_token in range(1, min(num_experts, _MOST_PER_TOKEN) + 1):
                width = round(active / (per_token + num_shared) / _EXPERT_UNIT) * _EXPERT_UNIT
                if width < _EXPERT_UNIT:
                    continue
                in_all, in_use = (num_experts + num_shared) * width, (per_token + num_shared) * width
                if max(abs(in_all / total - 1.0), abs(in_use / active - 1.0)) > tolerance:
                    continue
                shared = num_shared * width
                if (num_experts, per_token, shared) in seen:
                    continue
                seen.add((num_experts, per_token, shared))
                # Where dense layers are as wide as an expert, they stay so.
                dense = width if config.intermediate_size == own else config.intermediate_size
                yield replace(
                    config,
                    intermediate_size=dense,
                    num_experts=num_experts,
                    num_experts_per_token=per_token,
                    moe_intermediate_size=width,
                    shared_expert_intermediate_size=shared,
                )
