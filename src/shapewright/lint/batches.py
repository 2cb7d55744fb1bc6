"""Larger micro-batches and other layouts of the same devices, compared at one global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.lint.mlp import mlp_width_fields
from shapewright.lint.needs import divisors
from shapewright.lint.rule import Repair

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf

_LARGEST_FACTOR = 64


def larger_micro_batches(case: WhatIf) -> tuple[Repair, ...]:
    """Micro-batches of 2, 4, 8... times as many sequences, as long as they fit, at the global batch of the largest.

    Without a global batch in the workload both sides get the batch that the larger micro-batch would make, so that the
    optimiser step weighs the same on both.
    """
    workload, layout = case.workload, case.layout
    repairs = []
    factor = 2
    while factor <= _LARGEST_FACTOR:
        size = workload.micro_batch_size * factor
        per_round = size * layout.data_parallel
        if workload.global_batch_size is not None and workload.global_batch_size % per_round:
            break
        changed = case.changed({"micro_batch_size": size})
        # Memory grows with the micro-batch, so nothing larger fits either.
        if changed is None or not changed.fits:
            break
        at_equal = {} if workload.global_batch_size else {"global_batch_size": per_round * layout.pipeline_parallel}
        changes = {"micro_batch_size": size}
        repairs.append(Repair(kind="runtime", title=f"use {size}", changes=changes, at_equal=at_equal))
        factor *= 2
    return tuple(repairs)


def global_batch_of(case: WhatIf) -> int:
    """Sequences of one step over all replicas, given or by default."""
    workload, layout = case.workload, case.layout
    return workload.global_batch_size or workload.micro_batch_size * layout.data_parallel * layout.pipeline_parallel


def with_tensor_parallel(case: WhatIf, degree: int) -> Repair | None:
    """Another tensor parallel degree on the same devices, data parallelism taking up the difference.

    None where the devices or the global batch do not divide.
    """
    layout = case.layout
    devices = layout.tensor_parallel * layout.data_parallel
    if devices % degree:
        return None
    data_parallel = devices // degree
    if (data_parallel * layout.context_parallel) % layout.expert_parallel:
        return None
    changes: dict[str, Any] = {"tensor_parallel": degree}
    title = f"use tensor_parallel={degree}"
    if data_parallel != layout.data_parallel:
        changes["data_parallel"] = data_parallel
        title += f" with data_parallel={data_parallel}"
    at_equal: dict[str, Any] = {}
    per_round = case.workload.micro_batch_size * data_parallel
    if case.workload.is_training:
        if case.workload.global_batch_size is None:
            larger = max(per_round, case.workload.micro_batch_size * layout.data_parallel)
            at_equal = {"global_batch_size": larger * layout.pipeline_parallel}
        elif case.workload.global_batch_size % per_round:
            return None
    return Repair(kind="runtime", title=title, changes=changes, at_equal=at_equal)


def smaller_degrees(case: WhatIf, largest: int) -> tuple[Repair, ...]:
    """Tensor parallel degrees from ``largest`` down that divide the present one."""
    t = case.layout.tensor_parallel
    degrees = [degree for degree in divisors(t) if degree <= largest and degree < t]
    return tuple(repair for degree in reversed(degrees) if (repair := with_tensor_parallel(case, degree)))


def fitting_degrees(case: WhatIf) -> tuple[Repair, ...]:
    """The nearest tensor parallel degrees below and above that the model divides by, those inside a node if any."""
    t, heads = case.layout.tensor_parallel, case.config.num_heads
    common = [degree for degree in divisors(heads) if _divides_all(case, degree)]
    common = [degree for degree in common if case.device.node_size % degree == 0] or common
    nearest = [degree for degree in common if degree < t][-1:] + [degree for degree in common if degree > t][:1]
    repairs = []
    for degree in nearest:
        repair = with_tensor_parallel(case, degree)
        # A degree that needs another number of devices is still better than a step that cannot run.
        repairs.append(
            repair or Repair(kind="runtime", title=f"use tensor_parallel={degree}", changes={"tensor_parallel": degree})
        )
    return tuple(repairs)


def _divides_all(case: WhatIf, degree: int) -> bool:
    config = case.config
    kv_fits = config.is_mla or config.num_kv_heads % degree == 0 or degree % config.num_kv_heads == 0
    return kv_fits and all(getattr(config, name) % degree == 0 for name in mlp_width_fields(config))
