"""Fused attention: which kernel runs, and what moves its price."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from shapewright.core.errors import CalibrationError, UnknownRateError, WorkloadError
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.pricing.attention.kernels import read_parameters
from shapewright.pricing.attention.prefill import PrefillParameters
from shapewright.pricing.attention.price import price_attention, price_attentions
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.price import Price


def call(**sizes: object) -> Attention:
    """A bf16 call with 32 heads over 8 key-value heads of width 128."""
    defaults: dict[str, object] = {"batch_size": 4, "query_len": 4096, "kv_len": 4096}
    heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "v_head_dim": 128}
    return Attention(name="x", **{**defaults, **heads, **sizes})


def price(name: str, *, library: str = "", kernel: str = "", **sizes: object) -> Price:
    """Price of such a call."""
    device = load_device(name)
    return price_attention(call(**sizes), device, load_record("attention", device), library=library, kernel=kernel)


def test_head_width_is_padded_to_the_next_compiled_width() -> None:
    """A head of 80 pays for 96 on FlashAttention 2."""
    sizes = {"batch_size": 8, "num_heads": 32, "num_kv_heads": 32}
    padded = price("a100-sxm-80gb", head_dim=80, v_head_dim=80, **sizes)
    compiled = price("a100-sxm-80gb", head_dim=96, v_head_dim=96, **sizes)

    assert padded.compute_s == pytest.approx(compiled.compute_s)


def test_narrow_heads_are_slower_per_flop() -> None:
    """At d = 64 the exponentials weigh double: the same FLOPs in twice the heads take longer."""
    wide = price("h100-sxm-80gb", num_heads=16, num_kv_heads=16)
    narrow = price("h100-sxm-80gb", num_heads=32, num_kv_heads=32, head_dim=64, v_head_dim=64)

    assert narrow.compute_s > 1.1 * wide.compute_s


def test_decode_reads_the_cache() -> None:
    """64 sequences of 8192 cached tokens are bound by memory, within a quarter of the bandwidth."""
    found = price("h200-sxm-141gb", batch_size=64, query_len=1, kv_len=8192)

    assert found.roofline_s <= found.time_s <= 1.35 * found.roofline_s


def test_small_cache_elements_save_time() -> None:
    """A long fp8 cache is read faster than a bf16 one."""
    sizes = {"batch_size": 64, "query_len": 1, "kv_len": 16384}

    assert price("h100-sxm-80gb", kv_cache_dtype="fp8", **sizes).time_s < 0.75 * price("h100-sxm-80gb", **sizes).time_s


def test_latents_are_read_once() -> None:
    """Where values are part of the keys (MLA), decode reads the cache once."""
    sizes = {"batch_size": 128, "query_len": 1, "kv_len": 16384, "num_heads": 16, "num_kv_heads": 1}
    separate = price("h100-sxm-80gb", head_dim=576, v_head_dim=512, **sizes)
    shared = price("h100-sxm-80gb", head_dim=576, v_head_dim=512, values_in_keys=True, **sizes)

    assert shared.memory_s < 0.65 * separate.memory_s


def test_few_heads_and_sequences_leave_the_device_idle() -> None:
    """One short sequence decodes at a small part of the bandwidth: latency, not bytes."""
    found = price("h100-sxm-80gb", batch_size=1, query_len=1, kv_len=512)

    assert found.time_s > 10.0 * found.roofline_s


@pytest.mark.parametrize("name", ["v100-sxm2-16gb", "t4"])
def test_no_fused_kernel_before_ampere(name: str) -> None:
    """Volta and Turing are refused, with what to use instead."""
    with pytest.raises(WorkloadError, match="use attention='unfused'"):
        price(name)


def test_dtype_without_a_rate() -> None:
    """A missing data-sheet rate raises the device's own error."""
    with pytest.raises(UnknownRateError, match="has no fp8 rate"):
        price("a100-sxm-80gb", dtype="fp8")


def test_borrowed_record_is_labelled_and_widens() -> None:
    """A sibling's fractions carry a label, and the interval around the same time is wider."""
    device = load_device("h100-sxm-80gb")
    own = load_record("attention", device)
    borrowed = load_record("attention", device.with_pricing(uncalibrated=True))
    near = price_attention(call(), device, own)
    far = price_attention(call(), device, replace(own, transfer="architecture"))

    assert near.calibration.label == own.id
    assert price_attention(call(), device, borrowed).calibration.label == f"uncalibrated (borrows {borrowed.id})"
    assert far.time_s == near.time_s
    assert far.low_s < near.low_s
    assert far.high_s > near.high_s


def test_far_borrowed_decode_widens_more_than_prefill() -> None:
    """Another architecture's record is less certain about decode than about prefill; a sibling's equally for both."""
    device = load_device("a100-sxm-80gb")
    own = load_record("attention", device)

    def width(transfer: str, **sizes: object) -> float:
        found = price_attention(call(**sizes), device, replace(own, transfer=transfer))
        return float(np.log(found.high_s / found.time_s))

    far, near = (width(kind, query_len=1) / width(kind) for kind in ("generic", "architecture"))
    assert far > 1.2 * near


def test_more_bandwidth_per_sm_is_drawn_with_a_borrowed_record() -> None:
    """B200 has twice the bandwidth per SM of H100: with its record, decode draws more than a Hopper SM could."""
    device = load_device("b200-sxm-180gb")
    borrowed = load_record("attention", device.with_pricing(uncalibrated=True))
    sizes = {"batch_size": 32, "query_len": 1, "kv_len": 65536}
    found = price_attention(call(**sizes), device, borrowed)
    same_family = price_attention(call(**sizes), device, replace(borrowed, transfer="architecture"))

    assert borrowed.transfer == "generic"
    assert found.time_s < same_family.time_s


