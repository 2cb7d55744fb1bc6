"""Files for training frameworks: every field is written, or an error gives the reason."""

from __future__ import annotations

import argparse
import ast
import json
import math
import tomllib
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shapewright.app.formats.output_format import keep_expressible
from shapewright.app.formats.registry import FORMATS, RUN_FORMATS, find_format, write_format
from shapewright.core.errors import ConfigError, LayoutError, ShapewrightError, WorkloadError
from shapewright.models.read import list_presets, read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload


def read_arguments(text: str) -> dict[str, Any]:
    """Read arguments as a shell and argparse would."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    words = text.split()
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            parser.add_argument(word, **({"action": "store_true"} if following.startswith("--") else {}))
    return vars(parser.parse_args(words))


def read_neox(text: str) -> dict[str, Any]:
    """Read GPT-NeoX's YAML, whose quoted form is JSON but for comments and the last comma."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return dict(json.loads("\n".join(lines).replace(",\n}", "\n}")))


def read_flavor(text: str) -> dict[str, Any]:
    """Read the arguments of the flavor in torchtitan's comment."""
    line = next(line for line in text.splitlines() if "ModelArgs(" in line)
    call = ast.parse(line.partition(": ")[2].rstrip(",")).body[0]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    return {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.value.keywords}


def read_assignments(text: str) -> dict[str, Any]:
    """Read nanoGPT's file of assignments."""
    return {
        statement.targets[0].id: ast.literal_eval(statement.value)
        for statement in ast.parse(text).body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }


@pytest.mark.parametrize("name", FORMATS)
def test_fields_that_a_format_leaves_out_have_defaults(name: str) -> None:
    """A field that a format neither writes nor restricts is refused unless it has its default, so there must be one."""
    form = FORMATS[name]
    decided = form.written_fields | set(form.fixed_values) | {"name", "model_type", "fused_qkv", "fused_gate_up"}
    left_out = [spec for spec in fields(TransformerConfig) if spec.name not in decided]

    assert left_out
    assert [spec.name for spec in left_out if spec.default is MISSING] == []


@pytest.mark.parametrize("name", FORMATS)
def test_every_preset_is_written_or_refused_in_one_line(name: str) -> None:
    """No preset makes a format fail otherwise than by naming the field."""
    refusals = []
    for preset in list_presets():
        try:
            assert write_format(name, read_model(preset).config).endswith("\n")
        except ConfigError as error:
            refusals.append(str(error))

    assert len(refusals) < len(list_presets()) - 25 or name == "nanogpt"
    assert [words for words in refusals if not words.startswith(f"format {name} cannot express ")] == []


def test_megatron_arguments_of_a_dense_model() -> None:
    """Llama 3 8B over 2 x 4 x 2 devices, in the flags of NVIDIA's own recipe."""
    workload = Workload(seq_len=8192, micro_batch_size=1, global_batch_size=128, recompute="selective")
    layout = ParallelLayout(tensor_parallel=2, pipeline_parallel=4, data_parallel=2, virtual_pipeline=2, zero_stage=1)
    arguments = read_arguments(
        write_format("megatron-args", read_model("llama-3-8b").config, workload=workload, layout=layout)
    )

    assert (
        arguments
        | {
            "num_layers": "32",
            "hidden_size": "4096",
            "ffn_hidden_size": "14336",
            "num_attention_heads": "32",
            "group_query_attention": True,
            "num_query_groups": "8",
            "kv_channels": "128",
            "normalization": "RMSNorm",
            "position_embedding_type": "rope",
            "swiglu": True,
            "disable_bias_linear": True,
            "untie_embeddings_and_output_weights": True,
            "vocab_size": "128256",
            "tensor_model_parallel_size": "2",
            "pipeline_model_parallel_size": "4",
            "num_virtual_stages_per_pipeline_rank": "2",
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
            "seq_length": "8192",
            "micro_batch_size": "1",
            "global_batch_size": "128",
            "recompute_granularity": "selective",
            "bf16": True,
        }
        == arguments
    )
    # Megatron pads to a multiple of this times the tensor axis: 128256 = 250.5 * 256 * 2 = 501 * 128 * 2.
    assert arguments["make_vocab_size_divisible_by"] == "128"


