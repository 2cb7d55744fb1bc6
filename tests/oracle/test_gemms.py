"""Every GEMM of a Hugging Face model, forward and backward, as PyTorch dispatches it on the meta device."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch", reason="comparing GEMMs with PyTorch needs the trace extra (torch)")
pytest.importorskip("transformers", reason="comparing GEMMs with PyTorch needs the trace extra (transformers)")

from hf_models import HYBRID_CONFIGS, SPARSE_CONFIGS, TINY_CONFIGS, build_on_meta, model_type_of, tiny_config
from image_models import ENCODERS, VISION_LANGUAGE
from traced_gemms import (
    Trace,
    TracedGemm,
    count_gemms,
    trace_decode,
    trace_prefill,
    trace_training,
    without_groups,
    without_layout,
)

from shapewright.lowering.flops import count_model_flops
from shapewright.lowering.model import lower
from shapewright.models.families.registry import FAMILIES
from shapewright.models.hf_config import read_hf_config
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload

if TYPE_CHECKING:
    from shapewright.models.transformer import TransformerConfig

pytestmark = pytest.mark.oracle

# Unequal to each other, to every width of the tiny models and to every window.
BATCH_SIZE, SEQ_LEN, CONTEXT_LEN = 3, 40, 44

# transformers runs every expert of Llama 4 on every token; real kernels, and our lowering, route. DBRX's experts are a
# loop over the tokens that each gets, which needs their values.
_CANNOT_BE_TRACED = {"llama4", "llama4_text", "dbrx"}
TRAINED = sorted(
    key for key in TINY_CONFIGS if model_type_of(key) not in _CANNOT_BE_TRACED and key not in HYBRID_CONFIGS
)

# Layouts are compared where the weights are those of torch.nn.Linear (GPT-2 and its kin store W[in,out]) and where the
# model multiplies with the keys as they lie (others copy them transposed first).
WITH_LAYOUTS = [
    key
    for key in TRAINED
    if model_type_of(key)
    in {
        "bloom", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "gemma2", "gemma3_text", "gpt_neox", "granite",
        "llama", "mistral", "mixtral", "olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe",
        "smollm3", "stablelm", "starcoder2",
    }
]  # fmt: skip


def is_decoded(key: str) -> bool:
    """Whether prefill and decode of this model are compared.

    Left out: encoders, and decoders that need an encoder's output beside the cache; latent attention, whose expansion
    is lowered as absorbed into queries and outputs where transformers expands; GPT-Neo, which does not cut its cache to
    the window.
    """
    config = read_hf_config(tiny_config(key)).config
    return config.stack == "decoder" and not config.is_mla and model_type_of(key) != "gpt_neo"


DECODED = [key for key in TRAINED if is_decoded(key)]

_traces: dict[str, Trace] = {}


def traced(key: str) -> Trace:
    """Trace a model once for all tests of this file."""
    if key not in _traces:
        model = build_on_meta(tiny_config(key), dtype="bfloat16")
        _traces[key] = trace_training(model, BATCH_SIZE, SEQ_LEN)
    return _traces[key]


def training_workload() -> Workload:
    """The traced step: unfused attention, whose GEMMs are separate."""
    return Workload(micro_batch_size=BATCH_SIZE, seq_len=SEQ_LEN, attention="unfused")


def lowered_gemms(config: TransformerConfig, workload: Workload, *passes: str) -> Counter[TracedGemm]:
    """Count our GEMMs in the form of the trace."""
    return count_gemms(lower(config, workload, ParallelLayout()), *passes)


@pytest.mark.parametrize("key", TRAINED)
def test_every_gemm_of_a_training_step_is_lowered_and_no_other(key: str) -> None:
    """The lowered GEMMs (batch, m, n, k, groups) and their counts equal those that PyTorch dispatches."""
    config, trace = read_hf_config(tiny_config(key)).config, traced(key)
    workload = training_workload()
    assert without_layout(lowered_gemms(config, workload, "forward")) == without_layout(trace.forward)
    assert without_layout(lowered_gemms(config, workload, "forward", "backward")) == without_layout(trace.whole)


@pytest.mark.parametrize("key", TRAINED)
def test_flops_equal_those_that_pytorch_counts(key: str) -> None:
    """Model FLOPs of a step are FlopCounterMode's, to the last one, and backward is twice forward."""
    config, trace = read_hf_config(tiny_config(key)).config, traced(key)
    assert count_model_flops(config, training_workload()) == trace.whole_flops
    assert trace.whole_flops == 3 * trace.forward_flops


