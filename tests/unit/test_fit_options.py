"""find_fit_options: no option has unnecessary changes, and no sufficient option is missed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import shapewright
from shapewright.core.errors import ShapewrightError
from shapewright.hardware.loader import load_device
from shapewright.memory.estimate import estimate_memory
from shapewright.prediction.capacity.fit import Capacity
from shapewright.prediction.capacity.fit_options import FitOption
from shapewright.workload.workload import RECOMPUTE_MODES

JOBS: dict[str, dict[str, Any]] = {
    "one device": {"config": "llama-3-8b"},
    "replicas": {"config": "llama-3-8b", "workload": {"micro_batch_size": 8}, "layout": {"data_parallel": 8}},
    "a node": {"config": "llama-3-70b", "workload": {"micro_batch_size": 1}, "layout": {"data_parallel": 8}},
    "many nodes": {"config": "llama-3.1-405b", "workload": {"micro_batch_size": 2}, "layout": {"tensor_parallel": 8}},
    "mixture": {"config": "mixtral-8x7b", "workload": {"micro_batch_size": 1}, "layout": {"data_parallel": 8}},
    "unfused": {"config": "gpt3-2.7b", "workload": {"micro_batch_size": 4, "attention": "unfused"}},
    "decode": {
        "config": "llama-3-70b",
        "workload": {"phase": "decode", "micro_batch_size": 64, "context_len": 8191},
        "layout": {"tensor_parallel": 2},
    },
}


def capacity_of(config: Any, **job: Any) -> Capacity:
    """A job on H100s that does not fit."""
    found = shapewright.fits(config, device=job.pop("device", "h100-sxm-80gb"), **job)
    assert found.fit_options
    return found


def fits_after(found: Capacity, changes: dict[str, Any]) -> bool:
    """Return whether the job fits with changes; False where they contradict each other."""
    of_layout = {name: value for name, value in changes.items() if hasattr(found.layout, name)}
    of_workload = {name: value for name, value in changes.items() if name not in of_layout}
    try:
        layout, workload = replace(found.layout, **of_layout), replace(found.workload, **of_workload)
        needed_bytes = estimate_memory(found.config, workload, layout).total_bytes
    except ShapewrightError:
        return False
    return needed_bytes <= found.device.memory_bytes


def weaker_forms(found: Capacity, remedy: FitOption) -> list[dict[str, Any]]:
    """Options without one of the changes, or with a weaker form of one; on the same number of devices."""
    changes = dict(remedy.changes)
    degrees = {name for name in changes if name.endswith("_parallel")}
    forms = [{name: changes[name] for name in changes if name != left_out} for left_out in changes.keys() - degrees]
    if changes.get("zero_stage", 0) > found.layout.zero_stage + 1:
        forms.append({**changes, "zero_stage": changes["zero_stage"] - 1})
    if changes.get("recompute") == "full" and found.workload.recompute == "none":
        forms.append({**changes, "recompute": RECOMPUTE_MODES[RECOMPUTE_MODES.index("full") - 1]})
    if "micro_batch_size" in changes and 2 * changes["micro_batch_size"] < found.workload.micro_batch_size:
        forms.append({**changes, "micro_batch_size": 2 * changes["micro_batch_size"]})
    return [form for form in forms if form]


@pytest.mark.parametrize("name", JOBS)
def test_no_change_is_unnecessary(name: str) -> None:
    """Without any of its changes, or with a weaker form of it, the job does not fit."""
    found = capacity_of(**JOBS[name])
    for remedy in found.fit_options:
        assert fits_after(found, dict(remedy.changes))
        for field, value in remedy.changes.items():
            now = getattr(found.layout, field) if hasattr(found.layout, field) else getattr(found.workload, field)
            assert value != now
        for form in weaker_forms(found, remedy):
            assert not fits_after(found, form), (remedy.changes, form)


def test_replicas_become_shards_of_the_model() -> None:
    """A 70 B model fits with tensor or pipeline parallelism instead of eight replicas on the same devices."""
    found = capacity_of(**JOBS["a node"])
    present = [remedy for remedy in found.fit_options if remedy.num_devices == 8]
    assert any(remedy.changes.keys() & {"tensor_parallel", "pipeline_parallel"} for remedy in present)
    for remedy in present:
        degrees = {**vars(found.layout), **remedy.changes}
        assert degrees["tensor_parallel"] * degrees["pipeline_parallel"] * degrees["data_parallel"] == 8


def test_larger_jobs_are_the_smallest_that_fit() -> None:
    """405 B parameters do not fit on one node: options on two larger numbers of nodes, below which none fits."""
    found = capacity_of(**JOBS["many nodes"])
    larger = sorted({remedy.num_devices for remedy in found.fit_options} - {8})
    assert len(larger) == 2
    for num_devices in range(16, larger[0], 8):
        for data in (degree for degree in range(1, num_devices // 8 + 1) if (num_devices // 8) % degree == 0):
            pipeline = num_devices // 8 // data
            strongest = {"pipeline_parallel": pipeline, "data_parallel": data, "recompute": "full", "loss_chunks": 8}
            strongest |= {"zero_stage": 3 if pipeline == 1 and data > 1 else min(data - 1, 1)}
            assert not fits_after(found, strongest), strongest


@pytest.mark.parametrize(
    ("device", "changes"),
    [("h100-sxm-80gb", {"kv_cache_dtype": "fp8"}), ("a100-sxm-80gb", {"kv_cache_dtype": "fp8"})],
)
def test_a_narrower_cache_is_an_option(device: str, changes: dict[str, Any]) -> None:
    """With one sequence, a device may hold the cache in 8 bits and not in 16: kv_cache_dtype is an option."""
    workload = {"phase": "decode", "micro_batch_size": 1, "context_len": 100_000}
    needed = [
        shapewright.fits("llama-3.1-8b", device="b200-sxm-180gb", workload={**workload, **extra}).busiest.total_bytes
        for extra in ({}, changes)
    ]
    between = replace(load_device(device), memory_bytes=(needed[0] + needed[1]) / 2.0)
    found = capacity_of("llama-3.1-8b", device=between, workload=workload)
    on_one = [dict(remedy.changes) for remedy in found.fit_options if remedy.num_devices == 1]
    assert changes in on_one
    # fp8 products, and so weights, are offered where the device has them.
    assert ({"dtype": "fp8"} in on_one) == ("fp8" in between.dense_flops_per_s)


def test_notes_list_assumptions() -> None:
    """Notes state the bytes of the optimizer, the saved inputs of narrow GEMMs and the software."""
    job: dict[str, Any] = {"device": "h100-sxm-80gb", "software": "fsdp-2024"}
    narrow = shapewright.fits("llama-3-8b", workload={"dtype": "fp8", "optimizer": "lion"}, **job)
    # lion keeps one moment: 2 bytes of weights, 4 of gradients, 4 of master weights and 4 of the moment
    assert any(note.startswith("lion: ") and "; 14 bytes per parameter" in note for note in narrow.notes)
    assert any("inputs of fp8 GEMMs are assumed to be saved in 16 bits" in note for note in narrow.notes)
    assert any("fsdp-2024" in note for note in narrow.notes)
    assert narrow.optimizer == "lion"

    wide = shapewright.fits("llama-3-8b", device="h100-sxm-80gb", workload={"phase": "decode"})
    assert wide.optimizer == ""
    assert not any("assumed to be saved" in note or "software" in note for note in wide.notes)


def test_replicas_of_a_mixture_divide_its_experts() -> None:
    """Of Mixtral's 46.7 B weights 45.1 B are experts: 93 GB in bf16, 48 GB with half of the experts, 26 with a quarter.

    An A100 of 40 GB holds a quarter. In training, 8 devices need the host's memory, 16 do not.
    """
    decode = {"phase": "decode", "micro_batch_size": 1}
    found = capacity_of("mixtral-8x7b", device="a100-sxm-40gb", workload=decode)
    assert found.fit_options[0].changes == {"data_parallel": 4, "expert_parallel": 4}

    job = {"workload": {"micro_batch_size": 1}, "layout": {"data_parallel": 8}}
    options = capacity_of("mixtral-8x7b", **job).fit_options
    same = [one for one in options if one.num_devices == 8]
    assert all("offload_optimizer" in one.changes for one in same)
    assert any("expert_parallel" in one.changes for one in same)
    fastest = min((one for one in options if one.num_devices == 16), key=lambda one: one.slowdown_fraction or 0.0)
    assert fastest.changes["expert_parallel"] > 1
    assert "offload_optimizer" not in fastest.changes
