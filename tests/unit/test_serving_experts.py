"""Servers of models with experts: which layouts are looked at, what a device holds of the experts, and their times."""

from __future__ import annotations

import json
from typing import Any

import pytest

import shapewright
from command_line import run as run_command
from shapewright.app.report.outputs.serving import layout_words
from shapewright.core.errors import LayoutError
from shapewright.optimize.serving.capacity import candidate_layouts
from shapewright.optimize.serving.plan import ServingPlan
from shapewright.optimize.serving.point import model_as_served
from shapewright.prediction.build import build_scenario
from shapewright.prediction.predict import predict
from shapewright.pricing.servers import CURRENT_SERVER
from shapewright.workload.layout import ParallelLayout

MODEL, DEVICE = "qwen3-30b-a3b", "h100-sxm-80gb"
# 48 layers of 128 experts, each three matrices of 2048 x 768, in bf16.
EXPERTS_BYTES = 48 * 128 * 3 * 2048 * 768 * 2.0


def layouts(most_devices: int, model: str = MODEL, **given: int) -> list[ParallelLayout]:
    """Layouts of an instance of up to some H100s."""
    question = build_scenario(model, DEVICE, workload={"phase": "prefill"})
    return list(candidate_layouts(question, most_devices, given))


def plan(**given: Any) -> ServingPlan:
    """A plan in one format."""
    return shapewright.serve_plan(
        given.pop("model", MODEL), device=DEVICE, **{"prompt_len": 1000, "output_len": 200, "formats": []} | given
    )


def test_layouts_of_four_devices_without_stages() -> None:
    """One, two or four replicas of the attention; experts are cut as it is, or whole over all four devices."""
    of_four = [layout_words(one) for one in layouts(4, pipeline_parallel=1) if one.num_devices == 4]
    assert sorted(of_four) == [
        "DP 4, EP 4",
        "TP 2, DP 2, EP 2",
        "TP 2, DP 2, EP 4, ETP 1",
        "TP 4",
        "TP 4, EP 4, ETP 1",
    ]


@pytest.mark.parametrize("most_devices", [1, 6, 8, 16])
def test_every_layout_holds_the_experts_of_a_layer_once(most_devices: int) -> None:
    """Devices of a stage are the parts of its experts, whichever way they are cut, and no layout comes twice."""
    found = layouts(most_devices)
    assert len(set(found)) == len(found)
    for one in found:
        assert one.expert_parallel * one.expert_tensor_degree == one.devices_per_stage
        assert one.num_devices <= most_devices
    assert [one.num_devices for one in found] == sorted(one.num_devices for one in found)


def test_dense_models_are_cut_by_tensor_and_stages_alone() -> None:
    """No expert axis, no replicas of the attention."""
    assert all(one.num_devices == one.tensor_parallel * one.pipeline_parallel for one in layouts(8, "llama-3-8b"))


def test_degrees_that_are_fixed_restrict_the_layouts() -> None:
    """Each of the five, and those that follow from others."""
    assert {one.data_parallel for one in layouts(8, data_parallel=4)} == {4}
    assert {layout_words(one) for one in layouts(8, expert_parallel=8)} == {
        "DP 8, EP 8",
        "TP 2, DP 4, EP 8, ETP 1",
        "TP 4, DP 2, EP 8, ETP 1",
        "TP 8, EP 8, ETP 1",
    }
    # sglang's moe_tp_size 2 beside moe_ep_size 4: looked at where it is asked for.
    assert "TP 8, EP 4, ETP 2" in {layout_words(one) for one in layouts(8, expert_tensor_parallel=2)}
    assert not [one for one in layouts(8) if one.has_own_expert_degree and one.expert_tensor_degree > 1]


