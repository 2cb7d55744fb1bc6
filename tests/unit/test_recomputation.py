"""Modules of a layer that selective recomputation repeats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shapewright.app.formats.registry import write_format
from shapewright.core.errors import WorkloadError
from shapewright.hardware.loader import load_device
from shapewright.lowering.model import lower
from shapewright.memory.estimate import estimate_memory
from shapewright.memory.saved_tensors import list_saved_tensors
from shapewright.memory.tensors import select_kept_tensors
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.build import build_scenario
from shapewright.prediction.predict import predict
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.recompute import CORE, MODULES
from shapewright.workload.workload import Workload

DEEPSEEK = replace(read_model("deepseek-v2-lite").config, num_layers=2)
PLAIN = Workload(seq_len=512)
KEPT_BY_EXPERTS = ("moe.input", "moe.activation_input", "moe.up_output")


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
def test_recomputed_operations_of_each_module(modules: str, operations: set[str]) -> None:
    """The operations of each module and no others; DeepSeek-V2-Lite compresses only keys and values."""
    assert again(modules) == operations


def test_moe_module_recomputes_the_whole_block() -> None:
    """Router, dispatch, grouped GEMMs and combine."""
    layout = ParallelLayout(data_parallel=4, expert_parallel=4)
    names = {
        each.name.split(".")[0] + "." + each.name.split(".")[1]
        for each in lower(DEEPSEEK, taking("moe"), layout)
        if each.pass_name == "recompute"
    }
    assert {"moe.router", "moe.dispatch", "moe.gate_up", "moe.down", "moe.combine", "shared_expert.down"} <= names
    assert not any(name.startswith(("attention", "norm", "mlp")) for name in names)


def test_moe_act_drops_the_activation_output() -> None:
    """Experts save their input and the activation's input; the input of the second GEMM is recomputed."""
    tensors = list_saved_tensors(DEEPSEEK, PLAIN, ParallelLayout(), has_experts=True)
    kept = {tensor.name for tensor in select_kept_tensors(tensors, "selective", "moe_act") if tensor.block == "moe"}
    assert kept == set(KEPT_BY_EXPERTS)
    assert "moe.down_input" in {tensor.name for tensor in tensors}


def test_moe_act_keeps_what_the_shared_expert_saves() -> None:
    """Its activation does not run again: Megatron-LM's experts.py has the recomputation, shared_experts.py has not."""
    tensors = list_saved_tensors(DEEPSEEK, PLAIN, ParallelLayout(), has_experts=True)
    saved, kept = (
        {tensor.role for tensor in each if tensor.block == "shared_expert"}
        for each in (tensors, select_kept_tensors(tensors, "selective", "moe_act"))
    )
    assert saved == kept


@pytest.mark.parametrize("modules", MODULES)
def test_modules_that_repeat_nothing_keep_everything(modules: str) -> None:
    """A model without latents or experts keeps what the modules of such models compute again."""
    config = read_model("llama-3-8b").config
    whole, part = (estimate_memory(config, each, ParallelLayout()) for each in (PLAIN, taking(modules)))
    repeats = bool(again(modules, config)) and modules != CORE
    assert (part.activations_bytes < whole.activations_bytes) == repeats


@pytest.mark.parametrize("modules", MODULES)
def test_every_module_reduces_or_keeps_memory(modules: str) -> None:
    """No module increases memory; each but the fused attention core, which saves no scores, reduces it."""
    layout = ParallelLayout()
    whole, part = (estimate_memory(DEEPSEEK, each, layout).activations_bytes for each in (PLAIN, taking(modules)))
    assert part < whole or (modules == CORE and part == whole)


def test_recomputed_modules_add_time() -> None:
    """The more parts, the longer the step."""
    device = load_device("h100-sxm-80gb")
    steps = [
        predict(DEEPSEEK, device=device, workload=taking(modules)).step_time_s
        for modules in ("layernorm", "layernorm,moe_act", "layernorm,moe_act,mla_up_proj")
    ]
    assert steps == sorted(set(steps))


def test_module_names_are_sorted_and_described() -> None:
    """Any order and separators are accepted; non-default modules appear in descriptions."""
    workload = taking("moe_act  layernorm")
    assert workload == taking("layernorm,moe_act")
    assert workload.recompute_text == "selective recompute of layernorm,moe_act"
    assert taking(CORE).recompute_text == "selective recompute"
    assert Workload().recompute_text == "no recompute"
    assert Workload(recompute="full").recompute_text == "full recompute"
    assert Workload(recompute="full", recompute_layers=3).recompute_text == "full recompute of 3 layers a stage"
    config = read_model("mixtral-8x7b").config
    assert "--recompute-modules layernorm moe_act" in write_format("megatron-args", config, workload=workload)
    with pytest.raises(WorkloadError, match="cannot express recompute_modules"):
        write_format("torchtitan-toml", read_model("llama-3-8b").config, workload=workload)


@pytest.mark.parametrize("words", ["moe_action", "", " , "])
def test_unknown_modules_are_rejected(words: str) -> None:
    """The message lists the known modules."""
    with pytest.raises(WorkloadError, match="choose among core_attn, layernorm"):
        Workload(recompute_modules=words)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "affects selective recomputation only"),
        ({"recompute": "full"}, "affects selective recomputation only"),
        ({"recompute": "selective"}, "moe has no effect in a model without experts"),
        ({"recompute": "selective", "recompute_modules": "mla_up_proj"}, "without latent attention"),
        ({"recompute": "selective", "recompute_modules": "shared_experts"}, "shared_experts has no effect"),
    ],
)
def test_modules_without_effect_are_noted(given: dict[str, Any], message: str) -> None:
    """One line gives the reason why nothing changes."""
    (remark,) = build_scenario(
        "llama-3-8b", "h100-sxm-80gb", workload={"recompute_modules": "moe_act", **given}
    ).remarks
    assert message in remark
