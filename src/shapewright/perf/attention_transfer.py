"""What a device that nobody measured takes from another's record of attention, and what its data sheet changes in it.

    seconds        of a lender's kernel are clock cycles (perf.lending)
    memory         what a sibling's kernel takes beyond its traffic at full bandwidth, it takes in cycles of the same SM
    exponentials   of a multiprocessor and clock are the lender's, but where a generation is known to have doubled them
    rate           what a tile of the same SM takes beyond its multiplications is cycles too: a smaller share of slower
                   ones, as for products (perf.gemm_transfer)
    draw           another family's chip with more bandwidth for each multiprocessor and clock has SMs and a cache that
                   can draw it, by more keys in flight: each decode tile waits as many times less; one with less
                   bandwidth keeps what the lender's could
    reach          a cache in one piece keeps twice the share of keys that one of two partitions keeps, 1 at most
    plans          a kernel that plans splits before is flash-attn's on Hopper: no other family's library runs it
    decode         FlashAttention 2 starts a block for each query head without a group, and does not split the keys
                   under a window; other decode kernels pack the heads of a group and split always. Where a kernel runs
                   that a lender does not have, the nearest generation whose usual kernel does so lends its decode

How far each helps on devices left out: docs/decisions/0013-strangers.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from shapewright.hardware import load_device
from shapewright.perf.attention_sections import (
    Section,
    choose_section,
    has_family,
    kernel_family,
    read_kernel,
)
from shapewright.perf.calibration import GENERATIONS, list_records
from shapewright.perf.lenders import Sheet
from shapewright.perf.lending import (
    clock_hz_of,
    fixed_cost_scale,
    has_lenders_sm,
    is_other_card,
    num_cache_copies,
    scale_fixed_costs,
    sibling_bandwidth_share,
    sibling_rate_share,
)
from shapewright.perf.power import borrowed_attention_clock

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.perf.attention_decode import DecodeParameters
    from shapewright.perf.attention_kernels import AttentionRates
    from shapewright.perf.attention_prefill import PrefillParameters
    from shapewright.perf.calibration import CalibrationRecord

# Exponentials of a multiprocessor and clock in units of the generation before, whose record is borrowed: Blackwell
# Ultra doubled them (NVIDIA, "Inside NVIDIA Blackwell Ultra": 10.7 against 5 tera-exponentials a second; recalled).
_EXPONENTIAL_GROWTH = {("blackwell-ultra", "blackwell"): 2.0}
# Clock where the sheet gives none: only overheads of some microseconds depend on it. [Hz]
ASSUMED_CLOCK_HZ = 1.6e9
# The family of kernels that libraries call by no other word than flash.
_FLASH = "flash"


def decode_section(section: Section, library: str, kernel: str, device: Device) -> Section | None:
    """Section of another record whose decode kernels stand for the one that runs; None where the lender's own do.

    Args:
        section: What the lender has for the formats and the library.
        library: Library and version that runs; empty if unknown.
        kernel: Kernel that runs, as libraries spell it; empty if unknown.
        device: The device to price.
    """
    record = section.record
    is_known = not kernel or kernel_family(kernel) == _FLASH or has_family(section, kernel)
    if record.transfer != "generic" or is_known:
        return None
    age = GENERATIONS.get(device.architecture, GENERATIONS[record.architecture])
    sheet = Sheet.of(device)
    found: list[tuple[int, bool, float, str, Section]] = []
    for other in list_records("attention"):
        if record.borrower in other.devices or device.name in other.devices:
            continue
        lent = replace(other, transfer="generic", borrower=record.borrower, farther=record.farther)
        own = choose_section("fp8" if section.wanted == "fp8" else "bf16", _cache_bits(section), lent, library)
        if _packs(own):
            gap = abs(GENERATIONS[other.architecture] - age)
            balance = sheet.balance_distance(Sheet.of(load_device(other.device)))
            found.append((gap, own.name != section.wanted, balance, other.device, own))
    nearest = min(found, key=lambda entry: entry[:4])[4] if found else section
    return nearest if nearest.record.architecture != record.architecture else None


def _cache_bits(section: Section) -> int:
    return 16 if section.wanted == "16bit" else 8


def _packs(section: Section) -> bool:
    """Whether a section's usual decode kernel packs heads and splits keys always."""
    return read_kernel(section, section.content["usual_kernel"])[1].packs_always


def carry_kernel(
    prefill: PrefillParameters,
    decode: DecodeParameters,
    device: Device,
    rates: AttentionRates,
    record: CalibrationRecord,
) -> tuple[PrefillParameters, DecodeParameters]:
    """Constants of a lender's kernel as the device would have them; its own as they are."""
    if record.transfer == "exact" and not is_other_card(device, record):
        return prefill, decode
    scale = fixed_cost_scale(device, record)
    prefill, decode = scale_fixed_costs(prefill, scale), scale_fixed_costs(decode, scale)
    clock = borrowed_attention_clock(device, record)
    faster = clock * _EXPONENTIAL_GROWTH.get((device.architecture, record.architecture), 1.0)
    prefill = replace(
        prefill,
        exponentials_per_sm_per_clock=prefill.exponentials_per_sm_per_clock * faster,
        tensor_fraction={
            width: min(float(sibling_rate_share(np.array(share), device, record)) * clock, 1.0)
            for width, share in prefill.tensor_fraction.items()
        },
    )
    prefill = replace(prefill, bandwidth_fraction=sibling_bandwidth_share(prefill.bandwidth_fraction, device, record))
    decode = replace(decode, bandwidth_fraction=sibling_bandwidth_share(decode.bandwidth_fraction, device, record))
    if record.transfer == "generic":
        growth = 1.0 if has_lenders_sm(device, record) else _draw_growth(rates, record)
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
            # A kernel that plans splits before is flash-attn's on Hopper: no other family's library ran it.
            planned_sequence_s=0.0,
            planned_pair_s=0.0,
        )
    return prefill, decode


def _draw_growth(rates: AttentionRates, record: CalibrationRecord) -> float:
    """Factor on what one SM draws per clock, for a record of another family.

    A chip with more bandwidth per SM and clock than the measured one has SMs and a cache that can draw it; one with
    less (L40S) keeps what the measured one could.
    """
    measured = load_device(record.device)
    measured_sms_hz = (measured.num_sms or 1) * (clock_hz_of(measured) or ASSUMED_CLOCK_HZ)
    share = rates.bandwidth_bytes_per_s / (rates.num_sms * rates.clock_hz)
    return max(1.0, share * measured_sms_hz / measured.memory_bandwidth_bytes_per_s)
