"""Keys and defaults of trainers' files mean what the code of each trainer takes them for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shapewright
from command_line import run
from shapewright.app.formats.registry import parse_job, read_job
from trainer_texts import LITGPT_RUN, MEGATRON_LOG, MEGATRON_SCRIPT, NEOX, SMALL_MEGATRON, TITAN_JOB

pytest.importorskip("yaml", reason="YAML files need the yaml extra")


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


def test_a_file_without_replicas_leaves_the_guess_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Arguments that state a tensor degree alone say nothing about the 16 replicas guessed from a config of NeoX."""
    monkeypatch.chdir(tmp_path)
    sizes = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 2048}
    batch = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "precision": "bfloat16"}
    lines = [f"{name}: {value}" for name, value in {**sizes, "max_position_embeddings": 2048, **batch}.items()]
    Path("neox.yml").write_text("\n".join(lines), encoding="utf-8")
    Path("arguments.sh").write_text("--tensor-model-parallel-size 2 --micro-batch-size 4", encoding="utf-8")
    question = ["predict", "neox.yml", "--vocab-size", "50176", "--device", "h100-sxm-80gb"]
    code, out, err = run([*question, "--layout-from", "arguments.sh"], capsys)

    assert code == 0
    assert "data_parallel=16 is assumed" in out + err


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
