"""What share of its clock a device holds under a power limit, beside the device whose record it borrows.

The energy of a clock cycle goes as voltage squared, and voltage as clock: a board with x times the lender's power for a
cycle of a multiplier holds x^(1/3) times the share of its clock. Energies of transistors differ by process.
How far it helps on devices left out: docs/decisions/0003-gemm-calibration.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.hardware import load_device
from shapewright.perf.calibration import list_records
from shapewright.perf.lending import has_lenders_sm, rate_clock_hz

if TYPE_CHECKING:
    from shapewright.hardware import Device
    from shapewright.perf.calibration import CalibrationRecord

# Energy of a switched transistor, TSMC N7 = 1, by the process that an architecture's data-centre chips are made in.
# Source: TSMC's announcements (recalled, not re-read), power at the same speed: N7 against 16FF+ -60 %, N5 against N7
# -30 %, N3E against N5 -32 %; N6 is taken as N7, 12FFN as 16FF+, 4N and 4NP as N5.
SWITCHING_ENERGY = {
    "volta": 2.5,
    "turing": 2.5,
    "ampere": 1.0,
    "cdna2": 1.0,
    "hopper": 0.7,
    "ada": 0.7,
    "blackwell": 0.7,
    "blackwell-ultra": 0.7,
    "blackwell-consumer": 0.7,
    "cdna3": 0.7,
    "cdna4": 0.48,
}
# The same of chips that another process made than their architecture's data-centre chip, by compute capability: GA102
# and the like are Samsung's 8LPP. Its announcements (recalled, not re-read), power at the same speed: 10LPE against
# 14LPE -40 %, 10LPP against that -15 %, 8LPP against that -10 %, and 14LPP, against 14LPE -15 %, is taken as 16FF+.
_OTHER_SWITCHING_ENERGY = {"8.6": 1.35}
# Format in which a loss of clock was fitted on every measured device.
_WIDE_FORMAT = "bf16"
# Of the loss of clock of products, on logarithms, what attention loses.
_ATTENTION_EXPONENT = 0.5


def borrowed_power_share(device: Device, lender: Device) -> float:
    """Factor on the share of its clock that the lender sustains, by the device's power; 1 where a sheet is silent.

    It is the cube root of watts per multiplier, clock cubed and switching energy: the peak rate stands for multipliers
    times clock, and the energy of a cycle goes as the clock squared.
    """
    budgets = [_watts_per_cycle(chip) for chip in (device, lender)]
    if budgets[0] is None or budgets[1] is None:
        return 1.0
    return float((budgets[0] / budgets[1]) ** (1.0 / 3.0))


def _watts_per_cycle(chip: Device) -> float | None:
    """Board power over what its multipliers would use at the clock of the sheet's rate, up to a constant."""
    energy = _OTHER_SWITCHING_ENERGY.get(chip.compute_capability) or SWITCHING_ENERGY.get(chip.architecture)
    rate = chip.dense_flops_per_s.get("fp16")
    clock_hz = rate_clock_hz(chip) or chip.boost_clock_hz
    if not (chip.tdp_watts and clock_hz and energy and rate):
        return None
    return chip.tdp_watts / (rate * clock_hz**2 * energy)


def borrowed_attention_clock(device: Device, record: CalibrationRecord) -> float:
    """Factor on what a lender's attention kernels do in a second, by the power that the device has for it.

    It is the root of what products lose or gain: softmax and waiting leave multipliers idle for half of the time. On
    L40S the kernels that A100 runs take 1.20 times as long as A100's record says, its products 1.43 times. A gain is
    at most what the lender's products lose, and goes to the same multiprocessors alone.
    """
    if record.transfer == "exact":
        return 1.0
    share = borrowed_power_share(device, load_device(record.device))
    if share > 1.0:
        share = min(share, 1.0 / (1.0 - _lost_by_products(record.device))) if has_lenders_sm(device, record) else 1.0
    return float(share**_ATTENTION_EXPONENT)


def _lost_by_products(device_name: str) -> float:
    """Share of the rate that products in 16 bits lose to power on a measured device, 0 where nobody says."""
    for record in list_records("gemm"):
        if record.device == device_name and _WIDE_FORMAT in record.parameters["dtypes"]:
            return float(record.parameters["dtypes"][_WIDE_FORMAT]["power_drop_fraction"])
    return 0.0
