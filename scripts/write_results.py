"""Refresh the generated parts of README.md, docs/index.md and docs/guides: tables, console output, Python output.

A generated part is enclosed by ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; page_blocks.py runs the code blocks.
With --check nothing is written, and the exit code is 1 if a page is stale.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import readme_claims
from page_blocks import refresh_blocks
from proxy_table import proxy_table
from published_runs import evidence

from shapewright.app.report.outputs.catalogue import describe_calibration
from shapewright.hardware.loader import list_devices, load_device
from shapewright.models.read import list_presets

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
START = ROOT / "docs" / "index.md"
GUIDES = ROOT / "docs" / "guides"
PROXY_LOSSES = ROOT / "docs" / "proxy-losses.md"


def main() -> int:
    """Refresh the pages, or check that they are up to date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    parser.add_argument(
        "pages",
        nargs="*",
        type=Path,
        help="files to refresh (default: README, start page, proxy losses and guides)",
    )
    arguments = parser.parse_args()
    stale = 0
    for page in arguments.pages or (README, START, PROXY_LOSSES, *sorted(GUIDES.glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        fresh = refresh(text)
        if not arguments.check:
            page.write_text(fresh, encoding="utf-8")
        elif fresh != text:
            print(f"{page} is stale; run make docs", file=sys.stderr)
            stale = 1
    return stale


def refresh(text: str) -> str:
    """The text of a page with every generated part refreshed."""
    names = "|".join(map(re.escape, BLOCKS))
    blocks = re.compile(rf"(<!-- begin ({names}) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
    return refresh_blocks(blocks.sub(lambda block: f"{block[1]}\n{BLOCKS[block[2]]()}\n\n{block[3]}", text))


def devices_summary() -> str:
    """Number of devices and presets, and which devices are calibrated."""
    groups: dict[str, list[str]] = {}
    for name in list_devices():
        groups.setdefault(describe_calibration(load_device(name)), []).append(name)
    borrowed, bounds = groups.pop("none"), groups.pop("roofline only")
    measured = [
        f"- {_spell_kinds(words)}: {', '.join(f'`{name}`' for name in names)}"
        for words, names in sorted(groups.items(), reverse=True)
    ]
    return "\n".join(
        [
            f"[{len(list_devices())} devices](docs/devices.md) and {len(list_presets())} model presets are included. "
            "Calibrated with measurements:",
            "",
            *measured,
            "",
            f"{len(borrowed)} devices borrow the calibration of a related device; {len(bounds)} are priced by roofline "
            "alone.",
        ]
    )


def _spell_kinds(words: str) -> str:
    """Kinds of records as headings of the README name them."""
    return words.replace("-fp32", " in fp32").replace("gemm", "GEMM").replace("moe", "experts")


BLOCKS: dict[str, Callable[[], str]] = {
    "accuracy": readme_claims.accuracy_table,
    "devices": devices_summary,
    "evidence": evidence,
    "odd-width": readme_claims.odd_width,
    "paper": readme_claims.paper,
    "proxy-losses-1m": partial(proxy_table, "proxy_losses_1m_2026-11-30.csv", "proxy_runs_1m.csv"),
    "proxy-losses": partial(proxy_table, "proxy_losses_xeon_2026-11-23.csv", "proxy_runs_250k.csv"),
}
"""Content between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``."""


if __name__ == "__main__":
    sys.exit(main())
