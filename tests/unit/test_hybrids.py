"""Hybrids: layers with linear attention, state spaces and short convolutions beside attention."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

import shapewright
from shapewright.core.errors import ConfigError, LayoutError
from shapewright.lowering.flops import count_model_flops
from shapewright.lowering.model import lower, lower_parts
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.operations.collective import Collective
from shapewright.lowering.operations.gemm import Gemm
from shapewright.lowering.operations.operation import Operation
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.lowering.operations.scan import CausalConv, Scan
from shapewright.lowering.operations.sparse import SparseAttention
from shapewright.memory.estimate import estimate_memory, estimate_stages
from shapewright.memory.saved_tensors import list_saved_tensors
from shapewright.memory.stages import Stage
from shapewright.memory.states import count_stage_parameters
from shapewright.models.hf_config import read_hf_config
from shapewright.models.parameters import count_parameters
from shapewright.models.read import list_presets, load_preset, read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.models.write import to_config_json
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

HYBRIDS = [name for name in list_presets() if load_preset(name).config.get("model_type") in {
    "qwen3_next", "qwen3_5_moe_text", "kimi_linear", "nemotron_h", "granitemoehybrid", "jamba", "lfm2", "minimax",
    "falcon_h1", "bamba", "mamba2", "mamba", "falcon_mamba", "olmo_hybrid",
} and name != "granite-4.0-micro"]  # fmt: skip
ONE = ParallelLayout()


def small(**fields: object) -> TransformerConfig:
    """Build a small model of three gated delta nets for each attention layer."""
    sizes = {
        "hidden_size": 256, "num_layers": 8, "num_heads": 4, "vocab_size": 1000, "head_dim": 64, "gated_mlp": True,
        "layer_types": ("gated_delta_net",) * 3 + ("attention",), "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 64, "norm": "rmsnorm",
    }  # fmt: skip
    return TransformerConfig(**{**sizes, **fields})  # type: ignore[arg-type]


def config_of(name: str) -> TransformerConfig:
    """Read a preset."""
    return read_model(name).config


def test_there_are_presets_of_every_kind_of_layer() -> None:
    """Published hybrids cover all mixers but none of them alone."""
    kinds = {kind for name in HYBRIDS for kind in config_of(name).linear_layers}

    assert kinds == {
        "gated_delta_net", "kimi_delta_attention", "lightning_attention", "mamba2", "mamba", "short_convolution",
    }  # fmt: skip


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("phase", ["train", "prefill", "decode"])
def test_every_preset_is_predicted(name: str, phase: str) -> None:
    """Each phase has a time inside its interval; scans and convolutions run once for each of their layers."""
    prediction = shapewright.predict(name, device="h100-sxm-80gb", workload={"phase": phase, "context_len": 512})
    scans = Counter[str]()
    for entry in prediction.operations:
        operation = entry.operation
        if isinstance(operation, Scan | CausalConv) and operation.pass_name == "forward":
            scans[operation.rule if isinstance(operation, Scan) else "convolution"] += int(operation.repeats)
    config = config_of(name)
    counts = Counter(
        kind
        for index in range(config.num_layers)
        for kind in config.kind_of_layer(index).layer_type.split("+")
        if kind in config.linear_layers
    )

    assert 0.0 < prediction.step_time_low_s <= prediction.step_time_s <= prediction.step_time_high_s
    counts.pop("short_convolution", None)
    assert {rule: count for rule, count in scans.items() if rule != "convolution"} == dict(counts)


def test_sizes_that_are_left_out_follow_from_attention() -> None:
    """Heads and widths of linear attention are those of attention unless given; the convolution spans four tokens."""
    config = small(linear_num_key_heads=0, linear_num_value_heads=0, linear_key_head_dim=0, linear_value_head_dim=0)

    assert (config.linear_num_value_heads, config.linear_num_key_heads) == (4, 4)
    assert (config.linear_key_head_dim, config.linear_value_head_dim, config.linear_conv_width) == (64, 64, 4)


def test_parameters_of_a_gated_delta_net_by_hand() -> None:
    """Qwen3-Next's form: two input GEMMs, a convolution, an output GEMM, and three small vectors."""
    key, value, heads, h = 2 * 32, 4 * 64, 4, 256
    by_hand = h * (2 * key + 2 * value) + h * 2 * heads + (2 * key + value) * 4 + value * h + 2 * heads + 64
    linear = count_parameters(small()).by_component["linear"]

    assert linear == 6 * by_hand


