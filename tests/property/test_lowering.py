"""Lowering of any model under any layout: shards add up, passes relate, decode continues prefill."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shapewright.core.errors import LayoutError, WorkloadError
from shapewright.lowering.model import lower
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.base import PASSES, STAGES
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.operation import Operation
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.memory.estimate import estimate_memory
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

LARGEST_DEGREE = 8
ONE_DEVICE = ParallelLayout()


@st.composite
def configs(draw: st.DrawFn) -> TransformerConfig:
    """Models whose widths, heads, layers and experts divide by LARGEST_DEGREE."""
    heads = LARGEST_DEGREE * draw(st.integers(1, 3))
    fields: dict[str, Any] = {
        "hidden_size": heads * 8 * draw(st.integers(1, 4)),
        "num_layers": LARGEST_DEGREE * draw(st.integers(1, 2)),
        "num_heads": heads,
        "num_kv_heads": draw(st.sampled_from((heads, LARGEST_DEGREE))),
        "v_head_dim": draw(st.sampled_from((0, 24))),
        "intermediate_size": LARGEST_DEGREE * draw(st.integers(1, 64)),
        "vocab_size": LARGEST_DEGREE * draw(st.integers(1, 2000)),
        "embedding_size": draw(st.sampled_from((0, 40))),
        "gated_mlp": draw(st.booleans()),
        "fused_gate_up": draw(st.booleans()),
        "fused_qkv": draw(st.booleans()),
        "parallel_attention_mlp": draw(st.booleans()),
        "hidden_dropout": draw(st.sampled_from((0.0, 0.1))),
        "attention_dropout": draw(st.sampled_from((0.0, 0.1))),
        "qk_norm": draw(st.sampled_from(("none", "per-head"))),
        "position_embedding": draw(st.sampled_from(("rotary", "learned", "alibi"))),
        "mlp_bias": draw(st.booleans()),
        "tied_embeddings": draw(st.booleans()),
    }
    if draw(st.booleans()):
        fields |= {
            "num_experts": LARGEST_DEGREE * draw(st.integers(1, 4)),
            "num_experts_per_token": draw(st.integers(1, 8)),
            "moe_intermediate_size": LARGEST_DEGREE * draw(st.integers(1, 16)),
            "shared_expert_intermediate_size": draw(st.sampled_from((0, 128))),
            "moe_layers": draw(st.sampled_from(((), (False, True)))),
        }
    return TransformerConfig(**fields)


@st.composite
def latent_configs(draw: st.DrawFn) -> TransformerConfig:
    """The same with multi-head latent attention."""
    config = draw(configs())
    return replace(
        config,
        num_kv_heads=config.num_heads,
        head_dim=24,
        v_head_dim=draw(st.sampled_from((16, 24))),
        q_lora_rank=draw(st.sampled_from((0, 40))),
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        fused_qkv=False,
        qk_norm="none",
        position_embedding="rotary",
    )


any_configs = st.one_of(configs(), latent_configs())
windows = st.sampled_from(((), (16,), (16, 0), (0, 16, 16)))
window_kinds = st.sampled_from(("sliding", "chunked"))
degrees = st.sampled_from((1, 2, 4, 8))
stacks = st.sampled_from(("decoder", "encoder", "encoder-decoder"))
attention_kinds = st.sampled_from(("flash", "unfused"))


@st.composite
def trainings(draw: st.DrawFn) -> Workload:
    """Training steps of one micro-batch, whose tokens divide by LARGEST_DEGREE twice."""
    return Workload(
        micro_batch_size=draw(st.integers(1, 4)),
        seq_len=64 * draw(st.integers(1, 8)),
        dtype=draw(st.sampled_from(("bf16", "fp8", "fp32"))),
        attention=draw(attention_kinds),
    )


def sum_flops(operations: tuple[Operation, ...], **only: str) -> float:
    """FLOPs of all executions of the operations whose fields have these values."""
    return sum(
        float(each.flops) * int(each.repeats)
        for each in operations
        if all(getattr(each, field) == value for field, value in only.items())
    )


def sum_executed(operations: tuple[Operation, ...]) -> float:
    """The same with what the mask leaves of fused attention."""
    return sum(
        float(each.executed_flops if isinstance(each, Attention) else each.flops) * int(each.repeats)
        for each in operations
    )


@given(configs(), trainings(), degrees)
def test_tensor_shards_add_up(config: TransformerConfig, workload: Workload, t: int) -> None:
    """FLOPs of t devices are those of one, but for the router, which every device runs alone."""
    alone = {"moe.router"}
    whole = lower(config, workload, ONE_DEVICE)
    shard = lower(config, workload, ParallelLayout(tensor_parallel=t))

    def shared(operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
        return tuple(
            each for each in operations if each.name.removesuffix(".dgrad").removesuffix(".wgrad") not in alone
        )

    assert sum_flops(shared(shard)) * t == pytest.approx(sum_flops(shared(whole)), rel=1e-9)


@given(any_configs, trainings(), degrees)
def test_pipeline_shards_add_up(config: TransformerConfig, workload: Workload, p: int) -> None:
    """As many FLOPs: p stages of L/p layers and the two ends of the model, and one device."""
    assume(not config.moe_layers or (config.num_layers // p) % len(config.moe_layers) == 0)
    workload = replace(workload, global_batch_size=workload.micro_batch_size * 2)
    whole = lower(config, workload, ONE_DEVICE)
    stage = lower(config, workload, ParallelLayout(pipeline_parallel=p))
    ends = sum_flops(stage, stage="first") + sum_flops(stage, stage="last")
    assert sum_flops(stage, stage="every") * p + ends == pytest.approx(sum_flops(whole), rel=1e-9)


@given(any_configs, trainings(), degrees, stacks)
def test_context_shards_add_up(config: TransformerConfig, workload: Workload, cp: int, stack: str) -> None:
    """Executed FLOPs of cp devices with a piece of each sequence are those of one: a ring does no work twice."""
    config = replace(config, stack=stack, num_encoder_layers=2 if stack == "encoder-decoder" else 0)
    whole = lower(config, workload, ONE_DEVICE)
    piece = lower(config, workload, ParallelLayout(context_parallel=cp))
    assert sum_executed(piece) * cp == pytest.approx(sum_executed(whole), rel=1e-9)


@given(configs(), degrees, st.integers(1, 4))
def test_context_shards_of_a_prompt_behind_a_cache_add_up(config: TransformerConfig, cp: int, parts: int) -> None:
    """Each device meets its share of the cached keys in each step of the ring, and halves none of them."""
    workload = Workload(phase="prefill", micro_batch_size=2, seq_len=64, context_len=cp * 8 * parts)
    alone, piece = (
        sum_executed(tuple(each for each in lower(config, workload, layout) if isinstance(each, Attention)))
        for layout in (ONE_DEVICE, ParallelLayout(context_parallel=cp))
    )
    assert piece * cp == pytest.approx(alone, rel=1e-9)


@given(configs(), degrees, st.sampled_from((8, 16, 32, 64)), st.sampled_from(("train", "prefill")))
def test_context_shards_of_chunked_attention_add_up(
    config: TransformerConfig, cp: int, chunk_len: int, phase: str
) -> None:
    """A chunk that is longer than a device's piece of the sequence is worked on by several, and no pair is lost."""
    config = replace(config, attention_windows=(chunk_len, 0), attention_window_kind="chunked")
    workload = Workload(phase=phase, micro_batch_size=2, seq_len=128)
    whole = lower(config, workload, ONE_DEVICE)
    piece = lower(config, workload, ParallelLayout(context_parallel=cp))
    layers = (sum_executed(tuple(each for each in side if each.stage == "every")) for side in (whole, piece))
    assert next(layers) == pytest.approx(next(layers) * cp, rel=1e-9)


