"""Node sizes and networks other than those of the reference system."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

import shapewright
from command_line import run
from shapewright.core.errors import DeviceError, LayoutError
from shapewright.hardware.loader import load_device
from shapewright.hardware.nodes import with_nodes

H100 = load_device("h100-sxm-80gb")


def test_a_slower_network_affects_only_traffic_between_nodes() -> None:
    """With a quarter of the bandwidth, 16 devices are slower, and 8 in one node are not."""
    slow = with_nodes(H100, inter_node_bandwidth_bytes_per_s=12.5e9)
    workload = {"micro_batch_size": 1, "seq_len": 2048, "global_batch_size": 16}
    times_s = {
        (name, replicas): shapewright.predict(
            "llama-3-8b", device=device, workload=workload, layout={"data_parallel": replicas, "zero_stage": 3}
        ).step_time_s
        for name, device in (("own", H100), ("slow", slow))
        for replicas in (8, 16)
    }

    assert times_s["slow", 8] == times_s["own", 8]
    assert times_s["slow", 16] > 1.2 * times_s["own", 16]


def test_smaller_nodes_send_over_the_network() -> None:
    """Tensor parallelism of 8 over nodes of 4 uses the network, with one network card per device."""
    workload = {"micro_batch_size": 1, "seq_len": 2048}
    whole, halved = (
        shapewright.predict("llama-3-8b", device=device, workload=workload, layout={"tensor_parallel": 8}).step_time_s
        for device in (H100, with_nodes(H100, node_size=4))
    )

    assert halved > 1.1 * whole


def test_values_of_the_user_have_no_source() -> None:
    """The title mentions them, and the provenance of the file is dropped; without arguments the device is unchanged."""
    own = with_nodes(H100, node_size=4, inter_node_bandwidth_bytes_per_s=25e9)

    assert own.title == "NVIDIA H100 SXM5 80 GB (nodes of 4, network of 200 Gb/s each)"
    assert set(own.unsourced) == {"node_size", "inter_node_bandwidth_bytes_per_s"}
    assert with_nodes(H100) is H100


@pytest.mark.parametrize("node_size", [0, -1, 16_385, 2.0, True])
def test_invalid_node_sizes(node_size: int) -> None:
    """node_size is an integer of at least 1."""
    with pytest.raises(DeviceError, match="must be an integer from 1 to 16384"):
        with_nodes(H100, node_size=node_size)


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, 1e5, 4e14, float("nan")])
def test_invalid_networks(bandwidth: float) -> None:
    """A bandwidth in the wrong unit is an error with the range in Gb/s."""
    with pytest.raises(DeviceError, match=r"from 0\.008 to 80000 Gb/s"):
        with_nodes(H100, inter_node_bandwidth_bytes_per_s=bandwidth)


def test_plans_for_consumer_cards(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight cards without a reference system need node_size to be planned."""
    job = ["plan", "llama-3-8b", "--device", "rtx-4090", "--gpus", "8", "--global-batch", "64", "--json"]
    code, _, err = run(job, capsys)

    assert code == 2
    assert "--node-size" in err
    assert "--network-gbit-per-s" in err

    code, out, _ = run([*job, "--node-size", "8"], capsys)

    assert code == 0
    assert json.loads(out)["device"]["node_size"] == 8


def test_compare_with_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """All devices of a comparison have the given nodes."""
    job = ["compare", "gpt2", "--devices", "h100-sxm-80gb,l40s", "--dp", "16", "--json"]
    given = ["--node-size", "4", "--network-gbit-per-s", "100"]
    (own, given_nodes) = (json.loads(run([*job, *more], capsys)[1]) for more in ([], given))

    assert given_nodes["notes"][0] == "every device in nodes of 4, network of 100 Gb/s each"
    assert own["devices"][1]["step_time_s"] is None  # L40S has no network of its own
    assert given_nodes["devices"][1]["step_time_s"] > 0.0
    assert given_nodes["devices"][0]["step_time_s"] > own["devices"][0]["step_time_s"]


def test_plans_without_a_known_network() -> None:
    """A node of eight L40S, whose network is unknown, runs plans without traffic between nodes."""
    found = shapewright.plan("gpt2", device="l40s", num_devices=8, global_batch_size=32, top=100)

    assert {plan.layout.num_devices for plan in found.plans} == {8}
    assert any(plan.layout.pipeline_parallel >= 4 for plan in found.plans)


@pytest.mark.parametrize(
    ("axis", "degree", "num_layers", "tries"),
    [
        ("pipeline_parallel", 33, 32, [32]),
        ("pipeline_parallel", 18, 32, [16, 32]),
        ("pipeline_parallel", 26, 28, [7]),
        ("pipeline_parallel", 61, 61, [56]),  # a prime: no whole node shares the layers out evenly
        ("pipeline_parallel", 70, 61, [56]),
        ("tensor_parallel", 33, 32, [32]),
        ("tensor_parallel", 12, 32, [8, 16]),
    ],
)
def test_suggested_degrees_are_possible(axis: str, degree: int, num_layers: int, tries: list[int]) -> None:
    """Every degree that the error suggests can be predicted."""
    model: dict[str, Any] = {"overrides": {"num_layers": num_layers}}
    with pytest.raises(LayoutError, match=f"{axis}={degree} must be a multiple of 8") as refused:
        shapewright.predict("llama-3-8b", device="h100-sxm-80gb", layout={axis: degree}, **model)
    words = re.search(r"try ([0-9]+)(?: or ([0-9]+))?, or set node_size", str(refused.value))
    assert words is not None
    named = [int(word) for word in words.groups() if word]

    assert named == tries
    for one in named:
        found = shapewright.predict("llama-3-8b", device="h100-sxm-80gb", layout={axis: one}, **model)
        assert getattr(found.layout, axis) == one
