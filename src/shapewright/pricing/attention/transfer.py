"""Transfer of an attention record to an unmeasured device: what its data sheet changes in the donor's kernels.

    seconds        fixed costs are clock cycles (calibration.transfer)
    memory         a sibling's time beyond full-bandwidth traffic is cycles of the same SM
    exponentials   per SM and clock are the donor's, except where an architecture is known to have doubled them
    rate           a tile's time beyond its multiplications on the same SM is cycles too (gemm.transfer)
    draw           on another architecture, more bandwidth per SM and clock comes with SMs and caches that can use it,
                   by more keys in flight: the latency of a decode tile shrinks accordingly. With less bandwidth, the
                   donor's load rate is kept
    reach          a cache in one piece keeps twice the fraction of keys that one of two partitions keeps, at most 1
    plans          planning splits in a separate kernel is specific to flash-attn on Hopper: not transferred
    decode         FlashAttention 2 starts a block per query head without groups, and does not split the keys under a
                   window; other decode kernels always pack the heads of a group and split. Where the running kernel
                   is not in the donor's record, the decode kernels of the nearest generation with packing are used

8-bit arithmetic: where a record has no 8-bit kernels, its 16-bit kernels take the mean ratios of kernels that were
measured in both formats, each architecture weighted equally. Scores are accumulated in 32 bits and must be cast for the
second GEMM. Casting to 8 bits takes more work per score than to 16, and tiles of twice the rate wait more: 8-bit
kernels reach 0.64 to 0.76 times as many exponentials per clock (triton on Hopper as many), and 0.4 to 1.1 times the
fraction of a peak twice as high.

Accuracy on held-out devices: docs/decisions/0013.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shapewright.hardware.architectures import find_architecture
from shapewright.hardware.loader import load_device
from shapewright.pricing.attention.sections import Section, choose_section, has_family, kernel_family, read_kernel
from shapewright.pricing.calibration.donors import DeviceSpec
from shapewright.pricing.calibration.records import list_records
from shapewright.pricing.calibration.transfer import (
    attention_clock_ratio,
    clock_hz_of,
    fixed_cost_scale,
    has_donor_sm,
    is_sibling_card,
    num_cache_copies,
    scale_fixed_costs,
    transfer_bandwidth_fraction,
    transfer_rate_fraction,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shapewright.hardware.device import Device
    from shapewright.pricing.attention.decode import DecodeParameters
    from shapewright.pricing.attention.kernels import AttentionRates
    from shapewright.pricing.attention.prefill import PrefillParameters
    from shapewright.pricing.calibration.records import CalibrationRecord

# Clock where the data sheet gives none; only overheads of some microseconds depend on it. [Hz]
ASSUMED_CLOCK_HZ = 1.6e9
# Default kernel family of sections.kernel_family.
_FLASH = "flash"


def decode_section(section: Section, library: str, kernel: str, device: Device) -> Section | None:
    """Find another record's section whose decode kernels replace the donor's; None where the donor's own apply.

    Args:
        section: The donor's section for the formats and the library.
        library: Running library and version; empty if unknown.
        kernel: Running kernel, as libraries spell it; empty if unknown.
    """
    record = section.record
    is_known = not kernel or kernel_family(kernel) == _FLASH or has_family(section, kernel)
    if record.transfer != "generic" or is_known:
        return None
    donor_generation = find_architecture(record.architecture).generation or 0
    own_generation = device.architecture_facts.generation
    generation = donor_generation if own_generation is None else own_generation
    spec = DeviceSpec.of(device)
    found: list[tuple[int, bool, float, str, Section]] = []
    for other in list_records("attention"):
        if record.recipient in other.devices or device.name in other.devices:
            continue
        borrowed = replace(
            other, transfer="generic", recipient=record.recipient, distance_override=record.distance_override
        )
        own = choose_section("fp8" if section.wanted == "fp8" else "bf16", _cache_bits(section), borrowed, library)
        if _always_packs(own):
            gap = abs((find_architecture(other.architecture).generation or 0) - generation)
            balance = spec.balance_distance(DeviceSpec.of(load_device(other.device)))
            found.append((gap, own.name != section.wanted, balance, other.device, own))
    nearest = min(found, key=lambda entry: entry[:4])[4] if found else section
    return nearest if nearest.record.architecture != record.architecture else None


def _cache_bits(section: Section) -> int:
    return 16 if section.wanted == "16bit" else 8


def _always_packs(section: Section) -> bool:
    """Whether a section's usual decode kernel always packs heads and splits keys."""
    return read_kernel(section, section.content["usual_kernel"])[1].packs_always


