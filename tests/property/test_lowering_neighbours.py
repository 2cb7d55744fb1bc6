"""Adjacent operations of a lowered model agree: each reads the bytes that the one before it wrote.

Sizes of products are held against PyTorch; here the operations between them are held against the products. Heads,
widths and experts divide by the degrees, the routed rows too, so that every device has an equal share.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from shapewright.lowering.model import lower
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.lowering.operations.operation import Operation
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

BF16_BYTES, FP32_BYTES = 2.0, 4.0
FP8_BYTES = 1.0 + 4.0 / 128.0  # one fp32 scale for 128 elements (arXiv 2412.19437, section 3.3.2)


@st.composite
def models(draw: st.DrawFn) -> TransformerConfig:
    """Models that have an operation of every kind between their GEMMs."""
    return TransformerConfig(
        hidden_size=64 * draw(st.integers(1, 3)),
        num_layers=2,
        num_heads=8,
        num_kv_heads=draw(st.sampled_from((4, 8))),
        head_dim=16,
        v_head_dim=draw(st.sampled_from((16, 24))),
        intermediate_size=8 * draw(st.integers(1, 40)),
        vocab_size=8 * draw(st.integers(1, 40)),
        embedding_size=draw(st.sampled_from((0, 40))),
        gated_mlp=draw(st.booleans()),
        qk_norm="per-head",
        position_embedding="rotary",
        attention_dropout=0.1,
        num_experts=8,
        num_experts_per_token=draw(st.integers(1, 4)),
        moe_intermediate_size=8 * draw(st.integers(1, 20)),
        shared_expert_intermediate_size=draw(st.sampled_from((0, 64))),
        moe_layers=(False, True),
    )


@st.composite
def latent_models(draw: st.DrawFn) -> TransformerConfig:
    """The same with multi-head latent attention."""
    return TransformerConfig(
        hidden_size=64,
        num_layers=1,
        num_heads=8,
        vocab_size=96,
        head_dim=24,
        v_head_dim=draw(st.sampled_from((16, 24))),
        q_lora_rank=draw(st.sampled_from((0, 40))),
        kv_lora_rank=draw(st.sampled_from((32, 48))),
        qk_rope_head_dim=8,
        position_embedding="rotary",
    )


layouts = st.builds(ParallelLayout, tensor_parallel=st.sampled_from((1, 2, 4)), sequence_parallel=st.booleans())
workloads = st.builds(
    Workload,
    micro_batch_size=st.integers(1, 3),
    seq_len=st.sampled_from((16, 32)),
    attention=st.just("unfused"),
    dtype=st.sampled_from(("bf16", "fp8")),
)


def by_name(operations: tuple[Operation, ...]) -> dict[str, Any]:
    """Operations of the forward pass, by name."""
    return {each.name: each for each in operations if each.pass_name == "forward"}


def output(*gemms: Gemm | GroupedGemm) -> float:
    """Bytes of C of all given GEMMs, in the format of activations."""
    return sum(BF16_BYTES * (each.batch if isinstance(each, Gemm) else 1) * each.m * each.n for each in gemms)


def first_operand(gemm: Gemm | GroupedGemm) -> float:
    """Bytes of A in the format of activations."""
    return BF16_BYTES * (gemm.batch if isinstance(gemm, Gemm) else 1) * gemm.m * gemm.k


def second_operand(gemm: Gemm) -> float:
    """Bytes of B, where B is no weight."""
    return BF16_BYTES * gemm.batch * gemm.n * gemm.k


@given(models(), workloads, layouts)
def test_attention_record_round_trips(config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> None:
    """From queries, keys and values to the output projection; scores are masked, normalized and dropped in place."""
    found = by_name(lower(config, workload, layout))
    query, key, value = (found[f"attention.{role}"] for role in "qkv")
    score, over_value = found["attention.score"], found["attention.over_value"]
    for name in ("attention.qk_norm", "attention.rotary"):
        assert found[name].read_bytes == found[name].written_bytes == output(query, key)
    repeated = found.get("attention.repeat_kv")
    assert (repeated is None) == (config.num_kv_heads == config.num_heads)
    if repeated is not None:
        assert repeated.read_bytes == output(key, value)
        assert repeated.written_bytes == second_operand(score) + second_operand(over_value)
    for name in ("attention.mask", "attention.softmax"):
        assert found[name].read_bytes == found[name].written_bytes == output(score)
    assert found["attention.dropout"].read_bytes == output(score) == first_operand(over_value)
    merged = found["attention.merge_heads"]
    assert merged.read_bytes == merged.written_bytes == output(over_value) == first_operand(found["attention.out"])
    assert {found[name].repeats for name in found if name.startswith("attention.")} == {config.num_layers}


@given(models(), workloads, layouts)
def test_block_parameters_round_trip(config: TransformerConfig, workload: Workload, layout: ParallelLayout) -> None:
    """Activation sizes match the adjacent GEMMs in dense, shared and routed MLPs; routed rows are copied and summed."""
    found = by_name(lower(config, workload, layout))
    for block in ("mlp", "shared_expert", "moe"):
        inputs = [found[name] for name in (f"{block}.{role}" for role in ("gate", "up", "gate_up")) if name in found]
        if block == "shared_expert" and not config.shared_expert_intermediate_size:
            assert not inputs
            continue
        assert found[f"{block}.activation"].read_bytes == output(*inputs)
        assert found[f"{block}.activation"].written_bytes == first_operand(found[f"{block}.down"])
        assert len({found[f"{block}.{role}"].repeats for role in ("activation", "down")}) == 1
    router, choose = found["moe.router"], found["moe.choose"]
    assert choose.read_bytes == 2.0 * output(router) / BF16_BYTES * FP32_BYTES
    # A token goes out as one row for each of its experts, which the GEMMs read.
    assert found["moe.permute"].written_bytes == first_operand(found.get("moe.up") or found["moe.gate_up"])
    assert found["moe.unpermute"].read_bytes == output(found["moe.down"])
    assert found["moe.unpermute"].written_bytes == first_operand(router)


@given(models(), workloads, layouts)
def test_tensor_axis_communicates_what_it_shards(
    config: TransformerConfig, workload: Workload, layout: ParallelLayout
) -> None:
    """Outputs of row-parallel GEMMs are reduced at full width; gathered tokens match the width that the GEMM reads."""
    found = by_name(lower(config, workload, layout))
    moved = {name: each.message_bytes for name, each in found.items() if isinstance(each, Collective)}
    if layout.tensor_parallel == 1:
        assert not moved
        return
    reduction = "reduce_scatter" if layout.splits_sequence_over_tensor else "all_reduce"
    assert moved.pop("cross_entropy.all_reduce") == found["logits"].m * FP32_BYTES
    assert moved.pop(f"embedding.{reduction}") == found["embedding"].written_bytes
    assert moved.pop(f"attention.{reduction}") == output(found["attention.out"])
    assert moved.pop(f"mlp.{reduction}") == moved.pop(f"moe.{reduction}") == output(found["mlp.down"])
    if layout.splits_sequence_over_tensor:
        assert moved.pop("logits.all_gather") == first_operand(found["logits"])
        assert moved.pop("attention.all_gather") == first_operand(found["attention.q"])
        assert moved.pop("mlp.all_gather") == moved.pop("moe.all_gather") == first_operand(found["mlp.up"])
    assert not moved


@given(models(), workloads, layouts, st.sampled_from((2, 4, 8)))
def test_routed_rows_cross_both_axes(
    config: TransformerConfig, workload: Workload, layout: ParallelLayout, ep: int
) -> None:
    """Rows go to their experts, are gathered for the slices of these, and come back the same way.

    Shared experts see the tokens of this device, which are gathered and reduced for them alone.
    """
    splits = layout.splits_sequence_over_tensor
    spread = replace(layout, data_parallel=ep, expert_parallel=ep)
    found = by_name(lower(config, workload, spread))
    moved = {
        name: each.message_bytes
        for name, each in found.items()
        if isinstance(each, Collective) and each.name.startswith(("moe", "shared"))
    }
    rows_in = first_operand(found.get("moe.up") or found["moe.gate_up"])
    sent = rows_in / (layout.tensor_parallel if splits else 1)
    narrow = sent / BF16_BYTES * FP8_BYTES if workload.dtype == "fp8" else sent
    assert found["moe.permute"].written_bytes == sent
    assert moved.pop("moe.dispatch.alltoall") == narrow
    assert moved.pop("moe.combine.alltoall") == sent
    if splits:
        assert moved.pop("moe.all_gather") == rows_in
    if layout.tensor_parallel > 1:
        reduction = "reduce_scatter" if splits else "all_reduce"
        assert moved.pop(f"moe.{reduction}") == output(found["moe.down"])
        if config.shared_expert_intermediate_size:
            assert moved.pop(f"shared_expert.{reduction}") == output(found["shared_expert.down"])
            if splits:
                assert moved.pop("shared_expert.all_gather") == first_operand(found["shared_expert.up"])
    assert not moved


@given(latent_models(), st.sampled_from(("train", "prefill", "decode")), st.sampled_from(("flash", "unfused")))
def test_latents_are_normalised_and_cached(config: TransformerConfig, phase: str, attention: str) -> None:
    """Each low-rank output is normalized except the key's rotary part; the cache stores all outputs of kv_a."""
    context_len = 0 if phase == "train" else 7
    workload = Workload(phase=phase, micro_batch_size=2, seq_len=16, context_len=context_len, attention=attention)
    found = by_name(lower(config, workload, ParallelLayout()))
    latent, rope = found["attention.kv_a"], config.qk_rope_head_dim
    norms = {name: each.written_bytes for name, each in found.items() if name.endswith("_norm") and "attention" in name}
    assert norms.pop("attention.kv_a_norm") == output(latent) * config.kv_lora_rank / (config.kv_lora_rank + rope)
    if config.q_lora_rank:
        assert norms.pop("attention.q_a_norm") == output(found["attention.q_a"])
    assert not norms
    assert ("attention.cache_write" in found) == (phase != "train")
    if phase != "train":
        assert found["attention.cache_write"].read_bytes == output(latent)
    # All heads read one latent in decode, and heads of their own otherwise: nothing is repeated.
    assert "attention.repeat_kv" not in found


