"""Pipelines that count embedding and loss as layers when dividing layers into stages, as Megatron-LM can."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import shapewright
from shapewright.app.formats.registry import write_format
from shapewright.core.errors import LayoutError
from shapewright.lowering.counts import count_layers
from shapewright.lowering.model import lower
from shapewright.memory.estimate import estimate_memory, estimate_stages
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.composition.stages import rebalance_ends
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

BOTH = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
EMBEDDING = {"account_for_embedding_in_pipeline_split": True}
LOSS = {"account_for_loss_in_pipeline_split": True}
SMALL = TransformerConfig(hidden_size=64, num_layers=6, num_heads=4, vocab_size=512, max_position_embeddings=64)
TRAINING = Workload(micro_batch_size=1, seq_len=64, global_batch_size=16)


def step_s(model: Any, **layout: Any) -> float:
    """A training step on H100s. [s]"""
    workload = {"micro_batch_size": 1, "global_batch_size": 64, "seq_len": 4096, "recompute": "full"}
    return shapewright.predict(model, device="h100-sxm-80gb", workload=workload, layout=layout).step_time_s


@pytest.mark.parametrize("stages", [2, 3, 4, 6, 12])
@pytest.mark.parametrize(("num_layers", "ends"), [(24, {}), (23, EMBEDDING), (23, LOSS), (22, BOTH)])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_memory_is_that_of_the_fullest_stage(
    stages: int, num_layers: int, ends: dict[str, Any], recompute: str
) -> None:
    """Of equal layers, without and with ends that count as layers, no stage needs more than the one that is stated."""
    config = replace(SMALL, num_layers=num_layers)
    workload = replace(TRAINING, global_batch_size=2 * stages, recompute=recompute)
    layout = ParallelLayout(pipeline_parallel=stages, **ends)
    totals = [stage.total_bytes for stage in estimate_stages(config, workload, layout)]

    assert estimate_memory(config, workload, layout).total_bytes == max(totals)


def test_llama_3_405b_on_16_stages_of_8_chunks() -> None:
    """126 layers and both ends are 128; the bubble is that of 8 chunks: half of what 4 chunks wait."""
    spread = {"tensor_parallel": 8, "pipeline_parallel": 16}
    with pytest.raises(LayoutError, match=r"16 [*] 8 must not exceed num_layers=126; .*account_for_loss_in_pipeline"):
        step_s("llama-3.1-405b", **spread, virtual_pipeline=8)
    workload = {"micro_batch_size": 1, "global_batch_size": 64, "seq_len": 4096, "recompute": "full"}
    bubbles_s = {
        chunks: shapewright.predict(
            "llama-3.1-405b",
            device="h100-sxm-80gb",
            workload=workload,
            layout={**spread, "virtual_pipeline": chunks, **BOTH},
        ).bubble_time_s
        for chunks in (4, 8)
    }
    assert bubbles_s[8] == pytest.approx(bubbles_s[4] / 2, rel=0.02)


@pytest.mark.parametrize(
    ("ends", "num_layers", "expected"),
    [
        ({}, 6, [2, 2, 2]),
        (BOTH, 7, [2, 3, 2]),
        (EMBEDDING, 5, [1, 2, 2]),
        (LOSS, 5, [2, 2, 1]),
        (BOTH, 1, [0, 1, 0]),
    ],
)
def test_layers_of_each_stage(ends: dict[str, bool], num_layers: int, expected: list[int]) -> None:
    """By hand; together they are all layers in order."""
    layout = ParallelLayout(pipeline_parallel=3, **ends)
    stages = [layout.layers_of_stage(num_layers, index) for index in range(3)]
    assert [len(stage) for stage in stages] == expected
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


def test_memory_of_first_and_last_stage() -> None:
    """Six layers and both ends on four stages are 1, 2, 2, 1: weights of a layer less than in the middle."""
    layout = ParallelLayout(pipeline_parallel=4, **BOTH)
    first, second, third, last = (stage.weights_bytes for stage in estimate_stages(SMALL, TRAINING, layout))
    layer_bytes = second / 2
    embedding_bytes = 2.0 * 512 * 64
    assert second == third
    assert first == layer_bytes + embedding_bytes
    # The last has the logit matrix and the final norm besides.
    assert last == pytest.approx(layer_bytes + embedding_bytes, abs=2.0 * 2 * 64)


@pytest.mark.parametrize("ends", [BOTH, EMBEDDING, LOSS, {}])
def test_second_stage_can_need_most_memory(ends: dict[str, bool]) -> None:
    """It may be the second, which has a layer more than the first and all but one of its micro-batches."""
    config = replace(read_model("llama-3.1-405b").config, num_layers=128 - sum(ends.values()))
    layout = ParallelLayout(tensor_parallel=8, pipeline_parallel=16, virtual_pipeline=4, data_parallel=2, **ends)
    workload = Workload(micro_batch_size=1, global_batch_size=64, seq_len=8192, recompute="full")
    stages = [stage.total_bytes for stage in estimate_stages(config, workload, layout)]
    assert estimate_memory(config, workload, layout).total_bytes == max(stages)


def test_middle_stage_is_the_busiest() -> None:
    """Two layers, and of two stages that are both ends three of six."""
    assert count_layers(SMALL, ParallelLayout(pipeline_parallel=4, **BOTH)).num_layers == 2
    assert count_layers(SMALL, ParallelLayout(pipeline_parallel=2, **BOTH)).num_layers == 3
    operations = lower(SMALL, TRAINING, ParallelLayout(pipeline_parallel=4, **BOTH))
    assert {one.repeats for one in operations if one.name == "mlp.down"} == {16 * 2}


@pytest.mark.parametrize(
    ("counted", "expected"),
    [((True, True), (0.0, 4.0)), ((True, False), (0.0, 6.0)), ((False, True), (1.0, 4.0))],
)
def test_rebalancing_of_counted_ends(counted: tuple[bool, bool], expected: tuple[float, float]) -> None:
    """Ends of 1 s and 6 s and layers of 2 s; uncounted, both gaps would go to the slower one."""
    assert rebalance_ends(1.0, 6.0, 2.0, 2, 8, counted) == expected
    milliseconds = rebalance_ends(1e-3, 6e-3, 2e-3, 2, 8, counted)
    assert milliseconds == pytest.approx([1e-3 * end_s for end_s in expected])
    assert rebalance_ends(1.0, 6.0, 2.0, 2, 8) == (1.0, 2.0)
    assert rebalance_ends(1.0, 6.0, 2.0, 0, 8, counted) == (1.0, 6.0)


def test_step_time_with_counted_ends() -> None:
    """62 layers on 8 stages with both ends take what 64 take, less what fewer layers at the ends make up for."""
    config = read_model("llama-3-8b").config
    counted_s = step_s(replace(config, num_layers=62), pipeline_parallel=8, **BOTH)
    whole_s = step_s(replace(config, num_layers=64), pipeline_parallel=8)
    assert 0.9 * whole_s < counted_s < whole_s


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"pipeline_parallel": 4, **EMBEDDING}, "num_layers=6 plus 1 end.* make 7, .* multiple of .* = 4 [*] 1"),
        ({"pipeline_parallel": 4, "virtual_pipeline": 4, **BOTH}, "make 8, which is not a multiple of .* = 4 [*] 4"),
    ],
)
def test_uneven_stages_are_rejected(layout: dict[str, Any], words: str) -> None:
    """Megatron-LM rejects them too."""
    with pytest.raises(LayoutError, match=words):
        lower(SMALL, TRAINING, ParallelLayout(**layout))


def test_invalid_ends_are_rejected() -> None:
    """Ends require pipeline stages and boolean values, and plans do not search over them."""
    with pytest.raises(LayoutError, match="needs pipeline_parallel above 1"):
        ParallelLayout(**LOSS)
    with pytest.raises(LayoutError, match="must be true or false"):
        ParallelLayout(pipeline_parallel=2, account_for_loss_in_pipeline_split=1)  # type: ignore[arg-type]
    requested: list[dict[str, Any]] = [{"layout": dict(BOTH)}, {"keep": dict.fromkeys(LOSS, (True,))}]
    for given in requested:
        with pytest.raises(LayoutError, match="a plan does not count the ends of the model as layers"):
            shapewright.plan("llama-3-8b", device="h100-sxm-80gb", num_devices=8, global_batch_size=16, **given)


def test_framework_arguments() -> None:
    """Megatron-LM by its arguments, torchtitan by layers less at the ends; GPT-NeoX cannot be."""
    config = read_model("llama-3.1-405b").config
    layout = ParallelLayout(tensor_parallel=8, pipeline_parallel=16, virtual_pipeline=8, **BOTH)
    text = write_format("megatron-args", config, layout=layout)
    for words in ("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"):
        assert words in text
    assert "--num-virtual-stages-per-pipeline-rank 8" in text
    assert "--pipeline-model-parallel-layout" not in text
    dense = read_model("llama-3-8b").config
    counted = ParallelLayout(pipeline_parallel=3, **EMBEDDING)
    text = write_format("torchtitan-toml", replace(dense, num_layers=32), layout=counted)
    assert "first_stage_less_layers = 1" in text
    assert "last_stage_less_layers = 0" in text
    with pytest.raises(LayoutError, match="count as layers"):
        write_format("neox-yaml", config, layout=ParallelLayout(pipeline_parallel=16, **BOTH))
