"""Plans: request, results, messages if nothing fits, and output of the command."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shapewright
from command_line import run as run_command
from shapewright.app.report.optimize.plan import chrome_trace, plan_columns, render_plan
from shapewright.app.report.outputs.plan import plans_output
from shapewright.core.errors import LayoutError, ShapewrightError, WorkloadError
from shapewright.core.units import format_bytes, format_seconds
from shapewright.hardware.loader import load_device
from shapewright.memory.estimate import estimate_memory
from shapewright.models.read import read_model
from shapewright.optimize.plan.layers import find_layer_kinds
from shapewright.optimize.plan.request import PlanRequest
from shapewright.optimize.plan.result import Breakdown, PlanResult, break_down, explain_difference
from shapewright.optimize.plan.space import list_splits
from shapewright.prediction.build import build_scenario
from shapewright.workload.layout import ParallelLayout

H100 = "h100-sxm-80gb"
OFFLOADED = {"offload_optimizer": True}
SMALL = {"device": H100, "num_devices": 16, "global_batch_size": 64}


def small_plan(**keywords: Any) -> PlanResult:
    """Plan Llama-3-8B on two nodes."""
    return shapewright.plan("llama-3-8b", **{**SMALL, **keywords})


def test_plan_is_a_prediction() -> None:
    """Each listed plan equals the prediction of its layout and fits; the best comes first."""
    result = small_plan()
    steps = [plan.prediction.step_time_s for plan in result.plans]
    for plan in result.plans:
        alone = shapewright.predict("llama-3-8b", device=H100, workload=plan.workload, layout=plan.layout)
        assert plan.prediction.step_time_s == alone.step_time_s
        assert plan.total_bytes == pytest.approx(alone.memory.total_bytes, rel=1e-9)
        assert plan.total_bytes <= result.device.memory_bytes
        assert plan.layout.num_devices == 16

    assert steps == sorted(steps)
    assert [plan.rank for plan in result.plans] == list(range(1, 11))


def test_listed_plans_differ_to_some_purpose() -> None:
    """Of the plans of one split, a later one needs less memory than an earlier one."""
    least: dict[tuple[Any, ...], float] = {}
    for plan in small_plan(top=60).plans:
        layout = plan.layout
        key = (
            *(layout.tensor_parallel, layout.pipeline_parallel, layout.data_parallel, layout.context_parallel),
            plan.workload.micro_batch_size,
        )
        assert plan.total_bytes < least.get(key, float("inf"))
        least[key] = plan.total_bytes


def test_flags_and_lists_keep_values() -> None:
    """A field that was given has its value in every plan, and one with a list has values of the list."""
    result = small_plan(
        layout={"tensor_parallel": 2},
        workload={"recompute": "full"},
        keep={"pipeline_parallel": (2, 4), "pipeline_schedule": ("1f1b",), "virtual_pipeline": (1,)},
    )
    assert {plan.layout.tensor_parallel for plan in result.plans} == {2}
    assert {plan.layout.pipeline_parallel for plan in result.plans} <= {2, 4}
    assert {(plan.layout.pipeline_schedule, plan.layout.virtual_pipeline) for plan in result.plans} == {("1f1b", 1)}
    assert {plan.workload.recompute for plan in result.plans} == {"full"}


def test_objectives_have_different_best_plans() -> None:
    """Least memory, shortest step and cheapest token are each the least of their kind."""
    best = {objective: small_plan(objective=objective).plans[0] for objective in ("time", "memory", "cost")}

    assert best["memory"].total_bytes < best["time"].total_bytes
    assert best["time"].prediction.step_time_s < best["memory"].prediction.step_time_s
    costs = {objective: plan.device_s_per_million_tokens for objective, plan in best.items()}
    assert costs["cost"] < 1.001 * min(costs.values())


def test_the_cheapest_plan_takes_as_many_devices_as_cost_no_more() -> None:
    """Replicas with hidden communication cost the same on 1 and 16 devices; over slow networks fewer are cheaper."""
    free = small_plan(objective="cost", top=100)
    poor = shapewright.with_nodes("l40s", inter_node_bandwidth_bytes_per_s=1.25e8)
    job = {"num_devices": 16, "global_batch_size": 64, "workload": {"seq_len": 1024}}
    slow = shapewright.plan("gpt2-xl", device=poor, objective="cost", **job)
    costs = [plan.device_s_per_million_tokens for plan in free.plans]
    equal = [plan for plan, cost in zip(free.plans, costs, strict=True) if cost < 1.0005 * min(costs)]

    assert len({plan.layout.num_devices for plan in equal}) > 1
    assert free.plans[0].layout.num_devices == 16
    assert slow.plans[0].layout.num_devices < 16
    steps = {plan.layout.num_devices: plan.prediction.step_time_s for plan in reversed(free.plans)}
    assert steps[16] == min(steps.values())


def test_headroom_leaves_room() -> None:
    """With a tenth of the memory to be left free all plans leave it, and the best is slower or as fast."""
    result, all_of_it = small_plan(headroom_fraction=0.1), small_plan()
    assert max(plan.total_bytes for plan in result.plans) <= 0.9 * result.device.memory_bytes
    assert result.plans[0].prediction.step_time_s >= all_of_it.plans[0].prediction.step_time_s


def test_optimizer_counts_for_memory() -> None:
    """An optimizer with narrow states needs less memory for the same plan."""
    keep = {"layout": {"tensor_parallel": 8, "pipeline_parallel": 1, "zero_stage": 0}, "top": 1}
    usual, narrow = small_plan(**keep), small_plan(**keep, optimizer="adamw-8bit")
    assert narrow.plans[0].total_bytes < usual.plans[0].total_bytes - 4 * 8e9 / 8
    of_workload = small_plan(**keep, workload={"optimizer": "adamw-8bit"})
    assert of_workload.optimizer == "adamw-8bit"
    assert of_workload.plans[0].total_bytes == narrow.plans[0].total_bytes


def test_offload_is_tried_on_request() -> None:
    """Plans with the host's memory are among those without it; more of them fit, and the best is no slower."""
    keep = {"keep": {"tensor_parallel": (1,)}, "num_devices": 8}
    without, tried = small_plan(**keep), small_plan(**keep, try_offload=True)

    assert tried.tally.num_plans == 4 * without.tally.num_plans
    assert tried.tally.num_fitting > 2 * without.tally.num_fitting
    assert not any(plan.workload.offload_optimizer for plan in without.plans)
    assert tried.plans[0].prediction.step_time_s <= without.plans[0].prediction.step_time_s
    smallest = small_plan(**keep, try_offload=True, objective="memory").plans[0]
    assert smallest.workload.offload_optimizer
    assert any("of each device to the host" in note for note in small_plan(**keep, workload=OFFLOADED).notes)


