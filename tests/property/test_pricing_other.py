"""Properties of every price of attention, pointwise operations and collectives."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapewright.hardware.loader import list_devices, load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import COLLECTIVE_OPS, Collective
from shapewright.lowering.operations.pointwise import POINTWISE_KINDS, Pointwise
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.collectives import price_collective, price_collectives
from shapewright.pricing.pointwise import price_pointwise
from shapewright.pricing.price import Price

DEVICES = [load_device(name) for name in list_devices()]
FUSING = [
    device.name
    for device in DEVICES
    if "bf16" in device.dense_flops_per_s and device.architecture not in ("volta", "turing")
]
LINKED = [
    device.name
    for device in DEVICES
    if device.inter_node_bandwidth_bytes_per_s
    and (device.intra_node_bandwidth_bytes_per_s or device.pcie_bandwidth_bytes_per_s)
]
# Combining the splits of a decode kernel costs up to this, which a larger batch saves: libraries split short caches at
# a loss. [s]
SPLIT_COMBINATION_S = 6e-6
MEASURED = ["a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "l40s"]


@st.composite
def attention_sizes(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes of one attention call, decode and long prefill among them."""
    group, kv_heads = draw(st.integers(1, 64)), draw(st.integers(1, 64))
    head_dim = draw(st.sampled_from([8, 40, 64, 80, 96, 128, 192, 256, 512]))
    query_len = draw(st.one_of(st.just(1), st.integers(1, 2**17)))
    return {
        "batch_size": draw(st.integers(1, 2**12)),
        "query_len": query_len,
        "kv_len": query_len + draw(st.integers(0, 2**17)),
        "num_heads": group * kv_heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "v_head_dim": head_dim,
        "window_size": draw(st.one_of(st.just(0), st.integers(1, 2**15))),
    }


def price_call(name: str, *, uncalibrated: bool = False, physics_only: bool = False, **fields: Any) -> Price:
    """Price of one attention call."""
    device = load_device(name)
    record = load_record("attention", device.with_pricing(uncalibrated=uncalibrated, physics_only=physics_only))
    return price_attention(Attention(name="x", **fields), device, record)


def assert_ordered(found: Price) -> None:
    """Finite, with roofline <= low <= time <= high."""
    assert 0.0 <= found.roofline_s <= found.low_s <= found.time_s <= found.high_s < float("inf")
    assert found.start_s >= 0.0
    assert found.memory_s >= 0.0


@given(st.sampled_from(FUSING), attention_sizes(), st.booleans(), st.booleans(), st.booleans())
def test_attention_is_ordered_and_above_its_roofline(
    name: str, sizes: dict[str, Any], causal: bool, is_backward: bool, uncalibrated: bool
) -> None:
    """At any size on any device with fused attention."""
    found = price_call(name, uncalibrated=uncalibrated, causal=causal, is_backward=is_backward, **sizes)

    assert_ordered(found)
    assert found.time_s > 0.0


@given(st.lists(attention_sizes(), min_size=1, max_size=12), st.sampled_from(MEASURED))
def test_attention_scalar_equals_array(calls: list[dict[str, Any]], name: str) -> None:
    """An array of calls, prefill and decode mixed, costs what its members cost."""
    columns = {key: np.array([sizes[key] for sizes in calls]) for key in calls[0]}
    together = price_call(name, **columns)
    alone = [price_call(name, **sizes) for sizes in calls]

    for part in ("time_s", "low_s", "high_s", "start_s"):
        np.testing.assert_allclose(getattr(together, part), [getattr(price, part) for price in alone], rtol=1e-12)


@pytest.mark.parametrize("name", MEASURED)
@given(attention_sizes(), st.sampled_from(["batch_size", "kv_len", "num_heads"]), st.integers(2, 8))
def test_attention_grows_with_its_sizes(name: str, sizes: dict[str, Any], grown: str, factor: int) -> None:
    """Twice the sequences, keys or heads and more never take less time, the combination of splits aside.

    By the formulas: measured kernels do take less at some steps, and what was learned follows them.
    """
    larger = {**sizes, grown: sizes[grown] * factor}
    if grown == "num_heads":
        larger["num_kv_heads"] = sizes["num_kv_heads"] * factor

    least_s = 0.98 * price_call(name, physics_only=True, **sizes).time_s - SPLIT_COMBINATION_S
    assert price_call(name, physics_only=True, **larger).time_s >= least_s


