"""Change one token of the core at a time, and count the changes that no test notices: make mutation.

A seeded sample of changes is drawn over the packages below: comparisons, arithmetic, truth values, numbers and swapped
arguments. Pytest collects the tests once. A first run records which lines each test runs (before Python 3.12: which
functions). Then a forked process for each change replaces the code of the changed function and runs the tests that
reach the change until one fails: first those of the regression grid, then others, the quickest first, for --seconds. A
change outside functions (a default, a table) or in code that Numba compiles, whose lines are not seen, is made before
anything is imported, in a process of its own. With --seconds 0 the grid alone is run.

Results are kept in build/mutation, so that the same command continues where it was stopped; delete the folder after
a change of the tests that are there already. A change that takes too long is counted apart: no test noticed it. Whether
a change has no effect on behaviour is judged by a person: name such changes with --equivalent.

    python scripts/mutate.py --seed 1 --count 50
    python scripts/mutate.py --seed 1 --count 200 --seconds 0
    python scripts/mutate.py --at src/shapewright/memory/estimate.py:170
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import importlib.machinery
import itertools
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src"
RESULTS = ROOT / "build/mutation"
PACKAGES = (
    "memory", "lowering", "models/families", "lint", "optimize/serving", "optimize/plan", "pricing",
    "prediction/composition",
)  # fmt: skip
# Modules are traced in a process of their own, where functions are not replaced.
ELSEWHERE = SOURCE / "shapewright/lowering/torch_trace"
GRID = "tests/regression"
# Doctests and tests of parts, of whole steps by hand, of properties, and against other implementations,
TESTS = (
    GRID, "src/shapewright", "tests/unit", "tests/property", "tests/vectors", "tests/oracle",
)  # fmt: skip
# without those of fits, searches, measurements, files and processes, which are slow and see little of the core.
UNRELATED_UNITS = (
    "accuracy*", "architecture", "calibrate*", "cli*", "command_texts", "config_fuzz", "config_hub",
    "control_characters", "design", "experiments", "figures", "fit_*", "formats", "format_readers",
    "hardware_files", "hardware_loading", "hostile_folder", "job_pages", "loss_law", "nodes", "on_ray",
    "outputs", "own_losses", "package", "public_names", "question_json", "record_transfer", "refit",
    "report*", "results", "search*", "shapes_as_types", "store_*", "sweep",
    "trainer_files",
)  # fmt: skip
UNRELATED = (
    *(f"tests/unit/test_{name}.py" for name in UNRELATED_UNITS),
    "tests/property/test_bad_input.py", "tests/property/test_search.py", "tests/oracle/test_trace_child.py",
    "tests/oracle/test_trace_diffusers.py", "tests/oracle/test_traced_families.py",
    "src/shapewright/app", "src/shapewright/measure",
)  # fmt: skip
# Loading calibration records is slow: these keep what they have read.
KEPT_CACHES = ("shapewright.pricing.calibration", "shapewright.models.presets", "shapewright.hardware")
LIMIT_BYTES = 16 << 30
# A change may take this many times the recorded processor time of its tests and of reading records anew, and its
# process this many times that by the clock.
_MOST_SLOWDOWN, _MOST_WAITING, _READING_S = 3, 10, 10
TOO_LONG, FAILED, DIED, DONE = "too long", "error outside tests", "the process died", "done: "
# Processor time of each test, and the lines that it runs by file. [s]
Records = dict[str, tuple[float, dict[str, list[int]]]]
OTHER: dict[type, Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change: the file, the place of the node in its walk, and what is done there.

    ``function`` is the qualified name of the innermost function that holds it, empty outside functions; ``lines`` are
    those of the node, and the first of its statement.
    """

    path: Path
    place: int
    line: int
    lines: tuple[int, ...]
    function: str
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
        node.value = 2 * node.value if isinstance(node.value, float) and node.value else node.value + 1
    elif isinstance(node, ast.Call) and len(node.args) > 1 and not isinstance(node.args[1], ast.Starred):
        if ast.unparse(node.func).endswith(("min", "max", "minimum", "maximum")):
            return False
        node.args[0], node.args[1] = node.args[1], node.args[0]
    else:
        return False
    return True


def name_functions(tree: ast.AST) -> dict[int, str]:
    """Qualified name of the innermost function around each node that runs when the function is called."""
    names: dict[int, str] = {}

    def visit(node: ast.AST, inside: str, prefix: str) -> None:
        names[id(node)] = inside
        for name, value in ast.iter_fields(node):
            children = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST)]
            for child in children:
                if name == "body" and isinstance(node, ast.FunctionDef | ast.Lambda):
                    own = f"{prefix}{getattr(node, 'name', '<lambda>')}"
                    visit(child, own, f"{own}.<locals>.")
                elif name == "body" and isinstance(node, ast.ClassDef):
                    visit(child, inside, f"{prefix}{node.name}.")
                else:
                    visit(child, inside, prefix)

    visit(tree, "", "")
    return names