def test_a_job_that_needs_the_host_gets_an_offload_plan() -> None:
    """If nothing fits the devices, the message names a plan that offloads to the host, and more devices."""
    with pytest.raises(LayoutError, match=r"with try_offload it fits \(.*optimizer on host.*fewest devices"):
        shapewright.plan("llama-3-70b", device=H100, num_devices=8, global_batch_size=64)


@pytest.mark.parametrize(
    ("links", "is_suggested"),
    [
        ({"host_bandwidth_bytes_per_s": 64e9, "pcie_bandwidth_bytes_per_s": None}, True),
        ({"host_bandwidth_bytes_per_s": None, "pcie_bandwidth_bytes_per_s": 64e9}, True),
        ({"host_bandwidth_bytes_per_s": None, "pcie_bandwidth_bytes_per_s": None}, False),
    ],
)
def test_the_host_is_named_where_a_link_leads_to_it(links: dict[str, float | None], is_suggested: bool) -> None:
    """A link of the host's own does as well as PCIe; without either offloading has no price and is no way out."""
    device = replace(load_device(H100), **links)
    with pytest.raises(LayoutError, match="no plan fits 8 h100-sxm-80gb") as refusal:
        shapewright.plan("llama-3-70b", device=device, num_devices=8, global_batch_size=64)
    assert ("with try_offload it fits" in str(refusal.value)) == is_suggested


@pytest.mark.parametrize(("way_out", "words"), [({"num_devices": 8}, "fewest"), ({"try_offload": True}, "try_offload")])
def test_ways_out_are_of_the_chosen_software(way_out: dict[str, Any], words: str) -> None:
    """Experts in three kernels keep more for backward than fused ones do: the memory that is named counts it."""
    job = {**SMALL, "num_devices": 4, "workload": {"seq_len": 8192}, "keep": {"recompute": ("none",)}}
    with pytest.raises(LayoutError, match="no plan fits 4") as refusal:
        shapewright.plan("gpt-oss-20b", **job, software="nemo-moe-2025")
    (named,) = (part for part in str(refusal.value).split("; ") if words in part)
    tuned, chosen = (
        format_bytes(
            shapewright.plan("gpt-oss-20b", **{**job, **way_out}, software=software, objective="memory", top=1)
            .plans[0]
            .total_bytes
        )
        for software in ("tuned", "nemo-moe-2025")
    )

    assert tuned != chosen
    assert named.endswith(f", {chosen})")


