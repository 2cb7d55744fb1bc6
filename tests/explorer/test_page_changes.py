"""What stays on the page and what goes when a question changes, and that an applied row is the row that was shown."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from page_tools import ONCE_MORE, SEARCH_MS, expect, see, settle, turn_to, words_of

import shapewright
from shapewright.app.explorer.requests import MAX_COMPARED_DEVICES
from shapewright.core.units import format_seconds
from shapewright.hardware.loader import list_devices

pytestmark = ONCE_MORE


@pytest.mark.parametrize(
    ("card", "field", "verdict"),
    [("plan", "#plan-batch", "#plan-verdict"), ("serving", "#serving-prompt_len", "#serving-verdict")],
)
def test_a_refused_value_can_be_corrected(card: str, field: str, verdict: str, open_page: Callable[..., Any]) -> None:
    """The form of a card stays beside the reason why its question has no answer."""
    page = open_page("preset=gpt2&device=h100-sxm-80gb", errors=["422"])
    found = see(page, card)
    page.fill(field, "1000000000000000")
    page.locator(field).blur()
    expect(found.locator(".empty").first).to_contain_text("less than or equal to")
    expect(page.locator(verdict)).to_be_hidden()
    page.fill(field, "512")
    page.locator(field).blur()
    expect(page.locator(verdict)).to_be_visible()


def test_an_explanation_follows_the_job(open_page: Callable[..., Any]) -> None:
    """The explained operation keeps its place on another device, with that device's time."""
    page = open_page("preset=gpt2&device=h100-sxm-80gb")
    card = see(page, "operations")
    card.locator("[data-operation='mlp.up:forward'] button").focus()
    for device in ("h100-sxm-80gb", "l40s"):
        page.select_option("#device", device)
        operations = shapewright.predict("gpt2", device=device).operations
        (up,) = (one for one in operations if (one.operation.name, one.operation.pass_name) == ("mlp.up", "forward"))
        expect(page.locator("#reason")).to_contain_text(f"{format_seconds(float(up.price.time_s))}, 90 % between")
    page.select_option("#preset", "mamba-2.8b")
    expect(page.locator("#reason")).to_contain_text("Point at an operation")


def test_fixes_of_a_tower_are_no_buttons(open_page: Callable[..., Any]) -> None:
    """The form has no fields of ``vision_config``: what is to be changed there is text."""
    page = open_page("preset=qwen2.5-vl-7b&device=h100-sxm-80gb&w.images=2")
    card = see(page, "findings")
    finding = card.locator("[data-code=TC105]")
    expect(finding.locator(".advice").first).to_contain_text("use 3392")
    expect(finding.locator(".apply")).to_have_count(0)
    expect(page.locator("#advice")).not_to_contain_text("vision")


def test_a_found_shape_is_applied_to_the_job_that_was_searched(open_page: Callable[..., Any]) -> None:
    """A row is the shape and the step that it states, also when the page has another model and device by then."""
    page = open_page("preset=gpt3-2.7b&device=a100-sxm-80gb", viewport={"width": 1440, "height": 1800})
    turn_to(page, "search")
    for name in ("heads", "ffn", "depth", "width", "kv_heads"):
        page.uncheck(f"#search input[value={name}]")
    page.click("#start-search")
    row = page.locator("#search tbody tr").first
    expect(row).to_be_visible(timeout=SEARCH_MS)
    vocabulary = row.locator("td", has_text="->").inner_text().split()[-1]
    expect(page.locator("#search [role=status]")).to_contain_text("gpt3-2.7b")
    page.select_option("#preset", "gpt2")
    page.select_option("#device", "l40s")
    settle(page, words_of("gpt2", device="l40s"))
    row.locator(".apply").click()
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb", overrides={"vocab_size": int(vocabulary)}))


def test_a_search_is_stopped_before_it_has_a_name(open_page: Callable[..., Any]) -> None:
    """Stop right behind Search ends the search that the server starts meanwhile."""
    page = open_page("preset=gpt3-2.7b&device=a100-sxm-80gb")
    turn_to(page, "search")
    page.evaluate(
        "() => { document.getElementById('start-search').click(); document.getElementById('stop-search').click(); }"
    )
    expect(page.locator("#search [role=status]")).to_contain_text("Stopped", timeout=SEARCH_MS)


def test_a_plan_recomputes_all_layers(open_page: Callable[..., Any]) -> None:
    """A number of recomputed layers belongs to the job alone: plans choose the recomputation."""
    page = open_page("preset=gpt2&device=h100-sxm-80gb&w.recompute=%22full%22&w.recompute_layers=2")
    card = see(page, "plan")
    card.locator(".apply").first.click()
    expect(page.locator("#workload-recompute")).to_have_value("none")
    expect(page.locator("#workload-recompute_layers")).to_have_value("")


