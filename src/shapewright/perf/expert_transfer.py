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
    scale_fixed_costs,
)

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.perf.calibration import CalibrationRecord
    from shapewright.perf.gemm_menu import GemmParameters

# Compute capabilities, up to the point, of chips whose last-level cache has two partitions, and the one of major
# version 8 that has; GA102, AD102 and GB202 have one.
# Source: NVIDIA A100 and H100 architecture white papers, "L2 cache"; B200 has two dies.
_PARTITIONED_GENERATIONS, _PARTITIONED_AMPERE = ("9", "10"), "8.0"
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
    carried = replace(carried, hot_cache_share=means.hot_share / _num_copies(device))
    clock_hz = clock_beside_hz(device, load_device(record.device))
    # A kernel that sets each expert up as a problem of its own starts as its like do.
    by_groups = parameters.start_growth is not None and parameters.start_growth.counts_groups
    if by_groups or clock_hz is None or not is_gpu(device):
        return carried
    return replace(carried, start_s=means.start_cycles / clock_hz)


def _num_copies(device: Device) -> float:
    """Copies that a last-level cache holds of what the whole chip reads."""
    generation = device.compute_capability.partition(".")[0]
    is_split = generation in _PARTITIONED_GENERATIONS or device.compute_capability == _PARTITIONED_AMPERE
    return 2.0 if is_split else 1.0


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
                pair = (float(np.log(clock_hz * own["start_s"])), _num_copies(lender) * own["hot_cache_share"])
                families.setdefault(record.architecture, []).append(pair)
    if not families:
        return None
    log_cycles, share = np.mean([np.mean(pairs, axis=0) for pairs in families.values()], axis=0)
    return _Means(float(np.exp(log_cycles)), float(share))