def test_states_replace_the_cache_and_do_not_grow() -> None:
    """The cache of attention layers alone grows with the context; states of the others are 4 bytes an element."""
    config = small(num_kv_heads=2)
    short, long = (
        estimate_memory(config, Workload(phase="decode", context_len=length, micro_batch_size=1), ONE).kv_cache_bytes
        for length in (1023, 2047)
    )
    state = 6 * (4 * 4 * 32 * 64 + 2 * 3 * (2 * 64 + 256))

    assert long - short == 2 * 1024 * 2 * 2 * 64 * 2  # two layers, two heads of keys and values in 2 bytes
    assert short - (long - short) == state


def test_layers_run_the_operations_of_their_kind() -> None:
    """Six scans and convolutions, two attention calls, eight MLPs; tensor parallelism splits heads and channels."""
    job = Workload(phase="prefill", micro_batch_size=2, seq_len=128)
    whole, half = ({each.name: each for each in lower(small(), job, ParallelLayout(tensor_parallel=t))} for t in (1, 2))
    scan, conv, projection = (whole[f"gated_delta_net.{role}"] for role in ("scan", "convolution", "qkvz"))

    assert isinstance(scan, Scan)
    assert isinstance(conv, CausalConv)
    assert isinstance(projection, Gemm)
    assert (scan.repeats, scan.num_v_heads, scan.num_k_heads, scan.seq_len, scan.has_cache) == (6, 4, 2, 128, True)
    assert (conv.channels, conv.width) == (2 * 64 + 256, 4)
    assert (projection.m, projection.n, projection.k) == (256, 2 * 64 + 2 * 256, 256)
    assert (whole["attention.fused"].repeats, whole["mlp.down"].repeats, whole["residual"].repeats) == (2, 8, 16)
    assert half["gated_delta_net.scan"].num_v_heads == 2  # type: ignore[union-attr]
    assert half["gated_delta_net.out"].k == 128  # type: ignore[union-attr]
    assert half["gated_delta_net.all_reduce"].repeats == 6


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("degree", [8, 32])
def test_a_tensor_axis_adds_up_the_inner_projection_of_mamba_alone(degree: int, sequence_parallel: bool) -> None:
    """Its 256 steps and 2 x 16 keys and queries of each token are sums over the channels, needed on every device.

    With 32 devices each has 256 channels, as many as there are steps: the steps' projection is split by its outputs.
    """
    layout = ParallelLayout(tensor_parallel=degree, sequence_parallel=sequence_parallel)
    operations = lower(read_model("jamba-v0.1").config, Workload(micro_batch_size=1, seq_len=4096), layout)
    reduced = [one for one in operations if isinstance(one, Collective) and one.block == "mamba"]
    inner = [(one.pass_name, one.op_name) for one in reduced if one.message_bytes == 4096 * (256 + 2 * 16) * 2]
    assert inner == [("forward", "all_reduce"), ("backward", "all_reduce")]
    assert {one.message_bytes for one in reduced} == {4096 * 288 * 2, 4096 * 4096 * 2}


