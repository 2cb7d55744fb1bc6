"""FLOPs of a training step by every convention, as papers, logs and frameworks print them."""

from __future__ import annotations

from typing import Any

import pytest

from published_gpts import PUBLISHED, gpt
from shapewright.lowering.flops import (
    count_convention_flops,
    count_rule_of_thumb_flops,
    estimate_training_s,
)
from shapewright.models.flop_conventions import CONVENTIONS
from shapewright.models.parameters import count_parameters
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.workload import Workload

A100_FLOPS_PER_S = 312e12
SECONDS_PER_DAY = 86_400.0


@pytest.mark.parametrize(
    ("name", "model_flops", "hardware_flops"),
    [
        ("22B", 1.143561e15, 1.202934e15),
        ("175B", 1.410915e17, 1.448914e17),
        ("530B", 1.852230e18, 1.882536e18),
        ("1T", 6.425876e18, 6.510318e18),
    ],
)
def test_flops_follow_the_paper(name: str, model_flops: float, hardware_flops: float) -> None:
    """Equations 7 and 9 of arXiv 2205.05198 by hand for its four models."""
    shape, _, batch, _, _ = PUBLISHED[name]
    flops = count_convention_flops(gpt(*shape), Workload(seq_len=2048, recompute="selective"), batch, "megatron")

    assert flops.model_flops == pytest.approx(model_flops, rel=1e-6)
    assert flops.hardware_flops == pytest.approx(hardware_flops, rel=1e-6)


@pytest.mark.parametrize(
    ("num_layers", "hidden_size", "num_heads", "seconds", "tflops"),
    [
        (70, 14336, 112, 102.03, 153.68),
        (70, 14336, 112, 104.50, 150.05),
        (70, 14336, 112, 104.70, 149.77),
        (72, 14336, 112, 110.42, 146.00),
        (78, 13824, 108, 103.51, 156.92),
        (96, 12288, 96, 142.17, 111.30),
    ],
)
def test_bloom_logs(num_layers: int, hidden_size: int, num_heads: int, seconds: float, tflops: float) -> None:
    """TFLOP/s per device that BLOOM's logs print: 384 A100, batch 2048, s = 2048, v = 250880, full recomputation."""
    config = gpt(num_layers, hidden_size, num_heads, vocab_size=250880)
    flops = count_convention_flops(config, Workload(seq_len=2048, recompute="full"), 2048, "megatron")

    assert flops.hardware_flops is not None
    assert flops.hardware_flops / (384 * seconds) / 1e12 == pytest.approx(tflops, abs=0.01)


def test_conventions_of_llama_3_8b() -> None:
    """FLOPs per token at s = 8192, from W counted by hand and N = 8,030,261,248."""
    config = read_model("llama-3-8b").config
    workload = Workload(seq_len=8192)
    per_token = {
        name: count_convention_flops(config, workload, 4, name).model_flops / (4 * 8192) for name in CONVENTIONS
    }
    # Per layer 2 * 4096^2 + 2 * 4096 * 1024 + 3 * 4096 * 14336 = 218,103,808; logits 128256 * 4096 = 525,336,576.
    weights = 32 * 218_103_808 + 525_336_576
    square = 12 * 32 * 4096 * 8192

    assert per_token["megatron"] == pytest.approx(6 * weights + square, rel=1e-12)
    assert per_token["megatron-causal"] == pytest.approx(6 * weights + square / 2, rel=1e-12)
    assert per_token["torchtitan"] == per_token["llm-foundry"] == 6 * 8_030_261_248 + square
    assert per_token["torchtitan"] / 1e9 == pytest.approx(61.06, abs=0.01)  # the figure torchtitan divides by
    assert per_token["torchtitan-no-embedding"] == 6 * (8_030_261_248 - 128256 * 4096) + square
    assert per_token["6n"] == 6 * 8_030_261_248


def test_tied_embedding_counts_as_logits() -> None:
    """An embedding is left out as a look-up, but for Llama-3.2-1B, whose matrix is that of the logits too."""
    config = read_model("llama-3.2-1b").config
    counted = count_convention_flops(config, Workload(seq_len=4096), 1, "torchtitan-no-embedding").model_flops / 4096

    assert counted == 6 * 1_235_814_400 + 12 * 16 * 2048 * 4096


def test_values_of_latent_attention_are_narrower_than_queries() -> None:
    """Today's torchtitan adds up both widths: 192 + 128 in each of 128 heads of 61 layers of DeepSeek-V3."""
    config = read_model("deepseek-v3").config
    before, today = (
        count_convention_flops(config, Workload(seq_len=4096), 1, name).model_flops / 4096
        for name in ("torchtitan", "torchtitan-no-embedding")
    )

    assert before - today == pytest.approx(6 * 129280 * 7168 + 6 * 61 * 128 * (192 - 128) * 4096, rel=1e-9)


@pytest.mark.parametrize(("model", "attending"), [("kimi-linear-48b-a3b", 7), ("falcon-mamba-7b", 0)])
@pytest.mark.parametrize("convention", ["torchtitan", "llm-foundry"])
def test_only_layers_with_attention_have_pairs(model: str, attending: int, convention: str) -> None:
    """7 of 27 layers of Kimi Linear attend, with 32 heads of 192; none of Falcon Mamba's."""
    config = read_model(model).config
    counted = count_convention_flops(config, Workload(seq_len=4096), 1, convention).model_flops / 4096
    square = 12 * attending * 32 * 192 * 4096

    assert counted == pytest.approx(6 * count_parameters(config).active + square, rel=1e-12)


