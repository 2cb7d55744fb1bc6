"""What stays on the page and what goes when a question changes, and that an applied row is the row that was shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from page_tools import ONCE_MORE, expect, see

import shapewright
from shapewright.core.units import format_seconds

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
