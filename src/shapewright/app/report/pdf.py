"""Conversion of an HTML page to PDF with an installed browser."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from shapewright.core.errors import MissingExtraError, ShapewrightError

# Executables of browsers that accept Chromium's arguments.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge")
_PRINT_TIMEOUT_S = 120.0
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
"""Arguments that render one local page without network access, GPU or user profile."""


def find_browser() -> str | None:
    """Path of an installed browser, or None."""
    return next((path for path in map(shutil.which, BROWSERS) if path), None)


def print_to_pdf(page: Path, target: Path) -> None:
    """Convert an HTML file to PDF.

    Args:
        page: A self-contained page.
        target: The PDF to write.

    Raises:
        MissingExtraError: no browser is installed.
        ShapewrightError: the browser failed.
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
                timeout=_PRINT_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise ShapewrightError(
                f"{browser} did not print {page} within {_PRINT_TIMEOUT_S:.0f} s; print the page from your own browser"
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
            raise ShapewrightError(f"cannot write {target}: {error.strerror}; choose a writable folder") from error
