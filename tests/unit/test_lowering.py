"""Lowering a model: sizes, repeats and bytes worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shapewright.config import TransformerConfig, count_parameters, read_model
from shapewright.errors import WorkloadError
from shapewright.layout import ParallelLayout
from shapewright.lowering import lower
from shapewright.operations import Attention, Gemm, GroupedGemm, Operation, Pointwise
from shapewright.workload import Workload

ONE_DEVICE = ParallelLayout()


def gpt(
    *, hidden_size: int, num_heads: int, num_layers: int = 1, vocab_size: int = 51200, **fields: Any
) -> TransformerConfig:
    """A GPT of the paper: one QKV GEMM, f = 4h, learned positions."""
    return TransformerConfig(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_layers=num_layers,
        vocab_size=vocab_size,
        fused_qkv=True,
        position_embedding="learned",
        **fields,
    )


def named(operations: tuple[Operation, ...], name: str, pass_name: str = "forward") -> Any:
    """The one operation of this name and pass."""
    (found,) = (each for each in operations if each.name == name and each.pass_name == pass_name)
    return found


def letters(product: Any) -> tuple[int, int, int, int, str]:
    """Batch, m, n, k and layout of a GEMM."""
    return product.batch, product.m, product.n, product.k, product.layout


def test_layer_gemms_of_the_paper_on_one_device() -> None:
    """The products of h=2560, a=32, b=4, s=2048 as the paper's benchmark labels them (arXiv 2401.14489, table II)."""
    workload = Workload(micro_batch_size=4, seq_len=2048, attention="unfused")
    operations = lower(gpt(hidden_size=2560, num_heads=32), workload, ONE_DEVICE)
    # b s = 8192, b a = 128, h/a = 80
    assert letters(named(operations, "attention.qkv")) == (1, 8192, 7680, 2560, "NT")
    assert letters(named(operations, "attention.score")) == (128, 2048, 2048, 80, "NT")
    assert letters(named(operations, "attention.over_value")) == (128, 2048, 80, 2048, "NN")
    assert letters(named(operations, "attention.out")) == (1, 8192, 2560, 2560, "NT")
    assert letters(named(operations, "mlp.up")) == (1, 8192, 10240, 2560, "NT")
    assert letters(named(operations, "mlp.down")) == (1, 8192, 2560, 10240, "NT")
    assert letters(named(operations, "logits")) == (1, 8192, 51200, 2560, "NT")


def test_layer_gemms_of_the_paper_on_four_devices() -> None:
    """The same for h=8192, a=64, t=4: columns of the first products and rows of the second are shared out."""
    workload = Workload(micro_batch_size=4, seq_len=2048, attention="unfused")
    layout = ParallelLayout(tensor_parallel=4)
    operations = lower(gpt(hidden_size=8192, num_heads=64, vocab_size=50257), workload, layout)
    assert letters(named(operations, "attention.qkv")) == (1, 8192, 6144, 8192, "NT")
    assert letters(named(operations, "attention.score")) == (64, 2048, 2048, 128, "NT")
    assert letters(named(operations, "attention.out")) == (1, 8192, 8192, 2048, "NT")
    assert letters(named(operations, "mlp.up")) == (1, 8192, 8192, 8192, "NT")
    assert letters(named(operations, "mlp.down")) == (1, 8192, 8192, 8192, "NT")
    # 50257 / 4 = 12564.25, the last device is padded
    assert letters(named(operations, "logits")) == (1, 8192, 12565, 8192, "NT")


def test_gradients_of_a_linear_layer_permute_its_letters() -> None:
    """Forward NT, dgrad NN, wgrad TN: n and k of the layer stay contiguous in all three."""
    operations = lower(gpt(hidden_size=64, num_heads=4), Workload(micro_batch_size=2, seq_len=8), ONE_DEVICE)
    assert letters(named(operations, "mlp.up")) == (1, 16, 256, 64, "NT")
    assert letters(named(operations, "mlp.up.dgrad", "backward")) == (1, 16, 64, 256, "NN")
    assert letters(named(operations, "mlp.up.wgrad", "backward")) == (1, 256, 64, 16, "TN")


