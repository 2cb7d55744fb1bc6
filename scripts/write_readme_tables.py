"""Write the parts of README.md that are results: tables, console blocks, what Python prints.

A console block begins with ``$ shapewright``; it is run, 100 columns wide. In a Python block, what a statement prints
follows it as a comment. A table stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``. With --check nothing
is written; the exit code says whether the README is stale.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from write_pages import accuracy_facts, markdown_table

from shapewright.cli import main as run_command
from shapewright.config import list_presets
from shapewright.hardware import list_devices, load_device
from shapewright.report.devices import calibration_words

README = Path(__file__).parent.parent / "README.md"
NUM_COLUMNS = 100
PRINTED = "# -> "

# Column of the accuracy table -> (operation, sections); a row has the first section that its device has.
ACCURACY_COLUMNS: dict[str, tuple[str, tuple[str, ...]]] = {
    "GEMM, 16-bit": ("gemm", ("bf16", "fp16")),
    "GEMM, odd sizes": ("gemm", ("bf16, odd sizes",)),
    "GEMM, fp8": ("gemm", ("fp8",)),
    "expert blocks, 16-bit": (
        "moe",
        (
            "bf16, vllm 0.24.0/vllm_unquantizedfusedmoe_triton_tritonexperts",
            "bf16, vllm 0.24.0/vllm_unquantizedfusedmoe_flashinfer_trtllm_trtllmbf16experts",
            "bf16, vllm 0.14.0/vllm_fused_moe",
        ),
    ),
    "attention, prefill": ("attention", ("16bit/prefill",)),
    "attention, decode": ("attention", ("16bit/decode",)),
    "collectives": ("collectives", ("inside a node",)),
}


def main() -> int:
    """Write the README's results, or compare them with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the README is stale")
    parser.add_argument("--readme", type=Path, default=README, help="the file to work on")
    arguments = parser.parse_args()
    text = arguments.readme.read_text(encoding="utf-8")
    fresh = refresh(text)
    if not arguments.check:
        arguments.readme.write_text(fresh, encoding="utf-8")
        return 0
    if fresh != text:
        print(f"{arguments.readme} is stale; run make docs", file=sys.stderr)
    return int(fresh != text)


def refresh(text: str) -> str:
    """The README with every result made anew."""
    for name, table in {"accuracy": accuracy_table(), "devices": devices_table()}.items():
        marks = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        assert marks.search(text), f"the README has no place for the {name} table"
        text = marks.sub(lambda found, table=table: f"{found[1]}\n{table}\n\n{found[2]}", text)
    text = re.sub(
        r"```console\n(\$ shapewright .*?)```\n", lambda found: console_block(found[1]), text, flags=re.DOTALL
    )
    return re.sub(r"```python\n(.*?)```\n", lambda found: python_block(found[1]), text, flags=re.DOTALL)


def console_block(body: str) -> str:
    """The commands of a block, each with what it prints."""
    commands = [line for line in body.splitlines() if line.startswith("$ shapewright ")]
    shown = "".join(f"{command}\n{printed_by(command)}" for command in commands)
    return f"```console\n{shown}```\n"


def printed_by(command: str) -> str:
    """What a command prints on a page of the README's width, without blanks at the ends of lines."""
    out = io.StringIO()
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(NUM_COLUMNS)
    try:
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
            run_command(shlex.split(command)[2:])
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def python_block(body: str) -> str:
    """The statements of a block, each followed by what it prints."""
    source = "".join(f"{line}\n" for line in body.splitlines() if not line.startswith(PRINTED))
    lines = source.splitlines()
    shown, names, done = [], {"__name__": "readme"}, 0
    for statement in ast.parse(source).body:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(ast.Module([statement], []), "README.md", "exec"), names)
        assert statement.end_lineno is not None
        shown += lines[done : statement.end_lineno] + [PRINTED + line for line in out.getvalue().splitlines()]
        done = statement.end_lineno
    return "```python\n" + "".join(f"{line}\n" for line in shown + lines[done:]) + "```\n"


def accuracy_table() -> str:
    """Mean and median error per device and operation, on rows that no fit saw."""
    facts = accuracy_facts()
    devices = list(dict.fromkeys(fact["device"] for fact in facts if fact["operation"] == "gemm"))
    rows = [[device, *(cell(facts, device, *column) for column in ACCURACY_COLUMNS.values())] for device in devices]
    pointwise = [fact for fact in facts if fact["operation"] == "pointwise"]
    left_out = ", ".join(
        f"{100 * fact['mean']:.0f} % ({fact['section'].removeprefix('without ')})" for fact in pointwise
    )
    num_rows = sum(fact["rows"] for fact in facts if not fact["is_part"])
    return (
        markdown_table(["device", *ACCURACY_COLUMNS], rows)
        + f"\n\nPointwise operations on A100, one model left out at a time: mean error {left_out}.\n"
        + f"{num_rows:,} held-out rows in all; fitted {max(fact['date'] for fact in facts)}."
    )


def cell(facts: list[dict[str, Any]], device: str, operation: str, sections: tuple[str, ...]) -> str:
    """Mean and median error of one device and operation, with the number of rows."""
    for fact in facts:
        if (fact["device"], fact["operation"]) == (device, operation) and fact["section"] in sections:
            return f"{100 * fact['mean']:.1f} / {100 * fact['median']:.1f} % ({fact['rows']:,})"
    return ""


def devices_table() -> str:
    """Devices by what is known of them."""
    groups: dict[str, list[str]] = {}
    for name in list_devices():
        groups.setdefault(calibration_words(load_device(name)), []).append(name)
    borrowed, bounds = groups.pop("none"), groups.pop("roofline only")
    rows = [[words, ", ".join(f"`{name}`" for name in names)] for words, names in sorted(groups.items(), reverse=True)]
    rows.append([f"nothing: {len(borrowed)} devices borrow a sibling's record", shorten(borrowed)])
    rows.append([f"nothing: {len(bounds)} devices are priced by roofline alone", shorten(bounds)])
    return f"{len(list_devices())} devices, {len(list_presets())} model presets.\n\n" + markdown_table(
        ["measured", "devices"], rows
    )


def shorten(names: list[str]) -> str:
    """The first of many names."""
    return ", ".join(f"`{name}`" for name in names[:6]) + (", ..." if len(names) > 6 else "")


if __name__ == "__main__":
    sys.exit(main())
