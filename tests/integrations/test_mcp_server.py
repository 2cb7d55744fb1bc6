"""The MCP server, through the client of the official SDK."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest

pytest.importorskip("mcp", reason="the MCP server needs the mcp extra")

from mcp import Client, StdioServerParameters, stdio_client

import shapewright
from shapewright.app.api.steps import predict
from shapewright.app.integrations.mcp_inputs import MAX_CONFIG_BYTES, Access
from shapewright.app.integrations.mcp_server import make_server
from shapewright.core.child_process import child_environment
from shapewright.hardware.loader import list_devices

H100 = {"device": "h100-sxm-80gb"}
TINY = {
    "model_type": "llama", "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8,
    "intermediate_size": 1376, "vocab_size": 32003,
}  # fmt: skip
Result = TypeVar("Result")
TOOLS = ("check", "predict", "search", "design", "plan", "serve_plan")


def run_apart(talk: Coroutine[Any, Any, Result]) -> Result:
    """Run a conversation in a thread of its own: the browser's tests keep an event loop running in this one."""
    with ThreadPoolExecutor(max_workers=1) as threads:
        return threads.submit(asyncio.run, talk).result()


def call(tool: str, access: Access | None = None, **arguments: Any) -> tuple[bool, str]:
    """Call a tool of a server in this process; return whether it failed, and its text."""

    async def talk() -> tuple[bool, str]:
        async with Client(make_server(access or Access())) as client:
            result = await client.call_tool(tool, arguments)
            return bool(result.is_error), result.content[0].text

    return run_apart(talk())


def answer(tool: str, access: Access | None = None, **arguments: Any) -> dict[str, Any]:
    """Answer of a tool that succeeds."""
    failed, text = call(tool, access, **arguments)
    assert not failed, text
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def test_server_speaks_over_standard_input_and_output(tmp_path: Path) -> None:
    """The command of .mcp.json lists six typed tools, reads a file under its root, and answers in few words."""
    example = json.loads((Path(__file__).parents[2] / ".mcp.json").read_text(encoding="utf-8"))["mcpServers"]
    assert example["shapewright"] == {"command": "shapewright", "args": ["mcp", "--root", "."]}
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    command = ["-m", "shapewright", *example["shapewright"]["args"]]
    server = StdioServerParameters(command=sys.executable, args=command, env=child_environment(), cwd=tmp_path)

    async def talk() -> tuple[Any, Any]:
        async with Client(stdio_client(server)) as client:
            return await client.list_tools(), await client.call_tool("check", {"config": "config.json", **H100})

    listed, result = run_apart(talk())
    schemas = {tool.name: tool.input_schema for tool in listed.tools}
    text = result.content[0].text

    assert tuple(schemas) == TOOLS
    assert {"device"} <= set.intersection(*(set(schema["required"]) for schema in schemas.values()))
    assert schemas["predict"]["$defs"]["TransformerConfigFields"]["properties"]["hidden_size"]["type"] == "integer"
    assert schemas["predict"]["$defs"]["WorkloadFields"]["properties"]["phase"]["enum"] == [
        "train",
        "prefill",
        "decode",
    ]
    assert all(len(json.dumps(schema)) < 8000 for schema in schemas.values())
    assert not result.is_error, text
    assert "TC101" in json.loads(text)["answer"]
    assert len(text) < 5000


def test_prediction_is_that_of_the_library() -> None:
    """Fields, workload and layout reach the prediction; numbers are rounded to four digits."""
    workload, layout = {"phase": "decode", "context_len": 512}, {"tensor_parallel": 2}
    found = answer("predict", config="llama-3-8b", model={"num_layers": 4}, workload=workload, layout=layout, **H100)
    own = predict("llama-3-8b", device=H100["device"], overrides={"num_layers": 4}, workload=workload, layout=layout)

    assert found["step_time_s"] == pytest.approx(own.step_time_s, rel=5e-4)
    assert found["memory"]["fits"] is True
    assert len(found["slowest_operations"]) == 5


@pytest.mark.parametrize(
    ("tool", "arguments", "key"),
    [
        ("search", {"config": "gpt3-125m", "keep": {"num_layers": 12}, "top": 2}, "verdict"),
        ("design", {"num_devices": 2, "num_parameters": 125e6, "train_tokens": 1e9, "top": 2}, "config_json"),
        ("plan", {"config": "gpt2", "num_devices": 2, "global_batch_size": 16}, "plans"),
        ("serve_plan", {"config": TINY, "prompt_len": 100, "output_len": 20}, "best"),
    ],
)
def test_tools_that_search_answer_shortly(tool: str, arguments: dict[str, Any], key: str) -> None:
    """Each gives the answer in words, its main key, and no more text than an agent can take."""
    found = answer(tool, **arguments, **H100)

    assert found["answer"]
    assert found[key]
    assert len(json.dumps(found)) < 8000


