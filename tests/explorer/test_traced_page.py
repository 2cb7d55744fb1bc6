"""The page of a traced module: its answer is that of the commands, and only a server with a trace has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from explorer_jobs import ADDRESS, serving
from fastapi.testclient import TestClient

from shapewright.app.explorer.app import create_app
from shapewright.app.explorer.serve import page_address, serve
from shapewright.app.explorer.views.answers import TracedModule
from shapewright.app.report.traced.outputs import traced_check_output, traced_predict_output
from shapewright.core.errors import ShapewrightError
from shapewright.hardware.loader import load_device
from shapewright.lint.traced import check_trace
from shapewright.prediction.traced import predict_trace
from small_traces import small_trace

TRACED = TracedModule(small_trace(width=4097), "muon")


def test_the_answer_is_that_of_the_commands() -> None:
    """Findings, step and memory are those of check, predict and memory on the device of the request."""
    device = load_device("mi300x")
    with TestClient(create_app(traced=TRACED), base_url=ADDRESS) as client:
        answer = client.get("/api/v1/trace", params={"device": "mi300x"}).json()
    checked = traced_check_output(check_trace(TRACED.trace, device, optimizer="muon"))
    predicted = traced_predict_output(predict_trace(TRACED.trace, device, optimizer="muon"))

    assert answer["findings"] == checked.to_json()["findings"] != []
    assert answer["step"] == predicted.to_json()
    assert answer["by_module"]["modules"][0]["path"] == "layers.0-1.up"
    assert answer["text"]["title"].startswith("Mlp of mlp.py:build (16.8 M parameters) on AMD Instinct MI300X")
    assert len(answer["text"]["operations"]["rows"]) == len(predicted.operations)


def test_only_a_server_with_a_trace_has_the_page() -> None:
    """Without a module there is neither page nor route, an unknown device is a problem, and a public server refuses."""
    with TestClient(create_app(), base_url=ADDRESS) as client:
        assert client.get("/traced").status_code == 404
        assert client.get("/api/v1/trace", params={"device": "mi300x"}).status_code == 404
    with TestClient(create_app(traced=TRACED), base_url=ADDRESS) as client:
        assert client.get("/traced").status_code == 200
        unknown = client.get("/api/v1/trace", params={"device": "h1000"})
        assert (unknown.status_code, "h1000" in unknown.json()["detail"]) == (422, True)
    with pytest.raises(ShapewrightError, match="module"):
        serve("127.0.0.1", 0, open_browser=False, say=print, public_names=["a.example"], traced=TRACED)
    assert page_address("::1", 80, "x", "traced?device=l4") == "http://[::1]:80/traced?device=l4&token=x"


@pytest.fixture
def traced_server() -> Iterator[str]:
    """Address of a server with a trace."""
    with serving(create_app(traced=TRACED)) as address:
        yield address


def test_the_page_follows_its_device(browser: Any, traced_server: str) -> None:
    """It shows findings, operations, and memory on the device of its address, then on the one that is chosen."""
    from page_tools import expect

    page = browser.new_page()
    troubles: list[str] = []
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.goto(f"{traced_server}traced?device=a100-sxm-80gb")
    expect(page.locator("#title")).to_contain_text("NVIDIA A100 SXM4 80 GB")
    expect(page.locator("[data-code=TC105]").first).to_contain_text("layers.0-1.up: out_features=4097")
    expect(page.locator("#modules tbody tr")).to_have_count(2)
    page.select_option("#device", "mi300x")
    expect(page.locator("#title")).to_contain_text("MI300X")
    assert page.url.endswith("?device=mi300x")
    assert page.locator("#timeline canvas").count() == 1
    page.close()

    assert troubles == []
