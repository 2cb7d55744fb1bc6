"""Transfer rules of GEMM records to unmeasured devices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.gemm import Gemm
from shapewright.pricing.calibration.records import CalibrationRecord, list_records, load_record
from shapewright.pricing.calibration.transfer import (
    format_rate_error,
    sm_rate_scale,
    sustained_clock_ratio,
    transfer_rate_fraction,
)
from shapewright.pricing.gemm.parameters import GemmParameters, read_parameters
from shapewright.pricing.gemm.price import price_gemm
from shapewright.pricing.gemm.section import prepare_gemm_pricing
from shapewright.pricing.gemm.transfer import transfer_feed_scale, transfer_parameters


def adapted(
    device: Device, donor: str, dtype: str, section: str = "bf16", transfer: str = "generic"
) -> tuple[GemmParameters, GemmParameters]:
    """A donor's own parameters, and those transferred to the device."""
    record = replace(load_record("gemm", load_device(donor)), transfer=transfer)
    raw = record.parameters["dtypes"]
    own = read_parameters(raw[section])
    return own, transfer_parameters(own, raw, device, record, dtype)


def test_a_start_is_a_number_of_cycles() -> None:
    """A100 at 1.41 GHz as donor of L40S at 2.52 GHz: its start takes 1.41 / 2.52 of the time."""
    own, borrowed = adapted(load_device("l40s"), "a100-sxm-80gb", "bf16")

    assert borrowed.start_s == pytest.approx(own.start_s * 1.41 / 2.52)
    assert borrowed.split_start_s == pytest.approx(own.split_start_s * 1.41 / 2.52)


def test_a_cast_starts_as_slowly_elsewhere() -> None:
    """Only the 16-bit part of an 8-bit GEMM's start is cycles; the cast kernel before it waits for memory."""
    record = load_record("gemm", load_device("h100-sxm-80gb"))
    bf16_s = record.parameters["dtypes"]["bf16"]["start_s"]
    own, borrowed = adapted(load_device("b200-sxm-180gb"), "h100-sxm-80gb", "fp8", "fp8")

    assert borrowed.start_s == pytest.approx(own.start_s - bf16_s + bf16_s * 1.83 / 1.965)
    assert borrowed.cast_row_s == pytest.approx(own.cast_row_s * (1.83 * 132) / (1.965 * 148))


def test_power_limit_lowers_the_clock_by_the_cube_root() -> None:
    """An eighth of the watts at the same chip holds half of the clock, eight times as many would hold twice of it."""
    donor = load_device("h100-sxm-80gb")
    assert donor.tdp_watts is not None

    assert sustained_clock_ratio(replace(donor, tdp_watts=donor.tdp_watts / 8.0), donor) == pytest.approx(0.5)
    assert sustained_clock_ratio(replace(donor, tdp_watts=donor.tdp_watts * 8.0), donor) == pytest.approx(2.0)
    assert sustained_clock_ratio(replace(donor, tdp_watts=None), donor) == 1.0


@pytest.mark.parametrize("name", ["h20-96gb", "h200-nvl-141gb", "l40", "gb300"])
def test_a_data_sheet_may_have_either_16_bit_format(name: str) -> None:
    """bf16 is as fast as fp16 on each: clock, power and alignment follow from bf16 alone as from both."""
    device = load_device(name)
    rates = device.dense_flops_per_s
    alone = replace(device, dense_flops_per_s={key: rate for key, rate in rates.items() if key != "fp16"})
    record = load_record("gemm", device)
    gemm = Gemm(name="x", dtype="bf16", m=4096, n=4100, k=4096)

    assert rates["fp16"] == rates["bf16"]
    assert price_gemm(gemm, alone, record).time_s == price_gemm(gemm, device, record).time_s
    assert sustained_clock_ratio(alone, device) == 1.0
    assert format_rate_error(alone, record, "fp4") == format_rate_error(device, record, "fp4")


