"""What carries over from a lender's record: cycles, and what they are in seconds beside the lender's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shapewright.hardware import load_device
from shapewright.operations import Attention, Gemm
from shapewright.perf.attention import price_attention
from shapewright.perf.calibration import load_record
from shapewright.perf.experts import read_lone_row_s_per_byte
from shapewright.perf.gemm import price_gemm
from shapewright.perf.gemm_job import make_gemm_job
from shapewright.perf.lending import (
    clock_beside_hz,
    clock_hz_of,
    fixed_cost_scale,
    is_other_card,
    sibling_bandwidth_share,
    sm_rate_scale,
)

B200, H100, L40S = (load_device(name) for name in ("b200-sxm-180gb", "h100-sxm-80gb", "l40s"))
CALL = Attention(
    name="x", batch_size=4, query_len=2048, kv_len=2048, num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128
)


def test_fixed_costs_are_cycles() -> None:
    """A lender's start takes the lender's cycles at the device's clock; a device's own stays as it is."""
    borrowed = load_record("attention", L40S, uncalibrated=True)
    lender = load_device(borrowed.device)
    short = replace(CALL, query_len=1, kv_len=16)

    assert fixed_cost_scale(L40S, borrowed) == pytest.approx(1.41 / 2.52)
    assert fixed_cost_scale(L40S, load_record("attention", L40S)) == 1.0
    assert price_attention(short, L40S, borrowed).start_s < price_attention(short, lender, borrowed).start_s


def test_a_siblings_kernel_takes_as_many_cycles_beyond_its_traffic() -> None:
    """H200 has H100's SMs and 4.8 / 3.35 of its memory: beyond traffic a kernel takes 1.43 as much of it."""
    h200 = load_device("h200-sxm-141gb")
    sibling = load_record("moe", h200, uncalibrated=True)
    growth = 4.8 / 3.35

    assert sibling_bandwidth_share(0.5, h200, sibling) == pytest.approx(1.0 / (1.0 + growth))
    assert sibling_bandwidth_share(1.0, h200, sibling) == 1.0
    assert sibling_bandwidth_share(0.5, L40S, load_record("moe", L40S, uncalibrated=True)) == 0.5
    assert sibling_bandwidth_share(0.5, h200, load_record("moe", h200)) == 0.5


def test_a_card_of_the_measured_chip_differs_in_memory_alone() -> None:
    """A100 of 40 GB has 1.555 / 2.039 of the bandwidth of 80 GB, and the same caches and multiprocessors.

    Beyond its traffic a kernel takes that share of what it takes at 80 GB, and SMs draw as many bytes a clock from
    caches: 2.039 / 1.555 of what memory gives there.
    """
    small, large = load_device("a100-sxm-40gb"), load_device("a100-sxm-80gb")
    record = load_record("gemm", small)
    ratio = 1.555 / 2.039
    job = make_gemm_job("bf16", None, small, record)

    assert record.transfer == "exact"
    assert is_other_card(small, record)
    assert not is_other_card(large, record)
    assert sibling_bandwidth_share(0.5, small, record) == pytest.approx(1.0 / (1.0 + ratio))
    assert sibling_bandwidth_share(0.5, large, record) == 0.5
    assert job.rates is not None
    assert job.rates.feed_scale == pytest.approx(1.0 / ratio)
    assert job.label == record.id


def test_a_socket_is_no_slower_than_a_card() -> None:
    """A100 SXM 40 GB has the sheet of A100 PCIe 40 GB and more power: no product takes 3 % longer."""
    products = Gemm(name="x", m=np.array([1, 64, 128, 2048]), n=np.full(4, 10240), k=np.full(4, 2560), dtype="fp16")
    socket, card = (load_device(name) for name in ("a100-sxm-40gb", "a100-pcie-40gb"))
    times = [price_gemm(products, chip, load_record("gemm", chip)).time_s for chip in (socket, card)]

    assert (times[0] <= 1.03 * times[1]).all()


def test_decode_reads_a_larger_share_of_slower_memory() -> None:
    """Attention of A100's 40 GB takes at most as many times longer as its memory is slower, and is still its own."""
    small, large = (load_device(name) for name in ("a100-sxm-40gb", "a100-sxm-80gb"))
    decode = replace(CALL, query_len=1, kv_len=8192)
    slower, faster = (price_attention(decode, card, load_record("attention", card)) for card in (small, large))

    assert 1.0 < slower.time_s / faster.time_s < 2.039 / 1.555
    assert slower.calibration == faster.calibration


def test_a_silent_sheet_has_the_clock_of_its_rate() -> None:
    """B300's sheet gives no clock: 2250 TFLOP/s / (148 SMs x 2 x 4096 FLOP) = 1.86 GHz; one that gives it keeps it."""
    assert clock_hz_of(load_device("b300-sxm-288gb")) == pytest.approx(1.856e9, rel=1e-3)
    assert clock_hz_of(B200) == B200.boost_clock_hz
    assert clock_hz_of(load_device("h200-nvl-141gb")) is not None


def test_clocks_are_counted_as_the_lenders_sheet_counts() -> None:
    """B300 has B200's rate and units, so its cycles are as short; a sheet with a clock is believed."""
    b300, gb200 = load_device("b300-sxm-288gb"), load_device("gb200")

    assert clock_beside_hz(b300, B200) == pytest.approx(B200.boost_clock_hz)
    assert fixed_cost_scale(b300, load_record("attention", b300)) == pytest.approx(1.0)
    assert clock_beside_hz(gb200, B200) == gb200.boost_clock_hz
    assert clock_beside_hz(replace(gb200, boost_clock_hz=None, num_sms=None), B200) is None


def test_multiprocessors_do_more_by_number_and_by_clock() -> None:
    """Half of H100's SMs do half of its cycles, at twice its clock all of them; a silent sheet goes by its memory."""
    record = replace(load_record("moe", H100), transfer="architecture")
    fields: dict[str, Any] = {"dense_flops_per_s": {}, "boost_clock_hz": H100.boost_clock_hz}
    half = replace(H100, num_sms=66, **fields)
    assert sm_rate_scale(half, record) == pytest.approx(0.5)
    assert sm_rate_scale(replace(half, boost_clock_hz=2.0 * (H100.boost_clock_hz or 0.0)), record) == pytest.approx(1.0)
    silent = replace(H100, num_sms=None, memory_bandwidth_bytes_per_s=H100.memory_bandwidth_bytes_per_s * 3.0)
    assert sm_rate_scale(silent, record) == pytest.approx(3.0)
    assert sm_rate_scale(half, load_record("moe", H100)) == 1.0
    # What is bound by them takes twice as long on half of them.
    assert read_lone_row_s_per_byte(record, half, "bf16") == 2.0 * read_lone_row_s_per_byte(record, H100, "bf16") > 0.0


@pytest.mark.parametrize("name", ["tpu-v5p", "gaudi3", "tpu-v7"])
def test_chips_without_multiprocessors_have_no_cycles_to_compare(name: str) -> None:
    """Costs in seconds stay as they are, whichever side is no GPU, and work goes by bandwidth."""
    chip, record = load_device(name), replace(load_record("gemm", L40S), transfer="generic")
    ratio = chip.memory_bandwidth_bytes_per_s / L40S.memory_bandwidth_bytes_per_s

    assert fixed_cost_scale(chip, record) == fixed_cost_scale(H100, replace(record, device=name)) == 1.0
    assert sm_rate_scale(chip, record) == pytest.approx(ratio)
    assert fixed_cost_scale(H100, record) == pytest.approx(2.52 / 1.83)
