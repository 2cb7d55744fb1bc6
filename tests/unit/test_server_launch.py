"""Launch lines of serving plans, read by the recorded option lists of vLLM, SGLang and TensorRT-LLM.

server_grammars.json holds the arguments that a launch line needs, with types and choices, of the versions in
engines.toml; none of the engines can be installed without a GPU build of PyTorch.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import shapewright
from command_line import run as run_command
from shapewright.app.formats.servers.flags import layout_problem
from shapewright.app.formats.servers.launch import ENGINES, check_served, choose_expressible, find_engine, write_launch
from shapewright.core.errors import ConfigError, WorkloadError
from shapewright.optimize.serving.adapters import Adapters
from shapewright.optimize.serving.plan import ServingPlan
from shapewright.pricing.servers import server_names
from shapewright.workload.layout import ParallelLayout

GRAMMARS = json.loads(Path(__file__).with_name("server_grammars.json").read_text(encoding="utf-8"))
TYPES: dict[str, Any] = {"int": int, "float": float, "str": str, "json": json.loads}
SPECULATION = {"num_draft_tokens": 3, "acceptance_fraction": 0.7, "draft_cost_fraction": 0.1}

JOBS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dense": ("llama-3-8b", "h100-sxm-80gb", {"num_devices": 4, "usd_per_hour": 2.0, "requests_per_s": 5.0}),
    "fp8": ("llama-3-70b", "h200-sxm-141gb", {"num_devices": 8, "workload": {"dtype": "fp8"}, "cached_len": 200}),
    "int4": ("llama-3-70b", "h100-sxm-80gb", {"num_devices": 2, "workload": {"weight_dtype": "int4"}}),
    "drafts": ("llama-3.1-8b", "h100-sxm-80gb", {"num_devices": 2, "speculation": SPECULATION}),
    "adapters": ("llama-3-8b", "h100-sxm-80gb", {"num_devices": 2, "adapters": {"rank": 20, "num_resident": 4}}),
    "experts": ("mixtral-8x7b", "h100-sxm-80gb", {"num_devices": 8}),
    "nodes": ("deepseek-v3", "h100-sxm-80gb", {"num_devices": 16, "workload": {"dtype": "fp8"}}),
}


@cache
def make_plan(job: str) -> ServingPlan:
    """The plan of a job."""
    model, device, given = JOBS[job]
    return shapewright.serve_plan(model, device=device, prompt_len=1000, output_len=200, formats=[], **given)


def read_commands(engine: str, text: str) -> list[dict[str, Any]]:
    """Read the commands of a launch script as the engine's parser does; an argument that it does not take raises."""
    grammar = GRAMMARS[engine]
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    if engine != "sglang":
        parser.add_argument("model")
    for name, entry in grammar["arguments"].items():
        given = {**entry, **({"type": TYPES[entry["type"]]} if "type" in entry else {})}
        if given.get("action") == "BooleanOptionalAction":
            given["action"] = argparse.BooleanOptionalAction
        parser.add_argument(name, **given)
    without_files = re.sub(r"^cat > .*?^EOF$", "", text, flags=re.MULTILINE | re.DOTALL)
    found = []
    for line in without_files.replace("\\\n", " ").splitlines():
        words = shlex.split(re.sub(r"\$\(\(.*?\)\)|\$NODE_RANK", "0", line), comments=True)
        program = grammar["program"]
        starts = [index for index in range(len(words)) if words[index : index + len(program)] == program]
        if starts and "disaggregated" not in words:
            known, unknown = parser.parse_known_args(words[starts[0] + len(program) :])
            assert unknown == [], line
            found.append(vars(known))
    return found


