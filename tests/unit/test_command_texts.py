"""What the commands print for a new user: help, tables, CSV, the next command."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path

import click
import pytest

from command_line import COMMANDS, run
from fuzz.measurements import sound_store
from shapewright.app.cli.main import cli
from shapewright.prediction.warnings import warn_of_utilization


@pytest.mark.parametrize("path", COMMANDS)
def test_help_fits_one_screen(path: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """--help takes at most 40 lines of a terminal with 80 columns, and --help-all has what it leaves out."""
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run([*path.split(), "--help"], capsys)
    assert code == 0
    assert sum(max(1, -(-len(line) // 80)) for line in out.splitlines()) <= 40
    if "--help-all' explains" in out:
        _, whole, _ = run([*path.split(), "--help-all"], capsys)
        flags = {flag for parameter in COMMANDS[path].params for flag in parameter.opts if flag.startswith("-")}
        assert all(flag in whole for flag in flags)


@pytest.mark.parametrize("width", [80, 100])
def test_short_texts_of_options_end_with_a_clause(
    width: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that is cut off ends where it can stand alone, or with dots, so that part of a list is not all of it."""
    monkeypatch.setenv("COLUMNS", str(width))
    pages = {path: run([*path.split(), "--help"], capsys)[1] for path in ("check", "search", "plan", "bench")}
    for text in pages.values():
        assert "[default\n" not in text
        assert "; default\n" not in text
        assert not re.search(r"^ {2}--\S.* with --\S+$", text, re.MULTILINE)
    assert re.search(r"fields to vary: heads, .*\.\.\.\n", pages["search"])
    assert re.search(r"values that a field may take: tp, .*\.\.\.\n", pages["plan"])


