"""Files of trainers: what is written is read back, and what people have is understood."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import shapewright
from command_line import run
from shapewright.app.formats.output_format import unused_fields
from shapewright.app.formats.registry import FORMATS, READERS, RUN_FORMATS, parse_job, read_job, write_format
from shapewright.core.errors import ConfigError, ShapewrightError
from shapewright.models.read import list_presets, read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.models.write import untimed_values
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

pytest.importorskip("yaml", reason="YAML files need the yaml extra")

# Which GEMMs are fused follows from the trainer; a config file names neither model nor type.
IMPLEMENTATION = {"name", "model_type", "fused_qkv", "fused_gate_up"}
# Fields that a file of the format does not say, so that reading it back loses them.
LOST: dict[str, set[str]] = {
    "megatron-args": {"data_parallel"},
    "neox-yaml": set(),
    "torchtitan-toml": set(),
    "nanogpt": {"data_parallel"},
    "litgpt-yaml": {"zero_stage"},
    "deepspeed-json": {"seq_len"},
    "accelerate-yaml": set(),
}
# Forms of GELU that trainers run as one, at the same cost.
GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_tanh", "gelu_pytorch_tanh")
LAYOUTS = (
    ParallelLayout(data_parallel=8),
    ParallelLayout(tensor_parallel=2, pipeline_parallel=2, data_parallel=4, zero_stage=1, virtual_pipeline=2),
    ParallelLayout(pipeline_parallel=2, data_parallel=4),
    ParallelLayout(data_parallel=8, zero_stage=3),
    ParallelLayout(tensor_parallel=4, data_parallel=2, context_parallel=2, zero_stage=2, sequence_parallel=True),
)


def differences(written: Any, read: dict[str, Any], ignored: set[str]) -> dict[str, tuple[Any, Any]]:
    """Fields that differ: of those read, from what was written; of the others, from their defaults."""
    found = {}
    for spec in fields(written):
        before = getattr(written, spec.name)
        after = read.get(spec.name, spec.default)
        if spec.name not in ignored and before != after and not (before in GELU and after in GELU):
            found[spec.name] = (before, after)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_models_are_read_back(name: str) -> None:
    """Every field of every preset that a format can express is equal after writing and reading it."""
    num_read = 0
    for preset in [*list_presets(), "padded gpt2"]:
        model = read_model("gpt2", {"vocab_size": 50304}) if preset == "padded gpt2" else read_model(preset)
        try:
            text = write_format(name, model.config, untimed=untimed_values(model))
        except ShapewrightError:
            continue
        found = parse_job(text)
        back = read_model(None, found.fields).config
        read = {spec.name: getattr(back, spec.name) for spec in fields(TransformerConfig)}
        ignored = IMPLEMENTATION | set(unused_fields(model.config))
        assert differences(model.config, read, ignored) == {}, preset
        assert found.format == name
        values = untimed_values(model)
        if model.config.position_embedding != "rotary":
            values.pop("rotary_base", None)
        if name != "megatron-args" and values.pop("rope_scaling_factor", None):
            assert "# Not written: scaling of rotary positions (llama3, factor" in text
        assert name == "nanogpt" or found.untimed == pytest.approx(values), preset
        num_read += 1

    assert num_read > (0 if name == "nanogpt" else 15)


# Arguments of Megatron-LM whose name in a checkpoint is another one, with their value there.
RENAMED = {
    "disable_bias_linear": ("add_bias_linear", False),
    "no_persist_layer_norm": ("persist_layer_norm", False),
}


# What a checkpoint holds where an argument was not given.
OFF = {
    "swiglu": False, "untie_embeddings_and_output_weights": False, "group_query_attention": False, "num_experts": None,
    "qk_layernorm": False, "multi_latent_attention": False, "use_rope_scaling": False, "add_bias_linear": True,
    "moe_grouped_gemm": False, "q_lora_rank": None, "moe_shared_expert_intermediate_size": None,
}  # fmt: skip


def test_arguments_of_checkpoints_are_read_back() -> None:
    """What is written as an argument list is read back from the arguments that a checkpoint of it holds."""
    num_read = 0
    for preset in list_presets():
        model = read_model(preset)
        try:
            text = write_format("megatron-args", model.config, untimed=untimed_values(model))
        except ShapewrightError:
            continue
        held: dict[str, Any] = dict(OFF)
        for line in text.splitlines():
            key, _, value = line.removeprefix("--").partition(" ")
            name = key.replace("-", "_")
            if name in RENAMED:
                held.update([RENAMED[name]])
            else:
                held[name] = json.loads(value) if value.replace(".", "").isdigit() else value or True
        listed, kept = parse_job(text), parse_job(json.dumps({**held, "checkpoint_version": 3.0}))
        assert (kept.format, dict(kept.fields)) == ("megatron-args", dict(listed.fields)), preset
        assert kept.untimed == pytest.approx(listed.untimed), preset
        num_read += 1

    assert num_read > 100


def test_flavors_are_read_back(tmp_path: Path) -> None:
    """The line of a flavor that is written for torchtitan's Python file is read back from there."""
    num_read = 0
    for preset in list_presets():
        model = read_model(preset)
        try:
            text = write_format("torchtitan-toml", model.config, untimed=untimed_values(model))
        except ShapewrightError:
            continue
        (line,) = (line.removeprefix("#") for line in text.splitlines() if "ModelArgs(" in line)
        path = tmp_path / "__init__.py"
        path.write_text(
            f'llama3_args = {{\n    "debugmodel": TransformerModelArgs(dim=256),\n{line}\n}}\n', encoding="utf-8"
        )
        found, listed = read_job(f"{path}::shapewright"), parse_job(text)
        assert (dict(found.fields), found.untimed) == (dict(listed.fields), listed.untimed), preset
        num_read += 1

    assert num_read > 40