def test_a_weaker_board_with_one_16_bit_format_is_slower() -> None:
    """H100 96 GB: 500 of 700 W hold (5/7)^(1/3) of the clock, and its SMs are as many and as fast as H100's."""
    device = load_device("h100-sxm-96gb")
    donor = load_device("h100-sxm-80gb")

    assert sustained_clock_ratio(device, donor) == pytest.approx((500 / 700) ** (1 / 3), rel=1e-3)
    assert sm_rate_scale(device, load_record("gemm", device)) == pytest.approx(1.0, rel=1e-3)


def test_power_share_of_l40s_by_hand() -> None:
    """W per TFLOP/s: 350 / 362 against 400 / 312; over the squared clocks of these rates and 0.7 of the energy."""
    clocks = 362e12 / (142 * 1024), 312e12 / (108 * 2048)
    by_hand = ((350 / 362) / (clocks[0] ** 2 * 0.7) / ((400 / 312) / clocks[1] ** 2)) ** (1 / 3)

    assert sustained_clock_ratio(load_device("l40s"), load_device("a100-sxm-80gb")) == pytest.approx(by_hand, rel=1e-3)


def test_power_share_of_a40_by_hand() -> None:
    """W per TFLOP/s: 300 / 149.7 against 350 / 362; over the squared clocks, 1.35 of N7's energy against 0.7."""
    clocks = 149.7e12 / (84 * 1024), 362e12 / (142 * 1024)
    by_hand = ((300 / 149.7) / (clocks[0] ** 2 * 1.35) / ((350 / 362) / (clocks[1] ** 2 * 0.7))) ** (1 / 3)

    assert sustained_clock_ratio(load_device("a40"), load_device("l40s")) == pytest.approx(by_hand, rel=1e-3)


def test_less_power_lowers_the_sustained_rate() -> None:
    """The donor's sustained rate on endless work is multiplied by the clock ratio."""
    device = load_device("l40s")
    own, borrowed = adapted(device, "a100-sxm-80gb", "bf16")
    share = sustained_clock_ratio(device, load_device("a100-sxm-80gb"))

    assert 1.0 - borrowed.power_drop_fraction == pytest.approx((1.0 - own.power_drop_fraction) * share)


def test_more_power_recovers_the_donors_loss() -> None:
    """L40 has half of L40S's multipliers and most of its watts: it holds more of its clock, and RTX 4090 all of it."""
    own, l40 = adapted(load_device("l40"), "l40s", "bf16", transfer="architecture")
    _, rtx = adapted(load_device("rtx-4090"), "l40s", "bf16", transfer="architecture")

    assert own.power_drop_fraction > 0.25
    assert 0.0 < l40.power_drop_fraction < 0.6 * own.power_drop_fraction
    assert rtx.power_drop_fraction < 0.05


def test_slow_cases_are_not_transferred() -> None:
    """V100's slow cases do not apply to Turing; a V100 of another form factor keeps them."""
    assert adapted(load_device("t4"), "v100-sxm2-16gb", "fp16", "fp16")[1].slow_cases is None
    sibling = adapted(load_device("v100-pcie-16gb"), "v100-sxm2-16gb", "fp16", "fp16", "architecture")
    assert sibling[1].slow_cases == sibling[0].slow_cases is not None


def test_a_format_comes_from_who_has_it() -> None:
    """L40S borrows A100's kernels, which lack fp8, and the cost of casting to it from Hopper."""
    own, borrowed = adapted(load_device("l40s"), "a100-sxm-80gb", "fp8")
    hopper = load_record("gemm", load_device("h100-sxm-80gb")).parameters["dtypes"]["fp8"]

    assert own.cast_bytes_per_element == 0.0
    assert borrowed.cast_bytes_per_element == hopper["cast_bytes_per_element"]
    assert borrowed.write_ratio == hopper["write_ratio"]
    assert (borrowed.tile_rate_fraction == own.tile_rate_fraction).all()


