"""Plans in arrays against predictions one by one, and the best of a space against all of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shapewright.core.errors import ShapewrightError
from shapewright.hardware.device import Device
from shapewright.hardware.loader import load_device
from shapewright.memory.estimate import estimate_memory
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.optimize.plan import findings as plan_findings
from shapewright.optimize.plan.engine import explore
from shapewright.optimize.plan.findings import Findings
from shapewright.optimize.plan.request import PlanJob, PlanRequest, offload_choices
from shapewright.optimize.plan.result import break_down
from shapewright.optimize.plan.timeline import SIMULATED_SCHEDULES
from shapewright.prediction.build import build_scenario
from shapewright.prediction.predict import predict
from shapewright.prediction.scenario import Scenario
from shapewright.pricing.software import load_software, software_names
from shapewright.workload.layout import PIPELINE_SCHEDULES, ParallelLayout
from shapewright.workload.workload import RECOMPUTE_MODES, Workload

# Dense, gated, tied, expert layers, both kinds of layers, two windows, latent attention, an encoder before a decoder.
MODELS = ("llama-3-8b", "gpt3-125m", "mixtral-8x7b", "deepseek-v2-lite", "gemma-2-2b", "llama-4-scout", "t5-base")
DEVICES = ("h100-sxm-80gb", "a100-sxm-40gb")
LIMITLESS_BYTES = 1e18


FINETUNING: tuple[dict[str, Any], ...] = (
    {},
    {"finetune": "lora"},
    {"finetune": "qlora", "lora_rank": 8, "lora_targets": "attention"},
    {"finetune": "dora", "lora_dropout": 0.1, "lora_targets": "mlp"},
)
LAST_LAYERS = {"finetune": "last-layers", "last_layers": 3}
UNIFORM = ("llama-3-8b", "gpt3-125m")  # models whose layers are alike


@st.composite
def jobs(draw: st.DrawFn) -> PlanJob:
    """A model, a device of endless memory, a batch and a number of devices."""
    device = replace(load_device(draw(st.sampled_from(DEVICES))), memory_bytes=LIMITLESS_BYTES)
    workload = {
        "seq_len": draw(st.sampled_from((2048, 8192))),
        "global_batch_size": draw(st.sampled_from((16, 24, 64))),
        "attention": draw(st.sampled_from(("flash", "unfused"))),
        "optimizer": draw(st.sampled_from(("adamw", "muon", "galore-8bit"))),
    }
    name = draw(st.sampled_from(MODELS))
    choices = (*FINETUNING, *([LAST_LAYERS] if name in UNIFORM else []))
    workload |= draw(st.sampled_from(choices if workload["optimizer"] != "galore-8bit" else choices[:1]))
    longer = {"max_position_embeddings": 8192} if name.startswith("gpt3") else None
    question = build_scenario(name, device, workload=workload, overrides=longer)
    objective = draw(st.sampled_from(("time", "cost", "memory")))
    num_devices = draw(st.sampled_from((1, 4, 16, 24, 64)))
    requested: tuple[dict[str, tuple[Any, ...]], ...] = (
        {},
        offload_choices({}, question.workload),
        {"offload_activations": (True,)},
        {"pipeline_schedule": PIPELINE_SCHEDULES, "zero_stage": (0, 1, 2, 3)},
    )
    kept = draw(st.sampled_from(requested))
    return PlanJob(
        scenario=Scenario.of(
            question.config, device, question.workload, software=load_software(draw(st.sampled_from(software_names())))
        ),
        request=PlanRequest(num_devices=num_devices, objective=objective, kept=kept),
    )


@settings(max_examples=15, deadline=None)
@given(jobs(), st.randoms(use_true_random=False))
def test_arrays_equal_predictions_one_by_one(job: PlanJob, random: Any) -> None:
    """Step time and memory of any plan are those of predict and memory; the parts of its step add up to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_findings, "_KEPT", 10**9)
        findings = explore(job)
    num_plans = len(findings.best["step_s"])
    assert num_plans == findings.tally.num_plans == findings.tally.num_fitting
    for row in random.sample(range(num_plans), min(num_plans, 12)):
        choice = findings.choice(findings.best, row)
        own = job.scenario.software.settle(replace(job.scenario.workload, **choice.chosen_workload))
        prediction = predict(
            job.scenario.config,
            device=job.scenario.device,
            workload=own,
            layout=choice.layout,
            software=job.scenario.software,
        )
        assert choice.layout.num_devices == choice.num_devices
        assert findings.best["step_s"][row] == pytest.approx(prediction.step_time_s, rel=1e-9)
        needed_bytes = estimate_memory(job.scenario.config, own, choice.layout).total_bytes
        assert findings.best["bytes"][row] == pytest.approx(needed_bytes, rel=1e-9)
        assert sum(break_down(prediction).parts.values()) == pytest.approx(prediction.step_time_s, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("llama-3-8b", {}), ("mixtral-8x7b", {}), ("mixtral-8x7b", {"num_mtp_layers": 1, "num_layers": 4})],
)
def test_plans_of_an_unmeasured_device_are_its_predictions(name: str, changes: dict[str, int]) -> None:
    """Plans price every kind of operation as if the device had no record, experts of the last stage too."""
    workload = {"seq_len": 2048, "global_batch_size": 16}
    device = replace(load_device("h100-sxm-80gb"), memory_bytes=LIMITLESS_BYTES)
    question = build_scenario(read_model(name, changes), device, workload=workload, uncalibrated=True)
    job = PlanJob(
        scenario=Scenario.of(question.config, question.device, question.workload),
        request=PlanRequest(num_devices=4, objective="memory"),
    )
    findings = explore(job)
    assert len(findings.best["step_s"]) > 10
    for row in range(0, len(findings.best["step_s"]), 5):
        choice = findings.choice(findings.best, row)
        own = replace(question.workload, **choice.chosen_workload)
        prediction = predict(question.config, device=question.device, workload=own, layout=choice.layout)
        assert findings.best["step_s"][row] == pytest.approx(prediction.step_time_s, rel=1e-9)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("dit-s-2", {}),
        ("vit-b-16", {"optimizer": "muon"}),
        ("vit-b-16", {"finetune": "last-layers", "last_layers": 2}),
        ("llama-3-8b", {"kernels": "fused"}),
    ],
)
def test_plans_are_their_predictions(name: str, fields: dict[str, Any]) -> None:
    """Linear layers before and after those of an image model count once; fused losses have chunks by micro-batch."""
    device = replace(load_device("h100-sxm-80gb"), memory_bytes=LIMITLESS_BYTES)
    scenario = build_scenario(name, device, workload={"global_batch_size": 64, **fields})
    findings = explore(PlanJob(scenario=scenario, request=PlanRequest(num_devices=16, objective="memory")))
    assert len(findings.best["step_s"]) > 10
    for row in range(0, len(findings.best["step_s"]), 5):
        choice = findings.choice(findings.best, row)
        prediction = scenario.replace(layout=choice.layout, **choice.chosen_workload).predict()
        assert findings.best["step_s"][row] == pytest.approx(prediction.step_time_s, rel=1e-9)