def test_muon_counts_in_the_order_of_plans() -> None:
    """Replicas share Muon's GEMMs from ZeRO stage 1 on; the best plan of stage 0 is slower by the unshared ones."""
    keep = {"layout": {"tensor_parallel": 8, "pipeline_parallel": 1}, "top": 1}
    steps = {
        (name, stage): small_plan(keep={"zero_stage": (stage,)}, optimizer=name, layout=keep["layout"], top=1)
        .plans[0]
        .prediction.step_time_s
        for name in ("adamw", "muon")
        for stage in (0, 1)
    }

    assert steps["muon", 0] - steps["adamw", 0] > 1.5 * (steps["muon", 1] - steps["adamw", 1])
    assert small_plan(optimizer="muon").plans[0].layout.zero_stage > 0


def test_stragglers_and_prices_scale_expected_values() -> None:
    """A factor for stragglers makes the expected step and the cost of a token longer, and changes no order."""
    plain, slow = small_plan(usd_per_hour=2.0), small_plan(usd_per_hour=2.0, straggler_factor=1.5)
    for one, other in zip(plain.plans, slow.plans, strict=True):
        assert one.layout == other.layout
        assert other.expected_step_s == pytest.approx(1.5 * one.prediction.step_time_s)
        assert one.usd_per_million_tokens is not None
        assert other.usd_per_million_tokens == pytest.approx(1.5 * one.usd_per_million_tokens)
    best = plain.plans[0]
    # 16 devices at 2 USD an hour, a step of so many seconds and 64 * 2048 tokens.
    assert best.usd_per_million_tokens == pytest.approx(
        16 * 2.0 / 3600 * best.prediction.step_time_s / (64 * 2048) * 1e6
    )


def test_a_step_is_inside_its_interval_with_stragglers() -> None:
    """The table has the predicted step with its interval, and the expected one beside them; rates are the expected."""
    output = plans_output(small_plan(straggler_factor=1.5))
    best = output.plans[0]
    cells = {column.name: column.cells[0] for column in plan_columns(output)}

    assert cells["step"] == format_seconds(best.step_time_s)
    assert cells["90 % interval"].startswith(format_seconds(best.step_time_low_s))
    assert cells["expected"] == format_seconds(1.5 * best.step_time_s)
    assert best.tokens_per_s == pytest.approx(64 * 2048 / (1.5 * best.step_time_s))
    assert best.tokens_per_s_per_device == pytest.approx(best.tokens_per_s / 16)
    assert best.device_s_per_million_tokens == pytest.approx(16 * 1.5 * best.step_time_s / (64 * 2048) * 1e6)
    assert not any(next(one for one in plan_columns(plans_output(small_plan())) if one.name == "expected").cells)


def test_front_trades_time_for_memory() -> None:
    """Along the front steps grow and memory shrinks; its first point is the fastest plan."""
    result = small_plan()
    steps, needed = zip(*((point.step_s, point.total_bytes) for point in result.front), strict=True)
    assert list(steps) == sorted(steps)
    assert list(needed) == sorted(needed, reverse=True)
    assert steps[0] == pytest.approx(result.plans[0].prediction.step_time_s, rel=1e-9)


def test_communication_is_split_by_link() -> None:
    """Eight ways of tensor parallelism stay in the node, replicas of it reach across nodes."""
    layout = ParallelLayout(tensor_parallel=8, data_parallel=2, zero_stage=1)
    parts = break_down(shapewright.predict("llama-3-8b", device=H100, layout=layout))
    names = {*parts.parts, *parts.hidden}

    assert "tensor communication in node" in parts.exposed
    assert "data communication between nodes" in names
    assert not names & {"tensor communication between nodes", "data communication in node"}


def test_loss_names_the_part() -> None:
    """The comparison with the runner-up names the part of its largest loss, and its gains."""
    best = Breakdown({"GEMMs": 10.0, "pipeline bubble": 1.0}, {})
    other = Breakdown({"GEMMs": 9.75, "pipeline bubble": 1.5}, {})
    loss = explain_difference(best, other)

    assert (loss.part, loss.lost_s, loss.gained_s, loss.slower_by_s) == ("pipeline bubble", 0.5, 0.25, 0.25)


