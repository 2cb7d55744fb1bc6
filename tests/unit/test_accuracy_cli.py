"""The accuracy command: JSON keys, text, errors and exit codes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from command_line import run as run_command

KEYS = [
    "table", "device", "dtype", "library", "rows", "mape", "median_ape", "p90_ape", "bias", "kendall_tau",
    "coverage_90", "roofline_mape", "interval_width", "file",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a small paper_gemm.csv, one row of it of an unknown GPU."""
    rows = [("a100", 4096, 200.0), ("a100", 1024, 90.0), ("v100", 4096, 90.0), ("abacus", 64, 1.0)]
    with (tmp_path / "paper_gemm.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["sweep", "gpu", "batch", "m", "n", "k", "tflops"])
        writer.writerows(["mm", gpu, 1, width, width, width, tflops] for gpu, width, tflops in rows)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command."""
    return run_command(["accuracy", *arguments], capsys)


def test_json_is_a_list_with_the_promised_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object per device; skipped rows go to standard error."""
    code, out, err = run(capsys, str(folder), "--json")
    rows = json.loads(out)

    assert code == 0
    assert [list(row) for row in rows] == [KEYS, KEYS]
    assert {row["device"]: row["rows"] for row in rows} == {"a100-sxm-40gb": 2, "v100-sxm2-16gb": 1}
    assert rows[1]["kendall_tau"] is None
    assert "skipped 1 row: no device file for 'abacus'" in err


def test_regret_adds_three_keys(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--regret adds the number of sizes with alternatives; without any, the regret is empty."""
    _, out, _ = run(capsys, str(folder), "--json", "--regret")
    row = json.loads(out)[0]

    assert list(row) == [*KEYS, "regret_groups", "regret_median", "regret_p90"]
    assert (row["regret_groups"], row["regret_median"]) == (0, None)


def test_size_adds_a_column(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--by size groups by decades of the measured time."""
    _, out, _ = run(capsys, str(folder), "--json", "--by", "device,size", "--device", "a100-sxm-40gb")

    assert [(row["size"], row["dtype"], row["rows"]) for row in json.loads(out)] == [
        ("10-100 us", "all", 1),
        ("100-1000 us", "all", 1),
    ]


def test_text_output_is_complete(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Standard output has the table, the notes and the skipped rows."""
    code, out, err = run(capsys, str(folder), "--uncalibrated")

    assert code == 0
    assert err == ""
    for words in ("Kendall tau", "roofline", "a100-sxm-40gb", "note:", "skipped 1 row:"):
        assert words in out


def test_a_file_that_cannot_be_judged_is_exit_code_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The other files are evaluated, and the bad one is named."""
    (folder / "paper_layers.csv").write_text("log,gpu\nl,a100\n", encoding="utf-8")
    code, out, _ = run(capsys, str(folder))

    assert code == 1
    assert "paper_layers: not evaluated: paper_layers.csv lacks columns" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("{folder}/nowhere",), "does not exist"),
        (("{folder}", "--table", "gemms"), "table 'gemms' is not known"),
        (("{folder}", "--device", "abacus"), "unknown device"),
        (("{folder}", "--device", "h100-sxm-80gb"), "no row of h100-sxm-80gb"),
        (("{folder}", "--by", "colour"), "grouping 'colour' is not known"),
    ],
)
def test_errors_are_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    """Bad input gives exit code 2 and a one-line message."""
    code, out, err = run(capsys, *(argument.format(folder=folder) for argument in arguments))

    assert (code, out) == (2, "")
    assert words in err
    assert err.count("\n") == 1
