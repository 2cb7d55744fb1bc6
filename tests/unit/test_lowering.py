"""Lowering a model: GEMMs, gradients, repeats and stages worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lowered import LATENT, ONE_DEVICE, gpt, letters, named
from shapewright.core.errors import WorkloadError
from shapewright.lowering.checks import validate_lengths
from shapewright.lowering.model import lower
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload


def test_layer_gemms_of_the_paper_on_one_device() -> None:
    """The GEMMs of h=2560, a=32, b=4, s=2048 as the paper's benchmark labels them (arXiv 2401.14489, table II)."""
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
    """The same for h=8192, a=64, t=4: columns of the first GEMMs and rows of the second are split."""
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


def test_repeats_are_layers_of_a_stage_times_micro_batches() -> None:
    """61 layers on 16 stages are at most 4; B=64, b=2, d=4 are 8 passes: 32 executions, 8 at the ends of the model."""
    workload = Workload(micro_batch_size=2, seq_len=8, global_batch_size=64)
    layout = ParallelLayout(pipeline_parallel=16, data_parallel=4)
    operations = lower(gpt(hidden_size=64, num_heads=4, num_layers=61), workload, layout)
    assert named(operations, "mlp.up").repeats == 4 * 8
    assert (named(operations, "logits").repeats, named(operations, "logits").stage) == (8, "last")
    assert (named(operations, "embedding").repeats, named(operations, "embedding").stage) == (8, "first")
    assert named(operations, "optimizer.layers", "step").repeats == 1


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
    """Config flags define which projections share a GEMM; their widths add up."""
    config = TransformerConfig(
        hidden_size=64, num_heads=4, num_kv_heads=2, num_layers=1, vocab_size=96, intermediate_size=160, **flags
    )
    operations = lower(config, Workload(micro_batch_size=2, seq_len=8), ONE_DEVICE)
    assert {name: named(operations, name).n for name in names} == names


def test_prefill_computes_logits_of_last_tokens_only() -> None:
    """Layers have b s rows, logits b rows, and attention reads the cached context."""
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
    # Qwen2-MoE weighs what the shared expert says with a gate of one column.
    gated = lower(replace(config, shared_expert_gate=True), workload, ONE_DEVICE)
    gate = named(gated, "shared_expert.token_gate")
    assert (letters(gate), gate.repeats) == ((1, 16, 1, 64, "NT"), 2)
    assert len(gated) == len(operations) + 3  # and its two gradients
    assert named(operations, "mlp.up").repeats == 2
    spread = lower(config, workload, ParallelLayout(data_parallel=4, expert_parallel=4))
    assert (named(spread, "moe.down").m, named(spread, "moe.down").groups) == (32, 2)


def test_decode_reads_weights_of_selected_experts_only() -> None:
    """One token in decode reads the weights of its 2 experts, not of all 8."""
    config = gpt(hidden_size=64, num_heads=4, num_experts=8, num_experts_per_token=2, moe_intermediate_size=48)
    operations = lower(config, Workload(phase="decode", micro_batch_size=1, context_len=7), ONE_DEVICE)
    assert named(operations, "moe.up").groups == 2


def test_activations_of_fp8_gemms_are_bf16() -> None:
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


def test_encoder_decoder_training_lowers_both_stacks() -> None:
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


def test_encoder_runs_in_prefill_but_not_in_decode() -> None:
    """Prefill: the encoder over the prompt, the decoder over its start token. Decode: no encoder, cached cross keys."""
    prefill = lower(ENCODER_DECODER, Workload(phase="prefill", micro_batch_size=2, seq_len=8), ONE_DEVICE)
    assert (named(prefill, "encoder.mlp.up").m, named(prefill, "mlp.up").m) == (16, 2)
    decode = lower(ENCODER_DECODER, Workload(phase="decode", micro_batch_size=2, seq_len=8, context_len=5), ONE_DEVICE)
    assert not [each for each in decode if each.name.startswith("encoder.") or each.name == "cross_attention.k"]
    assert (named(decode, "cross_attention.fused").kv_len, named(decode, "attention.fused").kv_len) == (8, 6)


def test_decode_of_an_encoder_is_rejected() -> None:
    """The message states the reason and the supported phases."""
    config = gpt(hidden_size=64, num_heads=4, stack="encoder")
    with pytest.raises(WorkloadError, match=r"phase='decode'.*encoder.*phase='prefill' or 'train'"):
        lower(config, Workload(phase="decode"), ONE_DEVICE)
    prefill = lower(config, Workload(phase="prefill", micro_batch_size=2, seq_len=8), ONE_DEVICE)
    assert named(prefill, "logits").m == 16


def test_stage_with_experts_is_the_busiest() -> None:
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


def test_each_forward_gemm_has_two_gradients() -> None:
    """In training each forward GEMM has a dgrad and a wgrad with the same repeats."""
    operations = lower(LATENT, Workload(micro_batch_size=2, seq_len=8, attention="unfused"), ONE_DEVICE)
    forward = [each for each in operations if isinstance(each, Gemm | GroupedGemm) and each.pass_name == "forward"]
    assert len(forward) == 10
    for gemm in forward:
        for gradient in ("dgrad", "wgrad"):
            assert named(operations, f"{gemm.name}.{gradient}", "backward").repeats == gemm.repeats


def test_longest_sequence() -> None:
    """2^27 tokens are accepted, one more is not."""
    config = read_model("llama-3-8b").config
    validate_lengths(config, Workload(phase="prefill", micro_batch_size=1, seq_len=2**27))
    with pytest.raises(WorkloadError, match="longer than the limit of 134217728 tokens"):
        validate_lengths(config, Workload(phase="decode", micro_batch_size=1, context_len=2**27))
