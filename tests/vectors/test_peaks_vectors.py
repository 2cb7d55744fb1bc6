"""Peak rates from clocks and units, as published, against the device files."""

from __future__ import annotations

import pytest

from shapewright.hardware.loader import load_device


@pytest.mark.parametrize(
    ("device", "tera", "clock_hz", "fma_per_core", "cores"),
    [
        ("h100-sxm-80gb", 989.430, 1830e6, 512, 528),
        ("a100-sxm-80gb", 311.87, 1410e6, 256, 432),
        ("mi300x", 1307.4, 2100e6, 256, 1216),
        ("mi355x", 2516.6, 2400e6, 512, 1024),
        ("mi250x-card", 383.0, 1700e6, 128, 880),
        ("gaudi2", 432.5, 1650e6, 65536, 2),
        ("gaudi3", 1677, 1600e6, 65536, 8),
    ],
)
def test_peaks_of_the_sheets(device: str, tera: float, clock_hz: float, fma_per_core: int, cores: int) -> None:
    """Clock x FMA per clock and core x 2 x cores is the dense 16-bit rate, and what the device file gives."""
    assert clock_hz * fma_per_core * 2 * cores / 1e12 == pytest.approx(tera, abs=0.8)
    found = load_device(device)
    assert found.peak_flops_per_s("bf16") / 1e12 == pytest.approx(tera, rel=2e-3)
    assert found.num_sms is not None
    assert found.tensor_fma_per_sm_per_clock is not None
    assert found.boost_clock_hz is not None
    by_units = found.num_sms * found.tensor_fma_per_sm_per_clock * 2 * found.boost_clock_hz
    assert by_units / 1e12 == pytest.approx(tera, rel=0.01)


def test_memory_rate_of_b200() -> None:
    """Data rate x bus width / 8 is 8.184 TB/s at 3996 MHz and 1024 bytes; the sheet rounds down to 8."""
    assert pytest.approx(8.184, abs=0.001) == 3996e6 * 1024 * 2 / 1e12
    assert load_device("b200-sxm-180gb").memory_bandwidth_bytes_per_s == pytest.approx(3996e6 * 1024 * 2, rel=0.03)
