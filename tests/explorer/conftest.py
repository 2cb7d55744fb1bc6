"""A client of the application, and for the browser a server that runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The helper modules beside these tests (pytest's importlib mode leaves sys.path alone).
sys.path.insert(0, str(Path(__file__).parent))

pytest.importorskip("fastapi", reason="the explorer needs the serve extra")
pytest.importorskip("httpx", reason="the explorer's tests need httpx")

from explorer_jobs import ADDRESS, serving
from fastapi.testclient import TestClient

from shapewright.app.explorer.app import create_app


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """The application without a network."""
    with TestClient(create_app(), base_url=ADDRESS, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Address of a server on a free port of this machine."""
    with serving(create_app()) as address:
        yield address


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One Chromium for all tests."""
    from page_tools import BROWSER, WAIT_MS, playwright

    from shapewright.app.report.page import QUIET_BROWSER

    playwright.expect.set_options(timeout=WAIT_MS)
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=BROWSER, args=list(QUIET_BROWSER))
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any, server: str) -> Iterator[Callable[..., Any]]:
    """Open the page at a state; afterwards nothing may be on the console, and no request may have left."""
    from page_tools import WAIT_MS, WIDE

    contexts, troubles = [], []
    allowed_errors: list[str] = []

    def start(state: str = "", **options: Any) -> Any:
        allowed_errors.extend(options.pop("errors", ()))
        context = browser.new_context(**{"viewport": WIDE, "accept_downloads": True, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on(
            "request", lambda one: None if one.url.startswith((server, "blob:", "data:")) else troubles.append(one.url)
        )
        page.goto(f"{server}#{state}" if state else server)
        page.wait_for_selector("#version:not(:empty)")
        return page

    yield start
    for context in contexts:
        context.close()
    assert [text for text in troubles if not any(part in text for part in allowed_errors)] == []
