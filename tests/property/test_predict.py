"""Properties of every predicted step, for any shape, device and layout."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shapewright.core.errors import ShapewrightError
from shapewright.hardware.loader import load_device
from shapewright.lowering.operations.collective import Collective
from shapewright.models.read import list_presets, load_preset, read_model
from shapewright.models.transformer import TransformerConfig
from shapewright.prediction.build import build_scenario
from shapewright.prediction.predict import Prediction, predict
from shapewright.workload.workload import Workload

DEVICES = ("a100-sxm-40gb", "h100-sxm-80gb", "v100-sxm2-16gb", "l40s", "mi300x", "tpu-v5p", "groq-lpu-v1")


@st.composite
def shapes(draw: st.DrawFn) -> TransformerConfig:
    """Small and large models, aligned and odd, dense and sparse, of one stack and of two."""
    num_kv_heads = draw(st.sampled_from([1, 2, 5, 8]))
    num_heads = num_kv_heads * draw(st.sampled_from([1, 2, 4]))
    head_dim = draw(st.sampled_from([32, 64, 80, 96, 128, 133]))
    experts = {"num_experts": 8, "num_experts_per_token": 2} if draw(st.booleans()) else {}
    stack = draw(st.sampled_from(["decoder", "decoder", "encoder-decoder"]))
    return TransformerConfig(
        hidden_size=num_heads * head_dim,
        num_layers=draw(st.integers(1, 8)),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=draw(st.sampled_from([1, 1000, 50257, 50304])),
        intermediate_size=draw(st.integers(1, 20_000)),
        gated_mlp=draw(st.booleans()),
        stack=stack,
        num_encoder_layers=2 if stack == "encoder-decoder" else 0,
        **experts,
    )


@st.composite
def predictions(draw: st.DrawFn) -> Prediction:
    """A step of some shape on some device; impossible ones are left out."""
    device = draw(st.sampled_from(DEVICES))
    workload = {
        "phase": draw(st.sampled_from(["train", "prefill", "decode"])),
        "micro_batch_size": draw(st.sampled_from([1, 3, 8])),
        "seq_len": draw(st.sampled_from([1, 128, 2000])),
        "context_len": draw(st.sampled_from([0, 1, 999])),
    }
    if device not in {"mi300x", "tpu-v5p"}:
        workload["dtype"] = "fp16"
    layout = {
        "tensor_parallel": draw(st.sampled_from([1, 1, 2])),
        "pipeline_parallel": draw(st.sampled_from([1, 1, 2])),
        "data_parallel": draw(st.sampled_from([1, 2])),
        "context_parallel": draw(st.sampled_from([1, 1, 2])),
    }
    try:
        return build_scenario(draw(shapes()), device, workload=workload, layout=layout).predict()
    except ShapewrightError:
        assume(False)
        raise


@settings(max_examples=120)
@given(predictions())
def test_interval_holds_the_prediction(prediction: Prediction) -> None:
    """The interval contains the time, of the step and of every operation, and every number is finite."""
    assert 0.0 < prediction.step_time_low_s <= prediction.step_time_s <= prediction.step_time_high_s < math.inf
    for entry in prediction.operations:
        assert 0.0 <= entry.price.low_s <= entry.price.time_s <= entry.price.high_s < math.inf
        assert 0.0 <= entry.exposed_fraction <= 1.0


@settings(max_examples=120)
@given(predictions())
def test_no_step_is_faster_than_its_rooflines(prediction: Prediction) -> None:
    """Neither the step nor its lower end is below what the data sheet allows its exposed operations."""
    floor_s = sum(
        float(entry.price.roofline_s) * int(entry.operation.repeats) * entry.exposed_fraction
        for entry in prediction.operations
        if entry.operation.stage == "every" and entry.operation.pass_name != "step"
    )

    assert prediction.step_time_s >= floor_s * (1.0 - 1e-12)
    assert all(entry.price.time_s >= entry.price.roofline_s * (1.0 - 1e-12) for entry in prediction.operations)


@settings(max_examples=60)
@given(shapes(), st.sampled_from(["a100-sxm-40gb", "h100-sxm-80gb"]), st.sampled_from([2, 4, 8]))
def test_replicas_leave_computation_alone(config: TransformerConfig, device: str, data_parallel: int) -> None:
    """Each replica computes what one device does: replicas add communication, and nothing else."""
    alone = build_scenario(config, device).predict()
    together = build_scenario(config, device, layout={"data_parallel": data_parallel}).predict()

    def computation(prediction: Prediction) -> dict[tuple[str, str], float]:
        return {
            (entry.operation.name, entry.operation.pass_name): entry.total_time_s
            for entry in prediction.operations
            if not isinstance(entry.operation, Collective)
        }

    assert computation(together) == computation(alone)
    assert together.tokens_per_step == data_parallel * alone.tokens_per_step
    assert together.step_time_s >= alone.step_time_s


@settings(max_examples=40)
@given(shapes(), st.sampled_from(["a100-sxm-40gb", "l40s", "mi300x"]))
def test_layers_add_up(config: TransformerConfig, device: str) -> None:
    """Each further set of layers takes as long as the one before."""
    times = [
        build_scenario(replace(config, num_layers=layers), device, workload={"phase": "prefill", "dtype": "fp16"})
        .predict()
        .step_time_s
        for layers in (config.num_layers, 2 * config.num_layers, 3 * config.num_layers)
    ]

    assert times[2] - times[1] == pytest.approx(times[1] - times[0], rel=1e-6)


@settings(max_examples=40)
@given(predictions())
def test_rates_follow_from_times(prediction: Prediction) -> None:
    """Tokens, FLOPs and utilization are the step's, divided by its time and its devices."""
    per_device_s = prediction.step_time_s * prediction.layout.num_devices
    peak = prediction.device.peak_flops_per_s(prediction.workload.dtype)

    assert prediction.tokens_per_s_per_device == pytest.approx(prediction.tokens_per_step / per_device_s)
    assert prediction.mfu == pytest.approx(prediction.model_flops_per_s / peak)
    assert prediction.hfu >= prediction.mfu * (1.0 - 1e-12)