def check_settings(text: str) -> list[dict[str, Any]]:
    """Check the YAML files that TensorRT-LLM reads against its recorded keys and types."""
    yaml = pytest.importorskip("yaml", reason="YAML files are read with PyYAML")
    types = {"bool": bool, "int": int, "str": str, "list": list, "float": float}
    found = re.findall(r"^cat > (\S+) <<'EOF'\n(.*?)^EOF$", text, re.M | re.S)
    files = [(GRAMMARS["trtllm"]["router" if name == "router.yaml" else "settings"], body) for name, body in found]
    loaded = [(grammar, yaml.safe_load(body)) for grammar, body in files]

    def check(values: dict[str, Any], grammar: dict[str, Any]) -> None:
        for key, value in values.items():
            expected = grammar[key]
            if isinstance(expected, dict):
                check(value, expected)
            elif isinstance(expected, list):
                assert value in expected
            else:
                assert type(value) is types[expected], key

    for grammar, values in loaded:
        check(values, grammar)
        for servers in (values.get("context_servers"), values.get("generation_servers")):
            assert servers is None or len(set(servers["urls"])) == servers["num_instances"]
    return [values for grammar, values in loaded if grammar is GRAMMARS["trtllm"]["settings"]]


def test_versions_agree() -> None:
    """The recorded option lists are of the versions that launch lines are written for, and plans are priced for."""
    for name in ENGINES:
        assert find_engine(name).version == GRAMMARS[name]["version"]
        assert find_engine(name).server_name in server_names()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("job", JOBS)
