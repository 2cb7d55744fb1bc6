"""Invalid input to all commands: one line with the allowed values, exit code 2, without delay."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from shapewright.app.cli import main

MODEL = ("llama-3-8b",)
H100 = ("--device", "h100-sxm-80gb")
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "memory": ("memory", *MODEL, *H100),
    "predict": ("predict", *MODEL, *H100),
    "check": ("check", *MODEL, *H100),
    "search": ("search", *MODEL, *H100),
    "report": ("report", *MODEL, *H100, "-o", "review.html"),
    "compare": ("compare", *MODEL, "--devices", "h100-sxm-80gb,a100-sxm-80gb"),
    "mfu": ("mfu", *MODEL, *H100, "--seconds", "3.6", "--gpus", "64", "--global-batch", "128"),
    "plan": ("plan", *MODEL, *H100, "--gpus", "64", "--global-batch", "128"),
    "serve-plan": ("serve-plan", *MODEL, *H100, "--isl", "1000", "--osl", "100"),
    "flops": ("flops", *MODEL, "--train-tokens", "15t", "--gpus", "64", "--tflops", "400"),
    "params": ("params", *MODEL),
    "batch": ("batch", "--global-batch", "2048", "--gpus", "512", "--tp", "8", "--pp", "4"),
}
JOBS = ("memory", "predict", "check", "search", "report", "compare")  # whose layout says how many devices there are
LEARNED = ("gpt3-2.7b",)  # 2048 positions in a table

# What is wrong: commands, arguments that take the place of their own, words of the line.
CASES: tuple[tuple[str, tuple[str, ...], Mapping[str, str], tuple[str, ...]], ...] = (
    (
        "no device",
        ("mfu", "plan", "serve-plan", "flops", "batch"),
        {"--gpus": "0"},
        ("=0 must be an integer from 1 to",),
    ),
    ("no replica", (*JOBS, "mfu", "plan"), {"--dp": "0"}, ("data_parallel=0", "from 1 to")),
    ("no layer", (*JOBS, "plan", "flops", "params"), {"--num-layers": "0"}, ("num_layers=0",)),
    (
        "part of a node",
        ("mfu", "plan", "serve-plan"),
        {"--gpus": "13"},
        ("num_devices=13", "try 8 or 16", "--node-size"),
    ),
    ("part of a node", JOBS, {"--dp": "13"}, ("data_parallel=13", "try 8 or 16", "--node-size")),
    ("part of a node", JOBS, {"--tp": "2", "--dp": "5"}, ("2 * 5 = 10", "try 8 or 16")),
    ("devices and degrees", ("batch",), {"--gpus": "13"}, ("num_devices=13", "try 32")),
    ("batch", JOBS, {"--dp": "8", "--global-batch": "100"}, ("global_batch_size=100", "try 96 or 128")),
    ("batch", ("mfu",), {"--dp": "64", "--micro-batch-size": "3"}, ("global_batch_size=128", "try 192")),
    ("batch", ("batch",), {"--global-batch": "2047"}, ("global_batch_size=2047", "try 2032 or 2048")),
    ("sequence", (*JOBS, "mfu", "plan", "flops"), {"--seq-len": "1000000000"}, ("seq_len=1000000000", "134217728")),
    ("sequence", ("serve-plan",), {"--isl": "1000000000"}, ("prompt_len=1000000000", "134217728")),
    ("sequence", ("serve-plan",), {"--osl": "1000000000"}, ("output_len=1000000000", "134217728")),
    (
        "context",
        JOBS,
        {"--phase": "decode", "--context-len": "1000000000"},
        ("context_len=1000000000", "134217728"),
    ),
    (
        "optimizer",
        (*JOBS, "mfu", "plan"),
        {"--optimizer": "adamz"},
        ("'adamz'", "did you mean 'adam', 'adamw'?", "lion"),
    ),
    # check and report tell of a layout that divides nothing as a finding: their exit code is 1.
    ("degree", ("memory", "predict", "search", "compare", "plan"), {"--tp": "5"}, ("tensor_parallel=5", "4 or 8")),
    ("degree", ("mfu",), {"--tp": "5"}, ("num_devices=64", "5")),
)


def ask(command: str, changes: Mapping[str, str], model: tuple[str, ...] = MODEL) -> list[str]:
    """Arguments of a command with other values."""
    arguments = [model[0] if argument == MODEL[0] else argument for argument in COMMANDS[command]]
    for flag, value in changes.items():
        if flag in arguments:
            arguments[arguments.index(flag) + 1] = value
        else:
            arguments += [flag, value]
    return arguments


def refuse(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail, and return its one line."""
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    assert (stop.value.code, out) == (2, ""), err
    assert err.startswith("shapewright: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("command", "changes", "words"),
    [
        pytest.param(command, changes, words, id=f"{title.replace(' ', '_')}-{command}")
        for title, commands, changes, words in CASES
        for command in commands
    ],
)
def test_one_line_and_exit_2(
    command: str, changes: Mapping[str, str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is printed but one line that names the value, what is allowed, and what to do."""
    line = refuse(ask(command, changes), capsys)
    for word in words:
        assert word in line


@pytest.mark.parametrize("command", [*JOBS, "mfu", "plan", "flops"])
def test_a_table_of_positions_ends(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A model with 2048 learned positions takes no 4096 tokens; a longer table is another model."""
    line = refuse(ask(command, {"--seq-len": "4096"}, LEARNED), capsys)
    assert "seq_len=4096 exceeds the model's 2048 learned positions" in line
    assert "at most 2048" in line
    assert "max_position_embeddings=4096" in line


@pytest.mark.parametrize(("isl", "osl"), [("4000", "100"), ("2000", "100")])
def test_a_served_sequence_needs_positions(isl: str, osl: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompt and answer together must have positions."""
    line = refuse(ask("serve-plan", {"--isl": isl, "--osl": osl}, LEARNED), capsys)
    assert "2048 learned positions" in line


def test_longer_sequences_are_allowed_by_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The limit on sequence length catches typing errors: a model that states more positions may have more."""
    with pytest.raises(SystemExit) as stop:
        main(ask("predict", {"--seq-len": "200000000", "--max-position-embeddings": "268435456"}))
    assert stop.value.code == 0
    assert "s=200000000" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["plan", "serve-plan"])
def test_a_model_that_fits_nowhere(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """If no plan fits, the message states what the smallest plan needs, or which plans were tried."""
    changes = {"--hidden-size": "131072", "--num-layers": "500", "--num-heads": "1024", "--head-dim": "128"}
    line = refuse(ask(command, {**changes, "--intermediate-size": "524288"}), capsys)
    assert "fit" in line
    assert "h100-sxm-80gb" in line


@pytest.mark.parametrize("command", ["memory", "predict", "mfu"])
def test_rotary_positions_beyond_the_trained_length_are_noted(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Rotary positions allow sequences beyond the trained length; one note states that."""
    with pytest.raises(SystemExit) as stop:
        main(ask(command, {"--seq-len": "16384"}))
    out = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0
    assert out.count("16384 positions exceed the model's max_position_embeddings=8192") == 1