def list_mutants(path: Path) -> Iterator[Mutant]:
    """List the changes of a module, without docstrings, annotations, messages, and checks of equal lengths."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = name_functions(tree)
    quiet: set[int] = set()
    first_lines: dict[int, int] = {}
    for node in ast.walk(tree):
        for child in ast.iter_child_nodes(node):
            first_lines[id(child)] = child.lineno if isinstance(child, ast.stmt) else first_lines.get(id(node), 0)
        annotations = [getattr(node, name, None) for name in ("annotation", "returns")]
        messages = [node.exc] if isinstance(node, ast.Raise) else [node] if isinstance(node, ast.JoinedStr) else []
        checks = [node] if isinstance(node, ast.keyword) and node.arg == "strict" else []
        for part in (*annotations, *messages, *checks):
            quiet |= {id(inner) for inner in ast.walk(part)} if part is not None else set()
    for place, node in enumerate(ast.walk(tree)):
        if id(node) in quiet or not hasattr(node, "lineno"):
            continue
        before = ast.unparse(node)
        if change(node) and ast.unparse(node) != before:
            lines = (first_lines[id(node)], *range(node.lineno, getattr(node, "end_lineno", node.lineno) + 1))
            function = "" if path.stem == "compiled" else functions[id(node)]
            yield Mutant(path, place, node.lineno, lines, function, before[:80], ast.unparse(node)[:80])


def compile_mutant(mutant: Mutant) -> CodeType:
    """Code of the module with the change."""
    tree = ast.parse(mutant.path.read_text(encoding="utf-8"))
    change(list(ast.walk(tree))[mutant.place])
    return compile(tree, str(mutant.path), "exec", dont_inherit=True)


def list_codes(code: CodeType) -> Iterator[CodeType]:
    """List a code object and those within it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield from list_codes(part)


def is_kept(cache: Any) -> bool:
    """Whether a cache holds records and presets, which are slow to read, or is not of the package."""
    return not cache.__module__.startswith("shapewright") or cache.__module__.startswith(KEPT_CACHES)


def replace_functions(mutant: Mutant) -> None:
    """Give the live functions of the module the code with the change, and forget what was computed before.

    Records that were read stay, unless the change is where they are read or used.
    """
    codes = {(each.co_qualname, each.co_firstlineno): each for each in list_codes(compile_mutant(mutant))}
    module = ".".join(mutant.path.relative_to(SOURCE).parts)
    reads_records = module.startswith(("shapewright.pricing", "shapewright.models", "shapewright.hardware"))
    for live in gc.get_objects():
        if type(live) is FunctionType and live.__code__.co_filename == str(mutant.path):
            live.__code__ = codes[live.__code__.co_qualname, live.__code__.co_firstlineno]
        elif type(live) is functools._lru_cache_wrapper and (reads_records or not is_kept(live)):
            live.cache_clear()


def replace_module(mutant: Mutant) -> None:
    """Have the module imported with the change."""
    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        return compile_mutant(mutant) if loader.path == str(mutant.path) else original(loader, name)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign, assignment]


class Collected:
    """Plugin of pytest that hands the tests it collected to a function instead of running them."""

    def __init__(self, work: Callable[[Collected], object]) -> None:
        """Keep the function."""
        self.work = work
        self.items: dict[str, pytest.Item] = {}
        self.failed: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Call the function in place of pytest's loop."""
        self.items = {item.nodeid: item for item in session.items}
        self.work(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the name of a test that failed."""
        if report.failed:
            self.failed.add(report.nodeid)

    def run(self, names: Sequence[str]) -> Iterator[str]:
        """Run tests in order; yield the name of each that has run."""
        items = [self.items[name] for name in names if name in self.items]
        for item, following in zip(items, [*items[1:], None], strict=False):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            yield item.nodeid

    def find_failure(self, names: Sequence[str]) -> str:
        """Run tests in order until one fails; return its name, or nothing."""
        return next((name for name in self.run(names) if name in self.failed), "")


def collect(files: Sequence[str], work: Callable[[Collected], object]) -> None:
    """Have pytest collect tests, and call a function with them."""
    ignored = [f"--ignore-glob={ROOT / each}" for each in UNRELATED]
    with tempfile.TemporaryDirectory() as folder:
        options = ["-q", "-s", "--no-header", "--no-summary", "-p", "no:cacheprovider", f"--basetemp={folder}/tests"]
        if pytest.main([*options, f"--rootdir={ROOT}", *ignored, *files], plugins=[Collected(work)]) > 1:
            raise RuntimeError("pytest could not collect the tests")


def fork(work: Callable[[], object], limit_s: int | None = None) -> str:
    """Call a function in a forked process; return its text, or "too long" after its processor time.

    With a limit the process is quiet. Any other end of it, as at its limit of memory, counts as a failure of a test.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        text = FAILED
        try:
            if limit_s is not None:
                os.setpgid(0, 0)
                resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
                resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
                for stream in (1, 2):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            text = f"{DONE}{work()}"
        except Exception:
            traceback.print_exc()
        finally:
            os.write(writing, text.encode()[:4000])
            os._exit(0)
    os.close(writing)
    end_s = float("inf") if limit_s is None else time.monotonic() + _MOST_WAITING * limit_s
    with os.fdopen(reading, encoding="utf-8") as pipe:
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.01)
            if time.monotonic() > end_s:
                os.killpg(child, signal.SIGKILL)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXCPU):
            return TOO_LONG
        return (pipe.read() or DIED).removeprefix(DONE)


