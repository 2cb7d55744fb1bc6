"""Images over several devices: tensor parallelism of image models, plans with a vision tower, and refusals."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

import shapewright
from shapewright.core.errors import ConfigError, LayoutError
from shapewright.core.units import format_seconds
from shapewright.hardware.loader import load_device
from shapewright.lint.check import run_rules
from shapewright.lint.rule import Finding
from shapewright.lowering.model import lower
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm
from shapewright.memory.estimate import estimate_stages
from shapewright.memory.states import count_trained_parameters
from shapewright.models.hf_config import read_hf_config, read_vision_tower
from shapewright.models.parameters import count_parameters
from shapewright.models.read import read_model
from shapewright.prediction.scenario import Scenario
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

H100 = "h100-sxm-80gb"
JOB: dict[str, Any] = {"device": H100, "num_devices": 16, "global_batch_size": 64}
IMAGES = {"images": 2, "image_size": "448,672"}


def layer_flops(tensor_parallel: int) -> float:
    """FLOPs of the weight GEMMs of DiT's layers on one device, conditioning aside."""
    config = read_model("dit-s-2").config
    operations = lower(config, Workload(seq_len=256), ParallelLayout(tensor_parallel=tensor_parallel))
    blocks = ("attention", "mlp")
    return sum(one.flops * one.repeats for one in operations if isinstance(one, Gemm) and one.block in blocks)


def test_a_tensor_axis_splits_image_models() -> None:
    """They have no vocabulary to split, and each of two devices has half of the GEMMs."""
    assert layer_flops(2) == layer_flops(1) / 2


def test_the_ends_of_an_image_model_are_those_of_their_stages() -> None:
    """Linear layers before the layers are reduced on the first stage, those after them on the last.

    DiT-S/2 of width 384: a layer has 4 + 8 + 6 squares (attention, MLP, modulation). Before the layers come patches of
    2 x 2 x 4 values and a timestep of 256 values in two layers; after them a modulation of two widths and patches of
    2 x 2 x 8 values.
    """
    found = shapewright.predict("dit-s-2", device=H100, layout={"pipeline_parallel": 2, "data_parallel": 8})
    reduced = {
        each.operation.name: (each.operation.stage, each.operation.message_bytes, each.operation.repeats)
        for each in found.operations
        if isinstance(each.operation, Collective) and each.operation.role == "gradients"
    }
    square = 384 * 384
    assert reduced == {
        "layers.gradients.all_reduce": ("every", 2.0 * 18 * square, 6),
        "embedding.gradients.all_reduce": ("first", 2.0 * (16 * 384 + 256 * 384 + square), 1),
        "logits.gradients.all_reduce": ("last", 2.0 * (2 * square + 32 * 384), 1),
    }


def test_shapes_of_image_models_are_searched() -> None:
    """A search varies all but the vocabulary: 23 layers of DiT at a width of 1,280 are 685 M parameters.

    18 squares a layer; before the layers patches of 16 values, a timestep in two layers and 1,001 classes, after them
    a modulation of two widths and patches of 32 values.
    """
    found = shapewright.search("dit-xl-2", device=H100, workload={"phase": "train"}, top=5)
    best = found.candidates[0].config
    assert (best.hidden_size, best.num_layers) == (1280, 23)
    square = 1280 * 1280
    ends = (16 + 256 + 1001 + 32) * 1280 + 3 * square
    assert count_parameters(best).total == pytest.approx(23 * 18 * square + ends, rel=1e-3)  # less biases
    assert any("vocab is not varied: a model of images has no vocabulary" in note for note in found.notes)


def test_image_models_have_no_logits_to_chunk() -> None:
    """Fused kernels chunk the logits of a vocabulary; SigLIP has none, and trains as with other kernels."""
    memory = shapewright.predict("siglip-so400m", device=H100, workload={"kernels": "fused"}).memory

    assert memory.logits_bytes == 0.0