def test_a_design_is_applied_with_what_it_kept(open_page: Callable[..., Any]) -> None:
    """Kernels and chunks of the job are not those of the design, whose step becomes that of the page."""
    page = open_page(
        "page=design&preset=gpt2&device=h100-sxm-80gb&w.kernels=%22torch%22&w.loss_chunks=4&w.dtype=%22fp16%22",
        viewport={"width": 1440, "height": 1800},
    )
    page.fill("#design-devices", "1")
    page.focus("#design-size")
    page.keyboard.press("Home")
    page.focus("#design-tokens")
    page.keyboard.press("Home")
    page.click("#start-design")
    step = page.locator("#design td", has_text=", MFU ")
    expect(step).to_be_visible(timeout=SEARCH_MS)
    words = step.inner_text().partition(" (")[0]
    page.locator("#design .apply").first.click()
    expect(page.locator("[data-fact=step]")).to_have_text(words)
    expect(page.locator("#workload-dtype")).to_have_value("fp16")


def test_an_address_with_unknown_words_shows_the_first_page(open_page: Callable[..., Any]) -> None:
    """Names that every object of JavaScript has are no pages and no metrics."""
    page = open_page("page=constructor&v.y=%22constructor%22&preset=gpt3-2.7b&device=a100-sxm-80gb")
    assert page.title() == "Shapewright explorer"
    expect(page.locator("#sweep-metric")).to_have_value("step")
    expect(page.locator("#headline")).to_contain_text("edge of a cliff")


def test_points_of_one_speed_are_all_listed(open_page: Callable[..., Any]) -> None:
    """Points of a front that round to the same tokens per second of a user have a row each, with their instances."""
    page = open_page("preset=llama-3.1-405b&device=h200-sxm-141gb")
    card = see(page, "serving")
    expect(page.locator("#serving-verdict")).to_be_visible()
    card.locator("summary", has_text="What limits each point").click()
    rows = card.locator("[aria-label='What limits each point'] tbody tr")
    speeds = rows.locator("td:first-child").all_inner_texts()
    assert len(speeds) == 12 > len(set(speeds))
    assert len(set(rows.locator("td:nth-child(2)").all_inner_texts())) > 1


def test_advice_says_what_it_saves_as_the_finding_does(open_page: Callable[..., Any]) -> None:
    """A model of another size saves per parameter, a larger micro-batch at an equal global batch."""
    page = open_page("preset=gpt2&device=h100-sxm-80gb&m.intermediate_size=3001")
    card = see(page, "findings")
    lines = card.locator(".finding-list .apply").all_inner_texts()
    shown = [re.search(r"saves .*$", text) for text in page.locator("#advice .apply").all_inner_texts()]
    savings = [found[0] for found in shown if found][1:]  # the first is that of all fixes

    assert any("per parameter" in words for words in savings)
    assert any("at an equal global batch of " in words for words in savings)
    assert all(any(words in line for line in lines) for words in savings)


