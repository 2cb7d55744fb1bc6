"""Terms of a kernel's time, each worked out by hand from its definition (gemm.kernels)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shapewright.hardware.loader import load_device
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.gemm.kernels import (
    DeviceRates,
    Kernels,
    estimate_kernels,
    join_s,
    macs_per_s_per_sm,
    other_times_s,
)
from shapewright.pricing.gemm.parameters import GemmParameters, read_parameters
from shapewright.pricing.gemm.shapes import Gemms

# 1 TB/s: a megabyte takes a microsecond. Ten SMs of 2 TFLOP/s, which do 1e12 multiplications with additions each.
RATES = DeviceRates(flops_per_s_per_sm=2e12, bandwidth_bytes_per_s=1e12, num_sms=10.0, element_bytes=2.0)
# 1.5, 3 and 6 million elements of A, B and C.
SIZES = {"m": 1000.0, "n": 2000.0, "k": 500.0, "batch": 3.0}
A, B, C = 1.5e6, 3e6, 6e6
BARE: dict[str, Any] = {
    "start_s": 0.0,
    "split_start_s": 0.0,
    "bandwidth_fraction": 1.0,
    "feed_ratio": 1.0,
    "wave_give_back": 0.0,
    "power_drop_fraction": 0.0,
    "k_step": 1.0,
    "hot_cache_speedup": 1.0,
    "cast_bytes_per_element": 0.0,
    "cast_row_s": 0.0,
    "write_ratio": 1.0,
}


def parameters_of(**changes: float) -> GemmParameters:
    """Constants without any cost besides arithmetic and traffic, except the given ones."""
    raw = load_record("gemm", load_device("a100-sxm-80gb")).parameters["dtypes"]["bf16"]
    return replace(read_parameters(raw), **{**BARE, **changes})


def gemm_of(**changes: float) -> Gemms:
    """One GEMM as arrays."""
    sizes = {**SIZES, **changes}
    return Gemms(*(np.array([sizes[name]]) for name in ("m", "n", "k", "batch")), letters={"k": True, "n": True})


def gemms_of_work(*flops: float) -> Gemms:
    """GEMMs with the given work, of arbitrary sizes."""
    work, one = np.array(flops), np.ones(len(flops))
    return Gemms(work / 2.0, one, one, one, letters={"k": True, "n": True})


def others_us(split: float = 1.0, rates: DeviceRates = RATES, **changes: float) -> tuple[float, float]:
    """Traffic, and what comes before and after. [us]"""
    memory_s, added_s = other_times_s(gemm_of(), np.array([split]), parameters_of(**changes), rates)
    return float(memory_s[0]) * 1e6, float(np.ravel(added_s)[0]) * 1e6


@pytest.mark.parametrize(
    ("changes", "megabytes"),
    [
        ({}, 2 * (A + B + C) / 1e6),
        ({"write_ratio": 2.0}, 2 * (A + B + 2 * C) / 1e6),
        ({"bandwidth_fraction": 0.5}, 2 * 2 * (A + B + C) / 1e6),
    ],
)
def test_operands_cross_memory_once(changes: dict[str, float], megabytes: float) -> None:
    """Each operand is read once and the result written once, at the share of the bandwidth that is reached."""
    assert others_us(**changes) == (pytest.approx(megabytes), 0.0)


def test_weights_stored_narrower_are_read_narrower() -> None:
    """Four-bit weights of a 16-bit GEMM have a quarter of B's bytes."""
    stored = replace(RATES, stored_b_share=0.25)
    assert others_us(rates=stored)[0] == pytest.approx(2 * (A + B / 4 + C) / 1e6)


def test_partial_sums_of_a_split_are_written_and_read_in_fp32() -> None:
    """Four parts: 4 * 4 bytes of each output written, and read again; the reduction is a launch more."""
    memory_us, added_us = others_us(split=4.0, start_s=5e-6, split_start_s=2e-6)
    assert memory_us == pytest.approx((2 * (A + B + C) + 2 * 4 * 4 * C) / 1e6)
    assert added_us == pytest.approx(7.0)
    assert others_us(start_s=5e-6, split_start_s=2e-6)[1] == pytest.approx(5.0)


def test_a_cast_costs_its_bytes_and_its_rows() -> None:
    """Reading 2 bytes and writing 1 of each element of A, and 1 ns for each of 3000 rows, before the GEMM."""
    added_us = others_us(cast_bytes_per_element=3.0, cast_row_s=1e-9, bandwidth_fraction=0.5)[1]
    assert added_us == pytest.approx(2 * 3 * A / 1e6 + 3.0)


@pytest.mark.parametrize(("l2_bytes", "share_of_cold"), [(1e15, 0.25), (2 * 21e6, 0.625), (1.0, 1.0)])
def test_operands_left_in_the_cache_are_read_faster(l2_bytes: float, share_of_cold: float) -> None:
    """Four times as fast where all fit, half of that gain where they fill the usable cache, none far beyond."""
    hot = replace(RATES, l2_bytes=l2_bytes)
    changes = {"hot_cache_speedup": 4.0, "hot_cache_share": 0.5}
    assert others_us(rates=hot, **changes)[0] == pytest.approx(21.0 * share_of_cold)
    assert others_us(rates=RATES, **changes)[0] == pytest.approx(21.0)