def test_gradients_of_unfused_attention() -> None:
    """Of scores dQ = dS K, dK = dS^T Q; of values dP = dO V^T, dV = P^T dO, each for b a = 8 heads."""
    workload = Workload(micro_batch_size=2, seq_len=8, attention="unfused")
    operations = lower(gpt(hidden_size=64, num_heads=4), workload, ONE_DEVICE)
    assert letters(named(operations, "attention.score.dgrad", "backward")) == (8, 8, 16, 8, "NN")
    assert letters(named(operations, "attention.score.wgrad", "backward")) == (8, 8, 16, 8, "TN")
    assert letters(named(operations, "attention.over_value.dgrad", "backward")) == (8, 8, 8, 16, "NT")
    assert letters(named(operations, "attention.over_value.wgrad", "backward")) == (8, 8, 16, 8, "TN")


def test_repeats_count_layers_of_the_stage_and_micro_batches() -> None:
    """61 layers on 16 stages are at most 4; B=64, b=2, d=4 are 8 passes: 32 executions, 8 at the ends of the model."""
    workload = Workload(micro_batch_size=2, seq_len=8, global_batch_size=64)
    layout = ParallelLayout(pipeline_parallel=16, data_parallel=4)
    operations = lower(gpt(hidden_size=64, num_heads=4, num_layers=61), workload, layout)
    assert named(operations, "mlp.up").repeats == 4 * 8
    assert (named(operations, "logits").repeats, named(operations, "logits").stage) == (8, "last")
    assert (named(operations, "embedding").repeats, named(operations, "embedding").stage) == (8, "first")
    assert named(operations, "optimizer.layers", "step").repeats == 1


def test_unfused_softmax_reads_and_writes_every_score_once() -> None:
    """There are b a s^2 = 2 * 4 * 8 * 8 = 512 scores; dropout writes a mask of one byte each besides."""
    workload = Workload(micro_batch_size=2, seq_len=8, attention="unfused")
    operations = lower(gpt(hidden_size=64, num_heads=4, attention_dropout=0.1), workload, ONE_DEVICE)
    softmax, gradient = (
        named(operations, "attention.softmax"),
        named(operations, "attention.softmax.backward", "backward"),
    )
    assert (softmax.read_bytes, softmax.written_bytes) == (1024, 1024)
    assert (gradient.read_bytes, gradient.written_bytes) == (2048, 1024)
    dropout, gradient = (
        named(operations, "attention.dropout"),
        named(operations, "attention.dropout.backward", "backward"),
    )
    assert (dropout.read_bytes, dropout.written_bytes) == (1024, 1024 + 512)
    assert (gradient.read_bytes, gradient.written_bytes) == (1024 + 512, 1024)


def test_fused_attention_keeps_scores_out_of_memory() -> None:
    """One call forward and one backward, without dropout masks or scores."""
    workload = Workload(micro_batch_size=2, seq_len=8)
    operations = lower(gpt(hidden_size=64, num_heads=4, attention_dropout=0.1), workload, ONE_DEVICE)
    call = named(operations, "attention.fused")
    assert (call.batch_size, call.query_len, call.kv_len, call.num_heads, call.head_dim) == (2, 8, 8, 4, 16)
    assert named(operations, "attention.fused.backward", "backward").is_backward
    assert not [each for each in operations if "score" in each.name or "softmax" in each.name]


def test_residual_stream_of_a_layer() -> None:
    """T h = 16 * 64 elements of 2 bytes: 2 norms (x in, y out), 2 sums that drop (two in, one and mask out)."""
    workload = Workload(micro_batch_size=2, seq_len=8)
    operations = lower(gpt(hidden_size=64, num_heads=4, num_layers=3, hidden_dropout=0.1), workload, ONE_DEVICE)
    row_bytes = 16 * 64 * 2
    norm, residual = (named(operations, name) for name in ("norm", "residual_dropout"))
    assert (norm.read_bytes, norm.written_bytes, norm.repeats) == (row_bytes, row_bytes, 6)
    assert (residual.read_bytes, residual.written_bytes, residual.repeats) == (2 * row_bytes, 1.5 * row_bytes, 6)
    # Both gradients are added (two in, one out); that of the branch is dropped (dy and mask in, one out).
    gradient = named(operations, "residual_dropout.backward", "backward")
    assert (gradient.read_bytes, gradient.written_bytes) == (3.5 * row_bytes, 2 * row_bytes)
    assert gradient.num_kernels == 2
    # dx: x and dy; weights: x and dy once more
    gradient = named(operations, "norm.backward", "backward")
    assert (gradient.read_bytes, gradient.written_bytes, gradient.num_kernels) == (4 * row_bytes, row_bytes, 2)