def test_no_cast_costs_without_another_record_of_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another record of 8 bits the wider kernels are used unchanged."""
    monkeypatch.setattr("shapewright.pricing.gemm.transfer.list_records", lambda _: ())
    own, borrowed = adapted(load_device("l40s"), "a100-sxm-80gb", "fp8")

    assert borrowed.cast_bytes_per_element == own.cast_bytes_per_element == 0.0


def test_an_integer_format_on_a_measured_device_is_cast_too() -> None:
    """A100's own record has 16 bits only: int8 includes the cost of casting, and the label names the stand-in."""
    device = load_device("a100-sxm-80gb")
    price = price_gemm(Gemm(name="x", m=16, n=4096, k=4096, dtype="int8"), device, load_record("gemm", device))
    wide = price_gemm(Gemm(name="x", m=16, n=4096, k=4096), device, load_record("gemm", device))

    assert price.calibration.fractions_of == "bf16"
    assert price.start_s > wide.start_s


def test_user_record_is_used_unchanged() -> None:
    """No rule touches what was measured on the device itself."""
    device = load_device("l40s")
    record: CalibrationRecord = load_record("gemm", device)
    section = prepare_gemm_pricing("fp8", None, device, record).section
    assert section is not None

    assert section.parameters.start_s == record.parameters["dtypes"]["fp8"]["start_s"]
    assert section.parameters.power_drop_fraction == record.parameters["dtypes"]["fp8"]["power_drop_fraction"]


def test_feed_of_a_device_with_slower_memory() -> None:
    """A100's memory gives an SM 2.039e12 / 108 / 1.41e9 bytes a clock, 5.5 times what L40S's does."""
    scale = transfer_feed_scale(load_device("l40s"), load_device("a100-sxm-80gb"))

    assert scale == pytest.approx((2.039e12 / 108 / 1.41e9) / (864e9 / 142 / 2.52e9), rel=2e-3)
    assert transfer_feed_scale(load_device("b200-sxm-180gb"), load_device("h100-sxm-80gb")) == 1.0
    assert transfer_feed_scale(load_device("h200-sxm-141gb"), load_device("h100-sxm-80gb")) == pytest.approx(3.35 / 4.8)
    # GA102's SM draws as many bytes a clock as Ada's, of which its memory gives twice as many.
    scale = transfer_feed_scale(load_device("a40"), load_device("l40s"))
    assert scale == pytest.approx((864e9 / 142 / 2.52e9) / (696e9 / 84 / 1.74e9))


def test_rules_leave_prices_finite_and_above_the_roofline() -> None:
    """Every device with a borrowed record gets finite prices above its roofline."""
    operation = Gemm(name="x", m=np.array([1, 64, 4096]), n=4096, k=np.array([64, 4096, 16384]), dtype="fp16")
    for name in ("t4", "l4", "rtx-4090", "mi300x", "a10", "gh200-141gb"):
        device = load_device(name)
        price = price_gemm(operation, device, load_record("gemm", device))
        assert np.isfinite(price.time_s).all()
        assert (np.asarray(price.time_s) >= np.asarray(price.roofline_s)).all()


def test_another_version_on_another_architecture_uses_all_libraries() -> None:
    """A100's record has vllm 0.14.0, which stands for newer ones on another A100 and not on L40S."""
    operation = Gemm(name="x", m=64, n=4096, k=4096)
    for name, is_middle in (("l40s", True), ("a100-pcie-80gb", False)):
        device = load_device(name)
        record = load_record("gemm", device.with_pricing(uncalibrated=True))
        middle, own = (price_gemm(operation, device, record, library=library) for library in ("", "vllm 0.24.0"))
        assert record.device == "a100-sxm-80gb"
        assert (middle.time_s == own.time_s) == is_middle


