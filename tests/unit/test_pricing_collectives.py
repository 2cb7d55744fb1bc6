"""Collectives: the cheapest protocol inside a node, and the network between nodes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shapewright.core.errors import CalibrationError, UnknownRateError
from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.collective import Collective
from shapewright.pricing.calibration.records import CalibrationRecord, load_record
from shapewright.pricing.calibration.transfer import transfer_start_scale
from shapewright.pricing.collectives import price_collective, price_collectives
from shapewright.pricing.price import Price

# Two protocols: 10 us and a tenth of the link, or 30 us and all of it; groups of 8 start twice as late.
QUICK, WIDE = {"start_s": 1e-5, "bandwidth_fraction": 0.1}, {"start_s": 3e-5, "bandwidth_fraction": 1.0}
LATE = [{**protocol, "start_s": 2.0 * protocol["start_s"]} for protocol in (QUICK, WIDE)]
ROUND_RECORD = CalibrationRecord(
    id="collectives/round/2026-11-21",
    kind="collectives",
    device="x",
    devices=("x",),
    architecture="x",
    parameters={
        "operations": {"all_reduce": {"2": [QUICK, WIDE], "8": LATE}, "all_gather": {"2": [QUICK, WIDE]}},
        "groups_of_this_machine_only": ["8"],
        "between_nodes": {"bandwidth_fraction": 0.5, "hop_s": 1e-5, "start_s": 2e-5},
    },
    interval={"edges_s": [], "low": [0.9], "high": [1.1]},
    provenance={},
)
# 100 GB/s inside a node, 10 GB/s between nodes.
DEVICE = Device(
    name="round",
    title="Round",
    vendor="NVIDIA",
    architecture="x",
    dense_flops_per_s={"bf16": 1e15},
    memory_bytes=1e11,
    memory_bandwidth_bytes_per_s=1e12,
    node_size=8,
    intra_node_bandwidth_bytes_per_s=1e11,
    inter_node_bandwidth_bytes_per_s=1e10,
)


def call(op_name: str, message_bytes: float, num_ranks: int, ranks_per_node: int) -> Collective:
    """One collective over the tensor axis."""
    return Collective(
        name="x",
        op_name=op_name,
        axis="tensor",
        message_bytes=message_bytes,
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
    )


def price(op_name: str, message_bytes: float, num_ranks: int, ranks_per_node: int = 8) -> Price:
    """Price on the round machine."""
    return price_collective(call(op_name, message_bytes, num_ranks, ranks_per_node), DEVICE, ROUND_RECORD)


def test_small_messages_take_the_quick_protocol() -> None:
    """1 kB between two ranks: 10 us, and 2 x 1/2 x 1 kB at a tenth of 100 GB/s."""
    assert price("all_reduce", 1e3, 2).time_s == pytest.approx(1e-5 + 1e3 / 1e10)


def test_large_messages_take_the_wide_protocol() -> None:
    """1 GB between two ranks: 30 us, and 1 GB at 100 GB/s."""
    assert price("all_reduce", 1e9, 2).time_s == pytest.approx(3e-5 + 1e-2)


def test_corrections_are_of_one_device_and_inside_its_node() -> None:
    """Times a factor, linear in doublings of message and group; not by a donor's record, not between nodes."""
    tables = {"all_reduce": {"2": [0, 20, 0], "8": [0, 40, 0]}, "all_gather": {"2": [0, 0, 0]}}
    corrections = {"log2_bytes": [10.0, 12.0, 14.0], "log_step": 0.01, "operations": tables}
    record = replace(ROUND_RECORD, id="corrected", parameters={**ROUND_RECORD.parameters, "corrections": corrections})
    cases = {(11, 2, 8): 0.1, (12, 4, 8): 0.3, (12, 8, 8): 0.4, (15, 8, 8): 0.0, (12, 16, 8): 0.0}
    for (doublings, *group), log in cases.items():
        plain = price("all_reduce", 2.0**doublings, *group)
        found = price_collective(call("all_reduce", 2.0**doublings, *group), DEVICE, record)
        assert found.time_s == pytest.approx(plain.time_s * np.exp(log)), (doublings, group)

    borrowed = price_collective(call("all_reduce", 4096.0, 2, 8), DEVICE, replace(record, transfer="architecture"))
    assert borrowed.time_s == pytest.approx(price("all_reduce", 4096.0, 2).time_s)


def test_physics_alone_leaves_corrections_out() -> None:
    """--physics-only prices by the protocols."""
    chip = load_device("h100-sxm-80gb")
    found = [
        price_collective(
            call("all_reduce", 2.0**20, 8, 8), chip, load_record("collectives", chip.with_pricing(physics_only=alone))
        ).time_s
        for alone in (False, True)
    ]

    assert found[0] != found[1]


def test_unmeasured_group_sizes() -> None:
    """Four ranks lie halfway between two and eight in doublings; the ring volume is their own."""
    # 2 x 3/4 of 1 GB at 100 GB/s; starts 30 us and 60 us.
    assert price("all_reduce", 1e9, 4).time_s == pytest.approx(4.5e-5 + 1.5e-2)


