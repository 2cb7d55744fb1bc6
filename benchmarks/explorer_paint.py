"""Measure the explorer in a browser: time to first paint, and from a slider move to the frame with its result.

    python benchmarks/explorer_paint.py --json explorer_paint.json

Needs playwright and Chromium on the PATH. Starts a server; the page measures itself (User Timing), which excludes the
overhead of the driver.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from explorer_server import running_explorer
from playwright.sync_api import sync_playwright
from record import write_record

from shapewright.app.report.page import QUIET_BROWSER, find_browser

FIELDS = ("intermediate_size", "hidden_size", "vocab_size", "num_layers")
NUM_MOVES = 50
_BETWEEN_MOVES_MS = 200.0


def main() -> int:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the record to this file")
    arguments = parser.parse_args()
    with running_explorer() as (address, _):
        facts = measure(address)
    print(json.dumps(facts, indent=2))
    write_record(arguments.json, **facts)
    return 0


def measure(address: str) -> dict[str, Any]:
    """Load the page a few times, then move sliders one step at a time."""
    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=find_browser(), args=list(QUIET_BROWSER))
        paints, moves, wire_bytes = [], [], 0.0
        for _ in range(5):
            page = browser.new_context(viewport={"width": 1440, "height": 900}).new_page()
            page.goto(address)
            page.wait_for_selector("[data-fact=step]")
            page.wait_for_timeout(1500)
            paints.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
            wire_bytes = page.evaluate(
                "performance.getEntries().reduce((sum, one) => sum + (one.transferSize || 0), 0)"
            )
        for field in FIELDS:
            page.evaluate("document.getElementById('sweep').scrollIntoView()")
            page.evaluate("performance.clearMeasures()")
            slider = page.locator(f"[data-field={field}] input[type=range]")
            slider.focus()
            for _ in range(NUM_MOVES):
                page.keyboard.press("ArrowRight")
                page.wait_for_timeout(_BETWEEN_MOVES_MS)
            found = page.evaluate(
                "performance.getEntriesByName('shapewright:slide-to-paint').map((one) => one.duration)"
            )
            moves.append((field, found))
        version = browser.version
        browser.close()
    every = sorted(time_ms for _, found in moves for time_ms in found)
    return {
        "chromium": version,
        "first_paint_ms": sorted(paints),
        "wire_bytes_of_first_load": wire_bytes,
        "slide_to_paint": {
            "num_moves": len(every),
            "p50_ms": every[len(every) // 2],
            "p95_ms": every[int(0.95 * len(every))],
            "max_ms": every[-1],
        },
        "by_field": {field: sorted(found)[len(found) // 2] for field, found in moves if found},
    }


if __name__ == "__main__":
    sys.exit(main())
