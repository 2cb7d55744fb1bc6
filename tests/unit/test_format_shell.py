"""Shell scripts that start a training: arguments in variables are found, and what is not known is named."""

from __future__ import annotations

import time
from typing import Any

import pytest

from shapewright.app.formats.registry import parse_job
from shapewright.app.formats.shell import arguments_of, read_script

MODEL = "--num-layers 2 --hidden-size 512 --num-attention-heads 8"
LAYOUT = "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"


@pytest.mark.parametrize(
    "text",
    [
        f'MODEL_ARGS="{MODEL}"\nARGS="{LAYOUT}"\ntorchrun --nproc_per_node 8 pretrain_gpt.py $MODEL_ARGS $ARGS --bf16',
        f'A=({MODEL})\nB=({LAYOUT})\ntorchrun pretrain_gpt.py "${{A[@]}}" ${{B[*]}} --bf16 2>&1 | tee log',
        f"A=(\n  {MODEL}  # it's small\n)\nA+=({LAYOUT})\nrun ${{A[@]}} \\\n  --bf16 > out.txt",
        'TP="4"\nPP=2  # stages\nH=$((TP * 128))\nrun --num-layers $PP --hidden-size $H '
        "--num-attention-heads ${N:-8} --tensor-model-parallel-size=${TP} --pipeline-model-parallel-size '2' --bf16",
        f'CMD="pretrain_gpt.py {MODEL} {LAYOUT} --bf16"\necho $CMD\nbash -c "cd /tmp && $CMD"',
        f"cat > ds.json <<EOF\nit's a file --num-layers 9\nEOF\nexport A='{MODEL}'\nrun $A {LAYOUT} --bf16",
        f'ARGS="{MODEL} {LAYOUT} --bf16"',
        "--num-layers\n2\n--hidden-size 512 --num-attention-heads 8 # heads\n--bf16\n" + LAYOUT,
    ],
    ids=["variables", "arrays", "append", "values", "command", "heredoc", "definitions", "list"],
)
def test_arguments_in_variables_are_read(text: str) -> None:
    """Flags and values are found wherever a script keeps them."""
    found = parse_job(text)

    assert {name: found.fields[name] for name in ("num_layers", "hidden_size", "num_heads")} == {
        "num_layers": 2, "hidden_size": 512, "num_heads": 8,
    }  # fmt: skip
    assert (found.layout["tensor_parallel"], found.layout["pipeline_parallel"]) == (4, 2)
    assert found.workload["dtype"] == "bf16"


@pytest.mark.parametrize(
    "command",
    [
        "for TP in 4 8; do",
        "((TP*=2))",
        "(( TP++ ))",
        "let TP=4",
        "read -r TP <<< 4",
        "while read TP; do",
        "unset TP",
        "printf -v TP %d 8",
    ],
)
def test_variables_that_a_command_sets_are_named(command: str) -> None:
    """A value is not taken in silence where a loop, arithmetic or a builtin sets the variable again before its use."""
    found = parse_job(f"TP=2\nPP=2\n{command}\nrun {MODEL} --tensor-model-parallel-size $TP --bf16 --seed $PP")

    assert set(found.unread) == {"seed", "$TP (set again, by what is not run)"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (f"run {MODEL} --bf16 $MORE_ARGS", {"$MORE_ARGS"}),
        (f'run {MODEL} --bf16 --seed 1 "$@" $(cat args)', {"seed", "$@", "$(cat)"}),
        (f"run {MODEL} --bf16 --save $FOLDER", {"save=$FOLDER"}),
        (f'OPTIONAL="--seed 1"\nrun {MODEL} --bf16', {"$OPTIONAL (not used)"}),
        (f"TP=2\n[ $1 ] && TP=4\nrun {MODEL} --bf16 --seed $TP", {"seed", "$TP (set again, by what is not run)"}),
        (f"run {MODEL} --bf16\nrun {MODEL} --fp16", {"(another training command)"}),
    ],
)
def test_what_is_not_known_is_named(text: str, named: set[str]) -> None:
    """Variables that may hold flags, and values that may be others, are listed, and change nothing that is known."""
    found = parse_job(text)

    assert set(found.unread) == named
    assert (found.fields["num_layers"], found.workload["dtype"]) == (2, "bf16")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("A=1\nA=${A}2\nrun --a $A", {"a": "12"}),
        ("run --a ${A:-${B:-3}} --b ${C:=4} --c $C", {"a": "3", "b": "4", "c": "4"}),
        ("case $1 in\n  a) A=1 ;;\nesac\nrun --a $A", {"a": "$A"}),
        ("A=\nrun $A --a 1", {"a": "1"}),
        ("A=$((7 / 2))\nB=$((X * 2))\nrun --a $A --b $B", {"a": "3", "b": "$(($X*2))"}),
        ("A=$((((9 ** 64) ** 64) ** 64))\nrun --a $A", {"a": "$((((9**64)**64)**64))"}),
        ("f() {\n  A=1\n  run --a $A\n}\n(cd x; f)", {}),
        ("run --a='x y' --b \"it's\"", {"a": "x y", "b": "it's"}),
        ('D="$(cd "$(dirname "$0")" && pwd)"\nrun --a $D/x', {"a": "$(cd)/x"}),
    ],
)
def test_substitution_is_that_of_the_shell(text: str, arguments: dict[str, Any]) -> None:
    """Values are those that the shell would give, in the order of the script."""
    assert arguments_of(read_script(text).commands[-1]) == arguments


@pytest.mark.parametrize("line", ["a" * 60_000 + "(" + "b" * 60_000, "A" * 60_000 + "=(" + "b" * 60_000 + ")"])
def test_long_words_are_read_at_once(line: str) -> None:
    """A word of 120 kB with a bracket took 98 s, as the whole word was matched again for each character."""
    before_s = time.process_time()
    read_script(f"run {MODEL}\n{line}")

    assert time.process_time() - before_s < 2.0