def test_groups_beyond_the_largest_start_later_and_keep_the_bandwidth() -> None:
    """The smallest start grows 10 us in two doublings, so 16 ranks in one node start 5 us after 8."""
    sixteen = price("all_reduce", 1e9, 16, 16)

    assert sixteen.start_s == pytest.approx(6e-5 + 5e-6)
    assert sixteen.memory_s == pytest.approx(2 * 15 / 16 * 1e-2)


def test_starts_grow_as_between_the_largest_groups() -> None:
    """10, 30 and 70 us for 2, 4 and 8 ranks: 40 us a doubling from there on; none where the last ones start earlier."""
    for last_s, beyond_s in ((7e-5, 4e-5), (2e-5, 0.0)):
        groups = {size: [{**WIDE, "start_s": start_s}] for size, start_s in (("2", 1e-5), ("4", 3e-5), ("8", last_s))}
        record = replace(
            ROUND_RECORD,
            id=f"growing/{last_s}",
            parameters={**ROUND_RECORD.parameters, "operations": {"all_reduce": groups}},
        )
        found = price_collective(call("all_reduce", 1e9, 32, 32), DEVICE, record)
        assert found.start_s == pytest.approx(last_s + 2 * beyond_s)


def test_between_nodes_each_card_carries_its_share() -> None:
    """16 ranks on two nodes of eight: each card sends 2 x 1/2 of an eighth of 1 GB at half of 10 GB/s."""
    found = price("all_reduce", 1e9, 16)

    # 0.125 GB / 5 GB/s = 25 ms, longer than the 17.5 ms inside the node; starts 60 us, 20 us and two hops of 10 us.
    assert found.time_s == pytest.approx(0.025 + 6e-5 + 2e-5 + 2e-5)


def test_a_node_that_is_half_full_is_a_node() -> None:
    """Twelve ranks in nodes of eight are two nodes, as sixteen are."""
    assert price("all_reduce", 1e9, 12) == price("all_reduce", 1e9, 16)


def test_rows_sent_once_to_each_node_are_copied_inside() -> None:
    """Half of the rows cross and all of them travel inside: the network's time halves until the links are the limit."""
    whole = call("alltoall", 1e9, 16, 8)
    record = replace(ROUND_RECORD, parameters={**ROUND_RECORD.parameters, "operations": {"alltoall": {"8": LATE}}})
    every, half, none = (
        price_collective(replace(whole, crossing_fraction=part), DEVICE, record).memory_s for part in (1.0, 0.5, 0.01)
    )
    inside = price_collective(replace(whole, num_ranks=8), DEVICE, record).memory_s

    assert half == pytest.approx(every / 2.0)
    assert none == pytest.approx(inside)


def test_alltoall_sends_most_of_it_to_other_nodes() -> None:
    """Of 16 ranks, eight are elsewhere: half of the message leaves through the card."""
    record = replace(ROUND_RECORD, parameters={**ROUND_RECORD.parameters, "operations": {"alltoall": {"8": LATE}}})
    found = price_collective(call("alltoall", 1e9, 16, 8), DEVICE, record)

    assert found.memory_s == pytest.approx(0.5e9 / 5e9)


def test_sending_to_another_node() -> None:
    """A message to a neighbour in another node crosses one hop."""
    assert price("send_recv", 1e9, 2, 1).time_s == pytest.approx(1e9 / 5e9 + 2e-5 + 1e-5)


def test_inter_node_traffic_uses_no_intra_node_link() -> None:
    """Further ranks in the sender's node change neither the fixed cost nor the time."""
    assert price("send_recv", 1e9, 16, 8) == price("send_recv", 1e9, 2, 1)
    assert price("send_recv", 1e3, 16, 8) == price("send_recv", 1e3, 2, 1)


def test_sending_inside_a_node_stands_in_as_a_gather_of_two() -> None:
    """The whole message over one link; by its own protocols where they were measured."""
    assert price("send_recv", 1e9, 8, 8).time_s == pytest.approx(3e-5 + 1e-2)
    operations = {**ROUND_RECORD.parameters["operations"], "send_recv": {"2": [{**WIDE, "start_s": 5e-5}]}}
    record = replace(ROUND_RECORD, id="sending", parameters={**ROUND_RECORD.parameters, "operations": operations})
    assert price_collective(call("send_recv", 1e9, 8, 8), DEVICE, record).time_s == pytest.approx(5e-5 + 1e-2)


def test_intervals_are_wider_between_nodes() -> None:
    """0.9 and 1.1 of the time inside a node; between nodes, which are unmeasured, 1.6 times their logarithms."""
    inside, between = price("all_reduce", 1e3, 8), price("all_reduce", 1e3, 16)

    assert (inside.low_s / inside.time_s, inside.high_s / inside.time_s) == pytest.approx((0.9, 1.1))
    assert (between.low_s / between.time_s, between.high_s / between.time_s) == pytest.approx((0.9**1.6, 1.1**1.6))


