"""Models that transformers builds from a config: all of their parameters and layers are traced."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="tracing needs the trace extra (torch)")
transformers = pytest.importorskip("transformers", reason="tracing configs needs the trace extra (transformers)")

from shapewright.lowering.torch_trace.huggingface import trace_built_model

pytestmark = pytest.mark.oracle

# An encoder and a decoder that differ in every size.
SIZES = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 8, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 160, "vocab_size": 320, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def trace(config: dict[str, Any]) -> Any:
    """Trace of a training step."""
    return trace_built_model(config, source="config.json", batch_size=2, seq_len=16)


@pytest.mark.parametrize("model_type", ["bart", "mbart", "pegasus", "blenderbot", "plbart", "marian", "whisper"])
def test_encoders_and_decoders_have_their_own_sizes(model_type: str) -> None:
    """All parameters that transformers builds are there, and every layer of encoder and decoder runs."""
    config = {"model_type": model_type, **SIZES}
    kind = transformers.AutoModelForSpeechSeq2Seq if model_type == "whisper" else transformers.AutoModelForSeq2SeqLM
    with torch.device("meta"):
        model = kind.from_config(transformers.AutoConfig.for_model(**config))
    found = trace(config)
    runs = {linear.path: (linear.count, linear.out_features) for linear in found.linears}

    assert found.num_parameters == sum(one.numel() for one in model.parameters())
    assert runs["model.encoder.layers.0-1.fc1"] == (2, 96)
    assert runs["model.decoder.layers.0-2.fc1"] == (3, 160)