def test_gated_activation_reads_two_inputs() -> None:
    """Gate and up in, product out; backward reads those and dy and writes two gradients."""
    config = gpt(hidden_size=64, num_heads=4, gated_mlp=True, intermediate_size=160)
    operations = lower(config, Workload(micro_batch_size=2, seq_len=8), ONE_DEVICE)
    bytes_of_f = 16 * 160 * 2
    forward = named(operations, "mlp.activation")
    assert (forward.read_bytes, forward.written_bytes) == (2 * bytes_of_f, bytes_of_f)
    backward = named(operations, "mlp.activation.backward", "backward")
    assert (backward.read_bytes, backward.written_bytes) == (3 * bytes_of_f, 2 * bytes_of_f)
    assert letters(named(operations, "mlp.gate")) == letters(named(operations, "mlp.up")) == (1, 16, 160, 64, "NT")


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"fused_qkv": True}, {"attention.qkv": 64 + 2 * 2 * 16}),
        ({"fused_qkv": False}, {"attention.q": 64, "attention.k": 32, "attention.v": 32}),
        ({"gated_mlp": True, "fused_gate_up": True}, {"mlp.gate_up": 320}),
        ({"gated_mlp": True}, {"mlp.gate": 160, "mlp.up": 160}),
        ({}, {"mlp.up": 160}),
    ],
)
def test_fused_projections_are_one_gemm(flags: dict[str, bool], names: dict[str, int]) -> None:
    """Flags of the config say which projections share a GEMM; the widths add up."""
    config = TransformerConfig(
        hidden_size=64, num_heads=4, num_kv_heads=2, num_layers=1, vocab_size=96, intermediate_size=160, **flags
    )
    operations = lower(config, Workload(micro_batch_size=2, seq_len=8), ONE_DEVICE)
    assert {name: named(operations, name).n for name in names} == names


def test_windows_make_groups_of_fused_layers_only() -> None:
    """5 of 6 layers see 4 positions of 8; unfused attention computes the whole square for all of them."""
    config = gpt(hidden_size=64, num_heads=4, num_layers=6, attention_windows=(4, 4, 4, 4, 4, 0))
    workload = Workload(micro_batch_size=2, seq_len=8)
    calls = [each for each in lower(config, workload, ONE_DEVICE) if each.name == "attention.fused"]
    assert {(call.window_size, call.repeats) for call in calls if isinstance(call, Attention)} == {(4, 5), (0, 1)}
    unfused = lower(config, replace(workload, attention="unfused"), ONE_DEVICE)
    assert named(unfused, "attention.score").repeats == 6
    # A window that no query reaches the end of is none.
    short = lower(config, replace(workload, seq_len=4), ONE_DEVICE)
    assert (named(short, "attention.fused").window_size, named(short, "attention.fused").repeats) == (0, 6)


def test_chunked_attention_is_more_and_shorter_sequences() -> None:
    """20 tokens in chunks of 8: two whole chunks and one of four; in decode what is left of the query's chunk."""
    config = gpt(hidden_size=64, num_heads=4, attention_windows=(8,), attention_window_kind="chunked")
    operations = lower(config, Workload(micro_batch_size=3, seq_len=20), ONE_DEVICE)
    whole, rest = named(operations, "attention.fused"), named(operations, "attention.fused.rest")
    assert (whole.batch_size, whole.query_len, whole.kv_len) == (6, 8, 8)
    assert (rest.batch_size, rest.query_len, rest.kv_len) == (3, 4, 4)
    decode = Workload(phase="decode", micro_batch_size=3, context_len=18)  # position 18 is the third of its chunk
    assert named(lower(config, decode, ONE_DEVICE), "attention.fused").kv_len == 3


def test_decode_runs_one_token_per_sequence_against_the_cache() -> None:
    """b=5 rows in every GEMM, 101 keys of which 100 are cached, in the cache's own format."""
    workload = Workload(phase="decode", micro_batch_size=5, context_len=100, kv_cache_dtype="fp8")
    operations = lower(gpt(hidden_size=64, num_heads=4, num_layers=2), workload, ONE_DEVICE)
    assert {each.m for each in operations if isinstance(each, Gemm)} == {5}
    call = named(operations, "attention.fused")
    assert (call.query_len, call.kv_len, call.kv_cache_dtype, call.repeats) == (1, 101, "fp8", 2)
    assert {each.pass_name for each in operations} == {"forward"}