@pytest.mark.parametrize("name", [*FORMATS, *RUN_FORMATS])
def test_runs_are_read_back(name: str) -> None:
    """Every field of workload and layout is equal, or named in LOST."""
    config = read_model("gpt2", {"vocab_size": 50304}).config if name == "nanogpt" else read_model("llama-2-7b").config
    seq_len = config.max_position_embeddings if name == "nanogpt" else 1024
    num_read, seen = 0, set()
    for recompute in ("none", "full", "selective"):
        for layout in LAYOUTS:
            workload = Workload(
                seq_len=seq_len, micro_batch_size=2, global_batch_size=64, dtype="bf16", recompute=recompute
            )
            try:
                found = parse_job(write_format(name, config, workload=workload, layout=layout))
            except ShapewrightError:
                continue
            assert found.format == name
            parts = found.parts()
            lost = {**differences(workload, parts["workload"], set())}
            lost |= differences(layout, parts["layout"], set())
            assert set(lost) <= LOST[name], (recompute, layout, lost)
            seen |= set(lost)
            num_read += 1

    assert num_read >= 1
    assert seen == LOST[name]


@pytest.mark.parametrize(("layers", "chunks", "argument"), [(4, 1, 4), (4, 2, 2), (None, 2, 1)])
def test_layers_that_megatron_recomputes(layers: int | None, chunks: int, argument: int) -> None:
    """The block method counts the layers of a chunk, a workload those of a stage; others are an error or named."""
    workload = Workload(recompute="full", recompute_layers=layers)
    layout = ParallelLayout(pipeline_parallel=2, virtual_pipeline=chunks)
    text = write_format("megatron-args", read_model("llama-2-7b").config, workload=workload, layout=layout)

    assert f"--recompute-num-layers {argument}" in text
    assert parse_job(text).workload.get("recompute_layers") == layers
    uniform = text.replace("block", "uniform").replace(f"num-layers {argument}\n", "num-layers 8\n")
    assert "recompute_num_layers" in parse_job(uniform).unread
    with pytest.raises(ShapewrightError, match="recompute_layers=5"):
        write_format(
            "megatron-args",
            read_model("llama-2-7b").config,
            workload=Workload(recompute="full", recompute_layers=5),
            layout=ParallelLayout(pipeline_parallel=2, virtual_pipeline=2),
        )


MEGATRON_SCRIPT = """\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
TP=2
GPT_MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096   # Llama 3 8B
    --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --kv-channels 128 --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 500000
    --normalization RMSNorm --norm-epsilon 1e-05 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0.0 --attention-dropout 0.0
    --vocab-size 128256 --make-vocab-size-divisible-by 128
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size $TP --pipeline-model-parallel-size 4 --sequence-parallel
    --use-distributed-optimizer
)
torchrun --nproc_per_node 8 pretrain_gpt.py ${GPT_MODEL_ARGS[@]} ${MODEL_PARALLEL_ARGS[@]} \\
    --seq-length 8192 --micro-batch-size 1 --global-batch-size=128 --bf16 --lr 3e-4
"""
MEGATRON_LOG = """\
------------------------ arguments ------------------------
  add_bias_linear ................................. False
  ffn_hidden_size ................................. 14336
  hidden_size ..................................... 4096
  num_layers ...................................... 32
  num_attention_heads ............................. 32
  num_query_groups ................................ 8
  kv_channels ..................................... 128
  max_position_embeddings ......................... 8192
  padded_vocab_size ............................... 128256
  position_embedding_type ......................... rope
  normalization ................................... RMSNorm
  swiglu .......................................... True
  untie_embeddings_and_output_weights ............. True
  hidden_dropout .................................. 0.0
  attention_dropout ............................... 0.0
  tensor_model_parallel_size ...................... 2
  pipeline_model_parallel_size .................... 4
  sequence_parallel ............................... True
  use_distributed_optimizer ....................... True
  world_size ...................................... 64
  seq_length ...................................... 8192
  micro_batch_size ................................ 1
  global_batch_size ............................... 128
  bf16 ............................................ True
  recompute_granularity ........................... None
-------------------- end of arguments ---------------------
"""
NEOX = """\
# a comment
{
  "pipe-parallel-size": 1, "model-parallel-size": 2, "num-layers": 32, "hidden-size": 4096,
  "intermediate_size": 32768, "num-attention-heads": 32, "max-position-embeddings": 4096, "pos-emb": "rotary",
  "no-weight-tying": true, "norm": "rmsnorm", "rms_norm_epsilon": 1.0e-5, "use_bias_in_norms": false,
  "use_bias_in_attn_linear": false, "use_bias_in_mlp": false, "activation": "swiglu", "mlp_multiple_of": 256,
  "hidden-dropout": 0, "seq-length": 4096, "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true},
  "zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam"},
}
"""
LITGPT = """\
name: pythia-6.9b
hf_config: {org: EleutherAI, name: pythia-6.9b}
block_size: 2048
n_layer: 32
n_embd: 4096
n_head: 32
vocab_size: 50254
padding_multiple: 256
"""
TITAN_FLAVORS = """\
from torchtitan.models.llama3 import TransformerModelArgs
import os; os.abort()  # never run
llama3_args = {
    "debugmodel": TransformerModelArgs(dim=256, n_layers=6, n_heads=16, rope_theta=500000),
    "8B": TransformerModelArgs(
        dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim_multiplier=1.3, multiple_of=4 * 256, rope_theta=500000
    ),
}
"""
NANOGPT = """\
# gpt2-124M on 8 GPUs
wandb_log = True
batch_size = 12
block_size = 1024
gradient_accumulation_steps = 5 * 8
n_layer = 24
n_head = 16
n_embd = 1024
out_dir = os.path.join("out", "x")
"""