@given(any_configs, trainings(), degrees)
def test_expert_shards_add_up(config: TransformerConfig, workload: Workload, ep: int) -> None:
    """Spreading experts over the replicas moves weights, and no FLOPs."""
    assume(config.is_moe)
    replicated = lower(config, workload, ParallelLayout(data_parallel=ep))
    spread = lower(config, workload, ParallelLayout(data_parallel=ep, expert_parallel=ep))
    assert sum_flops(spread) == sum_flops(replicated)
    for each in spread:
        if isinstance(each, GroupedGemm):
            assert each.groups == config.num_experts // ep


@given(configs(), trainings(), degrees, degrees, degrees)
def test_expert_tensor_shards_add_up(config: TransformerConfig, workload: Workload, t: int, ep: int, e_t: int) -> None:
    """However experts are cut and spread, the devices of a stage multiply all routed rows of their replicas once."""
    assume(config.is_moe)
    replicas = max(ep * e_t // t, 1)
    layout = ParallelLayout(tensor_parallel=t, data_parallel=replicas, expert_parallel=ep, expert_tensor_parallel=e_t)
    whole, part = lower(config, workload, ONE_DEVICE), lower(config, workload, layout)

    def routed(operations: tuple[Operation, ...]) -> float:
        return sum_flops(tuple(each for each in operations if isinstance(each, GroupedGemm)))

    assert routed(part) * t * replicas == pytest.approx(routed(whole) * replicas, rel=1e-9)


@given(any_configs, windows, trainings())
def test_backward_is_twice_forward(config: TransformerConfig, pattern: tuple[int, ...], workload: Workload) -> None:
    """Every GEMM has two gradients of its own size."""
    operations = lower(replace(config, attention_windows=pattern), workload, ONE_DEVICE)
    assert sum_flops(operations, pass_name="backward") == 2 * sum_flops(operations, pass_name="forward")


@given(any_configs, trainings())
def test_fused_and_unfused_attention_have_the_same_flops(config: TransformerConfig, workload: Workload) -> None:
    """Fusion saves traffic, not arithmetic."""
    fused, unfused = (lower(config, replace(workload, attention=kind), ONE_DEVICE) for kind in ("flash", "unfused"))
    assert sum_flops(fused) == sum_flops(unfused)


@given(any_configs, trainings(), st.integers(1, 4))
def test_micro_batches_split_the_batch(config: TransformerConfig, workload: Workload, parts: int) -> None:
    """B sequences in one pass or in several: the same FLOPs, and one optimizer step."""
    b = workload.micro_batch_size
    together = lower(config, replace(workload, micro_batch_size=b * parts, global_batch_size=b * parts), ONE_DEVICE)
    apart = lower(config, replace(workload, global_batch_size=b * parts), ONE_DEVICE)
    assert sum_flops(together) == pytest.approx(sum_flops(apart), rel=1e-12)
    steps = [[each for each in operations if each.pass_name == "step"] for operations in (together, apart)]
    assert steps[0] == steps[1]


@given(any_configs, trainings())
def test_recomputation_is_a_part_of_forward(config: TransformerConfig, workload: Workload) -> None:
    """Full: all layers. Selective: less than that. None: nothing."""
    none, selective, full = (
        lower(config, replace(workload, recompute=mode), ONE_DEVICE) for mode in ("none", "selective", "full")
    )
    assert sum_flops(none, pass_name="recompute") == 0
    layers = sum_flops(full, pass_name="forward", stage="every")
    assert sum_flops(full, pass_name="recompute") == layers
    assert 0 < sum_flops(selective, pass_name="recompute") < layers


@given(configs(), windows, window_kinds, attention_kinds, st.integers(1, 4), st.integers(0, 80))
def test_decode_is_the_last_row_of_prefill(
    config: TransformerConfig, pattern: tuple[int, ...], kind: str, attention: str, b: int, context_len: int
) -> None:
    """One more token after c costs what a prompt of c + 1 costs more than one of c (executed, fused), row by row."""
    config = replace(config, attention_windows=pattern, attention_window_kind=kind)

    def executed(phase: str, **lengths: int) -> float:
        workload = Workload(phase=phase, micro_batch_size=b, attention="flash", **lengths)
        operations = lower(config, workload, ONE_DEVICE)
        return sum_executed(tuple(each for each in operations if each.stage == "every"))

    shorter = executed("prefill", seq_len=context_len) if context_len else 0.0
    step = executed("decode", context_len=context_len)
    assert step == pytest.approx(executed("prefill", seq_len=context_len + 1) - shorter, rel=1e-9)
    # Unfused, each row of the square is one query against all keys.
    if not any(pattern):
        unfused = Workload(phase="decode", micro_batch_size=b, context_len=context_len, attention=attention)
        square = Workload(phase="prefill", micro_batch_size=b, seq_len=context_len + 1, attention=attention)
        rows = sum_flops(lower(config, square, ONE_DEVICE), stage="every") / (context_len + 1)
        assert sum_flops(lower(config, unfused, ONE_DEVICE), stage="every") == pytest.approx(rows, rel=1e-9)


@given(any_configs, st.sampled_from(((), (16, 0))), stacks, degrees, degrees, st.integers(0, 80))
def test_decode_reads_the_cache_that_memory_holds(
    config: TransformerConfig, pattern: tuple[int, ...], stack: str, t: int, cp: int, context_len: int
) -> None:
    """Keys and values of all attention calls together are the KV cache of this device, byte for byte."""
    assume(stack != "encoder" and not (config.is_mla and stack == "encoder-decoder"))
    config = replace(
        config, attention_windows=pattern, stack=stack, num_encoder_layers=2 if stack == "encoder-decoder" else 0
    )
    workload = Workload(phase="decode", micro_batch_size=3, seq_len=64, context_len=context_len)
    layout = ParallelLayout(tensor_parallel=t, context_parallel=cp)
    read_bytes = 0.0
    for each in lower(config, workload, layout):
        if isinstance(each, Attention):
            widths = each.head_dim + (0 if each.values_in_keys else each.v_head_dim)
            read_bytes += 2.0 * each.repeats * each.batch_size * each.kv_len * each.num_kv_heads * widths

    assert read_bytes == estimate_memory(config, workload, layout).kv_cache_bytes


@given(configs(), windows, window_kinds, st.integers(1, 64), st.integers(1, 64))
def test_two_prompt_chunks_cost_as_much_as_one(
    config: TransformerConfig, pattern: tuple[int, ...], kind: str, first: int, second: int
) -> None:
    """Chunked prefill: the second chunk attends to the cached first one."""
    config = replace(config, attention_windows=pattern, attention_window_kind=kind)

    def executed(seq_len: int, context_len: int = 0) -> float:
        workload = Workload(phase="prefill", micro_batch_size=2, seq_len=seq_len, context_len=context_len)
        operations = lower(config, workload, ONE_DEVICE)
        return sum_executed(tuple(each for each in operations if each.stage == "every"))

    assert executed(first) + executed(second, first) == pytest.approx(executed(first + second), rel=1e-9)


layouts = st.builds(
    dict,
    tensor_parallel=st.integers(1, 9),
    pipeline_parallel=st.integers(1, 20),
    data_parallel=st.integers(1, 9),
    context_parallel=st.integers(1, 5),
    expert_parallel=st.sampled_from((1, 2, 4)),
    expert_tensor_parallel=st.sampled_from((None, None, 1, 2)),
    sequence_parallel=st.booleans(),
    zero_stage=st.integers(0, 3),
)
workloads = st.builds(
    dict,
    phase=st.sampled_from(("train", "prefill", "decode")),
    micro_batch_size=st.integers(1, 5),
    seq_len=st.integers(1, 200),
    context_len=st.integers(0, 100),
    global_batch_size=st.sampled_from((None, 24, 720)),
    attention=attention_kinds,
    dtype=st.sampled_from(("bf16", "fp8")),
)


@given(any_configs, windows, stacks, workloads, layouts, st.sampled_from((1, 4, 6, 8)))
def test_accepted_configs_lower_to_whole_operations(
    config: TransformerConfig,
    pattern: tuple[int, ...],
    stack: str,
    workload_fields: dict[str, Any],
    layout_fields: dict[str, Any],
    node_size: int,
) -> None:
    """A config is refused with a package error, or lowered to distinct operations of positive integer sizes."""
    try:
        config = replace(config, attention_windows=pattern, stack=stack)
        workload, layout = Workload(**workload_fields), ParallelLayout(**layout_fields)
        operations = lower(config, workload, layout, node_size=node_size)
    except (LayoutError, WorkloadError):
        return
    for each in operations:
        assert each.pass_name in PASSES
        assert each.stage in STAGES
        counts: list[Any] = [each.repeats]
        if isinstance(each, Gemm):
            counts += [each.m, each.n, each.k, each.batch]
        elif isinstance(each, GroupedGemm):
            counts += [each.m, each.n, each.k, each.groups]
        elif isinstance(each, Attention):
            counts += [each.batch_size, each.query_len, each.kv_len, each.num_heads, each.num_kv_heads, each.head_dim]
            assert each.num_heads % each.num_kv_heads == 0
        elif isinstance(each, Collective):
            counts += [each.num_ranks, each.ranks_per_node]
            assert 1 < each.num_ranks <= layout.num_devices
            assert each.ranks_per_node <= min(each.num_ranks, node_size)
            assert each.message_bytes > 0
        elif isinstance(each, Pointwise):
            assert each.read_bytes > 0
            assert each.written_bytes >= 0
        assert all(type(count) is int and count > 0 for count in counts), each
        assert each.num_bytes > 0
    alike = Counter(replace(each, repeats=1) for each in operations)
    assert max(alike.values()) == 1, alike.most_common(1)
