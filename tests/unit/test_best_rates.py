"""Effect of a published best rate on a borrowed record."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapewright.hardware.loader import load_device
from shapewright.pricing.calibration.records import CalibrationRecord, list_records, load_record
from shapewright.pricing.gemm.parameters import read_parameters
from shapewright.pricing.gemm.section import prepare_gemm_pricing
from shapewright.pricing.gemm.transfer import best_rate_scale, scale_rates, transfer_rate_scale

MI355X = load_device("mi355x")


def borrowed_by_mi355x(donor: str) -> CalibrationRecord:
    """The record of a device as another architecture's would be lent to MI355X, which has one of its own."""
    record = next(record for record in list_records("gemm") if record.device == donor)
    return replace(record, transfer="generic", recipient="mi355x")


def test_only_arithmetic_and_feed_are_scaled() -> None:
    """Half as fast again, but no tile beyond the peak: traffic and starts are no matter of kernels' rates."""
    own = read_parameters(load_record("gemm", load_device("mi250x-gcd")).parameters["dtypes"]["fp16"])

    faster = scale_rates(own, 2.0)

    assert faster.feed_ratio == 2.0 * own.feed_ratio
    assert (faster.tile_rate_fraction == np.minimum(2.0 * own.tile_rate_fraction, 1.0)).all()
    assert (faster.tile_rate_fraction == 1.0).any()
    assert (faster.bandwidth_fraction, faster.start_s) == (own.bandwidth_fraction, own.start_s)


def test_scaled_rates_are_labelled() -> None:
    """MI355X's GEMMs have MI250X's tiles at scaled rates in every format, and the label contains the factor."""
    record = borrowed_by_mi355x("mi250x-gcd")
    own = read_parameters(record.parameters["dtypes"]["fp16"])

    for dtype in ("bf16", "fp8"):
        pricing = prepare_gemm_pricing(dtype, None, MI355X, record)
        assert pricing.section is not None
        ratio = pricing.section.parameters.tile_rate_fraction / own.tile_rate_fraction
        assert ratio == pytest.approx(best_rate_scale(MI355X))
        assert f"{best_rate_scale(MI355X):.2f} times as fast by the best rate known" in pricing.source.label


def test_records_of_todays_libraries_stay_as_they_are() -> None:
    """A100's record is transferred to MI355X unscaled, and a device's own record is unchanged."""
    own = load_record("gemm", load_device("mi250x-gcd"))

    assert transfer_rate_scale(MI355X, borrowed_by_mi355x("a100-sxm-80gb")) == 1.0
    assert transfer_rate_scale(load_device("mi250x-gcd"), own) == 1.0
    assert transfer_rate_scale(MI355X, load_record("gemm", MI355X)) == 1.0
    assert transfer_rate_scale(MI355X, borrowed_by_mi355x("mi250x-gcd")) == best_rate_scale(MI355X) > 1.0


def test_a_sibling_without_a_best_rate_takes_the_nearest() -> None:
    """MI350X is MI355X with less power; a chip with MI325X's memory is nearer to it than to MI300X."""
    mi300x, mi325x = load_device("mi300x"), load_device("mi325x")
    unmeasured = replace(mi300x, name="own-chip", memory_bandwidth_bytes_per_s=mi325x.memory_bandwidth_bytes_per_s)

    assert best_rate_scale(load_device("mi350x")) == best_rate_scale(MI355X)
    assert best_rate_scale(unmeasured) == best_rate_scale(mi325x) != best_rate_scale(mi300x)
    assert best_rate_scale(load_device("t4")) == 1.0