def fields_like(preset: str, found: dict[str, Any], **changes: Any) -> dict[str, tuple[Any, Any]]:
    """Differences between what was read and a preset."""
    config = read_model(preset, changes or None).config
    back = read_model(None, found).config
    read = {spec.name: getattr(back, spec.name) for spec in fields(TransformerConfig)}
    return differences(config, read, IMPLEMENTATION | set(unused_fields(config)))


@pytest.mark.parametrize(
    ("text", "name", "preset", "changes", "workload", "layout"),
    [
        (
            MEGATRON_SCRIPT, "megatron-args", "llama-3-8b", {},
            {"seq_len": 8192, "micro_batch_size": 1, "global_batch_size": 128, "dtype": "bf16"},
            {"tensor_parallel": 2, "pipeline_parallel": 4, "sequence_parallel": True, "zero_stage": 1},
        ),
        (
            MEGATRON_LOG, "megatron-args", "llama-3-8b", {},
            {"seq_len": 8192, "recompute": "none"}, {"tensor_parallel": 2, "data_parallel": 8},
        ),
        (
            NEOX, "neox-yaml", "llama-2-7b", {},
            {"micro_batch_size": 4, "dtype": "bf16"}, {"tensor_parallel": 2, "zero_stage": 1},
        ),
        (LITGPT, "litgpt-yaml", "pythia-6.9b", {"vocab_size": 50432}, {}, {}),
        (
            NANOGPT, "nanogpt", "gpt2-medium",
            {"vocab_size": 50304, "hidden_dropout": 0.0, "attention_dropout": 0.0, "norm_bias": False,
             "qkv_bias": False, "attention_out_bias": False, "mlp_bias": False},
            {"seq_len": 1024, "micro_batch_size": 12, "global_batch_size": 480}, {},
        ),
    ],
)  # fmt: skip
def test_files_that_people_have(
    text: str, name: str, preset: str, changes: dict[str, Any], workload: dict[str, Any], layout: dict[str, Any]
) -> None:
    """Hand-written files give the fields of published models, with other spellings, defaults and arithmetic."""
    found = parse_job(text)
    model = {**found.fields, **({"vocab_size": 32000} if name == "neox-yaml" else {})}

    assert found.format == name
    assert fields_like(preset, model, **changes) == {}
    assert {key: found.workload[key] for key in workload} == workload
    assert {key: found.layout[key] for key in layout} == layout


