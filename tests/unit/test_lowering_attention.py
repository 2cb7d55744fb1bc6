"""Lowering attention: windows, latents, caches and the bytes of its parts, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from lowered import LATENT, ONE_DEVICE, gpt, letters, moved, named
from shapewright.lowering.model import lower
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.workload import Workload


def test_gradients_of_unfused_attention() -> None:
    """Of scores dQ = dS K, dK = dS^T Q; of values dP = dO V^T, dV = P^T dO, each for b a = 8 heads."""
    workload = Workload(micro_batch_size=2, seq_len=8, attention="unfused")
    operations = lower(gpt(hidden_size=64, num_heads=4), workload, ONE_DEVICE)
    assert letters(named(operations, "attention.score.dgrad", "backward")) == (8, 8, 16, 8, "NN")
    assert letters(named(operations, "attention.score.wgrad", "backward")) == (8, 8, 16, 8, "TN")
    assert letters(named(operations, "attention.over_value.dgrad", "backward")) == (8, 8, 8, 16, "NT")
    assert letters(named(operations, "attention.over_value.wgrad", "backward")) == (8, 8, 16, 8, "TN")


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


def test_windows_apply_to_fused_attention_only() -> None:
    """5 of 6 layers attend to 4 positions of 8; unfused attention computes all scores in every layer."""
    config = gpt(hidden_size=64, num_heads=4, num_layers=6, attention_windows=(4, 4, 4, 4, 4, 0))
    workload = Workload(micro_batch_size=2, seq_len=8)
    calls = [each for each in lower(config, workload, ONE_DEVICE) if each.name == "attention.fused"]
    assert {(call.window_size, call.repeats) for call in calls if isinstance(call, Attention)} == {(4, 5), (0, 1)}
    unfused = lower(config, replace(workload, attention="unfused"), ONE_DEVICE)
    assert named(unfused, "attention.score").repeats == 6
    # A window that no query reaches the end of is none.
    short = lower(config, replace(workload, seq_len=4), ONE_DEVICE)
    assert (named(short, "attention.fused").window_size, named(short, "attention.fused").repeats) == (0, 6)


def test_chunked_attention_becomes_shorter_sequences() -> None:
    """20 tokens in chunks of 8: two full chunks and one of four; in decode the current chunk only."""
    config = gpt(hidden_size=64, num_heads=4, attention_windows=(8,), attention_window_kind="chunked")
    operations = lower(config, Workload(micro_batch_size=3, seq_len=20), ONE_DEVICE)
    whole, rest = named(operations, "attention.fused"), named(operations, "attention.fused.rest")
    assert (whole.batch_size, whole.query_len, whole.kv_len) == (6, 8, 8)
    assert (rest.batch_size, rest.query_len, rest.kv_len) == (3, 4, 4)
    # 13 cached tokens end amid the second chunk: 3 new ones fill it and see its 5, then come a whole one and one of 4.
    behind = lower(config, Workload(phase="prefill", micro_batch_size=3, seq_len=15, context_len=13), ONE_DEVICE)
    calls = [each for each in behind if isinstance(each, Attention)]
    assert [(each.batch_size, each.query_len, each.kv_len) for each in calls] == [(3, 3, 8), (3, 8, 8), (3, 4, 4)]
    decode = Workload(phase="decode", micro_batch_size=3, context_len=18)  # position 18 is the third of its chunk
    assert named(lower(config, decode, ONE_DEVICE), "attention.fused").kv_len == 3


def test_decode_attends_to_cached_keys() -> None:
    """b=5 rows in every GEMM, 101 keys of which 100 are cached, in the cache's own format."""
    workload = Workload(phase="decode", micro_batch_size=5, context_len=100, kv_cache_dtype="fp8")
    operations = lower(gpt(hidden_size=64, num_heads=4, num_layers=2), workload, ONE_DEVICE)
    assert {each.m for each in operations if isinstance(each, Gemm)} == {5}
    call = named(operations, "attention.fused")
    assert (call.query_len, call.kv_len, call.kv_cache_dtype, call.repeats) == (1, 101, "fp8", 2)
    assert {each.pass_name for each in operations} == {"forward"}


def test_decode_reads_at_most_the_window() -> None:
    """With a window of 64 the hundredth token reads 64 keys."""
    config = gpt(hidden_size=64, num_heads=4, num_layers=2, attention_windows=(64, 0))
    workload = Workload(phase="decode", micro_batch_size=1, context_len=100, attention="unfused")
    scores = [each for each in lower(config, workload, ONE_DEVICE) if each.name == "attention.score"]
    assert {score.n for score in scores if isinstance(score, Gemm)} == {64, 101}


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


def test_latent_attention_absorbs_projections_in_decode() -> None:
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


def test_stored_weight_dtype_applies_to_all_weight_gemms_of_a_layer() -> None:
    """Int8 weights of MLA in decode: projections and the two absorbed ones; not scores and logits."""
    stored = Workload(phase="decode", micro_batch_size=2, context_len=9, weight_dtype="int8", attention="unfused")
    gemms = [each for each in lower(LATENT, stored, ONE_DEVICE) if isinstance(each, Gemm)]
    wide = {each.name for each in gemms if each.weight_dtype != "int8"}
    assert wide == {"attention.score", "attention.over_value", "logits"}


def test_cached_latents_are_expanded_again_in_prefill() -> None:
    """A prompt of 8 after 24 cached tokens expands 32 latents per sequence."""
    workload = Workload(phase="prefill", micro_batch_size=2, seq_len=8, context_len=24)
    assert named(lower(LATENT, workload, ONE_DEVICE), "attention.kv_b").m == 64


def test_rotary_positions_read_and_write_queries_and_keys() -> None:
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