def test_undetermined_parameters_are_the_mean_of_all_architectures() -> None:
    """Uncalibrated B200: Ampere, Hopper (two devices, one vote) and Ada; a sibling keeps its donor's parameters."""
    sections = {
        name: load_record("gemm", load_device(name)).parameters["dtypes"]["bf16"]
        for name in ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb", "l40s")
    }
    weights = (1 / 3, 1 / 6, 1 / 6, 1 / 3)
    give_back = sum(w * own["wave_give_back"] for w, own in zip(weights, sections.values(), strict=True))
    logs = sum(w * np.log(own["bandwidth_fraction"]) for w, own in zip(weights, sections.values(), strict=True))

    _, borrowed = adapted(load_device("b200-sxm-180gb"), "h100-sxm-80gb", "bf16")
    own, sibling = adapted(load_device("h200-sxm-141gb"), "h100-sxm-80gb", "bf16", transfer="architecture")

    assert borrowed.wave_give_back == pytest.approx(give_back)
    assert borrowed.bandwidth_fraction == pytest.approx(np.exp(logs))
    assert sibling.wave_give_back == own.wave_give_back
    assert sibling.bandwidth_fraction < own.bandwidth_fraction != borrowed.bandwidth_fraction


def test_sweeps_of_one_paper_are_excluded_from_means() -> None:
    """V100 and MI250X (fp16 sweeps) have no vote in means, and give everything but the bandwidth fraction."""
    _, v100 = adapted(load_device("v100-sxm2-16gb"), "a100-sxm-80gb", "fp16")
    _, t4 = adapted(load_device("t4"), "a100-sxm-80gb", "fp16")
    own, mi300x = adapted(load_device("mi300x"), "mi250x-gcd", "fp16", "fp16")

    assert v100.bandwidth_fraction == t4.bandwidth_fraction == mi300x.bandwidth_fraction
    assert own.bandwidth_fraction < mi300x.bandwidth_fraction
    assert mi300x.wave_give_back == own.wave_give_back


def test_a_recipient_streams_weights_like_measured_architectures() -> None:
    """One row times 8192 x 28672 is memory-bound: T4 takes at most 1.5 times its roofline."""
    device = load_device("t4")
    price = price_gemm(
        Gemm(name="x", m=1, n=28672, k=8192, layout="NT", dtype="fp16"), device, load_record("gemm", device)
    )

    assert 1.15 < price.time_s / price.roofline_s < 1.5


def test_slower_multipliers_leave_less_to_wait_for() -> None:
    """H20 has 0.234 of H100's FLOPs a clock and SM: a share of 0.25 is 1 / (1 + 3 * 0.234) there."""
    h20 = load_device("h20-96gb")
    record = load_record("gemm", h20)

    share = transfer_rate_fraction(np.array([0.25, 1.0]), h20, record)

    assert share == pytest.approx([1.0 / (1.0 + 3.0 * 0.234), 1.0], rel=2e-3)


def test_slower_multipliers_lose_less_to_narrow_loads() -> None:
    """H20 has 0.234 of H100's FLOPs a clock and SM: what loads of 2 bytes add is that much less of a tile's time.

    Its tiles reach 1 / (1 + (1 / r - 1) 0.234) where H100's reach r, which the loads are compared with.
    """
    h20 = load_device("h20-96gb")
    own, borrowed = adapted(h20, "h100-sxm-80gb", "bf16", transfer="architecture")
    rates = [float(each.tile_rate_fraction.max()) for each in (own, borrowed)]
    transferred, carried = own.alignment_factor[0], borrowed.alignment_factor[0]

    assert carried[1] == pytest.approx(
        1.0 / (1.0 + (1.0 / transferred[1] - 1.0) * 0.234 * rates[1] / rates[0]), rel=2e-3
    )
    assert (carried[:4] > 1.5 * transferred[:4]).all()
    assert (carried[4:] == transferred[4:]).all()


