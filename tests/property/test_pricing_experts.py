"""Properties of every price of an expert layer."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shapewright.hardware.loader import list_devices, load_device
from shapewright.lowering.operations.gemm import GroupedGemm
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.experts.price import price_grouped_gemm

DEVICES = [name for name in list_devices() if "bf16" in load_device(name).dense_flops_per_s]
dims = st.integers(1, 2**20)
groups = st.integers(1, 512)
layouts = st.sampled_from(["NT", "NN", "TN"])


@given(st.sampled_from(DEVICES), dims, dims, dims, groups, layouts, st.booleans())
def test_price_is_finite_ordered_and_above_its_roofline(
    name: str, m: int, n: int, k: int, num_groups: int, layout: str, uncalibrated: bool
) -> None:
    """It has roofline <= low <= time <= high, at any size on any device, in every pass."""
    device = load_device(name)
    record = load_record("moe", device.with_pricing(uncalibrated=uncalibrated))
    operation = GroupedGemm(name="x", m=m, n=n, k=k, groups=num_groups, layout=layout)

    found = price_grouped_gemm(operation, device, record)

    assert 0.0 < found.roofline_s <= found.low_s <= found.time_s <= found.high_s < float("inf")
    # Every row is computed, whatever the split: 1e-9 is for the rounding of rows per expert.
    assert found.time_s >= operation.flops / device.peak_flops_per_s("bf16") * (1.0 - 1e-9)


@given(st.lists(st.tuples(dims, dims, dims, groups), min_size=1, max_size=20), layouts)
def test_scalar_equals_array(shapes: list[tuple[int, int, int, int]], layout: str) -> None:
    """An array of layers costs exactly what its members cost."""
    device = load_device("h100-sxm-80gb")
    record = load_record("moe", device)
    m, n, k, g = (np.array(column) for column in zip(*shapes, strict=True))

    together = price_grouped_gemm(GroupedGemm(name="x", m=m, n=n, k=k, groups=g, layout=layout), device, record).time_s

    for index, (rows, columns, inner, experts) in enumerate(shapes):
        alone = GroupedGemm(name="x", m=rows, n=columns, k=inner, groups=experts, layout=layout)
        assert np.asarray(together)[index] == price_grouped_gemm(alone, device, record).time_s


@given(
    st.sampled_from(["a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb", "l40s"]),
    st.integers(1, 128),
    st.integers(1, 64),
    groups,
    st.lists(st.integers(1, 2**18), min_size=2, max_size=30),
)
def test_more_rows_never_cost_less(name: str, n: int, k: int, num_groups: int, rows: list[int]) -> None:
    """Among equally aligned widths time never falls as rows are added."""
    device = load_device(name)
    operation = GroupedGemm(name="x", m=np.sort(rows), n=128 * n, k=128 * k, groups=num_groups)

    found = price_grouped_gemm(operation, device, load_record("moe", device))

    assert np.all(np.diff(np.asarray(found.time_s)) >= -1e-12)
