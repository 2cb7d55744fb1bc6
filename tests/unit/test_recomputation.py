"""Parts of layers that selective recomputation takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shapewright.config import TransformerConfig, read_model
from shapewright.errors import WorkloadError
from shapewright.formats import write_format
from shapewright.hardware import load_device
from shapewright.layout import ParallelLayout
from shapewright.lowering import lower
from shapewright.memory import estimate_memory
from shapewright.predict import predict
from shapewright.question import ask
from shapewright.recomputation import CORE, MODULES
from shapewright.saved_tensors import keep_tensors, list_saved_tensors
from shapewright.workload import Workload

DEEPSEEK = replace(read_model("deepseek-v2-lite").config, num_layers=2)
PLAIN = Workload(seq_len=512)
KEPT_BY_EXPERTS = ("expert.input", "expert.activation_input", "expert.up_output")


def taking(modules: str) -> Workload:
    """A step that computes these parts again."""
    return replace(PLAIN, recompute="selective", recompute_modules=modules)


def again(modules: str, config: TransformerConfig = DEEPSEEK) -> set[str]:
    """Operations that run again."""
    return {each.name for each in lower(config, taking(modules), ParallelLayout()) if each.pass_name == "recompute"}


@pytest.mark.parametrize(
    ("modules", "operations"),
    [
        ("core_attn", {"attention.fused"}),
        ("layernorm", {"norm"}),
        ("mla_up_proj", {"attention.kv_b"}),
        ("moe_act", {"moe.activation"}),
        ("mlp", {"mlp.gate", "mlp.up", "mlp.activation", "mlp.down"}),
        ("layernorm,moe_act", {"norm", "moe.activation"}),
    ],
)
def test_parts_run_again(modules: str, operations: set[str]) -> None:
    """Each part's operations, and no others; DeepSeek-V2-Lite compresses keys and values alone."""
    assert again(modules) == operations


def test_experts_run_again_with_their_exchange() -> None:
    """The whole block: router, rows sent and received, products."""
    layout = ParallelLayout(data_parallel=4, expert_parallel=4)
    names = {
        each.name.split(".")[0] + "." + each.name.split(".")[1]
        for each in lower(DEEPSEEK, taking("moe"), layout)
        if each.pass_name == "recompute"
    }
    assert {"moe.router", "moe.dispatch", "moe.gate_up", "moe.down", "moe.combine", "shared_expert.down"} <= names
    assert not any(name.startswith(("attention", "norm", "mlp")) for name in names)


def test_an_activation_computed_again_is_not_kept() -> None:
    """Experts keep the rows that came and what is activated; what the second product reads is made again."""
    tensors = list_saved_tensors(DEEPSEEK, PLAIN, ParallelLayout(), has_experts=True)
    kept = {
        tensor.name for tensor in keep_tensors(tensors, "selective", "moe_act") if tensor.name.startswith("expert.")
    }
    assert kept == set(KEPT_BY_EXPERTS)
    assert "expert.down_input" in {tensor.name for tensor in tensors}


@pytest.mark.parametrize("modules", MODULES)
def test_every_part_saves_or_costs_nothing(modules: str) -> None:
    """No part makes a step need more; each but the fused core, whose scores nobody keeps, makes it need less."""
    layout = ParallelLayout()
    whole, part = (estimate_memory(DEEPSEEK, each, layout).activations_bytes for each in (PLAIN, taking(modules)))
    assert part < whole or (modules == CORE and part == whole)


def test_what_runs_again_takes_its_time() -> None:
    """The more parts, the longer the step."""
    device = load_device("h100-sxm-80gb")
    steps = [
        predict(DEEPSEEK, device=device, workload=taking(modules)).step_time_s
        for modules in ("layernorm", "layernorm,moe_act", "layernorm,moe_act,mla_up_proj")
    ]
    assert steps == sorted(set(steps))


def test_names_are_sorted_and_said() -> None:
    """Any order and blanks will do; words name the parts where they are not the usual one."""
    workload = taking("moe_act  layernorm")
    assert workload == taking("layernorm,moe_act")
    assert workload.recompute_words == "selective recompute of layernorm,moe_act"
    assert taking(CORE).recompute_words == "selective recompute"
    assert Workload().recompute_words == "no recompute"
    assert Workload(recompute="full").recompute_words == "full recompute"
    assert Workload(recompute="full", recompute_layers=3).recompute_words == "full recompute of 3 layers a stage"
    config = read_model("mixtral-8x7b").config
    assert "--recompute-modules layernorm moe_act" in write_format("megatron-args", config, workload=workload)
    with pytest.raises(WorkloadError, match="cannot express recompute_modules"):
        write_format("torchtitan-toml", read_model("llama-3-8b").config, workload=workload)


@pytest.mark.parametrize("words", ["moe_action", "", " , "])
def test_unknown_parts_are_refused(words: str) -> None:
    """The message lists what there is."""
    with pytest.raises(WorkloadError, match="choose among core_attn, layernorm"):
        Workload(recompute_modules=words)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "changes selective recomputation alone"),
        ({"recompute": "full"}, "changes selective recomputation alone"),
        ({"recompute": "selective"}, "moe has no effect in a model without experts"),
        ({"recompute": "selective", "recompute_modules": "mla_up_proj"}, "without latent attention"),
        ({"recompute": "selective", "recompute_modules": "shared_experts"}, "shared_experts has no effect"),
    ],
)
def test_parts_without_effect_are_said(given: dict[str, Any], said: str) -> None:
    """One line says why nothing changes."""
    (remark,) = ask("llama-3-8b", "h100-sxm-80gb", workload={"recompute_modules": "moe_act", **given}).remarks
    assert said in remark