def test_offloaded_states_of_the_tower_are_on_the_host_too() -> None:
    """With images the host keeps as many bytes more as the optimizer states of the tower take on the device."""
    memory = {
        (images, offload): shapewright.predict(
            "qwen2.5-vl-7b", device=H100, workload={"images": images, "offload_optimizer": offload}
        ).memory
        for images in (0, 1)
        for offload in (False, True)
    }
    added_bytes = memory[1, False].optimizer_bytes - memory[0, False].optimizer_bytes
    added_on_host_bytes = memory[1, True].host_bytes - memory[0, True].host_bytes

    assert memory[0, True].optimizer_bytes == memory[1, True].optimizer_bytes == 0.0
    assert added_on_host_bytes == pytest.approx(added_bytes)
    assert added_bytes > 0.0


def test_offloaded_activations_of_the_tower_count_every_micro_batch_in_flight() -> None:
    """The first of four stages has four micro-batches in flight, whose tower activations are all on the host."""

    def added_by_images(pipeline_parallel: int) -> tuple[float, float]:
        found = [
            shapewright.predict(
                "qwen2.5-vl-7b",
                device=H100,
                workload={"images": images, "offload_activations": True, "global_batch_size": 16},
                layout={"pipeline_parallel": pipeline_parallel},
            )
            for images in (1, 0)
        ]
        first, other = (estimate_stages(one.config, one.workload, one.layout)[0] for one in found)
        return first.host_bytes - other.host_bytes, first.activations_bytes - other.activations_bytes

    (host_bytes, device_bytes), (host_bytes_of_four, device_bytes_of_four) = map(added_by_images, (1, 4))

    assert host_bytes > 0.0
    assert host_bytes_of_four == pytest.approx(4.0 * host_bytes)
    # The device holds the layers being copied, and the end of the tower of each micro-batch.
    assert device_bytes < device_bytes_of_four < 4.0 * device_bytes


def test_gemma_3_may_keep_every_patch() -> None:
    """As many tokens of an image as it has patches merge none; more are refused."""
    part = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 128}
    config = {"model_type": "gemma3", "vision_config": {**part, "image_size": 224, "patch_size": 14}}
    tower = read_vision_tower({**config, "mm_tokens_per_image": 256}, 128)

    assert tower.patches is not None
    assert tower.patches.projector is not None
    assert tower.patches.projector.merge == 1
    with pytest.raises(ConfigError, match="mm_tokens_per_image=1024 exceeds the 256 patches of an image"):
        read_vision_tower({**config, "mm_tokens_per_image": 1024}, 128)


def test_a_tower_whose_tokens_do_not_divide_is_not_split_by_tokens() -> None:
    """SigLIP's 4096 tokens of 896 pixels are split over two devices, the 729 of LLaVA's 384 pixels are not."""
    config = {
        "model_type": "llava",
        "text_config": {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8},
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14},
    }
    model = read_model(config).with_vision().config
    collectives = {}
    for side in ("384", "896"):
        workload = Workload(micro_batch_size=2, seq_len=4608, images=1, image_size=side)
        operations = lower(model, workload, ParallelLayout(tensor_parallel=2))
        collectives[side] = {
            one.op_name for one in operations if isinstance(one, Collective) and one.name.startswith("vision.")
        }

    assert "reduce_scatter" not in collectives["384"]
    assert {"all_reduce"} <= collectives["384"]
    assert {"reduce_scatter", "all_gather"} <= collectives["896"]


def test_plans_with_images_are_predicted_with_the_tower() -> None:
    """Each listed plan is the prediction of its layout with images, in order of time; the text alone is faster."""
    result = shapewright.plan("qwen2.5-vl-7b", workload=IMAGES, **JOB)
    text = shapewright.plan("qwen2.5-vl-7b", **JOB)
    steps = [plan.prediction.step_time_s for plan in result.plans]
    for plan in result.plans:
        alone = shapewright.predict("qwen2.5-vl-7b", device=H100, workload=plan.workload, layout=plan.layout)
        assert plan.prediction.step_time_s == alone.step_time_s
        assert plan.total_bytes == alone.memory.total_bytes <= result.device.memory_bytes
        assert plan.workload.images == 2

    assert steps == sorted(steps)
    assert steps[0] > text.plans[0].prediction.step_time_s
    assert any("were predicted with the vision tower" in note for note in result.notes)
    assert not any("were predicted with the vision tower" in note for note in text.notes)