LITGPT_RUN = """\
model_name: tiny-llama-1.1b
model_config:
precision: bf16-mixed
devices: 8
train:
  global_batch_size: 512
  micro_batch_size: 4
  max_seq_length: 1024
"""


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("tiny-llama-1.1b", "tinyllama-1.1b"), ("Llama-3-8B", "llama-3-8b"), ("pythia-1b-deduped", "pythia-1b"),
        ("Llama-2-7b-chat-hf", "llama-2-7b"), ("Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"), ("phi-1_5", "phi-1.5"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"), ("Gemma-3-4b-it", "gemma-3-4b-text"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("without", ["model_config:\n", ""])
def test_models_that_litgpt_names(name: str, preset: str, without: str) -> None:
    """A training that names its model has the preset's shape and the batch of the file, with or without the key."""
    found = parse_job(LITGPT_RUN.replace("tiny-llama-1.1b", name).replace(without, ""))

    assert (found.format, found.model) == ("litgpt-yaml", preset)
    assert found.workload == {
        "phase": "train", "dtype": "bf16", "global_batch_size": 512, "micro_batch_size": 4, "seq_len": 1024,
    }  # fmt: skip
    # Its FSDP strategy shards weights, gradients and states.
    assert (found.layout, found.unread) == ({"data_parallel": 8, "zero_stage": 3}, ())


def test_true_precision_of_litgpt() -> None:
    """bf16-true has weights, gradients and AdamW's moments in 16 bits: 8 bytes per parameter instead of 18."""
    true = parse_job(LITGPT_RUN.replace("bf16-mixed", "bf16-true"))
    memory = {}
    for found in (parse_job(LITGPT_RUN), true):
        step = shapewright.predict("tinyllama-1.1b", device="h100-sxm-80gb", workload={**found.workload})
        memory[found.workload["dtype"], found is true] = step.memory.weights_bytes + step.memory.optimizer_bytes

    assert memory["bf16", True] == pytest.approx(1_100_048_384 * 6.0, rel=1e-3)
    assert memory["bf16", False] == pytest.approx(1_100_048_384 * 14.0, rel=1e-3)


def test_batches_and_nodes_of_litgpt() -> None:
    """512 and 4 sequences are the defaults of pretrain.py; its HYBRID_SHARD keeps all weights in each node."""
    text = LITGPT_RUN.replace("  global_batch_size: 512\n  micro_batch_size: 4\n", "")
    found = parse_job(text.replace("devices: 8", "devices: 8\nnum_nodes: 2"))

    assert (found.workload["global_batch_size"], found.workload["micro_batch_size"]) == (512, 4)
    assert (found.layout, found.unread) == ({"data_parallel": 16, "zero_stage": 3}, ("num_nodes",))


@pytest.mark.parametrize(
    ("name", "layers", "heads", "width"),
    [("gpt2", 12, 12, 768), ("gpt2-medium", 24, 16, 1024), ("gpt2-large", 36, 20, 1280), ("gpt2-xl", 48, 25, 1600)],
)
def test_weights_that_nanogpt_starts_from(name: str, layers: int, heads: int, width: int) -> None:
    """``init_from`` sets the sizes, whatever else the file says of them; its context may be cut."""
    found = parse_job(f"init_from = '{name}'\nn_layer = 2\nblock_size = 256\nbatch_size = 1\n").fields

    assert (found["num_layers"], found["num_heads"], found["hidden_size"]) == (layers, heads, width)
    assert (found["vocab_size"], found["qkv_bias"], found["max_position_embeddings"]) == (50257, True, 256)
    assert "init_from" in parse_job("init_from = 'resume'\nn_layer = 2\n").unread


SMALL_MEGATRON = "torchrun pretrain_gpt.py --num-layers 12 --hidden-size 64 --num-attention-heads 8 --bf16"


@pytest.mark.parametrize(
    ("flags", "field", "flagged"),
    [
        # megatron/core/transformer/utils.py, is_layer_window_attention: number % n != 0, with layers counted from 1.
        ("--window-size 127,0 --window-attn-skip-freq 6", "attention_windows", (128,) * 5 + (0,) + (128,) * 5 + (0,)),
        # transformer_config.py: no_rope_freq=4 is [0,0,0,1] repeated.
        ("--position-embedding-type rope --no-rope-freq 4", "rotary_layers", (True, True, True, False) * 3),
        # transformer_config.py: moe_layer_freq=3 is index % 3 == 0.
        ("--num-experts 4 --moe-layer-freq 3", "moe_layers", (True, False, False) * 4),
    ],
)
def test_numbers_as_patterns_of_megatron(flags: str, field: str, flagged: tuple[object, ...]) -> None:
    """A number instead of a list means another rule for windows, rotary positions and experts."""
    assert parse_job(f"{SMALL_MEGATRON} {flags}").fields[field] == flagged


@pytest.mark.parametrize(
    ("switch", "flags", "heads"),
    [
        # A log and a checkpoint have every argument: num_query_groups is 1 where groups are off.
        ("False", None, 8),
        ("True", None, 1),
        (None, "--group-query-attention --num-query-groups 2", 2),
        (None, "--num-query-groups 2", 8),
        (None, "--group-query-attention", 1),
    ],
)
def test_groups_of_queries_need_their_switch(switch: str | None, flags: str | None, heads: int) -> None:
    """Megatron-LM ignores num_query_groups, which is 1 by default, without group_query_attention."""
    text = f"{SMALL_MEGATRON} {flags}"
    if switch is not None:
        text = MEGATRON_LOG.replace("num_attention_heads ............................. 32", "num_attention_heads ... 8")
        text = text.replace("num_query_groups ................................ 8", "num_query_groups ... 1")
        text = text.replace("  kv_channels", f"  group_query_attention ... {switch}\n  kv_channels")

    assert parse_job(text).fields["num_kv_heads"] == heads


@pytest.mark.parametrize(
    ("flags", "stage"),
    [
        # distributed_data_parallel_config.py: data_parallel_sharding_strategy is no_shard unless it is given.
        ("--use-megatron-fsdp", 0),
        ("--use-megatron-fsdp --use-distributed-optimizer --data-parallel-sharding-strategy optim", 1),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", 2),
        ("--use-custom-fsdp --data-parallel-sharding-strategy optim_grads_params", 3),
        ("--use-torch-fsdp2", 3),
    ],
)
def test_what_fsdp_of_megatron_shards(flags: str, stage: int) -> None:
    """Megatron-FSDP shards what its strategy says; FSDP 2 shards everything."""
    found = parse_job(f"{SMALL_MEGATRON} {flags}")

    assert (found.layout["zero_stage"], found.unread) == (stage, ())


def test_layouts_of_megatron_with_multiplications() -> None:
    """Et*3|(tt|)*29,m|L has 1 + 29 + 1 + 1 chunks, so 16 stages have 2 each."""
    flags = "--pipeline-model-parallel-size 16 --pipeline-model-parallel-layout 'Et*3|(tt|)*29,m|L'"

    assert parse_job(f"{SMALL_MEGATRON} {flags}").layout["virtual_pipeline"] == 2


def test_the_older_switch_of_megatron_recomputes() -> None:
    """--recompute-activations is selective recomputation (arguments.py, validate_args)."""
    found = parse_job(f"{SMALL_MEGATRON} --recompute-activations")

    assert (found.workload["recompute"], found.workload["recompute_modules"]) == ("selective", "core_attn")
    assert found.unread == ()


def test_unread_keys_are_named() -> None:
    """Keys that predictions do not use are listed, not dropped silently."""
    assert "lr" in parse_job(MEGATRON_SCRIPT).unread
    assert "optimizer" in parse_job(NEOX).unread
    assert {"out_dir", "wandb_log"} <= set(parse_job(NANOGPT).unread)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (
            '{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": '
            '{"device": "nvme"}}}',
            {"zero_optimization.offload_param", "zero_optimization.offload_optimizer"},
        ),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: true}\n", {"fsdp_config.fsdp_offload_params"}),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: false, fsdp_sharding_strategy: 1}\n", set()),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}\n",
            {"fsdp_config.fsdp_sharding_strategy"},
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {offload_param_device: cpu, zero_stage: 3}\n",
            {"deepspeed_config.offload_param_device"},
        ),
        (
            "distributed_type: FSDP\nnum_processes: 8\nparallelism_config: {parallelism_config_dp_replicate_size: 2, "
            "parallelism_config_dp_shard_size: 4, parallelism_config_sp_size: 1}\n",
            {
                "parallelism_config.parallelism_config_dp_replicate_size",
                "parallelism_config.parallelism_config_sp_size",
            },
        ),
    ],
)
def test_what_is_not_priced_is_named(text: str, named: set[str]) -> None:
    """Settings that cost time or save memory and that no prediction has are named."""
    assert set(parse_job(text).unread) == named


