"""Weights stored narrower than they are multiplied, and caches in blocks: bytes, times, and what is refused."""

from __future__ import annotations

import pytest

import shapewright
from shapewright.core.errors import WorkloadError
from shapewright.lowering.operations.gemm import Gemm, GroupedGemm
from shapewright.memory.estimate import estimate_memory
from shapewright.models.transformer import TransformerConfig
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

STORED_INT4_BYTES = 0.5 + 2 / 128  # a 16-bit scale for each group of 128 weights


def test_bytes_of_a_gemm_with_narrow_weights() -> None:
    """x[2,8] and y[2,4] in bf16, W[4,8] in int4."""
    gemm = Gemm(name="x", m=2, n=4, k=8, weight_dtype="int4")
    assert gemm.num_bytes == 2 * (2 * 8 + 2 * 4) + STORED_INT4_BYTES * 4 * 8


def test_bytes_of_grouped_gemms_with_narrow_weights() -> None:
    """Six rows through three experts' W[4,8] in int8."""
    gemm = GroupedGemm(name="x", m=6, n=4, k=8, groups=3, weight_dtype="int8")
    assert gemm.num_bytes == 2 * (6 * 8 + 6 * 4) + 3 * 4 * 8


def decode(weight_dtype: str | None, batch: int) -> shapewright.Prediction:
    """Llama-3-8B decoding on an H100."""
    workload = {
        "phase": "decode",
        "micro_batch_size": batch,
        "context_len": 1000,
        "weight_dtype": weight_dtype,
    }
    return shapewright.predict("llama-3-8b", device="h100-sxm-80gb", workload=workload)


def gemms_s(found: shapewright.Prediction) -> float:
    """Time of all GEMMs of a step."""
    return sum(entry.total_time_s for entry in found.operations if entry.operation.kind == "gemm")


def test_narrow_weights_speed_up_their_readers() -> None:
    """GEMMs of one sequence are bound by weights, of which int4 reads a quarter; those of 2048 are compute-bound."""
    assert 2.0 < gemms_s(decode(None, 1)) / gemms_s(decode("int4", 1)) < 4.0
    assert gemms_s(decode(None, 2048)) / gemms_s(decode("int4", 2048)) < 1.1


def test_narrow_weights_do_not_apply_to_logits() -> None:
    """Logits stay in 16 bits; other GEMMs are labelled with the assumption and have a wider interval."""
    found = {entry.operation.name: entry for entry in decode("int4", 8).operations}
    assert isinstance(logits := found["logits"].operation, Gemm)
    assert logits.weight_dtype is None
    qkv = found["attention.q"] if "attention.q" in found else found["attention.qkv"]
    assert "int4 weights assumed" in qkv.price.calibration.label
    same = next(entry for entry in decode(None, 8).operations if entry.operation.name == qkv.operation.name)
    assert qkv.price.high_s / qkv.price.time_s > same.price.high_s / same.price.time_s


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"weight_dtype": "int4"}, "no effect in train"),
        ({"phase": "decode", "dtype": "fp8", "weight_dtype": "bf16"}, "wider than dtype=fp8"),
        ({"phase": "decode", "weight_dtype": "int3"}, "unknown dtype 'int3'"),
        ({"phase": "decode", "kv_block_tokens": 0}, "kv_block_tokens=0"),
    ],
)
def test_senseless_formats_are_refused(fields: dict[str, str], words: str) -> None:
    """Invalid formats are errors with a reason."""
    with pytest.raises(WorkloadError, match=words):
        Workload(**fields)


def test_paged_cache_ends_in_whole_blocks() -> None:
    """33 cached tokens take three blocks of 16; with a window of 20 they take two."""
    one_layer = {"hidden_size": 64, "num_heads": 4, "num_layers": 1, "vocab_size": 10}
    workload = Workload(phase="decode", micro_batch_size=3, context_len=32, kv_block_tokens=16)
    token_bytes = 2 * 2 * 64
    for windows, blocks in (((), 3), ((20,), 2)):
        config = TransformerConfig(**one_layer, attention_windows=windows)
        found = estimate_memory(config, workload, ParallelLayout())
        assert found.kv_cache_bytes == 3 * blocks * 16 * token_bytes
