"""The page in a real browser: what a person does with it, by mouse, by keyboard and on a phone.

Numbers are compared with the library's own words, to the last digit shown. No test may leave an error on the console
or send a request to another machine.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import shapewright
from shapewright.report.pdf import find_browser
from shapewright.report.prediction_text import verdict

playwright = pytest.importorskip("playwright.sync_api", reason="the browser tests need playwright")
pytest.importorskip("pytest_rerunfailures", reason="the browser tests need pytest-rerunfailures")
# A browser on a busy machine misses a moment now and then: once more, and said in the report; twice is a failure.
pytestmark = pytest.mark.flaky(reruns=1)
BROWSER = find_browser()
if BROWSER is None:
    pytest.skip("no Chromium, Chrome or Edge is on the PATH", allow_module_level=True)

ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
WIDE, NARROW = {"width": 1440, "height": 900}, {"width": 390, "height": 844}
PLANTED = '<img src=x onerror="window.planted=1"><script>window.planted=1</script>'
WAIT_MS = 20_000
CHART_MOVES_MS = 1_200  # a figure slides its points into place for a second


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One Chromium for all tests."""
    playwright.expect.set_options(timeout=WAIT_MS)
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=BROWSER, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def open_page(browser: Any, server: str) -> Iterator[Callable[..., Any]]:
    """Open the page at a state; afterwards nothing may be on the console, and no request may have left."""
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


def words_of(*arguments: Any, **keywords: Any) -> dict[str, str]:
    """The verdict in the library's words."""
    return verdict(shapewright.predict(*arguments, **keywords))


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
    playwright.expect(page.locator("[data-fact=step]")).to_have_text(step)
    page.wait_for_function("() => !document.querySelector('[aria-busy]')")
    assert shown(page) == expected


IS_ANSWERED = """(id) => {
  const card = document.getElementById(id);
  return !card.hasAttribute("aria-busy") &&
    card.querySelector("canvas, table, .finding-list, .fine, .empty:not([hidden])");
}"""


def see(page: Any, card: str) -> Any:
    """Scroll to a card and wait until it has its answer."""
    page.evaluate(f"document.getElementById('{card}').scrollIntoView()")
    page.wait_for_function(IS_ANSWERED, arg=card)
    return page.locator(f"#{card}")


def test_the_page_says_what_the_command_says(open_page: Callable[..., Any]) -> None:
    """Load, then another preset, device and format: every number of the verdict is the library's."""
    page = open_page()
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-40gb"))
    page.select_option("#preset", "llama-3-8b")
    settle(page, words_of("llama-3-8b", device="a100-sxm-40gb"))
    page.select_option("#device", "h100-sxm-80gb")
    page.select_option("#workload-dtype", "fp8")
    settle(page, words_of("llama-3-8b", device="h100-sxm-80gb", workload={"dtype": "fp8"}))
    page.select_option("#workload-phase", "decode")
    settle(page, words_of("llama-3-8b", device="h100-sxm-80gb", workload={"dtype": "fp8", "phase": "decode"}))


def test_sliding_shows_soon_and_can_be_undone(open_page: Callable[..., Any]) -> None:
    """A slider moves the verdict; its moves are one step to undo; the number field takes what the slider does not."""
    page = open_page()
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-40gb"))
    slider = page.locator("[data-field=intermediate_size] input[type=range]")
    slider.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    value = int(page.input_value("#model-intermediate_size"))
    assert value > 10240
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-40gb", overrides={"intermediate_size": value}))
    times = page.evaluate("performance.getEntriesByName('shapewright:slide-to-paint').map((one) => one.duration)")
    assert times
    page.fill("#model-vocab_size", "50258")
    page.press("#model-vocab_size", "Enter")
    both = {"intermediate_size": value, "vocab_size": 50258}
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-40gb", overrides=both))
    page.click("#undo")
    page.click("#undo")
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-40gb"))
    page.click("#redo")
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-40gb", overrides={"intermediate_size": value}))