@pytest.mark.parametrize(
    ("launch", "replicas", "unread"),
    [
        ("--nproc_per_node 8 --nnodes 4 --master_addr host --node_rank 0", 4, ()),
        ("--nproc-per-node=8 --standalone", 1, ()),
        ("--nnodes $NODES --nproc_per_node 8", None, ("nnodes=$NODES",)),
        ("--nproc_per_node gpu --nnodes 2", None, ("nproc_per_node",)),
    ],
)
def test_devices_that_torchrun_starts(launch: str, replicas: int | None, unread: tuple[str, ...]) -> None:
    """A launch script of Megatron-LM says the data-parallel degree, by its processes and the other degrees."""
    arguments = "--num-layers 2 --hidden-size 8 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"
    found = parse_job(f"torchrun {launch} pretrain_gpt.py {arguments}", format_name="megatron-args")

    assert found.layout.get("data_parallel") == replicas
    assert found.unread == unread


@pytest.mark.parametrize(("sizes", "positions"), [("model_name: tiny-llama-1.1b", 2048), ("model: {n_layer: 2}", 4096)])
def test_litgpt_trains_at_the_context_of_the_model(sizes: str, positions: int) -> None:
    """Without a length of its own, a training has sequences as long as the model's context."""
    text = f"{sizes}\ntrain:\n  max_seq_length: null\n  micro_batch_size: 4\n"
    found = parse_job(text, format_name="litgpt-yaml")

    assert found.workload["seq_len"] == positions


def test_flavors_are_data(tmp_path: Path) -> None:
    """A flavor of torchtitan is found in its file, which is never run; a missing one is an error with those there."""
    (tmp_path / "flavors.py").write_text(TITAN_FLAVORS, encoding="utf-8")
    path = str(tmp_path / "flavors.py")
    found = read_job(f"{path}::8B")

    assert fields_like("llama-3-8b", {**found.fields, "max_position_embeddings": 8192}) == {}
    assert found.untimed == {"rotary_base": 500000}
    for wrong in (path, f"{path}::9B"):
        with pytest.raises(ConfigError, match="debugmodel, 8B"):
            read_job(wrong)
    mixture = TITAN_FLAVORS.replace("multiple_of=4 * 256", "multiple_of=1024, moe_args=MoEArgs(num_experts=16)")
    (tmp_path / "flavors.py").write_text(mixture, encoding="utf-8")
    assert read_job(f"{path}::8B").unread == ("moe_args",)  # its experts would be left out without a word


@pytest.mark.parametrize(
    ("sections", "dtype"),
    [
        ('"fp16": {"fp16": true, "enabled": true}', "fp16"), ('"fp16": {"enabled": false}', "fp32"),
        ('"fp16": {"enabled": true, "type": "bfloat16"}', "bf16"), ('"precision": "bfloat16"', "bf16"),
    ],
)  # fmt: skip
def test_precision_of_neox(sections: str, dtype: str) -> None:
    """A section that is off is not used; bf16 was a type of fp16 (neox_args/arguments.py, calculate_derived)."""
    assert parse_job(NEOX.replace('"bf16": {"enabled": true}', sections)).workload["dtype"] == dtype


def test_defaults_of_neox() -> None:
    """Attention is global in all layers, which is unfused, and a gated MLP is int(4 h * 2/3) // 2 wide."""
    found = parse_job(NEOX.replace('"intermediate_size": 32768, ', "").replace('"mlp_multiple_of": 256,', ""))

    # 16384 * 2 / 3 = 10922.67: a matrix of 10922 columns, and one of 5461 rows (megatron/model/transformer.py).
    assert (found.fields["intermediate_size"], found.workload["attention"]) == (5461, "unfused")
    flash = NEOX.replace('"bf16"', '"attention_config": [[["flash"], 32]], "bf16"')
    assert parse_job(flash).workload["attention"] == "flash"


TITAN_JOB = """\
#     "own": TransformerModelArgs(dim=64, n_layers=32, n_heads=4),

[model]
name = "llama3"
flavor = "own"
"""


