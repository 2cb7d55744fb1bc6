"""Rules by which a device that nobody measured takes numbers from its lender's record."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapewright.hardware import Device, load_device
from shapewright.operations import Gemm
from shapewright.perf.calibration import CalibrationRecord, list_records, load_record
from shapewright.perf.gemm import price_gemm
from shapewright.perf.gemm_job import make_gemm_job
from shapewright.perf.gemm_menu import GemmParameters, read_parameters
from shapewright.perf.gemm_transfer import adapt_parameters, borrowed_feed_scale
from shapewright.perf.lending import sibling_rate_share
from shapewright.perf.power import borrowed_power_share


def adapted(
    device: Device, lender: str, dtype: str, section: str = "bf16", transfer: str = "generic"
) -> tuple[GemmParameters, GemmParameters]:
    """A lender's own parameters, and what the device makes of them."""
    record = replace(load_record("gemm", load_device(lender)), transfer=transfer)
    raw = record.parameters["dtypes"]
    own = read_parameters(raw[section])
    return own, adapt_parameters(own, raw, device, record, dtype)


def test_a_start_is_a_number_of_cycles() -> None:
    """A100 at 1.41 GHz lends L40S at 2.52 GHz: its start costs 1.41 / 2.52 of the time."""
    own, borrowed = adapted(load_device("l40s"), "a100-sxm-80gb", "bf16")

    assert borrowed.start_s == pytest.approx(own.start_s * 1.41 / 2.52)
    assert borrowed.split_start_s == pytest.approx(own.split_start_s * 1.41 / 2.52)


def test_a_cast_starts_as_slowly_elsewhere() -> None:
    """Of an 8-bit product's start only what a 16-bit one has is cycles; the kernel before it waits for memory."""
    record = load_record("gemm", load_device("h100-sxm-80gb"))
    bf16_s = record.parameters["dtypes"]["bf16"]["start_s"]
    own, borrowed = adapted(load_device("b200-sxm-180gb"), "h100-sxm-80gb", "fp8", "fp8")

    assert borrowed.start_s == pytest.approx(own.start_s - bf16_s + bf16_s * 1.83 / 1.965)
    assert borrowed.cast_row_s == pytest.approx(own.cast_row_s * (1.83 * 132) / (1.965 * 148))


def test_power_takes_the_cube_root_of_what_is_missing() -> None:
    """An eighth of the watts at the same chip holds half of the clock, eight times as many would hold twice of it."""
    lender = load_device("h100-sxm-80gb")
    assert lender.tdp_watts is not None

    assert borrowed_power_share(replace(lender, tdp_watts=lender.tdp_watts / 8.0), lender) == pytest.approx(0.5)
    assert borrowed_power_share(replace(lender, tdp_watts=lender.tdp_watts * 8.0), lender) == pytest.approx(2.0)
    assert borrowed_power_share(replace(lender, tdp_watts=None), lender) == 1.0


def test_power_share_of_l40s_by_hand() -> None:
    """W per TFLOP/s: 350 / 362 against 400 / 312; over the squared clocks of these rates and 0.7 of the energy."""
    clocks = 362e12 / (142 * 1024), 312e12 / (108 * 2048)
    by_hand = ((350 / 362) / (clocks[0] ** 2 * 0.7) / ((400 / 312) / clocks[1] ** 2)) ** (1 / 3)

    assert borrowed_power_share(load_device("l40s"), load_device("a100-sxm-80gb")) == pytest.approx(by_hand, rel=1e-3)


def test_power_share_of_a40_by_hand() -> None:
    """W per TFLOP/s: 300 / 149.7 against 350 / 362; over the squared clocks, 1.35 of N7's energy against 0.7."""
    clocks = 149.7e12 / (84 * 1024), 362e12 / (142 * 1024)
    by_hand = ((300 / 149.7) / (clocks[0] ** 2 * 1.35) / ((350 / 362) / (clocks[1] ** 2 * 0.7))) ** (1 / 3)

    assert borrowed_power_share(load_device("a40"), load_device("l40s")) == pytest.approx(by_hand, rel=1e-3)