def test_a_config_is_pasted_and_told_what_is_wrong(open_page: Callable[..., Any]) -> None:
    """Text that is no JSON, no object or no model is refused in words; a sound one becomes the question."""
    page = open_page(errors=["422"])
    page.click("text=Paste or drop a config.json")
    for text, words in (("{", "not valid JSON"), ("[1]", "no JSON object")):
        page.fill("#config", text)
        page.click("#use-config")
        playwright.expect(page.locator("#config-problem")).to_contain_text(words)
    page.fill("#config", json.dumps({"model_type": "gpt2", "n_embd": -4}))
    page.click("#use-config")
    playwright.expect(page.locator("#problem")).to_contain_text("in 'pasted config': ")
    config = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
              "num_key_value_heads": 8, "intermediate_size": 4097, "vocab_size": 32000}  # fmt: skip
    page.fill("#config", json.dumps(config))
    page.click("#use-config")
    model = {"hidden_size": 1024, "num_layers": 8, "num_heads": 16, "num_kv_heads": 8}
    playwright.expect(page.locator("#problem")).to_be_hidden()
    assert {name: int(page.input_value(f"#model-{name}")) for name in model} == model
    reload(page)
    playwright.expect(page.locator("#model-intermediate_size")).to_have_value("4097")
    page.evaluate(
        """(text) => {
          const carried = new DataTransfer();
          carried.items.add(new File([text], "config.json", { type: "application/json" }));
          const options = { dataTransfer: carried, bubbles: true, cancelable: true };
          document.body.dispatchEvent(new DragEvent("drop", options));
        }""",
        json.dumps({**config, "intermediate_size": 4224}),
    )
    playwright.expect(page.locator("#model-intermediate_size")).to_have_value("4224")


def test_crests_are_adopted(open_page: Callable[..., Any]) -> None:
    """A crest's button and a click into the chart change the field, and what is adopted is what was shown."""
    page = open_page()
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-40gb"))
    card = see(page, "crest")
    crest = card.locator(".chip-button:not([disabled])").last
    value = int(crest.get_attribute("data-value"))
    text = crest.get_attribute("title")
    crest.click()
    expected = words_of("gpt3-2.7b", device="a100-sxm-40gb", overrides={"intermediate_size": value})
    settle(page, expected)
    assert expected["model rate"] in text
    box = card.locator(".plot").bounding_box()
    page.mouse.click(box["x"] + 0.3 * box["width"], box["y"] + 0.5 * box["height"])
    page.wait_for_function(f"() => document.getElementById('model-intermediate_size').value !== '{value}'")


def test_a_fix_is_applied(open_page: Callable[..., Any]) -> None:
    """The button of a finding changes the model, the finding goes, and the step gets shorter against A."""
    page = open_page()
    page.click("#pin")
    card = see(page, "findings")
    card.locator("[data-code=TC101] .apply").first.click()
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-40gb", overrides={"vocab_size": 50304}))
    playwright.expect(card.locator("[data-code=TC101]")).to_have_count(0)
    playwright.expect(page.locator("#moved")).to_contain_text("(better)")
    page.click("#swap")
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-40gb"))
    playwright.expect(page.locator("#moved")).to_contain_text("(worse)")


def test_tiles_follow(open_page: Callable[..., Any]) -> None:
    """An operation chosen in the table has its tiles drawn, with the numbers of the prediction."""
    page = open_page()
    see(page, "operations")
    page.click("[data-operation='logits:forward'] button")
    card = see(page, "tiles")
    playwright.expect(card.locator("h3").last).to_contain_text("logits (forward)")
    logits = next(
        one
        for one in shapewright.predict("gpt3-2.7b", device="a100-sxm-40gb").operations
        if one.operation.name == "logits"
    )
    facts = card.locator(".tile-numbers").inner_text()
    assert f"{int(logits.price.num_tiles):,}" in facts  # type: ignore[attr-defined]
    assert f"{int(logits.price.num_waves)} on 108 SMs" in facts  # type: ignore[attr-defined]
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
    """By keyboard alone: a heading sorts its column, a row says why."""
    page = open_page()
    card = see(page, "operations")
    card.locator(".sort", has_text="runs").focus()
    page.keyboard.press("Enter")
    runs = [int(cell) for cell in card.locator("tbody tr td:nth-child(4)").all_inner_texts()]
    assert runs == sorted(runs, reverse=True)
    playwright.expect(card.locator("th[aria-sort=descending]")).to_contain_text("runs")
    card.locator("[data-operation='mlp.up:forward'] button").focus()
    playwright.expect(card.locator("#reason")).to_contain_text("2560 tiles in 24 waves on 108 SMs")