def test_rolling_cache_holds_no_more_than_the_window() -> None:
    """With a window of 64 the hundredth token reads 64 keys."""
    config = gpt(hidden_size=64, num_heads=4, num_layers=2, attention_windows=(64, 0))
    workload = Workload(phase="decode", micro_batch_size=1, context_len=100, attention="unfused")
    scores = [each for each in lower(config, workload, ONE_DEVICE) if each.name == "attention.score"]
    assert {score.n for score in scores if isinstance(score, Gemm)} == {64, 101}


def test_prefill_needs_the_last_tokens_logits_alone() -> None:
    """There are b s rows in the layers, b in the logits; the cached context is seen by attention."""
    workload = Workload(phase="prefill", micro_batch_size=3, seq_len=16, context_len=32)
    operations = lower(gpt(hidden_size=64, num_heads=4), workload, ONE_DEVICE)
    assert (named(operations, "mlp.up").m, named(operations, "logits").m) == (48, 3)
    assert (named(operations, "attention.fused").query_len, named(operations, "attention.fused").kv_len) == (16, 48)


def test_full_recomputation_repeats_the_layers_and_selective_the_attention_core() -> None:
    """Full: every forward operation of the layers again, no logits. Selective: score, softmax, over value."""
    config = gpt(hidden_size=64, num_heads=4, num_layers=2)
    workload = Workload(micro_batch_size=2, seq_len=8, attention="unfused", recompute="full")
    operations = lower(config, workload, ONE_DEVICE)
    forward = {each.name for each in operations if each.pass_name == "forward" and each.stage == "every"}
    assert {each.name for each in operations if each.pass_name == "recompute"} == forward
    selective = lower(config, replace(workload, recompute="selective"), ONE_DEVICE)
    repeated = {each.name for each in selective if each.pass_name == "recompute" and isinstance(each, Gemm)}
    assert repeated == {"attention.score", "attention.over_value"}


def test_experts_are_grouped_gemms_over_routed_rows() -> None:
    """T=16 tokens to 2 of 8 experts: 32 rows; over 4 devices still 32 rows, for 2 experts each."""
    config = gpt(
        hidden_size=64, num_heads=4, num_layers=4, gated_mlp=True, num_experts=8, num_experts_per_token=2,
        moe_intermediate_size=48, shared_expert_intermediate_size=96, moe_layers=(False, True),
    )  # fmt: skip
    workload = Workload(micro_batch_size=2, seq_len=8)
    operations = lower(config, workload, ONE_DEVICE)
    router, gate_up, down = (named(operations, f"moe.{role}") for role in ("router", "gate_up", "down"))
    assert letters(router) == (1, 16, 8, 64, "NT")
    assert (gate_up.m, gate_up.n, gate_up.k, gate_up.groups, gate_up.repeats) == (32, 96, 64, 8, 2)
    assert (down.m, down.n, down.k, down.groups) == (32, 64, 48, 8)
    wgrad = named(operations, "moe.down.wgrad", "backward")
    assert (wgrad.m, wgrad.n, wgrad.k, wgrad.groups, wgrad.layout) == (64, 48, 32, 8, "TN")
    assert named(operations, "shared_expert.up").n == 96
    assert named(operations, "mlp.up").repeats == 2
    spread = lower(config, workload, ParallelLayout(data_parallel=4, expert_parallel=4))
    assert (named(spread, "moe.down").m, named(spread, "moe.down").groups) == (32, 2)


def test_few_tokens_read_few_experts() -> None:
    """One token in decode reads the weights of its 2 experts, not of all 8."""
    config = gpt(hidden_size=64, num_heads=4, num_experts=8, num_experts_per_token=2, moe_intermediate_size=48)
    operations = lower(config, Workload(phase="decode", micro_batch_size=1, context_len=7), ONE_DEVICE)
    assert named(operations, "moe.up").groups == 2


LATENT = TransformerConfig(
    hidden_size=64, num_heads=4, num_layers=1, vocab_size=96, head_dim=24, v_head_dim=16,
    q_lora_rank=40, kv_lora_rank=32, qk_rope_head_dim=8,
)  # fmt: skip


