"""GEMM prices: the paper's cliffs, alignment classes, records and their transfer, by hand where it can be."""

from __future__ import annotations

import numpy as np
import pytest

from shapewright.core.errors import CalibrationError, UnknownRateError
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.calibration.source import ROOFLINE_BOUND
from shapewright.pricing.gemm.alignment import alignment_bytes
from shapewright.pricing.gemm.price import price_gemm, price_gemms
from shapewright.pricing.gemm.tiling import count_tiles, count_waves, tile_efficiency, wave_efficiency
from shapewright.pricing.price import GemmPrice, Price, split_rows

# What the paper's collector adds to every call on A100 (docs/decisions/0015). [s]
COLLECTOR_WAIT_S = 24.4e-6


def price(
    device_name: str,
    m: int,
    n: int,
    k: int,
    *,
    dtype: str = "fp16",
    layout: str = "NN",
    batch: int = 1,
    physics_only: bool = False,
) -> GemmPrice:
    """Price one GEMM on a named device."""
    device = load_device(device_name)
    operation = Gemm(name="x", m=m, n=n, k=k, batch=batch, dtype=dtype, layout=layout)
    return price_gemm(operation, device, load_record("gemm", device.with_pricing(physics_only=physics_only)))


def tflops(device_name: str, m: int, n: int, k: int, *, dtype: str = "fp16") -> float:
    """Predicted rate in the unit of the paper's figures."""
    return 2.0 * m * n * k / float(price(device_name, m, n, k, dtype=dtype).time_s) / 1e12


@pytest.mark.parametrize(
    ("n", "measured_before", "measured_after"), [(1536, 217.6, 180.1), (3072, 235.0, 201.3), (4608, 239.2, 220.0)]
)
def test_throughput_falls_after_full_waves(n: int, measured_before: float, measured_after: float) -> None:
    """At m=2304, k=4096 on A100, n=1536, 3072, 4608 fill 1, 2, 3 waves of 108 tiles; 64 columns more open another.

    Measured: paper_gemm.csv, sweep mm_ksweep_high (EleutherAI/cookbook @27dff48, arXiv 2401.14489 Fig. 5).
    """
    before, after = tflops("a100-sxm-40gb", 2304, n, 4096), tflops("a100-sxm-40gb", 2304, n + 64, 4096)
    # The depth of the cliff is that of the paper's libraries, which what was learned of today's says nothing about.
    physics_s = [float(price("a100-sxm-40gb", 2304, width, 4096, physics_only=True).time_s) for width in (n, n + 64)]
    rates = [
        2304 * 4096 * 2 * width / (time_s + COLLECTOR_WAIT_S)
        for width, time_s in zip((n, n + 64), physics_s, strict=True)
    ]

    assert after < 0.95 * before
    assert rates[0] == pytest.approx(measured_before * 1e12, rel=0.05)
    assert rates[1] / rates[0] == pytest.approx(measured_after / measured_before, rel=0.12)
    full = price("a100-sxm-40gb", 2304, n, 4096)
    assert full.num_waves == n // 1536
    assert full.wave_efficiency == 1.0


@pytest.mark.parametrize(
    ("vocab_size", "measured"),
    [(51137, 74), (51138, 138), (51140, 140), (51144, 226), (51152, 245), (51168, 237), (51200, 256)],
)
def test_logit_gemm_by_power_of_two_in_vocabulary(vocab_size: int, measured: float) -> None:
    """The logit GEMM of the paper, contracted over v, runs as fast as the largest power of two in v allows.

    Measured: means by power of two of paper_gemm.csv, sweep vocab_v_sweep, A100 (arXiv 2401.14489).
    """
    assert tflops("a100-sxm-40gb", 8192, 14336, vocab_size) == pytest.approx(measured, rel=0.08)


def test_swiglu_width_off_by_22_costs_half_on_h100() -> None:
    """10922 = 8h/3 is 4-byte aligned, 10944 is 64-aligned: 273 against 398 TFLOP/s, a factor of 1.46; predicted 1.62.

    The search multiplies four matrices at once and contracts over the width. The pair is held out from every fit; 398
    is half of the rate that H100 reaches with today's libraries.
    Source: stas00/ml-engineering, matrix-shape/swiglu-maf-bench.py (h = 4096, batch 4, fp16).
    """
    times = [price("h100-sxm-80gb", 4096, 4096, width, batch=4).time_s / width for width in (10922, 10944)]

    assert times[0] / times[1] == pytest.approx(398 / 273, rel=0.12)


def test_alignment_follows_contiguous_dimensions_only() -> None:
    """For y = x W^T tokens may be odd, widths may not; the gradient of W sees the same two widths."""
    aligned = price("a100-sxm-80gb", 8192, 4096, 4096, layout="NT")
    odd_tokens = price("a100-sxm-80gb", 8191, 4096, 4096, layout="NT")
    odd_input = price("a100-sxm-80gb", 8192, 4096, 4097, layout="NT")
    odd_gradient = price("a100-sxm-80gb", 4096, 4097, 8192, layout="TN")

    assert odd_tokens.alignment_factor == aligned.alignment_factor == 1.0
    assert odd_input.alignment_bytes == odd_gradient.alignment_bytes == 2
    assert odd_input.time_s > 2.0 * aligned.time_s