def test_interrupt_keeps_the_best_so_far() -> None:
    """Ctrl-C after the first part of the space returns the best of it, marked as incomplete."""

    def interrupt(done: int, total: int) -> None:
        assert done < total
        raise KeyboardInterrupt

    result = small_plan(progress=interrupt)
    assert not result.is_complete
    assert result.plans
    assert {plan.layout.pipeline_parallel for plan in result.plans} == {1}


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        ({"num_devices": 0}, LayoutError, "num_devices=0 must be an integer from 1 to"),
        ({"num_devices": 12}, LayoutError, "num_devices=12 must be a multiple of 8, the number of h100-sxm-80gb"),
        ({"global_batch_size": None}, WorkloadError, "a plan needs global_batch_size, the sequences"),
        ({"global_batch_size": 7, "keep": {"pipeline_parallel": (1,), "tensor_parallel": (1,),
          "context_parallel": (1,)}}, LayoutError, "no number of replicas that divides global_batch_size=7 leaves"),
        ({"layout": {"tensor_parallel": 3}}, LayoutError, "tensor_parallel must divide num_devices=16"),
        ({"layout": {"tensor_parallel": 0}}, LayoutError, "tensor_parallel=0 must be an integer from 1"),
        ({"layout": {"tensor_parallel": 2}, "keep": {"tensor_parallel": (4, 8)}}, LayoutError, "keep allows 4, 8 only"),
        ({"keep": {"warp": (1,)}}, LayoutError, "kept='warp' is not chosen by a plan"),
        ({"objective": "fame"}, LayoutError, "objective='fame' is not known; choose one of time, cost, memory"),
        ({"workload": {"phase": "decode"}}, WorkloadError, "plans are for training"),
        ({"workload": {"seq_len": 2**27}}, LayoutError, "give a shorter seq_len, or devices with more memory"),
        ({"straggler_factor": 0.5}, LayoutError, "straggler_factor=0.5 must be a number from 1 to below 100"),
        ({"usd_per_hour": -1.0}, LayoutError, "usd_per_hour=-1.0 must be a number above 0"),
        ({"usd_per_hour": 1e308}, LayoutError, "usd_per_hour=1e+308 must be a number above 0 and at most 1e"),
        ({"headroom_fraction": 1.5}, LayoutError, "headroom_fraction=1.5 must be a number from 0 to below 1"),
        ({"optimizer": "adamx"}, WorkloadError, "unknown optimizer 'adamx'"),
        ({"workload": {"offload_optimizer": True}, "optimizer": "muon"}, WorkloadError, "does not support"),
        ({"top": 0}, LayoutError, "top=0 must be an integer of at least 1"),
    ],
)  # fmt: skip
def test_invalid_scenarios(keywords: dict[str, Any], error: type[ShapewrightError], message: str) -> None:
    """Invalid input gives one line with the allowed values."""
    with pytest.raises(error, match=re.escape(message)) as caught:
        small_plan(**keywords)
    assert "\n" not in str(caught.value)


def test_a_batch_that_the_devices_cannot_share_gets_the_nearest_that_they_can() -> None:
    """No divisor of 1024 leaves degrees of 72 devices that 32 heads allow; 1008 and 1080 sequences do."""
    question: dict[str, Any] = {"device": "gb200", "num_devices": 72, "layout": {"pipeline_parallel": 1}}
    question["layout"]["context_parallel"] = 1
    with pytest.raises(
        LayoutError, match=r"tensor_parallel=18 must divide num_heads=32\).*give global_batch_size 1008 or 1080"
    ):
        shapewright.plan("llama-3-8b", global_batch_size=1024, **question)
    for advised in (1008, 1080):
        assert shapewright.plan("llama-3-8b", global_batch_size=advised, top=1, **question).plans


