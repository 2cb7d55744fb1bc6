"""What a device that nobody measured borrows, and what a library that nobody measured is priced as."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapewright.hardware import Device, list_devices, load_device
from shapewright.operations import Attention, Collective, Gemm, GroupedGemm, Pointwise
from shapewright.perf.attention import price_attention
from shapewright.perf.attention_sections import choose_section
from shapewright.perf.attention_transfer import decode_section
from shapewright.perf.calibration import load_record
from shapewright.perf.collectives import price_collective, price_collectives
from shapewright.perf.expert_kernels import choose_expert_kernel, expert_kernel_family, leave_poor_matches
from shapewright.perf.experts import price_grouped_gemm
from shapewright.perf.gemm import price_gemm
from shapewright.perf.gemm_job import make_gemm_job
from shapewright.perf.libraries import nearest_library
from shapewright.perf.pointwise import price_pointwise
from shapewright.perf.power import borrowed_attention_clock

B200, H100, L40S = (load_device(name) for name in ("b200-sxm-180gb", "h100-sxm-80gb", "l40s"))
PRODUCTS = Gemm(name="x", m=np.array([1, 64, 4096]), n=np.array([4096] * 3), k=np.array([4096] * 3))
CALL = Attention(
    name="x", batch_size=4, query_len=2048, kv_len=2048, num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128
)
EXPERTS = GroupedGemm(name="x", m=256, n=3072, k=4096, groups=64)


@pytest.mark.parametrize(
    ("library", "known", "expected"),
    [
        ("vllm 0.24.0", ["vllm 0.14.0", "vllm 0.24.0"], "vllm 0.24.0"),
        ("vllm 0.19", ["vllm 0.14.0", "vllm 0.24.0"], "vllm 0.14.0"),
        ("vllm 0.30.0", ["vllm 0.14.0", "vllm 0.24.0"], "vllm 0.24.0"),
        ("vllm 0.9", ["vllm 0.14.0", "vllm 0.24.0"], "vllm 0.14.0"),
        ("VLLM", ["vllm 0.14.0", "vllm 0.24.0", "sglang 1"], "vllm 0.24.0"),
        ("trtllm 1.2.0", ["vllm 0.24.0"], ""),
        ("vllm-omni 1", ["vllm 0.24.0"], ""),
        ("", ["vllm 0.24.0"], ""),
    ],
)
def test_nearest_library(library: str, known: list[str], expected: str) -> None:
    """The same library in its nearest version that is not newer stands for one; another library never does."""
    assert nearest_library(library, known) == expected


def test_another_version_is_priced_as_its_library() -> None:
    """Products and attention of sglang 0.6 are those of the sglang that was measured, and not those of vllm."""
    gemm, attention = load_record("gemm", H100), load_record("attention", H100)
    times = [price_gemm(PRODUCTS, H100, gemm, library=name).time_s for name in ("sglang 0.6.0", "sglang 0.5.14", "")]
    calls = [
        price_attention(CALL, H100, attention, library=name, kernel="fa3").time_s
        for name in ("sglang 0.6.0", "sglang 0.5.14", "")
    ]

    assert (times[0] == times[1]).all()
    assert (times[0] != times[2]).any()
    assert calls[0] == calls[1] != calls[2]


def test_a_kernel_is_found_in_another_library() -> None:
    """Triton attention of an unknown library is that of sglang, since vllm's section for H100 has none."""
    record = load_record("attention", H100)
    wide = replace(CALL, head_dim=256, v_head_dim=256)
    stranger, sglang, usual = (
        price_attention(wide, H100, record, library=library, kernel=kernel).time_s
        for library, kernel in (("trtllm 1.2.0", "triton"), ("sglang 0.5.14", "triton"), ("trtllm 1.2.0", ""))
    )

    assert stranger == sglang != usual


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        ("sglang_fused_moe_triton", "triton"),
        ("vllm_fused_moe", "triton"),
        ("vllm_x_flashinfer_trtllm_trtllmbf16experts", "trtllm"),
        ("sglang_flashinfer_cutlass_moe", "cutlass"),
        ("moe_torch_flow", ""),
    ],
)
def test_families_of_expert_kernels(kernel: str, family: str) -> None:
    """A kernel's name tells its family, or nothing."""
    assert expert_kernel_family(kernel) == family


