"""The page in a real browser: how tests open it, and read what it shows."""

from __future__ import annotations

from typing import Any

import pytest

import shapewright
from shapewright.app.report.outputs.predict import prediction_output
from shapewright.app.report.page import find_browser
from shapewright.app.report.predict import verdict

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
pytest.importorskip("pytest_rerunfailures", reason="the browser tests need pytest-rerunfailures")
BROWSER = find_browser()
if BROWSER is None:
    pytest.skip("no Chromium, Chrome or Edge is on the PATH", allow_module_level=True)

# A browser on a busy machine misses a moment now and then: once more, and said in the report; twice is a failure.
ONCE_MORE = pytest.mark.flaky(reruns=1)
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
LAPTOP = {"width": 1366, "height": 768}
WAIT_MS = 20_000
# A search starts a process of low priority, which a busy machine keeps waiting.
SEARCH_MS = 240_000

expect = playwright.expect


def words_of(*arguments: Any, **keywords: Any) -> dict[str, str]:
    """The verdict in the library's words."""
    return verdict(prediction_output(shapewright.predict(*arguments, **keywords)))


def shown(page: Any) -> dict[str, str]:
    """The verdict as the page shows it."""
    facts: dict[str, str] = page.evaluate(
        """() => Object.fromEntries([...document.querySelectorAll("[data-fact]")].map((one) =>
          one.dataset.fact === "step"
            ? [one.previousElementSibling.textContent, `${one.textContent} (${one.nextElementSibling.textContent})`]
            : [one.dataset.fact, one.textContent]))"""
    )
    return facts


def reload(page: Any) -> None:
    """Reload once the address has followed the last change, which it does within a quarter of a second."""
    page.wait_for_timeout(300)
    page.reload()


def focused(page: Any, words: str) -> None:
    """Wait until the element with the focus is the one described."""
    page.wait_for_function(f"() => document.activeElement.{words}")


def settle(page: Any, expected: dict[str, str]) -> None:
    """Wait for a verdict, and compare all of it."""
    step = next(iter(expected.values())).partition(" (")[0]
    expect(page.locator("[data-fact=step]")).to_have_text(step)
    page.wait_for_function("() => !document.querySelector('[aria-busy]')")
    assert shown(page) == expected


IS_ANSWERED = """(id) => {
  const card = document.getElementById(id);
  return !card.hasAttribute("aria-busy") &&
    card.querySelector("canvas, table, .finding-list, .fine, .empty:not([hidden])");
}"""


def turn_to(page: Any, card: str) -> None:
    """Open the page that a card is on."""
    name = page.get_attribute(f"#{card}", "data-page")
    page.click(f"#pages [data-page={name}]")


def see(page: Any, card: str) -> Any:
    """Open the page of a card, scroll to it and wait until it has its answer."""
    turn_to(page, card)
    page.evaluate(f"document.getElementById('{card}').scrollIntoView()")
    page.wait_for_function(IS_ANSWERED, arg=card)
    return page.locator(f"#{card}")
