"""Architecture of the package: allowed imports, cost of importing, and endings of public names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "shapewright"

# Packages in the order of the data flow: each imports from those before it only.
PACKAGES = (
    "core",
    "hardware",
    "models",
    "workload",
    "memory",
    "lowering",
    "pricing",
    "prediction",
    "lint",
    "optimize",
    "measure",
    "app",
)
# Pricing comes after these but must not use them: it prices operations, whatever model they come from.
NOT_FOR_PRICING = {"models", "memory"}
MOST_MODULES_IN_A_FOLDER = 15
ONE_MODULE_EACH = "app/cli/commands"  # a command is found by its name
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
    "mcp",
}

UNIT_LESS_END = re.compile(r"(?:^|_)(?:time|size|bandwidth|latency)$|_memory$|flops_efficiency$")
# Counts that Hugging Face and vendors spell so, and the one function that estimates more than a number.
SPELLED_AS_UPSTREAM = re.compile(
    r"(?:hidden|intermediate|embedding|vocab|batch|image|window|node|link_group|world)_size$|^estimate_memory$"
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


def forbidden_imports(part: str, source: str) -> list[str]:
    """List the packages that a source text of ``part`` imports from and must not."""
    if part in ("__init__", "__main__"):
        return []
    allowed = {*PACKAGES[: PACKAGES.index(part) + 1], "__version__"}
    if part == "pricing":
        allowed -= NOT_FOR_PRICING
    return sorted(set(imported_parts(source)) - allowed)


def part_of(path: Path) -> str:
    """Module or package directly under shapewright that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def python_files() -> list[Path]:
    """Return the package's source files."""
    return sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    """A file imports nothing from packages after its own."""
    assert forbidden_imports(part_of(path), path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("part", "source", "expected"),
    [
        ("hardware", "from shapewright.models import TransformerConfig", ["models"]),
        ("pricing", "import shapewright.models.transformer", ["models"]),
        ("memory", "def f():\n    from shapewright import lowering", ["lowering"]),
        ("lint", "from shapewright.prediction.predict import predict", []),
    ],
)
def test_forbidden_imports_are_noticed(part: str, source: str, expected: list[str]) -> None:
    """The check sees every form of import, also inside functions."""
    assert forbidden_imports(part, source) == expected


def test_packages_equal_the_list() -> None:
    """The source folder holds the listed packages and no other module but the two entry points."""
    found = {path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}

    assert found == {*PACKAGES, "__init__.py", "__main__.py"}


def test_names_come_from_their_modules() -> None:
    """A package's __init__ hands nothing on, so that a name has one home and no import loads what it does not need."""
    imports = [
        str(path.parent.relative_to(PACKAGE))
        for path in PACKAGE.rglob("__init__.py")
        if "from shapewright" in path.read_text(encoding="utf-8")
    ]

    assert sorted(imports) == [".", "app/cli"]


def test_folders_hold_few_modules() -> None:
    """A folder with many modules is divided into subpackages by subject."""
    sizes: dict[str, int] = {}
    for path in python_files():
        if path.name != "__init__.py":
            folder = str(path.parent.relative_to(PACKAGE))
            sizes[folder] = sizes.get(folder, 0) + 1

    assert {
        folder: size for folder, size in sizes.items() if size > MOST_MODULES_IN_A_FOLDER and folder != ONE_MODULE_EACH
    } == {}


def test_figures_draw_outputs() -> None:
    """Charts read outputs; reports place charts on pages, so that neither needs the other's helpers."""
    uses = {
        path.name: name
        for path in (PACKAGE / "app" / "figures").rglob("*.py")
        for name in re.findall(r"from (shapewright\.app\.report[.\w]*) import", path.read_text(encoding="utf-8"))
        if not name.startswith("shapewright.app.report.outputs")
    }

    assert uses == {}


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


def test_imports_have_no_cycles() -> None:
    """Imports have no cycles, not even for types."""
    assert find_circle({path: imported_files(path) for path in python_files()}) == []


def test_cycles_are_reported() -> None:
    """A cycle of three files is reported; a file with two importers is not."""
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
    assert loaded_modules("import shapewright, shapewright.prediction.predict, shapewright.app.cli", HEAVY) == set()


