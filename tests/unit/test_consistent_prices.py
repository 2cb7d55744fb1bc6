"""Every function that prices a step gets the same time as predict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import shapewright
from command_line import run
from shapewright.app.report.review import explain_prediction, gather_review
from shapewright.core.errors import CalibrationError, WorkloadError
from shapewright.prediction.build import build_scenario
from shapewright.pricing.software import software_names

MODEL, DEVICE = "gpt3-125m", "a100-sxm-80gb"
JOB: dict[str, Any] = {"workload": {"micro_batch_size": 2}, "layout": {"data_parallel": 4, "zero_stage": 3}}

STEPS: dict[str, Callable[..., float | None]] = {
    "check": lambda **job: shapewright.check(MODEL, device=DEVICE, **job).prediction.step_time_s,
    "compare": lambda **job: shapewright.compare(MODEL, devices=[DEVICE], **job).rows[0].prediction.step_time_s,
    "search": lambda **job: (
        shapewright.search(MODEL, device=DEVICE, vary=["vocab"], **job).baseline.prediction.step_time_s
    ),
    "sweep": lambda **job: (
        shapewright.sweep(MODEL, device=DEVICE, axes={"micro_batch_size": [2]}, **job).rows[0].prediction.step_time_s
    ),
    "report": lambda **job: gather_review(build_scenario(MODEL, DEVICE, **job), no_search=True).check.step_time_s,
    "mfu": lambda **job: (
        shapewright.mfu(
            MODEL, device=DEVICE, seconds=1.0, num_devices=4, global_batch_size=8, **job
        ).prediction.step_time_s
    ),
    "memory": lambda **job: shapewright.fits(MODEL, device=DEVICE, **job).offload.step_time_s,
}


@pytest.mark.parametrize("verb", STEPS)
@pytest.mark.parametrize("how", [{"software": "fsdp-2023"}, {"uncalibrated": True}, {}])
def test_every_verb_prices_the_step_that_predict_prices(verb: str, how: dict[str, Any]) -> None:
    """Software, and leaving measurements aside, mean the same to every verb."""
    step_s = shapewright.predict(MODEL, device=DEVICE, **JOB, **how).step_time_s

    found_s = STEPS[verb](**JOB, **how)

    # Offload adds what the host link leaves in the open.
    assert found_s is not None
    assert found_s >= step_s if verb == "memory" else found_s == step_s


def test_remedies_are_priced_with_the_software() -> None:
    """What makes a job fit takes longer with a generation that hides no traffic."""
    steps_s = [
        shapewright.fits("llama-2-7b", device=DEVICE, layout={"data_parallel": 8}, software=software)
        .fit_options[0]
        .step_time_s
        for software in ("tuned", "fsdp-2023")
    ]

    assert steps_s[0] is not None
    assert steps_s[1] is not None
    assert steps_s[1] > 1.02 * steps_s[0]


@pytest.mark.parametrize("how", [{"software": name} for name in software_names()] + [{"uncalibrated": True}])
def test_waterfall_of_a_prediction_has_no_remainder(how: dict[str, Any]) -> None:
    """From the peak to the step as its own software and records price it, part by part."""
    scenario = build_scenario(MODEL, DEVICE, **JOB, **how)
    found = explain_prediction(scenario.predict())
    parts_s = {part.name: part.time_s for part in found.waterfall}

    assert parts_s.get("unexplained", 0.0) == pytest.approx(0.0, abs=1e-9)
    assert sum(parts_s.values()) == pytest.approx(found.seconds, rel=1e-9)


def test_search_lists_shapes_with_the_software_of_predict() -> None:
    """A listed shape has the step that predict gives it with the same software, on several devices as on one."""
    job = {"layout": {"data_parallel": 8, "zero_stage": 3}, "software": "megatron-deepspeed-2021"}
    found = shapewright.search("gpt3-2.7b", devices=[DEVICE, "h100-sxm-80gb"], vary=["heads", "vocab"], **job)
    best = found.candidates[0]

    alone = shapewright.predict(best.config, device=DEVICE, workload=best.prediction.workload, **job)

    assert best.prediction.software == "megatron-deepspeed-2021"
    assert alone.step_time_s == best.prediction.step_time_s


@pytest.mark.parametrize("verb", STEPS)
def test_software_has_the_same_error_everywhere(verb: str) -> None:
    """An unknown generation, and training software for serving, are one clear line from every verb."""
    with pytest.raises(CalibrationError, match=r"unknown software 'fsdp-2032'; .*choose one of tuned"):
        STEPS[verb](software="fsdp-2032")
    with pytest.raises(WorkloadError, match="software='fsdp-2024' is training software and means nothing in prefill"):
        STEPS[verb](workload={"phase": "prefill"}, software="fsdp-2024")


SAID = {
    "predict": [],
    "check": [],
    "search": ["--vary", "vocab"],
    "memory": [],
    "mfu": ["--seconds", "1", "--gpus", "4", "--global-batch", "8"],
    "plan": ["--gpus", "4", "--global-batch", "8"],
}


@pytest.mark.parametrize("command", SAID)
def test_the_software_is_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Text and JSON name the software of the times unless it is the default."""
    job = [command, MODEL, "--device", DEVICE, *SAID[command]]
    _, text, _ = run([*job, "--software", "fsdp-2023"], capsys)
    _, facts, _ = run([*job, "--software", "fsdp-2023", "--json"], capsys)
    _, usual, _ = run(job, capsys)

    assert "software of fsdp-2023" in text
    assert '"software": "fsdp-2023"' in facts
    assert "software of" not in usual
