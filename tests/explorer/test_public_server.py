"""The public server of the container: started as the Dockerfile does, without docker."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from shapewright.app.explorer.app import create_app
from shapewright.app.explorer.search_jobs import PUBLIC_RUN_S
from shapewright.app.explorer.serve import serve
from shapewright.core.child_process import child_environment
from shapewright.core.errors import ShapewrightError

ROOT = Path(__file__).parents[2]
SPACE = "someone-shapewright.hf.space"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server that the container's command started, on a free port."""
    programs = tmp_path_factory.mktemp("bin")
    program = programs / "shapewright"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m shapewright "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    command = json.loads(re.findall(r"^CMD (.*)$", dockerfile, re.MULTILINE)[-1])
    assert "--port 7860" in command[-1]
    command[-1] = command[-1].replace("--port 7860", f"--port {port}").replace("0.0.0.0", "127.0.0.1")
    environment = {**child_environment(), "SPACE_HOST": SPACE, "PATH": f"{programs}:{os.environ['PATH']}"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "explorer at" in process.stdout.readline()
    yield f"http://127.0.0.1:{port}"
    process.send_signal(signal.SIGTERM)
    process.wait(timeout=15)
    process.stdout.close()


def request(address: str, path: str, *, host: str = SPACE, body: Any = None) -> tuple[int, Any, Any]:
    """Status, headers and content of an answer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Host": host, "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, data, headers)) as answer:
            return answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read()


def test_everyone_may_use_it_under_its_name(address: str) -> None:
    """The page and predictions need no token; a frame of the hub may show it; other host names are refused."""
    status, headers, page = request(address, "/")
    job = {"preset": "gpt2", "device": "h100-sxm-80gb"}
    predicted = request(address, "/api/v1/predict", body={"job": job})

    assert (status, b"<html" in page) == (200, True)
    assert "frame-ancestors https://huggingface.co" in headers["Content-Security-Policy"]
    assert headers["X-Frame-Options"] is None
    assert predicted[0] == 200
    assert json.loads(predicted[2])["step_time_s"] > 0.0
    assert request(address, "/", host="evil.example")[0] == 421
    assert request(address, "/api/v1", host="127.0.0.1")[0] == 200  # the health check


def test_no_request_names_a_file(address: str) -> None:
    """Paths and hub ids in the place of presets, configs and devices are refused."""
    jobs = (
        {"preset": "/etc/passwd", "device": "h100-sxm-80gb"},
        {"preset": "organization/name", "device": "h100-sxm-80gb"},
        {"preset": "gpt2", "device": "/etc/passwd"},
        {"config": "/etc/passwd", "device": "h100-sxm-80gb"},
    )
    assert {request(address, "/api/v1/predict", body={"job": job})[0] for job in jobs} == {422}


def test_searches_have_a_budget() -> None:
    """Searches of a public server end after its time limit with the best so far; files are refused at the start."""
    limits = []

    class Spied:
        """Records calls of the queue."""

        def __init__(self, max_run_s: float, *, calibration: str) -> None:
            limits.append((max_run_s, calibration))

        async def close(self) -> None:
            """End nothing."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shapewright.app.explorer.app.SearchQueue", Spied)
        with TestClient(create_app(public_names=(SPACE,)), base_url=f"http://{SPACE}") as client:
            assert client.get("/api/v1").status_code == 200
    assert limits == [(PUBLIC_RUN_S, "")]
    assert PUBLIC_RUN_S <= 20.0
    with pytest.raises(ShapewrightError, match="no files"):
        serve("127.0.0.1", 0, open_browser=False, say=print, store_path="x.sqlite", public_names=(SPACE,))


def test_space_is_described() -> None:
    """The metadata of the Space name the port that the container serves, and every file it copies is there."""
    text = (ROOT / "space" / "README.md").read_text(encoding="utf-8")
    facts = yaml.safe_load(text.split("---\n")[1])
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")

    assert (facts["sdk"], facts["license"]) == ("docker", "apache-2.0")
    assert f"EXPOSE {facts['app_port']}" in dockerfile
    assert len(facts["short_description"]) <= 60
    for line in re.findall(r"^COPY (?!--)(.*) \S+$", dockerfile, re.MULTILINE):
        assert all((ROOT / name).exists() for name in line.split())
        assert all(f"!{name}" in (ROOT / ".dockerignore").read_text(encoding="utf-8") for name in line.split())
