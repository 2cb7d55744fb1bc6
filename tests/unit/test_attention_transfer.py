"""Attention on unmeasured devices: clocks, caches, and decode kernels of another donor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.attention.sections import choose_section
from shapewright.pricing.attention.transfer import decode_section
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.calibration.transfer import attention_clock_ratio

B200, H100, L40S = (load_device(name) for name in ("b200-sxm-180gb", "h100-sxm-80gb", "l40s"))
CALL = Attention(
    name="x", batch_size=4, query_len=2048, kv_len=2048, num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128
)


def prefill_share(name: str, device: Device) -> float:
    """Fraction of a device's peak that a long prefill reaches with a donor's record."""
    record = load_record("attention", load_device(name))
    borrowed = replace(record, transfer="architecture", recipient=device.name, residual=None)
    price = price_attention(replace(CALL, query_len=16384, kv_len=16384), device, borrowed)
    return price.roofline_s / price.time_s


def test_softmax_share_falls_under_a_power_limit() -> None:
    """H20's prefill comes nearer to its peak than H100's, as its multiplications take four times the cycles."""
    h20 = load_device("h20-96gb")
    slower = replace(H100, dense_flops_per_s={"fp16": 232e12, "bf16": 232e12})

    assert prefill_share("h100-sxm-80gb", h20) > 1.25 * prefill_share("h100-sxm-80gb", H100)
    assert prefill_share("h100-sxm-80gb", slower) > 1.25 * prefill_share("h100-sxm-80gb", H100)


def test_attention_loses_the_root_of_the_gemm_loss() -> None:
    """L40S with an eighth of the watts multiplies at half of the clock, and attends at 0.707 of it."""
    record = replace(load_record("attention", L40S), transfer="architecture")
    lost = load_record("gemm", L40S).parameters["dtypes"]["bf16"]["power_drop_fraction"]

    assert L40S.tdp_watts is not None
    for watts, clock in ((L40S.tdp_watts / 8.0, 0.5), (L40S.tdp_watts * 8.0, 1.0 / (1.0 - lost))):
        assert attention_clock_ratio(replace(L40S, tdp_watts=watts), record) == pytest.approx(clock**0.5)
    assert attention_clock_ratio(L40S, load_record("attention", L40S)) == 1.0
    # Another family's kernels lose, and win nothing back.
    borrowed = load_record("attention", load_device("a100-sxm-80gb").with_pricing(uncalibrated=True))
    assert attention_clock_ratio(load_device("a100-sxm-80gb"), borrowed) == 1.0
    assert attention_clock_ratio(B200, load_record("attention", B200.with_pricing(uncalibrated=True))) < 0.95


def test_keys_reach_farther_in_a_cache_of_one_piece() -> None:
    """L40S without its record finds keys of 0.6 of its cache there again; cut in two, as A100's is, it does not."""
    borrowed = load_record("attention", L40S.with_pricing(uncalibrated=True))
    assert L40S.l2_bytes is not None
    keys = round(0.6 * L40S.l2_bytes / (16 * 8 * 2 * 128 * 2))
    call = replace(CALL, batch_size=16, query_len=1, kv_len=keys)
    whole, split = (
        price_attention(call, device, borrowed, hot_cache=True, library="sglang 0.5.14", kernel="flashinfer").time_s
        for device in (L40S, replace(L40S, compute_capability="8.0"))
    )

    assert whole < 0.7 * split


def test_decode_kernel_missing_at_the_donor_comes_from_the_nearest_generation() -> None:
    """An uncalibrated L40S borrows from A100, which lacks flashinfer, so Hopper's decode kernel is used."""
    record = load_record("attention", L40S.with_pricing(uncalibrated=True))
    packed, flash = (choose_section("bf16", 16, record, "sglang 0.5.14", kernel) for kernel in ("flashinfer", "fa2"))
    borrowed = decode_section(packed, "sglang 0.5.14", "flashinfer", L40S)

    assert record.architecture == "ampere"
    assert borrowed is not None
    assert (borrowed.record.architecture, borrowed.record.recipient, borrowed.record.distance) == (
        "hopper",
        "l40s",
        "generic",
    )
    assert decode_section(flash, "vllm 0.24.0", "fa2", L40S) is None
    assert decode_section(packed, "", "", L40S) is None


def test_a_device_of_no_generation_counts_as_one_of_its_donor() -> None:
    """A device of an unknown architecture that borrows from A100 keeps Ampere's decode kernels, unlike an L40S."""
    record = load_record("attention", L40S.with_pricing(uncalibrated=True))
    packed = choose_section("bf16", 16, record, "sglang 0.5.14", "flashinfer")
    unknown = replace(L40S, architecture="other")

    assert record.architecture == "ampere"
    assert unknown.architecture_facts.generation is None
    assert decode_section(packed, "sglang 0.5.14", "flashinfer", unknown) is None
    assert decode_section(packed, "sglang 0.5.14", "flashinfer", L40S) is not None


def test_prefill_stays_with_the_donor() -> None:
    """Which decode kernel runs changes decode steps alone, in calls of both kinds too."""
    record = load_record("attention", L40S.with_pricing(uncalibrated=True))
    both = replace(CALL, query_len=np.array([1, 2048]), kv_len=np.array([2048, 2048]))
    packed, flash = (price_attention(both, L40S, record, library="sglang 0.5.14", kernel=k) for k in ("flashinfer", ""))

    assert packed.calibration.label == f"{flash.calibration}, decode of attention/h100-sxm-80gb/2026-11-21"
    assert packed.time_s[1] == flash.time_s[1]
    assert packed.time_s[0] != flash.time_s[0]


def test_a_family_with_the_kernel_keeps_its_decode() -> None:
    """Own records, siblings, and donors that have the kernel price decode themselves."""
    for device, uncalibrated in ((L40S, False), (load_device("l4"), False), (load_device("rtx-pro-6000"), False)):
        record = load_record("attention", device.with_pricing(uncalibrated=uncalibrated))
        section = choose_section("bf16", 16, record, "sglang 0.5.14", "flashinfer")

        assert decode_section(section, "sglang 0.5.14", "flashinfer", device) is None
