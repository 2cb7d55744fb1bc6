"""Records on unmeasured devices: which are borrowed, and how links and caches change them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shapewright.hardware.device import Device
from shapewright.hardware.loader import list_devices, load_device
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.pricing.attention.price import price_attention
from shapewright.pricing.calibration.records import load_record
from shapewright.pricing.collectives import price_collective, price_collectives
from shapewright.pricing.experts.price import price_grouped_gemm
from shapewright.pricing.gemm.price import price_gemm
from shapewright.pricing.pointwise import price_pointwise

B200, H100, L40S = (load_device(name) for name in ("b200-sxm-180gb", "h100-sxm-80gb", "l40s"))
GEMMS = Gemm(name="x", m=np.array([1, 64, 4096]), n=np.array([4096] * 3), k=np.array([4096] * 3))
CALL = Attention(
    name="x", batch_size=4, query_len=2048, kv_len=2048, num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128
)
EXPERTS = GroupedGemm(name="x", m=256, n=3072, k=4096, groups=64)


@pytest.mark.parametrize(
    ("device", "kind", "donor", "transfer"),
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
def test_donors(device: str, kind: str, donor: str, transfer: str) -> None:
    """Siblings with the same SM come first, the nearest of them; what joins devices decides for collectives."""
    record = load_record(kind, load_device(device))

    assert (record.device, record.transfer) == (donor, transfer)


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
    """SM kinds differ by matrix instructions and shared memory, regardless of the architecture's name."""
    kinds = [load_device(name).sm_kind for name in (one, other)]

    assert None not in kinds
    assert (kinds[0] == kinds[1]) == is_same


def test_missing_numbers_give_no_sm_kind() -> None:
    """Without shared memory or compute capability a chip has no SM kind and matches no other."""
    silent = replace(L40S, shared_memory_per_sm_bytes=None)

    assert silent.sm_kind is None
    assert replace(L40S, compute_capability="").sm_kind is None
    record = load_record("gemm", replace(silent, name="x", architecture="ampere", compute_capability="8.6"))
    assert record.device == "a100-sxm-80gb"


def test_an_unlisted_generation_borrows_from_its_vendor() -> None:
    """A successor of B200 with twice its rate and memory borrows from B200; another vendor's new chip from A100."""
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
    """Four A40 share PCIe as four L40S do, whose protocols price them then; a pair has A100's."""
    card = load_device("a40")
    calls = [
        Collective(name="x", op_name="all_reduce", axis="tensor", message_bytes=1e8, num_ranks=n, ranks_per_node=n)
        for n in (2, 4)
    ]
    record = load_record("collectives", card)
    pair, four = price_collectives(calls, card, record)
    own = price_collective(calls[1], L40S, load_record("collectives", L40S.with_pricing(physics_only=True)))
    both = price_collective(
        replace(calls[0], num_ranks=np.array([2, 4]), ranks_per_node=np.array([2, 4])), card, record
    )

    assert "a100" in pair.calibration.label
    assert "l40s" in four.calibration.label
    assert four.memory_s == pytest.approx(own.memory_s)
    assert both.time_s.tolist() == [pair.time_s, four.time_s]
    assert all(name in both.calibration.label for name in ("a100", "l40s"))


def test_experts_on_another_architecture_take_the_mean_start() -> None:
    """An uncalibrated B200 takes the mean cycles of triton on A100, Hopper and L40S, one vote per architecture."""
    transferred = load_record("moe", B200.with_pricing(uncalibrated=True))
    few = replace(EXPERTS, m=1, groups=1)
    own, borrowed, ours = (
        price_grouped_gemm(few, device, record)
        for device, record in ((H100, load_record("moe", H100)), (B200, transferred), (B200, load_record("moe", B200)))
    )

    assert ours.start_s < borrowed.start_s < own.start_s
    # Kernels that set up each expert as a problem of its own are no measure, and keep what their like have.
    cutlass = "sglang 0.5.14/sglang_flashinfer_cutlass_moe"
    apart = [
        price_grouped_gemm(few, device, load_record("moe", H100), library=cutlass).start_s
        for device in (H100, replace(H100, name="x"))
    ]
    assert apart[0] == apart[1]


