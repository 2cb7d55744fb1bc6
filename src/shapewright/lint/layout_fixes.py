"""Fixes that change the micro-batch or the layout on the same devices, compared at an equal global batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shapewright.core.numeric import divisors
from shapewright.lint.rule import Fix
from shapewright.lint.shape_fixes import list_mlp_width_fields

if TYPE_CHECKING:
    from shapewright.prediction.scenario import Scenario

_LARGEST_MICRO_BATCH_TOKENS = 2**17
"""Largest micro-batch to try, in tokens: GEMMs with this many rows have thousands of tiles."""

NEARLY_BEST = 1.01
"""Times up to this ratio count as equal: the difference is within the error of the prediction."""


def larger_micro_batch_fixes(scenario: Scenario) -> tuple[Fix, ...]:
    """Suggest micro-batches of 2, 4, 8... times as many sequences, as long as they fit, at an equal global batch.

    Without a global batch in the workload, all candidates are compared at the global batch of the largest micro-batch,
    so that the optimizer step has the same share.
    """
    sizes = _larger_sizes(scenario)
    common_changes = {"global_batch_size": _common_global_batch(scenario, sizes[-1])} if sizes else {}
    return tuple(
        Fix(kind="runtime", title=f"use {size}", changes={"micro_batch_size": size}, common_changes=common_changes)
        for size in sizes
    )


def sufficient_micro_batch_fix(scenario: Scenario) -> Fix | None:
    """Suggest the smallest micro-batch within 1 % of the fastest; None where the present one is within 1 %."""
    fixes = larger_micro_batch_fixes(scenario)
    if not fixes:
        return None
    here = scenario.try_replace(fixes[0].common_changes)
    options = [(fix, scenario.try_replace({**fix.common_changes, **fix.changes})) for fix in fixes]
    timed = [(after.time_per_token_s, fix) for fix, after in options if after is not None and after.is_possible]
    if here is None or not here.is_possible or not timed:
        return None
    enough_s = NEARLY_BEST * min(time_s for time_s, _ in timed)
    if here.time_per_token_s <= enough_s:
        return None
    return next(fix for time_s, fix in timed if time_s <= enough_s)


def _larger_sizes(scenario: Scenario) -> list[int]:
    workload, layout = scenario.workload, scenario.layout
    sizes: list[int] = []
    size = 2 * workload.micro_batch_size
    while size * workload.seq_len <= _LARGEST_MICRO_BATCH_TOKENS:
        if workload.global_batch_size is not None and workload.global_batch_size % (size * layout.data_parallel):
            break
        changed = scenario.try_replace({"micro_batch_size": size})
        # Memory grows with the micro-batch: larger ones do not fit either.
        if changed is None or not changed.fits:
            break
        sizes.append(size)
        size *= 2
    return sizes


def _common_global_batch(scenario: Scenario, largest: int) -> int:
    layout = scenario.layout
    return scenario.workload.global_batch_size or largest * layout.data_parallel * layout.default_microbatches


def effective_global_batch(scenario: Scenario) -> int:
    """Return the sequences of one step over all replicas, given or by default."""
    workload, layout = scenario.workload, scenario.layout
    return workload.global_batch_size or workload.micro_batch_size * layout.data_parallel * layout.default_microbatches


def tensor_parallel_fix(scenario: Scenario, degree: int) -> Fix | None:
    """Suggest another tensor parallel degree on the same devices, with data parallelism adjusted.

    None where the devices or the global batch do not divide.
    """
    layout = scenario.layout
    devices = layout.tensor_parallel * layout.data_parallel
    if devices % degree:
        return None
    data_parallel = devices // degree
    expert_devices = layout.expert_parallel * (layout.expert_tensor_parallel or degree)
    if (degree * data_parallel * layout.context_parallel) % expert_devices:
        return None
    changes: dict[str, Any] = {"tensor_parallel": degree}
    title = f"use tensor_parallel={degree}"
    if data_parallel != layout.data_parallel:
        changes["data_parallel"] = data_parallel
        title += f" with data_parallel={data_parallel}"
    common_changes: dict[str, Any] = {}
    if scenario.workload.is_training:
        if scenario.workload.global_batch_size is None:
            # The default batch of the largest number of replicas, so that all degrees are compared at an equal batch.
            common_changes = {
                "global_batch_size": scenario.workload.micro_batch_size * devices * layout.default_microbatches
            }
        elif scenario.workload.global_batch_size % (scenario.workload.micro_batch_size * data_parallel):
            return None
    return Fix(kind="runtime", title=title, changes=changes, common_changes=common_changes)


def smaller_degree_fixes(scenario: Scenario, largest: int) -> tuple[Fix, ...]:
    """Suggest tensor parallel degrees up to ``largest`` that divide the present one, largest first."""
    t = scenario.layout.tensor_parallel
    degrees = [degree for degree in divisors(t) if degree <= largest and degree < t]
    return tuple(fix for degree in reversed(degrees) if (fix := tensor_parallel_fix(scenario, degree)))


def dividing_degree_fixes(scenario: Scenario) -> tuple[Fix, ...]:
    """Suggest the nearest tensor parallel degrees below and above that divide the model, preferably inside a node."""
    t, heads = scenario.layout.tensor_parallel, scenario.config.num_heads
    common = [degree for degree in divisors(heads) if _divides_all(scenario, degree)]
    common = [degree for degree in common if scenario.device.node_size % degree == 0] or common
    nearest = [degree for degree in common if degree < t][-1:] + [degree for degree in common if degree > t][:1]
    fixes = []
    for degree in nearest:
        fix = tensor_parallel_fix(scenario, degree)
        # The step cannot run: a degree on another number of devices is valid too.
        fixes.append(
            fix or Fix(kind="runtime", title=f"use tensor_parallel={degree}", changes={"tensor_parallel": degree})
        )
    return tuple(fixes)


def _divides_all(scenario: Scenario, degree: int) -> bool:
    """Whether a tensor parallel degree divides the key-value heads and the MLP widths that it splits."""
    config = scenario.config
    kv_heads_divide = config.is_mla or config.num_kv_heads % degree == 0 or degree % config.num_kv_heads == 0
    names = list(list_mlp_width_fields(config))
    if scenario.layout.expert_tensor_parallel and config.is_moe:  # then experts are split over another degree
        names.remove("moe_intermediate_size")
    return kv_heads_divide and all(getattr(config, name) % degree == 0 for name in names)
