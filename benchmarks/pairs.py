"""Compare two versions of the sources in alternation by CPU time, so that other load affects both alike.

    python benchmarks/pairs.py OLD/src NEW/src [--repeats 25] [--json FILE]

Each version predicts in a separate process; the two alternate in batches of calls. Commands run one after the other,
with compiled bytecode as in an installed package. Ratios are medians over the pairs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from record import processor_s, write_record
from run import CHECK, SHAPEWRIGHT, prediction_calls, with_bytecode

_CALLS = 10
_COMMANDS = {
    "shapewright --help": ["--help"],
    f"shapewright {' '.join(CHECK)}": CHECK,
    "shapewright predict llama-3-8b --device h100-sxm-80gb": ["predict", "llama-3-8b", "--device", "h100-sxm-80gb"],
}


@dataclass(frozen=True)
class Pair:
    """Processor seconds of one thing in both states.

    Attributes:
        name: What was measured.
        old_s: Median of the old state. [s]
        new_s: Median of the new one. [s]
        ratio: Median of old over new, pair by pair.
    """

    name: str
    old_s: float
    new_s: float
    ratio: float


def main() -> None:
    """Print a row for each measurement, and write a record if requested."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("states", nargs="*", type=Path, metavar="SRC", help="the two folders that hold shapewright")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help="predict what is asked on standard input")
    arguments = parser.parse_args()
    if arguments.worker:
        work()
        return
    if len(arguments.states) != 2:
        parser.error("give two folders")
    pairs = [*compare_predictions(arguments.states, arguments.repeats)]
    pairs += compare_commands(arguments.states, arguments.repeats)
    print("| what, processor time | old | new | old / new |\n|---|---|---|---|")
    for pair in pairs:
        print(f"| {pair.name} | {pair.old_s * 1e3:.3g} ms | {pair.new_s * 1e3:.3g} ms | {pair.ratio:.2f} |")
    write_record(arguments.json, pairs=[asdict(pair) for pair in pairs])


def work() -> None:
    """Predict a case a few times for each line of its name, and print the processor time of one call. [s]"""
    calls = {**prediction_calls(anew=True), **prediction_calls(anew=False)}
    for call in calls.values():
        call()
    for line in sys.stdin:
        start_s = time.process_time()
        for _ in range(_CALLS):
            calls[line.strip()]()
        print((time.process_time() - start_s) / _CALLS, flush=True)


def compare_predictions(states: list[Path], repeats: int) -> list[Pair]:
    """Predictions in warm processes."""
    command = [sys.executable, __file__, "--worker"]
    workers = [
        subprocess.Popen(command, env=_with_source(state), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for state in states
    ]

    def ask(worker: subprocess.Popen[str], name: str) -> float:
        assert worker.stdin is not None
        assert worker.stdout is not None
        print(name, file=worker.stdin, flush=True)
        return float(worker.stdout.readline())

    names = [*prediction_calls(anew=True), *prediction_calls(anew=False)]
    found = [_pair_of(name, [[ask(worker, name) for worker in workers] for _ in range(repeats)]) for name in names]
    for worker in workers:
        worker.communicate()
    return found


def compare_commands(states: list[Path], repeats: int) -> list[Pair]:
    """Commands in processes of their own, after one run that is not counted."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, words in _COMMANDS.items():
            seconds = [[_command_s(words, state, folder) for state in states] for _ in range(repeats + 1)]
            found.append(_pair_of(name, seconds[1:]))
    return found


def _command_s(words: list[str], state: Path, folder: str) -> float:
    """Processor time of one command and of what it starts. [s]"""
    environment = {**with_bytecode(folder), "PYTHONPATH": str(state.resolve())}
    before_s = processor_s()
    subprocess.run([*SHAPEWRIGHT, *words], env=environment, capture_output=True, check=False)
    return processor_s() - before_s


def _with_source(state: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(state.resolve())}


def _pair_of(name: str, seconds: list[list[float]]) -> Pair:
    old, new = zip(*seconds, strict=True)
    ratio = statistics.median(one / other for one, other in seconds)
    return Pair(name, statistics.median(old), statistics.median(new), ratio)


if __name__ == "__main__":
    main()