@pytest.mark.parametrize("key", WITH_LAYOUTS)
def test_operands_lie_in_memory_as_pytorch_has_them(key: str) -> None:
    """Operand layouts equal those of PyTorch's strides: NT forward, NN for dgrad, TN for wgrad, and attention."""
    config, trace = read_hf_config(tiny_config(key)).config, traced(key)
    assert lowered_gemms(config, training_workload(), "forward", "backward") == trace.whole


@pytest.mark.parametrize("key", DECODED)
def test_every_gemm_of_prefill_and_decode_is_lowered(key: str) -> None:
    """A prompt with its last token's logits, then one token against a cache that is longer than the windows."""
    config, model = read_hf_config(tiny_config(key)).config, build_on_meta(tiny_config(key), dtype="bfloat16")
    prefill = Workload(phase="prefill", micro_batch_size=BATCH_SIZE, seq_len=SEQ_LEN, attention="unfused")
    decode = Workload(phase="decode", micro_batch_size=BATCH_SIZE, context_len=CONTEXT_LEN, attention="unfused")
    traced_prefill, _ = trace_prefill(model, BATCH_SIZE, SEQ_LEN)
    assert without_layout(lowered_gemms(config, prefill, "forward")) == without_layout(traced_prefill)
    traced_decode = trace_decode(model, BATCH_SIZE, CONTEXT_LEN)
    # With few tokens transformers gathers one weight matrix per row; lowering counts the experts that rows may reach.
    lowered_decode = without_groups(without_layout(lowered_gemms(config, decode, "forward")))
    assert lowered_decode == without_groups(without_layout(traced_decode))


def only_weights(gemms: Counter[TracedGemm]) -> Counter[TracedGemm]:
    """Leave out batched GEMMs: those of attention, and those that transformers' scans are made of."""
    return Counter({gemm: count for gemm, count in gemms.items() if gemm.batch == 1})


@pytest.mark.parametrize("key", HYBRID_CONFIGS)
def test_every_projection_of_a_hybrid_is_lowered(key: str) -> None:
    """Weight GEMMs of a training step, of a prompt and of one token, of layers with scans and convolutions."""
    config, model = read_hf_config(tiny_config(key)).config, build_on_meta(tiny_config(key), dtype="bfloat16")
    workload = training_workload()
    recorded = trace_training(model, BATCH_SIZE, SEQ_LEN)
    forward, whole = (without_layout(each) for each in (recorded.forward, recorded.whole))

    assert only_weights(without_layout(lowered_gemms(config, workload, "forward"))) == only_weights(forward)
    assert only_weights(without_layout(lowered_gemms(config, workload, "forward", "backward"))) == only_weights(whole)

    if set(config.layer_types) <= {"mamba", "mamba2"}:
        return  # transformers computes the logits of the whole prompt
    prefill = Workload(phase="prefill", micro_batch_size=BATCH_SIZE, seq_len=SEQ_LEN, attention="unfused")
    traced_prefill, _ = trace_prefill(model, BATCH_SIZE, SEQ_LEN)
    lowered_prefill = without_layout(lowered_gemms(config, prefill, "forward"))
    assert only_weights(lowered_prefill) == only_weights(without_layout(traced_prefill))


