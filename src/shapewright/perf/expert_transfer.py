"""What a device that nobody measured takes from another's record of expert layers.

    seconds     of a lender's kernel are clock cycles (perf.lending); of another family's, the mean of all families in
                cycles, each of one vote: libraries launch five to eight kernels for a block or one for all of it, and
                no sheet tells which it will be
    hot cache   what stays in the last-level cache when a benchmark repeats a block is a share of it, the mean of the
                families too. A100's, H100's and B200's caches have two partitions that each hold what their own half of
                the chip reads, so that of what all read half as much fits

How far each helps on devices left out: docs/decisions/0013-strangers.md.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.hardware import load_device
from shapewright.perf.calibration import list_records
from shapewright.perf.lending import (
    clock_beside_hz,
    clock_hz_of,
    fixed_cost_scale,
    has_lenders_sm,
    is_gpu,
    num_cache_copies,
    scale_fixed_costs,
)

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.perf.calibration import CalibrationRecord
    from shapewright.perf.gemm_menu import GemmParameters

# Format whose sections are compared between families: every record has it.
_WIDE_FORMAT = "bf16"


class _Means(NamedTuple):
    """What the families have in the mean.

    Attributes:
        start_cycles: Fixed cost of a product. [cycle]
        hot_share: Share of a cache without partitions that repeated weights fill.
    """

    start_cycles: float
    hot_share: float


def carry_experts(parameters: GemmParameters, device: Device, record: CalibrationRecord) -> GemmParameters:
    """A lender's parameters of experts' products as the device would have them; the record's own where it is its."""
    carried = scale_fixed_costs(parameters, fixed_cost_scale(device, record))
    means = _mean_of_families(device.name)
    if record.transfer != "generic" or has_lenders_sm(device, record) or means is None:
        return carried
    carried = replace(carried, hot_cache_share=means.hot_share / num_cache_copies(device))
    clock_hz = clock_beside_hz(device, load_device(record.device))
    # A kernel that sets each expert up as a problem of its own starts as its like do.
    by_groups = parameters.start_growth is not None and parameters.start_growth.counts_groups
    if by_groups or clock_hz is None or not is_gpu(device):
        return carried
    return replace(carried, start_s=means.start_cycles / clock_hz)


@cache
def _mean_of_families(borrower: str) -> _Means | None:
    """Means over all families but a device's own, each of one vote; None where nobody else was measured.

    Kernels that set up a problem for each expert are no measure of the others.
    """
    families: dict[str, list[tuple[float, float]]] = {}
    for record in list_records("moe"):
        lender = load_device(record.device)
        clock_hz = clock_hz_of(lender)
        if borrower in record.devices or clock_hz is None:
            continue
        for section in record.parameters["libraries"].values():
            own = section.get(_WIDE_FORMAT)
            if own and not (own.get("start_growth") or {}).get("counts_groups", False):
                pair = (float(np.log(clock_hz * own["start_s"])), num_cache_copies(lender) * own["hot_cache_share"])
                families.setdefault(record.architecture, []).append(pair)
    if not families:
        return None
    log_cycles, share = np.mean([np.mean(pairs, axis=0) for pairs in families.values()], axis=0)
    return _Means(float(np.exp(log_cycles)), float(share))