def test_a_failed_export_leaves_the_numbers(open_page: Callable[..., Any]) -> None:
    """A link that the browser does not let the page copy is no reason to call the shape impossible."""
    page = open_page("preset=gpt2&device=h100-sxm-80gb")
    expected = words_of("gpt2", device="h100-sxm-80gb")
    settle(page, expected)
    page.evaluate("() => Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.click("#export summary")
    page.click("[data-export=link]")
    expect(page.locator("#problem")).to_contain_text("the link is its address")
    expect(page.locator("#title")).to_contain_text("gpt2")
    settle(page, expected)


def test_a_pinned_shape_that_cannot_run_hides_no_other(open_page: Callable[..., Any]) -> None:
    """Its reason stands where the comparison would be."""
    pinned = quote('{"preset": "gpt2", "overrides": {"num_heads": 7}, "device": "h100-sxm-80gb"}')
    page = open_page(f"preset=gpt2&device=h100-sxm-80gb&pin={pinned}", errors=["422"])
    settle(page, words_of("gpt2", device="h100-sxm-80gb"))
    expect(page.locator("#problem")).to_be_hidden()
    expect(page.locator("#moved")).to_contain_text("A cannot run: hidden_size=768 is not divisible by num_heads=7")


def test_plans_are_for_the_devices_of_the_field(open_page: Callable[..., Any]) -> None:
    """No devices are refused; they were eight."""
    page = open_page("preset=gpt2&device=h100-sxm-80gb", errors=["422"])
    card = see(page, "plan")
    page.fill("#plan-devices", "0")
    page.locator("#plan-devices").blur()
    expect(card.locator(".empty").first).to_contain_text("num_devices")


@pytest.mark.parametrize(
    ("page_name", "values", "verdict", "words"),
    [
        (
            "plan",
            {"plan-devices": "4", "plan-batch": "64", "plan-objective": "memory"},
            "#plan-verdict",
            "tp 4, micro-batch 1",
        ),
        (
            "serving",
            {
                "serving-prompt_len": "700",
                "serving-output_len": "90",
                "serving-num_devices": "2",
                "serving-ttft_limit_s": "900",
                "serving-tpot_limit_s": "80",
                "serving-requests_per_s": "0.5",
                "serving-usd_per_hour": "2.5",
                "serving-engine": "sglang",
            },
            "#serving [role=status]",
            "700",
        ),
        ("design", {"design-size": "3", "design-tokens": "8", "design-devices": "16"}, "#design-size-value", "140M"),
        (
            "design",
            {"search-tolerance": "0.05", "search-tokens": "1e12", "search-guard": "free"},
            "#search",
            "1 T tokens",
        ),
    ],
    ids=["plan", "serving", "design", "search"],
)
def test_a_link_holds_the_inputs_of_a_view(
    page_name: str, values: dict[str, str], verdict: str, words: str, open_page: Callable[..., Any]
) -> None:
    """Whoever opens the address sees the inputs and the answer for them; undo takes back the last."""
    page = open_page(f"page={page_name}&preset=gpt2&device=h100-sxm-80gb")
    expect(page.locator("[data-fact=step]")).to_be_visible()
    first = {name: page.input_value(f"#{name}") for name in values}
    for name, value in values.items():
        page.evaluate(
            """([name, value]) => {
              const input = document.getElementById(name);
              input.value = value;
              input.dispatchEvent(new Event("change"));
            }""",
            [name, value],
        )
    page.wait_for_function("(name) => location.hash.includes(`v.${name}=`)", arg=list(values)[-1])
    other = open_page(page.url.partition("#")[2])
    expect(other.locator(verdict)).to_contain_text(words)
    assert {name: other.input_value(f"#{name}") for name in values} == values
    for _ in values:
        page.click("#undo")
    assert {name: page.input_value(f"#{name}") for name in values} == first


def test_a_link_holds_what_a_search_varies(open_page: Callable[..., Any]) -> None:
    """Boxes differ from their start in the address alone; a choice that no list has is that of the start."""
    page = open_page("page=design&preset=gpt2&v.search-heads=false&v.search-head_dim=true&v.search-guard=%22none%22")
    expect(page.locator("[data-fact=step]")).to_be_visible()
    assert not page.is_checked("#search-heads")
    assert page.is_checked("#search-head_dim")
    assert page.is_checked("#search-vocab")
    assert page.input_value("#search-guard") == "usual"
    page.check("#search-heads")
    page.wait_for_function("() => !location.hash.includes('search-heads')")


def test_all_chosen_devices_are_compared(open_page: Callable[..., Any]) -> None:
    """A 25th device has its row or its problem; more than the server compares are refused beside the chips."""
    names = list(list_devices())
    chosen = quote(json.dumps(names[:25]))
    page = open_page(f"page=devices&preset=gpt2&device={names[0]}&v.devices={chosen}", errors=["422"])
    card = see(page, "devices")
    expect(card.locator("tbody tr, .below .problem")).to_have_count(25)
    assert len(names) > MAX_COMPARED_DEVICES
    page.goto(re.sub("v.devices=[^&]*", f"v.devices={quote(json.dumps(names))}", page.url))
    expect(card.locator(".empty").first).to_contain_text(f"at most {MAX_COMPARED_DEVICES} items")
    expect(card.locator(".chips button")).to_have_count(len(names))


@pytest.mark.parametrize("name", ["kernels", "weight_dtype", "kv_cache_dtype"])
def test_a_choice_can_be_taken_back(name: str, open_page: Callable[..., Any]) -> None:
    """Without one it depends on other fields, such as 4 bits for frozen weights of QLoRA; training refuses some."""
    page = open_page("preset=gpt2&device=h100-sxm-80gb", errors=["422"])
    settle(page, words_of("gpt2", device="h100-sxm-80gb"))
    field = page.locator(f"#workload-{name}")
    assert field.locator("option:checked").inner_text() == "default"
    field.select_option(index=1)
    page.wait_for_function("(name) => location.hash.includes(`w.${name}`)", arg=name)
    field.select_option("")
    page.wait_for_function("(name) => !location.hash.includes(`w.${name}`)", arg=name)