def test_flops_of_training_are_three_times_those_of_a_prompt() -> None:
    """Scans count the products of a token with the state, whatever the length; attention counts all pairs."""
    linear = small(layer_types=("gated_delta_net",))
    train, prompt = (Workload(phase=phase, micro_batch_size=1, seq_len=512) for phase in ("train", "prefill"))
    scans = 8 * 512 * 6 * 4 * 32 * 64

    ops = lower(linear, prompt, ONE)
    assert sum(float(each.flops) * each.repeats for each in ops if isinstance(each, Scan)) == scans
    logits = 2 * 511 * 256 * 1000  # of the tokens before the last, which a prompt does not compute
    assert count_model_flops(linear, train) == pytest.approx(3 * (count_model_flops(linear, prompt) + logits))
    assert not any(isinstance(each, Attention) for each in ops)


@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "nemotron-h-8b", "falcon-h1-7b", "jamba-v0.1"])
def test_pipeline_stages_hold_the_whole_model(name: str) -> None:
    """Parameters of the stages of a pipeline add up to the model's, whatever kinds of layers each has."""
    config, layout = config_of(name), ParallelLayout(pipeline_parallel=4)
    counts, job = count_parameters(config), Workload(micro_batch_size=1)
    stages = [count_stage_parameters(Stage(config, layout, index), counts, job) for index in range(4)]

    assert sum(stage.dense + stage.experts for stage in stages) == pytest.approx(counts.total)


def test_scans_pass_through_all_tokens_in_order() -> None:
    """A context axis would split a scan, which is an error that names the kind of layer."""
    with pytest.raises(LayoutError, match="context_parallel=2 is not supported for gated_delta_net layers"):
        lower(small(), Workload(micro_batch_size=1, seq_len=128), ParallelLayout(context_parallel=2))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"layer_types": ("attention", "rwkv")}, r"layer_types\[1\]='rwkv' is not known"),
        ({"layer_types": ()}, "needs layers without softmax attention; set layer_types"),
        ({"linear_num_key_heads": 3}, "linear_num_key_heads=3 must divide linear_num_value_heads=4"),
        ({"layer_types": ("mamba",)}, "mamba layers have one group and heads of width 1"),
        ({"stack": "encoder"}, "needs stack='decoder'"),
    ],
)
def test_contradictions_are_errors(fields: dict[str, object], words: str) -> None:
    """Each states the field, its value and what is allowed."""
    with pytest.raises(ConfigError, match=words):
        small(**fields)


def test_a_changed_pattern_is_written_in_the_form_that_was_read() -> None:
    """Kinds of layers go back into layer_types, in the names of transformers."""
    model = read_model("olmo-hybrid-7b")
    changed = replace(model.config, layer_types=("gated_delta_net", "attention"))

    written = to_config_json(model, changed)
    assert written["layer_types"][:3] == ["linear_attention", "full_attention", "linear_attention"]
    jamba = read_model("jamba-v0.1")
    with pytest.raises(ConfigError, match="cannot express layer_types"):
        to_config_json(jamba, replace(jamba.config, layer_types=("mamba", "attention")))


