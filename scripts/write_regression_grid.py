"""Answer a fixed list of questions, and compare every number with the answer that is checked in.

    python scripts/write_regression_grid.py [--check] [TABLE ...]

Each file of tests/regression is a table. A row is a question: a command line of ``shapewright``, a key of a config of a
model type with other values, a case of a lint rule, random kernels on a device, a part of a calibration record with
other values, an option with a number out of its range, a pipeline, or a traced module; to add a command, append a line
that holds it alone. The other columns are cells of the answer: ``memory.total_bytes`` is a number of the JSON output,
``operations.*.time_s`` a whole column of a list, as its sum and a mean of its logarithms that also changes where rows
change places or one small row moves. Texts count by their numbers, not by their wording; refusals count as a whole.

The grid says that an answer moved by more than two parts in a million, never whether it is right: other tests do that.
With --check nothing is written, and the exit code is 1 where a cell moved. Where that is meant, read what moved, renew
the files without --check, and commit both together. To look closer at a cell, run its command before and after.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, isclose, isfinite
from pathlib import Path
from statistics import median

from regression_answers import NEAR_ZERO, Answer, Cell, answer_command
from regression_calibrations import answer_changes, list_kinds
from regression_configs import answer_configs, list_configs
from regression_findings import answer_cases, list_rule_codes
from regression_kernels import KERNEL_DEVICES, answer_kernels
from regression_ranges import answer_ranges, list_commands
from regression_timelines import answer_timelines, list_schedules
from regression_traces import TRACED_DEVICES, answer_traces

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "regression"
TOLERANCE = 2e-6
# Tables whose rows are made here, in groups; those of other tables are command lines.
GROUPS: dict[str, tuple[Callable[[], Iterable[str]], Callable[[str], dict[str, Answer]]]] = {
    "calibrations": (list_kinds, answer_changes),
    "configs": (list_configs, answer_configs),
    "findings": (list_rule_codes, answer_cases),
    "kernels": (lambda: KERNEL_DEVICES, answer_kernels),
    "ranges": (list_commands, answer_ranges),
    "timelines": (list_schedules, answer_timelines),
    "traces": (lambda: TRACED_DEVICES, answer_traces),
}
_COMMANDS_OF_A_GROUP = 8
_MOST_SHOWN = 40


@dataclass(frozen=True)
class Move:
    """A cell whose value differs from the one that is checked in, or a row that only one side has."""

    question: str
    cell: str
    old: Cell
    new: Cell

    @property
    def size(self) -> float:
        """Relative change of a number, infinite for anything else."""
        pairs = _pair(self.old, self.new)
        return max((abs(new / old - 1.0) if old else inf for old, new in pairs), default=inf)

    def __str__(self) -> str:
        """One line."""
        share = "" if self.size == inf else f" ({100.0 * self.size:+.3g} %)"
        old, new = (write_cell(cell) or "nothing" for cell in (self.old, self.new))
        return f"{self.question}\n    {self.cell}: {old} -> {new}{share}"


def list_tables() -> list[str]:
    """Names of the tables."""
    return sorted(path.stem for path in FOLDER.glob("*.tsv"))


def list_groups(table: str) -> list[str]:
    """Names of the groups of questions of a table that are answered together."""
    if table in GROUPS:
        return list(GROUPS[table][0]())
    return [str(number) for number in range(-(-len(read_table(table)) // _COMMANDS_OF_A_GROUP))]


def answer_group(table: str, group: str) -> dict[str, Answer]:
    """Answer the questions of a group, with cells as they are read from a file."""
    if table in GROUPS:
        answers = GROUPS[table][1](group)
    else:
        start = int(group) * _COMMANDS_OF_A_GROUP
        lines = list(read_table(table))[start : start + _COMMANDS_OF_A_GROUP]
        answers = {line: answer_command(line) for line in lines}
    return {
        question: {cell: read_cell(text) for cell, value in answer.items() if (text := write_cell(value))}
        for question, answer in answers.items()
    }


def find_moves(table: str, group: str, new: dict[str, Answer]) -> list[Move]:
    """Compare the answers of a group with those of the file."""
    old = read_table(table)
    if table in GROUPS:
        old = {question: answer for question, answer in old.items() if question.partition(":")[0] == group}
    else:
        old = {question: old[question] for question in new}
    return list(compare(old, new))


def compare(old: dict[str, Answer], new: dict[str, Answer]) -> Iterator[Move]:
    """List the cells that differ."""
    for question in dict.fromkeys((*old, *new)):
        before, after = old.get(question, {}), new.get(question, {})
        for cell in dict.fromkeys((*before, *after)):
            if not _is_same(before.get(cell, ""), after.get(cell, "")):
                yield Move(question, cell, before.get(cell, ""), after.get(cell, ""))


def _is_same(old: Cell, new: Cell) -> bool:
    pairs = _pair(old, new)
    return old == new or (bool(pairs) and all(isclose(*pair, rel_tol=TOLERANCE, abs_tol=NEAR_ZERO) for pair in pairs))


def _pair(old: Cell, new: Cell) -> list[tuple[float, float]]:
    """Pair the numbers of two cells of a kind; none for texts."""
    if isinstance(old, float) and isinstance(new, float):
        return [(old, new)]
    if isinstance(old, tuple) and isinstance(new, tuple):
        # The mean of logarithms is an absolute quantity.
        return [(old[0], new[0]), (1.0, 1.0 + new[1] - old[1])]
    return []


def read_table(table: str) -> dict[str, Answer]:
    """Read the answers of a table by question."""
    head, *rows = (FOLDER / f"{table}.tsv").read_text(encoding="utf-8").splitlines()
    cells = head.split("\t")[1:]
    answers: dict[str, Answer] = {}
    for row in rows:
        question, *texts = row.split("\t")
        answers[question] = {cell: read_cell(text) for cell, text in zip(cells, texts, strict=False) if text}
    return answers


def write_table(table: str, answers: dict[str, Answer]) -> None:
    """Write a table, with a column for each cell of any answer."""
    cells = list(dict.fromkeys(cell for answer in answers.values() for cell in answer))
    lines = ["\t".join(("question", *cells))]
    for question, answer in answers.items():
        lines.append("\t".join((question, *(write_cell(answer.get(cell, "")) for cell in cells))).rstrip("\t"))
    (FOLDER / f"{table}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_cell(cell: Cell) -> str:
    """Return the text of a cell in a table."""
    if isinstance(cell, str):
        return " ".join(cell.split())
    if isinstance(cell, float):
        return f"{cell:.8g}"
    return f"{cell[0]:.8g}~{cell[1]:.6f}"


def read_cell(text: str) -> Cell:
    """Return the cell of a text of a table."""
    try:
        total, mark, logs = text.partition("~")
        return (float(total), float(logs)) if mark else float(total)
    except ValueError:
        return text


def describe(moves: Sequence[Move]) -> str:
    """Say which cells moved and how far, with the largest move of each question."""
    questions = dict.fromkeys(move.question for move in moves)
    ordered = sorted(moves, key=lambda move: -move.size)
    first = {move.question: move for move in reversed(ordered)}
    shown = sorted(first.values(), key=lambda move: -move.size)[:_MOST_SHOWN]
    sizes = [move.size for move in moves if isfinite(move.size)]
    extent = f", numbers by {100.0 * median(sizes):.2g} % in the median" if sizes else ""
    head = f"{len(moves)} cells of {len(questions)} answers moved{extent}; the largest move of each:"
    lines = [head, *map(str, shown)]
    lines += ["..."] * (len(first) > len(shown))
    return "\n".join((*lines, "renew them if this is meant: python scripts/write_regression_grid.py"))


def main() -> int:
    """Answer, print what moved, and write the tables unless they are only checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a cell moved")
    parser.add_argument("table", nargs="*", help="tables; default all")
    given = parser.parse_args()
    moves: list[Move] = []
    for table in given.table or list_tables():
        answers: dict[str, Answer] = {}
        for group in list_groups(table):
            answers |= answer_group(table, group)
        moves += compare(read_table(table), answers)
        if not given.check:
            write_table(table, answers)
    if moves:
        print(describe(moves))
    return int(given.check and bool(moves))


if __name__ == "__main__":
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
    sys.exit(main())
