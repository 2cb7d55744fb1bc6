"""The same job over devices: rows, money, energy, bounds, refusals, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import shapewright
from command_line import run
from shapewright.core.errors import ConfigError, DeviceError, UnknownDeviceError, WorkloadError
from shapewright.prediction.compare import BOUNDS, Comparison

DEVICES = ("a100-sxm-80gb", "h100-sxm-80gb", "h200-sxm-141gb")
JOB = {"micro_batch_size": 1, "seq_len": 4096}


def compared(**changes: object) -> Comparison:
    """Llama-3-8B over eight devices of three kinds."""
    job = {"devices": DEVICES, "workload": JOB, "layout": {"tensor_parallel": 8}} | changes
    return shapewright.compare("llama-3-8b", **job)


def test_rows_are_predictions() -> None:
    """Each row equals the prediction for that device, in the given order."""
    found = compared()
    assert tuple(row.device.name for row in found.rows) == DEVICES
    for row in found.rows:
        alone = shapewright.predict("llama-3-8b", device=row.device, workload=JOB, layout={"tensor_parallel": 8})
        assert row.prediction is not None
        assert row.prediction.step_time_s == alone.step_time_s
        assert row.tokens_per_s == pytest.approx(8 * alone.tokens_per_s_per_device)
        assert row.fits


def test_speed_is_relative_to_the_first_that_runs() -> None:
    """A refused device is no base: the second row is 1, and a Hopper is faster than an Ampere."""
    found = compared(devices=("cerebras-wse-3", *DEVICES))
    speeds = [found.speed_fraction(row) for row in found.rows]

    assert speeds[:2] == [None, 1.0]
    assert speeds[2] is not None
    assert speeds[2] > 1.5


def test_tokens_per_dollar_by_hand() -> None:
    """Tokens a second and device, times 3600, over dollars an hour; devices without a price have none."""
    found = compared(usd_per_hour={"h100_sxm": 2.5})  # an alias does
    by_name = {row.device.name: row for row in found.rows}
    priced = by_name["h100-sxm-80gb"]

    assert priced.prediction is not None
    assert priced.tokens_per_usd == pytest.approx(priced.prediction.tokens_per_s_per_device * 3600 / 2.5)
    assert by_name["a100-sxm-80gb"].tokens_per_usd is None


def test_tokens_per_joule_take_the_board_power() -> None:
    """Tokens a second over watts are tokens a joule; the notes call the power an upper bound."""
    found = compared()
    row = found.rows[1]

    assert row.prediction is not None
    assert row.tokens_per_joule == pytest.approx(row.prediction.tokens_per_s_per_device / 700)
    assert any("upper bound" in note for note in found.notes)


@pytest.mark.parametrize(
    ("workload", "layout", "largest"),
    [
        ({"micro_batch_size": 4, "seq_len": 4096}, {}, "compute"),
        ({"phase": "decode", "micro_batch_size": 1, "context_len": 1000}, {}, "memory"),
        (
            {"micro_batch_size": 1, "seq_len": 1024, "global_batch_size": 1},
            {"pipeline_parallel": 16},
            "bubble",
        ),
    ],
    ids=["train", "decode", "deep pipeline"],
)
def test_bounds_are_shares_of_the_step(workload: dict[str, object], layout: dict[str, int], largest: str) -> None:
    """Bounds add up to the whole step; large GEMMs are compute-bound, single tokens memory-bound."""
    row = compared(workload=workload, layout=layout).rows[0]

    assert set(row.bound_fractions) == set(BOUNDS)
    assert sum(row.bound_fractions.values()) == pytest.approx(1.0)
    assert row.bound_by == largest


def test_device_that_cannot_run_is_a_row() -> None:
    """fp8 on an A100, and a device without a rate: the row has the reason, the others are predicted."""
    found = compared(devices=("a100-sxm-80gb", "cerebras-wse-3", "h100-sxm-80gb"), workload={**JOB, "dtype": "fp8"})
    refused = {row.device.name: str(row.refusal) for row in found.rows if row.prediction is None}

    assert set(refused) == {"a100-sxm-80gb", "cerebras-wse-3"}
    assert "has no fp8 rate" in refused["a100-sxm-80gb"]
    assert found.rows[2].prediction is not None
    assert found.rows[0].bound_by == ""


def test_device_without_enough_memory_is_an_error() -> None:
    """A step that does not fit is predicted, marked, and named in the notes."""
    found = shapewright.compare("llama-3-8b", devices=["l4", "h200-sxm-141gb"], workload={"phase": "decode"})
    large = shapewright.compare("llama-3-70b", devices=["l4"], workload={"phase": "decode"})

    assert [row.fits for row in found.rows] == [True, True]
    assert [row.fits for row in large.rows] == [False]
    assert any("does not fit on l4" in note for note in large.notes)


def test_bounds_of_the_data_sheet_are_marked() -> None:
    """A device priced by its roofline alone is marked as such."""
    found = shapewright.compare("gpt2", devices=["cerebras-wse-2", "h100-sxm-80gb"], workload={"phase": "prefill"})
    assert any("not predictions" in note and "cerebras-wse-2" in note for note in found.notes)


def test_formats_that_differ_are_noted() -> None:
    """A V100 has no bf16 and runs fp16: a note states that formats differ."""
    found = shapewright.compare("gpt2", devices=["v100-sxm2-32gb", "a100-sxm-80gb"])
    assert [row.prediction.workload.dtype for row in found.rows if row.prediction] == ["fp16", "bf16"]
    assert any("different formats (bf16, fp16)" in note for note in found.notes)


def test_each_device_once() -> None:
    """An alias and the canonical name are the same device."""
    assert len(compared(devices=("h100-sxm-80gb", "h100_sxm")).rows) == 1


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"devices": ()}, DeviceError, "no device to compare"),
        ({"devices": ("h100-sxm-80bg",)}, UnknownDeviceError, "did you mean"),
        ({"workload": {"micro_batch_size": 0}}, WorkloadError, "micro_batch_size=0"),
        ({"usd_per_hour": {"l4": 1.0}}, WorkloadError, "'l4', which is not compared"),
        ({"usd_per_hour": {"h100-sxm-80gb": 0.0}}, WorkloadError, "must be a number from 1e-06 to 1e\\+06"),
        ({"usd_per_hour": {"h100-sxm-80gb": 1e-320}}, WorkloadError, "must be a number from 1e-06 to 1e\\+06"),
        ({"usd_per_hour": {"h100-sxm-80gb": float("nan")}}, WorkloadError, "must be a number from 1e-06 to 1e\\+06"),
        ({"usd_per_hour": {"h100-sxm-80gb": float("inf")}}, WorkloadError, "must be a number from 1e-06 to 1e\\+06"),
        ({"overrides": {"num_heads": 7}}, ConfigError, "num_heads=7"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_impossible_comparisons(changes: dict[str, object], error: type[Exception], words: str) -> None:
    """A misspelled name, a job that no device can run or an invalid price is an error without rows."""
    with pytest.raises(error, match=words):
        compared(**changes)


def test_command_line_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """One object with a row a device; a refused one has null for what it has not, and its reason."""
    prices = "a100-sxm-80gb=1.5,h100-sxm-80gb=2.8"
    names = "a100-sxm-80gb,h100-sxm-80gb,cerebras-wse-3"
    code, out, err = run(
        ["compare", "gpt3-2.7b", "--devices", names, "--usd-per-hour", prices, "--micro-batch-size", "1", "--json"],
        capsys,
    )
    facts = json.loads(out)
    a100, h100, refused = facts["devices"]

    assert (code, err) == (0, "")
    assert a100["tokens_per_usd"] == pytest.approx(a100["tokens_per_s_per_device"] * 3600 / 1.5)
    assert h100["speed_fraction"] == pytest.approx(a100["step_time_s"] / h100["step_time_s"])
    assert h100["step_time_low_s"] < h100["step_time_s"] < h100["step_time_high_s"]
    assert (refused["runs"], refused["step_time_s"], refused["tokens_per_joule"]) == (False, None, None)
    assert "cerebras-wse-3" in refused["problem"]


def test_command_line_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    """The table shows the bottleneck of each device, and the refused device with its reason on a separate line."""
    code, out, _ = run(["compare", "gpt2", "--devices", "a100-sxm-80gb,cerebras-wse-3"], capsys)

    assert code == 0
    for words in ("tokens/s", "tokens/J", "bound by", "1.00x", "cerebras-wse-3: cannot run the job: "):
        assert words in out


def test_devices_with_the_same_refusal_share_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Devices refused for the same reason share a line; another reason has its own."""
    devices = "h100-sxm-80gb,a100-sxm-80gb,t4,a30"
    _, out, _ = run(["compare", "gpt2", "--devices", devices, "--dtype", "fp8"], capsys)

    lines = [line for line in out.splitlines() if "cannot run the job" in line]
    have = ["bf16, fp16, fp32, int8, tf32", "fp16, fp32, int8"]
    assert [line.partition(")")[0] for line in lines] == [
        f"a100-sxm-80gb, a30: cannot run the job: each has no fp8 rate (it has {have[0]}",
        f"t4: cannot run the job: t4 has no fp8 rate (it has {have[1]}",
    ]


