"""How a record's numbers carry over to a device that borrows it: by the data sheets of the two.

Fractions of peak and of bandwidth carry over as they are, and so do cycles. What a record holds in seconds (starting a
kernel, combining the parts of a split) was spent in clock cycles, of which a faster clock makes fewer seconds: starting
FlashAttention 2 takes 11,300 cycles on A100 and 9,700 on L40S, and 8.0 against 3.8 microseconds
(docs/decisions/0013-strangers.md).
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from shapewright.hardware import load_device
from shapewright.perf.alignment import carried_factors

if TYPE_CHECKING:
    import numpy as np
    from _typeshed import DataclassInstance
    from numpy.typing import NDArray

    from shapewright.hardware import Device
    from shapewright.perf.calibration import CalibrationRecord

    Array = NDArray[np.float64]

_Parameters = TypeVar("_Parameters", bound="DataclassInstance")
# Peaks of an SM per clock whose ratio lies above this are those of the same multipliers, by sheets that round clocks.
_ALIKE_MULTIPLIERS = 0.9
# Compute capabilities, up to the point, of chips whose last-level cache has two partitions, and the one of major
# version 8 that has; GA102, AD102 and GB202 have one.
# Source: NVIDIA A100 and H100 architecture white papers, "L2 cache"; B200 has two dies.
_PARTITIONED_GENERATIONS, _PARTITIONED_AMPERE = ("9", "10"), "8.0"
# Makers whose chips run kernels on multiprocessors at one clock.
_GPU_VENDORS = ("NVIDIA", "AMD")


def clock_hz_of(device: Device) -> float | None:
    """Clock of a device: its sheet's, else the one that its units need for the rate of the sheet. [Hz]"""
    return device.boost_clock_hz or rate_clock_hz(device)


def rate_clock_hz(device: Device) -> float | None:
    """Clock that a device's units need for the rate of its sheet, at most what it boosts to; None if unknown. [Hz]"""
    rate = device.dense_flops_per_s.get("fp16")
    if not (rate and device.num_sms and device.tensor_fma_per_sm_per_clock):
        return None
    return rate / (2.0 * device.num_sms * device.tensor_fma_per_sm_per_clock)


def clock_beside_hz(device: Device, lender: Device) -> float | None:
    """Clock of a device as its lender's sheet counts, so that cycles of the one are cycles of the other. [Hz]

    A sheet without a clock tells that of its rate, which may lie below the boost that a lender's sheet gives: B200's
    2,250 TFLOP/s are 1.86 GHz, and it boosts to 1.97. B300, with the same rate of as many units, is not slower.
    """
    own, lent = rate_clock_hz(device), rate_clock_hz(lender)
    if device.boost_clock_hz or not (own and lent and lender.boost_clock_hz):
        return clock_hz_of(device)
    return lender.boost_clock_hz * own / lent


def is_gpu(device: Device) -> bool:
    """Whether a device runs kernels on multiprocessors at one clock, so that their fixed costs are cycles."""
    return device.vendor in _GPU_VENDORS


def fixed_cost_scale(device: Device, record: CalibrationRecord) -> float:
    """Factor on costs in seconds: the lender's clock over the device's; 1 for an own record or an unknown clock."""
    if record.transfer == "exact":
        return 1.0
    lender = load_device(record.device)
    clock_hz, lenders_hz = clock_beside_hz(device, lender), clock_hz_of(lender)
    if not (is_gpu(device) and is_gpu(lender)) or clock_hz is None or lenders_hz is None:
        return 1.0
    return lenders_hz / clock_hz


def sm_rate_scale(device: Device, record: CalibrationRecord) -> float:
    """Factor on what all multiprocessors together do in a second, number and clock: the device's over the lender's.

    1 for an own record, and for bandwidth's share where a sheet is silent: then all carries over as bandwidth does.
    """
    if record.transfer == "exact":
        return 1.0
    lender = load_device(record.device)
    scale = fixed_cost_scale(device, record)
    is_known = is_gpu(device) and device.num_sms and lender.num_sms and clock_hz_of(device)
    if not is_known or not device.num_sms or not lender.num_sms:
        return device.memory_bandwidth_bytes_per_s / lender.memory_bandwidth_bytes_per_s
    return device.num_sms / lender.num_sms / scale


def is_other_card(device: Device, record: CalibrationRecord) -> bool:
    """Whether a record is exact for a device's chip, but was measured on a card that may have other memory.

    A100 of 40 GB is that of 80 with 0.76 of its bandwidth: what waits for multiprocessors and caches takes as long.
    """
    return record.transfer == "exact" and device.name in record.devices[1:]


def has_lenders_sm(device: Device, record: CalibrationRecord) -> bool:
    """Whether a device borrows from one with its multiprocessors: a sibling, or GA102 and GB202 from AD102."""
    if record.transfer != "generic":
        return record.transfer == "architecture"
    return device.sm_kind is not None and device.sm_kind == load_device(record.device).sm_kind


