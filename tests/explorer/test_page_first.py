"""The first screen and the pages: what a new visitor sees, and where each page and each piece of advice leads."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations
from math import dist
from typing import Any

import pytest
from page_tools import NARROW, ONCE_MORE, WIDE, expect, reload, see, settle, words_of

pytestmark = ONCE_MORE
NOT_FITTING = "preset=gpt3-2.7b&device=a100-sxm-40gb"


def test_it_opens_on_the_cliff(open_page: Callable[..., Any]) -> None:
    """The verdict in words, and below it the whole chart with tiles beside it, on one screen and without a problem."""
    page = open_page()
    see(page, "sweep")
    expect(page.locator("#headline")).to_contain_text("Hidden size 2,560 is at the edge of a cliff", ignore_case=True)
    chart, tiles = page.locator("#sweep .plot").bounding_box(), page.locator("#tiles").bounding_box()
    assert page.locator("#headline").bounding_box()["y"] < chart["y"]
    assert chart["y"] + chart["height"] <= WIDE["height"]
    assert chart["width"] > 0.4 * WIDE["width"]
    assert tiles["x"] > chart["x"] + chart["width"]
    expect(page.locator(".bad, .finding.error")).to_have_count(0)


def test_pages_have_addresses(open_page: Callable[..., Any]) -> None:
    """A page is reached by its link, its key and its address; back returns to the page before, with the same job."""
    page = open_page()
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb"))
    page.click("#pages [data-page=memory]")
    expect(page.locator("#memory")).to_be_visible()
    expect(page.locator("#sweep")).to_be_hidden()
    assert "page=memory" in page.url
    page.select_option("#preset", "gpt2")
    settle(page, words_of("gpt2", device="a100-sxm-80gb"))
    reload(page)
    expect(page.locator("#memory")).to_be_visible()
    page.locator("main").focus()
    page.keyboard.press("4")
    expect(page.locator("#plan")).to_be_visible()
    expect(page).to_have_title(re.compile("Plan"))
    page.go_back()
    expect(page.locator("#memory")).to_be_visible()
    page.go_back()
    expect(page.locator("#sweep")).to_be_visible()
    settle(page, words_of("gpt2", device="a100-sxm-80gb"))


def test_heads_keep_their_width(open_page: Callable[..., Any]) -> None:
    """The slider of the hidden size keeps the heads, shows the fields that follow, and sets the chart's dimension."""
    page = open_page("preset=gpt3-2.7b&device=a100-sxm-80gb&v.dim=%22vocab_size%22")
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb"))
    page.locator("[data-field=hidden_size] input[type=range]").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#model-hidden_size")).not_to_have_value("2560")
    width = int(page.input_value("#model-hidden_size"))
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb", overrides={"hidden_size": width, "head_dim": 80}))
    assert page.input_value("#model-head_dim") == "80"
    assert page.input_value("#model-num_heads") == "32"
    expect(page.locator("[data-field=intermediate_size] .follows")).to_contain_text(f"10,240 → {4 * width:,}")
    expect(page.locator("#sweep-field")).to_have_value("hidden_size")
    expect(page.locator("#sweep .hint")).to_contain_text(f"hidden_size={width:,}")


def test_a_bad_size_is_priced_and_its_fix_is_a_button(open_page: Callable[..., Any]) -> None:
    """4097 typed for Llama has a step, and the headline's advice leads back to 4096."""
    page = open_page("preset=llama-3-8b&device=h100-sxm-80gb")
    page.fill("#model-hidden_size", "4097")
    page.press("#model-hidden_size", "Enter")
    settle(page, words_of("llama-3-8b", device="h100-sxm-80gb", overrides={"hidden_size": 4097}))
    expect(page.locator("#headline")).to_contain_text("wastes time")
    page.locator("#advice .apply", has_text="hidden size 4096").click()
    expect(page.locator("#model-hidden_size")).to_have_value("4096")
    expect(page.locator("#headline")).to_contain_text("edge of a cliff")


def test_a_shape_that_cannot_run_has_no_numbers(open_page: Callable[..., Any]) -> None:
    """The numbers of the last shape go; the value that the reason proposes is a button, and so is the way back."""
    page = open_page(errors=["422"])
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb"))
    page.fill("#model-num_heads", "31")
    page.press("#model-num_heads", "Enter")
    expect(page.locator("#problem")).to_contain_text("try num_heads=32")
    expect(page.locator("[data-fact=step]")).to_have_count(0)
    expect(page.locator("#sweep")).to_be_hidden()
    expect(page.locator("#advice .apply", has_text="Undo")).to_be_visible()
    page.locator("#advice .apply", has_text="num heads 32").click()
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb"))