def test_device_file_can_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A custom device file can be compared with the known devices."""
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(run(["devices", "template"], capsys)[1], encoding="utf-8")
    _, out, _ = run(["compare", "gpt2", "--devices", "./mine.toml,h100-sxm-80gb", "--json"], capsys)
    assert [row["name"] for row in json.loads(out)["devices"]] == ["my-device-80gb", "h100-sxm-80gb"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing option '--devices'"),
        (["--devices", ","], "no device to compare"),
        (["--devices", "h100-sxm-80gb", "--usd-per-hour", "2.1"], "NAME=USD"),
        (["--devices", "h100-sxm-80gb", "--usd-per-hour", "h100-sxm-80gb=cheap"], "NAME=USD"),
        (["--devices", "h100-sxm-80gb", "--usd-per-hour", "h100-sxm-80gb=-1"], "must be a number from 1e-06"),
        (["--devices", "h100-sxm-80gb,", "--tp", "5"], "tensor_parallel=5"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    code, out, err = run(["compare", "gpt2", *arguments], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize(("phase", "heading"), [("decode", "MBU"), ("prefill", "MFU")])
def test_decode_is_compared_by_bandwidth(phase: str, heading: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A decode step is shown as a fraction of bandwidth instead of arithmetic."""
    arguments = ["compare", "llama-3-8b", "--devices", "h100-sxm-80gb,l40s", "--micro-batch-size", "1"]
    code, out, _ = run([*arguments, "--phase", phase], capsys)

    assert code == 0
    assert {"MBU", "MFU"} & set(out.splitlines()[1].split()) == {heading}
