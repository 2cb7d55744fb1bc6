"""Write the results in README.md, docs/index.md and docs/guides: tables, console blocks, what Python prints.

A table stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``; blocks are those of page_blocks.py. With
--check nothing is written; the exit code says whether a page is stale.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import readme_claims
from accuracy_page import accuracy_facts, results
from markdown_parts import markdown_table
from page_blocks import refresh_blocks

from shapewright.config import list_presets
from shapewright.hardware import list_devices, load_device
from shapewright.report.devices import calibration_words

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
START = ROOT / "docs" / "index.md"
GUIDES = ROOT / "docs" / "guides"

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
    "attention, prefill": ("attention", ("prefill",)),
    "attention, decode": ("attention", ("decode",)),
    "collectives": ("collectives", ("inside a node",)),
}


def main() -> int:
    """Write the results of the pages, or compare them with what would be written."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    parser.add_argument(
        "pages", nargs="*", type=Path, help="the files to work on; by default README, start page and guides"
    )
    arguments = parser.parse_args()
    stale = 0
    for page in arguments.pages or (README, START, *sorted(GUIDES.glob("*.md"))):
        text = page.read_text(encoding="utf-8")
        fresh = refresh(text)
        if not arguments.check:
            page.write_text(fresh, encoding="utf-8")
        elif fresh != text:
            print(f"{page} is stale; run make docs", file=sys.stderr)
            stale = 1
    return stale


def refresh(text: str) -> str:
    """A page with every result made anew."""
    names = "|".join(map(re.escape, BLOCKS))
    blocks = re.compile(rf"(<!-- begin ({names}) -->\n).*?(<!-- end \2 -->)", re.DOTALL)
    return refresh_blocks(blocks.sub(lambda block: f"{block[1]}\n{BLOCKS[block[2]]()}\n\n{block[3]}", text))


def accuracy_table() -> str:
    """Mean and median error per device and operation, on rows that no fit saw."""
    facts = accuracy_facts()
    devices = list(dict.fromkeys(fact["device"] for fact in facts if fact["operation"] == "gemm"))
    rows = [[device, *(cell(facts, device, *column) for column in ACCURACY_COLUMNS.values())] for device in devices]
    pointwise = [fact for fact in facts if fact["operation"] == "pointwise" and fact["section"].startswith("without ")]
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
    if operation == "attention":
        facts = [{**fact, "operation": operation, "section": fact["phase"]} for fact in results()["attention"]]
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


BLOCKS = {
    "accuracy": accuracy_table,
    "devices": devices_table,
    "odd-width": readme_claims.odd_width,
    "paper": readme_claims.paper,
    "summary": readme_claims.summary,
    "beyond": readme_claims.beyond,
    "software": readme_claims.software,
}
"""What stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``."""


if __name__ == "__main__":
    sys.exit(main())
