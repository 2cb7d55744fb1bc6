"""Capacity: stages, largest sizes, fit options, the command."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

import shapewright
from command_line import run
from shapewright.app.cli.console import make_console
from shapewright.app.report.memory import print_memory_report, verdict_words
from shapewright.app.report.outputs.memory import memory_output
from shapewright.core.errors import LayoutError, WorkloadError
from shapewright.lowering.checks import max_sequence_length
from shapewright.memory.estimate import ALLOCATOR_BAND_FRACTION, estimate_memory, estimate_stages
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.capacity.fit import Capacity, find_largest
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.optimizers import find_recipe
from shapewright.workload.workload import Workload

LLAMA_3_8B_PARAMETERS = 8_030_261_248


def test_stages_agree_with_the_busiest() -> None:
    """estimate_memory returns the memory of the fullest stage."""
    config = TransformerConfig(hidden_size=2048, num_layers=26, num_heads=16, vocab_size=256_000)
    workload, layout = Workload(micro_batch_size=1), ParallelLayout(pipeline_parallel=4)
    stages = estimate_stages(config, workload, layout)

    assert [stage.stage for stage in stages] == [0, 1, 2, 3]
    assert max(stage.total_bytes for stage in stages) == estimate_memory(config, workload, layout).total_bytes


def total_bytes(found: Capacity, workload: Workload) -> float:
    """Memory of the same job with another workload."""
    recipe = find_recipe(found.optimizer, workload.dtype) if workload.is_training else None
    return estimate_memory(found.config, workload, found.layout, recipe=recipe).total_bytes


JOBS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("llama-3-8b", "h100-sxm-80gb", {"micro_batch_size": 1}, {"data_parallel": 8, "zero_stage": 1}),
    ("gpt3-175b", "a100-sxm-80gb", {"micro_batch_size": 1}, {"tensor_parallel": 8, "pipeline_parallel": 8}),
    ("llama-3-8b", "h100-sxm-80gb", {"phase": "decode", "context_len": 8191}, {}),
    ("llama-3-8b", "h100-sxm-80gb", {"phase": "decode", "micro_batch_size": 128, "context_len": 1023}, {}),
    ("mixtral-8x7b", "h200-sxm-141gb", {"phase": "prefill", "micro_batch_size": 1}, {"tensor_parallel": 2}),
]


@pytest.mark.parametrize(("model", "device", "workload", "layout"), JOBS, ids=lambda value: str(value)[:20])
def test_largest_sizes_fit_and_the_next_do_not(
    model: str, device: str, workload: dict[str, Any], layout: dict[str, Any]
) -> None:
    """The largest sizes fit; one sequence more does not, nor do 128 tokens more, where they have positions."""
    found = shapewright.fits(model, device=device, workload=workload, layout=layout)
    length = "context_len" if found.workload.phase == "decode" else "seq_len"
    capacity = found.device.memory_bytes
    most, longest = found.largest_micro_batch_size, found.largest_seq_len

    assert most >= 1
    assert total_bytes(found, replace(found.workload, micro_batch_size=most)) <= capacity
    assert total_bytes(found, replace(found.workload, micro_batch_size=most + 1)) > capacity
    assert total_bytes(found, replace(found.workload, **{length: longest})) <= capacity
    if longest < max_sequence_length(found.config):
        # Sequences are whole steps of 128; a context is as long as it can be.
        more = 1 if length == "context_len" else 128
        assert total_bytes(found, replace(found.workload, **{length: longest + more})) > capacity
    else:
        assert workload.get("micro_batch_size", 1) == 1, "a large batch is to be bound by memory, not by positions"


def test_largest_micro_batch_divides_the_global_batch() -> None:
    """With 24 sequences on 8 replicas the largest micro-batch is 1 or 3, whatever the memory."""
    found = shapewright.fits(
        "gpt2",
        device="h100-sxm-80gb",
        workload={"micro_batch_size": 1, "global_batch_size": 24},
        layout={"data_parallel": 8},
    )
    assert found.largest_micro_batch_size == 3


@pytest.mark.parametrize("threshold", [0, 1, 2, 3, 7, 64, 100])
def test_search_finds_the_threshold(threshold: int) -> None:
    """Bisection returns the last size that fits, within its limit."""
    assert find_largest(lambda size: size <= threshold, 100) == threshold
    assert find_largest(lambda size: size <= threshold, 50) == min(threshold, 50)


@pytest.mark.parametrize(
    ("model", "workload", "layout"),
    [
        ("llama-3-8b", {}, {}),
        ("llama-3-8b", {"micro_batch_size": 1}, {"data_parallel": 8}),
        ("llama-3.1-405b", {"micro_batch_size": 1}, {"tensor_parallel": 8}),
        ("llama-3-70b", {"phase": "decode", "micro_batch_size": 64, "context_len": 8192}, {}),
        ("mixtral-8x22b", {"global_batch_size": 64}, {}),
    ],
    ids=lambda value: str(value)[:30],
)
def test_fit_options_fit_and_are_sorted(model: str, workload: dict[str, Any], layout: dict[str, Any]) -> None:
    """Every option fits when estimated as a job; options on the same devices come first, then by time per token."""
    found = shapewright.fits(model, device="h100-sxm-80gb", workload=workload, layout=layout)

    assert found.verdict == "does not fit"
    assert found.fit_options
    present = found.layout.num_devices
    costs = [
        (remedy.num_devices > present, remedy.slowdown_fraction)
        for remedy in found.fit_options
        if remedy.slowdown_fraction is not None
    ]
    assert costs == sorted(costs)
    for remedy in found.fit_options:
        of_layout = {name: value for name, value in remedy.changes.items() if hasattr(found.layout, name)}
        of_workload = {name: value for name, value in remedy.changes.items() if name not in of_layout}
        after = shapewright.fits(
            model, device="h100-sxm-80gb", workload=workload | of_workload, layout=layout | of_layout
        )
        assert after.fits
        assert after.layout.num_devices == remedy.num_devices
        assert after.busiest.total_bytes == pytest.approx(remedy.needed_bytes)
        assert after.fit_options == ()


def test_option_on_the_same_devices_is_the_weakest() -> None:
    """Eight replicas of an 8 B model need sharded states, and stage 1 is sufficient: 2 and 3 are not listed."""
    found = shapewright.fits(
        "llama-3-8b", device="h100-sxm-80gb", workload={"micro_batch_size": 1}, layout={"data_parallel": 8}
    )
    same_devices = [dict(remedy.changes) for remedy in found.fit_options if remedy.num_devices == 8]
    assert {"zero_stage": 1} in same_devices
    assert {"zero_stage": 2} not in same_devices


def test_long_sequences_get_context_ranks() -> None:
    """A million tokens do not fit without context parallelism, which is among the options."""
    found = shapewright.fits(
        "llama-3-8b", device="h100-sxm-80gb", workload={"micro_batch_size": 1, "seq_len": 1_048_576}
    )
    assert any("context_parallel" in remedy.changes for remedy in found.fit_options)


def test_job_without_options_names_the_closest(capsys: pytest.CaptureFixture[str]) -> None:
    """Layers of 800 G parameters never fit: the closest option is named with its memory."""
    huge = TransformerConfig(hidden_size=262_144, num_layers=500, num_heads=1024, vocab_size=128_000)
    found = shapewright.fits(huge, device="h100-sxm-80gb")
    nearest = found.closest_option

    assert found.fit_options == ()
    assert any("no change makes it fit" in note for note in found.notes)
    assert nearest is not None
    assert nearest.needed_bytes > found.device.memory_bytes
    assert nearest.num_devices % 8 == 0
    print_memory_report(memory_output(found), make_console())
    assert f"on {nearest.num_devices:,} devices with --" in capsys.readouterr().out
    assert memory_output(found).to_json()["nearest"]["total_bytes"] == nearest.needed_bytes


def test_verdict_is_tight_within_the_allocator_overhead() -> None:
    """A job that fits only without allocator overhead is ``tight``."""
    found = shapewright.fits("gpt2", device="h100-sxm-80gb")
    needed = found.busiest.total_bytes
    for memory_bytes, verdict in (
        (needed * (1.01 + ALLOCATOR_BAND_FRACTION), "fits"),
        (needed * 1.01, "tight"),
        (needed * 0.99, "does not fit"),
    ):
        device = replace(found.device, memory_bytes=memory_bytes)
        assert shapewright.fits("gpt2", device=device, workload=found.workload).verdict == verdict


def test_verdict_states_the_overhead_of_what_is_needed() -> None:
    """A tenth of what the job needs may go to the allocator, not a tenth of what it leaves."""
    found = memory_output(shapewright.fits("gpt2", device="a100-sxm-80gb"))
    one_gib = replace(found, total_bytes=2.0**30, headroom_bytes=9 * 2.0**30, total_high_bytes=1.1 * 2**30)

    assert verdict_words(replace(one_gib, capacity_bytes=10 * 2.0**30)) == (
        "fits: needs 1 GiB of 10 GiB, 9 GiB left; allocator and communication buffers may take up to 102 MiB"
    )


def test_layout_that_does_not_divide_is_an_error() -> None:
    """A layout that does not divide the model raises an error."""
    with pytest.raises(LayoutError, match="tensor_parallel=5"):
        shapewright.fits("gpt2", device="h100-sxm-80gb", layout={"tensor_parallel": 5})


def test_command_line_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Components add up to the total, stages are listed, and Megatron's 7.5 bytes a parameter are in it."""
    job = ["llama-3-8b", "--device", "h100-sxm-80gb", "--micro-batch-size", "1", "--dp", "8", "--zero-stage", "1"]
    code, out, err = run(["memory", *job, "--json"], capsys)
    facts = json.loads(out)

    assert (code, err) == (0, "")
    assert facts["fits"] is True
    assert sum(facts["components"].values()) == pytest.approx(facts["total_bytes"])
    assert facts["headroom_bytes"] == pytest.approx(79.10 * 2**30 - facts["total_bytes"])
    states = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
    assert sum(facts["components"][name] for name in states) == 7.5 * LLAMA_3_8B_PARAMETERS
    assert facts["stages"][0]["total_bytes"] == facts["total_bytes"]