@pytest.mark.parametrize(
    ("more", "workload", "layout", "unread"),
    [
        # Defaults of config/job_config.py: local_batch_size 8, and selective_ac_option "2", which recomputes the
        # second of every two layers of a device as a whole (distributed/activation_checkpoint.py).
        ("", {"micro_batch_size": 8, "recompute": "full", "recompute_layers": 16}, {"zero_stage": 3}, ()),
        (
            "[activation_checkpoint]\nselective_ac_option = '3'\n[parallelism]\npipeline_parallel_degree = 4\n",
            {"recompute": "full", "recompute_layers": 2}, {"pipeline_parallel": 4}, (),
        ),
        ("[activation_checkpoint]\nselective_ac_option = '33'\n", {"recompute": "none"}, {}, ()),
        (
            "[activation_checkpoint]\nselective_ac_option = 'op'\n",
            {"recompute": "selective", "recompute_modules": "alternate_gemms"}, {}, (),
        ),
        ("[training]\nglobal_batch_size = -1\nlocal_batch_size = 2\n", {"micro_batch_size": 2}, {}, ()),
        # pipeline_parallel.py: two stages of a device in schedules of several, unless their layers are given.
        (
            "[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_schedule = 'Interleaved1F1B'\n",
            {}, {"pipeline_schedule": "1f1b", "virtual_pipeline": 2}, (),
        ),
        (
            "[parallelism]\npipeline_parallel_degree = 4\npipeline_parallel_schedule = 'ZBVZeroBubble'\n",
            {}, {}, ("parallelism.pipeline_parallel_schedule",),
        ),
        (
            "[parallelism]\ndata_parallel_replicate_degree = 2\ndata_parallel_shard_degree = 8\n",
            {}, {"data_parallel": 16}, ("parallelism.data_parallel_replicate_degree",),
        ),
        # parallel_dims.py: fsdp_enabled is dp_shard_enabled or cp_enabled.
        (
            "[parallelism]\ndata_parallel_shard_degree = 1\ncontext_parallel_degree = 2\n",
            {}, {"context_parallel": 2, "zero_stage": 3}, (),
        ),
        ("[parallelism]\ndata_parallel_shard_degree = 1\n", {}, {"zero_stage": 0}, ()),
        ("converters = ['quantize.linear.float8']\n", {"dtype": "fp8"}, {}, ()),
        ("converters = ['quantize.linear.mx']\n", {"dtype": "bf16"}, {}, ("model.converters",)),
    ],
)  # fmt: skip
def test_jobs_of_torchtitan(
    more: str, workload: dict[str, Any], layout: dict[str, Any], unread: tuple[str, ...]
) -> None:
    """Settings have the meaning and the defaults of torchtitan 0.2, and those that are not priced are named."""
    found = parse_job(TITAN_JOB + more)

    assert {name: found.workload.get(name) for name in workload} == workload
    assert {name: found.layout.get(name) for name in layout} == layout
    assert found.workload.get("global_batch_size") is None
    assert found.unread == unread


