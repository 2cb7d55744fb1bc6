"""Bytes moved by the lowered operations other than GEMMs, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from lowered import ONE_DEVICE, gpt, letters, moved, named
from shapewright.lowering.model import lower
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.models.parameters import count_parameters
from shapewright.models.read import read_model
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload


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
    # dx: x and dy in, dx out; another kernel adds up parts of the weights' gradient, which are small
    gradient = named(operations, "norm.backward", "backward")
    assert (gradient.read_bytes, gradient.written_bytes, gradient.num_kernels) == (2 * row_bytes, row_bytes, 2)


def test_gradients_of_norms_are_marked_and_norms_with_a_gate_are_not() -> None:
    """Kernels of gradients take longer than norms that read as much: gated delta nets normalize by a gate."""
    operations = lower(read_model("qwen3-next-80b-a3b").config, Workload(micro_batch_size=1, seq_len=64), ONE_DEVICE)
    norms = [one for one in operations if isinstance(one, Pointwise) and one.operation == "norm"]
    assert any(one.read_bytes > one.written_bytes and not one.gradient for one in norms)
    assert all(one.is_backward == bool(one.gradient) for one in norms)


def test_gated_activation_reads_two_inputs() -> None:
    """Forward reads gate and up and writes their product; backward reads those and dy and writes two gradients."""
    config = gpt(hidden_size=64, num_heads=4, gated_mlp=True, intermediate_size=160)
    operations = lower(config, Workload(micro_batch_size=2, seq_len=8), ONE_DEVICE)
    bytes_of_f = 16 * 160 * 2
    forward = named(operations, "mlp.activation")
    assert (forward.read_bytes, forward.written_bytes) == (2 * bytes_of_f, bytes_of_f)
    backward = named(operations, "mlp.activation.backward", "backward")
    assert (backward.read_bytes, backward.written_bytes) == (3 * bytes_of_f, 2 * bytes_of_f)
    assert letters(named(operations, "mlp.gate")) == letters(named(operations, "mlp.up")) == (1, 16, 160, 64, "NT")


def test_cross_entropy_takes_its_logits_in_fp32() -> None:
    """16 * 96 bf16 logits: cast (2 in, 4 out) and log-softmax (4 in, 4 out)."""
    config = gpt(hidden_size=64, num_heads=4, vocab_size=96)
    loss = named(lower(config, Workload(micro_batch_size=2, seq_len=8), ONE_DEVICE), "cross_entropy")
    assert (loss.read_bytes, loss.written_bytes) == (16 * 96 * 6, 16 * 96 * 8)


def test_chains_of_pytorch_move_what_their_kernels_read_and_write() -> None:
    """A norm in bf16: cast 2 + 4, square 4 + 4, mean 4, product 4 + 4, cast 4 + 2, weight 2 + 2 bytes an element."""
    config = gpt(hidden_size=64, num_heads=4, norm="rmsnorm", gated_mlp=True, intermediate_size=160)
    operations = lower(config, Workload(micro_batch_size=2, seq_len=8, kernels="torch"), ONE_DEVICE)
    norm, activation = named(operations, "norm"), named(operations, "mlp.activation")
    assert moved(norm) == (1024 * 20, 1024 * 16)
    assert norm.num_kernels == 8
    # The activation reads and writes its gate; the product reads two.
    assert moved(activation) == (2560 * 3 * 2, 2560 * 2 * 2)
    in_fp32 = lower(config, Workload(micro_batch_size=2, seq_len=8, kernels="torch", dtype="fp32"), ONE_DEVICE)
    assert moved(named(in_fp32, "norm")) == (1024 * 16, 1024 * 12)


def test_fused_loss_is_computed_in_chunks_without_a_backward_pass() -> None:
    """There are v / h = 128 / 32 chunks, whose weight gradients are added three times: 2 reads and 1 write each."""
    config = gpt(hidden_size=32, num_heads=4, vocab_size=128)
    operations = lower(config, Workload(micro_batch_size=2, seq_len=8, kernels="fused"), ONE_DEVICE)
    loss = named(operations, "cross_entropy")
    assert (loss.repeats, loss.read_bytes, loss.written_bytes) == (4, 16 * 128 * 4 / 4, 16 * 128 * 2 / 4)
    assert not any(operation.name == "cross_entropy.backward" for operation in operations)
    assert letters(named(operations, "logits")) == (1, 4, 128, 32, "NT")
    summed = named(operations, "logits.sum.backward", "backward")
    assert (summed.repeats, *moved(summed)) == (3, 2 * 128 * 32 * 2, 128 * 32 * 2)


def test_fused_loss_rounds_the_rows_of_a_chunk_to_a_power_of_two() -> None:
    """16 tokens over 96 / 32 chunks are 6 rows, rounded to 8: two chunks; 1,000 over 32 are 32 chunks of 32."""
    config = gpt(hidden_size=32, num_heads=4, vocab_size=96)
    operations = lower(config, Workload(micro_batch_size=2, seq_len=8, kernels="fused"), ONE_DEVICE)
    assert letters(named(operations, "logits")) == (1, 8, 96, 32, "NT")
    assert named(operations, "logits.sum.backward", "backward").repeats == 1

    fused = Workload(kernels="fused")
    assert [fused.count_loss_chunks(tokens, 32, 96, 1) for tokens in (1, 16, 24)] == [1, 2, 3]
    assert fused.count_loss_chunks(1000, 32, 1024, 1) == 32
    vocabularies = np.array([96, 128, 1024])
    assert np.array_equal(fused.count_loss_chunks(16, 32, vocabularies, 1), [2, 4, 16])


def test_embedding_rows_are_gathered_and_their_gradients_scattered() -> None:
    """T h = 1024 elements out of rows; backward zeroes all 96 * 64 gradients and adds the tokens' to their rows."""
    operations = lower(
        gpt(hidden_size=64, num_heads=4, vocab_size=96), Workload(micro_batch_size=2, seq_len=8), ONE_DEVICE
    )
    assert moved(named(operations, "embedding")) == (1024 * 2, 1024 * 2)
    # 8 learned positions are read for all sequences together
    assert moved(named(operations, "embedding.positions")) == ((1024 + 8 * 64) * 2, 1024 * 2)
    assert moved(named(operations, "embedding.backward", "backward")) == (2 * 1024 * 2, (1024 + 96 * 64) * 2)