def test_files_outside_of_the_roots_are_not_read(tmp_path: Path) -> None:
    """Paths count from the root; links out of it, parents, absolute paths and device files are refused."""
    inside, outside = tmp_path / "inside", tmp_path / "outside.json"
    inside.mkdir()
    for file in (outside, inside / "config.json"):
        file.write_text(json.dumps(TINY), encoding="utf-8")
    (inside / "link.json").symlink_to(outside)
    access = Access((inside.resolve(),))

    for allowed in ("config.json", ".", str(inside / "config.json")):
        assert answer("predict", access, config=allowed, **H100)["parameters"]
    for config in ("link.json", "../outside.json", str(outside), "/etc/passwd", "organization/name", "a\0b"):
        failed, text = call("predict", access, config=config, **H100)
        assert failed
        assert "no file that this server may read" in text
    assert call("predict", config="config.json", **H100)[0]
    assert "unknown device" in call("predict", config="gpt2", device=str(outside))[1]


def test_limits_end_a_call() -> None:
    """A call that takes too long, and a config that is too large, are refused in one line."""
    failed, text = call("search", Access(limit_s=1e-3), config="llama-3-8b", **H100)
    assert failed
    assert "0.001 s" in text
    assert text.count("\n") == 0
    failed, text = call("predict", config={**TINY, "x": "y" * MAX_CONFIG_BYTES}, **H100)
    assert failed
    assert "256 KiB" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"config": "gpt2", "model": {"hiden_size": 3}}, "did you mean 'hidden_size'"),
        ({"config": "gpt2", "layout": {"tensor_parallel": 5}}, "num_heads=12"),
        ({"config": "gpt2", "workload": {"seq_len": "many"}}, "workload.seq_len"),
        ({"model": "gpt2"}, "goes into `config`"),
        ({}, "hidden_size"),
    ],
)
def test_errors_are_those_of_the_library(arguments: dict[str, Any], words: str) -> None:
    """An agent reads what is wrong and what is allowed."""
    failed, text = call("predict", **arguments, **H100)

    assert failed
    assert words in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hidden_size": 4097}, "unknown argument 'hidden_size'; give it inside `model`"),
        ({"seq_len": 4096}, "unknown argument 'seq_len'; give it inside `workload`"),
        ({"tensor_parallel": 2}, "unknown argument 'tensor_parallel'; give it inside `layout`"),
        ({"devices": 2}, "unknown argument 'devices'; did you mean 'device'?"),
        ({"zzz": 2}, "unknown argument 'zzz'; allowed: device, config, model, "),
    ],
)
def test_unknown_arguments_are_refused(arguments: dict[str, Any], words: str) -> None:
    """No argument is ignored, and the message says where a field belongs."""
    failed, text = call("predict", config="llama-3-8b", **{**H100, **arguments})

    assert failed
    assert words in text


def test_sizes_may_be_texts() -> None:
    """Sizes and tokens are read as on the command line, and other texts are refused."""
    small: dict[str, Any] = {**H100, "num_devices": 1, "num_parameters": "50m"}
    as_text, as_number = answer("design", **small, train_tokens="0.4b"), answer("design", **small, train_tokens=4e8)
    failed, words = call("design", **small, train_tokens="many")

    assert as_text == as_number
    assert failed
    assert "train_tokens" in words


def test_names_that_do_not_exist_have_similar_ones() -> None:
    """An agent has no other tool to look names up: devices are listed, and presets of a similar name suggested."""
    failed, text = call("predict", config="lama-3-8b", **H100)
    assert failed
    assert "did you mean 'llama-3-8b'" in text

    failed, text = call("predict", config="gpt2", device="mi300")
    assert failed
    assert "unknown device 'mi300'; did you mean 'mi300x'" in text
    assert text.endswith(f"devices: {', '.join(list_devices())}")


def test_a_name_of_several_boards_is_noted() -> None:
    """The answer says which of them it is for, as on the command line."""
    (note, *_) = answer("plan", config="gpt2", device="h100", num_devices=1, global_batch_size=8)["notes"]

    assert note.startswith("h100 is taken for h100-sxm-80gb; there are also ")


def test_missing_and_invalid_arguments_are_named_in_one_line() -> None:
    """Without the SDK's own words on validation."""
    failed, text = call("plan", config="llama-3-8b", **H100, num_devices="many")

    assert failed
    assert text.endswith(
        "num_devices='many': Input should be a valid integer, unable to parse string as an integer; "
        "global_batch_size is missing"
    )
    assert "\n" not in text


def test_serving_answers_with_the_recommended_point() -> None:
    """The answer is the point that the command line recommends, not that with most tokens/s at any speed."""
    job: dict[str, Any] = {"prompt_len": 1000, "output_len": 200}
    plan = shapewright.serve_plan("llama-3-8b", **H100, **job)
    assert plan.recommended is not None
    found = answer("serve_plan", config="llama-3-8b", **H100, **job)

    assert found["recommended"]["batch_size"] == plan.recommended.point.batch_size
    assert f"batch {plan.recommended.point.batch_size}: first token" in found["answer"]