def test_layers_of_another_file_are_not_guessed() -> None:
    """Without its flavor, it is not known how many layers every other layer is, nor how many chunks a stage has."""
    text = "[model]\nname = 'llama3'\nflavor = '8B'\n[parallelism]\npipeline_parallel_degree = 2\n"
    found = parse_job(f"{text}pipeline_parallel_layers_per_stage = 4\n")

    assert found.unread == (
        "model.flavor", "parallelism.pipeline_parallel_layers_per_stage", "activation_checkpoint.selective_ac_option",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "workload", "layout"),
    [
        (
            '{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": true}, '
            '"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}',
            {"phase": "train", "micro_batch_size": 4, "dtype": "bf16", "offload_optimizer": True},
            {"zero_stage": 3},
        ),
        (
            "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 16\n"
            "fsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_activation_checkpointing: true\n",
            {"phase": "train", "dtype": "bf16", "recompute": "full"},
            {"data_parallel": 16, "zero_stage": 2},
        ),
        (
            "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nmixed_precision: 'no'\n"
            "num_processes: 4\ndeepspeed_config: {zero_stage: 3}\n",
            {"phase": "train", "dtype": "fp32"},
            {"data_parallel": 4, "zero_stage": 3},
        ),
        (
            "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 16\nparallelism_config:\n"
            "  parallelism_config_tp_size: 4\n  parallelism_config_cp_size: 2\n  parallelism_config_dp_shard_size: 2\n",
            {"phase": "train", "dtype": "bf16", "recompute": "none"},
            {
                "tensor_parallel": 4,
                "context_parallel": 2,
                "data_parallel": 2,
                "sequence_parallel": False,
                "zero_stage": 3,
            },
        ),
        (
            "distributed_type: FSDP\nmixed_precision: bf16\nparallelism_config: "
            "{parallelism_config_dp_replicate_size: 4}\n",
            {"phase": "train", "dtype": "bf16", "recompute": "none"},
            {"data_parallel": 4, "zero_stage": 0},
        ),
        (
            "vllm serve meta-llama/Llama-3.1-70B -tp 4 --tensor-parallel-size 4 --pipeline-parallel-size=2 \\\n"
            "  --max-model-len 8192 --max-num-seqs 64 --quantization fp8 --kv-cache-dtype fp8_e4m3\n",
            {"phase": "decode", "context_len": 8192, "micro_batch_size": 32, "dtype": "fp8", "kv_cache_dtype": "fp8"},
            {"tensor_parallel": 4, "pipeline_parallel": 2},
        ),
        (
            "docker run --gpus all -p 8000:8000 vllm/vllm-openai:v0.10 --model org/model -tp 2 --max-model-len 4096\n",
            {"phase": "decode", "context_len": 4096},
            {"tensor_parallel": 2},
        ),
        (
            "python -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp 16 --dp 8 --enable-dp-attention "
            "--ep-size 16 --context-length 4096 --max-running-requests 128 --dtype bfloat16",
            {"phase": "decode", "context_len": 4096, "micro_batch_size": 16, "dtype": "bf16"},
            {"tensor_parallel": 2, "data_parallel": 8, "expert_parallel": 16},
        ),
    ],
)
def test_files_of_runs(text: str, workload: dict[str, Any], layout: dict[str, Any]) -> None:
    """Files of DeepSpeed, Accelerate, vLLM and SGLang have workload and layout, and no model."""
    found = parse_job(text)

    assert (found.fields, dict(found.workload), dict(found.layout)) == ({}, workload, layout)
    assert found.model in text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ds.json", '{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4, "zero_optimization": {}}'),
        ("neox.yml", NEOX.replace('"bf16"', '"gradient_accumulation_steps": 4, "bf16"')),
        (
            "accelerate.yaml",
            "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {gradient_accumulation_steps: 4}\n",
        ),
    ],
)
def test_the_batch_follows_from_the_degrees(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Micro-batches per replica and step give the global batch of as many replicas as the command line says."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text, encoding="utf-8")
    question = ["predict", "llama-3-8b", "--device", "h100-sxm-80gb", "--layout-from", name, "--dp", "8", "--json"]
    code, out, _ = run([*question, "--micro-batch-size", "2"], capsys)

    assert code == 0
    assert json.loads(out)["workload"]["global_batch_size"] == 2 * 4 * 8
    assert read_job(name).parts(data_parallel=8)["workload"].get("global_batch_size", 4 * 4 * 8) == 4 * 4 * 8


@pytest.mark.parametrize(
    ("extra", "options", "is_assumed"),
    [
        ("", (), True),
        ("", ("--dp", "2"), False),
        ('"gradient_accumulation_steps": 4, ', (), False),
    ],
)
def test_replicas_that_a_file_does_not_state_are_noted(
    extra: str,
    options: tuple[str, ...],
    is_assumed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """DeepSpeed divides the batch of a step by the devices it is started on; without them 16 replicas are a guess."""
    monkeypatch.chdir(tmp_path)
    batch = f'{{{extra}"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "bf16": {{"enabled": true}}}}'
    Path("ds.json").write_text(batch, encoding="utf-8")
    question = ["predict", "gpt2", "--device", "h100-sxm-80gb", "--layout-from", "ds.json", *options, "--json"]
    code, out, err = run(question, capsys)

    assert code == 0
    degree = 2 if options else 4 if extra else 16
    assert json.loads(out)["layout"]["data_parallel"] == degree
    assert (f"data_parallel={degree} is assumed" in out + err) == is_assumed


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("neox.yml", NEOX.replace('"bf16"', '"make_vocab_size_divisible_by": 64, "bf16"')),
        ("args.sh", MEGATRON_SCRIPT.replace("--vocab-size 128256 --make-vocab-size-divisible-by 128",
                                            "--make-vocab-size-divisible-by 64")),
    ],
)  # fmt: skip
def test_the_vocabulary_is_padded_as_the_trainer_does(
    name: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vocabulary of the command line is padded to the file's multiple per tensor-parallel device, with a note."""
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text, encoding="utf-8")
    question = [name, "--device", "h100-sxm-80gb", "--vocab-size", "50257", "--json"]
    facts = json.loads(run(["predict", *question, "--tp", "4"], capsys)[1])
    checked = json.loads(run(["check", *question], capsys)[1])

    assert facts["config"]["vocab_size"] == 50432  # 197 * 64 * 4
    assert "vocab_size=50257 is padded to 50432" in " ".join(facts["notes"])
    assert "TC101" not in [finding["code"] for finding in checked["findings"]]
    assert read_job(name).vocab_multiple == 64


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("megatron-args", "llama-3-8b"), ("neox-yaml", "llama-2-7b"), ("torchtitan-toml", "llama-3-8b"),
        ("torchtitan-toml", "phi-4"), ("litgpt-yaml", "llama-2-7b"), ("megatron-args", "gpt3-1.3b"),
    ],
)  # fmt: skip
def test_plans_have_the_time_of_their_file(
    name: str, preset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan has the step and the memory that a prediction of the file it writes has, to the last digit."""
    monkeypatch.chdir(tmp_path)
    device = ["--device", "h100-sxm-80gb", "--json", "--vocab-size", "32768"]
    question = ["plan", preset, *device, "--gpus", "16", "--global-batch", "64", "--keep", "pp=1,2"]
    (best, *_) = json.loads(run([*question, "--format", name, "-o", "job"], capsys)[1])["plans"]
    replicas = [] if name in ("neox-yaml", "torchtitan-toml") else ["--dp", str(best["layout"]["data_parallel"])]
    zero = ["--zero-stage", str(best["layout"]["zero_stage"])] if name == "litgpt-yaml" else []
    facts = json.loads(run(["predict", "job", *device, *replicas, *zero], capsys)[1])

    assert facts["step_time_s"] == best["step_time_s"]
    assert facts["memory"]["total_bytes"] == best["total_bytes"]


def test_a_file_without_a_model_says_where_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A layout as CONFIG needs a model: the error names the option, and flags of a model are enough."""
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3}}', encoding="utf-8")
    Path("job.toml").write_text('[model]\nname = "llama3"\nflavor = "8B"\n', encoding="utf-8")
    question = ["--device", "h100-sxm-80gb", "--json"]
    for name in ("ds.json", "job.toml"):
        code, _, err = run(["predict", name, *question], capsys)
        assert code == 2
        assert f"'shapewright predict llama-3-8b --layout-from {name}'" in err
    sizes = ["--hidden-size", "512", "--num-layers", "2", "--num-heads", "8", "--vocab-size", "1024"]
    assert json.loads(run(["predict", "ds.json", *question, *sizes], capsys)[1])["layout"]["zero_stage"] == 3