@pytest.mark.parametrize("key", ["deepseek_v4", "deepseek_v4/ratios"])
def test_every_gemm_of_compressed_attention_is_lowered(key: str) -> None:
    """All GEMMs, batched ones and those of residual streams included, in training, a prompt and decode, and FLOPs."""
    config, model = read_hf_config(tiny_config(key)).config, build_on_meta(tiny_config(key), dtype="bfloat16")
    sizes = {"micro_batch_size": BATCH_SIZE, "attention": "unfused", "kernels": "torch"}
    training = Workload(seq_len=SEQ_LEN, **sizes)
    recorded = trace_training(model, BATCH_SIZE, SEQ_LEN)

    assert without_layout(lowered_gemms(config, training, "forward")) == without_layout(recorded.forward)
    assert without_layout(lowered_gemms(config, training, "forward", "backward")) == without_layout(recorded.whole)
    assert count_model_flops(config, training) == recorded.whole_flops

    prefill = Workload(phase="prefill", seq_len=SEQ_LEN, **sizes)
    decode = Workload(phase="decode", context_len=CONTEXT_LEN, **sizes)
    for workload, traced_gemms in (
        (prefill, trace_prefill(model, BATCH_SIZE, SEQ_LEN)[0]),
        (decode, trace_decode(model, BATCH_SIZE, CONTEXT_LEN)),
    ):
        lowered = without_groups(without_layout(lowered_gemms(config, workload, "forward")))
        assert lowered == without_groups(without_layout(traced_gemms))


@pytest.mark.parametrize("key", SPARSE_CONFIGS)
def test_every_projection_of_sparse_attention_is_lowered(key: str) -> None:
    """Weight GEMMs of the forward pass, those of the indexer among them, which transformers does not train."""
    recorded = trace_training(build_on_meta(tiny_config(key), dtype="bfloat16"), BATCH_SIZE, SEQ_LEN)
    config = read_hf_config(tiny_config(key)).config
    lowered = without_layout(lowered_gemms(config, training_workload(), "forward"))

    assert only_weights(lowered) == only_weights(without_layout(recorded.forward))


def test_llama_4_differs_in_its_experts_alone() -> None:
    """Transformers computes every expert where we route tokens; all other GEMMs are equal."""
    key = "llama4_text"
    lowered = without_layout(lowered_gemms(read_hf_config(tiny_config(key)).config, training_workload(), "forward"))
    recorded = without_layout(traced(key).forward)
    num_experts = tiny_config(key)["num_local_experts"]
    assert {gemm.groups for gemm in lowered - recorded} == {num_experts}
    assert {gemm.batch for gemm in recorded - lowered} == {num_experts}


# Code published with the model, and read as a type that is compared: LLaMA, DeepSeek-V3, MiniMax.
_OF_OTHER_CODE = {"exaone", "kimi_k2", "minimax_text_01"}
# Text models and towers of other names than those compared, with the same reader; test_images.py has DiT's.
_SAME_READER = {
    "qwen3_vl_moe_text", "qwen3_vl_moe_vision", "qwen3_5", "qwen3_5_vision", "qwen3_5_moe", "qwen3_5_moe_vision",
    "siglip2_vision_model", "dit", "DiTTransformer2DModel", "PixArtTransformer2DModel",
}  # fmt: skip


def test_every_type_with_a_table_is_compared() -> None:
    """A new table of a model type needs a config here or in test_images.py."""
    keys = (*TINY_CONFIGS, *SPARSE_CONFIGS, *ENCODERS, *VISION_LANGUAGE)
    compared = {model_type_of(key) for key in keys} | {f"{model_type_of(key)}_vision" for key in VISION_LANGUAGE}
    compared |= {
        config[part]["model_type"]
        for config in VISION_LANGUAGE.values()
        for part in ("text_config", "vision_config")
        if "model_type" in config[part]
    }

    assert set(FAMILIES) - compared == _OF_OTHER_CODE | _SAME_READER
    assert len({model_type_of(key) for key in WITH_LAYOUTS}) >= 20
    assert len({model_type_of(key) for key in DECODED}) >= 20
