"""Refit calibration records of the package from measured tables.

Without STEP all refits run in the order in which they build on each other; with names, those, in the same order. Each
runs in a process of its own, so that it reads the records that the steps before it wrote.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import shapewright
from shapewright.core.errors import CalibrationError, MissingExtraError, ShapewrightError
from shapewright.measure.refit.record_files import compare_folders
from shapewright.measure.refit.steps import PACKAGE, STEPS, Step, find_steps

EXTRA_MODULES = ("pandas", "scipy", "pyarrow", "lightgbm")
OPTIONS = {
    "device": "canonical name of a device",
    "architecture": "architecture of a device file, such as hopper",
    "dtype": "element format, such as bf16",
    "kernel": "part of an expert kernel's name; other kernels keep their sections",
    "kind": "kind of record, such as gemm",
}
PACKAGE_FOLDER = Path(shapewright.__file__).parent
RECORDS = (Path("pricing") / "data", Path("prediction") / "loss" / "data")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of this command."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PACKAGE}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help="refits to run; see --list")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with the measured tables")
    parser.add_argument("--list", action="store_true", help="list the refits in their order and exit")
    parser.add_argument(
        "--check",
        action="store_true",
        help="refit in a temporary copy of the package and compare with the committed records; write nothing",
    )
    for name, meaning in OPTIONS.items():
        users = ", ".join(step.name for step in STEPS if name in step.options)
        parser.add_argument(f"--{name}", action="append", metavar="NAME", help=f"{meaning}; repeatable; for {users}")
    return parser


def list_steps() -> str:
    """Describe all refits, one per line, in their order."""
    lines = []
    for step in STEPS:
        notes = [step.reason] if step.reason else []
        notes += [" ".join(f"[--{name}]" for name in step.options)] if step.options else []
        notes += ["runs only by name"] if step.on_request else []
        lines.append(f"{step.name:24s} {step.writes}{': ' * bool(notes)}{'; '.join(notes)}")
    return "\n".join(lines)


def require_data(folder: Path | None, steps: Sequence[Step]) -> Path:
    """Return the absolute data folder.

    Raises:
        CalibrationError: it was not given, or lacks a table that a step reads.
    """
    if folder is None:
        raise CalibrationError("no folder of measured tables; give one with --data DIR")
    tables = dict.fromkeys(table for step in steps for table in step.tables)
    if missing := [table for table in tables if not (folder / table).is_file()]:
        raise CalibrationError(f"{folder} lacks {', '.join(missing)}; give another --data DIR or name fewer refits")
    return folder.resolve()


def options_of(given: argparse.Namespace, steps: Sequence[Step]) -> list[str]:
    """Return the given step options as arguments.

    Raises:
        CalibrationError: a step does not take a given option.
    """
    arguments = []
    for name in OPTIONS:
        for value in getattr(given, name) or ():
            if unable := [step.name for step in steps if name not in step.options]:
                raise CalibrationError(f"--{name} does not apply to {', '.join(unable)}; name the refits that take it")
            arguments += [f"--{name}", value]
    return arguments


def run_apart(steps: Sequence[Step], data: Path, options: Sequence[str], package: Path = PACKAGE_FOLDER) -> None:
    """Run steps one after the other, each in a new process.

    Args:
        package: Folder of the shapewright package to run, whose records are read and written.

    Raises:
        CalibrationError: a step failed.
    """
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    for number, step in enumerate(steps, start=1):
        print(f"[{number}/{len(steps)}] {step.name}: writes {step.writes}", flush=True)
        began_s = time.monotonic()
        command = [sys.executable, "-m", PACKAGE, "--data", str(data), *options, step.name]
        outcome = subprocess.run(command, env=environment, cwd=package.parent, check=False)
        if outcome.returncode:
            raise CalibrationError(f"{step.name} failed with exit code {outcome.returncode}; later refits did not run")
        print(f"[{number}/{len(steps)}] {step.name}: done in {time.monotonic() - began_s:.0f} s", flush=True)


def check_steps(steps: Sequence[Step], data: Path, options: Sequence[str]) -> list[str]:
    """Refit in a temporary copy of the package and list how its records differ from the committed ones."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / PACKAGE_FOLDER.name
        shutil.copytree(PACKAGE_FOLDER, copy, ignore=shutil.ignore_patterns("__pycache__"))
        run_apart(steps, data, options, copy)
        are_complete = not any(step.replaces_record for step in steps)
        return [
            difference
            for folder in RECORDS
            for difference in compare_folders(PACKAGE_FOLDER / folder, copy / folder, compares_reports=are_complete)
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 1 if --check found differences, 2 for an error."""
    given = build_parser().parse_args(arguments)
    if given.list:
        print(list_steps())
        return 0
    try:
        if missing := [name for name in EXTRA_MODULES if importlib.util.find_spec(name) is None]:
            raise MissingExtraError(f"refits need {', '.join(missing)}; run: pip install 'shapewright[fit]'")
        steps = find_steps(given.steps)
        data, options = require_data(given.data, steps), options_of(given, steps)
        if given.check:
            differences = check_steps(steps, data, options)
            print("\n".join(differences) or "the committed records are reproduced")
            return 1 if differences else 0
        if len(steps) > 1:
            run_apart(steps, data, options)
        else:
            chosen = {f"{name}s": getattr(given, name) for name in steps[0].options if getattr(given, name)}
            steps[0].load()(data, **chosen)
    except ShapewrightError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
