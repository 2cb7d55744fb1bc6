"""Take the picture of the explorer that docs/explorer.md shows. Needs the serve extra, playwright and a Chromium."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

from shapewright.app.report.page import QUIET_BROWSER, find_browser

TARGET = Path(__file__).parent.parent / "docs" / "figures" / "explorer.png"
# The paper's case with the vocabulary padded, compared with the published shape.
STATE = (
    "preset=gpt3-2.7b&device=a100-sxm-80gb&m.vocab_size=50304&w.attention=%22unfused%22&w.dtype=%22fp16%22"
    "&v.dim=%22num_heads%22"
)


def main() -> int:
    """Start a server, open the page, write the picture."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    server = subprocess.Popen(
        [sys.executable, "-m", "shapewright", "serve", "--port", "0", "--no-browser"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split()[-1]
        with sync_playwright() as running:
            browser = running.chromium.launch(executable_path=find_browser(), args=list(QUIET_BROWSER))
            page = browser.new_page(viewport={"width": 1440, "height": 900})
            page.goto(f"{address}#{STATE}")
            page.wait_for_selector("[data-fact=step]")
            page.click("#pin")
            page.fill("#model-num_heads", "20")
            page.press("#model-num_heads", "Enter")
            page.wait_for_timeout(2500.0)
            page.wait_for_function("() => !document.querySelector('[aria-busy]')")
            page.screenshot(path=str(TARGET))
            browser.close()
    finally:
        server.terminate()
        server.wait(timeout=20)
    print(f"wrote {TARGET}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