def test_no_plan_beats_the_listed_ones_with_the_tower() -> None:
    """A large image reorders the plans; of all that the language model has, those that beat the last are listed."""
    job = {**JOB, "top": 5}
    workload = {"seq_len": 8192, "images": 1, "image_size": "1344"}
    listed = shapewright.plan("qwen2.5-vl-7b", workload=workload, **job).plans
    text = shapewright.plan("qwen2.5-vl-7b", workload={"seq_len": 8192}, **{**job, "top": 500}).plans
    better = set()
    for plan in text:
        with_tower = replace(plan.workload, images=1, image_size="1344")
        with suppress(LayoutError):
            one = shapewright.predict("qwen2.5-vl-7b", device=H100, workload=with_tower, layout=plan.layout)
            fits = one.memory.total_bytes <= load_device(H100).memory_bytes
            if fits and one.step_time_s < listed[-1].prediction.step_time_s * (1.0 - 1e-9):
                better.add(split_of(one.layout, one.workload))

    assert len(listed) == 5
    assert better <= {split_of(plan.layout, plan.workload) for plan in listed}


def split_of(layout: ParallelLayout, workload: Workload) -> tuple[int, ...]:
    """Degrees and micro-batch size, of which variants that need no less memory are not listed."""
    degrees = (layout.tensor_parallel, layout.pipeline_parallel, layout.data_parallel, layout.context_parallel)
    return (*degrees, layout.virtual_pipeline, workload.micro_batch_size)


def test_plans_that_fit_without_the_tower_alone() -> None:
    """Where the language model fits and the whole does not, the message says what the smallest needs."""
    only = {"keep": {"data_parallel": (16,), "zero_stage": (1,), "micro_batch_size": (1,), "recompute": ("none",)}}
    whole, text = (
        min(plan.total_bytes for plan in shapewright.plan("qwen2.5-vl-7b", workload=workload, **only, **JOB).plans)
        for workload in (IMAGES, {})
    )
    between = 0.5 * (whole + text) / load_device(H100).memory_bytes

    assert whole > text + 4e9  # 0.68 B parameters of the tower: weights in 16, gradients in 32 bits
    with pytest.raises(LayoutError, match=r"none of the best plans of the language model fits with the vision tower"):
        shapewright.plan("qwen2.5-vl-7b", workload=IMAGES, headroom_fraction=1.0 - between, **only, **JOB)


def test_a_search_varies_the_language_model_beside_its_tower() -> None:
    """The same shapes at the same times with and without images, and the time of the tower in a note."""
    plain, found = (
        shapewright.search(
            "qwen2.5-vl-7b", device=H100, vary=("heads", "head_dim", "width", "ffn"), top=3, workload=workload
        )
        for workload in ({}, {"images": 4, "image_size": "448"})
    )
    with_tower, alone = (
        shapewright.predict("qwen2.5-vl-7b", device=H100, workload=workload).step_time_s
        for workload in ({"images": 4, "image_size": "448"}, {})
    )

    assert [one.config for one in found.candidates] == [one.config for one in plain.candidates] != []
    assert found.baseline.prediction.step_time_s == plain.baseline.prediction.step_time_s
    assert any(f"tower takes {format_seconds(with_tower - alone)} (images=4)" in note for note in found.notes)


def test_siglip_2_sees_a_square_of_its_patches() -> None:
    """256 patches of 16 pixels are an image of 256 by 256."""
    patches = read_hf_config({"model_type": "siglip2_vision_model"}).config.patches

    assert patches is not None
    assert (patches.side, patches.image_size, patches.num_positions) == (16, (256, 256), 256)


