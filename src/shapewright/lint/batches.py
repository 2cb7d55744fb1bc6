"""Larger micro-batches and other layouts of the same devices, compared at one global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.integers import divisors
from shapewright.lint.mlp import mlp_width_fields
from shapewright.lint.rule import Repair

if TYPE_CHECKING:
    from shapewright.lint.what_if import WhatIf

MOST_TOKENS = 2**17
"""Tokens of a micro-batch beyond which nothing is tried: GEMMs of this many rows are thousands of tiles."""

NEARLY_BEST = 1.01
"""Times within this factor of each other are the same to a model whose error is some percent."""


def larger_micro_batches(case: WhatIf) -> tuple[Repair, ...]:
    """Micro-batches of 2, 4, 8... times as many sequences, as long as they fit, at one global batch.

    Without a global batch in the workload all sides get the batch that the largest micro-batch would make, so that the
    optimiser step weighs the same on all.
    """
    sizes = _larger_sizes(case)
    at_equal = {"global_batch_size": _common_global_batch(case, sizes[-1])} if sizes else {}
    return tuple(
        Repair(kind="runtime", title=f"use {size}", changes={"micro_batch_size": size}, at_equal=at_equal)
        for size in sizes
    )


def enough_micro_batch(case: WhatIf) -> Repair | None:
    """The smallest larger micro-batch that is nearly as fast as the fastest; None where the present one is."""
    repairs = larger_micro_batches(case)
    if not repairs:
        return None
    here = case.changed(repairs[0].at_equal)
    options = [(repair, case.changed({**repair.at_equal, **repair.changes})) for repair in repairs]
    timed = [(after.time_per_token_s, repair) for repair, after in options if after is not None and after.is_possible]
    if here is None or not here.is_possible or not timed:
        return None
    enough_s = NEARLY_BEST * min(time_s for time_s, _ in timed)
    if here.time_per_token_s <= enough_s:
        return None
    return next(repair for time_s, repair in timed if time_s <= enough_s)


def _larger_sizes(case: WhatIf) -> list[int]:
    workload, layout = case.workload, case.layout
    sizes: list[int] = []
    size = 2 * workload.micro_batch_size
    while size * workload.seq_len <= MOST_TOKENS:
        if workload.global_batch_size is not None and workload.global_batch_size % (size * layout.data_parallel):
            break
        changed = case.changed({"micro_batch_size": size})
        # Memory grows with the micro-batch, so nothing larger fits either.
        if changed is None or not changed.fits:
            break
        sizes.append(size)
        size *= 2
    return sizes


def _common_global_batch(case: WhatIf, largest: int) -> int:
    layout = case.layout
    return case.workload.global_batch_size or largest * layout.data_parallel * layout.pipeline_parallel


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
    held = layout.expert_parallel * (layout.expert_tensor_parallel or degree)
    if (degree * data_parallel * layout.context_parallel) % held:
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
            # The batch of as many replicas as there can be, so that all degrees are compared at one.
            at_equal = {"global_batch_size": case.workload.micro_batch_size * devices * layout.pipeline_parallel}
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
    own = "moe_intermediate_size" if case.layout.expert_tensor_parallel else None  # cut whatever the tensor degree is
    names = [name for name in mlp_width_fields(config) if name != own]
    return kv_fits and all(getattr(config, name) % degree == 0 for name in names)