def test_power_lowers_the_lenders_sustained_rate() -> None:
    """What the lender sustains on endless work is multiplied by the share."""
    device = load_device("l40s")
    own, borrowed = adapted(device, "a100-sxm-80gb", "bf16")
    share = borrowed_power_share(device, load_device("a100-sxm-80gb"))

    assert 1.0 - borrowed.power_drop_fraction == pytest.approx((1.0 - own.power_drop_fraction) * share)


def test_more_watts_give_back_what_the_lender_loses() -> None:
    """L40 has half of L40S's multipliers and most of its watts: it holds more of its clock, and RTX 4090 all of it."""
    own, l40 = adapted(load_device("l40"), "l40s", "bf16", transfer="architecture")
    _, rtx = adapted(load_device("rtx-4090"), "l40s", "bf16", transfer="architecture")

    assert own.power_drop_fraction > 0.25
    assert 0.0 < l40.power_drop_fraction < 0.6 * own.power_drop_fraction
    assert rtx.power_drop_fraction < 0.05


def test_slow_cases_stay_with_their_family() -> None:
    """What V100's libraries run slowly says nothing of Turing; a V100 of another form has the same libraries."""
    assert adapted(load_device("t4"), "v100-sxm2-16gb", "fp16", "fp16")[1].slow_cases is None
    sibling = adapted(load_device("v100-pcie-16gb"), "v100-sxm2-16gb", "fp16", "fp16", "architecture")
    assert sibling[1].slow_cases == sibling[0].slow_cases is not None


def test_a_format_comes_from_who_has_it() -> None:
    """L40S borrows A100's kernels, which know no fp8, and from Hopper what casting to it costs."""
    own, borrowed = adapted(load_device("l40s"), "a100-sxm-80gb", "fp8")
    hopper = load_record("gemm", load_device("h100-sxm-80gb")).parameters["dtypes"]["fp8"]

    assert own.cast_bytes_per_element == 0.0
    assert borrowed.cast_bytes_per_element == hopper["cast_bytes_per_element"]
    assert borrowed.write_ratio == hopper["write_ratio"]
    assert (borrowed.tile_rate_fraction == own.tile_rate_fraction).all()


def test_no_format_is_borrowed_where_nobody_else_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without another record of 8 bits the wider kernels stand as they are."""
    monkeypatch.setattr("shapewright.perf.gemm_transfer.list_records", lambda _: ())
    own, borrowed = adapted(load_device("l40s"), "a100-sxm-80gb", "fp8")

    assert borrowed.cast_bytes_per_element == own.cast_bytes_per_element == 0.0


def test_an_integer_format_on_a_measured_device_is_cast_too() -> None:
    """A100's own record has 16 bits alone: int8 on it pays for casting, and its label says whose fractions it has."""
    device = load_device("a100-sxm-80gb")
    price = price_gemm(Gemm(name="x", m=16, n=4096, k=4096, dtype="int8"), device, load_record("gemm", device))
    wide = price_gemm(Gemm(name="x", m=16, n=4096, k=4096), device, load_record("gemm", device))

    assert "fractions of bf16" in price.calibration
    assert price.start_s > wide.start_s


def test_a_record_of_ones_own_is_taken_as_it_is() -> None:
    """No rule touches what was measured on the device itself."""
    device = load_device("l40s")
    record: CalibrationRecord = load_record("gemm", device)
    section = make_gemm_job("fp8", None, device, record).section
    assert section is not None

    assert section.parameters.start_s == record.parameters["dtypes"]["fp8"]["start_s"]
    assert section.parameters.power_drop_fraction == record.parameters["dtypes"]["fp8"]["power_drop_fraction"]


def test_feed_of_a_device_with_slower_memory() -> None:
    """A100's memory gives an SM 2.039e12 / 108 / 1.41e9 bytes a clock, 5.5 times what L40S's does."""
    scale = borrowed_feed_scale(load_device("l40s"), load_device("a100-sxm-80gb"))

    assert scale == pytest.approx((2.039e12 / 108 / 1.41e9) / (864e9 / 142 / 2.52e9), rel=2e-3)
    assert borrowed_feed_scale(load_device("b200-sxm-180gb"), load_device("h100-sxm-80gb")) == 1.0
    assert borrowed_feed_scale(load_device("h200-sxm-141gb"), load_device("h100-sxm-80gb")) == pytest.approx(3.35 / 4.8)
    # GA102's SM draws as many bytes a clock as Ada's, of which its memory gives twice as many.
    scale = borrowed_feed_scale(load_device("a40"), load_device("l40s"))
    assert scale == pytest.approx((864e9 / 142 / 2.52e9) / (696e9 / 84 / 1.74e9))


