"""Build the wheel and the sdist, and install them bare: lowest and newest dependencies, and each extra alone.

Every installation gets an environment of its own, answers a question on the command line, and uses its extra.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What shows that an extra works; the others are imported by the code of the command that needs them.
USES = {
    "hub": "from huggingface_hub import hf_hub_download",
    "trace": "import torch, transformers",
    "bench": "import torch",
    "plot": "import shapewright.app.figures.matplotlib_files, matplotlib",
    "docs": "import mkdocs, mkdocstrings",
    "ray": "import ray",
    "fast": "import numba",
    "serve": "from shapewright.app.explorer.app import create_app; create_app()",
    "yaml": "from shapewright.app.formats.registry import parse_job; assert parse_job('n_layer: 2\\nn_head: 2').fields",
    "mcp": "from shapewright.app.integrations.mcp_server import Access, make_server; make_server(Access())",
    "fit": "import scipy, pyarrow, pandas, lightgbm",
}
QUESTION = "check", "gpt3-2.7b", "--device", "a100-sxm-40gb", "--fail-on", "never", "--json"
# The CPU build is small where the index has it; any other is a matter of the index.
TORCH = "torch==2.13.0"
WITH_TORCH = {"trace", "bench"}


def main() -> int:
    """Check the release; print a row for each installation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="installations to check; default: all")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which the rest is left out")
    arguments = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [name for name in project["optional-dependencies"] if name != "test"]
    missing = set(extras) ^ set(USES)
    if missing:
        print(f"USES and the extras of pyproject.toml differ: {', '.join(sorted(missing))}", file=sys.stderr)
        return 1
    start_s, failed, left_out = time.monotonic(), [], []
    with tempfile.TemporaryDirectory() as folder:
        wheel, sdist = build(Path(folder) / "dist")
        lowest = [re.sub(r">=", "==", requirement) for requirement in project["dependencies"]]
        plans: dict[str, tuple[list[str], str]] = {
            "newest": ([str(wheel)], ""),
            "lowest": ([str(wheel), *lowest], ""),
            "sdist": ([str(sdist)], ""),
            **{name: ([f"{wheel}[{name}]"], USES[name]) for name in extras},
        }
        for name, (requirements, use) in plans.items():
            if arguments.only and name not in arguments.only:
                continue
            if time.monotonic() - start_s > arguments.limit:
                left_out.append(name)
                continue
            began_s = time.monotonic()
            problem = ""
            for attempt in ("first", "second"):  # an index may fail to answer once
                place = Path(folder) / f"{name}-{attempt}"
                problem = try_installation(place, requirements, use, needs_torch=name in WITH_TORCH)
                shutil.rmtree(place, ignore_errors=True)
                if not problem:
                    break
            print(f"{name:8} {time.monotonic() - began_s:5.0f} s  {problem or 'works'}", flush=True)
            failed += [name] if problem else []
    if left_out:
        print(f"left out after {arguments.limit:g} s: {', '.join(left_out)}")
    return 1 if failed else 0


def build(folder: Path) -> tuple[Path, Path]:
    """Build the wheel and the sdist."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))


def try_installation(folder: Path, requirements: list[str], use: str, *, needs_torch: bool) -> str:
    """Install into a new environment and use it; return what went wrong, empty if nothing."""
    venv.create(folder)  # pip of this environment installs into it, and compiles nothing: both save seconds
    python, shapewright = (str(folder / "bin" / name) for name in ("python", "shapewright"))
    pip = [sys.executable, "-m", "pip", "--python", python, "--quiet", "--disable-pip-version-check"]
    install = [*pip, "install", "--no-compile"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if needs_torch:
        subprocess.run([*install, TORCH], env=environment, capture_output=True, check=False, timeout=600)
    steps: list[list[str]] = [
        [*install, *requirements],
        [*pip, "check"],
        [shapewright, *QUESTION],
        *([[python, "-c", use]] if use else []),
    ]
    for step in steps:
        outcome = subprocess.run(
            step, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=600
        )
        if outcome.returncode:
            words = (outcome.stderr or outcome.stdout).strip().splitlines()
            return f"fails at {' '.join(step[-2:])}: {words[-1] if words else outcome.returncode}"
        if step[0] == shapewright and not json.loads(outcome.stdout)["findings"]:
            return "finds nothing where there is something to find"
    return ""


if __name__ == "__main__":
    sys.exit(main())
