"""Layers with experts, layers that slide, and norms are those of the models that transformers builds."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs the trace extra: PyTorch")
pytest.importorskip("transformers", reason="needs the trace extra: transformers")

from hf_models import build_on_meta, tiny_config

from shapewright.lowering.model import lower
from shapewright.lowering.operations.pointwise import Pointwise
from shapewright.models.hf_config import read_hf_config
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

pytestmark = pytest.mark.oracle


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("qwen2_moe", {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
        ("qwen3_moe", {"num_hidden_layers": 5, "decoder_sparse_step": 3}),
        ("qwen3_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [0, 2]}),
        ("llama4_text", {"num_hidden_layers": 5, "interleave_moe_layer_step": 3}),
        ("llama4_text", {"moe_layers": [0, 3]}),
        ("deepseek_v2", {"first_k_dense_replace": 2}),
        ("deepseek_v3", {"first_k_dense_replace": 0}),
        ("deepseek_v3", {"first_k_dense_replace": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_layers_with_experts(key: str, changes: dict[str, Any]) -> None:
    """Expert layers equal those of transformers, whether given by a step, a list or a number of dense layers."""
    raw = {**tiny_config(key), **changes}
    built = {
        int(name.split(".layers.")[1].split(".")[0])
        for name, _ in build_on_meta(raw).named_parameters()
        if ".layers." in name and ".experts." in name
    }
    config = read_hf_config(raw).config
    assert {layer for layer in range(config.num_layers) if config.is_moe_layer(layer)} == built


@pytest.mark.parametrize("pattern", [["local", "global"], ["global", "local", "local", "local"]])
def test_local_layers_of_gpt_neo(pattern: list[str]) -> None:
    """A layer that GPT-Neo calls local has the window, a global one none."""
    raw = {**tiny_config("gpt_neo"), "attention_types": [[pattern, 4 // len(pattern)]]}
    layers: Any = build_on_meta(raw).transformer.h
    config = read_hf_config(raw).config
    assert [config.window_of_layer(layer) for layer in range(4)] == [
        {"local": 32, "global": 0}[each.attn.attention_type] for each in layers
    ]


@pytest.mark.parametrize(
    "key",
    [
        "gpt2", "gptj", "gpt_neox", "opt/projected", "bloom", "falcon", "falcon/new", "qwen3", "gemma2", "gemma3_text",
        "phi/qk_layernorm", "olmo", "olmo2", "stablelm/parallel", "cohere2", "deepseek_v2/lite", "deepseek_v3",
        "qwen3_moe", "llama4_text", "bert", "t5",
    ],
)  # fmt: skip
def test_norms_of_a_forward_pass(key: str) -> None:
    """Each norm of the model runs once, those of a layer's queries and keys together, ends of stacks included."""
    raw = tiny_config(key)
    names = [name for name, module in build_on_meta(raw).named_modules() if "norm" in type(module).__name__.lower()]
    built = {re.sub(r"\b[qk]_(layer)?norm\b.*", "qk", name) for name in names}
    operations = lower(read_hf_config(raw).config, Workload(phase="prefill", seq_len=32), ParallelLayout())
    run = [one for one in operations if isinstance(one, Pointwise) and one.operation in ("norm", "layernorm")]
    assert sum(int(one.repeats) for one in run) == len(built)


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("llama4_text", {"num_hidden_layers": 5}),
        ("llama4_text", {"no_rope_layers": [0, 1, 1, 0]}),
        ("smollm3", {"num_hidden_layers": 6, "no_rope_layer_interval": 3}),
        ("cohere2", {"num_hidden_layers": 5}),
        ("llama", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_layers_with_rotary_positions(key: str, changes: dict[str, Any]) -> None:
    """Layers that turn queries and keys are those of transformers; Cohere 2's are those that slide."""
    raw = {**tiny_config(key), **changes}
    blocks: list[Any] = [each.self_attn for each in build_on_meta(raw).model.layers]
    built = [
        each.sliding_window is not None if key == "cohere2" else bool(getattr(each, "use_rope", True))
        for each in blocks
    ]
    config = read_hf_config(raw).config
    assert [config.is_rotary_layer(layer) for layer in range(config.num_layers)] == built