def test_model_that_cannot_fit_gets_the_nearest_plan() -> None:
    """405B parameters on one node: how much the smallest plan needs, and the fewest devices that hold one."""
    with pytest.raises(LayoutError) as caught:
        shapewright.plan("llama-3.1-405b", device=H100, num_devices=8, global_batch_size=64, layout={"zero_stage": 1})
    found = re.search(r"the fewest devices that fit are (\d+) \((.*)\)$", str(caught.value))
    assert found is not None
    assert "the smallest needs" in str(caught.value)
    enough = int(found[1])
    result = shapewright.plan(
        "llama-3.1-405b", device=H100, num_devices=enough, global_batch_size=64, layout={"zero_stage": 1}
    )
    assert result.plans, "a plan for the suggested number of devices fits"


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command."""
    return run_command(
        ["plan", "llama-3-8b", "--device", H100, "--gpus", "16", "--global-batch", "64", *arguments], capsys
    )


def test_command_prints_what_python_returns(capsys: pytest.CaptureFixture[str]) -> None:
    """--json has the plans, their parts and the front, and its numbers are those of the Python result."""
    code, out, _ = run(["--json", "--top", "3"], capsys)
    document = json.loads(out)
    result = small_plan(top=3)

    assert code == 0
    assert [plan["step_time_s"] for plan in document["plans"]] == [p.prediction.step_time_s for p in result.plans]
    assert document["plans"][0]["loss"] is None
    assert document["plans"][1]["loss"]["slower_by_s"] >= 0.0
    assert sum(document["plans"][0]["breakdown_s"].values()) == pytest.approx(document["plans"][0]["step_time_s"])
    assert document["space"]["size"] == result.tally.num_plans
    assert len(document["pareto"]) == len(result.front)


def test_command_explains_the_runner_up(capsys: pytest.CaptureFixture[str]) -> None:
    """The report lists plans, parts of the step, the reason of the runner-up, and the front."""
    code, out, err = run([], capsys)
    assert (code, err) == (0, "")
    assert re.search(r"^rank 2 \(.*\) is .* slower: it loses .* in ", out, re.MULTILINE)
    for words in (
        "Step time of rank 1 by part",
        "Pareto front",
        "plans in",
        "slow devices and links are not included",
    ):
        assert words in out


@pytest.mark.parametrize("name", ["megatron-args", "torchtitan-toml", "neox-yaml", "deepspeed-json", "accelerate-yaml"])
def test_formats_get_a_plan_that_they_can_express(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With --format the search keeps to layouts that the framework can express; -o also prints the report."""
    target = tmp_path / "flags"
    code, out, err = run(["--format", name, "-o", str(target), "--json"], capsys)
    assert (code, err) == (0, f"wrote {target} (rank 1)\n")
    plan = json.loads(out)["plans"][0]
    text = target.read_text(encoding="utf-8")

    assert str(plan["micro_batch_size"]) in text
    printed_code, printed, _ = run(["--format", name], capsys)
    assert (printed_code, printed) == (0, text)


def test_a_report_beside_a_file_names_the_next_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """With -o the report ends as it does without --format; the file alone has no command below it."""
    format_of = ["--format", "megatron-args"]
    _, report, _ = run([*format_of, "-o", str(tmp_path / "flags")], capsys)
    _, file, _ = run(format_of, capsys)

    assert report.splitlines()[-1].startswith("next: shapewright predict ")
    assert "next:" not in file


