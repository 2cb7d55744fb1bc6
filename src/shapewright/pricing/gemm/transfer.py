"""Transfer of a GEMM record to an unmeasured device: what its data sheet changes in the donor's parameters.

Fractions of rates are kept, with these rules:

    start     start_s of a kernel is clock cycles: start_s * donor's clock / device's clock. The cast before an 8- or
              4-bit GEMM is a further kernel that waits for memory: its start is kept
    memory    a sibling's time beyond full-bandwidth traffic is cycles of the same SM (transfer_bandwidth_fraction)
    rate      a tile's time beyond its multiplications on the same SM is cycles too (transfer_rate_fraction)
    alignment narrow loads add as many cycles on every SM: a smaller share where multipliers are slower, a larger one
              where they are faster
    feed      no SM loads fewer bytes per clock from the caches than the donor's; the same SM (a sibling's, or AD102's
              for GA102 and GB202) loads no more either (DeviceRates.feed_scale)
    power     the cube root of power per multiplier cycle scales the sustained clock (sustained_clock_ratio), at most 1
    format    where the donor lacks the element format, its kernels in another format are used, and the nearest record
              with the format gives the costs of casting, splitting and writing
    means     the achieved fraction of bandwidth (0.74 to 0.85) and the recovered fraction of a last wave (0 to 0.97)
              do not follow from data sheets: another architecture's device takes the mean of all measured
              architectures. Where the donor's record comes from one paper's sweeps, only the first does, because
              their narrowest GEMMs are bound by tiles instead of memory
    best rate where the donor's record comes from such sweeps, arithmetic and operand feed are scaled by the best
              published GEMM rate of the device (transfer_rate_scale)
    library   slow cases, batch kernels and residual tables are specific to a library on one architecture: not
              transferred

Best rates: records from one paper's sweeps hold the rates of libraries of 2023 on the paper's devices. The fastest
published GEMM on a newer device shows what its own libraries reach. So the borrowed rates are multiplied by one number
with which that GEMM is predicted as near to its best rate as measured devices' best GEMMs are. ``data/best_rates.json``
holds the numbers, written by ``python -m shapewright.measure.refit``. Records of current libraries are not scaled
(docs/decisions/0016).

Accuracy of each rule on held-out devices: docs/decisions/0016.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.core.dtypes import get_dtype
from shapewright.hardware.architectures import find_architecture
from shapewright.hardware.loader import load_device
from shapewright.pricing.calibration.donors import DeviceSpec
from shapewright.pricing.calibration.records import FP32_GEMM, list_records
from shapewright.pricing.calibration.transfer import (
    clock_hz_of,
    comparable_clock_hz,
    sustained_clock_ratio,
    transfer_alignment,
    transfer_bandwidth_fraction,
    transfer_rate_fraction,
)
from shapewright.pricing.experts.transfer import transfer_experts

if TYPE_CHECKING:
    from shapewright.hardware.device import Device
    from shapewright.pricing.calibration.records import CalibrationRecord
    from shapewright.pricing.gemm.parameters import GemmParameters

# Exponent on the sustained clock ratio of tensor cores that gives that of the ordinary cores: with it A100's kernels,
# fitted at 250 W, price T4 and H100 without bias (docs/decisions/0017).
_FP32_POWER = 1.35
# Narrowest format that needs no cast before the GEMM. [bit]
_UNCAST_BITS = 16
# Format that every architecture was measured in, except those known from one paper's sweeps.
_WIDE_FORMAT = "bf16"


def transfer_parameters(
    parameters: GemmParameters, raw: Mapping[str, Any], device: Device, record: CalibrationRecord, dtype: str
) -> GemmParameters:
    """Transfer a donor's parameters to a device; the record's own where it belongs to the device.

    Args:
        parameters: Parameters of the record's own device.
    """
    if record.kind == FP32_GEMM:
        return _transfer_fp32(parameters, device, load_device(record.device))
    adapted = _transfer_rates(parameters, raw, device, record, dtype)
    if record.kind != "gemm":
        return adapted  # expert kernels pad their loads (docs/decisions/0016)
    rates = parameters.tile_rate_fraction, adapted.tile_rate_fraction
    return replace(adapted, alignment_factor=transfer_alignment(parameters.alignment_factor, rates, device, record))


def _transfer_fp32(parameters: GemmParameters, device: Device, donor: Device) -> GemmParameters:
    """Transfer the kernels of the ordinary cores: fractions are kept, starts are cycles, and power limits the clock.

    Vendors' libraries ship similar tiles for these cores over generations. The factor between devices follows the power
    of a multiplier cycle (docs/decisions/0017).
    """
    slower = _clock_ratio(donor, device)
    sustained = (1.0 - parameters.power_drop_fraction) * sustained_clock_ratio(device, donor, "fp32") ** _FP32_POWER
    return replace(
        parameters,
        start_s=parameters.start_s * slower,
        split_start_s=parameters.split_start_s * slower,
        power_drop_fraction=1.0 - min(sustained, 1.0),
    )


def _transfer_rates(
    parameters: GemmParameters, raw: Mapping[str, Any], device: Device, record: CalibrationRecord, dtype: str
) -> GemmParameters:
    """Transfer everything but the alignment factors, which depend on the resulting tile rates."""
    share = transfer_bandwidth_fraction(parameters.bandwidth_fraction, device, record)
    rates = transfer_rate_fraction(parameters.tile_rate_fraction, device, record)
    parameters = replace(parameters, bandwidth_fraction=share, tile_rate_fraction=rates)
    if record.kind != "gemm":
        return transfer_experts(parameters, device, record)
    if record.transfer != "exact":
        donor = load_device(record.device)
        parameters = _scale_start(parameters, raw, device, donor)
        sustained = (1.0 - parameters.power_drop_fraction) * sustained_clock_ratio(device, donor)
        parameters = replace(parameters, power_drop_fraction=1.0 - min(sustained, 1.0))
    if record.transfer == "generic":
        means = _use_architecture_means(parameters, device, dtype)
        if _WIDE_FORMAT not in raw:
            means = replace(parameters, bandwidth_fraction=means.bandwidth_fraction)
            means = scale_rates(means, transfer_rate_scale(device, record))
        parameters = replace(means, slow_cases=None, batch_kernels=None)
    # A section of the format itself has its casts, or was measured without them, on siblings too.
    is_cast = dtype in raw or parameters.cast_bytes_per_element > 0.0
    return parameters if is_cast or get_dtype(dtype).bits >= _UNCAST_BITS else _add_cast_costs(parameters, device)


def _use_architecture_means(parameters: GemmParameters, device: Device, dtype: str) -> GemmParameters:
    """Replace parameters that no data sheet determines by the mean over measured architectures, each weighted equally.

    Fractions of bandwidth are averaged on logarithms; recovered fractions of a last wave, which may be 0, linearly.
    Architectures known only from one paper's sweeps have no bf16 section and are left out, and so are kernels tuned for
    each shape, which no library picks by itself.
    """
    families: dict[str, list[tuple[float, float]]] = {}
    for record in list_records("gemm"):
        sections = record.parameters["dtypes"]
        if device.name in record.devices or _WIDE_FORMAT not in sections or record.parameters.get("is_tuned"):
            continue
        own = sections.get(dtype, sections[_WIDE_FORMAT])
        pair = (float(np.log(own["bandwidth_fraction"])), float(own["wave_give_back"]))
        families.setdefault(record.architecture, []).append(pair)
    if not families:
        return parameters
    log_bandwidth, give_back = np.mean([np.mean(pairs, axis=0) for pairs in families.values()], axis=0)
    return replace(parameters, bandwidth_fraction=float(np.exp(log_bandwidth)), wave_give_back=float(give_back))


def transfer_feed_scale(device: Device, donor: Device) -> float:
    """Factor on the donor's feed ratio that keeps the bytes per clock of an SM.

    A feed ratio is relative to memory bandwidth, and transfers so to another architecture with faster memory, whose
    caches are faster too; with slower memory the path from cache to SM stays as fast. The same SM loads as many bytes
    per clock with any memory: H200 is H100 with 1.43 times the bandwidth, and A40's SM is L40S's.
    """
    shares = [chip.memory_bandwidth_bytes_per_s / (chip.num_sms or 1) for chip in (device, donor)]
    scale = shares[1] / shares[0] / _clock_ratio(donor, device)
    is_sibling = (device.architecture, device.compute_capability) == (donor.architecture, donor.compute_capability)
    is_same_sm = is_sibling or device.sm_kind == donor.sm_kind is not None
    return scale if is_same_sm else max(1.0, scale)


def _clock_ratio(donor: Device, device: Device) -> float:
    """Clock of the donor over that of the device; 1 where a data sheet lacks it or one of them is not a GPU."""
    clocks = clock_hz_of(donor), comparable_clock_hz(device, donor)
    if clocks[0] is None or clocks[1] is None:
        return 1.0
    return clocks[0] / clocks[1] if _are_gpus(donor, device) else 1.0


def _are_gpus(*devices: Device) -> bool:
    """Whether each has SMs or compute units; in others matrix engines of other clocks and sizes are counted."""
    return all(each.architecture_facts.switching_energy is not None for each in devices)


def _row_ratio(donor: Device, device: Device) -> float:
    """Time of one row of a cast over the donor's: SMs work on a row each.

    The vector units of other devices, which cast, are not those that num_sms counts: they take the donor's time.
    """
    if not _are_gpus(donor, device):
        return 1.0
    return _clock_ratio(donor, device) * (donor.num_sms or 1) / (device.num_sms or 1)


def _scale_start(parameters: GemmParameters, raw: Mapping[str, Any], device: Device, donor: Device) -> GemmParameters:
    """Scale starts to the device's clock, except that of a cast before the GEMM."""
    slower = _clock_ratio(donor, device)
    kernel_s = parameters.start_s
    if parameters.cast_bytes_per_element > 0.0 and _WIDE_FORMAT in raw:
        kernel_s = min(kernel_s, float(raw[_WIDE_FORMAT]["start_s"]))
    return replace(
        parameters,
        start_s=parameters.start_s - kernel_s + kernel_s * slower,
        split_start_s=parameters.split_start_s * slower,
        cast_row_s=parameters.cast_row_s * _row_ratio(donor, device),
    )


