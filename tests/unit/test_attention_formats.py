"""8-bit attention where only 16-bit kernels were measured: mean ratios over architectures."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.attention.sections import choose_section, read_kernel
from shapewright.pricing.attention.transfer import mean_fp8_ratios, to_fp8_kernel
from shapewright.pricing.calibration.records import list_records, load_record

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


def test_architectures_are_weighted_equally() -> None:
    """Without Hopper and L40S only B200's six kernels count; with all, the means of three architectures."""
    kernels = ("triton_192", "triton_256", "trtllm_64", "trtllm_128", "trtllm_256", "trtllm_512")
    logs = {
        field: np.mean([np.log(ratio("b200-sxm-180gb", kernel, "sglang 0.5.14", field)) for kernel in kernels])
        for field in ("tensor_fraction", "exponentials_per_sm_per_clock")
    }
    everyone, without_b200 = mean_fp8_ratios("nobody"), mean_fp8_ratios("b200-sxm-180gb")

    for ours, others, own in zip(everyone, without_b200, logs.values(), strict=True):
        assert np.log(ours) == pytest.approx((2.0 * np.log(others) + own) / 3.0)


def test_eight_bits_reach_less_of_twice_the_rate() -> None:
    """In every architecture the fractions of peak and exponentials both drop, to at least half."""
    for left_out in ("nobody", "l40s", "b200-sxm-180gb"):
        assert all(0.5 < value < 0.9 for value in mean_fp8_ratios(left_out))


def test_only_kernels_without_their_format_are_carried() -> None:
    """H100's own fp8 section is unchanged; A100's 16-bit kernel, standing in for fp8 on MI300X, takes both ratios."""
    h100, mi300x = load_device("h100-sxm-80gb"), load_device("mi300x")
    own = choose_section("fp8", 8, load_record("attention", h100), "")
    borrowed = choose_section("fp8", 8, load_record("attention", mi300x), "")
    kernel = borrowed.content["usual_kernel"]
    wide = read_kernel(borrowed, kernel)[0]

    assert to_fp8_kernel(wide, own) is wide
    assert to_fp8_kernel(wide, choose_section("bf16", 16, load_record("attention", mi300x), "")) is wide
    narrow, ratios = to_fp8_kernel(wide, borrowed), mean_fp8_ratios("mi300x")
    assert narrow.exponentials_per_sm_per_clock == pytest.approx(
        wide.exponentials_per_sm_per_clock * ratios.exponentials
    )
    assert narrow.tensor_fraction["128"] == pytest.approx(wide.tensor_fraction["128"] * ratios.tensor_share)


@pytest.mark.parametrize("name", ["mi300x", "l40s"])
def test_eight_bits_gain_less_than_the_rate(name: str) -> None:
    """A long prompt in fp8 on a device that borrows A100's kernels is faster than in bf16, and not twice as fast."""
    device: Device = load_device(name)
    record = load_record("attention", device.with_pricing(uncalibrated=True))
    wide = replace(LONG, dtype="bf16", kv_cache_dtype="bf16")
    narrow_s, wide_s = (price_attention(call, device, record).time_s for call in (LONG, wide))

    assert record.device == "a100-sxm-80gb"
    assert 1.0 < wide_s / narrow_s < 1.8
