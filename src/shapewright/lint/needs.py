"""What a device needs of a dimension to run at full speed: thresholds of the rules, by dtype and device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shapewright.dtypes import get_dtype

if TYPE_CHECKING:
    from shapewright.hardware import Device

# Row length in bytes from which operands are loaded at full width: 16 bytes up to Turing, whole cache lines of 128
# bytes after it. Source: NVIDIA, Matrix Multiplication Background User's Guide, "Requirements to use tensor cores";
# arXiv 2401.14489, section on tensor cores. Whether less costs anything on a device is for its prices to say.
_FULL_WIDTH_BYTES = {"volta": 16, "turing": 16}
_FULL_WIDTH_BYTES_ELSEWHERE = 128

# Head widths that fused attention kernels are compiled for; others run in the next larger one with the rest padded.
# Source: Dao-AILab/flash-attention, one file per head dimension under csrc/flash_attn/src (v2) and hopper (v3).
FUSED_HEAD_DIMS = (32, 64, 96, 128, 192, 256)

# Row length that vector loads of a fused attention kernel need. [byte] Source: flash-attention refuses head
# dimensions that are no multiple of 8 fp16 elements and pads them in its Python layer.
FUSED_ALIGNMENT_BYTES = 16


def full_width_multiple(device: Device, dtype: str) -> int:
    """Elements that a contiguous dimension must be a multiple of for full-width loads.

    >>> from shapewright.hardware import load_device
    >>> [full_width_multiple(load_device(name), "fp16") for name in ("a100-sxm-40gb", "v100-sxm2-16gb")]
    [64, 8]
    """
    width_bytes = _FULL_WIDTH_BYTES.get(device.architecture, _FULL_WIDTH_BYTES_ELSEWHERE)
    return width_bytes * 8 // get_dtype(dtype).bits


def round_up(value: int, multiple: int) -> int:
    """Next multiple, or the value itself.

    >>> round_up(50257, 64), round_up(64, 64)
    (50304, 64)
    """
    return -(-value // multiple) * multiple


def neighbours(value: int, multiple: int) -> tuple[int, ...]:
    """Nearest multiples below and above a value that is none, nearest first; zero is left out.

    >>> neighbours(10922, 64), neighbours(30, 64)
    ((10944, 10880), (64,))
    """
    above = round_up(value, multiple)
    found = sorted({above, above - multiple} - {0, value}, key=lambda candidate: abs(candidate - value))
    return tuple(found)


def largest_power_of_two(value: int) -> int:
    """Largest power of two that divides a number.

    >>> largest_power_of_two(80), largest_power_of_two(50257)
    (16, 1)
    """
    return value & -value