def test_routing_reads_scores_and_moves_rows() -> None:
    """16 * 8 fp32 scores: softmax reads and writes them, top-k reads them, writes 2 weights and 2 indices a token."""
    config = gpt(hidden_size=64, num_heads=4, num_experts=8, num_experts_per_token=2)
    operations = lower(config, Workload(micro_batch_size=2, seq_len=8), ONE_DEVICE)
    assert moved(named(operations, "moe.choose")) == (2 * 16 * 8 * 4, 16 * 8 * 4 + 16 * 2 * 8)
    # 32 routed rows of 64 out; back in, they are added up to 16
    assert moved(named(operations, "moe.permute")) == (32 * 64 * 2, 32 * 64 * 2)
    assert moved(named(operations, "moe.unpermute")) == (32 * 64 * 2, 16 * 64 * 2)


def test_bias_gradients_read_all_tokens() -> None:
    """Columns: qkv 192, out 64, up 256 and down 64, of 16 rows each, for 3 layers of 2 micro-batches."""
    config = gpt(hidden_size=64, num_heads=4, num_layers=3, qkv_bias=True, attention_out_bias=True, mlp_bias=True)
    operations = lower(config, Workload(micro_batch_size=2, seq_len=8, global_batch_size=4), ONE_DEVICE)
    sums = [each for each in operations if isinstance(each, Pointwise) and each.name.endswith("bias_gradient")]
    assert {each.name: each.read_bytes for each in sums} == {
        "attention.bias_gradient": 16 * (192 + 64) * 2,
        "mlp.bias_gradient": 16 * (256 + 64) * 2,
    }
    assert {each.repeats for each in sums} == {3 * 2}


