"""Output of utilization: peaks, the one-line form for logs, the report, and invalid measurements."""

from __future__ import annotations

import json
from math import fsum

import pytest

import shapewright
from command_line import run
from published_gpts import measured
from shapewright.app.cli.console import make_console
from shapewright.app.report.mfu import print_utilization, utilization_line
from shapewright.app.report.outputs.mfu import mfu_output

FLAGS = ["--num-layers", "48", "--hidden-size", "6144", "--num-heads", "64", "--vocab-size", "51200"]
JOB = ["--device", "a100-sxm-80gb", "--seconds", "1.10", "--gpus", "8", "--global-batch", "4", "--seq-len", "2048"]


def test_die_and_card_name_each_other() -> None:
    """One die of an MI250X is compared with its own peak, and the card's is named as well."""
    found = shapewright.mfu("gpt2", device="mi250x-gcd", seconds=1.0, num_devices=1, global_batch_size=8)
    assert found.peak_flops_per_s == 191.5e12
    assert found.other_peaks == {"dense bf16, per card (mi250x-card)": 383e12}


@pytest.mark.parametrize(
    ("device", "peaks"),
    [
        ("h100-sxm-80gb", {"sparse bf16 (2:4), per card": 1978.9}),
        ("b200-sxm-180gb", {"sparse bf16 (2:4), per package": 4500, "dense bf16, per die (1 of 2)": 1125}),
        ("mi250x-card", {"dense bf16, per die (mi250x-gcd)": 191.5}),
        ("mi300x", {"sparse bf16 (2:4), per package": 2614.9, "dense bf16, per die (1 of 8)": 163.425}),
        ("tpu-v5p", {}),
    ],
)
def test_every_peak_is_named(device: str, peaks: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    """The report names the peak that MFU divides by, and MFU for the others."""
    found = shapewright.mfu("llama-3-8b", device=device, seconds=9.0, num_devices=8, global_batch_size=64)
    data = mfu_output(found).to_json()
    print_utilization(mfu_output(found), make_console())
    printed = capsys.readouterr().out

    assert {name: rate / 1e12 for name, rate in found.other_peaks.items()} == pytest.approx(peaks)
    assert data["peak_kind"] == f"dense bf16, per {found.device.scope}"
    assert f"{data['peak_kind']} *" in printed
    for name, rate in found.other_peaks.items():
        assert name in printed
        assert data["other_peaks"][name]["mfu"] == pytest.approx(found.result.mfu * found.peak_flops_per_s / rate)
    sparse = next((rate * 1e12 for name, rate in peaks.items() if name.startswith("sparse")), None)
    assert data["sparse_peak_flops_per_s"] == (None if sparse is None else pytest.approx(sparse))


def test_line_for_logs_is_parsable() -> None:
    """The one-line form has name=value pairs that agree with the JSON."""
    found = measured("175B", "selective")
    facts = dict(pair.split("=") for pair in utilization_line(mfu_output(found)).split())
    full = mfu_output(found).to_json()

    assert float(facts["mfu"]) == pytest.approx(full["mfu"], abs=1e-4)
    assert float(facts["hfu"]) == pytest.approx(full["hfu"], abs=1e-4)
    assert facts["convention"] == "megatron"


def test_command_line_takes_a_model_of_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """The 22 B model in flags, without a layout: MFU 41.65 %, HFU 43.81 %, and a waterfall that adds up."""
    code, out, err = run(["mfu", *FLAGS, *JOB, "--recompute", "selective", "--json"], capsys)
    facts = json.loads(out)

    assert (code, err) == (0, "")
    assert (facts["mfu"], facts["hfu"]) == (pytest.approx(0.4165, abs=1e-4), pytest.approx(0.4381, abs=1e-4))
    assert facts["model_flops_per_s_per_device"] == pytest.approx(129.95e12, rel=1e-4)
    assert fsum(part["time_s"] for part in facts["waterfall"]) == pytest.approx(1.10)
    assert facts["reachable"]["mfu_low"] < facts["reachable"]["mfu"] < facts["reachable"]["mfu_high"]


def test_command_line_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    """The report names conventions, peak, waterfall and what is reachable; --oneline is one line."""
    _, report, _ = run(["mfu", *FLAGS, *JOB, "--recompute", "selective", "--tp", "8"], capsys)
    _, line, _ = run(["mfu", *FLAGS, *JOB, "--recompute", "selective", "--tp", "8", "--oneline"], capsys)

    for words in (
        "41.7 %",
        "dense bf16, per card",
        "megatron-causal",
        "unexplained",
        "reachable: ",
        "sparse bf16 (2:4)",
    ):
        assert words in report
    assert line.startswith("mfu=0.4165 hfu=0.4381 ")
    assert line.count("\n") == 1


@pytest.mark.parametrize(
    ("recompute", "words"),
    [
        ([], "bf16, no recompute"),
        (["--recompute", "full"], "bf16, full recompute\n"),
        (["--recompute", "full", "--recompute-layers", "3"], "full recompute of 3 layers a stage"),
        (["--recompute", "selective", "--recompute-modules", "mlp,layernorm"], "selective recompute of layernorm,mlp"),
    ],
)
def test_headline_states_recomputation(recompute: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Some layers are not all of them, and some parts are not the usual one."""
    _, report, _ = run(["mfu", *FLAGS, *JOB, "--tp", "8", *recompute], capsys)
    assert words in report.splitlines(keepends=True)[0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seconds", "1", "--gpus", "8"], "Missing option '--global-batch'"),
        (["--seconds", "1", "--global-batch", "8"], "Missing option '--gpus'"),
        (["--seconds", "-1", "--gpus", "8", "--global-batch", "8"], "seconds=-1.0"),
        (["--seconds", "1", "--gpus", "8", "--global-batch", "0"], "global_batch_size=0"),
        (["--seconds", "1", "--gpus", "8", "--global-batch", "8", "--json", "--oneline"], "cannot be combined"),
    ],
)
def test_bad_measurement_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    code, out, err = run(["mfu", "gpt2", "--device", "a100-sxm-80gb", *arguments], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