def test_like_multipliers_lose_as_much() -> None:
    """GH200 and H200 have the same SM up to rounded clocks; a TPU has no SM to compare."""
    for name, donor in (("gh200-141gb", "h200-sxm-141gb"), ("gaudi3", "a100-sxm-80gb")):
        own, borrowed = adapted(load_device(name), donor, "bf16", transfer="architecture")

        assert borrowed.alignment_factor == pytest.approx(own.alignment_factor)


@pytest.mark.parametrize("name", ["gh200-96gb", "h100-pcie-80gb", "a30", "gb200", "h100-sxm-80gb"])
def test_the_same_multipliers_keep_their_share(name: str) -> None:
    """Siblings with the same rate per clock, and own records, keep their rate fractions."""
    device = load_device(name)
    share = np.array([0.25, 0.9])

    assert transfer_rate_fraction(share, device, load_record("gemm", device)).tolist() == share.tolist()


@pytest.mark.parametrize(
    ("name", "wider"),
    [("h100-sxm-80gb", True), ("gh200-141gb", True), ("rtx-4090", True), ("a100-sxm-80gb", False), ("t4", False)],
)
def test_alignment_of_another_sm_widens_the_interval(name: str, wider: bool) -> None:
    """An odd contraction has a factor that is known to 1.15 times where it was measured, and to 1.5 times elsewhere.

    The error of the factor and that of the even GEMM are independent: their logarithms add in quadrature.
    """
    device = load_device(name)
    dims = {"m": 8192, "n": 4096, "k": np.array([4096, 4097]), "dtype": "fp16"}
    price = price_gemm(Gemm(name="x", **dims), device, load_record("gemm", device.with_pricing(physics_only=True)))

    ends = np.log(price.high_s / price.time_s)

    assert ends[1] == pytest.approx(np.hypot(ends[0], np.log(1.5 if wider else 1.15)), rel=0.02)


@pytest.mark.parametrize(("name", "origin", "wider"), [("a100-sxm-80gb", "h100-sxm-80gb", True), ("l40s", "", False)])
def test_the_section_names_the_device_of_its_alignment_factors(name: str, origin: str, wider: bool) -> None:
    """The section's field decides, not the provenance: A100's interval is wider with it, L40S's narrower without."""
    device = load_device(name)
    record = load_record("gemm", device.with_pricing(physics_only=True))
    fields = {"alignment_from": origin} if origin else {}
    sections = {
        dtype: {key: entry for key, entry in section.items() if key != "alignment_from"} | fields
        for dtype, section in record.parameters["dtypes"].items()
    }
    record = replace(record, id=f"{record.id}/{origin}", parameters={**record.parameters, "dtypes": sections})
    dims = {"m": 8192, "n": 4096, "k": np.array([4096, 4097]), "dtype": "bf16"}

    price = price_gemm(Gemm(name="x", **dims), device, record)
    ends = np.log(price.high_s / price.time_s)

    assert ends[1] == pytest.approx(np.hypot(ends[0], np.log(1.5 if wider else 1.15)), rel=0.02)


def test_records_name_who_taught_their_alignment() -> None:
    """Odd sizes were measured on A100, V100 and MI250X; others name A100, or MI250X for AMD."""
    for record in list_records("gemm"):
        groups = (record.parameters["dtypes"], *record.parameters["libraries"].values())
        origins = {section.get("alignment_from", "") for group in groups for section in group.values()}

        expected = {
            "a100-sxm-80gb": "", "v100-sxm2-16gb": "", "mi250x-gcd": "",
            "h100-sxm-80gb": "a100-sxm-80gb", "h200-sxm-141gb": "a100-sxm-80gb",
            "b200-sxm-180gb": "a100-sxm-80gb", "l40s": "a100-sxm-80gb",
            "mi300x": "mi250x-gcd", "mi308x": "mi250x-gcd", "mi355x": "mi250x-gcd",
        }  # fmt: skip
        assert origins == {expected[record.device]}