def test_alignment_counts_bytes_not_elements() -> None:
    """Eight fp16 elements are 16 bytes, eight fp8 elements 8, eight fp4 elements 4."""
    assert [int(alignment_bytes(8, bits)) for bits in (16, 8, 4)] == [16, 8, 4]
    assert int(alignment_bytes(3, 4)) == 1


def test_tiles_and_waves_by_hand() -> None:
    """2304 x 1600 in 128 x 256 is 18 x 7 = 126 tiles, two waves of 108, 58 % full; 1600 of 1792 columns used."""
    tiles = count_tiles(2304, 1600, 128, 256)

    assert tiles == 126
    assert count_waves(tiles, 108) == 2
    assert wave_efficiency(tiles, 2, 108) == pytest.approx(126 / 216)
    assert tile_efficiency(2304, 1600, 128, 256) == pytest.approx(1600 / 1792)


def test_uncalibrated_device_borrows_and_is_labelled() -> None:
    """An H100 PCIe borrows a Hopper sibling's record, is labelled with it, and has a wider interval."""
    own, borrowed = price("h100-sxm-80gb", 8192, 8192, 8192), price("h100-pcie-80gb", 8192, 8192, 8192)

    assert own.calibration.label.startswith("gemm/h100-sxm-80gb")
    assert borrowed.calibration.label.startswith("uncalibrated (borrows gemm/h")
    assert borrowed.high_s / borrowed.time_s > own.high_s / own.time_s


def test_uncalibrated_flag_ignores_the_devices_record() -> None:
    """With ``uncalibrated``, the H100's own record is not used."""
    device = load_device("h100-sxm-80gb")

    assert load_record("gemm", device).transfer == "exact"
    assert load_record("gemm", device.with_pricing(uncalibrated=True)).device != device.name


def test_roofline_only_device_is_labelled_as_a_bound() -> None:
    """A wafer has no tiles to model: the price is the roofline, labelled."""
    found = price("graphcore-bow", 4096, 4096, 4096)

    assert found.time_s == found.roofline_s
    assert found.calibration.is_roofline_bound


def test_missing_rate_is_an_error_not_a_guess() -> None:
    """A V100 has no bf16 rate."""
    with pytest.raises(UnknownRateError, match="v100-sxm2-16gb has no bf16 rate"):
        price("v100-sxm2-16gb", 128, 128, 128, dtype="bf16")


def test_unknown_record_kind_is_an_error() -> None:
    """A kind that does not exist is named with those that do."""
    with pytest.raises(CalibrationError, match="choose one of gemm"):
        load_record("gem", load_device("l40s"))


def test_vectorized_equals_scalar() -> None:
    """Grouping by layout and dtype changes no price and keeps the order."""
    device = load_device("a100-sxm-80gb")
    record = load_record("gemm", device)
    operations = [
        Gemm(name=str(index), m=97 * index, n=4096 - index, k=1024 + 8 * index, layout=layout, dtype=dtype)
        for index, (layout, dtype) in enumerate(
            [("NT", "bf16"), ("NN", "fp16"), ("TN", "bf16"), ("NT", "fp16"), ("NT", "bf16")], start=1
        )
    ]

    together = price_gemms(operations, device, record)

    assert together == [price_gemm(operation, device, record) for operation in operations]


def test_array_dims_give_array_prices() -> None:
    """Arrays of shapes come back in their shape, equal to one call each."""
    device = load_device("h200-sxm-141gb")
    record = load_record("gemm", device)
    widths = np.array([[4096, 4097], [10922, 11008]])

    found = price_gemm(Gemm(name="x", m=512, n=widths, k=4096), device, record)

    assert np.shape(found.time_s) == (2, 2)
    assert found.time_s[1, 0] == price_gemm(Gemm(name="x", m=512, n=10922, k=4096), device, record).time_s


def test_rows_of_columns_equal_constructed_rows() -> None:
    """Prices split from columns equal prices made one by one; a missing column is a programmer's error."""
    names = ("time_s", "low_s", "high_s", "compute_s", "memory_s", "start_s", "roofline_s", "shared_error")
    columns = {name: np.array([place, 10.0 + place]) for place, name in enumerate(names)}

    found = split_rows(Price, columns, ROOFLINE_BOUND)

    assert found == [
        Price(
            time_s=more + 0.0,
            low_s=more + 1.0,
            high_s=more + 2.0,
            compute_s=more + 3.0,
            memory_s=more + 4.0,
            start_s=more + 5.0,
            roofline_s=more + 6.0,
            shared_error=more + 7.0,
            calibration=ROOFLINE_BOUND,
        )
        for more in (0.0, 10.0)
    ]
    with pytest.raises(AssertionError, match="time_s"):
        split_rows(Price, {"time_s": columns["time_s"]}, ROOFLINE_BOUND)