def test_a_search_runs_stops_and_is_adopted(open_page: Callable[..., Any]) -> None:
    """Stop keeps the best so far; a finished search's first shape becomes the question."""
    page = open_page(
        "preset=llama-3-70b&device=h200-sxm-141gb&l.tensor_parallel=4", viewport={"width": 1440, "height": 1800}
    )
    page.evaluate("document.getElementById('search').scrollIntoView()")
    for name in ("head_dim", "micro_batch"):
        page.check(f"#search input[value={name}]")
    page.select_option("#guard", "free")
    page.select_option("#tolerance", "0.05")
    page.click("#start-search")
    page.wait_for_function("() => document.querySelector('#search progress').value > 0")
    page.click("#stop-search")
    playwright.expect(page.locator("#search [role=status]")).to_contain_text("Stopped")
    page.goto(re.sub("#.*", "#preset=gpt3-2.7b&device=a100-sxm-40gb", page.url))
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-40gb"))
    for name in ("head_dim", "micro_batch", "ffn", "depth", "width", "kv_heads"):
        page.uncheck(f"#search input[value={name}]")
    page.select_option("#guard", "usual")
    page.click("#start-search")
    adopt = page.locator("#search .apply").first
    adopt.click()
    playwright.expect(page.locator("[data-fact=step]")).not_to_have_text(
        words_of("gpt3-2.7b", device="a100-sxm-40gb")["step"].partition(" (")[0]
    )
    assert int(page.input_value("#model-vocab_size")) % 64 == 0


def test_a_point_of_the_front_is_adopted(open_page: Callable[..., Any]) -> None:
    """A click on a point of a finished search's Pareto front makes that shape the question."""
    page = open_page(viewport={"width": 1440, "height": 1800})
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-40gb"))
    page.evaluate("document.getElementById('search').scrollIntoView()")
    for name in ("head_dim", "micro_batch", "ffn", "depth", "width", "kv_heads"):
        page.uncheck(f"#search input[value={name}]")
    page.click("#start-search")
    plot = page.locator("#search .plot")
    playwright.expect(plot).to_be_visible()
    playwright.expect(page.locator("#start-search")).to_be_enabled()
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
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-40gb", overrides=overrides))


def test_everything_is_exported(open_page: Callable[..., Any], tmp_path: Path) -> None:
    """config.json, JSON, CSV, report, PNG and SVG: each file holds what the page shows."""
    page = open_page("preset=llama-3-8b&device=h100-sxm-80gb&m.vocab_size=128300")
    expected = shapewright.predict("llama-3-8b", device="h100-sxm-80gb", overrides={"vocab_size": 128300})
    settle(page, verdict(expected))

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
    card = see(page, "crest")
    assert download(lambda: card.get_by_label("Save crests as PNG").click()).read_bytes().startswith(b"\x89PNG")
    assert "<svg" in download(lambda: card.get_by_label("Save crests as SVG").click()).read_text()
    tiles = see(page, "tiles")
    assert "<rect" in download(lambda: tiles.get_by_label("Save tiles as SVG").click()).read_text()


def test_the_address_holds_the_state(open_page: Callable[..., Any]) -> None:
    """A reload shows the same shape, the same product and the same dimension."""
    state = "preset=gpt2-xl&device=h200-sxm-141gb&m.num_heads=20&w.micro_batch_size=2"
    state += "&v.dim=%22vocab_size%22&v.op=%22logits:forward%22"
    page = open_page(state)
    expected = words_of(
        "gpt2-xl", device="h200-sxm-141gb", overrides={"num_heads": 20}, workload={"micro_batch_size": 2}
    )
    for _ in range(2):
        settle(page, expected)
        see(page, "tiles")
        assert page.input_value("#crest-field") == "vocab_size"
        assert page.input_value("#tile-operation") == "logits:forward"
        reload(page)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("preset=gpt3-2.7b&device=h1000", "unknown device 'h1000'"),
        ("preset=gpt3-2.7b&device=a100-sxm-40gb&m.num_heads=31", "hidden_size=2560 is not divisible by num_heads=31"),
        ("preset=..%2F..%2Fetc%2Fpasswd&device=h200-sxm-141gb", "no preset '../../etc/passwd'"),
        ("preset=gpt3-2.7b&device=a100-sxm-40gb&m.hidden_size=%22x%22", "job.overrides.hidden_size"),
    ],
)
def test_errors_are_told_in_the_commands_words(open_page: Callable[..., Any], state: str, words: str) -> None:
    """A state that makes no sense says so, and the page can be used again at once."""
    page = open_page(state, errors=["422"])
    playwright.expect(page.locator("#problem")).to_contain_text(words)
    playwright.expect(page.locator("#mini")).to_contain_text(words)
    page.click("#reset")
    page.select_option("#preset", "gpt2")
    page.select_option("#device", "l40s")
    settle(page, words_of("gpt2", device="l40s"))
    playwright.expect(page.locator("#problem")).to_be_hidden()


