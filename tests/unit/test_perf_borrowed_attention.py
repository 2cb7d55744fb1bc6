"""Attention on a device that nobody measured: clocks, caches, and decode of another lender."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapewright.hardware import Device, load_device
from shapewright.operations import Attention
from shapewright.perf.attention import price_attention
from shapewright.perf.attention_sections import choose_section
from shapewright.perf.attention_transfer import decode_section
from shapewright.perf.calibration import load_record
from shapewright.perf.power import borrowed_attention_clock

B200, H100, L40S = (load_device(name) for name in ("b200-sxm-180gb", "h100-sxm-80gb", "l40s"))
CALL = Attention(
    name="x", batch_size=4, query_len=2048, kv_len=2048, num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128
)


def prefill_share(name: str, device: Device) -> float:
    """Share of a device's peak that a long prefill reaches with a lender's record."""
    record = load_record("attention", load_device(name))
    lent = replace(record, transfer="architecture", borrower=device.name, residual=None)
    price = price_attention(replace(CALL, query_len=16384, kv_len=16384), device, lent)
    return price.roofline_s / price.time_s


def test_softmax_weighs_less_beside_throttled_multipliers() -> None:
    """H20's prefill comes nearer to its peak than H100's, as its multiplications take four times the cycles."""
    h20 = load_device("h20-96gb")
    slower = replace(H100, dense_flops_per_s={"fp16": 232e12, "bf16": 232e12})

    assert prefill_share("h100-sxm-80gb", h20) > 1.25 * prefill_share("h100-sxm-80gb", H100)
    assert prefill_share("h100-sxm-80gb", slower) > 1.25 * prefill_share("h100-sxm-80gb", H100)


def test_attention_loses_the_root_of_what_products_lose() -> None:
    """L40S with an eighth of the watts multiplies at half of the clock, and attends at 0.707 of it."""
    record = replace(load_record("attention", L40S), transfer="architecture")
    lost = load_record("gemm", L40S).parameters["dtypes"]["bf16"]["power_drop_fraction"]

    assert L40S.tdp_watts is not None
    for watts, clock in ((L40S.tdp_watts / 8.0, 0.5), (L40S.tdp_watts * 8.0, 1.0 / (1.0 - lost))):
        assert borrowed_attention_clock(replace(L40S, tdp_watts=watts), record) == pytest.approx(clock**0.5)
    assert borrowed_attention_clock(L40S, load_record("attention", L40S)) == 1.0
    # Another family's kernels lose, and win nothing back.
    lent = load_record("attention", load_device("a100-sxm-80gb"), uncalibrated=True)
    assert borrowed_attention_clock(load_device("a100-sxm-80gb"), lent) == 1.0
    assert borrowed_attention_clock(B200, load_record("attention", B200, uncalibrated=True)) < 0.95


def test_keys_reach_farther_in_a_cache_of_one_piece() -> None:
    """L40S without its record finds keys of 0.6 of its cache there again; cut in two, as A100's is, it does not."""
    lent = load_record("attention", L40S, uncalibrated=True)
    assert L40S.l2_bytes is not None
    keys = round(0.6 * L40S.l2_bytes / (16 * 8 * 2 * 128 * 2))
    call = replace(CALL, batch_size=16, query_len=1, kv_len=keys)
    whole, split = (
        price_attention(call, device, lent, hot_cache=True, library="sglang 0.5.14", kernel="flashinfer").time_s
        for device in (L40S, replace(L40S, compute_capability="8.0"))
    )

    assert whole < 0.7 * split


def test_decode_of_a_kernel_that_the_lender_lacks_comes_from_the_nearest_generation() -> None:
    """L40S without its record: A100 lends, which has no flashinfer, and Hopper's decode stands for it."""
    record = load_record("attention", L40S, uncalibrated=True)
    packed, flash = (choose_section("bf16", 16, record, "sglang 0.5.14", kernel) for kernel in ("flashinfer", "fa2"))
    lent = decode_section(packed, "sglang 0.5.14", "flashinfer", L40S)

    assert record.architecture == "ampere"
    assert lent is not None
    assert (lent.record.architecture, lent.record.borrower, lent.record.distance) == ("hopper", "l40s", "generic")
    assert decode_section(flash, "vllm 0.24.0", "fa2", L40S) is None
    assert decode_section(packed, "", "", L40S) is None


def test_prefill_stays_with_the_lender() -> None:
    """Which decode kernel runs changes decode steps alone, in calls of both kinds too."""
    record = load_record("attention", L40S, uncalibrated=True)
    both = replace(CALL, query_len=np.array([1, 2048]), kv_len=np.array([2048, 2048]))
    packed, flash = (price_attention(both, L40S, record, library="sglang 0.5.14", kernel=k) for k in ("flashinfer", ""))

    assert packed.calibration == f"{flash.calibration}, decode of attention/h100-sxm-80gb/2026-11-21"
    assert packed.time_s[1] == flash.time_s[1]
    assert packed.time_s[0] != flash.time_s[0]


def test_a_family_with_the_kernel_keeps_its_decode() -> None:
    """Own records, siblings, and lenders that have the kernel are asked as before."""
    for device, uncalibrated in ((L40S, False), (load_device("l4"), False), (load_device("rtx-pro-6000"), False)):
        record = load_record("attention", device, uncalibrated=uncalibrated)
        section = choose_section("bf16", 16, record, "sglang 0.5.14", "flashinfer")

        assert decode_section(section, "sglang 0.5.14", "flashinfer", device) is None
