"""The process of slow answers: predictions do not wait for it, and its end, hangs and lost clients harm nobody."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from explorer_jobs import ADDRESS, GPT3
from fastapi.testclient import TestClient

from shapewright.app.explorer import lanes
from shapewright.app.explorer.answer_worker import Files, answer
from shapewright.app.explorer.app import create_app
from shapewright.app.explorer.device_lookup import DeviceLookup
from shapewright.app.explorer.measured import Measurements
from shapewright.app.explorer.requests import SLOW_REQUESTS
from shapewright.app.explorer.serve import open_socket
from shapewright.core.deadline import Deadline

# A worker whose memory answers never end, politely or not, and whose plans end the process.
_UNRULY = """
import os, time
from shapewright.app.explorer import answer_worker
from shapewright.core.deadline import check_deadline

def polite(*_):
    while True:
        check_deadline()
        time.sleep(0.005)

def deaf(*_):
    while True:
        time.sleep(0.005)

answer_worker._OF_A_SCENARIO["memory"] = polite
answer_worker._OF_A_SCENARIO["heat-map"] = deaf
answer_worker._OF_A_SCENARIO["breakdown"] = lambda _: {"process": os.getpid()}
answer_worker.plans.answer_plan = lambda *_: os._exit(3)
answer_worker.figures.answer_sweep = lambda *_: print("noise") or {"nan": float("nan")}
answer_worker.main()
"""


@pytest.fixture(scope="module", autouse=True)
def unruly(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers start that worker."""
    path = tmp_path_factory.mktemp("worker") / "unruly.py"
    path.write_text(_UNRULY, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "python_command", lambda _module: [sys.executable, "-P", str(path)])
        yield


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    """The application with that worker."""
    with TestClient(create_app(), base_url=ADDRESS, raise_server_exceptions=False) as client:
        yield client


def post(client: TestClient, name: str, **body: Any) -> Any:
    """Status and JSON of an answer."""
    found = client.post(f"/api/v1/{name}", json={"job": GPT3, **body})
    return found.status_code, found.json()


def process_of(client: TestClient) -> int:
    """Process that answers."""
    status, found = post(client, "breakdown")
    assert status == 200, found
    return int(found["process"])


@pytest.mark.parametrize(("name", "is_kept"), [("memory", True), ("heat-map", False)])
def test_work_beyond_the_limit_ends(
    name: str, is_kept: bool, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that looks at its deadline ends itself, other work with its process; the next request is answered."""
    before = process_of(client)
    app: Any = client.app
    monkeypatch.setattr(app.state.slow, "limit_s", 0.2)
    status, found = post(client, name)
    monkeypatch.undo()

    assert (status, found["title"]) == (503, "TimeLimitError")
    assert "longer than 0.2 s" in found["detail"]
    assert (process_of(client) == before) is is_kept


def test_predictions_do_not_wait(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prediction is answered while the worker is busy without end."""
    process_of(client)
    app: Any = client.app
    monkeypatch.setattr(app.state.slow, "limit_s", 5.0)
    slow = threading.Thread(target=post, args=(client, "heat-map"))
    slow.start()
    for _ in range(5):
        assert post(client, "predict")[0] == 200
        assert slow.is_alive()
    slow.join()


def test_a_worker_that_dies_is_replaced(client: TestClient) -> None:
    """While it answers, the client has an error without details; while idle, nobody sees it."""
    before = process_of(client)
    status, found = post(client, "plan")
    assert (status, found["title"]) == (500, "InternalError")
    second = process_of(client)
    os.kill(second, signal.SIGKILL)
    time.sleep(0.2)

    assert len({before, second, process_of(client)}) == 3


def test_noise_and_nan_are_no_answers(client: TestClient) -> None:
    """What is printed is not read as a reply, and a number that JSON does not have is an internal error."""
    status, found = post(client, "sweep", field="hidden_size")

    assert (status, found["title"]) == (500, "InternalError")
    assert "Traceback" not in found["detail"]
    assert process_of(client)


def test_the_worker_ends_with_the_server() -> None:
    """Idle or busy."""
    for name in ("breakdown", "heat-map"):
        with TestClient(create_app(), base_url=ADDRESS, raise_server_exceptions=False) as client:
            process = process_of(client)
            if name == "heat-map":
                app: Any = client.app
                app.state.slow.limit_s = 0.3
                post(client, name)
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_lost_clients_leave_the_worker_to_the_next() -> None:
    """Clients that go away, running or waiting, whether or not their work looks at its deadline."""
    listener = open_socket("127.0.0.1", 0)
    running = uvicorn.Server(uvicorn.Config(create_app(), log_level="critical", access_log=False))
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        body = b'{"job": {"preset": "gpt3-2.7b", "device": "a100-sxm-40gb"}}'
        head = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        for name in (b"memory", b"heat-map", b"memory"):
            with socket.create_connection(listener.getsockname(), timeout=30) as connection:
                connection.sendall(b"POST /api/v1/%s HTTP/1.1\r\n" % name + head + body)
                time.sleep(0.3)
        with socket.create_connection(listener.getsockname(), timeout=30) as connection:
            connection.sendall(b"POST /api/v1/breakdown HTTP/1.1\r\n" + head + body)
            assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    finally:
        running.should_exit = True
        thread.join(timeout=10)
        listener.close()


@pytest.mark.parametrize("name", sorted(SLOW_REQUESTS))
def test_every_slow_request_has_an_answer(name: str) -> None:
    """The worker knows each, and an unknown preset is the command line's error."""
    extra = {"compare": b', "devices": ["l4"]', "sweep": b', "field": "hidden_size"'}.get(name, b"")
    files = Files(DeviceLookup(), Measurements())
    head, content = answer(name, b'{"job": {"preset": "none", "device": "l4"}%s}' % extra, files, Deadline(60.0))

    assert (head["status"], head["title"], content) == (422, "UnknownModelError", b"")
    assert "none" in head["detail"]


def test_a_process_that_does_not_start_in_time_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request that waits for it is refused, the log says why, and the next one starts another."""
    with monkeypatch.context() as patch:
        patch.setattr(lanes, "_MAX_START_S", 0.0)
        with TestClient(create_app(), base_url=ADDRESS) as client:
            status, found = post(client, "breakdown")
            assert (status, found["title"]) == (503, "TimeLimitError")
            patch.undo()
            assert process_of(client) > 0
    words = [record.getMessage() for record in caplog.records]
    assert any(each.startswith("no worker process: TimeLimitError(") for each in words)
    assert not any("never retrieved" in each for each in words)
