"""The job form of the page: sliders, pasted configs, the URL, and invalid input."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

import pytest
from page_tools import ONCE_MORE, expect, reload, see, settle, words_of

pytestmark = ONCE_MORE
PLANTED = '<img src=x onerror="window.planted=1"><script>window.planted=1</script>'


def test_page_text_equals_the_command(open_page: Callable[..., Any]) -> None:
    """Load, then another preset, device and format: every number of the verdict is the library's."""
    page = open_page()
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb"))
    page.select_option("#preset", "llama-3-8b")
    settle(page, words_of("llama-3-8b", device="a100-sxm-80gb"))
    page.select_option("#device", "h100-sxm-80gb")
    page.select_option("#workload-dtype", "fp8")
    settle(page, words_of("llama-3-8b", device="h100-sxm-80gb", workload={"dtype": "fp8"}))
    page.select_option("#workload-phase", "decode")
    settle(page, words_of("llama-3-8b", device="h100-sxm-80gb", workload={"dtype": "fp8", "phase": "decode"}))


def test_training_software_is_chosen(open_page: Callable[..., Any]) -> None:
    """A generation changes the step and is named in the title; a reload keeps it, and decoding has none."""
    page = open_page()
    page.select_option("#software", "fsdp-2024")
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb", software="fsdp-2024"))
    expect(page.locator("#title")).to_contain_text("software of fsdp-2024")
    reload(page)
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb", software="fsdp-2024"))
    page.select_option("#workload-phase", "decode")
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb", workload={"phase": "decode"}))
    expect(page.locator("#software")).to_be_hidden()


def test_nodes_are_given(open_page: Callable[..., Any]) -> None:
    """The title names the node; a reload keeps it, and an empty field resets it."""
    page = open_page()
    page.fill("#node_size", "4")
    page.keyboard.press("Tab")
    expect(page.locator("#title")).to_contain_text("nodes of 4")
    reload(page)
    expect(page.locator("#title")).to_contain_text("nodes of 4")
    page.fill("#node_size", "")
    page.keyboard.press("Tab")
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb"))


def test_sliding_shows_soon_and_can_be_undone(open_page: Callable[..., Any]) -> None:
    """A slider moves the verdict; its moves are one step to undo; the number field takes what the slider does not."""
    page = open_page()
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb"))
    slider = page.locator("[data-field=intermediate_size] input[type=range]")
    slider.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    value = int(page.input_value("#model-intermediate_size"))
    assert value > 10240
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb", overrides={"intermediate_size": value}))
    times = page.evaluate("performance.getEntriesByName('shapewright:slide-to-paint').map((one) => one.duration)")
    assert times
    page.fill("#model-vocab_size", "50258")
    page.press("#model-vocab_size", "Enter")
    both = {"intermediate_size": value, "vocab_size": 50258}
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb", overrides=both))
    page.click("#undo")
    page.click("#undo")
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb"))
    page.click("#redo")
    settle(page, words_of("gpt3-2.7b", device="a100-sxm-80gb", overrides={"intermediate_size": value}))


def test_pasted_config_shows_its_error(open_page: Callable[..., Any]) -> None:
    """Text that is no JSON, no object or no model is refused in words; a sound one becomes the question."""
    page = open_page(errors=["422"])
    page.click("text=Paste or drop a config.json")
    for text, words in (("{", "not valid JSON"), ("[1]", "not a JSON object")):
        page.fill("#config", text)
        page.click("#use-config")
        expect(page.locator("#config-problem")).to_contain_text(words)
    page.fill("#config", json.dumps({"model_type": "gpt2", "n_embd": -4}))
    page.click("#use-config")
    expect(page.locator("#problem")).to_contain_text("in 'pasted config': ")
    config = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16,
              "num_key_value_heads": 8, "intermediate_size": 4097, "vocab_size": 32000}  # fmt: skip
    page.fill("#config", json.dumps(config))
    page.click("#use-config")
    model = {"hidden_size": 1024, "num_layers": 8, "num_heads": 16, "num_kv_heads": 8}
    expect(page.locator("#problem")).to_be_hidden()
    assert {name: int(page.input_value(f"#model-{name}")) for name in model} == model
    reload(page)
    expect(page.locator("#model-intermediate_size")).to_have_value("4097")
    page.evaluate(
        """(text) => {
          const carried = new DataTransfer();
          carried.items.add(new File([text], "config.json", { type: "application/json" }));
          const options = { dataTransfer: carried, bubbles: true, cancelable: true };
          document.body.dispatchEvent(new DragEvent("drop", options));
        }""",
        json.dumps({**config, "intermediate_size": 4224}),
    )
    expect(page.locator("#model-intermediate_size")).to_have_value("4224")


