"""Serving plans of vision-language models: prompts with images, which run through the vision tower."""

from __future__ import annotations

from typing import Any

import pytest

import shapewright
from shapewright.app.api.serving import build_served
from shapewright.app.report.outputs.serving import serve_plan_output
from shapewright.core.errors import WorkloadError
from shapewright.optimize.serving.pass_times import PassShape, predict_passes
from shapewright.optimize.serving.point import Instance
from shapewright.optimize.serving.request import ServingFormat, ServingRequest
from shapewright.optimize.serving.traffic.pass_table import price_table
from shapewright.optimize.serving.traffic.stream import pass_s

H100 = "h100-sxm-80gb"
MODEL = "qwen2.5-vl-7b"
# The projections of the model as current engines fuse them.
FUSED = {"fused_qkv": True, "fused_gate_up": True}


def instance(images: int) -> Instance:
    """One device that serves prompts of 2,000 tokens."""
    request = ServingRequest(prompt_len=2000, output_len=200)
    scenario = build_served(MODEL, {"device": H100, "workload": {"images": images}}, new_len=request.new_len)
    return Instance(scenario, ServingFormat("bf16", "bf16", "bf16"), request)


def test_a_whole_prompt_takes_as_long_as_predict_says() -> None:
    """The images of a prompt add to its pass what they add to a prefill."""
    whole = PassShape(prefill_tokens=2000)
    (with_images,), (text,) = (predict_passes(instance(images), [whole]) for images in (2, 0))
    step_s, text_step_s = (
        shapewright.predict(
            MODEL,
            device=H100,
            overrides=FUSED,
            workload={"phase": "prefill", "micro_batch_size": 1, "seq_len": 2000, "images": images},
        ).step_time_s
        for images in (2, 0)
    )

    assert text.middle_s == pytest.approx(text_step_s, rel=1e-9)
    assert with_images.middle_s - text.middle_s == pytest.approx(step_s - text_step_s, rel=1e-6)
    assert with_images.middle_s > 1.05 * text.middle_s


@pytest.mark.parametrize("num_passes", [2, 4, 10])
def test_parts_of_a_prompt_take_parts_of_its_images(num_passes: int) -> None:
    """The passes of one prompt add up to at least its images once, and not to twice as much."""
    parts = [PassShape(decode_batch=8, decode_context=2100, prefill_tokens=2000 // num_passes)] * num_passes
    whole = [PassShape(prefill_tokens=2000)]

    def added_s(shapes: list[PassShape]) -> float:
        return sum(
            one.middle_s - other.middle_s
            for one, other in zip(*(predict_passes(instance(images), shapes) for images in (2, 0)), strict=True)
        )

    assert added_s(whole) <= added_s(parts) < 2.0 * added_s(whole)


def test_images_slow_prompts_and_the_tower_takes_memory() -> None:
    """With images, weights include the tower, and first tokens come later; decoding alone takes as long."""
    plans = [
        shapewright.serve_plan(
            MODEL, device=H100, prompt_len=2000, output_len=200, num_devices=1, workload={"images": images}, formats=()
        )
        for images in (0, 2)
    ]
    text, with_images = (serve_plan_output(plan).to_json() for plan in plans)
    decode = PassShape(decode_batch=8, decode_context=2100)
    memory = [
        shapewright.predict(MODEL, device=H100, workload={"phase": "prefill", "seq_len": 2000, "images": images}).memory
        for images in (0, 2)
    ]

    assert "images" not in text["request"]
    assert with_images["request"]["images"] == 2
    assert with_images["capacities"][0]["weights_bytes"] - text["capacities"][0]["weights_bytes"] == pytest.approx(
        memory[1].weights_bytes - memory[0].weights_bytes
    )
    assert with_images["best"]["tokens_per_s"] < text["best"]["tokens_per_s"]
    assert with_images["shortest_ttft_s"] > text["shortest_ttft_s"]
    assert predict_passes(instance(2), [decode]) == predict_passes(instance(0), [decode])


def test_traffic_with_images_is_slower() -> None:
    """Simulated requests wait for the images of their prompts too."""
    kept: dict[str, Any] = {
        "device": H100, "arrivals": "4/s", "prompt_len": 2000, "output_len": 100, "num_requests": 300, "num_devices": 1,
    }  # fmt: skip
    text, with_images = (
        shapewright.serve_traffic(MODEL, **kept, workload={"images": images}).runs[0].figures for images in (0, 2)
    )

    assert text is not None
    assert with_images is not None
    assert with_images.times["ttft"].p50_s > 1.05 * text.times["ttft"].p50_s


@pytest.mark.parametrize(
    ("model", "images", "words"),
    [
        (MODEL, 20, "images=20 make"),
        ("llama-3-8b", 1, "vision tower"),
        ("llama-3.2-11b-vision", 1, "attend to images"),
        (MODEL, -1, "images=-1"),
    ],
)
def test_images_that_cannot_be_served_are_refused(model: str, images: int, words: str) -> None:
    """Images of models without a tower, with layers that attend to them, or with more tokens than a prompt."""
    with pytest.raises(shapewright.ShapewrightError, match=words) as refusal:
        shapewright.serve_plan(model, device=H100, prompt_len=2000, output_len=200, workload={"images": images})

    assert isinstance(refusal.value, WorkloadError) or model == "llama-3-8b"


def test_decoding_sequences_bring_no_images_to_a_simulated_pass() -> None:
    """256 sequences that decode beside 256 tokens of a prompt double the tokens of a pass, and not its images."""
    served = instance(2)
    table = price_table(served, max_sequences=256, max_tokens=2048, longest_len=2200).table
    shape = PassShape(256, 1024, prefill_tokens=256)
    (exact,) = predict_passes(served, [shape])
    (text,) = predict_passes(instance(0), [shape])

    assert exact.middle_s > 1.05 * text.middle_s
    assert pass_s(table, 256, 256 * 1024, 256, 256 * 0.5 * 257) == pytest.approx(exact.middle_s, rel=0.02)