def test_what_cannot_run_has_its_remedy(open_page: Callable[..., Any]) -> None:
    """A layout that does not divide the model is refused, and the finding beside it can be applied."""
    page = open_page("preset=gpt3-2.7b&device=a100-sxm-80gb&l.tensor_parallel=7", errors=["422"])
    playwright.expect(page.locator("#problem")).to_contain_text("tensor_parallel=7 must divide num_heads=32")
    card = see(page, "findings")
    card.locator(".finding.error .apply").first.click()
    playwright.expect(page.locator("#problem")).to_be_hidden()
    playwright.expect(page.locator("[data-fact=step]")).to_be_visible()


def test_planted_markup_stays_text(open_page: Callable[..., Any]) -> None:
    """Script tags in every text that a config, a state or an answer can carry are shown and never run."""
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
              "name": PLANTED, "_name_or_path": PLANTED, "activation_function": PLANTED, "torch_dtype": PLANTED,
              "architectures": [PLANTED]}  # fmt: skip
    page = open_page(f"config={quote(json.dumps(config))}&device=a100-sxm-40gb", errors=["422"])
    for card in ("findings", "crest", "operations", "memory", "devices"):
        page.evaluate(f"document.getElementById('{card}').scrollIntoView()")
        page.wait_for_timeout(100)
    for part in ("preset", "device", "m.activation", "w.dtype", "v.op", "v.dim", "v.optimizer", "m.name"):
        value = quote(PLANTED if part in ("preset", "device") else json.dumps(PLANTED))
        page.goto(re.sub("#.*", f"#{part}={value}", page.url))
        page.wait_for_timeout(100)
    assert page.evaluate("window.planted") is None
    assert page.locator("img").count() == 1


def test_a_phone_shows_everything(open_page: Callable[..., Any]) -> None:
    """At 390 pixels nothing is wider than the screen but what scrolls by itself, and the question opens."""
    page = open_page(viewport=NARROW, has_touch=True, device_scale_factor=2)
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-40gb"))
    for card in ("findings", "crest", "tiles", "operations", "waterfall", "memory", "devices", "heat"):
        see(page, card)
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    page.evaluate("scrollTo(0, 0)")
    page.tap("#question summary")
    page.select_option("#preset", "gpt2")
    settle(page, words_of("gpt2", device="a100-sxm-40gb"))


def test_the_keyboard_alone_is_enough(open_page: Callable[..., Any]) -> None:
    """Skip link, presets by /, a field, undo by Ctrl+Z, pin by P, the export menu and back with Escape."""
    page = open_page()
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-40gb"))
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
    settle(page, words_of("gpt2-xl", device="a100-sxm-40gb"))
    page.keyboard.press("Control+z")
    page.wait_for_function("() => document.getElementById('preset').value !== 'gpt2-xl'")
    page.locator("main").focus()
    page.keyboard.press("p")
    playwright.expect(page.locator("#pin")).to_have_attribute("aria-pressed", "true")
    page.locator("#export summary").focus()
    page.keyboard.press("Enter")
    playwright.expect(page.locator("#export")).to_have_attribute("open", "")
    page.keyboard.press("Tab")
    focused(page, "dataset.export === 'config'")
    page.keyboard.press("Escape")
    focused(page, "tagName === 'SUMMARY'")


@pytest.mark.parametrize(
    "options",
    [{"color_scheme": "light"}, {"color_scheme": "dark"}, {"viewport": NARROW}],
    ids=["light", "dark", "phone"],
)
def test_nothing_stands_in_a_readers_way(open_page: Callable[..., Any], options: dict[str, Any]) -> None:
    """The rules of WCAG 2 that a program can check: no serious violation, in either light and on a phone."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python")
    page = open_page(**options)
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-40gb"))
    for card in ("findings", "crest", "tiles", "operations", "waterfall", "memory", "devices", "heat", "search"):
        page.evaluate(f"document.getElementById('{card}').scrollIntoView()")
        page.wait_for_timeout(150)
    page.wait_for_function("() => !document.querySelector('[aria-busy]')")
    found = axe.Axe().run(page).response["violations"]
    serious = {
        one["id"]: [node["html"][:120] for node in one["nodes"][:3]]
        for one in found
        if one["impact"] in ("serious", "critical")
    }
    assert serious == {}