@given(models(), workloads)
def test_the_loss_reads_its_logits(config: TransformerConfig, workload: Workload) -> None:
    """Cast, then log-softmax, in fp32; the gradient towards the logits is as large as they are."""
    operations = lower(config, workload, ParallelLayout())
    found = by_name(operations)
    wide = output(found["logits"]) / BF16_BYTES * FP32_BYTES
    assert found["cross_entropy"].read_bytes == output(found["logits"]) + wide
    (gradient,) = (each for each in operations if each.name == "cross_entropy.backward")
    assert isinstance(gradient, Pointwise)
    # Three kernels: the target's gradient is scattered, log-softmax goes back, and the result is cast.
    assert (gradient.read_bytes, gradient.num_kernels) == (3.0 * wide, 3)
    assert gradient.written_bytes == 2.0 * wide + output(found["logits"])
    normalized = found["final_norm"]
    assert normalized.read_bytes == normalized.written_bytes == first_operand(found["attention.q"])


@given(models(), st.sampled_from((2, 4)), st.sampled_from(("prefill", "decode")))
def test_inference_gathers_the_logits_of_all_words(config: TransformerConfig, t: int, phase: str) -> None:
    """Each of t devices has a part of the vocabulary, and one token a sequence is sampled from the whole."""
    workload = Workload(phase=phase, micro_batch_size=3, seq_len=16)
    found = by_name(lower(config, workload, ParallelLayout(tensor_parallel=t)))
    assert found["logits.all_gather"].message_bytes == t * output(found["logits"]) == 2.0 * 3 * config.vocab_size