def collect_in_child(files: Sequence[str], work: Callable[[Collected], object]) -> None:
    """Do so in a forked process, so that nothing of the package is imported here."""
    if fork(lambda: collect(files, work)) == FAILED:
        raise RuntimeError("the tests could not be collected")


def watch_lines(note: Callable[[str, int], object]) -> Callable[[], None]:
    """Call a function with the file and number of each line of the package that runs; return what starts it anew."""
    source = str(SOURCE)
    if sys.version_info < (3, 12):
        # Events of lines would take hours here. All lines of a function that is called count as run, so that a change
        # meets more tests than need be, and none too few.
        seen: dict[int, CodeType] = {}

        def trace(frame: FrameType, _event: str, _: object) -> None:
            code = frame.f_code
            if id(code) not in seen:
                seen[id(code)] = code
                if code.co_filename.startswith(source):
                    for _, _, line in code.co_lines():
                        note(code.co_filename, line or code.co_firstlineno)

        def begin() -> None:
            seen.clear()
            sys.settrace(trace)

        return begin

    watch, tool = sys.monitoring, sys.monitoring.COVERAGE_ID

    def see(code: CodeType, line: int) -> object:
        if code.co_filename.startswith(source):
            note(code.co_filename, line)
        return watch.DISABLE  # until it is started anew

    watch.use_tool_id(tool, "mutate")
    watch.register_callback(tool, watch.events.LINE, see)
    watch.set_events(tool, watch.events.LINE)
    return watch.restart_events


def record(tests: Collected, file: Path) -> None:
    """Run the tests that have no record; note the time of each, and the lines that it runs where it passes."""
    records = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    lines: dict[str, set[int]] = {}
    restart = watch_lines(lambda path, line: lines.setdefault(path, set()).add(line))
    # Not isinstance, which reads __class__ of anything.
    caches = [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper and not is_kept(each)]
    start_s = time.process_time()
    restart()
    for name in tests.run([name for name in tests.items if name not in records]):
        time_s = time.process_time() - start_s
        reached = {str(Path(path).relative_to(SOURCE)): sorted(found) for path, found in [*lines.items()]}
        records[name] = (time_s, {} if name in tests.failed else reached)
        if len(records) % 500 == 0:
            file.write_text(json.dumps(records), encoding="utf-8")
        for each in caches:
            each.cache_clear()
        lines.clear()
        start_s = time.process_time()
        restart()
    file.write_text(json.dumps(records), encoding="utf-8")


def choose_tests(mutant: Mutant, records: Records, limit_s: float) -> list[str]:
    """Tests that reach the change: all of the grid, then others as many as fit the limit, the quickest first.

    For a change outside functions, those that reach anything of its file, or of a file that imports it.
    """
    own = str(mutant.path.relative_to(SOURCE))
    files, wanted = {own}, frozenset(mutant.lines)
    if not mutant.function:
        module = own.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        package, _, name = module.rpartition(".")
        imported = re.compile(rf"from {module}[ .]|from {package} import [^#]*?\b{name}\b")
        files |= {str(each.relative_to(SOURCE)) for each in SOURCE.rglob("*.py") if imported.search(each.read_text())}
    chosen = sorted(
        (time_s, test)
        for test, (time_s, reached) in records.items()
        if (not wanted.isdisjoint(reached.get(own, ())) if mutant.function else not files.isdisjoint(reached))
    )
    grid = [test for _, test in chosen if test.startswith(GRID)]
    others = [(time_s, test) for time_s, test in chosen if not test.startswith(GRID)]
    ends_s = itertools.accumulate(time_s for time_s, _ in others)
    return grid + [test for (_, test), end_s in zip(others, ends_s, strict=True) if end_s <= limit_s]


