"""Ranges of the regression grid: what each number of a command line may be, as refusals of others state it."""

from __future__ import annotations

from typing import Any

import click
from regression_answers import Answer, answer_command

from shapewright.app.cli.main import cli

_LINES = {
    "predict": "gpt2 --device h100-sxm-80gb",
    "plan": "gpt2 --device h100-sxm-80gb --gpus 2 --global-batch 8 --top 1",
    "serve-plan": "gpt2 --device h100-sxm-80gb --gpus 1 --isl 100 --osl 20",
    "serve-plan, traffic": "gpt2 --device h100-sxm-80gb --gpus 1 --isl 100 --osl 20 --arrivals 5/s",
    "design": "--params 50m --train-tokens 1b --gpus 1 --device h100-sxm-80gb --top 1",
    "search": "gpt2 --device h100-sxm-80gb --vary heads --top 1",
    "mfu": "gpt2 --device h100-sxm-80gb --seconds 1 --gpus 1 --global-batch 8",
    "flops": "gpt2 --device h100-sxm-80gb --train-tokens 1b --gpus 1 --mfu 0.4",
    "compare": "gpt2 --devices h100-sxm-80gb,l40s",
}
# Too small and too large for nearly every option, and the number that some exclude; what is in range is answered, with
# an exit code.
_VALUES = ("-1", "0", "1" + "0" * 18)
# Options that start measurements, and those whose number does not change an answer.
_LEFT_OUT = {"verify", "verify_budget", "trace_time_limit_s", "explain"}
_PARSED_NUMBERS = ("amount", "hours", "nats")  # types of options that read a number with or without a suffix


def list_commands() -> list[str]:
    """Commands whose numbers are tried."""
    return list(_LINES)


def answer_ranges(command: str) -> dict[str, Answer]:
    """Give each option that holds a number, and that no command before has, other values."""
    earlier = list(_LINES)[: list(_LINES).index(command)]
    word = command.partition(",")[0]
    known = {name for other in earlier if other != word for name in _numbers(other)}
    answers: dict[str, Answer] = {}
    for name, option in _numbers(command).items():
        for value in _VALUES if name not in known else ():
            line = f"{word} {_LINES[command]} {option} {value} --json"
            answer = answer_command(line)
            answers[f"{command}: {option} {value}"] = {
                key: cell for key, cell in answer.items() if key in ("refused", "exit code")
            }
    return answers


def _numbers(command: str) -> dict[str, str]:
    """Spelling of the options of a command that hold numbers, by name."""
    found: Any = cli.get_command(click.Context(cli), command.partition(",")[0])
    return {
        option.name: option.opts[0]
        for option in found.params
        if isinstance(option, click.Option) and option.name not in _LEFT_OUT and not option.is_flag
        and (
            isinstance(option.type, click.types.IntParamType | click.types.FloatParamType)
            or option.type.name in _PARSED_NUMBERS
        )
    }  # fmt: skip