@pytest.mark.parametrize("path", ["predict", "check", "memory", "compare"])
def test_help_explains_batch_length_and_tensor_parallelism(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What most jobs set has its own line on the first page, before what few calls need."""
    _, out, _ = run([path, "--help"], capsys)
    lines = out.partition("  Also:")[0].splitlines()
    for flag in ("--micro-batch-size", "--seq-len", "--tp"):
        assert any(re.match(rf"  (--\S+, )?{flag}\b.* {{2,}}\S", line) for line in lines)


def test_a_bare_call_shows_what_to_try(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a command there are three commands to try, each of which exists."""
    code, out, _ = run([], capsys)
    tried = [line.split()[1] for line in out.splitlines() if line.startswith("  shapewright ")]
    assert code == 0
    assert len(tried) == 3
    assert set(tried) <= set(COMMANDS)


def test_a_table_is_judged_by_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Accuracy takes one csv of any name, known by its columns, and its help has them."""
    _, page, _ = run(["accuracy", "--help"], capsys)
    (header,) = [line.strip() for line in page.splitlines() if line.strip().startswith("device,")]
    path = tmp_path / "mine.csv"
    path.write_text(f"{header}\nh100-sxm-80gb,torch 2.8,gemm,bf16,4096,4096,4096,230\n", encoding="utf-8")
    code, out, _ = run(["accuracy", str(path)], capsys)
    assert (code, "torch 2.8" in out) == (0, True)

    path.write_text("a,b\n1,2\n", encoding="utf-8")
    code, _, err = run(["accuracy", str(path)], capsys)
    assert (code, "device, library, kernel, dtype, m, n, k, latency_us" in err) == (2, True)


@pytest.mark.parametrize(("sweep", "num_rows"), [([], 33), (["--sweep", "micro_batch_size=1,2"], 2)])
def test_predictions_as_csv(sweep: list[str], num_rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Predict --csv prints a row per operation, or per step of a sweep."""
    _, out, _ = run(["predict", "gpt2", "--device", "h100-sxm-80gb", "--csv", *sweep], capsys)
    header, *rows = csv.reader(out.splitlines())
    assert all(len(row) == len(header) for row in rows)
    assert len(rows) >= num_rows
    assert "time_low_s" in header or "step_time_low_s" in header


@pytest.mark.parametrize("path", ["predict", "check", "memory"])
def test_next_command_keeps_the_scenario(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The next command is about the same model and layout, with options that it knows."""
    given = [
        "gpt2",
        "--num-layers",
        "3",
        "--device",
        "h100-sxm-80gb",
        "--tp",
        "2",
        "--dtype",
        "fp16",
        "--no-qkv-bias",
        "--node-size",
        "4",
    ]
    _, out, _ = run([path, *given], capsys)
    words = shlex.split(out.splitlines()[-1])[2:]
    assert "--software" not in words  # which was not given
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None
    parsed = command.make_context(words[0], words[1:]).params

    assert (parsed["model__num_layers"], parsed["model__qkv_bias"]) == (3, False)
    if words[0] != "plan":  # which chooses the layout
        assert (parsed["layout__tensor_parallel"], parsed["workload__dtype"]) == (2, "fp16")


@pytest.mark.parametrize(
    "command",
    [
        "check llama-3-8b --hidden-size 4097 --device h100-sxm-80gb",
        "check-files {config} --device h100-sxm-80gb",
        "predict gpt2 --device h100-sxm-80gb",
        "search gpt2 --device h100-sxm-80gb --top 1",
        "search gpt2 --device h100-sxm-80gb --top 1 --explain 1",
        "report gpt2 --device h100-sxm-80gb --no-search -o {folder}/review.html",
        "params gpt2",
        "devices",
        "devices show h100-sxm-80gb",
        "design --params 125m --train-tokens 2b --device h100-sxm-80gb --gpus 1 --keep heads=8 --top 1",
        "design --params 125m --train-tokens 2b --device h100-sxm-80gb --gpus 1 --top 1 -o {folder}/design",
        "rule",
        "batch --global-batch 96",
        "store ls {store}",
        "store show {store}",
        "store verify {store}",
        "store export {store} {folder}/tables --format csv",
        "store merge {folder}/all.sqlite {store}",
        "store rescue {folder}/new.sqlite {store}",
        "accuracy {store}",
        "plot roofline --device h100-sxm-80gb -o {folder}/roofline.html",
    ],
)
def test_outputs_end_with_the_next_command(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line of a text output is a command that exists; JSON has none."""
    store, config = tmp_path / "own store.sqlite", tmp_path / "config.json"
    store.write_bytes(sound_store())
    config.write_text('{"model_type": "gpt2", "vocab_size": 50257}', encoding="utf-8")
    words = [word.format(store=store, config=config, folder=tmp_path) for word in command.split()]
    _, out, _ = run(words, capsys)
    first, second, *following = shlex.split(out.splitlines()[-1])
    assert (first, second) == ("next:", "shapewright")
    assert following[0] in COMMANDS or " ".join(following[:2]) in COMMANDS
    if words[0] == "design":
        assert following == ([*words, "-o", "design"] if "-o" not in words else following)
        assert "-o" not in words or Path(following[1]).is_file()
    if any(word.endswith(".sqlite") for word in following):
        assert any(Path(word).exists() for word in following)
    if words[0] in ("check", "predict", "search", "params", "devices", "batch", "rule", "accuracy"):
        _, out, _ = run([*words, "--json"], capsys)
        assert "next: " not in out


@pytest.mark.parametrize(
    ("width", "command"),
    [
        ("140", "plan llama-3-70b --device h100-sxm-80gb --gpus 64 --global-batch 256"),
        ("100", "plan llama-3-70b --device h100-sxm-80gb --gpus 64 --global-batch 256"),
        ("100", "serve-plan llama-3-8b --device h100-sxm-80gb --isl 4000 --osl 500"),
        ("100", "search gpt3-2.7b --device a100-sxm-40gb --top 3"),
        ("80", "plan llama-3-70b --device h100-sxm-80gb --gpus 64 --global-batch 256"),
        ("80", "serve-plan llama-3-8b --device h100-sxm-80gb --isl 4000 --osl 500"),
        ("80", "search gpt3-2.7b --device a100-sxm-40gb --top 3"),
        ("80", "check gpt3-2.7b --device a100-sxm-40gb"),
        ("80", "compare llama-3-8b --devices a100-sxm-80gb,h100-sxm-80gb --tp 8"),
    ],
)
def test_intervals_stay(
    width: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A narrow table keeps its intervals, says which columns it leaves out, and explains none of those."""
    monkeypatch.setenv("COLUMNS", width)
    _, out, _ = run(command.split(), capsys)
    assert re.search(r"90 % interval  |\(90 %\)|\dx \([\d.]+ to ", out)
    left_out = {
        name.strip()
        for line in out.splitlines()
        if line.startswith(f"not shown at {width} columns: ")
        for name in line.partition(": ")[2].split(",")
    }
    assert left_out
    assert not any("interval" in name or name == "to the same loss" for name in left_out)
    rows = [line for line in out.splitlines() if re.match(r" +\d+  [a-z]+[ =]|recommended  |num_|[ah]100-", line)]
    assert rows
    assert max(map(len, rows)) <= int(width)
    legend = next((line for line in out.splitlines() if line.startswith("letters: ")), "")
    assert not any(f"; {name}: " in legend for name in left_out)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("check gpt3-2.7b --device h100-sxm-80gb --tp 3", "check gpt3-2.7b --device h100-sxm-80gb --tp 2"),
        ("check gpt2 --device h100-sxm-80gb --tp 5", "check gpt2 --device h100-sxm-80gb --tp 4"),
        (
            "design --params 125m --train-tokens 1b --gpus 8 --device h100 -o {folder}/d",
            "report {folder}/d/config.json",
        ),
        ("design --params 125m --train-tokens 1b --gpus 8 --device h100", "design --params 125m --train-tokens 1b"),
        ("flops gpt2", "predict gpt2 --device h100-sxm-80gb"),
        ("check gpt2 --device l40s --train-tokens 300b", "search gpt2 --device l40s --train-tokens 300000000000"),
        (
            "predict gpt2 --device rtx-4090 --dp 2 --node-size 2 --physics-only",
            "check gpt2 --device rtx-4090 --node-size 2 --physics-only --dp 2",
        ),
        (
            "plan llama-3-8b --device h100-sxm-80gb --gpus 8 --global-batch 64 --keep tp=2 --keep pp=2",
            "predict llama-3-8b --device h100-sxm-80gb --micro-batch-size 4 --global-batch 64 --tp 2 --pp 2 --dp 2",
        ),
        ("plan gpt2 --device l40s --gpus 2 --global-batch 64", "check gpt2 --device l40s --micro-batch-size"),
        (
            "memory llama-3-8b --device rtx-4090 --finetune qlora --micro-batch-size 1",
            "predict llama-3-8b --device rtx-4090 --micro-batch-size 1 --finetune qlora",
        ),
        (
            "memory llama-3-8b --device l40s --finetune lora --seq-len 8192 --micro-batch-size 8",
            "plan llama-3-8b --device l40s --seq-len 8192 --finetune lora --gpus 8",
        ),
        ("memory llama-3-8b --device l40s --phase decode", "predict llama-3-8b --device l40s --phase decode"),
        ("predict {arguments} --device l40s", "check {arguments} --device l40s"),
        (
            "predict llama-3-8b --device l40s --layout-from {arguments}",
            "check llama-3-8b --device l40s --layout-from {arguments}",
        ),
    ],
)
def test_next_command_works(command: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The next command has the job of the one before, in a layout that can run, and names files that exist."""
    arguments = tmp_path / "megatron.args"
    arguments.write_text(
        "--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 512 --vocab-size 50304 "
        "--max-position-embeddings 1024 --micro-batch-size 2 --tensor-model-parallel-size 2 --bf16\n"
    )
    places = {"folder": tmp_path, "arguments": arguments}
    _, out, _ = run(command.format(**places).split(), capsys)
    line = out.splitlines()[-1].removeprefix("next: shapewright ")
    assert line.startswith(words.format(**places))
    if line.startswith(("check", "predict", "plan")):
        code, _, err = run(line.split(), capsys)
        assert (code in (0, 1), err) == (True, "")


def test_utilizations_above_one_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """HFU above 1 counts masked attention, which the JSON says."""
    question = ["llama-3-8b", "--device", "h100-sxm-80gb", "--seq-len", "1000000", "--micro-batch-size", "1"]
    _, out, _ = run(["predict", *question, "--tp", "8", "--recompute", "full", "--json"], capsys)
    found = json.loads(out)
    assert found["hfu"] > 1.0
    assert any(f"HFU is {found['hfu']:.0%}, above 1: it counts" in warning for warning in found["warnings"])
    assert [note.partition(":")[0] for note in warn_of_utilization(0.4, 1.1)] == ["MBU is 110%, above 1"]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("plan", "--objective [time|cost|memory]  time: shortest step"),
        ("search", "--objective                   time-to-loss, loss-at-budget, time, ..."),
        ("check", "--fail-on [info|warning|error|never]  lowest severity"),
    ],
)
def test_short_help_shows_what_to_choose_from(
    command: str, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values of an option stand beside it, or in place of its meaning, also on one screen of help."""
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run([command, "--help"], capsys)

    assert any(shown.strip().startswith(line) for shown in out.splitlines())


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        (
            "mfu llama-3-8b --device h100-sxm-80gb --seconds 0.2 --gpus 8 --global-batch 128",
            "check --seconds (of a whole",
        ),
        (
            "mfu llama-3-8b --device h100-sxm-80gb --seconds 0.2 --gpus 8 --global-batch 128",
            "--global-batch and --dtype",
        ),
        ("plan llama-3-70b --device h100-sxm-80gb --gpus 8 --global-batch 64", "with --try-offload it fits"),
    ],
)
def test_advice_names_flags(command: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What to change is named as one types it."""
    _, out, err = run(command.split(), capsys)
    assert advice in out + err


@pytest.mark.parametrize("command", ["check", "predict", "search"])
def test_devices_of_a_layout_are_given_by_its_degrees(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--gpus, which plans take, names the degrees and the command that chooses them."""
    code, _, err = run([command, "llama-3-8b", "--device", "h100-sxm-80gb", "--gpus", "32"], capsys)

    assert code == 2
    assert "give the degrees of a layout, such as --dp 8 --tp 4; 'plan' chooses them" in err