def test_family_comes_before_format_and_library() -> None:
    """8-bit triton on H100 takes triton's 16-bit section, an unknown kernel the default; a known one is itself."""
    record = load_record("moe", H100)
    own = "vllm 0.24.0/vllm_unquantizedfusedmoe_triton_tritonexperts"

    assert choose_expert_kernel(record, ("bf16", "bf16"), own) == own
    assert choose_expert_kernel(record, ("fp8", "bf16"), "sglang 0.6/sglang_fused_moe_triton") == (
        "sglang 0.5.14/sglang_fused_moe_triton"
    )
    assert choose_expert_kernel(record, ("fp8", "bf16"), "trtllm 1.2/moe_triton") == own
    assert choose_expert_kernel(record, ("fp8", "bf16"), "trtllm 1.2/moe_torch_flow") == ""


@pytest.mark.parametrize(
    ("library", "lender"),
    [("vllm 0.14.0", "sglang 0.5.14"), ("vllm 0.16.2", "sglang 0.5.14"), ("vllm 0.17.0", "vllm 0.24.0")],
)
def test_an_older_vllm_is_priced_by_who_has_its_default_tiles(library: str, lender: str) -> None:
    """Up to 0.16 vllm ran sglang's two tiles where nobody tuned; what was tuned is its own list's."""
    key = f"{library}/vllm_fused_moe"
    job = make_gemm_job("bf16", None, H100, load_record("moe", H100), library=key)

    assert choose_expert_kernel(load_record("moe", H100), ("bf16", "bf16"), key).startswith(lender)
    assert job.section is not None
    assert job.section.rule is not None
    assert job.section.rule.library == ("vllm 0.14.0" if lender.startswith("sglang") else "vllm 0.24.0")


def test_poor_matches_are_not_lent() -> None:
    """Hopper's CUTLASS experts stay with Hopper: B200 without its record takes 16-bit fractions in 8 bits."""
    lent = load_record("moe", B200, uncalibrated=True)
    kept = leave_poor_matches(lent)
    own = price_grouped_gemm(replace(EXPERTS, dtype="fp8"), B200, load_record("moe", B200))
    borrowed = price_grouped_gemm(replace(EXPERTS, dtype="fp8"), B200, lent)

    assert lent.architecture == "hopper"
    assert "fp8" in lent.parameters["dtypes"]
    assert "fp8" not in kept.parameters["dtypes"]
    assert "without cutlass" in borrowed.calibration
    assert borrowed.time_s < 2.0 * own.time_s
    assert leave_poor_matches(load_record("moe", H100)) is load_record("moe", H100)


@pytest.mark.parametrize(
    ("device", "kind", "lender", "transfer"),
    [
        ("b300-sxm-288gb", "attention", "b200-sxm-180gb", "architecture"),
        ("gb300", "moe", "b200-sxm-180gb", "architecture"),
        ("gh200-141gb", "gemm", "h200-sxm-141gb", "architecture"),
        ("h100-pcie-80gb", "attention", "h100-sxm-80gb", "architecture"),
        ("a40", "attention", "l40s", "generic"),
        ("rtx-a6000", "gemm", "l40s", "generic"),
        ("a10g", "moe", "l40s", "generic"),
        ("a40", "collectives", "a100-sxm-80gb", "generic"),
        ("a30", "gemm", "a100-sxm-80gb", "architecture"),
        ("t4", "gemm", "v100-sxm2-16gb", "generic"),
        ("a30", "attention", "a100-sxm-80gb", "architecture"),
        ("rtx-pro-6000", "attention", "l40s", "generic"),
        ("a10", "collectives", "l40s", "generic"),
        ("rtx-4090", "collectives", "l40s", "architecture"),
        ("mi300x", "collectives", "a100-sxm-80gb", "generic"),
        ("l40s", "collectives", "l40s", "exact"),
    ],
)
def test_lenders(device: str, kind: str, lender: str, transfer: str) -> None:
    """Siblings with the same SM come first, the nearest of them; what joins devices decides for collectives."""
    record = load_record(kind, load_device(device))

    assert (record.device, record.transfer) == (lender, transfer)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("a40", "l40s", True),
        ("rtx-5090", "rtx-3090", True),
        ("a40", "a100-sxm-80gb", False),
        ("h20-96gb", "h100-sxm-80gb", True),
        ("b200-sxm-180gb", "h100-sxm-80gb", False),
        ("gb300", "b200-sxm-180gb", True),
        ("t4", "v100-sxm2-16gb", False),
        ("mi300x", "mi250x-gcd", False),
    ],
)
def test_kinds_of_multiprocessors(one: str, other: str, is_same: bool) -> None:
    """Matrix instructions and shared memory tell them apart, whatever the architecture is called."""
    kinds = [load_device(name).sm_kind for name in (one, other)]

    assert None not in kinds
    assert (kinds[0] == kinds[1]) == is_same


