"""Attention in 8 bits where only 16-bit kernels were measured: the ratios that other families' kernels show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapewright.hardware import Device, load_device
from shapewright.operations import Attention
from shapewright.perf.attention import price_attention
from shapewright.perf.attention_formats import mean_ratios, narrow_kernel
from shapewright.perf.attention_sections import choose_section, read_kernel
from shapewright.perf.calibration import list_records, load_record

LONG = Attention(
    name="x", dtype="fp8", kv_cache_dtype="fp8", batch_size=4, query_len=8192, kv_len=8192,
    num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128,
)  # fmt: skip


def ratio(device: str, kernel: str, library: str, field: str) -> float:
    """A kernel's constant in fp8 over the same library's in 16 bits, as the record of a device has them."""
    (record,) = [record for record in list_records("attention") if record.device == device]
    narrow = record.parameters["sections"]["fp8"]["kernels"][kernel]["prefill"]
    wide = record.parameters["libraries"][library]["16bit"]["kernels"][kernel]["prefill"]
    found = [
        entry[field] if field != "tensor_fraction" else next(iter(entry[field].values())) for entry in (narrow, wide)
    ]
    return float(found[0] / found[1])


def test_families_have_one_vote_each() -> None:
    """Without Hopper's and L40S's devices only B200's six kernels speak; with all, the means of three families do."""
    kernels = ("triton_192", "triton_256", "trtllm_64", "trtllm_128", "trtllm_256", "trtllm_512")
    logs = {
        field: np.mean([np.log(ratio("b200-sxm-180gb", kernel, "sglang 0.5.14", field)) for kernel in kernels])
        for field in ("tensor_fraction", "exponentials_per_sm_per_clock")
    }
    everyone, without_b200 = mean_ratios("nobody"), mean_ratios("b200-sxm-180gb")

    for ours, others, own in zip(everyone, without_b200, logs.values(), strict=True):
        assert np.log(ours) == pytest.approx((2.0 * np.log(others) + own) / 3.0)


def test_eight_bits_reach_less_of_twice_the_rate() -> None:
    """Every family casts scores: shares of the peak and exponentials both fall, to no less than half."""
    for left_out in ("nobody", "l40s", "b200-sxm-180gb"):
        assert all(0.5 < value < 0.9 for value in mean_ratios(left_out))


def test_only_kernels_without_their_format_are_carried() -> None:
    """H100's own fp8 section stays; A100's 16-bit kernel, standing in for fp8 on MI300X, takes both ratios."""
    h100, mi300x = load_device("h100-sxm-80gb"), load_device("mi300x")
    own = choose_section("fp8", 8, load_record("attention", h100), "")
    lent = choose_section("fp8", 8, load_record("attention", mi300x), "")
    kernel = lent.content["usual_kernel"]
    wide = read_kernel(lent, kernel)[0]

    assert narrow_kernel(wide, own) is wide
    assert narrow_kernel(wide, choose_section("bf16", 16, load_record("attention", mi300x), "")) is wide
    narrow, ratios = narrow_kernel(wide, lent), mean_ratios("mi300x")
    assert narrow.exponentials_per_sm_per_clock == pytest.approx(
        wide.exponentials_per_sm_per_clock * ratios.exponentials
    )
    assert narrow.tensor_fraction["128"] == pytest.approx(wide.tensor_fraction["128"] * ratios.tensor_share)


@pytest.mark.parametrize("name", ["mi300x", "l40s"])
def test_eight_bits_gain_less_than_the_rate(name: str) -> None:
    """A long prompt in fp8 on a device that borrows A100's kernels is faster than in bf16, and not twice as fast."""
    device: Device = load_device(name)
    record = load_record("attention", device, uncalibrated=True)
    wide = replace(LONG, dtype="bf16", kv_cache_dtype="bf16")
    narrow_s, wide_s = (price_attention(call, device, record).time_s for call in (LONG, wide))

    assert record.device == "a100-sxm-80gb"
    assert 1.0 < wide_s / narrow_s < 1.8
