"""Parallel layouts in lowering: sharded sizes, collectives and their groups of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shapewright.lowering.collectives import ranks_per_node
from shapewright.lowering.model import lower
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

B, S, H = 2, 32, 64
CONFIG = TransformerConfig(
    hidden_size=H, num_heads=8, num_kv_heads=4, num_layers=4, vocab_size=96, intermediate_size=160, fused_qkv=True
)
WORKLOAD = Workload(micro_batch_size=B, seq_len=S)
RESIDUAL_BYTES = B * S * H * 2


def collectives(
    layout: ParallelLayout, config: TransformerConfig = CONFIG, workload: Workload = WORKLOAD, **only: Any
) -> list[Collective]:
    """Collectives of a lowered model whose fields have these values."""
    return [
        each
        for each in lower(config, workload, layout)
        if isinstance(each, Collective) and all(getattr(each, field) == value for field, value in only.items())
    ]


def volume(operations: list[Collective]) -> float:
    """Bytes that the busiest device sends over all executions."""
    return sum(float(each.num_bytes) * int(each.repeats) for each in operations)


def test_one_device_does_not_communicate() -> None:
    """No axis, no collective."""
    assert collectives(ParallelLayout()) == []


def test_tensor_parallel_reduces_twice_forward_and_twice_backward() -> None:
    """2 + 2 all_reduces of b s h elements per layer: 8 b s h (t-1)/t elements per device (arXiv 2104.04473, 3.2)."""
    layout = ParallelLayout(tensor_parallel=4, sequence_parallel=False)
    for pass_name in ("forward", "backward"):
        reductions = collectives(layout, axis="tensor", pass_name=pass_name, stage="every")
        assert {each.op_name for each in reductions} == {"all_reduce"}
        assert {each.message_bytes for each in reductions} == {RESIDUAL_BYTES}
        assert sum(int(each.repeats) for each in reductions) == 2 * CONFIG.num_layers
    whole = volume(collectives(layout, axis="tensor", stage="every"))
    assert whole == 8 * RESIDUAL_BYTES * 3 / 4 * CONFIG.num_layers


def test_sequence_parallel_adds_one_all_gather() -> None:
    """all_gather + reduce_scatter for each all_reduce; one gather more for wgrad (arXiv 2205.05198, 4.2.2)."""
    plain = collectives(ParallelLayout(tensor_parallel=4, sequence_parallel=False), axis="tensor", stage="every")
    split = collectives(ParallelLayout(tensor_parallel=4), axis="tensor", stage="every")
    assert {each.op_name for each in split} == {"all_gather", "reduce_scatter"}
    again = [each for each in split if each.pass_name == "backward" and each.op_name == "all_gather" and each.overlaps]
    assert sum(int(each.repeats) for each in again) == 2 * CONFIG.num_layers
    assert volume(split) - volume(again) == volume(plain)


def test_input_gradient_reduction_overlaps_with_weight_gradients() -> None:
    """Collectives that only the input gradient waits for overlap; those that a GEMM waits for do not."""
    plain, split = (
        {
            (each.op_name, each.pass_name, each.overlaps)
            for each in collectives(
                ParallelLayout(tensor_parallel=4, sequence_parallel=splits), axis="tensor", stage="every"
            )
        }
        for splits in (False, True)
    )
    assert plain == {("all_reduce", "forward", False), ("all_reduce", "backward", True)}
    assert split == {
        ("all_gather", "forward", False),
        ("reduce_scatter", "forward", False),
        ("all_gather", "backward", False),
        ("all_gather", "backward", True),
        ("reduce_scatter", "backward", True),
    }


def test_pipeline_send_is_split_over_the_tensor_axis() -> None:
    """Each rank sends 1/t of the residual stream; without sequence parallelism the next stage gathers it."""
    sent = {
        splits: {
            each.op_name: (each.message_bytes, each.num_ranks, each.ranks_per_node)
            for each in collectives(
                ParallelLayout(tensor_parallel=4, pipeline_parallel=2, sequence_parallel=splits),
                axis="pipeline",
                pass_name="forward",
            )
        }
        for splits in (False, True)
    }
    assert sent[False] == {"send_recv": (RESIDUAL_BYTES / 4, 2, 2), "all_gather": (RESIDUAL_BYTES, 4, 4)}
    assert sent[True] == {"send_recv": (RESIDUAL_BYTES / 4, 2, 2)}


def test_collectives_of_embedding_and_logits() -> None:
    """Embedding: reduced forward, gathered backward. Logits: gathered forward and for wgrad, reduced for dgrad."""
    found = {each.name: each for each in collectives(ParallelLayout(tensor_parallel=4)) if each.stage != "every"}
    assert {name for name in found if "cross_entropy" not in name} == {
        "embedding.reduce_scatter",
        "embedding.backward.all_gather",
        "logits.all_gather",
        "logits.backward.reduce_scatter",
        "logits.backward.all_gather",
    }
    assert {name for name, each in found.items() if each.overlaps} == {
        "logits.backward.all_gather",
        "logits.backward.reduce_scatter",
    }
    plain = collectives(ParallelLayout(tensor_parallel=4, sequence_parallel=False))
    ends = {each.name for each in plain if each.stage != "every" and "cross_entropy" not in each.name}
    assert ends == {"embedding.all_reduce", "logits.backward.all_reduce"}


def test_sequence_parallel_splits_the_residual_stream_in_training_only() -> None:
    """Norms see 1/t of the tokens in training; inference keeps them whole."""
    layout = ParallelLayout(tensor_parallel=4)
    norms = {each.name: each for each in lower(CONFIG, WORKLOAD, layout)}
    assert norms["norm"].num_bytes == 2 * RESIDUAL_BYTES / 4
    prefill = {
        each.name: each for each in lower(CONFIG, Workload(phase="prefill", micro_batch_size=B, seq_len=S), layout)
    }
    assert prefill["norm"].num_bytes == 2 * RESIDUAL_BYTES


def test_parallel_attention_and_mlp_share_one_reduction() -> None:
    """Their sum is reduced: one all_reduce forward and one backward per layer."""
    config = TransformerConfig(
        hidden_size=H, num_heads=8, num_layers=4, vocab_size=96, parallel_attention_mlp=True, num_norms_per_layer=1
    )
    layout = ParallelLayout(tensor_parallel=4, sequence_parallel=False)
    reductions = collectives(layout, config, axis="tensor", stage="every")
    assert [(each.pass_name, each.repeats) for each in reductions] == [("forward", 4), ("backward", 4)]
    split = collectives(ParallelLayout(tensor_parallel=4), config, axis="tensor", stage="every", pass_name="forward")
    assert [(each.op_name, each.repeats) for each in split] == [("all_gather", 4), ("reduce_scatter", 4)]


def test_few_key_value_heads_are_replicated() -> None:
    """4 key heads on 8 devices: each device has one, and one query head."""
    operations = lower(CONFIG, WORKLOAD, ParallelLayout(tensor_parallel=8))
    (qkv,) = (each for each in operations if each.name == "attention.qkv")
    (call,) = (each for each in operations if each.name == "attention.fused")
    assert isinstance(qkv, Gemm)
    assert isinstance(call, Attention)
    assert qkv.n == 8 + 8 + 8
    assert (call.num_heads, call.num_kv_heads) == (1, 1)


@pytest.mark.parametrize(
    ("zero_stage", "elements"),
    [(0, 2), (1, 2), (2, 2), (3, 3)],
)
def test_zero_communication_volume_per_weight(zero_stage: int, elements: int) -> None:
    """Times (d-1)/d (arXiv 1910.02054, section 7), gradients and weights in bf16, hidden behind computation."""
    workload = Workload(micro_batch_size=B, seq_len=S, global_batch_size=8 * B)
    traffic = collectives(ParallelLayout(data_parallel=8, zero_stage=zero_stage), workload=workload, axis="data")
    qkv, out, mlp, ends = H * (8 + 2 * 4) * 8, H * H, 2 * H * 160, 2 * 96 * H
    weights = 4 * (qkv + out + mlp) + ends
    assert volume(traffic) == pytest.approx(elements * weights * 2 * 7 / 8)
    assert all(each.overlaps for each in traffic)


def test_sharded_gradients_are_reduced_in_every_pass() -> None:
    """ZeRO-1 reduces once per step, ZeRO-2 once per micro-batch: 4 of them."""
    workload = Workload(micro_batch_size=B, seq_len=S, global_batch_size=2 * 4 * B)
    once, every = (
        volume(
            collectives(ParallelLayout(data_parallel=2, zero_stage=stage), workload=workload, op_name="reduce_scatter")
        )
        for stage in (1, 2)
    )
    assert every == 4 * once


def test_optimizer_states_are_sharded_over_replicas() -> None:
    """From ZeRO stage 1 on each of 8 replicas steps over an eighth of the weights."""

    def bytes_read(zero_stage: int) -> float:
        operations = lower(CONFIG, WORKLOAD, ParallelLayout(data_parallel=8, zero_stage=zero_stage))
        return sum(float(each.num_bytes) for each in operations if each.name.startswith("optimizer."))

    assert bytes_read(1) == bytes_read(0) / 8


def test_pipeline_sends_in_both_passes() -> None:
    """4 micro-batches, b s h elements each; interleaving twice as often; the tensor axis sends its share."""
    sends = collectives(ParallelLayout(pipeline_parallel=4), op_name="send_recv")
    assert [(each.pass_name, each.num_ranks, each.repeats, each.message_bytes) for each in sends] == [
        ("forward", 2, 4, RESIDUAL_BYTES),
        ("backward", 2, 4, RESIDUAL_BYTES),
    ]
    interleaved = ParallelLayout(pipeline_parallel=2, virtual_pipeline=2, tensor_parallel=4)
    (send,) = collectives(interleaved, op_name="send_recv", pass_name="forward")
    assert (send.repeats, send.message_bytes, send.overlaps) == (2 * 2, RESIDUAL_BYTES / 4, True)


def test_context_parallel_ring_exchanges_keys_and_values() -> None:
    """3 steps of a ring of 4: b s/4 tokens, keys and values of 4 heads; own square causal, then halves of others."""
    layout = ParallelLayout(context_parallel=4)
    (ring,) = collectives(layout, axis="context", pass_name="forward")
    assert (ring.repeats, ring.message_bytes, ring.overlaps) == (3 * 4, B * S // 4 * 4 * 2 * 8 * 2, True)
    # The gradients of keys and values travel with them.
    (back,) = collectives(layout, axis="context", pass_name="backward")
    assert (back.repeats, back.message_bytes) == (ring.repeats, 2 * ring.message_bytes)
    calls = {each.name: each for each in lower(CONFIG, WORKLOAD, layout) if isinstance(each, Attention)}
    own, others = calls["attention.fused"], calls["attention.fused.ring"]
    assert (own.query_len, own.kv_len, own.causal, own.repeats) == (8, 8, True, 4)
    assert (others.query_len, others.kv_len, others.causal, others.repeats) == (8, 4, False, 4 * 3)


def test_context_parallel_passes_the_keys_of_the_encoder_around_as_well() -> None:
    """Two devices, one step: 16 of 32 tokens, for self-attention of both stacks and for cross-attention."""
    config = TransformerConfig(
        hidden_size=H, num_heads=8, num_layers=3, num_encoder_layers=2, vocab_size=96, stack="encoder-decoder"
    )
    rings = collectives(ParallelLayout(context_parallel=2), config, role="ring", pass_name="forward")
    assert {each.name: each.repeats for each in rings} == {
        "encoder.attention.ring": 2, "attention.ring": 3, "cross_attention.ring": 3
    }  # fmt: skip
    assert {each.message_bytes for each in rings} == {B * 16 * 2 * H * 2}


def test_context_parallel_splits_the_cache_in_decode() -> None:
    """One token on every device, 101 keys on four: 26 on the fullest, and the outputs are added up."""
    decode = Workload(phase="decode", micro_batch_size=3, context_len=100)
    layout = ParallelLayout(context_parallel=4)
    (call,) = (each for each in lower(CONFIG, decode, layout) if isinstance(each, Attention))
    assert (call.query_len, call.kv_len) == (1, 26)
    (reduction,) = collectives(layout, workload=decode, axis="context")
    assert (reduction.op_name, reduction.message_bytes) == ("all_reduce", 3 * 64 * 2)


def test_context_parallel_adds_up_latents_in_decode() -> None:
    """Absorbed attention returns a latent of each head, 16 elements, which is projected to a value of 8 afterwards."""
    config = replace(CONFIG, num_kv_heads=8, kv_lora_rank=16, qk_rope_head_dim=4, fused_qkv=False)
    decode = Workload(phase="decode", micro_batch_size=3, context_len=100)
    (reduction,) = collectives(ParallelLayout(context_parallel=4), config, decode, axis="context")
    assert reduction.message_bytes == 3 * 8 * 16 * 2


@pytest.mark.parametrize("q_lora_rank", [0, 24])
def test_sequence_parallelism_gathers_latents_instead_of_the_residual_stream(q_lora_rank: int) -> None:
    """Each of four devices projects its 16 of 64 tokens down; the axis gathers 24 + 16 + 4 elements of each, not 64."""
    ranks = {"q_lora_rank": q_lora_rank, "kv_lora_rank": 16, "qk_rope_head_dim": 4}
    config = replace(CONFIG, num_kv_heads=8, fused_qkv=False, **ranks)
    for sequence_parallel, own_tokens in ((True, 16), (False, 64)):
        layout = ParallelLayout(tensor_parallel=4, sequence_parallel=sequence_parallel)
        rows = {
            one.role: one.m for one in lower(config, WORKLOAD, layout) if isinstance(one, Gemm) and not one.gradient
        }
        assert rows["kv_a"] == rows.get("q_a", own_tokens) == own_tokens
        assert rows["kv_b"] == rows.get("q_b", 64) == 64
        gathers = collectives(layout, config, op_name="all_gather", block="attention", pass_name="forward")
        widths = [q_lora_rank or H, 16 + 4] if sequence_parallel else []
        assert [each.message_bytes for each in gathers] == [64 * width * 2 for width in widths]


def test_experts_without_an_exchange_permute_the_gathered_tokens() -> None:
    """Both of two devices have all T = 64 tokens, of which each goes to 3 experts: 192 rows of the grouped GEMM."""
    config = TransformerConfig(
        hidden_size=H, num_heads=8, num_layers=4, vocab_size=96, num_experts=8, num_experts_per_token=3
    )
    operations = {one.name: one for one in lower(config, WORKLOAD, ParallelLayout(tensor_parallel=2))}
    permute, up, unpermute = (operations[f"moe.{name}"] for name in ("permute", "up", "unpermute"))
    assert isinstance(up, GroupedGemm)
    assert isinstance(permute, Pointwise)
    assert isinstance(unpermute, Pointwise)
    assert up.m == 64 * 3
    assert permute.written_bytes == unpermute.read_bytes == 64 * 3 * H * 2


def test_expert_parallel_exchanges_routed_rows() -> None:
    """T k_e h elements to the experts and back, twice forward and twice backward per layer."""
    config = TransformerConfig(
        hidden_size=H, num_heads=8, num_layers=4, vocab_size=96, num_experts=8, num_experts_per_token=3
    )
    layout = ParallelLayout(data_parallel=4, expert_parallel=4)
    exchanges = collectives(layout, config, axis="expert")
    assert {each.op_name for each in exchanges} == {"alltoall"}
    assert {each.message_bytes for each in exchanges} == {3 * RESIDUAL_BYTES}
    assert sum(int(each.repeats) for each in exchanges) == 4 * 4
    # Copies of an expert live on data_parallel / expert_parallel devices: none to reduce with.
    assert not [each for each in collectives(layout, config, axis="data") if each.name.startswith("experts")]


def test_fp8_rows_are_dispatched_in_fp8_and_combined_in_bf16() -> None:
    """Dispatched rows and the gradients of what comes back are FP8 with scales; combined ones stay in 16 bits."""
    config = TransformerConfig(
        hidden_size=H, num_heads=8, num_layers=4, vocab_size=96, num_experts=8, num_experts_per_token=3
    )
    layout = ParallelLayout(data_parallel=4, expert_parallel=4)
    sent = {
        dtype: {
            each.name.removeprefix("moe.").removesuffix(".alltoall"): each.message_bytes
            for each in collectives(layout, config, axis="expert", workload=replace(WORKLOAD, dtype=dtype))
        }
        for dtype in ("fp8", "fp4")
    }
    wide, narrow = 3.0 * RESIDUAL_BYTES, 3.0 * RESIDUAL_BYTES * (1.0 + 4.0 / 128.0) / 2.0

    assert sent["fp8"] == {
        "dispatch": narrow, "combine": wide, "dispatch.backward": wide, "combine.backward": narrow
    }  # fmt: skip
    assert set(sent["fp4"].values()) == {wide}


def test_dispatch_sends_a_token_to_each_node_once() -> None:
    """Two experts of 8 over 4 nodes of 2: of 1.5 rows that leave a node, those to the same one are sent once."""
    config = TransformerConfig(
        hidden_size=H, num_heads=8, num_layers=4, vocab_size=96, num_experts=8, num_experts_per_token=2
    )
    layout = ParallelLayout(data_parallel=8, expert_parallel=8)
    by_node_size = {
        size: {
            each.crossing_fraction
            for each in lower(config, WORKLOAD, layout, node_size=size)
            if isinstance(each, Collective) and each.axis == "expert"
        }
        for size in (2, 8)
    }

    # Both experts on one node in 1 case of 4: 1.75 nodes for 2 rows.
    assert by_node_size == {2: {1.75 / 2.0}, 8: {1.0}}


def test_tied_embedding_gradients_are_reduced_over_stages() -> None:
    """First and last stage each hold the matrix; on one stage there is nothing to add."""
    config = TransformerConfig(hidden_size=H, num_heads=8, num_layers=4, vocab_size=96, tied_embeddings=True)
    (reduction,) = collectives(ParallelLayout(pipeline_parallel=4), config, pass_name="step")
    assert (reduction.op_name, reduction.num_ranks, reduction.message_bytes) == ("all_reduce", 2, 96 * H * 2)
    assert reduction.repeats == 1
    # Devices 0 and 3, and 0 and 6 with two slices a stage, share a node of 8; with four slices a stage 0 and 12 do not.
    near, apart = (
        collectives(
            ParallelLayout(pipeline_parallel=4, tensor_parallel=slices), config, pass_name="step", axis="pipeline"
        )
        for slices in (2, 4)
    )
    assert [one.ranks_per_node for one in (reduction, *near, *apart)] == [2, 2, 1]
    assert not collectives(ParallelLayout(), config)


def test_stride_of_expert_replicas() -> None:
    """8 replicas, experts over 2: 4 copies of each, every second device, so 2 of them in a node of 4."""
    config = TransformerConfig(
        hidden_size=H, num_heads=8, num_layers=4, vocab_size=96, num_experts=8, num_experts_per_token=3
    )
    layout = ParallelLayout(data_parallel=8, expert_parallel=2)
    operations = lower(config, WORKLOAD, layout, node_size=4)
    (reduction,) = (each for each in operations if each.name == "experts.gradients.all_reduce")
    assert isinstance(reduction, Collective)
    assert (reduction.num_ranks, reduction.ranks_per_node) == (4, 2)
    assert reduction.message_bytes * reduction.repeats == 4 * 4 * 2 * H * 4 * H * 2  # 4 layers, 4 local experts


def test_the_loss_of_split_logits_reduces_three_numbers_per_token() -> None:
    """Maximum, target's logit and sum of exponentials: 4 bytes per token each (arXiv 1909.08053, section 3)."""
    reductions = collectives(ParallelLayout(tensor_parallel=4), op_name="all_reduce", stage="last")
    assert [(each.message_bytes, each.repeats) for each in reductions] == [(B * S * 4, 3)]