def test_help_loads_no_numpy() -> None:
    """Help pages, that of every command among them, wait neither for NumPy nor for lowering and pricing."""
    commands = [path.stem.replace("_", "-") for path in (PACKAGE / ONE_MODULE_EACH).glob("[a-z]*.py")]
    program = (
        "import sys\n"
        "from contextlib import suppress\n"
        "from shapewright.app.cli.main import main\n"
        "for words in ([], *([command] for command in sys.argv[1:])):\n"
        "    with suppress(SystemExit):\n"
        "        main([*words, '--help'])\n"
        "print(*sys.modules, file=sys.stderr)\n"
    )
    outcome = subprocess.run([sys.executable, "-c", program, *commands], capture_output=True, text=True, check=True)

    assert outcome.stdout.count("Usage: shapewright") == len(commands) + 1
    # Of lowering, torch_trace alone is loaded: it tells a PyTorch module from a config.
    unwanted = HEAVY | {"numpy", "shapewright.lowering.model", "shapewright.pricing", "shapewright.prediction"}
    assert unwanted & set(outcome.stderr.split()) == set()


def test_heavy_imports_are_noticed() -> None:
    """The check sees a watched module that something else loads in its turn."""
    assert loaded_modules("import xml.dom.minidom, sys; sys.exit(1)", {"xml", "numpy"}) == {"xml"}


def undocumented_dataclasses(source: str) -> list[str]:
    """Name the dataclasses without a docstring, for which the standard library formats their signature on import."""
    classes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    return [
        node.name
        for node in classes
        if any("dataclass" in ast.unparse(one) for one in node.decorator_list) and not ast.get_docstring(node)
    ]


def test_dataclasses_have_docstrings() -> None:
    """Without one, a class takes milliseconds of every command that imports it."""
    assert undocumented_dataclasses("@dataclass(frozen=True)\nclass Point:\n    x: int\n") == ["Point"]
    assert {path.name: found for path in python_files() if (found := undocumented_dataclasses(path.read_text()))} == {}


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
    """List public names that end in a quantity instead of a unit."""
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


_STRING_TESTS = {"startswith", "endswith", "partition", "rpartition", "split", "rsplit", "removeprefix", "removesuffix"}


def _is_operation_name(node: ast.expr) -> bool:
    """Whether an expression is the name of an operation, such as ``entry.operation.name``."""
    if not isinstance(node, ast.Attribute) or node.attr != "name":
        return False
    owner = node.value
    return (owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")) == "operation"


def parsed_operation_names(source: str) -> list[int]:
    """List the lines that derive something from an operation's displayed name by a fixed text, or use its identity."""
    return [node.lineno for node in ast.walk(ast.parse(source)) if isinstance(node, ast.expr) and _parses_name(node)]


def _parses_name(node: ast.expr) -> bool:
    if isinstance(node, ast.Compare):
        return isinstance(node.ops[0], ast.In | ast.NotIn) and _is_operation_name(node.comparators[0])
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        has_text = any(isinstance(part, ast.Constant) for given in node.args for part in ast.walk(given))
        return node.func.attr in _STRING_TESTS and has_text and _is_operation_name(node.func.value)
    return ast.unparse(node) == "id(operation)"


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_operation_names_are_not_parsed(path: Path) -> None:
    """Only lowering, which makes the displayed names of operations, takes them apart."""
    assert part_of(path) == "lowering" or parsed_operation_names(path.read_text(encoding="utf-8")) == []


def test_parsed_operation_names_are_noticed() -> None:
    """The check sees string methods with a fixed text, containment and identity; lookups by a given name may be."""
    source = (
        'entry.operation.name.startswith("moe.")\n'
        'operation.name.partition(".")\n'
        '"attention" in operation.name\n'
        "id(operation)\n"
        "operation.name.startswith(name)\n"
        'sample.name.startswith("alignment.")\n'
    )
    assert parsed_operation_names(source) == [1, 2, 3, 4]


def texts_with_flags(source: str) -> list[str]:
    """Texts of a module, outside docstrings, that name a flag; commands in quotes are typed as they are."""
    tree = ast.parse(source)
    bare = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "VALUE" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in bare:
            text = node.value
        else:
            continue
        if re.search(r"(?<![\w-])--[a-z]", re.sub(r"'[^']*'", "", text)):
            found.append(text)
    return found


def test_texts_of_the_library_name_no_flags() -> None:
    """Flags are named by the command line alone, and by refits, which are a command of their own."""
    found = {
        str(path.relative_to(PACKAGE)): texts
        for path in python_files()
        if part_of(path) != "app" and (texts := texts_with_flags(path.read_text(encoding="utf-8")))
    }

    assert {path for path in found if not path.startswith("measure/refit/")} == {"measure/bench/verify.py"}
    assert found["measure/bench/verify.py"] == ["search --verify"]  # the command that a store records


def test_flags_in_texts_are_noticed() -> None:
    """A flag in a text or an f-string is found; a docstring and a command in quotes are left alone."""
    lines = '"""With --json."""', 'first = "set --tp"', 'second = f"{first} or --pp"', "third = \"run 'memory --tp 2'\""

    assert texts_with_flags("\n".join(lines)) == ["set --tp", "VALUE or --pp", " or --pp"]
