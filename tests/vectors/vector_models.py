"""Models of published vectors, for the tests of parameters, FLOPs, activations and traffic."""

from __future__ import annotations

from dataclasses import replace

from shapewright.models.transformer import TransformerConfig

TOKENS = 300e9  # what EleutherAI/cookbook assumes where nothing is said


def gpt(num_layers: int, hidden_size: int, num_heads: int, vocab_size: int = 51200) -> TransformerConfig:
    """Return a GPT with learned positions, biases left out as simple calculators do, and an untied logit matrix."""
    return TransformerConfig(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        vocab_size=vocab_size,
        position_embedding="learned",
        max_position_embeddings=2048,
        norm_bias=True,
    )


def fairseq_moe(every: int = 1) -> TransformerConfig:
    """Return fairseq's mixture of 512 experts, which the layers have, or every second one."""
    return TransformerConfig(
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        vocab_size=51200,
        num_experts=512,
        num_experts_per_token=1,
        moe_intermediate_size=3072,
        moe_layers=tuple(layer % every == every - 1 for layer in range(12)),
    )


def dropped(config: TransformerConfig) -> TransformerConfig:
    """Return the same model with dropout, as GPT was trained."""
    return replace(config, hidden_dropout=0.1, attention_dropout=0.1, tied_embeddings=True)