def test_power_takes_half_of_its_share_at_its_scale() -> None:
    """A tenth of the rate is lost where endless work loses a fifth, and alignment scales what is left."""
    parameters = parameters_of(power_drop_fraction=0.2, power_half_flops=1e12)
    rate = macs_per_s_per_sm(gemms_of_work(0.0, 1e12, 1e30), np.array([1.0, 0.5, 1.0]), parameters, RATES)
    np.testing.assert_allclose(rate, [1e12, 0.5 * 0.9e12, 0.8e12])


def test_a_run_of_gemms_has_one_clock() -> None:
    """With fitted runs, small and large GEMMs of one run are slowed equally, and those of an unknown run fully."""
    parameters = parameters_of(power_drop_fraction=0.2, power_half_flops=1e12, power_run_steepness=3.0)
    gemms, ones = gemms_of_work(1.0, 1e30, 1.0, 1.0), np.ones(4)
    rates = [
        macs_per_s_per_sm(each, ones, parameters, RATES)
        for each in (gemms._replace(run_flops=np.array([1e12, 1e12, 2e12, 1e15])), gemms)
    ]
    np.testing.assert_allclose(rates[0], [0.9e12, 0.9e12, (1 - 0.2 * 8 / 9) * 1e12, 0.8e12], rtol=1e-6)
    np.testing.assert_allclose(rates[1], 0.8e12)


def test_a_run_sets_the_clock_where_none_was_fitted() -> None:
    """A section without fitted runs uses a run's work instead of the GEMM's own; without a run the GEMM's own."""
    parameters = parameters_of(power_drop_fraction=0.2, power_half_flops=1e12)
    gemms = gemms_of_work(1e12, 1e12, 0.0)
    run = gemms._replace(run_flops=np.array([1e12, 3e12, np.inf]))
    np.testing.assert_allclose(macs_per_s_per_sm(run, np.ones(3), parameters, RATES), [0.9e12, 0.85e12, 0.8e12])
    np.testing.assert_allclose(macs_per_s_per_sm(gemms, np.ones(3), parameters, RATES), [0.9e12, 0.9e12, 1e12])


def test_selected_gemms_keep_their_run() -> None:
    """Selected rows of GEMM arrays keep the work of their runs."""
    gemms = gemms_of_work(1.0, 2.0, 3.0)._replace(run_flops=np.array([4.0, 5.0, 6.0]))
    np.testing.assert_array_equal(gemms.rows(slice(1, 3)).run_flops, [5.0, 6.0])
    assert gemms_of_work(1.0).rows(slice(0, 1)).run_flops is None


def kernel_times(tile: tuple[float, float], rates: DeviceRates = RATES, **changes: float) -> Any:
    """Times of one kernel with half of the rate and no prologue."""
    kernel = Kernels(*(np.array([number]) for number in (*tile, 0.5, 0.0, 1.0)))
    return estimate_kernels(gemm_of(), np.ones(1), kernel, parameters_of(**changes), rates)


def test_tiles_run_in_waves() -> None:
    """3 * 10 * 20 tiles of 100 x 100 and k = 500 are 60 waves of ten, 10 us each at half of 1e12 a second."""
    times = kernel_times((100.0, 100.0), replace(RATES, bandwidth_bytes_per_s=1e18))
    assert (float(times.num_tiles[0]), float(times.num_waves[0])) == (600.0, 60.0)
    assert float(times.compute_s[0]) == pytest.approx(60 * 10e-6)
    # Tiles of 100 x 96 leave 21 columns of them, the last one partly empty: 630 tiles, 63 waves.
    partly = kernel_times((100.0, 96.0), replace(RATES, bandwidth_bytes_per_s=1e18))
    assert float(partly.compute_s[0]) == pytest.approx(63 * 9.6e-6)


def test_a_tail_is_won_back_in_part() -> None:
    """Half of an incomplete last wave is recovered, but a single wave takes as long as a full one."""
    times = [kernel_times((102.0, 100.0), replace(RATES, bandwidth_bytes_per_s=1e18, num_sms=sms)) for sms in (7, 1e6)]
    half = [
        kernel_times((102.0, 100.0), replace(RATES, bandwidth_bytes_per_s=1e18, num_sms=sms), wave_give_back=0.5)
        for sms in (7, 1e6)
    ]
    # 600 tiles over 7 SMs are 85.71 waves of 86; over a million SMs a part of one, which takes as long as a whole one.
    assert float(half[0].compute_s[0] / times[0].compute_s[0]) == pytest.approx((86 - 0.5 * (86 - 600 / 7)) / 86)
    assert float(half[1].compute_s[0]) == float(times[1].compute_s[0])


def test_an_sm_draws_its_share_of_the_bandwidth() -> None:
    """A tile of 100 x 100 needs 200 * 500 elements of 2 bytes; an SM draws a tenth of the bandwidth, or twice that."""
    slow = kernel_times((100.0, 100.0), replace(RATES, bandwidth_bytes_per_s=1e10))
    assert float(slow.compute_s[0]) == pytest.approx(60 * 200 * 500 * 2 / 1e9)
    twice = kernel_times((100.0, 100.0), replace(RATES, bandwidth_bytes_per_s=1e10), feed_ratio=2.0)
    assert float(twice.compute_s[0]) == pytest.approx(60 * 200 * 500 * 2 / 2e9)


def test_arithmetic_and_traffic_overlap_between_the_longer_and_the_sum() -> None:
    """P = 1 adds them, p = 2 is the hypotenuse, a large p hides the shorter one."""
    three, four = np.array([3.0]), np.array([4.0])
    assert [float(join_s(three, four, power)[0]) for power in (1.0, 2.0)] == pytest.approx([7.0, 5.0])
    assert float(join_s(four, three, 64.0)[0]) == pytest.approx(4.0)
