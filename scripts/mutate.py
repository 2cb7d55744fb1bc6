"""Change one token of the core at a time, and count the changes that no test notices: make mutation.

A seeded sample of changes is drawn over the packages below: comparisons, arithmetic, truth values, numbers and swapped
arguments. Each is written into a copy of the repository, whose tests of that package run until one fails. Whether a
change has no effect on behaviour is judged by a person: name such changes with --equivalent.

    python scripts/mutate.py --seed 1 --count 50
    python scripts/mutate.py --at src/shapewright/memory/estimate.py:170
"""

from __future__ import annotations

import argparse
import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Tests of each package, the quickest first.
TESTS: dict[str, tuple[str, ...]] = {
    "memory": (
        "unit/test_memory.py", "unit/test_many_layers.py", "property/test_memory.py", "vectors", "unit/test_pi*.py",
        "unit/test_offload.py", "unit/test_finetuning.py", "unit/test_stored_weights.py", "unit/test_hybrids.py",
    ),
    "lowering": (
        "unit/test_lowering*.py", "unit/test_hybrids.py", "property/test_lowering*.py", "unit/test_pi*.py",
        "unit/test_exp*.py", "unit/test_flop*.py", "vectors",
    ),
    "models/families": ("unit/test_config*.py", "unit/test_hybrids.py", "oracle/test_parameters.py"),
    "lint": ("unit/test_lint*.py", "property/test_lint.py"),
    "optimize/serving": ("unit/test_serving*.py", "unit/test_traffic*.py", "property/test_serving.py"),
    "optimize/plan": ("unit/test_plan*.py", "unit/test_pi*.py", "property/test_plan.py"),
    "pricing": ("unit/test_pricing*.py", "unit/test_exp*.py", "property/test_pricing*.py", "accuracy/test_drift.py"),
    "prediction/composition": ("unit/test_predict.py", "unit/test_pi*.py", "property/test_predict.py"),
}  # fmt: skip
LIMIT_S = 900
OTHER: dict[type, Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: the file, the place of the node in its walk, and what is done there."""

    path: Path
    place: int
    line: int
    before: str
    after: str

    def __str__(self) -> str:
        """File, line and change."""
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.before} -> {self.after}"


def change(node: ast.AST) -> bool:
    """Change a node in place; return whether there was something to change."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
        node.ops[0] = OTHER[type(node.ops[0])]()
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OTHER:
        node.op = OTHER[type(node.op)]()
    elif isinstance(node, ast.IfExp):
        node.body, node.orelse = node.orelse, node.body
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        node.value = not node.value
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        node.value = node.value + 1
    elif isinstance(node, ast.Call) and len(node.args) > 1 and not isinstance(node.args[1], ast.Starred):
        node.args[0], node.args[1] = node.args[1], node.args[0]
    else:
        return False
    return True


def list_mutants(path: Path) -> Iterator[Mutant]:
    """List the changes of a module, without docstrings, annotations and messages."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    quiet: set[int] = set()
    for node in ast.walk(tree):
        annotations = [getattr(node, name, None) for name in ("annotation", "returns")]
        messages = [node.exc] if isinstance(node, ast.Raise) else [node] if isinstance(node, ast.JoinedStr) else []
        for part in (*annotations, *messages):
            quiet |= {id(inner) for inner in ast.walk(part)} if part is not None else set()
    for place, node in enumerate(ast.walk(tree)):
        if id(node) in quiet or not hasattr(node, "lineno"):
            continue
        before = ast.unparse(node)
        if change(node):
            yield Mutant(path, place, node.lineno, before[:80], ast.unparse(node)[:80])


def mutated_text(mutant: Mutant) -> str:
    """Text of the module with the change."""
    tree = ast.parse(mutant.path.read_text(encoding="utf-8"))
    change(list(ast.walk(tree))[mutant.place])
    return ast.unparse(tree)


def is_noticed(mutant: Mutant, copy: Path, tests: tuple[str, ...]) -> bool:
    """Whether a test fails, or takes too long, with the change."""
    target = copy / mutant.path.relative_to(ROOT)
    whole = target.read_text(encoding="utf-8")
    target.write_text(mutated_text(mutant), encoding="utf-8")
    files = [str(file) for name in tests for file in sorted((copy / "tests").glob(name))]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *files]
    environment = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(command, cwd=copy, env=environment, capture_output=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return True
    finally:
        target.write_text(whole, encoding="utf-8")
    return run.returncode != 0


def main() -> int:
    """Draw the changes, run their tests, and print those that nothing noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--package", action="append", choices=TESTS, help="a package; default all")
    parser.add_argument("--at", action="append", default=[], metavar="FILE:LINE", help="all changes of a line instead")
    parser.add_argument("--equivalent", action="append", default=[], metavar="TEXT", help="a change without effect")
    given = parser.parse_args()
    lines = {(ROOT / file, int(line)) for file, _, line in (each.partition(":") for each in given.at)}
    drawn: list[tuple[str, Mutant]] = []
    for package in given.package or TESTS:
        found = [
            one for path in sorted((ROOT / "src/shapewright" / package).rglob("*.py")) for one in list_mutants(path)
        ]
        chosen = [one for one in found if (one.path, one.line) in lines]
        if not lines:
            number = -(-given.count // len(given.package or TESTS))
            chosen = Random(f"{given.seed} {package}").sample(found, min(number, len(found)))
        drawn += [(package, one) for one in chosen]
    alive = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "dist", "__pycache__"))
        for package, mutant in drawn:
            if any(text in str(mutant) for text in given.equivalent) or is_noticed(mutant, copy, TESTS[package]):
                print(f"noticed  {mutant}", flush=True)
            else:
                alive += 1
                print(f"ALIVE    {mutant}", flush=True)
    noticed = len(drawn) - alive
    print(f"{noticed} of {len(drawn)} changes noticed ({100.0 * noticed / max(len(drawn), 1):.1f} %)")
    return int(alive > 0.03 * len(drawn))


if __name__ == "__main__":
    sys.exit(main())
