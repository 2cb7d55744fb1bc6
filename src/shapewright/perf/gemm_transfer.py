"""What a device that nobody measured takes from its lender's record, and what its data sheet changes in it.

A record holds fractions, elements and seconds. Fractions of rates carry over as they are, by these rules:

    start     seconds of a lender's kernel are clock cycles: start_s * lender's clock / device's clock. A cast before an
              8- or 4-bit product is a kernel more, which waits for memory rather than for cycles: its start stays
    memory    what a sibling's kernel takes beyond its traffic at full bandwidth, it takes in cycles of the same SMs
    rate      what a tile of the same SM takes beyond its multiplications too, a smaller share where those are slower
    alignment what narrow loads add to a tile's multiplications they add in as many cycles on every SM: a smaller share
              where multipliers are slower, and a larger one where they are faster
    feed      no SM draws fewer bytes a clock from the caches than the lender's does; the same SM (a sibling's, or
              AD102's for GA102 and GB202) draws no more either (DeviceRates.feed_scale)
    power     energy of a clock cycle goes as voltage squared, and voltage as clock: a board that has x times the
              lender's power for a cycle of a multiplier holds x^(1/3) times the share of its clock, 1 at most
    format    a lender without the element format has its kernels, and the nearest record with it says what casting
              costs, that the contraction is hardly split, and what writing costs
    means     the share of bandwidth that kernels reach (0.74 to 0.85) and of a last wave that they win back (0 to 0.97)
              follow no line of a sheet: another family's device takes the mean of all families that were measured, and
              the first also where sweeps of one paper lend, whose narrowest products are bound by tiles, not by memory
    best rate where such sweeps lend, arithmetic and operand feed are as fast as the best product that anyone found on
              the device asks for (perf.best_rates)
    habits    slow cases, kernels for batches and learned tables are fingerprints of a library on one family: they stay

How far each helps on devices left out: docs/decisions/0003-gemm-calibration.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from shapewright.dtypes import get_dtype
from shapewright.hardware import load_device
from shapewright.perf.best_rates import borrowed_rate_scale, speed_up
from shapewright.perf.calibration import list_records
from shapewright.perf.expert_transfer import carry_experts
from shapewright.perf.lenders import Sheet
from shapewright.perf.lending import (
    borrowed_alignment,
    clock_beside_hz,
    clock_hz_of,
    sibling_bandwidth_share,
    sibling_rate_share,
)
from shapewright.perf.power import SWITCHING_ENERGY, borrowed_power_share

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shapewright.hardware import Device
    from shapewright.perf.calibration import CalibrationRecord
    from shapewright.perf.gemm_menu import GemmParameters

# Families whose records say what an 8-bit format costs, best measured first.
_FORMAT_LENDERS = ("hopper", "blackwell", "ada")
# Formats of this width and above come as they are; narrower ones are cast to. [bit]
_UNCAST_BITS = 16
# The format that every family of the tables was measured in.
_WIDE_FORMAT = "bf16"


def adapt_parameters(
    parameters: GemmParameters, raw: Mapping[str, Any], device: Device, record: CalibrationRecord, dtype: str
) -> GemmParameters:
    """A lender's parameters as the device would have them; the record's own where it is the device's.

    Args:
        parameters: What the record says of its own device.
        raw: The record's sections by dtype.
        device: The device to price.
        record: Whose parameters they are.
        dtype: Element format of the products.
    """
    adapted = _adapt_rates(parameters, raw, device, record, dtype)
    if record.kind != "gemm":
        return adapted  # kernels of experts pad what they load: theirs is another matter (decision 0003)
    rates = parameters.tile_rate_fraction, adapted.tile_rate_fraction
    return replace(adapted, alignment_factor=borrowed_alignment(parameters.alignment_factor, rates, device, record))


def _adapt_rates(
    parameters: GemmParameters, raw: Mapping[str, Any], device: Device, record: CalibrationRecord, dtype: str
) -> GemmParameters:
    """All but what depends on how fast tiles come out."""
    share = sibling_bandwidth_share(parameters.bandwidth_fraction, device, record)
    rates = sibling_rate_share(parameters.tile_rate_fraction, device, record)
    parameters = replace(parameters, bandwidth_fraction=share, tile_rate_fraction=rates)
    if record.kind != "gemm":
        return carry_experts(parameters, device, record)
    if record.transfer != "exact":
        lender = load_device(record.device)
        parameters = _scale_start(parameters, raw, device, lender)
        sustained = (1.0 - parameters.power_drop_fraction) * borrowed_power_share(device, lender)
        parameters = replace(parameters, power_drop_fraction=1.0 - min(sustained, 1.0))
    if record.transfer == "generic":
        means = _take_means(parameters, device, dtype)
        if _WIDE_FORMAT not in raw:
            means = replace(parameters, bandwidth_fraction=means.bandwidth_fraction)
            means = speed_up(means, borrowed_rate_scale(device, record))
        parameters = replace(means, slow_cases=None, batch_kernels=None)
    is_cast = parameters.cast_bytes_per_element > 0.0
    return parameters if is_cast or get_dtype(dtype).bits >= _UNCAST_BITS else _borrow_format(parameters, device)


def _take_means(parameters: GemmParameters, device: Device, dtype: str) -> GemmParameters:
    """A lender's parameters, but what no data sheet tells is the mean of the families measured, each of one vote.

    Shares of bandwidth are averaged on logarithms, shares of a last wave, which may be 0, as they are. Families of
    which only the sweeps of one paper were measured have no bf16 section, and are left out.
    """
    families: dict[str, list[tuple[float, float]]] = {}
    for record in list_records("gemm"):
        sections = record.parameters["dtypes"]
        if device.name in record.devices or _WIDE_FORMAT not in sections:
            continue
        own = sections.get(dtype, sections[_WIDE_FORMAT])
        pair = (float(np.log(own["bandwidth_fraction"])), float(own["wave_give_back"]))
        families.setdefault(record.architecture, []).append(pair)
    if not families:
        return parameters
    log_bandwidth, give_back = np.mean([np.mean(pairs, axis=0) for pairs in families.values()], axis=0)
    return replace(parameters, bandwidth_fraction=float(np.exp(log_bandwidth)), wave_give_back=float(give_back))


def borrowed_feed_scale(device: Device, lender: Device) -> float:
    """Factor on the lender's feed ratio, so that no SM draws fewer bytes a clock than the lender's does.

    A feed ratio counts in shares of memory bandwidth. That is how it carries over to another family with faster memory,
    whose caches are faster too; a device with slower memory keeps the path from cache to SM. The same SM draws as many
    bytes a clock whatever the memory: H200's is H100's, with 1.43 times the bandwidth behind it, and A40's is L40S's.
    """
    shares = [chip.memory_bandwidth_bytes_per_s / (chip.num_sms or 1) for chip in (device, lender)]
    scale = shares[1] / shares[0] / _clock_ratio(lender, device)
    is_sibling = (device.architecture, device.compute_capability) == (lender.architecture, lender.compute_capability)
    is_same_sm = is_sibling or device.sm_kind == lender.sm_kind is not None
    return scale if is_same_sm else max(1.0, scale)


def _clock_ratio(lender: Device, device: Device) -> float:
    """Clock of a lender over that of the device, 1 where sheets are silent or one is no GPU."""
    clocks = clock_hz_of(lender), clock_beside_hz(device, lender)
    if clocks[0] is None or clocks[1] is None:
        return 1.0
    if not {lender.architecture, device.architecture} <= set(SWITCHING_ENERGY):
        return 1.0
    return clocks[0] / clocks[1]


def _scale_start(parameters: GemmParameters, raw: Mapping[str, Any], device: Device, lender: Device) -> GemmParameters:
    """Starts in cycles of the device's clock; that of a cast before the product as it is."""
    slower = _clock_ratio(lender, device)
    kernel_s = parameters.start_s
    if parameters.cast_bytes_per_element > 0.0 and _WIDE_FORMAT in raw:
        kernel_s = min(kernel_s, float(raw[_WIDE_FORMAT]["start_s"]))
    per_row = slower * (lender.num_sms or 1) / (device.num_sms or 1)
    return replace(
        parameters,
        start_s=parameters.start_s - kernel_s + kernel_s * slower,
        split_start_s=parameters.split_start_s * slower,
        cast_row_s=parameters.cast_row_s * per_row,
    )