def test_a_device_holds_its_share_of_the_experts() -> None:
    """Where the attention is cut alike, weights differ by the experts' bytes over the parts they are cut into."""
    weights = {layout_words(one.layout): one.weights_bytes for one in plan(num_devices=8).capacities}
    attention_bytes = weights["TP 1"] - EXPERTS_BYTES

    for degree in (2, 4, 8):
        whole = weights[f"DP {degree}, EP {degree}"]
        assert whole == pytest.approx(attention_bytes + EXPERTS_BYTES / degree, rel=1e-12)
    cut, apart = weights["TP 2, DP 4, EP 4"], weights["TP 2, DP 4, EP 8, ETP 1"]
    assert cut == apart == pytest.approx(weights["TP 2"] - EXPERTS_BYTES * (1 / 2 - 1 / 8), rel=1e-12)


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel": 4, "expert_parallel": 4, "expert_tensor_parallel": 1},
        {"tensor_parallel": 2, "data_parallel": 4, "expert_parallel": 8, "expert_tensor_parallel": 1},
        {"tensor_parallel": 1, "data_parallel": 8, "expert_parallel": 8},
    ],
    ids=str,
)
def test_token_time_equals_predict(layout: dict[str, int]) -> None:
    """A decoding instance takes the predicted step in the middle of the answer, exchanges of experts and all."""
    points = [one for one in plan(layout=layout, num_devices=16).points if one.mode == "disaggregated"]
    assert points
    question = build_scenario(MODEL, DEVICE, workload={"phase": "prefill"})
    for point in (points[0], points[-1]):
        workload = {"phase": "decode", "micro_batch_size": point.batch_size, "context_len": 1100, "kv_block_tokens": 16}
        alone = predict(
            model_as_served(question.config, CURRENT_SERVER),
            device=question.device,
            workload=build_scenario(MODEL, DEVICE, workload=workload).workload,
            layout=ParallelLayout(pipeline_parallel=point.layout.pipeline_parallel, **layout),
        )
        assert point.tpot.middle_s == pytest.approx(alone.step_time_s, rel=1e-12)
        assert point.num_sequences % (point.batch_size * layout.get("data_parallel", 1)) == 0


def test_a_large_server_has_layouts_of_every_size_priced() -> None:
    """With more layouts than are priced, every size is represented, and a note states the limit."""
    found = plan(model="deepseek-v3", num_devices=64, workload={"dtype": "fp8"}, prompt_len=500, output_len=20)
    assert {one.layout.num_devices for one in found.capacities} == {16, 32, 64}
    assert len(found.capacities) == 32
    assert "DP 64, EP 64" in {layout_words(one.layout) for one in found.capacities}
    assert any("32 of" in line and "fix a degree" in line for line in found.notes)


def test_the_command_prints_and_writes_the_degrees(capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the flags that predict takes; its JSON has them by field name."""
    job = ["serve-plan", MODEL, "--device", DEVICE, "--isl", "1000", "--osl", "200", "--formats", "none", "--gpus", "8"]
    fixed = ["--tp", "2", "--dp", "4", "--ep", "8"]
    _, text, _ = run_command([*job, *fixed], capsys)
    code, out, _ = run_command([*job, *fixed, "--json"], capsys)

    assert code == 0
    assert "TP 2, DP 4, EP 8, ETP 1" in text
    assert json.loads(out)["best"]["layout"] == {
        "tensor_parallel": 2,
        "pipeline_parallel": 1,
        "data_parallel": 4,
        "expert_parallel": 8,
        "expert_tensor_parallel": 1,
        "num_devices": 8,
    }


def test_replicas_without_experts_are_refused() -> None:
    """Copies of a dense model are instances of their own; one piece of experts that are not there has no effect."""
    for name in ("data_parallel", "expert_tensor_parallel"):
        with pytest.raises(LayoutError, match=f"{name}=2 needs a model with experts"):
            plan(model="llama-3-8b", layout={name: 2})
    found = plan(model="llama-3-8b", layout={"tensor_parallel": 1, "expert_tensor_parallel": 1})
    assert "expert_tensor_parallel=1 has no effect in a model without experts" in found.notes


@pytest.mark.parametrize(("formats", "is_said"), [([], True), (["bf16:int4"], True), (["fp8"], False)])
def test_a_kernel_of_experts_without_effect_is_noted(formats: list[str], is_said: bool) -> None:
    """In 16 bits there is no kernel to choose; a plan that also tries a narrow format has one."""
    found = plan(workload={"expert_kernel": "as-16-bit"}, layout={"tensor_parallel": 1}, formats=formats)
    line = "expert_kernel=as-16-bit has no effect on experts in 16 bits or more"
    assert (line in found.notes) == is_said
