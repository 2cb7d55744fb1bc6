"""Search jobs: they report progress, can be stopped, wait in a short queue, and have a time limit."""

from __future__ import annotations

import time
from typing import Any

import pytest
from explorer_jobs import ADDRESS, GPT3
from fastapi.testclient import TestClient

import shapewright
from shapewright.app.explorer.app import create_app
from shapewright.app.explorer.search_jobs import MAX_WAITING, SearchQueue

# Everything at once, without a guard: minutes of work.
LONG: dict[str, Any] = {
    "job": {"preset": "llama-3-70b", "device": "h200-sxm-141gb", "layout": {"tensor_parallel": 4}},
    "vary": ["heads", "head_dim", "kv_heads", "ffn", "vocab", "depth", "width", "micro_batch"],
    "guard": "free",
    "tolerance_fraction": 0.05,
}


# Far more than a search waits for a processor on a busy machine; only a search that hangs takes it.
LONGEST_S = 240.0


def wait(client: TestClient, run_id: str, *, for_progress: bool = False) -> dict[str, Any]:
    """The search when it is over, or has priced its first shapes."""
    stop_s = time.monotonic() + LONGEST_S
    while time.monotonic() < stop_s:
        run: dict[str, Any] = client.get(f"/api/v1/searches/{run_id}").json()
        if run["state"] in ("done", "failed", "cancelled") or (for_progress and run["done"]):
            return run
        time.sleep(0.05)
    raise AssertionError(f"the search does not end: {run}")


def start(client: TestClient, **body: Any) -> dict[str, Any]:
    """Put a search into the queue."""
    answer = client.post("/api/v1/searches", json=body)
    assert answer.status_code == 202, answer.text
    run: dict[str, Any] = answer.json()
    assert answer.headers["location"] == f"/api/v1/searches/{run['id']}"
    return run


@pytest.mark.parametrize("uncalibrated", [False, True])
def test_search_job_equals_the_command(uncalibrated: bool, client: TestClient) -> None:
    """The same shapes in the same order with the same numbers, with and without the device's own calibration."""
    run = wait(client, start(client, job={**GPT3, "uncalibrated": uncalibrated}, vary=["heads", "vocab"])["id"])
    expected = shapewright.search(
        "gpt3-2.7b",
        device="a100-sxm-40gb",
        workload={"dtype": "fp16", "attention": "unfused"},
        vary=["heads", "vocab"],
        uncalibrated=uncalibrated,
    )

    assert run["state"] == "done", run["error"]
    assert [one["speedup"] for one in run["result"]["candidates"]] == [
        one.speedup.factor for one in expected.candidates
    ]
    assert len(run["result"]["text"]["candidates"]["rows"]) == len(expected.candidates)
    assert "net: speed-up to the same loss" in run["result"]["text"]["letters"]
    assert run["progress_fraction"] == 1.0


def test_unsearchable_requests_are_errors(client: TestClient) -> None:
    """At once where the model cannot run; as a failed search with the command's line where the space is empty."""
    assert client.post("/api/v1/searches", json={"job": {**GPT3, "device": "h1000"}}).status_code == 422
    run = wait(client, start(client, job=GPT3, vary=["heads"], keep={"heads": 7})["id"])

    assert run["state"] == "failed"
    assert run["error"]
    assert run["error_kind"] == "ConfigError"


def test_fields_that_a_format_does_not_have_are_left_out_with_a_note(client: TestClient) -> None:
    """The page offers the head width for every model: GPT's config.json has none, so the others are searched.

    Alone it is an error, which names it.
    """
    run = wait(client, start(client, job=GPT3, vary=["heads", "head_dim", "vocab"])["id"])
    expected = shapewright.search(
        "gpt3-2.7b",
        device="a100-sxm-40gb",
        workload={"dtype": "fp16", "attention": "unfused"},
        vary=["heads", "vocab"],
    )
    alone = wait(client, start(client, job=GPT3, vary=["head_dim"])["id"])

    assert run["state"] == "done", run["error"]
    assert [one["speedup"] for one in run["result"]["candidates"]] == [
        one.speedup.factor for one in expected.candidates
    ]
    assert "head_dim is not varied: a config.json of model_type 'gpt2' has no field for it" in run["result"]["notes"]
    assert alone["state"] == "failed"
    assert "vary=head_dim is not possible" in alone["error"]


def test_a_running_search_can_be_stopped(client: TestClient) -> None:
    """A running search stops, and the next in the queue starts; a stopped one in the queue never starts."""
    first, second, third = start(client, **LONG), start(client, **LONG), start(client, job=GPT3, vary=["vocab"])
    run = wait(client, first["id"], for_progress=True)
    assert run["state"] == "running", run["error"]
    assert 0.0 < run["progress_fraction"] < 1.0
    assert client.delete(f"/api/v1/searches/{second['id']}").json()["state"] == "cancelled"
    client.delete(f"/api/v1/searches/{first['id']}")

    stopped = wait(client, first["id"])
    assert stopped["state"] == "cancelled"
    # On a busy machine it may stop before it has a result.
    assert stopped["result"] is None or stopped["result"]["is_complete"] is False
    assert wait(client, third["id"])["state"] == "done"
    assert client.get(f"/api/v1/searches/{second['id']}").json()["result"] is None


def test_time_is_limited() -> None:
    """A search that exceeds the time limit returns its best so far, marked as incomplete."""
    with TestClient(create_app(queue=SearchQueue(max_run_s=2.0)), base_url=ADDRESS) as client:
        run = wait(client, start(client, **LONG)["id"])

    # On a busy machine the time may be over before the first shapes are priced.
    assert run["result"] is None or run["result"]["is_complete"] is False
    assert run["state"] == ("failed" if run["result"] is None else "done")
    assert "stopped after 2 s" in run["error"]


def test_the_queue_is_short() -> None:
    """Beyond its length a search is turned away with the time to come again; leaving ends everything."""
    with TestClient(create_app(), base_url=ADDRESS) as client:
        answers = [client.post("/api/v1/searches", json=LONG) for _ in range(MAX_WAITING + 3)]
        refused = [answer for answer in answers if answer.status_code == 429]
        begun_s = time.monotonic()

    assert refused
    assert refused[0].headers["retry-after"]
    assert "searches are waiting" in refused[0].json()["detail"]
    assert time.monotonic() - begun_s < 10.0


@pytest.mark.parametrize("method", ["get", "delete"])
def test_unknown_searches_are_not_found(method: str, client: TestClient) -> None:
    """A name that was never given, or is forgotten."""
    assert getattr(client, method)("/api/v1/searches/none").status_code == 404