def test_lines_parse(engine: str, job: str) -> None:
    """Lines of points all over a plan are read without an unknown flag or value, for as many devices as planned."""
    plan = choose_expressible(make_plan(job), find_engine(engine))
    for point in plan.points[:: max(len(plan.points) // 15, 1)]:
        launch = write_launch(plan, engine, point)
        commands = read_commands(engine, launch.text)
        assert len(commands) == (1 if point.prefill_layout is None else 2)
        layouts = [point.layout] if point.prefill_layout is None else [point.prefill_layout, point.layout]
        for layout, found in zip(layouts, commands, strict=True):
            sizes = {
                "vllm": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
                "sglang": ("tp_size", "pp_size"),
                "trtllm": ("tp_size", "pp_size"),
            }[engine]
            devices = 1
            for size in sizes:
                devices *= found[size] or 1
            assert devices == layout.num_devices
        if engine == "trtllm":
            assert len(check_settings(launch.text)) == len(commands)


@pytest.mark.parametrize("version", ["0.10.2", *GRAMMARS["vllm"]["later"]])
def test_flags_are_of_the_version_of_the_server(version: str) -> None:
    """VLLM renamed the largest CUDA graph; a later version names the heading and is no difference from the plan."""
    renamed = GRAMMARS["vllm"]["later"].get(version, {})
    server = f"vllm-{version.rpartition('.')[0]}"
    plan = shapewright.serve_plan(
        "llama-3-8b", device="h200-sxm-141gb", prompt_len=100, output_len=100, formats=[], server=server
    )
    launch = write_launch(plan, "vllm", max(plan.points, key=lambda point: point.batch_size))

    assert launch.version == version
    assert launch.text.splitlines()[0].endswith(f"vLLM {version}")
    assert not any("priced for" in words for words in launch.warnings)
    assert renamed.get("--cuda-graph-sizes", "--cuda-graph-sizes") in launch.text


def test_another_version_than_that_of_the_flags_is_a_warning() -> None:
    """Option lists of vLLM 0.6 were not checked."""
    plan = shapewright.serve_plan(
        "llama-3-8b", device="h100-sxm-80gb", prompt_len=100, output_len=100, formats=[], server="vllm-0.6"
    )

    assert "the plan is priced for vLLM 0.6, and launched in vLLM 0.10.2" in write_launch(plan, "vllm").warnings


def test_flags_hold_what_the_plan_assumes() -> None:
    """Sequences, tokens of a pass, formats, memory, block and context of the plan are in vLLM's flags."""
    plan = make_plan("fp8")
    point = next(point for point in plan.points if point.prefill_layout is None and point.layout.pipeline_parallel == 2)
    (found,) = read_commands("vllm", write_launch(plan, "vllm", point).text)

    assert found["model"] == "meta-llama/Meta-Llama-3-70B"
    assert found["max_num_seqs"] == 2 * point.batch_size
    assert found["max_num_batched_tokens"] == point.prefill_tokens + point.batch_size
    assert (found["quantization"], found["kv_cache_dtype"], found["dtype"]) == ("fp8", "fp8", "bfloat16")
    assert (found["gpu_memory_utilization"], found["block_size"], found["max_model_len"]) == (0.9, 16, 1200)
    assert found["enable_prefix_caching"]
    assert found["enable_chunked_prefill"]


@pytest.mark.parametrize("is_mixed", [True, False])
def test_passes_of_sglang_hold_the_prompts_of_the_plan(*, is_mixed: bool) -> None:
    """SGLang takes the sequences that decode in a mixed pass off its limits of prompt tokens; prefill has none."""
    plan = shapewright.serve_plan(
        "llama-3-8b", device="h100-sxm-80gb", prompt_len=2048, output_len=600, num_devices=4, formats=[]
    )
    points = [one for one in plan.points if (one.prefill_layout is None) == is_mixed and one.layout.num_devices == 1]
    for point in sorted(points, key=lambda one: one.prefill_tokens)[:: len(points) - 1]:
        found = read_commands("sglang", write_launch(plan, "sglang", point).text)[0]
        decoding = point.batch_size if is_mixed else 0

        assert found["enable_mixed_chunk"] == is_mixed
        assert 0 <= found["chunked_prefill_size"] - decoding - point.prefill_tokens < 16
        # 16,384 by default; the last prompt of a pass must be below what is left.
        assert (found["max_prefill_tokens"] or 16384) - decoding > point.prefill_tokens


def test_replicated_attention_is_one_group_of_sglang_and_trtllm() -> None:
    """Groups: vLLM counts replicas beside the tensor group, the others all devices, and SGLang all sequences."""
    plan = make_plan("nodes")
    wide = ParallelLayout(data_parallel=16, expert_parallel=16, expert_tensor_parallel=None)
    point = next(point for point in plan.points if point.layout == wide and point.prefill_layout is None)
    (vllm,) = read_commands("vllm", write_launch(plan, "vllm", point).text)
    (sglang,) = read_commands("sglang", write_launch(plan, "sglang", point).text)
    (trtllm,) = read_commands("trtllm", write_launch(plan, "trtllm", point).text)

    assert (vllm["tensor_parallel_size"], vllm["data_parallel_size"], vllm["enable_expert_parallel"]) == (1, 16, True)
    assert (sglang["tp_size"], sglang["dp_size"], sglang["ep_size"], sglang["nnodes"]) == (16, 16, 16, 2)
    assert sglang["max_running_requests"] == 16 * vllm["max_num_seqs"] == 16 * point.batch_size
    assert (trtllm["tp_size"], trtllm["ep_size"], trtllm["max_batch_size"]) == (16, 16, point.batch_size)
    assert check_settings(write_launch(plan, "trtllm", point).text)[0]["enable_attention_dp"]


def test_memory_fractions_are_those_of_each_engine() -> None:
    """SGLang's is weights and cache, TensorRT-LLM's the cache in what is left: both below vLLM's 0.9."""
    plan = make_plan("dense")
    point = next(point for point in plan.points if point.prefill_layout is None and point.layout.num_devices == 1)
    (sglang,) = read_commands("sglang", write_launch(plan, "sglang", point).text)
    (trtllm,) = read_commands("trtllm", write_launch(plan, "trtllm", point).text)
    cache = plan.capacities[0].free_bytes

    assert 0.8 < sglang["mem_fraction_static"] < 0.9
    left = cache + 0.1 * plan.device.memory_bytes
    assert trtllm["kv_cache_free_gpu_memory_fraction"] == pytest.approx(cache / left, abs=0.01)


def test_sglang_leaves_memory_for_the_draft() -> None:
    """Its fraction is of the model's own weights and cache, beside which a draft of 10 % takes 10 % of both."""
    plan = make_plan("drafts")
    point = next(point for point in plan.points if point.prefill_layout is None and point.layout.num_devices == 1)
    (sglang,) = read_commands("sglang", write_launch(plan, "sglang", point).text)
    (capacity,) = (each for each in plan.capacities if each.layout == point.layout)
    both = (capacity.weights_bytes + capacity.free_bytes) / 1.1 / plan.device.memory_bytes

    # The pass of the point has a few tokens more or less than that of the capacity.
    assert sglang["mem_fraction_static"] == pytest.approx(both, abs=0.02)
    assert 1.1 * sglang["mem_fraction_static"] < 0.9


def test_the_cache_is_launched_with_the_memory_that_the_plan_gives_it() -> None:
    """TensorRT-LLM's 0.9 is of free memory: Llama-3-8B leaves 62.2 of 79.1 GiB, so vLLM must take (16.9 + 56.0) / 79.1.

    16.06 GB of weights, 0.9 GB of context and about 1.2 GB of a pass are 16.9 GiB.
    """
    plan = shapewright.serve_plan(
        "llama-3-8b", device="h100-sxm-80gb", prompt_len=1000, output_len=200, formats=[], server="trtllm-1.0"
    )
    point = next(point for point in plan.points if point.prefill_layout is None and point.layout.num_devices == 1)
    (trtllm,) = read_commands("trtllm", write_launch(plan, "trtllm", point).text)
    (vllm,) = read_commands("vllm", write_launch(plan, "vllm", point).text)

    assert trtllm["kv_cache_free_gpu_memory_fraction"] == 0.9
    assert vllm["gpu_memory_utilization"] == pytest.approx((16.9 + 56.0) / 79.1, abs=0.005)


def test_layouts_that_an_engine_cannot_have_are_left_out() -> None:
    """Experts in vLLM are on all devices or split by none; TensorRT-LLM either splits or replicates attention."""
    plan = make_plan("nodes")
    for name in ENGINES:
        engine = find_engine(name)
        kept = choose_expressible(plan, engine)
        assert not any(layout_problem(engine, point.layout) for point in kept.points)
        assert (len(kept.points) < len(plan.points)) == (name != "sglang")


def test_a_combination_that_is_not_supported_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """A given layout that vLLM cannot have is written with a warning, in the script and on stderr."""
    job = ["serve-plan", "mixtral-8x7b", "--device", "h100-sxm-80gb", "--isl", "1000", "--osl", "200", "--gpus", "8"]
    code, out, err = run_command(
        [*job, "--tp", "2", "--ep", "2", "--etp", "2", "--dp", "2", "--format", "vllm"], capsys
    )

    assert code == 0
    assert "# warning: vLLM 0.10.2 cannot have experts over EP 2 x ETP 2" in out
    assert "cannot have experts over EP 2 x ETP 2" in err


@pytest.mark.parametrize(
    ("job", "engine", "words"),
    [
        ("int4", "vllm", "only from a checkpoint"),
        ("fp8", "trtllm", "only from a checkpoint"),
        ("drafts", "sglang", "no mixed passes with speculative decoding"),
        ("drafts", "vllm", "replace DRAFT_MODEL"),
    ],
)
def test_differences_from_the_plan_are_warnings(job: str, engine: str, words: str) -> None:
    """What the engine needs or does otherwise is named; a quantized checkpoint needs nothing."""
    plan = make_plan(job)
    launch = write_launch(plan, engine, next(point for point in plan.points if point.prefill_layout is None))
    assert any(words in each for each in launch.warnings)
    assert not any("checkpoint" in each for each in write_launch(make_plan("nodes"), "trtllm").warnings)


@pytest.mark.parametrize(
    ("model", "dtype", "engine", "words"),
    [
        (
            "gpt-oss-20b",
            "bf16",
            "vllm",
            "gpt-oss-20b is a checkpoint in mxfp4 and served as such, not in bf16 as planned",
        ),
        ("gpt-oss-20b", "fp4", "vllm", ""),
        ("gpt-oss-20b", "fp4", "trtllm", ""),
        (
            "deepseek-v3",
            "bf16",
            "sglang",
            "DeepSeek-V3 is a checkpoint in fp8 and served as such, not in bf16 as planned",
        ),
        ("deepseek-v3", "fp8", "sglang", ""),
    ],
)
def test_a_checkpoint_is_served_in_its_own_format(model: str, dtype: str, engine: str, words: str) -> None:
    """Weights that are published in a narrow format need no other checkpoint, and cannot be served in 16 bits."""
    plan = shapewright.serve_plan(
        model, device="h200-sxm-141gb", prompt_len=1000, output_len=200, num_devices=16, formats=[],
        workload={"dtype": dtype},
    )  # fmt: skip
    found = [each for each in write_launch(plan, engine).warnings if "checkpoint" in each]

    assert len(found) == bool(words)
    assert all(words in each for each in found)


def test_the_page_holds_the_launch_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --html, the commands are on the page too."""
    page = tmp_path / "plan.html"
    job = ["serve-plan", "llama-3-8b", "--device", "h100-sxm-80gb", "--isl", "100", "--osl", "20", "--tp", "1"]
    code, out, _ = run_command([*job, "--gpus", "1", "--format", "vllm", "--html", str(page)], capsys)
    assert code == 0
    assert "--max-num-seqs" in out
    assert "--max-num-seqs" in page.read_text(encoding="utf-8")


def test_the_launch_lines_go_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With -o the report is printed beside the file, which holds what --format alone prints."""
    target = tmp_path / "launch.sh"
    job = ["serve-plan", "llama-3-8b", "--device", "h100-sxm-80gb", "--isl", "100", "--osl", "20", "--gpus", "1"]
    _, printed, _ = run_command([*job, "--format", "vllm"], capsys)
    code, report, err = run_command([*job, "--format", "vllm", "-o", str(target)], capsys)

    assert (code, target.read_text(encoding="utf-8")) == (0, printed)
    assert "recommended" in report
    assert err.startswith(f"wrote {target}\n")
    assert "-o has no effect without --format" in run_command([*job, "-o", str(target)], capsys)[2]


def test_adapters_are_in_the_lines_of_every_engine() -> None:
    """Rank and number of adapters; vLLM has ranks in steps, SGLang needs the modules, TensorRT-LLM a YAML key."""
    plan = make_plan("adapters")
    (vllm,) = read_commands("vllm", write_launch(plan, "vllm", plan.points[0]).text)
    (sglang,) = read_commands("sglang", write_launch(plan, "sglang", plan.points[0]).text)
    (trtllm,) = check_settings(write_launch(plan, "trtllm", plan.points[0]).text)

    assert (vllm["enable_lora"], vllm["max_loras"], vllm["max_lora_rank"]) == (True, 4, 32)
    assert (sglang["max_loras_per_batch"], sglang["max_lora_rank"], len(sglang["lora_target_modules"])) == (4, 20, 7)
    assert trtllm["lora_config"] == {"max_lora_rank": 20, "max_loras": 4, "max_cpu_loras": 4}
    large = replace(plan, request=replace(plan.request, adapters=Adapters(rank=1024, num_resident=1)))
    with pytest.raises(WorkloadError, match="adapters of rank 512 at most, not 1024"):
        write_launch(large, "vllm", plan.points[0])


def test_the_lines_say_what_is_predicted_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """The second line has the numbers of the recommended point, and how many of its units the devices hold."""
    question = ["llama-3-8b", "--device", "h100-sxm-80gb", "--isl", "1000", "--osl", "200", "--gpus", "8", "--tp", "2"]
    _, out, _ = run_command(["serve-plan", *question, "--formats", "none", "--format", "vllm", "--json"], capsys)
    facts = json.loads(out)
    point = facts["recommended"]
    line = facts["launch"]["text"].splitlines()[1]

    assert line.startswith(f"# predicted for {point['num_devices']} GPUs: {point['num_sequences']} sequences, first ")
    per_token_ms = float(re.search(r"per token ([\d.]+) ms", line)[1])  # type: ignore[index]
    assert per_token_ms == pytest.approx(1e3 * point["tpot_s"], rel=0.01)
    assert f" {point['tokens_per_s_per_device']:,.0f} tokens/s per GPU" in line
    assert line.endswith(f"; {8 // point['num_devices']} times that on 8")


def test_fleet_is_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Launch lines state the number of instances for the load, with the spare one; JSON has them too."""
    job = ["serve-plan", "llama-3-8b", "--device", "h100-sxm-80gb", "--isl", "1000", "--osl", "200", "--tp", "1"]
    job += ["--tpot", "20ms", "--load", "30/s", "--formats", "none"]
    code, out, _ = run_command([*job, "--format", "sglang", "--json"], capsys)
    facts = json.loads(out)
    total = facts["fleet"]["num_instances"] + facts["fleet"]["num_spare_instances"]

    assert code == 0
    assert facts["server"]["name"] == "sglang-0.5"
    assert f"# {total} instances of 1 GPU for 30 requests/s, 1 spare" in facts["launch"]["text"]
    assert facts["launch"]["version"] == GRAMMARS["sglang"]["version"]


def test_models_from_folders_are_launched_from_them(tmp_path: Path) -> None:
    """The folder of a config.json is the checkpoint, quoted where it needs to be."""
    folder = tmp_path / "my model"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    config |= {"vocab_size": 32000, "intermediate_size": 4096}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    plan = shapewright.serve_plan(
        folder, device="h100-sxm-80gb", prompt_len=100, output_len=20, formats=[], layout={"tensor_parallel": 1}
    )
    assert f"vllm serve '{folder}'" in write_launch(plan, "vllm").text


@pytest.mark.parametrize(
    ("model", "given", "engine", "words"),
    [
        ("gpt-neo-2.7b", {}, "vllm", "vLLM 0.10.2 does not know model_type='gpt_neo'"),
        ("gpt2", {}, "trtllm", "does not know model_type='gpt2'; choose format vllm or sglang"),
        ("llama-3-8b", {"workload": {"dtype": "int8"}}, "trtllm", "TensorRT-LLM 1.0 does not know the format int8"),
        ("llama-3-8b", {"workload": {"kv_cache_dtype": "int4"}}, "vllm", "does not know kv_cache_dtype='int4'"),
        ("llama-3-8b", {"tpot_limit_s": 1e-6}, "vllm", "no point keeps the limits"),
    ],
)
def test_unsupported_by_an_engine_is_an_error(model: str, given: dict[str, Any], engine: str, words: str) -> None:
    """Models, formats and caches that an engine does not support are errors that name it and its version."""
    lengths: dict[str, Any] = {"prompt_len": 100, "output_len": 20, "formats": [], "layout": {"tensor_parallel": 1}}
    plan = shapewright.serve_plan(model, device="h100-sxm-80gb", **lengths, **given)
    with pytest.raises((ConfigError, WorkloadError), match=re.escape(words)):
        write_launch(plan, engine)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpt-neo-2.7b", "--format", "vllm"], "does not know model_type='gpt_neo'"),
        (["llama-3-8b", "--format", "tgi"], "unknown format 'tgi'"),
        (["llama-3-8b", "--format", "vllm", "--server", "sglang-0.5"], "different engines"),
        (
            [
                "--hidden-size",
                "1024",
                "--num-layers",
                "2",
                "--num-heads",
                "8",
                "--vocab-size",
                "100",
                "--format",
                "vllm",
            ],
            "flags",
        ),
    ],
)
def test_bad_launches_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    job = ["serve-plan", *arguments, "--device", "h100-sxm-80gb", "--isl", "100", "--osl", "20", "--tp", "1"]
    code, out, err = run_command(job, capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("name", ["my model's", "--trust-remote-code", "-x; touch y"])
def test_folders_reach_every_engine_as_one_argument(
    name: str, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A shell gives the engine the folder as it is named, once quoted, and not as an option."""
    config = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(
        json.dumps({**config, "intermediate_size": 4096, "vocab_size": 32000}), encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ["serve-plan", f"./{name}", "--device", "h100-sxm-80gb", "--isl", "100", "--osl", "20"]
    _, out, err = run_command([*arguments, "--format", engine], capsys)
    before = {"vllm": "serve", "sglang": "--model-path", "trtllm": "trtllm-serve"}[engine]
    lines = [shlex.split(line) for line in out.replace("\\\n", " ").splitlines() if before in line and line[0] != "#"]

    assert lines, err
    folder = f"./{name}" if name.startswith("-") else name
    assert {words[words.index(before) + 1] for words in lines} - {"disaggregated"} == {folder}


@pytest.mark.parametrize("images", [0, 2])
def test_vllm_allows_the_images_of_a_prompt(images: int) -> None:
    """A plan with images limits a prompt to them; SGLang and plans without images need no flag."""
    plan = shapewright.serve_plan(
        "qwen2.5-vl-7b", device="h100-sxm-80gb", prompt_len=2000, output_len=200, num_devices=1, formats=[],
        workload={"images": images},
    )  # fmt: skip
    point = plan.best()
    assert point is not None
    (command,) = read_commands("vllm", write_launch(plan, "vllm", point).text)

    assert command["limit_mm_per_prompt"] == ({"image": images} if images else None)
    assert "mm" not in write_launch(plan, "sglang", point).text


@pytest.mark.parametrize(("device", "kind"), [("mi300x", "devices of AMD"), ("t4", "turing devices")])
def test_tensorrt_llm_runs_on_nvidia_from_ampere_alone(device: str, kind: str) -> None:
    """Launch lines for other devices are refused, and times of the engine there have a note."""
    job: dict[str, Any] = {"prompt_len": 1000, "output_len": 200, "num_devices": 1, "formats": []}
    found, on_nvidia = (
        shapewright.serve_plan("qwen3-0.6b", device=each, server="trtllm-1.0", **job)
        for each in (device, "h100-sxm-80gb")
    )
    words = f"does not run on {kind}"

    assert any(words in note for note in found.notes)
    assert not any(words in note for note in on_nvidia.notes)
    with pytest.raises(ConfigError, match=f"TensorRT-LLM {words}, such as {device}; choose format vllm or sglang$"):
        check_served(find_engine("trtllm"), found.scenario)


def test_unfused_attention_of_a_plan_has_a_note() -> None:
    """Engines have paged attention where libraries have no fused one; who asks for unfused attention knows."""
    job: dict[str, Any] = {"prompt_len": 500, "output_len": 200, "num_devices": 1, "formats": []}
    found, asked, fused = (
        shapewright.serve_plan("qwen3-0.6b", device=device, workload=workload, **job)
        for device, workload in (("t4", {}), ("t4", {"attention": "unfused"}), ("l4", {}))
    )
    words = "paged attention of engines reads them once"

    assert [any(words in note for note in plan.notes) for plan in (found, asked, fused)] == [True, False, False]


def test_a_checkpoint_in_mxfp4_is_compared_in_it() -> None:
    """gpt-oss-120b in 16 bits takes four H100s; its own checkpoint fits on one, as it was published to do."""
    job: dict[str, Any] = {"device": "h100-sxm-80gb", "prompt_len": 1000, "output_len": 200}
    with pytest.raises(WorkloadError, match=r"does not fit on 1 x h100-sxm-80gb .* or .*fp4.*, which fits"):
        shapewright.serve_plan("gpt-oss-120b", num_devices=1, **job)
    plan = shapewright.serve_plan("gpt-oss-120b", num_devices=4, **job)

    assert [one.format.name for one in plan.capacities if one.layout.num_devices == 1] == ["bf16:fp4"]
