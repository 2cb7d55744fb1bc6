"""Activations and optimizer states in the host's memory: what leaves the device, what moves, what it costs."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import shapewright
from shapewright.app.cli import main
from shapewright.core.errors import UnknownRateError, WorkloadError
from shapewright.hardware.loader import load_device
from shapewright.lowering.model import lower
from shapewright.lowering.operations.collective import Collective
from shapewright.memory.estimate import estimate_memory
from shapewright.memory.saved_tensors import list_saved_tensors
from shapewright.models.read import read_model
from shapewright.prediction.build import build_scenario
from shapewright.prediction.capacity.fit_options import LINK_FRACTION
from shapewright.prediction.predict import Prediction, predict
from shapewright.pricing.host import HOST_OPTIMIZER_BYTES_PER_S
from shapewright.pricing.software import OVERLAP_SHARE
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

TRAINING = {"micro_batch_size": 2, "seq_len": 2048}
LAYERS = 32  # of Llama-3-8B
LINK_BYTES_PER_S = 64e9  # PCIe 5.0 x16 of its H100


def llama(device: str = "h100-sxm-80gb", layout: dict[str, Any] | None = None, **workload: Any) -> Prediction:
    """Predict a training step of Llama-3-8B."""
    return shapewright.predict("llama-3-8b", device=device, workload=TRAINING | workload, layout=layout)


def hosts(prediction: Prediction) -> dict[str, Collective]:
    """Operations of the host axis by name."""
    operations = (entry.operation for entry in prediction.operations)
    return {one.name: one for one in operations if isinstance(one, Collective) and one.is_host}


def test_activations_by_hand() -> None:
    """All but two layers' tensors leave; the copies of each pass hide behind 0.9 of its computation."""
    plain, moved = llama(), llama(offload_activations=True)
    layer = sum(one.num_bytes for one in list_saved_tensors(plain.config, plain.workload, plain.layout))
    one_way_s = LAYERS * layer / (LINK_FRACTION * LINK_BYTES_PER_S)
    cover = dict.fromkeys(("forward", "backward"), 0.0)
    for entry in plain.operations:
        if entry.operation.pass_name in cover:
            cover[entry.operation.pass_name] += entry.total_time_s
    exposed_s = sum(max(one_way_s - OVERLAP_SHARE * cover_s, 0.0) for cover_s in cover.values())

    assert set(hosts(moved)) == {"activations.to_host", "activations.from_host"}
    assert plain.memory.activations_bytes - moved.memory.activations_bytes == pytest.approx((LAYERS - 2) * layer)
    assert moved.memory.host_bytes == pytest.approx(LAYERS * layer)
    assert moved.step_time_s - plain.step_time_s == pytest.approx(exposed_s, rel=1e-9)
    assert exposed_s > 0.1


def test_full_recomputation_offloads_layer_inputs_only() -> None:
    """With full recomputation only each layer's input moves, and computation hides it."""
    plain, moved = llama(recompute="full"), llama(recompute="full", offload_activations=True)
    inputs = 2 * 2048 * 4096 * 2

    assert float(hosts(moved)["activations.to_host"].message_bytes) == inputs
    assert plain.memory.total_bytes - moved.memory.total_bytes == (LAYERS - 2) * inputs
    assert moved.step_time_s == plain.step_time_s


def test_some_layers_recomputed() -> None:
    """Layers that are not computed again move whole; the others their input alone."""
    moved = hosts(llama(recompute="full", recompute_layers=8, offload_activations=True))
    counts = {name: int(one.repeats) for name, one in moved.items() if name.endswith("to_host")}
    assert counts == {"activations.to_host": 8, "activations.whole.to_host": 24}


def test_frozen_layers_move_nothing() -> None:
    """Layers before the trained ones have no backward pass: they save no tensors, and none leave."""
    moved = llama(offload_activations=True, finetune="last-layers", last_layers=3)
    layer = sum(one.num_bytes for one in list_saved_tensors(moved.config, moved.workload, moved.layout))

    assert {name: int(one.repeats) for name, one in hosts(moved).items()} == {
        "activations.to_host": 3,
        "activations.from_host": 3,
    }
    assert moved.memory.host_bytes == pytest.approx(3 * layer)


@pytest.mark.parametrize(
    ("layout", "layers", "ends"),
    [
        ({"data_parallel": 4}, 4, 4),
        ({"pipeline_parallel": 4}, 4, 2),
        ({"pipeline_parallel": 4, "tensor_parallel": 4}, 8, 4),
    ],
)
def test_devices_that_update_weights_share_their_host(layout: dict[str, int], layers: int, ends: int) -> None:
    """Nodes of 8: embedding and logits are updated by their own stages, which are on one node if the job is."""
    operations = hosts(llama(layout=layout, offload_optimizer=True))
    sharing = [operations[f"optimizer.{group}.on_host"].num_ranks for group in ("layers", "embedding", "logits")]
    assert sharing == [layers, ends, ends]