def test_partitioned_caches_hold_half_of_shared_data() -> None:
    """L40S without its record keeps more of its cache's weights than an A100 of its size would."""
    transferred = load_record("moe", L40S.with_pricing(uncalibrated=True))
    weights = replace(EXPERTS, m=8, groups=8, n=2048, k=1024)
    split = replace(L40S, compute_capability="8.0")

    def gain(device: Device) -> float:
        cold, hot = (
            price_grouped_gemm(weights, device, transferred, hot_cache=is_hot).time_s for is_hot in (False, True)
        )
        return cold / hot

    assert weights.num_bytes < 0.5 * L40S.l2_bytes
    assert gain(L40S) > 1.1 * gain(split)


def test_kernels_of_slow_memory_reach_more_of_it() -> None:
    """A rotation waits for its SM: on L40S, with a fifth of A100's bandwidth per SM, it comes nearer to memory."""
    rotary = Pointwise(name="x", operation="rotary", read_bytes=1e9, written_bytes=1e9)
    shares = {
        device.name: price.roofline_s / price.time_s
        for device in (load_device("a100-sxm-80gb"), L40S, B200)
        for price in [price_pointwise(rotary, device, load_record("pointwise", device))]
    }

    assert shares["l40s"] > 1.5 * shares["a100-sxm-80gb"]
    assert shares["b200-sxm-180gb"] == pytest.approx(shares["a100-sxm-80gb"], rel=0.01)


def in_order(device: Device) -> list[float]:
    """Times of one piece of work of each kind on a device."""
    norm = Pointwise(name="x", operation="norm", read_bytes=1e8, written_bytes=1e8)
    return [
        *price_gemm(GEMMS, device, load_record("gemm", device)).time_s.tolist(),
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
        ("a100-sxm-80gb", "a100-sxm-40gb"),
        ("l40s", "l4"),
        ("rtx-pro-6000", "rtx-5090"),
        ("mi325x", "mi300x"),
    ],
)
def test_a_better_data_sheet_is_not_slower(fast: str, slow: str) -> None:
    """A device at least as good in every data-sheet number takes at most 3 % longer for any operation."""
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
def test_softmax_rate_of_another_vendor(kind: str, is_own: bool) -> None:
    """A softmax reaches a smaller fraction of bandwidth on MI250X than on A100; additions have no such kernel."""
    operation = Pointwise(name="x", operation=kind, read_bytes=4e9, written_bytes=4e9)
    shares = []
    for name in ("a100-sxm-80gb", "mi250x-gcd"):
        price = price_pointwise(operation, load_device(name), load_record("pointwise", load_device(name)))
        shares.append(price.roofline_s / price.time_s)

    assert (shares[1] < 0.5 * shares[0]) == is_own


@pytest.mark.parametrize("kind", ["softmax", "mask"])
def test_uncalibrated_device_ignores_its_softmax_record(kind: str) -> None:
    """An uncalibrated MI250X uses A100's softmax; other AMD chips keep the measured one."""
    operation = Pointwise(name="x", operation=kind, read_bytes=4e9, written_bytes=4e9)

    def share(name: str, *, uncalibrated: bool) -> float:
        record = load_record("pointwise", load_device(name).with_pricing(uncalibrated=uncalibrated))
        found = price_pointwise(operation, load_device(name), record)
        return float(found.roofline_s / found.time_s)

    assert share("mi250x-gcd", uncalibrated=True) > 3.0 * share("mi250x-gcd", uncalibrated=False)
    assert share("mi300x", uncalibrated=True) == share("mi300x", uncalibrated=False)


def test_softmax_interval_widens_with_distance() -> None:
    """On its chip, a sibling, another AMD architecture, a third vendor's chip: ever wider intervals."""
    operation = Pointwise(name="x", operation="softmax", read_bytes=4e9, written_bytes=4e9)
    chips = map(load_device, ("mi250x-gcd", "mi210", "mi300x", "gaudi2"))
    prices = [price_pointwise(operation, chip, load_record("pointwise", chip)) for chip in chips]
    ends = [float(np.log(price.high_s / price.time_s)) for price in prices]

    assert ends[:3] == pytest.approx([ends[0], 1.6 * ends[0], 2.5 * ends[0]])
    assert ends[3] > ends[2]
