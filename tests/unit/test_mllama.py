"""Llama 3.2 Vision: layers of cross-attention to the tiles of images, skipped without images."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import shapewright
from shapewright.core.errors import ConfigError, LayoutError, WorkloadError
from shapewright.lowering.model import lower
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm
from shapewright.memory.estimate import estimate_kv_cache, estimate_memory
from shapewright.models.parameters import count_parameters
from shapewright.models.read import load_preset, read_model
from shapewright.models.write import to_config_json
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

ONE, PRESET = ParallelLayout(), "llama-3.2-11b-vision"
WITH_IMAGES = read_model(PRESET).with_vision().config


def count_cross(phase: str, images: int, *, length: int = 512) -> dict[str, tuple[int, int]]:
    """Rows and runs of each GEMM of cross-attention."""
    sizes: dict[str, Any] = {"context_len": length} if phase == "decode" else {"seq_len": length}
    found = lower(WITH_IMAGES, Workload(phase=phase, micro_batch_size=2, images=images, **sizes), ONE)
    return {
        one.role: (int(one.m), int(one.repeats))
        for one in found
        if isinstance(one, Gemm) and one.block == "cross_attention"
    }


def test_keys_and_values_of_an_image_are_made_once() -> None:
    """A prompt projects 4 tiles of 1601 tokens in each of 8 layers; decode projects queries alone, and reads them."""
    tokens = 4 * (40 * 40 + 1)
    assert count_cross("prefill", 1) == {
        "q": (2 * 512, 8), "k": (2 * tokens, 8), "v": (2 * tokens, 8), "out": (2 * 512, 8),
    }  # fmt: skip
    assert count_cross("prefill", 3)["k"] == (3 * 2 * tokens, 8)
    assert count_cross("decode", 1) == {"q": (2, 8), "out": (2, 8)}
    (core,) = (
        one
        for one in lower(WITH_IMAGES, Workload(phase="decode", context_len=512, images=1), ONE)
        if isinstance(one, Attention) and one.block == "cross_attention"
    )
    assert (core.kv_len, core.causal, core.repeats) == (tokens, False, 8)


@pytest.mark.parametrize("phase", ["prefill", "decode", "train"])
def test_layers_without_images_are_skipped_with_their_mlps(phase: str) -> None:
    """32 of 40 layers run; all weights are in memory."""
    workload = Workload(phase=phase, seq_len=512, context_len=512 if phase == "decode" else 0)
    config = read_model(PRESET).config
    downs = [
        one for one in lower(config, workload, ONE) if one.block == "mlp" and one.role == "down" and not one.gradient
    ]
    memory = estimate_memory(config, replace(workload, phase="decode", context_len=512), ONE)

    assert sum(int(one.repeats) for one in downs if one.pass_name == "forward") == 32
    assert memory.weights_bytes == 2 * count_parameters(config).total


def test_the_cache_of_an_image_is_apart_from_the_sequence() -> None:
    """32 layers keep the tokens of the sequence, 8 those of the image: 2 x 8 x 128 elements each."""
    kinds = list(WITH_IMAGES.count_kinds(range(40)).items())
    cached = [
        estimate_kv_cache(
            WITH_IMAGES, Workload(phase="decode", micro_batch_size=1, context_len=999, images=images), ONE, kinds
        )
        for images in (0, 1, 2)
    ]
    per_token = 2 * 2 * 8 * 128

    assert cached == [per_token * (32 * 1000 + 8 * 4 * 1601 * images) for images in (0, 1, 2)]


def test_training_with_images_keeps_more_and_takes_longer() -> None:
    """The tower's and the cross-attention's activations come on top; more images are slower."""
    workload = {"seq_len": 1024, "micro_batch_size": 1, "recompute": "full"}
    without, one, two = (
        shapewright.predict(PRESET, device="h200-sxm-141gb", workload={**workload, "images": images})
        for images in (0, 1, 2)
    )

    assert without.step_time_s < one.step_time_s < two.step_time_s
    assert without.memory.activations_bytes < one.memory.activations_bytes < two.memory.activations_bytes


def test_a_stage_may_have_skipped_layers_alone() -> None:
    """A pipeline of one layer a stage is predicted, with images and without."""
    for images in (0, 1):
        prediction = shapewright.predict(
            PRESET,
            device="h200-sxm-141gb",
            workload={"phase": "prefill", "seq_len": 256, "images": images},
            layout={"pipeline_parallel": 40},
        )
        assert 0.0 < prediction.step_time_s < float("inf")


def test_adapters_are_on_cross_attention_too() -> None:
    """Of 40 layers 8 have the adapters of cross-attention, which are as large as those of self-attention."""
    workload = Workload(seq_len=512, images=1, finetune="lora", lora_targets="q_proj,v_proj", lora_rank=8)
    adapted = {
        (one.block, int(one.repeats))
        for one in lower(WITH_IMAGES, workload, ONE)
        if one.role == "q.lora_a" and not one.gradient and not one.name.startswith("vision.")
    }

    assert adapted == {("attention", 32), ("cross_attention", 8)}


def test_more_layers_keep_the_share_of_cross_attention() -> None:
    """The list of layers is written anew."""
    model = read_model(PRESET)
    written = to_config_json(model, shapewright.models.transformer.with_changes(model.config, {"num_layers": 45}))

    assert written["text_config"]["cross_attention_layers"] == [3, 8, 13, 18, 23, 28, 33, 38, 43]


def test_what_is_not_supported_is_said() -> None:
    """Tiles of another size, layers that do not exist, and a context axis."""
    with pytest.raises(WorkloadError, match=r"image_size=448,448 is not that of a tile.*use 560,560"):
        lower(WITH_IMAGES, Workload(seq_len=512, images=1, image_size="448"), ONE)
    with pytest.raises(LayoutError, match="context_parallel=2 is not supported for layers that attend to images"):
        lower(WITH_IMAGES, Workload(seq_len=512, images=1), ParallelLayout(context_parallel=2))
    given = dict(load_preset(PRESET).config)
    with pytest.raises(ConfigError, match="cross_attention_layers has 40"):
        read_model({**given, "text_config": {**given["text_config"], "cross_attention_layers": [3, 40]}})
    with pytest.raises(ConfigError, match="vision_output_dim=1 must be 7680"):
        read_model({**given, "vision_config": {**given["vision_config"], "vision_output_dim": 1}}).with_vision()
