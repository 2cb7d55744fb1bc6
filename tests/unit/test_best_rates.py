"""What a published best rate changes in a borrowed record."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapewright.hardware import load_device
from shapewright.perf.best_rates import best_rate_scale, borrowed_rate_scale, speed_up
from shapewright.perf.calibration import list_records, load_record
from shapewright.perf.gemm_job import make_gemm_job
from shapewright.perf.gemm_menu import read_parameters

MI355X = load_device("mi355x")


def test_arithmetic_and_feed_are_faster_and_nothing_else() -> None:
    """Half as fast again, but no tile beyond the peak: traffic and starts are no matter of kernels' rates."""
    own = read_parameters(load_record("gemm", load_device("mi250x-gcd")).parameters["dtypes"]["fp16"])

    faster = speed_up(own, 2.0)

    assert faster.feed_ratio == 2.0 * own.feed_ratio
    assert (faster.tile_rate_fraction == np.minimum(2.0 * own.tile_rate_fraction, 1.0)).all()
    assert (faster.tile_rate_fraction == 1.0).any()
    assert (faster.bandwidth_fraction, faster.start_s) == (own.bandwidth_fraction, own.start_s)


def test_the_borrowed_record_is_sped_up_and_says_so() -> None:
    """MI355X's products have the tiles of MI250X, each so many times as fast in every format, and the label says so."""
    record = load_record("gemm", MI355X)
    own = read_parameters(record.parameters["dtypes"]["fp16"])

    for dtype in ("bf16", "fp8"):
        job = make_gemm_job(dtype, None, MI355X, record)
        assert job.section is not None
        ratio = job.section.parameters.tile_rate_fraction / own.tile_rate_fraction
        assert ratio == pytest.approx(best_rate_scale(MI355X))
        assert f"{best_rate_scale(MI355X):.2f} times as fast by the best rate known" in job.label


def test_records_of_todays_libraries_stay_as_they_are() -> None:
    """A100's record would lend MI355X its rates unchanged, and a device's own record is not touched."""
    a100 = next(record for record in list_records("gemm") if record.device == "a100-sxm-80gb")
    own = load_record("gemm", load_device("mi250x-gcd"))

    assert borrowed_rate_scale(MI355X, replace(a100, transfer="generic")) == 1.0
    assert borrowed_rate_scale(load_device("mi250x-gcd"), own) == 1.0
    assert borrowed_rate_scale(MI355X, load_record("gemm", MI355X)) == best_rate_scale(MI355X) > 1.0


def test_a_sibling_without_a_best_rate_takes_the_nearest() -> None:
    """MI350X is MI355X with less power; a chip with MI325X's memory is nearer to it than to MI300X."""
    mi300x, mi325x = load_device("mi300x"), load_device("mi325x")
    stranger = replace(mi300x, name="own-chip", memory_bandwidth_bytes_per_s=mi325x.memory_bandwidth_bytes_per_s)

    assert best_rate_scale(load_device("mi350x")) == best_rate_scale(MI355X)
    assert best_rate_scale(stranger) == best_rate_scale(mi325x) != best_rate_scale(mi300x)
    assert best_rate_scale(load_device("t4")) == 1.0
