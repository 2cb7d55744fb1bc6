"""A measured step may be given as tokens per second, of the job or of one device, in place of its time."""

from __future__ import annotations

from typing import Any

import pytest

import shapewright
from command_line import run
from shapewright.app.report.outputs.mfu import mfu_output
from shapewright.core.errors import WorkloadError

JOB: dict[str, Any] = {"device": "h100-sxm-80gb", "num_devices": 8, "global_batch_size": 64}
FLAGS = ["mfu", "llama-3-8b", "--device", "h100-sxm-80gb", "--gpus", "8", "--global-batch", "64", "--seq-len", "8192"]


@pytest.mark.parametrize(
    ("name", "rate"), [("tokens_per_s", 64 * 8192 / 5.0), ("tokens_per_s_per_device", 64 * 8192 / 5.0 / 8)]
)
def test_a_rate_gives_the_same_result_as_a_time(name: str, rate: float) -> None:
    """64 sequences of 8192 tokens in 5 s on 8 devices, given as a rate: the same result, and the rate is shown."""
    job = {**JOB, "workload": {"seq_len": 8192}}
    of_time = mfu_output(shapewright.mfu("llama-3-8b", **job, seconds=5.0)).to_json()
    of_rate = mfu_output(shapewright.mfu("llama-3-8b", **{**job, name: rate})).to_json()

    assert (of_time["given"], of_rate["given"]) == ("seconds", name)
    assert of_rate["seconds"] == pytest.approx(5.0)
    assert of_rate[name] == pytest.approx(rate)
    assert of_rate["mfu"] == pytest.approx(of_time["mfu"])


def test_rate_of_the_job_given_as_rate_of_a_device_is_noted() -> None:
    """A rate eight times too high exceeds the device's peak, and a note suggests a unit mix-up."""
    found = shapewright.mfu("llama-3-8b", tokens_per_s_per_device=80_000, **JOB)
    assert any("check tokens_per_s_per_device (of one device?)" in note for note in found.notes)


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({}, "one of seconds, tokens_per_s, tokens_per_s_per_device, steps_per_s, images_per_s, but none was given"),
        ({"seconds": 1.0, "tokens_per_s": 9.0}, "seconds and tokens_per_s were given; give only one"),
        ({"seconds": True}, "seconds=True must be a number from"),
        ({"tokens_per_s": 0.0}, "tokens_per_s=0.0 must be a number from"),
        ({"tokens_per_s": float("nan")}, "tokens_per_s=nan must be a number from"),
        ({"tokens_per_s_per_device": float("inf")}, "tokens_per_s_per_device=inf must be a number from"),
    ],
    ids=str,
)
def test_one_measurement_that_can_be(measured: dict[str, Any], words: str) -> None:
    """None, two, and what no step can have are refused with what is allowed."""
    with pytest.raises(WorkloadError, match=words):
        shapewright.mfu("llama-3-8b", **JOB, **measured)


def test_headline_states_the_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    """The headline distinguishes a predicted time from a measured one."""
    _, of_time, _ = run([*FLAGS, "--seconds", "5"], capsys)
    _, of_rate, _ = run([*FLAGS, "--tokens-per-s-per-gpu", "13107.2"], capsys)
    _, of_job, _ = run([*FLAGS, "--tokens-per-s", "104857.6"], capsys)

    assert ": 5 s per step of 64 x 8192 tokens" in of_time
    assert ": 5 s per step (from tokens/s/device) of 64 x 8192 tokens" in of_rate
    assert ": 5 s per step (from tokens/s) of 64 x 8192 tokens" in of_job


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "one of --seconds, --tokens-per-s, --tokens-per-s-per-gpu, --steps-per-s, --images-per-s"),
        (["--seconds", "1", "--tokens-per-s", "9"], "one of --seconds, --tokens-per-s, --tokens-per-s-per-gpu, "),
        (["--tokens-per-s-per-gpu", "0"], "tokens_per_s_per_device=0.0"),
    ],
)
def test_bad_measurement_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    code, out, err = run([*FLAGS, *arguments], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
