"""Limits of the server: time of an answer, lost clients, idle and many connections, and malformed requests."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import urlsplit

import pytest
from explorer_jobs import GPT3, serving
from fastapi.testclient import TestClient

from shapewright.app.explorer.app import create_app
from shapewright.app.explorer.guard import SECURITY_HEADERS
from shapewright.app.explorer.protocol import LimitedProtocol, QuietLog
from shapewright.app.explorer.views import answers
from shapewright.core.child_process import SOURCE_FOLDER, python_command
from shapewright.core.deadline import check_deadline

BODY = json.dumps({"job": GPT3}).encode()
HEAD = b"Host: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(BODY)


class Impatient(LimitedProtocol):
    """Connections of a server with room for eight, which may be idle for a second."""

    limit_s = 1.0
    most = 8


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """A server with small limits."""
    with serving(create_app(), http=Impatient, log_level="critical") as address:
        yield "127.0.0.1", urlsplit(address).port or 0


def post(address: tuple[str, int], path: str) -> bytes:
    """First part of the answer to a prediction's request."""
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(b"POST /api/v1/%s HTTP/1.1\r\n" % path.encode() + HEAD + BODY)
        return connection.recv(4096)


def work_until_stopped(_scenario: Any) -> Any:
    """Work without end, until it is stopped."""
    stop_s = time.monotonic() + 60.0
    while time.monotonic() < stop_s:
        check_deadline()
        time.sleep(0.005)
    raise AssertionError("nothing stopped the work")


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "//", "http://]"])
def test_malformed_origins_are_refused(origin: str, client: TestClient) -> None:
    """An origin that is no address is another origin."""
    answer = client.post("/api/v1/predict", json={"job": GPT3}, headers={"origin": origin})
    assert (answer.status_code, answer.json()["title"]) == (403, "WrongOrigin")


def test_many_fields_are_no_token() -> None:
    """A URL with more fields than are read is refused before anything else."""
    with TestClient(
        create_app(host="192.0.2.7", token="t"), base_url="http://192.0.2.7", raise_server_exceptions=False
    ) as client:
        assert client.get("/?" + "&".join(f"a{index}=1" for index in range(20))).status_code == 401


def test_internal_errors_have_the_headers(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error is answered with the security headers of every other answer."""
    monkeypatch.setattr(answers, "answer_predict", lambda *_: 1 / 0)
    answer = client.post("/api/v1/predict", json={"job": GPT3})

    assert (answer.status_code, answer.json()["title"]) == (500, "InternalError")
    assert {name: answer.headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS


def test_an_answer_has_a_time_limit(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work beyond the time limit of its lane ends with an error, and the next request is answered."""
    monkeypatch.setattr(answers, "answer_csv", work_until_stopped)
    app: Any = client.app
    monkeypatch.setattr(app.state.fast, "limit_s", 0.2)
    answer = client.post("/api/v1/operations.csv", json={"job": GPT3})

    assert (answer.status_code, answer.json()["title"]) == (503, "TimeLimitError")
    assert "longer than 0.2 s" in answer.json()["detail"]
    assert client.get("/api/v1").status_code == 200


@pytest.mark.parametrize(
    "start", [b"", b"POST /api/v1/predict HTTP/1.1\r\nHost: 127", b"POST /api/v1/predict HTTP/1.1\r\n" + HEAD]
)
def test_unfinished_requests_are_closed(start: bytes, address: tuple[str, int]) -> None:
    """A client that sends nothing, half of the headers or no body is disconnected."""
    with socket.create_connection(address, timeout=30) as connection:
        connection.sendall(start)
        try:
            rest = connection.recv(4096)
        except ConnectionResetError:
            rest = b""
    assert rest == b""


def test_idle_connections_make_room(address: tuple[str, int]) -> None:
    """More idle connections than the server has room for do not keep others out."""
    with ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(socket.create_connection(address, timeout=30))
        assert post(address, "predict").startswith(b"HTTP/1.1 200")


def test_errors_of_the_loop_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Of a thousand failed accepts one is logged."""
    log = QuietLog()
    with caplog.at_level(logging.ERROR):
        for _ in range(1000):
            log(None, {"message": "socket.accept() out of system resource", "exception": OSError(24, "many")})  # type: ignore[arg-type]

    assert len(caplog.records) == 1


def test_few_file_descriptors_block_no_client() -> None:
    """With 128 files and 200 connections the server answers, logs little, and stops when it is interrupted."""
    command = [
        "sh",
        "-c",
        'ulimit -n 128; exec "$@"',
        "sh",
        *python_command("shapewright"),
        "serve",
        "--port",
        "0",
        "--no-browser",
    ]
    environment = {**os.environ, "PYTHONPATH": SOURCE_FOLDER}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = re.search(r"http://127.0.0.1:(\d+)", server.stdout.readline())
        assert found is not None
        address = ("127.0.0.1", int(found.group(1)))
        with ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(socket.create_connection(address, timeout=30))
            assert post(address, "predict").startswith(b"HTTP/1.1 200")
        server.send_signal(signal.SIGINT)
        _, log = server.communicate(timeout=30)
    finally:
        server.kill()

    assert len(log) < 20_000