def test_command_line_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    """Verdict, bars, stages, largest sizes; what to turn on where it does not fit."""
    fitting = ["gpt3-175b", "--device", "a100-sxm-80gb", "--tp", "8", "--pp", "8", "--micro-batch-size", "1"]
    _, report, _ = run(["memory", *fitting, "--recompute", "selective"], capsys)
    _, missing, _ = run(["memory", "llama-3-8b", "--device", "h100-sxm-80gb"], capsys)

    for words in ("fits: needs", "optimizer", "####", "stage", "largest micro_batch_size", "largest seq_len"):
        assert words in report
    for words in ("does not fit: needs 175 GiB of 79.1 GiB", "none fits", "--recompute full", "time per token"):
        assert words in missing


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--optimizer", "adamx"], "unknown optimizer 'adamx'"),
        (["--tp", "5"], "tensor_parallel=5"),
        (["--micro-batch-size", "0"], "micro_batch_size=0"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    code, out, err = run(["memory", "gpt2", "--device", "a100-sxm-80gb", *arguments], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_optimizer_without_effect_has_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    """An optimizer has no effect in decode, and a note states it."""
    _, out, _ = run(["memory", "gpt2", "--device", "a100-sxm-80gb", "--phase", "decode", "--optimizer", "lion"], capsys)
    assert "optimizer=lion has no effect in decode" in out


def test_batches_that_do_not_divide_are_refused() -> None:
    """A global batch that replicas and micro-batches do not divide raises an error."""
    with pytest.raises(WorkloadError, match=r"global_batch_size=63 must be a multiple of .* = 2 \* 8; try 48 or 64"):
        shapewright.fits(
            "llama-3-8b",
            device="h100-sxm-80gb",
            workload={"global_batch_size": 63, "micro_batch_size": 2},
            layout={"data_parallel": 8},
        )


def test_options_over_nodes_without_a_network_have_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    """Options over several nodes cannot be priced without a network: a note names the missing field."""
    box = ["--node-size", "8", "--dp", "8"]
    job = [
        "memory",
        "llama-3-8b",
        "--device",
        "rtx-4090",
        *box,
        "--micro-batch-size",
        "1",
        "--seq-len",
        "4096",
        "--json",
    ]
    lonely, linked = (json.loads(run([*job, *more], capsys)[1]) for more in ([], ["--network-gbit-per-s", "100"]))

    assert any("set inter_node_bandwidth_bytes_per_s" in note for note in lonely["notes"])
    assert any(remedy["step_time_s"] is None for remedy in lonely["remedies"])
    assert not any("inter_node_bandwidth" in note for note in linked["notes"])
    assert all(remedy["step_time_s"] for remedy in linked["remedies"])