def test_latent_attention_expands_in_training() -> None:
    """kv_b makes a (d - rope + d_v) = 4 * (16 + 16) columns from the latent; attention runs on full heads."""
    operations = lower(LATENT, Workload(micro_batch_size=2, seq_len=8), ONE_DEVICE)
    widths = {
        role: (named(operations, f"attention.{role}").n, named(operations, f"attention.{role}").k)
        for role in ("q_a", "q_b", "kv_a", "kv_b")
    }
    assert widths == {"q_a": (40, 64), "q_b": (96, 40), "kv_a": (40, 64), "kv_b": (128, 32)}
    call = named(operations, "attention.fused")
    assert (call.num_kv_heads, call.head_dim, call.v_head_dim) == (4, 24, 16)


def test_latent_attention_absorbs_in_decode() -> None:
    """Queries enter the latent space head by head; attention reads one latent of 32 + 8 per token, 32 being values."""
    operations = lower(LATENT, Workload(phase="decode", micro_batch_size=2, context_len=9), ONE_DEVICE)
    assert letters(named(operations, "attention.absorb_q")) == (4, 2, 32, 16, "NN")
    assert letters(named(operations, "attention.absorb_out")) == (4, 2, 16, 32, "NN")
    call = named(operations, "attention.fused")
    assert (call.num_kv_heads, call.head_dim, call.v_head_dim, call.values_in_keys) == (1, 40, 32, True)
    # Q and O: 2 sequences, 4 heads, 40 + 32 elements; keys that hold values: 2 sequences, 10 tokens, 40 elements
    assert call.num_bytes == 2 * (2 * 4 * (40 + 32) + 2 * 10 * 40)
    unfused = Workload(phase="decode", micro_batch_size=2, context_len=9, attention="unfused")
    assert letters(named(lower(LATENT, unfused, ONE_DEVICE), "attention.score")) == (2, 4, 10, 40, "NT")


def test_latents_of_a_cached_context_are_expanded_again() -> None:
    """A prompt of 8 after 24 cached tokens expands 32 latents per sequence."""
    workload = Workload(phase="prefill", micro_batch_size=2, seq_len=8, context_len=24)
    assert named(lower(LATENT, workload, ONE_DEVICE), "attention.kv_b").m == 64


def test_narrow_formats_leave_activations_in_bf16() -> None:
    """fp8 weight GEMMs, bf16 logits, router, attention and pointwise."""
    config = gpt(
        hidden_size=64, num_heads=4, num_experts=8, num_experts_per_token=2, moe_layers=(False, True), num_layers=2
    )
    operations = lower(config, Workload(micro_batch_size=2, seq_len=8, dtype="fp8"), ONE_DEVICE)
    narrow = {each.name for each in operations if each.dtype == "fp8" and each.pass_name == "forward"}
    assert narrow == {"attention.qkv", "attention.out", "mlp.up", "mlp.down", "moe.up", "moe.down"}
    assert {each.dtype for each in operations if isinstance(each, Attention)} == {"bf16"}


ENCODER_DECODER = TransformerConfig(
    hidden_size=64, num_heads=4, num_layers=3, num_encoder_layers=2, vocab_size=96, stack="encoder-decoder",
    position_embedding="relative",
)  # fmt: skip


def test_encoder_decoder_trains_both_stacks() -> None:
    """2 encoder and 3 decoder layers; cross attention takes keys and values from the encoder's tokens."""
    operations = lower(ENCODER_DECODER, Workload(micro_batch_size=2, seq_len=8), ONE_DEVICE)
    assert named(operations, "encoder.mlp.up").repeats == 2
    assert named(operations, "mlp.up").repeats == named(operations, "cross_attention.k").repeats == 3
    # A decoder layer has one norm and one residual sum more than an encoder layer, for cross attention.
    assert (named(operations, "norm").repeats, named(operations, "encoder.norm").repeats) == (9, 4)
    assert (named(operations, "residual").repeats, named(operations, "encoder.residual").repeats) == (9, 4)
    assert not named(operations, "encoder.attention.fused").causal
    assert not named(operations, "cross_attention.fused").causal
    assert named(operations, "attention.fused").causal