def test_a_link_to_a_shape_that_cannot_run_fills_the_form(open_page: Callable[..., Any]) -> None:
    """The form shows the requested values, and for the others those of the preset, so that one can be mended."""
    page = open_page("preset=gpt3-2.7b&device=h100-sxm-80gb&m.num_heads=31&w.dtype=%22fp16%22", errors=["422"])
    expect(page.locator("#problem")).to_contain_text("try num_heads=32")
    expect(page.locator("#model-num_heads")).to_have_value("31")
    expect(page.locator("#model-hidden_size")).to_have_value("2560")
    expect(page.locator("#model-vocab_size")).to_have_value("50257")
    expect(page.locator("#workload-dtype")).to_have_value("fp16")
    expect(page.locator("#preset")).to_have_value("gpt3-2.7b")
    expect(page.locator("#device")).to_have_value("h100-sxm-80gb")
    page.locator("#advice .apply", has_text="num heads 32").click()
    settle(page, words_of("gpt3-2.7b", device="h100-sxm-80gb", workload={"dtype": "fp16"}))


def test_remedies_are_buttons(open_page: Callable[..., Any]) -> None:
    """Changes that make a job fit are buttons in terms of the page's fields, the shortest time first."""
    page = open_page(NOT_FITTING)
    card = see(page, "memory")
    assert "--" not in card.inner_text()
    for table in card.locator("table").all():
        times = [int(text.split()[0]) for text in table.locator("tbody td:nth-last-child(2)").all_inner_texts() if text]
        assert times == sorted(times)
    card.locator(".apply").first.click()
    expect(card.locator(".fine")).to_be_visible()


def test_a_plan_is_applied(open_page: Callable[..., Any]) -> None:
    """The first plan for eight devices becomes the layout of the job."""
    page = open_page("page=plan&preset=gpt3-2.7b&device=a100-sxm-80gb")
    card = see(page, "plan")
    expect(card.locator("tbody tr").first).to_contain_text("dp 8", ignore_case=True)
    assert card.locator("canvas").count() == 2
    card.locator(".apply").first.click()
    expect(page.locator("#layout-data_parallel")).to_have_value("8")
    expect(page.locator("#title")).to_contain_text("dp 8", ignore_case=True)


@pytest.mark.parametrize("card", ["sweep", "layer", "memory"])
def test_legends_are_whole_and_colours_differ(card: str, open_page: Callable[..., Any]) -> None:
    """Every series of a chart is in its legend, in a colour of its own where colours tell parts apart."""
    page = open_page(
        "preset=deepseek-v3&device=h200-sxm-141gb&l.expert_parallel=64&l.data_parallel=64", viewport=NARROW
    )
    see(page, card)
    names, colors = page.evaluate(
        """(id) => {
          const items = [...document.querySelectorAll(`#${id} .legend li`)];
          return [items.map((one) => one.textContent), items.map((one) => one.style.getPropertyValue("--swatch"))];
        }""",
        card,
    )
    assert len(names) > 3
    if card != "sweep":
        assert len(set(colors)) == len(colors)


def test_names_of_bars_are_whole_and_dark_colours_differ(open_page: Callable[..., Any]) -> None:
    """Names of bars have the room that they need, and no two parts have nearly the same colour in the dark."""
    page = open_page(
        "preset=deepseek-v3&device=h200-sxm-141gb&l.expert_parallel=64&l.data_parallel=64", color_scheme="dark"
    )
    see(page, "layer")
    swatches = page.locator("#layer .legend li").evaluate_all(
        "(items) => items.map((one) => one.style.getPropertyValue('--swatch'))"
    )
    colors = [[int(one[at : at + 2], 16) for at in (1, 3, 5)] for one in swatches]
    assert len(colors) > 4
    assert min(dist(*pair) for pair in combinations(colors, 2)) > 45.0
    for card in ("devices", "waterfall"):
        see(page, card)
        left, needed = page.evaluate(
            """(id) => {
              const figures = [...document.querySelectorAll(`#${id} [role=img]`)];
              const { yAxis: [axis], grid: [grid] } = echarts.getInstanceByDom(figures[0]).getOption();
              const pen = document.createElement("canvas").getContext("2d");
              pen.font = "12px system-ui, sans-serif";
              return [grid.left, Math.max(...axis.data.map((name) => pen.measureText(name).width))];
            }""",
            card,
        )
        assert left - 12 >= needed > 0


def test_a_wide_table_announces_hidden_columns(open_page: Callable[..., Any]) -> None:
    """On a phone time and share come first; a line announces hidden columns until the table is scrolled to its end."""
    page = open_page(viewport=NARROW)
    card = see(page, "operations")
    assert [name.strip() for name in card.locator("thead th").all_inner_texts()[:3]] == ["operation", "time", "share"]
    assert card.locator("tbody tr").first.locator("td").first.inner_text().endswith("ms")
    expect(card.locator(".more-columns")).to_be_visible()
    card.locator(".scroll").evaluate("(one) => one.scrollTo(one.scrollWidth, 0)")
    expect(card.locator(".more-columns")).to_be_hidden()