def is_replaceable(mutant: Mutant) -> bool:
    """Whether live functions can be given the change: it is in one, and each has a name and line of its own."""
    places = Counter((each.co_qualname, each.co_firstlineno) for each in list_codes(compile_mutant(mutant)))
    return bool(mutant.function) and max(places.values()) == 1


def run_mutants(mutants: Sequence[Mutant], records: Records, results: Path, limit_s: float) -> None:
    """Test the changes, and append each with the test that noticed it to the file of results."""

    def run(tests: Collected, mutant: Mutant, names: Sequence[str]) -> str:
        if is_replaceable(mutant):
            replace_functions(mutant)
        return tests.find_failure(names)

    def run_changed_module(mutant: Mutant, names: Sequence[str]) -> str:
        replace_module(mutant)
        found: list[str] = []
        files = sorted({test.partition("::")[0] for test in names})
        collect(files, lambda tests: found.append(run(tests, mutant, names)))
        return found[0]

    def fork_with_tests(mutant: Mutant, work: Callable[[Mutant, Sequence[str]], str]) -> None:
        names = choose_tests(mutant, records, limit_s)
        most_s = _MOST_SLOWDOWN * (_READING_S + sum(records[name][0] for name in names))
        note(mutant, fork(functools.partial(work, mutant, names), int(most_s)) if names else "")

    def note(mutant: Mutant, test: str) -> None:
        if test == FAILED:
            raise RuntimeError(f"no test could run with {mutant}")
        with results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"change": str(mutant), "place": mutant.place, "test": test}) + "\n")
        print(f"{'noticed' if test else 'ALIVE':8} {mutant}  {test.rpartition('/')[2]}", flush=True)

    def run_changed_functions(tests: Collected) -> None:
        # One test of each table, so that modules are imported and records read once.
        first = {
            name.partition("[")[2].partition("-")[0]: name for name in reversed(tests.items) if name.startswith(GRID)
        }
        tests.find_failure([*first.values()])
        for mutant in filter(is_replaceable, mutants):
            fork_with_tests(mutant, functools.partial(run, tests))

    collect_in_child(TESTS if limit_s else (GRID,), run_changed_functions)
    for mutant in itertools.filterfalse(is_replaceable, mutants):
        fork_with_tests(mutant, run_changed_module)


def main() -> int:
    """Draw the changes, run their tests, and print those that nothing noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=40, help="changes of each package")
    parser.add_argument("--package", action="append", choices=PACKAGES, help="a package; default all")
    parser.add_argument("--seconds", type=float, default=30.0, help="tests beside the grid, by recorded time")
    parser.add_argument("--at", action="append", default=[], metavar="FILE:LINE", help="all changes of a line instead")
    parser.add_argument("--equivalent", action="append", default=[], metavar="TEXT", help="a change without effect")
    given = parser.parse_args()
    lines = {(ROOT / file, int(line)) for file, _, line in (each.partition(":") for each in given.at)}
    drawn: dict[str, list[Mutant]] = {}
    for package in given.package or PACKAGES:
        paths = sorted((SOURCE / "shapewright" / package).rglob("*.py"))
        found = [mutant for path in paths if ELSEWHERE not in path.parents for mutant in list_mutants(path)]
        if lines:
            drawn[package] = [mutant for mutant in found if (mutant.path, mutant.line) in lines]
        else:
            drawn[package] = Random(f"{given.seed} {package}").sample(found, min(given.count, len(found)))
    RESULTS.mkdir(parents=True, exist_ok=True)
    records, results = RESULTS / "records.json", RESULTS / "results.jsonl"
    collect_in_child(TESTS if given.seconds else (GRID,), lambda tests: record(tests, records))
    results.touch()
    tested = read_results(results)
    new = [mutant for mutants in drawn.values() for mutant in mutants if (str(mutant), mutant.place) not in tested]
    Random(given.seed).shuffle(new)  # what has run when it is stopped is a sample of all
    run_mutants(new, json.loads(records.read_text(encoding="utf-8")), results, given.seconds)
    tested = read_results(results)
    missed = 0
    for package, mutants in drawn.items():
        counts: Counter[str] = Counter()
        for mutant in mutants:
            test = tested[str(mutant), mutant.place]
            same = any(text in str(mutant) for text in given.equivalent)
            counts["no effect" if same else TOO_LONG if test == TOO_LONG else "noticed" if test else "alive"] += 1
        missed += counts[TOO_LONG] + counts["alive"]
        print(f"{package}: {', '.join(f'{number} {word}' for word, number in counts.items())}")
    return int(missed > 0.03 * sum(map(len, drawn.values())))


def read_results(file: Path) -> dict[tuple[str, int], str]:
    """Test that noticed each change tested so far, empty where none did."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {(row["change"], row["place"]): row["test"] for row in rows}


if __name__ == "__main__":
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive a fork
    sys.exit(main())