def test_the_address_holds_the_state(open_page: Callable[..., Any]) -> None:
    """A reload restores shape, GEMM and dimension from the URL."""
    state = "preset=gpt2-xl&device=h200-sxm-141gb&m.num_heads=20&w.micro_batch_size=2"
    state += "&v.dim=%22vocab_size%22&v.op=%22logits:forward%22"
    page = open_page(state)
    expected = words_of(
        "gpt2-xl", device="h200-sxm-141gb", overrides={"num_heads": 20}, workload={"micro_batch_size": 2}
    )
    for _ in range(2):
        settle(page, expected)
        see(page, "tiles")
        assert page.input_value("#sweep-field") == "vocab_size"
        assert page.input_value("#tile-operation") == "logits:forward"
        reload(page)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("preset=gpt3-2.7b&device=h1000", "unknown device 'h1000'"),
        ("preset=gpt3-2.7b&device=a100-sxm-80gb&m.num_heads=31", "hidden_size=2560 is not divisible by num_heads=31"),
        ("preset=..%2F..%2Fetc%2Fpasswd&device=h200-sxm-141gb", "no preset '../../etc/passwd'"),
        ("preset=gpt3-2.7b&device=a100-sxm-80gb&m.hidden_size=%22x%22", "job.overrides.hidden_size"),
    ],
)
def test_errors_use_the_commands_words(open_page: Callable[..., Any], state: str, words: str) -> None:
    """An invalid state shows the command line's message, and the page stays usable."""
    page = open_page(state, errors=["422"])
    expect(page.locator("#problem")).to_contain_text(words)
    expect(page.locator("#mini")).to_contain_text(words)
    page.click("#reset")
    page.select_option("#preset", "gpt2")
    page.select_option("#device", "l40s")
    settle(page, words_of("gpt2", device="l40s"))
    expect(page.locator("#problem")).to_be_hidden()


def test_impossible_jobs_name_a_remedy(open_page: Callable[..., Any]) -> None:
    """A layout that does not divide the model is rejected, and its finding offers a fix that can be applied."""
    page = open_page("preset=gpt3-2.7b&device=a100-sxm-80gb&l.tensor_parallel=7", errors=["422"])
    expect(page.locator("#problem")).to_contain_text("tensor_parallel=7 must divide num_heads=32")
    card = see(page, "findings")
    card.locator(".finding.error .apply").first.click()
    expect(page.locator("#problem")).to_be_hidden()
    expect(page.locator("[data-fact=step]")).to_be_visible()


def test_planted_markup_stays_text(open_page: Callable[..., Any]) -> None:
    """Script tags in every text that a config, a state or an answer can carry are shown and never run."""
    config = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257,
              "name": PLANTED, "_name_or_path": PLANTED, "activation_function": PLANTED, "torch_dtype": PLANTED,
              "architectures": [PLANTED]}  # fmt: skip
    page = open_page(f"config={quote(json.dumps(config))}&device=a100-sxm-80gb", errors=["422"])
    for card in ("findings", "sweep", "operations", "memory", "devices"):
        see(page, card)
    for part in ("preset", "device", "m.activation", "w.dtype", "v.op", "v.dim", "m.name"):
        value = quote(PLANTED if part in ("preset", "device") else json.dumps(PLANTED))
        page.goto(re.sub("#.*", f"#{part}={value}", page.url))
        page.wait_for_timeout(100)
    assert page.evaluate("window.planted") is None
    assert page.locator("img").count() == 1
