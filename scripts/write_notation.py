"""Write docs/notation.md from the documentation of public fields; with --check, only report whether it is stale."""

from __future__ import annotations

import argparse
import sys
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

from shapewright.core.fields import FieldDoc, documented_fields
from shapewright.models.transformer import TransformerConfig
from shapewright.workload import ParallelLayout, Workload

DEFAULT_TARGET = Path(__file__).parent.parent / "docs" / "notation.md"

INTRODUCTION = """\
# Notation

<!-- Written by scripts/write_notation.py from the fields' own notes; run `make docs` after changing one. -->

Fields are spelled as Hugging Face spells them where that is unambiguous. Symbols are the letters of arXiv 2401.14489
where it has one, and appear in formulas only. In the GEMM C[m,n] = A[m,k] B[k,n] the contracted dimension is `k`, as
in BLAS; the paper writes `n` for it.

Quantities are in SI base units and say so in their suffix: `_s`, `_bytes`, `_flops` (an amount), `_flops_per_s` (a
rate), `_bytes_per_s`, `_hz`, `_watts`; `num_` begins a count and `_fraction` ends a number from 0 to 1.

Fields that flags can set are listed. `patches` and `vision` of a model (its image side, and the tower whose tokens a
language model reads) come from a config.json alone: [images](guides/images.md).
"""

SECTIONS = (
    ("The model: `TransformerConfig`", TransformerConfig),
    ("What is run: `Workload`", Workload),
    ("How it is spread: `ParallelLayout`", ParallelLayout),
)


def main() -> int:
    """Write the page, or compare it with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if the page is stale")
    parser.add_argument("--output", type=Path, default=DEFAULT_TARGET, help="page to write or compare")
    arguments = parser.parse_args()
    wanted = render_page()
    if not arguments.check:
        arguments.output.write_text(wanted, encoding="utf-8")
        return 0
    found = arguments.output.read_text(encoding="utf-8") if arguments.output.exists() else ""
    if found == wanted:
        return 0
    print(f"{arguments.output} is stale; run `make docs`", file=sys.stderr)
    return 1


def render_page() -> str:
    """Return the whole page."""
    parts = [INTRODUCTION]
    for title, cls in SECTIONS:
        rows = ["| field | symbol | meaning | default |", "|---|---|---|---|"]
        rows += [_row(spec, doc) for spec, doc in documented_fields(cls)]
        parts.append(f"## {title}\n\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _row(spec: Field[Any], doc: FieldDoc) -> str:
    meaning = doc.help
    if doc.choices:
        meaning += "; one of " + ", ".join(f"`{choice}`" for choice in doc.choices)
    symbol = f"`{doc.symbol}`" if doc.symbol else ""
    cells = (f"`{spec.name}`", symbol, meaning, _default(spec))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(spec: Field[Any]) -> str:
    if spec.default is MISSING:
        return "required"
    return "" if spec.default in (None, "", ()) else f"`{spec.default}`"


if __name__ == "__main__":
    sys.exit(main())
