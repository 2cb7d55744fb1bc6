"""Checkpoints in fp8 with one scale per block of a weight, as compressed-tensors writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import shapewright
from shapewright.core.errors import ConfigError
from shapewright.lint.rules.shards import find_partial_blocks
from shapewright.models.hf_config import has_block_scales
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.build import build_scenario
from shapewright.workload.layout import ParallelLayout

FP8 = {"num_bits": 8, "type": "float"}
# As llm-compressor's scheme FP8_BLOCK writes it.
IN_BLOCKS = {
    "targets": ["Linear"],
    "weights": {**FP8, "strategy": "block", "block_structure": [128, 128], "symmetric": True, "dynamic": False},
    "input_activations": {**FP8, "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": True},
}
PER_CHANNEL = {**IN_BLOCKS, "weights": {**FP8, "strategy": "channel"}}
FOUR_BITS = {**IN_BLOCKS, "weights": {"num_bits": 4, "type": "float", "strategy": "block"}}
WEIGHTS_ALONE = {**IN_BLOCKS, "input_activations": None}
ATTENTION = {**IN_BLOCKS, "targets": ["re:.*self_attn.*"]}


def quantization(*groups: Any, **more: Any) -> dict[str, Any]:
    """Return a config.json object with a quantization config."""
    numbered = {f"group_{index}": group for index, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": numbered, **more}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (quantization(IN_BLOCKS), True),
        (quantization(IN_BLOCKS, ignore=["lm_head", "re:.*mlp.gate$", "re:.*shared_experts.*"]), True),
        (quantization({**IN_BLOCKS, "targets": ["re:.*mlp.experts.*"]}, ATTENTION), True),
        (quantization({name: IN_BLOCKS[name] for name in ("weights", "input_activations")}), True),
        (quantization(PER_CHANNEL), False),
        (quantization(FOUR_BITS), False),
        (quantization(WEIGHTS_ALONE), False),
        (quantization(ATTENTION), False),
        (quantization(ATTENTION, PER_CHANNEL), False),
        (quantization(IN_BLOCKS, ignore=["re:.*mlp.experts.*"]), False),
        (quantization(), False),
        ({**quantization(IN_BLOCKS), "quant_method": "modelopt"}, False),
    ],
)
def test_block_scales_of_experts_are_recognised(found: dict[str, Any], expected: bool) -> None:
    """fp8 weights and activations, scales per block, and experts among the targets."""
    assert has_block_scales({"quantization_config": found}, "qwen3_moe") == expected


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({**quantization(), "config_groups": ["Linear"]}, "config_groups=.* must be an object"),
        (quantization("Linear"), "group_0='Linear' must be an object"),
        (quantization(IN_BLOCKS, ignore="lm_head"), "ignore='lm_head' must be a list"),
    ],
)
def test_malformed_groups_are_errors(found: dict[str, Any], words: str) -> None:
    """A malformed quantization config is an error on one line."""
    with pytest.raises(ConfigError, match=words):
        has_block_scales({"quantization_config": found}, "qwen3_moe")


def test_block_scales_select_another_expert_kernel(tmp_path: Path) -> None:
    """Checkpoints with block scales do not use the measured kernel that has one scale per tensor."""
    raw = {**(read_model("qwen3-30b-a3b").raw or {})}
    kernels = []
    for index, group in enumerate((IN_BLOCKS, PER_CHANNEL)):
        path = tmp_path / f"{index}.json"
        path.write_text(json.dumps({**raw, "quantization_config": quantization(group)}), encoding="utf-8")
        question = build_scenario(path, "h200-sxm-141gb", workload={"phase": "decode", "dtype": "fp8"})
        kernels.append(question.workload.expert_kernel)
    assert kernels == ["as-16-bit", "measured"]


def test_split_blocks_are_errors_where_the_checkpoint_has_blocks(tmp_path: Path) -> None:
    """Experts of 768 on four devices are 1.5 blocks each: such a checkpoint does not load, one per channel does."""
    raw = {**(read_model("qwen3-30b-a3b").raw or {})}
    found = {}
    for index, group in enumerate((IN_BLOCKS, PER_CHANNEL)):
        path = tmp_path / f"{index}.json"
        path.write_text(json.dumps({**raw, "quantization_config": quantization(group)}), encoding="utf-8")
        report = shapewright.check(
            path,
            device="h200-sxm-141gb",
            workload={"phase": "decode", "dtype": "fp8"},
            layout={"tensor_parallel": 4},
        )
        (finding,) = (each for each in report.findings if each.code == "SV101")
        found[index] = finding
    changes = [dict(suggestion.changes) for suggestion in found[0].suggestions]

    assert (found[0].severity, found[1].severity) == ("error", "info")
    assert "vLLM and SGLang do not load it" in found[0].message
    assert {"tensor_parallel": 2, "data_parallel": 2} in changes
    assert {"expert_tensor_parallel": 1, "expert_parallel": 4} in changes


@pytest.mark.parametrize(
    ("heads", "tensor_parallel", "refused"),
    [
        ({"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}, 1, {"num_heads", "num_kv_heads"}),
        ({"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}, 1, set()),
        ({"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}, 2, {"num_kv_heads"}),
        ({"intermediate_size": 1000, "gated_mlp": True}, 1, {"intermediate_size"}),
        ({"intermediate_size": 1000, "gated_mlp": False}, 1, set()),
        ({"intermediate_size": 1000, "gated_mlp": False}, 2, {"intermediate_size"}),
    ],
)
def test_whole_matrices_are_refused_where_they_are_merged(
    heads: dict[str, Any], tensor_parallel: int, refused: set[str]
) -> None:
    """As validate_fp8_block_shape of vLLM has it: each part of a split matrix, and all but the last of a merged one."""
    shape = {"hidden_size": 512, "num_layers": 2, "num_heads": 4, "head_dim": 128, "vocab_size": 1024, **heads}
    config = TransformerConfig(**shape)
    assert set(find_partial_blocks(config, ParallelLayout(tensor_parallel=tensor_parallel))) == refused
