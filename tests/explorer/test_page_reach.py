"""Accessibility of the page: on a phone, by keyboard alone, with a screen reader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from page_tools import LAPTOP, NARROW, ONCE_MORE, SEARCH_MS, WIDE, expect, focused, see, settle, turn_to, words_of

pytestmark = ONCE_MORE


def test_a_phone_shows_everything(open_page: Callable[..., Any]) -> None:
    """At 390 pixels nothing is wider than the screen but what scrolls by itself, and the question opens."""
    page = open_page(viewport=NARROW, has_touch=True, device_scale_factor=2)
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb"))
    for card in ("findings", "sweep", "tiles", "operations", "waterfall", "memory", "devices", "heat"):
        see(page, card)
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    page.evaluate("scrollTo(0, 0)")
    page.tap("#question summary")
    page.select_option("#preset", "gpt2")
    settle(page, words_of("gpt2", device="a100-sxm-80gb"))


def test_a_phone_says_what_a_tapped_field_means(open_page: Callable[..., Any]) -> None:
    """The help that a pointer sees as a tooltip stands below the field tapped last, within the screen, and moves on."""
    page = open_page("preset=llama-3-8b&device=h100-sxm-80gb", viewport=NARROW, has_touch=True, is_mobile=True)
    shown = "one => getComputedStyle(one, '::after').content"
    page.tap("#question summary")
    batch, network = page.locator("[data-field=micro_batch_size]"), page.locator("label:has(#network_gbit_per_s)")
    before = batch.bounding_box()["height"]
    batch.locator("input[type=number]").tap()

    assert batch.get_attribute("title") in batch.evaluate(shown)
    assert batch.bounding_box()["height"] >= before + 12
    network.tap()
    assert network.evaluate(shown) == '"Bandwidth between nodes, per device and direction"'
    assert batch.evaluate(shown) == "none"
    page.locator("[data-field=sequence_parallel] label").tap()
    assert page.locator("[data-field=sequence_parallel]").evaluate(shown) != "none"
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


def test_a_laptop_shows_model_and_device_first(open_page: Callable[..., Any]) -> None:
    """Both lists are in sight before anything is scrolled; on a phone a mark says that the question opens."""
    page = open_page(viewport=LAPTOP)
    for name in ("preset", "device"):
        box = page.locator(f"#{name}").bounding_box()
        assert box["y"] + box["height"] < LAPTOP["height"]
    page.set_viewport_size(NARROW)
    marker = page.locator("#question > summary").evaluate("one => getComputedStyle(one).display")
    assert marker == "list-item"


def test_a_phone_shows_what_a_search_found(open_page: Callable[..., Any]) -> None:
    """The verdict has the whole width, and the gain of each shape is in sight beside its changes."""
    page = open_page("page=design&preset=gpt2&device=a100-sxm-80gb&m.hidden_size=769", viewport=NARROW)
    page.locator("#search button", has_text="Search").click()
    net = page.locator("#search table").first.locator("tbody tr").first.locator("td").nth(2)
    expect(net).to_contain_text("x", timeout=SEARCH_MS)
    place = net.bounding_box()
    assert place["x"] + place["width"] <= NARROW["width"]
    words = page.locator("#search p", has_text="Verdict:")
    assert words.evaluate("one => getComputedStyle(one).display") == "block"
    assert words.locator(".unbroken").count() > 0
    expect(page.locator("#search .hint", has_text="letters: ")).to_contain_text("net: speed-up to the same loss")


# Choices whose text is wider than the room that their list leaves for it, beside an arrow of at least 16 pixels.
_CHOICES_CUT_OFF = """() => [...document.querySelectorAll(".control select")].flatMap((list) => {
  const style = getComputedStyle(list);
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = `${style.fontSize} ${style.fontFamily}`;
  const room = list.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) - 16;
  return [...list.options].map((one) => one.text).filter((text) => pen.measureText(text).width > room);
})"""


@pytest.mark.parametrize("viewport", [WIDE, NARROW], ids=["wide", "phone"])
def test_choices_are_shown_in_full(viewport: dict[str, int], open_page: Callable[..., Any]) -> None:
    """Each choice of a question fits its list, such as the optimizers and 'default'."""
    page = open_page(viewport=viewport)
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb"))
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")

    assert page.get_by_role("option", name="default", exact=True).count() == 3
    assert page.evaluate(_CHOICES_CUT_OFF) == []


# Arrows of a table that are wider than their room, which leaves "32 ->20".
_ARROWS_CUT_OFF = """() => [...document.querySelectorAll("#findings td .unbroken")].filter((one) => {
  const range = document.createRange();
  range.selectNodeContents(one);
  return range.getBoundingClientRect().width > one.getBoundingClientRect().width + 1;
}).length"""


@pytest.mark.parametrize("width", [1280, NARROW["width"]])
def test_buttons_of_rows_are_in_sight(width: int, open_page: Callable[..., Any]) -> None:
    """A better shape and a plan are applied without scrolling a table sideways, and its arrows keep their spaces."""
    page = open_page(viewport={"width": width, "height": 844})
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb"))
    for card in ("findings", "plan"):
        button = see(page, card).locator("td button", has_text="Apply").first
        box, region = button.bounding_box(), page.locator(f"#{card} .scroll").first.bounding_box()
        assert box["x"] + box["width"] <= region["x"] + region["width"] + 1
    turn_to(page, "findings")
    assert page.locator("#findings td .unbroken").count() > 0
    assert page.evaluate(_ARROWS_CUT_OFF) == 0


def test_the_keyboard_alone_is_enough(open_page: Callable[..., Any]) -> None:
    """Skip link, presets by /, a field, undo by Ctrl+Z, pin by P, the export menu and back with Escape."""
    page = open_page()
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb"))
    page.keyboard.press("Tab")
    focused(page, "className === 'skip'")
    page.keyboard.press("Enter")
    focused(page, "id === 'main'")
    page.keyboard.press("/")
    focused(page, "id === 'preset'")
    for _ in range(5):
        page.keyboard.type("gpt2-xl")
        if page.input_value("#preset") == "gpt2-xl":
            break
        page.wait_for_timeout(1500)  # a busy browser takes slow letters for a new word; let it forget the last one
    settle(page, words_of("gpt2-xl", device="a100-sxm-80gb"))
    page.keyboard.press("Control+z")
    page.wait_for_function("() => document.getElementById('preset').value !== 'gpt2-xl'")
    page.locator("main").focus()
    page.keyboard.press("p")
    expect(page.locator("#pin")).to_have_attribute("aria-pressed", "true")
    page.locator("#export summary").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#export")).to_have_attribute("open", "")
    page.keyboard.press("Tab")
    focused(page, "dataset.export === 'config'")
    page.keyboard.press("Escape")
    focused(page, "tagName === 'SUMMARY'")


@pytest.mark.parametrize(
    "options",
    [{"color_scheme": "light"}, {"color_scheme": "dark"}, {"viewport": NARROW}],
    ids=["light", "dark", "phone"],
)
def test_page_has_no_accessibility_violation(open_page: Callable[..., Any], options: dict[str, Any]) -> None:
    """The rules of WCAG 2 that a program can check: no serious violation, in either light and on a phone."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    page = open_page(**options)
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb"))
    serious = {}
    for card in ("findings", "tiles", "operations", "memory", "plan", "serving", "design", "devices"):
        turn_to(page, card)
        page.evaluate("document.querySelectorAll('.card').forEach((one) => one.scrollIntoView())")
        page.wait_for_timeout(150)
        page.wait_for_function("() => !document.querySelector('[aria-busy]')")
        for one in axe.Axe().run(page).response["violations"]:
            if one["impact"] in ("serious", "critical"):
                serious[f"{card}: {one['id']}"] = [node["html"][:120] for node in one["nodes"][:3]]

    assert serious == {}
