"""The Design view: the API gives what the command gives, and the page asks it with two sliders."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

import shapewright

JOB: dict[str, Any] = {
    "preset": "gpt2",
    "device": "h100-sxm-80gb",
    "workload": {"seq_len": 1024, "micro_batch_size": 2},
}
ASKED: dict[str, Any] = {"num_parameters": 150_000_000, "train_tokens": 10**10, "num_devices": 8}


def wait(client: TestClient, run_id: str, longest_s: float = 90.0) -> dict[str, Any]:
    """The design when it is over."""
    stop_s = time.monotonic() + longest_s
    while time.monotonic() < stop_s:
        run: dict[str, Any] = client.get(f"/api/v1/searches/{run_id}").json()
        if run["state"] in ("done", "failed", "cancelled"):
            return run
        time.sleep(0.05)
    raise AssertionError("the design does not end")


def test_a_design_is_what_the_command_finds(client: TestClient) -> None:
    """The same shapes with the same plans and verdict; what a plan chooses is not kept from the job."""
    answer = client.post("/api/v1/designs", json={"job": JOB, **ASKED})
    run = wait(client, answer.json()["id"])
    expected = shapewright.design("gpt2", device="h100-sxm-80gb", workload={"seq_len": 1024}, **ASKED)

    assert answer.status_code == 202
    assert answer.headers["location"] == f"/api/v1/searches/{run['id']}"
    assert run["state"] == "done", run["error"]
    assert run["progress_fraction"] == 1.0
    result = run["result"]
    assert result["verdict"]["text"] == expected.verdict.text
    assert [one["plan"]["step_time_s"] for one in result["designs"]] == [
        one.prediction.step_time_s for one in expected.designs
    ]
    assert len(result["configs"]) == len(result["designs"]) == len(result["text"]["designs"]["rows"])
    assert result["figure"]["option"]["series"]


@pytest.mark.parametrize(
    ("changes", "status"),
    [({"train_tokens": 0}, 422), ({"num_parameters": 10}, 422), ({"num_devices": 0}, 422), ({"more": 1}, 422)],
)
def test_bad_requests_are_refused_at_once(changes: dict[str, Any], status: int, client: TestClient) -> None:
    """Values out of range and unknown fields never reach the queue."""
    assert client.post("/api/v1/designs", json={"job": JOB, **ASKED, **changes}).status_code == status


def test_what_fits_nowhere_fails_with_the_command_s_line(client: TestClient) -> None:
    """The reason is that of the plan: how much memory is missing, and what would fit."""
    body = {"job": {**JOB, "preset": "llama-3-8b"}, **ASKED, "num_parameters": 10**12}
    run = wait(client, client.post("/api/v1/designs", json=body).json()["id"])

    assert run["state"] == "failed"
    assert "no plan fits 8 h100-sxm-80gb" in run["error"]


def test_sliders_ask_and_the_answer_is_adopted(open_page: Callable[..., Any]) -> None:
    """Moving a slider designs; verdict, frontier and table are shown, and Apply makes the answer the question."""
    from page_tools import expect

    page = open_page(
        "page=design&preset=gpt2&device=h100-sxm-80gb&w.seq_len=1024", viewport={"width": 1440, "height": 1800}
    )
    page.fill("#design-devices", "8")
    page.focus("#design-size")
    for _ in range(5):
        page.keyboard.press("PageDown")
    expect(page.locator("#design-size-value")).not_to_have_text("3B")
    page.focus("#design-tokens")
    page.keyboard.press("Home")
    expect(page.locator("#design-tokens-value")).to_have_text("1B")
    page.click("#start-design")
    page.wait_for_function(
        "() => document.querySelector('#design progress').hidden && document.querySelector('#design table')",
        timeout=90_000,
    )
    verdict = page.locator("#design-verdict").inner_text()
    assert "gpt2" in verdict
    assert page.locator("#design canvas").count() >= 1
    shape = page.locator("#design .below td").nth(1).inner_text()
    page.locator("#design .apply").first.click()
    page.wait_for_function(
        "(layers) => document.getElementById('model-num_layers').value === layers",
        arg=shape.split("L=")[1].split()[0],
    )
