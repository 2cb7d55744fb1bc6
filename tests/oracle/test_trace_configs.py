"""Models that transformers builds from a config: all of their parameters and layers are traced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="tracing needs the trace extra (torch)")
transformers = pytest.importorskip("transformers", reason="tracing configs needs the trace extra (transformers)")

import shapewright
from shapewright.core.errors import TraceError
from shapewright.lowering.operations.attention import Attention
from shapewright.lowering.torch_trace.child import trace_config
from shapewright.lowering.torch_trace.huggingface import trace_built_model
from shapewright.models.config_file import read_json_file

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


@pytest.mark.parametrize("model_type", ["m2m_100", "bart"])
def test_no_layer_is_dropped(model_type: str) -> None:
    """Layers that training drops at random all run, and a note says so."""
    config = {"model_type": model_type, **SIZES, "encoder_layerdrop": 0.2, "decoder_layerdrop": 0.1}
    found = trace(config)

    assert {"model.encoder.layers.0-1.fc1", "model.decoder.layers.0-2.fc1"} <= {one.path for one in found.linears}
    assert "with encoder_layerdrop=0 instead of 0.2, so that every layer runs" in found.notes[0]
    assert "with decoder_layerdrop=0 instead of 0.1, so that every layer runs" in found.notes[0]


def test_the_reason_of_a_refused_config_is_said() -> None:
    """What transformers refuses is one line, with the reason that follows in its own message."""
    with pytest.raises(TraceError, match=r"config: .*hidden size \(64\) is not a multiple .* heads \(5\)$") as found:
        trace({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 5})
    assert "\n" not in str(found.value)


@pytest.mark.parametrize("limit", ["Infinity", '{"__float__": "Infinity"}'])
def test_infinite_limits_are_read_as_transformers_writes_them(limit: str, tmp_path: Path) -> None:
    """Both forms build the model of a finite limit."""
    config = {
        "model_type": "mamba2", "hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1,
        "num_hidden_layers": 2, "vocab_size": 320,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config)[:-1] + f', "time_step_limit": [0.0, {limit}]}}', encoding="utf-8")
    found = trace_config(read_json_file(path), "config.json", batch_size=2, seq_len=16)

    assert found.operations == trace(config | {"time_step_limit": [0.0, 1e30]}).operations


@pytest.mark.parametrize(("seq_len", "is_noted"), [(200, True), (16, False)])
def test_a_loop_over_tokens_is_noted(seq_len: int, is_noted: bool) -> None:
    """Without its kernel, transformers runs the recurrence of RWKV token by token."""
    config = {"model_type": "rwkv", "vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "context_length": 512}
    found = trace_built_model(config, source="config.json", batch_size=1, seq_len=seq_len, phase="prefill")

    notes = [note for note in found.notes if "loop over tokens" in note]
    assert [note.partition(":")[0] for note in notes] == ["rwkv.blocks.0-1.attention"] * is_noted


class Dropping(torch.nn.Module):
    """Two layers, each of which is left out in a share of the steps."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)])
        self.rate = rate

    def forward(self, x: Any) -> Any:
        """Apply the layers that are kept."""
        for layer in self.layers:
            if torch.rand([]) < self.rate:
                continue
            x = layer(x)
        return x


@pytest.mark.parametrize(("rate", "is_noted"), [(0.0, False), (0.3, True)])
def test_comparisons_with_random_numbers_have_their_likelier_outcome(rate: float, is_noted: bool) -> None:
    """Layers that are seldom dropped run, and a note says so where one outcome is not certain."""
    found = shapewright.trace(Dropping(rate), "x=float32[8,64]")

    assert [(linear.path, linear.count) for linear in found.linears] == [("layers.0-1", 2)]
    assert any("likelier outcome" in note for note in found.notes) == is_noted


def test_a_window_without_a_causal_mask_has_two_sides() -> None:
    """ModernBERT's window of 128 is 64 tokens before and after each, which transformers gives flash attention."""
    config = {
        "model_type": "modernbert", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 96, "vocab_size": 320, "local_attention": 128, "global_attn_every_n_layers": 3,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
    }  # fmt: skip
    found = trace_built_model(config, source="config.json", batch_size=1, seq_len=512, phase="prefill")
    attention = [one for one in found.operations if isinstance(one, Attention)]

    assert [(one.causal, one.window_size, one.repeats) for one in attention] == [(False, 0, 1), (False, 129, 2)]
