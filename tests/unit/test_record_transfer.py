"""Transfer of a record's numbers: fixed costs in cycles, clocks, bandwidth and rate fractions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.calibration.transfer import (
    clock_hz_of,
    comparable_clock_hz,
    fixed_cost_scale,
    is_sibling_card,
    sm_rate_scale,
    transfer_bandwidth_fraction,
)
from shapewright.pricing.experts.price import read_lone_row_s_per_byte
from shapewright.pricing.gemm.price import price_gemm
from shapewright.pricing.gemm.section import prepare_gemm_pricing

B200, H100, L40S = (load_device(name) for name in ("b200-sxm-180gb", "h100-sxm-80gb", "l40s"))
CALL = Attention(
    name="x", batch_size=4, query_len=2048, kv_len=2048, num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128
)


def test_fixed_costs_are_cycles() -> None:
    """A donor's start is as many cycles at the device's clock; an own record is unchanged."""
    borrowed = load_record("attention", L40S.with_pricing(uncalibrated=True))
    donor = load_device(borrowed.device)
    short = replace(CALL, query_len=1, kv_len=16)

    assert fixed_cost_scale(L40S, borrowed) == pytest.approx(1.41 / 2.52)
    assert fixed_cost_scale(L40S, load_record("attention", L40S)) == 1.0
    assert price_attention(short, L40S, borrowed).start_s < price_attention(short, donor, borrowed).start_s


def test_a_siblings_kernel_takes_as_many_cycles_beyond_its_traffic() -> None:
    """H200 has H100's SMs and 4.8 / 3.35 of its bandwidth: the time beyond traffic is 1.43 times as much of it."""
    h200 = load_device("h200-sxm-141gb")
    sibling = load_record("moe", h200.with_pricing(uncalibrated=True))
    growth = 4.8 / 3.35

    assert transfer_bandwidth_fraction(0.5, h200, sibling) == pytest.approx(1.0 / (1.0 + growth))
    assert transfer_bandwidth_fraction(1.0, h200, sibling) == 1.0
    assert transfer_bandwidth_fraction(0.5, L40S, load_record("moe", L40S.with_pricing(uncalibrated=True))) == 0.5
    assert transfer_bandwidth_fraction(0.5, h200, load_record("moe", h200)) == 0.5


def test_a_card_of_the_measured_chip_differs_in_memory_alone() -> None:
    """A100 40 GB has 1.555 / 2.039 of the bandwidth of 80 GB, and the same caches and SMs.

    The time beyond traffic is that share of its value at 80 GB, and SMs load as many bytes per clock from caches:
    2.039 / 1.555 relative to memory.
    """
    small, large = load_device("a100-sxm-40gb"), load_device("a100-sxm-80gb")
    record = load_record("gemm", small)
    ratio = 1.555 / 2.039
    pricing = prepare_gemm_pricing("bf16", None, small, record)

    assert record.transfer == "exact"
    assert is_sibling_card(small, record)
    assert not is_sibling_card(large, record)
    assert transfer_bandwidth_fraction(0.5, small, record) == pytest.approx(1.0 / (1.0 + ratio))
    assert transfer_bandwidth_fraction(0.5, large, record) == 0.5
    assert pricing.rates is not None
    assert pricing.rates.feed_scale == pytest.approx(1.0 / ratio)
    assert pricing.source.label == record.id


def test_socket_is_at_least_as_fast_as_a_card() -> None:
    """A100 SXM 40 GB has the data sheet of A100 PCIe 40 GB and more power: no GEMM takes 3 % longer."""
    gemms = Gemm(name="x", m=np.array([1, 64, 128, 2048]), n=np.full(4, 10240), k=np.full(4, 2560), dtype="fp16")
    socket, card = (load_device(name) for name in ("a100-sxm-40gb", "a100-pcie-40gb"))
    times = [price_gemm(gemms, chip, load_record("gemm", chip)).time_s for chip in (socket, card)]

    assert (times[0] <= 1.03 * times[1]).all()


def test_decode_reads_a_larger_share_of_slower_memory() -> None:
    """Attention on A100 40 GB is slower by at most the ratio of bandwidths, and still priced as exact."""
    small, large = (load_device(name) for name in ("a100-sxm-40gb", "a100-sxm-80gb"))
    decode = replace(CALL, query_len=1, kv_len=8192)
    slower, faster = (price_attention(decode, card, load_record("attention", card)) for card in (small, large))

    assert 1.0 < slower.time_s / faster.time_s < 2.039 / 1.555
    assert slower.calibration == faster.calibration


def test_a_missing_clock_follows_from_the_rate() -> None:
    """B300's data sheet has no clock: 2250 TFLOP/s / (148 SMs x 2 x 4096 FLOP) = 1.86 GHz."""
    assert clock_hz_of(load_device("b300-sxm-288gb")) == pytest.approx(1.856e9, rel=1e-3)
    assert clock_hz_of(B200) == B200.boost_clock_hz
    assert clock_hz_of(load_device("h200-nvl-141gb")) is not None


def test_clocks_are_counted_as_on_the_donors_data_sheet() -> None:
    """B300 has B200's rate and units, so its cycles are as short; a clock on the data sheet takes precedence."""
    b300, gb200 = load_device("b300-sxm-288gb"), load_device("gb200")

    assert comparable_clock_hz(b300, B200) == pytest.approx(B200.boost_clock_hz)
    assert fixed_cost_scale(b300, load_record("attention", b300)) == pytest.approx(1.0)
    assert comparable_clock_hz(gb200, B200) == gb200.boost_clock_hz
    assert comparable_clock_hz(replace(gb200, boost_clock_hz=None, num_sms=None), B200) is None


def test_multiprocessors_do_more_by_number_and_by_clock() -> None:
    """Half of H100's SMs have half of its rate, at twice the clock all of it; without numbers bandwidth counts."""
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
    """If either device is not a GPU, costs in seconds are kept, and rates scale with bandwidth."""
    chip, record = load_device(name), replace(load_record("gemm", L40S), transfer="generic")
    ratio = chip.memory_bandwidth_bytes_per_s / L40S.memory_bandwidth_bytes_per_s

    assert fixed_cost_scale(chip, record) == fixed_cost_scale(H100, replace(record, device=name)) == 1.0
    assert sm_rate_scale(chip, record) == pytest.approx(ratio)
    assert fixed_cost_scale(H100, record) == pytest.approx(2.52 / 1.83)
