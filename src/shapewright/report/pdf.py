"""A page as a PDF, printed by the browser that is there."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from shapewright.errors import MissingExtraError, ShapewrightError

# Programs that take Chromium's arguments, by the names they are installed under.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
PRINTING_TAKES_AT_MOST_S = 120.0
QUIET_BROWSER = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
"""Arguments of a browser that shows one local page: no network of its own, no GPU, nothing of its user."""


def find_browser() -> str | None:
    """Path of a browser that can print, or None."""
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


def print_to_pdf(page: Path, target: Path) -> None:
    """Print an HTML file.

    Args:
        page: A page that needs nothing from elsewhere.
        target: The PDF to write.

    Raises:
        MissingExtraError: no browser is there.
        ShapewrightError: the browser did not print.
    """
    browser = find_browser()
    if browser is None:
        raise MissingExtraError(
            f"no browser to print a PDF with: none of {', '.join(BROWSERS)} is on the PATH; install one, or print the "
            "page from your own browser"
        )
    with tempfile.TemporaryDirectory() as profile:
        draft = Path(profile) / "page.pdf"
        try:
            outcome = subprocess.run(
                [
                    browser,
                    *QUIET_BROWSER,
                    "--no-pdf-header-footer",
                    f"--user-data-dir={profile}/user",
                    f"--print-to-pdf={draft}",
                    page.resolve().as_uri(),
                ],
                capture_output=True,
                timeout=PRINTING_TAKES_AT_MOST_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ShapewrightError(
                f"{browser} did not print {page} within {PRINTING_TAKES_AT_MOST_S:.0f} s; print the page from your own "
                "browser"
            ) from None
        if not draft.is_file():
            words = outcome.stderr.decode(errors="replace").strip().splitlines()
            raise ShapewrightError(
                f"{browser} printed nothing (exit code {outcome.returncode}: {words[-1] if words else 'no message'}); "
                "print the page from your own browser"
            )
        try:
            shutil.copyfile(draft, target)
        except OSError as error:
            raise ShapewrightError(
                f"cannot write {target}: {error.strerror}; give the path of a file in a folder that you can write to"
            ) from error