def _borrow_format(parameters: GemmParameters, device: Device) -> GemmParameters:
    """Kernels of a wider format with what casting to 8 bits costs elsewhere."""
    found = _find_format(device)
    if found is None:
        return parameters
    narrow, wide, lender = found
    per_row = _clock_ratio(lender, device) * (lender.num_sms or 1) / (device.num_sms or 1)
    return replace(
        parameters,
        start_s=parameters.start_s + max(0.0, float(narrow["start_s"]) - float(wide["start_s"])),
        split_start_s=float(narrow["split_start_s"]),
        write_ratio=float(narrow["write_ratio"]),
        cast_bytes_per_element=float(narrow["cast_bytes_per_element"]),
        cast_row_s=float(narrow["cast_row_s"]) * per_row,
    )


def _find_format(device: Device) -> tuple[Mapping[str, Any], Mapping[str, Any], Device] | None:
    """The fp8 and the bf16 section of the nearest other record that has both, and whose they are.

    Of a family the device of the nearest balance, as for whole records (perf.lenders).
    """
    sheet = Sheet.of(device)
    found: list[tuple[int, float, str, Mapping[str, Any]]] = []
    for record in list_records("gemm"):
        sections = record.parameters["dtypes"]
        is_known = record.architecture in _FORMAT_LENDERS and {"fp8", _WIDE_FORMAT} <= set(sections)
        if is_known and device.name not in record.devices:
            distance = sheet.balance_distance(Sheet.of(load_device(record.device)))
            found.append((_FORMAT_LENDERS.index(record.architecture), distance, record.device, sections))
    if not found:
        return None
    _, _, lender, sections = min(found, key=lambda entry: entry[:3])
    return sections["fp8"], sections[_WIDE_FORMAT], load_device(lender)
