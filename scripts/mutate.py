"""Change one token of the core at a time, and count the changes that no test notices: make mutation.

A seeded sample of changes is drawn over the packages below: comparisons, arithmetic, truth values, numbers and swapped
arguments. Each is written into a copy of the repository. One run of the tests records which functions each of
them calls; then those that call the changed function run, the quickest first, until one fails. Whether a change has no
effect on behaviour is judged by a person: name such changes with --equivalent.

    python scripts/mutate.py --seed 1 --count 50
    python scripts/mutate.py --at src/shapewright/memory/estimate.py:170
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "memory", "lowering", "models/families", "lint", "optimize/serving", "optimize/plan", "pricing",
    "prediction/composition",
)  # fmt: skip
# Tests of the core: of its parts, of whole steps by hand, and of properties.
TESTS = (
    "unit/test_arch*s.py", "unit/test_attention*.py", "unit/test_b[lu]*.py", "unit/test_config_[hlprt]*.py",
    "unit/test_cap*.py",
    "unit/test_ends*.py", "unit/test_exp*.py", "unit/test_fin*.py", "unit/test_flop*.py", "unit/test_hybrids.py",
    "unit/test_images.py", "unit/test_layout*.py", "unit/test_lint*.py", "unit/test_lowering*.py", "unit/test_many*.py",
    "unit/test_memory.py", "unit/test_o[df]*.py", "unit/test_op*.py", "unit/test_pi*.py", "unit/test_pl*.py",
    "unit/test_pr[ei][dc]*.py", "unit/test_recomp*.py", "unit/test_rotary*.py", "unit/test_serving*.py",
    "unit/test_stored*.py", "unit/test_traffic*.py", "unit/test_w*.py", "lint", "vectors", "property/test_[lmops]*.py",
    "property/test_pr*.py", "accuracy/test_drift.py",
)  # fmt: skip
LIMIT_S = 900
# Plugin of pytest that records the time of each test that passes, and the functions of the package that it calls.
RECORDER = """
import json, os, pathlib, sys, time
import pytest

RECORDS, FAILED, SOURCE = {}, set(), os.environ["MUTATE_SOURCE"]

@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    called, start_s = set(), time.perf_counter()
    def trace(frame, event, arg):
        code = frame.f_code
        if code.co_filename.startswith(SOURCE):
            called.add(f"{code.co_filename[len(SOURCE) + 1:]}:{code.co_firstlineno}")
    sys.settrace(trace)
    try:
        return (yield)
    finally:
        sys.settrace(None)
        RECORDS[item.nodeid] = [time.perf_counter() - start_s, sorted(called)]

def pytest_runtest_logreport(report):
    if report.failed:
        FAILED.add(report.nodeid)

def pytest_sessionfinish():
    for name in FAILED:
        del RECORDS[name]
    pathlib.Path(os.environ["MUTATE_RECORDS"]).write_text(json.dumps(RECORDS), encoding="utf-8")
"""
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


def run_pytest(copy: Path, arguments: Sequence[str], **environment: str) -> int:
    """Run pytest in a copy of the repository; return its exit code.

    Raises:
        subprocess.TimeoutExpired: it takes too long.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    folders = f"{copy / 'src'}{os.pathsep}{copy.parent}"
    child = {**os.environ, "PYTHONPATH": folders, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    limit_s = None if environment else LIMIT_S
    return subprocess.run(command, cwd=copy, env=child, capture_output=True, timeout=limit_s, check=False).returncode


def record_tests(copy: Path, records: Path, tests: Sequence[str]) -> dict[str, tuple[float, list[str]]]:
    """Run tests; return the time of each, and the functions of the package that it calls."""
    if not records.exists():
        (copy.parent / "mutate_recorder.py").write_text(RECORDER, encoding="utf-8")
        files = sorted({str(file) for name in tests for file in (copy / "tests").glob(name)})
        run_pytest(
            copy, ["-p", "mutate_recorder", *files], MUTATE_RECORDS=str(records), MUTATE_SOURCE=str(copy / "src")
        )
    found: dict[str, tuple[float, list[str]]] = json.loads(records.read_text(encoding="utf-8"))
    return found


def choose_tests(mutant: Mutant, records: Mapping[str, tuple[float, list[str]]]) -> list[str]:
    """Tests that call the function with the change, or anything of its file where it is in none; quickest first."""
    tree = ast.parse(mutant.path.read_text(encoding="utf-8"))
    around = [
        min([node.lineno, *(each.lineno for each in node.decorator_list)])
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.body[0].lineno <= mutant.line <= (node.end_lineno or 0)
    ]
    prefix = f"{mutant.path.relative_to(ROOT / 'src')}:{max(around) if around else ''}"
    chosen = [
        (time_s, name)
        for name, (time_s, called) in records.items()
        if any(each == prefix or (not around and each.startswith(prefix)) for each in called)
    ]
    return [name for _, name in sorted(chosen)]


def is_noticed(mutant: Mutant, copy: Path, tests: Sequence[str]) -> bool:
    """Whether a test fails, or takes too long, with the change."""
    if not tests:
        return False
    target = copy / mutant.path.relative_to(ROOT)
    whole = target.read_text(encoding="utf-8")
    target.write_text(mutated_text(mutant), encoding="utf-8")
    names = copy.parent / "tests.txt"
    names.write_text("\n".join(tests), encoding="utf-8")
    try:
        return run_pytest(copy, ["-x", f"@{names}"]) != 0
    except subprocess.TimeoutExpired:
        return True
    finally:
        target.write_text(whole, encoding="utf-8")


def main() -> int:
    """Draw the changes, run their tests, and print those that nothing noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--package", action="append", choices=PACKAGES, help="a package; default all")
    parser.add_argument("--tests", action="append", metavar="GLOB", help="tests to run; default those of the core")
    parser.add_argument("--records", type=Path, help="which test calls what; written where it does not exist")
    parser.add_argument("--at", action="append", default=[], metavar="FILE:LINE", help="all changes of a line instead")
    parser.add_argument("--equivalent", action="append", default=[], metavar="TEXT", help="a change without effect")
    given = parser.parse_args()
    lines = {(ROOT / file, int(line)) for file, _, line in (each.partition(":") for each in given.at)}
    drawn: list[Mutant] = []
    for package in given.package or PACKAGES:
        found = [
            one for path in sorted((ROOT / "src/shapewright" / package).rglob("*.py")) for one in list_mutants(path)
        ]
        chosen = [one for one in found if (one.path, one.line) in lines]
        if not lines:
            number = -(-given.count // len(given.package or PACKAGES))
            chosen = Random(f"{given.seed} {package}").sample(found, min(number, len(found)))
        drawn += chosen
    Random(given.seed).shuffle(drawn)  # what has run when it is stopped is a sample of all
    alive = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".venv*", "build", "dist", "__pycache__"))
        records = record_tests(copy, given.records or Path(folder) / "records.json", given.tests or TESTS)
        for mutant in drawn:
            tests = choose_tests(mutant, records)
            if any(text in str(mutant) for text in given.equivalent) or is_noticed(mutant, copy, tests):
                print(f"noticed  {mutant}", flush=True)
            else:
                alive += 1
                print(f"ALIVE    {mutant}", flush=True)
    noticed = len(drawn) - alive
    print(f"{noticed} of {len(drawn)} changes noticed ({100.0 * noticed / max(len(drawn), 1):.1f} %)")
    return int(alive > 0.03 * len(drawn))


if __name__ == "__main__":
    sys.exit(main())