def test_a_trace_that_cannot_be_drawn_is_refused_before_a_page_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A plan without a pipeline has no trace: nothing is written, the page neither."""
    page, trace = tmp_path / "plan.html", tmp_path / "plan.json"
    code, _, err = run(["--keep", "pp=1", "--html", str(page), "--trace", str(trace)], capsys)
    assert (code, page.exists(), trace.exists()) == (2, False, False)
    assert "--trace draws a pipeline" in err


def test_pages_and_traces(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The page is one file with the timeline; the trace has every pass of every stage, none of them overlapping."""
    page, trace = tmp_path / "plan.html", tmp_path / "plan.json"
    code, _, err = run(["--keep", "pp=4", "--html", str(page), "--trace", str(trace)], capsys)
    assert (code, err) == (0, "")
    assert "Pipeline of rank 1" in page.read_text(encoding="utf-8")
    events_file = json.loads(trace.read_text(encoding="utf-8"))
    events = [event for event in events_file["traceEvents"] if event["ph"] == "X"]
    for stage in range(4):
        own = sorted((event for event in events if event["pid"] == stage), key=lambda event: event["ts"])
        assert all(before["ts"] + before["dur"] <= after["ts"] + 1e-3 for before, after in itertools.pairwise(own))
    assert events_file["otherData"]["simulated_step_s"] == pytest.approx(
        events_file["otherData"]["predicted_step_s"], rel=0.05
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "tp"], "--keep 'tp' is not FIELD=VALUE, such as tp=4,8"),
        (["--keep", "tp=x"], "keep tensor_parallel='x' must be one or more integers"),
        (["--keep", "tpp=4"], "it chooses tp, pp, dp"),
        (["--keep", "tp=2", "--keep", "tp=4"], "--keep names --tensor-parallel twice"),
        (["--keep", "schedule=2f2b"], "choose among 1f1b, gpipe, zero-bubble"),
        (["--keep", "sp=perhaps"], "must be true or false, or both"),
        (["-o", "flags"], "-o has no effect without --format"),
        (["--format", "megatron"], "unknown format"),
        (["--format", "megatron-args", "--json"], "--format and --json both print"),
        (["--format", "deepspeed-json", "--keep", "tp=2"], "can express only 1"),
        (["--pick", "0"], "--pick 0"),
        (["--keep", "pp=1", "--trace", "trace.json"], "--trace draws a pipeline, and rank 1 has none"),
        (["--headroom", "lots"], "is not a fraction such as"),
    ],
)
def test_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A contradiction or a word that is not known is one line on standard error, exit code 2."""
    code, out, err = run(arguments, capsys)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_pipelines_shard_weights_only_on_request() -> None:
    """ZeRO stage 3 with a pipeline is only tried if requested, since frameworks reject it."""

    def stages(**changes: Any) -> set[tuple[bool, int]]:
        found = small_plan(top=400, **changes)
        assert any("ZeRO stages up to 2 are tried" in note for note in found.notes) == (not changes)
        return {(plan.layout.pipeline_parallel > 1, plan.layout.zero_stage) for plan in found.plans}

    usual, kept_stages = stages(), stages(keep={"zero_stage": (3,)})
    assert (True, 3) not in usual
    assert (False, 3) in usual
    assert (True, 3) in kept_stages


def test_dualpipe_is_tried_on_request() -> None:
    """DualPipe is only tried if requested, and then named in the plan."""
    assert "dualpipe" not in {plan.layout.pipeline_schedule for plan in small_plan(top=400).plans}
    kept = small_plan(keep={"pipeline_schedule": ("dualpipe",)})
    assert {plan.layout.pipeline_schedule for plan in kept.plans} == {"dualpipe"}
    assert any("dualpipe exists in DeepSeek's own stack" in note for note in kept.notes)
    assert "Pipeline of rank 1" not in render_plan(plans_output(kept), kept.plans[0].prediction)
    with pytest.raises(LayoutError, match="is priced by a formula and not simulated"):
        chrome_trace(kept.plans[0])


def test_dualpipe_takes_every_even_number_of_micro_batches_from_two_per_stage() -> None:
    """Of 12 sequences in two stages: 12, 6 and 4 micro-batches, of 1, 2 and 3 sequences."""
    plans = shapewright.plan(
        "llama-3-8b",
        device=replace(load_device(H100), memory_bytes=10**15),
        num_devices=2,
        global_batch_size=12,
        top=500,
        keep={"pipeline_schedule": ("dualpipe",), "pipeline_parallel": (2,)},
        workload={"seq_len": 512},
    ).plans

    assert {plan.workload.micro_batch_size for plan in plans} == {1, 2, 3}
    for plan in plans:
        memory = estimate_memory(read_model("llama-3-8b").config, plan.workload, plan.layout)
        assert plan.total_bytes == pytest.approx(memory.total_bytes, rel=1e-9)


def test_splits_of_four_devices_of_a_mixture_by_hand() -> None:
    """Four devices on the tensor axis alone hold 8 experts in slices or whole; the latter need sequence parallelism."""
    scenario = build_scenario("mixtral-8x7b", H100, workload={"seq_len": 512})
    request = PlanRequest(num_devices=4, kept={"tensor_parallel": (4,), "micro_batch_size": (1,)})
    splits = list_splits(scenario, request, num_devices=4, global_batch_size=4)

    found = {(each.sequence_parallel, each.expert_tensor_parallel or 4, each.expert_parallel) for each in splits}
    assert found == {(False, 4, 1), (True, 4, 1), (True, 1, 1), (True, 1, 2), (True, 1, 4)}


def test_a_single_device_has_one_split() -> None:
    """Sequence parallelism without a tensor axis has no effect, and is not tried twice."""
    scenario = build_scenario("llama-3-8b", H100, workload={"seq_len": 512})
    request = PlanRequest(num_devices=1, kept={"micro_batch_size": (1,)})

    assert len(list(list_splits(scenario, request, num_devices=1, global_batch_size=4))) == 1


def test_an_encoder_of_one_layer_is_a_kind_of_its_own() -> None:
    """Plans of T5 with 12 decoder layers and a single encoder layer count both."""
    config = replace(read_model("flan-t5-base").config, num_encoder_layers=1)

    assert find_layer_kinds(config).layers_by_kind(config, 1).tolist() == [12.0, 1.0]
