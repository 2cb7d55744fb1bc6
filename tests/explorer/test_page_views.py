"""The views of the page: what is clicked there becomes the question, and what is drawn is what is predicted."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from page_tools import ONCE_MORE, SEARCH_MS, expect, see, settle, turn_to, words_of

import shapewright
from shapewright.app.report.outputs.predict import prediction_output
from shapewright.app.report.predict import verdict

pytestmark = ONCE_MORE
CHART_MOVES_MS = 1_200  # a figure slides its points into place for a second


def test_local_maxima_can_be_applied(open_page: Callable[..., Any]) -> None:
    """A crest's button and a click into the chart change the field, and what is adopted is what was shown."""
    page = open_page("preset=gpt3-2.7b&device=a100-sxm-80gb&v.dim=%22intermediate_size%22")
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb"))
    card = see(page, "sweep")
    crest = card.locator(".chip-button:not([disabled])").last
    value = int(crest.get_attribute("data-value"))
    text = crest.get_attribute("title")
    crest.click()
    expected = words_of("gpt3-2.7b", device="a100-sxm-80gb", overrides={"intermediate_size": value})
    settle(page, expected)
    assert expected["model rate"] in text
    box = card.locator(".plot").bounding_box()
    page.mouse.click(box["x"] + 0.3 * box["width"], box["y"] + 0.5 * box["height"])
    page.wait_for_function(f"() => document.getElementById('model-intermediate_size').value !== '{value}'")


def test_a_fix_is_applied(open_page: Callable[..., Any]) -> None:
    """The button of a finding changes the model, removes the finding, and shortens the step relative to A."""
    page = open_page()
    page.click("#pin")
    card = see(page, "findings")
    card.locator("[data-code=TC101] .apply").first.click()
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb", overrides={"vocab_size": 50304}))
    expect(card.locator("[data-code=TC101]")).to_have_count(0)
    expect(page.locator("#moved")).to_contain_text("(better)")
    page.click("#swap")
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb"))
    expect(page.locator("#moved")).to_contain_text("(worse)")


def test_arrows_of_changes_have_their_room(open_page: Callable[..., Any]) -> None:
    """No arrow of a change runs into the new value behind it, and a fix names only what it changes."""
    page = open_page("preset=llama-3-8b&device=h100-sxm-80gb&m.hidden_size=4097")
    see(page, "findings")
    overlaps = page.evaluate(
        """() => [...document.querySelectorAll("#findings td .unbroken")].map((arrow) => {
          const text = document.createRange();
          text.selectNodeContents(arrow);
          return text.getBoundingClientRect().width - arrow.getBoundingClientRect().width;
        })"""
    )
    assert overlaps
    assert max(overlaps) < 0.5
    expect(page.locator("#advice .apply", has_text="hidden size 4096")).not_to_contain_text("intermediate size")


def test_tiles_follow(open_page: Callable[..., Any]) -> None:
    """An operation chosen in the table has its tiles drawn, with the numbers of the prediction."""
    page = open_page()
    see(page, "operations")
    page.click("[data-operation='logits:forward'] button")
    card = see(page, "tiles")
    expect(card.locator("h3").last).to_contain_text("logits (forward)")
    logits = next(
        one
        for one in shapewright.predict("gpt3-2.7b", device="a100-sxm-80gb").operations
        if one.operation.name == "logits"
    )
    facts = card.locator(".tile-numbers").inner_text()
    assert f"{int(logits.price.num_tiles):,}" in facts
    assert f"{int(logits.price.num_waves)} on 108 SMs" in facts
    colors = page.evaluate(
        """() => {
          const canvas = document.querySelector(".tile-canvas");
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const pixels = new Uint32Array(data.buffer);
          return new Set(pixels).size;
        }"""
    )
    assert colors > 4


def test_operations_sort_and_explain(open_page: Callable[..., Any]) -> None:
    """By keyboard alone, a heading sorts its column and a row shows its explanation."""
    page = open_page()
    card = see(page, "operations")
    card.locator(".sort", has_text="runs").focus()
    page.keyboard.press("Enter")
    runs = [int(cell) for cell in card.locator("tbody tr td:nth-child(4)").all_inner_texts()]
    assert runs == sorted(runs, reverse=True)
    expect(card.locator("th[aria-sort=descending]")).to_contain_text("runs")
    card.locator("[data-operation='mlp.up:forward'] button").focus()
    expect(card.locator("#reason")).to_contain_text("2560 tiles in 24 waves on 108 SMs")


