"""Who may import whom, what importing costs, and how public names end."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "shapewright"

# Modules import from lower levels only; those of level 0 may use each other.
LEVELS = {
    **dict.fromkeys(
        ("units", "errors", "dtypes", "fields", "integers", "optimizers", "parquet", "recomputation", "shown"), 0
    ),
    **dict.fromkeys(("hardware", "config", "workload", "layout", "operations"), 1),
    "saved_tensors": 1.5,  # what lowering moves to the host is what memory counts
    **dict.fromkeys(("lowering", "perf", "memory", "formats"), 2),
    "adding_up": 2.5,  # from prices to a step, for whoever predicts, plans or searches
    "step_warnings": 2.8,  # what predict says of a priced step
    **dict.fromkeys(("predict", "whole"), 3),
    **dict.fromkeys(("store", "horizon", "cluster"), 4),
    **dict.fromkeys(("lint", "plan", "question", "accuracy", "figures"), 5),
    "search": 5.5,  # its layouts are those of a plan
    **dict.fromkeys(("assumed_layout", "capacity", "calculators", "compare", "serving", "sweep", "utilization"), 5),
    **dict.fromkeys(("report", "bench", "api", "fit"), 6),
    "explorer": 7,
    "cli": 8,  # its serve starts the explorer
    **dict.fromkeys(("__init__", "__main__"), 9),
}
HEAVY = {
    "torch",
    "transformers",
    "scipy",
    "pandas",
    "pyarrow",
    "matplotlib",
    "huggingface_hub",
    "ray",
    "lightgbm",
    "numba",
}

UNIT_LESS_END = re.compile(r"(?:^|_)(?:time|size|bandwidth|latency)$|_memory$|flops_efficiency$")
# Counts that Hugging Face and vendors spell so, and the one function that estimates more than a number.
SPELLED_AS_UPSTREAM = re.compile(
    r"(?:hidden|intermediate|embedding|vocab|batch|window|node|link_group)_size$|^estimate_memory$"
)


def imported_parts(source: str) -> Iterator[str]:
    """Name the modules and packages directly under shapewright that a source text imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: relative imports hide the level"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.split(".")[1] for name in names if name.startswith("shapewright."))


def upward_imports(part: str, source: str) -> list[str]:
    """List what a source text of ``part`` imports from its own level or above."""
    allowed = {other for other, level in LEVELS.items() if level < LEVELS[part] or level == 0} | {part, "__version__"}
    return sorted(set(imported_parts(source)) - allowed)


def part_of(path: Path) -> str:
    """Module or package directly under shapewright that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def python_files() -> list[Path]:
    """Return the package's source files."""
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    """A file imports nothing of its own level or above, except its own package."""
    assert upward_imports(part_of(path), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("part", "source", "expected"),
    [
        ("operations", "from shapewright.config import TransformerConfig", ["config"]),
        ("perf", "import shapewright.lowering.layer", ["lowering"]),
        ("operations", "def f():\n    from shapewright import workload", ["workload"]),
        ("lint", "from shapewright.predict import predict", []),
    ],
)
def test_upward_imports_are_noticed(part: str, source: str, expected: list[str]) -> None:
    """The check sees every form of import, also inside functions."""
    assert upward_imports(part, source) == expected


def imported_files(path: Path) -> set[Path]:
    """Files of the package that a file imports by their own names, for the type checker alone too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    found = {PACKAGE.parent.joinpath(*name.split(".")).with_suffix(".py") for name in names}
    return {file for file in found if file.is_file()} - {path}


def find_circle(arrows: dict[Path, set[Path]]) -> list[Path]:
    """Files that need each other, in a row; empty where none do."""
    done: set[Path] = set()

    def visit(path: Path, above: list[Path]) -> list[Path]:
        if path in above:
            return above[above.index(path) :]
        if path in done:
            return []
        circle = next((found for other in sorted(arrows[path]) if (found := visit(other, [*above, path]))), [])
        done.add(path)
        return circle

    return next((found for path in sorted(arrows) if (found := visit(path, []))), [])


def test_no_files_need_each_other() -> None:
    """Files can be read one after the other: none imports what imports it, not even for its types."""
    assert find_circle({path: imported_files(path) for path in python_files()}) == []


def test_circles_are_noticed() -> None:
    """A circle of three files is named; a file that two others need is none."""
    one, two, three = (Path(name) for name in ("one", "two", "three"))

    assert find_circle({one: {two, three}, two: {three}, three: set()}) == []
    assert find_circle({one: {two}, two: {three}, three: {one}}) == [one, two, three]


def loaded_modules(code: str, watched: set[str]) -> set[str]:
    """Run code in a new interpreter and return which of the watched top-level modules it loaded."""
    report = "import sys; print(*{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    program = f"try:\n    {code}\nexcept SystemExit:\n    pass\n{report}\n"
    outcome = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return watched & set(outcome.stderr.split())


def test_import_loads_nothing_heavy() -> None:
    """Importing the package and its command line loads no optional dependency."""
    assert loaded_modules("import shapewright, shapewright.predict, shapewright.cli", HEAVY) == set()


def test_help_loads_no_numpy() -> None:
    """Printing the help does not wait for NumPy."""
    help_run = "from shapewright.cli import main; import sys; sys.argv = ['shapewright', '--help']; main()"
    assert loaded_modules(help_run, HEAVY | {"numpy"}) == set()


def test_heavy_imports_are_noticed() -> None:
    """The check sees a watched module that something else loads in its turn."""
    assert loaded_modules("import xml.dom.minidom, sys; sys.exit(1)", {"xml", "numpy"}) == {"xml"}


def public_names(source: str) -> Iterator[str]:
    """Name the public functions, arguments and class or module attributes that a source text defines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            arguments = node.args
            yield node.name
            yield from (argument.arg for argument in arguments.posonlyargs + arguments.args + arguments.kwonlyargs)
        elif isinstance(node, ast.ClassDef | ast.Module):
            for statement in node.body:
                targets = getattr(statement, "targets", [getattr(statement, "target", None)])
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def unit_less_names(source: str) -> list[str]:
    """List public names that end in a quantity where the unit should stand."""
    names = {name.lower() for name in public_names(source) if not name.startswith("_")}
    return sorted(name for name in names if UNIT_LESS_END.search(name) and not SPELLED_AS_UPSTREAM.search(name))


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_of_quantities_end_in_their_unit(path: Path) -> None:
    """No public name ends in a bare time, size, memory, bandwidth or latency."""
    assert unit_less_names(path.read_text(encoding="utf-8")) == []


def test_unit_less_names_are_noticed() -> None:
    """The check sees functions, arguments, fields and constants, and lets counts and private names be."""
    source = (
        "START_LATENCY = 1\n_hidden_time = 2\n"
        "class Link:\n    bandwidth: float\n    node_size: int\n    peak_memory: float = 0\n"
        "def step_time(tile_size, *, time_s): ...\n"
    )
    assert unit_less_names(source) == ["bandwidth", "peak_memory", "start_latency", "step_time", "tile_size"]