@pytest.mark.parametrize("preset", ["llama-3-8b", "gpt3-2.7b", "mixtral-8x7b", "qwen2.5-0.5b", "deepseek-v3"])
def test_optimizer_updates_all_weights(preset: str) -> None:
    """Weights counted from GEMMs are the model's parameters but for norms and biases: within 0.3 %."""
    config = read_model(preset).config
    operations = lower(config, Workload(micro_batch_size=1, seq_len=64), ONE_DEVICE)
    # AdamW reads gradient, weight and two moments, 16 bytes, and writes weight, moments and the bf16 copy, 14 bytes.
    steps = [each for each in operations if isinstance(each, Pointwise) and each.name.startswith("optimizer.")]
    weights = sum(each.read_bytes for each in steps) / 16
    assert weights == pytest.approx(count_parameters(config).total, rel=3e-3)
    assert weights <= count_parameters(config).total
    assert sum(each.written_bytes for each in steps) / 14 == weights


@pytest.mark.parametrize("degree", [1, 2])
def test_optimizer_updates_learned_positions(degree: int) -> None:
    """GPT-3 125M has 2048 x 768 positions, on every tensor rank whole, beside the rows of the vocabulary."""
    config, layout = read_model("gpt3-125m").config, ParallelLayout(tensor_parallel=degree)
    operations = lower(config, Workload(micro_batch_size=1, seq_len=64), layout)
    (step,) = (each for each in operations if isinstance(each, Pointwise) and each.name == "optimizer.embedding")
    rows = -(-config.vocab_size // degree)

    assert config.max_position_embeddings == 2048
    assert step.read_bytes == 16 * (rows + 2048) * 768


@pytest.mark.parametrize("degree", [1, 2])
def test_optimizer_updates_the_transform_before_the_logits_of_bert(degree: int) -> None:
    """A matrix of 768 x 768, its bias, and scale and shift of a norm: 592,128, whole on every tensor rank."""
    config, layout = read_model("bert-base").config, ParallelLayout(tensor_parallel=degree, data_parallel=2)
    operations = lower(config, Workload(micro_batch_size=1, seq_len=64), layout)
    (step,) = (each for each in operations if isinstance(each, Pointwise) and each.name == "optimizer.logits")
    (reduced,) = (each for each in operations if each.name == "logits.gradients.all_reduce")

    assert step.read_bytes == 16 * 592_128
    assert reduced.message_bytes == 2 * 592_128


def test_muon_moves_one_moment_per_layer_weight() -> None:
    """Layers keep one fp32 moment instead of two; embeddings and logits are updated by AdamW."""
    config = gpt(hidden_size=64, num_heads=4, vocab_size=512)
    adamw, muon = (
        lower(config, Workload(micro_batch_size=2, seq_len=8, optimizer=name), ONE_DEVICE) for name in ("adamw", "muon")
    )
    less = {
        name: [
            before - after
            for before, after in zip(
                *(moved(named(one, f"optimizer.{name}", "step")) for one in (adamw, muon)), strict=True
            )
        ]
        for name in ("layers", "embedding", "logits")
    }
    assert less == {"layers": [4 * 12 * 64 * 64] * 2, "embedding": [0.0, 0.0], "logits": [0.0, 0.0]}


@pytest.mark.parametrize("pass_name", ["forward", "backward"])
def test_chunked_loss_moves_the_same_bytes(pass_name: str) -> None:
    """Four chunks of 4 tokens: a quarter of the bytes, four times as often, for loss and logits."""
    config = gpt(hidden_size=64, num_heads=4, vocab_size=512)
    whole, parts = (
        lower(config, Workload(micro_batch_size=2, seq_len=8, loss_chunks=chunks), ONE_DEVICE) for chunks in (1, 4)
    )
    loss = "cross_entropy" if pass_name == "forward" else "cross_entropy.backward"
    at_once, apart = (named(operations, loss, pass_name) for operations in (whole, parts))
    assert moved(apart) == tuple(each / 4 for each in moved(at_once))
    assert (at_once.repeats, apart.repeats) == (1, 4)
    assert named(parts, "logits").m == 4
    assert named(parts, "logits").repeats == 4