def test_what_no_sheet_tells_is_no_kind() -> None:
    """Without shared memory or compute capability a chip resembles nobody, another such chip neither."""
    silent = replace(L40S, shared_memory_per_sm_bytes=None)

    assert silent.sm_kind is None
    assert replace(L40S, compute_capability="").sm_kind is None
    record = load_record("gemm", replace(silent, name="x", architecture="ampere", compute_capability="8.6"))
    assert record.device == "a100-sxm-80gb"


def test_a_generation_nobody_knows_borrows_from_its_makers_nearest_chip() -> None:
    """A successor of B200 with twice its rate and memory borrows from B200; another maker's new chip from A100."""
    rates = {name: 2.0 * rate for name, rate in B200.dense_flops_per_s.items()}
    bandwidth = 2.0 * B200.memory_bandwidth_bytes_per_s
    successor = replace(
        B200,
        name="successor",
        architecture="other",
        compute_capability="11.0",
        dense_flops_per_s=rates,
        memory_bandwidth_bytes_per_s=bandwidth,
    )

    for kind in ("gemm", "moe", "attention", "collectives"):
        record = load_record(kind, successor)
        assert (record.device, record.transfer) == ("b200-sxm-180gb", "generic")
        assert load_record(kind, replace(successor, name="stranger", vendor="Nobody")).device == "a100-sxm-80gb"
    times = zip(in_order(successor), in_order(B200), strict=True)
    assert all(ours <= 1.1 * known for ours, known in times)


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


def test_a_bridge_joins_a_pair() -> None:
    """Four bridged cards talk over PCIe: a quarter of the pair's bandwidth, and never faster than the pair."""
    card = load_device("h100-nvl-94gb")
    record = load_record("collectives", card)
    pair, four = (
        price_collective(
            Collective(name="x", op_name="all_gather", axis="tensor", message_bytes=1e9, num_ranks=n, ranks_per_node=n),
            card,
            record,
        )
        for n in (2, 4)
    )

    assert four.roofline_s / pair.roofline_s == pytest.approx((3 / 4) / (1 / 2) * 300 / 64)


def test_beyond_a_bridge_cards_talk_as_those_without_one() -> None:
    """Four A40 share PCIe as four L40S do, whose record prices them then; a pair has A100's protocols."""
    card = load_device("a40")
    calls = [
        Collective(name="x", op_name="all_reduce", axis="tensor", message_bytes=1e8, num_ranks=n, ranks_per_node=n)
        for n in (2, 4)
    ]
    record = load_record("collectives", card)
    pair, four = price_collectives(calls, card, record)
    own = price_collective(calls[1], L40S, load_record("collectives", L40S))
    both = price_collective(
        replace(calls[0], num_ranks=np.array([2, 4]), ranks_per_node=np.array([2, 4])), card, record
    )

    assert "a100" in pair.calibration
    assert "l40s" in four.calibration
    assert four.memory_s == pytest.approx(own.memory_s)
    assert both.time_s.tolist() == [pair.time_s, four.time_s]
    assert all(name in both.calibration for name in ("a100", "l40s"))


def test_experts_of_another_family_start_as_families_do_in_the_mean() -> None:
    """B200 without its record: triton's cycles on A100, Hopper's two devices and L40S, one vote for each family."""
    lent = load_record("moe", B200, uncalibrated=True)
    few = replace(EXPERTS, m=1, groups=1)
    own, borrowed, ours = (
        price_grouped_gemm(few, device, record)
        for device, record in ((H100, load_record("moe", H100)), (B200, lent), (B200, load_record("moe", B200)))
    )

    assert ours.start_s < borrowed.start_s < own.start_s
    # Kernels that set up each expert as a problem of its own are no measure, and keep what their like have.
    cutlass = "sglang 0.5.14/sglang_flashinfer_cutlass_moe"
    apart = [
        price_grouped_gemm(few, device, load_record("moe", H100), library=cutlass).start_s
        for device in (H100, replace(H100, name="x"))
    ]
    assert apart[0] == apart[1]


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