def num_cache_copies(device: Device) -> float:
    """Copies that a last-level cache holds of what the whole chip reads: one in each of its partitions."""
    generation = device.compute_capability.partition(".")[0]
    is_split = generation in _PARTITIONED_GENERATIONS or device.compute_capability == _PARTITIONED_AMPERE
    return 2.0 if is_split else 1.0


def sibling_bandwidth_share(share: float, device: Device, record: CalibrationRecord) -> float:
    """Share of memory bandwidth that a sibling's kernel reaches on a device; as it is where no sibling lends.

    A chip with another card's memory counts as its sibling.

        1 / share = 1 + (1 / lender's share - 1) x bandwidth ratio / multiprocessor rate ratio

    What a kernel takes beyond its traffic at full bandwidth it spends in the multiprocessors, which are the same and
    take as many cycles with another memory behind them: CUTLASS's experts read 0.83 TB/s on H100 and 0.87 on H200, a
    quarter and less than a fifth of what their memories give (docs/decisions/0013-strangers.md). Another family has
    other kernels.
    """
    if record.transfer != "architecture" and not is_other_card(device, record):
        return share
    lender = load_device(record.device)
    growth = device.memory_bandwidth_bytes_per_s / lender.memory_bandwidth_bytes_per_s / sm_rate_scale(device, record)
    return 1.0 / (1.0 + (1.0 / share - 1.0) * growth)


def sibling_rate_share(share: Array, device: Device, record: CalibrationRecord) -> Array:
    """Shares of a busy SM's peak that tiles of the same SM reach on a device; as they are where another one lends.

        1 / share = 1 + (1 / lender's share - 1) x peak of an SM per clock, the device's over the lender's

    What a tile takes beyond its multiplications it spends loading and issuing, in as many cycles where the multipliers
    are throttled (H20 has 0.23 of H100's) or half as many (RTX 3090, 4090, 5090 beside L40S). Others differ by 3 %.
    """
    if not has_lenders_sm(device, record):
        return share
    ratio = multiplier_ratio(device, load_device(record.device))
    return share if ratio > _ALIKE_MULTIPLIERS else 1.0 / (1.0 + (1.0 / share - 1.0) * ratio)


def multiplier_ratio(device: Device, lender: Device) -> float:
    """Peak of an SM per clock in 16 bits, the device's over the lender's; 1 where a sheet is silent."""
    clocks_hz = clock_beside_hz(device, lender), clock_hz_of(lender)
    rates = device.dense_flops_per_s.get("fp16"), lender.dense_flops_per_s.get("fp16")
    if not (all(clocks_hz) and all(rates) and device.num_sms and lender.num_sms):
        return 1.0
    per_cycle = [
        rate / (num_sms * clock_hz)
        for rate, num_sms, clock_hz in zip(rates, (device.num_sms, lender.num_sms), clocks_hz, strict=True)
        if rate and clock_hz
    ]
    return per_cycle[0] / per_cycle[1]


def borrowed_alignment(
    factors: Array, tile_rates: tuple[Array, Array], device: Device, record: CalibrationRecord
) -> Array:
    """A lender's alignment factors as the SM of a device would have them (perf.alignment.carried_factors).

    Args:
        factors: The lender's, by alignment class along the last axis.
        tile_rates: Shares of a busy SM's peak that tiles reach, as lent and as the device has them.
        device: The device.
        record: Whose factors they are.
    """
    lender = load_device(record.device)
    if record.transfer == "exact" or not (is_gpu(device) and is_gpu(lender)):
        return factors
    ratio = multiplier_ratio(device, lender)
    ratio = 1.0 if _ALIKE_MULTIPLIERS < ratio < 1.0 / _ALIKE_MULTIPLIERS else ratio
    lent, own = tile_rates
    return carried_factors(factors, ratio * float(own.max() / lent.max()))


def carries_alignment(device: Device, record: CalibrationRecord, alignment_from: str) -> bool:
    """Whether alignment factors were measured on another SM than the device's, and the interval does not know it.

    Intervals of records from two generations away or from another maker are made of sweeps with odd sizes.

    Args:
        device: The device to price.
        record: Whose factors they are.
        alignment_from: The device that they were measured on, where the section of the record says it is another.
    """
    if record.kind != "gemm" or record.distance in ("distant", "foreign"):
        return False
    if record.transfer != "exact":
        ratio = multiplier_ratio(device, load_device(record.device))
        if not _ALIKE_MULTIPLIERS < ratio < 1.0 / _ALIKE_MULTIPLIERS:
            return True
    return bool(alignment_from)


def scale_fixed_costs(parameters: _Parameters, scale: float) -> _Parameters:
    """Parameters with every field in seconds times a factor."""
    if scale == 1.0:
        return parameters
    changed: dict[str, Any] = {
        spec.name: getattr(parameters, spec.name) * scale for spec in fields(parameters) if spec.name.endswith("_s")
    }
    return replace(parameters, **changed)