def test_torchtitan_publishes_56_8_percent() -> None:
    """Llama-3-8B, 2904 tokens a second and A100 at s = 8192: 56.8 % of 312 TFLOP/s (torchtitan, 2024)."""
    flops = count_convention_flops(read_model("llama-3-8b").config, Workload(seq_len=8192), 1, "torchtitan").model_flops
    assert 2904 * flops / 8192 / A100_FLOPS_PER_S == pytest.approx(0.568, abs=5e-4)


@pytest.mark.parametrize(("recompute", "ratio"), [("none", 1.0), ("selective", 1.0), ("full", 4 / 3)])
def test_llm_foundry_hardware_flops(recompute: str, ratio: float) -> None:
    """llm-foundry multiplies by 4/3 where activations are checkpointed."""
    flops = count_convention_flops(gpt(24, 2048, 16), Workload(recompute=recompute), 8, "llm-foundry")
    assert flops.hardware_flops == pytest.approx(ratio * flops.model_flops)


def test_causal_convention_halves_attention() -> None:
    """72 B L s h^2 (1 + s/(12h) + v/(12hL)), and s/(6h) where the core is recomputed: half of eq. 7 and 9."""
    gpt = TransformerConfig(hidden_size=1024, num_layers=4, num_heads=8, vocab_size=51200)
    matrices, tokens = 72.0 * 4 * 1024**2, 8 * 2048
    for attention in ("flash", "unfused"):
        for recompute, core in (("none", 1 / 12), ("selective", 1 / 6)):
            step = Workload(seq_len=2048, attention=attention, recompute=recompute)
            counted = count_convention_flops(gpt, step, 8, "megatron-causal")
            terms = 1.0 + 51200 / (12 * 1024 * 4)
            assert counted.model_flops == pytest.approx(matrices * tokens * (terms + 2048 / 1024 / 12))
            assert counted.hardware_flops == pytest.approx(matrices * tokens * (terms + core * 2048 / 1024))


def test_bidirectional_attention_is_not_halved() -> None:
    """An encoder sees the whole square, so that both Megatron conventions agree."""
    config = read_model("bert-large").config
    by_square, by_half = (
        count_convention_flops(config, Workload(seq_len=512), 8, name).model_flops
        for name in ("megatron", "megatron-causal")
    )
    assert by_square == by_half


def test_rule_of_thumb_counts_active_parameters() -> None:
    """Mixtral's rule of thumb takes the 12.9 billion parameters that a token uses, and not all 46.7."""
    config = read_model("mixtral-8x7b").config
    flops = count_convention_flops(config, Workload(seq_len=4096), 2, "6n").model_flops
    assert flops == 6 * count_parameters(config).active * 2 * 4096


def test_rule_of_thumb_flops() -> None:
    """8 FLOPs a parameter and token: 52 B parameters, batch 1024 x 2048, 127 s, 64 devices (ml-engineering)."""
    flops = count_rule_of_thumb_flops(52e9, 1024 * 2048, recompute="full")
    assert flops / (127 * 64 * 1e12) == pytest.approx(107.334551181102, rel=1e-13)


@pytest.mark.parametrize(
    ("parameters", "tokens", "devices", "rate", "days"),
    [(175e9, 300e9, 1024, 140e12, 33.9), (1e12, 450e9, 3072, 163e12, 83.2)],
)
def test_days_of_training(parameters: float, tokens: float, devices: int, rate: float, days: float) -> None:
    """Equation 4 of arXiv 2104.04473: 34 and 84 days, as the paper rounds them."""
    duration_s = estimate_training_s(parameters, tokens, num_devices=devices, flops_per_s_per_device=rate)
    assert duration_s / SECONDS_PER_DAY == pytest.approx(days, abs=0.05)


@pytest.mark.parametrize("convention", ["megatron", "megatron-causal", "llm-foundry", "6n"])
@pytest.mark.parametrize(
    ("finetune", "trained_layers"), [({"finetune": "lora"}, 32), ({"finetune": "last-layers", "last_layers": 2}, 2)]
)
def test_recomputation_repeats_the_forward_pass_of_trained_layers(
    convention: str, finetune: dict[str, Any], trained_layers: int
) -> None:
    """Frozen weights take gradients away, not the repeated forward pass; layers below the trained ones run once."""
    config = read_model("llama-3-8b").config

    def repeated(**fields: Any) -> float:
        flops = count_convention_flops(config, Workload(seq_len=4096, recompute="full", **fields), 1, convention)
        assert flops.hardware_flops is not None
        return flops.hardware_flops - flops.model_flops

    # The adapters of rank 16 on all linear layers, 41.9 M parameters, are repeated where operations are counted.
    adapters = 2.0 * 41_943_040 * 4096 if "megatron" in convention and trained_layers == 32 else 0.0

    assert repeated(**finetune) == pytest.approx(repeated() * trained_layers / 32 + adapters, rel=1e-9)


def test_causal_convention_halves_the_attention_that_runs() -> None:
    """With 2 of 32 layers trained, the forward core runs in all layers and the backward core in two."""
    config = read_model("llama-3-8b").config
    workload = Workload(seq_len=4096, finetune="last-layers", last_layers=2)
    causal, whole = (
        count_convention_flops(config, workload, 1, name).model_flops for name in ("megatron-causal", "megatron")
    )
    # 4 x h x s^2 forward in 32 layers, twice that backward in 2.
    core = 4.0 * 4096 * 4096**2 * (32 + 2 * 2)

    assert whole - causal == pytest.approx(0.5 * core, rel=1e-9)
