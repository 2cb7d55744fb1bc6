"""Transfer of a record's numbers to the device that borrows it, by the data sheets of both.

Fractions of peak and of bandwidth, and cycles, are kept. A fixed cost in seconds (starting a kernel, combining the
parts of a split) was spent in clock cycles, which take less time at a faster clock: starting FlashAttention 2 takes
11,300 cycles on A100 and 9,700 on L40S, but 8.0 and 3.8 microseconds (docs/decisions/0013).

Power limits: the energy of a clock cycle grows with voltage squared, and voltage with clock, so a board with x times
the donor's power per multiplier cycle sustains x^(1/3) times the fraction of its clock. The energy of a transistor
depends on the process (hardware.architectures). Accuracy on held-out devices: docs/decisions/0016.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from shapewright.hardware.architectures import GPU_VENDORS, find_compute_capability
from shapewright.hardware.loader import load_device
from shapewright.pricing.calibration.donors import has_link
from shapewright.pricing.calibration.intervals import FORMAT_ERROR
from shapewright.pricing.calibration.records import list_records, load_record
from shapewright.pricing.gemm.alignment import transfer_alignment_factors

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from jaxtyping import Float

    from shapewright.hardware.device import Device
    from shapewright.pricing.calibration.records import CalibrationRecord

    AnyShape = Float[np.ndarray, "..."]

_Parameters = TypeVar("_Parameters", bound="DataclassInstance")
# Ratio of two SMs' peaks per clock above which they are taken as equal: data sheets round clocks.
_EQUAL_RATE_RATIO = 0.9


def clock_hz_of(device: Device) -> float | None:
    """Clock of a device: that of its data sheet, else the clock that its data-sheet rate implies. [Hz]"""
    return device.boost_clock_hz or rate_clock_hz(device)


def wide_flops_per_s(device: Device) -> float | None:
    """Data-sheet rate of matrix units in 16 bits: of fp16, else of bf16; None if unknown. [flop/s]

    GPUs that have both multiply equally fast in both, except MI100, whose bf16 is half as fast.
    """
    return device.dense_flops_per_s.get("fp16") or device.dense_flops_per_s.get("bf16")


def rate_clock_hz(device: Device) -> float | None:
    """Clock that the data-sheet rate in 16 bits implies; None if unknown. At most the boost clock. [Hz]"""
    rate = wide_flops_per_s(device)
    if not (rate and device.num_sms and device.tensor_fma_per_sm_per_clock):
        return None
    return rate / (2.0 * device.num_sms * device.tensor_fma_per_sm_per_clock)


def comparable_clock_hz(device: Device, donor: Device) -> float | None:
    """Clock of a device, counted the way its donor's data sheet counts, so that cycles of both compare. [Hz]

    Without a clock on its data sheet, the clock implied by the device's rate may lie below the boost clock that the
    donor's data sheet gives: B200's 2,250 TFLOP/s imply 1.86 GHz, and it boosts to 1.97. B300, with the same rate and
    as many units, is not slower.
    """
    own_hz, donor_hz = rate_clock_hz(device), rate_clock_hz(donor)
    if device.boost_clock_hz or not (own_hz and donor_hz and donor.boost_clock_hz):
        return clock_hz_of(device)
    return donor.boost_clock_hz * own_hz / donor_hz


def is_gpu(device: Device) -> bool:
    """Whether a device runs kernels on SMs at one clock, so that fixed costs are cycles."""
    return device.vendor in GPU_VENDORS


def fixed_cost_scale(device: Device, record: CalibrationRecord) -> float:
    """Factor on costs in seconds: the donor's clock over the device's; 1 for an own record or an unknown clock."""
    if record.transfer == "exact":
        return 1.0
    donor = load_device(record.device)
    clock_hz, donor_hz = comparable_clock_hz(device, donor), clock_hz_of(donor)
    if not (is_gpu(device) and is_gpu(donor)) or clock_hz is None or donor_hz is None:
        return 1.0
    return donor_hz / clock_hz


def sm_rate_scale(device: Device, record: CalibrationRecord) -> float:
    """Factor on what all SMs together do per second: their number times clock, the device's over the donor's.

    1 for an own record; the ratio of memory bandwidths where a data sheet lacks a number, so that everything scales
    with bandwidth.
    """
    if record.transfer == "exact":
        return 1.0
    donor = load_device(record.device)
    scale = fixed_cost_scale(device, record)
    is_known = is_gpu(device) and device.num_sms and donor.num_sms and clock_hz_of(device)
    if not is_known or not device.num_sms or not donor.num_sms:
        return device.memory_bandwidth_bytes_per_s / donor.memory_bandwidth_bytes_per_s
    return device.num_sms / donor.num_sms / scale


def is_sibling_card(device: Device, record: CalibrationRecord) -> bool:
    """Whether a record is exact for the device's chip but was measured on a card with possibly different memory.

    A100 40 GB is A100 80 GB with 0.76 of its bandwidth: whatever waits for SMs and caches takes as long.
    """
    return record.transfer == "exact" and device.name in record.devices[1:]


def has_donor_sm(device: Device, record: CalibrationRecord) -> bool:
    """Whether device and donor have the same SM: siblings, and GA102 or GB202 with AD102 as donor."""
    if record.transfer != "generic":
        return record.transfer == "architecture"
    return device.sm_kind is not None and device.sm_kind == load_device(record.device).sm_kind


def num_cache_copies(device: Device) -> float:
    """Copies that the last-level cache holds of data read by the whole chip: one per partition."""
    return float(find_compute_capability(device.compute_capability).num_cache_partitions)


def transfer_bandwidth_fraction(share: float, device: Device, record: CalibrationRecord) -> float:
    """Fraction of memory bandwidth that a sibling's kernel reaches on a device; unchanged for other donors.

        1 / fraction = 1 + (1 / donor's fraction - 1) x bandwidth ratio / SM rate ratio

    The time beyond full-bandwidth traffic is spent in the SMs, which are the same and take as many cycles with other
    memory: CUTLASS's experts read 0.83 TB/s on H100 and 0.87 on H200, a quarter and less than a fifth of their
    bandwidths (docs/decisions/0013). A chip with another card's memory counts as a sibling. Other architectures run
    other kernels.
    """
    if record.transfer != "architecture" and not is_sibling_card(device, record):
        return share
    donor = load_device(record.device)
    growth = device.memory_bandwidth_bytes_per_s / donor.memory_bandwidth_bytes_per_s / sm_rate_scale(device, record)
    return 1.0 / (1.0 + (1.0 / share - 1.0) * growth)


def transfer_rate_fraction(share: AnyShape, device: Device, record: CalibrationRecord) -> AnyShape:
    """Fractions of an SM's peak that tiles reach on a device with the donor's SM; unchanged for other donors.

        1 / fraction = 1 + (1 / donor's fraction - 1) x peak of an SM per clock, device over donor

    The time beyond the multiplications is loading and issuing, which takes as many cycles where the multipliers are
    throttled (H20 has 0.23 of H100's) or half as many (RTX 3090, 4090, 5090 compared with L40S). Otherwise the
    difference is 3 %.
    """
    if not has_donor_sm(device, record):
        return share
    ratio = tensor_rate_ratio(device, load_device(record.device))
    return share if ratio > _EQUAL_RATE_RATIO else 1.0 / (1.0 + (1.0 / share - 1.0) * ratio)


def tensor_rate_ratio(device: Device, donor: Device) -> float:
    """Peak of an SM per clock in 16 bits, the device's over the donor's; 1 where a data sheet lacks a number."""
    clocks_hz = comparable_clock_hz(device, donor), clock_hz_of(donor)
    rates = wide_flops_per_s(device), wide_flops_per_s(donor)
    if not (all(clocks_hz) and all(rates) and device.num_sms and donor.num_sms):
        return 1.0
    per_cycle = [
        rate / (num_sms * clock_hz)
        for rate, num_sms, clock_hz in zip(rates, (device.num_sms, donor.num_sms), clocks_hz, strict=True)
        if rate and clock_hz
    ]
    return per_cycle[0] / per_cycle[1]


def transfer_alignment(
    factors: AnyShape, tile_rates: tuple[AnyShape, AnyShape], device: Device, record: CalibrationRecord
) -> AnyShape:
    """Alignment factors on a device's SM (gemm.alignment.transfer_alignment_factors).

    Args:
        factors: The donor's, by alignment class along the last axis.
        tile_rates: Fractions of an SM's peak that tiles reach, on the donor and on the device.
    """
    donor = load_device(record.device)
    if record.transfer == "exact" or not (is_gpu(device) and is_gpu(donor)):
        return factors
    ratio = tensor_rate_ratio(device, donor)
    ratio = 1.0 if _EQUAL_RATE_RATIO < ratio < 1.0 / _EQUAL_RATE_RATIO else ratio
    donor_rates, own_rates = tile_rates
    return transfer_alignment_factors(factors, ratio * float(own_rates.max() / donor_rates.max()))


def has_transferred_alignment(device: Device, record: CalibrationRecord, alignment_from: str) -> bool:
    """Whether alignment factors were measured on another SM and the interval does not include that error.

    Intervals of records two generations away or of another vendor come from sweeps that include unaligned sizes.

    Args:
        alignment_from: Device that they were measured on, where the record's section names another.
    """
    if record.kind != "gemm" or record.distance in ("distant", "foreign"):
        return False
    if record.transfer != "exact":
        ratio = tensor_rate_ratio(device, load_device(record.device))
        if not _EQUAL_RATE_RATIO < ratio < 1.0 / _EQUAL_RATE_RATIO:
            return True
    return bool(alignment_from)


def format_rate_error(device: Device, record: CalibrationRecord, dtype: str) -> float:
    """What GEMMs that wait for arithmetic may be wrong by where a sibling's SM has another rate in their format.

    Blackwell Ultra multiplies 1.56 times as fast as Blackwell in 4 bits and as fast in 16. Its kernels may take as many
    cycles as the donor's, or keep their fraction of the peak; the root of the ratio reaches both from the middle. It is
    at most FORMAT_ERROR: what a format's fractions are wrong by that are another format's.

    Returns:
        A factor; 1 where an SM's rates have the donor's proportions, and for records that are no sibling's, whose
        intervals come from devices that differ in this, too.
    """
    if record.transfer != "architecture":
        return 1.0
    chips = device, load_device(record.device)
    rates = [(chip.dense_flops_per_s.get(dtype), wide_flops_per_s(chip)) for chip in chips]
    shares = [narrow / wide for narrow, wide in rates if narrow and wide]
    if len(shares) < len(rates):
        return 1.0
    ratio = shares[0] / shares[1]
    is_equal = _EQUAL_RATE_RATIO < ratio < 1.0 / _EQUAL_RATE_RATIO
    return 1.0 if is_equal else min(math.exp(0.5 * abs(math.log(ratio))), FORMAT_ERROR)


def scale_fixed_costs(parameters: _Parameters, scale: float) -> _Parameters:
    """Multiply every field in seconds by a factor."""
    if scale == 1.0:
        return parameters
    changed: dict[str, Any] = {
        spec.name: getattr(parameters, spec.name) * scale for spec in fields(parameters) if spec.name.endswith("_s")
    }
    return replace(parameters, **changed)


# Format in which the power loss was fitted on every measured device.
_WIDE_FORMAT = "bf16"
# Exponent on the sustained clock ratio of GEMMs that gives attention's.
_ATTENTION_EXPONENT = 0.5


def sustained_clock_ratio(device: Device, donor: Device, dtype: str = "") -> float:
    """Factor on the fraction of its clock that the donor sustains under power; 1 where a data sheet lacks a number.

    The cube root of the ratio of watts / (multipliers x clock^3 x switching energy), device over donor: the peak rate
    stands for multipliers x clock, and the energy of a cycle grows with the clock squared.

    Args:
        donor: The device whose record prices it.
        dtype: Format whose multipliers run: ordinary cores in fp32; if empty, tensor cores in 16 bits.
    """
    budgets = [_watts_per_cycle(chip, dtype) for chip in (device, donor)]
    if budgets[0] is None or budgets[1] is None:
        return 1.0
    return float((budgets[0] / budgets[1]) ** (1.0 / 3.0))


def _watts_per_cycle(chip: Device, dtype: str) -> float | None:
    """Board power over the power of its multipliers at the rated clock, up to a constant; None if unknown."""
    process = find_compute_capability(chip.compute_capability)
    energy = process.switching_energy or chip.architecture_facts.switching_energy
    rate = chip.dense_flops_per_s.get(dtype) if dtype else wide_flops_per_s(chip)
    clock_hz = rate_clock_hz(chip) or chip.boost_clock_hz
    if not (chip.tdp_watts and clock_hz and energy and rate):
        return None
    return chip.tdp_watts / (rate * clock_hz**2 * energy)


def attention_clock_ratio(device: Device, record: CalibrationRecord) -> float:
    """Factor on the rate of a donor's attention kernels from the device's power.

    The root of the ratio for GEMMs, because softmax and waiting leave the multipliers idle half of the time: on L40S,
    kernels of A100 take 1.20 times as long as A100's record predicts, and GEMMs 1.43 times. A gain is at most the
    donor's own loss, and applies only to the same SM.
    """
    if record.transfer == "exact":
        return 1.0
    share = sustained_clock_ratio(device, load_device(record.device))
    if share > 1.0:
        share = min(share, 1.0 / (1.0 - _donor_power_loss(record.device))) if has_donor_sm(device, record) else 1.0
    return float(share**_ATTENTION_EXPONENT)


def _donor_power_loss(device_name: str) -> float:
    """Fraction of the 16-bit GEMM rate that a measured device loses to power limits; 0 if not measured."""
    for record in list_records("gemm"):
        if record.device == device_name and _WIDE_FORMAT in record.parameters["dtypes"]:
            return float(record.parameters["dtypes"][_WIDE_FORMAT]["power_drop_fraction"])
    return 0.0


def transfer_start_scale(record: CalibrationRecord, device: Device) -> float:
    """Factor on the starts of a donor's protocols; 1 for an own or a sibling's record.

    Args:
        record: A record of kind ``collectives`` of the package.
        device: The device to price; with another kind of link than the donor's the factor is 1.
    """
    if record.transfer != "generic" or has_link(device) != has_link(load_device(record.device)):
        return 1.0
    return _mean_start_scale(record.device, device.name)


def without_link(device: Device) -> Device:
    """Return a card without a link other than PCIe."""
    return replace(device, intra_node_bandwidth_bytes_per_s=None, link_group_size=None)


def without_bridge(device: Device, record: CalibrationRecord) -> tuple[Device, CalibrationRecord] | None:
    """Return a bridged card without its bridge and the record that prices it.

    None where the record is the card's own.

    Args:
        device: A card whose link joins only part of a node.
        record: Record that prices it where the link reaches.
    """
    if record.transfer == "exact":
        return None
    unbridged = without_link(device)
    return unbridged, load_record("collectives", unbridged)


@cache
def _mean_start_scale(donor: str, recipient: str) -> float:
    """Mean start over architectures with the donor's kind of link, over the donor's, on logarithms."""
    families: dict[str, list[float]] = {}
    own = 0.0
    for record in list_records("collectives"):
        level = _log_start(record.parameters)
        own = level if record.device == donor else own
        is_alike = has_link(load_device(record.device)) == has_link(load_device(donor))
        if is_alike and recipient not in record.devices:
            families.setdefault(record.architecture, []).append(level)
    if not families:
        return 1.0
    return float(np.exp(np.mean([np.mean(levels) for levels in families.values()]) - own))


def _log_start(parameters: Mapping[str, Any]) -> float:
    """Mean logarithm of the fastest protocol's start.

    Averaged over operations and groups, except groups that are specific to one machine.
    """
    skipped = parameters["groups_of_this_machine_only"]
    starts_s = [
        min(protocol["start_s"] for protocol in protocols)
        for groups in parameters["operations"].values()
        for size, protocols in groups.items()
        if size not in skipped
    ]
    return float(np.mean(np.log(starts_s)))