def _add_cast_costs(parameters: GemmParameters, device: Device) -> GemmParameters:
    """Add the measured costs of casting to 8 bits to kernels of a wider format."""
    found = _find_cast_costs(device)
    if found is None:
        return parameters
    narrow, wide, donor = found
    return replace(
        parameters,
        start_s=parameters.start_s + max(0.0, float(narrow["start_s"]) - float(wide["start_s"])),
        split_start_s=float(narrow["split_start_s"]),
        write_ratio=float(narrow["write_ratio"]),
        cast_bytes_per_element=float(narrow["cast_bytes_per_element"]),
        cast_row_s=float(narrow["cast_row_s"]) * _row_ratio(donor, device),
    )


def _find_cast_costs(device: Device) -> tuple[Mapping[str, Any], Mapping[str, Any], Device] | None:
    """Find the fp8 and bf16 sections of the nearest other record that has both, and their device.

    Among devices of one architecture, the nearest in balance, as for whole records (calibration.donors).
    """
    spec = DeviceSpec.of(device)
    found: list[tuple[int, float, str, Mapping[str, Any]]] = []
    for record in list_records("gemm"):
        sections = record.parameters["dtypes"]
        rank = find_architecture(record.architecture).fp8_donor_rank
        if rank is not None and {"fp8", _WIDE_FORMAT} <= set(sections) and device.name not in record.devices:
            distance = spec.balance_distance(DeviceSpec.of(load_device(record.device)))
            found.append((rank, distance, record.device, sections))
    if not found:
        return None
    _, _, donor, sections = min(found, key=lambda entry: entry[:3])
    return sections["fp8"], sections[_WIDE_FORMAT], load_device(donor)