def test_rules_leave_prices_finite_and_above_the_roofline() -> None:
    """Every device that borrows gets a price that no sheet forbids."""
    operation = Gemm(name="x", m=np.array([1, 64, 4096]), n=4096, k=np.array([64, 4096, 16384]), dtype="fp16")
    for name in ("t4", "l4", "rtx-4090", "mi300x", "a10", "gh200-141gb"):
        device = load_device(name)
        price = price_gemm(operation, device, load_record("gemm", device))
        assert np.isfinite(price.time_s).all()
        assert (np.asarray(price.time_s) >= np.asarray(price.roofline_s)).all()


def test_another_family_lends_another_version_by_the_middle_of_its_libraries() -> None:
    """A100's record has vllm 0.14.0, which stands for newer ones on another A100 and not on L40S."""
    operation = Gemm(name="x", m=64, n=4096, k=4096)
    for name, is_middle in (("l40s", True), ("a100-pcie-80gb", False)):
        device = load_device(name)
        record = load_record("gemm", device, uncalibrated=True)
        middle, own = (price_gemm(operation, device, record, library=library) for library in ("", "vllm 0.24.0"))
        assert record.device == "a100-sxm-80gb"
        assert (middle.time_s == own.time_s) == is_middle


def test_what_no_sheet_tells_is_the_mean_of_all_families() -> None:
    """B200 without its record: Ampere, Hopper (two devices, one vote) and Ada; a sibling keeps its lender's."""
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


def test_a_sweep_of_one_paper_is_no_family() -> None:
    """V100 and MI250X were measured in fp16 sweeps: they have no vote, and lend all but the share of bandwidth."""
    _, v100 = adapted(load_device("v100-sxm2-16gb"), "a100-sxm-80gb", "fp16")
    _, t4 = adapted(load_device("t4"), "a100-sxm-80gb", "fp16")
    own, mi300x = adapted(load_device("mi300x"), "mi250x-gcd", "fp16", "fp16")

    assert v100.bandwidth_fraction == t4.bandwidth_fraction == mi300x.bandwidth_fraction
    assert own.bandwidth_fraction < mi300x.bandwidth_fraction
    assert mi300x.wave_give_back == own.wave_give_back


def test_a_borrowing_chip_streams_weights_as_measured_families_do() -> None:
    """One row against 8192 x 28672 is bound by memory: MI300X takes no more than 1.5 times its roofline for it."""
    device = load_device("mi300x")
    price = price_gemm(
        Gemm(name="x", m=1, n=28672, k=8192, layout="NT", dtype="bf16"), device, load_record("gemm", device)
    )

    assert 1.15 < price.time_s / price.roofline_s < 1.5


def test_slower_multipliers_leave_less_to_wait_for() -> None:
    """H20 has 0.234 of H100's FLOPs a clock and SM: a share of 0.25 is 1 / (1 + 3 * 0.234) there."""
    h20 = load_device("h20-96gb")
    record = load_record("gemm", h20)

    share = sibling_rate_share(np.array([0.25, 1.0]), h20, record)

    assert share == pytest.approx([1.0 / (1.0 + 3.0 * 0.234), 1.0], rel=2e-3)


def test_slower_multipliers_lose_less_to_narrow_loads() -> None:
    """H20 has 0.234 of H100's FLOPs a clock and SM: what loads of 2 bytes add is that much less of a tile's time.

    Its tiles reach 1 / (1 + (1 / r - 1) 0.234) where H100's reach r, which the loads are compared with.
    """
    h20 = load_device("h20-96gb")
    own, borrowed = adapted(h20, "h100-sxm-80gb", "bf16", transfer="architecture")
    rates = [float(each.tile_rate_fraction.max()) for each in (own, borrowed)]
    lent, carried = own.alignment_factor[0], borrowed.alignment_factor[0]

    assert carried[1] == pytest.approx(1.0 / (1.0 + (1.0 / lent[1] - 1.0) * 0.234 * rates[1] / rates[0]), rel=2e-3)
    assert (carried[:4] > 1.5 * lent[:4]).all()
    assert (carried[4:] == lent[4:]).all()