def test_devices_without_tiles_get_their_roofline() -> None:
    """A TPU's price is its bound and is labelled so."""
    found = price("tpu-v5p")

    assert found.time_s == found.roofline_s
    assert found.calibration.is_roofline_bound


def test_library_picks_its_kernels() -> None:
    """Sglang's triton kernel at head width 64 is slower on L40S than FlashAttention 2, which prices models."""
    sizes = {"head_dim": 64, "v_head_dim": 64}

    assert price("l40s", library="sglang 0.5.14", **sizes).time_s > 1.2 * price("l40s", **sizes).time_s


def test_unknown_library_is_priced_as_models_are() -> None:
    """A library that no table holds gets the default kernels, and a wider interval: its own may be others."""
    unmeasured, usual = price("l40s", library="someone 1.0"), price("l40s")

    assert unmeasured.time_s == usual.time_s
    assert unmeasured.high_s / unmeasured.low_s > 1.2 * usual.high_s / usual.low_s
    assert price("l40s", library="vllm 0.24.0") == usual


def test_kernel_picks_among_those_of_one_width() -> None:
    """On B200 sglang has both triton and trtllm at head width 256; the slower one is used only on request."""
    sizes = {"head_dim": 256, "v_head_dim": 256, "library": "sglang 0.5.14"}
    usual = price("b200-sxm-180gb", **sizes)

    assert price("b200-sxm-180gb", kernel="trtllm_mha", **sizes) == usual
    assert price("b200-sxm-180gb", kernel="triton", **sizes).time_s > 1.3 * usual.time_s


def test_one_query_head_per_group_runs_another_decode_kernel() -> None:
    """Flashinfer decodes small groups without tensor cores: three heads cost less than one alone, or than four."""
    sizes = {"batch_size": 1024, "query_len": 1, "kv_len": 2, "library": "sglang 0.5.14", "num_kv_heads": 4}
    one, three, four = (price("l40s", num_heads=4 * group, **sizes).time_s for group in (1, 3, 4))

    assert three < one
    assert three < 0.7 * four


def test_incomplete_record_is_named() -> None:
    """A missing constant raises an error that names the record and the constant."""
    with pytest.raises(CalibrationError, match=r"attention record broken lacks start_s, query_tile"):
        read_parameters(PrefillParameters, {}, "broken")


@pytest.mark.parametrize("device_name", ["a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb", "l40s"])
@pytest.mark.parametrize("query_len", [1, 4096])
def test_a_head_between_compiled_widths_takes_the_work_of_the_next(device_name: str, query_len: int) -> None:
    """A head of 72 computes as long as one of 96: only what memory moves can be less."""
    device = load_device(device_name)
    record = load_record("attention", device)
    narrow, wide = (
        price_attention(
            Attention(
                name="attention",
                batch_size=16,
                query_len=query_len,
                kv_len=4096,
                num_heads=32,
                num_kv_heads=8,
                head_dim=head_dim,
                v_head_dim=head_dim,
            ),
            device,
            record,
        )
        for head_dim in (72, 96)
    )
    assert narrow.compute_s == pytest.approx(wide.compute_s, rel=0.01)
    assert narrow.time_s <= wide.time_s


@pytest.mark.parametrize("name", ["h100-sxm-80gb", "l40s", "mi300x", "rtx-4090"])
def test_batched_pricing_equals_single_pricing(name: str) -> None:
    """Passes, directions, windows and widths priced together equal their separate prices, in the given order."""
    calls = [
        call(),
        call(is_backward=True),
        call(query_len=1),
        call(window_size=128),
        call(head_dim=192, v_head_dim=128, num_kv_heads=32),
        call(causal=False, query_len=1, kv_len=512),
        call(kv_cache_dtype="fp8", query_len=1),
        call(batch_size=1, query_len=512, kv_len=512, is_backward=True, window_size=100),
    ]
    device = load_device(name)
    record = load_record("attention", device)

    together = price_attentions(calls, device, record)

    for one, found in zip(calls, together, strict=True):
        alone = price_attention(one, device, record)
        numbers, expected = asdict(found), asdict(alone)
        assert numbers.pop("calibration") == expected.pop("calibration")
        assert numbers == pytest.approx(expected, rel=1e-12)


def test_direction_may_differ_from_call_to_call() -> None:
    """Forward and backward calls in one operation of arrays: FLOPs and bytes double, five GEMMs instead of two."""
    both = call(is_backward=np.array([False, True]))

    assert both.flops[1] == 2.0 * both.flops[0]
    assert both.num_bytes[1] == 2.0 * both.num_bytes[0]
    assert both.executed_flops[1] == 2.5 * both.executed_flops[0]


def test_an_assumed_backward_pass_is_less_certain_than_the_forward_pass() -> None:
    """A100's backward pass was not measured: its interval is 1.3 wide to each side, whatever the forward pass has."""
    device = load_device("a100-sxm-80gb")
    sizes = {"batch_size": 2, "query_len": 8192, "kv_len": 8192, "num_heads": 32, "num_kv_heads": 8}
    forward = call(head_dim=128, v_head_dim=128, is_training=True, **sizes)
    price = price_attention(forward, device, load_record("attention", device))
    assumed = price_attention(forward.changed(is_backward=True), device, load_record("attention", device))

    assert 0.9 < price.low_s / price.time_s < price.high_s / price.time_s < 1.1
    assert assumed.low_s / assumed.time_s == pytest.approx(1.0 / 1.3, abs=0.01)
    assert assumed.high_s / assumed.time_s == pytest.approx(1.3, abs=0.01)