def test_one_rank_costs_nothing() -> None:
    """Even where the device has no link at all."""
    lonely = replace(DEVICE, intra_node_bandwidth_bytes_per_s=None, inter_node_bandwidth_bytes_per_s=None)
    found = price_collective(call("all_reduce", 1e9, 1, 1), lonely, ROUND_RECORD)

    assert (found.time_s, found.low_s, found.high_s, found.roofline_s) == (0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("missing", "ranks", "advice"),
    [
        ("intra_node_bandwidth_bytes_per_s", 2, "use one device per node"),
        ("inter_node_bandwidth_bytes_per_s", 16, "keep the ranks inside a node of 8"),
    ],
)
def test_unknown_links_are_an_error(missing: str, ranks: int, advice: str) -> None:
    """A missing bandwidth raises an error that names the key and a remedy."""
    device = replace(DEVICE, **{missing: None})

    with pytest.raises(UnknownRateError, match=f"{missing}.*{advice}"):
        price_collective(call("all_reduce", 1e6, ranks, 8), device, ROUND_RECORD)


def test_unknown_operation_is_an_error() -> None:
    """An operation without a table or a substitute is an error."""
    with pytest.raises(CalibrationError, match="has no 'reduce_scatter'; it has all_gather, all_reduce"):
        price("reduce_scatter", 1e6, 2)


def test_recipients_skip_groups_of_one_machine() -> None:
    """A borrowed record prices eight ranks from its other groups."""
    borrowed = replace(ROUND_RECORD, id="borrowed", transfer="architecture")
    found = price_collective(call("all_reduce", 1e9, 8, 8), DEVICE, borrowed)

    assert found.memory_s == pytest.approx(2 * 7 / 8 * 1e-2)
    assert found.start_s == pytest.approx(3e-5)


def test_four_nodes_of_eight_b200() -> None:
    """4 GiB all_reduce: 22.05 ms measured, 10.15 ms inside one node (stas00/ml-engineering, network/README.md)."""
    device = load_device("b200-sxm-180gb")
    record = load_record("collectives", device)
    sizes = np.array([4.0 * 2**30, 4.0 * 2**30])
    operation = replace(
        call("all_reduce", 1.0, 8, 8), message_bytes=sizes, num_ranks=np.array([32, 8]), ranks_per_node=np.array([8, 8])
    )
    found = price_collective(operation, device, record)

    np.testing.assert_allclose(found.time_s, [22.05e-3, 10.15e-3], rtol=0.06)


def test_other_architectures_take_the_mean_start() -> None:
    """An uncalibrated B200 borrows from Hopper, with starts between those of Ampere and Hopper; corrections aside."""
    device = load_device("b200-sxm-180gb")
    transferred = load_record("collectives", device.with_pricing(uncalibrated=True, physics_only=True))
    a100 = load_record("collectives", load_device("a100-sxm-80gb").with_pricing(physics_only=True))
    assert transferred.device == "h100-sxm-80gb"

    scale = transfer_start_scale(transferred, device)
    # The first protocol of two and eight ranks: 1.45 to 1.7 times as late on A100, so about the root of that.
    assert 1.2 < scale < 1.3
    own, borrowed = (
        price_collective(call("all_reduce", 8.0, 4, 4), device, record)
        for record in (replace(transferred, recipient="", transfer="exact"), transferred)
    )
    assert borrowed.start_s == pytest.approx(own.start_s * scale)
    assert borrowed.start_s < price_collective(call("all_reduce", 8.0, 4, 4), device, a100).start_s


@pytest.mark.parametrize(
    ("device", "uncalibrated"), [("gb200", False), ("h200-sxm-141gb", True), ("l40s", True), ("rtx-pro-6000", False)]
)
def test_siblings_and_other_links_keep_the_donors_start(device: str, uncalibrated: bool) -> None:
    """Siblings, and cards without a link of their own, keep their donor's starts."""
    card = load_device(device)

    assert transfer_start_scale(load_record("collectives", card.with_pricing(uncalibrated=uncalibrated)), card) == 1.0


def test_serving_libraries_reduce_small_messages_with_their_own_kernel() -> None:
    """Inside a node with NVLink their kernel starts sooner than NCCL; training, PCIe and networks keep NCCL."""

    def time_s(device: str, **changes: Any) -> float:
        call = Collective(
            name="r", op_name="all_reduce", axis="tensor", message_bytes=65536.0, num_ranks=8, ranks_per_node=8
        ).changed(**changes)
        chosen = load_device(device)
        (price,) = price_collectives([call], chosen, load_record("collectives", chosen))
        assert price.low_s <= price.time_s <= price.high_s
        return float(price.time_s)

    for device in ("a100-sxm-80gb", "h100-sxm-80gb", "b200-sxm-180gb"):
        assert time_s(device, is_served=True) < 0.7 * time_s(device)
        assert time_s(device, is_served=True, message_bytes=2.0**33) <= time_s(device, message_bytes=2.0**33)
    assert time_s("l40s", is_served=True) == time_s("l40s")
    across = {"num_ranks": 16, "ranks_per_node": 8}
    assert time_s("h100-sxm-80gb", is_served=True, **across) == time_s("h100-sxm-80gb", **across)