def transfer_rate_scale(device: Device, record: CalibrationRecord) -> float:
    """Factor on borrowed GEMM rates; 1 unless the record is another architecture's with older software."""
    is_older = (
        record.kind == "gemm" and record.transfer == "generic" and _WIDE_FORMAT not in record.parameters["dtypes"]
    )
    return best_rate_scale(device) if is_older else 1.0


def best_rate_scale(device: Device) -> float:
    """Factor on the rates of an older-software record from the best published rate of a device.

    A device without a published rate uses the nearest one of its architecture; 1 where there is none.
    """
    scales = _scales()
    if device.name in scales:
        return scales[device.name]
    known = [load_device(name) for name in scales]
    siblings = [each for each in known if each.architecture == device.architecture]
    return scales[min(siblings, key=lambda each: _distance(device, each)).name] if siblings else 1.0


def scale_rates(parameters: GemmParameters, scale: float) -> GemmParameters:
    """Scale arithmetic and operand feed of kernels; no tile exceeds the peak of its SM."""
    return replace(
        parameters,
        tile_rate_fraction=np.minimum(parameters.tile_rate_fraction * scale, 1.0),
        feed_ratio=parameters.feed_ratio * scale,
    )


@cache
def _scales() -> Mapping[str, float]:
    """Read the factors by device name."""
    path = resources.files("shapewright.pricing") / "data" / "best_rates.json"
    scales: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["rate_scale"]
    return scales


def _distance(one: Device, other: Device) -> float:
    """Distance of two devices: the sum of |ln| of the ratios of bandwidths and 16-bit rates."""
    rates = [chip.dense_flops_per_s.get("bf16", 1.0) for chip in (one, other)]
    bandwidths = [chip.memory_bandwidth_bytes_per_s for chip in (one, other)]
    return abs(math.log(rates[0] / rates[1])) + abs(math.log(bandwidths[0] / bandwidths[1]))