def test_optimizer_by_hand() -> None:
    """12 bytes of states a parameter leave; 4 of gradient go, 2 of weight come, 30 are touched in the host's memory."""
    plain, moved = llama(layout={"data_parallel": 8}), llama(layout={"data_parallel": 8}, offload_optimizer=True)
    operations = hosts(moved)
    weights = LAYERS * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336)

    assert plain.memory.optimizer_bytes == moved.memory.host_bytes == 12 * plain.parameters.total
    assert moved.memory.optimizer_bytes == 0
    assert float(operations["optimizer.layers.gradients.to_host"].message_bytes) == 4 * weights
    assert float(operations["optimizer.layers.weights.from_host"].message_bytes) == 2 * weights
    step = next(entry for entry in moved.operations if entry.operation.name == "optimizer.layers.on_host")
    assert step.total_time_s == pytest.approx(8 * 30 * weights / HOST_OPTIMIZER_BYTES_PER_S)


def test_fp32_weights_are_also_on_the_host() -> None:
    """In fp32 a weight is its own master copy: the host holds a copy and 8 bytes of moments."""
    memory = estimate_memory(
        build_scenario("gpt3-125m", "h100-sxm-80gb").config,
        Workload(dtype="fp32", offload_optimizer=True),
        ParallelLayout(),
    )
    assert memory.host_bytes == pytest.approx(3 * memory.weights_bytes)


def test_nvlink_c2c_hides_more_than_pcie() -> None:
    """NVLink-C2C carries 450 GB/s each way, seven times PCIe 5.0, and hides what that one shows."""
    times = [
        entry.price.time_s
        for device in ("h100-sxm-80gb", "gh200-96gb")
        for entry in llama(device, offload_activations=True).operations
        if entry.operation.name == "activations.to_host"
    ]
    assert times[0] / times[1] == pytest.approx(450 / 64)
    assert llama("gh200-96gb", offload_activations=True).step_time_s == llama("gh200-96gb").step_time_s


def test_capacity_includes_offload() -> None:
    """Offloading lets larger jobs and longer sequences fit; the result states its cost."""
    job: dict[str, Any] = {"device": "h100-sxm-80gb", "layout": {"tensor_parallel": 8}}
    workload = {"micro_batch_size": 1, "seq_len": 131072}
    plain = shapewright.fits("llama-3-8b", workload=workload, **job)
    moved = shapewright.fits("llama-3-8b", workload=workload | {"offload_activations": True}, **job)

    assert (plain.fits, moved.fits) == (False, True)
    assert moved.largest_seq_len > plain.largest_seq_len
    for found in (plain, moved):
        assert found.offload is not None
        assert found.offload.total_bytes == pytest.approx(moved.busiest.total_bytes)
        assert found.offload.freed_bytes == pytest.approx(plain.busiest.total_bytes - moved.busiest.total_bytes)
        assert found.offload.step_time_s is not None
        assert found.offload.exposed_s is not None
        assert found.offload.exposed_fraction is not None
        assert 0.0 <= found.offload.exposed_fraction <= 1.0


@pytest.mark.parametrize("uncalibrated", [False, True])
def test_traffic_by_hand(uncalibrated: bool) -> None:
    """A layer's tensors twice; 4 bytes of gradient and 2 of weight for each parameter; directions at the same time."""
    job: dict[str, Any] = {"device": "h100-sxm-80gb", "uncalibrated": uncalibrated, "software": "nemo-2024"}
    plain = shapewright.predict("llama-3-8b", workload=TRAINING, **job)
    layer = sum(one.num_bytes for one in list_saved_tensors(plain.config, plain.workload, plain.layout))
    # Whichever of the two the job has already, copies of the other are told apart from it.
    for already in ({}, {"offload_optimizer": True}, {"offload_activations": True}):
        found = shapewright.fits("llama-3-8b", workload=TRAINING | already, **job)
        saved, states = found.offload, found.optimizer_offload
        assert saved is not None
        assert states is not None
        assert saved.moved_bytes == pytest.approx(2 * LAYERS * layer)
        assert saved.transfer_s == pytest.approx(LAYERS * layer / (0.8 * LINK_BYTES_PER_S))
        assert saved.host_bytes == pytest.approx(LAYERS * layer)
        assert states.moved_bytes == pytest.approx((4 + 2) * plain.parameters.total, rel=1e-4)  # norms left out
        assert states.transfer_s == pytest.approx(4 * plain.parameters.total / (0.8 * LINK_BYTES_PER_S), rel=1e-4)
        assert states.exposed_fraction is None
        if not already:
            after = shapewright.predict("llama-3-8b", workload=TRAINING | {"offload_activations": True}, **job)
            assert saved.step_time_s == after.step_time_s
            assert saved.exposed_s == pytest.approx(after.step_time_s - plain.step_time_s)
            assert saved.exposed_fraction == pytest.approx((saved.exposed_s or 0.0) / (2 * (saved.transfer_s or 0.0)))


def test_offload_is_a_remedy() -> None:
    """Where one device must do, offloaded optimizer states are what makes it fit, priced."""
    found = shapewright.fits("llama-3-8b", device="gh200-96gb", workload={"micro_batch_size": 1, "seq_len": 4096})
    on_one = [remedy for remedy in found.fit_options if remedy.num_devices == 1]

    assert on_one
    for remedy in on_one:
        assert remedy.changes["offload_optimizer"] is True
        assert remedy.slowdown_fraction is not None
        assert remedy.needed_bytes <= found.device.memory_bytes


