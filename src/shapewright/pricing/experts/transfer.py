"""Transfer of an expert-layer record to an unmeasured device.

    seconds     fixed costs are clock cycles (calibration.transfer). On another architecture they are the mean over all
                measured architectures, in cycles and weighted equally: libraries launch five to eight kernels for a
                block or one for all of it, which no data sheet determines
    hot cache   weights that stay in the last-level cache when a benchmark repeats a block fill a fraction of it, the
                mean over architectures too. The caches of A100, H100 and B200 have two partitions that each hold the
                data read by their half of the chip, so half as much data shared by all SMs fits

Accuracy on held-out devices: docs/decisions/0013.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from shapewright.hardware.loader import load_device
from shapewright.pricing.calibration.records import list_records
from shapewright.pricing.calibration.transfer import (
    clock_hz_of,
    comparable_clock_hz,
    fixed_cost_scale,
    has_donor_sm,
    is_gpu,
    num_cache_copies,
    scale_fixed_costs,
)

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.pricing.calibration.records import CalibrationRecord
    from shapewright.pricing.gemm.parameters import GemmParameters

# Format whose sections are compared between architectures: every record has it.
_WIDE_FORMAT = "bf16"


class _Means(NamedTuple):
    """Means over architectures.

    Attributes:
        start_cycles: Fixed cost of a GEMM. [cycle]
        hot_share: Fraction of a cache without partitions that repeated weights fill.
    """

    start_cycles: float
    hot_share: float


def transfer_experts(parameters: GemmParameters, device: Device, record: CalibrationRecord) -> GemmParameters:
    """Transfer a donor's expert-GEMM parameters to a device; own records are unchanged."""
    carried = scale_fixed_costs(parameters, fixed_cost_scale(device, record))
    means = _architecture_means(device.name)
    if record.transfer != "generic" or has_donor_sm(device, record) or means is None:
        return carried
    carried = replace(carried, hot_cache_share=means.hot_share / num_cache_copies(device))
    clock_hz = comparable_clock_hz(device, load_device(record.device))
    # Kernels that set up a problem per expert have starts of their own.
    by_groups = parameters.start_growth is not None and parameters.start_growth.counts_groups
    if by_groups or clock_hz is None or not is_gpu(device):
        return carried
    return replace(carried, start_s=means.start_cycles / clock_hz)


@cache
def _architecture_means(recipient: str) -> _Means | None:
    """Means over all architectures except a device's own record, weighted equally; None without other records.

    Kernels that set up a problem per expert are excluded.
    """
    families: dict[str, list[tuple[float, float]]] = {}
    for record in list_records("moe"):
        donor = load_device(record.device)
        clock_hz = clock_hz_of(donor)
        if recipient in record.devices or clock_hz is None:
            continue
        for section in record.parameters["libraries"].values():
            own = section.get(_WIDE_FORMAT)
            if own and not (own.get("start_growth") or {}).get("counts_groups", False):
                pair = (float(np.log(clock_hz * own["start_s"])), num_cache_copies(donor) * own["hot_cache_share"])
                families.setdefault(record.architecture, []).append(pair)
    if not families:
        return None
    log_cycles, share = np.mean([np.mean(pairs, axis=0) for pairs in families.values()], axis=0)
    return _Means(float(np.exp(log_cycles)), float(share))