def test_memory_bound_gemms_have_the_aligned_interval() -> None:
    """One row against 4096 x 4097 in fp16 on RTX 4090 streams its weights: a slower kernel would hardly show."""
    device = load_device("rtx-4090")
    operation = Gemm(name="x", m=1, n=4096, k=np.array([4096, 4097]), dtype="fp16")
    price = price_gemm(operation, device, load_record("gemm", device.with_pricing(physics_only=True)))

    ends = np.log(price.high_s / price.time_s)

    assert ends[1] == pytest.approx(ends[0], rel=0.05)


def test_a_format_with_another_rate_widens_the_interval_of_siblings() -> None:
    """Blackwell Ultra multiplies 14 instead of 9 PFLOP/s in 4 bits: known to the root of that; 8 bits are equal."""
    b200, b300 = load_device("b200-sxm-180gb"), load_device("b300-sxm-288gb")
    record = load_record("gemm", b300)

    assert format_rate_error(b300, record, "fp4") == pytest.approx((14.0 / 9.0) ** 0.5, rel=0.01)
    assert format_rate_error(b300, record, "fp8") == 1.0
    assert format_rate_error(b300, record, "int8") == 1.5
    assert format_rate_error(b200, load_record("gemm", b200), "fp4") == 1.0

    operation = Gemm(name="x", m=np.array([1, 8192]), n=8192, k=8192, dtype="fp4")
    one_row, many_rows = np.log(price_gemm(operation, b300, record).high_s / price_gemm(operation, b300, record).time_s)
    without = prepare_gemm_pricing("fp4", None, b300, record)._replace(rate_error=1.0)
    plain = without.section.residual_interval.factors(np.array([1e-5, 1e-3]))[1]
    assert many_rows > np.hypot(np.log(plain[1]), 0.15)
    assert one_row < np.log(plain[0]) + 0.05


def test_a_sibling_has_no_casts_that_its_donor_was_measured_without() -> None:
    """MI325X runs a narrow fp8 GEMM as fast as MI300X, whose kernels were timed alone."""
    gemm = Gemm(name="x", m=4096, n=256, k=7168, dtype="fp8")
    own, sibling = (
        price_gemm(gemm, device, load_record("gemm", device)).time_s
        for device in map(load_device, ("mi300x", "mi325x"))
    )

    assert sibling == pytest.approx(own, rel=0.05)


def test_training_scales_tensors_where_serving_scales_blocks() -> None:
    """MI300X in fp8: training gains what MI308X gains by a scale per token; bf16 and other devices have one section."""

    def gain(name: str, dtype: str) -> float:
        device = load_device(name)
        served = Gemm(name="x", m=8192, n=8192, k=8192, dtype=dtype)
        times = [
            price_gemm(one, device, load_record("gemm", device)).time_s
            for one in (served, served.changed(is_training=True))
        ]
        return float(times[0] / times[1])

    assert 1.1 < gain("mi300x", "fp8") < 1.35
    assert gain("mi325x", "fp8") == pytest.approx(gain("mi300x", "fp8"), rel=0.05)
    assert gain("mi300x", "bf16") == gain("mi355x", "fp8") == gain("h100-sxm-80gb", "fp8") == 1.0


@pytest.mark.parametrize("name", ["gaudi2", "trainium1", "tpu-v4"])
def test_casts_do_not_scale_with_the_number_of_matrix_engines(name: str) -> None:
    """Eight bits are not slower than 16 where a device has two matrix engines and no SMs: vector units cast."""
    device = load_device(name)
    narrow = "int8" if name.startswith("tpu") else "fp8"
    times = [
        price_gemm(Gemm(name="x", m=4096, n=16384, k=4096, dtype=dtype), device, load_record("gemm", device)).time_s
        for dtype in ("bf16", narrow)
    ]

    assert times[1] < 1.05 * times[0]