def test_encoder_decoder_reads_its_prompt_once() -> None:
    """Prefill: the encoder over the prompt, the decoder over its start token. Decode: no encoder, cached cross keys."""
    prefill = lower(ENCODER_DECODER, Workload(phase="prefill", micro_batch_size=2, seq_len=8), ONE_DEVICE)
    assert (named(prefill, "encoder.mlp.up").m, named(prefill, "mlp.up").m) == (16, 2)
    decode = lower(ENCODER_DECODER, Workload(phase="decode", micro_batch_size=2, seq_len=8, context_len=5), ONE_DEVICE)
    assert not [each for each in decode if each.name.startswith("encoder.") or each.name == "cross_attention.k"]
    assert (named(decode, "cross_attention.fused").kv_len, named(decode, "attention.fused").kv_len) == (8, 6)


def test_an_encoder_has_no_decode() -> None:
    """The error says what the model is and what it can do."""
    config = gpt(hidden_size=64, num_heads=4, stack="encoder")
    with pytest.raises(WorkloadError, match=r"phase='decode'.*encoder.*--phase prefill or train"):
        lower(config, Workload(phase="decode"), ONE_DEVICE)
    prefill = lower(config, Workload(phase="prefill", micro_batch_size=2, seq_len=8), ONE_DEVICE)
    assert named(prefill, "logits").m == 16


def test_cross_entropy_takes_its_logits_in_fp32() -> None:
    """16 * 96 bf16 logits: cast (2 in, 4 out) and log-softmax (4 in, 4 out)."""
    config = gpt(hidden_size=64, num_heads=4, vocab_size=96)
    loss = named(lower(config, Workload(micro_batch_size=2, seq_len=8), ONE_DEVICE), "cross_entropy")
    assert (loss.read_bytes, loss.written_bytes) == (16 * 96 * 6, 16 * 96 * 8)


def moved(operation: Pointwise) -> tuple[float, float]:
    """Bytes read and bytes written."""
    return float(operation.read_bytes), float(operation.written_bytes)


def test_embedding_rows_are_gathered_and_their_gradients_scattered() -> None:
    """T h = 1024 elements out of rows; backward zeroes all 96 * 64 gradients and adds the tokens' to their rows."""
    operations = lower(
        gpt(hidden_size=64, num_heads=4, vocab_size=96), Workload(micro_batch_size=2, seq_len=8), ONE_DEVICE
    )
    assert moved(named(operations, "embedding")) == (1024 * 2, 1024 * 2)
    # 8 learned positions are read for all sequences together
    assert moved(named(operations, "embedding.positions")) == ((1024 + 8 * 64) * 2, 1024 * 2)
    assert moved(named(operations, "embedding.backward", "backward")) == (2 * 1024 * 2, (1024 + 96 * 64) * 2)


def test_rotary_positions_turn_queries_and_keys() -> None:
    """T (a + a_kv) d = 16 * (4 + 2) * 16 elements in and out; of MLA the rope part of 4 heads and one shared key."""
    config = TransformerConfig(hidden_size=64, num_heads=4, num_kv_heads=2, num_layers=1, vocab_size=96)
    workload = Workload(micro_batch_size=2, seq_len=8)
    assert moved(named(lower(config, workload, ONE_DEVICE), "attention.rotary")) == (16 * 96 * 2, 16 * 96 * 2)
    assert moved(named(lower(LATENT, workload, ONE_DEVICE), "attention.rotary")) == (16 * 40 * 2, 16 * 40 * 2)


def test_new_keys_and_values_are_written_to_the_cache() -> None:
    """5 tokens of 2 key and 2 value heads of 16; of MLA one latent of 32 and one key of 8. Training has no cache."""
    config = TransformerConfig(hidden_size=64, num_heads=4, num_kv_heads=2, num_layers=1, vocab_size=96)
    decode = Workload(phase="decode", micro_batch_size=5, context_len=3)
    assert moved(named(lower(config, decode, ONE_DEVICE), "attention.cache_write")) == (5 * 64 * 2, 5 * 64 * 2)
    assert moved(named(lower(LATENT, decode, ONE_DEVICE), "attention.cache_write")) == (5 * 40 * 2, 5 * 40 * 2)
    narrow = replace(decode, kv_cache_dtype="fp8")
    assert moved(named(lower(config, narrow, ONE_DEVICE), "attention.cache_write")) == (5 * 64 * 2, 5 * 64)
    training = lower(config, Workload(micro_batch_size=2, seq_len=8), ONE_DEVICE)
    assert not [each for each in training if each.name == "attention.cache_write"]