def test_command_line_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CONFIG may be such a file, --layout-from another one; flags come on top of both."""
    monkeypatch.chdir(tmp_path)
    Path("pretrain.sh").write_text(MEGATRON_SCRIPT, encoding="utf-8")
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}')
    device = ["--device", "h100-sxm-80gb", "--json"]
    code, out, err = run(["predict", "pretrain.sh", *device, "--tp", "4", "--dp", "2"], capsys)
    facts = json.loads(out)
    mixed = json.loads(run(["predict", "llama-3-8b", *device, "--layout-from", "ds.json", "--dp", "8"], capsys)[1])
    plan = json.loads(run(["plan", "pretrain.sh", *device, "--gpus", "8", "--top", "1"], capsys)[1])

    assert code == 0
    assert err.startswith("note: read pretrain.sh as megatron-args, without ")
    assert "lr" in err
    assert (facts["config"]["hidden_size"], facts["config"]["name"]) == (4096, "pretrain")
    assert [facts["layout"][name] for name in ("tensor_parallel", "pipeline_parallel", "data_parallel")] == [4, 4, 2]
    assert facts["workload"]["global_batch_size"] == 128
    assert (mixed["layout"]["zero_stage"], mixed["workload"]["micro_batch_size"]) == (3, 2)
    assert plan["workload"]["global_batch_size"] == 128
    assert plan["plans"][0]["layout"]["num_devices"] == 8
    assert shapewright.read_job("pretrain.sh").parts()["layout"]["pipeline_parallel"] == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--num-layers $LAYERS --hidden-size 8", r"\$LAYERS' has no value"),
        ("if [ $1 ]; then N=2; fi\nrun --num-layers $N", r"\$N' has no value .* conditions"),
        ("run --num-layers $(cat n)", "commands are not run"),
        ("A=(--num-layers 2", "bracket"),
        ("A=aaaaaaaaaaaaaaaa\n" + "A=$A$A\n" * 60 + "run --num-layers $A", "without end"),
        ("--num-layers '4", "quotes"),
        ("a: &x 1\nn_layer: *x", "aliases"),
        ("[model]\nname = ", "TOML"),
        ("n_layer = (", "Python"),
        ("hello", "not known"),
        ("model_name: vicuna-7b-v1.3\nmodel_config:\n", "model_name='vicuna-7b-v1.3' is no preset"),
        ("model_config:\ntrain:\n  micro_batch_size: 4\n", "neither a model_config"),
        ("init_from = 'gpt3'", "gpt2-xl"),
    ],
)
def test_broken_files_are_one_line(text: str, words: str) -> None:
    """Each error says what is wrong in one line."""
    with pytest.raises(ConfigError, match=words) as caught:
        parse_job(text)

    assert "\n" not in str(caught.value)


def test_every_format_has_a_reader() -> None:
    """What can be written can be read, launch lines too."""
    assert set(READERS) == {*FORMATS, *RUN_FORMATS, "vllm", "sglang"}
    assert set(LOST) == {*FORMATS, *RUN_FORMATS}


def test_litgpt_has_the_nodes_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes given on the command line are those of the file."""
    nodes = ["--device", "h100-sxm-80gb", "--gpus", "16", "--node-size", "4"]
    question = ["plan", "tinyllama-1.1b", *nodes, "--global-batch", "64", "--keep", "dp=16"]
    _, out, _ = run([*question, "--format", "litgpt-yaml"], capsys)

    assert out.splitlines()[-2:] == ["devices: 4  # of a node", "num_nodes: 4"]


@pytest.mark.parametrize(
    ("num_devices", "lines"),
    [
        (8, ["devices: 8"]),
        (32, ["devices: 8  # of a node", "num_nodes: 4"]),
        (12, ["devices: 6  # of a node", "num_nodes: 2"]),
        (11, ["devices: 1  # of a node", "num_nodes: 11"]),
    ],
)
def test_litgpt_has_devices_of_a_node(num_devices: int, lines: list[str]) -> None:
    """More devices than a node has are several nodes, and read back as they were written."""
    layout = ParallelLayout(data_parallel=num_devices, zero_stage=3)
    text = write_format("litgpt-yaml", read_model("llama-2-7b").config, workload=Workload(), layout=layout)

    assert [line for line in text.splitlines() if line.startswith(("devices:", "num_nodes:"))] == lines
    assert parse_job(text).layout == {"data_parallel": num_devices, "zero_stage": 3}
