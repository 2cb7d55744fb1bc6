"""Sweeps: rows are predictions, ranges read as written, refusals stay in their rows."""

from __future__ import annotations

import json

import pytest

import shapewright
from command_line import run as run_command
from shapewright.core.errors import LayoutError, ShapewrightError, WorkloadError
from shapewright.prediction.sweep import parse_values


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of predict with a sweep."""
    return run_command(["predict", "llama-3-8b", "--device", "h100-sxm-80gb", "--phase", "decode", *arguments], capsys)


def test_rows_are_predictions() -> None:
    """Each row equals the prediction of its values, the last field varies fastest; failed rows have a reason."""
    found = shapewright.sweep(
        "llama-3-8b",
        device="h100-sxm-80gb",
        workload={"phase": "decode"},
        axes={"tensor_parallel": [1, 3], "micro_batch_size": [1, 64]},
    )
    row = found.rows[1]
    same = shapewright.predict(
        "llama-3-8b", device="h100-sxm-80gb", workload={"phase": "decode", "micro_batch_size": 64}
    )

    assert [tuple(row.values.values()) for row in found.rows] == [(1, 1), (1, 64), (3, 1), (3, 64)]
    assert row.prediction is not None
    assert row.prediction.step_time_s == same.step_time_s
    assert all(row.prediction is None and "tensor_parallel=3" in str(row.refusal) for row in found.rows[2:])


def test_sizes_of_the_model_are_swept() -> None:
    """Each row is the model with that size, and sizes that follow from it do: one head of 2560 / 20 is 128 wide."""
    found = shapewright.sweep(
        "gpt3-2.7b", device="a100-sxm-40gb", axes={"num_heads": [32, 30, 20], "micro_batch_size": [1]}
    )
    assert [row.values["num_heads"] for row in found.rows] == [32, 30, 20]
    published, refused, wider = found.rows
    assert published.prediction is not None
    assert wider.prediction is not None
    assert refused.prediction is None
    assert "hidden_size=2560 is not divisible by num_heads=30" in str(refused.refusal)
    same = shapewright.predict(
        "gpt3-2.7b", device="a100-sxm-40gb", overrides={"num_heads": 20}, workload={"micro_batch_size": 1}
    )
    assert wider.prediction.step_time_s == same.step_time_s
    assert wider.prediction.config.head_dim == 128
    assert wider.prediction.step_time_s < published.prediction.step_time_s


def test_yes_and_no_are_swept(capsys: pytest.CaptureFixture[str]) -> None:
    """The row of ``false`` is that of the flag turned off, not that of a text which counts as true."""
    training = ["predict", "llama-3-8b", "--device", "h100-sxm-80gb", "--tp", "2", "--json"]
    _, out, _ = run_command([*training, "--sweep", "sequence_parallel=false,true"], capsys)
    swept = [row["step_time_s"] for row in json.loads(out)["rows"]]
    single = []
    for flag in ("--no-sequence-parallel", "--sequence-parallel"):
        _, out, _ = run_command([*training, flag], capsys)
        single.append(json.loads(out)["step_time_s"])

    assert swept == single
    assert swept[0] != swept[1]


def test_size_sweep_shows_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    """If parameter counts differ between rows, the table shows them; JSON always does."""
    code, text, _ = run(["--sweep", "vocab_size=128256,256512"], capsys)
    assert code == 0
    assert "parameters" in text
    assert "8.03 B" in text
    assert "9.08 B" in text  # 2 x 128256 x 4096 more
    assert "parameters" not in run(["--sweep", "micro_batch_size=1,2"], capsys)[1]
    facts = json.loads(run(["--sweep", "micro_batch_size=1,2", "--json"], capsys)[1])
    assert [row["parameters"] for row in facts["rows"]] == [8_030_261_248] * 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8..4", "is not a range"),
        ("0..8", "is not a range"),
        ("1..x", "is not a range"),
        ("1..9:0", "is not a range"),
        (",", "has no values"),
        ("0..9999999:1", "more than 1000 values"),
    ],
)
def test_senseless_values_are_refused(text: str, words: str) -> None:
    """The error explains the syntax of ranges."""
    with pytest.raises(WorkloadError, match=words):
        parse_values(text)


@pytest.mark.parametrize(
    ("axes", "error", "words"),
    [
        ({"batch": [1]}, WorkloadError, "cannot sweep 'batch'"),
        ({"micro_batch_size": list(range(1, 200)), "seq_len": list(range(1, 200))}, WorkloadError, "39601 comb"),
        ({"tensor_parallel": [5, 7]}, LayoutError, "tensor_parallel=5 must divide"),
    ],
)
def test_senseless_sweeps_are_refused(axes: dict[str, list[int]], error: type[ShapewrightError], words: str) -> None:
    """A field that does not exist, too many combinations, and a sweep of which nothing can run."""
    with pytest.raises(error, match=words):
        shapewright.sweep("gpt2", device="a100-sxm-80gb", axes=axes)


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A table of batch against context, and the same as JSON; short names of fields work."""
    sweep = ["--sweep", "micro-batch-size=1..8", "--sweep", "context_len=1000,8000", "--sweep", "tp=1,3"]
    code, text, err = run(sweep, capsys)
    _, out, _ = run([*sweep, "--json"], capsys)
    facts = json.loads(out)

    assert (code, err) == (0, "")
    for words in ("micro_batch_size", "context_len", "tokens/s/device", "tensor_parallel=3 must divide"):
        assert words in text
    assert facts["axes"]["micro_batch_size"] == [1, 2, 4, 8]
    assert len(facts["rows"]) == 16
    assert facts["rows"][0]["values"] == {"micro_batch_size": 1, "context_len": 1000, "tensor_parallel": 1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--sweep", "batch"], "not of the form"), (["--sweep", "tp=1,2", "--all"], "have no effect with --sweep")],
)
def test_bad_options_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    code, out, err = run(arguments, capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err
