"""Launch lines of inference engines: what is written is read back, and scripts with several instances."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import run
from shapewright.app.formats.registry import parse_job, read_job
from shapewright.core.errors import ConfigError

INSTANCES = """\
# 2 prefill instances of 4 GPUs
vllm serve some/model --port 8100 --tensor-parallel-size 1 --pipeline-parallel-size 4 --max-model-len 4200 \\
  --max-num-seqs 8 --dtype bfloat16

# decode instance of 8 GPUs
vllm serve some/model --port 8200 --tensor-parallel-size 8 --max-model-len 4200 --max-num-seqs 24 --dtype bfloat16
"""
PREFILL = {"phase": "prefill", "seq_len": 4200, "micro_batch_size": 2, "dtype": "bf16"}
DECODE = {"phase": "decode", "context_len": 4200, "micro_batch_size": 24, "dtype": "bf16"}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (INSTANCES, ("prefill", "decode")),
        (
            INSTANCES.replace("8100", """8100 --kv-transfer-config '{"kv_role": "kv_producer"}'""").replace("#", "##"),
            ("prefill", "2"),
        ),
        (
            INSTANCES.replace("vllm serve", "python -m sglang.launch_server --model-path").replace("#", "##")
            .replace("max-num-seqs", "max-running-requests").replace("max-model-len", "context-length")
            .replace("8100", "8100 --disaggregation-mode prefill").replace("8200", "8200 --disaggregation-mode decode")
            .replace("pipeline-parallel-size", "pp-size"),
            ("prefill", "decode"),
        ),
    ],
)  # fmt: skip
def test_each_instance_of_a_launch_script_is_read(text: str, names: tuple[str, str], tmp_path: Path) -> None:
    """The instance that decodes is taken unless another is asked for, and a note says how to get the other."""
    path = tmp_path / "launch.sh"
    path.write_text(text, encoding="utf-8")
    prefill, decode = (read_job(f"{path}::{name}") for name in names)

    assert (prefill.workload, prefill.layout["pipeline_parallel"]) == (PREFILL, 4)
    assert (decode.workload, decode.layout["tensor_parallel"], decode.model) == (DECODE, 8, "some/model")
    taken, other = (names[1], names[0]) if "decode" in names else names
    assert read_job(path).unread[0] == f"instance {other} (FILE::{other}; this is instance {taken})"
    with pytest.raises(ConfigError, match=", ".join(names)):
        read_job(f"{path}::3")


def test_an_older_entry_point_of_vllm_is_read() -> None:
    """Its model is an option."""
    found = parse_job("M=a/b\npython -m vllm.entrypoints.openai.api_server --model $M --tensor-parallel-size ${TP:-4}")

    assert (found.model, found.layout) == ("a/b", {"tensor_parallel": 4})


@pytest.mark.parametrize(
    ("flags", "unread"),
    [
        ("--quantization bitsandbytes", ("quantization=bitsandbytes",)),
        (
            "--quantization compressed-tensors --kv-cache-dtype nvfp4",
            ("quantization=compressed-tensors", "kv_cache_dtype=nvfp4"),
        ),
        ("--quantization awq --kv-cache-dtype fp8_e5m2", ()),
        ("--kv-cache-dtype bfloat16", ()),
    ],
)
def test_formats_that_are_not_priced_are_named(flags: str, unread: tuple[str, ...]) -> None:
    """Weights of a method whose bits only the checkpoint says would be priced as 16 bits without a word."""
    assert parse_job(f"vllm serve a/b {flags}").unread == unread


def test_long_names_of_degrees_of_sglang() -> None:
    """server_args.py has two or three names of each."""
    long = "--tensor-parallel-size 8 --pipeline-parallel-size 2 --data-parallel-size 4 --expert-parallel-size 8"
    found = parse_job(f"python -m sglang.launch_server --model-path a/b {long}")

    assert (
        found.layout == parse_job("python -m sglang.launch_server --model-path a/b --tp 8 --pp 2 --dp 4 --ep 8").layout
    )
    assert found.unread == ()


@pytest.mark.parametrize(("engine", "spare"), [("vllm", 0), ("sglang", 8)])
def test_launch_lines_are_read_back(engine: str, spare: int, capsys: pytest.CaptureFixture[str]) -> None:
    """The line that serve-plan writes gives its model, layout, lengths and formats back; the rest is named."""
    question = ["llama-3-8b", "--device", "h100-sxm-80gb", "--isl", "1000", "--osl", "200", "--gpus", "2"]
    code, out, _ = run(["serve-plan", *question, "--tp", "2", "--pp", "1", "--format", engine], capsys)
    found = parse_job(out)

    assert code == 0
    assert found.format == engine
    assert found.model == "meta-llama/Meta-Llama-3-8B"
    assert {"tensor_parallel": 2, "pipeline_parallel": 1}.items() <= found.layout.items()
    assert (found.workload["context_len"], found.workload["dtype"]) == (1200 + spare, "bf16")
    assert "port" in found.unread
