"""Shared parts of generated Markdown pages. Not a script itself."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
WRITTEN_BY = "<!-- Written by scripts/write_pages.py; run `make docs` after a change. -->"


def markdown_table(names: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown; bars inside cells are escaped."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def join_parts(parts: Iterable[str]) -> str:
    """A page of headings, paragraphs and tables."""
    return "\n\n".join(parts) + "\n"