@pytest.mark.parametrize("name", MEASURED)
@given(attention_sizes(), st.integers(2, 8))
def test_attention_grows_with_queries_among_prefills(name: str, sizes: dict[str, Any], factor: int) -> None:
    """Longer prompts never take less time; with what was learned, not a tenth less."""
    length = max(sizes["query_len"], 2)
    prompt = {**sizes, "query_len": length, "kv_len": length}
    longer = {**sizes, "query_len": length * factor, "kv_len": length * factor}

    physics = [price_call(name, physics_only=True, **call).time_s for call in (prompt, longer)]
    learned = [price_call(name, **call).time_s for call in (prompt, longer)]

    assert physics[1] >= 0.999 * physics[0]
    assert learned[1] >= 0.9 * learned[0]


@given(
    st.sampled_from([device.name for device in DEVICES]),
    st.sampled_from(POINTWISE_KINDS),
    st.floats(0.0, 1e14),
    st.floats(1.0, 1e14),
    st.integers(1, 1000),
)
def test_pointwise_is_ordered_and_grows(name: str, kind: str, read: float, written: float, num_kernels: int) -> None:
    """On any device, at any size; twice the bytes never take less time."""
    device = load_device(name)
    record = load_record("pointwise", device)

    def price(scale: float) -> Price:
        work = Pointwise(
            name="x",
            operation=kind,
            read_bytes=scale * read,
            written_bytes=scale * written,
            num_kernels=num_kernels,
        )
        return price_pointwise(work, device, record)

    assert_ordered(price(1.0))
    assert price(2.0).time_s >= price(1.0).time_s


@given(st.lists(st.tuples(st.floats(1.0, 1e12), st.floats(1.0, 1e12)), min_size=1, max_size=12))
def test_pointwise_scalar_equals_array(amounts: list[tuple[float, float]]) -> None:
    """An array of operations costs what its members cost."""
    device = load_device("a100-sxm-80gb")
    record = load_record("pointwise", device)
    read, written = (np.array(column) for column in zip(*amounts, strict=True))

    def price(read_bytes: Any, written_bytes: Any) -> Any:
        work = Pointwise(name="x", operation="activation", read_bytes=read_bytes, written_bytes=written_bytes)
        return price_pointwise(work, device, record).time_s

    np.testing.assert_array_equal(price(read, written), [price(*pair) for pair in amounts])


@st.composite
def collective_sizes(draw: st.DrawFn) -> dict[str, Any]:
    """Message and ranks of one collective, inside a node or over several."""
    local, nodes = draw(st.integers(1, 8)), draw(st.integers(1, 512))
    return {
        "message_bytes": draw(st.floats(1.0, 1e13)),
        "num_ranks": local * nodes,
        "ranks_per_node": local,
    }


def price_sizes(name: str, op_name: str, **sizes: Any) -> Price:
    """Price of one collective."""
    device = load_device(name)
    operation = Collective(name="x", op_name=op_name, axis="tensor", **sizes)
    return price_collective(operation, device, load_record("collectives", device))


@given(st.sampled_from(LINKED), st.sampled_from(COLLECTIVE_OPS), collective_sizes())
def test_collectives_are_ordered_and_grow(name: str, op_name: str, sizes: dict[str, Any]) -> None:
    """On any device with links, a longer message never takes less time, and a single rank none."""
    found = price_sizes(name, op_name, **sizes)
    longer = price_sizes(name, op_name, **{**sizes, "message_bytes": 2.0 * sizes["message_bytes"]})

    assert_ordered(found)
    assert longer.time_s >= found.time_s
    assert (found.time_s == 0.0) == (sizes["num_ranks"] == 1)


@given(st.lists(collective_sizes(), min_size=1, max_size=12), st.sampled_from(COLLECTIVE_OPS))
def test_collectives_scalar_equals_array(calls: list[dict[str, Any]], op_name: str) -> None:
    """An array of collectives costs what its members cost."""
    columns = {key: np.array([sizes[key] for sizes in calls]) for key in calls[0]}
    together = price_sizes("h100-sxm-80gb", op_name, **columns)

    alone = [price_sizes("h100-sxm-80gb", op_name, **sizes).time_s for sizes in calls]
    np.testing.assert_allclose(together.time_s, alone, rtol=1e-12)


@given(
    st.lists(st.tuples(st.sampled_from(COLLECTIVE_OPS), collective_sizes()), min_size=1, max_size=12),
    st.sampled_from(LINKED),
)
def test_collectives_of_several_names_together_equal_each_alone(
    calls: list[tuple[str, dict[str, Any]]], name: str
) -> None:
    """One evaluation serves operations of all names, and changes none of their prices."""
    device = load_device(name)
    record = load_record("collectives", device)
    operations = [Collective(name="x", op_name=op_name, axis="tensor", **sizes) for op_name, sizes in calls]

    together = price_collectives(operations, device, record)

    for operation, found in zip(operations, together, strict=True):
        expected, numbers = asdict(price_collective(operation, device, record)), asdict(found)
        assert numbers.pop("calibration") == expected.pop("calibration")
        assert numbers == pytest.approx(expected, rel=1e-12)