def test_a_search_runs_stops_and_is_adopted(open_page: Callable[..., Any]) -> None:
    """Stop keeps the best so far; a finished search's first shape becomes the question."""
    page = open_page(
        "preset=llama-3-70b&device=h200-sxm-141gb&l.tensor_parallel=4", viewport={"width": 1440, "height": 1800}
    )
    turn_to(page, "search")
    for name in ("head_dim", "micro_batch"):
        page.check(f"#search input[value={name}]")
    page.select_option("#search-guard", "free")
    page.select_option("#search-tolerance", "0.05")
    page.click("#start-search")
    page.wait_for_function("() => document.querySelector('#search progress').value > 0", timeout=SEARCH_MS)
    page.click("#stop-search")
    expect(page.locator("#search [role=status]")).to_contain_text("Stopped", timeout=SEARCH_MS)
    page.goto(re.sub("#.*", "#page=design&preset=gpt3-2.7b&device=a100-sxm-80gb", page.url))
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb"))
    for name in ("head_dim", "micro_batch", "ffn", "depth", "width", "kv_heads"):
        page.uncheck(f"#search input[value={name}]")
    page.select_option("#search-guard", "usual")
    page.click("#start-search")
    page.locator("#search .apply").first.click(timeout=SEARCH_MS)
    expect(page.locator("[data-fact=step]")).not_to_have_text(
        words_of("gpt3-2.7b", device="a100-sxm-80gb")["step"].partition(" (")[0]
    )
    assert int(page.input_value("#model-vocab_size")) % 64 == 0


def test_a_point_of_the_front_is_adopted(open_page: Callable[..., Any]) -> None:
    """A click on a point of a finished search's Pareto front makes that shape the question."""
    page = open_page(viewport={"width": 1440, "height": 1800})
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb"))
    turn_to(page, "search")
    for name in ("head_dim", "micro_batch", "ffn", "depth", "width", "kv_heads"):
        page.uncheck(f"#search input[value={name}]")
    page.click("#start-search")
    plot = page.locator("#search .plot")
    expect(plot).to_be_visible(timeout=SEARCH_MS)
    expect(page.locator("#start-search")).to_be_enabled()
    page.wait_for_timeout(CHART_MOVES_MS)
    x, y = page.evaluate(
        """() => {
          const chart = echarts.getInstanceByDom(document.querySelector("#search .plot"));
          const index = chart.getOption().series.findIndex((one) => one.name === "shape");
          const [point] = chart.getOption().series[index].data;
          return chart.convertToPixel({ seriesIndex: index }, point.value ?? point);
        }"""
    )
    plot.click(position={"x": x, "y": y})
    page.wait_for_function("() => location.hash.includes('m.vocab_size')")
    changed = dict(re.findall(r"m\.(\w+)=(\d+)", page.url))
    overrides = {name: int(value) for name, value in changed.items()}
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb", overrides=overrides))


def test_everything_is_exported(open_page: Callable[..., Any], tmp_path: Path) -> None:
    """config.json, JSON, CSV, report, PNG and SVG: each file holds what the page shows."""
    page = open_page("preset=llama-3-8b&device=h100-sxm-80gb&m.vocab_size=128300")
    expected = shapewright.predict("llama-3-8b", device="h100-sxm-80gb", overrides={"vocab_size": 128300})
    settle(page, verdict(prediction_output(expected)))

    def download(click: Callable[[], None]) -> Path:
        with page.expect_download() as waiting:
            click()
        path = tmp_path / str(waiting.value.suggested_filename)
        waiting.value.save_as(path)
        return path

    def choose(kind: str) -> Path:
        page.click("#export summary")
        return download(lambda: page.click(f"[data-export={kind}]"))

    config = choose("config")
    assert json.loads(config.read_text())["vocab_size"] == 128300
    again = shapewright.predict(str(config), device="h100-sxm-80gb")
    assert again.step_time_s == expected.step_time_s
    assert json.loads(choose("json").read_text())["step_time_s"] == expected.step_time_s
    with choose("csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(expected.operations)
    assert "H100" in choose("report").read_text()
    card = see(page, "sweep")
    assert download(lambda: card.get_by_label("Save sweep as PNG").click()).read_bytes().startswith(b"\x89PNG")
    assert "<svg" in download(lambda: card.get_by_label("Save sweep as SVG").click()).read_text()
    tiles = see(page, "tiles")
    assert "<rect" in download(lambda: tiles.get_by_label("Save tiles as SVG").click()).read_text()
