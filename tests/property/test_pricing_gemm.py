"""Properties of every GEMM price."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapewright.hardware.loader import list_devices, load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.gemm.price import price_gemm
from shapewright.pricing.gemm.tiling import count_tiles, count_waves

DEVICES = [name for name in list_devices() if "bf16" in load_device(name).dense_flops_per_s]
dims = st.integers(1, 2**22)
layouts = st.sampled_from(["NT", "NN", "TN"])


@given(st.sampled_from(DEVICES), dims, dims, dims, st.integers(1, 4096), layouts, st.booleans())
def test_price_is_finite_ordered_and_above_its_roofline(
    name: str, m: int, n: int, k: int, batch: int, layout: str, uncalibrated: bool
) -> None:
    """It has low <= time <= high, roofline <= time, efficiencies in (0, 1], at any size on any device."""
    device = load_device(name)
    record = load_record("gemm", device.with_pricing(uncalibrated=uncalibrated))

    found = price_gemm(Gemm(name="x", m=m, n=n, k=k, batch=batch, layout=layout), device, record)

    assert 0.0 < found.roofline_s <= found.low_s <= found.time_s <= found.high_s < float("inf")
    assert 0.0 < found.tile_efficiency <= 1.0
    assert 0.0 < found.wave_efficiency <= 1.0


@given(dims, dims, dims, st.integers(1, 64))
def test_reported_tiles_and_waves_are_those_of_the_reported_kernel(m: int, n: int, k: int, batch: int) -> None:
    """Tiles and waves of a price follow from its tile and split by exact integer arithmetic."""
    device = load_device("h100-sxm-80gb")

    found = price_gemm(Gemm(name="x", m=m, n=n, k=k, batch=batch), device, load_record("gemm", device))

    tiles = count_tiles(m, n, int(found.tile_m), int(found.tile_n), batch) * int(found.split_k)
    assert found.num_tiles == tiles
    assert found.num_waves == count_waves(tiles, 132)


@given(st.lists(st.tuples(dims, dims, dims), min_size=1, max_size=20), layouts)
def test_scalar_equals_array(shapes: list[tuple[int, int, int]], layout: str) -> None:
    """An array of shapes costs exactly what its members cost."""
    device = load_device("a100-sxm-80gb")
    record = load_record("gemm", device)
    m, n, k = (np.array(column) for column in zip(*shapes, strict=True))

    together = price_gemm(Gemm(name="x", m=m, n=n, k=k, layout=layout), device, record)

    alone = [price_gemm(Gemm(name="x", m=a, n=b, k=c, layout=layout), device, record).time_s for a, b, c in shapes]
    np.testing.assert_array_equal(np.asarray(together.time_s), alone)


@pytest.mark.parametrize("name", ["a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb", "l40s"])
@given(st.integers(1, 256), st.integers(1, 256), st.integers(1, 256), st.integers(1, 8), st.sampled_from("mnk"))
def test_more_work_of_the_same_alignment_never_gains_more_than_the_tail(
    name: str, m: int, n: int, k: int, factor: int, grown: str
) -> None:
    """Among 64-aligned shapes, growing one dimension never makes the GEMM faster than measurement noise (2 %)."""
    device = load_device(name)
    record = load_record("gemm", device)
    small = {"m": 64 * m, "n": 64 * n, "k": 64 * k}
    large = {**small, grown: small[grown] * factor}

    before = price_gemm(Gemm(name="x", **small), device, record).time_s
    after = price_gemm(Gemm(name="x", **large), device, record).time_s

    assert after >= 0.98 * before
