"""build_scenario: defaults that suit model and device, and a note for every option without effect."""

from __future__ import annotations

import pytest

from shapewright.core.errors import UnknownRateError, WorkloadError
from shapewright.hardware.loader import load_device
from shapewright.models.read import read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.build import build_scenario
from shapewright.workload.layout import ParallelLayout
from shapewright.workload.workload import Workload


@pytest.mark.parametrize(
    ("device", "dtype", "attention"),
    [("v100-sxm2-16gb", "fp16", "unfused"), ("t4", "fp16", "unfused"), ("a100-sxm-40gb", "bf16", "flash")],
)
def test_defaults_fit_the_device(device: str, dtype: str, attention: str) -> None:
    """bf16 and fused attention where the device has them; Volta and Turing have neither."""
    workload = build_scenario("gpt2", device).workload

    assert (workload.dtype, workload.attention) == (dtype, attention)


@pytest.mark.parametrize(("model", "seq_len"), [("gpt2", 1024), ("bert-base", 512), ("llama-3-8b", 2048)])
def test_default_length_fits_the_model(model: str, seq_len: int) -> None:
    """2048 tokens, or the model's own maximum where that is less."""
    assert build_scenario(model, "a100-sxm-40gb").workload.seq_len == seq_len


def test_decode_continues_a_full_context() -> None:
    """The default cache is full but for the new token."""
    workload = build_scenario("gpt2", "a100-sxm-40gb", workload={"phase": "decode"}).workload

    assert (workload.context_len, workload.query_len, workload.kv_len) == (1023, 1, 1024)


def test_objects_are_taken_as_they_are() -> None:
    """A Workload, ParallelLayout, Device and TransformerConfig of the caller's are used unchanged."""
    config = TransformerConfig(hidden_size=1024, num_layers=2, num_heads=16, vocab_size=1000)
    device = load_device("l40s")
    workload, layout = Workload(seq_len=77), ParallelLayout(tensor_parallel=2)
    scenario = build_scenario(config, device, workload=workload, layout=layout)

    assert scenario.config is config
    assert scenario.device is device
    assert scenario.workload is workload
    assert scenario.layout is layout
    assert scenario.notes == ()


def test_model_object_is_as_good_as_its_name() -> None:
    """A model that was read before gives the same scenario."""
    assert build_scenario(read_model("gpt2"), "l40s") == build_scenario("gpt2", "l40s")


def test_encoders_do_not_decode() -> None:
    """Decoding with an encoder is an error that lists the supported phases."""
    with pytest.raises(WorkloadError, match="bert-base is an encoder and does not decode; use phase='prefill'"):
        build_scenario("bert-base", "l40s", workload={"phase": "decode"})


@pytest.mark.parametrize(
    ("model", "workload", "words"),
    [
        ("gpt2", {"phase": "decode", "seq_len": 5}, "seq_len=5 has no effect in decode"),
        ("gpt2", {"kv_cache_dtype": "fp8"}, "kv_cache_dtype=fp8 has no effect in train"),
    ],
)
def test_fields_without_effect_are_noted(model: str, workload: dict[str, object], words: str) -> None:
    """A given field without effect is noted."""
    assert any(words in note for note in build_scenario(model, "l40s", workload=workload).notes)


def test_source_length_of_an_encoder_decoder_counts() -> None:
    """Decoding T5, seq_len is the length of the source: no note, and more of it takes longer."""
    short, long = (
        build_scenario("t5-base", "l40s", workload={"phase": "decode", "seq_len": seq_len, "context_len": 10})
        for seq_len in (64, 512)
    )

    assert not any("no effect" in note for note in long.notes)
    assert short.predict().step_time_s < long.predict().step_time_s


def test_activations_of_narrow_formats_need_a_rate() -> None:
    """T4 has int8 but no bf16, in which int8's activations are: the advice is a format that it can run."""
    with pytest.raises(UnknownRateError, match="activations are in bf16") as found:
        build_scenario("gpt2", "t4", workload={"dtype": "int8", "phase": "decode"})

    assert str(found.value).endswith("set dtype to fp16 or fp32, with weight_dtype='int8' for narrow weights")
    build_scenario("gpt2", "t4", workload={"dtype": "fp16", "weight_dtype": "int8", "phase": "decode"})