def test_caches_of_two_partitions_hold_half_as_much_of_what_all_read() -> None:
    """L40S without its record keeps more of its cache's weights than an A100 of its size would."""
    lent = load_record("moe", L40S, uncalibrated=True)
    weights = replace(EXPERTS, m=8, groups=8, n=2048, k=1024)
    split = replace(L40S, compute_capability="8.0")

    def gain(device: Device) -> float:
        cold, hot = (price_grouped_gemm(weights, device, lent, hot_cache=is_hot).time_s for is_hot in (False, True))
        return cold / hot

    assert weights.num_bytes < 0.5 * L40S.l2_bytes
    assert gain(L40S) > 1.1 * gain(split)


def test_norms_of_slow_memory_reach_more_of_it() -> None:
    """A norm waits for its SM: on L40S, with a fifth of A100's bandwidth per SM, it comes nearer to memory."""
    norm = Pointwise(name="x", operation="norm", read_bytes=1e9, written_bytes=1e9)
    shares = {
        device.name: price.roofline_s / price.time_s
        for device in (load_device("a100-sxm-80gb"), L40S, B200)
        for price in [price_pointwise(norm, device, load_record("pointwise", device))]
    }

    assert shares["l40s"] > 1.5 * shares["a100-sxm-80gb"]
    assert shares["b200-sxm-180gb"] == pytest.approx(shares["a100-sxm-80gb"], rel=0.01)


def in_order(device: Device) -> list[float]:
    """Times of one piece of work of each kind on a device."""
    norm = Pointwise(name="x", operation="norm", read_bytes=1e8, written_bytes=1e8)
    return [
        *price_gemm(PRODUCTS, device, load_record("gemm", device)).time_s.tolist(),
        price_attention(CALL, device, load_record("attention", device)).time_s,
        price_attention(replace(CALL, query_len=1), device, load_record("attention", device)).time_s,
        price_grouped_gemm(EXPERTS, device, load_record("moe", device)).time_s,
        price_pointwise(norm, device, load_record("pointwise", device)).time_s,
    ]


@pytest.mark.parametrize(
    ("fast", "slow"),
    [
        ("gb200", "b200-sxm-180gb"),
        ("gb300", "b300-sxm-288gb"),
        ("gb300", "gb200"),
        ("h100-sxm-80gb", "h100-pcie-80gb"),
        ("h800-sxm-80gb", "h100-pcie-80gb"),
        ("h200-sxm-141gb", "h20-96gb"),
        ("a100-sxm-80gb", "a30"),
        ("l40s", "l4"),
        ("rtx-pro-6000", "rtx-5090"),
        ("mi325x", "mi300x"),
    ],
)
def test_a_better_sheet_is_no_slower(fast: str, slow: str) -> None:
    """A device that is at least as good in every number of its sheet takes at most 3 % longer for anything."""
    times = zip(in_order(load_device(fast)), in_order(load_device(slow)), strict=True)

    assert all(better <= 1.03 * worse for better, worse in times)


@pytest.mark.parametrize("name", list_devices())
def test_every_device_has_sane_prices(name: str) -> None:
    """On each device and format: finite, inside its interval, no faster than the roofline, and not absurdly slower."""
    device = load_device(name)
    random = np.random.default_rng(0)
    m, n, k = (np.round(2.0 ** random.uniform(low, 15, 60) / 8) * 8 + 8 for low in (0, 5, 5))
    record = load_record("gemm", device)
    for dtype in device.dense_flops_per_s:
        price = price_gemm(Gemm(name="x", dtype=dtype, m=m, n=n, k=k), device, record)
        large = price_gemm(Gemm(name="x", dtype=dtype, m=8192, n=8192, k=8192), device, record)
        time_s = np.asarray(price.time_s)

        assert np.isfinite(time_s).all()
        assert (price.roofline_s <= time_s * (1 + 1e-9)).all()
        assert (price.low_s <= time_s * (1 + 1e-9)).all()
        assert (time_s <= np.asarray(price.high_s) * (1 + 1e-9)).all()
        assert 0.2 <= large.roofline_s / large.time_s <= 1.0, dtype


@pytest.mark.parametrize(("kind", "is_own"), [("softmax", True), ("mask", True), ("residual", False)])
def test_another_makers_chip_has_a_softmax_of_its_own(kind: str, is_own: bool) -> None:
    """A softmax reaches less of the bandwidth on MI250X than on A100; an addition has no kernel of its own there."""
    operation = Pointwise(name="x", operation=kind, read_bytes=4e9, written_bytes=4e9)
    shares = []
    for name in ("a100-sxm-80gb", "mi250x-gcd"):
        price = price_pointwise(operation, load_device(name), load_record("pointwise", load_device(name)))
        shares.append(price.roofline_s / price.time_s)

    assert (shares[1] < 0.5 * shares[0]) == is_own


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