@settings(max_examples=40)
@given(predictions())
def test_options_without_effect_cost_nothing(prediction: Prediction) -> None:
    """No-op options do not change the time: wide windows, default formats, sharding over one replica."""
    config, workload, layout = prediction.config, prediction.workload, prediction.layout
    if config.stack == "decoder":
        config = replace(config, attention_windows=(1 << 20,))
    if workload.is_training and layout.data_parallel * layout.context_parallel == 1:
        layout = replace(layout, zero_stage=3)
    elif not workload.is_training:
        workload = replace(workload, weight_dtype=workload.dtype, kv_cache_dtype=workload.dtype)
    again = build_scenario(config, prediction.device, workload=workload, layout=layout).predict()

    assert again.step_time_s == pytest.approx(prediction.step_time_s, rel=1e-9)
    assert again.mfu == pytest.approx(prediction.mfu, rel=1e-9)


@pytest.mark.parametrize("device", ["a100-sxm-80gb", "h100-sxm-80gb", "h20-96gb", "gb300", "mi300x", "rtx-4090"])
@pytest.mark.parametrize("uncalibrated", [False, True])
def test_more_work_is_not_faster(device: str, *, uncalibrated: bool) -> None:
    """Longer contexts, larger batches and longer prompts take no less time with fused attention.

    Kernels switch at some sizes, which may cost 3 %. Unfused, odd lengths lose up to a third of the rate of the next
    multiple of 8 in the GEMMs of attention, whose rows are as long as the keys; that is real.
    """
    model = read_model("llama-3.1-8b").config
    chosen = replace(load_device(device), uncalibrated=uncalibrated)
    contexts = (100, 255, 256, 1000, 1001, 1024, 2047, 2048, 5000)
    batches = (1, 2, 3, 7, 8, 15, 16, 17, 31, 48, 65, 128, 200)
    lengths = (100, 127, 128, 200, 256, 511, 512, 1000, 1024, 2000)
    for field, sizes, start in (
        ("context_len", contexts, Workload(phase="decode", micro_batch_size=8)),
        ("micro_batch_size", batches, Workload(phase="decode", context_len=999)),
        ("seq_len", lengths, Workload(phase="prefill", micro_batch_size=1)),
    ):
        times_s = [
            predict(model, device=chosen, workload=replace(start, **{field: size})).step_time_s for size in sizes
        ]
        assert all(after > 0.97 * before for before, after in itertools.pairwise(times_s)), (field, times_s)


@settings(max_examples=60)
@given(st.sampled_from(list_presets()), st.randoms(use_true_random=False))
def test_order_of_keys_changes_nothing(name: str, random: Random) -> None:
    """The order of keys in a config does not matter."""
    values = dict(load_preset(name).config)
    keys = list(values)
    random.shuffle(keys)

    assert read_model({key: values[key] for key in keys}).config == read_model(values).config


@settings(max_examples=30)
@given(st.sampled_from([1, 2, 8]), st.sampled_from([64, 80, 128]), st.integers(1, 4), st.integers(1, 9000))
def test_equal_shapes_of_other_types_take_as_long(kv_heads: int, head_dim: int, layers: int, width: int) -> None:
    """Mistral without windows, and Qwen2 without its biases, are Llama under another name."""
    values = {
        "hidden_size": 8 * head_dim, "num_attention_heads": 8, "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers, "intermediate_size": width, "vocab_size": 32_000, "sliding_window": None,
    }  # fmt: skip
    times = {
        build_scenario({**values, "model_type": name}, "a100-sxm-80gb", overrides={"qkv_bias": False})
        .predict()
        .step_time_s
        for name in ("llama", "mistral", "qwen2")
    }

    assert len(times) == 1