def test_findings_of_the_tower_cost_a_share_of_the_whole_step() -> None:
    """Heads of 72 in SigLIP are named as the tower's; more images in a sequence make them cost more of it."""
    few, many = (
        next(
            finding
            for finding in shapewright.check(
                "gemma-3-4b", device="h100-sxm-80gb", workload={"phase": "prefill", "seq_len": 4096, "images": images}
            ).findings
            if finding.field == "vision_config.head_dim"
        )
        for images in (1, 8)
    )
    assert few.code == "TC103"
    assert set(few.suggestions[0].changes) >= {"vision_config.num_heads", "vision_config.head_dim"}
    assert few.cost_fraction is not None
    assert many.cost_fraction is not None
    assert 0.0 < few.cost_fraction < many.cost_fraction < 0.5


@pytest.mark.parametrize(
    "fields",
    [
        {"finetune": "last-layers", "last_layers": 2},
        {"finetune": "last-layers", "last_layers": 30},  # more than the 27 of the tower
        {"finetune": "lora", "lora_targets": "gate_proj"},  # the tower's MLP has no gate
    ],
)
def test_a_tower_without_trained_weights_has_a_forward_pass_alone(fields: dict[str, Any]) -> None:
    """It comes before the last layers, and before the first adapter: no gradient reaches it."""
    found = shapewright.predict("gemma-3-4b", device=H100, workload={"images": 1, "recompute": "full", **fields})
    without = shapewright.predict("gemma-3-4b", device=H100, workload={"recompute": "full", **fields})

    of_tower = [one.operation for one in found.operations if one.operation.name.startswith("vision.")]
    assert {one.pass_name for one in of_tower} == {"forward"}
    trained = [one.memory.gradients_bytes + one.memory.optimizer_bytes for one in (found, without)]
    assert trained[0] == trained[1]
    assert found.memory.activations_bytes == without.memory.activations_bytes
    assert found.memory.weights_bytes > without.memory.weights_bytes


def test_trained_parameters_count_the_adapters_of_the_tower() -> None:
    """Rank 16: 34 layers of 2560 with 2048 queries and 1024 values, and 27 of the tower with 1152 of each."""
    found = shapewright.predict(
        "gemma-3-4b", device=H100, workload={"images": 1, "finetune": "lora", "lora_targets": "q_proj,v_proj"}
    )
    own, tower = 34 * 16 * (2560 + 2048 + 2560 + 1024), 27 * 16 * 4 * 1152
    assert count_trained_parameters(found.config, found.workload) == own + tower


@pytest.mark.parametrize("phase", ["train", "prefill", "decode"])
def test_memory_of_a_step_without_images_is_that_of_the_language_model(phase: str) -> None:
    """The tower of a job of 0 images was refused as one of micro_batch_size=0."""
    model = read_model("gemma-3-4b")
    workload = Workload(phase=phase, seq_len=1024)
    found, text_only = (
        estimate_stages(config, workload, ParallelLayout())[0].total_bytes
        for config in (model.with_vision().config, model.config)
    )
    assert found == text_only


def test_a_fix_of_the_tower_saves_its_share_of_the_step_and_an_unknown_saving_stays_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first fix of a finding is given a saving of 1, the whole tower; the others are given none."""

    def with_other_gains(scenario: Scenario) -> list[Finding]:
        return [
            replace(
                finding,
                suggestions=tuple(
                    replace(each, predicted_gain_fraction=None if place else 1.0)
                    for place, each in enumerate(finding.suggestions)
                ),
            )
            for finding in run_rules(scenario)
        ]

    monkeypatch.setattr("shapewright.lint.check.run_rules", with_other_gains)
    keywords: dict[str, Any] = {"device": H100, "workload": {"images": 2}}
    result = shapewright.check("qwen2.5-vl-7b", **keywords)
    step = shapewright.predict("qwen2.5-vl-7b", **keywords)
    text = shapewright.predict("qwen2.5-vl-7b", device=H100, workload={"seq_len": step.workload.seq_len})
    first, *others = next(each for each in result.findings if each.field.startswith("vision_config.")).suggestions

    assert first.predicted_gain_fraction is not None
    assert first.predicted_gain_fraction == pytest.approx(1.0 - text.step_time_s / step.step_time_s, abs=0.03)
    assert others
    assert all(each.predicted_gain_fraction is None for each in others)