def test_routing_reads_scores_and_moves_rows() -> None:
    """16 * 8 fp32 scores: softmax reads and writes them, top-k reads them, writes 2 weights and 2 indices a token."""
    config = gpt(hidden_size=64, num_heads=4, num_experts=8, num_experts_per_token=2)
    operations = lower(config, Workload(micro_batch_size=2, seq_len=8), ONE_DEVICE)
    assert moved(named(operations, "moe.choose")) == (2 * 16 * 8 * 4, 16 * 8 * 4 + 16 * 2 * 8)
    # 32 routed rows of 64 out; back in, they are added up to 16
    assert moved(named(operations, "moe.permute")) == (32 * 64 * 2, 32 * 64 * 2)
    assert moved(named(operations, "moe.unpermute")) == (32 * 64 * 2, 16 * 64 * 2)


def test_biases_cost_a_sum_over_tokens_in_backward() -> None:
    """Columns: qkv 192, out 64, up 256 and down 64, of 16 rows each."""
    config = gpt(hidden_size=64, num_heads=4, qkv_bias=True, attention_out_bias=True, mlp_bias=True)
    operations = lower(config, Workload(micro_batch_size=2, seq_len=8), ONE_DEVICE)
    sums = [each for each in operations if isinstance(each, Pointwise) and each.name.endswith("bias_gradient")]
    assert {each.name: each.read_bytes for each in sums} == {
        "attention.bias_gradient": 16 * (192 + 64) * 2,
        "mlp.bias_gradient": 16 * (256 + 64) * 2,
    }


@pytest.mark.parametrize("preset", ["llama-3-8b", "gpt3-2.7b", "mixtral-8x7b", "qwen2.5-0.5b", "deepseek-v3"])
def test_the_optimizer_steps_over_the_weights_of_the_model(preset: str) -> None:
    """Weights counted from GEMMs are the model's parameters but for norms, biases and positions: within 0.3 %."""
    config = read_model(preset).config
    operations = lower(config, Workload(micro_batch_size=1, seq_len=64), ONE_DEVICE)
    # AdamW reads gradient, weight and two moments, 16 bytes, and writes weight, moments and the bf16 copy, 14 bytes.
    steps = [each for each in operations if isinstance(each, Pointwise) and each.name.startswith("optimizer.")]
    weights = sum(each.read_bytes for each in steps) / 16
    assert weights == pytest.approx(count_parameters(config).total, rel=3e-3)
    assert weights <= count_parameters(config).total
    assert sum(each.written_bytes for each in steps) / 14 == weights


def test_the_busiest_stage_has_the_experts() -> None:
    """3 dense layers then 5 with experts on 2 stages: the second stage, 4 expert layers, is what is lowered."""
    config = gpt(
        hidden_size=64, num_heads=4, num_layers=8, num_experts=8, num_experts_per_token=2,
        moe_layers=(False, False, False, True, True, True, True, True),
    )  # fmt: skip
    operations = lower(config, Workload(micro_batch_size=2, seq_len=8), ParallelLayout(pipeline_parallel=2))
    assert named(operations, "moe.up").repeats == 4 * 2
    assert not [each for each in operations if each.name.startswith("mlp.")]


def test_narrow_embeddings_are_projected() -> None:
    """e=32 against h=64: in after the embedding, out before the logits (OPT-350M)."""
    config = gpt(hidden_size=64, num_heads=4, vocab_size=96, embedding_size=32)
    operations = lower(config, Workload(micro_batch_size=2, seq_len=8), ONE_DEVICE)
    assert letters(named(operations, "embedding.project_in")) == (1, 16, 64, 32, "NT")
    assert letters(named(operations, "logits.project_out")) == (1, 16, 32, 64, "NT")
    assert letters(named(operations, "logits")) == (1, 16, 96, 32, "NT")


def test_every_product_knows_its_gradient() -> None:
    """In training each forward GEMM has a dgrad and a wgrad that run as often as it does."""
    operations = lower(LATENT, Workload(micro_batch_size=2, seq_len=8, attention="unfused"), ONE_DEVICE)
    forward = [each for each in operations if isinstance(each, Gemm | GroupedGemm) and each.pass_name == "forward"]
    assert len(forward) == 10
    for product in forward:
        for gradient in ("dgrad", "wgrad"):
            assert named(operations, f"{product.name}.{gradient}", "backward").repeats == product.repeats
