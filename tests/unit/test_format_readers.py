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
from shapewright.app.formats.registry import (
    FORMATS,
    READERS,
    RUN_FORMATS,
    is_job_file,
    parse_job,
    read_job,
    write_format,
)
from shapewright.core.errors import ConfigError, ShapewrightError
from shapewright.models.read import list_presets, read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.models.write import untimed_values
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload
from trainer_texts import LITGPT, MEGATRON_LOG, MEGATRON_SCRIPT, NANOGPT, NEOX, TITAN_FLAVORS

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


def test_unread_keys_are_named() -> None:
    """Keys that predictions do not use are listed, not dropped silently."""
    assert "lr" in parse_job(MEGATRON_SCRIPT).unread
    assert "optimizer" in parse_job(NEOX).unread
    assert {"out_dir", "wandb_log"} <= set(parse_job(NANOGPT).unread)


@pytest.mark.parametrize(
    "text",
    ["n_layer: int = 24\nn_embd = 1024", "n_layer, n_embd = 24, 1024", "n_layer = depth = 24\nn_embd = 1024"],
)
def test_any_literal_assignment_of_nanogpt_is_read(text: str) -> None:
    """Assignments with a type, of tuples and of several names set sizes; the defaults were taken in their place."""
    found = parse_job(f"n_head = 16\n{text}\nblock_size = 512")

    assert [found.fields[name] for name in ("num_layers", "num_heads", "hidden_size")] == [24, 16, 1024]


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("n_layer *= 2", "n_layer"),
        ("if True:\n    n_embd = 1600", "n_embd"),
        ("n_embd = 64 * n_head", "n_embd"),
        ("for n_layer in (24, 48):\n    pass", "n_layer"),
        ("n_head, batch_size = sizes()", "n_head"),
    ],
)
def test_sizes_of_nanogpt_that_need_a_run_are_refused(line: str, name: str) -> None:
    """A size that a condition, loop or expression sets is an error, not the default or an earlier value in silence."""
    with pytest.raises(ConfigError, match=rf"{name} is set by a statement that is not run \(line 3\)"):
        parse_job(f"n_layer = 12\nn_head = 12\n{line}")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.args", "--swiglu --num-layers 2 --hidden-size 512 --num-attention-heads 8 --vocab-size 1000"),
        ("a.py", "n_layer = 2\nn_embd = 512\nn_head = 8"),
        ("a.json", '{"num-layers": 2, "hidden-size": 512, "num-attention-heads": 8}'),
    ],
)
def test_a_byte_order_mark_changes_nothing(name: str, text: str, tmp_path: Path) -> None:
    """Editors on Windows begin a file with a mark: the first argument of a list was dropped with it, in silence."""
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    plain = read_job(path)
    path.write_text(text, encoding="utf-8-sig")

    assert is_job_file(path)
    assert read_job(path) == plain
    assert plain.fields["num_layers"] == 2
    assert plain.fields.get("gated_mlp", False) == (name == "a.args")


def test_what_may_set_names_of_nanogpt_is_named() -> None:
    """Other names that are set by what is not run, and functions that may set any name, are listed as unread."""
    text = "n_layer = 12\ngradient_accumulation_steps //= 2\nexec(open('configurator.py').read())"

    assert set(parse_job(text).unread) == {"gradient_accumulation_steps", "exec(...)"}


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


def test_litgpt_needs_a_block_size(tmp_path: Path) -> None:
    """It is the length of the sequences of a training that gives none."""
    path = tmp_path / "train.yaml"
    path.write_text("model_config:\n  n_layer: 2\n  block_size: 0\ntrain:\n  micro_batch_size: 1\n")
    with pytest.raises(ConfigError, match="block_size=0 must be a whole number above 0"):
        read_job(str(path))