def test_recomputing_all_layers_is_a_remedy() -> None:
    """Where only some layers are computed again, all of them may be enough, and it is priced."""
    workload = {"micro_batch_size": 1, "seq_len": 8192, "recompute": "full", "recompute_layers": 8}
    found = shapewright.fits(
        "llama-3-70b", device="h100-sxm-80gb", workload=workload, layout={"data_parallel": 64, "zero_stage": 3}
    )
    assert {"recompute_layers": 80} in [dict(remedy.changes) for remedy in found.fit_options]


def test_waterfall_and_pipelines() -> None:
    """Of a pipeline each stage moves what its own layers save; a measured step loses the rest to ``offload``."""
    moved = llama(layout={"pipeline_parallel": 4}, global_batch_size=16, offload_activations=True)
    assert int(hosts(moved)["activations.to_host"].repeats) == 8 * 8  # layers of a stage, micro-batches

    found = shapewright.mfu(
        "llama-3-8b",
        device="h100-sxm-80gb",
        seconds=3.6,
        num_devices=8,
        global_batch_size=128,
        workload={"offload_activations": True},
    )
    parts = {part.name: part.time_s for part in found.waterfall}
    assert parts["offload"] > 0.0
    assert sum(parts.values()) == pytest.approx(3.6)


def test_plan_and_predict_agree_on_offload() -> None:
    """Plans of a job that offloads take the step and the memory of predict."""
    job: dict[str, Any] = {"device": "h100-sxm-80gb", "num_devices": 8}
    workload = {"global_batch_size": 16, "seq_len": 8192, "offload_activations": True, "offload_optimizer": True}
    for plan in shapewright.plan("llama-3-8b", workload=workload, **job).plans[:3]:
        assert plan.workload.offload_activations
        assert plan.workload.offload_optimizer
        assert plan.prediction.memory.host_bytes > 0.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"phase": "decode", "offload_activations": True},
            "offload_activations has no effect in decode; omit it",
        ),
        ({"phase": "prefill", "offload_optimizer": True}, "offload_optimizer has no effect in prefill"),
        ({"offload_optimizer": True, "optimizer": "muon"}, "use optimizer='adamw' or omit offload_optimizer"),
        ({"offload_activations": 1}, "offload_activations=1 must be true or false"),
    ],
)
def test_invalid_offload_is_rejected(fields: dict[str, Any], message: str) -> None:
    """Inference saves nothing, no host multiplies Muon's matrices, and a flag is true or false."""
    with pytest.raises(WorkloadError, match=message):
        Workload(**fields)


def test_layers_of_multi_token_prediction_are_copied() -> None:
    """The host holds what one micro-batch saves of all layers; time left out those that predict further tokens."""
    config = replace(read_model("deepseek-v3").config, num_layers=5, num_mtp_layers=1)
    workload = Workload(offload_activations=True, seq_len=512)
    copies = [each for each in lower(config, workload, ParallelLayout()) if each.role == "to_host"]
    moved_bytes = sum(float(each.message_bytes) * int(each.repeats) for each in copies if isinstance(each, Collective))

    assert moved_bytes == pytest.approx(estimate_memory(config, workload, ParallelLayout()).host_bytes)


def test_device_without_a_host_link_rate() -> None:
    """There is no price without the link's rate: predict names the key, memory leaves times out."""
    device = replace(load_device("h100-sxm-80gb"), pcie_bandwidth_bytes_per_s=None)
    scenario = build_scenario("llama-3-8b", device, workload=TRAINING | {"offload_activations": True})
    with pytest.raises(UnknownRateError, match="neither host_bandwidth_bytes_per_s nor pcie_bandwidth_bytes_per_s"):
        predict(scenario.config, device=device, workload=scenario.workload)
    offload = shapewright.fits("llama-3-8b", device=device, workload=TRAINING).offload
    assert offload is not None
    assert (offload.transfer_s, offload.exposed_s, offload.step_time_s) == (None, None, None)
    assert shapewright.fits("llama-3-8b", device=device, workload={"phase": "decode"}).offload is None


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The flags report host memory, link and exposed fraction, in text and in JSON."""
    command = ["memory", "llama-3-8b", "--device", "h100-sxm-80gb", "--seq-len", "8192", "--micro-batch-size", "1"]
    command += ["--offload-activations", "--offload-optimizer"]
    outputs = []
    for arguments in (command, [*command, "--json"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
        outputs.append(capsys.readouterr().out)

    assert "over the host link of 59.6 GiB/s" in outputs[0]
    assert "of the copies)" in outputs[0]
    assert "the host needs" in outputs[0]
    found = json.loads(outputs[1])
    assert found["host_bytes"] == pytest.approx(
        found["offload"]["host_bytes"] + found["optimizer_offload"]["host_bytes"]
    )
    assert found["offload"]["moved_bytes"] > 0
    assert found["workload"]["offload_activations"] is True
