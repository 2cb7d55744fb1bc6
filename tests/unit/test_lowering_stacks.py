"""Two stacks, mixed stacks and projected embeddings: each part is lowered as often as it occurs in the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shapewright.lowering.model import lower
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.operation import Operation
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

SINGLE = ParallelLayout()
TRAINING = Workload(seq_len=64, micro_batch_size=2)
SMALL: dict[str, Any] = {"hidden_size": 128, "num_heads": 4, "num_layers": 6, "vocab_size": 512}
ATTENTIONS = ("encoder.attention.fused", "attention.fused", "cross_attention.fused")
T5 = TransformerConfig(**SMALL, stack="encoder-decoder", num_encoder_layers=4)


def named(operations: tuple[Operation, ...], name: str, pass_name: str = "forward") -> list[Any]:
    """Operations of a name in a pass."""
    return [one for one in operations if one.name == name and one.pass_name == pass_name]


def test_selective_recomputation_repeats_all_attention_blocks() -> None:
    """Scores of the encoder, of the decoder and of attention to the encoder run again, once for each layer."""
    operations = lower(T5, replace(TRAINING, recompute="selective"), SINGLE)
    again = {one.name: one.repeats for one in operations if one.pass_name == "recompute" and one.kind == "attention"}
    assert again == {"encoder.attention.fused": 4, "attention.fused": 6, "cross_attention.fused": 6}


@pytest.mark.parametrize("attention", ["flash", "unfused"])
@pytest.mark.parametrize("degree", [2, 4])
def test_start_token_is_replicated_over_the_context_axis(degree: int, attention: str) -> None:
    """A prompt's encoder is cut; the decoder's one token reads its own key, a share of the source, and joins shares."""
    prompt = Workload(phase="prefill", seq_len=64, micro_batch_size=2, attention=attention)
    operations = lower(T5, prompt, ParallelLayout(context_parallel=degree))
    is_fused = attention == "flash"
    (own,) = named(operations, "attention.fused" if is_fused else "attention.score")
    (cross,) = named(operations, "cross_attention.fused" if is_fused else "cross_attention.score")

    assert (own.kv_len if is_fused else own.n) == 1
    assert (cross.kv_len if is_fused else cross.n) == 64 // degree
    assert not named(operations, "attention.fused.ring")
    assert len(named(operations, "cross_attention.all_reduce")) == 1
    assert bool(named(operations, "encoder.attention.fused.ring")) == is_fused


def test_stages_hold_both_stacks_and_masks_only_the_decoder() -> None:
    """Of 4 encoder and 6 decoder layers the fullest of three stages has two each; the decoder masks its own scores."""
    operations = lower(T5, replace(TRAINING, global_batch_size=12), ParallelLayout(pipeline_parallel=3))
    masked = {
        one.name: (one.repeats, one.causal)
        for one in operations
        if isinstance(one, Attention) and one.pass_name == "forward"
    }
    assert masked == dict(zip(ATTENTIONS, ((12, False), (12, True), (12, False)), strict=True))


@pytest.mark.parametrize("degree", [1, 2])
def test_cross_attention_shapes(degree: int) -> None:
    """Two prompts of 64 tokens, two start tokens; 4 heads of 24 over 2 key-value heads, whose values are 40 wide."""
    config = replace(T5, head_dim=24, v_head_dim=40, num_kv_heads=2)
    workload = Workload(phase="prefill", seq_len=64, micro_batch_size=2)
    operations = lower(config, workload, ParallelLayout(tensor_parallel=degree))
    found = {
        letter: [(one.m, one.n, one.k) for one in named(operations, f"cross_attention.{letter}")]
        for letter in ("q", "k", "v", "out")
    }
    assert found == {
        "q": [(2, 4 * 24 // degree, 128)],
        "k": [(128, 2 * 24 // degree, 128)],
        "v": [(128, 2 * 40 // degree, 128)],
        "out": [(2, 128, 4 * 40 // degree)],
    }


def test_unfused_attention_copies_heads_before_the_output_projection() -> None:
    """Unfused attention leaves heads outermost, for which a copy of 128 rows of 128 runs; a fused kernel does not."""
    config = TransformerConfig(**SMALL)
    copies = [
        [
            one.read_bytes
            for one in named(lower(config, replace(TRAINING, attention=kind), SINGLE), "attention.merge_heads")
        ]
        for kind in ("unfused", "flash")
    ]
    assert copies == [[128 * 128 * 2], []]


def test_stage_with_fewer_windows_is_the_busiest() -> None:
    """Two layers with a window of 16 tokens precede two without: a pipeline waits for the latter."""
    config = replace(TransformerConfig(**SMALL), num_layers=4, attention_windows=(16, 16, 0, 0))
    operations = lower(config, TRAINING, ParallelLayout(pipeline_parallel=2))
    windows = [(one.window_size, one.repeats) for one in named(operations, "attention.fused")]
    assert windows == [(0, 2 * 2)]


@pytest.mark.parametrize(("name", "num_layers"), [("encoder.attention.fused", 4), ("cross_attention.fused", 6)])
def test_context_parallel_cross_attention_reads_all_source_tokens(name: str, num_layers: int) -> None:
    """Four ranks of the context axis have 16 tokens each, and keys of all 64 come round the ring."""
    operations = lower(T5, TRAINING, ParallelLayout(context_parallel=4))
    calls = [*named(operations, name), *named(operations, f"{name}.ring")]
    assert {one.query_len for one in calls} == {16}
    assert sum(one.kv_len * one.repeats for one in calls) == 64 * num_layers


def test_prefill_encodes_the_prompt() -> None:
    """Prefill encodes 64 tokens, and the decoder runs its start token alone, which attends to them."""
    operations = lower(T5, Workload(phase="prefill", seq_len=64), SINGLE)
    lengths = {one.name: (one.query_len, one.kv_len) for one in operations if isinstance(one, Attention)}
    assert lengths == dict(zip(ATTENTIONS, ((64, 64), (1, 1), (1, 64)), strict=True))


def test_activations_of_tf32_gemms_are_fp32() -> None:
    """TF32 is the format of GEMM operands; norms read 4 bytes per element."""
    (norm,) = named(lower(TransformerConfig(**SMALL), replace(TRAINING, dtype="tf32"), SINGLE), "norm")
    assert (norm.dtype, norm.read_bytes) == ("fp32", 4 * 2 * 64 * 128)


@pytest.mark.parametrize("changes", [{}, {"finetune": "lora"}, {"finetune": "dora"}])
def test_every_gemm_is_tf32_where_one_is(changes: dict[str, Any]) -> None:
    """torch.set_float32_matmul_precision("high") holds for logits, scores, router and adapters as for other GEMMs."""
    experts = {"num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 64}
    workload = replace(TRAINING, dtype="tf32", attention="unfused", **changes)
    operations = lower(TransformerConfig(**SMALL, **experts), workload, SINGLE)
    gemms = [one for one in operations if isinstance(one, Gemm | GroupedGemm)]

    assert {("logits", ""), ("router", "router"), ("attention", "score")} <= {(one.block, one.role) for one in gemms}
    assert {one.dtype for one in gemms} == {"tf32"}


def test_recompute_modules_apply_to_both_stacks() -> None:
    """Recomputing norms only: two of an encoder layer, three of a decoder layer, no attention."""
    requested = replace(TRAINING, recompute="selective", recompute_modules="layernorm")
    again = {one.name: one.repeats for one in lower(T5, requested, SINGLE) if one.pass_name == "recompute"}
    assert again == {"encoder.norm": 8, "norm": 18}


def test_bias_gradients_of_dense_and_expert_layers() -> None:
    """Of six layers two have experts: four MLPs and two sets of experts sum the gradients of their biases."""
    mixed = TransformerConfig(
        **SMALL,
        num_experts=4,
        num_experts_per_token=2,
        moe_layers=(False, False, True),
        mlp_bias=True,
        expert_bias=True,
    )
    operations = lower(mixed, TRAINING, SINGLE)
    (dense,) = named(operations, "mlp.bias_gradient", "backward")
    (experts,) = named(operations, "moe.bias_gradient", "backward")
    assert (dense.repeats, experts.repeats) == (4, 2)
    assert dense.num_kernels == 2  # of the first product and of the second


def test_orthogonalization_excludes_attention_scores() -> None:
    """Score GEMMs have no weights, so the GEMMs of Muon do not depend on the kind of attention."""
    steps = []
    for attention in ("flash", "unfused"):
        workload = replace(TRAINING, optimizer="muon", attention=attention)
        steps.append([one for one in lower(TransformerConfig(**SMALL), workload, SINGLE) if one.pass_name == "step"])
    assert steps[0] == steps[1]
    assert any(one.kind == "gemm" for one in steps[0])


def test_layers_without_attention_to_the_encoder_send_less_to_the_host() -> None:
    """Encoder and decoder of T5 offload what each saves; a decoder layer attends twice, and saves more."""
    operations = lower(T5, replace(TRAINING, offload_activations=True), SINGLE)
    (encoder,) = named(operations, "encoder.activations.to_host")
    (decoder,) = named(operations, "activations.to_host")
    assert (encoder.repeats, decoder.repeats) == (4, 6)
    assert encoder.message_bytes < decoder.message_bytes


def test_narrow_embeddings_move_few_bytes() -> None:
    """Rows of 32 numbers are gathered, projected to 128, and their gradients scattered into a matrix of 512 x 32."""
    narrow = TransformerConfig(**SMALL, embedding_size=32)
    operations = lower(narrow, TRAINING, SINGLE)
    (rows,) = named(operations, "embedding")
    (scatter,) = named(operations, "embedding.backward", "backward")
    (projection,) = named(operations, "embedding.project_in")
    tokens = 2 * 64
    assert (rows.read_bytes, rows.written_bytes) == (2 * tokens * 32, 2 * tokens * 32)
    assert scatter.written_bytes == 2 * (tokens * 32 + 512 * 32)
    assert (projection.m, projection.n, projection.k) == (tokens, 128, 32)


def test_rows_of_the_embedding_on_two_devices() -> None:
    """511 rows are padded to 256 on each of two; positions and token types see the half of the tokens that is kept."""
    config = TransformerConfig(
        **{**SMALL, "vocab_size": 511}, position_embedding="learned", num_token_types=2, hidden_dropout=0.1
    )
    layout = ParallelLayout(tensor_parallel=2, sequence_parallel=True)
    operations = lower(config, TRAINING, layout)
    (scatter,) = named(operations, "embedding.backward", "backward")
    (positions,) = named(operations, "embedding.positions")
    (types,) = named(operations, "embedding.token_types")
    (dropped,) = named(operations, "embedding.dropout")
    tokens, h = 2 * 64, 128
    assert scatter.written_bytes == 2 * (tokens + 256) * h
    assert positions.read_bytes == 2 * (tokens // 2 + 64) * h
    assert types.read_bytes == 2 * (tokens // 2 + 2) * h
    backward = {one.name for one in operations if one.pass_name == "backward" and one.stage == "first"}
    assert {f"{one.name}.backward" for one in (positions, types, dropped)} <= backward
    # A mask of one byte for each number of 16 bits.
    assert dropped.written_bytes == (2 + 1) * tokens // 2 * h


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_the_residual_stream_by_hand(kind: str) -> None:
    """Two devices keep half of the tokens each; masks of dropout are one byte a number, and inference drops nothing."""
    config = TransformerConfig(**SMALL, norm=kind, hidden_dropout=0.1)
    layout = ParallelLayout(tensor_parallel=2, sequence_parallel=True)
    numbers = 2 * 64 // 2 * 128
    operations = lower(config, TRAINING, layout)
    (norm,) = named(operations, "norm")
    (added,) = named(operations, "residual_dropout")
    assert norm.operation == ("layernorm" if kind == "layernorm" else "norm")
    assert (norm.repeats, norm.read_bytes, norm.written_bytes) == (12, 2 * numbers, 2 * numbers)
    assert (added.repeats, added.read_bytes, added.written_bytes) == (12, 4 * numbers, 3 * numbers)
    served = lower(config, Workload(phase="prefill", seq_len=64, micro_batch_size=2), layout)
    assert not [one.name for one in served if "dropout" in one.name]
    (plain,) = named(served, "residual")
    assert (plain.read_bytes, plain.written_bytes) == (8 * numbers, 4 * numbers)  # every token on each device


def test_windows_of_unfused_attention() -> None:
    """Decode reads only the keys of the window; prefill computes all scores and masks them."""
    windowed = TransformerConfig(**SMALL, attention_windows=(16,))
    decode = Workload(phase="decode", context_len=99, attention="unfused")
    prefill = Workload(phase="prefill", seq_len=100, attention="unfused")
    (one,) = named(lower(windowed, decode, SINGLE), "attention.score")
    (many,) = named(lower(windowed, prefill, SINGLE), "attention.score")
    assert (one.n, many.n) == (16, 100)


def test_expert_exchange_is_symmetric() -> None:
    """Rows return as many as they went, also where devices that share an expert gather them; both see own tokens."""
    config = TransformerConfig(
        **SMALL, num_experts=4, num_experts_per_token=2, shared_expert_intermediate_size=64, expert_bias=True
    )
    layout = ParallelLayout(
        tensor_parallel=4, data_parallel=2, sequence_parallel=True, expert_parallel=4, expert_tensor_parallel=2
    )
    operations = lower(config, replace(TRAINING, global_batch_size=4, fused_experts=False), layout)
    (sent,) = named(operations, "moe.dispatch.alltoall")
    (back,) = named(operations, "moe.combine.alltoall")
    (router,) = named(operations, "moe.router")
    assert sent.message_bytes == back.message_bytes == 2 * 64 // 4 * 2 * 128 * 2
    assert router.m == 2 * 64 // 4
    # Whole experts of a group of four: one each, with two kernels in each direction for its bias.
    (scaled,) = named(operations, "moe.scaled_bias_gradient", "backward")
    assert scaled.num_kernels == 4
    # The shared expert is cut over the tensor axis, and gathers tokens that the routed experts do not have whole.
    apart = {one.name for one in operations if one.kind == "collective" and one.name.startswith("shared_expert")}
    alone = lower(config, TRAINING, ParallelLayout(tensor_parallel=4, sequence_parallel=True))
    assert apart
    assert not [one for one in alone if one.kind == "collective" and one.name.startswith("shared_expert")]


@pytest.mark.parametrize(("stack", "causal"), [("encoder", False), ("decoder", True)])
def test_encoder_attention_is_bidirectional(stack: str, causal: bool) -> None:
    """Each token of an encoder attends to all, each of a decoder to those before it."""
    operations = lower(TransformerConfig(**SMALL, stack=stack), TRAINING, SINGLE)
    assert [one.causal for one in named(operations, "attention.fused")] == [causal]


@pytest.mark.parametrize("preset", ["gpt2", "bert-base", "flan-t5-small", "mixtral-8x7b", "deepseek-v3"])
def test_operations_state_their_block_and_gradient(preset: str) -> None:
    """Fields agree with the displayed name: block first, gradient last, and the same module in both directions."""
    config = read_model(preset).config
    layout = ParallelLayout(tensor_parallel=2, data_parallel=2)
    operations = lower(config, Workload(seq_len=512, optimizer="muon"), layout)

    modules = {each.module for each in operations if not each.gradient}
    for each in operations:
        assert each.block
        assert bool(each.gradient) == (each.gradient in each.name.split("."))
        if each.gradient and each.kind != "collective":
            assert each.module in modules


def test_gemms_of_unfused_attention_have_no_weight_gradient() -> None:
    """Scores and attention over values multiply activations by activations."""
    unfused = lower(read_model("gpt2").config, Workload(seq_len=512, attention="unfused"), ParallelLayout())

    weightless = {each.name for each in unfused if each.gradient == "wgrad" and not each.is_weight_gradient}
    assert weightless == {"attention.score.wgrad", "attention.over_value.wgrad"}
