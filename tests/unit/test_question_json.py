"""JSON output contains the complete scenario, enough to repeat the prediction."""

from __future__ import annotations

import json
from typing import Any

import pytest

import shapewright
from command_line import run
from shapewright.models.transformer import TransformerConfig

# A knob of every kind, most of them off their default.
JOB = (
    *("gpt-oss-20b", "--device", "h100-sxm-80gb", "--node-size", "4", "--network-gbit-per-s", "200"),
    *("--tp", "2", "--ep", "4", "--etp", "1", "--dp", "4", "--zero-stage", "1"),
    *("--dtype", "fp8", "--micro-batch-size", "1", "--global-batch", "16", "--loss-chunks", "2"),
    *("--recompute", "selective", "--recompute-modules", "moe_act,layernorm"),
    *("--no-fused-experts", "--no-narrow-dispatch"),
)
NODES = {"node_size": 4, "inter_node_bandwidth_bytes_per_s": 25e9}


def answer(command: str, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    """Return the JSON that a command prints for the job."""
    facts: dict[str, Any] = json.loads(run([command, *JOB, *more, "--json"], capsys)[1])
    return facts


def ask_again(facts: dict[str, Any]) -> float:
    """Step of the question that an answer states. [s]"""
    config = {name: tuple(value) if isinstance(value, list) else value for name, value in facts["config"].items()}
    layout = {name: value for name, value in facts["layout"].items() if name != "num_devices"}
    device = facts["device"]
    nodes = {name: device[name] for name in NODES}
    return shapewright.predict(
        TransformerConfig(**config),
        device=shapewright.with_nodes(device["name"], **nodes),
        workload=facts["workload"],
        layout=layout,
    ).step_time_s


@pytest.mark.parametrize("command", ["predict", "check", "memory"])
def test_answers_contain_the_complete_scenario(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A prediction repeated from its JSON alone is equal to the last digit."""
    facts = answer(command, capsys)

    assert facts["workload"]["recompute_modules"] == "layernorm,moe_act"
    assert ask_again(facts) == answer("predict", capsys)["step_time_s"]


def test_answers_state_the_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """The device of mfu and of a sweep, as that of the others, has the nodes that were given."""
    mfu = answer("mfu", capsys, "--seconds", "1", "--gpus", "8")
    sweep = answer("predict", capsys, "--sweep", "micro_batch_size=1,2")

    for facts in (mfu, sweep):
        assert {name: facts["device"][name] for name in NODES} == NODES
