"""Output of serve-plan, and its errors for invalid options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from command_line import run as run_command


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command."""
    return run_command(["serve-plan", *arguments], capsys)


# One tensor degree: what the command prints does not hang on how many layouts there are.
JOB = ["llama-3-8b", "--device", "h100-sxm-80gb", "--isl", "1000", "--osl", "200", "--tp", "1"]


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text and JSON agree on the best point; the page is complete and lists its assumptions."""
    page = tmp_path / "plan.html"
    limits = ["--ttft", "300ms", "--tpot", "12ms"]
    code, text, _ = run([*JOB, *limits, "--html", str(page)], capsys)
    _, out, err = run([*JOB, *limits, "--json"], capsys)
    facts = json.loads(out)
    best = facts["best"]

    assert (code, err) == (0, "")
    assert facts["schema_version"] == 1
    assert f"{best['tokens_per_s_per_device']:,.0f}" in text
    assert best["ttft_low_s"] < best["ttft_s"] <= 0.3
    assert best["tokens_per_s_per_user"] == pytest.approx(1 / best["tpot_s"])
    assert [one["name"] for one in facts["formats"]] == ["bf16", "fp8", "bf16:int4"]
    for words in ("aggregated", "tokens in cache", "first token at most 300 ms"):
        assert words in text
    written = page.read_text(encoding="utf-8")
    for words in ("Assumptions", "echarts", "tokens/s of a user"):
        assert words in written


def test_unreachable_limits_exit_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1, and the shortest times that there are."""
    code, text, _ = run([*JOB, "--tpot", "1us"], capsys)
    assert code == 1
    assert "the shortest time to first token is" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpus", "0"], "num_devices=0"),
        (["--ttft", "soon"], "is not a time such as 300ms"),
        (["--draft-tokens", "4"], "belong together"),
        (["--tp", "3"], "tensor_parallel=3"),
        (["--isl", "9000"], "--isl + --osl = 9200 tokens exceed the model's max_position_embeddings=8192"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    code, out, err = run([*JOB, *arguments], capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


@pytest.mark.parametrize("server", ["vllm-0.10", "sglang-0.5", "trtllm-1.0"])
def test_the_next_command_launches_the_same_plan(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It keeps limits, load, cached prefix and adapters, and writes the lines of the engine that was named."""
    limits = ["--ttft", "300ms", "--tpot", "12ms", "--load", "10/s", "--cached-prefix", "100"]
    adapters = ["--lora-rank", "16", "--lora-adapters", "4"]
    _, text, _ = run([*JOB, *limits, *adapters, "--server", server], capsys)
    following = text.splitlines()[-1].split()
    assert following[:3] == ["next:", "shapewright", "serve-plan"]
    words = following[3:]

    assert words[-2:] == ["--format", server.partition("-")[0]]
    given = dict(zip(words[1::2], words[2::2], strict=True))
    assert [given[name] for name in ("--ttft", "--tpot", "--load", "--cached-prefix")] == [
        "0.3",
        "0.012",
        "10.0",
        "100",
    ]
    assert (given["--lora-rank"], given["--lora-adapters"]) == ("16", "4")
    code, launch, _ = run(words, capsys)
    assert code == 0
    assert "llama-3-8b" in launch.lower()


def test_limits_that_no_plan_keeps_are_not_in_the_next_command(capsys: pytest.CaptureFixture[str]) -> None:
    """With them there would be nothing to launch."""
    code, text, _ = run([*JOB, "--tpot", "1us"], capsys)
    words = text.splitlines()[-1].split()[3:]

    assert code == 1
    assert "--tpot" not in words
    assert run(words, capsys)[0] == 0