def every_plan(
    config: TransformerConfig, device: Device, workload: Workload, num_devices: int
) -> Iterator[tuple[float, float]]:
    """Step time and memory of every plan, by trying all values of all fields; DualPipe only on request."""
    degrees = [degree for degree in range(1, num_devices + 1) if num_devices % degree == 0]
    chunks = range(1, config.num_layers + 1)
    for tensor, pipeline, context, expert, cut, sequence, zero, size, mode, chunk, schedule in itertools.product(
        degrees,
        degrees,
        degrees,
        degrees,
        (None, 1) if config.is_moe else (None,),
        (True, False),
        range(4),
        degrees,
        RECOMPUTE_MODES,
        chunks,
        SIMULATED_SCHEDULES,
    ):
        data = num_devices // (tensor * pipeline * context)
        per_stage = -(-config.num_layers // pipeline)
        if (
            data < 1
            or tensor * pipeline * context * data != num_devices
            or (tensor == 1 and not (sequence and cut is None))
        ):
            continue
        if pipeline > 1 and zero == 3:
            continue
        if per_stage % chunk or per_stage * (pipeline - 1) >= config.num_layers or (zero and data * context == 1):
            continue
        assert workload.global_batch_size is not None
        if chunk > 1 and workload.global_batch_size // (data * size) % pipeline:
            continue
        try:
            layout = ParallelLayout(
                tensor_parallel=tensor,
                pipeline_parallel=pipeline,
                data_parallel=data,
                context_parallel=context,
                expert_parallel=expert,
                expert_tensor_parallel=cut,
                sequence_parallel=sequence,
                zero_stage=zero,
                virtual_pipeline=chunk,
                pipeline_schedule=schedule,
            )
            own = replace(workload, micro_batch_size=size, recompute=mode)
            prediction = predict(config, device=device, workload=own, layout=layout)
        except ShapewrightError:
            continue
        if prediction.memory.total_bytes <= device.memory_bytes:
            yield prediction.step_time_s, prediction.memory.total_bytes


@pytest.mark.parametrize("moe_width", [0, 1024, 1026], ids=["dense", "experts", "experts that no axis of 4 cuts"])
def test_best_is_the_best_of_all(moe_width: int) -> None:
    """Number of plans, shortest step and least memory equal those of brute force."""
    experts = {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": moe_width} if moe_width else {}
    config = TransformerConfig(
        hidden_size=1024,
        num_layers=4,
        num_heads=8,
        vocab_size=32000,
        max_position_embeddings=4096,
        **experts,
    )
    device = replace(load_device("h100-sxm-80gb"), memory_bytes=4e9)
    workload = Workload(seq_len=4096, micro_batch_size=1, global_batch_size=4)
    plans = np.array(list(every_plan(config, device, workload, 4)))
    found: dict[str, Findings] = {}
    for objective in ("time", "memory"):
        request = PlanRequest(num_devices=4, objective=objective)
        found[objective] = explore(PlanJob(scenario=Scenario.of(config, device, workload), request=request))

    assert found["time"].tally.num_fitting == len(plans) < found["time"].tally.num_plans
    assert found["time"].best["step_s"][0] == pytest.approx(plans[:, 0].min(), rel=1e-9)
    assert found["memory"].best["bytes"][0] == pytest.approx(plans[:, 1].min(), rel=1e-9)
    for step_s, needed in zip(found["time"].front["step_s"], found["time"].front["bytes"], strict=True):
        both = (plans[:, 0] < step_s * (1 - 1e-9)) & (plans[:, 1] < needed * (1 - 1e-9))
        assert not both.any(), "a plan on the front is beaten in time and memory"
