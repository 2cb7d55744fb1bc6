"""Parameter counts against published numbers and hand calculations."""

from __future__ import annotations

import pytest

from shapewright.models.hf_config import read_hf_config
from shapewright.models.parameters import count_parameters
from shapewright.models.transformer import TransformerConfig

GPT = {"norm": "layernorm", "norm_bias": True, "qkv_bias": True, "attention_out_bias": True, "mlp_bias": True}


def llama(*, h: int, layers: int, heads: int, kv: int, f: int, v: int) -> TransformerConfig:
    """A Llama config: RMSNorm, SwiGLU, no biases, untied."""
    return TransformerConfig(
        hidden_size=h,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv,
        intermediate_size=f,
        vocab_size=v,
        norm="rmsnorm",
        gated_mlp=True,
    )


@pytest.mark.parametrize(
    ("config", "published"),
    [
        (llama(h=4096, layers=32, heads=32, kv=32, f=11008, v=32000), 6_738_415_616),  # Llama-2-7B
        (llama(h=4096, layers=32, heads=32, kv=8, f=14336, v=128256), 8_030_261_248),  # Llama-3-8B
        (llama(h=8192, layers=80, heads=64, kv=8, f=28672, v=128256), 70_553_706_496),  # Llama-3-70B
        (llama(h=16384, layers=126, heads=128, kv=8, f=53248, v=128256), 405_853_388_800),  # Llama-3.1-405B
    ],
)
def test_llamas(config: TransformerConfig, published: int) -> None:
    """Counts of the published checkpoints."""
    assert count_parameters(config).total == published


def test_bloom() -> None:
    """BLOOM's official count: 12 L h^2 + 13 L h + 250880 h + 4 h, the last for the embedding normalization."""
    bloom = read_hf_config({"model_type": "bloom", "hidden_size": 14336, "n_layer": 70, "n_head": 112}).config
    assert count_parameters(bloom).total == 176_247_271_424


@pytest.mark.parametrize(
    ("d_model", "n_layers", "n_heads", "max_seq_len", "published"),
    [
        (4096, 32, 32, 2048, 6_658_859_008),
        (8192, 80, 64, 2048, 64_862_437_376),
        (768, 12, 12, 512, 124_131_840),
    ],
)
def test_mpt_with_biases(d_model: int, n_layers: int, n_heads: int, max_seq_len: int, published: int) -> None:
    """MPT of llm-foundry's benchmark table: biases and learned positions."""
    config = {
        "model_type": "mpt",
        "d_model": d_model,
        "n_layers": n_layers,
        "n_heads": n_heads,
        "max_seq_len": max_seq_len,
        "no_bias": False,
        "attn_config": {"alibi": False},
    }
    assert count_parameters(read_hf_config(config).config).total == published


@pytest.mark.parametrize(("attention", "num_kv_heads"), [("multiquery", 1), ("grouped_query", 2), ("multihead", 4)])
def test_mpt_with_shared_keys(attention: str, num_kv_heads: int) -> None:
    """llm-foundry's MPT by hand: fused QKV and an MLP of expansion_ratio times the width."""
    h, layers, head, ratio, v = 64, 3, 16, 3, 320
    config = {
        "model_type": "mpt",
        "d_model": h,
        "n_layers": layers,
        "n_heads": h // head,
        "expansion_ratio": ratio,
        "vocab_size": v,
        "attn_config": {"attn_type": f"{attention}_attention", "kv_n_heads": 2, "alibi": True, "attn_pdrop": 0.125},
    }
    found = read_hf_config(config).config
    layer = h * (h + 2 * num_kv_heads * head) + h * h + 2 * h * ratio * h + 2 * h
    assert count_parameters(found).total == v * h + layers * layer + h
    assert (found.position_embedding, found.attention_dropout) == ("alibi", 0.125)


@pytest.mark.parametrize(
    ("h", "layers", "heads", "billions"),
    [(2304, 24, 24, 1.7), (3072, 30, 32, 3.6), (12288, 80, 96, 145.6), (25600, 128, 160, 1008.0)],
)
def test_megatron_table(h: int, layers: int, heads: int, billions: float) -> None:
    """Rows of Table 1 of arXiv 2104.04473 (v = 51200, s = 2048), whose formula omits 2 h."""
    config = TransformerConfig(
        hidden_size=h,
        num_layers=layers,
        num_heads=heads,
        vocab_size=51200,
        max_position_embeddings=2048,
        position_embedding="learned",
        tied_embeddings=True,
        **GPT,
    )
    total = count_parameters(config).total
    assert total == 12 * layers * h**2 + 13 * layers * h + (51200 + 2048) * h + 2 * h
    assert total / 1e9 == pytest.approx(billions, abs=0.06)


def test_active_parameters_of_mixtral() -> None:
    """Mixtral 8x7B: a token uses 2 of 8 experts of 3 * 4096 * 14336 in each of 32 layers."""
    counts = count_parameters(read_hf_config({"model_type": "mixtral"}).config)
    assert counts.total == 46_702_792_704
    assert counts.active == counts.total - 32 * 6 * 3 * 4096 * 14336 == 12_879_925_248


def test_components_add_up() -> None:
    """The components add up to the total, and a tied logit matrix is counted once."""
    counts = count_parameters(read_hf_config({"model_type": "gemma2"}).config)
    assert sum(counts.by_component.values()) == counts.total
    assert counts.by_component["head"] == 0
    assert counts.token_embedding == 256000 * 2304


def test_latent_attention_by_hand() -> None:
    """One MLA layer, term by term (arXiv 2405.04434, section 2.1)."""
    config = TransformerConfig(
        hidden_size=10,
        num_layers=1,
        num_heads=2,
        vocab_size=7,
        head_dim=5,
        v_head_dim=3,
        q_lora_rank=4,
        kv_lora_rank=6,
        qk_rope_head_dim=2,
        norm="rmsnorm",
    )
    ((_, layer),) = count_parameters(config).layers
    # queries 10*4 + 4 + 4*2*5 = 84; keys and values 10*(6+2) + 6 + 6*2*(3+3) = 158; output 2*3*10 = 60
    assert layer.attention == 84 + 158 + 60


def test_huge_models_stay_exact() -> None:
    """Counts beyond 2**64 are exact."""
    config = llama(h=2**40, layers=65536, heads=1, kv=1, f=2**40, v=2**40)
    assert count_parameters(config).total == 2 * 2**80 + 65536 * (4 * 2**80 + 3 * 2**80 + 2 * 2**40) + 2**40