@pytest.mark.parametrize(
    ("num_ranks", "stride", "node_size", "expected"),
    [(8, 1, 8, 8), (16, 1, 8, 8), (4, 2, 8, 4), (4, 4, 8, 2), (4, 8, 8, 1), (64, 8, 8, 1), (6, 1, 6, 6), (4, 3, 1, 1)],
)
def test_ranks_of_a_group_that_share_a_node(num_ranks: int, stride: int, node_size: int, expected: int) -> None:
    """As many neighbors, a stride apart, as fit in the node."""
    assert ranks_per_node(num_ranks, stride, node_size) == expected


def test_ranks_per_node_of_nested_axes() -> None:
    """t=2, context 2, d=2, p=2 on nodes of 4: tensor inside, context inside, data half, pipeline across."""
    layout = ParallelLayout(tensor_parallel=2, context_parallel=2, data_parallel=2, pipeline_parallel=2)
    found = {each.axis: each for each in lower(CONFIG, WORKLOAD, layout, node_size=4) if isinstance(each, Collective)}
    shares = {axis: (each.num_ranks, each.ranks_per_node) for axis, each in found.items()}
    # Gradients are reduced over data and context together: 4 ranks, 2 devices apart.
    assert shares == {"tensor": (2, 2), "context": (2, 2), "data": (4, 2), "pipeline": (2, 1)}