def latent(**fields: object) -> TransformerConfig:
    """Build a small model with latent attention whose indexer selects 1024 tokens."""
    sizes = {
        "hidden_size": 512, "num_layers": 2, "num_heads": 8, "vocab_size": 1000, "head_dim": 192, "v_head_dim": 128,
        "q_lora_rank": 256, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_num_heads": 16, "index_head_dim": 128,
        "index_topk": 1024,
    }  # fmt: skip
    return TransformerConfig(**{**sizes, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("job", "is_sparse"),
    [
        (Workload(phase="decode", context_len=8192), True),
        (Workload(phase="decode", context_len=1000), False),
        (Workload(phase="prefill", seq_len=4096), True),
        (Workload(phase="prefill", seq_len=1024), False),
        (Workload(seq_len=4096), False),
    ],
)
def test_an_indexer_selects_tokens_of_long_contexts(job: Workload, is_sparse: bool) -> None:
    """Beyond index_topk tokens scores, selection and attention to the selected ones replace dense attention."""
    operations = {each.name: each for each in lower(latent(), job, ONE) if each.pass_name == "forward"}

    assert ("attention.index_logits" in operations) is is_sparse
    assert isinstance(operations["attention.fused"], SparseAttention if is_sparse else Attention)
    assert ("attention.absorb_q" in operations) is (is_sparse or job.phase == "decode")
    assert {"attention.index_q", "attention.index_k", "attention.index_weights"} <= set(operations)


def test_selected_attention_does_not_grow_with_the_context() -> None:
    """Attention to 1024 of 16 or 64 thousand tokens takes the same time; scores and selection grow."""
    times = []
    for length in (16384, 65536):
        job = {"phase": "decode", "context_len": length, "micro_batch_size": 16}
        found = shapewright.predict(latent(), device="h200-sxm-141gb", workload=job).operations
        times.append({each.operation.role: each.price.time_s for each in found})
    short, long = times

    assert long["fused"] == pytest.approx(short["fused"], rel=0.1)
    assert long["index_logits"] > 2.0 * short["index_logits"]


def test_an_indexer_needs_all_its_sizes_and_latents() -> None:
    """Half an indexer, or one without latents, is an error that names the fields."""
    with pytest.raises(ConfigError, match="index_num_heads=16 needs index_topk as well"):
        latent(index_topk=0)
    with pytest.raises(ConfigError, match="index_topk=1024 is sparse attention over latents and needs"):
        latent(q_lora_rank=0)


def test_multi_token_prediction_adds_layers_and_heads_to_training() -> None:
    """Two layers further: their projection and norms, the logits twice more, on the last stage of training only."""
    without, config = small(), small(num_mtp_layers=2)
    h, (group, layer) = config.hidden_size, count_parameters(config).layers[-1]
    assert group.layer_type == "attention"
    added = count_parameters(config).total - count_parameters(without).total
    assert added == 2 * (2 * h * h + 3 * h + layer.total)

    def operations(model: TransformerConfig, phase: str) -> list[Operation]:
        return list(lower(model, Workload(phase=phase, micro_batch_size=1, seq_len=128), ONE))

    def logits(model: TransformerConfig) -> Counter[str]:
        found = [entry for entry in operations(model, "train") if entry.block in ("logits", "cross_entropy")]
        return Counter({entry.name: int(entry.repeats) for entry in found})

    assert logits(config) == Counter({name: 3 * count for name, count in logits(without).items()})
    further = [entry for entry in operations(config, "train") if entry.name.startswith("mtp.")]
    assert {entry.stage for entry in further} == {"last"}
    assert {entry.pass_name for entry in further} >= {"forward", "backward"}
    assert len(operations(config, "prefill")) == len(operations(without, "prefill"))
    with pytest.raises(ConfigError, match="num_mtp_layers=1 needs stack='decoder'"):
        small(num_mtp_layers=1, stack="encoder")


def test_layers_of_multi_token_prediction_are_loaded_for_training_alone() -> None:
    """Servers skip their weights: 2 bytes of each weight in training, nothing in inference, also on several stages."""
    without, config = small(), small(num_mtp_layers=2)
    added = count_parameters(config).total - count_parameters(without).total

    def weights_bytes(model: TransformerConfig, phase: str, stages: int) -> list[float]:
        layout = ParallelLayout(pipeline_parallel=stages)
        workload = Workload(phase=phase, micro_batch_size=1, seq_len=128)
        return [stage.weights_bytes for stage in estimate_stages(model, workload, layout)]

    assert weights_bytes(config, "train", 1)[0] - weights_bytes(without, "train", 1)[0] == 2 * added
    for stages in (1, 2):
        for phase in ("prefill", "decode"):
            assert weights_bytes(config, phase, stages) == weights_bytes(without, phase, stages)


def test_layers_of_multi_token_prediction_run_again_as_the_others_do() -> None:
    """Full recomputation repeats their forward pass, as their saved tensors are dropped; selective the same modules."""
    config = small(num_mtp_layers=1)

    def further(pass_name: str, **fields: Any) -> Counter[str]:
        found = lower(config, Workload(micro_batch_size=1, seq_len=128, **fields), ONE)
        named = (one for one in found if one.name.startswith("mtp.") and one.pass_name == pass_name)
        return Counter({one.name: int(one.repeats) for one in named})

    assert not further("recompute")
    assert further("recompute", recompute="full") == further("forward")
    assert set(further("recompute", recompute="selective", recompute_modules="layernorm")) == {"mtp.norm"}


def test_logits_of_every_predicted_token_are_kept_until_the_backward_pass() -> None:
    """128 tokens with one further: twice the softmax in fp32; in chunks there is one at a time."""
    config = small(num_mtp_layers=1)
    whole, chunked = (
        estimate_memory(config, Workload(micro_batch_size=1, seq_len=128, loss_chunks=chunks), ONE).logits_bytes
        for chunks in (1, 4)
    )
    assert whole == 2 * 128 * config.vocab_size * 4
    assert chunked == 128 // 4 * config.vocab_size * 4


@pytest.mark.parametrize(
    ("name", "kind", "roles"),
    [
        ("mamba-2.8b", "mamba", {"in_output", "x_output", "dt_output", "convolution_output", "scan_output"}),
        ("mamba2-2.7b", "mamba2", {"in_output", "convolution_output", "scan_output", "output"}),
        ("lfm2-1.2b", "short_convolution", {"in_output", "convolution_output", "gated_input", "output"}),
    ],
)
def test_a_norm_or_gate_after_the_scan_saves_its_output(name: str, kind: str, roles: set[str]) -> None:
    """Mamba's scan writes the input of the last GEMM; Mamba 2 has a norm between them, LFM2 a gate."""
    saved = list_saved_tensors(config_of(name), Workload(), ONE, layer_type=kind, has_mlp=False)

    assert {tensor.role for tensor in saved if tensor.block == kind} == roles
    assert all(tensor.block != "mlp" for tensor in saved)


def test_a_cached_token_is_written_with_its_index_key() -> None:
    """DeepSeek-V3.2 writes a latent of 512, a rotary key of 64 and an indexer's key of 128 for each new token."""
    config = read_hf_config({"model_type": "deepseek_v32"}).config
    (write,) = (
        each
        for each in lower(config, Workload(phase="prefill", seq_len=16, micro_batch_size=1), ONE)
        if each.role == "cache_write"
    )

    assert write.num_bytes == 16 * (512 + 64 + 128) * (2 + 2)


def test_jamba_with_one_expert_is_dense() -> None:
    """Transformers takes its MLP instead of experts where there is but one."""
    config = read_hf_config({"model_type": "jamba", "num_experts": 1}).config

    assert config.num_experts == 0


JAMBA = replace(read_model("jamba-v0.1").config, num_layers=8)  # attention in layer 4, experts in layers 1, 3, 5 and 7


@pytest.mark.parametrize(
    ("fields", "pass_name", "runs"),
    [
        ({"recompute": "full", "recompute_layers": 4}, "recompute", (0, 4, 2, 2)),
        ({"recompute": "full", "recompute_layers": 5}, "recompute", (1, 4, 3, 2)),
        ({"finetune": "last-layers", "last_layers": 1}, "backward", (0, 1, 0, 1)),
        ({"finetune": "last-layers", "last_layers": 4}, "backward", (1, 3, 2, 2)),
    ],
)
def test_recomputed_and_trained_layers_are_those_at_their_places(
    fields: dict[str, Any], pass_name: str, runs: tuple[int, ...]
) -> None:
    """The first layers run again and the last ones have gradients; each kind alone was rounded down to 0 in a pass."""
    found = Counter[str]()
    for each in lower(JAMBA, Workload(seq_len=512, **fields), ParallelLayout()):
        if each.pass_name == pass_name:
            found[each.name.removesuffix(".wgrad")] += int(each.repeats)
    assert tuple(found[name] for name in ("attention.q", "mamba.in", "mlp.up", "moe.gate_up")) == runs


def test_memory_of_the_last_layer_is_that_of_its_kind() -> None:
    """Layer 7 has a Mamba mixer and experts: an eighth of all layers had half of their gradients."""
    workload = Workload(seq_len=512, finetune="last-layers", last_layers=1)
    experts = 16 * 3 * 4096 * 14336 + 16 * 4096
    mixer = 4096 * 16384 + 8192 * 5 + 8192 * 288 + 256 * 8192 + 8192 + 16 * 8192 + 8192 + 8192 * 4096 + 288
    found = estimate_memory(JAMBA, workload, ParallelLayout())
    assert found.gradients_bytes == 4 * (experts + mixer + 2 * 4096)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_tensor_axis_splits_the_projection_of_further_tokens(sequence_parallel: bool) -> None:
    """Megatron's eh_proj is column-parallel: memory divided its weights, the optimizer step updated all of them."""
    config = replace(read_model("llama-3-8b").config, num_layers=2, num_mtp_layers=1)
    layout = ParallelLayout(tensor_parallel=4, sequence_parallel=sequence_parallel)
    workload = Workload(micro_batch_size=1, seq_len=1024)
    found = {each.name: each for each in lower(config, workload, layout)}
    project = found["mtp.project"]
    stored = count_stage_parameters(Stage(config, layout, 0), count_parameters(config), workload).dense
    updated = sum(each.num_weights for each in lower_parts(config, workload, layout).groups)

    assert isinstance(project, Gemm)
    assert (project.m, project.n, project.k) == (1024, 1024, 8192)
    assert updated == pytest.approx(stored, rel=1e-3)  # but for norms
    sent = {name: each.message_bytes for name, each in found.items() if isinstance(each, Collective)}
    assert sent["mtp.outputs.all_gather"] == 1024 * 4096 * 2
    assert sent["mtp.outputs.backward.reduce_scatter"] == 1024 * 4096 * 2 * (1 if sequence_parallel else 4)
    assert sent.get("mtp.inputs.all_gather", 0) == (1024 * 8192 * 2 if sequence_parallel else 0)


def test_the_stage_that_predicts_further_tokens_has_a_copy_of_the_embedding() -> None:
    """DeepSeek-V3 on 8 stages: the last embeds the inputs of the further layer with 129,280 x 7,168 weights of its own.

    Its optimizer updates them beside the logits, and their gradients, 2 bytes each, are added to those of the first
    stage. On one stage there is one embedding, and with DualPipe in memory.
    """
    config = replace(read_model("deepseek-v3").config, num_mtp_layers=1)
    counts, table, job = count_parameters(config), 129_280 * 7168, Workload(micro_batch_size=1, seq_len=128)

    def held(layout: ParallelLayout) -> float:
        stages = [Stage(config, layout, index) for index in range(layout.pipeline_parallel)]
        return sum(each.dense + each.experts for each in (count_stage_parameters(one, counts, job) for one in stages))

    def updates(layout: ParallelLayout) -> dict[str, float]:
        found = lower(config, job, layout)
        added = [one.message_bytes for one in found if isinstance(one, Collective) and "tied_gradients" in one.name]
        # AdamW reads 16 bytes of each weight.
        read = [one.read_bytes / 16 for one in found if isinstance(one, Pointwise) and one.name == "optimizer.logits"]
        return {"updated": sum(read), "added_bytes": sum(added)}

    apart = ParallelLayout(pipeline_parallel=8)
    together = replace(apart, pipeline_schedule="dualpipe")
    assert held(apart) == counts.total + table
    assert held(ParallelLayout()) == held(together) == counts.total
    assert updates(apart) == {"updated": 2 * table, "added_bytes": 2 * table}
    assert updates(ParallelLayout()) == {"updated": table, "added_bytes": 0}