def transfer_kernel(
    prefill: PrefillParameters,
    decode: DecodeParameters,
    device: Device,
    rates: AttentionRates,
    record: CalibrationRecord,
) -> tuple[PrefillParameters, DecodeParameters]:
    """Transfer the constants of a donor's kernel to the device; own records are unchanged."""
    if record.transfer == "exact" and not is_sibling_card(device, record):
        return prefill, decode
    scale = fixed_cost_scale(device, record)
    prefill, decode = scale_fixed_costs(prefill, scale), scale_fixed_costs(decode, scale)
    clock = attention_clock_ratio(device, record)
    faster = clock * device.architecture_facts.exponential_growth.get(record.architecture, 1.0)
    fractions = transfer_rate_fraction(np.array(list(prefill.tensor_fraction.values())), device, record)
    prefill = replace(
        prefill,
        exponentials_per_sm_per_clock=prefill.exponentials_per_sm_per_clock * faster,
        tensor_fraction=dict(zip(prefill.tensor_fraction, np.minimum(fractions * clock, 1.0).tolist(), strict=True)),
    )
    prefill = replace(
        prefill, bandwidth_fraction=transfer_bandwidth_fraction(prefill.bandwidth_fraction, device, record)
    )
    decode = replace(decode, bandwidth_fraction=transfer_bandwidth_fraction(decode.bandwidth_fraction, device, record))
    if record.transfer == "generic":
        growth = 1.0 if has_donor_sm(device, record) else _draw_growth(rates, record)
        copies = num_cache_copies(load_device(record.device)) / num_cache_copies(device)
        prefill = replace(
            prefill,
            l2_bytes_per_sm_clock=prefill.l2_bytes_per_sm_clock * growth,
            l2_reach_fraction=min(prefill.l2_reach_fraction * copies, 1.0),
        )
        decode = replace(
            decode,
            l2_reach_fraction=min(decode.l2_reach_fraction * copies, 1.0),
            l2_bytes_per_sm_clock=decode.l2_bytes_per_sm_clock * growth,
            sm_bytes_per_clock=decode.sm_bytes_per_clock * growth,
            key_tile_cycles=decode.key_tile_cycles / growth,
            dram_tile_cycles=decode.dram_tile_cycles / growth,
            # Specific to flash-attn on Hopper.
            planned_sequence_s=0.0,
            planned_pair_s=0.0,
        )
    return prefill, decode


def _draw_growth(rates: AttentionRates, record: CalibrationRecord) -> float:
    """Factor on the load rate per SM and clock, for a record of another architecture.

    With more bandwidth per SM and clock than the measured device, the SMs and the cache can use it; with less (L40S),
    the measured rate is kept.
    """
    measured = load_device(record.device)
    measured_sms_hz = (measured.num_sms or 1) * (clock_hz_of(measured) or ASSUMED_CLOCK_HZ)
    share = rates.bandwidth_bytes_per_s / (rates.num_sms * rates.clock_hz)
    return max(1.0, share * measured_sms_hz / measured.memory_bandwidth_bytes_per_s)


_NARROW, _WIDE = "fp8", "16bit"


class FormatRatios(NamedTuple):
    """Ratios of 8-bit kernels to the same kernels in 16 bits.

    Attributes:
        tensor_share: Ratio of the fractions of the peak of their format.
        exponentials: Ratio of the exponentials per SM and clock.
    """

    tensor_share: float
    exponentials: float


def to_fp8_kernel(prefill: PrefillParameters, section: Section) -> PrefillParameters:
    """Scale a 16-bit kernel to 8-bit arithmetic where its section stands in for an 8-bit one; else return it."""
    if section.wanted != _NARROW or section.name == _NARROW:
        return prefill
    ratios = mean_fp8_ratios(section.record.recipient or section.record.device)
    return replace(
        prefill,
        exponentials_per_sm_per_clock=prefill.exponentials_per_sm_per_clock * ratios.exponentials,
        tensor_fraction={width: share * ratios.tensor_share for width, share in prefill.tensor_fraction.items()},
    )


@cache
def mean_fp8_ratios(left_out: str) -> FormatRatios:
    """Geometric means over the architectures of the package's records without one device; 1 without records.

    Args:
        left_out: The device to price, whose own measurements are excluded.
    """
    families: dict[str, list[tuple[float, float]]] = {}
    for record in list_records("attention"):
        if left_out not in record.devices:
            families.setdefault(record.architecture, []).extend(_ratios(record))
    means = [np.mean(np.log(pairs), axis=0) for pairs in families.values() if pairs]
    if not means:
        return FormatRatios(1.0, 1.0)
    tensor_share, exponentials = np.exp(np.mean(means, axis=0))
    return FormatRatios(float(tensor_share), float(exponentials))


def _ratios(record: CalibrationRecord) -> Iterator[tuple[float, float]]:
    """Ratios of peak fraction and exponentials, for each kernel that one library runs in both formats."""
    narrow: Mapping[str, Any] = record.parameters["sections"].get(_NARROW, {}).get("kernels", {})
    for library, sections in record.parameters.get("libraries", {}).items():
        reported = record.provenance["reports"]
        wide: Mapping[str, Any] = sections.get(_WIDE, {}).get("kernels", {})
        for name in sorted(set(narrow) & set(wide)):
            libraries = reported.get(f"{_NARROW}/{name}/prefill", {}).get("libraries", ())
            if library in libraries:
                pair = narrow[name]["prefill"], wide[name]["prefill"]
                (width,) = pair[0]["tensor_fraction"]
                yield (
                    pair[0]["tensor_fraction"][width] / pair[1]["tensor_fraction"][width],
                    pair[0]["exponentials_per_sm_per_clock"] / pair[1]["exponentials_per_sm_per_clock"],
                )