def test_megatron_fuses_activations_by_default() -> None:
    """Fused SwiGLU is Megatron's default, and memory's; without it the argument that turns it off is written."""
    config = read_model("llama-3-8b").config
    fused, plain = (
        write_format("megatron-args", config, workload=Workload(seq_len=4096, fused_activation=is_fused))
        for is_fused in (True, False)
    )
    assert "swiglu-fusion" not in fused
    assert "--no-bias-swiglu-fusion" in plain


def test_megatron_gets_the_chunks_of_layers_that_stages_do_not_divide() -> None:
    """61 layers on 16 stages of two chunks: every layer once, no stage above the four that a plan gives it."""
    layout = ParallelLayout(pipeline_parallel=16, virtual_pipeline=2)
    arguments = read_arguments(write_format("megatron-args", read_model("deepseek-v3").config, layout=layout))
    chunks = str(arguments["pipeline_model_parallel_layout"]).split("|")

    assert len(chunks) == 32
    assert [chunks[0][0], chunks[-1][-1]] == ["E", "L"]
    assert sum(chunk.count("t") for chunk in chunks) == 61
    assert max(sum(chunk.count("t") for chunk in chunks[stage::16]) for stage in range(16)) == 4
    assert "num_virtual_stages_per_pipeline_rank" not in arguments


def test_megatron_arguments_of_experts_and_latent_attention() -> None:
    """DeepSeek-V3: three dense layers, shared expert, and the parts of a latent head."""
    arguments = read_arguments(write_format("megatron-args", read_model("deepseek-v3").config))

    assert (arguments["num_experts"], arguments["moe_router_topk"], arguments["moe_ffn_hidden_size"]) == (
        "256",
        "8",
        "2048",
    )
    assert json.loads(arguments["moe_layer_freq"]) == [0] * 3 + [1] * 58
    assert arguments["moe_shared_expert_intermediate_size"] == "2048"
    assert (arguments["qk_head_dim"], arguments["qk_pos_emb_head_dim"], arguments["v_head_dim"]) == ("128", "64", "128")
    assert "kv_channels" not in arguments