def test_like_multipliers_lose_as_much() -> None:
    """GH200 and H200 are one SM by sheets that round clocks; a TPU's multipliers are none of an SM's."""
    for name, lender in (("gh200-141gb", "h200-sxm-141gb"), ("gaudi3", "a100-sxm-80gb")):
        own, borrowed = adapted(load_device(name), lender, "bf16", transfer="architecture")

        assert borrowed.alignment_factor == pytest.approx(own.alignment_factor)


@pytest.mark.parametrize("name", ["gh200-96gb", "h100-pcie-80gb", "a30", "gb200", "h100-sxm-80gb"])
def test_the_same_multipliers_keep_their_share(name: str) -> None:
    """Siblings whose SMs multiply as much a clock, and a device of its own record, take shares as they are."""
    device = load_device(name)
    share = np.array([0.25, 0.9])

    assert sibling_rate_share(share, device, load_record("gemm", device)).tolist() == share.tolist()


@pytest.mark.parametrize(
    ("name", "wider"),
    [("h100-sxm-80gb", True), ("gh200-141gb", True), ("rtx-4090", True), ("a100-sxm-80gb", False), ("t4", False)],
)
def test_alignment_of_another_sm_widens_the_interval(name: str, wider: bool) -> None:
    """An odd contraction is 1.5 times less sure on either side where only A100's factors are known, an even one is not.

    The two errors are independent: their logarithms add as squares.
    """
    device = load_device(name)
    dims = {"m": 8192, "n": 4096, "k": np.array([4096, 4097]), "dtype": "fp16"}
    price = price_gemm(Gemm(name="x", **dims), device, load_record("gemm", device, physics_only=True))

    ends = np.log(price.high_s / price.time_s)

    assert ends[1] == pytest.approx(np.hypot(ends[0], np.log(1.5)) if wider else ends[0], rel=0.02)


@pytest.mark.parametrize(("name", "origin", "wider"), [("a100-sxm-80gb", "h100-sxm-80gb", True), ("l40s", "", False)])
def test_the_section_says_whose_alignment_it_carries(name: str, origin: str, wider: bool) -> None:
    """A field of the section decides, whatever the provenance says: A100 is less sure with it, L40S surer without."""
    device = load_device(name)
    record = load_record("gemm", device, physics_only=True)
    fields = {"alignment_from": origin} if origin else {}
    sections = {
        dtype: {key: entry for key, entry in section.items() if key != "alignment_from"} | fields
        for dtype, section in record.parameters["dtypes"].items()
    }
    record = replace(record, id=f"{record.id}/{origin}", parameters={**record.parameters, "dtypes": sections})
    dims = {"m": 8192, "n": 4096, "k": np.array([4096, 4097]), "dtype": "bf16"}

    price = price_gemm(Gemm(name="x", **dims), device, record)
    ends = np.log(price.high_s / price.time_s)

    assert (ends[1] > 1.05 * ends[0]) == wider


def test_records_name_who_taught_their_alignment() -> None:
    """Odd sizes were measured on A100, V100 and MI250X; every section of the others' records names A100."""
    for record in list_records("gemm"):
        groups = (record.parameters["dtypes"], *record.parameters["libraries"].values())
        origins = {section.get("alignment_from", "") for group in groups for section in group.values()}

        expected = {
            "a100-sxm-80gb": "", "v100-sxm2-16gb": "", "mi250x-gcd": "",
            "h100-sxm-80gb": "a100-sxm-80gb", "h200-sxm-141gb": "a100-sxm-80gb",
            "b200-sxm-180gb": "a100-sxm-80gb", "l40s": "a100-sxm-80gb",
        }  # fmt: skip
        assert origins == {expected[record.device]}


def test_products_that_wait_for_memory_are_as_sure_as_aligned_ones() -> None:
    """One row against 4096 x 4097 in fp16 on RTX 4090 streams its weights: a slower kernel would hardly show."""
    device = load_device("rtx-4090")
    operation = Gemm(name="x", m=1, n=4096, k=np.array([4096, 4097]), dtype="fp16")
    price = price_gemm(operation, device, load_record("gemm", device, physics_only=True))

    ends = np.log(price.high_s / price.time_s)

    assert ends[1] == pytest.approx(ends[0], rel=0.05)
