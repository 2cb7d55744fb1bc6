"""Memory of any model under any layout: what sharding, recomputation and length must do to it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapewright.memory.estimate import estimate_memory, estimate_stages
from shapewright.memory.saved_tensors import list_saved_tensors
from shapewright.memory.stages import Stage
from shapewright.memory.states import count_device_parameters, count_stage_parameters
from shapewright.models.parameters import count_parameters
from shapewright.models.read import list_presets, read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

LARGEST_DEGREE = 8


@st.composite
def configs(draw: st.DrawFn) -> TransformerConfig:
    """Models whose widths, heads and experts divide by LARGEST_DEGREE."""
    heads = LARGEST_DEGREE * draw(st.integers(1, 4))
    fields: dict[str, Any] = {
        "hidden_size": heads * 16 * draw(st.integers(1, 4)),
        "num_layers": draw(st.integers(1, 12)),
        "num_heads": heads,
        "num_kv_heads": draw(st.sampled_from((heads, LARGEST_DEGREE))),
        "intermediate_size": 64 * draw(st.integers(1, 64)),
        "vocab_size": 64 * draw(st.integers(1, 2000)),
        "gated_mlp": draw(st.booleans()),
        "parallel_attention_mlp": draw(st.booleans()),
        "num_norms_per_layer": draw(st.sampled_from((1, 2, 4))),
        "hidden_dropout": draw(st.sampled_from((0.0, 0.1))),
        "attention_dropout": draw(st.sampled_from((0.0, 0.1))),
        "tied_embeddings": draw(st.booleans()),
        "attention_windows": draw(st.sampled_from(((), (64,), (64, 0)))),
    }
    if draw(st.booleans()):
        fields |= {
            "num_experts": LARGEST_DEGREE * draw(st.integers(1, 4)),
            "num_experts_per_token": draw(st.integers(1, 8)),
            "moe_intermediate_size": 64 * draw(st.integers(1, 16)),
            "shared_expert_intermediate_size": draw(st.sampled_from((0, 128))),
            "moe_layers": draw(st.sampled_from(((), (False, True)))) if fields["num_layers"] > 1 else (),
        }
    return TransformerConfig(**fields)


@st.composite
def trainings(draw: st.DrawFn) -> Workload:
    """Training steps whose tokens divide by LARGEST_DEGREE twice."""
    return Workload(
        micro_batch_size=draw(st.integers(1, 8)),
        seq_len=64 * draw(st.integers(1, 64)),
        dtype=draw(st.sampled_from(("bf16", "fp8", "fp32"))),
        attention=draw(st.sampled_from(("flash", "unfused"))),
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
    )


degrees = st.sampled_from((1, 2, 4, 8))


@given(configs(), trainings(), degrees)
def test_tensor_parallel_shards_sum_to_the_whole(config: TransformerConfig, workload: Workload, degree: int) -> None:
    """With sequence parallelism all ranks together keep what one device keeps, but for rows that experts gather."""
    whole, shard = (
        list_saved_tensors(config, workload, ParallelLayout(tensor_parallel=t), has_experts=config.is_moe_layer(0))
        for t in (1, degree)
    )
    assert [tensor.name for tensor in shard] == [tensor.name for tensor in whole]
    shares = [1 if tensor.name in ("moe.input", "moe.output") else degree for tensor in shard]
    assert [share * tensor.num_bytes for share, tensor in zip(shares, shard, strict=True)] == [
        tensor.num_bytes for tensor in whole
    ]


@given(configs(), st.integers(1, 6), degrees)
def test_stages_and_ranks_sum_to_the_model(config: TransformerConfig, num_stages: int, degree: int) -> None:
    """All devices together hold the model, plus unsharded tensors on tensor ranks and a tied copy."""
    counts = count_parameters(config)
    layout = ParallelLayout(tensor_parallel=degree, pipeline_parallel=num_stages)
    held = 0.0
    for stage in range(num_stages):
        layers = [layer for layer in range(config.num_layers) if layer % num_stages == stage]
        kinds = Counter(config.kind_of_layer(layer) for layer in layers)
        parameters = count_device_parameters(
            config,
            counts,
            layout,
            kinds=[(kind, config.has_cross_attention, count) for kind, count in kinds.items()],
            is_first=stage == 0,
            is_last=stage == num_stages - 1,
        )
        held += degree * (parameters.dense + parameters.experts)
    tied_copy = counts.token_embedding if config.tied_embeddings and num_stages > 1 else 0
    kept_whole = counts.other_embedding + counts.final_norms
    kept_whole += sum(group.num_layers * (layer.norms + layer.router) for group, layer in counts.layers)
    assert held == pytest.approx(counts.total + tied_copy + (degree - 1) * kept_whole, rel=1e-12)


@pytest.mark.parametrize("name", list_presets())
def test_stages_of_presets_sum_to_the_model(name: str) -> None:
    """Stages of every preset hold each parameter once, and a tied embedding twice; T5-small has 6 + 6 layers."""
    config = read_model(name).config
    counts = count_parameters(config)
    for num_stages in (2, 4, 8):
        layout = ParallelLayout(pipeline_parallel=num_stages)
        stages = [
            count_stage_parameters(Stage(config, layout, index), counts, Workload()) for index in range(num_stages)
        ]
        held = sum(stage.dense + stage.experts for stage in stages)
        assert held == counts.total - counts.vision + config.tied_embeddings * counts.token_embedding


@given(configs(), trainings(), degrees)
def test_zero_stages_sum_to_the_whole(config: TransformerConfig, workload: Workload, replicas: int) -> None:
    """At stage 3 all replicas together hold one copy of weights, gradients and optimizer states."""
    alone = estimate_memory(config, workload, ParallelLayout())
    sharded = estimate_memory(config, workload, ParallelLayout(data_parallel=replicas, zero_stage=3))
    for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert replicas * getattr(sharded, name) == pytest.approx(getattr(alone, name))


@given(configs(), trainings(), degrees)
def test_later_zero_stage_never_keeps_more(config: TransformerConfig, workload: Workload, replicas: int) -> None:
    """Stages 0 to 2 only ever take away."""
    totals = [
        estimate_memory(config, workload, ParallelLayout(data_parallel=replicas, zero_stage=stage)).total_bytes
        for stage in (0, 1, 2)
    ]
    assert totals == sorted(totals, reverse=True)


@given(configs(), trainings())
def test_more_recomputation_never_keeps_more(config: TransformerConfig, workload: Workload) -> None:
    """None, selective, full: activations fall or stay, and nothing else but the workspace moves."""
    memories = [
        estimate_memory(config, dataclasses.replace(workload, recompute=mode), ParallelLayout())
        for mode in ("none", "selective", "full")
    ]
    kept = [memory.activations_bytes for memory in memories]
    assert kept == sorted(kept, reverse=True)
    assert len({memory.weights_bytes + memory.optimizer_bytes + memory.logits_bytes for memory in memories}) == 1


@given(configs(), trainings(), st.integers(1, 12), st.sampled_from((None, 24)))
def test_offloading_only_ever_takes_away(
    config: TransformerConfig, workload: Workload, stages: int, global_batch_size: int | None
) -> None:
    """The device never keeps more, and device and host together keep at least what the device kept alone."""
    layout = ParallelLayout(pipeline_parallel=min(stages, config.num_layers))
    job = dataclasses.replace(workload, micro_batch_size=1, global_batch_size=global_batch_size)
    offloads: dict[str, Any] = {"offload_activations": True, "offload_optimizer": True}
    jobs = job, dataclasses.replace(job, **offloads)
    for plain, moved in zip(*(estimate_stages(config, each, layout) for each in jobs), strict=True):
        assert moved.total_bytes <= plain.total_bytes
        assert moved.total_bytes + moved.host_bytes >= plain.total_bytes * (1 - 1e-12)


@given(configs(), trainings(), st.integers(1, 8))
def test_memory_grows_with_the_micro_batch(config: TransformerConfig, workload: Workload, more: int) -> None:
    """Activations and logits are proportional to the sequences of a micro-batch; states do not depend on them."""
    larger = dataclasses.replace(workload, micro_batch_size=more * workload.micro_batch_size)
    small, large = (estimate_memory(config, chosen, ParallelLayout()) for chosen in (workload, larger))
    assert large.activations_bytes == pytest.approx(more * small.activations_bytes)
    assert large.logits_bytes == pytest.approx(more * small.logits_bytes)
    assert large.optimizer_bytes == small.optimizer_bytes


@given(configs(), st.integers(0, 10_000), st.integers(0, 10_000), st.sampled_from(("bf16", "fp8")))
def test_kv_cache_never_shrinks_with_the_context(
    config: TransformerConfig, context_len: int, more: int, kv_cache_dtype: str
) -> None:
    """A longer context never needs less, and windows never more than no windows."""
    shorter = Workload(phase="decode", context_len=context_len, kv_cache_dtype=kv_cache_dtype)
    longer = dataclasses.replace(shorter, context_len=context_len + more)
    no_windows = dataclasses.replace(config, attention_windows=())
    cached = [
        estimate_memory(model, workload, ParallelLayout()).kv_cache_bytes
        for model, workload in ((config, shorter), (config, longer), (no_windows, longer))
    ]
    assert cached == sorted(cached)


@given(configs(), trainings(), degrees, degrees, st.integers(1, 3))
def test_estimate_is_finite_for_every_layout(
    config: TransformerConfig, workload: Workload, tensor: int, stages: int, chunks: int
) -> None:
    """Every part is a number from 0 up, whatever the layout, more stages than layers included."""
    layout = ParallelLayout(
        tensor_parallel=tensor,
        pipeline_parallel=stages,
        virtual_pipeline=chunks if stages > 1 else 1,
        data_parallel=2,
        zero_stage=1,
    )
    memory = dataclasses.asdict(estimate_memory(config, workload, layout))
    assert all(0 <= value < float("inf") for value in memory.values())


@pytest.mark.parametrize("largest", [2**30, 2**40])
def test_extremes_do_not_overflow(largest: int) -> None:
    """Dimensions up to 2**40 give exact results far beyond the range of int64."""
    config = TransformerConfig(hidden_size=largest, num_layers=1, num_heads=1, vocab_size=1, intermediate_size=largest)
    memory = estimate_memory(config, Workload(micro_batch_size=1, seq_len=1), ParallelLayout())
    # Q, K, V, O and two MLP matrices of h * h parameters with 2 bytes each, and small change
    assert memory.weights_bytes == pytest.approx(2 * 6 * float(largest) ** 2)
