"""Terms of kernels' work by hand: FLOPs of attention and projections, bytes of weights and tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shapewright.hardware.loader import load_device
from shapewright.models.hf_config import read_hf_config
from shapewright.models.parameters import count_parameters
from shapewright.models.read import read_model
from shapewright.pricing.kernels.attention import encoder_work, latent_attention_work, latent_bmm_work, training_work
from shapewright.pricing.kernels.hybrids import sparse_work
from shapewright.pricing.kernels.price import kernel_rates
from shapewright.pricing.kernels.work import KernelWork

H100 = load_device("h100-sxm-80gb")
RATES = kernel_rates(H100)
PEAK = H100.peak_flops_per_s("bf16")
BYTES_PER_S = H100.memory_bandwidth_bytes_per_s


def sizes(**given: float) -> dict[str, Any]:
    """Sizes of a single call."""
    return {name: np.array([value], float) for name, value in given.items()}


def seconds(work: KernelWork, *names: str) -> float:
    """Sum of terms of arithmetic and traffic. [s]"""
    return float(sum({**work.compute, **work.memory}[name][0] for name in names))


def test_encoder_attention() -> None:
    """Two GEMMs of 2 s^2 d for each head, and four tensors of 16 bits moved once."""
    work = encoder_work(H100, RATES, **sizes(batch_size=2, seq_len=1024, num_heads=16, head_dim=64))

    assert seconds(work, "gemm") == pytest.approx(2 * 16 * 2 * 2 * 1024**2 * 64 / PEAK)
    assert seconds(work, "bytes") == pytest.approx(4 * 2 * 1024 * 16 * 64 * 2 / BYTES_PER_S)


def test_batched_gemms_of_latents() -> None:
    """Each of 128 heads multiplies 256 tokens by a matrix of 128 x 512."""
    work = latent_bmm_work(H100, RATES, **sizes(num_heads=128, num_tokens=256), k=128.0, n=512.0, dtype="bf16")

    assert seconds(work, "gemm") == pytest.approx(2 * 128 * 256 * 128 * 512 / PEAK)
    assert seconds(work, "weights") == pytest.approx(128 * 128 * 512 * 2 / BYTES_PER_S)
    assert seconds(work, "activations") == pytest.approx(128 * 256 * (128 + 512) * 2 / BYTES_PER_S)


@pytest.mark.parametrize("is_absorbed", [False, True])
def test_a_module_of_latent_attention_has_the_weights_of_the_model(is_absorbed: bool) -> None:
    """DeepSeek-V3's 187 million attention weights of a layer: 2 FLOPs each for each token, read once in 16 bits."""
    config = read_model("deepseek-v3").config
    norms = config.q_lora_rank + config.kv_lora_rank
    weights = count_parameters(config).layers[0][1].attention - norms
    work = latent_attention_work(
        H100, RATES, **sizes(batch_size=1, query_len=256, context_len=256, num_heads=128), is_decode=False,
        is_absorbed=is_absorbed, dtype="bf16", cache_dtype="bf16", projections="bf16",
    )  # fmt: skip
    read = ("weights", "latent weights") if is_absorbed else ("weights",)

    assert seconds(work, "gemm", "latent") == pytest.approx(2 * 256 * weights / PEAK, rel=1e-4)
    assert seconds(work, *read) == pytest.approx(2 * weights / BYTES_PER_S, rel=1e-4)


def test_a_module_of_sparse_attention_has_the_weights_of_the_model() -> None:
    """DeepSeek-V3.2's 201 million attention weights with the indexer's, but for its narrow projections."""
    weights = count_parameters(read_hf_config({"model_type": "deepseek_v32"}).config).layers[0][1].attention
    work = sparse_work(
        H100, RATES, **sizes(batch_size=1, query_len=256, context_len=4096, num_heads=128, compress_ratio=1),
        hidden_size=7168.0, selected=2048.0, is_module=True, gemm_dtype="bf16", cache_dtype="bf16",
    )  # fmt: skip

    assert seconds(work, "projections", "heads") == pytest.approx(2 * 256 * weights / PEAK, rel=0.02)


def test_decoding_over_latents() -> None:
    """Each of 128 heads multiplies 576 and 512 wide with each of 4096 tokens, whose latents are read once for all."""
    work = latent_attention_work(
        H100, RATES, **sizes(batch_size=2, query_len=1, context_len=4096, num_heads=128), is_decode=True,
        is_absorbed=True, dtype="bf16", cache_dtype="bf16",
    )  # fmt: skip

    assert seconds(work, "attention") == pytest.approx(2 * 128 * 4096 * 2 * (576 + 512) / PEAK)
    assert seconds(work, "keys") == pytest.approx(2 * 4096 * 576 * 2 / BYTES_PER_S)
    assert seconds(work, "queries") == pytest.approx(2 * 128 * (576 + 512) * 2 / BYTES_PER_S)


def test_a_prompt_with_expanded_latents() -> None:
    """Causal attention of 8 blocks of 128 queries visits 9 / 16 of 1024 x 1024 scores, 192 + 128 wide."""
    work = latent_attention_work(
        H100, RATES, **sizes(batch_size=2, query_len=1024, context_len=1024, num_heads=128), is_decode=False,
        is_absorbed=False, dtype="bf16", cache_dtype="bf16",
    )  # fmt: skip

    assert seconds(work, "attention") == pytest.approx(2 * 128 * 1024**2 * 9 / 16 * 2 * (192 + 128) / PEAK)
    assert seconds(work, "keys") == pytest.approx(2 * 1024 * 128 * (192 + 128) * 2 / BYTES_PER_S)


@pytest.mark.parametrize(("is_backward", "gemms_of_192", "gemms_of_128"), [(False, 1, 1), (True, 3, 2)])
def test_training_of_attention(is_backward: bool, gemms_of_192: int, gemms_of_128: int) -> None:
    """Without a mask: one GEMM as wide as keys and one as values, backward 3 and 2; all tensors move, and gradients."""
    work = training_work(
        H100, RATES, **sizes(
            batch_size=2, query_len=1024, kv_len=1024, num_heads=16, num_kv_heads=4, head_dim=192, v_head_dim=128,
            window_size=0, is_causal=0,
        ), is_backward=is_backward, dtype="bf16",
    )  # fmt: skip
    flops = 2 * 16 * 1024**2 * 2 * (gemms_of_192 * 192 + gemms_of_128 * 128)

    assert seconds(work, "gemm") == pytest.approx(flops / PEAK)
    assert seconds(work, "bytes") == pytest.approx(
        (1 + is_backward) * 2 * 1024 * (16 + 4) * (192 + 128) * 2 / BYTES_PER_S
    )
    assert seconds(work, "after the query") == 0.0