def test_gpt_neox_cuts_a_gated_mlp_to_its_width() -> None:
    """GPT-NeoX takes three times the width of a gated MLP, and two of its three matrices are one."""
    arguments = read_neox(write_format("neox-yaml", read_model("llama-2-7b").config))
    # megatron/model/transformer.py: 2/3 of it is the first product's width, a third the second's.
    first = int(arguments["intermediate_size"] * 2 / 3)

    assert (first, first // 2) == (2 * 11008, 11008)
    assert (arguments["activation"], arguments["norm"], arguments["pos_emb"]) == ("swiglu", "rmsnorm", "rotary")
    assert (arguments["use_bias_in_mlp"], arguments["no_weight_tying"], arguments["mlp_multiple_of"]) == (
        False,
        True,
        1,
    )


def test_gpt_neox_names_matching_tokenizers() -> None:
    """Pythia's 50432 rows are 50277 tokens padded over the tensor axis, which the file states."""
    layout = ParallelLayout(tensor_parallel=2, data_parallel=4, zero_stage=1)
    workload = Workload(seq_len=2048, micro_batch_size=16, global_batch_size=1024)
    text = write_format("neox-yaml", read_model("pythia-6.9b").config, workload=workload, layout=layout)
    arguments = read_neox(text)

    assert "tokenizers of 50177 to 50432 tokens" in text
    assert (
        -(-50277 // (arguments["make_vocab_size_divisible_by"] * 2)) * arguments["make_vocab_size_divisible_by"] * 2
        == 50432
    )
    assert (arguments["gpt_j_residual"], arguments["gpt_j_tied"]) == (True, False)
    assert arguments["gradient_accumulation_steps"] * arguments["train_micro_batch_size_per_gpu"] * 4 == 1024


@given(st.integers(8, 20_000), st.integers(1, 60_000))
def test_torchtitan_gets_the_very_mlp_width(eighths: int, width: int) -> None:
    """Whatever the hidden size, the multiplier and the multiple that are written give the MLP width back."""
    config = TransformerConfig(
        hidden_size=8 * eighths,
        num_layers=2,
        num_heads=4,
        vocab_size=1024,
        norm="rmsnorm",
        activation="silu",
        gated_mlp=True,
        intermediate_size=width,
    )
    flavor = read_flavor(write_format("torchtitan-toml", config))
    # torchtitan/models/llama3/model/model.py, FeedForward
    hidden = int(2 * (4 * flavor["dim"]) / 3)
    hidden = int(flavor["ffn_dim_multiplier"] * hidden)
    hidden = flavor["multiple_of"] * ((hidden + flavor["multiple_of"] - 1) // flavor["multiple_of"])

    assert hidden == width


def test_torchtitan_model_is_chosen_by_what_it_can_express() -> None:
    """Tied embeddings and normalized heads go to qwen3; the rest of the file is TOML either way."""
    workload = Workload(seq_len=4096, micro_batch_size=2)
    layout = ParallelLayout(pipeline_parallel=2, data_parallel=4, zero_stage=3)
    text = write_format("torchtitan-toml", read_model("qwen3-4b").config, workload=workload, layout=layout)
    job, flavor = tomllib.loads(text), read_flavor(text)

    assert (job["model"]["name"], flavor["head_dim"], flavor["hidden_dim"], flavor["qk_norm"]) == (
        "qwen3",
        128,
        9728,
        True,
    )
    assert job["training"]["local_batch_size"] == 4
    assert job["parallelism"]["pipeline_parallel_microbatch_size"] == 2
    assert job["parallelism"]["data_parallel_shard_degree"] == 4


def torchtitan_chunks(num_layers: int, parallelism: dict[str, Any]) -> int:
    """Chunks over all stages as torchtitan counts them (distributed/pipeline_parallel.py, pipeline_llm)."""
    weight = (
        parallelism["pipeline_parallel_first_stage_less_layers"]
        + parallelism["pipeline_parallel_last_stage_less_layers"]
    )
    return math.ceil((num_layers + weight) / parallelism["pipeline_parallel_layers_per_stage"])


@pytest.mark.parametrize(
    ("preset", "stages", "chunks", "schedule"),
    [
        ("llama-3-70b", 4, 5, "Interleaved1F1B"),
        ("llama-3.1-405b", 16, 2, "Interleaved1F1B"),
        ("llama-3-70b", 8, 1, "1F1B"),
    ],
)
def test_torchtitan_cuts_as_many_chunks(preset: str, stages: int, chunks: int, schedule: str) -> None:
    """Its own rule finds as many chunks on each stage, also of 126 layers on 16 stages, whose ends have fewer."""
    layout = ParallelLayout(pipeline_parallel=stages, virtual_pipeline=chunks)
    config = read_model(preset).config
    job = tomllib.loads(write_format("torchtitan-toml", config, workload=Workload(), layout=layout))["parallelism"]

    assert job["pipeline_parallel_schedule"] == schedule
    assert torchtitan_chunks(config.num_layers, job) == stages * chunks


def test_torchtitan_names_the_kind_of_selective_recomputation() -> None:
    """Recomputation by operation, which torchtitan names differently from every n layers."""
    workload = Workload(recompute="selective", recompute_modules="alternate_gemms")
    text = write_format("torchtitan-toml", read_model("llama-3-8b").config, workload=workload)

    assert tomllib.loads(text)["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}


@pytest.mark.parametrize(
    "change", [{"optimizer": "muon"}, {"loss_chunks": 8}, {"packed": "8x256"}, {"kernels": "fused"}]
)
def test_workloads_that_a_file_would_leave_out_are_refused(change: dict[str, Any]) -> None:
    """A file without them trains another step than the priced one; scripts have them with DeepSpeed and Accelerate."""
    config = read_model("llama-2-7b", {"vocab_size": 50304}).config
    for name in FORMATS:
        if name != "nanogpt":  # which has no such model
            with pytest.raises(WorkloadError, match=f"{name} cannot express {next(iter(change))}"):
                write_format(name, config, workload=Workload(**change))
    for name in RUN_FORMATS:
        assert write_format(name, config, workload=Workload(**change))


def test_some_recomputed_layers_are_written_for_megatron_alone() -> None:
    """The files of others recompute all layers or none."""
    config, some = read_model("llama-2-7b").config, Workload(recompute="full", recompute_layers=8)

    assert "--recompute-num-layers 8" in write_format("megatron-args", config, workload=some)
    for name in ("torchtitan-toml", "neox-yaml", *RUN_FORMATS):
        with pytest.raises(WorkloadError, match="recompute_layers=8"):
            write_format(name, config, workload=some)


def test_torchtitan_shards_weights_over_context_parallel_devices() -> None:
    """parallel_dims.py: FSDP is enabled where dp_shard or cp exceeds 1, so no file keeps whole weights with cp."""
    config, layout = read_model("llama-3-8b").config, ParallelLayout(data_parallel=4, context_parallel=2)
    with pytest.raises(LayoutError, match="zero_stage=0 with context_parallel=2"):
        write_format("torchtitan-toml", config, layout=layout)
    assert "context_parallel_degree = 2" in write_format(
        "torchtitan-toml", config, layout=replace(layout, zero_stage=3)
    )


def test_optimizer_states_on_the_host() -> None:
    """Megatron-LM and DeepSpeed support it; others offload weights and gradients as well, or nothing, and raise."""
    config = read_model("llama-3-8b").config
    options: dict[str, Any] = {
        "workload": Workload(offload_optimizer=True),
        "layout": ParallelLayout(data_parallel=8, zero_stage=1),
    }
    megatron = read_arguments(write_format("megatron-args", config, **options))
    deepspeed = json.loads(write_format("deepspeed-json", config, **options))

    assert megatron["optimizer_cpu_offload"] is True
    assert megatron["optimizer_offload_fraction"] == "1.0"
    assert megatron["use_precision_aware_optimizer"] is True
    assert deepspeed["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
    for name in ("torchtitan-toml", "accelerate-yaml"):
        with pytest.raises(WorkloadError, match="offload_optimizer"):
            write_format(name, config, **options)
    with pytest.raises(WorkloadError, match="offload_activations"):
        write_format("megatron-args", config, workload=Workload(offload_activations=True))


def test_nanogpt_takes_gpt2_with_a_padded_vocabulary() -> None:
    """GPT-2 as train.py trains it; as published, its vocabulary is refused."""
    config = read_model("gpt2").config
    padded = replace(config, vocab_size=50304)
    workload = Workload(seq_len=1024, micro_batch_size=12, global_batch_size=480)
    arguments = read_assignments(
        write_format("nanogpt", padded, workload=workload, layout=ParallelLayout(data_parallel=8))
    )

    assert (arguments["n_layer"], arguments["n_head"], arguments["n_embd"], arguments["block_size"]) == (
        12,
        12,
        768,
        1024,
    )
    assert (arguments["batch_size"], arguments["gradient_accumulation_steps"], arguments["bias"]) == (12, 40, True)
    with pytest.raises(ConfigError, match="vocab_size=50257"):
        write_format("nanogpt", config)


@pytest.mark.parametrize(
    ("name", "preset", "options", "error", "words"),
    [
        ("megatron-args", "mpt-7b", {}, ConfigError, "LayerNorm without bias"),
        ("neox-yaml", "mixtral-8x7b", {}, ConfigError, "num_experts=8"),
        (
            "megatron-args",
            "gpt2",
            {"layout": ParallelLayout(tensor_parallel=2)},
            ConfigError,
            "vocab_size=50257 over 2",
        ),
        ("torchtitan-toml", "gpt2", {}, ConfigError, "norm='layernorm'"),
        ("megatron-args", "llama-3-8b", {"workload": Workload(phase="decode")}, WorkloadError, "phase='decode'"),
        ("neox-yaml", "llama-2-7b", {"workload": Workload(recompute="selective")}, WorkloadError, "recompute"),
        ("neox-yaml", "llama-2-7b", {"layout": ParallelLayout(context_parallel=2)}, LayoutError, "context_parallel=2"),
        ("torchtitan-toml", "llama-2-7b", {"layout": ParallelLayout(zero_stage=1)}, LayoutError, "zero_stage=1"),
        ("megatron", "llama-2-7b", {}, ConfigError, "did you mean"),
    ],
)
def test_inexpressible_models_are_errors(
    name: str, preset: str, options: dict[str, Any], error: type[ShapewrightError], words: str
) -> None:
    """A field, workload or layout that a framework cannot express is an error that names it."""
    with pytest.raises(error, match=words):
        write_format(name, read_model(preset).config, **options)


def test_deepspeed_shares_the_batch() -> None:
    """Micro-batch, accumulation and replicas make the global batch; the ZeRO stage and recomputation arrive."""
    workload = Workload(micro_batch_size=2, global_batch_size=64, recompute="full")
    layout = ParallelLayout(data_parallel=8, zero_stage=3)
    arguments = json.loads(
        write_format("deepspeed-json", read_model("llama-3-8b").config, workload=workload, layout=layout)
    )

    assert arguments["train_batch_size"] == 64
    assert arguments["train_micro_batch_size_per_gpu"] * arguments["gradient_accumulation_steps"] * 8 == 64
    assert arguments["zero_optimization"]["stage"] == 3
    assert arguments["activation_checkpointing"]["number_checkpoints"] == 32
    assert arguments["bf16"] == {"enabled": True}


def test_accelerate_spreads_by_fsdp() -> None:
    """ZeRO stage 3 gathers weights again for the backward pass, stage 2 keeps them; the batch is in comments."""
    workload = Workload(micro_batch_size=2, global_batch_size=64, recompute="full")
    for stage, reshards in ((2, "false"), (3, "true")):
        layout = ParallelLayout(data_parallel=8, zero_stage=stage)
        text = write_format("accelerate-yaml", read_model("llama-3-8b").config, workload=workload, layout=layout)
        arguments = dict(
            line.strip().split(": ") for line in text.splitlines() if ": " in line and not line.startswith("#")
        )
        assert arguments["distributed_type"] == "FSDP"
        assert arguments["fsdp_version"] == "2"
        assert arguments["fsdp_reshard_after_forward"] == reshards
        assert arguments["fsdp_activation_checkpointing"] == "true"
        assert arguments["num_processes"] == "8"
        assert "#   gradient_accumulation_steps: 4" in text


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("deepspeed-json", {"tensor_parallel": 2}, "tensor_parallel=2"),
        ("accelerate-yaml", {"pipeline_parallel": 2}, "pipeline_parallel=2"),
        ("accelerate-yaml", {"data_parallel": 2, "zero_stage": 1}, "zero_stage=1"),
        ("megatron-args", {"pipeline_parallel": 2, "pipeline_schedule": "zero-bubble"}, "Megatron-LM has 1f1b"),
        ("torchtitan-toml", {"pipeline_parallel": 2, "pipeline_schedule": "zero-bubble"}, "has 1f1b and gpipe"),
    ],
)
def test_layouts_that_a_framework_does_not_have(name: str, fields: dict[str, Any], message: str) -> None:
    """An axis or a schedule that cannot be expressed is an error that names it."""
    with pytest.raises(LayoutError, match=message):
        write_format(name, read_model("llama-3-8b").config, workload=Workload(), layout=ParallelLayout(**fields))


def test_plans_for_a_trainer_recompute_as_it_can() -> None:
    """Every second GEMM is repeated by torchtitan, modules by Megatron-LM: plans with others are not tried."""
    titan, megatron = find_format("torchtitan-toml"), find_format("megatron-args")

    assert keep_expressible(titan, {})["recompute"] == ("none", "full")
    assert "recompute" not in keep_expressible(titan, {}, recompute_modules="alternate_gemms")
    assert "recompute" not in keep_expressible(megatron, {})
    assert keep_expressible(megatron, {}, recompute_modules="alternate_gemms")["recompute"] == ("none", "full")
    assert keep_expressible(find_format("litgpt-yaml"), {}, recompute_modules="mlp")["recompute"] == ("none",)
    with pytest.raises(ConfigError, match="keep=recompute: torchtitan-toml can express only none, full"):
        keep_expressible(titan, {"recompute": ("selective",)})
